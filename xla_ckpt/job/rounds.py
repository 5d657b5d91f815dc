"""The rounds of a process, and when what was said in them may be forgotten.

A rank may be far behind: rank 0 that fails tells the others, and waits for nobody. So each rank closes a round when it
has heard all that it wants to hear, and what was said goes when all have closed it. The process that holds the store
must not end before that, either.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence

from xla_ckpt.errors import RankFailedError
from xla_ckpt.job.communicator import Communicator
from xla_ckpt.job.verdict import Deadline, Round

logger = logging.getLogger(__name__)


class Rounds:
    """The rounds of one process with its peers, numbered alike by all. Safe for several threads."""

    def __init__(self, communicator: Communicator, before: int = 0) -> None:
        self.communicator = communicator
        self._lock = threading.Lock()
        self.last = before
        """Number of the latest round; the first one follows on `before`, that of an earlier group on the same store."""
        self._open: dict[str, tuple[int, Round]] = {}
        """Those of which something is left in the store, by name, oldest first."""
        self._books = Round(communicator, "rounds", 60.0)

    def begin(self, doing: str, timeout: float) -> Round:
        """The next round: the same one on all ranks that make the same calls in the same order."""
        with self._lock:
            self.last += 1
            made = Round(self.communicator, f"{doing}/{self.last}", timeout)
            if self.communicator.size > 1:
                self._open[made.name] = self.last, made
            return made

    @contextlib.contextmanager
    def taking_part(self, exchange: Round) -> Iterator[None]:
        """This rank's part in a round, at the end of which it closes it."""
        try:
            yield
        except RankFailedError:
            with self._lock:
                self._open.pop(exchange.name, None)  # a rank is gone, and closes nothing any more
            raise
        except BaseException:
            _close(exchange)
            raise
        _close(exchange)

    def tidy(self) -> None:
        """Forget what this rank said in rounds that all ranks have closed. Reaches the store, and never waits.

        Raises:
            RankFailedError: The store is gone.
        """
        with self._lock:  # not while the store is asked: who begins a round must not wait for that
            rounds = list(self._open.values())
        settled = self._settled(rounds) if rounds else 0
        for number, made in rounds:
            if number <= settled:
                made.forget()
                with self._lock:
                    self._open.pop(made.name, None)

    def _settled(self, rounds: Sequence[tuple[int, Round]]) -> int:
        """The number of a round that all ranks have closed, as all before it. Rank 0 finds out for all."""
        if self.communicator.rank != 0:
            return int(self._books.hear("settled", 0)) if self._books.has("settled") else 0
        settled = 0
        for number, made in rounds:
            if not made.is_closed():
                break
            settled = number
        if settled:
            self._books.say("settled", settled)
            self._books.said.clear()
        return settled

    def linger(self, seconds: float) -> None:
        """On rank 0: wait until all ranks have closed all rounds, at most so long."""
        if self.communicator.rank != 0:
            return
        deadline = Deadline(seconds)
        with self._lock:
            rounds = list(self._open.values())
        try:
            for _, made in rounds:
                made.wait_closed(deadline)
        except RankFailedError as error:
            logger.warning("this process ends before all others have heard of the last call: %s", error)


def _close(exchange: Round) -> None:
    try:
        exchange.close()
    except RankFailedError as error:  # what the call itself came to stands; the next one raises this
        logger.warning("the end of a call could not be told to the other ranks: %s", error)
