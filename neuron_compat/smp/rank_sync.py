"""Handshake of the ranks of a group before a collective: all proceed, or all raise the same error.

A collective that some ranks never call hangs the others. Before one, each rank therefore publishes its call and the
result of its preparation in the job's key-value store, and waits with a timeout for the outcome, which the first rank
of the group decides: missing ranks, an error of one rank, or the values of all.
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
    LEADER_TIMEOUT_FRACTION,
    Deadline,
    Exchange,
    TorchCommunicator,
    as_checkpoint_error,
    get_torch_communicator,
    has_launcher_store,
)
from xla_ckpt.logs import get_logger

logger = get_logger(__name__)

DEFAULT_TIMEOUT_SECONDS = 600.0
"""Seconds that a rank waits for the others; ``SMP_MEETING_TIMEOUT`` in the environment says another number."""

EXIT_GRACE_SECONDS = 10.0
"""Seconds that a rank waits, at most, until others have heard what came of a call, or need it no more at its end."""

_sync_counts: dict[tuple[int, ...], int] = {}
"""Ranks of a group -> the number of its last meeting. All of its ranks count alike."""

_last_communicator: list[TorchCommunicator] = []
"""What the last meeting of this process went through. The program may have ended its process group since."""


def _get_timeout() -> float:
    """Seconds that a rank waits for the others."""
    text = os.environ.get("SMP_MEETING_TIMEOUT", str(DEFAULT_TIMEOUT_SECONDS))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise SMPConfigError("SMP_MEETING_TIMEOUT in the environment is a number of seconds above 0", found=text)
    return seconds


def run_on_all_ranks(
    kind: str, call_name: str, prepare: Callable[[], Any] = lambda: None, *, hint: str = ""
) -> list[Any]:
    """Run `prepare` on all ranks of a group, and wait for all; what it returned, rank by rank.

    Args:
        kind: Of the group, as `job.KINDS` names it.
        call_name: What the program called, for messages. All ranks have to call the same.
        prepare: What may fail, and has to be done before the ranks need each other. What it returns is JSON.
        hint: What to tell a program that makes the call on too few ranks.

    Raises:
        CheckpointError: What `prepare` raised on the lowest rank that failed; an error of another kind becomes an
            `SMPRuntimeError`. The same on all ranks.
        TooFewRanksError: Some ranks did not come in time, or made another call.
    """
    members = job.get_rank_info().groups[kind]
    if len(members) == 1:
        return [prepare()]
    me = job.rank()
    number = _sync_counts[tuple(members)] = _sync_counts.get(tuple(members), 0) + 1
    name = "-".join(map(str, members))
    _last_communicator[:] = [get_torch_communicator()]
    meeting = Exchange(_last_communicator[0], f"smp/{name}/{number}", _get_timeout(), SMPRuntimeError)
    error, value = None, None
    try:
        value = prepare()
    except Exception as found:  # told to all ranks, and raised on all of them
        error = as_checkpoint_error(found, call_name, me, SMPRuntimeError)
    meeting.publish(f"here/{me}", [call_name, value], error)
    if me == members[0]:
        _decide_outcome(meeting, members, call_name, hint)
    return _wait_for_outcome(meeting, members, me, call_name, hint, error)


def _decide_outcome(exchange: Exchange, members: list[int], call_name: str, hint: str) -> None:
    """On the first rank of the group: hear all, and tell all what came of it."""
    deadline = Deadline(
        exchange.timeout * LEADER_TIMEOUT_FRACTION
    )  # the verdict comes before the others give up on this rank
    values: list[Any] = []
    missing: list[int] = []
    others: list[tuple[int, str]] = []
    errors: list[CheckpointError] = []
    for rank in members:
        try:
            theirs, value = exchange.receive(f"here/{rank}", rank, deadline)
        except RankFailedError as error:
            if error.rank != rank or exchange.is_published(f"here/{rank}"):
                errors.append(error)
                continue
            missing.append(rank)
            continue
        except CheckpointError as error:
            errors.append(error)
            continue
        values.append(value)
        if theirs != call_name or exchange.is_published(f"gone/{rank}"):
            others.append((rank, theirs))
    if missing or others:
        exchange.publish("verdict", error=_build_too_few_error(members, missing, others, call_name, hint))
    elif errors:
        exchange.publish("verdict", error=errors[0])
    else:
        exchange.publish("verdict", values)
    _wait_for_acknowledgements(exchange, [rank for rank in members[1:] if rank not in missing])


def _wait_for_acknowledgements(exchange: Exchange, present: list[int]) -> None:
    """Wait until all have heard the verdict: the store may be in this process, and end with it."""
    deadline = Deadline(EXIT_GRACE_SECONDS)
    for rank in present:
        try:
            exchange.receive(f"heard/{rank}", rank, deadline)
        except RankFailedError as error:
            logger.warning("a rank may not have heard what came of a call: %s", error)
            return


@atexit.register
def _close_at_exit() -> None:
    """At the end of the program: say that this rank needs the store no more, and on its holder wait for all others.

    Without a launcher the store is in rank 0's process, and a group that rank 0 is not in may still be in a call.
    """
    for store in _last_communicator:
        end = Exchange(store, "smp/end", EXIT_GRACE_SECONDS)
        try:
            end.close()
            if end.rank == 0 and not has_launcher_store():
                end.wait_closed(Deadline(EXIT_GRACE_SECONDS))
        except RankFailedError as error:
            logger.warning("this process ends, and other ranks may still need the store of the job: %s", error)


def _wait_for_outcome(
    exchange: Exchange, members: list[int], me: int, call_name: str, hint: str, own_error: CheckpointError | None
) -> list[Any]:
    """What `prepare` returned, rank by rank; or the error that the first rank of the group has decided on."""
    try:
        values: list[Any] = _receive_outcome(exchange, members, me)
    except RankFailedError as error:
        if error.rank != members[0] or exchange.is_published("verdict"):
            raise
        # Left as word for that rank, which may come to another call of this number later.
        exchange.publish(f"gone/{me}")
        raise _build_too_few_error(members, [members[0]], [], call_name, hint) from None
    except CheckpointError as error:
        if own_error is not None and own_error.to_json() == error.to_json():
            raise own_error from own_error.__cause__  # the same facts, with the original traceback
        raise
    return values


def _receive_outcome(exchange: Exchange, members: list[int], me: int) -> Any:
    """The verdict. Once there is one, the first rank of the group learns that it was heard."""
    try:
        return exchange.receive("verdict", members[0])
    finally:
        if exchange.is_published("verdict"):
            _delete_previous_keys(exchange, me == members[0], me)
            exchange.publish(f"heard/{me}")  # the last word: the store may end with the process that hears it


def _delete_previous_keys(exchange: Exchange, is_first: bool, me: int) -> None:
    """Remove what this rank said in the meeting before: all ranks are in this one, so nobody asks for it."""
    before, _, number = exchange.name.rpartition("/")
    for key in (f"here/{me}", f"heard/{me}", *(["verdict"] if is_first else [])):
        get_torch_communicator().delete(f"{before}/{int(number) - 1}/{key}")


def _build_too_few_error(
    members: list[int], missing: list[int], others: list[tuple[int, str]], call_name: str, hint: str
) -> TooFewRanksError:
    """The error for ranks that did not come in time, or else for those that made another call."""
    if missing:
        late = (
            f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} did not within {_get_timeout():g} s"
        )
    else:
        late = ", ".join(f"rank {rank} called {theirs}" for rank, theirs in others)
    return TooFewRanksError(
        f"{call_name} was not called on all ranks of its group",
        expected=f"ranks {', '.join(map(str, members))}",
        found=late,
        hint=hint or None,
    )
