"""How a program of jax calls a model's arrays, and how they lie: rules by which they are those of a torch model. Pure.

jax's kernels are (in, out) where torch's are (out, in), heads may be a dim of their own, and the layers of a model may
be one array with a dim of layers. A rule names the dims before and after, as einops does, and may multiply. A chunk is
decoded, its dims are put into another order, and the manifest says which part of it is which array.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from xla_ckpt.errors import IncompatibleCheckpointError, UsageError
from xla_ckpt.sharding.box import Box

_GROUP = re.compile(r"\(([^()]*)\)|(\S+)")
_AXIS = re.compile(r"([a-z_]\w*)(?::([1-9]\d*))?", re.IGNORECASE)
_PLACE = re.compile(r"\\\{(\w+)\\\}")
_ROOT = re.compile(r"\s*sqrt\(([^()]*\w[^()]*)\)\s*")

_EXAMPLE = "('params/layers/query/kernel', 'layers.{layer}.q.weight', 'embed layer head dim -> (head dim) embed')"

Axes = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NameRule:
    """What arrays of some paths are to a model."""

    path: re.Pattern[str]
    """Their paths in the tree, with the numbers in it as groups."""

    name: str
    """The name in the model, with numbers of the path, and of dims that it does not have, in braces."""

    before: tuple[Axes, ...]
    """The axes of each stored dim, outermost first."""

    after: tuple[Axes, ...]
    """The axes of each dim in the model."""

    sizes: Mapping[str, int]
    """Those that the rule says."""

    factor: float | Axes
    """What elements are multiplied by: a number, or the axes of whose sizes it is the root."""

    @property
    def numbering(self) -> Axes:
        """The axes that are numbers in names."""
        kept = {axis for group in self.after for axis in group}
        return tuple(axis for group in self.before for axis in group if axis not in kept)


def parse_names(rules: Iterable[tuple[str, str, str]]) -> tuple[NameRule, ...]:
    """The caller's rules: (path, name, pattern).

    Raises:
        UsageError: One of them makes no sense.
    """
    return tuple(_parsed(rule) for rule in rules)


def _parsed(rule: tuple[str, str, str]) -> NameRule:
    try:
        path, name, pattern = rule
        left, right = pattern.split("->")
        right, times, by = right.partition("*")
        sizes: dict[str, int] = {}
        before, after = _axes(left, sizes), _axes(right, {})
        factor = _factor(by) if times else 1.0
        numbers = set(_PLACE.findall(re.escape(path)))
        parsed = NameRule(re.compile(_PLACE.sub(r"(?P<\1>\\d+)", re.escape(path))), name, before, after, sizes, factor)
        name.format(**dict.fromkeys((*numbers, *parsed.numbering), 0))
    except (ValueError, TypeError, AttributeError, KeyError, IndexError, re.error) as error:
        raise _senseless(rule, str(error)) from error
    one, other = ([axis for group in groups for axis in group] for groups in (before, after))
    if len(set(one)) < len(one) or len(set(other)) < len(other) or not set(other) <= set(one):
        raise _senseless(rule, "each axis behind the arrow stands before it, and none stands twice")
    if isinstance(factor, tuple) and not set(factor) <= set(one):
        raise _senseless(rule, "each axis of the factor stands before the arrow")
    if missing := [axis for axis in parsed.numbering if f"{{{axis}}}" not in name]:
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


def _factor(text: str) -> float | Axes:
    if (root := _ROOT.fullmatch(text)) is not None:
        return tuple(root[1].split())
    number = float(text)
    if not math.isfinite(number) or not number:
        raise ValueError(f"{text.strip()} is no factor")
    return number


@dataclass(frozen=True, slots=True)
class Renaming:
    """A stored array as arrays of a model."""

    rule: NameRule
    leaf: str
    sizes: Mapping[str, int]
    """Of all axes."""

    numbers: Mapping[str, str]
    """Those of its path."""

    cut: frozenset[str]
    """Axes that chunks cut."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of each array of the model."""
        return tuple(math.prod(self.sizes[axis] for axis in group) for group in self.rule.after)

    @property
    def factor(self) -> float:
        """What each element is multiplied by."""
        said = self.rule.factor
        return said if isinstance(said, float) else math.sqrt(math.prod(self.sizes[axis] for axis in said))

    @property
    def outer(self) -> Axes:
        """The axes along which a chunk has its parts one behind the other: each part is a box of an array."""
        loose: list[str] = []
        for group in self.rule.after:
            last = max((place for place, axis in enumerate(group) if axis in self.cut), default=0)
            loose += group[:last]
        return (*self.rule.numbering, *loose)

    @property
    def most_parts(self) -> int:
        """Parts that a chunk has, at most."""
        return math.prod(self.sizes[axis] for axis in self.outer)

    @property
    def order(self) -> Axes:
        """The axes in the order in which the elements of a chunk are read."""
        inner = [axis for group in self.rule.after for axis in group if axis not in self.outer]
        return (*self.outer, *inner)

    def extents(self, chunk: Box) -> dict[str, range]:
        """The part of each axis that a chunk has."""
        extents = {}
        for group, low, high in zip(self.rule.before, chunk.start, chunk.stop, strict=True):
            inner = math.prod(self.sizes[axis] for axis in group[1:])
            if low % inner or high % inner:
                raise IncompatibleCheckpointError(
                    f"a chunk of the array ends inside of the axes {' '.join(group)}", leaf=self.leaf, found=str(chunk)
                )
            extents[group[0]] = range(low // inner, high // inner)
            extents |= {axis: range(self.sizes[axis]) for axis in group[1:]}
        return extents

    def ordered(self, elements: Any, chunk: Box) -> Any:
        """The elements of a chunk, an array of numpy's, multiplied, with the axes in `order`."""
        extents = self.extents(chunk)
        axes = [axis for group in self.rule.before for axis in group]
        if (factor := self.factor) != 1:
            wide = np.result_type(elements.dtype, np.float32)  # a product of two bfloat16 would be rounded twice
            product = elements.astype(wide)
            product *= wide.type(factor)
            elements = product.astype(elements.dtype)
        return elements.reshape([len(extents[axis]) for axis in axes]).transpose([axes.index(a) for a in self.order])

    def parts(self, chunk: Box) -> Iterator[tuple[str, Box]]:
        """(name, box) of each part of a chunk, in the order of its elements."""
        extents = self.extents(chunk)
        for at in itertools.product(*(extents[axis] for axis in self.outer)):
            fixed = dict(zip(self.outer, at, strict=True))
            start, stop = [], []
            for group in self.rule.after:
                low = high = 0
                for axis in group:
                    first, last = (fixed[axis],) * 2 if axis in fixed else (extents[axis][0], extents[axis][-1])
                    low, high = low * self.sizes[axis] + first, high * self.sizes[axis] + last
                start.append(low)
                stop.append(high + 1)
            yield self.rule.name.format(**self.numbers, **fixed), Box(tuple(start), tuple(stop))


def renaming(
    rules: Sequence[NameRule], path: str, shape: Sequence[int], chunk: Sequence[int], leaf: str
) -> Renaming | None:
    """What an array is to a model; None if no rule is for its path.

    Args:
        rules: The rules. The first one counts whose path it is.
        path: Its path in the tree.
        shape: Its shape.
        chunk: The shape of its chunks.
        leaf: What it is called in errors.

    Raises:
        IncompatibleCheckpointError: It does not have the dims that the rule says.
    """
    for rule in rules:
        if (match := rule.path.fullmatch(path)) is None:
            continue
        sizes = dict(rule.sizes)
        for group, n in zip(rule.before, shape, strict=False):
            unsaid = [axis for axis in group if axis not in sizes]
            known = math.prod(sizes[axis] for axis in group if axis in sizes)
            sizes |= dict.fromkeys(unsaid, n // known)
            if len(unsaid) > 1 or math.prod(sizes[axis] for axis in group) != n:
                raise _misfit(rule, shape, leaf)
        if len(shape) != len(rule.before):
            raise _misfit(rule, shape, leaf)
        cut = {group[0] for group, n, size in zip(rule.before, shape, chunk, strict=True) if size < n}
        return Renaming(rule, leaf, sizes, match.groupdict(), frozenset(cut))
    return None


def _misfit(rule: NameRule, shape: Sequence[int], leaf: str) -> IncompatibleCheckpointError:
    return IncompatibleCheckpointError(
        "the array does not have the dims that the rule of its name says",
        leaf=leaf,
        expected=" ".join(f"({' '.join(group)})" if len(group) != 1 else group[0] for group in rule.before),
        found=list(shape),
    )


_REGISTERED: list[NameRule] = []


def register_names(rules: Iterable[tuple[str, str, str]]) -> None:
    """Say what a model is called in orbax's checkpoints, where a program of jax saved it.

    From then on, until it is called again, the arrays that a rule fits are those of ``model`` in each such checkpoint:
    for `load_checkpoint`, `convert` and all other functions. All ranks of a job call it with the same rules.

    Args:
        rules: (path, name, pattern). The path is the array's in the tree, with slashes; ``{number}`` in it is any
            number. The pattern names the dims of the array, and those of the model's, as einops does. A dim of which
            there is nothing behind the arrow numbers arrays: ``{layer}`` in the name is its index. Elements are
            multiplied by what stands behind ``*``: a number, or the root of the product of some sizes, as in
            ``embed head dim -> (head dim) embed * sqrt(dim)``.

    Raises:
        UsageError: A rule makes no sense.

    Example:
        ``xla_ckpt.register_names([("params/dense/kernel", "dense.weight", "in out -> out in")])``
    """
    _REGISTERED[:] = parse_names(rules)


def registered_names() -> Sequence[NameRule]:
    """The rules that were given last."""
    return tuple(_REGISTERED)
