"""Small immutable objects, of which plans make a dozen for each array."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

Made = TypeVar("Made")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def lightweight(*, kw_only: bool = False) -> Callable[[type[Made]], type[Made]]:
    """A dataclass with slots that type checkers take for frozen.

    While a program runs nothing keeps its fields from being set. A frozen dataclass sets each field through a call,
    and takes more than twice as long to make. That was a tenth of a save of many small arrays. Classes of which few
    objects are made are frozen dataclasses.
    """
    return dataclass(slots=True, kw_only=kw_only, unsafe_hash=True)
