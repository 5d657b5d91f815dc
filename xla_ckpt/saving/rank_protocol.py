"""The messages between the ranks of a save, from the handshake to the outcome.

`negotiate_save` is the handshake: every rank publishes a `RankHello`, and rank 0 answers with a `SaveAgreement` or an
error. Then rank 0 sends `BeginSave`, every other rank sends its `RankResult`, and `wait_for_outcome` returns the
sequence number that rank 0 has committed, or raises the error that all ranks raise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from xla_ckpt.core.plan.rank_consistency import (
    RankMismatch,
    compute_arrays_fingerprint,
    find_first_stages,
    find_mismatched_ranks,
)
from xla_ckpt.core.plan.rank_record import RankRecord
from xla_ckpt.core.plan.save_plan import SavePlan
from xla_ckpt.distributed.exchange import LEADER_TIMEOUT_FRACTION, Deadline, Exchange, Message
from xla_ckpt.distributed.job import Job
from xla_ckpt.errors import RankFailedError, UnsupportedStateError
from xla_ckpt.features.local_first.upload import DiskInfo, HostDisks, combine_disk_infos
from xla_ckpt.reports import PhaseRecorder, RankTimings
from xla_ckpt.saving.context import PreparedSave, SaveContext
from xla_ckpt.saving.finalize import WritePlanner


@dataclass(frozen=True, slots=True)
class RankHello(Message):
    """Handshake message of a rank, which describes its state."""

    layout: str
    """Layout in which the state can be written."""

    arrays_fingerprint: str
    """Fingerprint of the arrays that all ranks of its pipeline stage have."""

    leaves: tuple[str, ...]
    """Leaf paths of the arrays, if this rank reports for one of several stages."""

    planner_info: Any
    """Information on which the files of other ranks depend (`WritePlanner.shared_info`)."""

    disk: DiskInfo
    """Disk of this rank's host."""


@dataclass(frozen=True, slots=True)
class SaveAgreement(Message):
    """Result of the handshake, known to all ranks."""

    mismatched_ranks: tuple[int, ...]
    """Ranks whose arrays differ from the first rank of their pipeline stage."""

    first_stages: dict[str, int]
    """First pipeline stage of each leaf that several stages have, such as a tied parameter."""

    planner_info: Any
    """Combined information of all ranks (`WritePlanner.combine_infos`)."""

    disks: HostDisks
    """Disks of the hosts."""

    def plan_rank(self, planner: WritePlanner, stage: int) -> SavePlan:
        """Return the plan of a rank of a stage, without the leaves of earlier stages, so that each is stored once."""
        earlier = frozenset(leaf for leaf, first in self.first_stages.items() if first < stage)
        plan = planner.plan_with(self.planner_info)
        return plan.exclude_leaves(earlier) if earlier else plan


def negotiate_save(
    context: SaveContext, job: Job, get_prepared: Callable[[], PreparedSave], phases: PhaseRecorder
) -> SaveAgreement:
    """Run the handshake of a save with all ranks.

    Raises:
        CheckpointError: A rank could not prepare its state, or did not join in time; the same on all ranks.
    """
    uploader, placement = context.uploader, job.placement

    def describe_rank() -> Any:
        prepared = get_prepared()
        return RankHello(
            layout=prepared.layout,
            arrays_fingerprint=compute_arrays_fingerprint(prepared.collect_array_facts(prepared.is_shared_leaf))
            if job.exchange.size > 1
            else "",
            leaves=tuple(prepared.leaves.paths) if placement.mesh.pp > 1 and placement.is_stage_leader else (),
            planner_info=prepared.planner.shared_info,
            disk=DiskInfo("") if uploader is None else uploader.get_disk_info(saves=True),
        ).to_json()

    def combine(messages: Sequence[Any]) -> Any:
        hellos, mesh = [RankHello.from_json(message) for message in messages], placement.mesh
        _check_same_layout([hello.layout for hello in hellos])
        return SaveAgreement(
            mismatched_ranks=tuple(find_mismatched_ranks([hello.arrays_fingerprint for hello in hellos], mesh)),
            first_stages=find_first_stages(
                [hello.leaves for rank, hello in enumerate(hellos) if mesh.first_of_stage(rank) == rank]
            ),
            planner_info=get_prepared().planner.combine_infos([hello.planner_info for hello in hellos]),
            disks=combine_disk_infos([hello.disk for hello in hellos]),
        ).to_json()

    if job.exchange.rank == 0:
        context.root.prepare_commit()  # on this thread, because the caller does not wait for it
    with phases.measure("meet"):
        try:
            agreed = SaveAgreement.from_json(job.begin_call(context.call, describe_rank, combine))
        except RankFailedError as lost:
            # Other errors are about calls that differ, perhaps in path and tag, and must be the same on all ranks.
            lost.at(path=context.root.path, tag=context.tag)
            raise
    if uploader is not None:
        uploader.set_disks(agreed.disks)
    return agreed


def _check_same_layout(layouts: Sequence[str]) -> None:
    """Raise an error if ranks fell back to different layouts, because each layout would contain only part of the files.

    Raises:
        UnsupportedStateError: The layouts differ.
    """
    difference = RankMismatch.find(dict(enumerate(layouts)))
    if difference is not None:
        raise UnsupportedStateError(
            "no layout of this save can hold the states of all ranks, and they would write different ones",
            rank=difference.rank,
            expected=difference.expected,
            found=difference.found,
            hint="The warnings of the ranks that fell back say why. Name one layout that can hold all of it.",
        )


@dataclass(frozen=True, slots=True)
class BaseTag(Message):
    """Tag whose files a save may reuse."""

    directory: str
    """Name of the tag's directory in the root directory."""

    tag: str
    sequence: int
    """Sequence number of its commit."""


@dataclass(frozen=True, slots=True)
class BeginSave(Message):
    """Message of rank 0 that lets all other ranks write."""

    draft: str
    """Name of the draft directory."""

    sequence: int
    """Sequence number that the tag will have."""

    base: BaseTag | None
    """Tag whose files are reused; None if no files are reused."""


@dataclass(frozen=True, slots=True)
class RankResult(Message):
    """Message to rank 0 of the files that another rank has written durably."""

    record: RankRecord
    timings: RankTimings


def wait_for_outcome(exchange: Exchange) -> int:
    """Wait for the outcome, and return the sequence number that rank 0 publishes after the commit.

    Raises:
        CheckpointError: The save did not commit; the same error on every rank.
        RankFailedError: A rank failed; or rank 0 was lost during the commit, and it is unknown if the tag exists.
    """
    try:
        return int(exchange.receive("verdict", 0))
    except RankFailedError as error:
        if error.rank != 0 or exchange.decide_outcome(error) is not None:
            raise
    # Rank 0 began the commit before this rank timed out. Only rank 0 knows the result.
    try:
        return int(exchange.receive("verdict", 0, Deadline(exchange.timeout * (1 - LEADER_TIMEOUT_FRACTION))))
    except RankFailedError as error:
        if exchange.decide_outcome(error) is not None:
            raise
        raise RankFailedError(
            "rank 0 began to commit, and did not say how that ended",
            rank=0,
            expected="its answer within the timeout and a fifth of it",
            hint="It died or hangs. The tag is there, complete, or it is not there: xla_ckpt.list_tags says so.",
        ) from None
