"""The rounds of a process, and when the messages of a round may be removed from the store.

A round is one call of all ranks, and the messages that they exchange in it. A rank may be far behind the others:
rank 0, for instance, tells them that it has failed, and waits for nobody. So each rank closes a round when it has heard
all that it wants to hear, and the messages are removed when all ranks have closed it. The process that holds the store
must not end before that, either.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from xla_ckpt.errors import CheckpointError, LoadError, RankFailedError, SaveError
from xla_ckpt.job.call import DifferentCalls
from xla_ckpt.job.communicator import Communicator
from xla_ckpt.job.round import Deadline, Round
from xla_ckpt.logs import get_logger
from xla_ckpt.storage.process_state import process_lock

logger = get_logger(__name__)

TIMEOUT = 1800.0
"""Seconds that a rank waits for another before it gives up, by default."""


class Rounds:
    """The rounds of one process with its peers. All of them number the rounds alike. Safe for several threads."""

    def __init__(self, communicator: Communicator, before: int = 0) -> None:
        self.communicator = communicator
        self._lock = process_lock()
        self.last = before
        """Number of the latest round. The first follows `before`, which an earlier group on the same store reached."""
        self._open: dict[str, tuple[int, Round]] = {}
        """(number, round) of rounds of which something is left in the store, by name, oldest first."""
        self.different = DifferentCalls(communicator.rank)
        """The calls of the latest rounds if they differed."""
        self.ended: CheckpointError | None = None
        """That a rank has ended, once it is known: no call of all ranks can succeed any more."""

    def begin(self, doing: str, timeout: float) -> Round:
        """The next round: the same one on all ranks that make the same calls in the same order."""
        exchange = Round(self.communicator, "", timeout, LoadError if doing == "load" else SaveError)
        self._number(exchange)
        return exchange

    def following(self, timeout: float) -> Round:
        """The round in which the others wait for this rank, if they call it once more. It does not take part in it."""
        return Round(self.communicator, f"call/{self.last + 1}", timeout)

    def pass_over(self, exchange: Round) -> None:
        """Leave a round that is of another call, and has failed, for the next one.

        What this rank has said in it stays in the store: another rank may still have to pass it over.
        """
        with self._lock:
            self._open.pop(exchange.name, None)
        exchange.said.clear()
        self._number(exchange)

    def _number(self, exchange: Round) -> None:
        with self._lock:
            self.last += 1
            exchange.number = self.last
            exchange.name = exchange.whole = f"call/{self.last}"  # whatever is called: ranks that differ have to meet
            if self.communicator.size > 1:
                self._open[exchange.name] = self.last, exchange

    def give_back(self, exchange: Round) -> bool:
        """Leave the latest round for the next call, because this one is not made; whether it is still the latest."""
        with self._lock:
            if exchange.number != self.last:
                return False
            self._open.pop(exchange.name, None)
            self.last -= 1
            return True

    def is_behind(self, timeout: float, number: int, other: int) -> bool:
        """Claim that this rank is behind another one since a round; whether that one has not claimed the opposite.

        Raises:
            RankFailedError: The store is gone.
        """
        rank = self.communicator.rank
        exchange = Round(self.communicator, f"call/{number}", timeout)
        return bool(exchange.settle(f"behind/{min(rank, other)}-{max(rank, other)}", rank) == rank)

    @contextlib.contextmanager
    def taking_part(self, exchange: Round) -> Iterator[None]:
        """Around all that this rank says and hears in a round: at the end it closes the round.

        It does so after an error, too, because the others wait for it. Only after the loss of another rank it does
        not: the store may be gone with that rank, and nobody waits for this round any more.
        """
        try:
            yield
        except RankFailedError:
            with self._lock:
                self._open.pop(exchange.name, None)  # the lost rank never closes it, so nobody could ever tidy it
            raise
        except BaseException as error:
            if not isinstance(error, CheckpointError):
                _interrupted(exchange, error)
            _close(exchange)
            raise
        _close(exchange)

    def tidy(self, timeout: float) -> None:
        """Remove from the store what this rank said in rounds that all ranks have closed. It does not wait for them.

        Args:
            timeout: Seconds that a request to the store may take.

        Raises:
            RankFailedError: The store is gone.
        """
        with self._lock:  # released before the store is asked: who begins a round must not wait for the store
            rounds = list(self._open.values())
        settled = self._settled(rounds, timeout) if rounds else 0
        for number, exchange in rounds:
            if number <= settled:
                exchange.forget()
                with self._lock:
                    self._open.pop(exchange.name, None)

    def _settled(self, rounds: Sequence[tuple[int, Round]], timeout: float) -> int:
        """The latest round up to which all ranks have closed all rounds; 0 if there is none.

        Rank 0 finds out for all, so that the store is not asked by every rank about every other.
        """
        books = Round(self.communicator, "rounds", timeout)
        if books.rank != 0:
            return int(books.hear("settled", 0)) if books.has("settled") else 0
        settled = 0
        for number, exchange in rounds:
            if not exchange.is_closed():
                break  # a later round may be closed already: its messages wait for those of this one
            settled = number
        if settled:
            books.say("settled", settled)  # written over again and again, and never removed
        return settled

    def linger(self, seconds: float) -> None:
        """On rank 0: wait until all ranks have closed all rounds, at most so many seconds.

        Without a launcher the store lives in the process of rank 0, and ends with it.
        """
        if self.communicator.rank != 0:
            return
        deadline = Deadline(seconds)
        with self._lock:
            rounds = list(self._open.values())
        try:
            for _, exchange in rounds:
                exchange.wait_closed(deadline)
        except RankFailedError as error:
            logger.warning("this process ends before all others have heard of the last call: %s", error)


def _interrupted(exchange: Round, error: BaseException) -> None:
    """Tell the other ranks why this one leaves a call that all are in: a signal handler has raised, for instance."""
    if exchange.size > 1:
        exchange.decide(
            RankFailedError(
                f"rank {exchange.rank} was interrupted by {type(error).__name__}",
                rank=exchange.rank,
                hint="Make the call again, on all ranks.",
            )
        )


def _close(exchange: Round) -> None:
    try:
        exchange.close()
    except RankFailedError as error:
        # The call has its result, which must not be lost for this. The next call finds the store gone, and raises.
        logger.warning("the end of a call could not be told to the other ranks: %s", error)
