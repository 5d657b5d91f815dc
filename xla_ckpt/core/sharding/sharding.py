"""Shardings: the mesh axes that split each tensor dim, sections of fused dims, and sharding rules by leaf path.

The mesh, the rank and the shape of the local tensor determine a local array, without communication. The rows of a fused
grouped-query attention projection consist of sections (queries, keys, values), and each section is split separately. If
there are more ranks than key-value heads, several ranks hold the same keys and values, as with neuronx-distributed's
`kv_size_multiplier`. The global array contains them once. Rules pair a regular expression with a sharding, for arrays
that do not describe their own. The first matching rule applies.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

from xla_ckpt.core.sharding.box import Box
from xla_ckpt.core.sharding.local_array import LocalArray, Piece, PieceCopy, compute_chunk_bounds
from xla_ckpt.core.sharding.mesh import Mesh
from xla_ckpt.errors import UsageError

_SECTION_PATTERN = re.compile(r"(\d*)\s*(?:x\s*(\d+)(?:/(\d+))?(?:\s+(adjacent))?)?")


@dataclass(frozen=True, slots=True)
class Section:
    """A section of a tensor dim.

    Raises:
        ValueError: A field is out of range.
    """

    size: int | None = None
    """Number of elements in the global array. None: equal shares of the dim."""

    copies: int = 1
    """Number of ranks that hold each element. With `n` ranks the section is split into ``n // copies`` parts, and rank
    `r` holds part ``r % (n // copies)``: the sequence of parts is repeated, as in neuronx-distributed on trn1. A single
    rank holds the section once, whatever the value."""

    adjacent: bool = False
    """True if neighbouring ranks hold the same part: rank `r` holds part ``r // copies``, as on trn2."""

    max_parts: int | None = None
    """Maximum number of parts, which is the number of heads. Stored with an array for loads on other numbers of ranks:
    these hold as many copies as necessary, and `copies` is the number of copies at the time of the save."""

    def __post_init__(self) -> None:
        if self.size is not None and self.size < 1:
            raise ValueError(f"a section of {self.size} elements")
        if self.copies < 1:
            raise ValueError(f"a section that {self.copies} ranks hold")
        if self.adjacent and self.copies == 1:
            raise ValueError("a section that one rank holds has no adjacent copies")
        if self.max_parts is not None and self.max_parts < 1:
            raise ValueError(f"a section of {self.max_parts} parts")

    @property
    def spec(self) -> int | str:
        """Section in the JSON and text form that `parse_section` reads."""
        size = "" if self.size is None else str(self.size)
        if self.copies == 1:
            return size if self.size is None else self.size
        parts = "" if self.max_parts is None else f"/{self.max_parts}"
        return f"{size}x{self.copies}{parts}{' adjacent' if self.adjacent else ''}"

    def count_copies(self, ranks: int) -> int:
        """Return the number of ranks, out of `ranks`, that hold each element.

        Raises:
            ValueError: The ranks cannot hold equally many copies.
        """
        if ranks == 1:
            return 1
        copies = self.copies
        # Keeping the number of copies keeps the order of the query heads, unless parts would have to be split further.
        if self.max_parts is not None and (ranks % copies or ranks // copies > self.max_parts):
            copies = max(1, ranks // self.max_parts)
        if ranks % copies:
            raise ValueError(f"{copies} copies of a section do not divide {ranks} ranks")
        return copies

    def to_stored(self, ranks: int) -> Section:
        """Return the section as stored by a job that holds it on `ranks` ranks, for use on other numbers of ranks."""
        if self.copies == 1 or self.max_parts is not None or ranks == 1:
            return self
        return replace(self, max_parts=ranks // self.copies)


def parse_section(entry: Any) -> Section:
    """Parse a section: a size, a size with copies, or only copies. ``/8`` gives the number of parts.

    Raises:
        ValueError: `entry` has another form.

    >>> parse_section(4096).size, parse_section("1024x4").copies, parse_section("x4 adjacent").adjacent
    (4096, 4, True)
    """
    if type(entry) is int:
        return Section(entry)
    match = _SECTION_PATTERN.fullmatch(entry.strip()) if isinstance(entry, str) else None
    if match is None:
        raise ValueError(f"a section is written like 4096, '1024x4' or '1024x4 adjacent', not {entry!r}")
    size, copies, parts, adjacent = match.groups()
    return Section(
        int(size) if size else None, int(copies or 1), adjacent is not None, None if parts is None else int(parts)
    )


def has_sections(entry: object) -> bool:
    """Return True if an entry of a spec ends with a list of sections.

    >>> has_sections(("tp", (8, "4x2"))), has_sections(("tp", 3)), has_sections("tp"), has_sections(None)
    (True, False, False, False)
    """
    return isinstance(entry, list | tuple) and bool(entry) and isinstance(entry[-1], list | tuple)


@dataclass(frozen=True, slots=True)
class SectionBlock:
    """Neighbouring elements of one tensor dim on one rank."""

    start: int
    """First element in the local tensor."""

    stop: int
    """One past the last element in the local tensor."""

    global_start: int
    """First element in the global array."""

    copy: int = 0
    """Index of this copy."""

    copies: int = 1
    adjacent: bool = False


def compute_global_size(n: int, ranks: int, sections: Sequence[Section]) -> int:
    """Return the global size of a dim that has `n` elements on each rank.

    Raises:
        ValueError: The local sizes are inconsistent with the sections.
    """
    if n < 0:
        raise ValueError(f"a tensor dim of size {n}")
    copies_held = [s.count_copies(ranks) for s in sections]
    sizes = [s.size for s in sections if s.size is not None]
    if sizes:
        expected = sum(size * copies for size, copies in zip(sizes, copies_held, strict=True))
        if expected != n * ranks:
            one = f"; {sizes[0]} strided blocks are ('tp', {sizes[0]}), or tp*{sizes[0]} at the command line"
            raise ValueError(
                f"sections of {_format_sections(sections)} elements are {expected} with all copies, and {ranks} times "
                f"{n} are {n * ranks}; their sizes are those of the whole array{one if len(sizes) == 1 else ''}"
            )
        return sum(sizes)
    if len(sections) > 1 and n % sum(copies_held):
        raise ValueError(
            f"a dim of {n} elements on each rank does not consist of {len(sections)} strided blocks; sections of other "
            "sizes are ('tp', [Q, K, V]), or tp:Q+K+V at the command line"
        )
    if n * ranks * len(sections) % sum(copies_held):
        raise ValueError(f"{ranks} times {n} elements are not {copies_held[0]} copies of anything")
    return n * ranks * len(sections) // sum(copies_held)


def compute_local_size(total: int, ranks: int, sections: Sequence[Section]) -> int:
    """Return the local size, on each rank, of a dim of `total` elements.

    Raises:
        ValueError: The sections do not add up to `total`, or do not divide.
    """
    sizes = zip(_compute_sizes(total, sections), sections, strict=True)
    return sum(_divide_evenly(size, ranks // section.count_copies(ranks)) for size, section in sizes)


def compute_blocks(n: int, ranks: int, index: int, sections: Sequence[Section], total: int) -> list[SectionBlock]:
    """Return the blocks of a tensor dim that one rank holds.

    Args:
        n: Elements of the dim in the local tensor.
        ranks: Number of ranks that the dim is split over.
        index: Index of this rank among them.
        sections: Sections of the dim.
        total: Elements of the dim in the global array. Fewer than the sum over all ranks if the last elements are
            padding.

    Raises:
        ValueError: The sizes are inconsistent with the sections.
    """
    if total < 0:
        raise ValueError(f"a tensor dim of size {total}")
    if total != compute_global_size(n, ranks, sections):
        # Padding follows the last element of the array. With several sections its position would be ambiguous.
        if tuple(sections) != (Section(),) or total > n * ranks:
            raise ValueError(
                f"a dim of {total} elements cannot be {ranks} times {n} of which the last ones are padding"
            )
        low = min(index * n, total)
        return [SectionBlock(0, min(low + n, total) - low, low)]
    if ranks == 1:
        return [SectionBlock(0, n, 0)]  # the sections of a single rank are adjacent
    blocks, at, first = [], 0, 0
    for section, size in zip(sections, _compute_sizes(total, sections), strict=True):
        copies = section.count_copies(ranks)
        parts = ranks // copies
        part, copy = divmod(index, copies) if section.adjacent else (index % parts, index // parts)
        width = _divide_evenly(size, parts)
        blocks.append(SectionBlock(at, at + width, first + part * width, copy, copies, section.adjacent))
        at, first = at + width, first + size
    return blocks


def _compute_sizes(total: int, sections: Sequence[Section]) -> list[int]:
    """Return the sizes of the sections of a dim.

    Raises:
        ValueError: The sections do not add up to `total`, or do not divide.
    """
    sizes = [_divide_evenly(total, len(sections)) if s.size is None else s.size for s in sections]
    if sum(sizes) != total:
        raise ValueError(f"sections of {_format_sections(sections)} elements are {sum(sizes)}, and the dim has {total}")
    return sizes


def _divide_evenly(size: int, parts: int) -> int:
    if size % parts:
        raise ValueError(f"{size} elements of a section do not divide by {parts}")
    return size // parts


def _format_sections(sections: Sequence[Section]) -> str:
    return " + ".join(str(s.spec) for s in sections)


REPLICATED_AXES = ("edp", "ep", "cp", "tp")
"""Mesh axes that replicate an unsplit array. ``pp`` is not among them, because its stages hold different arrays."""

SPLIT_AXES = ("pp", "dp", "edp", "ep", "cp", "tp")
"""Mesh axes that may split a tensor dim. ``dp`` is ``edp`` times ``ep``."""

STAGE_AXES = ("dp", "cp", "tp")
"""Mesh axes that span the ranks of one pipeline stage."""


@dataclass(frozen=True, slots=True)
class DimSharding:
    """Sharding of one tensor dim.

    Raises:
        ValueError: The axes are unknown or repeated, or the sections are inconsistent.
    """

    axes: tuple[str, ...]
    """Mesh axes, outermost first."""

    sections: tuple[Section, ...] = (Section(),)
    """Consecutive sections of the dim, each split over the axes separately. A rank's local tensor holds its part of the
    first section, then of the second, ... Sections without a size have equal sizes: their number is the
    `partition_stride` of Megatron and neuronx-distributed, for projections that are fused into one tensor."""

    def __post_init__(self) -> None:
        unknown = [a for a in self.axes if a not in SPLIT_AXES]
        if unknown or not self.axes or len(set(self.axes)) < len(self.axes):
            raise ValueError(f"{self.axes} are no mesh axes to split over; there are {', '.join(SPLIT_AXES)}")
        if not self.sections:
            raise ValueError("a tensor dim of no sections")
        if len({s.size is None for s in self.sections}) > 1:
            raise ValueError("of the sections of a tensor dim either all have a size, or none")

    @classmethod
    def from_stride(cls, axes: tuple[str, ...], stride: int) -> DimSharding:
        """Create a split into `stride` sections of equal size.

        Raises:
            ValueError: `stride` is below 1.
        """
        if stride < 1:
            raise ValueError(f"a partition stride of {stride}")
        return cls(axes, (Section(),) * stride)

    @property
    def is_plain(self) -> bool:
        """True if each rank holds a single chunk of the dim that no other rank holds."""
        return self.sections == (Section(),)

    @property
    def has_custom_sections(self) -> bool:
        """True if the sections have sizes or copies, which a stride cannot express."""
        return any(s != Section() for s in self.sections)

    @property
    def has_copies(self) -> bool:
        """True if several ranks hold the same section."""
        return any(s.copies > 1 for s in self.sections)


@dataclass(frozen=True, slots=True)
class Sharding:
    """Sharding of an array. Tensor dims after the last one in `dims` are not split.

    Raises:
        ValueError: A mesh axis splits two tensor dims, or is a part of another axis.

    >>> Sharding.parse((("dp", "tp"), None)).spec
    (('dp', 'tp'), None)
    """

    dims: tuple[DimSharding | None, ...] = ()

    shape: tuple[int | None, ...] | None = None
    """Unpadded global size of each tensor dim, or None where local tensors are not padded."""

    def __post_init__(self) -> None:
        axes = self.axes
        if len(set(axes)) < len(axes) or ("dp" in axes and ("ep" in axes or "edp" in axes)):
            raise ValueError(f"a mesh axis splits two tensor dims, or is a part of another: {', '.join(axes)}")

    @property
    def axes(self) -> tuple[str, ...]:
        """All mesh axes that split the array."""
        return tuple(a for split in self.dims if split is not None for a in split.axes)

    @property
    def has_copies(self) -> bool:
        """True if several ranks of an axis that splits the array hold the same part."""
        return any(split is not None and split.has_copies for split in self.dims)

    @property
    def spec(self) -> tuple[object, ...]:
        """Sharding as JSON: per tensor dim None or the axes, followed by the stride or the sections."""
        return tuple(map(_format_dim, self.dims))

    @classmethod
    def parse(cls, spec: Any) -> Sharding:
        """Parse a spec in JAX's style: ``("tp", None)``, ``(("dp", "tp"), None)``, or None.

        An integer after the axes is the stride: ``(("tp", 3), None)``. A list after them contains the sections, as
        sizes in elements of the global array. ``x4`` after a size means that four ranks hold the same part, and ``x4
        adjacent`` that these ranks are neighbours: ``(("tp", [4096, "1024x4", "1024x4"]), None)``. A single section
        needs no size: ``(("tp", ["x4"]), None)``. Stored arrays also record the number of parts of a section:
        ``"1024x4/8"``.

        Raises:
            ValueError: `spec` has another form.
        """
        if isinstance(spec, Sharding):
            return spec
        if spec is None:
            return cls()
        if not isinstance(spec, list | tuple):
            raise ValueError(f"a sharding is written like ('tp', None), not {spec!r}")  # noqa: TRY004
        return cls(tuple(_parse_dim(entry) for entry in spec))

    def pad_dims(self, ndim: int) -> tuple[DimSharding | None, ...]:
        """Return the split of each dim of an array with `ndim` dims."""
        return (*self.dims, *(None,) * (ndim - len(self.dims)))

    def map_local_shape(self, local_shape: Sequence[int], mesh: Mesh, rank: int) -> LocalArray:
        """Map a rank's local tensor of this shape to the global array.

        Raises:
            ValueError: The shape is inconsistent with this sharding.
        """
        if len(self.dims) > len(local_shape):
            raise ValueError(f"{len(self.dims)} dims are sharded, the tensor has {len(local_shape)}")
        sizes = mesh.sizes
        shape: list[int] = []
        blocks: list[list[SectionBlock]] = []
        axes: list[tuple[str, ...]] = []
        for dim, (split, n) in enumerate(zip(self.pad_dims(len(local_shape)), local_shape, strict=True)):
            named, sections = ((), (Section(),)) if split is None else (split.axes, split.sections)
            ranks = count_parts(named, sizes)
            declared = None if self.shape is None else self.shape[dim]
            total = compute_global_size(n, ranks, sections) if declared is None else declared
            shape.append(total)
            blocks.append(compute_blocks(n, ranks, compute_part_index(named, mesh, rank), sections, total))
            axes.append(named)
        replica, replicas, group = compute_replica(self.axes, sizes, mesh.coordinates(rank))
        return LocalArray(
            shape=tuple(shape),
            pieces=_build_pieces(blocks, axes),
            replica=replica,
            replicas=replicas,
            group=group,
            spec=self._to_stored(mesh).spec,
        )

    def map_global_shape(self, shape: Sequence[int], mesh: Mesh, rank: int) -> LocalArray:
        """Compute a rank's part of a global array of this shape. Dims that do not divide are split into chunks.

        Raises:
            ValueError: More dims are sharded than the array has, or a dim with sections does not divide.
        """
        if len(self.dims) > len(shape):
            raise ValueError(f"{len(self.dims)} dims are sharded, the array has {len(shape)}")
        dims = self.pad_dims(len(shape))
        ranks = [1 if split is None else count_parts(split.axes, mesh.sizes) for split in dims]
        uneven = any(
            split is not None and split.is_plain and n % count
            for split, n, count in zip(dims, shape, ranks, strict=True)
        )
        if not uneven:
            local = [
                n if split is None else compute_local_size(n, count, split.sections)
                for split, n, count in zip(dims, shape, ranks, strict=True)
            ]
            return replace(self, shape=None).map_local_shape(local, mesh, rank)
        bounds = []
        for split, n, count in zip(dims, shape, ranks, strict=True):
            if split is None:
                bounds.append((0, n))
            elif not split.is_plain:
                raise ValueError("one dim is cut into sections, and another one does not divide")
            else:
                bounds.append(compute_chunk_bounds(0, n, count, compute_part_index(split.axes, mesh, rank)))
        box = Box(tuple(low for low, _ in bounds), tuple(high for _, high in bounds))
        replica, replicas, group = compute_replica(self.axes, mesh.sizes, mesh.coordinates(rank))
        return LocalArray(
            shape=tuple(shape),
            pieces=(Piece(Box.from_shape(box.shape), box),),  # kept even if empty, because it records the local shape
            replica=replica,
            replicas=replicas,
            group=group,
            spec=self._to_stored(mesh).spec,
        )

    def map_zero1_shape(self, local_shape: Sequence[int], mesh: Mesh, rank: int, axes: tuple[str, ...]) -> LocalArray:
        """Map a rank's ZeRO-1 shard of a local tensor: its rows, zero-padded, are split over `axes`.

        Raises:
            ValueError: The shape is inconsistent with this sharding, or the tensor is already split over these axes.
        """
        full = self.map_local_shape(local_shape, mesh, rank)
        first = self.dims[0] if self.dims else None
        split = DimSharding(axes) if first is None else DimSharding((*first.axes, *axes), first.sections)
        here = Sharding((split, *self.dims[1:]))
        # Zero padding follows the last row, so the last ranks hold fewer rows of the tensor than others, or none.
        low, high = compute_chunk_bounds(
            0, local_shape[0], count_parts(axes, mesh.sizes), compute_part_index(axes, mesh, rank)
        )
        replica, replicas, group = compute_replica(here.axes, mesh.sizes, mesh.coordinates(rank))
        return replace(
            full,
            pieces=full.slice_rows(low, high),
            replica=replica,
            replicas=replicas,
            group=group,
            # The number of copies of a section depends on the ranks that split the parameter, without dp.
            spec=Sharding(
                (DimSharding(split.axes, self._to_stored_sections(first, mesh)), *self._to_stored(mesh).dims[1:])
            ).spec,
        )

    def _to_stored(self, mesh: Mesh) -> Sharding:
        """Return the sharding as stored for ranks of other meshes than `mesh`."""
        dims = tuple(s if s is None else DimSharding(s.axes, self._to_stored_sections(s, mesh)) for s in self.dims)
        return replace(self, dims=dims)

    @staticmethod
    def _to_stored_sections(split: DimSharding | None, mesh: Mesh) -> tuple[Section, ...]:
        if split is None:
            return (Section(),)
        ranks = count_parts(split.axes, mesh.sizes)
        return tuple(section.to_stored(ranks) for section in split.sections)


REPLICATED = Sharding()
"""Sharding of an array that is replicated on all ranks."""


def _parse_dim(entry: Any) -> DimSharding | None:
    match entry:
        case None:
            return None
        case str(axis):
            return DimSharding((axis,))
        case [*axes, int(stride)] if all(isinstance(a, str) for a in axes):
            return DimSharding.from_stride(tuple(axes), stride)
        case [*axes, [*sections]] if all(isinstance(a, str) for a in axes):
            return DimSharding(tuple(axes), tuple(map(parse_section, sections)))
        case [*axes] if all(isinstance(a, str) for a in axes):
            return DimSharding(tuple(axes))
    raise ValueError(f"a tensor dim is split over a mesh axis, several, or None, not {entry!r}")


def _format_dim(split: DimSharding | None) -> object:
    """Return one entry of `Sharding.spec`, in the form that `_parse_dim` reads."""
    if split is None:
        return None
    if split.has_custom_sections:
        return (*split.axes, tuple(s.spec for s in split.sections))
    if len(split.sections) > 1:
        return (*split.axes, len(split.sections))
    return split.axes[0] if len(split.axes) == 1 else split.axes


def _build_pieces(blocks: Sequence[Sequence[SectionBlock]], axes: Sequence[tuple[str, ...]]) -> tuple[Piece, ...]:
    """Return the pieces of a local tensor that holds these blocks of each dim: one per combination of blocks.

    Args:
        blocks: Blocks of each dim.
        axes: Mesh axes that split each dim.
    """
    pieces = []
    for choice in product(*blocks):
        local = Box(tuple(b.start for b in choice), tuple(b.stop for b in choice))
        start = tuple(b.global_start for b in choice)
        stop = tuple(b.global_start + b.stop - b.start for b in choice)
        box = Box(start, stop)
        if box.size:
            pieces.append(Piece(local, box, copy=_find_copy(choice, axes)))
    return tuple(pieces)


def _find_copy(choice: Sequence[SectionBlock], axes: Sequence[tuple[str, ...]]) -> PieceCopy | None:
    """Return the copy number of a piece, or None if no other rank holds its sections."""
    index, count, group = 0, 1, []
    for block, named in zip(choice, axes, strict=True):
        if block.copies > 1:
            index, count = index * block.copies + block.copy, count * block.copies
            group.append((named, block.copies, block.adjacent))
    return PieceCopy(index, count, tuple(group)) if count > 1 else None


def count_parts(axes: Iterable[str], sizes: Mapping[str, int]) -> int:
    """Return the number of parts of a dim that is split over these axes."""
    return prod(sizes[a] for a in axes)


def compute_part_index(axes: Sequence[str], mesh: Mesh, rank: int) -> int:
    """Return the index of a rank's part of a dim that is split over these axes."""
    at, sizes, index = mesh.coordinates(rank), mesh.sizes, 0
    for axis in axes:
        index = index * sizes[axis] + at[axis]
    return index


def compute_replica(axes: Sequence[str], sizes: dict[str, int], at: dict[str, int]) -> tuple[int, int, object]:
    """Return (replica, replicas, identifier of the group of holders) of a rank, for an array that these axes split."""
    split = _expand_dp_axis(axes)
    others = [a for a in REPLICATED_AXES if a not in split]
    replica = 0
    for axis in others:
        replica = replica * sizes[axis] + at[axis]
    return replica, count_parts(others, sizes), ("mesh", tuple(others))


def find_group_axes(group: Sequence[int], mesh: Mesh, rank: int) -> tuple[str, ...] | None:
    """Return the mesh axes that span exactly the ranks of a group, in its order, or None if there are no such axes.

    >>> find_group_axes([1, 3], Mesh(dp=2, tp=2), 1)
    ('dp',)
    """
    here = mesh.coordinates(rank)
    for axes in (("dp",), ("dp", "cp"), ("edp",), ("edp", "cp"), ("cp",), ("tp",), ("dp", "cp", "tp"), ("dp", "tp")):
        along = _expand_dp_axis(axes)
        others = [a for a in ("pp", "edp", "ep", "cp", "tp") if a not in along]
        alike = all(mesh.coordinates(r)[a] == here[a] for r in group for a in others)
        if alike and [compute_part_index(axes, mesh, r) for r in group] == list(range(count_parts(axes, mesh.sizes))):
            return axes
    return None


def _expand_dp_axis(axes: Iterable[str]) -> frozenset[str]:
    """Return the axes with ``dp`` replaced by ``edp`` and ``ep``."""
    return frozenset(single for axis in axes for single in (("edp", "ep") if axis == "dp" else (axis,)))


ShardingRules = Sequence[tuple[str, Any]]
"""Pairs of (regex, spec). The first regex that matches a part of a leaf's path or name applies."""

ParsedRules = Sequence[tuple[re.Pattern[str], Sharding]]


def parse_rules(rules: ShardingRules | None) -> ParsedRules:
    """Parse a caller's sharding rules.

    Raises:
        UsageError: A rule is malformed.
    """
    if isinstance(rules, Mapping):
        raise UsageError(
            "rules of shardings are a list, of which the first that fits decides",
            found="a dict",
            hint="Write [(regular expression, spec), ...]; of this dict list(shardings.items()) makes one.",
        )
    parsed = []
    for rule in rules or ():
        try:
            pattern, spec = rule
            parsed.append((re.compile(pattern), Sharding.parse(spec)))
        except (ValueError, TypeError, re.error) as error:
            raise UsageError(
                f"a rule of shardings makes no sense: {error}",
                found=repr(rule),
                hint="Write a regular expression and a spec, as in shardings=[(r'\\.up_proj', ('tp', None))] "
                "(--sharding '\\.up_proj' tp,_).",
            ) from error
    return tuple(parsed)


def find_unused_rules(rules: ParsedRules, leaves: Iterable[str]) -> list[str]:
    """Return a message for each rule that matches no leaf: a typing error, or a rule for another pipeline stage."""
    leaf_paths = list(leaves)
    return [
        f"no leaf path has a part that the sharding rule ({rule[0].pattern!r}, {rule[1].spec}) fits"
        for rule in rules
        if all(find_sharding([rule], path, path.partition("/")[2]) is None for path in leaf_paths)
    ]


def find_sharding(rules: ParsedRules, *names: str) -> Sharding | None:
    """Return the sharding of the first rule that matches one of an array's names, or None if no rule matches."""
    rule = find_rule(rules, *names)
    return None if rule is None else rule[1]


def find_rule(rules: ParsedRules, *names: str) -> tuple[re.Pattern[str], Sharding] | None:
    """Return the first rule that matches one of an array's names, or None if no rule matches."""
    return next((rule for rule in rules if any(rule[0].search(name) for name in names)), None)
