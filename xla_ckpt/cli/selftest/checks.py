"""What a check is: a promise of this library, and a function that looks whether it holds in a bench."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import IO, Literal

from xla_ckpt.cli.selftest.command import LASTING
from xla_ckpt.errors import CheckpointError, CorruptCheckpointError
from xla_ckpt.storage.base import Directory, Store
from xla_ckpt.storage.door import store_at
from xla_ckpt.storage.program import importing_alike


@dataclass(frozen=True, slots=True)
class Sighting:
    """What a check has seen, and a sentence that says how."""

    verdict: Literal["holds", "does not hold", "could not be seen", "was not looked at"]
    sentence: str


holds, broken, unseen, skipped = (
    partial(Sighting, verdict) for verdict in ("holds", "does not hold", "could not be seen", "was not looked at")
)

NO_TIME = skipped(f"There was no time left: --seconds gives more, and its default, {LASTING:.0f}, is enough as a rule.")


@dataclass(frozen=True, slots=True)
class Child:
    """A process of a selftest (`child.py`)."""

    process: subprocess.Popen[str]
    lines: IO[str]
    """What it says."""

    errors: IO[str]
    """What it, or Python for it, prints as errors."""

    def ending(self) -> str:
        """How it ended, or is about to end: its exit code, and the last line of its errors."""
        code = self.process.wait()
        self.errors.seek(0)
        last = self.errors.read().strip().rpartition("\n")[2]
        return f"exit code {code}: {last}" if last else f"exit code {code}, and said nothing"


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
    def child(self, *words: str) -> Iterator[Child]:
        """A process that does what the words say (`child.py`). It is killed when the block ends, or the time does."""
        command = [sys.executable, "-P", "-m", "xla_ckpt.cli.selftest.child", *words]
        errors = os.fdopen(os.memfd_create("errors of a child"), "w+", errors="replace")  # no disk can be full
        child = subprocess.Popen(  # noqa: S603  # this library's own program
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=importing_alike(),
            cwd="/",
            start_new_session=True,  # Ctrl-C is for its parent, which ends it
            text=True,
        )
        timer = threading.Timer(self.left, child.kill)
        timer.start()
        try:
            assert child.stdout is not None, "it has a pipe"
            yield Child(child, child.stdout, errors)
        finally:
            timer.cancel()
            child.kill()
            child.communicate()
            errors.close()


@dataclass(frozen=True, slots=True)
class Check:
    """A promise, and how it is seen."""

    name: str
    promise: str
    see: Callable[[Bench], Sighting]

    share: float = 1.0
    """The part of the time that is left which it may take."""

    def __call__(self, bench: Bench) -> Sighting:
        """Look whether the promise holds."""
        if not bench.left:
            return NO_TIME
        return sighted(partial(self._see, bench))

    def _see(self, bench: Bench) -> Sighting:
        bench.store.prepare()
        return self.see(bench)


def sighted(see: Callable[[], Sighting]) -> Sighting:
    """What was seen. Storage that refuses something has broken no promise, unless it has lost what it had taken."""
    try:
        return see()
    except (CorruptCheckpointError, FileNotFoundError) as error:
        return broken(f"{type(error).__name__}: {error}")
    except (CheckpointError, OSError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return unseen(f"There was no room: {error}")
        return unseen(f"{type(error).__name__}: {error}")
