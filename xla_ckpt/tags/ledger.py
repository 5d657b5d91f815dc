"""A root of tags in an object store, where nothing is renamed: one record, the ledger, says which tags there are.

An attempt is written under a name of its own, ``<tag>/.<random>``, and one conditional replacement of the ledger makes
it the tag, ends the one that it replaces, and retires those that are too many. Pins and deletions are such
replacements, too. What a job does that was stopped meanwhile is refused: the ledger is another one by then.

Readers take no lock: the files of a tag stay for `LAG` commits after the one that ended it (`tags/ledger_rules.py`).
Directories and files that are no tags are `Placed`.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from xla_ckpt.errors import RootInUseError, StorageError, storage_errors
from xla_ckpt.logs import get_logger
from xla_ckpt.storage.base import Directory, ObjectStore, Store
from xla_ckpt.storage.small_files import read_whole
from xla_ckpt.storage.this_process import this_process
from xla_ckpt.tags import ledger_rules as rules
from xla_ckpt.tags.attempt import WRITING, Attempt, taken_over, unknown_outcome
from xla_ckpt.tags.deleting import busy
from xla_ckpt.tags.entry import REPORT, TagEntry
from xla_ckpt.tags.lease import LEASES
from xla_ckpt.tags.lease_places import LeaseRecord
from xla_ckpt.tags.ledger_cleaning import (
    attempts_in,
    check_not_lost,
    clean_placed,
    clean_unnamed,
    judged,
    parsed_or_empty,
)
from xla_ckpt.tags.ledger_record import LedgerRecord, Unanswered
from xla_ckpt.tags.ledger_rules import LAG, Ledger, attempt_name
from xla_ckpt.tags.missing import check_is_no_tag, existing, no_such_tag
from xla_ckpt.tags.names import LEDGER, NEW_PREFIX, check_tag
from xla_ckpt.tags.placed import Placed
from xla_ckpt.tags.root import Adopted, Cleaned, Draft, Kind, go_on

logger = get_logger(__name__)


class LedgerRoot:
    """The tags in an object store.

    Args:
        store: Where.
        writer: By what the ledger knows who writes an attempt; None is this process.
    """

    def __init__(self, store: ObjectStore, writer: str | None = None) -> None:
        self.store = store
        me = this_process()
        self._writer = f"{me.token}-{me.pid}" if writer is None else writer  # a forked process has the same token
        self._record = LedgerRecord(store)
        self._epoch: int | None = None
        """In which this was given the root; None if it saves without a lease."""

    @property
    def path(self) -> str:
        """What users call it."""
        return self.store.path

    def read(self) -> Ledger:
        """The ledger as it is now.

        Raises:
            CheckpointError: It is damaged, or cannot be read.
        """
        return self._record.read()

    def entries(self) -> list[TagEntry]:
        ledger = self.read()
        if ledger.sequence == 0:
            with storage_errors("listing the tags", path=self.path):
                check_not_lost(self.store)
        return rules.entries_in(ledger)

    def entry(self, tag: str) -> TagEntry | None:
        check_tag(tag, self.path)
        return next((entry for entry in self.entries() if entry.tag == tag), None)

    def open(self, tag: str) -> Directory:
        return self.open_listed(existing(self, tag))

    def open_listed(self, entry: TagEntry) -> Directory:
        return self.store.fill(entry.directory)

    def report_of(self, tag: str) -> Any:
        with contextlib.closing(self.open(tag)) as directory:
            try:
                return json.loads(read_whole(directory, REPORT))
            except (OSError, ValueError, RecursionError):
                return None

    def is_ours(self, name: str) -> bool:
        ledger = self.read()
        if ledger.sequence == 0:
            with storage_errors("looking for a tag", path=self.path, tag=name):
                check_not_lost(self.store, [name])
        return name in ledger.tags

    def knows(self, name: str) -> bool:
        return rules.knows(self.read(), name)

    def is_certain(self) -> bool:
        return self._record.exists()

    def is_root(self, name: str) -> bool:
        return self.store.has(f"{name}/{LEDGER}")

    def begin(self, name: str, kind: Kind) -> Draft:
        if kind not in (Kind.TAG, Kind.REPAIR):
            is_file = kind in (Kind.FILE, Kind.RENEWED_FILE)
            return Placed.begin(self.store, name, self.store.fill("" if is_file else name))
        return self._begin(name, kind, attempt_name(name, uuid.uuid4().hex))

    def upload(self, tag: str, version: str, *, begins: bool) -> Attempt | None:
        """Take part in the upload of a version of a tag (`upload_rules.uploaded_as`), whoever has begun it.

        Args:
            tag: Its name.
            version: What its attempt is known by.
            begins: Whether this begins it if nobody has, or if it was given up. What else was begun in an earlier
                epoch is given up then: who goes on with other uploads takes part in those first.

        Returns:
            Where it is filled; None if nobody has begun it.
        """
        prefix = attempt_name(tag, version)
        joined = self._attempt(tag, Kind.UPLOAD, prefix, None)
        return self._begin(tag, Kind.UPLOAD, prefix + uuid.uuid4().hex) if joined is None and begins else joined

    def fate(self, attempt: str) -> rules.Fate:
        """What became of an attempt that another process commits."""
        return rules.fate(self.read(), attempt)

    def _begin(self, name: str, kind: Kind, attempt: str) -> Attempt:
        due = self._due()
        try:
            self._record.sweep(due)
        except OSError as error:  # who may write there and not delete can save all the same
            logger.warning("%s: files that nobody needs any more stay: %s", self.path, error)
        begun = self._attempt(name, kind, attempt, attempt)
        assert begun is not None, "a new one is begun"
        return begun

    def _attempt(self, name: str, kind: Kind, prefix: str, new: str | None) -> Attempt | None:
        """The open attempt with a name that begins like this, or else the new one."""
        added = set[str]()

        def named(ledger: Ledger) -> str | None:
            return next((attempt for attempt in ledger.open if attempt.startswith(prefix)), new)

        def change(ledger: Ledger) -> Ledger:
            if self._epoch not in (None, ledger.epoch):
                raise taken_over(self.path, ledger)
            attempt = named(ledger)
            if attempt is None:
                return ledger
            added.update({attempt} - WRITING)
            WRITING.add(attempt)
            is_ours = attempt in ledger.open and ledger.open[attempt].epoch == ledger.epoch
            return ledger if is_ours else rules.begun(ledger, attempt, self._writer)

        try:
            ledger = self._record.edit(change)
        except BaseException:
            WRITING.difference_update(added)
            raise
        attempt = named(ledger)
        WRITING.difference_update(added - {attempt})
        if attempt is None:
            return None
        return Attempt(
            root=self,
            record=self._record,
            tag=name,
            before=ledger.tags.get(name),
            epoch=ledger.epoch,
            directory=self.store.fill(attempt),
            kind=kind,
            sequence=ledger.sequence + 1,
            newest=next(reversed(rules.entries_in(ledger)), None),
        )

    def join(self, draft: str) -> Directory:
        if draft not in self.read().open and not self.store.has(NEW_PREFIX + draft):
            raise FileNotFoundError(f"nobody writes {draft}")
        return self.store.fill(draft)

    def draft_of(self, name: str) -> str:
        return name

    def place_of(self, name: str) -> str:
        its = self.read().tags.get(name)
        return name if its is None else its.attempt

    def pin(self, tag: str, pinned: bool) -> bool:
        entry = existing(self, tag)
        if entry.pinned == pinned:
            return False

        def change(ledger: Ledger) -> Ledger:
            if tag not in ledger.tags:
                raise no_such_tag(self, tag)
            if self._writes(ledger, tag) or ledger.tags[tag].attempt != entry.directory:
                raise busy(self, tag)
            return rules.pinned(ledger, tag, pinned)

        with storage_errors("pinning a tag", path=self.path, tag=tag):
            self._edit(change, tag, "pinned" if pinned else "unpinned")
        return True

    def _edit(self, change: Callable[[Ledger], Ledger], tag: str, done: str) -> None:
        try:
            self._record.edit(change)
        except Unanswered as error:
            raise unknown_outcome(self.path, tag, done, error, "it is as it was before, or so") from error

    def retire(self, tag: str) -> None:
        def change(ledger: Ledger) -> Ledger:
            if tag not in ledger.tags:
                raise FileNotFoundError(f"there is no tag {tag}")
            return rules.retired(ledger, [tag])

        self._edit(change, tag, "deleted")

    def is_read(self, tag: str) -> bool:
        """False: nobody can tell, and who reads it has time (`LAG`)."""
        return False

    def is_written(self, tag: str) -> bool:
        return self._writes(self.read(), tag)

    def _writes(self, ledger: Ledger, tag: str) -> bool:
        return any(attempt.startswith(attempt_name(tag, "")) for attempt in self._without_dead(ledger).open)

    def _without_dead(self, ledger: Ledger) -> Ledger:
        # Which attempts this process writes is looked at when the ledger was read: who begins one says so here first.
        return rules.without_dead(ledger, self._writer, frozenset(WRITING))

    def clean(self, only: str | None = None) -> None:
        self._record.sweep(self._due())

    def _due(self) -> list[str]:
        """The attempts whose files may go, when those that nobody writes any more are given up."""
        ledger = self._record.last()
        if self._without_dead(ledger) != ledger:
            ledger = self._record.edit(self._without_dead)
        return rules.due(ledger)

    def clean_all(self, within: float) -> Cleaned:
        listed = attempts_in(self.store)
        before = self.read()
        if before.open:
            try:
                self.hold(within)  # then those of writers that were killed are given up
            except RootInUseError as error:
                logger.info("%s: what is being written stays: %s", self.path, error)
        self.clean()
        after = self.read()
        unnamed, placed = clean_unnamed(self.store, listed, after), clean_placed(self.store)
        swept = sorted(rules.named(before) - rules.named(after))
        written = dict.fromkeys(after.open, "it is being written")
        read = dict.fromkeys(after.doomed, f"it is no tag any more, and goes after {LAG} commits: somebody may read it")
        return Cleaned((*swept, *unnamed.removed, *placed.removed), written | read | {**unnamed.kept, **placed.kept})

    def adopt(self, tags: Sequence[str], within: float) -> Adopted:
        job, before = self._lease(within), set[str]()
        names = [name for name in attempts_in(self.store) if not tags or name.partition("/")[0] in tags]
        complete, incomplete = judged(self.store, names)

        def change(ledger: Ledger) -> Ledger:
            before.clear()
            before.update(ledger.tags)
            return rules.adopted(ledger if job is None else rules.taken(ledger, job), complete)

        after = self._record.edit(change, parsed_or_empty)
        adopted = tuple(entry.tag for entry in rules.entries_in(after) if entry.tag not in before)
        return Adopted(adopted, rules.never_tags(after, incomplete))

    def hold(self, within: float, check: Callable[[], object] = go_on) -> None:
        job, self._epoch = self._lease(within, check), None
        if job is not None:
            ledger = self.take(job)
            if ledger.sequence == 0:
                check_not_lost(self.store)
            LEASES.note(self.path, "", ledger.sequence)

    def _check_is_no_tag(self) -> None:
        """Refuse the name of a tag as a root: one path would stand for both."""
        try:
            check_is_no_tag(self.path, _ledger_root)
        except StorageError as error:
            logger.debug("%s: what is above it cannot be read: %s", self.path, error)  # as who may use this path alone

    def _lease(self, within: float, check: Callable[[], object] = go_on) -> str | None:
        self.store.check_conditions()
        return LEASES.hold(LeaseRecord(self.store, lambda: self.read().owner), within, check)

    def take(self, job: str) -> Ledger:
        """Have all commits refused that a job has begun which had the root before this one.

        Raises:
            UsageError: It is no root, but a tag.
        """

        def change(ledger: Ledger) -> Ledger:
            if ledger.sequence == 0:  # before anything is written: else it would be a root from then on
                self._check_is_no_tag()
            return rules.taken(ledger, job)

        ledger = self._record.edit(change)
        self._epoch = ledger.epoch
        return ledger

    def check_commits(self) -> None:
        """Nothing: a replaced record commits."""

    def expect(self) -> None:
        """Nothing."""

    def await_ready(self, within: float) -> bool:
        return False


def _ledger_root(store: Store) -> LedgerRoot:
    assert store.object_store is not None, "what is above an object store's root is in it"
    return LedgerRoot(store.object_store)
