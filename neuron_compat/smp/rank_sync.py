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
"""Seconds that a rank waits for the others; ``SMP_MEETING_TIMEOUT`` in the environment overrides it."""

EXIT_GRACE_SECONDS = 10.0
"""Maximum number of seconds that a rank waits until others have received an outcome, or no longer need it at exit."""

_sync_counts: dict[tuple[int, ...], int] = {}
"""Ranks of a group -> the number of its last handshake, which is equal on all of its ranks."""

_last_communicator: list[TorchCommunicator] = []
"""Communicator of this process's last handshake. The program may have destroyed its process group since."""


def _get_timeout() -> float:
    """Return the number of seconds that a rank waits for the others.

    Raises:
        SMPConfigError: The environment variable is not a number above 0.
    """
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
    """Run `prepare` on all ranks of a group, wait for all, and return the results in rank order.

    Args:
        kind: Kind of the group, a key of `job.GROUP_KINDS`.
        call_name: Name of the program's call, for messages. It must be the same on all ranks.
        prepare: Operations that may fail, and must precede the collective. The result must be JSON-serializable.
        hint: Hint for a program that makes the call on too few ranks.

    Raises:
        CheckpointError: The error of `prepare` on the lowest rank that failed; an error of another kind becomes an
            `SMPRuntimeError`. The same on all ranks.
        TooFewRanksError: Some ranks did not make the call in time, or made another call.
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
    except Exception as found:  # sent to all ranks, and raised on all of them
        error = as_checkpoint_error(found, call_name, me, SMPRuntimeError)
    meeting.publish(f"here/{me}", [call_name, value], error)
    if me == members[0]:
        _decide_outcome(meeting, members, call_name, hint)
    return _wait_for_outcome(meeting, members, me, call_name, hint, error)


def _decide_outcome(exchange: Exchange, members: list[int], call_name: str, hint: str) -> None:
    """Receive the results of all ranks on the first rank of the group, and publish the outcome."""
    deadline = Deadline(
        exchange.timeout * LEADER_TIMEOUT_FRACTION
    )  # the outcome arrives before the others' timeout for this rank
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
    """Wait until all ranks have received the outcome, because the store may be in this process, and end with it."""
    deadline = Deadline(EXIT_GRACE_SECONDS)
    for rank in present:
        try:
            exchange.receive(f"heard/{rank}", rank, deadline)
        except RankFailedError as error:
            logger.warning("a rank may not have heard what came of a call: %s", error)
            return


@atexit.register
def _close_at_exit() -> None:
    """Publish at exit that this rank no longer needs the store, and wait for all others on the rank that holds it.

    Without a launcher, the store is in rank 0's process, and a group without rank 0 may still be in a call.
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
    """Return the results of `prepare` in rank order; or raise the error that the first rank of the group has chosen."""
    try:
        values: list[Any] = _receive_outcome(exchange, members, me)
    except RankFailedError as error:
        if error.rank != members[0] or exchange.is_published("verdict"):
            raise
        # For that rank, which may reach another call with this number later.
        exchange.publish(f"gone/{me}")
        raise _build_too_few_error(members, [members[0]], [], call_name, hint) from None
    except CheckpointError as error:
        if own_error is not None and own_error.to_json() == error.to_json():
            raise own_error from own_error.__cause__  # the same error, with the original traceback
        raise
    return values


def _receive_outcome(exchange: Exchange, members: list[int], me: int) -> Any:
    """Receive the outcome, and acknowledge it to the first rank of the group."""
    try:
        return exchange.receive("verdict", members[0])
    finally:
        if exchange.is_published("verdict"):
            _delete_previous_keys(exchange, me == members[0], me)
            exchange.publish(f"heard/{me}")  # last, because the store may end with the process that reads it


def _delete_previous_keys(exchange: Exchange, is_first: bool, me: int) -> None:
    """Delete this rank's keys of the previous handshake. All ranks are in this one, so none will read them."""
    before, _, number = exchange.name.rpartition("/")
    for key in (f"here/{me}", f"heard/{me}", *(["verdict"] if is_first else [])):
        get_torch_communicator().delete(f"{before}/{int(number) - 1}/{key}")


def _build_too_few_error(
    members: list[int], missing: list[int], others: list[tuple[int, str]], call_name: str, hint: str
) -> TooFewRanksError:
    """Return the error for ranks that did not make the call in time, or otherwise for those that made another call."""
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
