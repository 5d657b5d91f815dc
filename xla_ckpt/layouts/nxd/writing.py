"""Saves and conversions to neuronx-distributed's layouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from xla_ckpt.layouts.base import Rewriting, StoredState, Topology
from xla_ckpt.layouts.by_rank.new_job import NewJob, deals_rows
from xla_ckpt.layouts.by_rank.rewriting import members_of_ranks, rewritten
from xla_ckpt.layouts.by_rank.writing import RankWriting, held_by_rank
from xla_ckpt.layouts.nxd.plan import WHOSE_NXD, RankPlan, check_job
from xla_ckpt.plan.save_plan import SavePlan
from xla_ckpt.state.describe import Description
from xla_ckpt.tree import schema


@dataclass(frozen=True, kw_only=True)
class NxdWriting(RankWriting):
    """What one rank writes: files of neuronx-distributed's for what it has a place for, native ones for the rest."""

    xser: bool

    @cached_property
    def plan(self) -> SavePlan:
        """See `xla_ckpt.engine.writing.Writing`."""
        placement, first = self.description.placement, self.description.replicas == "first"
        files = RankPlan(placement.mesh, placement.rank, self.xser, first=first).files(self.state())
        return SavePlan((*self.native.plan.files, *files))


def nxd_writing(description: Description, *, xser: bool, marks: Mapping[str, bytes]) -> NxdWriting:
    """How a rank writes its state (see `xla_ckpt.layouts.base.Layout.writing`)."""
    rank_state, native = held_by_rank(description, WHOSE_NXD, "xser")
    return NxdWriting(description=description, rank_state=rank_state, native=native, xser=xser, marks=marks)


def nxd_rewriting(stored: StoredState, to: Topology, name: str, *, xser: bool, marks: Mapping[str, bytes]) -> Rewriting:
    """The files of a stored state, for another job (see `xla_ckpt.layouts.base.Layout.rewriting`)."""
    manifest, trees = stored.manifest, members_of_ranks(stored, name, WHOSE_NXD)
    # A ZeRO-1 optimizer of one dp rank deals out nothing, but its master weights have a place in ZeRO-1 files only.
    has_masters = schema.MASTER in (trees.get(schema.OPTIMIZER) or {})
    dealt = deals_rows(manifest) or has_masters if to.zero1 is None else to.zero1
    job = NewJob(manifest=manifest, trees=trees, mesh=to.mesh, rules=to.rules, cuts=to.pipeline_cuts, zero1=dealt)
    check_job(trees, zero1=dealt)
    doubts = []
    if manifest.left_out and not xser:  # from xser files with master weights it reads no model at all
        doubts.append("neuronx-distributed, too, refuses a pt tag that lacks names of its model, unless strict=False")
    return rewritten(
        job, to, lambda rank: RankPlan(to.mesh, rank, xser).files(job.state(rank)), doubts=doubts, marks=marks
    )
