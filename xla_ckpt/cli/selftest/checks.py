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
"""Default time limit of a selftest (s), which slow storage can exceed."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Verdict of a check, with a sentence that explains it."""

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
    """Child process of a selftest (`xla_ckpt.cli.selftest.child`)."""

    process: subprocess.Popen[str]
    output: IO[str]
    """Standard output of the process."""

    errors: IO[str]
    """Error output of the process."""

    def describe_exit(self) -> str:
        """Return the exit code of the process and the last line of its errors, waiting for its end."""
        code = self.process.wait()
        self.errors.seek(0)
        last = self.errors.read().strip().rpartition("\n")[2]
        return f"exit code {code}: {last}" if last else f"exit code {code}, and said nothing"


class CheckContext:
    """Scratch directory of a check, and its deadline (`time.monotonic`)."""

    def __init__(self, path: str, deadline: float) -> None:
        self.store: Store = open_store(path)
        self._deadline = deadline

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline."""
        return max(self._deadline - time.monotonic(), 0.0)

    def get_root_path(self, name: str) -> str:
        """Return the path of a root for tags in the scratch directory."""
        return f"{self.store.path}/{name}"

    @contextlib.contextmanager
    def make_folder(self, name: str) -> Iterator[Directory]:
        """Create a new directory in the scratch directory."""
        store = self.store.object_store
        if store is not None:
            yield store.get_directory(name)
            return
        assert self.store.file_system is not None, "a store is one of the two"
        with contextlib.closing(self.store.file_system.make_directory(name)) as directory:
            yield directory

    @contextlib.contextmanager
    def start_child(self, *words: str) -> Iterator[ChildProcess]:
        """Start a child process with these arguments (`xla_ckpt.cli.selftest.child`).

        It is killed at the end of the block, or at the deadline.
        """
        command = [sys.executable, "-P", "-m", "xla_ckpt.cli.selftest.child", *words]
        errors = os.fdopen(os.memfd_create("errors of a child"), "w+", errors="replace")  # unaffected by a full disk
        child = subprocess.Popen(  # noqa: S603  # this library's own program
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=get_subprocess_env(),
            cwd="/",
            start_new_session=True,  # Ctrl-C goes to the parent, which ends it
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
    """Guarantee of the library, and the function that checks it."""

    name: str
    promise: str
    run: Callable[[CheckContext], CheckResult]

    time_share: float = 1.0
    """Fraction of the remaining time that the check may use."""

    def __call__(self, context: CheckContext) -> CheckResult:
        """Check the guarantee."""
        if not context.seconds_left:
            return OUT_OF_TIME
        return run_catching_errors(partial(self._prepare_and_run, context))

    def _prepare_and_run(self, context: CheckContext) -> CheckResult:
        context.store.prepare()
        return self.run(context)


def run_catching_errors(run: Callable[[], CheckResult]) -> CheckResult:
    """Run a check, and return its result. Storage errors fail the check only if acknowledged data was lost."""
    try:
        return run()
    except (CorruptCheckpointError, FileNotFoundError) as error:
        return failed(f"{type(error).__name__}: {error}")
    except (CheckpointError, OSError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return inconclusive(f"There was no room: {error}")
        return inconclusive(f"{type(error).__name__}: {error}")
