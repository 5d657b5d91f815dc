"""An attempt: a tag of a ledger that is being written, and how its commit ends when the storage does not answer."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from functools import partial
from typing import Any

from xla_ckpt.errors import CheckpointError, RootInUseError, UnknownOutcomeError
from xla_ckpt.logs import get_logger
from xla_ckpt.manifest import manifest_json
from xla_ckpt.storage.base import Directory
from xla_ckpt.storage.process_state import process_wide
from xla_ckpt.storage.small_files import write_small
from xla_ckpt.tags import ledger_rules as rules
from xla_ckpt.tags.entry import MANIFEST, REPORT, TagEntry
from xla_ckpt.tags.facts import facts_of, tags_to_retire
from xla_ckpt.tags.kept import superfluous
from xla_ckpt.tags.lease import LEASES
from xla_ckpt.tags.ledger_record import LedgerRecord, Unanswered
from xla_ckpt.tags.ledger_rules import Ledger, LedgerTag
from xla_ckpt.tags.missing import no_such_tag
from xla_ckpt.tags.placing import overtaken
from xla_ckpt.tags.retention import Retention
from xla_ckpt.tags.root import Kind, Root, logged_after_commit

logger = get_logger(__name__)

WRITING: set[str] = process_wide(set(), set.clear)
"""The attempts that this process writes."""


@dataclass(slots=True, kw_only=True)
class Attempt:
    """A tag that is being written, or a repaired version of one, in a directory of its own."""

    root: Root
    record: LedgerRecord
    tag: str
    before: LedgerTag | None
    """What the tag was when this was begun."""

    epoch: int
    """That of the ledger when this was begun."""

    directory: Directory
    kind: Kind
    sequence: int
    newest: TagEntry | None
    is_open: bool = True

    def commit(self, *, retention: Retention | None, report: Any, within: float) -> float:
        if self.kind is Kind.REPAIR:
            self._check_owner(self.record.read())
            self._carry_over()
        try:
            start = self.record.store.start_of(f"{self.directory.name}/{MANIFEST}", manifest_json.HEAD_BYTES)
        except FileNotFoundError:
            self._check_owner(self.record.read())  # who has taken the root over has removed it
            raise
        head = manifest_json.parse_head(start)
        if report is not None:
            write_small(self.directory, REPORT, json.dumps(report).encode())

        def change(ledger: Ledger) -> Ledger:
            its = ledger.tags.get(self.tag)
            self._check_owner(ledger)
            if (its or self.before) != self.before and its is not None:
                raise overtaken(self.record.path, self.tag)
            pinned = head.pinned
            sequence = head.sequence if self.kind is Kind.UPLOAD else ledger.sequence + 1
            if self.kind is Kind.REPAIR:
                if its is None:
                    raise no_such_tag(self.root, self.tag)
                pinned, sequence = its.pinned, its.sequence
            entry = LedgerTag(self.directory.name, sequence, pinned, head.created)
            after = rules.committed(ledger, self.tag, entry)
            if retention is None:
                return after
            return rules.retired(after, tags_to_retire(self.record.store, rules.entries_in(after), retention))

        if retention is not None:
            # What a policy reads of older tags is read now, and kept: an edit that takes long loses to those of others.
            with contextlib.suppress(CheckpointError):  # the edit meets it, too
                superfluous(facts_of(self.record.store, rules.entries_in(self.record.last())), retention)
        try:
            ledger = self.record.edit(change)
        except Unanswered as error:
            ledger = self._settle(error)
        with logged_after_commit(self.record.path, self.tag):
            if self.kind is not Kind.REPAIR:
                LEASES.note(self.record.path, self.tag, ledger.sequence)
            self._close()
        return 0.0

    def _check_owner(self, ledger: Ledger) -> None:
        if ledger.epoch != self.epoch or self.directory.name not in ledger.open:
            raise taken_over(self.record.path, ledger)

    def _settle(self, error: Unanswered) -> Ledger:
        """Find out whether the commit was done that the storage did not answer; the ledger, if it was.

        The attempt is given up, unless it is a tag by now. That is a change of the ledger, so that a request is refused
        which is still on its way.
        """
        attempt, fate = self.directory.name, "unknown"
        cause: Exception = error
        try:
            ledger = self.record.edit(partial(rules.given_up, attempts=[attempt]))
            fate = rules.fate(ledger, attempt)
        except (OSError, CheckpointError) as silent:
            cause = silent
        if fate == "committed":
            return ledger
        if fate == "given up":
            raise error
        after = "the new tag is there, whole, or what was there before. The next save there cleans up"
        raise unknown_outcome(self.record.path, self.tag, "committed", error, after) from cause

    def _carry_over(self) -> None:
        """Have the files that were not made anew in this directory, too."""
        if self.before is None:
            raise no_such_tag(self.root, self.tag)
        source, anew = self.record.store.open(self.before.attempt), set(self.directory.files())
        for path in source.files():
            if path not in anew:
                self.directory.link(source, path, path)

    def abandon(self) -> None:
        if not self.is_open:
            return
        attempt = self.directory.name
        self._close()
        try:
            # First nobody can commit it any more, not even a request that is still on its way. It stays if one was
            # accepted whose answer was lost.
            ledger = self.record.edit(partial(rules.given_up, attempts=[attempt]))
            if rules.fate(ledger, attempt) != "committed":
                self.record.sweep([attempt])
        except (OSError, CheckpointError) as error:
            logger.warning("%s: %s is left for the next save to remove: %s", self.record.path, attempt, error)

    def _close(self) -> None:
        self.is_open = False
        WRITING.discard(self.directory.name)
        self.directory.close()


def unknown_outcome(path: str, tag: str, done: str, error: Unanswered, after: str) -> UnknownOutcomeError:
    """The error for a change of the ledger that was not answered: what it does to a tag, and what is there `after`."""
    return UnknownOutcomeError(
        f"the storage did not answer whether it has {done} this tag",
        path=path,
        tag=tag,
        found=error,
        hint=f"Look with xla-ckpt ls when it answers again: {after}.",
    )


def taken_over(path: str, ledger: Ledger) -> RootInUseError:
    """The error for a save that began before another job took the root over."""
    return RootInUseError(
        "another process has taken over this root since this save began",
        path=path,
        found=ledger.owner,
        hint="This one was stopped or silent for long. Start it again to go on from the newest tag.",
    )
