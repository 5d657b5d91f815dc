"""How a save begins: all ranks say that they make this call, what they save, and which disk they see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from xla_ckpt.engine.disks import Disks, DiskWord, united_disks
from xla_ckpt.engine.frozen import Frozen
from xla_ckpt.engine.order import Order
from xla_ckpt.engine.phases import Phases
from xla_ckpt.errors import RankFailedError
from xla_ckpt.job.job import Job
from xla_ckpt.plan.same_arrays import fingerprint, odd_ones


@dataclass(frozen=True, slots=True)
class AgreedSave:
    """What all ranks know when a save has begun."""

    odd: Sequence[int]
    """Those that have other arrays than the first of their pipeline stage."""

    united: Any
    """What they have made of what each of them told (see `Agreeing`)."""

    disks: Disks
    """Which disks they see."""


def open_save(order: Order, job: Job, ready: Callable[[], Frozen], phases: Phases) -> AgreedSave:
    """Begin together with all ranks.

    Raises:
        CheckpointError: A rank could not prepare what it saves, or did not come; the same on all ranks.
    """
    uploader = order.uploader

    def word() -> list[Any]:
        frozen = ready()
        # What arrays this rank has, as far as its whole pipeline stage has the same; what its files depend on.
        arrays = fingerprint(frozen.types(frozen.has_in_common)) if job.exchange.size > 1 else ""
        return [arrays, frozen.told, (DiskWord("") if uploader is None else uploader.word(saves=True)).to_json()]

    def united(words: Sequence[Any]) -> list[Any]:
        arrays, files, disks = zip(*words, strict=True)
        odd = odd_ones(arrays, job.placement.mesh)
        return [odd, ready().unite(list(files)), united_disks(disks)]

    if job.exchange.rank == 0:
        order.root.expect()  # only now: the caller no longer waits
    with phases.timed("meet"):
        try:
            odd, files, seen = job.begin(order.call, word, united)
        except RankFailedError as lost:
            # Other errors are about calls that differ, perhaps in path and tag: all ranks say the same of them.
            lost.at(path=order.root.path, tag=order.tag)
            raise
    disks = Disks.from_json(seen)
    if uploader is not None:
        uploader.meet(disks)
    return AgreedSave(odd, files, disks)
