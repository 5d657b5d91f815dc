"""How a save begins: all ranks say that they make this call, what they save, and which disk they see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from xla_ckpt.engine.disks import Disks, DiskWord, united_disks
from xla_ckpt.engine.frozen import Frozen
from xla_ckpt.engine.order import Order
from xla_ckpt.engine.phases import Phases
from xla_ckpt.engine.writing import Writing
from xla_ckpt.errors import RankFailedError
from xla_ckpt.job.job import Job
from xla_ckpt.job.messages import Message
from xla_ckpt.plan.same_arrays import arrays_fingerprint, first_stages, odd_ones
from xla_ckpt.plan.save_plan import SavePlan


@dataclass(frozen=True, slots=True)
class RankWord(Message):
    """What each rank says of what it saves."""

    arrays: str
    """A fingerprint of the arrays that all of its pipeline stage has."""

    leaves: tuple[str, ...]
    """Their leaf paths, if it speaks for one of several stages."""

    files: Any
    """What the files of other ranks depend on (`Writing.told`)."""

    disk: DiskWord
    """Which disk it sees."""


@dataclass(frozen=True, slots=True)
class AgreedSave(Message):
    """What all ranks know when a save has begun."""

    odd: tuple[int, ...]
    """Those that have other arrays than the first of their pipeline stage."""

    first_stages: dict[str, int]
    """The first pipeline stage of each leaf that several hold, such as a tied parameter."""

    files: Any
    """What rank 0 has made of what each of them told (`Writing.unite`)."""

    disks: Disks
    """Which disks they see."""

    def plan(self, writing: Writing, stage: int) -> SavePlan:
        """What a rank of a pipeline stage writes: without what an earlier stage stores, so that it is stored once."""
        earlier = frozenset(leaf for leaf, first in self.first_stages.items() if first < stage)
        plan = writing.plan_among(self.files)
        return plan.minus(earlier) if earlier else plan


def open_save(order: Order, job: Job, ready: Callable[[], Frozen], phases: Phases) -> AgreedSave:
    """Begin together with all ranks.

    Raises:
        CheckpointError: A rank could not prepare what it saves, or did not come; the same on all ranks.
    """
    uploader, placement = order.uploader, job.placement

    def word() -> Any:
        frozen = ready()
        return RankWord(
            arrays=arrays_fingerprint(frozen.types(frozen.has_in_common)) if job.exchange.size > 1 else "",
            leaves=tuple(frozen.leaves.paths) if placement.mesh.pp > 1 and placement.speaks else (),
            files=frozen.writing.told,
            disk=DiskWord("") if uploader is None else uploader.word(saves=True),
        ).to_json()

    def united(said: Sequence[Any]) -> Any:
        words, mesh = [RankWord.from_json(one) for one in said], placement.mesh
        return AgreedSave(
            odd=tuple(odd_ones([word.arrays for word in words], mesh)),
            first_stages=first_stages([w.leaves for rank, w in enumerate(words) if mesh.first_of_stage(rank) == rank]),
            files=ready().writing.unite([word.files for word in words]),
            disks=united_disks([word.disk for word in words]),
        ).to_json()

    if job.exchange.rank == 0:
        order.root.expect()  # only now: the caller no longer waits
    with phases.timed("meet"):
        try:
            agreed = AgreedSave.from_json(job.begin(order.call, word, united))
        except RankFailedError as lost:
            # Other errors are about calls that differ, perhaps in path and tag: all ranks say the same of them.
            lost.at(path=order.root.path, tag=order.tag)
            raise
    if uploader is not None:
        uploader.meet(agreed.disks)
    return agreed
