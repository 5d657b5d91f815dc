"""Check the arguments of public functions, and suggest the closest keyword, choice or leaf for a misspelt one."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import functools
import inspect
import reprlib
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ParamSpec, SupportsIndex, TypeVar, cast

from xla_ckpt.errors import UsageError

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Value = TypeVar("Value")

MIN_SIMILARITY = 0.7
"""Minimum similarity of a suggestion (1: identical). With less, ``step`` would be suggested for ``stale``."""

MIN_WORD_LENGTH = 3
"""Minimum length of a word for suggestions with one other letter or a transposition: shorter words are similar to too
many others."""


def check_arguments(call: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Wrap a function to suggest the closest keyword for an unknown one, and to reject arguments of a wrong type.

    For example, ``strict="no"`` is rejected, because any string is true in Python.

    >>> check_arguments(check_choice)(nam="a")
    Traceback (most recent call last):
    TypeError: check_choice() has no argument 'nam': did you mean 'name'?
    """
    return _wrap_call(call, {})


def check_arguments_and_fields(
    **values: type[Any],
) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Wrap a function as `check_arguments` does, if some of its arguments are dataclasses.

    For a keyword that is a field of such a dataclass, the error names the argument that accepts it.

    Args:
        values: Dataclasses, by the names of the arguments that accept them.
    """
    return lambda call: _wrap_call(call, _map_fields(values))


def check_deferred_arguments(
    *later: Callable[..., Any], without: Collection[str] = (), **values: type[Any]
) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Wrap a function that keeps its keyword arguments for later calls, so that they are checked immediately.

    The later calls may happen hours into training. The checks are the same as in `check_arguments_and_fields`.

    Args:
        later: Functions that will be called with the keywords.
        without: Names of their arguments that the wrapped function does not accept, because it passes them itself.
        values: Dataclasses, by the names of the arguments that accept them.

    >>> check_deferred_arguments(check_choice)(suggest_leaf)(laef="a")
    Traceback (most recent call last):
    TypeError: suggest_leaf() has no argument 'laef': did you mean 'leaf'?
    """
    kept = {
        name: parameter
        for call in later
        for name, parameter in inspect.signature(call).parameters.items()
        if name not in without
    }
    return lambda call: _wrap_call(call, _map_fields(values), kinds=False, kept=kept)


def _map_fields(values: Mapping[str, type[Any]]) -> dict[str, tuple[str, type[Any]]]:
    """Map each field name to the name of its argument and the dataclass of that argument."""
    return {field.name: (name, kind) for name, kind in values.items() for field in dataclasses.fields(kind)}


def check_argument_names(
    *forwarded_to: Callable[..., Any],
) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Wrap a function of another library's interface, which checks the types of its arguments itself.

    Args:
        forwarded_to: Functions that receive, as ``**more``, the keywords that the function does not have. A keyword
            that is not similar to one of its own arguments is forwarded unchecked.

    >>> check_argument_names()(check_choice)(nam="a")
    Traceback (most recent call last):
    TypeError: check_choice() has no argument 'nam': did you mean 'name'?
    """
    further = [name for call in forwarded_to for name in inspect.signature(call).parameters]
    return lambda call: _wrap_call(call, {}, kinds=False, further=further)


def check_fields(kind: type[Value], more: str = "") -> type[Value]:
    """Return the dataclass with a constructor that suggests the closest field for an unknown keyword.

    If no field is similar, the error lists the names of all fields, followed by `more`.
    """
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    for name in names:
        _FIELD_OWNERS.setdefault(name, kind.__name__)
    fields = ", ".join(names)
    constructor = _wrap_call(kind.__init__, {}, kinds=False, otherwise=f": it has {fields}{more}")
    kind.__init__ = constructor  # type: ignore[method-assign]
    return kind


def check_option_fields(kind: type[Value]) -> type[Value]:
    """Apply `check_fields` to a dataclass of options for calls that have further arguments."""
    return check_fields(kind, "; others are arguments of the call itself")


_FIELD_OWNERS: dict[str, str] = {}
"""Field name -> name of its dataclass, for errors about a keyword that belongs to the options of another call."""

_FLAG_CHOICES: dict[str, tuple[bool | None, ...]] = {"bool": (True, False), "bool | None": (None, True, False)}
"""Annotation of a boolean argument -> its choices. Any string is true in Python."""


_KIND_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "int": (lambda value: isinstance(value, SupportsIndex), "a whole number"),
    "float": (lambda value: hasattr(value, "__float__"), "a number"),
    "str": (lambda value: isinstance(value, str), "a text"),
    "PathLike": (
        lambda value: isinstance(value, str) or (hasattr(value, "__fspath__") and isinstance(value.__fspath__(), str)),
        "a path, as a str or os.PathLike",
    ),
    "ShardingRules": (lambda value: isinstance(value, Iterable), "a list of (regular expression, spec)"),
    "str | Sequence": (lambda value: isinstance(value, Sequence), "a name, or a list of names"),
    "Sequence": (lambda value: isinstance(value, Sequence) and not isinstance(value, str | bytes), "a list"),
    "Callable": (callable, "a function"),
    "Reshard": (callable, "a function of (states, rank, world)"),
}
"""Annotation of an argument, without its type parameters -> (check of the type, description of the expected type).

Without this check a value of another type fails deep inside, with a Python error that names no argument.
"""


def parse_texts(name: str, value: Any, expected: str) -> tuple[str, ...]:
    """Return the strings of an argument that accepts one string or a list of strings.

    >>> parse_texts("layout", "native", "a layout"), parse_texts("layout", ["xser", "native"], "layouts")
    (('native',), ('xser', 'native'))

    Raises:
        UsageError: The value is empty or of another type.
    """
    texts = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list | tuple) else ()
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise UsageError(f"{name} is not of the kind that it takes", expected=expected, found=reprlib.repr(value))
    return texts


_SELF_CHECKED = {"tag", "tag_a", "tag_b", "as_tag", "num_kept_ckpts"}
"""Arguments whose functions check the type with an error of their own."""


def _check_kind(name: str, value: Any, annotation: str) -> None:
    """Raise an error if a value is not of the type that an argument accepts.

    Raises:
        UsageError: The value is of another type.
    """
    kind = annotation.removesuffix(" | None")
    check, expected = _KIND_CHECKS.get(kind.partition("[")[0], (None, ""))
    if check is None or name in _SELF_CHECKED or (value is None and kind != annotation):
        return
    if not check(value):
        raise UsageError(
            f"{name} is not of the kind that it takes",
            expected=expected,
            found=reprlib.repr(value),
            hint="The order of the arguments is path, tag, and then what is saved or loaded."
            if name == "path"
            else None,
        )


def _wrap_call(
    call: Callable[Parameters, Result],
    fields: dict[str, tuple[str, type[Any]]],
    *,
    kinds: bool = True,  # False for dataclasses, which check the types of their fields themselves
    otherwise: str = "",
    further: Sequence[str] = (),
    kept: Mapping[str, inspect.Parameter] = MappingProxyType({}),
) -> Callable[Parameters, Result]:
    parameters = {n: p for n, p in inspect.signature(call).parameters.items() if p.kind is not p.VAR_KEYWORD}
    known = [*dict.fromkeys([*parameters, *kept])]
    ordered = [name for name, p in parameters.items() if p.kind is not p.KEYWORD_ONLY]
    others = [name for name in parameters if name not in ordered]
    otherwise = otherwise or f": it has {', '.join(name for name in known if name != 'self')}"
    typed = {**kept, **parameters} if kinds else kept
    annotations = {name: p.annotation for name, p in typed.items() if isinstance(p.annotation, str)}
    flags = {
        name: _FLAG_CHOICES[p.annotation] for name, p in {**kept, **parameters}.items() if p.annotation in _FLAG_CHOICES
    }
    called = call.__qualname__.removesuffix(".__init__").rpartition(".")[2]

    @functools.wraps(call)
    def checked(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        for name in kwargs:
            if name in known or name in further or (further and find_closest(name, [*known, *further]) not in known):
                continue
            hint = suggest(name, [*known, *fields]) or (
                f": {_FIELD_OWNERS[name]} has it" if name in _FIELD_OWNERS else otherwise
            )
            if name in fields:
                argument, kind = fields[name]
                hint = f": say {argument}={kind.__name__}({name}=...)"
            raise TypeError(f"{called}() has no argument {name!r}{hint}")
        if others and len(args) > len(ordered):
            raise TypeError(
                f"{called}() takes no more than {', '.join(n for n in ordered if n != 'self') or 'nothing'} by order: "
                f"say all others by name, {others[0]}=..."
            )
        for name, value in (*zip(ordered, args, strict=False), *kwargs.items()):
            if name in flags:
                check_choice(name, value, flags[name])
            elif name in annotations:
                _check_kind(name, value, annotations[name])
        return _disable_tracing(call)(*args, **kwargs)

    return checked


def _disable_tracing(call: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Exclude a function from torch.compile if a compiled function calls it.

    Dynamo, which would trace all code that it calls, is loaded whenever a function is compiled.
    """
    disable = getattr(sys.modules.get("torch._dynamo"), "disable", None)
    return call if disable is None else cast("Callable[Parameters, Result]", disable(call))


def suggest(word: Any, known: Sequence[Any]) -> str:
    """Return the end of a sentence that names the known word closest to `word`, or an empty string.

    The string is also empty if `word` itself is known, because the caller then rejects it for a reason other than its
    spelling.

    >>> suggest("async_safe", ["async_save", "mesh"]), suggest("x", ["mesh"]), suggest("mesh", ["mesh"])
    (": did you mean 'async_save'?", '', '')
    """
    near = "" if word in known else find_closest(str(word), [k for k in known if isinstance(k, str)])
    return f": did you mean {near!r}?" if near else ""


def find_closest(word: str, known: Sequence[str]) -> str:
    """Return the closest known word, or an empty string if there is none.

    A word is close by similarity, or if it is the only one with the given word before an underscore, or the only one
    with a single typo or transposed letters.

    >>> find_closest("runz", ["notes", "runs"]), find_closest("x", ["runs"])
    ('runs', '')
    >>> find_closest("tni", ["runs", "tiny"]), find_closest("tni", ["tiny", "unit"])
    ('tiny', '')
    >>> find_closest("rum", ["run", "std"]), find_closest("rum", ["run", "sum"])
    ('run', '')
    >>> find_closest("s3", ["s2_partial", "s3_partial"])
    's3_partial'
    """
    if near := difflib.get_close_matches(word, known, 1, MIN_SIMILARITY):
        return near[0]
    if len(longer := [k for k in known if k.startswith(f"{word}_")]) == 1:
        return longer[0]
    if len(word) < MIN_WORD_LENGTH:
        return ""
    # Longer words with one different letter have more than `MIN_SIMILARITY`.
    nearly = [
        k
        for k in known
        if _count_different_letters(word, k) <= 1
        or (len(k) == len(word) == MIN_WORD_LENGTH and _has_one_substitution(word, k))
    ]
    return nearly[0] if len(nearly) == 1 else ""


def _has_one_substitution(word: str, other: str) -> bool:
    """Return True if two words of the same length differ in exactly one letter."""
    return sum(a != b for a, b in zip(word, other, strict=True)) == 1


def _count_different_letters(word: str, other: str) -> int:
    """Return the number of letters that only one of two words contains."""
    a, b = Counter(word), Counter(other)
    return ((a - b) + (b - a)).total()


def suggest_leaf(leaf: str, leaves: Sequence[str]) -> str:
    """Return the end of a sentence, as `suggest` does, for an unknown leaf path: a leaf, or a prefix of leaves.

    If none is similar, a path with a similar end, after a slash or a dot, is suggested. For a glob pattern, only a
    pattern that matches leaves is suggested, because a similar prefix would match other leaves, too.

    >>> suggest_leaf("modle", ["model/a/w", "step"]), suggest_leaf("model/a/v", ["model/a/w"])
    (": did you mean 'model'?", ": did you mean 'model/a/w'?")
    >>> suggest_leaf("wieght", ["model/a.weight"]), suggest_leaf("a", ["model/a.weight"])
    (": did you mean 'model/a.weight'?", ": did you mean 'model/a'?")
    >>> suggest_leaf("model", ["model/a.weight"]), suggest_leaf("model/a", ["model/a.weight"])  # nothing is misspelt
    ('', '')
    >>> suggest_leaf("a.*", ["model/a.weight"]), suggest_leaf("model/b*", ["model/a.weight"])
    (": did you mean 'model/a.*'?", '')
    """
    if any(letter in leaf for letter in "*?["):
        tops = sorted({path.partition("/")[0] for path in leaves})
        fitting = (f"{top}/{leaf}" for top in tops if fnmatch.filter(leaves, f"{top}/{leaf}"))
        return next((f": did you mean {pattern!r}?" for pattern in fitting), "")
    if any(path == leaf or path.startswith((f"{leaf}/", f"{leaf}.")) for path in leaves):
        return ""  # the path is known, and rejected for another reason
    # A longer word has less than `MIN_SIMILARITY`, and checking all parts of a long path is quadratic.
    longest = 2 * len(leaf)
    parts = {path[:end] for path in leaves for end, letter in enumerate(path[: longest + 1]) if letter == "/"}
    if whole := suggest(leaf, [*leaves, *sorted(parts)]):
        return whole
    ends: dict[str, tuple[str, int]] = {}
    for path in leaves:
        begins = {"/": 0, ".": 0}
        for end, letter in enumerate(f"{path}/"):
            if letter in begins:
                for begin in begins.values():
                    if end - begin <= longest:
                        ends.setdefault(path[begin:end], (path, end))
                begins[letter] = end + 1
    if not (near := find_closest(leaf, [*ends])):
        return ""
    path, end = ends[near]
    return f": did you mean {path[:end]!r}?"


def check_choice(name: str, choice: Any, choices: Sequence[Any], besides: str = "") -> None:
    """Raise an error if a value is not one of the choices of an option. `besides` names further accepted values.

    Raises:
        UsageError: The value is not one of the choices.
    """
    if choice not in choices:
        raise UsageError(
            f"there is no such choice for {name}{suggest(choice, choices)}",
            expected=" or ".join(map(repr, choices)) + besides,
            found=repr(choice),
        )
