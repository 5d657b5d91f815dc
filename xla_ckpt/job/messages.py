"""What ranks tell each other: frozen classes whose fields travel as JSON by their names."""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self, Union, get_args, get_origin, get_type_hints

from xla_ckpt import errors
from xla_ckpt.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Message:
    """What one rank tells another. Each message is a frozen dataclass that extends this one.

    A field holds plain JSON; or a value of a class with `to_json` and `from_json`, another message for instance; or an
    error; or a tuple of such values. Each may be None where its annotation says so.
    """

    def to_json(self) -> dict[str, Any]:
        """As JSON, for the way to another rank: field -> value."""
        return {field.name: _as_json(getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def from_json(cls, json: Mapping[str, Any]) -> Self:
        """The message that `to_json` described.

        Raises:
            TypeError: It is of another class, which has other fields.
        """
        kinds = _kinds(cls)  # type: ignore[arg-type]  # mypy takes a class for something that cannot be hashed
        return cls(**{name: _of_json(kinds.get(name), value) for name, value in json.items()})


@functools.cache
def _kinds(message: type[Message]) -> dict[str, Any]:
    return get_type_hints(message)


def _as_json(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_as_json(member) for member in value]
    return value.to_json() if hasattr(value, "to_json") else value


def _of_json(kind: Any, json: Any) -> Any:
    """The value of a field, whose annotation is `kind`."""
    if get_origin(kind) in (Union, types.UnionType):
        if json is None:
            return None
        first, *others = (member for member in get_args(kind) if member is not types.NoneType)
        return json if others else _of_json(first, json)
    if get_origin(kind) is tuple:
        members, last = get_args(kind), get_args(kind)[-1]
        of_each = members[:1] * len(json) if last is ... else members
        return tuple(_of_json(member, value) for member, value in zip(of_each, json, strict=True))
    if kind is CheckpointError:
        return errors.from_json(json)
    return kind.from_json(json) if hasattr(kind, "from_json") else json
