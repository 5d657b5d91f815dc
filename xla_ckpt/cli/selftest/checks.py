"""Framework of the selftest: a check, its result, and the context that it runs in.

A check verifies one guarantee of the library. Its context provides a scratch directory, a deadline and child
processes.
"""

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

from xla_ckpt.errors import CheckpointError, CorruptCheckpointError
from xla_ckpt.storage.base import Directory, Store
from xla_ckpt.storage.helper_process import get_subprocess_env
from xla_ckpt.storage.resolve import open_store

DEFAULT_SECONDS = 120.0
"""Longest duration of a selftest (s), unless the storage keeps it waiting."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What a check has seen, and a sentence that says how."""

    verdict: Literal["holds", "does not hold", "could not be seen", "was not looked at"]
    sentence: str


passed, failed, inconclusive, skipped = (
    partial(CheckResult, verdict) for verdict in ("holds", "does not hold", "could not be seen", "was not looked at")
)

OUT_OF_TIME = skipped(
    f"There was no time left: --seconds gives more, and its default, {DEFAULT_SECONDS:.0f}, is enough as a rule."
)


@dataclass(frozen=True, slots=True)
class ChildProcess:
    """A process of a selftest (`start_child.py`)."""

    process: subprocess.Popen[str]
    output: IO[str]
    """What it says."""

    errors: IO[str]
    """What it, or Python for it, prints as errors."""

    def describe_exit(self) -> str:
        """How it ended, or is about to end: its exit code, and the last line of its errors."""
        code = self.process.wait()
        self.errors.seek(0)
        last = self.errors.read().strip().rpartition("\n")[2]
        return f"exit code {code}: {last}" if last else f"exit code {code}, and said nothing"


class CheckContext:
    """A fresh folder, and the time (of `time.monotonic`) until which it may be used."""

    def __init__(self, path: str, deadline: float) -> None:
        self.store: Store = open_store(path)
        self._deadline = deadline

    @property
    def seconds_left(self) -> float:
        """Seconds that are left."""
        return max(self._deadline - time.monotonic(), 0.0)

    def get_root_path(self, name: str) -> str:
        """The path of a root in it, for tags."""
        return f"{self.store.path}/{name}"

    @contextlib.contextmanager
    def make_folder(self, name: str) -> Iterator[Directory]:
        """A new directory in it."""
        store = self.store.object_store
        if store is not None:
            yield store.get_directory(name)
            return
        assert self.store.file_system is not None, "a store is one of the two"
        with contextlib.closing(self.store.file_system.make_directory(name)) as directory:
            yield directory

    @contextlib.contextmanager
    def start_child(self, *words: str) -> Iterator[ChildProcess]:
        """A process that does what the words say (`start_child.py`).

        It is killed when the block ends, or the time does.
        """
        command = [sys.executable, "-P", "-m", "xla_ckpt.cli.selftest.child", *words]
        errors = os.fdopen(os.memfd_create("errors of a child"), "w+", errors="replace")  # no disk can be full
        child = subprocess.Popen(  # noqa: S603  # this library's own program
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=get_subprocess_env(),
            cwd="/",
            start_new_session=True,  # Ctrl-C is for its parent, which ends it
            text=True,
        )
        timer = threading.Timer(self.seconds_left, child.kill)
        timer.start()
        try:
            assert child.stdout is not None, "it has a pipe"
            yield ChildProcess(child, child.stdout, errors)
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
    run: Callable[[CheckContext], CheckResult]

    time_share: float = 1.0
    """The part of the time that is left which it may take."""

    def __call__(self, context: CheckContext) -> CheckResult:
        """Look whether the promise holds."""
        if not context.seconds_left:
            return OUT_OF_TIME
        return run_catching_errors(partial(self._prepare_and_run, context))

    def _prepare_and_run(self, context: CheckContext) -> CheckResult:
        context.store.prepare()
        return self.run(context)


def run_catching_errors(run: Callable[[], CheckResult]) -> CheckResult:
    """What was seen. Storage that refuses something has broken no promise, unless it has lost what it had taken."""
    try:
        return run()
    except (CorruptCheckpointError, FileNotFoundError) as error:
        return failed(f"{type(error).__name__}: {error}")
    except (CheckpointError, OSError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return inconclusive(f"There was no room: {error}")
        return inconclusive(f"{type(error).__name__}: {error}")
