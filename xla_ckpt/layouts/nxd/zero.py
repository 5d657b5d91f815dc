"""ZeRO-1 optimizer files of neuronx-distributed, for another number of data-parallel ranks.

The files name no parameter, and do not say how a tensor was split over tp. Neither has to be known: for each (tp, pp)
rank the rows of all dp ranks are put together, to the shape that `shape_info` says, and dealt out again.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from xla_ckpt.errors import CorruptCheckpointError, UnsupportedStateError, UsageError
from xla_ckpt.layouts.by_rank.arrays import RankArray, assembled, check_zero1_rows
from xla_ckpt.layouts.by_rank.copies import in_common
from xla_ckpt.layouts.by_rank.form import StoredTensor
from xla_ckpt.layouts.by_rank.grid import RankAt
from xla_ckpt.layouts.by_rank.plan import Laying, RankState, RankTensor
from xla_ckpt.layouts.by_rank.state import trees
from xla_ckpt.layouts.nxd.folders import OPTIM, FolderFiles
from xla_ckpt.layouts.nxd.optimizer import DEALT_MEMBERS
from xla_ckpt.layouts.nxd.writing import files_of_rank
from xla_ckpt.layouts.scanned import foreign_head
from xla_ckpt.layouts.torch_save.pickle_writer import LeafAt
from xla_ckpt.manifest.arrays import ArrayRecord, Arrays
from xla_ckpt.manifest.records import Manifest, UnknownArray
from xla_ckpt.plan.file_plan import FilePlan
from xla_ckpt.sharding.local_array import whole
from xla_ckpt.sharding.mesh import AXES, Mesh
from xla_ckpt.sharding.sharding import Sharding
from xla_ckpt.tree import schema
from xla_ckpt.tree.nested import Keys, replaced_leaves


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroFiles:
    """The optimizer files of a tag."""

    manifest: Manifest
    """Their arrays, with the rows of all dp ranks, by ``pp/tp/<path in the file>``."""

    stages: Mapping[tuple[int, int], Any]
    """(pp, tp) -> what a file holds, with a `LeafAt` for each tensor."""

    dealt: frozenset[str]
    """Arrays whose rows are dealt out over dp."""

    full: bool
    """Whether they are files of the converter, which hold the states of all dp ranks."""

    xser: bool
    dp: int
    """Data-parallel ranks that have files of their own."""

    def plans(self, dp: int | None) -> list[FilePlan]:
        """The files for `dp` data-parallel ranks. None: a file for each (tp, pp) that holds the states of all."""
        pp = 1 + max(pp for pp, _ in self.stages)
        tp = 1 + max(tp for _, tp in self.stages)
        mesh = Mesh(pp=pp, dp=dp or 1, tp=tp)
        files: list[FilePlan] = []
        for rank in range(mesh.size):
            at = mesh.coordinates(rank)
            tensors = {
                path: self._tensor(path, record, mesh, rank)
                for path, record in self.manifest.arrays.items()
                if path.startswith(f"{at['pp']}/{at['tp']}/")
            }
            state = RankState(parts={schema.OPTIMIZER: self.stages[at["pp"], at["tp"]]}, tensors=tensors, zero1=True)
            files += files_of_rank(Laying(mesh, rank, state), xser=self.xser)
        if dp is not None:
            return files
        return [replace(f, path=f.path.replace("optim/dp_rank_00_", "optim/full_", 1)) for f in files]

    def _tensor(self, path: str, record: ArrayRecord, mesh: Mesh, rank: int) -> RankTensor:
        """What one rank has of an array: its rows, the last ones padded, or all of it."""
        if path not in self.dealt:
            place = whole(record.shape)
            return RankTensor(leaf=path, dtype=record.dtype, shape=record.shape, pieces=place.pieces, alike=AXES)
        place = Sharding().zero1(record.shape, mesh, rank, ("dp",))
        shape = (-(-record.shape[0] // mesh.dp), *record.shape[1:])
        return RankTensor(leaf=path, dtype=record.dtype, shape=shape, pieces=place.pieces, alike=("cp",))


def scan_optimizer(files: FolderFiles, tag: str) -> ZeroFiles:
    """The ZeRO-1 optimizer under ``optim`` in a tag directory. No tensor data is read.

    Raises:
        UsageError: There is none.
        CorruptCheckpointError: Files are missing, or do not fit together.
        UnsupportedStateError: It is the optimizer of an expert-parallel job.
    """
    grid = files.whole_grids().get(OPTIM)
    if grid is None:
        raise UsageError(
            "there are no optimizer files of neuronx-distributed",
            file="optim",
            found="nothing",
            hint="Pass the directory of a tag, in which the folder optim lies.",
        )
    names = [posixpath.basename(path) for path in grid.paths.values()]
    full = [name for name in names if name.startswith("full_")]
    if full and len(full) < len(names):
        raise CorruptCheckpointError(
            "files for each dp rank lie beside files for all of them", file="optim", found=", ".join(names[:4])
        )
    by_rank = trees(files, grid)
    for at, tree in by_rank.items():
        _check(grid.paths[at], tree)
    work = _Arrays(files=files, by_rank=by_rank, dp=grid.sizes.dp)
    stages = {(pp, tp): work.stage(pp, tp) for pp in range(grid.sizes.pp) for tp in range(grid.sizes.tp)}
    manifest = Manifest(
        head=foreign_head(tag),
        skeleton=None,
        arrays=Arrays.of(work.records),
        files=tuple(files.records),
    )
    xser = any(map(files.are_apart, grid.paths.values()))
    return ZeroFiles(
        manifest=manifest, stages=stages, dealt=frozenset(work.dealt), full=bool(full), xser=xser, dp=grid.sizes.dp
    )


def _check(path: str, tree: Any) -> None:
    """Refuse the file of another kind of optimizer."""
    if "_ep_rank_" in path or any(str(key).startswith("ep_") for key in tree):
        raise UnsupportedStateError(
            "this is the optimizer of an expert-parallel job: fewer ranks have its experts in common than the rest",
            file=path,
            hint="Convert the whole tag: xla-ckpt convert --like, with a model that says which is which.",
        )
    if "base_state" not in tree or not isinstance(tree.get("shape_info"), Mapping):
        raise UsageError(
            "this optimizer was not saved with ZeRO-1: it is the same for any number of data-parallel ranks", file=path
        )


@dataclass(slots=True, kw_only=True)
class _Arrays:
    """Collects the arrays of all files."""

    files: FolderFiles
    by_rank: Mapping[RankAt, Any]
    dp: int
    records: dict[str, ArrayRecord] = field(default_factory=dict)
    dealt: list[str] = field(default_factory=list)

    def stage(self, pp: int, tp: int) -> Any:
        """What the files of one (tp, pp) hold, with a `LeafAt` in place of each tensor.

        Raises:
            CorruptCheckpointError: Some dp ranks lack rows of a state.
            IncompatibleCheckpointError: The dp ranks differ in what is no rows.
        """
        ranks = {RankAt(dp=dp): self.by_rank[RankAt(pp=pp, dp=dp, tp=tp)] for dp in range(self.dp)}
        first = ranks[RankAt()]

        def of_all(keys: Keys, leaf: Any) -> Any:
            path = "/".join(map(str, (pp, tp, *keys)))
            # A tensor in a container that is a state is no rows.
            if keys[0] in DEALT_MEMBERS and type(keys[1]) is int and len(keys) <= 3 and isinstance(leaf, StoredTensor):
                rows = [_member(tree, keys) for tree in ranks.values()]
                return self._united(path, rows, first["shape_info"].get(keys[1]))
            return self._alone(path, leaf)

        def alike(keys: Keys) -> Any:
            """What lies there: tensors that are rows as on the first rank, all else as all ranks have it."""
            of_ranks = {at: _member(tree, keys[:-1]) or {} for at, tree in ranks.items()}
            value = of_ranks[RankAt()][keys[-1]]
            if keys[0] not in DEALT_MEMBERS or (len(keys) > 1 and type(keys[1]) is not int):
                return in_common(self.files, of_ranks, keys[-1])
            if isinstance(value, Mapping) and len(keys) < 3:
                return {key: alike((*keys, key)) for key in value}
            return value if isinstance(value, StoredTensor) else in_common(self.files, of_ranks, keys[-1])

        return replaced_leaves({key: alike((key,)) for key in first}, of_all)

    def _united(self, path: str, ranks: list[Any], shape: Any) -> Any:
        """The array of which each dp rank has rows; `shape` is that of all of them together."""
        missing = next((dp for dp, tensor in enumerate(ranks) if not isinstance(tensor, StoredTensor)), None)
        if missing is not None or shape is None:
            raise CorruptCheckpointError(
                "the dp ranks hold different states",
                leaf=path,
                found=f"none on dp rank {missing}",
                expected="a tensor on each, and its whole shape in shape_info",
            )
        copies = {(dp, 0, 0): tensor for dp, tensor in enumerate(ranks)}
        if not ranks[0].shape:
            return self._alone(path, ranks[0])
        local = tuple(map(int, shape))
        array = RankArray(leaf=path, copies=copies, mesh=Mesh(dp=self.dp), local=local, rows=("dp",))
        check_zero1_rows(array, self.dp, self.files.lost_rows)
        self.records[path] = assembled(self.files, array, Sharding()).record
        self.dealt.append(path)
        return LeafAt(path)

    def _alone(self, path: str, value: Any) -> Any:
        """A tensor that each dp rank has whole, as a `LeafAt`; any other value as it is.

        Raises:
            IncompatibleCheckpointError: The dp ranks have different ones.
        """
        if isinstance(value, UnknownArray):
            raise value.error(path)
        if not isinstance(value, StoredTensor):
            return value
        array = RankArray(leaf=path, copies={(0, 0, 0): value}, mesh=Mesh(), local=value.shape)
        self.records[path] = assembled(self.files, array, Sharding()).record
        return LeafAt(path)


def _member(tree: Any, keys: Keys) -> Any:
    """What lies at a place; None if nothing does."""
    for key in keys:
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree
