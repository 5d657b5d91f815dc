"""torch.distributed as the place where ranks meet: its key-value store, never a collective of training.

Imported where a program has made a process group.

Reading replicas' shares (`replica_read="share"`) is the one thing that moves array bytes between ranks; it uses
process groups of its own.
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

from xla_ckpt.storage.process_state import process_wide
from xla_ckpt.storage.threads import started
from xla_ckpt.storage.waiting import Outcome

REACH = 30.0
"""Seconds within which the store itself must answer, at most."""

GRACE = 2.0
"""Seconds that a request may take beyond its timeout: the end of a wait is a message to the store, too."""


class _Line:
    """A connection to the store, with a thread of its own.

    torch can wait for minutes, whatever the timeout, once the host of the store is gone or cut off: then this thread
    is left to itself.
    """

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        if started(partial(_serve, connect, self._orders), "xla_ckpt-store") is None:
            raise RuntimeError("no thread is to be had that could ask the store")

    def __del__(self) -> None:
        self._orders.put(None)

    def ask(self, action: Callable[[Any], Any], seconds: float) -> Any:
        """The result of `action` on the store; TimeoutError if there is none in time."""
        answer = Outcome[Any]()
        self._orders.put((action, answer))
        return answer.result(seconds)


_Order = tuple[Callable[[Any], Any], Outcome[Any]]


def _serve(connect: Callable[[], Any], orders: queue.SimpleQueue[_Order | None]) -> None:
    store: list[Any] = []

    def answered(action: Callable[[Any], Any]) -> Any:
        if not store:
            store.append(connect())
        return action(store[0])

    while (order := orders.get()) is not None:
        action, answer = order
        answer.run(partial(answered, action))
        del order, action, answer


class StoreCommunicator:
    """A rank's view of the process group's store. Safe for several threads: each uses a connection of its own."""

    def __init__(self) -> None:
        import torch.distributed.distributed_c10d as c10d

        self.group = torch.distributed.group.WORLD
        """The process group that it belongs to."""
        self.rank: int = torch.distributed.get_rank()
        self.size: int = torch.distributed.get_world_size()
        store: Any = c10d._get_default_store()
        self._shared: Any = c10d.PrefixStore("xla_ckpt", store)
        # Who waits on a connection holds it: training's own use of the store must not wait for that.
        self._fails = False  # whether the store has answered the last request by an error, or not at all
        self._idle: list[_Line] = []  # connections are kept: torch asks the name server for each new one

    def _ask(self, action: Callable[[Any], Any], seconds: float) -> Any:
        try:
            line = self._idle.pop()
        except IndexError:
            line = _Line(self._shared.clone)
        try:
            answer = line.ask(action, seconds)
        except BaseException:
            self._fails = True
            raise
        self._fails = False
        self._idle.append(line)  # only now: after an error nobody knows what it still waits for
        return answer

    def _reach(self, action: Callable[[Any], Any], timeout: float) -> Any:
        # Who has found the store gone tells the others of it, for which torch connects anew, again and again: that must
        # not take REACH once more.
        seconds = GRACE if self._fails else min(timeout + GRACE, REACH)
        try:
            return self._ask(action, seconds)
        except TimeoutError as error:
            raise ConnectionError(f"it did not answer within {seconds:g} s") from error
        except RuntimeError as error:
            raise ConnectionError(str(error)) from error

    def put(self, key: str, value: bytes, timeout: float = REACH) -> None:
        self._reach(lambda store: store.set(key, value), timeout)

    def put_once(self, key: str, value: bytes, timeout: float = REACH) -> bytes:
        text = value.decode("ascii")  # torch takes a string here, where it takes bytes elsewhere
        return bytes(self._reach(lambda store: store.compare_set(key, "", text), timeout))

    def take(self, key: str, timeout: float) -> bytes:
        end = time.monotonic() + timeout

        def wait(store: Any) -> bytes | None:
            try:
                # torch cuts it to milliseconds: a wait that ended before `end` would be taken for a broken store.
                left = max(math.ceil((end - time.monotonic()) * 1000), 1)
                store.wait([key], datetime.timedelta(milliseconds=left))
            except torch.distributed.DistStoreError:
                if time.monotonic() < end:
                    raise
                # The store has confirmed that the wait is over. The connection is kept: for a new one torch asks the
                # name server, which takes five seconds where none answers, and others wait for what comes next.
                return None
            return bytes(store.get(key))

        try:
            value: bytes | None = self._ask(wait, timeout + GRACE)
        except (RuntimeError, LookupError, TimeoutError) as error:
            # Not every store of torch's has that error for a wait that ran out (LookupError, RuntimeError).
            if time.monotonic() >= end:
                # A store that works ends the wait itself.
                self._fails = type(error) is TimeoutError
                raise TimeoutError(key) from error
            raise ConnectionError(str(error)) from error
        if value is None:
            raise TimeoutError(key)
        return value

    def has(self, keys: Sequence[str], timeout: float = REACH) -> bool:
        return bool(self._reach(lambda store: store.check([*keys]), timeout))

    def forget(self, key: str, timeout: float = REACH) -> None:
        self._reach(lambda store: store.delete_key(key), timeout)


_current: list[StoreCommunicator] = process_wide([], list.clear)


def communicator() -> StoreCommunicator:
    """The communicator of the current process group: a later group gets a new one."""
    if not _current or _current[0].group is not torch.distributed.group.WORLD:
        _current[:] = [StoreCommunicator()]
    return _current[0]
