"""ZeRO-1 optimizer files of neuronx-distributed, for another number of data-parallel ranks.

They name no parameter and know nothing of tensor parallelism, and need not: of each (tp, pp) rank the rows of all dp
ranks are put together, as `shape_info` says that they belong, and dealt out again.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from xla_ckpt.errors import CorruptCheckpointError, UnsupportedStateError, UsageError
from xla_ckpt.layouts.nxd.arrays import check_rows, record
from xla_ckpt.layouts.nxd.plan import RankPlan, RankState, RankTensor
from xla_ckpt.layouts.nxd.rank_files import At, Scan, StoredTensor
from xla_ckpt.layouts.nxd.state import trees
from xla_ckpt.layouts.torch_save.pickle_writer import LeafAt
from xla_ckpt.manifest.records import ArrayRecord, Head, Manifest
from xla_ckpt.plan.save_plan import FilePlan
from xla_ckpt.sharding.local_array import LocalArray, whole
from xla_ckpt.sharding.mesh import AXES, Mesh
from xla_ckpt.sharding.sharding import Sharding
from xla_ckpt.tree import schema

_DEALT = ("base_state", "sharded_master_weights")
"""Members whose tensors are dealt out by rows; all others are the same on all dp ranks."""


@dataclass(frozen=True, slots=True)
class ZeroFiles:
    """The optimizer files of a tag."""

    manifest: Manifest
    """Their arrays, whole, by ``pp/tp/<path in the file>``."""

    stages: Mapping[tuple[int, int], Any]
    """(pp, tp) -> what a file holds, with a `LeafAt` for each tensor."""

    dealt: frozenset[str]
    """Arrays whose rows are dealt out over dp."""

    full: bool
    """Whether they are files of the converter that hold all dp ranks' states."""

    xser: bool
    dp: int

    def plans(self, dp: int | None) -> list[FilePlan]:
        """The files for `dp` data-parallel ranks; None: one that holds all of it, for each (tp, pp)."""
        pp, tp = (1 + max(at[i] for at in self.stages) for i in (0, 1))
        mesh = Mesh(pp=pp, dp=dp or 1, tp=tp)
        files: list[FilePlan] = []
        for rank in range(mesh.size):
            at = mesh.coordinates(rank)
            tensors = {
                path: self._tensor(path, held, mesh, rank)
                for path, held in self.manifest.arrays.items()
                if path.startswith(f"{at['pp']}/{at['tp']}/")
            }
            state = RankState({schema.OPTIMIZER: self.stages[at["pp"], at["tp"]]}, tensors, zero1=True)
            files += RankPlan(mesh, rank, self.xser).files(state)
        if dp is not None:
            return files
        return [replace(f, path=f.path.replace("optim/dp_rank_00_", "optim/full_", 1)) for f in files]

    def _tensor(self, path: str, held: ArrayRecord, mesh: Mesh, rank: int) -> RankTensor:
        shape, place = held.shape, whole(held.shape)
        alike: tuple[str, ...] = AXES
        if path in self.dealt:
            place = _rows(held.shape, mesh, rank)
            shape, alike = (-(-held.shape[0] // mesh.dp), *held.shape[1:]), ("cp",)
        return RankTensor(path, held.dtype, shape, place.pieces, alike)


def _rows(shape: tuple[int, ...], mesh: Mesh, rank: int) -> LocalArray:
    return Sharding().zero1(shape, mesh, rank, ("dp",))


def scan_optimizer(files: Scan, tag: str) -> ZeroFiles:
    """The ZeRO-1 optimizer under ``optim`` in a tag directory. No tensor data is read.

    Raises:
        UsageError: There is none.
        CorruptCheckpointError: Files are missing, or do not fit together.
        UnsupportedStateError: It is the optimizer of an expert-parallel job.
    """
    grid = files.rank_files().get("optim")
    if grid is None:
        raise UsageError("there are no optimizer files of neuronx-distributed", file="optim", found="nothing")
    names = [posixpath.basename(path) for path in grid.paths.values()]
    full = [name for name in names if name.startswith("full_")]
    if full and len(full) < len(names):
        raise CorruptCheckpointError(
            "files for each dp rank lie beside files for all of them", file="optim", found=", ".join(names[:4])
        )
    held = trees(files, grid)
    for at, tree in held.items():
        _check(grid.paths[at], tree)
    work = _Arrays(files, held, grid.sizes.dp)
    stages = {(pp, tp): work.stage(pp, tp) for pp in range(grid.sizes.pp) for tp in range(grid.sizes.tp)}
    manifest = Manifest(Head(tag, 0, pinned=False, created=""), None, work.records, tuple(files.files))
    xser = any(f"{path}.info.pt" in files.names or f"{path}.tensors" in files.folders for path in grid.paths.values())
    return ZeroFiles(manifest, stages, frozenset(work.dealt), bool(full), xser, grid.sizes.dp)


def _check(path: str, tree: Any) -> None:
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


@dataclass(slots=True)
class _Arrays:
    """Collects the arrays of all files."""

    files: Scan
    held: Mapping[At, Any]
    dp: int
    records: dict[str, ArrayRecord] = field(default_factory=dict)
    dealt: list[str] = field(default_factory=list)

    def stage(self, pp: int, tp: int) -> Any:
        """What the files of one (tp, pp) hold, with a mark in place of each tensor."""
        ranks = [self.held[At(pp, dp, 0, tp)] for dp in range(self.dp)]
        shapes = ranks[0]["shape_info"]
        made = {}
        for key, value in ranks[0].items():
            path = f"{pp}/{tp}/{key}"
            if key in _DEALT:
                made[key] = {
                    number: self._state(f"{path}/{number}", [r[key].get(number) for r in ranks], shapes.get(number))
                    if type(number) is int
                    else _marked(held, f"{path}/{number}", self._alone)  # of no parameter: each dp rank has it whole
                    for number, held in value.items()
                }
            else:
                made[key] = _marked(value, path, self._alone)
        return made

    def _state(self, path: str, ranks: list[Any], shape: Any) -> Any:
        """The state, or the master weight, of one parameter on all dp ranks."""
        first = ranks[0]
        if isinstance(first, StoredTensor):
            return self._united(path, ranks, shape)
        if not isinstance(first, Mapping):
            return first
        return {
            what: self._united(f"{path}/{what}", [(r or {}).get(what) for r in ranks], shape)
            if isinstance(value, StoredTensor)
            else value
            for what, value in first.items()
        }

    def _united(self, path: str, ranks: list[Any], shape: Any) -> LeafAt:
        missing = next((dp for dp, held in enumerate(ranks) if not isinstance(held, StoredTensor)), None)
        if missing is not None or shape is None:
            raise CorruptCheckpointError(
                "the dp ranks hold different states",
                leaf=path,
                found=f"none on dp rank {missing}",
                expected="a tensor on each, and its whole shape in shape_info",
            )
        copies = {(dp, 0, 0): held for dp, held in enumerate(ranks)}
        if not ranks[0].shape:
            return self._alone(path, ranks[0])
        local = tuple(map(int, shape))
        check_rows(path, local, copies, self.dp)
        self.records[path] = record(self.files, path, copies, Mesh(dp=self.dp), Sharding(), ("dp",), local)
        self.dealt.append(path)
        return LeafAt(path)

    def _alone(self, path: str, held: StoredTensor) -> LeafAt:
        self.records[path] = record(self.files, path, {(0, 0, 0): held}, Mesh(), Sharding())
        return LeafAt(path)


def _marked(value: Any, path: str, mark: Callable[[str, StoredTensor], LeafAt]) -> Any:
    if isinstance(value, StoredTensor):
        return mark(path, value)
    if isinstance(value, Mapping):
        return {k: _marked(v, f"{path}/{k}", mark) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_marked(v, f"{path}/{i}", mark) for i, v in enumerate(value)]
    return value
