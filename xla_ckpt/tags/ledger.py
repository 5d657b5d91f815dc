"""A root of tags in an object store, where nothing is renamed: one record, the ledger, says which tags there are.

An attempt is written under a name of its own, ``<tag>/.<random>``, and one conditional replacement of the ledger makes
it the tag, ends the one that it replaces, and retires those that are too many. Pins and deletions are such
replacements, too. What a job does that was stopped meanwhile is refused: the ledger is another one by then.

Readers take no lock: the files of a tag stay for `LAG` commits after the one that ended it (`tags/ledger_rules.py`).
Directories and files that are no tags are `Placed`.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from xla_ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    RootInUseError,
    StorageError,
    naming,
    storage_errors,
)
from xla_ckpt.manifest import manifest_json
from xla_ckpt.storage.base import Changed, Directory, ObjectStore, read_whole, write_small
from xla_ckpt.storage.this_process import this_process
from xla_ckpt.tags import ledger_rules as rules
from xla_ckpt.tags.deleting import busy
from xla_ckpt.tags.entry import MANIFEST, REPORT, TagEntry
from xla_ckpt.tags.ledger_rules import Ledger, LedgerTag, attempt_name
from xla_ckpt.tags.missing import no_such_tag
from xla_ckpt.tags.names import LEDGER, NEW_PREFIX, check_tag
from xla_ckpt.tags.placed import Placed
from xla_ckpt.tags.placing import overtaken
from xla_ckpt.tags.root import Draft, Kind

logger = logging.getLogger(__name__)

TRIES = 3
"""How often a write of the ledger is tried that the storage refuses, or does not answer."""

_WRITING: set[str] = set()
"""The attempts that this process writes."""


class LedgerRoot:
    """The tags in an object store.

    Args:
        store: Where.
        job: By what the ledger knows who saves there; None is this process.
    """

    def __init__(self, store: ObjectStore, job: str | None = None) -> None:
        self.store = store
        self._job = this_process().token if job is None else job

    @property
    def path(self) -> str:
        """What users call it."""
        return self.store.path

    def read(self) -> Ledger:
        """The ledger as it is now.

        Raises:
            CheckpointError: It is damaged, or cannot be read.
        """
        return self._read()[0]

    def _read(self) -> tuple[Ledger, str | None]:
        about = {"path": self.path, "file": LEDGER}
        with naming(**about), storage_errors("reading the record of the tags", **about):
            record = self.store.read_record(LEDGER)
            return (Ledger(), None) if record is None else (rules.parse_ledger(record[0]), record[1])

    def edit(self, change: Callable[[Ledger], Ledger]) -> Ledger:
        """Replace the ledger by what `change` makes of it, which is asked again if somebody else has changed it.

        Raises:
            OSError: The storage refused, or does not say what became of it.
        """
        while True:
            before, version = self._read()
            after = change(before)
            if after == before:
                return before
            write, refused = uuid.uuid4().hex, None
            try:
                self._write(rules.ledger_json(after, write), version)
                return after
            except Changed:
                pass
            except OSError as error:
                refused = error
            # Answers get lost, so it may be our own write that has changed it; others may have come after it.
            if write in self.read().recent:
                return after
            if refused is not None:
                raise refused

    def _write(self, data: bytes, version: str | None) -> None:
        for _ in range(TRIES - 1):
            try:
                return self.store.write_record(LEDGER, data, version)
            except OSError as error:
                logger.debug("%s: its ledger could not be written, which is tried again: %s", self.path, error)
        return self.store.write_record(LEDGER, data, version)

    def entries(self) -> list[TagEntry]:
        return _listed(self.read())

    def entry(self, tag: str) -> TagEntry | None:
        check_tag(tag, self.path)
        return next((entry for entry in self.entries() if entry.tag == tag), None)

    def _existing(self, tag: str) -> TagEntry:
        entry = self.entry(tag)
        if entry is None:
            raise no_such_tag(self, tag)
        return entry

    def open(self, tag: str) -> Directory:
        before = None
        while (entry := self._existing(tag)) != before:
            before = entry
            try:
                return self.store.open(entry.directory)
            except FileNotFoundError:
                continue  # a newer version has replaced it since the look, and its files are gone
            except OSError as error:
                raise StorageError.of(error, "opening a tag", path=self.path, tag=tag) from error
        raise CorruptCheckpointError("the tag has no files", path=self.path, tag=tag)

    def report_of(self, tag: str) -> Any:
        directory = self.open(tag)
        try:
            return json.loads(read_whole(directory, REPORT))
        except (OSError, ValueError, RecursionError):
            return None
        finally:
            directory.close()

    def is_ours(self, name: str) -> bool:
        return name in self.read().tags

    def is_root(self, name: str) -> bool:
        return self.store.has(f"{name}/{LEDGER}")

    def begin(self, name: str, kind: Kind) -> Draft:
        if kind not in (Kind.TAG, Kind.REPAIR):
            is_file = kind in (Kind.FILE, Kind.RENEWED_FILE)
            return Placed.begin(self.store, name, self.store.fill("" if is_file else name))
        due = rules.due(self.edit(self._without_dead))
        try:
            self.sweep(due)
        except OSError as error:  # who may write there and not delete can save all the same
            logger.warning("%s: files that nobody needs any more stay: %s", self.path, error)
        attempt = attempt_name(name, uuid.uuid4().hex)
        _WRITING.add(attempt)
        try:
            ledger = self.edit(partial(rules.begun, attempt=attempt))
        except BaseException:
            _WRITING.discard(attempt)
            raise
        return Attempt(
            root=self,
            tag=name,
            before=ledger.tags.get(name),
            epoch=ledger.epoch,
            directory=self.store.fill(attempt),
            is_repair=kind is Kind.REPAIR,
            sequence=ledger.sequence + 1,
            newest=next(reversed(_listed(ledger)), None),
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
        entry = self._existing(tag)
        if entry.pinned == pinned:
            return False

        def change(ledger: Ledger) -> Ledger:
            if tag not in ledger.tags:
                raise no_such_tag(self, tag)
            if self._writes(ledger, tag) or ledger.tags[tag].attempt != entry.directory:
                raise busy(self, tag)
            return rules.pinned(ledger, tag, pinned)

        with storage_errors("pinning a tag", path=self.path, tag=tag):
            self.edit(change)
        return True

    def retire(self, tag: str) -> None:
        def change(ledger: Ledger) -> Ledger:
            if tag not in ledger.tags:
                raise FileNotFoundError(f"there is no tag {tag}")
            return rules.retired(ledger, [tag])

        self.edit(change)

    def is_read(self, tag: str) -> bool:
        """False: nobody can tell, and who reads it has time (`LAG`)."""
        return False

    def is_written(self, tag: str) -> bool:
        return self._writes(self.read(), tag)

    def _writes(self, ledger: Ledger, tag: str) -> bool:
        return any(attempt.startswith(attempt_name(tag, "")) for attempt in self._without_dead(ledger).open)

    def _without_dead(self, ledger: Ledger) -> Ledger:
        # Which attempts this process writes is looked at when the ledger was read: who begins one says so here first.
        return rules.without_dead(ledger, self._job, frozenset(_WRITING))

    def clean(self, only: str | None = None) -> None:
        self.sweep(rules.due(self.edit(self._without_dead)))

    def sweep(self, attempts: Sequence[str]) -> None:
        """Delete the files of attempts that nobody needs any more."""
        for attempt in attempts:
            self.store.remove(attempt)
        self.edit(partial(rules.swept, attempts=attempts))

    def hold(self, within: float) -> None:
        """Take the root over at once. Whether its last owner lives need not be asked: memory has one process."""
        self.store.check_conditions()
        self.edit(partial(rules.taken, job=self._job))

    def expect(self) -> None:
        """Nothing."""

    def await_ready(self, within: float) -> bool:
        return False


def _listed(ledger: Ledger) -> list[TagEntry]:
    entries = [
        TagEntry(tag=tag, sequence=its.sequence, pinned=its.pinned, created=its.created, directory=its.attempt)
        for tag, its in ledger.tags.items()
    ]
    return sorted(entries, key=lambda entry: (entry.sequence, entry.tag))


@dataclass(slots=True, kw_only=True)
class Attempt:
    """A tag that is being written, or a repaired version of one, in a directory of its own."""

    root: LedgerRoot
    tag: str
    before: LedgerTag | None
    """What the tag was when this was begun."""

    epoch: int
    """That of the ledger when this was begun."""

    directory: Directory
    is_repair: bool
    sequence: int
    newest: TagEntry | None
    is_open: bool = True

    def commit(self, *, num_kept: int | None, report: Any, within: float) -> float:
        self._check_owner(self.root.read())  # else its files may be gone, which says less
        if report is not None:
            write_small(self.directory, REPORT, json.dumps(report).encode())
        if self.is_repair:
            self._carry_over()
        start = self.root.store.start_of(f"{self.directory.name}/{MANIFEST}", manifest_json.HEAD_BYTES)
        head = manifest_json.parse_head(start)

        def change(ledger: Ledger) -> Ledger:
            its = ledger.tags.get(self.tag)
            self._check_owner(ledger)
            if (its or self.before) != self.before and its is not None:
                raise overtaken(self.root.path, self.tag)
            pinned, sequence = head.pinned, ledger.sequence + 1
            if self.is_repair:
                if its is None:
                    raise no_such_tag(self.root, self.tag)
                pinned, sequence = its.pinned, its.sequence
            return rules.committed(
                ledger, self.tag, LedgerTag(self.directory.name, sequence, pinned, head.created), num_kept
            )

        self.root.edit(change)
        self._close()
        return 0.0

    def _check_owner(self, ledger: Ledger) -> None:
        if ledger.epoch != self.epoch or self.directory.name not in ledger.open:
            raise RootInUseError(
                "another process has taken over this root since this save began",
                path=self.root.path,
                found=ledger.owner,
                hint="This one was stopped or silent for long. Start it again to go on from the newest tag.",
            )

    def _carry_over(self) -> None:
        """Have the files that were not made anew in this directory, too."""
        if self.before is None:
            raise no_such_tag(self.root, self.tag)
        source, anew = self.root.store.open(self.before.attempt), set(self.directory.files())
        for path in source.files():
            if path not in anew:
                self.root.store.copy(f"{source.name}/{path}", f"{self.directory.name}/{path}")

    def abandon(self) -> None:
        if not self.is_open:
            return
        attempt = self.directory.name
        self._close()
        try:
            # First nobody can commit it any more, not even a request that is still on its way. It stays if one was
            # accepted whose answer was lost.
            ledger = self.root.edit(partial(rules.given_up, attempts=[attempt]))
            if not rules.was_committed(ledger, attempt):
                self.root.sweep([attempt])
        except (OSError, CheckpointError) as error:
            logger.warning("%s: %s is left for the next save to remove: %s", self.root.path, attempt, error)

    def _close(self) -> None:
        self.is_open = False
        _WRITING.discard(self.directory.name)
        self.directory.close()
