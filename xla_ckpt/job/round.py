"""One exchange between all ranks: messages that carry a value or an error, and one word of how it ends."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from xla_ckpt.errors import CheckpointError, RankFailedError, SaveError, from_json
from xla_ckpt.job.communicator import Communicator
from xla_ckpt.logs import get_logger

logger = get_logger(__name__)

Value = TypeVar("Value")

LEAD = 0.8
"""The part of the timeout for which rank 0 waits for the others. Its verdict comes before they give up on it."""

PATIENCE = 30.0
"""Seconds after which a wait for another rank is told of."""

FATE = "fate"
"""The key of how a round ends: the error of the rank that first gave up, or that rank 0 commits. It is put once."""

COMPRESS_BYTES = 4096
"""Messages from this length on travel compressed."""


def _packed(message: Any) -> bytes:
    """A message as bytes. Long ones are compressed: records are full of repetition, and rank 0 hears thousands."""
    text = json.dumps(message).encode()
    return b"z" + zlib.compress(text, 1) if len(text) > COMPRESS_BYTES else text


def _unpacked(data: bytes) -> Any:
    return json.loads(zlib.decompress(data[1:]) if data[:1] == b"z" else data)


class Deadline:
    """A span of time for several waits together."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds that are left, at least a thousandth."""
        return max(self._end - time.monotonic(), 0.001)


class _SilentError(Exception):
    """A rank did not answer in time."""

    def __init__(self, rank: int, seconds: float) -> None:
        super().__init__(rank, seconds)
        self.rank, self.seconds = rank, seconds

    def as_failure(self) -> RankFailedError:
        """What a call raises for it, if no other rank has told another cause before."""
        return RankFailedError(
            f"rank {self.rank} did not answer within {self.seconds:g} s",
            rank=self.rank,
            hint="It died, hangs, or never made this call: all ranks must make the same calls, and none of them may "
            "stand under `if rank == 0`.",
        )


class Round:
    """One exchange between all ranks (a save, a load), on keys of its own.

    Args:
        communicator: The job's store.
        name: The same on all ranks, and of no other round.
        timeout: Seconds that this rank waits for another one, once it has nothing to do itself.
        failure: What an exception in it becomes that is no error of ours.
    """

    def __init__(
        self, communicator: Communicator, name: str, timeout: float, failure: type[CheckpointError] = SaveError
    ) -> None:
        self.communicator = communicator
        self.name = name
        self.whole = name
        """The name of the round that this one is inside of, or its own."""
        self.number = 0
        """How many calls of all ranks came before this one, and itself; 0 for what is no call."""
        self.timeout = timeout
        self.failure = failure
        self.said: list[str] = []
        """The keys that this rank has put."""
        self.waited: Callable[[int, float], None] | None = None
        """Called after each wait: with the rank that was waited for, and the begin (s of `time.perf_counter`)."""

    @property
    def rank(self) -> int:
        """This process."""
        return self.communicator.rank

    @property
    def size(self) -> int:
        """Number of processes."""
        return self.communicator.size

    def say(self, key: str, value: Any = None, error: CheckpointError | None = None) -> None:
        """Publish a value, or an error in its place."""
        message = {"error": error.to_json()} if error is not None else {"value": value}
        self.said.append(f"{self.name}/{key}")
        self._reach(lambda: self.communicator.put(f"{self.name}/{key}", _packed(message), self.timeout))

    def decide(self, error: CheckpointError | None = None) -> CheckpointError | None:
        """Decide for all ranks how this round ends; the first word counts.

        A rank that gives up says its error, and rank 0 says None when it begins to commit: never do both count.

        Returns:
            The error that all ranks raise, or None if rank 0 has begun to commit.
        """
        said = None if error is None else error.to_json()
        try:
            first = self._put_once(f"{self.whole}/{FATE}", said)
        except RankFailedError as gone:
            return error or gone  # the store is gone: there is no word of others that this rank could repeat
        return error if first == said else None if first is None else from_json(first)

    def settle(self, key: str, value: Any) -> Any:
        """Publish a value, unless somebody has published something under this key before; what is there now."""
        return self._put_once(f"{self.name}/{key}", value)

    def _put_once(self, key: str, value: Any) -> Any:
        message = json.dumps({"value": value}).encode()
        self.said.append(key)
        return json.loads(self._reach(lambda: self.communicator.put_once(key, message, self.timeout)))["value"]

    def has(self, key: str) -> bool:
        """Whether anybody has published this."""
        return self._reach(lambda: self.communicator.has([f"{self.name}/{key}"], self.timeout))

    def has_said(self, key: str) -> bool:
        """Whether this rank has published this."""
        return f"{self.name}/{key}" in self.said

    def hear(self, key: str, whose: int, deadline: Deadline | None = None) -> Any:
        """The value that rank `whose` published; waits until the deadline, by default for the timeout.

        Raises:
            CheckpointError: The error that it published instead.
            RankFailedError: It published nothing in time. All ranks that give up in this round raise the error of the
                first one: they would name different ranks otherwise, each the one that it happened to wait for.
        """
        try:
            return self._hear(key, whose, deadline)
        except _SilentError as error:
            lost = error.as_failure()
            raise self.decide(lost) or lost from None

    def hear_each(self, key: str, ranks: Iterable[int]) -> Iterator[Any]:
        """What ranks publish under this key and their number, one after the other.

        All of them together have `LEAD` of the timeout. Errors are those of `hear`.
        """
        deadline = Deadline(self.timeout * LEAD)
        for rank in ranks:
            yield self.hear(f"{key}/{rank}", rank, deadline)

    def hear_settled(self, key: str, whose: int, instead: Callable[[RankFailedError], Any]) -> Any:
        """The value that rank `whose` settles; if it does not in time, `instead` says what this rank settles for it.

        All ranks hear the same then, also where rank `whose` comes too late for one of them only.
        """
        try:
            return self._hear(key, whose, None)
        except _SilentError as error:
            value = instead(error.as_failure())
            try:
                return self.settle(key, value)
            except RankFailedError:
                return value  # the store does not answer, either

    def _hear(self, key: str, whose: int, deadline: Deadline | None) -> Any:
        began = time.perf_counter()
        try:
            left = self.timeout if deadline is None else deadline.left
            data = self._reach(lambda: self._take(f"{self.name}/{key}", whose, left))
        except TimeoutError:
            raise _SilentError(whose, self.timeout if deadline is None else deadline.seconds) from None
        finally:
            if self.waited is not None:
                self.waited(whose, began)
        message = _unpacked(data)
        if "error" in message:
            raise from_json(message["error"])
        return message["value"]

    def _take(self, key: str, whose: int, left: float) -> bytes:
        """Take a key. A wait that gets long is told of: a rank that never makes the call hangs all others till then.

        It ends if a rank has said meanwhile that it gives up: that one may have been interrupted, and does not come.
        """
        warned = False
        while left > PATIENCE:
            try:
                return self.communicator.take(key, PATIENCE)
            except TimeoutError:
                if (
                    self.communicator.has([f"{self.whole}/{FATE}"], self.timeout)
                    and (given_up := self.decide()) is not None
                ):
                    raise given_up from None
                if not warned:
                    logger.warning(
                        "rank %d has been waiting for rank %d for %g s, and will for %.0f s more. Is it "
                        "alive, and do all ranks make this call? It must not stand under `if rank == 0`",
                        self.rank,
                        whose,
                        PATIENCE,
                        left - PATIENCE,
                    )
                warned = True
                left -= PATIENCE
        return self.communicator.take(key, left)

    def _reach(self, action: Callable[[], Value]) -> Value:
        try:
            return action()
        except ConnectionError as error:
            raise RankFailedError(
                "the store through which the ranks of the job meet is gone",
                hint="The process that holds it (rank 0 or the launcher) died; restart the job.",
            ) from error

    def within(self, name: str) -> Round:
        """A round inside of this one."""
        inner = Round(self.communicator, f"{self.name}/{name}", self.timeout, self.failure)
        inner.said, inner.waited, inner.whole = self.said, self.waited, self.whole
        return inner

    def close(self) -> None:
        """Tell the others that this rank has heard all that it wants to hear in this round."""
        if self.size > 1:
            self.say(f"closed/{self.rank}")

    def is_closed(self) -> bool:
        """Whether all ranks have closed this round."""
        keys = [f"{self.name}/closed/{rank}" for rank in range(self.size)]
        return self._reach(lambda: self.communicator.has(keys, self.timeout))

    def wait_closed(self, deadline: Deadline) -> None:
        """Wait until all ranks have closed it.

        Raises:
            RankFailedError: One of them has not in time.
        """
        for rank in range(self.size):
            try:
                self._hear(f"closed/{rank}", rank, deadline)
            except _SilentError as error:
                raise error.as_failure() from None  # how the round ended was decided before

    def forget(self) -> None:
        """Remove what this rank has put. Nobody may ask for it again."""
        for key in self.said:
            self._reach(lambda key=key: self.communicator.forget(key, self.timeout))  # type: ignore[misc]
        self.said.clear()
