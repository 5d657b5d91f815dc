"""Saves by DCP's calls, among all saves of the process: those in the background take turns, and all have reports."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import StorageWriter as StockWriter

from xla_ckpt.dcp.writer import StorageWriter
from xla_ckpt.engine.background import SAVES, SaveHandle, install_exit_hook
from xla_ckpt.engine.cancellation import Cancellation
from xla_ckpt.engine.ending import end
from xla_ckpt.engine.phases import SAVE, Phases
from xla_ckpt.engine.report import SaveReport
from xla_ckpt.engine.trace import Trace
from xla_ckpt.logs import get_logger
from xla_ckpt.storage.process_state import process_lock, process_wide
from xla_ckpt.storage.trace_file import trace_file

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpSave:
    """One save by DCP's calls, on this rank."""

    path: str | None
    """The directory; None if a writer of the program's has none."""

    writer: StockWriter
    rank: int
    world: int
    save: Callable[[], Metadata]
    stall: float = 0.0
    """Seconds that the caller waited before this was begun."""

    def run(self) -> tuple[Metadata, SaveReport]:
        """Save, and tell the program's functions how it went.

        Raises:
            CheckpointError: It failed.
        """
        began, file = time.perf_counter(), trace_file(None)
        phases = Phases(keep=file is not None)
        if isinstance(self.writer, StorageWriter):
            self.writer.phases = phases
        error: BaseException | None = None
        try:
            metadata = self.save()
        except BaseException as failure:  # Ctrl-C, too: a report without an error says that there is a checkpoint
            error = failure
            raise
        finally:
            ended = time.perf_counter()
            nbytes, files = 0, 0
            if isinstance(self.writer, StorageWriter):
                nbytes, files = self.writer.nbytes, self.writer.files
            trace = None if file is None else Trace(file=file, doing="save", rank=self.rank, world=self.world)
            root, _, tag = (self.path or "").rpartition("/")
            phases.keep(SAVE, began, ended, nbytes, about=tag)
            report = SaveReport(
                path=root, tag=tag, sequence=0, nbytes=nbytes, files=files, seconds=ended - began, stall=self.stall,
                phases=phases.report(), error=error,
            )  # fmt: skip
            end(report, phases, trace)
            del error  # or this frame and the error's traceback would keep each other, and the state, in memory
        return metadata, report


@dataclass(frozen=True, slots=True, kw_only=True)
class _InBackground:
    """Such a save, as `Saves` runs it."""

    of: DcpSave
    before: SaveHandle | None
    """The one that began before it. Their ranks talk in collectives, which all ranks have to come to in one order."""

    done: Future[Metadata] = field(default_factory=Future)
    freezing: None = None

    def run(self) -> SaveReport:
        if self.before is not None:
            self.before.wait()
        try:
            metadata, report = self.of.run()
        except BaseException as error:
            logger.error("the save of %s in the background failed: %s", self.of.path, error)  # noqa: TRY400  # it says all
            self.done.set_exception(error)
            raise
        self.done.set_result(metadata)
        return report

    def release(self) -> None:
        """See `xla_ckpt.engine.background.InFlight`."""

    def tidy(self, *, failed: bool) -> None:
        """See `xla_ckpt.engine.background.InFlight`."""


_lock = process_lock()
_latest: list[SaveHandle] = process_wide([], list.clear)
"""The save that began last."""


def in_background(save: DcpSave) -> Future[Metadata]:
    """Run a save in the background, after all that began before it; its result, or its error."""
    install_exit_hook()
    path = save.path or ""
    handle = SaveHandle(path, path.rpartition("/")[2], Cancellation(), error_heard=True)  # by the future
    with _lock:
        work = _InBackground(of=save, before=_latest[0] if _latest else None)
        _latest[:] = [handle]
    SAVES.start(handle, work)
    return work.done


def wait_for(path: str | None) -> None:
    """Wait for a save in the background into the same directory. Who has its future hears of its error."""
    if path is not None:
        SAVES.settle(path)
