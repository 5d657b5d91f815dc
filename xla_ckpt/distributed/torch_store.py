"""Client of the torch.distributed key-value store, with timeouts that hold even if its host is unreachable.

Each concurrent request has its own connection and thread, because torch may block far beyond the timeout. This module
imports torch, so import it only after the program has created a process group.
"""

from __future__ import annotations

import datetime
import math
import queue
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from xla_ckpt.storage.process_state import register_fork_reset
from xla_ckpt.storage.synchronization import Future
from xla_ckpt.storage.threads import start_thread

STORE_TIMEOUT_SECONDS = 30.0
"""Maximum time for a response of the store (s)."""

GRACE_SECONDS = 2.0
"""Seconds that a request may take beyond its timeout, because ending a wait also takes a message to the store."""


class _StoreConnection:
    """A connection to the store with its own thread.

    If the host of the store is unreachable, torch may block for minutes regardless of the timeout. The thread is then
    abandoned.
    """

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._requests: queue.SimpleQueue[_StoreRequest | None] = queue.SimpleQueue()
        if start_thread(partial(_serve_requests, connect, self._requests), "xla_ckpt-store") is None:
            raise RuntimeError("no thread is to be had that could ask the store")

    def __del__(self) -> None:
        self._requests.put(None)

    def call(self, request: Callable[[Any], Any], seconds: float) -> Any:
        """Return the result of `request` applied to the store.

        Raises:
            TimeoutError: There was no result within `seconds` seconds.
            Exception: Any exception raised by `request`.
        """
        answer = Future[Any]()
        self._requests.put((request, answer))
        return answer.result(seconds)


_StoreRequest = tuple[Callable[[Any], Any], Future[Any]]


def _serve_requests(connect: Callable[[], Any], requests: queue.SimpleQueue[_StoreRequest | None]) -> None:
    store: list[Any] = []

    def answered(action: Callable[[Any], Any]) -> Any:
        if not store:
            store.append(connect())
        return action(store[0])

    while (order := requests.get()) is not None:
        action, answer = order
        answer.run(partial(answered, action))
        del order, action, answer


class TorchCommunicator:
    """A rank's client of the process group's store. Thread-safe: each concurrent request uses its own connection."""

    def __init__(self) -> None:
        import torch.distributed.distributed_c10d as c10d

        self.group = torch.distributed.group.WORLD
        """Process group of this communicator."""
        self.rank: int = torch.distributed.get_rank()
        self.size: int = torch.distributed.get_world_size()
        store: Any = c10d._get_default_store()
        self._store: Any = c10d.PrefixStore("xla_ckpt", store)
        # Cloned for each connection: a waiting request blocks its connection, which must not delay the training
        # program.
        self._is_failing = False  # True if the last request failed or timed out
        self._idle_connections: list[
            _StoreConnection
        ] = []  # reused, because torch resolves the host name for each new connection

    def _call_store(self, action: Callable[[Any], Any], seconds: float) -> Any:
        try:
            line = self._idle_connections.pop()
        except IndexError:
            line = _StoreConnection(self._store.clone)
        try:
            answer = line.call(action, seconds)
        except BaseException:
            self._is_failing = True
            raise
        self._is_failing = False
        self._idle_connections.append(line)  # not after an error, when it may still be waiting
        return answer

    def _call_with_timeout(self, action: Callable[[Any], Any], timeout: float) -> Any:
        # After the store has become unreachable, this rank still tries to notify the others, for which torch reconnects
        # repeatedly. That must not take `STORE_TIMEOUT_SECONDS` again.
        seconds = GRACE_SECONDS if self._is_failing else min(timeout + GRACE_SECONDS, STORE_TIMEOUT_SECONDS)
        try:
            return self._call_store(action, seconds)
        except TimeoutError as error:
            raise ConnectionError(f"it did not answer within {seconds:g} s") from error
        except RuntimeError as error:
            raise ConnectionError(str(error)) from error

    def put(self, key: str, value: bytes, timeout: float = STORE_TIMEOUT_SECONDS) -> None:
        self._call_with_timeout(lambda store: store.set(key, value), timeout)

    def put_if_absent(self, key: str, value: bytes, timeout: float = STORE_TIMEOUT_SECONDS) -> bytes:
        text = value.decode("ascii")  # torch requires a str here, unlike elsewhere
        return bytes(self._call_with_timeout(lambda store: store.compare_set(key, "", text), timeout))

    def get(self, key: str, timeout: float) -> bytes:
        end = time.monotonic() + timeout

        def wait(store: Any) -> bytes | None:
            try:
                # torch truncates it to milliseconds: a wait that ended before `end` would be treated as a broken store.
                left = max(math.ceil((end - time.monotonic()) * 1000), 1)
                store.wait([key], datetime.timedelta(milliseconds=left))
            except torch.distributed.DistStoreError:
                if time.monotonic() < end:
                    raise
                # The store has confirmed the timeout. Keep the connection, because a new one requires a name lookup,
                # which takes five seconds if the name server does not respond, while other ranks wait.
                return None
            return bytes(store.get(key))

        try:
            value: bytes | None = self._call_store(wait, timeout + GRACE_SECONDS)
        except (RuntimeError, LookupError, TimeoutError) as error:
            # Not every torch store raises DistStoreError on timeout (LookupError, RuntimeError).
            if time.monotonic() >= end:
                # A working store ends the wait itself.
                self._is_failing = type(error) is TimeoutError
                raise TimeoutError(key) from error
            raise ConnectionError(str(error)) from error
        if value is None:
            raise TimeoutError(key)
        return value

    def has(self, keys: Sequence[str], timeout: float = STORE_TIMEOUT_SECONDS) -> bool:
        return bool(self._call_with_timeout(lambda store: store.check([*keys]), timeout))

    def delete(self, key: str, timeout: float = STORE_TIMEOUT_SECONDS) -> None:
        self._call_with_timeout(lambda store: store.delete_key(key), timeout)


_torch_communicator: list[TorchCommunicator] = register_fork_reset([], list.clear)


def get_torch_communicator() -> TorchCommunicator:
    """Return the communicator of the current process group; a new group gets a new communicator."""
    if not _torch_communicator or _torch_communicator[0].group is not torch.distributed.group.WORLD:
        _torch_communicator[:] = [TorchCommunicator()]
    return _torch_communicator[0]
