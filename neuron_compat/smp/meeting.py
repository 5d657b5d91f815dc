"""Calls that all ranks of a group make: none goes on before all are there, and all raise the same error.

A collective that some ranks never make hangs the others. So before one, the ranks of a group call the roll in the
job's key-value store. Who is missing, or what went wrong on a rank before the collective, all of them hear, in time.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from typing import Any

from neuron_compat.smp import job
from neuron_compat.smp.errors import SMPConfigError, SMPRuntimeError, TooFewRanksError
from xla_ckpt import CheckpointError, RankFailedError
from xla_ckpt.facade import (
    LEAD,
    Deadline,
    Round,
    StoreCommunicator,
    as_checkpoint_error,
    communicator,
    launcher_has_store,
)
from xla_ckpt.logs import get_logger

logger = get_logger(__name__)

TIMEOUT = 600.0
"""Seconds that a rank waits for the others; ``SMP_MEETING_TIMEOUT`` in the environment says another number."""

LINGER = 10.0
"""Seconds that a rank waits, at most, until others have heard what came of a call, or need it no more at its end."""

_counts: dict[tuple[int, ...], int] = {}
"""Ranks of a group -> the number of its last meeting. All of its ranks count alike."""

_met_through: list[StoreCommunicator] = []
"""What the last meeting of this process went through. The program may have ended its process group since."""


def _timeout() -> float:
    """Seconds that a rank waits for the others."""
    text = os.environ.get("SMP_MEETING_TIMEOUT", str(TIMEOUT))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise SMPConfigError("SMP_MEETING_TIMEOUT in the environment is a number of seconds above 0", found=text)
    return seconds


def together(kind: str, call: str, prepare: Callable[[], Any] = lambda: None, *, guard: str = "") -> list[Any]:
    """Run `prepare` on all ranks of a group, and wait for all; what it returned, rank by rank.

    Args:
        kind: Of the group, as `job.KINDS` names it.
        call: What the program called, for messages. All ranks have to call the same.
        prepare: What may fail, and has to be done before the ranks need each other. What it returns is JSON.
        guard: What to tell a program that makes the call on too few ranks.

    Raises:
        CheckpointError: What `prepare` raised on the lowest rank that failed; an error of another kind becomes an
            `SMPRuntimeError`. The same on all ranks.
        TooFewRanksError: Some ranks did not come in time, or made another call.
    """
    members = job.ranks().groups[kind]
    if len(members) == 1:
        return [prepare()]
    me = job.rank()
    number = _counts[tuple(members)] = _counts.get(tuple(members), 0) + 1
    name = "-".join(map(str, members))
    _met_through[:] = [communicator()]
    meeting = Round(_met_through[0], f"smp/{name}/{number}", _timeout(), SMPRuntimeError)
    error, value = None, None
    try:
        value = prepare()
    except Exception as found:  # told to all ranks, and raised on all of them
        error = as_checkpoint_error(found, call, me, SMPRuntimeError)
    meeting.say(f"here/{me}", [call, value], error)
    if me == members[0]:
        _decide(meeting, members, call, guard)
    return _verdict(meeting, members, me, call, guard, error)


def _decide(meeting: Round, members: list[int], call: str, guard: str) -> None:
    """On the first rank of the group: hear all, and tell all what came of it."""
    deadline = Deadline(meeting.timeout * LEAD)  # the verdict comes before the others give up on this rank
    values: list[Any] = []
    missing: list[int] = []
    others: list[tuple[int, str]] = []
    errors: list[CheckpointError] = []
    for rank in members:
        try:
            theirs, value = meeting.hear(f"here/{rank}", rank, deadline)
        except RankFailedError as error:
            if error.rank != rank or meeting.has(f"here/{rank}"):
                errors.append(error)
                continue
            missing.append(rank)
            continue
        except CheckpointError as error:
            errors.append(error)
            continue
        values.append(value)
        if theirs != call or meeting.has(f"gone/{rank}"):
            others.append((rank, theirs))
    if missing or others:
        meeting.say("verdict", error=_too_few(members, missing, others, call, guard))
    elif errors:
        meeting.say("verdict", error=errors[0])
    else:
        meeting.say("verdict", values)
    _linger(meeting, [rank for rank in members[1:] if rank not in missing])


def _linger(meeting: Round, present: list[int]) -> None:
    """Wait until all have heard the verdict: the store may be in this process, and end with it."""
    deadline = Deadline(LINGER)
    for rank in present:
        try:
            meeting.hear(f"heard/{rank}", rank, deadline)
        except RankFailedError as error:
            logger.warning("a rank may not have heard what came of a call: %s", error)
            return


@atexit.register
def _leave() -> None:
    """At the end of the program: say that this rank needs the store no more, and on its holder wait for all others.

    Without a launcher the store is in rank 0's process, and a group that rank 0 is not in may still be in a call.
    """
    for store in _met_through:
        end = Round(store, "smp/end", LINGER)
        try:
            end.close()
            if end.rank == 0 and not launcher_has_store():
                end.wait_closed(Deadline(LINGER))
        except RankFailedError as error:
            logger.warning("this process ends, and other ranks may still need the store of the job: %s", error)


def _verdict(
    meeting: Round, members: list[int], me: int, call: str, guard: str, own_error: CheckpointError | None
) -> list[Any]:
    """What `prepare` returned, rank by rank; or the error that the first rank of the group has decided on."""
    try:
        values: list[Any] = _heard(meeting, members, me)
    except RankFailedError as error:
        if error.rank != members[0] or meeting.has("verdict"):
            raise
        # Left as word for that rank, which may come to another call of this number later.
        meeting.say(f"gone/{me}")
        raise _too_few(members, [members[0]], [], call, guard) from None
    except CheckpointError as error:
        if own_error is not None and own_error.to_json() == error.to_json():
            raise own_error from own_error.__cause__  # the same facts, with the original traceback
        raise
    return values


def _heard(meeting: Round, members: list[int], me: int) -> Any:
    """The verdict. Once there is one, the first rank of the group learns that it was heard."""
    try:
        return meeting.hear("verdict", members[0])
    finally:
        if meeting.has("verdict"):
            _tidy(meeting, me == members[0], me)
            meeting.say(f"heard/{me}")  # the last word: the store may end with the process that hears it


def _tidy(meeting: Round, is_first: bool, me: int) -> None:
    """Remove what this rank said in the meeting before: all ranks are in this one, so nobody asks for it."""
    before, _, number = meeting.name.rpartition("/")
    for key in (f"here/{me}", f"heard/{me}", *(["verdict"] if is_first else [])):
        communicator().forget(f"{before}/{int(number) - 1}/{key}")


def _too_few(
    members: list[int], missing: list[int], others: list[tuple[int, str]], call: str, guard: str
) -> TooFewRanksError:
    """The error for ranks that did not come in time, or else for those that made another call."""
    if missing:
        late = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} did not within {_timeout():g} s"
    else:
        late = ", ".join(f"rank {rank} called {theirs}" for rank, theirs in others)
    return TooFewRanksError(
        f"{call} was not called on all ranks of its group",
        expected=f"ranks {', '.join(map(str, members))}",
        found=late,
        hint=guard or None,
    )
