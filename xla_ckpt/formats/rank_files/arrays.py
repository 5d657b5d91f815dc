"""Assemble global arrays from the tensors of all ranks, and compare tensors that should be replicas.

If nothing records that tensors of one name are replicas, they are compared first. Tensors that differ are shards, or
replicas that have diverged: a job over the same ranks then loads each rank's own, and any other job gets an
`UnreadableArray`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from xla_ckpt.core.manifest.arrays import ArrayRecord, Shard, create_array_record
from xla_ckpt.core.manifest.manifest import UnreadableArray
from xla_ckpt.core.plan.hints import LoadHints
from xla_ckpt.core.sharding.box import Box
from xla_ckpt.core.sharding.local_array import LocalArray, Piece
from xla_ckpt.core.sharding.mesh import Mesh
from xla_ckpt.core.sharding.sharding import Sharding
from xla_ckpt.errors import CorruptCheckpointError, FormatError, IncompatibleCheckpointError
from xla_ckpt.formats.rank_files.file_names import RankCoords, format_names
from xla_ckpt.formats.rank_files.files import RankFiles
from xla_ckpt.formats.rank_files.layout import StoredTensor
from xla_ckpt.formats.rank_files.split_inference import REPLICATED_RULE, SHARDING_HINT, list_replica_orders
from xla_ckpt.formats.torch_save.stored_tensors import list_piece_shards

TensorCopies = Mapping[tuple[int, int, int], StoredTensor]
"""Tensors by the coordinates (dp, ep, tp) of their ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredArray:
    """Tensors of one array, as stored by the ranks."""

    leaf: str
    copies: TensorCopies
    mesh: Mesh
    local_shape: tuple[int, ...]
    """Shape on each rank: the shape of the tensors, or of all rows together if ZeRO-1 sharded the rows."""

    row_axes: tuple[str, ...] = ()
    """Mesh axes over which ZeRO-1 sharded the rows of the local tensors."""

    per_dp_files: bool = False
    """True if each dp rank has its own file, as with ZeRO-1."""

    def get_rank(self, at: tuple[int, int, int], *, per_dp: bool) -> int:
        """Return the rank that stored the tensor at these coordinates. `per_dp`: distinguish dp ranks."""
        dp, ep, tp = at
        # Without ZeRO-1 the mesh has as many dp ranks as ep ranks (see `RankStateBuilder.mesh`), and files number the
        # ep ranks.
        return self.mesh.rank({"dp": dp if per_dp or self.mesh.ep == 1 else ep, "tp": tp})


_TensorPiece = tuple[StoredTensor, Piece]


@dataclass(frozen=True, slots=True)
class AssembledArray:
    """An array assembled from the tensors of all ranks."""

    record: ArrayRecord
    sources: Mapping[Box, _TensorPiece]
    """Part of a stored tensor that each box is read from."""

    duplicates: Sequence[tuple[_TensorPiece, _TensorPiece]]
    """Pairs of such a part and another copy of it, in sections that are replicated on several ranks."""

    def find_mismatch(self, files: RankFiles) -> tuple[_TensorPiece, _TensorPiece] | None:
        """Return the first pair of copies that differ; None if all are equal."""
        return next(((a, b) for a, b in self.duplicates if not files.is_same_part(*a, *b)), None)

    def is_same_as(self, other: AssembledArray, files: RankFiles) -> bool:
        """Return True if another assembly of the same tensors contains the same bytes in each box."""
        one, two = self.sources, other.sources
        return one.keys() == two.keys() and all(files.is_same_part(*one[box], *two[box]) for box in one)


def assemble_replicated(files: RankFiles, array: StoredArray, sharding: Sharding) -> ArrayRecord | UnreadableArray:
    """Assemble an array with sections that are replicated on several ranks, and compare the replicas.

    Arguments and errors are the same as in `assemble_array`.

    Returns:
        The record; an `UnreadableArray` if replicas differ, or if their order is ambiguous.
    """
    different = ""
    fitting: list[AssembledArray] = []
    for reading in list_replica_orders(sharding, array.mesh):
        candidate = assemble_array(files, array, reading)
        pair = candidate.find_mismatch(files)
        if pair is None:
            fitting.append(candidate)
            continue
        ((one, piece), (other, _)) = pair
        different = different or f"rows {piece.global_box} differ between {one.file} and {other.file}"
    # Heads that are equal in pairs fit both orders, which is harmless if both give the same array (zeros, for example).
    if len(fitting) == 2 and not fitting[0].is_same_as(fitting[1], files):
        return UnreadableArray(
            problem="keys and values are equal on several ranks in two ways, which give different arrays",
            expected="copies on neighbouring ranks, or repeated as a whole",
            found="both fit",
            hint="Say which by a rule: (('tp', [4096, '1024x4', '1024x4']), None), or '1024x4 adjacent' for "
            "copies on neighbouring ranks.",
        )
    if fitting:
        return fitting[0].record
    return UnreadableArray(
        problem="ranks that should hold the same keys and values hold different ones",
        expected=f"copies as in {sharding.spec}",
        found=different,
        hint="A rule with these sections takes the first copies. The copies may have drifted apart, or the keys may "
        "have been repeated in an order that is neither of the two: as a whole, or on neighbouring ranks.",
    )


def assemble_array(files: RankFiles, array: StoredArray, sharding: Sharding) -> AssembledArray:
    """Assemble an array from the tensors of all ranks. If several tensors cover the same box, the first is used.

    Raises:
        CorruptCheckpointError: Tensors are missing, or do not fit together.
        IncompatibleCheckpointError: The sharding does not fit the tensors.
    """
    first = next(iter(array.copies.values()))
    shards: dict[Box, Shard] = {}
    firsts: dict[Box, _TensorPiece] = {}
    twice: list[tuple[_TensorPiece, _TensorPiece]] = []
    shape: tuple[int, ...] = first.shape
    spec: object = None
    for at, tensor in sorted(array.copies.items()):
        if (tensor.shape, tensor.dtype) != (first.shape, first.dtype):
            raise CorruptCheckpointError(
                "the ranks have tensors that do not fit together",
                leaf=array.leaf,
                file=tensor.file,
                expected=f"{first.dtype.name} {list(first.shape)}",
                found=f"{tensor.dtype.name} {list(tensor.shape)}",
            )
        place = _place_in_array(array, sharding, tensor, array.get_rank(at, per_dp=bool(array.row_axes)))
        shape, spec = place.shape, place.spec
        for piece in place.pieces:
            if piece.global_box.size and piece.global_box not in shards:
                shards[piece.global_box], firsts[piece.global_box] = _make_shard(files, tensor, piece), (tensor, piece)
            elif piece.copy is not None:
                twice.append((firsts[piece.global_box], (tensor, piece)))
    try:
        return AssembledArray(create_array_record(first.dtype, shape, [*shards.values()], spec), firsts, twice)
    except FormatError as error:
        raise CorruptCheckpointError(
            f"the rank files together do not hold this array exactly once: {error.problem}",
            leaf=array.leaf,
            expected=error.expected,
            found=error.found,
            hint="Check the sharding that applies to it.",
        ) from error


def check_zero1_rows(array: StoredArray, ranks: int, hint: str) -> None:
    """Check that the rows of all ZeRO-1 ranks, with padding, add up to a whole tensor.

    They do not if ranks overwrote each other's files. `hint` gives a possible reason and a remedy.

    Raises:
        CorruptCheckpointError: Rows are missing, or shapes do not fit the number of files.
    """
    total, *others = array.local_shape
    expected = (-(-total // ranks), *others)
    for (dp, _, tp), tensor in array.copies.items():
        if tensor.shape == expected:
            continue
        count = tensor.shape[0] * ranks if tensor.shape else 0
        if list(tensor.shape[1:]) == others and 0 < count < total:
            raise CorruptCheckpointError(
                f"the {ranks} ZeRO-1 shards hold only {count} of {total} rows: the others are missing",
                leaf=array.leaf,
                file=tensor.file,
                expected=f"{list(expected)} in each",
                found=str(list(tensor.shape)),
                hint=hint,
            )
        raise CorruptCheckpointError(
            "the ZeRO-1 shards do not fit to the number of rank files along dp",
            leaf=array.leaf,
            file=tensor.file,
            expected=f"{list(expected)} in each",
            found=f"{list(tensor.shape)} at dp {dp}, tp {tp}",
            hint="Files of an earlier save with another dp size may be left in the directory.",
        )


def _place_in_array(array: StoredArray, sharding: Sharding, tensor: StoredTensor, rank: int) -> LocalArray:
    """Compute the position of one rank's tensor in the global array.

    Raises:
        IncompatibleCheckpointError: The sharding does not fit the tensor.
    """
    try:
        return _compute_local_array(
            sharding, array.local_shape if array.row_axes else tensor.shape, array.mesh, rank, array.row_axes
        )
    except ValueError as error:
        raise IncompatibleCheckpointError(
            f"the sharding {sharding.spec} does not fit to what is stored: {error}",
            leaf=array.leaf,
            found=f"{list(array.local_shape if array.row_axes else tensor.shape)} on each rank of {array.mesh}",
            hint="Correct the rule of shardings= (--sharding), the attributes of the parameter, or the config.json it "
            "comes from; docs/parallelism.md has rules for fused arrays and for experts.",
        ) from error


@lru_cache(maxsize=1 << 14)
def _compute_local_array(
    sharding: Sharding, local: tuple[int, ...], mesh: Mesh, rank: int, rows: tuple[str, ...]
) -> LocalArray:
    """Compute the position of a rank's tensor. Cached because layers and optimizer states repeat the same arguments."""
    return sharding.map_zero1_shape(local, mesh, rank, rows) if rows else sharding.map_local_shape(local, mesh, rank)


def _make_shard(files: RankFiles, tensor: StoredTensor, piece: Piece) -> Shard:
    """Return the shard for a piece of a stored tensor."""
    at = files.locate(tensor)
    (shard,) = list_piece_shards(at, piece, files.get_file_number(at.file))  # tensors of rank files are in C order
    return shard


def add_stored_shape(unknown: UnreadableArray, copies: TensorCopies) -> UnreadableArray:
    """Return an unreadable array with the dtype, shape and number of the stored tensors."""
    first = next(iter(copies.values()))
    # Ranks may refer to the same file: state shared by all expert-parallel ranks is stored with the first of them.
    places = {(tensor.file, None if tensor.location is None else tensor.location.offset) for tensor in copies.values()}
    return replace(unknown, dtype=first.dtype, shape=first.shape, tensor_count=len(places))


_SPLIT_AXES = ("ep", "tp")
"""Mesh axes over which an array of one name may be sharded without a record of it on disk."""


def choose_copies(
    files: RankFiles, array: StoredArray, split_axes: Sequence[str], hints: LoadHints, *, per_rank: bool
) -> tuple[TensorCopies, bool] | UnreadableArray:
    """Choose the copies from which an array is read.

    Copies that differ are parts of an array, or replicas that have diverged. In a job over the same tp and ep ranks,
    each rank loads its own in either case, like the program that wrote them. For any other job the array is unreadable.

    Args:
        split_axes: Mesh axes over which it is sharded. Along all other axes the copies must be equal.
        hints: Information from the targets of the load.
        per_rank: True if each rank loads its own tensor, with the shape that one rank stored.

    Returns:
        The copies, and True if they belong only to the rank that loads; an `UnreadableArray` if copies differ
        otherwise.

    Raises:
        CorruptCheckpointError: A file is missing, or contains another tensor.
    """
    copies, mesh = array.copies, array.mesh
    at = _get_coordinates(array)
    pairs = _find_differing_pairs(files, copies, at, split_axes)
    if not pairs:
        return copies, False
    if per_rank and (hints.mesh.tp, hints.mesh.ep) == (mesh.tp, mesh.ep):
        coordinates = hints.mesh.coordinates(hints.rank)
        # Along an axis that shards the array, the parts of all ranks are needed; dp consists of ep and edp.
        own = [axis for axis in _SPLIT_AXES if axis not in split_axes and not (axis == "ep" and "dp" in split_axes)]
        return {key: tensor for key, tensor in copies.items() if all(at[key][a] == coordinates[a] for a in own)}, True
    named = [axis for axis in ("dp", *_SPLIT_AXES) if mesh.sizes[axis] > 1 and (axis != "dp" or array.per_dp_files)]
    called = {key: f"({', '.join(f'{axis} {at[key][axis]}' for axis in named)})" for key in copies}
    shape = list(copies[pairs[0][1]].shape)
    return UnreadableArray(
        problem="the ranks hold different tensors of this name, and nothing says how the array was split over them",
        expected="equal ones on all ranks, or a sharding",
        found=f"{shape} on each rank; {format_names([f'{called[b]} differs from {called[a]}' for a, b in pairs])}",
        hint=f"{SHARDING_HINT} A job of tp={mesh.tp}, ep={mesh.ep} whose ranks have tensors of this shape loads each "
        f"rank's own. Copies that have drifted apart need {REPLICATED_RULE}: it takes the first rank's.",
    )


def has_differing_copies(files: RankFiles, array: StoredArray, split_axes: Sequence[str]) -> bool:
    """Return True if copies of one part differ. The arguments are the same as in `choose_copies`.

    Raises:
        CorruptCheckpointError: A file is missing, or contains another tensor.
    """
    return bool(_find_differing_pairs(files, array.copies, _get_coordinates(array), split_axes))


def _get_coordinates(array: StoredArray) -> dict[_CopyKey, dict[str, int]]:
    """Return the mesh coordinates of the rank that stored each copy."""
    return {key: array.mesh.coordinates(array.get_rank(key, per_dp=array.per_dp_files)) for key in array.copies}


_CopyKey = tuple[int, int, int]
"""Coordinates (dp, ep, tp) of a copy."""


def _find_differing_pairs(
    files: RankFiles, copies: TensorCopies, coordinates: Mapping[_CopyKey, Mapping[str, int]], split_axes: Sequence[str]
) -> list[tuple[_CopyKey, _CopyKey]]:
    """Return pairs of copies of one part whose bytes differ: the first copy of the part, and the other one.

    Copies of different shapes or dtypes are skipped here, because `assemble_array` raises an error for them.
    """
    first: dict[tuple[int, ...], _CopyKey] = {}
    pairs = []
    for key in sorted(copies):
        part = tuple(coordinates[key][axis] for axis in split_axes)
        one = first.setdefault(part, key)
        if one == key or (copies[one].shape, copies[one].dtype) != (copies[key].shape, copies[key].dtype):
            continue
        if not files.is_same(copies[one], copies[key]):
            pairs.append((one, key))
    return pairs


_MISSING = object()
"""Placeholder for a member that a rank does not have."""


def merge_common_value(files: RankFiles, by_rank: Mapping[RankCoords, Any], key: Any) -> Any:
    """Return the value that all ranks have under a key, with an `UnreadableArray` for each part that differs.

    It is used for values that are not parameter tensors and therefore not parts of a larger array: plain values, and
    containers with tensors in them. Without the comparison, every rank would silently get the first rank's values.

    Raises:
        CorruptCheckpointError: A file is missing, or contains another tensor.
    """
    return _merge_common(files, {at: members.get(key, _MISSING) for at, members in by_rank.items()})


def _merge_common(files: RankFiles, values: Mapping[RankCoords, Any]) -> Any:
    one = min(values)
    first = values[one]
    others = [at for at in values if not _is_same_value(files, first, values[at])]
    if others:
        return _describe_difference(one, sorted(others), list(values))
    if isinstance(first, Mapping):
        return {k: _merge_common(files, {at: value[k] for at, value in values.items()}) for k in first}
    if type(first) in (list, tuple):
        return type(first)(_merge_common(files, {at: v[i] for at, v in values.items()}) for i in range(len(first)))
    return first


def _is_same_value(files: RankFiles, one: Any, other: Any) -> bool:
    """Return True if two values are equal; for two containers, if they have the same keys or length."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, StoredTensor):
        return files.is_same(one, other)
    if isinstance(one, Mapping):
        return bool(one.keys() == other.keys())
    if type(one) in (list, tuple):
        return len(one) == len(other)
    return bool(one == other) or (one != one and other != other)  # NaN is not equal to itself


def _describe_difference(one: RankCoords, others: Sequence[RankCoords], ranks: Sequence[RankCoords]) -> UnreadableArray:
    axes = [axis for axis in ("dp", *_SPLIT_AXES) if len({getattr(at, axis) for at in ranks}) > 1]

    def called(at: RankCoords) -> str:
        return f"({', '.join(f'{axis} {getattr(at, axis)}' for axis in axes)})"

    return UnreadableArray(
        problem="the ranks hold different values in this place, and nothing says which of them is meant",
        expected="the same on all ranks",
        found=format_names([f"{called(other)} differs from {called(one)}" for other in others]),
        hint="Load what does not need it: the model without the optimizer, or parts of the tag by xla_ckpt.restore.",
    )
