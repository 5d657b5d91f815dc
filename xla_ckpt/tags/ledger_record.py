"""Ledger record in an object store: read, conditional update with retries, garbage collection and rebuild.

Edits are compare-and-swap; after a lost response, the write is looked up by its unique name. Cleanup removes attempts
that the ledger does not reference, and `adopt` rebuilds a lost ledger from manifests.
"""

from __future__ import annotations

import errno
import itertools
import random
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from xla_ckpt.core.manifest import manifest_json
from xla_ckpt.errors import CheckpointError, CorruptCheckpointError, FormatError, annotate_errors, wrap_os_errors
from xla_ckpt.logs import get_logger
from xla_ckpt.storage.base import ObjectStore, VersionConflict, read_file
from xla_ckpt.tags import ledger_rules as rules
from xla_ckpt.tags.entry import DRAFT_PREFIX, LEDGER_NAME, MANIFEST_FILE, is_tag_name
from xla_ckpt.tags.ledger_rules import Ledger, LedgerTag
from xla_ckpt.tags.root import CleanupReport

logger = get_logger(__name__)

WRITE_ATTEMPTS = 3
"""Number of attempts to write a record if the storage rejects the write or does not respond.

S3 occasionally rejects the write of an unmodified record for an instant (409).
"""


MIN_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.05, 1.0
"""Maximum pause (s) before an edit that lost a race is retried: initially, and after several retries."""

REFUSAL_ERRNOS = frozenset({errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT, errno.EROFS})
"""Error numbers of definite rejections: the write was not done, and will not be done later."""


class UnknownWriteOutcome(OSError):  # noqa: N818  # the outcome can still be found out
    """The outcome of a write of the ledger is unknown: the request may still be in flight."""


class LedgerRecord:
    """The ledger of a root in an object store."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self._cached: tuple[Ledger, str | None] | None = None
        """Ledger and version after the last edit. Another process may have changed it since."""

    @property
    def path(self) -> str:
        """Address of the root, as users write it."""
        return self.store.path

    def exists(self) -> bool:
        """Return True if the ledger exists, even if it is corrupt."""
        with (
            annotate_errors(path=self.path, file=LEDGER_NAME),
            wrap_os_errors("reading the record of the tags", path=self.path),
        ):
            return self.store.read_record(LEDGER_NAME) is not None

    def read(self) -> Ledger:
        """Return the current ledger.

        Raises:
            CheckpointError: The ledger is corrupt or cannot be read.
        """
        return self._read(rules.parse_ledger)[0]

    def read_cached(self) -> Ledger:
        """Return the ledger after the last edit, or the current one if there was no edit."""
        return self.read() if self._cached is None else self._cached[0]

    def _read(self, parse: Callable[[bytes], Ledger]) -> tuple[Ledger, str | None]:
        about = {"path": self.path, "file": LEDGER_NAME}
        with annotate_errors(**about), wrap_os_errors("reading the record of the tags", **about):
            record = self.store.read_record(LEDGER_NAME)
            return (Ledger(), None) if record is None else (parse(record[0]), record[1])

    def edit(self, change: Callable[[Ledger], Ledger], parse: Callable[[bytes], Ledger] = rules.parse_ledger) -> Ledger:
        """Replace the ledger with `change(ledger)`, retrying if another process has changed it.

        The first attempt uses the ledger after the last edit: a conditional write needs no read before it. That ledger
        is only trusted if the write succeeds.

        Raises:
            UnknownWriteOutcome: The storage did not report the outcome.
            OSError: The storage failed.
        """
        last, self._cached = self._cached, None
        if last is not None and not _is_effective(change, last[0]):
            last = None
        pause = MIN_BACKOFF_SECONDS
        while True:
            (before, version), last = last or self._read(parse), None
            after = change(before)
            if after == before:
                self._cached = before, version
                return before
            write, refused = uuid.uuid4().hex, None
            try:
                self._cached = after, self._write(rules.encode_ledger(after, write), version)
                return after
            except VersionConflict:
                pass
            except OSError as error:
                refused = error
            # The response of this write may have been lost, and other writes may have followed.
            try:
                now = self._read(parse)[0]
            except OSError as error:
                raise UnknownWriteOutcome(error.errno, error.strerror or str(error)) from error
            if write in now.recent:
                return after
            if refused is not None and refused.errno in REFUSAL_ERRNOS:
                raise refused
            if refused is not None:
                raise UnknownWriteOutcome(refused.errno, refused.strerror or str(refused)) from refused
            time.sleep(random.uniform(0, pause))  # noqa: S311  # spread out concurrent writers
            pause = min(2 * pause, MAX_BACKOFF_SECONDS)

    def _write(self, data: bytes, version: str | None) -> str:
        """Write the ledger with retries. If all attempts fail, raise the least conclusive error."""
        raised: OSError | None = None
        for _ in range(WRITE_ATTEMPTS):
            try:
                return self.store.write_record(LEDGER_NAME, data, version)
            except OSError as error:
                logger.debug("%s: its ledger could not be written: %s", self.path, error)
                if raised is None or raised.errno in REFUSAL_ERRNOS:
                    raised = error
        assert raised is not None, "it was tried"
        raise raised

    def delete_attempts(self, attempts: Sequence[str]) -> None:
        """Delete the files of unneeded attempts, and remove the attempts from the ledger."""
        for attempt in attempts:
            self.store.remove(attempt)
        if attempts:
            self.edit(partial(rules.forget_attempts, attempts=attempts))


def _is_effective(change: Callable[[Ledger], Ledger], ledger: Ledger) -> bool:
    """Return True if a change modifies a ledger without raising an error."""
    try:
        return change(ledger) != ledger
    except (CheckpointError, OSError):
        return False  # tried again with the current ledger


ABANDONED_SECONDS = 24 * 3600.0
"""Time without a change after which the writer of a fixed-name object is considered dead (s).

Measured by the clock of this machine, which may differ from the store's; S3 rejects clocks that are 15 minutes off.
"""

MAX_LOST_IN_ERROR = 5
"""Maximum number of tags in the error about a lost ledger."""


def list_attempts(store: ObjectStore, tags: Iterable[str] | None = None) -> list[str]:
    """Return all attempts with files, including those missing from the ledger; with `tags`, only attempts of these
    tags.
    """
    names = [name for name in (store.list_names() if tags is None else tags) if is_tag_name(name)]
    return [f"{tag}/{name}" for tag in names for name in store.list_names(tag) if rules.is_attempt(f"{tag}/{name}")]


def partition_attempts(store: ObjectStore, attempts: Iterable[str]) -> tuple[dict[str, LedgerTag], dict[str, str]]:
    """Split attempts into complete ones, with their ledger entries, and incomplete ones, with the reasons.

    An attempt is complete if all files of its manifest exist. Attempts without a manifest are in neither result.
    """
    complete, incomplete = {}, {}
    for attempt in attempts:
        directory = store.get_directory(attempt)
        try:
            manifest = manifest_json.parse_manifest(read_file(directory, MANIFEST_FILE))
            if missing := sorted({record.path for record in manifest.files} - {*directory.list_files()}):
                incomplete[attempt] = f"files of its manifest are missing: {', '.join(missing[:3])}"
            else:
                head = manifest.header
                complete[attempt] = LedgerTag(attempt, head.sequence, head.pinned, head.created)
        except FileNotFoundError:
            continue  # it was never finished
        except CheckpointError as error:
            incomplete[attempt] = str(error)
        finally:
            directory.close()
    return complete, incomplete


def find_complete_attempts(store: ObjectStore, attempts: Iterable[str]) -> dict[str, LedgerTag]:
    """Return the complete attempts with their ledger entries."""
    return partition_attempts(store, attempts)[0]


def check_ledger_not_lost(store: ObjectStore, tags: Iterable[str] | None = None) -> None:
    """Check that a root with an empty ledger has not lost an earlier one.

    Args:
        store: The root, which may be a view of an earlier state: the ledger is read again.
        tags: Tags to check; None for all.

    Raises:
        CorruptCheckpointError: There are complete attempts. Otherwise a job would train from the start, and a save
            would create a ledger without these tags.
        OSError: The storage failed.
    """
    attempts = list_attempts(store, tags)  # before the ledger, which then contains later attempts
    if not attempts:
        return
    ledger = LedgerRecord(store.snapshot_view().object_store or store).read()
    complete = (attempt for attempt in _find_unreferenced(ledger, attempts) if find_complete_attempts(store, [attempt]))
    if lost := list(itertools.islice(complete, MAX_LOST_IN_ERROR)):
        raise CorruptCheckpointError(
            "there are complete tags, and no record of them: somebody has removed it",
            path=store.path,
            found=", ".join(lost),
            hint="xla-ckpt adopt ROOT makes a new one from the manifests. Or save to another directory.",
        )


def _find_unreferenced(ledger: Ledger, attempts: Iterable[str]) -> list[str]:
    named = rules.collect_attempts(ledger)
    return [attempt for attempt in attempts if attempt not in named]


def clean_unreferenced(store: ObjectStore, attempts: Iterable[str], ledger: Ledger) -> CleanupReport:
    """Delete the files of attempts that are not in the ledger, which must have been read after they were listed.

    An attempt is added to the ledger before it has files, so these were given up, and their files were written late by
    a process that was suspended. Complete ones are kept: they may have been tags of a lost ledger.
    """
    unnamed = _find_unreferenced(ledger, attempts)
    kept = find_complete_attempts(store, unnamed)
    removed = [attempt for attempt in unnamed if attempt not in kept]
    for attempt in removed:
        store.remove(attempt)
    reason = "complete, and in no record: xla-ckpt adopt makes a tag of it, if there is no newer one of its name"
    return CleanupReport(tuple(removed), dict.fromkeys(kept, reason))


def clean_fixed_names(store: ObjectStore) -> CleanupReport:
    """Remove the lock records of writers that were killed while they wrote a `InPlaceDraft`."""
    removed, kept = [], {}
    before = (time.time() - ABANDONED_SECONDS) * 1e9
    for record in store.list_names():
        if not record.startswith(DRAFT_PREFIX):
            continue
        name = record.removeprefix(DRAFT_PREFIX)
        if max(store.get_modified_time(record) or 0, store.get_modified_time(name) or 0) > before:
            kept[record] = f"somebody wrote {name} a short time ago, and may still do so"
            continue
        store.remove(record)
        removed.append(record)
        if store.has(name):
            kept[name] = "its writer was killed, perhaps before it was complete: remove it if you do not need it"
    return CleanupReport(tuple(removed), kept)


def parse_or_empty(data: bytes) -> Ledger:
    """Return the ledger in a record, or an empty one if it is corrupt."""
    try:
        return rules.parse_ledger(data)
    except FormatError:
        return Ledger()
