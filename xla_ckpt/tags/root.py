"""Checkpoint root: the `Root` protocol, transactions that write to it, and lookups of its tags.

`directory_root` implements it for file systems and `ledger_root` for object stores. A `Transaction` creates a draft,
makes it durable, and commits it atomically, or removes it.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

from xla_ckpt.errors import CheckpointError, NoCheckpointError, UsageError
from xla_ckpt.keywords import suggest
from xla_ckpt.logs import get_logger
from xla_ckpt.storage.base import Directory, Store, write_file
from xla_ckpt.storage.resolve import open_parent, open_store
from xla_ckpt.storage.signals import defer_signals
from xla_ckpt.tags.entry import DRAFT_PREFIX, TagEntry, is_tag_name
from xla_ckpt.tags.retention import Retention

logger = get_logger(__name__)


def do_nothing() -> None:
    """Do nothing: the default `check` of waits that need not be interrupted."""


@contextlib.contextmanager
def log_errors_after_commit(path: str, tag: str) -> Iterator[None]:
    """Log exceptions of the block, which runs after a commit: the tag exists, so its save has not failed."""
    try:
        yield
    except Exception:
        logger.exception("%s: tag %s is committed; what was to be done afterwards failed", path, tag)


class TransactionKind(enum.Enum):
    """Kind of object that a transaction writes."""

    TAG = "tag"
    """A native tag. It replaces a tag with the same name, and older tags may be retired."""

    CHECKPOINT = "checkpoint"
    """A directory in another library's format, such as DCP. It replaces a directory with the same name, except in an
    object store, which cannot do so atomically and raises an error.
    """

    NEW_DIRECTORY = "new directory"
    """A new directory. Only an empty directory may have its name."""

    NEW_FILE = "new file"
    """A new single file, whose name must be unused. The draft contains only this file."""

    REPLACED_FILE = "file"
    """A single file, which replaces a file with the same name. The draft contains only this file. If several
    processes write it concurrently, the last one wins.
    """

    UPLOAD = "upload"
    """A tag committed in another root, which keeps its sequence number. Only in object stores."""

    REPAIR = "repair"
    """Files that replace files of an existing tag."""


@dataclass(frozen=True, slots=True)
class CleanupReport:
    """Result of cleaning a root."""

    removed: tuple[str, ...]
    kept: Mapping[str, str]
    """Remaining names that are not tags -> the reason."""


@dataclass(frozen=True, slots=True)
class AdoptReport:
    """Result of adding tags to the ledger of a root."""

    adopted: tuple[str, ...]
    """Tags that were added to the ledger."""

    refused: Mapping[str, str]
    """Names with incomplete tags that are not in the ledger -> the missing parts."""


class Draft(Protocol):
    """An object being written, which readers do not recognize yet."""

    @property
    def directory(self) -> Directory:
        """Directory for the files. Everything in it must be durable before the commit."""

    @property
    def sequence(self) -> int:
        """Sequence number of the new tag; 0 if the draft is not a tag."""

    @property
    def newest(self) -> TagEntry | None:
        """The newest readable tag when the draft was created; None if the draft is not a tag."""

    def commit(self, *, retention: Retention | None, report: Any, within: float) -> float:
        """Rename the draft to its final name atomically, and retire older tags. See `Transaction.commit`.

        The tags to retire are selected before the rename, and later steps raise no errors.
        """

    def abort(self) -> None:
        """Close the draft and remove uncommitted files, which may be the reason why the storage is full."""


class Root(Protocol):
    """A directory or bucket prefix that contains tags."""

    @property
    def path(self) -> str:
        """Path or address of the root, as users write it."""

    @property
    def store(self) -> Store:
        """The store for reading files."""

    def list_entries(self) -> list[TagEntry]:
        """Return all committed native tags, oldest first. Empty if the root does not exist.

        Raises:
            CorruptCheckpointError: There are complete tags, but their ledger is missing.
            StorageError: The root cannot be read.
        """

    def get_entry(self, tag: str) -> TagEntry | None:
        """Return a committed native tag as in `list_entries`, or None if it does not exist.

        Raises:
            InvalidTagError: `tag` is not a valid tag name.
        """

    def open(self, tag: str) -> Directory:
        """Open the directory of a committed tag, locked for reading so that retention does not delete it.

        Raises:
            NoCheckpointError: The tag does not exist; the message lists the existing ones.
            InvalidTagError: `tag` is not a valid tag name.
        """

    def open_listed(self, entry: TagEntry) -> Directory:
        """Open the directory of a listed tag, which may have been deleted since.

        Raises:
            OSError: The tag was deleted, or the storage failed. In an object store, raised only when a file is read.
        """

    def begin(self, name: str, kind: TransactionKind) -> Draft:
        """Create the draft directory, after removing leftovers of killed writers.

        Raises:
            UsageError: The name exists, and the storage cannot replace it.
            MissingPackageError: See `check_can_commit`.
            OSError: The storage failed.
        """

    def open_draft(self, draft: str) -> Directory:
        """Open the directory of a draft that another process of this job has created.

        Raises:
            FileNotFoundError: The draft is not visible to this process.
        """

    def get_draft_name(self, name: str) -> str:
        """Return the name of the draft directory for a name, if there is only one draft for it."""

    def get_directory_name(self, name: str) -> str:
        """Return the current name of a directory: the old version's, if it is being replaced at the moment.

        In an object store, return the name of the committed attempt.
        """

    def pin(self, tag: str, pinned: bool) -> bool:
        """Pin or unpin a native tag durably. Return True if this changed anything. Retention does not delete pinned
        tags.

        Raises:
            NoCheckpointError: The tag does not exist, or was retired in the meantime.
            CheckpointError: The manifest is corrupt.
            UsageError: A save of this tag is running, or replaced it in the meantime.
            StorageError: The storage failed. The pin is unchanged, unless only making it durable failed.
        """

    def retire(self, tag: str) -> None:
        """Remove a tag from the root atomically and durably. Open readers keep its files, which `clean` deletes
        afterwards.

        Raises:
            FileNotFoundError: The tag does not exist.
            OSError: The storage failed.
        """

    def read_report(self, tag: str) -> Any:
        """Return the report stored by the commit of a tag, or None if it is missing or corrupt.

        Raises:
            CheckpointError: As `open`.
        """

    def is_native_tag(self, name: str) -> bool:
        """Return True if a directory is a native tag, even a corrupt one."""

    def is_managed(self, name: str) -> bool:
        """Return True if a name belongs to this library: a tag, a draft, or a leftover."""

    def is_authoritative(self) -> bool:
        """Return True if a record marks this as a root of tags, so that it cannot be a checkpoint itself."""

    def is_root(self, name: str) -> bool:
        """Return True if a directory, or the root itself (""), contains native tags, after probing a few names."""

    def is_read(self, tag: str) -> bool:
        """Return True if a process reads this tag, or may do so."""

    def is_written(self, tag: str) -> bool:
        """Return True if a process writes this tag, or may do so."""

    def clean(self, only: str | None = None) -> None:
        """Remove leftovers of killed or replaced saves, and roll back an interrupted replacement.

        Args:
            only: Only clean up leftovers of this name, if the directory may contain unrelated files.

        Raises:
            OSError: The storage failed.
        """

    def clean_all(self, within: float) -> CleanupReport:
        """Clean the root like `clean`, and also search for leftovers that saves do not find.

        Args:
            within: Maximum seconds to wait for the lease of the root. Drafts of an active job are kept.

        Raises:
            CheckpointError: The ledger is corrupt.
            OSError: The storage failed.
        """

    def adopt(self, tags: Sequence[str], within: float) -> AdoptReport:
        """Add complete tags with these names (default: all) to the ledger, even if it is corrupt or missing.

        Raises:
            RootInUseError: Another process saves to this root.
            UsageError: The root has no ledger.
            OSError: The storage failed.
        """

    def acquire_lease(self, within: float, check: Callable[[], object] = do_nothing) -> None:
        """Acquire the lease for saving to this root, waiting until it is known if another process holds it.

        Args:
            within: Maximum seconds to wait.
            check: Called repeatedly during the wait; an exception ends the wait.

        Raises:
            RootInUseError: Another process saves to this root, or it is still unknown if its owner is running.
            UsageError: The environment variable has an invalid value.
            OSError: The storage failed.
        """

    def check_can_commit(self) -> None:
        """Raise an error if a save could not be committed.

        Raises:
            MissingPackageError: A package needed to commit tags is not installed.
        """

    def prepare_commit(self) -> None:
        """Start preparing for a commit in the background."""

    def wait_ready(self, within: float) -> bool:
        """Wait until a commit is possible, at most `within` seconds. Return True if that was not known before.

        Raises:
            SaveError: A commit is not possible.
        """


COMMIT_TIMEOUT = 1800.0
"""Default timeout of a commit (s)."""


class Transaction:
    """A context manager that writes a tag, a directory or a file, which appears atomically under its name or not at
    all.

    Leaving the context without a commit aborts it. Signal handlers are deferred while the draft is created or removed,
    so that an exception from one does not leave it behind.

    Args:
        root: Root to write to.
        name: Final name.
        kind: Kind of object to write.

    Raises (on entry, and from `begin`):
        OSError: The storage failed.
    """

    def __init__(self, root: Root, name: str, kind: TransactionKind = TransactionKind.TAG) -> None:
        self._root, self._name, self._kind = root, name, kind
        self._draft: Draft | None = None

    def begin(self) -> Self:
        """Begin the transaction outside a `with` block. The caller must eventually call `abort`."""
        with defer_signals():
            self._draft = self._root.begin(self._name, self._kind)
        return self

    @property
    def _active_draft(self) -> Draft:
        assert self._draft is not None, "a transaction is begun before it is used"
        return self._draft

    @property
    def directory(self) -> Directory:
        return self._active_draft.directory

    @property
    def sequence(self) -> int:
        return self._active_draft.sequence

    @property
    def newest(self) -> TagEntry | None:
        return self._active_draft.newest

    def seal(self, final_files: Mapping[str, bytes]) -> None:
        """Make all written files durable, then write the small files that mark the object as complete.

        Raises:
            OSError: The storage failed.
        """
        self.directory.sync()
        for path, data in final_files.items():
            write_file(self.directory, path, data)
        if final_files:
            self.directory.sync()

    def commit(
        self, *, retention: Retention | None = None, report: Any = None, within: float = COMMIT_TIMEOUT
    ) -> float:
        """Commit the draft under its name atomically, and retire tags according to the policy.

        An object with the same name stays readable until the new one is in place. A failure to delete older tags is
        logged and raises no error, because the new one is committed.

        Args:
            retention: Retention policy; None keeps all tags.
            report: JSON report about the save, stored with the tag for users.
            within: Maximum seconds to wait for the process that commits.

        Returns:
            Seconds spent selecting and retiring older tags.

        Raises:
            SaveError: The commit failed; the name is unchanged.
            OSError: The storage failed; the name is unchanged.
            NotDurableError: The commit succeeded, but a power loss may undo it.
        """
        with defer_signals():  # an interrupted caller would not stop the commit
            return self._active_draft.commit(retention=retention, report=report, within=within)

    def abort(self) -> None:
        """Close the draft and remove uncommitted files. Further calls do nothing."""
        with defer_signals():
            if self._draft is not None:
                self._draft.abort()

    def __enter__(self) -> Self:
        try:
            return self.begin()
        except BaseException:
            self.abort()
            raise

    def __exit__(self, *_: object) -> None:
        self.abort()


def check_not_a_tag(path: str, open_root: Callable[[Store], Root]) -> None:
    """Raise an error if a path is a tag of the root above it, which `open_root` opens from a store.

    Raises:
        UsageError: The path is a tag.
    """
    try:
        store, name = open_parent(path)
    except UsageError:
        return  # it has no parent
    if open_root(store).is_native_tag(name):
        raise UsageError(
            "this is a tag, and no root of tags",
            path=path,
            hint=f"Pass {store.path}, and the name of the new tag (convert: as_tag= (--as)).",
        )


def require_tag(root: Root, tag: str) -> TagEntry:
    """Return the entry of a tag.

    Raises:
        NoCheckpointError: The tag does not exist.
    """
    entry = root.get_entry(tag)
    if entry is None:
        raise make_no_such_tag_error(root, tag)
    return entry


def resolve_tag_link(store: Store, tag: str) -> str:
    """Return the tag that a name refers to: the target of a symbolic link such as ``latest``, or the name itself.

    Raises:
        UsageError: The link points out of the root.
    """
    here, address = store.resolve_address("").rstrip("/"), store.resolve_address(tag) if is_tag_name(tag) else ""
    if address in ("", f"{here}/{tag}") or _is_file(open_store(address)):  # caches contain links to files
        return tag
    place, _, name = address.rpartition("/")
    if place != here:
        raise UsageError(
            "this is a link out of the root, which is not followed",
            path=store.path,
            tag=tag,
            expected="a tag, or a link to a tag of the same root",
            found=address,
            hint="Pass the path of the root of that tag.",
        )
    return name


def _is_file(store: Store) -> bool:
    return store.has("") and not store.is_directory("")


def make_no_such_tag_error(root: Root, tag: str | None) -> NoCheckpointError:
    """Return the error for a missing tag, or for a root without tags (`tag` None)."""
    try:
        tags = [entry.tag for entry in root.list_entries()]
    except (OSError, CheckpointError):
        tags = []
    return NoCheckpointError(
        f"there is no such checkpoint{suggest(tag, tags)}" if tag else "there is no checkpoint",
        path=root.path,
        tag=tag,
        hint=_describe_link(root.store, tag) or _describe_contents(root, tags),
    )


def _describe_link(store: Store, tag: str | None) -> str:
    """Return a hint about a symbolic link, which only reads by name follow."""
    if tag is None or store.file_system is None or not is_tag_name(tag) or not store.has(tag):
        return ""
    try:
        name = resolve_tag_link(store, tag)
    except UsageError as error:
        return f"It is a link to {error.found}, and counts as no tag."
    return "" if name == tag else f"It is a link to {name}: name that tag."


def _describe_contents(root: Root, tags: Sequence[str]) -> str:
    """Return a hint about the contents of a root directory in which a tag was not found."""
    store = root.store
    if not store.is_directory(""):
        return "It is a file." if store.has("") else "Nothing lies there."
    if tags:
        return f"Tags there, oldest first: {', '.join(tags[-10:])}."
    try:
        unfinished = [name for name in store.list_names() if name.startswith(DRAFT_PREFIX)]
    except OSError:
        unfinished = []
    return "No tag of this library is there" + (f"; {len(unfinished)} unfinished." if unfinished else ".")
