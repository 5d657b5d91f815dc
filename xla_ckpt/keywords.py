"""Arguments of the public functions: names and choices that do not exist, and those that were probably meant."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

from xla_ckpt.errors import UsageError

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Value = TypeVar("Value")


def known_options(call: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """The same function, which says of an unknown keyword which one was probably meant, and refuses ``strict="no"``.

    It refuses what is no number in the place of one, too.

    >>> known_options(check_choice)(nam="a")
    Traceback (most recent call last):
    TypeError: check_choice() has no argument 'nam': did you mean 'name'?
    """
    return _checked(call, {})


def taking_values(**values: type[Any]) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """`known_options` for a function with arguments that are values of several fields.

    A keyword that is such a field is answered with the value that it belongs into.

    Args:
        values: Dataclasses, by the names of the arguments that take them.
    """
    fields = {field.name: (name, kind) for name, kind in values.items() for field in dataclasses.fields(kind)}
    return lambda call: _checked(call, fields)


def known_fields(kind: type[Value]) -> type[Value]:
    """The same dataclass, whose constructor says of an unknown keyword which field was probably meant."""
    fields = ", ".join(field.name for field in dataclasses.fields(kind))  # type: ignore[arg-type]
    constructor = _checked(kind.__init__, {}, f": it has {fields}; others are arguments of the call itself")
    kind.__init__ = constructor  # type: ignore[method-assign]
    return kind


_FLAGS: dict[str, tuple[bool | None, ...]] = {"bool": (True, False), "bool | None": (None, True, False)}
"""Annotation of an argument that is no more than yes or no -> its choices. Any text counts as true in Python."""


_NUMBERS = {"int": ("__index__", "a whole number"), "float | None": ("__float__", "a number, or None")}
"""Annotation of an argument that is a number -> what numbers of all libraries have, and what it is in words."""


def _check_number(name: str, number: Any, annotation: str) -> None:
    """Refuse what is no number: a dict in the place of `num_workers`, because an argument too many was given."""
    method, words = _NUMBERS[annotation]
    if not hasattr(number, method) and (number is not None or annotation == "int"):
        raise UsageError(f"{name} is no number", expected=words, found=repr(number)[:80])


def _checked(
    call: Callable[Parameters, Result], fields: dict[str, tuple[str, type[Any]]], otherwise: str = ""
) -> Callable[Parameters, Result]:
    parameters = inspect.signature(call).parameters
    known = list(parameters)
    flags = {name: _FLAGS[p.annotation] for name, p in parameters.items() if p.annotation in _FLAGS}
    numbers = {name: p.annotation for name, p in parameters.items() if p.annotation in _NUMBERS}
    called = call.__qualname__.removesuffix(".__init__").rpartition(".")[2]

    @functools.wraps(call)
    def checked(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        for name in kwargs:
            if name in known:
                continue
            hint = meant(name, [*known, *fields]) or otherwise
            if name in fields:
                argument, kind = fields[name]
                hint = f": say {argument}={kind.__name__}({name}=...)"
            raise TypeError(f"{called}() has no argument {name!r}{hint}")
        for name, value in (*zip(known, args, strict=False), *kwargs.items()):
            if name in flags:
                check_choice(name, value, flags[name])
            if name in numbers:
                _check_number(name, value, numbers[name])
        return call(*args, **kwargs)

    return checked


def meant(word: Any, known: Sequence[Any]) -> str:
    """The end of a sentence that says which of the known words was probably meant; nothing if none is like it.

    >>> meant("async_safe", ["async_save", "mesh"]), meant("x", ["mesh"])
    (": did you mean 'async_save'?", '')
    """
    near = difflib.get_close_matches(str(word), [k for k in known if isinstance(k, str)], 1)
    return f": did you mean {near[0]!r}?" if near else ""


def nearest(leaf: str, leaves: Sequence[str]) -> str:
    """The end of a sentence, as `meant` says it, of a leaf path that is none: a leaf, or a part that leaves lie below.

    >>> nearest("modle", ["model/a/w", "step"]), nearest("model/a/v", ["model/a/w"])
    (": did you mean 'model'?", ": did you mean 'model/a/w'?")
    """
    parts = {path[:end] for path in leaves for end, letter in enumerate(path) if letter == "/"}
    return meant(leaf, [*leaves, *sorted(parts)])


def check_choice(name: str, choice: Any, choices: Sequence[Any], besides: str = "") -> None:
    """Refuse a value that is none of the choices of an option. `besides` says what else it may be.

    Raises:
        UsageError: It is none.
    """
    if choice not in choices:
        raise UsageError(
            f"there is no such choice for {name}{meant(choice, choices)}",
            expected=" or ".join(map(repr, choices)) + besides,
            found=repr(choice),
        )
