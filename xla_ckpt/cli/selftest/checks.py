"""What a check is: a promise of this library, and a function that looks whether it holds in a bench."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import IO, Literal

from xla_ckpt.errors import CheckpointError
from xla_ckpt.storage.base import Directory, Store
from xla_ckpt.storage.door import store_at
from xla_ckpt.storage.program import importing_alike


@dataclass(frozen=True, slots=True)
class Sighting:
    """What a check has seen, and a sentence that says how."""

    verdict: Literal["holds", "does not hold", "could not be seen"]
    sentence: str


holds, broken, unseen = (partial(Sighting, verdict) for verdict in ("holds", "does not hold", "could not be seen"))


class Bench:
    """A fresh folder, and the time (of `time.monotonic`) until which it may be used."""

    def __init__(self, path: str, until: float) -> None:
        self.store: Store = store_at(path)
        self._until = until

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return max(self._until - time.monotonic(), 0.0)

    def below(self, name: str) -> str:
        """The path of a root in it, for tags."""
        return f"{self.store.path}/{name}"

    @contextlib.contextmanager
    def folder(self, name: str) -> Iterator[Directory]:
        """A new directory in it."""
        store = self.store.object_store
        if store is not None:
            yield store.fill(name)
            return
        assert self.store.file_system is not None, "a store is one of the two"
        with contextlib.closing(self.store.file_system.make(name)) as directory:
            yield directory

    @contextlib.contextmanager
    def child(self, *words: str) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
        """A process that does what the words say (`child.py`), and the lines that it says.

        It is killed when the block ends, or the time does.
        """
        command = [sys.executable, "-P", "-m", "xla_ckpt.cli.selftest.child", *words]
        child = subprocess.Popen(  # noqa: S603  # this library's own program
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=importing_alike(),
            start_new_session=True,  # Ctrl-C is for its parent, which ends it
            text=True,
        )
        timer = threading.Timer(self.left, child.kill)
        timer.start()
        try:
            assert child.stdout is not None, "it has a pipe"
            yield child, child.stdout
        finally:
            timer.cancel()
            child.kill()
            child.communicate()


@dataclass(frozen=True, slots=True)
class Check:
    """A promise, and how it is seen."""

    name: str
    promise: str
    see: Callable[[Bench], Sighting]

    def __call__(self, bench: Bench) -> Sighting:
        """Look whether the promise holds."""
        if not bench.left:
            return unseen("There was no time left: --seconds gives more.")
        try:
            return self.see(bench)
        except (CheckpointError, OSError) as error:
            return broken(f"{type(error).__name__}: {error}")
