"""A root directory whose tags go to an object store afterwards. It commits as any other one does."""

from __future__ import annotations

import contextlib
import errno
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence

from xla_ckpt.errors import CheckpointError, NoCheckpointError, UsageError, naming, storage_errors
from xla_ckpt.logs import get_logger
from xla_ckpt.manifest.records import Head
from xla_ckpt.storage.base import FileSystem, LocalFiles, ReadDirectory, Source
from xla_ckpt.storage.small_files import write_small
from xla_ckpt.tags.cleaning import check_is_directory, move_to_trash, remove, retire
from xla_ckpt.tags.directories import DirectoryRoot
from xla_ckpt.tags.directory_draft import DirectoryDraft
from xla_ckpt.tags.entry import UPLOAD, TagEntry
from xla_ckpt.tags.facts import tags_to_retire
from xla_ckpt.tags.ledger import LedgerRoot
from xla_ckpt.tags.names import DISK_MARK, NEW_PREFIX, TRASH
from xla_ckpt.tags.placing import place
from xla_ckpt.tags.retention import Retention
from xla_ckpt.tags.root import Kind, go_on
from xla_ckpt.tags.upload_rules import Journal, address_in, is_another_run, parse_journal

logger = get_logger(__name__)

MAX_JOURNAL = 1 << 26
"""No more bytes of a journal are read."""


class LocalFirst(DirectoryRoot):
    """The root directory of tags that go to an object store.

    Args:
        store: The directory.
        remote: Where the tags go.
        committed: Is called after each commit with what it says of the tags to keep.
    """

    def __init__(self, store: FileSystem, remote: LedgerRoot, committed: Callable[[Retention | None], object]) -> None:
        super().__init__(store)
        self.remote = remote
        self._committed = committed
        self._above = 0
        self._asked = False
        """Whether the object store was asked which numbers it has: once, since saves must not wait for it."""
        self.disks: tuple[str, ...] = ()
        """The disks that the processes see which save here, that of rank 0 first."""

    def disk(self, *, anew: bool) -> str:
        """What the disk is known by that this process sees; without `anew`, nothing if it has no such mark yet.

        It lies on the disk itself, so it stays the same on whichever host the disk is, and in whichever order hosts
        come.

        Raises:
            OSError: The storage refused.
        """
        while not (marks := self.store.names(DISK_MARK)) and anew:
            check_is_directory(self.store, DISK_MARK)
            self.store.prepare()
            draft = self.store.make(f"{NEW_PREFIX}{uuid.uuid4().hex}")
            try:
                draft.make(uuid.uuid4().hex)
                draft.sync()
                self.store.rename(draft.name, DISK_MARK)
                self.store.sync()
            except OSError as error:
                remove(self.store, draft.name)
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):  # else another process was faster
                    raise
            finally:
                draft.close()
        return marks[0] if marks else ""

    def begin(self, name: str, kind: Kind) -> DirectoryDraft:
        draft = super().begin(name, kind)
        if kind is Kind.TAG:
            try:
                write_small(draft.directory, UPLOAD, Journal(address=self.remote.path, disks=self.disks).to_json())
            except BaseException:
                draft.abandon()
                raise
        return draft

    def whole_entries(self) -> list[TagEntry]:
        """The tags of which this disk has all files, oldest first: the other ones can be read from here by nobody.

        Those with a damaged journal are among them: a load of one raises what is wrong (`check_whole`).
        """
        disk, entries = self.disk(anew=False), self.entries()
        journals = journals_of(self.store, entries, self.remote.path)
        return [e for e in entries if e.tag not in journals or journals[e.tag].is_whole_on(disk)]

    def check_whole(self, tag: str) -> None:
        """Refuse a tag whose journal is damaged: the disk may have a part of its files.

        Raises:
            CorruptCheckpointError: It is.
        """
        if (entry := self.entry(tag)) is not None:
            self.journal(entry)

    def nearer(self, far: ReadDirectory, tag: str, head: Head) -> ReadDirectory:
        """The files of a tag in the object store, of which those are read from this disk that it has."""
        entry = self.entry(tag)
        if entry is None or (entry.sequence, entry.created) != (head.sequence, head.created):
            return far  # the disk has another version of it, or nothing
        try:
            return NearerFiles(far, self.open(tag))
        except NoCheckpointError:
            return far  # it was retired meanwhile

    def hold(self, within: float, check: Callable[[], object] = go_on) -> None:
        super().hold(within, check)
        if not self._asked:
            addresses = self._checked_addresses()
            try:
                remote = self.remote.entries()
            except CheckpointError as error:
                if not self.entries():
                    raise  # nothing says which numbers there are
                logger.warning("%s: new tags are numbered after those in %s: %s", self.remote.path, self.path, error)
            else:
                self._check_is_same_run(remote, addresses)
                self.have_seen(remote)
            self._asked = True

    def _check_is_same_run(self, remote: list[TagEntry], addresses: Mapping[str, str | None]) -> None:
        """Refuse to mix the tags of two runs."""
        addressed = (tag for tag, address in addresses.items() if address is not None)
        if is_another_run(self.entries(), remote, addressed):
            raise UsageError(
                "there are tags of another run in the object store, and none of this directory's: they would be mixed",
                path=self.remote.path,
                expected=f"tags of {self.path}, or none",
                found=", ".join(entry.tag for entry in remote[-5:]),
                hint="Name an address where nothing lies.",
            )

    def _checked_addresses(self) -> dict[str, str | None]:
        """Where the tags of the directory go: each to this root, or None of one that does not say so.

        Others are refused: they would come here, too, and be taken for newer ones.
        """
        addresses = {entry.tag: _address_of(self.store, entry) for entry in self.entries()}
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

    def have_seen(self, remote: list[TagEntry]) -> None:
        """Number the next tags above all that are in the object store."""
        self.number_above(max((entry.sequence for entry in remote), default=0))

    def number_above(self, sequence: int) -> None:
        """Number the next tags above this number."""
        self._above = max(self._above, sequence)

    def above(self) -> int:
        return self._above

    def committed(self, tag: str, doomed: Sequence[TagEntry], retention: Retention | None) -> None:
        """Retire nothing: tags go when they are in the object store (see `retire_sent`)."""
        self._committed(retention)

    def retire_sent(self, tag: str, retention: Retention | None) -> None:
        """Retire what is in the object store, and not to be kept since this tag is there. That it fails is logged."""
        try:
            if retention is not None:
                sent = {e.tag: e for e in self.entries() if self.is_sent(e) and not self.is_written(e.tag)}
                retire(self.store, [sent[old] for old in tags_to_retire(self.store, sent.values(), retention)])
            self.clean()
        except (OSError, CheckpointError) as error:
            logger.warning("could not clean up in %s after tag %s: %s", self.path, tag, error)

    def opened(self, tag: str) -> LocalFiles | None:
        """A tag, open for reading; None if there is none of this name."""
        try:
            return self.open(tag)
        except NoCheckpointError:
            return None

    def bring_back(self, tag: str, replaced: LocalFiles) -> None:
        """Give the version of a tag its name again that a commit has replaced; what that has committed is removed.

        Raises:
            OSError: The storage refused, or it is gone.
        """
        trash = (f"{TRASH}/{name}" for name in self.store.names(TRASH))
        name = next((name for name in trash if replaced.is_at(name)), None)
        if name is None:
            raise FileNotFoundError(errno.ENOENT, "what was replaced is gone", tag)
        old = place(self.store, name, tag, self.store.identity(tag))
        if old is not None and old != name:
            move_to_trash(self.store, old)

    def journal(self, entry: TagEntry) -> Journal:
        """What a tag says of its upload.

        Raises:
            CheckpointError: It is damaged, or cannot be read.
        """
        return _journal_of(self.store, entry, self.remote.path)

    def readable_journal(self, entry: TagEntry) -> Journal | None:
        """The same; None if it is damaged, or cannot be read."""
        return journals_of(self.store, [entry], self.remote.path).get(entry.tag)

    def is_sent(self, entry: TagEntry) -> bool:
        """Whether a tag says that it was committed in the object store."""
        journal = self.readable_journal(entry)
        return journal is not None and journal.is_remote


def journals_of(store: FileSystem, entries: Iterable[TagEntry], address: str) -> dict[str, Journal]:
    """What tags in a directory say of their upload to an address, but for those whose journals are damaged."""
    journals = {}
    for entry in entries:
        with contextlib.suppress(CheckpointError):  # whoever uploads or loads the tag meets the error
            journals[entry.tag] = _journal_of(store, entry, address)
    return journals


def _journal_of(store: FileSystem, entry: TagEntry, address: str) -> Journal:
    with naming(path=store.path, tag=entry.tag), storage_errors("reading the journal of an upload"):
        return parse_journal(_journal_data(store, entry), address)


def _address_of(store: FileSystem, entry: TagEntry) -> str | None:
    try:
        return address_in(_journal_data(store, entry))
    except OSError:
        return None


def _journal_data(store: FileSystem, entry: TagEntry) -> bytes | None:
    try:
        return store.start_of(f"{entry.directory}/{UPLOAD}", MAX_JOURNAL, links=False)
    except (FileNotFoundError, NotADirectoryError):
        return None  # no upload was begun, or the tag is gone


class NearerFiles:
    """The files of a tag in an object store, of which those are read from a disk that it has.

    Args:
        far: The tag in the object store.
        near: The part of the same version of it that the disk has.
    """

    def __init__(self, far: ReadDirectory, near: ReadDirectory) -> None:
        self._far, self._near = far, near
        self.name, self.costs = far.name, far.costs

    def open(self, path: str, size: int | None = None) -> Source:
        with contextlib.suppress(FileNotFoundError):
            return self._near.open(path, size)
        return self._far.open(path, size)

    def files(self) -> list[str]:
        return self._far.files()

    def is_at(self, name: str) -> bool:
        return self._far.is_at(name)

    def close(self) -> None:
        self._near.close()
        self._far.close()


def write_journal(directory: LocalFiles, journal: Journal) -> None:
    """Keep what is known of the upload of a tag, in its directory, which may have lost its name meanwhile.

    A loss of power leaves the old journal or the new one: nothing else says on which disks the files of the tag are.
    """
    directory.replace(UPLOAD, journal.to_json(), durable=True)
