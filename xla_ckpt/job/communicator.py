"""How the processes of a job talk about a save: a key-value store, never a collective.

A collective on the training group from a background thread would tangle with training's own; a store does not, and a
process that dies blocks nobody but those who wait for its key, for a bounded time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from xla_ckpt.storage.waiting import Notifier


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
        changed: Notifier | None = None,
    ) -> None:
        self.rank, self.size = rank, size
        self._board = {} if board is None else board
        self._changed = changed or Notifier()

    def peer(self, rank: int) -> Solo:
        """Another rank on the same board."""
        return Solo(rank, self.size, self._board, self._changed)

    def put(self, key: str, value: bytes, _timeout: float = 0) -> None:
        self._board[key] = value
        self._changed.notify()

    def put_once(self, key: str, value: bytes, _timeout: float = 0) -> bytes:
        stored = self._board.setdefault(key, value)
        self._changed.notify()
        return stored

    def take(self, key: str, timeout: float) -> bytes:
        if not self._changed.wait_for(lambda: key in self._board, timeout):
            raise TimeoutError(key)
        return self._board[key]

    def has(self, keys: Sequence[str], _timeout: float = 0) -> bool:
        return all(key in self._board for key in keys)

    def forget(self, key: str, _timeout: float = 0) -> None:
        self._board.pop(key, None)
