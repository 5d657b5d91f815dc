"""A root of tags in a file system: each tag is a directory, and what is not committed yet has another name.

Drafts are ``.new-<name>``. On the way to its name a draft exchanges it with what is there (`tags/placing.py`), or sets
it aside as ``.old-<name>``. Retired tags go to ``.trash`` by one rename, and their files when nobody reads them.
A lock on each directory says who writes or reads it. One process at a time saves in a root directory (`tags/lease.py`).
"""

from __future__ import annotations

import contextlib
import errno
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from xla_ckpt.errors import MissingPackageError, StorageError, UsageError, naming
from xla_ckpt.extras import check_installed
from xla_ckpt.logs import get_logger
from xla_ckpt.manifest import manifest_json
from xla_ckpt.plan.parity import COPY
from xla_ckpt.storage.base import FileSystem, Identity, LocalFiles
from xla_ckpt.storage.small_files import read_whole, write_small
from xla_ckpt.tags import listing
from xla_ckpt.tags.cleaning import clean, is_draft, leftovers, move_to_trash, retire, tags_without
from xla_ckpt.tags.deleting import busy
from xla_ckpt.tags.directory_draft import DirectoryDraft
from xla_ckpt.tags.entry import MANIFEST, TagEntry
from xla_ckpt.tags.lease import LEASES
from xla_ckpt.tags.lease_places import LeaseDirectory
from xla_ckpt.tags.missing import existing, no_such_tag
from xla_ckpt.tags.names import NEW_PREFIX, OLD_PREFIX, is_tag_name
from xla_ckpt.tags.orbax_commit import COMMITTER
from xla_ckpt.tags.retention import Retention
from xla_ckpt.tags.root import Adopted, Cleaned, Kind, go_on
from xla_ckpt.tags.transaction import Transaction

logger = get_logger(__name__)

_MAX_LOOKS = 8
"""What has names of tags, and is looked at to see whether a directory is a root of tags, at most."""


class DirectoryRoot:
    """The root directory of tags, in a file system."""

    def __init__(self, store: FileSystem) -> None:
        self.store = store

    @property
    def path(self) -> str:
        """What users call it."""
        return self.store.path

    def entries(self) -> list[TagEntry]:
        return listing.entries(self.store)

    def entry(self, tag: str) -> TagEntry | None:
        return listing.entry_of(self.store, tag)

    def open(self, tag: str) -> LocalFiles:
        directory = listing.open_directory(self.store, tag)
        if directory is None:
            raise no_such_tag(self, tag)
        return directory

    def open_listed(self, entry: TagEntry) -> LocalFiles:
        return self.store.open(entry.directory)

    def report_of(self, tag: str) -> Any:
        with contextlib.closing(self.open(tag)) as directory:
            return listing.custom_metadata(self.store, directory.name).get("report")

    def is_ours(self, name: str) -> bool:
        return listing.is_ours(self.store, name)

    def knows(self, name: str) -> bool:
        return self.is_ours(name)

    def is_certain(self) -> bool:
        return False

    def is_root(self, name: str) -> bool:
        below = f"{name}/" if name else ""
        tags = itertools.islice(filter(is_tag_name, self.store.names(name)), _MAX_LOOKS)
        return any(self.store.has(f"{below}{tag}/{MANIFEST}") for tag in tags)

    def begin(self, name: str, kind: Kind) -> DirectoryDraft:
        if kind is Kind.TAG:
            self.check_commits()
        new_root = self.store.prepare()
        clean(self.store, None if kind in (Kind.TAG, Kind.REPAIR) else name)
        entries = self.entries() if kind is Kind.TAG else []
        suffix = "-repair" if kind is Kind.REPAIR else ""  # nobody takes it for a save of that tag
        before, replaced = self._replaced(name)
        try:
            return DirectoryDraft(
                store=self.store,
                name=name,
                kind=kind,
                before=before,
                replaced=replaced,
                sequence=1 + max((self.above(), *(e.sequence for e in entries))) if kind is Kind.TAG else 0,
                newest=next((entry for entry in reversed(entries) if entry.damage is None), None),
                directory=_new_directory(self.store, f"{NEW_PREFIX}{name}{suffix}"),
                new_root=new_root,
                root=self,
            )
        except BaseException:
            if before is not None:
                before.close()
            raise

    def _replaced(self, name: str) -> tuple[LocalFiles | None, Identity | None]:
        """Return the directory that the next one of a name replaces, open, and the identity of what has that name.

        Both belong to the same directory, unless other programs keep putting another one in its place.
        """
        attempts = 3
        while True:
            place = self.place_of(name)
            before, replaced = _directory_of(self.store, place), self.store.identity(name)
            attempts -= 1
            if before is None or place != name or before.identity == replaced or not attempts:  # a link has its own
                return before, replaced
            before.close()

    def above(self) -> int:
        """Above which number the next tag has its own, whatever those in this directory have."""
        return 0

    def superfluous(self, new: TagEntry, retention: Retention | None) -> list[TagEntry]:
        """Return the tags that are not to be kept any more when this one is committed, oldest first.

        Raises:
            UsageError: The policy failed.
        """
        return tags_without(self.store, new, retention)

    def committed(self, tag: str, doomed: Sequence[TagEntry], retention: Retention | None) -> None:
        """Do what follows the commit of a tag: retire those tags that are not to be kept any more."""
        retire(self.store, doomed)

    def join(self, draft: str) -> LocalFiles:
        return self.store.open(draft, lock=False)

    def draft_of(self, name: str) -> str:
        return NEW_PREFIX + name

    def place_of(self, name: str) -> str:
        old = OLD_PREFIX + name
        return old if not self.store.has(name) and self.store.has(old) else name

    def pin(self, tag: str, pinned: bool) -> bool:
        entry = existing(self, tag)
        if entry.damage is not None:
            raise entry.damage
        if entry.pinned == pinned:
            return False
        try:
            with Transaction(self, tag, Kind.REPAIR) as transaction:
                for name, data in self._with_pin(tag, pinned).items():
                    write_small(transaction.directory, name, data)
                # A manifest must not come into a newer version of the tag. A save takes far longer than from here to
                # the commit, so one that begins after this look does not end before it.
                now = existing(self, tag)
                if self.is_written(tag) or (now.sequence, now.directory) != (entry.sequence, entry.directory):
                    raise busy(self, tag)
                transaction.commit()
        except FileNotFoundError:
            raise no_such_tag(self, tag) from None
        except StorageError as error:
            raise error.at(tag=tag) from None
        except OSError as error:
            raise StorageError.of(error, "pinning a tag", path=self.path, tag=tag) from error
        existing(self, tag)
        return True

    def _with_pin(self, tag: str, pinned: bool) -> dict[str, bytes]:
        """The manifest of a tag with another pin, and the copy from which a lost one is repaired, if there is one."""
        with contextlib.closing(self.open(tag)) as directory, naming(path=self.path, tag=tag, file=MANIFEST):
            manifest = manifest_json.with_pin(read_whole(directory, MANIFEST), pinned)
            return dict.fromkeys({MANIFEST, *({COPY} & {*directory.files()})}, manifest)

    def retire(self, tag: str) -> None:
        names = [name for name in (OLD_PREFIX + tag, tag) if self.store.has(name)]
        if not names:
            raise FileNotFoundError(errno.ENOENT, "there is no such tag", tag)
        # A killed replacement has left its old version, which a save would take for the tag that it has to bring back.
        for name in names:
            move_to_trash(self.store, name)
        self.store.sync()

    def is_read(self, tag: str) -> bool:
        entry = existing(self, tag)
        return self.store.in_use(entry.directory)

    def is_written(self, tag: str) -> bool:
        return any(is_draft(name, tag) and self.store.in_use(name) for name in self.store.names())

    def clean(self, only: str | None = None) -> None:
        clean(self.store, only)

    def clean_all(self, within: float) -> Cleaned:
        before = leftovers(self.store)
        clean(self.store)
        kept = leftovers(self.store)
        why = "somebody uses it, or may do so: without locks, until it has not changed for an hour"
        return Cleaned(tuple(sorted(before - kept)), dict.fromkeys(sorted(kept), why))

    def adopt(self, tags: Sequence[str], within: float) -> Adopted:
        raise UsageError(
            "the tags of a directory are in no record: each one counts that is there",
            path=self.path,
            expected="a root in an object store",
            hint="xla-ckpt ls ROOT lists them.",
        )

    def hold(self, within: float, check: Callable[[], object] = go_on) -> None:
        self.store.prepare()
        LEASES.hold(LeaseDirectory(self.store), within, check)

    def check_commits(self) -> None:
        with naming(path=self.path):
            check_installed("orbax", "a save into a directory")

    def expect(self) -> None:
        try:
            self.check_commits()
        except MissingPackageError as error:
            # A run that trains first would hear of it with its first save.
            logger.warning("%s", error)
        else:
            COMMITTER.start()

    def await_ready(self, within: float) -> bool:
        return COMMITTER.await_ready(within)


def _directory_of(store: FileSystem, name: str) -> LocalFiles | None:
    """The directory of this name. Without a lock: nobody needs its files."""
    try:
        return store.open(name, lock=False)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _new_directory(store: FileSystem, name: str) -> LocalFiles:
    """Make a directory of this name, or of a name that begins like it.

    The name is taken where another job writes the same, and where a writer was killed on a file system without locks:
    there what it left looks as if it were in use, and a job that starts again must be able to save that tag.
    """
    for number in itertools.count():
        try:
            return store.make(f"{name}-{number}" if number else name)
        except FileExistsError:
            continue
    raise AssertionError("numbers do not end")
