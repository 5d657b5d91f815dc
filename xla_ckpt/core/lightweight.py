"""Dataclasses with slots, columnar sequences and a cached property without a lock.

`slots_dataclass` makes immutable objects that are cheap to create, for classes with thousands of instances.
`ColumnarSequence` stores many rows as columns and creates a row only when it is read. `cached_property` takes no lock,
because a process that is forked while another thread computes would wait for it forever.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, dataclass_transform, overload

Made = TypeVar("Made")
Value_co = TypeVar("Value_co", covariant=True)
Row_co = TypeVar("Row_co", covariant=True)


class cached_property(Generic[Value_co]):  # noqa: N801  # as `functools` has it
    """A property that is computed when it is first read, without a lock.

    `functools.cached_property` of Python 3.11 holds a lock for all objects of the class while it computes. A process
    that is forked meanwhile would wait for it for ever. Two threads may compute the value twice here.
    """

    def __init__(self, compute: Callable[[Any], Value_co]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type[Any], name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type[Any]) -> cached_property[Value_co]: ...

    @overload
    def __get__(self, instance: object, owner: type[Any]) -> Value_co: ...

    def __get__(self, instance: object | None, owner: type[Any]) -> cached_property[Value_co] | Value_co:
        if instance is None:
            return self
        value = self._compute(instance)
        instance.__dict__[self._name] = value
        return value


class ColumnarSequence(Sequence[Row_co]):
    """Many things of a kind as one value of columns. Where a single one is asked for, it is made."""

    __slots__ = ()

    @abstractmethod
    def get_row(self, index: int) -> Row_co:
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
            return [self.get_row(number) for number in range(*which.indices(len(self)))]
        return self.get_row(which)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def slots_dataclass(*, kw_only: bool = False) -> Callable[[type[Made]], type[Made]]:
    """A dataclass with slots that type checkers take for frozen.

    While a program runs nothing keeps its fields from being set. A frozen dataclass sets each field through a call,
    and takes more than twice as long to make. That was a tenth of a save of many small arrays. Classes of which few
    objects are made are frozen dataclasses.
    """
    return dataclass(slots=True, kw_only=kw_only, unsafe_hash=True)
