"""One verdict for all: messages between ranks that carry a value or an error, and the same error everywhere."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, TypeVar

from xla_ckpt.coord.communicator import Communicator
from xla_ckpt.errors import CheckpointError, RankFailedError, SaveError, StorageError, from_json

Value = TypeVar("Value")


def as_checkpoint_error(error: BaseException, doing: str, rank: int, **facts: Any) -> CheckpointError:
    """Any exception as an error of ours that can travel; the original stays its cause."""
    if isinstance(error, CheckpointError):
        made = error
    elif isinstance(error, OSError):
        made = StorageError.of(error, doing)
    else:
        made = SaveError(f"{doing} failed: {type(error).__name__}: {error}")
    if made is not error:
        made.__cause__ = error
    return made.at(rank=rank, **facts)


class Round:
    """One exchange between all ranks (a save, a load), on keys of its own."""

    def __init__(self, communicator: Communicator, name: str, timeout: float) -> None:
        self.communicator = communicator
        self.name = name
        self.timeout = timeout
        self._end = time.monotonic() + timeout

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
        self.communicator.put(f"{self.name}/{key}", json.dumps(message).encode())

    def hear(self, key: str, whose: int) -> Any:
        """The value that rank `whose` published.

        Raises:
            CheckpointError: The error that it published instead.
            RankFailedError: It published nothing in time.
        """
        try:
            data = self.communicator.take(f"{self.name}/{key}", max(self._end - time.monotonic(), 0.001))
        except TimeoutError:
            raise RankFailedError(
                f"rank {whose} did not answer within {self.timeout:g} s", rank=whose,
                hint="It died, hangs, or never made this call: all ranks must make the same calls.",
            ) from None  # fmt: skip
        message = json.loads(data)
        if "error" in message:
            raise from_json(message["error"])
        return message["value"]

    def forget(self, *keys: str) -> None:
        """Remove keys that nobody will ask for again."""
        for key in keys:
            self.communicator.forget(f"{self.name}/{key}")


def agree(exchange: Round, what: str, action: Callable[[], Value]) -> Value:
    """Run `action` on every rank; if it raises anywhere, raise the same error everywhere (the lowest rank's).

    Rank 0 hears all and tells all: two messages a rank. `what` names the action in messages and keys.
    """
    if exchange.size == 1:
        return action()
    mine: CheckpointError | None = None
    value: Value | None = None
    try:
        value = action()
    except Exception as error:
        # Told to all ranks, and raised below on all of them.
        mine = as_checkpoint_error(error, what, exchange.rank)
    exchange.say(f"{what}/{exchange.rank}", error=mine)
    if exchange.rank == 0:
        exchange.say(f"{what}/verdict", error=_first_error(exchange, what))
    try:
        exchange.hear(f"{what}/verdict", 0)
    except CheckpointError as verdict:
        if mine is not None and mine.rank == verdict.rank:
            raise mine from mine.__cause__  # the same facts, with the original traceback
        raise
    return value  # type: ignore[return-value]  # without an error there is a value


def _first_error(exchange: Round, what: str) -> CheckpointError | None:
    for rank in range(exchange.size):
        try:
            exchange.hear(f"{what}/{rank}", rank)
        except CheckpointError as error:
            return error
    return None
