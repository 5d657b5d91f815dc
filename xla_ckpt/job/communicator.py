"""How the processes of a job talk about a save: a key-value store, never a collective.

A collective on the training group from a background thread would tangle with training's own; a store does not, and a
process that dies blocks nobody but those who wait for its key, for a bounded time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Protocol


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

    def put_once(self, key: str, value: bytes, timeout: float, /) -> bytes:
        """Make `value`, which is ASCII, visible to all ranks if nobody has put this key; what is there then."""

    def take(self, key: str, timeout: float) -> bytes:
        """The value of `key`, waiting for it at most `timeout` seconds; TimeoutError if it does not come."""

    def has(self, keys: Sequence[str], timeout: float, /) -> bool:
        """Whether all these keys are there, now."""

    def forget(self, key: str, timeout: float, /) -> None:
        """Remove a key that nobody will ask for again."""


class Solo:
    """The communicator of a process on its own (and, shared by threads as different ranks, of tests)."""

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        board: dict[str, bytes] | None = None,
        changed: threading.Condition | None = None,
    ) -> None:
        self.rank, self.size = rank, size
        self._board = {} if board is None else board
        self._changed = changed or threading.Condition()

    def peer(self, rank: int) -> Solo:
        """Another rank on the same board."""
        return Solo(rank, self.size, self._board, self._changed)

    def put(self, key: str, value: bytes, _timeout: float = 0) -> None:
        with self._changed:
            self._board[key] = value
            self._changed.notify_all()

    def put_once(self, key: str, value: bytes, _timeout: float = 0) -> bytes:
        with self._changed:
            stored = self._board.setdefault(key, value)
            self._changed.notify_all()
            return stored

    def take(self, key: str, timeout: float) -> bytes:
        end = time.monotonic() + timeout
        with self._changed:
            while key not in self._board:
                if not self._changed.wait(end - time.monotonic()) and key not in self._board:
                    raise TimeoutError(key)
            return self._board[key]

    def has(self, keys: Sequence[str], _timeout: float = 0) -> bool:
        with self._changed:
            return all(key in self._board for key in keys)

    def forget(self, key: str, _timeout: float = 0) -> None:
        with self._changed:
            self._board.pop(key, None)
