"""How a program of jax calls a model's arrays, and how they lie: rules by which they are those of a torch model. Pure.

jax's kernels are (in, out) where torch's are (out, in), heads may be a dim of their own, and the layers of a model may
be one array with a dim of layers. A rule names the dims before and after, as einops does, and may multiply and add. A
chunk is decoded, its dims are put into another order, and the manifest says which part of it is which array. A
`Renaming` serves both directions: what is read, and what is written under the names of the program of jax.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from xla_ckpt.dtypes import DType
from xla_ckpt.errors import IncompatibleCheckpointError
from xla_ckpt.layouts.orbax.name_rules import Axes, NameRule
from xla_ckpt.sharding.box import Box


@dataclass(frozen=True, slots=True)
class Renaming:
    """A stored array as arrays of a model."""

    rule: NameRule
    leaf: str
    sizes: Mapping[str, int]
    """Of all axes."""

    numbers: Mapping[str, int]
    """Those of its path."""

    cut: frozenset[str]
    """Axes that chunks cut."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of each array of the model."""
        return tuple(math.prod(self.sizes[axis] for axis in group) for group in self.rule.after)

    @property
    def changes(self) -> bool:
        """Whether elements are multiplied, or something is added to them."""
        return self.rule.factor.root(self.sizes) != 1 or self.rule.plus != 0

    def check_type(self, dtype: DType, leaf: str) -> None:
        """Refuse elements that the rule cannot compute with.

        Raises:
            IncompatibleCheckpointError: They are no floating-point numbers, and the rule changes them.
        """
        if self.changes and not dtype.floating:
            raise IncompatibleCheckpointError(
                "a rule computes with elements that are no floating-point numbers", leaf=leaf, found=dtype.name
            )

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

    def other_names(self, rules: Sequence[NameRule]) -> dict[str, str]:
        """Further names of an array, if it is one of the model -> its name: of rules that differ in the name alone."""
        if self.rule.numbering:
            return {}
        others = [r for r in rules if r.path == self.rule.path and r.name != self.rule.name]
        others = [rule for rule in others if replace(rule, name=self.rule.name) == self.rule]
        return {rule.named(self.numbers): self.rule.named(self.numbers) for rule in others}

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
        """The elements of a chunk, an array of numpy's, with the axes in `order`: another view of the same memory."""
        sizes = self._lengths(chunk)
        return elements.reshape([*sizes.values()]).transpose([[*sizes].index(axis) for axis in self.order])

    def computed(self, elements: Any) -> Any:
        """Stored elements, an array of numpy's, as the model has them."""
        if not self.changes:
            return elements
        wide = _wide(elements)
        number, root = wide.dtype.type, self.rule.factor.root(self.sizes)
        if self.rule.factor.divides:
            wide /= number(root)
        else:
            wide *= number(root)
        wide += number(self.rule.plus)
        return wide.astype(elements.dtype)

    def stored(self, elements: Any, chunk: Box) -> Any:
        """The elements of a chunk as they are stored, from what `ordered` and `computed` give: their inverse."""
        sizes = self._lengths(chunk)
        elements = elements.reshape([sizes[axis] for axis in self.order])
        elements = elements.transpose([self.order.index(axis) for axis in sizes]).reshape(chunk.shape)
        if not self.changes:
            return elements
        wide = _wide(elements)
        number, root = wide.dtype.type, self.rule.factor.root(self.sizes)
        wide -= number(self.rule.plus)
        wide *= number(root if self.rule.factor.divides else 1 / root)
        return wide.astype(elements.dtype)

    def _lengths(self, chunk: Box) -> dict[str, int]:
        """How much of each axis a chunk has, in the order of the stored axes."""
        extents = self.extents(chunk)
        return {axis: len(extents[axis]) for group in self.rule.before for axis in group}

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
            yield self.rule.named({**self.numbers, **fixed}), Box(tuple(start), tuple(stop))


def _wide(elements: Any) -> Any:
    """A copy of elements, as float32 or wider: what is computed with two bfloat16 would be rounded twice."""
    return elements.astype(np.result_type(elements.dtype, np.float32))


def renaming(
    rules: Sequence[NameRule], path: str, shape: Sequence[int], chunk: Sequence[int], leaf: str
) -> Renaming | None:
    """What an array is to a model; None if no rule is for its path.

    Args:
        rules: The rules. The first one counts whose path it is.
        chunk: The shape of its chunks.
        leaf: What it is called in errors.

    Raises:
        IncompatibleCheckpointError: It does not have the dims that the rule says.
    """
    for rule in rules:
        if (match := rule.paths.fullmatch(path)) is None:
            continue
        sizes = _sizes(rule, rule.before, shape, leaf)
        cut = {group[0] for group, n, size in zip(rule.before, shape, chunk, strict=True) if size < n}
        numbers = {name: int(number) for name, number in match.groupdict().items()}
        return Renaming(rule, leaf, sizes, numbers, frozenset(cut))
    return None


def _sizes(rule: NameRule, dims: Sequence[Axes], shape: Sequence[int], leaf: str) -> dict[str, int]:
    """The sizes of all axes of an array with these dims.

    Raises:
        IncompatibleCheckpointError: It does not have them.
    """
    sizes = dict(rule.sizes)
    for group, n in zip(dims, shape, strict=False):
        unsaid = [axis for axis in group if axis not in sizes]
        known = math.prod(sizes[axis] for axis in group if axis in sizes)
        sizes |= dict.fromkeys(unsaid, n // known)
        if len(unsaid) > 1 or math.prod(sizes[axis] for axis in group) != n:
            raise _misfit(rule, dims, shape, leaf)
    if len(shape) != len(dims):
        raise _misfit(rule, dims, shape, leaf)
    return sizes


def _misfit(rule: NameRule, dims: Sequence[Axes], shape: Sequence[int], leaf: str) -> IncompatibleCheckpointError:
    groups = [[f"{axis}:{rule.sizes[axis]}" if axis in rule.sizes else axis for axis in group] for group in dims]
    return IncompatibleCheckpointError(
        "the array does not have the dims that the rule of its name says",
        leaf=leaf,
        expected=" ".join(f"({' '.join(group)})" if len(group) != 1 else group[0] for group in groups),
        found=list(shape),
        hint="Where a dim has several axes, a rule says the sizes of all but one: (head dim:64).",
    )


@dataclass(frozen=True, slots=True)
class Inverse:
    """A stored array that is made of arrays of a model."""

    renaming: Renaming
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    """The shape of the chunks that it is written in: each has parts of as few arrays of the model as can be."""


def inverses(
    rules: Sequence[NameRule], arrays: Mapping[str, tuple[Sequence[int], int]], chunk_bytes: int
) -> dict[str, Inverse]:
    """What a program of jax would have stored of a model, by the path in its tree.

    Args:
        rules: The rules. The first one counts that gives the name of an array.
        arrays: Name in the model -> shape, bytes of an element.
        chunk_bytes: A larger chunk is cut along its first dim, where that cuts the arrays of the model into rows.

    Raises:
        IncompatibleCheckpointError: No rule gives the name of an array, or arrays are missing, or shapes do not fit.
    """
    numbers: dict[str, list[dict[str, int]]] = {}
    sizes: dict[str, tuple[NameRule, dict[str, int], int]] = {}
    for name, (shape, itemsize) in arrays.items():
        rule, of_name = _rule_of(rules, name)
        path = rule.path.format(**of_name)
        of_array = _sizes(rule, rule.after, shape, name)
        if sizes.get(path, (rule,))[0] != rule:
            raise IncompatibleCheckpointError("arrays of the model that are one array in jax are not tied", leaf=name)
        if sizes.setdefault(path, (rule, of_array, itemsize)) != (rule, of_array, itemsize):
            raise IncompatibleCheckpointError("arrays that are one in jax have different shapes or types", leaf=name)
        numbers.setdefault(path, []).append(of_name)
    return {path: _inverse(path, *sizes[path], numbers[path], chunk_bytes) for path in sizes}


def _rule_of(rules: Sequence[NameRule], name: str) -> tuple[NameRule, dict[str, int]]:
    for rule in rules:
        if (numbers := rule.numbers_of(name)) is not None:
            return rule, numbers
    raise IncompatibleCheckpointError(
        "no rule of names gives an array of the model", leaf=name, hint="Add one to those of register_names."
    )


def _inverse(
    path: str, rule: NameRule, sizes: dict[str, int], itemsize: int, numbers: list[dict[str, int]], chunk_bytes: int
) -> Inverse:
    """The stored array at a path, whose arrays in the model have these numbers."""
    counts = {axis: max(of_name[axis] for of_name in numbers) + 1 for axis in rule.numbering}
    for axis, count in counts.items():
        if rule.sizes.get(axis, count) != count:
            raise IncompatibleCheckpointError(
                "the model does not have as many arrays of a name as the rule says",
                leaf=rule.name,
                expected=f"{axis}:{rule.sizes[axis]}",
                found=count,
            )
    if len(numbers) != math.prod(counts.values()):
        there = {tuple(of_name[axis] for axis in counts) for of_name in numbers}
        missing = next(at for at in itertools.product(*map(range, counts.values())) if at not in there)
        lacking = rule.named({**numbers[0], **dict(zip(counts, missing, strict=True))})
        raise IncompatibleCheckpointError("an array of the model is missing", leaf=lacking, found=f"others of {path}")
    sizes = {**sizes, **counts}
    shape = tuple(math.prod(sizes[axis] for axis in group) for group in rule.before)
    chunk = [n // sizes[group[0]] if group[0] in counts else n for group, n in zip(rule.before, shape, strict=True)]
    if rule.before and len(rule.before[0]) == 1 and rule.after and rule.before[0][0] == rule.after[0][0]:
        chunk[0] = max(chunk[0] // max(-(-math.prod(chunk) * itemsize // chunk_bytes), 1), 1)
    cut = {group[0] for group, n, size in zip(rule.before, shape, chunk, strict=True) if size < n}
    of_path = {name: numbers[0][name] for name in rule.paths.groupindex}
    return Inverse(Renaming(rule, path, sizes, of_path, frozenset(cut)), shape, tuple(chunk))
