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


def known_options(call: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """The same function, which says of an unknown keyword which one was probably meant.

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


def _checked(
    call: Callable[Parameters, Result], fields: dict[str, tuple[str, type[Any]]]
) -> Callable[Parameters, Result]:
    known = list(inspect.signature(call).parameters)

    @functools.wraps(call)
    def checked(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        for name in kwargs:
            if name in known:
                continue
            hint = meant(name, [*known, *fields])
            if name in fields:
                argument, kind = fields[name]
                hint = f": say {argument}={kind.__name__}({name}=...)"
            raise TypeError(f"{call.__name__}() has no argument {name!r}{hint}")
        return call(*args, **kwargs)

    return checked


def meant(word: Any, known: Sequence[Any]) -> str:
    """The end of a sentence that says which of the known words was probably meant; nothing if none is like it.

    >>> meant("async_safe", ["async_save", "mesh"]), meant("x", ["mesh"])
    (": did you mean 'async_save'?", '')
    """
    near = difflib.get_close_matches(str(word), [k for k in known if isinstance(k, str)], 1)
    return f": did you mean {near[0]!r}?" if near else ""


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
