"""Checkpoint root: the `Root` protocol, transactions that write to it, and lookups of its tags.

`directory_root` implements it for file systems and `ledger_root` for object stores. A `Transaction` begins a draft,
makes it durable, and commits it in one step, or removes it.
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
    """The `check` of who waits as long as it takes."""


@contextlib.contextmanager
def log_errors_after_commit(path: str, tag: str) -> Iterator[None]:
    """Log what the block raises, which runs after a commit: the tag is there, so its save has not failed."""
    try:
        yield
    except Exception:
        logger.exception("%s: tag %s is committed; what was to be done afterwards failed", path, tag)


class TransactionKind(enum.Enum):
    """What a transaction writes."""

    TAG = "tag"
    """A tag of ours. One of that name is replaced; older ones may be retired."""

    CHECKPOINT = "checkpoint"
    """A directory that another library reads, such as DCP's. What has that name is replaced; an object store, which
    cannot do that in one step, refuses it."""

    NEW_DIRECTORY = "new directory"
    """A directory, where nothing of that name is yet but for an empty directory."""

    NEW_FILE = "new file"
    """A single file, where nothing of that name is yet. The draft holds a file of that name, and nothing else."""

    REPLACED_FILE = "file"
    """A single file, which takes the place of one of that name. The draft holds it alone. Several processes may write
    one at once: the last one counts."""

    UPLOAD = "upload"
    """A tag that another root has committed: it keeps the number that it has there. Object stores alone have this."""

    REPAIR = "repair"
    """Files of a tag that is there, which take the places of those that it has."""


@dataclass(frozen=True, slots=True)
class CleanupReport:
    """What came of cleaning a root."""

    removed: tuple[str, ...]
    kept: Mapping[str, str]
    """What stays and is no tag -> why."""


@dataclass(frozen=True, slots=True)
class AdoptReport:
    """What came of taking tags into the record of a root."""

    adopted: tuple[str, ...]
    """The tags that were not in it, and are now."""

    refused: Mapping[str, str]
    """Names under which files lie that are no complete tag, and that the record does not know -> what is missing."""


class Draft(Protocol):
    """What is being written. Readers do not take it for what it will be."""

    @property
    def directory(self) -> Directory:
        """Where its files go. Everything in it must be durable before the commit."""

    @property
    def sequence(self) -> int:
        """The commit number that the tag will have; 0 for what is no tag."""

    @property
    def newest(self) -> TagEntry | None:
        """The newest tag that can be read, as it was when this was begun; None for what is no tag."""

    def commit(self, *, retention: Retention | None, report: Any, within: float) -> float:
        """Have it take its name, in one step, and retire older tags. See `Transaction.commit`.

        Which tags are retired is decided before, and what is done after that step raises nothing.
        """

    def abort(self) -> None:
        """Let go of it. What was not committed is removed: it may be why the storage is full."""


class Root(Protocol):
    """A place of tags."""

    @property
    def path(self) -> str:
        """What users call it."""

    @property
    def store(self) -> Store:
        """The files in it, for those who read them."""

    def list_entries(self) -> list[TagEntry]:
        """All committed tags of ours, oldest first. An absent root has none.

        Raises:
            CorruptCheckpointError: There are complete tags, and the record of them is gone.
            StorageError: It cannot be read.
        """

    def get_entry(self, tag: str) -> TagEntry | None:
        """A committed tag of ours, as `list_entries` lists it; None if there is none of this name.

        Raises:
            InvalidTagError: `tag` cannot be one.
        """

    def open(self, tag: str) -> Directory:
        """The directory of a committed tag, marked as being read so that no retention deletes it under the reader.

        Raises:
            NoCheckpointError: There is no such tag; the message lists those that there are.
            InvalidTagError: `tag` cannot be one.
        """

    def open_listed(self, entry: TagEntry) -> Directory:
        """The same of a tag that was listed, where nobody minds if it has gone since.

        Raises:
            OSError: It has, or the storage refused. An object store says it only when a file is read.
        """

    def begin(self, name: str, kind: TransactionKind) -> Draft:
        """Make the directory that is filled, after what killed writers left behind has been removed.

        Raises:
            UsageError: Something has the name, and the storage cannot replace it.
            MissingPackageError: See `check_can_commit`.
            OSError: The storage refused.
        """

    def open_draft(self, draft: str) -> Directory:
        """The directory of a draft that another process of this job has begun, by its name.

        Raises:
            FileNotFoundError: This process does not see it.
        """

    def get_draft_name(self, name: str) -> str:
        """The name of the draft that is filled to become this, if it is the only one."""

    def get_directory_name(self, name: str) -> str:
        """The name that a directory has right now: perhaps that of an old version which is just being replaced.

        In an object store it is that of the attempt which is the tag.
        """

    def pin(self, tag: str, pinned: bool) -> bool:
        """Pin a tag of ours, or undo that, durably; whether that changed anything. Retention leaves pinned tags alone.

        Raises:
            NoCheckpointError: There is no such tag, or a save retired it meanwhile.
            CheckpointError: Its manifest is damaged.
            UsageError: A save of this tag is running, or replaced it meanwhile.
            StorageError: The storage refused. The pin is as it was, unless only making it durable was refused.
        """

    def retire(self, tag: str) -> None:
        """Have a tag disappear in one step, durably. Who reads it reads on; `clean` removes what nobody reads any more.

        Raises:
            FileNotFoundError: There is no such tag.
            OSError: The storage refused.
        """

    def read_report(self, tag: str) -> Any:
        """What the commit of a tag was given to keep for people; None if it was nothing, or is damaged.

        Raises:
            CheckpointError: As `open`.
        """

    def is_native_tag(self, name: str) -> bool:
        """Whether a directory is a tag of ours, damaged or not."""

    def is_managed(self, name: str) -> bool:
        """Whether what has this name is ours: a tag, one that is being written, or what one has left."""

    def is_authoritative(self) -> bool:
        """Whether something says that this is a root of tags, so that it is no checkpoint itself."""

    def is_root(self, name: str) -> bool:
        """Whether a directory, or the root itself (""), holds tags of ours, as far as few looks tell."""

    def is_read(self, tag: str) -> bool:
        """Whether somebody reads this tag right now, or may do so."""

    def is_written(self, tag: str) -> bool:
        """Whether somebody writes this tag right now, or may do so."""

    def clean(self, only: str | None = None) -> None:
        """Remove what killed or replaced saves left. Undoes a replacement that was killed half-way.

        Args:
            only: Clean up after writers of this name alone: what else lies there may be anybody's.

        Raises:
            OSError: The storage refused.
        """

    def clean_all(self, within: float) -> CleanupReport:
        """As `clean`, and look for what no save would find.

        Args:
            within: Seconds to wait at most until it is clear whether somebody saves there, whose leftovers stay.

        Raises:
            CheckpointError: The record of the tags is damaged.
            OSError: The storage refused.
        """

    def adopt(self, tags: Sequence[str], within: float) -> AdoptReport:
        """Take complete tags of these names, or all, into the record of the tags, also if it is damaged or gone.

        Raises:
            RootInUseError: Another process saves there.
            UsageError: There is no such record.
            OSError: The storage refused.
        """

    def acquire_lease(self, within: float, check: Callable[[], object] = do_nothing) -> None:
        """Be the one who saves here, from now on. Waits until it is clear whether another process does.

        Args:
            within: Seconds to wait at most.
            check: Is called while this waits, and raises to end the wait.

        Raises:
            RootInUseError: Another process saves there, or nobody can tell in that time whether it still runs.
            UsageError: The environment variable has a value that means nothing.
            OSError: The storage refused.
        """

    def check_can_commit(self) -> None:
        """Refuse a save that could not be committed in the end.

        Raises:
            MissingPackageError: What commits tags is not installed.
        """

    def prepare_commit(self) -> None:
        """Have ready what a commit takes, as soon as that can be: somebody will commit here, it seems."""

    def wait_ready(self, within: float) -> bool:
        """Wait until a commit has all that it takes, so many seconds at most; whether it was not known to have it.

        Raises:
            SaveError: It cannot be had, and why.
        """


COMMIT_TIMEOUT = 1800.0
"""Seconds that a commit may take, by default."""


class Transaction:
    """Something that is being written: it appears whole, under its name, or not at all.

    A context that begins it, and throws it away unless it is committed. What a signal handler of the program raises
    comes when the draft is there, or is gone: nobody else would remove it.

    Raises (on entry, and from `begin`):
        OSError: The storage refused.
    """

    def __init__(self, root: Root, name: str, kind: TransactionKind = TransactionKind.TAG) -> None:
        self._root, self._name, self._kind = root, name, kind
        self._draft: Draft | None = None

    def begin(self) -> Self:
        """Begin it outside of a `with` block: then somebody has to call `abort` in the end."""
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
        """Make durable what is written, and then write the small files by which readers know that it is complete.

        Raises:
            OSError: The storage refused.
        """
        self.directory.sync()
        for path, data in final_files.items():
            write_file(self.directory, path, data)
        if final_files:
            self.directory.sync()

    def commit(
        self, *, retention: Retention | None = None, report: Any = None, within: float = COMMIT_TIMEOUT
    ) -> float:
        """Have it appear under its name, in one step, and retire tags that are not to be kept any more.

        What had the name stays readable until the new one is in place. That older tags could not be deleted is logged,
        and no error: the new one is there.

        Args:
            retention: Which tags stay; None keeps all.
            report: Plain JSON about the save, which the tag keeps for people.
            within: Seconds to wait at most for a process that commits.

        Returns:
            Seconds that choosing and retiring older tags took.

        Raises:
            SaveError: It was not committed; what has the name is as it was before.
            OSError: Likewise.
            NotDurableError: It was committed, and a loss of power may undo that.
        """
        with defer_signals():  # a commit would go on without a caller that has been interrupted
            return self._active_draft.commit(retention=retention, report=report, within=within)

    def abort(self) -> None:
        """Let go of it; what was not committed is removed. Does nothing a second time."""
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
    """Refuse a root that is itself a tag of the root above it, which `open_root` makes of a store.

    Raises:
        UsageError: It is one.
    """
    try:
        store, name = open_parent(path)
    except UsageError:
        return  # nothing is above it
    if open_root(store).is_native_tag(name):
        raise UsageError(
            "this is a tag, and no root of tags",
            path=path,
            hint=f"Pass {store.path}, and the name of the new tag (convert: as_tag= (--as)).",
        )


def require_tag(root: Root, tag: str) -> TagEntry:
    """What a root has under a name.

    Raises:
        NoCheckpointError: Nothing.
    """
    entry = root.get_entry(tag)
    if entry is None:
        raise make_no_such_tag_error(root, tag)
    return entry


def resolve_tag_link(store: Store, tag: str) -> str:
    """Return the name of the tag that is meant by a name: that to which a link of the program's own leads, such as
    ``latest``, or the name itself.

    Raises:
        UsageError: It is a link out of the root.
    """
    here, address = store.resolve_address("").rstrip("/"), store.resolve_address(tag) if is_tag_name(tag) else ""
    if address in ("", f"{here}/{tag}") or _is_file(open_store(address)):  # caches have links to files
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
    """The error for a tag that is not there, or for a root without any (`tag` None)."""
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
    """What is said of a link: only reads by its name follow it."""
    if tag is None or store.file_system is None or not is_tag_name(tag) or not store.has(tag):
        return ""
    try:
        name = resolve_tag_link(store, tag)
    except UsageError as error:
        return f"It is a link to {error.found}, and counts as no tag."
    return "" if name == tag else f"It is a link to {name}: name that tag."


def _describe_contents(root: Root, tags: Sequence[str]) -> str:
    """What a root directory holds in place of the tag that was looked for: other tags, or what else lies there."""
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
