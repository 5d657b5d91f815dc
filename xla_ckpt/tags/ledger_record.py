"""Ledger record in an object store: read, conditional update with retries, garbage collection and rebuild.

Edits are compare-and-swap; a write whose answer is lost is looked up by its unique name. Cleanup removes attempts
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
"""How often a change of a record is tried that the storage refuses, or does not answer.

S3 refuses a write of a record at times for an instant (409), although nobody else has changed it.
"""


MIN_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.05, 1.0
"""Seconds before a change is made anew that somebody else has come before: at most, the first time and in the end."""

REFUSAL_ERRNOS = frozenset({errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT, errno.EROFS})
"""By these the storage says no: what it has refused so is not done, and is not done later either."""


class UnknownWriteOutcome(OSError):  # noqa: N818  # no error of its own: what became of a write is still to be found out
    """Nobody knows whether the ledger was replaced, or will be: a request may still be on its way."""


class LedgerRecord:
    """The ledger of a root in an object store."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self._cached: tuple[Ledger, str | None] | None = None
        """The ledger and its version, as an edit left it. Another process may have changed it since."""

    @property
    def path(self) -> str:
        """The root, as users call it."""
        return self.store.path

    def exists(self) -> bool:
        """Whether there is one, be it damaged."""
        with (
            annotate_errors(path=self.path, file=LEDGER_NAME),
            wrap_os_errors("reading the record of the tags", path=self.path),
        ):
            return self.store.read_record(LEDGER_NAME) is not None

    def read(self) -> Ledger:
        """The ledger as it is now.

        Raises:
            CheckpointError: It is damaged, or cannot be read.
        """
        return self._read(rules.parse_ledger)[0]

    def read_cached(self) -> Ledger:
        """The ledger as the last edit left it; as it is now, if there was none."""
        return self.read() if self._cached is None else self._cached[0]

    def _read(self, parse: Callable[[bytes], Ledger]) -> tuple[Ledger, str | None]:
        about = {"path": self.path, "file": LEDGER_NAME}
        with annotate_errors(**about), wrap_os_errors("reading the record of the tags", **about):
            record = self.store.read_record(LEDGER_NAME)
            return (Ledger(), None) if record is None else (parse(record[0]), record[1])

    def edit(self, change: Callable[[Ledger], Ledger], parse: Callable[[bytes], Ledger] = rules.parse_ledger) -> Ledger:
        """Replace the ledger by what `change` makes of it, which is asked again if somebody else has changed it.

        The last edit's ledger is tried first: a write on the condition that it is still there costs no look before. It
        proves nothing unless it is written.

        Raises:
            Unanswered: The storage does not say what became of it.
            OSError: The storage refused.
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
            # Answers get lost, so it may be our own write that has changed it; others may have come after it.
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
            time.sleep(random.uniform(0, pause))  # noqa: S311  # writers that lose at one time come back at different ones
            pause = min(2 * pause, MAX_BACKOFF_SECONDS)

    def _write(self, data: bytes, version: str | None) -> str:
        """Write it, several times if need be. Of all errors that is raised which says least."""
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
        """Delete the files of attempts that nobody needs any more."""
        for attempt in attempts:
            self.store.remove(attempt)
        if attempts:
            self.edit(partial(rules.forget_attempts, attempts=attempts))


def _is_effective(change: Callable[[Ledger], Ledger], ledger: Ledger) -> bool:
    """Whether a change would do something to a ledger, and does not refuse it."""
    try:
        return change(ledger) != ledger
    except (CheckpointError, OSError):
        return False  # it is asked again, with the ledger as it is


ABANDONED_SECONDS = 24 * 3600.0
"""The writer of something with a fixed name has ended if nothing of it has changed for so long (s).

By the clock of this machine, which may differ from the store's; S3 refuses one that is a quarter of an hour wrong.
"""

MAX_LOST_IN_ERROR = 5
"""Tags that the error for a lost ledger names, at most."""


def list_attempts(store: ObjectStore, tags: Iterable[str] | None = None) -> list[str]:
    """All attempts that have files, also those that no ledger names; with `tags`, those of these names."""
    names = [name for name in (store.list_names() if tags is None else tags) if is_tag_name(name)]
    return [f"{tag}/{name}" for tag in names for name in store.list_names(tag) if rules.is_attempt(f"{tag}/{name}")]


def partition_attempts(store: ObjectStore, attempts: Iterable[str]) -> tuple[dict[str, LedgerTag], dict[str, str]]:
    """Those attempts that are complete, by what their manifests say, and have all their files; why others are not."""
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
    """Those attempts that are complete."""
    return partition_attempts(store, attempts)[0]


def check_ledger_not_lost(store: ObjectStore, tags: Iterable[str] | None = None) -> None:
    """Check that a root whose ledger has no commit has not lost the ledger that had some.

    Args:
        store: The root. It may be a look at an earlier state: the ledger is read anew.
        tags: The names that are looked at; None for all.

    Raises:
        CorruptCheckpointError: It has. A job would train anew, and a save would begin a ledger without these tags.
        OSError: The storage refused.
    """
    attempts = list_attempts(store, tags)  # first: what another process begins meanwhile is in the ledger then
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
    """Delete the files of attempts that the ledger does not name, which was read after they were listed.

    So they were given up: an attempt is in the ledger before it has files. They came late, from a process that was
    stopped. Complete ones stay: they may have been tags, and the ledger was lost.
    """
    unnamed = _find_unreferenced(ledger, attempts)
    kept = find_complete_attempts(store, unnamed)
    removed = [attempt for attempt in unnamed if attempt not in kept]
    for attempt in removed:
        store.remove(attempt)
    reason = "complete, and in no record: xla-ckpt adopt makes a tag of it, if there is no newer one of its name"
    return CleanupReport(tuple(removed), dict.fromkeys(kept, reason))


def clean_fixed_names(store: ObjectStore) -> CleanupReport:
    """Remove the records of writers that were killed while they wrote something with a fixed name
    (`FixedNameDraft`).
    """
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
    """The ledger in a record; an empty one if it is damaged."""
    try:
        return rules.parse_ledger(data)
    except FormatError:
        return Ledger()
