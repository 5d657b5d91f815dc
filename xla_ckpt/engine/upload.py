"""Uploads: the tags of a directory go to an object store, oldest first, on a thread of this process.

What goes up is looked for in the directory, and not handed over: a process that was killed leaves nothing but its tags
and their journals, and the next one goes on with them. A file is sent whole, and compared with its digests on the way.

Where hosts have disks of their own, each has a thread like this, and sends what its disk has into one attempt. That of
the tag's first disk begins the attempt and commits it when all files are there; the others wait until it has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from xla_ckpt.engine.disks import Disks, DiskWord
from xla_ckpt.engine.sent_part import DiskPart, WaitingTag, absent_disks
from xla_ckpt.engine.tag_reader import TagReader
from xla_ckpt.errors import (
    ChangedTagError,
    CheckpointError,
    CorruptCheckpointError,
    NoCheckpointError,
    RankFailedError,
    SaveError,
    UsageError,
    from_json,
    naming,
    storage_errors,
)
from xla_ckpt.job.verdict import as_checkpoint_error
from xla_ckpt.logs import get_logger
from xla_ckpt.storage.base import FileSystem, ObjectStore
from xla_ckpt.storage.process_state import process_lock, process_wide
from xla_ckpt.storage.this_process import this_process
from xla_ckpt.storage.waiting import Notifier
from xla_ckpt.storage.worker import Worker
from xla_ckpt.tags.entry import TagEntry
from xla_ckpt.tags.lease import LEASES
from xla_ckpt.tags.ledger import LedgerRoot
from xla_ckpt.tags.local_first import LocalFirst, write_journal
from xla_ckpt.tags.retention import Retention
from xla_ckpt.tags.transaction import WITHIN
from xla_ckpt.tags.upload_rules import step_of, uploaded_as

logger = get_logger(__name__)

FIRST_LOOK, LAST_LOOK = 0.2, 5.0
"""Seconds between two looks at a tag that waits for files of other disks: at first, and in the end."""


STAYS = (CorruptCheckpointError, ChangedTagError, RankFailedError)
"""Errors of a tag that stays in the directory. This process does not try it again, and the others go up."""


class Uploader:
    """What brings the tags of one directory to one object store. Its thread runs while there is something to do."""

    def __init__(self, near: FileSystem, far: ObjectStore) -> None:
        self.root = LocalFirst(near, LedgerRoot(far), self.wake)
        """The directory. A commit there wakes this."""
        # Not a daemon: a thread that comes out of obstore while the interpreter ends, ends the process badly.
        self._worker = Worker("xla_ckpt-upload", daemon=False)
        self._woken = Notifier()
        self._wakes = 0
        """How often it was woken."""
        self._retention: Retention | None = None
        self._reached = 0
        """Number of the newest tag that was dealt with; all older ones were, too."""
        self._dropped: dict[int, CheckpointError] = {}
        self._present: frozenset[str] = frozenset()
        """The disks of the job; empty where nobody knows them."""
        self._waiting: dict[int, WaitingTag] = {}
        """The tags of which this disk has sent its part, by their numbers."""
        self._error: CheckpointError | None = None
        """Why the last try ended early; None if it did not."""
        self._ends = False
        """Whether the thread is to end soon."""

    def word(self, *, saves: bool) -> DiskWord:
        """What this process says of the disk when a save or a load begins."""
        newest = max((entry.sequence for entry in self.root.entries()), default=0) if saves else 0
        return DiskWord(self.root.disk(anew=True), this_process().token, newest)

    def meet(self, disks: Disks) -> None:
        """Hear which disks the job has."""
        self.root.disks, self._present = disks.names, frozenset(disks.names)
        self.root.number_above(disks.newest)
        LEASES.share_with(self.root.path, disks.tokens)
        LEASES.share_with(self.root.remote.path, disks.tokens)

    def wake(self, retention: Retention | None) -> None:
        """Have tags go up that are not in the object store, in the background.

        `retention` says which tags stay, there and here. Never fails: what cannot be done now is done after the next
        save.
        """
        self._retention = retention
        self._wakes += 1
        self._woken.notify()  # the thread may pause until other disks have sent their files
        if not self._worker.submit(self._upload, self._failed, once=True):
            self._error = SaveError("no thread is to be had that could upload", path=self.root.remote.path)

    def uploaded(self, sequence: int, timeout: float | None) -> None:
        """Wait until the tag with this number has gone up, and all older ones.

        Raises:
            CheckpointError: It has not, and why.
            TimeoutError: It is still on its way.
        """
        self._wait(lambda: self._reached >= sequence and sequence not in self._waiting, timeout)
        if sequence in self._dropped:
            raise _again(self._dropped[sequence])
        if self._reached < sequence and self._error is not None:
            raise _again(self._error)
        if self._reached < sequence and self._worker.is_lost:
            raise self._of_parent()

    def finish(self) -> None:
        """Wait until all tags have gone up. If the last try ended early, it is repeated once.

        Raises:
            CheckpointError: They have not, and why.
        """
        self._worker.wait()
        if self._error is not None:
            self.wake(self._retention)
            self._worker.wait()
            self._worker.work_here()  # where no thread is to be had
        if self._error is not None:
            raise _again(self._error)

    def finish_all(self, *, leads: bool) -> None:
        """Have all tags go up that can, and wait, if this process is the first one on its disk.

        Raises:
            CheckpointError: They have not, and why.
        """
        if leads:
            self.wake(self._retention)
            self.finish()

    def end(self) -> None:
        """Have the thread end soon: the next process goes on."""
        self._ends = True
        self._worker.clear()
        self._woken.notify()

    def _wait(self, enough: Callable[[], bool], timeout: float | None) -> None:
        if not self._worker.wait(enough, timeout):
            raise TimeoutError(f"tags of {self.root.path} are still on their way to {self.root.remote.path}")

    def _of_parent(self) -> CheckpointError:
        return UsageError(
            "this process was forked during an upload, which its parent makes",
            path=self.root.remote.path,
            hint="Wait for uploads in the process that saved.",
        )

    def _upload(self) -> None:
        """Send what there is, and look again while tags wait for files of other disks."""
        pause = FIRST_LOOK
        while True:
            wakes, self._error = self._wakes, None
            self._send_all()
            if not self._waiting or self._ends:
                return
            if self._woken.wait_for(lambda: self._wakes != wakes or self._ends, pause):  # noqa: B023  # used at once
                pause = FIRST_LOOK
            pause = min(2 * pause, LAST_LOOK)

    def _failed(self, raised: BaseException) -> None:
        """Keep an error for `uploaded` and `finish`; the save has long returned."""
        self._error = as_checkpoint_error(raised, "uploading", 0, path=self.root.remote.path)
        logger.warning("an upload from %s is tried again with the next save: %s", self.root.path, self._error)

    def _send_all(self) -> None:
        entries = self.root.entries()
        listed = {entry.sequence for entry in entries}
        self._waiting = {n: tag for n, tag in self._waiting.items() if n in listed}  # others were deleted
        unsent = [e for e in entries if e.sequence not in self._dropped and not self.root.is_sent(e)]
        if unsent:
            self.root.remote.hold(WITHIN, self._check_ends)
        for entry in unsent:  # before one is begun, which would give up those of a job that was killed
            journal = self.root.readable_journal(entry)
            if journal is not None and not absent_disks(journal, self._present):
                self.root.remote.upload(entry.tag, uploaded_as(entry), begins=False)
        for entry in entries:
            if entry in unsent:
                try:
                    with naming(path=self.root.path, tag=entry.tag), storage_errors("uploading a tag"):
                        self._send(entry)
                except CheckpointError as error:
                    if error is not entry.damage and not isinstance(error, STAYS):
                        raise
                    # It stays here, and does not keep those from the object store that are newer.
                    self._dropped[entry.sequence] = error
                    self._waiting.pop(entry.sequence, None)
                    logger.warning("a tag is not uploaded: %s", error)
            self._reached = max(self._reached, entry.sequence)
            self._worker.notify()

    def _send(self, entry: TagEntry) -> None:
        remote = self.root.remote.entries()
        self.root.have_seen(remote)
        step = step_of(entry, remote)
        if step == "drop":
            raise ChangedTagError("the object store has a newer tag of this name", found=self.root.remote.path)
        if entry.damage is not None:
            raise entry.damage
        try:
            directory = self.root.open(entry.tag)
        except NoCheckpointError:
            return  # somebody has deleted it
        with TagReader(directory, self.root.path, entry.tag) as reader:
            if reader.manifest.head.sequence != entry.sequence:
                return  # a save has replaced it since it was listed, and has woken this thread
            before = self._waiting.get(entry.sequence)
            part = DiskPart(self.root, entry, directory, reader, self._present, self._check_ends, before)
            waiting = part.send(self._retention) if step == "send" else None
            if waiting is not None:
                self._waiting[entry.sequence] = waiting
                return
            journal = self.root.journal(entry)
            write_journal(directory, replace(journal, is_remote=True))
        self._waiting.pop(entry.sequence, None)
        self.root.retire_sent(entry.tag, self._retention)

    def _check_ends(self) -> None:
        if self._ends:
            raise InterruptedError("the process ends")


def _again(error: CheckpointError) -> CheckpointError:
    """The error once more: one that was raised twice would collect the frames of both."""
    return from_json(error.to_json())


class Uploads:
    """The uploads of one process."""

    def __init__(self) -> None:
        self._lock = process_lock()
        self._uploaders: dict[tuple[str, str], Uploader] = {}

    def of(self, near: FileSystem, far: ObjectStore) -> Uploader:
        """What brings the tags of a directory to an object store."""
        with self._lock:
            key = (near.path, far.path)
            if key not in self._uploaders:
                self._uploaders[key] = Uploader(near, far)
            return self._uploaders[key]

    def wait(self) -> None:
        """Wait for all uploads.

        Raises:
            CheckpointError: A tag has not gone up, and why.
        """
        for uploader in list(self._uploaders.values()):
            uploader.finish()

    def at_exit(self) -> None:
        """Wait for all uploads, unless somebody interrupts that; and log what failed: nobody is left to raise to."""
        try:
            self.wait()
        except CheckpointError as error:
            logger.error("tags are not uploaded at exit; the next process goes on: %s", error)  # noqa: TRY400
        except BaseException:
            logger.exception("uploads are interrupted; the next process goes on")
            for uploader in list(self._uploaders.values()):
                uploader.end()


UPLOADS = process_wide(Uploads(), Uploads.__init__)
"""The uploads of this process."""
