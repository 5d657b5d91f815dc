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
    """Finds out that the job is to end, and has all ranks agree on the step at which they save.

    ::

        with xla_ckpt.PreemptionGuard() as guard:
            for step in range(first, last):
                train(step)
                if guard.should_save():
                    xla_ckpt.save_checkpoint(root, f"step_{step}", model, optimizer)
                    break

    A scheduler sends SIGTERM to one machine, or to all at slightly different times. Ranks that saved on their own would
    save different steps. So the ranks meet at each call of `should_save`, through the job's store and not by a
    collective, and what one of them has noticed counts for all from that very call on.

    Args:
        signals: Signals that mean it. Their handlers are replaced until `close`; python runs handlers in the main
            thread, between two of its instructions, so a long step is not interrupted.
        file: A file that means it as soon as it is there, on any rank: schedulers and people can make one.
        asked: A function that says so by returning True: it may ask a cloud's metadata service. It is called on every
            rank, in each call of `should_save` in which the ranks meet.
        every: The ranks meet in every so many calls of `should_save`, the others return what is known. A meeting costs
            two messages a rank, and some more on rank 0; steps of a few milliseconds want a larger number.
        mesh: How the ranks are arranged, as for `save_checkpoint`.
        timeout: Seconds that a rank waits for the others in `should_save`.

    Raises:
        UsageError: It is not made in the main thread, or `every` is below 1.
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
            self.close()  # nobody else can: who is interrupted here, for instance, never gets this object
            raise

    def __enter__(self) -> PreemptionGuard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def reason(self) -> str | None:
        """What was noticed, and on which rank, once all ranks know of it."""
        return self._agreed

    def should_save(self) -> bool:
        """Whether the job is to save now, and to end. All ranks call it at the same places, and get the same answer.

        It stays True once it was. In a job of one process it asks nobody.

        Raises:
            CheckpointError: `asked` raised on some rank; all ranks raise it.
            RankFailedError: A rank did not come within the timeout.
        """
        self._calls += 1
        if self._agreed is None and self._calls % self._every == 0:
            self._agreed = self._agree_on_notice()
            if self._agreed is not None:
                logger.warning("the job is to end (%s): it saves now", self._agreed)
        return self._agreed is not None

    def close(self) -> None:
        """Give the signals their former handlers back."""
        with defer_signals():
            for number, handler in self._previous_handlers.items():
                # A handler that was not set from Python cannot be restored by Python.
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
            self._previous_handlers = {}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        # Nothing but a note: this runs between any two instructions, also while a lock is held.
        self._notice = signal.Signals(number).name

    def _check_notice(self) -> str | None:
        """What this rank has noticed so far."""
        if self._notice is None and self._file is not None:
            folder, _, name = self._file.rpartition("/")
            if open_store(folder or "/").has(name):
                self._notice = f"the file {self._file} is there"
        if self._notice is None and self._poll is not None and self._poll():
            self._notice = "the program's function said so"
        return self._notice

    def _agree_on_notice(self) -> str | None:
        """What any rank has noticed: the word of the lowest of them."""
        job = get_current_job("", self._mesh, operation="preemption", timeout=self._timeout)
        if job.exchange.size == 1:
            return self._check_notice()
        call = CallSignature.create("should_save", every=self._every)
        job.skip_if_behind(call)
        with job.participate():
            decided: str | None = job.begin_call(call, self._check_notice, _find_first_notice)
            return decided


def _find_first_notice(notices: Sequence[str | None]) -> str | None:
    """What the lowest rank has noticed that has noticed anything.

    >>> _find_first_notice([None, "SIGTERM"])
    'SIGTERM, on rank 1'
    """
    return next((f"{what}, on rank {rank}" for rank, what in enumerate(notices) if what is not None), None)
