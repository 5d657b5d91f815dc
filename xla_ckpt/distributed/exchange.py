"""Messages between ranks over a key-value store: send, receive, timeouts and the outcome of a call.

Ranks never use a collective, because one on a background thread would interleave with those of the training loop. A
`Communicator` is one rank's view of the job's store (in-process here; `torch_store` and `current_job` have the
others). An `Exchange` is one call of all ranks on keys of its own: ranks publish values or errors, receive them
before a deadline, and record one outcome that all of them raise or return. `Message` classes are sent as JSON,
field by field.
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
    """What one rank tells another. Each message is a frozen dataclass that extends this one.

    A field holds plain JSON; or a value of a class with `to_json` and `from_json`, another message for instance; or an
    error; or a tuple of such values. Each may be None where its annotation says so.
    """

    def to_json(self) -> dict[str, Any]:
        """As JSON, for the way to another rank: field -> value."""
        return {field.name: _encode_field(getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def from_json(cls, json: Mapping[str, Any]) -> Self:
        """The message that `to_json` described.

        Raises:
            TypeError: It is of another class, which has other fields.
        """
        kinds = _get_field_types(cls)  # type: ignore[arg-type]  # mypy takes a class for something that cannot be hashed
        return cls(**{name: _decode_field(kinds.get(name), value) for name, value in json.items()})


@functools.cache
def _get_field_types(message: type[Message]) -> dict[str, Any]:
    return get_type_hints(message)


def _encode_field(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_encode_field(member) for member in value]
    return value.to_json() if hasattr(value, "to_json") else value


def _decode_field(annotation: Any, json: Any) -> Any:
    """The value of a field, whose annotation is `annotation`."""
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
    """A rank's view of the job's key-value store. Each request takes at most about `timeout` seconds.

    ConnectionError if the store does not answer in that time, or is gone.
    """

    @property
    def rank(self) -> int:
        """This process."""

    @property
    def size(self) -> int:
        """Number of processes."""

    def put(self, key: str, value: bytes, timeout: float, /) -> None:
        """Make `value` visible to all ranks."""

    def put_if_absent(self, key: str, value: bytes, timeout: float, /) -> bytes:
        """Make `value`, which is ASCII, visible to all ranks if nobody has put this key; what is there then."""

    def get(self, key: str, timeout: float) -> bytes:
        """The value of `key`, waiting for it at most `timeout` seconds; TimeoutError if it does not come."""

    def has(self, keys: Sequence[str], timeout: float, /) -> bool:
        """Whether all these keys are there, now."""

    def delete(self, key: str, timeout: float, /) -> None:
        """Remove a key that nobody will ask for again."""


class InProcessCommunicator:
    """The communicator of a process on its own (and, shared by threads as different ranks, of tests)."""

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
        """Another rank on the same board."""
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
"""The part of the timeout for which rank 0 waits for the others. Its verdict comes before they give up on it."""

WARN_AFTER_SECONDS = 30.0
"""Seconds after which a wait for another rank is told of."""

OUTCOME_KEY = "fate"
"""The key of how a round ends: the error of the rank that first gave up, or that rank 0 commits. It is put once."""

COMPRESS_BYTES = 4096
"""Messages from this length on travel compressed."""


def _pack_message(message: Any) -> bytes:
    """A message as bytes. Long ones are compressed: records are full of repetition, and rank 0 hears thousands."""
    text = json.dumps(message).encode()
    return b"z" + zlib.compress(text, 1) if len(text) > COMPRESS_BYTES else text


def _unpack_message(data: bytes) -> Any:
    return json.loads(zlib.decompress(data[1:]) if data[:1] == b"z" else data)


class Deadline:
    """A span of time for several waits together."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def remaining(self) -> float:
        """Seconds that are left, at least a thousandth."""
        return max(self._end - time.monotonic(), 0.001)


class _PeerTimeoutError(Exception):
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


class Exchange:
    """One exchange between all ranks (a save, a load), on keys of its own.

    Args:
        communicator: The job's store.
        name: The same on all ranks, and of no other round.
        timeout: Seconds that this rank waits for another one, once it has nothing to do itself.
        failure: What an exception in it becomes that is no error of ours.
    """

    def __init__(
        self, communicator: Communicator, name: str, timeout: float, error_type: type[CheckpointError] = SaveError
    ) -> None:
        self.communicator = communicator
        self.name = name
        self.outer_name = name
        """The name of the round that this one is inside of, or its own."""
        self.number = 0
        """How many calls of all ranks came before this one, and itself; 0 for what is no call."""
        self.timeout = timeout
        self.error_type = error_type
        self.published_keys: list[str] = []
        """The keys that this rank has put."""
        self.on_wait: Callable[[int, float], None] | None = None
        """Called after each wait: with the rank that was waited for, and the begin (s of `time.perf_counter`)."""

    @property
    def rank(self) -> int:
        """This process."""
        return self.communicator.rank

    @property
    def size(self) -> int:
        """Number of processes."""
        return self.communicator.size

    def publish(self, key: str, value: Any = None, error: CheckpointError | None = None) -> None:
        """Publish a value, or an error in its place."""
        message = {"error": error.to_json()} if error is not None else {"value": value}
        self.published_keys.append(f"{self.name}/{key}")
        self._call_store(lambda: self.communicator.put(f"{self.name}/{key}", _pack_message(message), self.timeout))

    def decide_outcome(self, error: CheckpointError | None = None) -> CheckpointError | None:
        """Decide for all ranks how this round ends; the first word counts.

        A rank that gives up says its error, and rank 0 says None when it begins to commit: never do both count.

        Returns:
            The error that all ranks raise, or None if rank 0 has begun to commit.
        """
        said = None if error is None else error.to_json()
        try:
            first = self._put_once(f"{self.outer_name}/{OUTCOME_KEY}", said)
        except RankFailedError as gone:
            return error or gone  # the store is gone: there is no word of others that this rank could repeat
        return error if first == said else None if first is None else from_json(first)

    def publish_once(self, key: str, value: Any) -> Any:
        """Publish a value, unless somebody has published something under this key before; what is there now."""
        return self._put_once(f"{self.name}/{key}", value)

    def _put_once(self, key: str, value: Any) -> Any:
        message = json.dumps({"value": value}).encode()
        self.published_keys.append(key)
        return json.loads(self._call_store(lambda: self.communicator.put_if_absent(key, message, self.timeout)))[
            "value"
        ]

    def is_published(self, key: str) -> bool:
        """Whether anybody has published this."""
        return self._call_store(lambda: self.communicator.has([f"{self.name}/{key}"], self.timeout))

    def has_published(self, key: str) -> bool:
        """Whether this rank has published this."""
        return f"{self.name}/{key}" in self.published_keys

    def receive(self, key: str, source_rank: int, deadline: Deadline | None = None) -> Any:
        """The value that rank `source_rank` published; waits until the deadline, by default for the timeout.

        Raises:
            CheckpointError: The error that it published instead.
            RankFailedError: It published nothing in time. All ranks that give up in this round raise the error of the
                first one: they would name different ranks otherwise, each the one that it happened to wait for.
        """
        try:
            return self._receive(key, source_rank, deadline)
        except _PeerTimeoutError as error:
            lost = error.as_failure()
            raise self.decide_outcome(lost) or lost from None

    def receive_each(self, key: str, ranks: Iterable[int]) -> Iterator[Any]:
        """What ranks publish under this key and their number, one after the other.

        All of them together have `LEADER_TIMEOUT_FRACTION` of the timeout. Errors are those of `receive`.
        """
        deadline = Deadline(self.timeout * LEADER_TIMEOUT_FRACTION)
        for rank in ranks:
            yield self.receive(f"{key}/{rank}", rank, deadline)

    def receive_or_publish(self, key: str, source_rank: int, make_value: Callable[[RankFailedError], Any]) -> Any:
        """The value that rank `source_rank` settles; if it does not in time, `make_value` says what this rank settles
        for it.

        All ranks hear the same then, also where rank `source_rank` comes too late for one of them only.
        """
        try:
            return self._receive(key, source_rank, None)
        except _PeerTimeoutError as error:
            value = make_value(error.as_failure())
            try:
                return self.publish_once(key, value)
            except RankFailedError:
                return value  # the store does not answer, either

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
        """Take a key. A wait that gets long is told of: a rank that never makes the call hangs all others till then.

        It ends if a rank has said meanwhile that it gives up: that one may have been interrupted, and does not come.
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
        """A round inside of this one."""
        inner = Exchange(self.communicator, f"{self.name}/{name}", self.timeout, self.error_type)
        inner.published_keys, inner.on_wait, inner.outer_name = self.published_keys, self.on_wait, self.outer_name
        return inner

    def close(self) -> None:
        """Tell the others that this rank has heard all that it wants to hear in this round."""
        if self.size > 1:
            self.publish(f"closed/{self.rank}")

    def is_closed(self) -> bool:
        """Whether all ranks have closed this round."""
        keys = [f"{self.name}/closed/{rank}" for rank in range(self.size)]
        return self._call_store(lambda: self.communicator.has(keys, self.timeout))

    def wait_closed(self, deadline: Deadline) -> None:
        """Wait until all ranks have closed it.

        Raises:
            RankFailedError: One of them has not in time.
        """
        for rank in range(self.size):
            try:
                self._receive(f"closed/{rank}", rank, deadline)
            except _PeerTimeoutError as error:
                raise error.as_failure() from None  # how the round ended was decided before

    def delete_published(self) -> None:
        """Remove what this rank has put. Nobody may ask for it again."""
        for key in self.published_keys:
            self._call_store(lambda key=key: self.communicator.delete(key, self.timeout))  # type: ignore[misc]
        self.published_keys.clear()
