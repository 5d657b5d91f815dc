"""Checkpoint root in a file system: one directory for each tag; drafts have temporary names.

Drafts are named ``.new-<name>``. A `DirectoryDraft` is committed by exchanging its name with the old version; without
support for that, the old version is renamed to ``.old-<name>``. Retired tags are renamed into ``.trash``. Directory
locks mark readers and writers, and a lease allows one job at a time to save.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from xla_ckpt.core.files.parity import MANIFEST_COPY, PARITY_FOLDER
from xla_ckpt.core.manifest import manifest_json
from xla_ckpt.errors import MissingPackageError, NotDurableError, StorageError, UsageError, annotate_errors
from xla_ckpt.extras import check_installed
from xla_ckpt.logs import get_logger
from xla_ckpt.storage.base import (
    FileSystem,
    FileSystemDirectory,
    Identity,
    make_not_durable_error,
    read_file,
    rename_durably,
    write_file,
)
from xla_ckpt.tags import listing
from xla_ckpt.tags.deletion import make_busy_error
from xla_ckpt.tags.directory_operations import (
    check_no_concurrent_save,
    clean_root,
    find_tags_retired_by,
    is_draft,
    list_leftovers,
    move_to_trash,
    remove_directory,
    remove_empty_root,
    remove_unused,
    replace_directory,
    retire_tags,
)
from xla_ckpt.tags.entry import DRAFT_PREFIX, MANIFEST_FILE, REPLACED_PREFIX, TagEntry, is_tag_name
from xla_ckpt.tags.lease import LEASES, DirectoryLease
from xla_ckpt.tags.orbax_commit import ORBAX_COMMITTER
from xla_ckpt.tags.retention import Retention
from xla_ckpt.tags.root import (
    AdoptReport,
    CleanupReport,
    Transaction,
    TransactionKind,
    do_nothing,
    log_errors_after_commit,
    make_no_such_tag_error,
    require_tag,
)

logger = get_logger(__name__)


class CommitHooks(Protocol):
    """Callbacks from a draft to its root when it becomes a tag."""

    def find_tags_retired_by(self, new: TagEntry, retention: Retention | None) -> list[TagEntry]:
        """Return the tags that the retention policy drops when a new tag is committed."""

    def finish_commit(self, tag: str, doomed: Sequence[TagEntry], retention: Retention | None) -> None:
        """Perform the tasks that follow the commit of a tag."""


@dataclass(slots=True, kw_only=True)
class DirectoryDraft:
    """A directory that is being written under a temporary name."""

    store: FileSystem
    name: str
    """Final name."""

    kind: TransactionKind
    directory: FileSystemDirectory
    previous: FileSystemDirectory | None
    """Directory with the final name when the draft was created. It stays open so that its inode number is not
    reused.
    """

    replaced_identity: Identity | None
    """Identity of that directory."""

    sequence: int
    newest: TagEntry | None
    hooks: CommitHooks
    """The root of the draft."""

    created_root: bool = False
    """True if the root directory was created for this draft."""

    is_placed: bool = False
    """True if the draft has its final name. The draft's name may then refer to the old version."""

    is_open: bool = True

    def commit(self, *, retention: Retention | None, report: Any, within: float) -> float:
        match self.kind:
            case TransactionKind.TAG:
                LEASES.check(self.store.path, self.sequence)
                metadata = {"tag": self.name, "sequence": self.sequence}
                metadata |= {} if report is None else {"report": report}
                began = time.perf_counter()
                doomed = self.hooks.find_tags_retired_by(self._make_entry(), retention)
                placing = time.perf_counter()
                with self._mark_placed():
                    old = ORBAX_COMMITTER.commit(
                        self.store, self.directory, self.name, self.replaced_identity, metadata, within
                    )
                placed = time.perf_counter()
                with log_errors_after_commit(self.store.path, self.name):
                    if old is not None:
                        _trash_or_warn(
                            self.store, old
                        )  # `Root.clean` deletes its files, after all ranks know about the commit
                    LEASES.record_commit(self.store.path, self.name, self.sequence)
                with log_errors_after_commit(self.store.path, self.name):
                    self.hooks.finish_commit(self.name, doomed, retention)
                return placing - began + time.perf_counter() - placed
            case TransactionKind.CHECKPOINT:
                self._move_into_place()
            case TransactionKind.NEW_DIRECTORY:
                if self.store.is_directory(self.name) and self.store.remove_empty(self.name):
                    self.replaced_identity = None
                check_no_concurrent_save(self.store, self.name, None)
                self._move_into_place()
            case TransactionKind.NEW_FILE:
                check_no_concurrent_save(self.store, self.name, None)  # a rename would replace a file
                rename_durably(self.store, f"{self.directory.name}/{self.name}", self.name)
            case TransactionKind.REPLACED_FILE:
                self.store.rename(f"{self.directory.name}/{self.name}", self.name)
                try:
                    self.store.sync()
                except OSError as refused:  # what was there is gone, so that nothing can be undone
                    raise make_not_durable_error(self.store, self.name, refused) from refused
            case TransactionKind.REPAIR:
                self._apply_repair()
        return 0.0

    def _make_entry(self) -> TagEntry:
        """Return the entry of the tag that this draft will become."""
        entry = listing.read_entry(self.store, self.directory.name, self.name)
        return entry or TagEntry(tag=self.name, sequence=self.sequence, directory=self.directory.name)

    def _move_into_place(self) -> None:
        """Rename the draft to its final name. Remove the directory that it replaces, unless it is being read."""
        with self._mark_placed():
            old = replace_directory(self.store, self.directory.name, self.name, self.replaced_identity)
        if old is not None:
            remove_unused(self.store, old)

    @contextlib.contextmanager
    def _mark_placed(self) -> Iterator[None]:
        """Record that the block has renamed the draft to its final name, and release its locks for readers."""
        try:
            yield
        except NotDurableError:
            self.is_placed = True  # a power loss may restore the directory with the draft's name
            raise
        self.is_placed = True
        with log_errors_after_commit(self.store.path, self.name):
            self._close()

    def _apply_repair(self) -> None:
        """Move the files of the draft over files of the tag."""
        assert self.previous is not None, "begin() has opened the tag"
        self.directory.sync()
        # Parity files come first, because only repairs need them: an error in between leaves the tag unchanged.
        for path in sorted(self.directory.list_files(), key=lambda path: (not path.startswith(PARITY_FOLDER), path)):
            self.previous.move_in(self.directory, path)
        try:
            self.previous.sync()
        except OSError as refused:
            raise make_not_durable_error(self.store, self.name, refused) from refused

    def abort(self) -> None:
        if self.is_open and not self.is_placed and self.directory.is_at(self.directory.name):
            self._close()
            # Not `remove_unused`, which keeps it for a while on a file system without locks: this process created it.
            remove_directory(self.store, self.directory.name)
            if self.created_root:
                remove_empty_root(self.store)
        self._close()

    def _close(self) -> None:
        if self.is_open:
            self.is_open = False
            self.directory.close()
            if self.previous is not None:
                self.previous.close()


def _trash_or_warn(store: FileSystem, name: str) -> None:
    """Move the old version of a tag to the trash. A failure is logged, because the new version is in place."""
    try:
        move_to_trash(store, name)
    except FileNotFoundError:
        logger.debug("%s in %s: another program has removed it", name, store.path)
    except OSError as error:
        logger.warning("%s: the old version of a tag stays under the name %s: %s", store.path, name, error)


_MAX_PROBES = 8
"""Maximum number of names that are probed to find out if a directory is a root of tags."""


class DirectoryRoot:
    """A root of tags in a file system."""

    def __init__(self, store: FileSystem) -> None:
        self.store = store

    @property
    def path(self) -> str:
        """Path of the root, as users write it."""
        return self.store.path

    def list_entries(self) -> list[TagEntry]:
        return listing.list_entries(self.store)

    def get_entry(self, tag: str) -> TagEntry | None:
        return listing.get_entry(self.store, tag)

    def open(self, tag: str) -> FileSystemDirectory:
        directory = listing.open_tag_directory(self.store, tag)
        if directory is None:
            raise make_no_such_tag_error(self, tag)
        return directory

    def open_listed(self, entry: TagEntry) -> FileSystemDirectory:
        return self.store.open(entry.directory)

    def read_report(self, tag: str) -> Any:
        with contextlib.closing(self.open(tag)) as directory:
            return listing.read_custom_metadata(self.store, directory.name).get("report")

    def is_native_tag(self, name: str) -> bool:
        return listing.is_native_tag(self.store, name)

    def is_managed(self, name: str) -> bool:
        return self.is_native_tag(name)

    def is_authoritative(self) -> bool:
        return False

    def is_root(self, name: str) -> bool:
        below = f"{name}/" if name else ""
        tags = itertools.islice(filter(is_tag_name, self.store.list_names(name)), _MAX_PROBES)
        return any(self.store.has(f"{below}{tag}/{MANIFEST_FILE}") for tag in tags)

    def begin(self, name: str, kind: TransactionKind) -> DirectoryDraft:
        if kind is TransactionKind.TAG:
            self.check_can_commit()
        new_root = self.store.prepare()
        clean_root(self.store, None if kind in (TransactionKind.TAG, TransactionKind.REPAIR) else name)
        entries = self.list_entries() if kind is TransactionKind.TAG else []
        suffix = "-repair" if kind is TransactionKind.REPAIR else ""  # so that it does not count as a save of that tag
        before, replaced = self._open_replaced(name)
        try:
            return DirectoryDraft(
                store=self.store,
                name=name,
                kind=kind,
                previous=before,
                replaced_identity=replaced,
                sequence=1 + max((self.get_min_sequence(), *(e.sequence for e in entries)))
                if kind is TransactionKind.TAG
                else 0,
                newest=next((entry for entry in reversed(entries) if entry.damage is None), None),
                directory=_make_draft_directory(self.store, f"{DRAFT_PREFIX}{name}{suffix}"),
                created_root=new_root,
                hooks=self,
            )
        except BaseException:
            if before is not None:
                before.close()
            raise

    def _open_replaced(self, name: str) -> tuple[FileSystemDirectory | None, Identity | None]:
        """Return the open directory that a new one with this name replaces, and the identity of the name.

        Both refer to the same directory, unless other programs keep replacing it.
        """
        attempts = 3
        while True:
            place = self.get_directory_name(name)
            before, replaced = _open_if_exists(self.store, place), self.store.get_identity(name)
            attempts -= 1
            if before is None or place != name or before.identity == replaced or not attempts:  # a link has its own
                return before, replaced
            before.close()

    def get_min_sequence(self) -> int:
        """Return the minimum sequence number; new tags get larger ones, independently of the tags in this directory."""
        return 0

    def find_tags_retired_by(self, new: TagEntry, retention: Retention | None) -> list[TagEntry]:
        """Return the tags that the retention policy drops when this tag is committed, oldest first.

        Raises:
            UsageError: The policy failed.
        """
        return find_tags_retired_by(self.store, new, retention)

    def finish_commit(self, tag: str, doomed: Sequence[TagEntry], retention: Retention | None) -> None:
        """Retire the tags that the retention policy has dropped."""
        retire_tags(self.store, doomed)

    def open_draft(self, draft: str) -> FileSystemDirectory:
        return self.store.open(draft, lock=False)

    def get_draft_name(self, name: str) -> str:
        return DRAFT_PREFIX + name

    def get_directory_name(self, name: str) -> str:
        old = REPLACED_PREFIX + name
        return old if not self.store.has(name) and self.store.has(old) else name

    def pin(self, tag: str, pinned: bool) -> bool:
        entry = require_tag(self, tag)
        if entry.damage is not None:
            raise entry.damage
        if entry.pinned == pinned:
            return False
        try:
            with Transaction(self, tag, TransactionKind.REPAIR) as transaction:
                for name, data in self._make_pinned_files(tag, pinned).items():
                    write_file(transaction.directory, name, data)
                # A manifest must not end up in a newer version of the tag. A save takes far longer than the steps from
                # this check to the commit, so one that starts after the check does not end before the commit.
                now = require_tag(self, tag)
                if self.is_written(tag) or (now.sequence, now.directory) != (entry.sequence, entry.directory):
                    raise make_busy_error(self, tag)
                transaction.commit()
        except FileNotFoundError:
            raise make_no_such_tag_error(self, tag) from None
        except StorageError as error:
            raise error.at(tag=tag) from None
        except OSError as error:
            raise StorageError.of(error, "pinning a tag", path=self.path, tag=tag) from error
        require_tag(self, tag)
        return True

    def _make_pinned_files(self, tag: str, pinned: bool) -> dict[str, bytes]:
        """Return the manifest of a tag with a changed pin, and its repair copy if there is one: path -> contents."""
        with (
            contextlib.closing(self.open(tag)) as directory,
            annotate_errors(path=self.path, tag=tag, file=MANIFEST_FILE),
        ):
            manifest = manifest_json.set_pin(read_file(directory, MANIFEST_FILE), pinned)
            return dict.fromkeys({MANIFEST_FILE, *({MANIFEST_COPY} & {*directory.list_files()})}, manifest)

    def retire(self, tag: str) -> None:
        names = [name for name in (REPLACED_PREFIX + tag, tag) if self.store.has(name)]
        if not names:
            raise FileNotFoundError(errno.ENOENT, "there is no such tag", tag)
        # A killed replacement may have left the old version, which the next save would restore as the tag.
        for name in names:
            move_to_trash(self.store, name)
        self.store.sync()

    def is_read(self, tag: str) -> bool:
        entry = require_tag(self, tag)
        return self.store.is_in_use(entry.directory)

    def is_written(self, tag: str) -> bool:
        return any(is_draft(name, tag) and self.store.is_in_use(name) for name in self.store.list_names())

    def clean(self, only: str | None = None) -> None:
        clean_root(self.store, only)

    def clean_all(self, within: float) -> CleanupReport:
        before = list_leftovers(self.store)
        clean_root(self.store)
        kept = list_leftovers(self.store)
        why = "somebody uses it, or may do so: without locks, until it has not changed for an hour"
        return CleanupReport(tuple(sorted(before - kept)), dict.fromkeys(sorted(kept), why))

    def adopt(self, tags: Sequence[str], within: float) -> AdoptReport:
        raise UsageError(
            "the tags of a directory are in no record: each one counts that is there",
            path=self.path,
            expected="a root in an object store",
            hint="xla-ckpt ls ROOT lists them.",
        )

    def acquire_lease(self, within: float, check: Callable[[], object] = do_nothing) -> None:
        self.store.prepare()
        LEASES.acquire(DirectoryLease(self.store), within, check)

    def check_can_commit(self) -> None:
        with annotate_errors(path=self.path):
            check_installed("orbax", "a save into a directory")

    def prepare_commit(self) -> None:
        try:
            self.check_can_commit()
        except MissingPackageError as error:
            # Otherwise a run would only find out at its first save.
            logger.warning("%s", error)
        else:
            ORBAX_COMMITTER.start()

    def wait_ready(self, within: float) -> bool:
        return ORBAX_COMMITTER.wait_ready(within)


def _open_if_exists(store: FileSystem, name: str) -> FileSystemDirectory | None:
    """Open a directory without a lock, or return None if it does not exist."""
    try:
        return store.open(name, lock=False)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _make_draft_directory(store: FileSystem, name: str) -> FileSystemDirectory:
    """Create a directory with this name or with a numbered suffix.

    The name is in use if another job writes the same tag, or if a writer was killed on a file system without locks,
    where its draft appears to be in use. A restarted job must be able to save that tag.
    """
    for number in itertools.count():
        try:
            return store.make_directory(f"{name}-{number}" if number else name)
        except FileExistsError:
            continue
    raise AssertionError("numbers do not end")
