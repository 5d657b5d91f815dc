"""Uploads: the tags of a directory go to an object store, oldest first, on a thread of this process.

What goes up is looked for in the directory, and not handed over: a process that was killed leaves nothing but its tags
and their journals, and the next one goes on with them. A file is sent whole, and compared with its digests on the way.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from xla_ckpt.engine.tag_reader import TagReader
from xla_ckpt.errors import (
    ChangedTagError,
    CheckpointError,
    CorruptCheckpointError,
    NoCheckpointError,
    from_json,
    naming,
    storage_errors,
)
from xla_ckpt.job.verdict import as_checkpoint_error
from xla_ckpt.manifest.digest import BlockDigester, JoinedDigest
from xla_ckpt.storage.base import Directory, FileSystem, LocalFiles, ObjectStore, Source, size_of
from xla_ckpt.storage.this_process import after_fork
from xla_ckpt.storage.undisturbed import undisturbed, waited
from xla_ckpt.tags.attempt import Attempt
from xla_ckpt.tags.entry import MANIFEST, REPORT, UPLOAD, TagEntry
from xla_ckpt.tags.ledger import LedgerRoot
from xla_ckpt.tags.ledger_rules import attempt_name
from xla_ckpt.tags.local_first import LocalFirst, write_journal
from xla_ckpt.tags.retention import Retention
from xla_ckpt.tags.root import WITHIN, Kind
from xla_ckpt.tags.upload_rules import Journal, step_of

logger = logging.getLogger(__name__)

PIECE_BYTES = 8 * 1024 * 1024
"""Bytes of a file that are read at a time."""


class Uploader:
    """What brings the tags of one directory to one object store. Its thread runs while there is something to do."""

    def __init__(self, near: FileSystem, far: ObjectStore) -> None:
        self.root = LocalFirst(near, LedgerRoot(far), self.wake)
        """The directory. A commit there wakes this."""
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._again = False
        self._retention: Retention | None = None
        self._reached = 0
        """Number of the newest tag that was dealt with; all older ones were, too."""
        self._dropped: dict[int, CheckpointError] = {}
        self._error: CheckpointError | None = None
        """Why the last try ended early; None if it did not."""
        self._ends = threading.Event()

    def wake(self, retention: Retention | None) -> None:
        """Have tags go up that are not in the object store, in the background.

        `retention` says which tags stay, there and here. Never fails: what cannot be done now is done after the next
        save.
        """
        with undisturbed(), self._changed:
            self._retention, self._again = retention, True
            if self._thread is None:
                self._start()

    def _start(self) -> None:
        # Not a daemon: a thread that comes out of obstore while the interpreter ends would end the process badly.
        self._thread = threading.Thread(target=self._work, name="xla_ckpt-upload", daemon=False)
        try:
            self._thread.start()
        except RuntimeError as error:  # no further thread is to be had
            self._thread, self._error = None, as_checkpoint_error(error, "uploading", 0)

    def uploaded(self, sequence: int, timeout: float | None) -> None:
        """Wait until the tag with this number has gone up, and all older ones.

        Raises:
            CheckpointError: It has not, and why.
            TimeoutError: It is still on its way.
        """
        self._wait(lambda: self._reached >= sequence, timeout)
        if sequence in self._dropped:
            raise _again(self._dropped[sequence])
        if self._reached < sequence and self._error is not None:
            raise _again(self._error)

    def finish(self) -> None:
        """Wait until all tags have gone up. If the last try ended early, it is repeated once.

        Raises:
            CheckpointError: They have not, and why.
        """
        self._wait(lambda: False, None)
        if self._error is not None:
            self.wake(self._retention)
            self._wait(lambda: False, None)
        if self._error is not None:
            raise _again(self._error)

    def end(self) -> None:
        """Have the thread end soon: the next process goes on."""
        self._ends.set()

    def _wait(self, enough: Callable[[], bool], timeout: float | None) -> None:
        with self._changed:
            done = partial(self._changed.wait_for, lambda: enough() or self._thread is None)
            if not waited(done, timeout):
                raise TimeoutError(f"tags of {self.root.path} are still on their way to {self.root.remote.path}")

    def _work(self) -> None:
        while True:
            with self._changed:
                self._again = False
            error: CheckpointError | None = None
            try:
                self._send_all()
            except Exception as raised:
                # Told by `uploaded` and `finish`; the save has long returned.
                error = as_checkpoint_error(raised, "uploading", 0, path=self.root.remote.path)
                logger.warning("an upload from %s is tried again with the next save: %s", self.root.path, error)
            with self._changed:
                self._error = error
                if not self._again or self._ends.is_set():
                    self._thread = None
                    self._changed.notify_all()
                    return

    def _send_all(self) -> None:
        holds = False
        for entry in self.root.entries():
            if entry.sequence not in self._dropped and not self.root.journal(entry).is_remote:
                if not holds:
                    self.root.remote.hold(WITHIN, self._check_ends)
                    holds = True
                try:
                    with naming(path=self.root.path, tag=entry.tag), storage_errors("uploading a tag"):
                        self._send(entry)
                except CheckpointError as error:
                    if error is not entry.damage and not isinstance(error, CorruptCheckpointError | ChangedTagError):
                        raise
                    # It stays here, and does not keep those from the object store that are newer.
                    self._dropped[entry.sequence] = error
                    logger.warning("a tag is not uploaded: %s", error)
            with self._changed:
                self._reached = max(self._reached, entry.sequence)
                self._changed.notify_all()

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
            if step == "send":
                self._fill(reader, directory, entry)
            journal = self.root.journal(entry)
            write_journal(directory, replace(journal, is_remote=True))
        self.root.retire_sent(entry.tag, self._retention)

    def _fill(self, reader: TagReader, directory: LocalFiles, entry: TagEntry) -> None:
        """Send what is not there yet, the manifest last, and commit."""
        files = [path for path in directory.files() if not path.startswith(UPLOAD) and path != MANIFEST]
        sizes = {path: size_of(directory, path) for path in (*files, MANIFEST)}
        remote, attempt = self.root.remote, self.root.journal(entry).attempt
        resumed = remote.resume(entry.tag, attempt) if attempt.startswith(attempt_name(entry.tag, "")) else None
        draft = remote.begin(entry.tag, Kind.UPLOAD) if resumed is None else resumed
        sent = {} if resumed is None else self._sent(resumed, sizes)
        name, nbytes = draft.directory.name, sum(sizes.values())
        journal = Journal(address=remote.path, nbytes=nbytes, attempt=name, sent=sent)
        write_journal(directory, journal)
        numbers = {record.path: number for number, record in enumerate(reader.manifest.files)}
        filled = draft.directory.streaming
        assert filled is not None, "files of an object store are streamed"
        try:
            for path, size in sizes.items():
                if path not in sent:
                    pieces = _whole(directory, path) if path not in numbers else checked(reader, numbers[path])
                    filled.stream(path, size, self._unless_ended(pieces))
                    journal = replace(journal, sent={**journal.sent, path: size})
                    write_journal(directory, journal)
        except CorruptCheckpointError:
            draft.abandon()
            raise
        # If it fails, the attempt stays: the next try goes on with it.
        report = None if REPORT in sent else self.root.report_of(entry.tag)
        draft.commit(retention=self._retention, report=report, within=WITHIN)

    def _sent(self, attempt: Attempt, sizes: Mapping[str, int]) -> dict[str, int]:
        """The files that an earlier try has sent, with their sizes. They are whole: else they would not be there."""
        sent = {path: size_of(attempt.directory, path) for path in attempt.directory.files()}
        for path, size in sent.items():
            if path in sizes and size != sizes[path]:  # a pin has changed the manifest since
                self.root.remote.store.remove(f"{attempt.directory.name}/{path}")
        return {path: size for path, size in sent.items() if size == sizes.get(path, size)}

    def _unless_ended(self, pieces: Iterator[memoryview]) -> Iterator[memoryview]:
        for piece in pieces:
            self._check_ends()
            yield piece

    def _check_ends(self) -> None:
        if self._ends.is_set():
            raise InterruptedError("the process ends")


def checked(reader: TagReader, number: int) -> Iterator[memoryview]:
    """A file of a tag, in pieces, which are compared with its digests before the last one is over.

    Raises:
        CorruptCheckpointError: It is not what was saved.
    """
    record, source = reader.manifest.files[number], reader.source(number)
    table = None if record.head == record.size else reader.digest_table(number)  # a file of pickles has no regions
    damaged = CorruptCheckpointError("the file is not what was saved", file=record.path, hint=reader.hint)
    regions = [] if table is None else list(zip(table.offset.tolist(), table.nbytes.tolist(), strict=True))
    rest, at = JoinedDigest(), 0
    for offset, nbytes in (*regions, (record.size, 0)):
        for piece in _pieces(source, at, offset - at, damaged):
            rest.add(rest.nbytes, piece)
            yield piece
        of_region = BlockDigester(nbytes)
        for piece in _pieces(source, offset, nbytes, damaged):
            of_region.update(piece)
            yield piece
        if table is not None and nbytes and tuple(of_region.digests) != table.of(offset, nbytes):
            raise damaged
        at = offset + nbytes
    if rest.value != record.digest:
        raise damaged


def _pieces(source: Source, offset: int, nbytes: int, short: CheckpointError) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(min(PIECE_BYTES, nbytes)))
    for at in range(offset, offset + nbytes, PIECE_BYTES):
        piece = buffer[: min(PIECE_BYTES, offset + nbytes - at)]
        if source.read_into(piece, at) < len(piece):
            raise short
        yield piece


def _whole(directory: Directory, path: str) -> Iterator[memoryview]:
    """A file that is not in the manifest, such as the manifest itself, which has a digest of its own."""
    with contextlib.closing(directory.open(path)) as source:
        yield from _pieces(source, 0, source.size, CorruptCheckpointError("the file is cut off", file=path))


def _again(error: CheckpointError) -> CheckpointError:
    """The error once more: one that was raised twice would collect the frames of both."""
    return from_json(error.to_json())


class Uploads:
    """The uploads of one process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
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


UPLOADS = Uploads()
"""The uploads of this process."""

after_fork(UPLOADS.__init__)  # type: ignore[misc]  # the threads, and what they hold, are the parent's
