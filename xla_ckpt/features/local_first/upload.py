"""Upload checkpoints from local disks to an object store, oldest first, on a background thread.

The uploader looks for tags in the directory; nothing is handed over in memory. So a process that was killed leaves
only its tags and their journals, and the next process continues with them. Every file is sent whole and compared with
its digests.

All hosts may see one disk, or each host may have its own; ranks find out together, by a mark on each disk
(`HostDisks`). The first rank of each disk is its leader and uploads the disk's part of a tag into one attempt. The
leader of the tag's first disk begins the attempt, and commits it when all files are there.
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
    """What a rank says of the disk that it sees."""

    disk: str
    """The mark of the disk; empty where the call is about no such disk: all ranks see one storage then."""

    token: str = ""
    """Its process, as leases name it."""

    newest_sequence: int = 0
    """The highest number of a tag on the disk."""


@dataclass(frozen=True, slots=True)
class HostDisks(Message):
    """The disks that the ranks of a job see."""

    names: tuple[str, ...] = ("",)
    """Their marks, that of rank 0 first."""

    leaders: tuple[int, ...] = (0,)
    """The first rank of each disk."""

    tokens: tuple[str, ...] = ()
    """The processes of these ranks."""

    rank_disks: tuple[int, ...] = ()
    """For each rank which of the disks it sees; empty where all see the first one."""

    newest_sequence: int = 0
    """The highest number of a tag on any of them."""

    @property
    def is_multi_disk(self) -> bool:
        """Whether no disk has all files of what this job saves."""
        return len(self.names) > 1

    def get_leader(self, rank: int) -> int:
        """The first rank of the disk that a rank sees.

        >>> [HostDisks(("a", "b"), (0, 2), rank_disks=(0, 0, 1, 1)).get_leader(rank) for rank in range(4)]
        [0, 0, 2, 2]
        """
        return self.leaders[self.rank_disks[rank]] if self.rank_disks else 0

    def is_leader(self, rank: int) -> bool:
        """Whether a rank is the first one of its disk."""
        return self.get_leader(rank) == rank


def combine_disk_infos(infos: Sequence[DiskInfo]) -> HostDisks:
    """What rank 0 makes of the words of all ranks, in their order."""
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
"""Seconds between two looks at a tag that waits for files of other disks: at first, and in the end."""


SKIPPED_ERRORS = (CorruptCheckpointError, ChangedTagError, RankFailedError)
"""Errors of a tag that stays in the directory. This process does not try it again, and the others go up."""


class Uploader:
    """What brings the tags of one directory to one object store. Its thread runs while there is something to do."""

    def __init__(self, local: FileSystem, remote: ObjectStore) -> None:
        self.root = LocalFirstRoot(local, LedgerRoot(remote), self.wake)
        """The directory. A commit there wakes this."""
        # Not a daemon: a thread that comes out of obstore while the interpreter ends, ends the process badly.
        self._worker = Worker("xla_ckpt-upload", daemon=False)
        self._woken = Notifier()
        self._wake_count = 0
        """How often it was woken."""
        self._retention: Retention | None = None
        self._reached_sequence = 0
        """Number of the newest tag that was dealt with; all older ones were, too."""
        self._failed_tags: dict[int, CheckpointError] = {}
        self._present_disks: frozenset[str] = frozenset()
        """The disks of the job; empty where nobody knows them."""
        self._pending: dict[int, PendingUpload] = {}
        """The tags of which this disk has sent its part, by their numbers."""
        self._error: CheckpointError | None = None
        """Why the last try ended early; None if it did not."""
        self._is_stopping = False
        """Whether the thread is to end soon."""

    def get_disk_info(self, *, saves: bool) -> DiskInfo:
        """What this process says of the disk when a save or a load begins."""
        newest = max((entry.sequence for entry in self.root.list_entries()), default=0) if saves else 0
        return DiskInfo(self.root.get_disk_id(create=True), get_process_identity().token, newest)

    def set_disks(self, disks: HostDisks) -> None:
        """Hear which disks the job has."""
        self.root.disks, self._present_disks = disks.names, frozenset(disks.names)
        self.root.raise_min_sequence(disks.newest_sequence)
        LEASES.share_with(self.root.path, disks.tokens)
        LEASES.share_with(self.root.remote.path, disks.tokens)

    def wake(self, retention: Retention | None) -> None:
        """Have tags go up that are not in the object store, in the background.

        `retention` says which tags stay, there and here. Never fails: what cannot be done now is done after the next
        save.
        """
        self._retention = retention
        self._wake_count += 1
        self._woken.notify()  # the thread may pause until other disks have sent their files
        if not self._worker.submit(self._upload, self._record_error, once=True):
            self._error = SaveError("no thread is to be had that could upload", path=self.root.remote.path)

    def wait_uploaded(self, sequence: int, timeout: float | None) -> None:
        """Wait until the tag with this number has gone up, and all older ones.

        Raises:
            CheckpointError: It has not, and why.
            TimeoutError: It is still on its way.
        """
        self._wait_for(lambda: self._reached_sequence >= sequence and sequence not in self._pending, timeout)
        if sequence in self._failed_tags:
            raise _copy_error(self._failed_tags[sequence])
        if self._reached_sequence < sequence and self._error is not None:
            raise _copy_error(self._error)
        if self._reached_sequence < sequence and self._worker.is_lost:
            raise self._make_fork_error()

    def finish(self) -> None:
        """Wait until all tags have gone up. If the last try ended early, it is repeated once.

        Raises:
            CheckpointError: They have not, and why.
        """
        self._worker.wait()
        if self._error is not None:
            self.wake(self._retention)
            self._worker.wait()
            self._worker.run_here()  # where no thread is to be had
        if self._error is not None:
            raise _copy_error(self._error)

    def finish_all(self, *, is_leader: bool) -> None:
        """Have all tags go up that can, and wait, if this process is the first one on its disk.

        Raises:
            CheckpointError: They have not, and why.
        """
        if is_leader:
            self.wake(self._retention)
            self.finish()

    def stop(self) -> None:
        """Have the thread end soon: the next process goes on."""
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
        """Send what there is, and look again while tags wait for files of other disks."""
        pause = MIN_POLL_SECONDS
        while True:
            wakes, self._error = self._wake_count, None
            self._send_all()
            if not self._pending or self._is_stopping:
                return
            if self._woken.wait_for(lambda: self._wake_count != wakes or self._is_stopping, pause):  # noqa: B023  # used at once
                pause = MIN_POLL_SECONDS
            pause = min(2 * pause, MAX_POLL_SECONDS)

    def _record_error(self, raised: BaseException) -> None:
        """Keep an error for `wait_uploaded` and `finish`; the save has long returned."""
        self._error = as_checkpoint_error(raised, "uploading", 0, path=self.root.remote.path)
        logger.warning("an upload from %s is tried again with the next save: %s", self.root.path, self._error)

    def _send_all(self) -> None:
        entries = self.root.list_entries()
        listed = {entry.sequence for entry in entries}
        self._pending = {n: tag for n, tag in self._pending.items() if n in listed}  # others were deleted
        unsent = [e for e in entries if e.sequence not in self._failed_tags and not self.root.is_uploaded(e)]
        if unsent:
            self.root.remote.acquire_lease(COMMIT_TIMEOUT, self._check_stopping)
        for entry in unsent:  # before one is begun, which would give up those of a job that was killed
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
                    # It stays here, and does not keep those from the object store that are newer.
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
            return  # somebody has deleted it
        with TagReader(directory, self.root.path, entry.tag) as reader:
            if reader.manifest.header.sequence != entry.sequence:
                return  # a save has replaced it since it was listed, and has woken this thread
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
    """The error once more: one that was raised twice would collect the frames of both."""
    return from_json(error.to_json())


class UploadRegistry:
    """The uploads of one process."""

    def __init__(self) -> None:
        self._lock = fork_safe_lock()
        self._uploaders: dict[tuple[str, str], Uploader] = {}

    def get_uploader(self, local: FileSystem, remote: ObjectStore) -> Uploader:
        """What brings the tags of a directory to an object store."""
        with self._lock:
            key = (local.path, remote.path)
            if key not in self._uploaders:
                self._uploaders[key] = Uploader(local, remote)
            return self._uploaders[key]

    def wait(self) -> None:
        """Wait for all uploads.

        Raises:
            CheckpointError: A tag has not gone up, and why.
        """
        for uploader in list(self._uploaders.values()):
            uploader.finish()

    def finish_at_exit(self) -> None:
        """Wait for all uploads, unless somebody interrupts that; and log what failed: nobody is left to raise to."""
        try:
            self.wait()
        except CheckpointError as error:
            logger.error("tags are not uploaded at exit; the next process goes on: %s", error)  # noqa: TRY400
        except BaseException:
            logger.exception("uploads are interrupted; the next process goes on")
            for uploader in list(self._uploaders.values()):
                uploader.stop()


UPLOADS = register_fork_reset(UploadRegistry(), UploadRegistry.__init__)
"""The uploads of this process."""


MAX_DISK_WAIT_SECONDS = 600.0
"""Seconds for which a tag is waited for whose other disks send no file."""

PIECE_BYTES = 8 * 1024 * 1024
"""Bytes of a file that are read at a time."""


@dataclass(frozen=True, slots=True)
class PendingUpload:
    """A tag whose part on this disk is sent, and those of others are not."""

    present_files: Set[str]
    """The files that were there at the last look."""

    since: float = field(default_factory=time.monotonic)
    """When the last of them was new."""


def find_absent_disks(journal: UploadJournal, present: Set[str]) -> Set[str]:
    """The disks with a part of a tag that no process of this job sees; none where it is not known what they see."""
    return set(journal.disks) - present if present else set()


@dataclass(frozen=True, slots=True)
class UploadPart:
    """What one disk has of a tag."""

    root: LocalFirstRoot
    entry: TagEntry
    directory: FileSystemDirectory
    reader: TagReader
    """The same directory, by its manifest."""

    present_disks: Set[str]
    """The disks of this job; empty where nobody knows them."""

    check_cancelled: Callable[[], None]
    """Is called between two pieces, and raises to end this."""

    previous: PendingUpload | None
    """What the last look has told, if this process has sent the part already."""

    def send(self, retention: Retention | None) -> PendingUpload | None:
        """Send what is not there yet. If this is the first disk, and all files are there: the manifest, and commit.

        Returns:
            What others still have to do; None if the tag is committed.

        Raises:
            RankFailedError: They do not do it.
            CheckpointError: Likewise, or a file is damaged.
            OSError: A storage refused. The attempt stays, and the next try goes on with it.
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
            # If this process has sent its part, nobody but its job may have ended that: it is swept as a retired tag.
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
        """What this disk is to send, the manifest last, with the sizes."""
        files = [
            path for path in self.directory.list_files() if not path.startswith(UPLOAD_FILE) and path != MANIFEST_FILE
        ]
        # Other disks have files of their own under the names of those that are in no manifest.
        paths = [*files, MANIFEST_FILE] if all_files else [path for path in files if path in named]
        return {path: get_file_size(self.directory, path) for path in paths}

    def _find_sent_files(self, draft: LedgerDraft, sizes: Mapping[str, int], there: Set[str]) -> dict[str, int]:
        """Which of these files are there. They are whole: else they would not be there."""
        sent = {path: size for path, size in sizes.items() if path in there}
        for path in () if self.previous is not None else (*sent,):
            if get_file_size(draft.directory, path) != sizes[path]:  # a pin has changed the manifest since
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
        """What is to be waited for, as long as there is hope for it."""
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
    """A file of a tag, in pieces, which are compared with its digests before the last one is over.

    Raises:
        CorruptCheckpointError: It is not what was saved.
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
    """A file that is not in the manifest, such as the manifest itself, which has a digest of its own."""
    with contextlib.closing(directory.open(path)) as source:
        yield from _read_pieces(source, 0, source.size, CorruptCheckpointError("the file is cut off", file=path))
