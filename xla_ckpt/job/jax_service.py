"""jax.distributed as the place where ranks meet: the key-value store of its coordination service. Imported where a
program has initialised it.

jax gives its programs no public way to that store. What is used here of `jax._src.distributed` is what orbax uses.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from xla_ckpt.storage.process_state import process_wide

SLICE = 1.0
"""Seconds of one wait inside of jax, which hears no signal meanwhile: a longer wait consists of several."""


def _key(name: str) -> str:
    """The name of a key. To the service a slash begins a folder, and to delete a key is to delete the folder, too."""
    return f"xla_ckpt/{name.replace('/', '|')}"


class ServiceCommunicator:
    """A process's view of the coordination service. Safe for several threads, as jax's client is."""

    def __init__(self, state: Any) -> None:
        self.client: Any = state.client
        self.rank: int = state.process_id
        self.size: int = state.num_processes

    def put(self, key: str, value: bytes, _timeout: float = 0) -> None:
        _reach(lambda: self.client.key_value_set_bytes(_key(key), value, allow_overwrite=True))

    def put_once(self, key: str, value: bytes, timeout: float = 0) -> bytes:
        try:
            self.client.key_value_set_bytes(_key(key), value)
        except RuntimeError as error:
            if not _says(error, "ALREADY_EXISTS"):
                raise ConnectionError(str(error)) from error
            return self.take(key, timeout)
        return value

    def take(self, key: str, timeout: float) -> bytes:
        end = time.monotonic() + timeout
        while True:
            left = max(min(end - time.monotonic(), SLICE), 0.001)
            try:
                return bytes(self.client.blocking_key_value_get_bytes(_key(key), math.ceil(left * 1000)))
            except RuntimeError as error:
                if not _says(error, "DEADLINE_EXCEEDED"):
                    raise ConnectionError(str(error)) from error
                if time.monotonic() >= end:
                    raise TimeoutError(key) from error

    def has(self, keys: Sequence[str], _timeout: float = 0) -> bool:
        return all(map(self._has, keys))

    def _has(self, key: str) -> bool:
        try:
            self.client.key_value_try_get_bytes(_key(key))
        except RuntimeError as error:
            if not _says(error, "NOT_FOUND"):
                raise ConnectionError(str(error)) from error
            return False
        return True

    def forget(self, key: str, _timeout: float = 0) -> None:
        _reach(lambda: self.client.key_value_delete(_key(key)))


def _reach(ask: Callable[[], object]) -> None:
    try:
        ask()
    except RuntimeError as error:
        raise ConnectionError(str(error)) from error


def _says(error: RuntimeError, status: str) -> bool:
    """Whether an error of jax's client has a status, with which its text begins."""
    return str(error).startswith(status)


_current: list[ServiceCommunicator] = process_wide([], list.clear)


def service_communicator(state: Any) -> ServiceCommunicator:
    """The communicator of the current coordination service: a later one gets a new one."""
    if not _current or _current[0].client is not state.client:
        _current[:] = [ServiceCommunicator(state)]
    return _current[0]
