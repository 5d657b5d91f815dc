"""Slotted dataclasses, columnar sequences and a cached property without a lock.

`slots_dataclass` creates immutable objects cheaply, for classes with thousands of instances. `ColumnarSequence` stores
many rows as columns and creates a row only on access. `cached_property` does not use a lock, because a process that is
forked while another thread holds the lock would deadlock.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, dataclass_transform, overload

Made = TypeVar("Made")
Value_co = TypeVar("Value_co", covariant=True)
Row_co = TypeVar("Row_co", covariant=True)


class cached_property(Generic[Value_co]):  # noqa: N801  # named as in `functools`
    """Property that is computed on first access, without a lock.

    `functools.cached_property` of Python 3.11 holds one lock for all objects of the class during the computation. A
    process that is forked at that time would deadlock. Without the lock, two threads may compute the value twice.
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
    """Sequence of rows that are stored as columns. A row object is created on access."""

    __slots__ = ()

    @abstractmethod
    def get_row(self, index: int) -> Row_co:
        """Return one row.

        Raises:
            IndexError: The index is out of range.
        """

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # columns are mutable

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
    """Create a dataclass with slots that type checkers treat as frozen.

    The fields are not protected at run time. A frozen dataclass sets each field through a function call and takes more
    than twice as long to create, which was 10% of the time to save many small arrays. Classes with few instances should
    be frozen dataclasses instead.
    """
    return dataclass(slots=True, kw_only=kw_only, unsafe_hash=True)
