"""Saves and conversions to neuronx-distributed's layouts."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from xla_ckpt.errors import UsageError
from xla_ckpt.layouts.base import Rewriting, StoredState, Topology
from xla_ckpt.layouts.by_rank.new_job import NewJob, deals_rows
from xla_ckpt.layouts.by_rank.plan import PARTS, check_common, check_rows
from xla_ckpt.layouts.by_rank.writing import RankWriting, held_by_rank
from xla_ckpt.layouts.native import native_files
from xla_ckpt.layouts.nxd.plan import WHOSE, RankPlan, check_job
from xla_ckpt.layouts.torch_save.pickle_writer import LeafAt
from xla_ckpt.plan.save_plan import SavePlan
from xla_ckpt.state.describe import Description
from xla_ckpt.tree import schema

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class NxdWriting(RankWriting):
    """What one rank writes: files of neuronx-distributed's for what it has a place for, native ones for the rest."""

    xser: bool

    @cached_property
    def plan(self) -> SavePlan:
        """See `xla_ckpt.engine.save.Writing`."""
        placement, first = self.description.placement, self.description.replicas == "first"
        theirs = RankPlan(placement.mesh, placement.rank, self.xser, first=first).files(self.state())
        return SavePlan((*self.rest.plan.files, *theirs))


def writing_of(description: Description, *, xser: bool, marks: Mapping[str, bytes]) -> NxdWriting:
    """How a rank writes its state (see `xla_ckpt.layouts.base.Layout.writing`)."""
    held, rest = held_by_rank(description, WHOSE, "xser")
    check_rows(held, description.placement.mesh, description.state.zero1 or (), WHOSE)
    return NxdWriting(description=description, held=held, rest=rest, xser=xser, marks=marks)


def rewriting_of(stored: StoredState, to: Topology, name: str, *, xser: bool, marks: Mapping[str, bytes]) -> Rewriting:
    """The files of a stored state, for another job (see `xla_ckpt.layouts.base.Layout.rewriting`)."""
    manifest = stored.manifest
    held = manifest.skeleton if isinstance(manifest.skeleton, dict) else {}
    theirs = [part for part in PARTS if part in held]
    native, specs = native_files(manifest, [p for p in manifest.arrays if schema.member_of(p) not in theirs], to)
    if not theirs:
        raise UsageError(f"the tag holds nothing that {name} has a place for", expected=", ".join(PARTS))
    check_common(held, WHOSE)
    trees = {part: stored.tree(part, lambda path, _: LeafAt(path)) for part in theirs}
    # A ZeRO-1 optimizer of one dp rank deals out nothing, but its master weights have a place in ZeRO-1 files only.
    has_masters = schema.MASTER in (trees.get(schema.OPTIMIZER) or {})
    dealt = deals_rows(manifest) or has_masters if to.zero1 is None else to.zero1
    target = NewJob(manifest=manifest, trees=trees, mesh=to.mesh, rules=to.rules, cuts=to.pipeline_cuts, zero1=dealt)
    check_job(trees, zero1=dealt)
    doubts = target.doubts()
    if manifest.left_out and not xser:  # from xser files with master weights it reads no model at all
        doubts.append("neuronx-distributed, too, refuses a pt tag that lacks names of its model, unless strict=False")
    for message in doubts:
        logger.warning("%s", message)
    files = []
    for rank in range(to.mesh.size):
        mine = SavePlan(RankPlan(to.mesh, rank, xser).files(target.state(rank)))
        files.append((*native[rank], *mine.minus(target.of_earlier_stages(rank)).files))
    specs |= {path: target.spec(path) for path in manifest.arrays if path not in specs}
    return Rewriting(files, specs, marks)
