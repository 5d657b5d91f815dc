"""Local-first root: tags are committed to a local directory and uploaded to an object store later.

`LocalFirstRoot` adds an upload journal to each tag, numbers tags above those in the object store, and retires uploaded
tags. `LocalFirstFiles` reads local files if they exist and remote ones otherwise.
"""

from __future__ import annotations

import contextlib
import errno
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence

from xla_ckpt.core.manifest.manifest import ManifestHeader
from xla_ckpt.errors import CheckpointError, NoCheckpointError, UsageError, annotate_errors, wrap_os_errors
from xla_ckpt.features.local_first.upload_rules import (
    UploadJournal,
    is_another_run,
    parse_address,
    parse_journal,
)
from xla_ckpt.logs import get_logger
from xla_ckpt.storage.base import FileReader, FileSystem, FileSystemDirectory, ReadDirectory, write_file
from xla_ckpt.tags.directory_operations import (
    check_is_directory,
    move_to_trash,
    remove_directory,
    replace_directory,
    retire_tags,
)
from xla_ckpt.tags.directory_root import DirectoryDraft, DirectoryRoot
from xla_ckpt.tags.entry import DISK_ID_NAME, DRAFT_PREFIX, TRASH_NAME, UPLOAD_FILE, TagEntry
from xla_ckpt.tags.ledger_root import LedgerRoot
from xla_ckpt.tags.retention import Retention
from xla_ckpt.tags.retention_inputs import select_tags_to_retire
from xla_ckpt.tags.root import TransactionKind, do_nothing

logger = get_logger(__name__)

MAX_JOURNAL_BYTES = 1 << 26
"""Maximum number of bytes read from a journal."""


class LocalFirstRoot(DirectoryRoot):
    """A local root directory whose tags are uploaded to an object store.

    Args:
        store: The directory.
        remote: Root in the object store.
        on_commit: Called after each commit with its retention policy.
    """

    def __init__(self, store: FileSystem, remote: LedgerRoot, on_commit: Callable[[Retention | None], object]) -> None:
        super().__init__(store)
        self.remote = remote
        self._on_commit = on_commit
        self._min_sequence = 0
        self._is_remote_checked = False
        """True once the sequence numbers in the object store were read. Only once, because saves must not wait for
        it.
        """
        self.disks: tuple[str, ...] = ()
        """Ids of the disks of the processes that save here, the disk of rank 0 first."""

    def get_disk_id(self, *, create: bool) -> str:
        """Return the id of the disk of this process. Without `create`, return an empty string if it has none.

        The id is stored on the disk, so that it does not depend on the host or on the order of hosts.

        Raises:
            OSError: The storage failed.
        """
        while not (marks := self.store.list_names(DISK_ID_NAME)) and create:
            check_is_directory(self.store, DISK_ID_NAME)
            self.store.prepare()
            draft = self.store.make_directory(f"{DRAFT_PREFIX}{uuid.uuid4().hex}")
            try:
                draft.make_directory(uuid.uuid4().hex)
                draft.sync()
                self.store.rename(draft.name, DISK_ID_NAME)
                self.store.sync()
            except OSError as error:
                remove_directory(self.store, draft.name)
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):  # otherwise another process was faster
                    raise
            finally:
                draft.close()
        return marks[0] if marks else ""

    def begin(self, name: str, kind: TransactionKind) -> DirectoryDraft:
        draft = super().begin(name, kind)
        if kind is TransactionKind.TAG:
            try:
                write_file(
                    draft.directory, UPLOAD_FILE, UploadJournal(address=self.remote.path, disks=self.disks).to_json()
                )
            except BaseException:
                draft.abort()
                raise
        return draft

    def list_complete_entries(self) -> list[TagEntry]:
        """Return the tags with all files on this disk, oldest first. Other tags cannot be read here.

        Includes tags with a corrupt journal, whose load raises the error (`check_journal`).
        """
        disk, entries = self.get_disk_id(create=False), self.list_entries()
        journals = read_journals(self.store, entries, self.remote.path)
        return [e for e in entries if e.tag not in journals or journals[e.tag].is_complete_on(disk)]

    def check_journal(self, tag: str) -> None:
        """Raise an error if the journal of a tag is corrupt, since the disk may contain only a part of its files.

        Raises:
            CorruptCheckpointError: The journal is corrupt.
        """
        if (entry := self.get_entry(tag)) is not None:
            self.read_journal(entry)

    def prefer_local(self, remote: ReadDirectory, tag: str, head: ManifestHeader) -> ReadDirectory:
        """Return the files of a tag in the object store, replaced by the files on this disk if it has the same
        version.
        """
        entry = self.get_entry(tag)
        if entry is None or (entry.sequence, entry.created) != (head.sequence, head.created):
            return remote  # the disk has another version, or none
        try:
            return LocalFirstFiles(remote, self.open(tag))
        except NoCheckpointError:
            return remote  # retired in the meantime

    def acquire_lease(self, within: float, check: Callable[[], object] = do_nothing) -> None:
        super().acquire_lease(within, check)
        if not self._is_remote_checked:
            addresses = self._check_addresses()
            try:
                remote = self.remote.list_entries()
            except CheckpointError as error:
                if not self.list_entries():
                    raise  # the sequence numbers are unknown
                logger.warning("%s: new tags are numbered after those in %s: %s", self.remote.path, self.path, error)
            else:
                self._check_is_same_run(remote, addresses)
                self.observe_remote(remote)
            self._is_remote_checked = True

    def _check_is_same_run(self, remote: list[TagEntry], addresses: Mapping[str, str | None]) -> None:
        """Raise a UsageError if the object store contains tags of another run."""
        addressed = (tag for tag, address in addresses.items() if address is not None)
        if is_another_run(self.list_entries(), remote, addressed):
            raise UsageError(
                "there are tags of another run in the object store, and none of this directory's: they would be mixed",
                path=self.remote.path,
                expected=f"tags of {self.path}, or none",
                found=", ".join(entry.tag for entry in remote[-5:]),
                hint="Name an address where nothing lies.",
            )

    def _check_addresses(self) -> dict[str, str | None]:
        """Return the upload address of each tag in the directory, or None if the tag records none.

        Raises:
            UsageError: A tag has another address. It would be uploaded here and treated as newer.
        """
        addresses = {entry.tag: _read_address(self.store, entry) for entry in self.list_entries()}
        for tag, address in addresses.items():
            if address not in (None, self.remote.path):
                raise UsageError(
                    "the directory given as local= has tags of another root",
                    path=self.path,
                    tag=tag,
                    expected=self.remote.path,
                    found=address,
                    hint="Give each root a directory of its own.",
                )
        return addresses

    def observe_remote(self, remote: list[TagEntry]) -> None:
        """Number new tags above all tags in the object store."""
        self.raise_min_sequence(max((entry.sequence for entry in remote), default=0))

    def raise_min_sequence(self, sequence: int) -> None:
        """Number new tags above `sequence`."""
        self._min_sequence = max(self._min_sequence, sequence)

    def get_min_sequence(self) -> int:
        return self._min_sequence

    def finish_commit(self, tag: str, doomed: Sequence[TagEntry], retention: Retention | None) -> None:
        """Only call `on_commit`: tags are retired after their upload (see `retire_uploaded`)."""
        self._on_commit(retention)

    def retire_uploaded(self, tag: str, retention: Retention | None) -> None:
        """Retire uploaded tags that the policy drops after `tag` was uploaded. A failure is logged."""
        try:
            if retention is not None:
                sent = {e.tag: e for e in self.list_entries() if self.is_uploaded(e) and not self.is_written(e.tag)}
                retire_tags(
                    self.store, [sent[old] for old in select_tags_to_retire(self.store, sent.values(), retention)]
                )
            self.clean()
        except (OSError, CheckpointError) as error:
            logger.warning("could not clean up in %s after tag %s: %s", self.path, tag, error)

    def open_if_exists(self, tag: str) -> FileSystemDirectory | None:
        """Open a tag for reading, or return None if it does not exist."""
        try:
            return self.open(tag)
        except NoCheckpointError:
            return None

    def restore_replaced(self, tag: str, replaced: FileSystemDirectory) -> None:
        """Restore the version of a tag that a commit has replaced, and remove the new version.

        Raises:
            OSError: The storage failed, or the old version no longer exists.
        """
        trash = (f"{TRASH_NAME}/{name}" for name in self.store.list_names(TRASH_NAME))
        name = next((name for name in trash if replaced.is_at(name)), None)
        if name is None:
            raise FileNotFoundError(errno.ENOENT, "what was replaced is gone", tag)
        old = replace_directory(self.store, name, tag, self.store.get_identity(tag))
        if old is not None and old != name:
            move_to_trash(self.store, old)

    def read_journal(self, entry: TagEntry) -> UploadJournal:
        """Return the upload journal of a tag.

        Raises:
            CheckpointError: The journal is corrupt or cannot be read.
        """
        return _read_journal(self.store, entry, self.remote.path)

    def try_read_journal(self, entry: TagEntry) -> UploadJournal | None:
        """Return the upload journal of a tag, or None if it is corrupt or cannot be read."""
        return read_journals(self.store, [entry], self.remote.path).get(entry.tag)

    def is_uploaded(self, entry: TagEntry) -> bool:
        """Return True if the journal of a tag records that it was committed in the object store."""
        journal = self.try_read_journal(entry)
        return journal is not None and journal.is_remote


def read_journals(store: FileSystem, entries: Iterable[TagEntry], address: str) -> dict[str, UploadJournal]:
    """Return the journals of uploads of tags to an address, without corrupt ones."""
    journals = {}
    for entry in entries:
        with contextlib.suppress(CheckpointError):  # an upload or load of the tag raises the error
            journals[entry.tag] = _read_journal(store, entry, address)
    return journals


def _read_journal(store: FileSystem, entry: TagEntry, address: str) -> UploadJournal:
    with annotate_errors(path=store.path, tag=entry.tag), wrap_os_errors("reading the journal of an upload"):
        return parse_journal(_read_journal_bytes(store, entry), address)


def _read_address(store: FileSystem, entry: TagEntry) -> str | None:
    try:
        return parse_address(_read_journal_bytes(store, entry))
    except OSError:
        return None


def _read_journal_bytes(store: FileSystem, entry: TagEntry) -> bytes | None:
    try:
        return store.read_start(f"{entry.directory}/{UPLOAD_FILE}", MAX_JOURNAL_BYTES, links=False)
    except (FileNotFoundError, NotADirectoryError):
        return None  # no upload has started, or the tag was deleted


class LocalFirstFiles:
    """The files of a tag in an object store, read from a local disk if it contains them.

    Args:
        remote: The tag in the object store.
        local: The part of the same version on the disk.
    """

    def __init__(self, remote: ReadDirectory, local: ReadDirectory) -> None:
        self._remote, self._local = remote, local
        self.name, self.costs = remote.name, remote.costs

    def open(self, path: str, size: int | None = None) -> FileReader:
        with contextlib.suppress(FileNotFoundError):
            return self._local.open(path, size)
        return self._remote.open(path, size)

    def list_files(self) -> list[str]:
        return self._remote.list_files()

    def is_at(self, name: str) -> bool:
        return self._remote.is_at(name)

    def close(self) -> None:
        self._local.close()
        self._remote.close()


def write_journal(directory: FileSystemDirectory, journal: UploadJournal) -> None:
    """Write the upload journal of a tag into its directory, which may have been renamed in the meantime.

    The write is atomic and durable, because the journal is the only record of the disks that contain the tag's files.
    """
    directory.write_atomic(UPLOAD_FILE, journal.to_json(), durable=True)
