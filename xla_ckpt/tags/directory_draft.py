"""A directory on its way to its name: the draft of a tag, of a checkpoint of DCP's, of a file or of a repair."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from xla_ckpt.errors import NotDurableError
from xla_ckpt.logs import get_logger
from xla_ckpt.plan.parity import FOLDER as PARITY_FOLDER
from xla_ckpt.storage.base import FileSystem, Identity, LocalFiles
from xla_ckpt.storage.durable_names import not_durable, rename_durably
from xla_ckpt.tags import listing
from xla_ckpt.tags.cleaning import move_to_trash, remove, remove_empty_root, remove_unused
from xla_ckpt.tags.entry import TagEntry
from xla_ckpt.tags.lease import LEASES
from xla_ckpt.tags.orbax_commit import COMMITTER
from xla_ckpt.tags.placing import check_not_overtaken, place
from xla_ckpt.tags.retention import Retention
from xla_ckpt.tags.root import Kind, logged_after_commit

logger = get_logger(__name__)


class Tags(Protocol):
    """The tags of a root directory, in which a draft becomes one."""

    def superfluous(self, new: TagEntry, retention: Retention | None) -> list[TagEntry]:
        """Return the tags that are not to be kept any more when a new one is committed."""

    def committed(self, tag: str, doomed: Sequence[TagEntry], retention: Retention | None) -> None:
        """Do what follows the commit of a tag."""


@dataclass(slots=True, kw_only=True)
class DirectoryDraft:
    """A directory on its way to its name."""

    store: FileSystem
    name: str
    """The name that it will have."""

    kind: Kind
    directory: LocalFiles
    before: LocalFiles | None
    """What had the name when this was begun. It is open, so that no other directory gets its number."""

    replaced: Identity | None
    """The number of that directory."""

    sequence: int
    newest: TagEntry | None
    root: Tags
    """What knows the tags beside it."""

    new_root: bool = False
    """Whether the root directory was made for it."""

    placed: bool = False
    """Whether the directory has its name. That of the draft may be the old version's by now."""

    is_open: bool = True

    def commit(self, *, retention: Retention | None, report: Any, within: float) -> float:
        match self.kind:
            case Kind.TAG:
                LEASES.check(self.store.path, self.sequence)
                metadata = {"tag": self.name, "sequence": self.sequence}
                metadata |= {} if report is None else {"report": report}
                began = time.perf_counter()
                doomed = self.root.superfluous(self._as_tag(), retention)
                placing = time.perf_counter()
                with self._placing():
                    old = COMMITTER.commit(self.store, self.directory, self.name, self.replaced, metadata, within)
                placed = time.perf_counter()
                with logged_after_commit(self.store.path, self.name):
                    if old is not None:
                        _move_away(self.store, old)  # its files go with `Root.clean`, when all ranks know of the commit
                    LEASES.note(self.store.path, self.name, self.sequence)
                with logged_after_commit(self.store.path, self.name):
                    self.root.committed(self.name, doomed, retention)
                return placing - began + time.perf_counter() - placed
            case Kind.CHECKPOINT:
                self._place()
            case Kind.NEW:
                if self.store.is_directory(self.name) and self.store.remove_empty(self.name):
                    self.replaced = None
                check_not_overtaken(self.store, self.name, None)
                self._place()
            case Kind.FILE:
                check_not_overtaken(self.store, self.name, None)  # a rename would replace a file
                rename_durably(self.store, f"{self.directory.name}/{self.name}", self.name)
            case Kind.RENEWED_FILE:
                self.store.rename(f"{self.directory.name}/{self.name}", self.name)
                try:
                    self.store.sync()
                except OSError as refused:  # what was there is gone, so that nothing can be undone
                    raise not_durable(self.store, self.name, refused) from refused
            case Kind.REPAIR:
                self._adopt()
        return 0.0

    def _as_tag(self) -> TagEntry:
        """The tag that this will be, as it lies there now."""
        entry = listing.entry_at(self.store, self.directory.name, self.name)
        return entry or TagEntry(tag=self.name, sequence=self.sequence, directory=self.directory.name)

    def _place(self) -> None:
        """Have the directory take its name. What had it before is removed, unless somebody reads it."""
        with self._placing():
            old = place(self.store, self.directory.name, self.name, self.replaced)
        if old is not None:
            remove_unused(self.store, old)

    @contextlib.contextmanager
    def _placing(self) -> Iterator[None]:
        """The directory takes its name. Readers mark it as theirs from then on."""
        try:
            yield
        except NotDurableError:
            self.placed = True  # and what stands under the draft's name may be what a loss of power brings back
            raise
        self.placed = True
        with logged_after_commit(self.store.path, self.name):
            self._close()

    def _adopt(self) -> None:
        """Put the files into the places of those that the tag has."""
        assert self.before is not None, "begin() has opened the tag"
        self.directory.sync()
        # What only repairs need comes first: who meets an error in between has the tag as it was.
        for path in sorted(self.directory.files(), key=lambda path: (not path.startswith(PARITY_FOLDER), path)):
            self.before.adopt(self.directory, path)
        try:
            self.before.sync()
        except OSError as refused:
            raise not_durable(self.store, self.name, refused) from refused

    def abandon(self) -> None:
        if self.is_open and not self.placed and self.directory.is_at(self.directory.name):
            self._close()
            # This process made it. Where there are no locks, `remove_unused` would leave it until it is old.
            remove(self.store, self.directory.name)
            if self.new_root:
                remove_empty_root(self.store)
        self._close()

    def _close(self) -> None:
        if self.is_open:
            self.is_open = False
            self.directory.close()
            if self.before is not None:
                self.before.close()


def _move_away(store: FileSystem, name: str) -> None:
    """Move the old version of a tag to the trash. That this is refused is logged: the new one is in place."""
    try:
        move_to_trash(store, name)
    except FileNotFoundError:
        logger.debug("%s in %s: another program has removed it", name, store.path)
    except OSError as error:
        logger.warning("%s: the old version of a tag stays under the name %s: %s", store.path, name, error)
