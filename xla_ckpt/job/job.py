"""One call of one process, among the same calls of the other ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

from xla_ckpt.errors import CheckpointError, RankFailedError, from_json
from xla_ckpt.job.call import Call, is_missed, open_together, say_end, word_of
from xla_ckpt.job.communicator import Communicator
from xla_ckpt.job.round import Round
from xla_ckpt.job.rounds import Rounds
from xla_ckpt.job.verdict import raise_as_told
from xla_ckpt.logs import get_logger
from xla_ckpt.sharding.placement import Placement
from xla_ckpt.storage.process_state import process_wide

logger = get_logger(__name__)

LINGER = 10.0
"""Seconds that rank 0 waits at the exit of the program, at most, for ranks that have not heard of the last calls."""

TELLS_WITHIN = 1.0
"""Seconds that the store has at the exit of the program to take the word of its end: it may have ended before."""

_rounds: list[Rounds] = process_wide([], list.clear)  # a worker that a rank forks is not that rank
"""The rounds of the current process group, if there were any. A later group gets others."""


def rounds_over(communicator: Communicator) -> Rounds:
    """The rounds over a communicator. Their numbers go on from those of an earlier one, which used the same store."""
    if not _rounds or _rounds[0].communicator is not communicator:
        # One number is left out: in that round a rank of the earlier group may have said that it has ended.
        _rounds[:] = [Rounds(communicator, _rounds[0].last + 1 if _rounds else 0)]
    return _rounds[0]


@dataclass(frozen=True, slots=True)
class Job:
    """One call of one process, among the same calls of its peers."""

    exchange: Round
    placement: Placement
    rounds: Rounds

    def taking_part(self) -> AbstractContextManager[None]:
        """A context around everything that this rank says and hears in its call."""
        return self.rounds.taking_part(self.exchange)

    def begin(
        self, call: Call, prepare: Callable[[], Any] = lambda: None, unite: Callable[[list[Any]], Any] = lambda _: None
    ) -> Any:
        """Begin a call together with all ranks: each says which call it makes, and nothing is done before all have.

        A rank that has left calls out which the others gave up takes part in the next one: it comes later to fewer
        rounds than they, and goes on to the one that they are in.

        Args:
            call: What this rank was called for, as far as all ranks have to be called for the same.
            prepare: What may fail on a rank, and has to be done before. It returns JSON.
            unite: What rank 0 makes of all that the ranks have prepared. It returns JSON, too.

        Returns:
            What `unite` has returned, on all ranks.

        Raises:
            CheckpointError: What `prepare` raised on the lowest rank that failed; the same on all ranks.
            RankFailedError: A rank did not come in time.
            UsageError: The ranks make different calls.
        """
        if self.exchange.size == 1:
            return unite([prepare()])
        if self.rounds.ended is not None:
            raise _of_call(self.rounds.ended, call)
        self.rounds.tidy(self.exchange.timeout)
        word = word_of(self.exchange, call, prepare)
        while is_missed(call, verdict := open_together(self.exchange, word, unite)):
            text = "this rank has left out a call that others made, %s, and which failed for that; it goes on with %s"
            logger.warning(text, verdict.call, call)
            self.rounds.pass_over(self.exchange)
        if verdict.ended is not None:
            self.rounds.ended = verdict.ended
            raise _of_call(verdict.ended, call)
        number = self.exchange.number
        if verdict.error is not None:
            if verdict.value is not None:
                self.rounds.different.add(number, list(map(Call.from_json, verdict.value)), verdict.error)
            raise_as_told(verdict.error, word.error)
        self.rounds.different.clear(number)
        return verdict.value

    def leave_out_if_behind(self, call: Call, earlier: CheckpointError | None = None) -> None:
        """Refuse a call that the other ranks have made before, while this one made another. It takes no round.

        Args:
            call: What this rank was called for.
            earlier: What is raised then instead.

        Raises:
            UsageError: It is such a call. The next call of all ranks is the same one.
            RankFailedError: The store is gone.
        """
        number = self.exchange.number
        error = self.rounds.different.left_out(number, call, partial(self.rounds.is_behind, self.exchange.timeout))
        if error is not None and self.rounds.give_back(self.exchange):
            raise earlier or error

    def shows(self, progress: bool | None) -> bool | None:
        """Whether this rank may show a progress bar."""
        return progress if self.exchange.rank == 0 else False


def _of_call(error: CheckpointError, call: Call) -> CheckpointError:
    """The same error, of one of the calls that it is the error of."""
    return from_json(error.to_json()).at(path=call.path or None, tag=call.tag)


def launcher_has_store() -> bool:
    """Whether the job's store is in the launcher's process: else it is in that of rank 0, and ends with it."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def leave(communicator: Communicator | None) -> None:
    """At the end of the program: tell the other ranks of it, and wait for those that have to hear of its last calls.

    They hear through the store, and where there is no launcher, rank 0's process holds it.

    Args:
        communicator: What this process would meet the others through if it made its first call now.
    """
    if not _rounds and communicator is not None:
        rounds_over(communicator)
    for rounds in _rounds:
        try:
            say_end(rounds.following(TELLS_WITHIN))
        except (RankFailedError, RuntimeError) as error:
            # The store was in another process, which has ended; or Python starts no thread any more to reach it by.
            logger.debug("the end of this process could not be told to other ranks: %s", error)
    if not launcher_has_store():
        for rounds in _rounds:
            rounds.linger(LINGER)
