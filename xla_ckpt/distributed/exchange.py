"""Messages between ranks over a key-value store: send, receive, timeouts and the outcome of a call.

Ranks never use a collective, because it would interleave, on a background thread, with the training loop. A
`Communicator` is one rank's client of the job's store (in-process here; `torch_store` and `current_job` contain the
others). An `Exchange` is one call of all ranks with its own keys: ranks publish values or errors, receive them before a
deadline, and record one outcome that all of them raise or return. `Message` classes are sent as JSON, field by field.
"""

from __future__ import annotations

import functools
import json
import time
import types
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, Self, TypeVar, Union, get_args, get_origin, get_type_hints

from xla_ckpt import errors
from xla_ckpt.errors import CheckpointError, RankFailedError, SaveError, from_json
from xla_ckpt.logs import get_logger
from xla_ckpt.storage.synchronization import Notifier


@dataclass(frozen=True, slots=True)
class Message:
    """Base class of messages between ranks, which are frozen dataclasses.

    A field contains plain JSON, a value of a class with `to_json` and `from_json` (such as another message), an error,
    or a tuple of such values. It may be None if its annotation allows it.
    """

    def to_json(self) -> dict[str, Any]:
        """Return the message as a JSON object of its fields."""
        return {field.name: _encode_field(getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def from_json(cls, json: Mapping[str, Any]) -> Self:
        """Return the message encoded by `to_json`.

        Raises:
            TypeError: The JSON has the fields of a different class.
        """
        kinds = _get_field_types(cls)  # type: ignore[arg-type]  # mypy considers the class unhashable
        return cls(**{name: _decode_field(kinds.get(name), value) for name, value in json.items()})


@functools.cache
def _get_field_types(message: type[Message]) -> dict[str, Any]:
    return get_type_hints(message)


def _encode_field(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_encode_field(member) for member in value]
    return value.to_json() if hasattr(value, "to_json") else value


def _decode_field(annotation: Any, json: Any) -> Any:
    """Return the value of a field with this annotation."""
    if get_origin(annotation) in (Union, types.UnionType):
        if json is None:
            return None
        first, *others = (member for member in get_args(annotation) if member is not types.NoneType)
        return json if others else _decode_field(first, json)
    if get_origin(annotation) is tuple:
        members, last = get_args(annotation), get_args(annotation)[-1]
        of_each = members[:1] * len(json) if last is ... else members
        return tuple(_decode_field(member, value) for member, value in zip(of_each, json, strict=True))
    if annotation is CheckpointError:
        return errors.from_json(json)
    return annotation.from_json(json) if hasattr(annotation, "from_json") else json


class Communicator(Protocol):
    """A rank's client of the job's key-value store. Each request takes at most about `timeout` seconds.

    Methods raise ConnectionError if the store is unreachable or does not respond in that time.
    """

    @property
    def rank(self) -> int:
        """Rank of this process."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def put(self, key: str, value: bytes, timeout: float, /) -> None:
        """Set the value of `key`, visible to all ranks."""

    def put_if_absent(self, key: str, value: bytes, timeout: float, /) -> bytes:
        """Set the value of `key`, an ASCII value, unless it is set. Return the stored value."""

    def get(self, key: str, timeout: float) -> bytes:
        """Return the value of `key`, waiting for it at most `timeout` seconds.

        Raises:
            TimeoutError: The key was not set in time.
        """

    def has(self, keys: Sequence[str], timeout: float, /) -> bool:
        """Return True if all keys are set."""

    def delete(self, key: str, timeout: float, /) -> None:
        """Delete a key that no rank will request again."""


class InProcessCommunicator:
    """The communicator of a single-process job; in tests, shared by threads that act as different ranks."""

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        values: dict[str, bytes] | None = None,
        changed: Notifier | None = None,
    ) -> None:
        self.rank, self.size = rank, size
        self._values = {} if values is None else values
        self._changed = changed or Notifier()

    def create_peer(self, rank: int) -> InProcessCommunicator:
        """Return the communicator of another rank with the same store."""
        return InProcessCommunicator(rank, self.size, self._values, self._changed)

    def put(self, key: str, value: bytes, _timeout: float = 0) -> None:
        self._values[key] = value
        self._changed.notify()

    def put_if_absent(self, key: str, value: bytes, _timeout: float = 0) -> bytes:
        stored = self._values.setdefault(key, value)
        self._changed.notify()
        return stored

    def get(self, key: str, timeout: float) -> bytes:
        if not self._changed.wait_for(lambda: key in self._values, timeout):
            raise TimeoutError(key)
        return self._values[key]

    def has(self, keys: Sequence[str], _timeout: float = 0) -> bool:
        return all(key in self._values for key in keys)

    def delete(self, key: str, _timeout: float = 0) -> None:
        self._values.pop(key, None)


logger = get_logger(__name__)

Value = TypeVar("Value")

LEADER_TIMEOUT_FRACTION = 0.8
"""Fraction of the timeout for which rank 0 waits for the others, so that its verdict arrives before they time out."""

WARN_AFTER_SECONDS = 30.0
"""Seconds after which a wait for another rank is logged."""

OUTCOME_KEY = "fate"
"""Key of the outcome of an exchange: the error of the first rank that gave up, or the commit by rank 0. Set once."""

COMPRESS_BYTES = 4096
"""Messages of at least this length (bytes) are compressed."""


def _pack_message(message: Any) -> bytes:
    """Return a message as bytes. Long messages are compressed: they are repetitive, and rank 0 receives thousands."""
    text = json.dumps(message).encode()
    return b"z" + zlib.compress(text, 1) if len(text) > COMPRESS_BYTES else text


def _unpack_message(data: bytes) -> Any:
    return json.loads(zlib.decompress(data[1:]) if data[:1] == b"z" else data)


class Deadline:
    """A time limit shared by several waits."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def remaining(self) -> float:
        """Remaining time (s), at least a millisecond."""
        return max(self._end - time.monotonic(), 0.001)


class _PeerTimeoutError(Exception):
    """A rank did not publish a value in time."""

    def __init__(self, rank: int, seconds: float) -> None:
        super().__init__(rank, seconds)
        self.rank, self.seconds = rank, seconds

    def as_failure(self) -> RankFailedError:
        """Return the error that the call raises, unless another rank has already decided the outcome."""
        return RankFailedError(
            f"rank {self.rank} did not answer within {self.seconds:g} s",
            rank=self.rank,
            hint="It died, hangs, or never made this call: all ranks must make the same calls, and none of them may "
            "stand under `if rank == 0`.",
        )


class Exchange:
    """One exchange of messages between all ranks (for a save or a load) with its own keys.

    Args:
        communicator: Client of the job's store.
        name: Unique name of the exchange, equal on all ranks.
        timeout: Seconds that this rank waits for another rank once it has no work itself.
        error_type: Type of error that exceptions are converted to if they are neither a `CheckpointError` nor an
            OSError.
    """

    def __init__(
        self, communicator: Communicator, name: str, timeout: float, error_type: type[CheckpointError] = SaveError
    ) -> None:
        self.communicator = communicator
        self.name = name
        self.outer_name = name
        """Name of the outermost enclosing exchange, or of this one."""
        self.number = 0
        """Number of this call among all calls of all ranks, from 1; 0 if it is not a call."""
        self.timeout = timeout
        self.error_type = error_type
        self.published_keys: list[str] = []
        """Keys that this rank has set."""
        self.on_wait: Callable[[int, float], None] | None = None
        """Called after each wait with the awaited rank and the start time (s of `time.perf_counter`)."""

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return self.communicator.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.communicator.size

    def publish(self, key: str, value: Any = None, error: CheckpointError | None = None) -> None:
        """Publish a value, or an error in its place.

        Raises:
            RankFailedError: The store is unreachable.
        """
        message = {"error": error.to_json()} if error is not None else {"value": value}
        self.published_keys.append(f"{self.name}/{key}")
        self._call_store(lambda: self.communicator.put(f"{self.name}/{key}", _pack_message(message), self.timeout))

    def decide_outcome(self, error: CheckpointError | None = None) -> CheckpointError | None:
        """Decide the outcome of this exchange for all ranks; the first decision counts.

        A rank that gives up publishes its error, and rank 0 publishes None when it begins to commit: never do both
        count.

        Returns:
            The error that all ranks raise, or None if rank 0 has begun to commit.
        """
        outcome = None if error is None else error.to_json()
        try:
            first = self._put_once(f"{self.outer_name}/{OUTCOME_KEY}", outcome)
        except RankFailedError as gone:
            return error or gone  # the store is unreachable, so the decision of other ranks is unknown
        return error if first == outcome else None if first is None else from_json(first)

    def publish_once(self, key: str, value: Any) -> Any:
        """Publish a value unless one is published under this key; return the published value.

        Raises:
            RankFailedError: The store is unreachable.
        """
        return self._put_once(f"{self.name}/{key}", value)

    def _put_once(self, key: str, value: Any) -> Any:
        message = json.dumps({"value": value}).encode()
        self.published_keys.append(key)
        return json.loads(self._call_store(lambda: self.communicator.put_if_absent(key, message, self.timeout)))[
            "value"
        ]

    def is_published(self, key: str) -> bool:
        """Return True if any rank has published this key."""
        return self._call_store(lambda: self.communicator.has([f"{self.name}/{key}"], self.timeout))

    def has_published(self, key: str) -> bool:
        """Return True if this rank has published this key."""
        return f"{self.name}/{key}" in self.published_keys

    def receive(self, key: str, source_rank: int, deadline: Deadline | None = None) -> Any:
        """Return the value published by rank `source_rank`, waiting until the deadline (default: for the timeout).

        Raises:
            CheckpointError: The error that the rank published instead.
            RankFailedError: The rank published nothing in time. All ranks that give up in this exchange raise the error
                of the first one; otherwise each would name the rank that it happened to wait for.
        """
        try:
            return self._receive(key, source_rank, deadline)
        except _PeerTimeoutError as error:
            lost = error.as_failure()
            raise self.decide_outcome(lost) or lost from None

    def receive_each(self, key: str, ranks: Iterable[int]) -> Iterator[Any]:
        """Yield the values that ranks publish under this key and their rank, in order.

        All of them share `LEADER_TIMEOUT_FRACTION` of the timeout.

        Raises:
            CheckpointError: As `receive`.
        """
        deadline = Deadline(self.timeout * LEADER_TIMEOUT_FRACTION)
        for rank in ranks:
            yield self.receive(f"{key}/{rank}", rank, deadline)

    def receive_or_publish(self, key: str, source_rank: int, make_value: Callable[[RankFailedError], Any]) -> Any:
        """Return the value that rank `source_rank` publishes once; on timeout, publish `make_value(error)` in its
        place.

        All ranks then receive the same value, even if the value of `source_rank` is late for only one of them.
        """
        try:
            return self._receive(key, source_rank, None)
        except _PeerTimeoutError as error:
            value = make_value(error.as_failure())
            try:
                return self.publish_once(key, value)
            except RankFailedError:
                return value  # the store is unreachable too

    def _receive(self, key: str, source_rank: int, deadline: Deadline | None) -> Any:
        began = time.perf_counter()
        try:
            left = self.timeout if deadline is None else deadline.remaining
            data = self._call_store(lambda: self._wait_for_key(f"{self.name}/{key}", source_rank, left))
        except TimeoutError:
            raise _PeerTimeoutError(source_rank, self.timeout if deadline is None else deadline.seconds) from None
        finally:
            if self.on_wait is not None:
                self.on_wait(source_rank, began)
        message = _unpack_message(data)
        if "error" in message:
            raise from_json(message["error"])
        return message["value"]

    def _wait_for_key(self, key: str, source_rank: int, seconds: float) -> bytes:
        """Wait for a key. A long wait is logged, because a rank that never makes the call blocks all others until the
        timeout.

        Raises the error of a rank that has given up in the meantime, since that rank may have been interrupted.
        """
        warned = False
        while seconds > WARN_AFTER_SECONDS:
            try:
                return self.communicator.get(key, WARN_AFTER_SECONDS)
            except TimeoutError:
                if (
                    self.communicator.has([f"{self.outer_name}/{OUTCOME_KEY}"], self.timeout)
                    and (given_up := self.decide_outcome()) is not None
                ):
                    raise given_up from None
                if not warned:
                    logger.warning(
                        "rank %d has been waiting for rank %d for %g s, and will for %.0f s more. Is it "
                        "alive, and do all ranks make this call? It must not stand under `if rank == 0`",
                        self.rank,
                        source_rank,
                        WARN_AFTER_SECONDS,
                        seconds - WARN_AFTER_SECONDS,
                    )
                warned = True
                seconds -= WARN_AFTER_SECONDS
        return self.communicator.get(key, seconds)

    def _call_store(self, action: Callable[[], Value]) -> Value:
        try:
            return action()
        except ConnectionError as error:
            raise RankFailedError(
                "the store through which the ranks of the job meet is gone",
                hint="The process that holds it (rank 0 or the launcher) died; restart the job.",
            ) from error

    def create_nested(self, name: str) -> Exchange:
        """Return an exchange nested in this one."""
        inner = Exchange(self.communicator, f"{self.name}/{name}", self.timeout, self.error_type)
        inner.published_keys, inner.on_wait, inner.outer_name = self.published_keys, self.on_wait, self.outer_name
        return inner

    def close(self) -> None:
        """Announce that this rank has received everything that it needs from this exchange."""
        if self.size > 1:
            self.publish(f"closed/{self.rank}")

    def is_closed(self) -> bool:
        """Return True if all ranks have closed this exchange."""
        keys = [f"{self.name}/closed/{rank}" for rank in range(self.size)]
        return self._call_store(lambda: self.communicator.has(keys, self.timeout))

    def wait_closed(self, deadline: Deadline) -> None:
        """Wait until all ranks have closed this exchange.

        Raises:
            RankFailedError: A rank did not close it in time.
        """
        for rank in range(self.size):
            try:
                self._receive(f"closed/{rank}", rank, deadline)
            except _PeerTimeoutError as error:
                raise error.as_failure() from None  # the outcome of the exchange is already decided

    def delete_published(self) -> None:
        """Delete the keys that this rank has set. No rank may request them again."""
        for key in self.published_keys:
            self._call_store(lambda key=key: self.communicator.delete(key, self.timeout))  # type: ignore[misc]
        self.published_keys.clear()
