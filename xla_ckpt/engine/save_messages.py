"""What the ranks of a save tell each other from its beginning to its verdict."""

from __future__ import annotations

from dataclasses import dataclass

from xla_ckpt.engine.rank_timings import Measured
from xla_ckpt.errors import RankFailedError
from xla_ckpt.job.messages import Message
from xla_ckpt.job.round import LEAD, Deadline, Round
from xla_ckpt.plan.record import Record


@dataclass(frozen=True, slots=True)
class EarlierTag(Message):
    """The tag whose files a save may share."""

    directory: str
    """Its name in the root directory."""

    tag: str
    sequence: int
    """Its commit number."""


@dataclass(frozen=True, slots=True)
class Begun(Message):
    """Rank 0 tells all others that they may write."""

    draft: str
    """Name of the directory that is filled."""

    sequence: int
    """Number that the tag will have."""

    earlier: EarlierTag | None
    """With what they share; None if they do not."""


@dataclass(frozen=True, slots=True)
class Part(Message):
    """Any other rank tells rank 0 what it has written, durably."""

    record: Record
    measured: Measured


def hear_verdict(exchange: Round) -> int:
    """The commit number of the tag, which rank 0 says when all is done.

    Raises:
        CheckpointError: The save did not commit; the same error on every rank.
        RankFailedError: Likewise; or rank 0 was lost while it committed, and nobody knows whether the tag is there.
    """
    try:
        return int(exchange.hear("verdict", 0))
    except RankFailedError as error:
        if error.rank != 0 or exchange.decide(error) is not None:
            raise
    # Rank 0 began to commit before this rank gave up on it. What became of that, rank 0 alone can say.
    try:
        return int(exchange.hear("verdict", 0, Deadline(exchange.timeout * (1 - LEAD))))
    except RankFailedError as error:
        if exchange.decide(error) is not None:
            raise
        raise RankFailedError(
            "rank 0 began to commit, and did not say how that ended",
            rank=0,
            expected="its answer within the timeout and a fifth of it",
            hint="It died or hangs. The tag is there, complete, or it is not there: xla_ckpt.list_tags says so.",
        ) from None
