"""A `Root`: a place where tags come to be and go.

Directories answer for it on file systems (`tags/directories.py`), and a record that is replaced on a condition in
object stores (`tags/ledger.py`). A `Transaction` (`tags/transaction.py`) is how anything is written there.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from xla_ckpt.logs import get_logger
from xla_ckpt.storage.base import Directory, Store
from xla_ckpt.tags.entry import TagEntry
from xla_ckpt.tags.retention import Retention

logger = get_logger(__name__)


def go_on() -> None:
    """The `check` of who waits as long as it takes."""


@contextlib.contextmanager
def logged_after_commit(path: str, tag: str) -> Iterator[None]:
    """Log what the block raises, which runs after a commit: the tag is there, so its save has not failed."""
    try:
        yield
    except Exception:
        logger.exception("%s: tag %s is committed; what was to be done afterwards failed", path, tag)


class Kind(enum.Enum):
    """What a transaction writes."""

    TAG = "tag"
    """A tag of ours. One of that name is replaced; older ones may be retired."""

    CHECKPOINT = "checkpoint"
    """A directory that another library reads, such as DCP's. What has that name is replaced; an object store, which
    cannot do that in one step, refuses it."""

    NEW = "new directory"
    """A directory, where nothing of that name is yet but for an empty directory."""

    FILE = "new file"
    """A single file, where nothing of that name is yet. The draft holds a file of that name, and nothing else."""

    RENEWED_FILE = "file"
    """A single file, which takes the place of one of that name. The draft holds it alone. Several processes may write
    one at once: the last one counts."""

    UPLOAD = "upload"
    """A tag that another root has committed: it keeps the number that it has there. Object stores alone have this."""

    REPAIR = "repair"
    """Files of a tag that is there, which take the places of those that it has."""


@dataclass(frozen=True, slots=True)
class Cleaned:
    """What came of cleaning a root."""

    removed: tuple[str, ...]
    kept: Mapping[str, str]
    """What stays and is no tag -> why."""


@dataclass(frozen=True, slots=True)
class Adopted:
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

    def abandon(self) -> None:
        """Let go of it. What was not committed is removed: it may be why the storage is full."""


class Root(Protocol):
    """A place of tags."""

    @property
    def path(self) -> str:
        """What users call it."""

    @property
    def store(self) -> Store:
        """The files in it, for those who read them."""

    def entries(self) -> list[TagEntry]:
        """All committed tags of ours, oldest first. An absent root has none.

        Raises:
            CorruptCheckpointError: There are complete tags, and the record of them is gone.
            StorageError: It cannot be read.
        """

    def entry(self, tag: str) -> TagEntry | None:
        """A committed tag of ours, as `entries` lists it; None if there is none of this name.

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

    def begin(self, name: str, kind: Kind) -> Draft:
        """Make the directory that is filled, after what killed writers left behind has been removed.

        Raises:
            UsageError: Something has the name, and the storage cannot replace it.
            MissingPackageError: See `check_commits`.
            OSError: The storage refused.
        """

    def join(self, draft: str) -> Directory:
        """The directory of a draft that another process of this job has begun, by its name.

        Raises:
            FileNotFoundError: This process does not see it.
        """

    def draft_of(self, name: str) -> str:
        """The name of the draft that is filled to become this, if it is the only one."""

    def place_of(self, name: str) -> str:
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

    def report_of(self, tag: str) -> Any:
        """What the commit of a tag was given to keep for people; None if it was nothing, or is damaged.

        Raises:
            CheckpointError: As `open`.
        """

    def is_ours(self, name: str) -> bool:
        """Whether a directory is a tag of ours, damaged or not."""

    def knows(self, name: str) -> bool:
        """Whether what has this name is ours: a tag, one that is being written, or what one has left."""

    def is_certain(self) -> bool:
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

    def clean_all(self, within: float) -> Cleaned:
        """As `clean`, and look for what no save would find.

        Args:
            within: Seconds to wait at most until it is clear whether somebody saves there, whose leftovers stay.

        Raises:
            CheckpointError: The record of the tags is damaged.
            OSError: The storage refused.
        """

    def adopt(self, tags: Sequence[str], within: float) -> Adopted:
        """Take complete tags of these names, or all, into the record of the tags, also if it is damaged or gone.

        Raises:
            RootInUseError: Another process saves there.
            UsageError: There is no such record.
            OSError: The storage refused.
        """

    def hold(self, within: float, check: Callable[[], object] = go_on) -> None:
        """Be the one who saves here, from now on. Waits until it is clear whether another process does.

        Args:
            within: Seconds to wait at most.
            check: Is called while this waits, and raises to end the wait.

        Raises:
            RootInUseError: Another process saves there, or nobody can tell in that time whether it still runs.
            UsageError: The environment variable has a value that means nothing.
            OSError: The storage refused.
        """

    def check_commits(self) -> None:
        """Refuse a save that could not be committed in the end.

        Raises:
            MissingPackageError: What commits tags is not installed.
        """

    def expect(self) -> None:
        """Have ready what a commit takes, as soon as that can be: somebody will commit here, it seems."""

    def await_ready(self, within: float) -> bool:
        """Wait until a commit has all that it takes, so many seconds at most; whether it was not known to have it.

        Raises:
            SaveError: It cannot be had, and why.
        """
