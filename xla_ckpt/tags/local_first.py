"""A root directory whose tags go to an object store afterwards. It commits as any other one does."""

from __future__ import annotations

import logging
from collections.abc import Callable

from xla_ckpt.errors import CheckpointError, UsageError
from xla_ckpt.storage.base import FileSystem, LocalFiles
from xla_ckpt.tags.cleaning import retire_older
from xla_ckpt.tags.directories import DirectoryRoot
from xla_ckpt.tags.entry import UPLOAD, TagEntry
from xla_ckpt.tags.ledger import LedgerRoot
from xla_ckpt.tags.retention import Retention
from xla_ckpt.tags.root import go_on
from xla_ckpt.tags.upload_rules import Journal, address_in, parse_journal

logger = logging.getLogger(__name__)

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
        self._above: int | None = None

    def hold(self, within: float, check: Callable[[], object] = go_on) -> None:
        super().hold(within, check)
        if self._above is None:
            self._check_is_its_directory()
        if self._above is None:  # asked once: while the store is away, saves must not wait for it
            try:
                self.have_seen(self.remote.entries())
            except CheckpointError as error:
                if not self.entries():
                    raise  # nothing says which numbers there are
                logger.warning("%s: new tags are numbered after those in %s: %s", self.remote.path, self.path, error)
                self.have_seen([])

    def _check_is_its_directory(self) -> None:
        """Refuse the directory of another root: its tags would go to this one, too, and be taken for newer ones.

        Raises:
            UsageError: It has tags that go to another address.
        """
        for entry in self.entries():
            address = address_in(_journal_data(self.store, entry))
            if address not in (None, self.remote.path):
                raise UsageError(
                    "the directory given as local= has tags of another root",
                    path=self.path,
                    tag=entry.tag,
                    expected=self.remote.path,
                    found=address,
                    hint="Give each root a directory of its own.",
                )

    def have_seen(self, remote: list[TagEntry]) -> None:
        """Number the next tags above all that are in the object store."""
        self._above = max((self.above(), *(entry.sequence for entry in remote)))

    def above(self) -> int:
        return self._above or 0

    def retire_older(self, tag: str, retention: Retention | None) -> float:
        """Retire nothing: tags go when they are in the object store (see `retire_sent`)."""
        self._committed(retention)
        return 0.0

    def retire_sent(self, tag: str, retention: Retention | None) -> None:
        """Retire what is in the object store, and not to be kept since this tag is there. That it fails is logged."""
        retire_older(
            self.store, tag, retention, lambda old: self.journal(old).is_remote and not self.is_written(old.tag)
        )
        try:
            self.clean()
        except OSError as error:
            logger.warning("could not clean up in %s after tag %s: %s", self.path, tag, error)

    def journal(self, entry: TagEntry) -> Journal:
        """What a tag says of its upload."""
        return journal_of(self.store, entry, self.remote.path)


def journal_of(store: FileSystem, entry: TagEntry, address: str) -> Journal:
    """What a tag in a directory says of its upload to an address."""
    return parse_journal(_journal_data(store, entry), address)


def _journal_data(store: FileSystem, entry: TagEntry) -> bytes:
    try:
        return store.start_of(f"{entry.directory}/{UPLOAD}", MAX_JOURNAL, links=False)
    except OSError:
        return b""  # no upload was begun, or the tag is gone


def write_journal(directory: LocalFiles, journal: Journal) -> None:
    """Keep what is known of the upload of a tag, in its directory, which may have lost its name meanwhile."""
    directory.replace(UPLOAD, journal.to_json())
