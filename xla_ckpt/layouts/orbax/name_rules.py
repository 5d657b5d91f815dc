"""Rules of names: what a program of jax calls a model's arrays, and how they lie, as a caller says it. Pure."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from xla_ckpt.dtypes import dtype
from xla_ckpt.engine.numpy_types import numpy_dtype
from xla_ckpt.errors import UsageError
from xla_ckpt.lightweight import cached_property

_BFLOAT16 = numpy_dtype(dtype("bfloat16"))

_GROUP = re.compile(r"\(([^()]*)\)|(\S+)")
_AXIS = re.compile(r"([a-z_]\w*)(?::([1-9]\d*))?", re.IGNORECASE)
_PLACE = re.compile(r"\\\{(\w+)\\\}")
_NUMBER = re.compile(r"\{(?:([1-9]\d*)\*)?([a-zA-Z_]\w*)(?:\+(\d+))?\}")
_OPERATOR = re.compile(r"\s+([*/+-])(?:\s+|$)")
_ROOT = re.compile(r"sqrt\(([^()]*\w[^()]*)\)|bfloat16\(sqrt\(([^()]*\w[^()]*)\)\)")

_EXAMPLE = "('params/layers/query/kernel', 'layers.{layer}.q.weight', 'embed layer head dim -> (head dim) embed')"

MAX_PARSED = 1 << 14
"""Parsed rules that are kept in memory."""

Axes = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Factor:
    """What elements are multiplied by: a number, or the root of the product of some sizes."""

    number: float = 1.0
    axes: Axes = ()
    """Of whose sizes it is the root, if there are any."""

    coarse: bool = False
    """Whether the root is rounded to a bfloat16 first."""

    divides: bool = False
    """Whether elements are divided by it."""

    def root(self, sizes: Mapping[str, int]) -> float:
        """The number, for these sizes of axes."""
        root = math.sqrt(math.prod(sizes[axis] for axis in self.axes)) if self.axes else self.number
        return float(np.float32(root).astype(_BFLOAT16)) if self.coarse else root


@dataclass(frozen=True)
class NameRule:
    """What arrays of some paths are to a model."""

    path: str
    """Their paths in the tree, with numbers in braces."""

    name: str
    """The name in the model, with numbers of the path, and of dims that it does not have, in braces."""

    pattern: str
    """What the caller said of the dims, from which all else comes."""

    before: tuple[Axes, ...]
    """The axes of each stored dim, outermost first."""

    after: tuple[Axes, ...]
    """The axes of each dim in the model."""

    sizes: Mapping[str, int]
    """Those that the rule says."""

    factor: Factor = Factor()
    plus: float = 0.0
    """What is added to elements that have been multiplied."""

    @property
    def numbering(self) -> Axes:
        """The axes that are numbers in names."""
        kept = {axis for group in self.after for axis in group}
        return tuple(axis for group in self.before for axis in group if axis not in kept)

    @cached_property
    def paths(self) -> re.Pattern[str]:
        """The paths that it is for, with their numbers as groups."""
        return re.compile(_PLACE.sub(r"(?P<\1>\\d+)", re.escape(self.path)))

    @cached_property
    def names(self) -> re.Pattern[str]:
        """The names that it gives, with their numbers as groups."""
        return re.compile(_NUMBER.sub(r"(?P<\2>\\d+)", "".join(
            part if _NUMBER.fullmatch(part) else re.escape(part) for part in re.split(r"(\{[^{}]*\})", self.name)
        )))  # fmt: skip

    def named(self, numbers: Mapping[str, int]) -> str:
        """The name of the array in the model that these numbers choose."""
        return _NUMBER.sub(lambda n: str(int(n[1] or 1) * numbers[n[2]] + int(n[3] or 0)), self.name)

    def numbers_of(self, name: str) -> dict[str, int] | None:
        """The numbers that give this name; None if none do."""
        if (match := self.names.fullmatch(name)) is None:
            return None
        numbers = {}
        for times, axis, plus in _NUMBER.findall(self.name):
            number, rest = divmod(int(match[axis]) - int(plus or 0), int(times or 1))
            if rest or number < 0:
                return None
            numbers[axis] = number
        return numbers


def parse_names(rules: Iterable[tuple[str, str, str]]) -> tuple[NameRule, ...]:
    """The caller's rules: (path, name, pattern).

    Raises:
        UsageError: One of them makes no sense.
    """
    return tuple(_parsed(rule) for rule in rules)


def _parsed(rule: tuple[str, str, str]) -> NameRule:
    try:
        path, name, pattern = rule
        hash((path, name, pattern))
    except (ValueError, TypeError) as error:
        raise _senseless(rule, "it is no (path, name, pattern), of which there is a list") from error
    return _rule(path, name, pattern)


@functools.lru_cache(MAX_PARSED)
def _rule(path: str, name: str, pattern: str) -> NameRule:
    """Parsed once: a model has a thousand rules, and what writes or reads it asks for them several times."""
    rule = path, name, pattern
    try:
        if pattern.count("->") != 1:
            raise ValueError("its pattern has one arrow (->), between the axes that are stored and those of the name")
        left, right = pattern.split("->")
        right, *rest = _OPERATOR.split(right)
        sizes: dict[str, int] = {}
        before, after = _axes(left, sizes), _axes(right, sizes)
        factor, plus = _arithmetic(dict(zip(rest[::2], rest[1::2], strict=True)), rest[::2])
        parsed = NameRule(path, name, pattern, before, after, sizes, factor, plus)
        numbers = [*parsed.paths.groupindex, *parsed.numbering]
        parsed.named(dict.fromkeys(numbers, 0))
        path.format(**dict.fromkeys(numbers, 0))  # a brace that is no number would be found out when a model is written
        parsed.names  # noqa: B018  # a number that stands twice in a name is no pattern
    except (ValueError, TypeError, AttributeError, KeyError, IndexError, re.error) as error:
        raise _senseless(rule, str(error)) from error
    one, other = ([axis for group in groups for axis in group] for groups in (before, after))
    if len(set(one)) < len(one) or len(set(other)) < len(other) or not set(other) <= set(one):
        raise _senseless(rule, "each axis behind the arrow stands before it, and none stands twice")
    if not set(factor.axes) <= set(one):
        raise _senseless(rule, "each axis of the factor stands before the arrow")
    if missing := [number for number in numbers if number not in parsed.names.groupindex]:
        raise _senseless(rule, f"the axis {missing[0]} is neither behind the arrow nor in the name")
    return parsed


def _senseless(rule: object, why: str) -> UsageError:
    return UsageError(f"a rule of names makes no sense: {why}", expected=_EXAMPLE, found=repr(rule)[:200])


def _axes(text: str, sizes: dict[str, int]) -> tuple[Axes, ...]:
    groups = []
    for inside, alone in _GROUP.findall(text):
        axes = []
        for word in inside.split() if not alone else [alone]:
            match = _AXIS.fullmatch(word)
            if match is None:
                raise ValueError(f"{word!r} is no axis")
            axes.append(match[1])
            if match[2] is not None:
                sizes[match[1]] = int(match[2])
        if not axes:
            raise ValueError("there is a dim without axes")
        groups.append(tuple(axes))
    return tuple(groups)


def _arithmetic(by: Mapping[str, str], order: Sequence[str]) -> tuple[Factor, float]:
    """What elements are multiplied by, and what is added to them, from an operand for each operator."""
    if order and "".join(order) not in ("*", "/", "+", "-", "*+", "*-", "/+", "/-"):
        raise ValueError(f"{' '.join(order)} is more than a factor and what is added")
    operator = next((one for one in by if one in "*/"), None)
    factor = Factor() if operator is None else _factor(by[operator], divides=operator == "/")
    return factor, float(by["+"]) if "+" in by else -float(by.get("-", "0"))


def _factor(text: str, *, divides: bool) -> Factor:
    if (root := _ROOT.fullmatch(text.strip())) is not None:
        return Factor(axes=tuple((root[1] or root[2]).split()), coarse=root[2] is not None, divides=divides)
    number = float(text)
    if not math.isfinite(number) or not number:
        raise ValueError(f"{text.strip()} is no factor")
    return Factor(number, divides=divides)


_REGISTERED: list[NameRule] = []


def register_names(rules: Iterable[tuple[str, str, str]]) -> None:
    """Say what a model is called in orbax's checkpoints, where a program of jax saved it.

    From then on, until it is called again, the arrays that a rule fits are those of ``model`` in each such checkpoint:
    for `load_checkpoint`, `convert` and all other functions. ``convert(..., to="orbax-model")`` writes a model under
    the names of the program of jax: an array of it is written by the first rule that gives its name. All ranks of a job
    call it with the same rules. `restore` finds these arrays under ``model``, too, and no longer where they were in the
    tree: ``register_names([])`` takes the rules back.

    Args:
        rules: (path, name, pattern). The path is the array's in the tree, with slashes; ``{number}`` in it is any
            number. The pattern names the dims of the array, and those of the model's, as einops does. A dim of which
            there is nothing behind the arrow numbers arrays: ``{layer}`` in the name is its index, and
            ``{2*layer+1}`` what is computed from it. Elements are multiplied by what stands behind ``*``, or divided by
            what stands behind ``/``: a number, or the root of the product of some sizes, as in
            ``embed head dim -> (head dim) embed * sqrt(dim)``. A number behind ``+`` or ``-`` is added or subtracted.

    A rule that differs from an earlier one in the name alone gives a second name of one array: that of tied parameters.

    Raises:
        UsageError: A rule makes no sense.

    Example:
        ``xla_ckpt.register_names([("params/dense/kernel", "dense.weight", "in out -> out in")])``
    """
    _REGISTERED[:] = parse_names(rules)


def registered_names() -> Sequence[NameRule]:
    """The rules that were given last."""
    return tuple(_REGISTERED)
