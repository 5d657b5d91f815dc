"""Saves and conversions to neuronx-distributed's layouts: which files one rank writes, and what is in them.

A rank file ``dp_rank_00_tp_rank_01_pp_rank_00.pt`` holds the state of one rank as a dict, with its own part of each
tensor. Ranks that differ along dp and cp only have one rank file in common. In the layout ``pt`` the first of these
ranks writes the file. In the layout ``xser`` each tensor lies in a file of its own, and the ranks share the writing.
Every rank decides alone what it writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial

from xla_ckpt.errors import UsageError
from xla_ckpt.layouts.base import Rewriting, StoredState, Topology
from xla_ckpt.layouts.by_rank.grid import RankAt
from xla_ckpt.layouts.by_rank.new_job import NewJob, deals_rows
from xla_ckpt.layouts.by_rank.plan import SHARING, Laying, RankState
from xla_ckpt.layouts.by_rank.rewriting import members_of_ranks, rewritten
from xla_ckpt.layouts.by_rank.writing import RankWriting, held_by_rank
from xla_ckpt.layouts.nxd.folders import MODEL, OPTIM
from xla_ckpt.layouts.nxd.optimizer import numbered
from xla_ckpt.layouts.nxd.tags import OF_EXPERTS, OF_RANK, TAG_MARKS
from xla_ckpt.layouts.nxd.tensor_files import lay_apart
from xla_ckpt.plan.file_plan import FilePlan
from xla_ckpt.plan.save_plan import SavePlan
from xla_ckpt.sharding.mesh import Mesh
from xla_ckpt.state.describe import Description
from xla_ckpt.tree import path as paths
from xla_ckpt.tree import schema
from xla_ckpt.tree.nested import in_dicts_and_lists

_WHOSE = "neuronx-distributed's"
"""Whose layout it is, in errors."""


@dataclass(frozen=True, kw_only=True)
class NxdWriting(RankWriting):
    """What one rank writes: files of neuronx-distributed's for what it has a place for, native ones for the rest."""

    xser: bool

    @property
    def marks(self) -> Mapping[str, bytes]:
        """Those by which neuronx-distributed finds a tag."""
        return TAG_MARKS

    @cached_property
    def plan(self) -> SavePlan:
        placement, first = self.description.placement, self.description.replicas == "first"
        files = files_of_rank(self.state(), placement.mesh, placement.rank, xser=self.xser, first=first)
        return SavePlan((*self.native.plan.files, *files))


def nxd_writing(description: Description, *, xser: bool) -> NxdWriting:
    """How a rank writes its state (see `xla_ckpt.layouts.base.Layout.writing`)."""
    rank_state, native = held_by_rank(description, _WHOSE, "xser")
    return NxdWriting(description=description, rank_state=rank_state, native=native, xser=xser)


def nxd_rewriting(stored: StoredState, to: Topology, name: str, *, xser: bool) -> Rewriting:
    """The files of a stored state, for another job (see `xla_ckpt.layouts.base.Layout.rewriting`).

    Raises:
        UsageError: Something would be lost.
    """
    manifest, trees = stored.manifest, members_of_ranks(stored, name, _WHOSE)
    # A ZeRO-1 optimizer of one dp rank deals out nothing, but its master weights have a place in ZeRO-1 files only.
    has_masters = schema.MASTER in (trees.get(schema.OPTIMIZER) or {})
    zero1 = deals_rows(manifest) or has_masters if to.zero1 is None else to.zero1
    job = NewJob(manifest=manifest, trees=trees, mesh=to.mesh, rules=to.rules, cuts=to.pipeline_cuts, zero1=zero1)
    if has_masters and not zero1:
        raise UsageError(
            "master weights have a place in ZeRO-1 files only",
            leaf=paths.join(schema.OPTIMIZER, schema.MASTER),
            found="zero1=False",
            hint="Leave zero1=False (--no-zero1) away, or convert to the native layout.",
        )
    doubts = []
    if manifest.left_out and not xser:  # from xser files with master weights it reads no model at all
        doubts.append("neuronx-distributed, too, refuses a pt tag that lacks names of its model, unless strict=False")
    return rewritten(
        job, to, lambda rank: files_of_rank(job.state(rank), to.mesh, rank, xser=xser), doubts=doubts, marks=TAG_MARKS
    )


def files_of_rank(state: RankState, mesh: Mesh, rank: int, *, xser: bool, first: bool = False) -> list[FilePlan]:
    """The files that one rank writes.

    Args:
        xser: Whether each tensor lies in a file of its own.
        first: See `Laying.first`.

    Raises:
        UnsupportedStateError: Something in its state cannot be pickled.
    """
    laying = Laying(mesh, rank, state.tensors, first)
    lay, coordinates = partial(lay_apart, laying) if xser else laying.shared, laying.at
    at = RankAt(**{axis: coordinates[axis] for axis in ("pp", "ep", "tp")})
    of_rank = (OF_EXPERTS if mesh.ep > 1 else OF_RANK).of(at)
    plans: list[FilePlan] = []
    if schema.MODEL in state.parts:
        tree = in_dicts_and_lists(state.parts[schema.MODEL])
        plans += lay(f"{MODEL}/{of_rank}", tree, schema.MODEL, SHARING)
    if schema.OPTIMIZER in state.parts:
        tree = in_dicts_and_lists(numbered(state) if state.by_name else state.parts[schema.OPTIMIZER])
        # With ZeRO-1 every dp rank has rows of its own, so only ranks along cp have a file in common.
        of_rows = OF_RANK.of(replace(at, dp=coordinates["dp"]))
        name, sharing = (of_rows, ("cp",)) if state.zero1 else (of_rank, SHARING)
        plans += lay(f"{OPTIM}/{name}", tree, schema.OPTIMIZER, sharing)
    return [*plans, *laying.common(state)]
