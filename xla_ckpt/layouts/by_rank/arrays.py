"""From the tensors of rank files to one array: where each of its parts lies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from xla_ckpt.errors import CorruptCheckpointError, FormatError, IncompatibleCheckpointError
from xla_ckpt.layouts.by_rank.files import RankFiles
from xla_ckpt.layouts.by_rank.form import StoredTensor
from xla_ckpt.layouts.by_rank.splits import readings
from xla_ckpt.layouts.torch_save.strided import shards_of_piece
from xla_ckpt.manifest.arrays import ArrayRecord, array_record
from xla_ckpt.manifest.records import UnknownArray
from xla_ckpt.manifest.shards import Shard
from xla_ckpt.sharding.box import Box
from xla_ckpt.sharding.local_array import LocalArray, Piece
from xla_ckpt.sharding.mesh import Mesh
from xla_ckpt.sharding.sharding import Sharding

Copies = Mapping[tuple[int, int, int], StoredTensor]
"""(dp, ep, tp) -> the tensor there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankArray:
    """What the ranks stored of one array."""

    leaf: str
    copies: Copies
    mesh: Mesh
    local: tuple[int, ...]
    """Shape on each rank: that of the tensors, and of rows that were dealt out that of all of them."""

    rows: tuple[str, ...] = ()
    """Mesh axes over which ZeRO-1 dealt out the rows of the local tensors."""

    dealt: bool = False
    """Whether each dp rank has a file of its own, as ZeRO-1 writes them."""

    def rank_of(self, at: tuple[int, int, int], *, dealt: bool) -> int:
        """The rank whose tensor stands there. `dealt`: whether dp ranks are told apart."""
        dp, ep, tp = at
        # Without ZeRO-1 the mesh has as many dp ranks as ep ranks (see `ScannedState.mesh`), and files count the ep
        # ranks.
        return self.mesh.rank({"dp": dp if dealt or self.mesh.ep == 1 else ep, "tp": tp})


_Part = tuple[StoredTensor, Piece]


@dataclass(frozen=True, slots=True)
class Assembled:
    """An array put together from the tensors of all ranks."""

    record: ArrayRecord
    firsts: Mapping[Box, _Part]
    """The part that each box is read from."""

    twice: Sequence[tuple[_Part, _Part]]
    """Pairs of such a part and another copy of it, in sections that several ranks held."""

    def different(self, files: RankFiles) -> tuple[_Part, _Part] | None:
        """The first of those pairs whose parts are not equal."""
        return next(((a, b) for a, b in self.twice if not files.same_part(*a, *b)), None)

    def same(self, other: Assembled, files: RankFiles) -> bool:
        """Whether another reading of the same tensors finds the same in each box."""
        one, two = self.firsts, other.firsts
        return one.keys() == two.keys() and all(files.same_part(*one[box], *two[box]) for box in one)


def record_of_copies(files: RankFiles, array: RankArray, sharding: Sharding) -> ArrayRecord | UnknownArray:
    """The record of an array with sections that several ranks held, whose copies are compared.

    Arguments and errors are those of `assembled`.
    """
    different = ""
    fitting: list[Assembled] = []
    for reading in readings(sharding, array.mesh):
        candidate = assembled(files, array, reading)
        pair = candidate.different(files)
        if pair is None:
            fitting.append(candidate)
            continue
        ((one, piece), (other, _)) = pair
        different = different or f"rows {piece.box} differ between {one.file} and {other.file}"
    # Heads that are equal in pairs fit both orders. That is no matter if both give the same array (zeros, say).
    if len(fitting) == 2 and not fitting[0].same(fitting[1], files):
        return UnknownArray(
            problem="keys and values are equal on several ranks in two ways, which give different arrays",
            expected="copies on neighbouring ranks, or repeated as a whole",
            found="both fit",
            hint="Say which by a rule: (('tp', [4096, '1024x4', '1024x4']), None), or '1024x4 adjacent' for "
            "copies on neighbouring ranks.",
        )
    if fitting:
        return fitting[0].record
    return UnknownArray(
        problem="ranks that should hold the same keys and values hold different ones",
        expected=f"copies as in {sharding.spec}",
        found=different,
        hint="A rule with these sections takes the first copies. The copies may have drifted apart, or the keys may "
        "have been repeated in an order that is neither of the two: as a whole, or on neighbouring ranks.",
    )


def assembled(files: RankFiles, array: RankArray, sharding: Sharding) -> Assembled:
    """An array from the tensors of all ranks. Of several tensors in one place the first is used.

    Raises:
        CorruptCheckpointError: Tensors are missing, or do not fit together.
        IncompatibleCheckpointError: The sharding does not fit.
    """
    first = next(iter(array.copies.values()))
    shards: dict[Box, Shard] = {}
    firsts: dict[Box, _Part] = {}
    twice: list[tuple[_Part, _Part]] = []
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
        place = _place(array, sharding, tensor, array.rank_of(at, dealt=bool(array.rows)))
        shape, spec = place.shape, place.spec
        for piece in place.pieces:
            if piece.box.size and piece.box not in shards:
                shards[piece.box], firsts[piece.box] = _shard(files, tensor, piece), (tensor, piece)
            elif piece.copy is not None:
                twice.append((firsts[piece.box], (tensor, piece)))
    try:
        return Assembled(array_record(first.dtype, shape, [*shards.values()], spec), firsts, twice)
    except FormatError as error:
        raise CorruptCheckpointError(
            f"the rank files together do not hold this array exactly once: {error.problem}",
            leaf=array.leaf,
            expected=error.expected,
            found=error.found,
            hint="Check the sharding that applies to it.",
        ) from error


def check_zero1_rows(array: RankArray, ranks: int, lost: str) -> None:
    """Check that the rows of all ZeRO-1 ranks, padded, are those of a whole tensor.

    They are not if ranks wrote over each other's files; `lost` says why they may have, and what to do.

    Raises:
        CorruptCheckpointError: Rows are missing, or shapes do not fit to the number of files.
    """
    total, *others = array.local
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
                hint=lost,
            )
        raise CorruptCheckpointError(
            "the ZeRO-1 shards do not fit to the number of rank files along dp",
            leaf=array.leaf,
            file=tensor.file,
            expected=f"{list(expected)} in each",
            found=f"{list(tensor.shape)} at dp {dp}, tp {tp}",
            hint="Files of an earlier save with another dp size may be left in the directory.",
        )


def _place(array: RankArray, sharding: Sharding, tensor: StoredTensor, rank: int) -> LocalArray:
    """Where the tensor of one rank lies in the global array."""
    try:
        return _part(sharding, array.local if array.rows else tensor.shape, array.mesh, rank, array.rows)
    except ValueError as error:
        raise IncompatibleCheckpointError(
            f"the sharding {sharding.spec} does not fit to what is stored: {error}",
            leaf=array.leaf,
            found=f"{list(array.local if array.rows else tensor.shape)} on each rank of {array.mesh}",
            hint="Correct the rule of shardings= (--sharding), the attributes of the parameter, or the config.json it "
            "comes from; docs/parallelism.md has rules for fused arrays and for experts.",
        ) from error


@lru_cache(maxsize=1 << 14)
def _part(sharding: Sharding, local: tuple[int, ...], mesh: Mesh, rank: int, rows: tuple[str, ...]) -> LocalArray:
    """Where the tensor of a rank lies: the layers of a model, and the states of an optimizer, ask the same of it."""
    return sharding.zero1(local, mesh, rank, rows) if rows else sharding.place(local, mesh, rank)


def _shard(files: RankFiles, tensor: StoredTensor, piece: Piece) -> Shard:
    """The shard that a piece of a stored tensor is."""
    at = files.place(tensor)
    (shard,) = shards_of_piece(at, piece, files.number(at.file))  # tensors of rank files are in C order
    return shard


def with_stored_shape(unknown: UnknownArray, copies: Copies) -> UnknownArray:
    """The same, with what is stored of it on the ranks."""
    first = next(iter(copies.values()))
    # Ranks may name the same file: what all expert-parallel ranks have alike lies with the first of them.
    places = {(tensor.file, None if tensor.at is None else tensor.at.offset) for tensor in copies.values()}
    return replace(unknown, dtype=first.dtype, shape=first.shape, tensors=len(places))
