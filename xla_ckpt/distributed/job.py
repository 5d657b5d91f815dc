"""A call of one rank in its job, and the sequence of calls that all ranks make together.

The `Exchange` of a `Job` has the same number on all ranks, assigned by the process-wide `ExchangeSequence`. Each rank
closes an exchange when it has received everything, and messages are deleted from the store once all ranks have closed
it. `shut_down` announces the exit of this process, and keeps rank 0 alive until the other ranks have received its last
messages. This module imports no framework: `current_job` finds the ranks.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

from xla_ckpt.core.sharding.mesh import RankInfo
from xla_ckpt.distributed.consensus import raise_agreed_error
from xla_ckpt.distributed.exchange import Communicator, Deadline, Exchange
from xla_ckpt.distributed.handshake import (
    CallMismatches,
    CallSignature,
    announce_exit,
    exchange_handshakes,
    is_skipped_call,
    prepare_handshake,
)
from xla_ckpt.errors import CheckpointError, LoadError, RankFailedError, SaveError, from_json
from xla_ckpt.logs import get_logger
from xla_ckpt.storage.process_state import fork_safe_lock, register_fork_reset

logger = get_logger(__name__)

DEFAULT_TIMEOUT = 1800.0
"""Default time that a rank waits for another before it gives up (s)."""


class ExchangeSequence:
    """The exchanges of one process with its peers, numbered equally on all ranks. Thread-safe.

    Args:
        communicator: Client of the job's store.
        last_number: Number of the last exchange of an earlier process group on the same store.
    """

    def __init__(self, communicator: Communicator, last_number: int = 0) -> None:
        self.communicator = communicator
        self._lock = fork_safe_lock()
        self.last_number = last_number
        """Number of the latest exchange."""
        self._open_exchanges: dict[str, tuple[int, Exchange]] = {}
        """Exchanges with keys left in the store, oldest first: name -> (number, exchange)."""
        self.mismatches = CallMismatches(communicator.rank)
        """The calls of the latest exchanges in which they differed."""
        self.exit_error: CheckpointError | None = None
        """The error of all further calls once a rank has exited; otherwise None."""

    def begin(self, operation: str, timeout: float) -> Exchange:
        """Return the next exchange, which is the same on all ranks that make the same calls in the same order."""
        exchange = Exchange(self.communicator, "", timeout, LoadError if operation == "load" else SaveError)
        self._assign_number(exchange)
        return exchange

    def create_next(self, timeout: float) -> Exchange:
        """Return the exchange of the next call without participating in it."""
        return Exchange(self.communicator, f"call/{self.last_number + 1}", timeout)

    def skip_exchange(self, exchange: Exchange) -> None:
        """Replace the exchange of a different, failed call with the next one.

        The messages of this rank stay in the store, because another rank may still need them to skip the exchange too.
        """
        with self._lock:
            self._open_exchanges.pop(exchange.name, None)
        exchange.published_keys.clear()
        self._assign_number(exchange)

    def _assign_number(self, exchange: Exchange) -> None:
        with self._lock:
            self.last_number += 1
            exchange.number = self.last_number
            exchange.name = exchange.outer_name = (
                f"call/{self.last_number}"  # independent of the operation, so that ranks with different calls meet
            )
            if self.communicator.size > 1:
                self._open_exchanges[exchange.name] = self.last_number, exchange

    def give_back(self, exchange: Exchange) -> bool:
        """Return the number of the latest exchange, because the call is skipped. Return True if it was still the
        latest.
        """
        with self._lock:
            if exchange.number != self.last_number:
                return False
            self._open_exchanges.pop(exchange.name, None)
            self.last_number -= 1
            return True

    def claim_behind(self, timeout: float, number: int, other: int) -> bool:
        """Claim that this rank is behind another one since an exchange. Return False if that rank has claimed the
        opposite.

        Raises:
            RankFailedError: The store is unreachable.
        """
        rank = self.communicator.rank
        exchange = Exchange(self.communicator, f"call/{number}", timeout)
        return bool(exchange.publish_once(f"behind/{min(rank, other)}-{max(rank, other)}", rank) == rank)

    @contextlib.contextmanager
    def participate(self, exchange: Exchange) -> Iterator[None]:
        """Wrap all communication of this rank in an exchange, and close the exchange at the end.

        The exchange is also closed after an error, because the other ranks wait for it. It is not closed after the
        loss of a rank, because the store may be gone with that rank, and the other ranks no longer wait.
        """
        try:
            yield
        except RankFailedError:
            with self._lock:
                self._open_exchanges.pop(
                    exchange.name, None
                )  # the lost rank never closes it, so it can never be deleted
            raise
        except BaseException as error:
            if not isinstance(error, CheckpointError):
                _report_interruption(exchange, error)
            _close_exchange(exchange)
            raise
        _close_exchange(exchange)

    def delete_finished(self, timeout: float) -> None:
        """Delete this rank's messages of exchanges that all ranks have closed, without waiting for them.

        Args:
            timeout: Timeout of a request to the store (s).

        Raises:
            RankFailedError: The store is unreachable.
        """
        with self._lock:  # released before requests to the store, so that starting an exchange never waits for them
            rounds = list(self._open_exchanges.values())
        settled = self._find_last_closed(rounds, timeout) if rounds else 0
        for number, exchange in rounds:
            if number <= settled:
                exchange.delete_published()
                with self._lock:
                    self._open_exchanges.pop(exchange.name, None)

    def _find_last_closed(self, exchanges: Sequence[tuple[int, Exchange]], timeout: float) -> int:
        """Return the number of the last exchange up to which all ranks have closed all exchanges, or 0.

        Rank 0 publishes it, so that not every rank queries the store about every other.
        """
        books = Exchange(self.communicator, "rounds", timeout)
        if books.rank != 0:
            return int(books.receive("settled", 0)) if books.is_published("settled") else 0
        settled = 0
        for number, exchange in exchanges:
            if not exchange.is_closed():
                break  # a later exchange may be closed already, but messages are deleted in order
            settled = number
        if settled:
            books.publish("settled", settled)  # overwritten each time, and never deleted
        return settled

    def wait_at_exit(self, seconds: float) -> None:
        """On rank 0, wait until all ranks have closed all exchanges, at most `seconds` seconds.

        Without a launcher, the process of rank 0 hosts the store, which ends with it.
        """
        if self.communicator.rank != 0:
            return
        deadline = Deadline(seconds)
        with self._lock:
            rounds = list(self._open_exchanges.values())
        try:
            for _, exchange in rounds:
                exchange.wait_closed(deadline)
        except RankFailedError as error:
            logger.warning("this process ends before all others have heard of the last call: %s", error)


def _report_interruption(exchange: Exchange, error: BaseException) -> None:
    """Send the other ranks the reason why this rank leaves a call, such as an exception from a signal handler."""
    if exchange.size > 1:
        exchange.decide_outcome(
            RankFailedError(
                f"rank {exchange.rank} was interrupted by {type(error).__name__}",
                rank=exchange.rank,
                hint="Make the call again, on all ranks.",
            )
        )


def _close_exchange(exchange: Exchange) -> None:
    try:
        exchange.close()
    except RankFailedError as error:
        # The call has a result, which must not be lost. The next call finds that the store is unreachable, and raises.
        logger.warning("the end of a call could not be told to the other ranks: %s", error)


EXIT_GRACE_SECONDS = 10.0
"""Maximum time that rank 0 waits at exit for ranks that have not received the last messages (s)."""

EXIT_ANNOUNCE_SECONDS = 1.0
"""Timeout for announcing the exit of this process (s). The store may have ended before."""

_sequences: list[ExchangeSequence] = register_fork_reset([], list.clear)  # a worker forked by a rank is not that rank
"""The exchange sequence of the current process group, if any. A later group gets a new one."""


def get_exchange_sequence(communicator: Communicator) -> ExchangeSequence:
    """Return the exchange sequence of a communicator. Its numbers continue after an earlier group with the same
    store.
    """
    if not _sequences or _sequences[0].communicator is not communicator:
        # Skip one number: a rank of the earlier group may have announced its exit in that exchange.
        _sequences[:] = [ExchangeSequence(communicator, _sequences[0].last_number + 1 if _sequences else 0)]
    return _sequences[0]


@dataclass(frozen=True, slots=True)
class Job:
    """One call of one rank in its job."""

    exchange: Exchange
    placement: RankInfo
    sequence: ExchangeSequence

    def participate(self) -> AbstractContextManager[None]:
        """Return a context for all communication of this rank in its call."""
        return self.sequence.participate(self.exchange)

    def begin_call(
        self,
        call: CallSignature,
        prepare: Callable[[], Any] = lambda: None,
        combine: Callable[[list[Any]], Any] = lambda _: None,
    ) -> Any:
        """Begin a call on all ranks: exchange signatures, so that nothing is done before all ranks have joined.

        A rank that has skipped calls, which the others gave up, joins the exchange that they are in.

        Args:
            call: Signature of the call, which must be equal on all ranks.
            prepare: Function that runs before the exchange, may fail, and returns JSON.
            combine: Function that rank 0 applies to the prepared values of all ranks. It returns JSON.

        Returns:
            The result of `combine`, on all ranks.

        Raises:
            CheckpointError: The error of `prepare` on the lowest rank that failed; the same on all ranks.
            RankFailedError: A rank did not join in time.
            UsageError: The ranks make different calls.
        """
        if self.exchange.size == 1:
            return combine([prepare()])
        if self.sequence.exit_error is not None:
            raise _copy_for_call(self.sequence.exit_error, call)
        self.sequence.delete_finished(self.exchange.timeout)
        word = prepare_handshake(self.exchange, call, prepare)
        while is_skipped_call(call, verdict := exchange_handshakes(self.exchange, word, combine)):
            text = "this rank has left out a call that others made, %s, and which failed for that; it goes on with %s"
            logger.warning(text, verdict.call, call)
            self.sequence.skip_exchange(self.exchange)
        if verdict.exit_error is not None:
            self.sequence.exit_error = verdict.exit_error
            raise _copy_for_call(verdict.exit_error, call)
        number = self.exchange.number
        if verdict.error is not None:
            if verdict.value is not None:
                self.sequence.mismatches.add(number, list(map(CallSignature.from_json, verdict.value)), verdict.error)
            raise_agreed_error(verdict.error, word.error)
        self.sequence.mismatches.clear(number)
        return verdict.value

    def skip_if_behind(self, call: CallSignature, earlier: CheckpointError | None = None) -> None:
        """Raise an error for a call that the other ranks made earlier, while this rank made another. Uses no exchange.

        Args:
            call: Signature of the call.
            earlier: Error to raise instead, if given.

        Raises:
            UsageError: The call is skipped. The next call is the same on all ranks.
            RankFailedError: The store is unreachable.
        """
        number = self.exchange.number
        error = self.sequence.mismatches.find_skip_error(
            number, call, partial(self.sequence.claim_behind, self.exchange.timeout)
        )
        if error is not None and self.sequence.give_back(self.exchange):
            raise earlier or error

    def resolve_progress(self, progress: bool | None) -> bool | None:
        """Return `progress` on rank 0, and False on other ranks, which show no progress bar."""
        return progress if self.exchange.rank == 0 else False


def _copy_for_call(error: CheckpointError, call: CallSignature) -> CheckpointError:
    """Return a copy of an error for another call that it applies to."""
    return from_json(error.to_json()).at(path=call.path or None, tag=call.tag)


def has_launcher_store() -> bool:
    """Return True if the launcher's process hosts the job's store. Otherwise rank 0 hosts it, and it ends with rank
    0.
    """
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def shut_down(communicator: Communicator | None) -> None:
    """Announce the exit of this process to the other ranks, and wait for ranks that need the last messages.

    Without a launcher the store is in the process of rank 0, so rank 0 must not exit before they are received.

    Args:
        communicator: Communicator to use if this process has not made a call yet.
    """
    if not _sequences and communicator is not None:
        get_exchange_sequence(communicator)
    for rounds in _sequences:
        try:
            announce_exit(rounds.create_next(EXIT_ANNOUNCE_SECONDS))
        except (RankFailedError, RuntimeError) as error:
            # The process with the store has exited, or Python cannot start the thread that would connect to it.
            logger.debug("the end of this process could not be told to other ranks: %s", error)
    if not has_launcher_store():
        for rounds in _sequences:
            rounds.wait_at_exit(EXIT_GRACE_SECONDS)
