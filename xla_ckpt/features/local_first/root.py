"""Local-first root: tags are committed to a local directory and uploaded to an object store later.

`LocalFirstRoot` adds an upload journal to each tag, numbers tags above those in the object store, and retires
uploaded tags. `LocalFirstFiles` reads local files where they exist and remote ones otherwise.
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
"""No more bytes of a journal are read."""


class LocalFirstRoot(DirectoryRoot):
    """The root directory of tags that go to an object store.

    Args:
        store: The directory.
        remote: Where the tags go.
        committed: Is called after each commit with what it says of the tags to keep.
    """

    def __init__(self, store: FileSystem, remote: LedgerRoot, on_commit: Callable[[Retention | None], object]) -> None:
        super().__init__(store)
        self.remote = remote
        self._on_commit = on_commit
        self._min_sequence = 0
        self._is_remote_checked = False
        """Whether the object store was asked which numbers it has: once, since saves must not wait for it."""
        self.disks: tuple[str, ...] = ()
        """The disks that the processes see which save here, that of rank 0 first."""

    def get_disk_id(self, *, create: bool) -> str:
        """What the disk is known by that this process sees; without `create`, nothing if it has no such mark yet.

        It lies on the disk itself, so it stays the same on whichever host the disk is, and in whichever order hosts
        come.

        Raises:
            OSError: The storage refused.
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
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):  # else another process was faster
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
        """The tags of which this disk has all files, oldest first: the other ones can be read from here by nobody.

        Those with a damaged journal are among them: a load of one raises what is wrong (`check_journal`).
        """
        disk, entries = self.get_disk_id(create=False), self.list_entries()
        journals = read_journals(self.store, entries, self.remote.path)
        return [e for e in entries if e.tag not in journals or journals[e.tag].is_complete_on(disk)]

    def check_journal(self, tag: str) -> None:
        """Refuse a tag whose journal is damaged: the disk may have a part of its files.

        Raises:
            CorruptCheckpointError: It is.
        """
        if (entry := self.get_entry(tag)) is not None:
            self.read_journal(entry)

    def prefer_local(self, remote: ReadDirectory, tag: str, head: ManifestHeader) -> ReadDirectory:
        """The files of a tag in the object store, of which those are read from this disk that it has."""
        entry = self.get_entry(tag)
        if entry is None or (entry.sequence, entry.created) != (head.sequence, head.created):
            return remote  # the disk has another version of it, or nothing
        try:
            return LocalFirstFiles(remote, self.open(tag))
        except NoCheckpointError:
            return remote  # it was retired meanwhile

    def acquire_lease(self, within: float, check: Callable[[], object] = do_nothing) -> None:
        super().acquire_lease(within, check)
        if not self._is_remote_checked:
            addresses = self._check_addresses()
            try:
                remote = self.remote.list_entries()
            except CheckpointError as error:
                if not self.list_entries():
                    raise  # nothing says which numbers there are
                logger.warning("%s: new tags are numbered after those in %s: %s", self.remote.path, self.path, error)
            else:
                self._check_is_same_run(remote, addresses)
                self.observe_remote(remote)
            self._is_remote_checked = True

    def _check_is_same_run(self, remote: list[TagEntry], addresses: Mapping[str, str | None]) -> None:
        """Refuse to mix the tags of two runs."""
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
        """Where the tags of the directory go: each to this root, or None of one that does not say so.

        Others are refused: they would come here, too, and be taken for newer ones.
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
        """Number the next tags above all that are in the object store."""
        self.raise_min_sequence(max((entry.sequence for entry in remote), default=0))

    def raise_min_sequence(self, sequence: int) -> None:
        """Number the next tags above this number."""
        self._min_sequence = max(self._min_sequence, sequence)

    def get_min_sequence(self) -> int:
        return self._min_sequence

    def finish_commit(self, tag: str, doomed: Sequence[TagEntry], retention: Retention | None) -> None:
        """Retire nothing: tags go when they are in the object store (see `retire_uploaded`)."""
        self._on_commit(retention)

    def retire_uploaded(self, tag: str, retention: Retention | None) -> None:
        """Retire what is in the object store, and not to be kept since this tag is there. That it fails is logged."""
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
        """A tag, open for reading; None if there is none of this name."""
        try:
            return self.open(tag)
        except NoCheckpointError:
            return None

    def restore_replaced(self, tag: str, replaced: FileSystemDirectory) -> None:
        """Give the version of a tag its name again that a commit has replaced; what that has committed is removed.

        Raises:
            OSError: The storage refused, or it is gone.
        """
        trash = (f"{TRASH_NAME}/{name}" for name in self.store.list_names(TRASH_NAME))
        name = next((name for name in trash if replaced.is_at(name)), None)
        if name is None:
            raise FileNotFoundError(errno.ENOENT, "what was replaced is gone", tag)
        old = replace_directory(self.store, name, tag, self.store.get_identity(tag))
        if old is not None and old != name:
            move_to_trash(self.store, old)

    def read_journal(self, entry: TagEntry) -> UploadJournal:
        """What a tag says of its upload.

        Raises:
            CheckpointError: It is damaged, or cannot be read.
        """
        return _read_journal(self.store, entry, self.remote.path)

    def try_read_journal(self, entry: TagEntry) -> UploadJournal | None:
        """The same; None if it is damaged, or cannot be read."""
        return read_journals(self.store, [entry], self.remote.path).get(entry.tag)

    def is_uploaded(self, entry: TagEntry) -> bool:
        """Whether a tag says that it was committed in the object store."""
        journal = self.try_read_journal(entry)
        return journal is not None and journal.is_remote


def read_journals(store: FileSystem, entries: Iterable[TagEntry], address: str) -> dict[str, UploadJournal]:
    """What tags in a directory say of their upload to an address, but for those whose journals are damaged."""
    journals = {}
    for entry in entries:
        with contextlib.suppress(CheckpointError):  # whoever uploads or loads the tag meets the error
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
        return None  # no upload was begun, or the tag is gone


class LocalFirstFiles:
    """The files of a tag in an object store, of which those are read from a disk that it has.

    Args:
        far: The tag in the object store.
        near: The part of the same version of it that the disk has.
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
    """Keep what is known of the upload of a tag, in its directory, which may have lost its name meanwhile.

    A loss of power leaves the old journal or the new one: nothing else says on which disks the files of the tag are.
    """
    directory.write_atomic(UPLOAD_FILE, journal.to_json(), durable=True)
