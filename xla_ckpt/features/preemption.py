"""Preemption: agree among all ranks on the step at which the job saves before its machines are taken away."""

from __future__ import annotations

import reprlib
import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any

from xla_ckpt.core.sharding.mesh import Mesh
from xla_ckpt.distributed.current_job import get_current_job
from xla_ckpt.distributed.handshake import CallSignature
from xla_ckpt.distributed.job import DEFAULT_TIMEOUT
from xla_ckpt.errors import UsageError
from xla_ckpt.keywords import check_arguments
from xla_ckpt.logs import get_logger
from xla_ckpt.storage.resolve import PathLike, normalize_path, open_store
from xla_ckpt.storage.signals import defer_signals

logger = get_logger(__name__)


class PreemptionGuard:
    """A guard that detects a preemption of the job and lets all ranks agree on the step at which they save.

    ::

        with xla_ckpt.PreemptionGuard() as guard:
            for step in range(first, last):
                train(step)
                if guard.should_save():
                    xla_ckpt.save_checkpoint(root, f"step_{step}", model, optimizer)
                    break

    A scheduler sends SIGTERM to one machine, or to all machines at slightly different times, so ranks that decide
    independently would save different steps. With this guard, ranks synchronize in `should_save` through the job's
    store, without a collective, and a notice on one rank takes effect on all ranks in the same call.

    Args:
        signals: Signals that announce a preemption. Their handlers are replaced until `close`. Python runs handlers in
            the main thread, between two instructions, so a long step is not interrupted.
        file: Path of a file that announces a preemption as soon as it exists, on any rank. Schedulers and users can
            create it.
        asked: Function that returns True to announce a preemption, for example after querying a cloud's metadata
            service. It is called on every rank, in each call of `should_save` that synchronizes.
        every: Number of calls of `should_save` per synchronization; the other calls return the known state. A
            synchronization costs two messages per rank, and more on rank 0. Use a larger number if steps take only a
            few milliseconds.
        mesh: Device mesh, as in `save_checkpoint`.
        timeout: Seconds that a rank waits for the others in `should_save`.

    Raises:
        UsageError: It is not created in the main thread although `signals` is not empty, `signals` contains an invalid
            signal, or `every` is below 1.
    """

    @check_arguments
    def __init__(
        self,
        *,
        signals: Sequence[signal.Signals] = (signal.SIGTERM,),
        file: PathLike | None = None,
        asked: Callable[[], bool] | None = None,
        every: int = 1,
        mesh: Mesh | str | None = None,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        if every < 1:
            raise UsageError("every= is no number of calls", expected="1 or more", found=every)
        unknown = [number for number in signals if number not in signal.valid_signals()]
        if unknown:
            raise UsageError(
                "signals has what is no signal", expected="such as signal.SIGTERM", found=reprlib.repr(unknown)
            )
        if signals and threading.current_thread() is not threading.main_thread():
            raise UsageError(
                "a preemption guard is made in another thread than the main one, which alone receives signals",
                hint="Make it in the main thread, or with signals=() and file= or asked=.",
            )
        self._file = None if file is None else normalize_path(file)
        self._poll, self._every, self._mesh, self._timeout = asked, every, mesh, timeout
        self._calls = 0
        self._notice: str | None = None
        self._agreed: str | None = None
        self._previous_handlers: dict[signal.Signals, Any] = {}
        try:
            for number in signals:
                self._previous_handlers[number] = signal.getsignal(number)
                signal.signal(number, self._receive)
        except BaseException:
            self.close()  # an interruption here means that no caller gets this object to close it
            raise

    def __enter__(self) -> PreemptionGuard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def reason(self) -> str | None:
        """The notice and its rank, once all ranks know about it; otherwise None."""
        return self._agreed

    def should_save(self) -> bool:
        """Return True if the job should save now and exit. Call it on all ranks at the same steps; all get the same
        result.

        After the first True, it always returns True. A single-process job sends no messages.

        Raises:
            CheckpointError: `asked` raised an exception on a rank; all ranks raise it.
            RankFailedError: A rank did not call it within the timeout.
        """
        self._calls += 1
        if self._agreed is None and self._calls % self._every == 0:
            self._agreed = self._agree_on_notice()
            if self._agreed is not None:
                logger.warning("the job is to end (%s): it saves now", self._agreed)
        return self._agreed is not None

    def close(self) -> None:
        """Restore the previous signal handlers."""
        with defer_signals():
            for number, handler in self._previous_handlers.items():
                # A handler that was not set from Python cannot be restored by Python.
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
            self._previous_handlers = {}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        # Only record the signal: this runs between any two instructions, even while a lock is held.
        self._notice = signal.Signals(number).name

    def _check_notice(self) -> str | None:
        """Return the notice of this rank, or None."""
        if self._notice is None and self._file is not None:
            folder, _, name = self._file.rpartition("/")
            if open_store(folder or "/").has(name):
                self._notice = f"the file {self._file} is there"
        if self._notice is None and self._poll is not None and self._poll():
            self._notice = "the program's function said so"
        return self._notice

    def _agree_on_notice(self) -> str | None:
        """Return the notice of the lowest rank that has one, or None."""
        job = get_current_job("", self._mesh, operation="preemption", timeout=self._timeout)
        if job.exchange.size == 1:
            return self._check_notice()
        call = CallSignature.create("should_save", every=self._every)
        job.skip_if_behind(call)
        with job.participate():
            decided: str | None = job.begin_call(call, self._check_notice, _find_first_notice)
            return decided


def _find_first_notice(notices: Sequence[str | None]) -> str | None:
    """Return the notice of the lowest rank that has one, or None.

    >>> _find_first_notice([None, "SIGTERM"])
    'SIGTERM, on rank 1'
    """
    return next((f"{what}, on rank {rank}" for rank, what in enumerate(notices) if what is not None), None)
