"""Many small things: immutable objects that are cheap to make, and columns, for which no object is made at all."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform, overload

Made = TypeVar("Made")
Row_co = TypeVar("Row_co", covariant=True)


class Columns(Sequence[Row_co]):
    """Many things of a kind as one value of columns. Where a single one is asked for, it is made."""

    __slots__ = ()

    @abstractmethod
    def row(self, number: int) -> Row_co:
        """One of them.

        Raises:
            IndexError: There are not so many.
        """

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # columns can be written to

    @overload
    def __getitem__(self, which: int) -> Row_co: ...

    @overload
    def __getitem__(self, which: slice) -> Sequence[Row_co]: ...

    def __getitem__(self, which: int | slice) -> Row_co | Sequence[Row_co]:
        if isinstance(which, slice):
            return [self.row(number) for number in range(*which.indices(len(self)))]
        return self.row(which)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def lightweight(*, kw_only: bool = False) -> Callable[[type[Made]], type[Made]]:
    """A dataclass with slots that type checkers take for frozen.

    While a program runs nothing keeps its fields from being set. A frozen dataclass sets each field through a call,
    and takes more than twice as long to make. That was a tenth of a save of many small arrays. Classes of which few
    objects are made are frozen dataclasses.
    """
    return dataclass(slots=True, kw_only=kw_only, unsafe_hash=True)
