"""The contents of a checkpoint: its arrays, values and files, and samples of array values.

Contents come from the manifest, or from the headers of another library's files. A sample reads an array, or some
pieces of a large one, and computes statistics and a histogram. Reading tags of this library needs neither torch nor
orbax.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np

from xla_ckpt.conversion.source import ProgramInfo, open_source
from xla_ckpt.core.dtypes import DType, to_numpy_dtype
from xla_ckpt.core.manifest.arrays import ArrayRecord
from xla_ckpt.core.manifest.manifest import Manifest, UnreadableArray
from xla_ckpt.core.plan.restore_plan import ReadRequest, plan_restore
from xla_ckpt.core.plan.stored_sharding import compute_local_array, get_stored_sharding
from xla_ckpt.core.sharding.box import Box
from xla_ckpt.core.sharding.memory_layout import split_by_span
from xla_ckpt.core.sharding.mesh import Mesh
from xla_ckpt.core.tree import path as paths
from xla_ckpt.core.tree import schema
from xla_ckpt.core.tree.skeleton import is_array, is_object, iterate_leaf_parts
from xla_ckpt.errors import IncompatibleCheckpointError, UsageError, wrap_os_errors
from xla_ckpt.features.parity.parity import get_parity_status
from xla_ckpt.formats.registry import find_layout
from xla_ckpt.formats.tags import find_foreign_tag
from xla_ckpt.inspection.tags import StoredFile, describe_note, list_stored_files, to_plain_json
from xla_ckpt.keywords import suggest_leaf
from xla_ckpt.loading.read import read_into
from xla_ckpt.loading.tag_reader import TagReader
from xla_ckpt.progress import IoContext
from xla_ckpt.storage.base import Store
from xla_ckpt.tags.resolve import open_root


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredArray:
    """Array in a tag."""

    leaf: str
    dtype: str
    shape: tuple[int, ...]
    """Global shape, over all ranks."""

    nbytes: int
    shards: int
    """Number of stored shards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPart:
    """Part of the state, with its arrays; each byte is counted once if that is known."""

    part: str
    arrays: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UnresolvedArray:
    """Array of another library's tag whose sharding over the ranks is unknown."""

    leaf: str
    dtype: str | None
    rank_shape: tuple[int, ...] | None
    """Shape of each rank's stored tensor."""

    tensors: int
    """Number of stored tensors, including copies."""

    nbytes: int
    expected: str | None
    found: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnresolvedArrays:
    """Arrays whose sharding is unknown, with the same problem and hint."""

    problem: str
    hint: str | None
    arrays: tuple[UnresolvedArray, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TagContents:
    """Contents of a tag. Leaves are identified by their leaf paths, such as ``"model/layers.0.weight"``."""

    path: str
    """Root directory."""

    tag: str
    sequence: int
    """Sequence number of its commit; 0 if another library wrote it."""

    created: str | None
    """Time of its commit, in ISO 8601 format."""

    pinned: bool
    parity: str | None
    """Parity of the tag: ``"block"``, ``"file"`` or None; or ``"damaged"`` or ``"lost"`` (docs/repair.md)."""

    note: str
    """Further remarks, for example that the tag contains only adapters."""

    version: int
    """Format version of its manifest."""

    mesh: str | None
    ranks: int
    """Number of ranks that saved it."""

    nbytes: int
    """Bytes of the arrays, each counted once; for a tag without an index, bytes of its files."""

    arrays: tuple[StoredArray, ...]
    """Arrays, each with `leaf`, `dtype`, `shape`, `nbytes` and `shards`."""

    parts: tuple[StoredPart, ...]
    """Parts of the state, each with `part`, `arrays` and `nbytes`."""

    unknown: tuple[UnresolvedArrays, ...]
    """Arrays that cannot be read, by reason (`problem`, `hint`)."""

    layout: str
    """Name of the layout, or of the library that wrote it."""

    splits: Mapping[str, tuple[object, ...]] = field(repr=False)
    """Leaf -> sharding spec of the array over the mesh of the save, as in sharding rules; only for sharded arrays."""

    divergent: tuple[str, ...]
    """Arrays that were stored from diverged replicas."""

    aliases: Mapping[str, str]
    """Leaf -> leaf of the stored array with which it shares its memory."""

    values: Mapping[str, Any] = field(repr=False)
    """Plain values, by leaf. Not part of the `repr`, because the state of one generator has 625 numbers."""

    files: tuple[StoredFile, ...]
    """Files, each with `path` and `size`."""

    def to_json(self) -> dict[str, Any]:
        """Return the contents as plain JSON, without copies of the arrays, files and plain values.

        `asdict` would copy each of them, 8 us for each array and file; and plain values may be nested deeply.
        """
        answer = asdict(replace(self, arrays=(), files=(), values={}))
        arrays, files = map(to_plain_json, self.arrays), map(to_plain_json, self.files)
        return {**answer, "arrays": list(arrays), "files": list(files), "values": self.values}

    def _repr_html_(self) -> str:
        from xla_ckpt.rendering import html, reports

        return html.render_html(reports.render_tag(self.to_json()))


def read_contents(store: Store, tag: str, program: ProgramInfo, pattern: str | None = None) -> TagContents:
    """Read the contents of a tag from its manifest.

    Args:
        store: Root directory.
        tag: Name of the tag.
        program: Information of the caller about the tag.
        pattern: Only leaves at or below this path, or that match this glob pattern; None for all.

    Raises:
        NoCheckpointError: The tag does not exist.
        UsageError: No leaf matches the pattern.
        CheckpointError: The tag is damaged, or the caller's information contradicts it.
    """
    with open_source(store, tag, program, as_stored=True) as reader:
        manifest, survives = reader.manifest, get_parity_status(reader.directory, reader.manifest)
    foreign = find_foreign_tag(store, tag)
    named = dict(iterate_leaf_parts(manifest.skeleton))
    values = {leaf: _display_value(part, reader) for leaf, part in named.items() if not is_array(part)}
    leaves = [*manifest.arrays, *manifest.unreadable, *manifest.aliases, *values]
    if not any(paths.is_match(leaf, pattern) for leaf in leaves):
        hint = f"Leaves begin with: {paths.format_top_parts(leaves)}."
        problem = f"no leaf is like this{suggest_leaf(pattern or '', leaves)}"
        raise UsageError(problem, path=store.path, tag=tag, found=pattern, hint=hint)
    head, entry = manifest.header, foreign[1] if foreign is not None else open_root(store).get_entry(tag)
    # The manifest groups arrays by form; the result is in the order of the state.
    in_order = [leaf for leaf in dict.fromkeys([*named, *manifest.arrays]) if leaf in manifest.arrays]
    arrays = {leaf: manifest.arrays[leaf] for leaf in in_order if paths.is_match(leaf, pattern)}
    unknown = {leaf: array for leaf, array in manifest.unreadable.items() if paths.is_match(leaf, pattern)}
    if foreign is None:
        files = tuple(StoredFile(path=file.path, size=file.size) for file in manifest.files)
    else:
        files = list_stored_files(store, foreign[1])
    return TagContents(
        path=store.path,
        tag=tag,
        sequence=head.sequence if foreign is None else 0,
        created=head.created,
        pinned=head.pinned if entry is None else entry.pinned,
        parity=survives,
        note=describe_note(manifest),
        version=head.version,
        mesh=manifest.mesh,
        ranks=manifest.world_size,
        # The bytes of all arrays are unknown without an index, so the sizes of the files are summed.
        nbytes=manifest.nbytes if foreign is None else sum(file.size for file in files),
        arrays=tuple(
            StoredArray(
                leaf=leaf,
                dtype=record.dtype.name,
                shape=record.shape,
                nbytes=record.nbytes,
                shards=record.metadata.shard_count,
            )
            for leaf, record in arrays.items()
        ),
        parts=_sum_parts([*arrays.items(), *unknown.items()]),
        unknown=tuple(map(_describe_unresolved, UnreadableArray.group_by_reason(unknown))),
        layout=find_layout(manifest).name if foreign is None else foreign[0].origin or foreign[0].name,
        splits={leaf: record.spec for leaf, record in arrays.items() if record.spec is not None and any(record.spec)},
        divergent=tuple(leaf for leaf, record in arrays.items() if record.is_divergent),
        aliases={alias: leaf for alias, leaf in manifest.aliases.items() if paths.is_match(alias, pattern)},
        values={leaf: value for leaf, value in values.items() if paths.is_match(leaf, pattern)},
        files=files,
    )


def _display_value(value: Any, reader: TagReader) -> Any:
    """Return a plain value, or a description of an object that another library pickled."""
    if reader.foreign_objects is None or not is_object(value):
        return value
    return {"$object": f"a pickled {reader.foreign_objects[value['$object']].kind}"}


def _sum_parts(arrays: Sequence[tuple[str, ArrayRecord | UnreadableArray]]) -> tuple[StoredPart, ...]:
    """Sum the number and bytes of the arrays of each part of the state, in the order of a training state."""
    sums: dict[str, tuple[int, int]] = {}
    for leaf, array in sorted(arrays, key=lambda pair: _rank_member(pair[0])):
        if isinstance(array, ArrayRecord) or array.tensor_count:
            number, nbytes = sums.get(part := leaf.split("/")[0], (0, 0))
            sums[part] = number + 1, nbytes + array.nbytes
    return tuple(StoredPart(part=part, arrays=number, nbytes=nbytes) for part, (number, nbytes) in sums.items())


def _rank_member(leaf: str) -> int:
    """Return the position of a leaf's part in a training state."""
    part = leaf.split("/", maxsplit=1)[0]
    return schema.MEMBERS.index(part) if part in schema.MEMBERS else len(schema.MEMBERS)


def _describe_unresolved(group: Mapping[str, UnreadableArray]) -> UnresolvedArrays:
    """Describe arrays whose sharding is unknown for the same reason.

    The hint contains a rule for a replicated array as an example: an array with the fewest dims, such as the weight of
    a norm, is likely replicated.
    """
    example, first = min(group.items(), key=lambda item: len(item[1].shape or ()))
    arrays = tuple(
        UnresolvedArray(
            leaf=leaf,
            dtype=None if array.dtype is None else array.dtype.name,
            rank_shape=array.shape,
            tensors=array.tensor_count,
            nbytes=array.nbytes,
            expected=array.expected,
            found=array.found,
        )
        for leaf, array in group.items()
    )
    return UnresolvedArrays(problem=first.problem, hint=first.format_hint(example), arrays=arrays)


MAX_VALUE_BYTES = 64 << 20
"""Maximum number of bytes of an array that are read for its statistics."""

SAMPLE_PIECES = 16
"""Number of evenly spaced pieces that are read of a larger array."""

MAX_LISTED_PARTS = 256
"""Maximum number of parts of an array that are listed."""

MAX_CHECKED_RANKS = 1024
"""Maximum number of ranks of a mesh for which the parts are computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayPart:
    """Stored part of an array."""

    start: tuple[int, ...]
    stop: tuple[int, ...]
    file: str
    """Path of the file relative to the tag."""

    ranks: tuple[int, ...]
    """Ranks of the first pipeline stage that had the part during the save, as far as the tag records them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArraySample:
    """Result of `Checkpoints.sample`."""

    path: str
    tag: str
    leaf: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    mesh: str | None
    """Mesh of the job that saved it."""

    split: tuple[object, ...] | None
    """Sharding spec over the mesh, as in sharding rules; None if it is unknown."""

    shards: int
    """Number of stored parts."""

    parts: tuple[ArrayPart, ...]
    """Stored parts, at most the first 256."""

    values: Statistics | None
    """Statistics of the values that were read; None if two values are packed into a byte."""

    @property
    def whole(self) -> bool:
        """True if all of its values were read."""
        return self.values is not None and self.values.elements == Box.from_shape(self.shape).size

    def to_json(self) -> dict[str, Any]:
        """Return the sample as plain JSON."""
        return {**asdict(self), "whole": self.whole}


def sample_array(store: Store, tag: str, leaf: str, program: ProgramInfo, max_bytes: int) -> ArraySample:
    """Return the stored parts of an array and statistics of its values, or of evenly spaced pieces if it is large.

    Raises:
        IncompatibleCheckpointError: The array does not exist, or its sharding is unknown.
        CheckpointError: The tag is damaged.
    """
    with (
        open_source(store, tag, program, part=leaf) as reader,
        wrap_os_errors("reading an array", path=store.path, tag=tag),
    ):
        record = reader.manifest.find_array(leaf)
        if record is None:
            problem = f"there is no such array{suggest_leaf(leaf, list(reader.manifest.arrays))}"
            hint = f"Leaf paths of its arrays begin with: {paths.format_top_parts(reader.manifest.arrays)}."
            raise IncompatibleCheckpointError(problem, path=store.path, tag=tag, leaf=leaf, hint=hint)
        return ArraySample(
            path=store.path,
            tag=tag,
            leaf=leaf,
            dtype=record.dtype.name,
            shape=record.shape,
            nbytes=record.nbytes,
            mesh=reader.manifest.mesh,
            split=record.spec,
            shards=record.metadata.shard_count,
            parts=_list_parts(reader.manifest, leaf, record),
            values=_sample_values(reader, leaf, record, max_bytes),
        )


def _sample_values(reader: TagReader, leaf: str, record: ArrayRecord, max_bytes: int) -> Statistics | None:
    whole, itemsize = Box.from_shape(record.shape), record.dtype.itemsize
    boxes = list(split_by_span(whole, whole, itemsize, max(max_bytes // SAMPLE_PIECES, 1)))
    if record.nbytes > max_bytes:
        boxes = [boxes[i * len(boxes) // SAMPLE_PIECES] for i in range(SAMPLE_PIECES)]
    slots = [memoryview(bytearray(box.size * itemsize)) for box in boxes]
    wants = [ReadRequest(leaf, box, number) for number, box in enumerate(boxes)]
    read_into(reader, plan_restore(reader.manifest, wants), slots, IoContext())
    return compute_statistics(slots, record.dtype)


def _list_parts(manifest: Manifest, leaf: str, record: ArrayRecord) -> tuple[ArrayPart, ...]:
    boxes_by_rank = _compute_rank_boxes(manifest.mesh, leaf, record)
    return tuple(
        ArrayPart(
            start=shard.box.start,
            stop=shard.box.stop,
            file=manifest.files[shard.file].path,
            ranks=tuple(
                rank for rank, boxes in boxes_by_rank.items() if any(shard.box.intersect(box) for box in boxes)
            ),
        )
        for shard in islice(record, MAX_LISTED_PARTS)
    )


def _compute_rank_boxes(text: str | None, leaf: str, record: ArrayRecord) -> Mapping[int, tuple[Box, ...]]:
    """Map each rank of the first pipeline stage to its boxes of an array. Empty if no sharding is recorded."""
    try:
        mesh = Mesh.parse(text or "")
        if text is None or record.spec is None or mesh.size // mesh.pp > MAX_CHECKED_RANKS:
            return {}
        sharding = get_stored_sharding(record)
        return {
            rank: compute_local_array(leaf, sharding, record.shape, mesh, rank).boxes
            for rank in range(mesh.size // mesh.pp)
        }
    except ValueError:
        return {}  # the spec is informative, and a spec of another library may be impossible on a `Mesh`


HISTOGRAM_BINS = 40
"""Number of bins of a histogram."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Statistics of values. NaNs and infinities are only counted; of complex values the magnitude is used."""

    elements: int = 0
    nans: int = 0
    infinities: int = 0
    zeros: int = 0
    low: float = 0.0
    """Smallest finite value."""

    high: float = 0.0
    """Largest finite value."""

    mean: float = 0.0
    deviation: float = 0.0
    """Standard deviation."""

    norm: float = 0.0
    """L2 norm of the finite values."""

    counts: tuple[int, ...] = ()
    """Number of finite values in each of `HISTOGRAM_BINS` equal intervals between `low` and `high`."""


def compute_statistics(pieces: Sequence[memoryview], dtype: DType) -> Statistics | None:
    """Compute statistics of the values in some buffers, each of which is read twice; None if the values are packed.

    >>> import numpy as np
    >>> values = np.array([0, 1, 3, np.nan], np.float32)
    >>> some = compute_statistics([memoryview(values).cast("B")], DType("float32", 4, "F32"))
    >>> some.elements, some.nans, some.zeros, some.high, some.counts[0], some.counts[-1]
    (4, 1, 1, 3.0, 1, 1)
    """
    if dtype.packed:
        return None
    kind = to_numpy_dtype(dtype)
    elements = nans = infinities = zeros = count = 0
    low, high, total, squares = math.inf, -math.inf, 0.0, 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for piece in pieces:
            values = _to_floats(piece, kind)
            finite = values[np.isfinite(values)]
            elements, count = elements + values.size, count + finite.size
            nans += int(np.isnan(values).sum())
            infinities += int(np.isinf(values).sum())
            zeros += int((finite == 0).sum())
            if finite.size:
                low, high = min(low, float(finite.min())), max(high, float(finite.max()))
                total, squares = total + float(finite.sum()), squares + float(np.square(finite).sum())
    if not count:
        return Statistics(elements=elements, nans=nans, infinities=infinities)
    counts = np.zeros(HISTOGRAM_BINS, np.int64)
    for piece in pieces:
        values = _to_floats(piece, kind)
        finite = values[np.isfinite(values)]
        # Halved, because the difference of two finite values may be infinite.
        width = high / 2 - low / 2
        places = (finite / 2 - low / 2) / width * HISTOGRAM_BINS if width > 0 else np.zeros(finite.size)
        counts += np.bincount(np.clip(places.astype(np.int64), 0, HISTOGRAM_BINS - 1), minlength=HISTOGRAM_BINS)
    mean = total / count
    spread = squares / count - mean * mean
    return Statistics(
        elements=elements,
        nans=nans,
        infinities=infinities,
        zeros=zeros,
        low=low,
        high=high,
        mean=mean,
        deviation=math.sqrt(spread) if spread > 0 else 0.0,
        norm=math.sqrt(squares) if squares >= 0 else math.inf,
        counts=tuple(counts.tolist()),
    )


def _to_floats(piece: memoryview, kind: np.dtype[Any]) -> np.ndarray[Any, np.dtype[np.float64]]:
    values = np.frombuffer(piece, kind)
    return np.abs(values).astype(np.float64) if kind.kind == "c" else values.astype(np.float64)
