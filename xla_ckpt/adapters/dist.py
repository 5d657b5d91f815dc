"""torch.distributed as the place where ranks meet: its key-value store, never a collective of training.

Reading replicas' shares (`replica_read="share"`) is the one thing that moves array bytes between ranks; it uses
process groups of its own.
"""

from __future__ import annotations

import datetime
import queue
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

from xla_ckpt.errors import UsageError

POLL = 0.02
"""Seconds between two looks at a store that cannot be cloned (torch before 2.7)."""

REACH = 30.0
"""Seconds within which the store itself must answer."""

GRACE = 2.0
"""Seconds that a wait may take beyond its timeout, because its end, too, is a message to the store."""


def is_distributed() -> bool:
    """Whether this process is one of several that torch.distributed knows."""
    distributed: Any = torch.distributed
    return bool(distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1)


def check_alone() -> None:
    """Refuse to take a process for the whole job when XLA knows of others.

    Raises:
        UsageError: There are others, and no torch.distributed to meet them through.
    """
    runtime: Any = sys.modules.get("torch_xla.runtime")
    xla: Any = sys.modules.get("torch_xla")
    if runtime is None or xla is None or not xla._XLAC._xla_runtime_is_initialized():
        return
    if (processes := runtime.process_count()) > 1:
        raise UsageError(
            f"XLA runs {processes} processes, and torch.distributed is not initialised", expected="a process group",
            hint='Call torch.distributed.init_process_group("gloo") (or "xla") before the first save or load.',
        )  # fmt: skip


class _Line:
    """A connection to the store, with a thread of its own.

    torch can wait for minutes, whatever the timeout, once the host of the store is gone or cut off: then this thread
    is left to itself.
    """

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(connect, self._orders), name="xla_ckpt-store", daemon=True).start()

    def __del__(self) -> None:
        self._orders.put(None)

    def ask(self, action: Callable[[Any], Any], seconds: float) -> Any:
        """The result of `action` on the store; TimeoutError if there is none in time."""
        answer: Future[Any] = Future()
        self._orders.put((action, answer))
        return answer.result(seconds)


_Order = tuple[Callable[[Any], Any], "Future[Any]"]


def _serve(connect: Callable[[], Any], orders: queue.SimpleQueue[_Order | None]) -> None:
    store: Any = None
    while (order := orders.get()) is not None:
        action, answer = order
        try:
            if store is None:
                store = connect()
            answer.set_result(action(store))
        except BaseException as error:
            # Raised by who waits for the answer.
            answer.set_exception(error)
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
        self._clones = hasattr(self._shared, "clone")
        self._idle: list[_Line] = []  # connections are kept: torch asks the name server for each new one

    def _ask(self, action: Callable[[Any], Any], seconds: float) -> Any:
        try:
            line = self._idle.pop()
        except IndexError:
            shared = self._shared
            line = _Line(shared.clone if self._clones else lambda: shared)
        answer = line.ask(action, seconds)
        self._idle.append(line)  # only now: after an error nobody knows what it still waits for
        return answer

    def _reach(self, action: Callable[[Any], Any]) -> Any:
        try:
            return self._ask(action, REACH)
        except TimeoutError as error:
            raise ConnectionError(f"it did not answer within {REACH:g} s") from error
        except RuntimeError as error:
            raise ConnectionError(str(error)) from error

    def put(self, key: str, value: bytes) -> None:
        self._reach(lambda store: store.set(key, value))

    def take(self, key: str, timeout: float) -> bytes:
        end = time.monotonic() + timeout

        def wait(store: Any) -> bytes:
            if self._clones:
                store.wait([key], datetime.timedelta(seconds=max(end - time.monotonic(), 0.001)))
            while not self._clones and not store.check([key]):
                if time.monotonic() > end:
                    raise TimeoutError(key)
                time.sleep(POLL)
            return bytes(store.get(key))

        try:
            value: bytes = self._ask(wait, timeout + GRACE)
        except (RuntimeError, LookupError, TimeoutError) as error:
            # torch has no error of its own for a wait that ran out (LookupError, DistStoreError, RuntimeError).
            if time.monotonic() >= end:
                raise TimeoutError(key) from error
            raise ConnectionError(str(error)) from error
        return value

    def has(self, *keys: str) -> bool:
        return bool(self._reach(lambda store: store.check([*keys])))

    def forget(self, key: str) -> None:
        self._reach(lambda store: store.delete_key(key))


_current: list[StoreCommunicator] = []


def communicator() -> StoreCommunicator:
    """The communicator of the current process group: a later group gets a new one."""
    if not _current or _current[0].group is not torch.distributed.group.WORLD:
        _current[:] = [StoreCommunicator()]
    return _current[0]
