"""Name rules: map the arrays of a JAX program to the arrays of a torch model, and back. Pure.

JAX kernels are (in, out) and torch weights (out, in), heads may be a separate dim, and all layers of a model may be
stacked in one array with a layer dim. A rule names the dims before and after, like einops, and may multiply and add. A
chunk is decoded, its dims are transposed, and the manifest maps its parts to arrays. A `Renaming` is used in both
directions: for reading, and for writing under the names of the JAX program.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from xla_ckpt.core.dtypes import DType, get_dtype, to_numpy_dtype
from xla_ckpt.core.lightweight import cached_property
from xla_ckpt.core.manifest.arrays import ArrayRecord, Shard, create_array_record
from xla_ckpt.core.sharding.box import Box
from xla_ckpt.errors import FormatError, IncompatibleCheckpointError, UsageError, annotate_errors

_BFLOAT16 = to_numpy_dtype(get_dtype("bfloat16"))

_GROUP = re.compile(r"\(([^()]*)\)|(\S+)")
_AXIS = re.compile(r"([a-z_]\w*)(?::([1-9]\d*))?", re.IGNORECASE)
_PATH_NUMBER = re.compile(r"\\\{(\w+)\\\}")
_NAME_NUMBER = re.compile(r"\{(?:([1-9]\d*)\*)?([a-zA-Z_]\w*)(?:\+(\d+))?\}")
_OPERATOR = re.compile(r"\s+([*/+-])(?:\s+|$)")
_ROOT_FACTOR = re.compile(r"sqrt\(([^()]*\w[^()]*)\)|bfloat16\(sqrt\(([^()]*\w[^()]*)\)\)")

_EXAMPLE = "('params/layers/query/kernel', 'layers.{layer}.q.weight', 'embed layer head dim -> (head dim) embed')"

RULE_CACHE_SIZE = 1 << 14
"""Maximum number of parsed rules that are cached."""

Axes = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ScaleFactor:
    """Factor that elements are multiplied by: a number, or the square root of a product of axis sizes."""

    number: float = 1.0
    axes: Axes = ()
    """Axes whose sizes are under the root; empty for a number."""

    rounds_to_bfloat16: bool = False
    """True if the root is rounded to bfloat16 first."""

    divides: bool = False
    """True if elements are divided by the factor."""

    def compute(self, sizes: Mapping[str, int]) -> float:
        """Return the factor for these sizes of axes."""
        root = math.sqrt(math.prod(sizes[axis] for axis in self.axes)) if self.axes else self.number
        return float(np.float32(root).astype(_BFLOAT16)) if self.rounds_to_bfloat16 else root


@dataclass(frozen=True)
class NameRule:
    """Rule that maps arrays with matching paths to arrays of a model."""

    path: str
    """Path of the arrays in the tree, with numbers in braces."""

    name: str
    """Name in the model, with numbers of the path, and of dims that the model array lacks, in braces."""

    pattern: str
    """Pattern of the dims, as given by the caller; the fields below are parsed from it."""

    stored_axes: tuple[Axes, ...]
    """Axes of each stored dim, outermost first."""

    model_axes: tuple[Axes, ...]
    """Axes of each dim in the model."""

    sizes: Mapping[str, int]
    """Sizes of axes that the rule specifies."""

    factor: ScaleFactor = ScaleFactor()
    offset: float = 0.0
    """Number that is added to elements after the multiplication."""

    @property
    def numbered_axes(self) -> Axes:
        """Axes that become numbers in names."""
        kept = {axis for group in self.model_axes for axis in group}
        return tuple(axis for group in self.stored_axes for axis in group if axis not in kept)

    @cached_property
    def path_pattern(self) -> re.Pattern[str]:
        """Regex of the paths that match the rule, with their numbers as groups."""
        return re.compile(_PATH_NUMBER.sub(r"(?P<\1>\\d+)", re.escape(self.path)))

    @cached_property
    def name_pattern(self) -> re.Pattern[str]:
        """Regex of the names that the rule produces, with their numbers as groups."""
        return re.compile(_NAME_NUMBER.sub(r"(?P<\2>\\d+)", "".join(
            part if _NAME_NUMBER.fullmatch(part) else re.escape(part) for part in re.split(r"(\{[^{}]*\})", self.name)
        )))  # fmt: skip

    def format_name(self, numbers: Mapping[str, int]) -> str:
        """Return the name in the model for these numbers."""
        return _NAME_NUMBER.sub(lambda n: str(int(n[1] or 1) * numbers[n[2]] + int(n[3] or 0)), self.name)

    def parse_name(self, name: str) -> dict[str, int] | None:
        """Return the numbers that produce this name; None if there are none."""
        if (match := self.name_pattern.fullmatch(name)) is None:
            return None
        numbers = {}
        for times, axis, plus in _NAME_NUMBER.findall(self.name):
            number, rest = divmod(int(match[axis]) - int(plus or 0), int(times or 1))
            if rest or number < 0:
                return None
            numbers[axis] = number
        return numbers


def parse_name_rules(rules: Iterable[tuple[str, str, str]]) -> tuple[NameRule, ...]:
    """Parse rules given as (path, name, pattern).

    Raises:
        UsageError: A rule is invalid.
    """
    return tuple(_parse_rule(rule) for rule in rules)


def _parse_rule(rule: tuple[str, str, str]) -> NameRule:
    try:
        path, name, pattern = rule
        hash((path, name, pattern))
    except (ValueError, TypeError) as error:
        raise _make_rule_error(rule, "it is no (path, name, pattern), of which there is a list") from error
    return _parse_cached_rule(path, name, pattern)


@functools.lru_cache(RULE_CACHE_SIZE)
def _parse_cached_rule(path: str, name: str, pattern: str) -> NameRule:
    """Parse a rule with a cache: a model has a thousand rules, which readers and writers request several times."""
    rule = path, name, pattern
    try:
        if pattern.count("->") != 1:
            raise ValueError("its pattern has one arrow (->), between the axes that are stored and those of the name")
        left, right = pattern.split("->")
        right, *rest = _OPERATOR.split(right)
        sizes: dict[str, int] = {}
        before, after = _parse_axes(left, sizes), _parse_axes(right, sizes)
        factor, plus = _parse_arithmetic(dict(zip(rest[::2], rest[1::2], strict=True)), rest[::2])
        parsed = NameRule(path, name, pattern, before, after, sizes, factor, plus)
        numbers = [*parsed.path_pattern.groupindex, *parsed.numbered_axes]
        parsed.format_name(dict.fromkeys(numbers, 0))
        path.format(**dict.fromkeys(numbers, 0))  # find invalid braces now, not when a model is written
        parsed.name_pattern  # noqa: B018  # raises for a number that occurs twice in a name
    except (ValueError, TypeError, AttributeError, KeyError, IndexError, re.error) as error:
        raise _make_rule_error(rule, str(error)) from error
    one, other = ([axis for group in groups for axis in group] for groups in (before, after))
    if len(set(one)) < len(one) or len(set(other)) < len(other) or not set(other) <= set(one):
        raise _make_rule_error(rule, "each axis behind the arrow stands before it, and none stands twice")
    if not set(factor.axes) <= set(one):
        raise _make_rule_error(rule, "each axis of the factor stands before the arrow")
    if missing := [number for number in numbers if number not in parsed.name_pattern.groupindex]:
        raise _make_rule_error(rule, f"the axis {missing[0]} is neither behind the arrow nor in the name")
    return parsed


def _make_rule_error(rule: object, why: str) -> UsageError:
    return UsageError(f"a rule of names makes no sense: {why}", expected=_EXAMPLE, found=repr(rule)[:200])


def _parse_axes(text: str, sizes: dict[str, int]) -> tuple[Axes, ...]:
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


def _parse_arithmetic(by: Mapping[str, str], order: Sequence[str]) -> tuple[ScaleFactor, float]:
    """Return the factor and the offset for elements, given an operand for each operator."""
    if order and "".join(order) not in ("*", "/", "+", "-", "*+", "*-", "/+", "/-"):
        raise ValueError(f"{' '.join(order)} is more than a factor and what is added")
    operator = next((one for one in by if one in "*/"), None)
    factor = ScaleFactor() if operator is None else _parse_factor(by[operator], divides=operator == "/")
    return factor, float(by["+"]) if "+" in by else -float(by.get("-", "0"))


def _parse_factor(text: str, *, divides: bool) -> ScaleFactor:
    if (root := _ROOT_FACTOR.fullmatch(text.strip())) is not None:
        return ScaleFactor(
            axes=tuple((root[1] or root[2]).split()), rounds_to_bfloat16=root[2] is not None, divides=divides
        )
    number = float(text)
    if not math.isfinite(number) or not number:
        raise ValueError(f"{text.strip()} is no factor")
    return ScaleFactor(number, divides=divides)


_registered_rules: list[NameRule] = []


def register_names(rules: Iterable[tuple[str, str, str]]) -> None:
    """Register the names of a model in orbax checkpoints that a JAX program saved.

    Until the next call, arrays that match a rule are loaded as ``model`` from each such checkpoint, by
    `load_checkpoint`, `convert` and all other functions. ``convert(..., to="orbax-model")`` writes a model under the
    names of the JAX program: an array is written by the first rule that produces its name. All ranks of a job must call
    this with the same rules. `restore` also finds these arrays under ``model``, and no longer at their place in the
    tree: ``register_names([])`` removes the rules.

    Args:
        rules: (path, name, pattern). The path is the path of the array in the tree, with slashes; ``{number}`` in it
            matches any number. The pattern names the dims of the stored array and of the model array, as in einops. A
            dim that is missing after the arrow numbers the arrays: ``{layer}`` in the name is its index, and
                ``{2*layer+1}`` is
            computed from it. Elements are multiplied by the factor after ``*``, or divided by the one after ``/``: a
            number, or the square root of a product of sizes, as in
            ``embed head dim -> (head dim) embed * sqrt(dim)``. A number after ``+`` or ``-`` is added or subtracted.

    A rule that differs from an earlier one only in the name gives a second name of one array, for tied parameters.

    Raises:
        UsageError: A rule is invalid.

    Example:
        ``xla_ckpt.register_names([("params/dense/kernel", "dense.weight", "in out -> out in")])``
    """
    _registered_rules[:] = parse_name_rules(rules)


def get_registered_rules() -> Sequence[NameRule]:
    """Return the registered rules."""
    return tuple(_registered_rules)


@dataclass(frozen=True, slots=True)
class Renaming:
    """Mapping of a stored array to arrays of a model."""

    rule: NameRule
    leaf: str
    sizes: Mapping[str, int]
    """Sizes of all axes."""

    numbers: Mapping[str, int]
    """Numbers in its path."""

    cut_axes: frozenset[str]
    """Axes that chunks split."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of each array of the model."""
        return tuple(math.prod(self.sizes[axis] for axis in group) for group in self.rule.model_axes)

    @property
    def has_arithmetic(self) -> bool:
        """True if the rule changes the values of elements."""
        return self.rule.factor.compute(self.sizes) != 1 or self.rule.offset != 0

    def check_dtype(self, dtype: DType, leaf: str) -> None:
        """Check that the rule can compute with elements of this dtype.

        Raises:
            IncompatibleCheckpointError: It is not a floating-point dtype, and the rule changes the values.
        """
        if self.has_arithmetic and not dtype.is_floating:
            raise IncompatibleCheckpointError(
                "a rule computes with elements that are no floating-point numbers", leaf=leaf, found=dtype.name
            )

    @property
    def outer_axes(self) -> Axes:
        """Axes along which the parts of a chunk are concatenated. Each part is a box of one array."""
        loose: list[str] = []
        for group in self.rule.model_axes:
            last = max((place for place, axis in enumerate(group) if axis in self.cut_axes), default=0)
            loose += group[:last]
        return (*self.rule.numbered_axes, *loose)

    @property
    def max_parts(self) -> int:
        """Maximum number of parts of a chunk."""
        return math.prod(self.sizes[axis] for axis in self.outer_axes)

    @property
    def axis_order(self) -> Axes:
        """Axes in the order in which the elements of a chunk are read."""
        inner = [axis for group in self.rule.model_axes for axis in group if axis not in self.outer_axes]
        return (*self.outer_axes, *inner)

    def find_aliases(self, rules: Sequence[NameRule]) -> dict[str, str]:
        """Map further names of a model array to its name, from rules that differ only in the name."""
        if self.rule.numbered_axes:
            return {}
        others = [r for r in rules if r.path == self.rule.path and r.name != self.rule.name]
        others = [rule for rule in others if replace(rule, name=self.rule.name) == self.rule]
        return {rule.format_name(self.numbers): self.rule.format_name(self.numbers) for rule in others}

    def compute_extents(self, chunk: Box) -> dict[str, range]:
        """Return the range of each axis that a chunk covers.

        Raises:
            IncompatibleCheckpointError: The chunk ends inside of a group of axes.
        """
        extents = {}
        for group, low, high in zip(self.rule.stored_axes, chunk.start, chunk.stop, strict=True):
            inner = math.prod(self.sizes[axis] for axis in group[1:])
            if low % inner or high % inner:
                raise IncompatibleCheckpointError(
                    f"a chunk of the array ends inside of the axes {' '.join(group)}", leaf=self.leaf, found=str(chunk)
                )
            extents[group[0]] = range(low // inner, high // inner)
            extents |= {axis: range(self.sizes[axis]) for axis in group[1:]}
        return extents

    def to_model_order(self, elements: Any, chunk: Box) -> Any:
        """Return a view of a chunk (a numpy array) with its axes in `axis_order`."""
        sizes = self._get_lengths(chunk)
        return elements.reshape([*sizes.values()]).transpose([[*sizes].index(axis) for axis in self.axis_order])

    def to_model_values(self, elements: Any) -> Any:
        """Convert stored elements (a numpy array) to the values in the model."""
        if not self.has_arithmetic:
            return elements
        wide = _widen(elements)
        number, root = wide.dtype.type, self.rule.factor.compute(self.sizes)
        if self.rule.factor.divides:
            wide /= number(root)
        else:
            wide *= number(root)
        wide += number(self.rule.offset)
        return wide.astype(elements.dtype)

    def to_stored(self, elements: Any, chunk: Box) -> Any:
        """Convert elements of a chunk to their stored form: the inverse of `to_model_order` and `to_model_values`."""
        sizes = self._get_lengths(chunk)
        elements = elements.reshape([sizes[axis] for axis in self.axis_order])
        elements = elements.transpose([self.axis_order.index(axis) for axis in sizes]).reshape(chunk.shape)
        if not self.has_arithmetic:
            return elements
        wide = _widen(elements)
        number, root = wide.dtype.type, self.rule.factor.compute(self.sizes)
        wide -= number(self.rule.offset)
        wide *= number(root if self.rule.factor.divides else 1 / root)
        return wide.astype(elements.dtype)

    def _get_lengths(self, chunk: Box) -> dict[str, int]:
        """Return the length of each axis in a chunk, in the order of the stored axes."""
        extents = self.compute_extents(chunk)
        return {axis: len(extents[axis]) for group in self.rule.stored_axes for axis in group}

    def iterate_parts(self, chunk: Box) -> Iterator[tuple[str, Box]]:
        """Yield (name, box) of each part of a chunk, in the order of its elements."""
        extents = self.compute_extents(chunk)
        for at in itertools.product(*(extents[axis] for axis in self.outer_axes)):
            fixed = dict(zip(self.outer_axes, at, strict=True))
            start, stop = [], []
            for group in self.rule.model_axes:
                low = high = 0
                for axis in group:
                    first, last = (fixed[axis],) * 2 if axis in fixed else (extents[axis][0], extents[axis][-1])
                    low, high = low * self.sizes[axis] + first, high * self.sizes[axis] + last
                start.append(low)
                stop.append(high + 1)
            yield self.rule.format_name({**self.numbers, **fixed}), Box(tuple(start), tuple(stop))


def _widen(elements: Any) -> Any:
    """Return a copy of elements as float32 or wider. Arithmetic in bfloat16 would round twice."""
    return elements.astype(np.result_type(elements.dtype, np.float32))


def find_renaming(
    rules: Sequence[NameRule], path: str, shape: Sequence[int], chunk: Sequence[int], leaf: str
) -> Renaming | None:
    """Return the mapping of an array to a model; None if no rule matches its path.

    Args:
        rules: Rules; the first one with a matching path is used.
        path: Path of the array in the tree.
        shape: Shape of the array.
        chunk: Shape of its chunks.
        leaf: Name of the array in errors.

    Raises:
        IncompatibleCheckpointError: The array does not have the dims of the rule.
    """
    for rule in rules:
        if (match := rule.path_pattern.fullmatch(path)) is None:
            continue
        sizes = _resolve_sizes(rule, rule.stored_axes, shape, leaf)
        cut = {group[0] for group, n, size in zip(rule.stored_axes, shape, chunk, strict=True) if size < n}
        numbers = {name: int(number) for name, number in match.groupdict().items()}
        return Renaming(rule, leaf, sizes, numbers, frozenset(cut))
    return None


def _resolve_sizes(rule: NameRule, dims: Sequence[Axes], shape: Sequence[int], leaf: str) -> dict[str, int]:
    """Return the sizes of all axes of an array with these dims.

    Raises:
        IncompatibleCheckpointError: The shape does not match the dims.
    """
    sizes = dict(rule.sizes)
    for group, n in zip(dims, shape, strict=False):
        unsized = [axis for axis in group if axis not in sizes]
        known = math.prod(sizes[axis] for axis in group if axis in sizes)
        sizes |= dict.fromkeys(unsized, n // known)
        if len(unsized) > 1 or math.prod(sizes[axis] for axis in group) != n:
            raise _make_dims_error(rule, dims, shape, leaf)
    if len(shape) != len(dims):
        raise _make_dims_error(rule, dims, shape, leaf)
    return sizes


def _make_dims_error(
    rule: NameRule, dims: Sequence[Axes], shape: Sequence[int], leaf: str
) -> IncompatibleCheckpointError:
    groups = [[f"{axis}:{rule.sizes[axis]}" if axis in rule.sizes else axis for axis in group] for group in dims]
    return IncompatibleCheckpointError(
        "the array does not have the dims that the rule of its name says",
        leaf=leaf,
        expected=" ".join(f"({' '.join(group)})" if len(group) != 1 else group[0] for group in groups),
        found=list(shape),
        hint="Where a dim has several axes, a rule says the sizes of all but one: (head dim:64).",
    )


@dataclass(frozen=True, slots=True)
class InverseRenaming:
    """Stored array that is assembled from arrays of a model."""

    renaming: Renaming
    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    """Shape of the chunks that are written. Each chunk contains parts of as few arrays of the model as possible."""


def plan_inverse_renamings(
    rules: Sequence[NameRule], arrays: Mapping[str, tuple[Sequence[int], int]], chunk_bytes: int
) -> dict[str, InverseRenaming]:
    """Plan the arrays that a JAX program would store for a model, by the path in its tree.

    Args:
        rules: Rules; the first one that produces the name of an array is used.
        arrays: Name in the model -> shape, bytes of an element.
        chunk_bytes: Maximum bytes of a chunk. Larger chunks are split along their first dim, if this splits the arrays
            of the model into rows.

    Raises:
        IncompatibleCheckpointError: No rule produces the name of an array, or arrays are missing, or shapes do not
            match.
    """
    numbers: dict[str, list[dict[str, int]]] = {}
    sizes: dict[str, tuple[NameRule, dict[str, int], int]] = {}
    for name, (shape, itemsize) in arrays.items():
        rule, of_name = _find_rule(rules, name)
        path = rule.path.format(**of_name)
        of_array = _resolve_sizes(rule, rule.model_axes, shape, name)
        if sizes.get(path, (rule,))[0] != rule:
            raise IncompatibleCheckpointError("arrays of the model that are one array in jax are not tied", leaf=name)
        if sizes.setdefault(path, (rule, of_array, itemsize)) != (rule, of_array, itemsize):
            raise IncompatibleCheckpointError("arrays that are one in jax have different shapes or types", leaf=name)
        numbers.setdefault(path, []).append(of_name)
    return {path: _plan_inverse_renaming(path, *sizes[path], numbers[path], chunk_bytes) for path in sizes}


def _find_rule(rules: Sequence[NameRule], name: str) -> tuple[NameRule, dict[str, int]]:
    for rule in rules:
        if (numbers := rule.parse_name(name)) is not None:
            return rule, numbers
    raise IncompatibleCheckpointError(
        "no rule of names gives an array of the model", leaf=name, hint="Add one to those of register_names."
    )


def _plan_inverse_renaming(
    path: str, rule: NameRule, sizes: dict[str, int], itemsize: int, numbers: list[dict[str, int]], chunk_bytes: int
) -> InverseRenaming:
    """Plan the stored array at a path, given the numbers of its arrays in the model."""
    counts = {axis: max(of_name[axis] for of_name in numbers) + 1 for axis in rule.numbered_axes}
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
        lacking = rule.format_name({**numbers[0], **dict(zip(counts, missing, strict=True))})
        raise IncompatibleCheckpointError("an array of the model is missing", leaf=lacking, found=f"others of {path}")
    sizes = {**sizes, **counts}
    shape = tuple(math.prod(sizes[axis] for axis in group) for group in rule.stored_axes)
    chunk = [
        n // sizes[group[0]] if group[0] in counts else n for group, n in zip(rule.stored_axes, shape, strict=True)
    ]
    if (
        rule.stored_axes
        and len(rule.stored_axes[0]) == 1
        and rule.model_axes
        and rule.stored_axes[0][0] == rule.model_axes[0][0]
    ):
        chunk[0] = max(chunk[0] // max(-(-math.prod(chunk) * itemsize // chunk_bytes), 1), 1)
    cut = {group[0] for group, n, size in zip(rule.stored_axes, shape, chunk, strict=True) if size < n}
    of_path = {name: numbers[0][name] for name in rule.path_pattern.groupindex}
    return InverseRenaming(Renaming(rule, path, sizes, of_path, frozenset(cut)), shape, tuple(chunk))


MAX_MODEL_PARTS = 1 << 22
"""Maximum number of model parts in an array, because a malicious file may describe any number."""


class ModelArrayCollector:
    """Collector of the arrays of a model while the stored arrays are scanned."""

    def __init__(self, rules: Sequence[NameRule], *, multiple_items: bool = False) -> None:
        self.rules = rules
        self.multiple_items = multiple_items
        """True if the checkpoint has several items. A path may begin with the name of an item in that case."""
        self.unmatched_paths: list[str] = []
        """Paths of arrays that match no rule, in the form used in rules."""
        self._arrays: dict[str, tuple[DType, tuple[int, ...], list[Shard]]] = {}
        self._aliases: dict[str, str] = {}
        """Further names of arrays -> their names in `_arrays`."""
        self._items: dict[str, str] = {}
        """Name of an array -> the item that contains it."""

    def add_array(self, renaming: Renaming, item: str, dtype: DType, chunks: Sequence[Box], file: int) -> None:
        """Add a stored array as one or more arrays of the model.

        Args:
            renaming: Mapping of the array to the model.
            item: Item that contains it.
            dtype: Dtype of the array.
            chunks: Its chunks, in the order of its file.
            file: Number of the file, which contains the elements of each chunk in the order of the renaming.

        Raises:
            IncompatibleCheckpointError: The rules do not match the array.
            FormatError: The array has too many parts.
        """
        renaming.check_dtype(dtype, renaming.leaf)
        if (count := renaming.max_parts * len(chunks)) > MAX_MODEL_PARTS:
            raise FormatError(
                "an array has too many parts", leaf=renaming.leaf, expected=f"at most {MAX_MODEL_PARTS}", found=count
            )
        offset = 0
        for chunk in chunks:
            for name, box in renaming.iterate_parts(chunk):
                if (other := self._items.setdefault(name, item)) != item:
                    raise IncompatibleCheckpointError(
                        "a rule of register_names is for arrays of several items",
                        leaf=renaming.leaf,
                        found=f"{name} in the items {other} and {item}",
                        hint=f"Begin the path of the rule with the item that is meant: {other}/{renaming.leaf}.",
                    )
                known, shape, shards = self._arrays.setdefault(name, (dtype, renaming.shape, []))
                if (known, shape) != (dtype, renaming.shape):
                    raise IncompatibleCheckpointError(
                        "two rules give other arrays one name", leaf=renaming.leaf, found=name
                    )
                shards.append(Shard(box, file, offset))
                offset += box.size * dtype.itemsize
        self._aliases |= renaming.find_aliases(self.rules)

    def build_records(self) -> dict[str, ArrayRecord]:
        """Return the record of each array by its name in the model. Several names of one array share one record."""
        records = {}
        for name, (dtype, shape, shards) in self._arrays.items():
            with annotate_errors(leaf=name):
                records[name] = create_array_record(dtype, shape, shards)
        return records | {other: records[name] for other, name in self._aliases.items()}
