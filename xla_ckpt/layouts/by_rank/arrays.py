"""From the tensors of rank files to one array: how it was split, and where each of its parts lies."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from xla_ckpt.errors import CorruptCheckpointError, FormatError, IncompatibleCheckpointError
from xla_ckpt.layouts.by_rank.files import RankFiles, StoredTensor
from xla_ckpt.manifest.arrays import ArrayRecord, array_record
from xla_ckpt.manifest.records import UnknownArray
from xla_ckpt.manifest.shards import Shard
from xla_ckpt.plan.hints import ArrayHint
from xla_ckpt.plan.stored_shardings import without_axes
from xla_ckpt.sharding.box import Box
from xla_ckpt.sharding.local_array import LocalArray, Piece
from xla_ckpt.sharding.mesh import Mesh
from xla_ckpt.sharding.ranges import runs
from xla_ckpt.sharding.sections import global_size
from xla_ckpt.sharding.sharding import Sharding, Split, number_of_parts

_FUSED = re.compile(r"qkv|gate_up|up_gate|query_key_value|dense_h_to_4h|w_pack|c_attn|\bkv_proj", re.IGNORECASE)
_KEYS = re.compile(r"(weight|bias)_[kv]$|(^|\.)[kv]_proj\.|(^|\.)(key|value)s?(_proj)?\.")
"""Keys and values, of which several ranks may hold the same. Of any other array a shape that does not fit is one."""

_SEPARATE = re.compile(r"(weight|bias)_[qkv]$")
"""Parts of neuronx-distributed's `GQAQKVColumnParallelLinear`, whose name only looks fused."""

HINT = (
    "Give a model whose parameters have tensor_model_parallel, partition_dim and partition_stride, or a rule such as "
    "shardings=[(r'up_proj', ('tp', None)), (r'norm', None)]; on the command line --like, --config or --sharding, "
    "as in --sharding norm _ for what is not split. A "
    "stride, as in (('tp', 3), None), is for fused parts of equal size. Queries, keys and values of different sizes "
    "are sections: (('tp', [4096, 1024, 1024]), None), or [4096, '1024x4', '1024x4'] where 4 ranks hold the same keys "
    "and values."
)


def declared(local: tuple[int, ...], hint: ArrayHint) -> bool:
    """Whether a rule, attributes or the tag say how an array was split. A shape alone says only how it may have been.

    Attributes also stay on weights that every rank has whole. So they say nothing about a tensor that already has the
    wanted shape.
    """
    return hint.sharding is not None and (hint.ruled or hint.told or hint.shape != local)


def resolve(
    name: str, local: tuple[int, ...], mesh: Mesh, expert: bool | None, hint: ArrayHint
) -> Sharding | UnknownArray:
    """How an array was split of which each rank of `mesh` has a tensor of the shape `local`.

    Of sections that several ranks held alike (keys and values) the shapes say how many ranks did. Which of them did is
    found out by `readings`.
    """
    if hint.problem is not None:
        return hint.problem
    if hint.sharding is not None and declared(local, hint):
        sharding = hint.sharding if hint.ruled else _over_experts(hint.sharding, local, mesh, expert, hint.shape)
        if not hint.ruled and not hint.told:
            sharding = _with_copies(name, sharding, local, mesh, hint)
        return _true_size(sharding, local, hint)
    if mesh.tp == mesh.ep == 1 or not local or hint.shape == local:
        return Sharding()
    if hint.shape is None:
        return _unknown("nothing says what the whole is")
    return _inferred(name, local, mesh, expert, hint.shape)


def _over_experts(
    sharding: Sharding, local: tuple[int, ...], mesh: Mesh, expert: bool | None, wanted: tuple[int, ...] | None
) -> Sharding:
    """The same for what the files say of experts: parameters of a job without expert parallelism do not say it."""
    if expert is False:  # ranks that hold different experts hold the same of it
        return without_axes(sharding, ("ep", "dp"))
    dims = sharding.over(len(local))
    if mesh.ep == 1 or not dims or dims[0] is not None or "ep" in sharding.axes:
        return sharding
    if expert or (wanted is not None and wanted[:1] == (local[0] * mesh.ep,)):
        return replace(sharding, dims=(Split(("ep",)), *dims[1:]))
    return sharding


def _fits(split: Split, n: int, ranks: int, total: int) -> bool:
    """Whether each rank has `n` of `total` elements with the copies that the program has."""
    try:
        return global_size(n, ranks, split.sections) == total
    except ValueError:
        return False


def _with_copies(name: str, sharding: Sharding, local: tuple[int, ...], mesh: Mesh, hint: ArrayHint) -> Sharding:
    """The same for the number of copies that the job had which wrote the tensors; the program may want another one."""
    if hint.shape is None or len(hint.shape) != len(local) or hint.padded:
        return sharding
    dims = list(sharding.over(len(local)))
    for dim, split in enumerate(dims):
        if split is None or (split.plain and not _KEYS.search(name)):
            continue
        ranks = number_of_parts(split.axes, mesh.sizes)
        if not _fits(split, local[dim], ranks, hint.shape[dim]):
            dims[dim] = _with_counted_copies(split, local[dim], ranks, hint.shape[dim])
    return replace(sharding, dims=tuple(dims))


def _with_counted_copies(split: Split, n: int, ranks: int, total: int) -> Split:
    """The same with so many copies of keys and values that each rank has `n` of `total` elements.

    Queries are held once, and keys and values behind them in equal numbers of copies. Where no number fits, the split
    stays as it is, and what does not fit is told.
    """
    queries, keys = split.sections[:1], split.sections[1:]
    if not keys:
        queries, keys = (), queries  # a single section is one of keys or values, and nothing else has to be counted
    rows = sum(section.size or 0 for section in queries)
    if total <= rows or (queries and rows == 0):
        return split
    copies, remainder = divmod(n * ranks - rows, total - rows)
    if remainder or copies < 1 or ranks % copies:
        return split
    held_once = (replace(section, copies=1, adjacent=False) for section in queries)
    copied = (replace(section, copies=copies, adjacent=section.adjacent and copies > 1) for section in keys)
    return Split(split.axes, (*held_once, *copied))


def readings(sharding: Sharding, mesh: Mesh) -> list[Sharding]:
    """The ways in which ranks may have held copies of sections: repeated as a whole, or on neighbouring ranks.

    Where all ranks of an axis hold the same, both are one.
    """
    candidates = []
    for adjacent in (False, True):
        dims: list[Split | None] = []
        for split in sharding.dims:
            if split is None or not split.copies:
                dims.append(split)
                continue
            ranks = number_of_parts(split.axes, mesh.sizes)
            sections = (replace(s, adjacent=adjacent and 1 < s.copies < ranks) for s in split.sections)
            dims.append(Split(split.axes, tuple(sections)))
        candidate = replace(sharding, dims=tuple(dims))
        if candidate not in candidates:
            candidates.append(candidate)
    # The order of the job that loads is the likelier one: it is looked at first.
    return sorted(candidates, key=lambda candidate: candidate != sharding)


def _inferred(
    name: str, local: tuple[int, ...], mesh: Mesh, expert: bool | None, wanted: tuple[int, ...]
) -> Sharding | UnknownArray:
    """How an array was split, from the shape that each rank has and the shape that is wanted.

    It counts as known only if a single split over ep and tp makes one shape of the other. A guess would put the parts
    together in a wrong order, without an error.
    """
    if len(wanted) != len(local):
        return Sharding()  # no split makes these shapes fit, and the load says so
    fitting = [
        (ep_dim, tp_dim)
        for ep_dim in _ep_dims(expert, mesh)
        for tp_dim in _tp_dims(local, mesh)
        if _united_shape(local, mesh, ep_dim, tp_dim) == wanted
    ]
    if not fitting:
        return _unknown(
            f"no split over {mesh.tp} tp (and {mesh.ep} ep) ranks makes the wanted shape of theirs", str(list(wanted))
        )
    if len(fitting) > 1:
        return _unknown(f"{list(local)} of each rank makes {list(wanted)} in {len(fitting)} ways")
    ((ep_dim, tp_dim),) = fitting
    # The shape of a fused projection does not show whether a rank has one block of it, or one of each of its parts.
    if tp_dim is not None and _FUSED.search(name) and not _SEPARATE.search(name):
        return _unknown("by its name it is fused, and nothing says in how many strided blocks each rank has it")
    dims: list[Split | None] = [None] * len(local)
    if ep_dim is not None:
        dims[ep_dim] = Split(("ep",))
    if tp_dim is not None:
        dims[tp_dim] = Split(("tp",))
    return Sharding(tuple(dims))


def _ep_dims(expert: bool | None, mesh: Mesh) -> list[int | None]:
    """The dims that may be split over ep, None for no dim. Experts are always stacked along the first dim."""
    if expert:
        return [0]
    if expert is False or mesh.ep == 1:
        return [None]
    return [None, 0]


def _tp_dims(local: tuple[int, ...], mesh: Mesh) -> list[int | None]:
    """The dims that may be split over tp, None for no dim."""
    return [None] if mesh.tp == 1 else [None, *range(len(local))]


def _united_shape(local: tuple[int, ...], mesh: Mesh, ep_dim: int | None, tp_dim: int | None) -> tuple[int, ...] | None:
    """The shape of an array of which each rank has `local`; None for a split that no layer makes: one dim over both."""
    if ep_dim is not None and ep_dim == tp_dim:
        return None
    shape = list(local)
    if ep_dim is not None:
        shape[ep_dim] *= mesh.ep
    if tp_dim is not None:
        shape[tp_dim] *= mesh.tp
    return tuple(shape)


def _unknown(why: str, expected: str | None = None) -> UnknownArray:
    return UnknownArray(
        problem=f"it is ambiguous how this array was split over the ranks: {why}", hint=HINT, expected=expected
    )


def with_stored_shape(unknown: UnknownArray, copies: Copies) -> UnknownArray:
    """The same, with what is stored of it on the ranks."""
    first = next(iter(copies.values()))
    # Ranks may name the same file: what all expert-parallel ranks have alike lies with the first of them.
    places = {(tensor.file, None if tensor.at is None else tensor.at.offset) for tensor in copies.values()}
    return replace(unknown, dtype=first.dtype, shape=first.shape, tensors=len(places))


def _true_size(sharding: Sharding, local: tuple[int, ...], hint: ArrayHint) -> Sharding:
    """The sharding with the global size of each split dim, where the program says that local tensors are padded."""
    if not hint.padded or hint.shape is None or len(hint.shape) != len(local):
        return sharding
    dims = sharding.over(len(local))
    return replace(sharding, shape=tuple(n if s is not None else None for n, s in zip(hint.shape, dims, strict=True)))


Copies = Mapping[tuple[int, int, int], StoredTensor]
"""(dp, ep, tp) -> the tensor there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankArray:
    """What the ranks stored of one array."""

    leaf: str
    """Its leaf path."""

    copies: Copies
    mesh: Mesh
    """How the ranks were arranged."""

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
            expected="copies on neighbouring ranks (trn2), or repeated as a whole (trn1)",
            found="both fit",
            hint="Say which by a rule: (('tp', [4096, '1024x4', '1024x4']), None), or '1024x4 adjacent' for trn2.",
        )
    if fitting:
        return fitting[0].record
    return UnknownArray(
        problem="ranks that should hold the same keys and values hold different ones",
        expected=f"copies as in {sharding.spec}",
        found=different,
        hint="A rule with these sections takes the first copies. The copies may have drifted apart, or the keys may "
        "have been repeated in an order that is neither trn1's (as a whole) nor trn2's (on neighbouring ranks).",
    )


def assembled(files: RankFiles, array: RankArray, sharding: Sharding) -> Assembled:
    """An array from the tensors of all ranks. Of several tensors in one place the first is used.

    Args:
        files: Where its files are.
        array: Its tensors.
        sharding: How it was split.

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


def check_zero1_rows(array: RankArray, ranks: int) -> None:
    """Check that the rows of all ZeRO-1 ranks, padded, are those of a whole tensor.

    They are not if ranks wrote over each other's files.

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
                hint=_CP_HINT,
            )
        raise CorruptCheckpointError(
            "the ZeRO-1 shards do not fit to the number of rank files along dp",
            leaf=array.leaf,
            file=tensor.file,
            expected=f"{list(expected)} in each",
            found=f"{list(tensor.shape)} at dp {dp}, tp {tp}",
            hint="Files of an earlier save with another dp size may be left in the directory.",
        )


_CP_HINT = (
    "If files of more dp ranks were there once, restore them from a copy. Else the job had context parallelism: "
    "neuronx-distributed shards over dp and cp, and names the files by dp only: context-parallel ranks wrote over each "
    "other, and the data is lost. The model itself is whole: load it without the optimizer."
)


def _place(array: RankArray, sharding: Sharding, tensor: StoredTensor, rank: int) -> LocalArray:
    """Where the tensor of one rank lies in the global array."""
    try:
        if array.rows:
            return sharding.zero1(array.local, array.mesh, rank, array.rows)
        return sharding.place(tensor.shape, array.mesh, rank)
    except ValueError as error:
        raise IncompatibleCheckpointError(
            f"the sharding {sharding.spec} does not fit to what is stored: {error}",
            leaf=array.leaf,
            found=f"{list(array.local if array.rows else tensor.shape)} on each rank of {array.mesh}",
            hint=HINT,
        ) from error


def _shard(files: RankFiles, tensor: StoredTensor, piece: Piece) -> Shard:
    """The shard that a piece of a stored tensor is."""
    at = files.place(tensor)
    where = runs(piece.local, Box.whole(tensor.shape), tensor.dtype.itemsize)
    file = files.number(at.file)
    if where.contiguous:
        return Shard(piece.box, file, at.offset + where.offset)
    return Shard(piece.box, file, at.offset, piece.frame(tensor.shape))
