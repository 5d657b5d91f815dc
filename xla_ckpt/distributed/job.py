"""A call of one rank in its job, and the sequence of calls that all ranks make together.

The `Exchange` of a `Job` has the same number on all ranks, assigned by the process-wide `ExchangeSequence`. Each
rank closes an exchange when it has received everything, and messages are deleted from the store once all ranks have
closed it. `shut_down` announces the exit of this process, and keeps rank 0 alive until the other ranks have
received its last messages. This module imports no framework: `current_job` finds the ranks.
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
"""Seconds that a rank waits for another before it gives up, by default."""


class ExchangeSequence:
    """The rounds of one process with its peers. All of them number the rounds alike. Safe for several threads."""

    def __init__(self, communicator: Communicator, last_number: int = 0) -> None:
        self.communicator = communicator
        self._lock = fork_safe_lock()
        self.last_number = last_number
        """Number of the latest round.

        The first follows `last_number`, which an earlier group on the same store reached.
        """
        self._open_exchanges: dict[str, tuple[int, Exchange]] = {}
        """(number, round) of rounds of which something is left in the store, by name, oldest first."""
        self.mismatches = CallMismatches(communicator.rank)
        """The calls of the latest rounds if they differed."""
        self.exit_error: CheckpointError | None = None
        """That a rank has ended, once it is known: no call of all ranks can succeed any more."""

    def begin(self, operation: str, timeout: float) -> Exchange:
        """The next round: the same one on all ranks that make the same calls in the same order."""
        exchange = Exchange(self.communicator, "", timeout, LoadError if operation == "load" else SaveError)
        self._assign_number(exchange)
        return exchange

    def create_next(self, timeout: float) -> Exchange:
        """The round in which the others wait for this rank, if they call it once more. It does not take part in it."""
        return Exchange(self.communicator, f"call/{self.last_number + 1}", timeout)

    def skip_exchange(self, exchange: Exchange) -> None:
        """Leave a round that is of another call, and has failed, for the next one.

        What this rank has said in it stays in the store: another rank may still have to pass it over.
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
                f"call/{self.last_number}"  # whatever is called: ranks that differ have to meet
            )
            if self.communicator.size > 1:
                self._open_exchanges[exchange.name] = self.last_number, exchange

    def give_back(self, exchange: Exchange) -> bool:
        """Leave the latest round for the next call, because this one is not made; whether it is still the latest."""
        with self._lock:
            if exchange.number != self.last_number:
                return False
            self._open_exchanges.pop(exchange.name, None)
            self.last_number -= 1
            return True

    def claim_behind(self, timeout: float, number: int, other: int) -> bool:
        """Claim that this rank is behind another one since a round; whether that one has not claimed the opposite.

        Raises:
            RankFailedError: The store is gone.
        """
        rank = self.communicator.rank
        exchange = Exchange(self.communicator, f"call/{number}", timeout)
        return bool(exchange.publish_once(f"behind/{min(rank, other)}-{max(rank, other)}", rank) == rank)

    @contextlib.contextmanager
    def participate(self, exchange: Exchange) -> Iterator[None]:
        """Around all that this rank says and hears in a round: at the end it closes the round.

        It does so after an error, too, because the others wait for it. Only after the loss of another rank it does
        not: the store may be gone with that rank, and nobody waits for this round any more.
        """
        try:
            yield
        except RankFailedError:
            with self._lock:
                self._open_exchanges.pop(
                    exchange.name, None
                )  # the lost rank never closes it, so nobody could ever tidy it
            raise
        except BaseException as error:
            if not isinstance(error, CheckpointError):
                _report_interruption(exchange, error)
            _close_exchange(exchange)
            raise
        _close_exchange(exchange)

    def delete_finished(self, timeout: float) -> None:
        """Remove from the store what this rank said in rounds that all ranks have closed. It does not wait for them.

        Args:
            timeout: Seconds that a request to the store may take.

        Raises:
            RankFailedError: The store is gone.
        """
        with self._lock:  # released before the store is asked: who begins a round must not wait for the store
            rounds = list(self._open_exchanges.values())
        settled = self._find_last_closed(rounds, timeout) if rounds else 0
        for number, exchange in rounds:
            if number <= settled:
                exchange.delete_published()
                with self._lock:
                    self._open_exchanges.pop(exchange.name, None)

    def _find_last_closed(self, exchanges: Sequence[tuple[int, Exchange]], timeout: float) -> int:
        """The latest round up to which all ranks have closed all rounds; 0 if there is none.

        Rank 0 finds out for all, so that the store is not asked by every rank about every other.
        """
        books = Exchange(self.communicator, "rounds", timeout)
        if books.rank != 0:
            return int(books.receive("settled", 0)) if books.is_published("settled") else 0
        settled = 0
        for number, exchange in exchanges:
            if not exchange.is_closed():
                break  # a later round may be closed already: its messages wait for those of this one
            settled = number
        if settled:
            books.publish("settled", settled)  # written over again and again, and never removed
        return settled

    def wait_for_peers(self, seconds: float) -> None:
        """On rank 0: wait until all ranks have closed all rounds, at most so many seconds.

        Without a launcher the store lives in the process of rank 0, and ends with it.
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
    """Tell the other ranks why this one leaves a call that all are in: a signal handler has raised, for instance."""
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
        # The call has its result, which must not be lost for this. The next call finds the store gone, and raises.
        logger.warning("the end of a call could not be told to the other ranks: %s", error)


EXIT_GRACE_SECONDS = 10.0
"""Seconds that rank 0 waits at the exit of the program, at most, for ranks that have not heard of the last calls."""

EXIT_ANNOUNCE_SECONDS = 1.0
"""Seconds that the store has at the exit of the program to take the word of its end: it may have ended before."""

_sequences: list[ExchangeSequence] = register_fork_reset([], list.clear)  # a worker that a rank forks is not that rank
"""The rounds of the current process group, if there were any. A later group gets others."""


def get_exchange_sequence(communicator: Communicator) -> ExchangeSequence:
    """The rounds over a communicator. Their numbers go on from those of an earlier one, which used the same store."""
    if not _sequences or _sequences[0].communicator is not communicator:
        # One number is left out: in that round a rank of the earlier group may have said that it has ended.
        _sequences[:] = [ExchangeSequence(communicator, _sequences[0].last_number + 1 if _sequences else 0)]
    return _sequences[0]


@dataclass(frozen=True, slots=True)
class Job:
    """One call of one process, among the same calls of its peers."""

    exchange: Exchange
    placement: RankInfo
    sequence: ExchangeSequence

    def participate(self) -> AbstractContextManager[None]:
        """A context around everything that this rank says and hears in its call."""
        return self.sequence.participate(self.exchange)

    def begin_call(
        self,
        call: CallSignature,
        prepare: Callable[[], Any] = lambda: None,
        combine: Callable[[list[Any]], Any] = lambda _: None,
    ) -> Any:
        """Begin a call together with all ranks: each says which call it makes, and nothing is done before all have.

        A rank that has left calls out which the others gave up takes part in the next one: it comes later to fewer
        rounds than they, and goes on to the one that they are in.

        Args:
            call: What this rank was called for, as far as all ranks have to be called for the same.
            prepare: What may fail on a rank, and has to be done before. It returns JSON.
            combine: What rank 0 makes of all that the ranks have prepared. It returns JSON, too.

        Returns:
            What `combine` has returned, on all ranks.

        Raises:
            CheckpointError: What `prepare` raised on the lowest rank that failed; the same on all ranks.
            RankFailedError: A rank did not come in time.
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
        """Refuse a call that the other ranks have made before, while this one made another. It takes no round.

        Args:
            call: What this rank was called for.
            earlier: What is raised then instead.

        Raises:
            UsageError: It is such a call. The next call of all ranks is the same one.
            RankFailedError: The store is gone.
        """
        number = self.exchange.number
        error = self.sequence.mismatches.find_skip_error(
            number, call, partial(self.sequence.claim_behind, self.exchange.timeout)
        )
        if error is not None and self.sequence.give_back(self.exchange):
            raise earlier or error

    def resolve_progress(self, progress: bool | None) -> bool | None:
        """Whether this rank may show a progress bar."""
        return progress if self.exchange.rank == 0 else False


def _copy_for_call(error: CheckpointError, call: CallSignature) -> CheckpointError:
    """The same error, of one of the calls that it is the error of."""
    return from_json(error.to_json()).at(path=call.path or None, tag=call.tag)


def has_launcher_store() -> bool:
    """Whether the job's store is in the launcher's process: else it is in that of rank 0, and ends with it."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def shut_down(communicator: Communicator | None) -> None:
    """At the end of the program: tell the other ranks of it, and wait for those that have to hear of its last calls.

    They hear through the store, and where there is no launcher, rank 0's process holds it.

    Args:
        communicator: What this process would meet the others through if it made its first call now.
    """
    if not _sequences and communicator is not None:
        get_exchange_sequence(communicator)
    for rounds in _sequences:
        try:
            announce_exit(rounds.create_next(EXIT_ANNOUNCE_SECONDS))
        except (RankFailedError, RuntimeError) as error:
            # The store was in another process, which has ended; or Python starts no thread any more to reach it by.
            logger.debug("the end of this process could not be told to other ranks: %s", error)
    if not has_launcher_store():
        for rounds in _sequences:
            rounds.wait_for_peers(EXIT_GRACE_SECONDS)
