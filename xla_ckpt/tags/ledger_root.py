"""Checkpoint root in an object store: a ledger record lists the tags; nothing is renamed.

A `LedgerDraft` is written under a unique attempt name; one conditional update of the ledger commits it, replaces the
old version and retires older tags. Readers take no lock: files are kept for `RETENTION_COMMITS` commits after they are
retired. Directories with a name that other libraries expect are written in place as a `InPlaceDraft`.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from xla_ckpt.core.manifest import manifest_json
from xla_ckpt.errors import (
    CheckpointError,
    RootInUseError,
    StorageError,
    UnknownOutcomeError,
    UsageError,
    wrap_os_errors,
)
from xla_ckpt.logs import get_logger
from xla_ckpt.storage.base import Directory, ObjectStore, Store, VersionConflict, read_file, write_file
from xla_ckpt.storage.process_state import register_fork_reset
from xla_ckpt.storage.system_info import get_process_identity
from xla_ckpt.tags import ledger_rules as rules
from xla_ckpt.tags.deletion import make_busy_error
from xla_ckpt.tags.directory_operations import make_concurrent_save_error
from xla_ckpt.tags.entry import DRAFT_PREFIX, LEDGER_NAME, MANIFEST_FILE, REPORT_FILE, TagEntry, check_tag
from xla_ckpt.tags.lease import LEASES, RecordLease
from xla_ckpt.tags.ledger_record import (
    WRITE_ATTEMPTS,
    LedgerRecord,
    UnknownWriteOutcome,
    check_ledger_not_lost,
    clean_fixed_names,
    clean_unreferenced,
    list_attempts,
    parse_or_empty,
    partition_attempts,
)
from xla_ckpt.tags.ledger_rules import RETENTION_COMMITS, Ledger, LedgerTag, make_attempt_name
from xla_ckpt.tags.retention import Retention, find_tags_to_delete
from xla_ckpt.tags.retention_inputs import load_tag_infos, select_tags_to_retire
from xla_ckpt.tags.root import (
    AdoptReport,
    CleanupReport,
    Draft,
    Root,
    TransactionKind,
    check_not_a_tag,
    do_nothing,
    log_errors_after_commit,
    make_no_such_tag_error,
    require_tag,
)

logger = get_logger(__name__)


@dataclass(slots=True, kw_only=True)
class InPlaceDraft:
    """An object that is written in place under its final name, which must be unused.

    Each file appears atomically, and the marker files that `Transaction.seal` writes last show that a directory is
    complete. A record ``.new-<name>``, created conditionally, excludes other writers. If the writer is killed,
    `clean_fixed_names` in `tags/ledger_record.py` removes the record later; the files have to be removed manually.
    """

    store: ObjectStore
    name: str
    directory: Directory
    sequence: int = 0
    newest: TagEntry | None = None
    is_open: bool = True

    @classmethod
    def begin(cls, store: ObjectStore, name: str, directory: Directory) -> InPlaceDraft:
        """Create a draft.

        Raises:
            UsageError: The name exists or is being written.
            OSError: The storage failed.
        """
        record, token = DRAFT_PREFIX + name, uuid.uuid4().hex.encode()
        try:
            store.write_record(record, token, None)
        except (VersionConflict, OSError) as error:
            its = store.read_record(record)
            is_mine = its is not None and its[0] == token  # in that case only the response was lost
            if isinstance(error, OSError) and not is_mine:
                raise
            if not is_mine:
                raise UsageError(
                    "something is being written there, or its writer was killed",
                    path=store.path,
                    found=name,
                    hint=f"If nobody writes it, remove {name} and {record}, or choose another name. After a day "
                    "xla-ckpt clean removes such a record.",
                ) from None
        if store.has(name):
            store.remove(record)
            raise UsageError(
                "something has this name, and this storage cannot replace it in one step",
                path=store.path,
                found=name,
                hint="Remove it first, or choose another name.",
            )
        return cls(store=store, name=name, directory=directory)

    def commit(self, *, retention: Retention | None, report: object, within: float) -> float:
        self.is_open = False  # it is complete, so later failures must not remove it
        self.directory.close()
        record = DRAFT_PREFIX + self.name
        for _ in range(WRITE_ATTEMPTS):
            try:
                self.store.remove(record)
                break
            except OSError as error:
                logger.warning("%s: %s is complete, and %s stays: %s", self.store.path, self.name, record, error)
        return 0.0

    def abort(self) -> None:
        if not self.is_open:
            return
        self.is_open = False
        self.directory.close()
        try:
            self.store.remove(self.name)  # before the record, which excludes other writers until then
            self.store.remove(DRAFT_PREFIX + self.name)
        except OSError as error:
            logger.warning("%s: what was not finished of %s stays: %s", self.store.path, self.name, error)


ACTIVE_DRAFTS: set[str] = register_fork_reset(set(), set.clear)
"""Attempts that this process is writing."""


@dataclass(slots=True, kw_only=True)
class LedgerDraft:
    """A tag that is being written, or a repaired version of one, in its own directory."""

    root: Root
    record: LedgerRecord
    tag: str
    previous: LedgerTag | None
    """Entry of the tag when the draft was created."""

    epoch: int
    """Epoch of the ledger when the draft was created."""

    directory: Directory
    kind: TransactionKind
    sequence: int
    newest: TagEntry | None
    is_open: bool = True

    def commit(self, *, retention: Retention | None, report: Any, within: float) -> float:
        if self.kind is TransactionKind.REPAIR:
            self._check_owner(self.record.read())
            self._link_unchanged_files()
        try:
            start = self.record.store.read_start(
                f"{self.directory.name}/{MANIFEST_FILE}", manifest_json.MAX_HEADER_BYTES
            )
        except FileNotFoundError:
            self._check_owner(self.record.read())  # removed by a process that has taken over the root
            raise
        head = manifest_json.parse_header(start)
        if report is not None:
            write_file(self.directory, REPORT_FILE, json.dumps(report).encode())

        def change(ledger: Ledger) -> Ledger:
            its = ledger.tags.get(self.tag)
            self._check_owner(ledger)
            if (its or self.previous) != self.previous and its is not None:
                raise make_concurrent_save_error(self.record.path, self.tag)
            pinned = head.pinned
            sequence = head.sequence if self.kind is TransactionKind.UPLOAD else ledger.sequence + 1
            if self.kind is TransactionKind.REPAIR:
                if its is None:
                    raise make_no_such_tag_error(self.root, self.tag)
                pinned, sequence = its.pinned, its.sequence
            entry = LedgerTag(self.directory.name, sequence, pinned, head.created)
            after = rules.commit_attempt(ledger, self.tag, entry)
            if retention is None:
                return after
            return rules.retire_tags(
                after, select_tags_to_retire(self.record.store, rules.list_entries(after), retention)
            )

        if retention is not None:
            # Cache what the policy reads of older tags, because a slow edit loses the race with other writers.
            with contextlib.suppress(CheckpointError):  # the edit raises it too
                find_tags_to_delete(
                    load_tag_infos(self.record.store, rules.list_entries(self.record.read_cached())), retention
                )
        try:
            ledger = self.record.edit(change)
        except UnknownWriteOutcome as error:
            ledger = self._resolve_unknown(error)
        with log_errors_after_commit(self.record.path, self.tag):
            if self.kind is not TransactionKind.REPAIR:
                LEASES.record_commit(self.record.path, self.tag, ledger.sequence)
            self._close()
        return 0.0

    def _check_owner(self, ledger: Ledger) -> None:
        if ledger.epoch != self.epoch or self.directory.name not in ledger.open:
            raise make_taken_over_error(self.record.path, ledger)

    def _resolve_unknown(self, error: UnknownWriteOutcome) -> Ledger:
        """Find out if an unconfirmed commit has succeeded; if so, return the ledger.

        Gives up the attempt unless it is committed. This changes the ledger, so that a request still in flight is
        rejected.

        Raises:
            UnknownWriteOutcome: The commit has failed.
            UnknownOutcomeError: The outcome is still unknown.
        """
        attempt, fate = self.directory.name, "unknown"
        cause: Exception = error
        try:
            ledger = self.record.edit(partial(rules.give_up_attempts, attempts=[attempt]))
            fate = rules.find_outcome(ledger, attempt)
        except (OSError, CheckpointError) as silent:
            cause = silent
        if fate == "committed":
            return ledger
        if fate == "given up":
            raise error
        after = "the new tag is there, whole, or what was there before. The next save there cleans up"
        raise make_unknown_outcome_error(self.record.path, self.tag, "committed", error, after) from cause

    def _link_unchanged_files(self) -> None:
        """Link the files that were not rewritten into this directory."""
        if self.previous is None:
            raise make_no_such_tag_error(self.root, self.tag)
        source, anew = self.record.store.open(self.previous.attempt), set(self.directory.list_files())
        for path in source.list_files():
            if path not in anew:
                self.directory.link(source, path, path)

    def abort(self) -> None:
        if not self.is_open:
            return
        attempt = self.directory.name
        self._close()
        try:
            # First make it impossible to commit the attempt, even by a request in flight. It is kept if such a request
            # has been accepted with its response lost.
            ledger = self.record.edit(partial(rules.give_up_attempts, attempts=[attempt]))
            if rules.find_outcome(ledger, attempt) != "committed":
                self.record.delete_attempts([attempt])
        except (OSError, CheckpointError) as error:
            logger.warning("%s: %s is left for the next save to remove: %s", self.record.path, attempt, error)

    def _close(self) -> None:
        self.is_open = False
        ACTIVE_DRAFTS.discard(self.directory.name)
        self.directory.close()


def make_unknown_outcome_error(
    path: str, tag: str, action: str, error: UnknownWriteOutcome, after: str
) -> UnknownOutcomeError:
    """Return the error for an unconfirmed change of the ledger: `action` on a tag, and the possible states in
    `after`.
    """
    return UnknownOutcomeError(
        f"the storage did not answer whether it has {action} this tag",
        path=path,
        tag=tag,
        found=error,
        hint=f"Look with xla-ckpt ls when it answers again: {after}.",
    )


def make_taken_over_error(path: str, ledger: Ledger) -> RootInUseError:
    """Return the error for a save that began before another job took over the root."""
    return RootInUseError(
        "another process has taken over this root since this save began",
        path=path,
        found=ledger.owner,
        hint="This one was stopped or silent for long. Start it again to go on from the newest tag.",
    )


class LedgerRoot:
    """A root of tags in an object store.

    Args:
        store: The object store.
        writer: Name of the writer of attempts in the ledger; by default this process.
    """

    def __init__(self, store: ObjectStore, writer: str | None = None) -> None:
        self.store = store
        me = get_process_identity()
        self._writer = f"{me.token}-{me.pid}" if writer is None else writer  # a forked process has the same token
        self._record = LedgerRecord(store)
        self._epoch: int | None = None
        """Epoch in which this process acquired the root; None if it saves without a lease."""

    @property
    def path(self) -> str:
        """Address of the root, as users write it."""
        return self.store.path

    def read(self) -> Ledger:
        """Return the current ledger.

        Raises:
            CheckpointError: The ledger is corrupt or cannot be read.
        """
        return self._record.read()

    def list_entries(self) -> list[TagEntry]:
        ledger = self.read()
        if ledger.sequence == 0:
            with wrap_os_errors("listing the tags", path=self.path):
                check_ledger_not_lost(self.store)
        return rules.list_entries(ledger)

    def get_entry(self, tag: str) -> TagEntry | None:
        check_tag(tag, self.path)
        return next((entry for entry in self.list_entries() if entry.tag == tag), None)

    def open(self, tag: str) -> Directory:
        return self.open_listed(require_tag(self, tag))

    def open_listed(self, entry: TagEntry) -> Directory:
        return self.store.get_directory(entry.directory)

    def read_report(self, tag: str) -> Any:
        with contextlib.closing(self.open(tag)) as directory:
            try:
                return json.loads(read_file(directory, REPORT_FILE))
            except (OSError, ValueError, RecursionError):
                return None

    def is_native_tag(self, name: str) -> bool:
        ledger = self.read()
        if ledger.sequence == 0:
            with wrap_os_errors("looking for a tag", path=self.path, tag=name):
                check_ledger_not_lost(self.store, [name])
        return name in ledger.tags

    def is_managed(self, name: str) -> bool:
        return rules.is_managed(self.read(), name)

    def is_authoritative(self) -> bool:
        return self._record.exists()

    def is_root(self, name: str) -> bool:
        return self.store.has(f"{name}/{LEDGER_NAME}")

    def begin(self, name: str, kind: TransactionKind) -> Draft:
        if kind not in (TransactionKind.TAG, TransactionKind.REPAIR):
            is_file = kind in (TransactionKind.NEW_FILE, TransactionKind.REPLACED_FILE)
            return InPlaceDraft.begin(self.store, name, self.store.get_directory("" if is_file else name))
        return self._begin(name, kind, make_attempt_name(name, uuid.uuid4().hex))

    def begin_upload(self, tag: str, version: str, *, begins: bool) -> LedgerDraft | None:
        """Join the upload of a version of a tag (`upload_rules.make_upload_token`), which may have been started
        elsewhere.

        Args:
            tag: Name of the tag.
            version: Token of the version, with which the name of the attempt begins.
            begins: If True, create the attempt if it does not exist or was given up. This gives up open attempts of
                earlier epochs, so join those to be continued first.

        Returns:
            The draft, or None if the upload was not started.
        """
        prefix = make_attempt_name(tag, version)
        joined = self._open_attempt(tag, TransactionKind.UPLOAD, prefix, None)
        return (
            self._begin(tag, TransactionKind.UPLOAD, prefix + uuid.uuid4().hex) if joined is None and begins else joined
        )

    def get_outcome(self, attempt: str) -> rules.AttemptOutcome:
        """Return the outcome of an attempt that another process commits."""
        return rules.find_outcome(self.read(), attempt)

    def _begin(self, name: str, kind: TransactionKind, attempt: str) -> LedgerDraft:
        due = self._find_expired()
        try:
            self._record.delete_attempts(due)
        except OSError as error:  # credentials that cannot delete can still save
            logger.warning("%s: files that nobody needs any more stay: %s", self.path, error)
        begun = self._open_attempt(name, kind, attempt, attempt)
        assert begun is not None, "a new one is begun"
        return begun

    def _open_attempt(self, name: str, kind: TransactionKind, prefix: str, new: str | None) -> LedgerDraft | None:
        """Open the attempt with a name that begins with `prefix`, otherwise create the attempt `new` unless it is
        None.
        """
        added = set[str]()

        def named(ledger: Ledger) -> str | None:
            return next((attempt for attempt in ledger.open if attempt.startswith(prefix)), new)

        def change(ledger: Ledger) -> Ledger:
            if self._epoch not in (None, ledger.epoch):
                raise make_taken_over_error(self.path, ledger)
            attempt = named(ledger)
            if attempt is None:
                return ledger
            added.update({attempt} - ACTIVE_DRAFTS)
            ACTIVE_DRAFTS.add(attempt)
            is_ours = attempt in ledger.open and ledger.open[attempt].epoch == ledger.epoch
            return ledger if is_ours else rules.begin_attempt(ledger, attempt, self._writer)

        try:
            ledger = self._record.edit(change)
        except BaseException:
            ACTIVE_DRAFTS.difference_update(added)
            raise
        attempt = named(ledger)
        ACTIVE_DRAFTS.difference_update(added - {attempt})
        if attempt is None:
            return None
        return LedgerDraft(
            root=self,
            record=self._record,
            tag=name,
            previous=ledger.tags.get(name),
            epoch=ledger.epoch,
            directory=self.store.get_directory(attempt),
            kind=kind,
            sequence=ledger.sequence + 1,
            newest=next(reversed(rules.list_entries(ledger)), None),
        )

    def open_draft(self, draft: str) -> Directory:
        if draft not in self.read().open and not self.store.has(DRAFT_PREFIX + draft):
            raise FileNotFoundError(f"nobody writes {draft}")
        return self.store.get_directory(draft)

    def get_draft_name(self, name: str) -> str:
        return name

    def get_directory_name(self, name: str) -> str:
        its = self.read().tags.get(name)
        return name if its is None else its.attempt

    def pin(self, tag: str, pinned: bool) -> bool:
        entry = require_tag(self, tag)
        if entry.pinned == pinned:
            return False

        def change(ledger: Ledger) -> Ledger:
            if tag not in ledger.tags:
                raise make_no_such_tag_error(self, tag)
            if self._is_writing(ledger, tag) or ledger.tags[tag].attempt != entry.directory:
                raise make_busy_error(self, tag)
            return rules.set_pinned(ledger, tag, pinned)

        with wrap_os_errors("pinning a tag", path=self.path, tag=tag):
            self._edit(change, tag, "pinned" if pinned else "unpinned")
        return True

    def _edit(self, change: Callable[[Ledger], Ledger], tag: str, done: str) -> None:
        try:
            self._record.edit(change)
        except UnknownWriteOutcome as error:
            raise make_unknown_outcome_error(self.path, tag, done, error, "it is as it was before, or so") from error

    def retire(self, tag: str) -> None:
        def change(ledger: Ledger) -> Ledger:
            if tag not in ledger.tags:
                raise FileNotFoundError(f"there is no tag {tag}")
            return rules.retire_tags(ledger, [tag])

        self._edit(change, tag, "deleted")

    def is_read(self, tag: str) -> bool:
        """Return False: readers take no lock, but have time to finish (`RETENTION_COMMITS`)."""
        return False

    def is_written(self, tag: str) -> bool:
        return self._is_writing(self.read(), tag)

    def _is_writing(self, ledger: Ledger, tag: str) -> bool:
        return any(attempt.startswith(make_attempt_name(tag, "")) for attempt in self._drop_dead(ledger).open)

    def _drop_dead(self, ledger: Ledger) -> Ledger:
        # `ACTIVE_DRAFTS` is checked after reading the ledger: a draft is added to the set before the ledger.
        return rules.give_up_dead(ledger, self._writer, frozenset(ACTIVE_DRAFTS))

    def clean(self, only: str | None = None) -> None:
        self._record.delete_attempts(self._find_expired())

    def _find_expired(self) -> list[str]:
        """Return the attempts whose files may be deleted, after giving up attempts of dead writers."""
        ledger = self._record.read_cached()
        if self._drop_dead(ledger) != ledger:
            ledger = self._record.edit(self._drop_dead)
        return rules.list_expired(ledger)

    def clean_all(self, within: float) -> CleanupReport:
        listed = list_attempts(self.store)
        before = self.read()
        if before.open:
            try:
                self.acquire_lease(within)  # gives up attempts of killed writers
            except RootInUseError as error:
                logger.info("%s: what is being written stays: %s", self.path, error)
        self.clean()
        after = self.read()
        unnamed, placed = clean_unreferenced(self.store, listed, after), clean_fixed_names(self.store)
        swept = sorted(rules.collect_attempts(before) - rules.collect_attempts(after))
        written = dict.fromkeys(after.open, "it is being written")
        read = dict.fromkeys(
            after.doomed, f"it is no tag any more, and goes after {RETENTION_COMMITS} commits: somebody may read it"
        )
        return CleanupReport(
            (*swept, *unnamed.removed, *placed.removed), written | read | {**unnamed.kept, **placed.kept}
        )

    def adopt(self, tags: Sequence[str], within: float) -> AdoptReport:
        job, before = self._acquire_lease(within), set[str]()
        names = [name for name in list_attempts(self.store) if not tags or name.partition("/")[0] in tags]
        complete, incomplete = partition_attempts(self.store, names)

        def change(ledger: Ledger) -> Ledger:
            before.clear()
            before.update(ledger.tags)
            return rules.adopt_attempts(ledger if job is None else rules.take_ownership(ledger, job), complete)

        after = self._record.edit(change, parse_or_empty)
        adopted = tuple(entry.tag for entry in rules.list_entries(after) if entry.tag not in before)
        return AdoptReport(adopted, rules.explain_rejected(after, incomplete))

    def acquire_lease(self, within: float, check: Callable[[], object] = do_nothing) -> None:
        job, self._epoch = self._acquire_lease(within, check), None
        if job is not None:
            ledger = self.take_ownership(job)
            if ledger.sequence == 0:
                check_ledger_not_lost(self.store)
            LEASES.record_commit(self.path, "", ledger.sequence)

    def _check_not_a_tag(self) -> None:
        """Raise an error if the root's path is a tag, since a path must not be both."""
        try:
            check_not_a_tag(self.path, _open_ledger_root)
        except StorageError as error:
            logger.debug("%s: what is above it cannot be read: %s", self.path, error)  # perhaps no permission

    def _acquire_lease(self, within: float, check: Callable[[], object] = do_nothing) -> str | None:
        self.store.check_conditional_writes()
        return LEASES.acquire(RecordLease(self.store, lambda: self.read().owner), within, check)

    def take_ownership(self, job: str) -> Ledger:
        """Make a job the owner of the root, so that commits begun by earlier owners are rejected.

        Raises:
            UsageError: The path is a tag.
        """

        def change(ledger: Ledger) -> Ledger:
            if ledger.sequence == 0:  # before the first write, which would make it a root
                self._check_not_a_tag()
            return rules.take_ownership(ledger, job)

        ledger = self._record.edit(change)
        self._epoch = ledger.epoch
        return ledger

    def check_can_commit(self) -> None:
        """Do nothing: a commit only needs a conditional write."""

    def prepare_commit(self) -> None:
        """Do nothing: a commit needs no preparation."""

    def wait_ready(self, within: float) -> bool:
        return False


def _open_ledger_root(store: Store) -> LedgerRoot:
    assert store.object_store is not None, "what is above an object store's root is in it"
    return LedgerRoot(store.object_store)
