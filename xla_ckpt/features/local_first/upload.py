"""Upload checkpoints from local disks to an object store, oldest first, on a background thread.

The uploader lists the tags in the directory and keeps no queue in memory. A process that was killed leaves only its
tags and their journals, and the next process continues with them. Every file is sent completely and compared with its
digests.

All hosts may share one disk, or each host may have its own; ranks detect this together by an id on each disk
(`HostDisks`). The first rank of each disk is its leader and uploads the disk's part of a tag into one attempt. The
leader of the tag's first disk begins the attempt, and commits it when all files are present.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from xla_ckpt.core.checksum import BlockDigester, OutOfOrderDigest
from xla_ckpt.distributed.consensus import as_checkpoint_error
from xla_ckpt.distributed.exchange import Message
from xla_ckpt.errors import (
    ChangedTagError,
    CheckpointError,
    CorruptCheckpointError,
    NoCheckpointError,
    RankFailedError,
    SaveError,
    UsageError,
    annotate_errors,
    from_json,
    wrap_os_errors,
)
from xla_ckpt.features.local_first.root import LocalFirstRoot, write_journal
from xla_ckpt.features.local_first.upload_rules import UploadJournal, decide_upload, make_upload_token
from xla_ckpt.loading.tag_reader import TagReader
from xla_ckpt.logs import get_logger
from xla_ckpt.storage.base import Directory, FileReader, FileSystem, FileSystemDirectory, ObjectStore, get_file_size
from xla_ckpt.storage.process_state import fork_safe_lock, register_fork_reset
from xla_ckpt.storage.synchronization import Notifier
from xla_ckpt.storage.system_info import get_process_identity
from xla_ckpt.storage.threads import Worker
from xla_ckpt.tags.entry import MANIFEST_FILE, REPORT_FILE, UPLOAD_FILE, TagEntry
from xla_ckpt.tags.lease import LEASES
from xla_ckpt.tags.ledger_root import LedgerDraft, LedgerRoot
from xla_ckpt.tags.retention import Retention
from xla_ckpt.tags.root import COMMIT_TIMEOUT


@dataclass(frozen=True, slots=True)
class DiskInfo(Message):
    """Message of a rank about its disk."""

    disk: str
    """Id of the disk; empty if the call uses no local disk, so that all ranks share one storage."""

    token: str = ""
    """Token of the process, as in leases."""

    newest_sequence: int = 0
    """Highest sequence number of a tag on the disk."""


@dataclass(frozen=True, slots=True)
class HostDisks(Message):
    """The local disks of the ranks of a job."""

    names: tuple[str, ...] = ("",)
    """Ids of the disks, the disk of rank 0 first."""

    leaders: tuple[int, ...] = (0,)
    """First rank of each disk."""

    tokens: tuple[str, ...] = ()
    """Tokens of the processes of these ranks."""

    rank_disks: tuple[int, ...] = ()
    """Index of the disk of each rank; empty if all ranks use the first disk."""

    newest_sequence: int = 0
    """Highest sequence number of a tag on any disk."""

    @property
    def is_multi_disk(self) -> bool:
        """True if no disk contains all files that this job saves."""
        return len(self.names) > 1

    def get_leader(self, rank: int) -> int:
        """Return the first rank of the disk of a rank.

        >>> [HostDisks(("a", "b"), (0, 2), rank_disks=(0, 0, 1, 1)).get_leader(rank) for rank in range(4)]
        [0, 0, 2, 2]
        """
        return self.leaders[self.rank_disks[rank]] if self.rank_disks else 0

    def is_leader(self, rank: int) -> bool:
        """Return True if a rank is the first one of its disk."""
        return self.get_leader(rank) == rank


def combine_disk_infos(infos: Sequence[DiskInfo]) -> HostDisks:
    """Return the disks of the job, given the messages of all ranks by rank."""
    names = list(dict.fromkeys(word.disk for word in infos))
    disks = [word.disk for word in infos]
    leaders = [disks.index(name) for name in names]
    number = {name: place for place, name in enumerate(names)}
    return HostDisks(
        tuple(names),
        tuple(leaders),
        tuple(infos[rank].token for rank in leaders),
        tuple(number[disk] for disk in disks) if len(names) > 1 else (),
        max(word.newest_sequence for word in infos),
    )


logger = get_logger(__name__)

MIN_POLL_SECONDS, MAX_POLL_SECONDS = 0.2, 5.0
"""First and longest pause (s) between checks of a tag that waits for files of other disks."""


SKIPPED_ERRORS = (CorruptCheckpointError, ChangedTagError, RankFailedError)
"""Errors after which this process skips a tag: it stays in the directory, and other tags are still uploaded."""


class Uploader:
    """Background uploader from one directory to one object store. Its thread runs while there is work.

    Args:
        local: Store of the directory.
        remote: The object store.
    """

    def __init__(self, local: FileSystem, remote: ObjectStore) -> None:
        self.root = LocalFirstRoot(local, LedgerRoot(remote), self.wake)
        """Root of the directory, whose commits wake this uploader."""
        # Not a daemon: a thread that returns from obstore during interpreter shutdown crashes the process.
        self._worker = Worker("xla_ckpt-upload", daemon=False)
        self._woken = Notifier()
        self._wake_count = 0
        """Number of calls of `wake`."""
        self._retention: Retention | None = None
        self._reached_sequence = 0
        """Number of the newest processed tag; all older tags are processed too."""
        self._failed_tags: dict[int, CheckpointError] = {}
        self._present_disks: frozenset[str] = frozenset()
        """Ids of the disks of the job; empty if unknown."""
        self._pending: dict[int, PendingUpload] = {}
        """Tags whose part on this disk is uploaded, by sequence number."""
        self._error: CheckpointError | None = None
        """Error of the last run; None if it succeeded."""
        self._is_stopping = False
        """True if the thread should stop soon."""

    def get_disk_info(self, *, saves: bool) -> DiskInfo:
        """Return the message of this process about its disk at the start of a save or load."""
        newest = max((entry.sequence for entry in self.root.list_entries()), default=0) if saves else 0
        return DiskInfo(self.root.get_disk_id(create=True), get_process_identity().token, newest)

    def set_disks(self, disks: HostDisks) -> None:
        """Set the disks of the job."""
        self.root.disks, self._present_disks = disks.names, frozenset(disks.names)
        self.root.raise_min_sequence(disks.newest_sequence)
        LEASES.share_with(self.root.path, disks.tokens)
        LEASES.share_with(self.root.remote.path, disks.tokens)

    def wake(self, retention: Retention | None) -> None:
        """Upload missing tags in the background, and apply `retention` in the object store and in the directory.

        Raises no errors: a failed upload is repeated after the next save.
        """
        self._retention = retention
        self._wake_count += 1
        self._woken.notify()  # the thread may be waiting for other disks
        if not self._worker.submit(self._upload, self._record_error, once=True):
            self._error = SaveError("no thread is to be had that could upload", path=self.root.remote.path)

    def wait_uploaded(self, sequence: int, timeout: float | None) -> None:
        """Wait until the tag with this number and all older ones are uploaded, at most `timeout` seconds.

        Raises:
            CheckpointError: The upload failed.
            TimeoutError: The upload has not finished in time.
        """
        self._wait_for(lambda: self._reached_sequence >= sequence and sequence not in self._pending, timeout)
        if sequence in self._failed_tags:
            raise _copy_error(self._failed_tags[sequence])
        if self._reached_sequence < sequence and self._error is not None:
            raise _copy_error(self._error)
        if self._reached_sequence < sequence and self._worker.is_lost:
            raise self._make_fork_error()

    def finish(self) -> None:
        """Wait until all tags are uploaded. If the last run failed, it is repeated once.

        Raises:
            CheckpointError: The upload failed.
        """
        self._worker.wait()
        if self._error is not None:
            self.wake(self._retention)
            self._worker.wait()
            self._worker.run_here()  # if no thread can be started
        if self._error is not None:
            raise _copy_error(self._error)

    def finish_all(self, *, is_leader: bool) -> None:
        """If this process is the leader of its disk, upload all tags that can be uploaded, and wait.

        Raises:
            CheckpointError: The upload failed.
        """
        if is_leader:
            self.wake(self._retention)
            self.finish()

    def stop(self) -> None:
        """Stop the thread soon. The next process continues."""
        self._is_stopping = True
        self._worker.clear()
        self._woken.notify()

    def _wait_for(self, enough: Callable[[], bool], timeout: float | None) -> None:
        if not self._worker.wait(enough, timeout):
            raise TimeoutError(f"tags of {self.root.path} are still on their way to {self.root.remote.path}")

    def _make_fork_error(self) -> CheckpointError:
        return UsageError(
            "this process was forked during an upload, which its parent makes",
            path=self.root.remote.path,
            hint="Wait for uploads in the process that saved.",
        )

    def _upload(self) -> None:
        """Upload all tags, and repeat while tags wait for files of other disks."""
        pause = MIN_POLL_SECONDS
        while True:
            wakes, self._error = self._wake_count, None
            self._send_all()
            if not self._pending or self._is_stopping:
                return
            if self._woken.wait_for(lambda: self._wake_count != wakes or self._is_stopping, pause):  # noqa: B023  # called immediately
                pause = MIN_POLL_SECONDS
            pause = min(2 * pause, MAX_POLL_SECONDS)

    def _record_error(self, raised: BaseException) -> None:
        """Store an error for `wait_uploaded` and `finish`, because the save has already returned."""
        self._error = as_checkpoint_error(raised, "uploading", 0, path=self.root.remote.path)
        logger.warning("an upload from %s is tried again with the next save: %s", self.root.path, self._error)

    def _send_all(self) -> None:
        entries = self.root.list_entries()
        listed = {entry.sequence for entry in entries}
        self._pending = {n: tag for n, tag in self._pending.items() if n in listed}  # others were deleted
        unsent = [e for e in entries if e.sequence not in self._failed_tags and not self.root.is_uploaded(e)]
        if unsent:
            self.root.remote.acquire_lease(COMMIT_TIMEOUT, self._check_stopping)
        for entry in unsent:  # before any upload starts, which would give up attempts of a job that was killed
            journal = self.root.try_read_journal(entry)
            if journal is not None and not find_absent_disks(journal, self._present_disks):
                self.root.remote.begin_upload(entry.tag, make_upload_token(entry), begins=False)
        for entry in entries:
            if entry in unsent:
                try:
                    with annotate_errors(path=self.root.path, tag=entry.tag), wrap_os_errors("uploading a tag"):
                        self._send(entry)
                except CheckpointError as error:
                    if error is not entry.damage and not isinstance(error, SKIPPED_ERRORS):
                        raise
                    # The tag stays on the disk, but does not block the upload of newer tags.
                    self._failed_tags[entry.sequence] = error
                    self._pending.pop(entry.sequence, None)
                    logger.warning("a tag is not uploaded: %s", error)
            self._reached_sequence = max(self._reached_sequence, entry.sequence)
            self._worker.notify()

    def _send(self, entry: TagEntry) -> None:
        remote = self.root.remote.list_entries()
        self.root.observe_remote(remote)
        step = decide_upload(entry, remote)
        if step == "drop":
            raise ChangedTagError("the object store has a newer tag of this name", found=self.root.remote.path)
        if entry.damage is not None:
            raise entry.damage
        try:
            directory = self.root.open(entry.tag)
        except NoCheckpointError:
            return  # deleted in the meantime
        with TagReader(directory, self.root.path, entry.tag) as reader:
            if reader.manifest.header.sequence != entry.sequence:
                return  # replaced since it was listed by a save that has woken this thread
            before = self._pending.get(entry.sequence)
            part = UploadPart(self.root, entry, directory, reader, self._present_disks, self._check_stopping, before)
            waiting = part.send(self._retention) if step == "send" else None
            if waiting is not None:
                self._pending[entry.sequence] = waiting
                return
            journal = self.root.read_journal(entry)
            write_journal(directory, replace(journal, is_remote=True))
        self._pending.pop(entry.sequence, None)
        self.root.retire_uploaded(entry.tag, self._retention)

    def _check_stopping(self) -> None:
        if self._is_stopping:
            raise InterruptedError("the process ends")


def _copy_error(error: CheckpointError) -> CheckpointError:
    """Return a copy of an error: an exception that is raised twice collects both tracebacks."""
    return from_json(error.to_json())


class UploadRegistry:
    """The uploaders of one process."""

    def __init__(self) -> None:
        self._lock = fork_safe_lock()
        self._uploaders: dict[tuple[str, str], Uploader] = {}

    def get_uploader(self, local: FileSystem, remote: ObjectStore) -> Uploader:
        """Return the uploader from a directory to an object store, creating it if necessary."""
        with self._lock:
            key = (local.path, remote.path)
            if key not in self._uploaders:
                self._uploaders[key] = Uploader(local, remote)
            return self._uploaders[key]

    def wait(self) -> None:
        """Wait for all uploads.

        Raises:
            CheckpointError: An upload failed.
        """
        for uploader in list(self._uploaders.values()):
            uploader.finish()

    def finish_at_exit(self) -> None:
        """Wait for all uploads at exit unless interrupted. Errors are logged, because there is no caller."""
        try:
            self.wait()
        except CheckpointError as error:
            logger.error("tags are not uploaded at exit; the next process goes on: %s", error)  # noqa: TRY400
        except BaseException:
            logger.exception("uploads are interrupted; the next process goes on")
            for uploader in list(self._uploaders.values()):
                uploader.stop()


UPLOADS = register_fork_reset(UploadRegistry(), UploadRegistry.__init__)
"""Uploaders of this process."""


MAX_DISK_WAIT_SECONDS = 600.0
"""Maximum time to wait for a tag whose other disks upload no files (s)."""

PIECE_BYTES = 8 * 1024 * 1024
"""Bytes of a file that are read at a time."""


@dataclass(frozen=True, slots=True)
class PendingUpload:
    """A tag whose part on this disk is uploaded, while parts on other disks are not."""

    present_files: Set[str]
    """Files that were present at the last check."""

    since: float = field(default_factory=time.monotonic)
    """Time at which the last of them appeared (s of `time.monotonic`)."""


def find_absent_disks(journal: UploadJournal, present: Set[str]) -> Set[str]:
    """Return the disks with a part of a tag that no process of this job has; empty if the disks are unknown."""
    return set(journal.disks) - present if present else set()


@dataclass(frozen=True, slots=True)
class UploadPart:
    """Upload of the part of a tag on one disk."""

    root: LocalFirstRoot
    entry: TagEntry
    directory: FileSystemDirectory
    reader: TagReader
    """Reader of the same directory."""

    present_disks: Set[str]
    """Ids of the disks of this job; empty if unknown."""

    check_cancelled: Callable[[], None]
    """Called between two pieces; an exception cancels the upload."""

    previous: PendingUpload | None
    """Result of the last call of `send`, if this process has uploaded the part already."""

    def send(self, retention: Retention | None) -> PendingUpload | None:
        """Upload missing files. On the first disk, once all files are present, upload the manifest and commit.

        Returns:
            The files that are present, if other disks have not finished; None if the tag is committed.

        Raises:
            RankFailedError: Other disks make no progress, or are not available.
            CheckpointError: A file is corrupt.
            OSError: A storage failed. The attempt is kept, and the next run continues it.
        """
        journal, own, remote = self.root.read_journal(self.entry), self.root.get_disk_id(create=True), self.root.remote
        if gone := find_absent_disks(journal, self.present_disks):
            raise self._make_incomplete_error(f"{len(gone)} of {len(journal.disks)} disks are not there")
        is_first = journal.disks[:1] in ((), (own,))
        named = {record.path: number for number, record in enumerate(self.reader.manifest.files)}
        sizes = self._list_sizes(named, all_files=is_first)
        if journal.is_complete_on(own) and (lost := named.keys() - sizes.keys()):
            raise self.reader.make_missing_error(named[min(lost)])
        draft = remote.begin_upload(self.entry.tag, make_upload_token(self.entry), begins=is_first)
        if draft is None:
            # If this process has uploaded its part, only its own job can have ended the attempt: it was retired and
            # deleted.
            ends = ("committed",) if self.previous is None else ("committed", "unknown")
            if journal.attempt and remote.get_outcome(journal.attempt) in ends:
                return None
            return self._keep_waiting(set())
        there = set(draft.directory.list_files())
        sent = self._find_sent_files(draft, sizes, there)
        journal = replace(journal, nbytes=sum(sizes.values()), attempt=draft.directory.name, sent=sent)
        write_journal(self.directory, journal)
        missing = named.keys() - there - sizes.keys()
        self._send_files(draft, journal, {p: n for p, n in sizes.items() if p != MANIFEST_FILE or not missing}, named)
        if missing or not is_first:
            return self._keep_waiting(there)
        report = None if REPORT_FILE in there else self.root.read_report(self.entry.tag)
        draft.commit(retention=retention, report=report, within=COMMIT_TIMEOUT)
        return None

    def _list_sizes(self, named: Mapping[str, int], *, all_files: bool) -> dict[str, int]:
        """Return the sizes of the files that this disk uploads, with the manifest last."""
        files = [
            path for path in self.directory.list_files() if not path.startswith(UPLOAD_FILE) and path != MANIFEST_FILE
        ]
        # Files that are not in the manifest exist on several disks with the same names.
        paths = [*files, MANIFEST_FILE] if all_files else [path for path in files if path in named]
        return {path: get_file_size(self.directory, path) for path in paths}

    def _find_sent_files(self, draft: LedgerDraft, sizes: Mapping[str, int], there: Set[str]) -> dict[str, int]:
        """Return the sizes of the files that are already uploaded. They are complete, since they appear atomically."""
        sent = {path: size for path, size in sizes.items() if path in there}
        for path in () if self.previous is not None else (*sent,):
            if get_file_size(draft.directory, path) != sizes[path]:  # the manifest was changed by a pin
                self.root.remote.store.remove(f"{draft.directory.name}/{path}")
                del sent[path]
        return sent

    def _send_files(
        self, draft: LedgerDraft, journal: UploadJournal, sizes: Mapping[str, int], named: Mapping[str, int]
    ) -> None:
        filled = draft.directory.streaming
        assert filled is not None, "files of an object store are streamed"
        try:
            for path, size in sizes.items():
                if path not in journal.sent:
                    known = path in named
                    pieces = (
                        _read_verified(self.reader, named[path]) if known else _read_whole_file(self.directory, path)
                    )
                    filled.stream(path, size, self._check_pieces(pieces))
                    journal = replace(journal, sent={**journal.sent, path: size})
                    write_journal(self.directory, journal)
        except CorruptCheckpointError:
            draft.abort()
            raise

    def _check_pieces(self, pieces: Iterator[memoryview]) -> Iterator[memoryview]:
        for piece in pieces:
            self.check_cancelled()
            yield piece

    def _keep_waiting(self, there: Set[str]) -> PendingUpload:
        """Return the state to wait for, unless the wait is too long.

        Raises:
            RankFailedError: The disks are unknown, or have uploaded no file for `MAX_DISK_WAIT_SECONDS`.
        """
        waiting = (
            self.previous
            if self.previous is not None and self.previous.present_files == there
            else PendingUpload(there)
        )
        if not self.present_disks or time.monotonic() - waiting.since > MAX_DISK_WAIT_SECONDS:
            raise self._make_incomplete_error("files that are missing in the object store")
        return waiting

    def _make_incomplete_error(self, problem: str) -> RankFailedError:
        return RankFailedError(
            "a part of this tag is on the disks of other hosts, which do not send it",
            tag=self.entry.tag,
            found=problem,
            hint="It goes up when a job saves or loads that has all of these disks; or run xla-ckpt upload on their "
            "hosts, and then here once more. If a disk is lost, so is this tag: remove it with xla-ckpt rm.",
        )


def _read_verified(reader: TagReader, number: int) -> Iterator[memoryview]:
    """Yield the pieces of a file, compared with its digests before the last piece is consumed.

    Raises:
        CorruptCheckpointError: The file does not match its digests.
    """
    record, source = reader.manifest.files[number], reader.open_file(number)
    table = (
        None if record.framing_bytes == record.size else reader.get_digest_table(number)
    )  # a file of pickles has no regions
    damaged = CorruptCheckpointError("the file is not what was saved", file=record.path, hint=reader.hint)
    regions = [] if table is None else list(zip(table.offset.tolist(), table.nbytes.tolist(), strict=True))
    rest, at = OutOfOrderDigest(), 0
    for offset, nbytes in (*regions, (record.size, 0)):
        for piece in _read_pieces(source, at, offset - at, damaged):
            rest.add(rest.nbytes, piece)
            yield piece
        of_region = BlockDigester(nbytes)
        for piece in _read_pieces(source, offset, nbytes, damaged):
            of_region.update(piece)
            yield piece
        if table is not None and nbytes and tuple(of_region.digests) != table.get_digests(offset, nbytes):
            raise damaged
        at = offset + nbytes
    if rest.value != record.framing_digest:
        raise damaged


def _read_pieces(source: FileReader, offset: int, nbytes: int, short: CheckpointError) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(min(PIECE_BYTES, nbytes)))
    for at in range(offset, offset + nbytes, PIECE_BYTES):
        piece = buffer[: min(PIECE_BYTES, offset + nbytes - at)]
        if source.read_into(piece, at) < len(piece):
            raise short
        yield piece


def _read_whole_file(directory: Directory, path: str) -> Iterator[memoryview]:
    """Yield the pieces of a file that is not listed in the manifest, or of the manifest, which has its own digest."""
    with contextlib.closing(directory.open(path)) as source:
        yield from _read_pieces(source, 0, source.size, CorruptCheckpointError("the file is cut off", file=path))
