"""What killed writers leave in an object store beside what the ledger names; and a ledger from what lies there."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable

from xla_ckpt.errors import CheckpointError, CorruptCheckpointError, FormatError
from xla_ckpt.manifest import manifest_json
from xla_ckpt.storage.base import ObjectStore
from xla_ckpt.storage.small_files import read_whole
from xla_ckpt.tags import ledger_rules as rules
from xla_ckpt.tags.entry import MANIFEST
from xla_ckpt.tags.ledger_record import LedgerRecord
from xla_ckpt.tags.ledger_rules import Ledger, LedgerTag
from xla_ckpt.tags.names import NEW_PREFIX, is_tag_name
from xla_ckpt.tags.root import Cleaned

UNCHANGED = 24 * 3600.0
"""The writer of something with a fixed name has ended if nothing of it has changed for so long (s).

By the clock of this machine, which may differ from the store's; S3 refuses one that is a quarter of an hour wrong.
"""

LOST_IN_ERROR = 5
"""Tags that the error for a lost ledger names, at most."""


def attempts_in(store: ObjectStore, tags: Iterable[str] | None = None) -> list[str]:
    """All attempts that have files, also those that no ledger names; with `tags`, those of these names."""
    names = [name for name in (store.names() if tags is None else tags) if is_tag_name(name)]
    return [f"{tag}/{name}" for tag in names for name in store.names(tag) if rules.is_attempt(f"{tag}/{name}")]


def judged(store: ObjectStore, attempts: Iterable[str]) -> tuple[dict[str, LedgerTag], dict[str, str]]:
    """Those attempts that are complete, by what their manifests say, and have all their files; why others are not."""
    complete, incomplete = {}, {}
    for attempt in attempts:
        directory = store.fill(attempt)
        try:
            manifest = manifest_json.parse(read_whole(directory, MANIFEST))
            if missing := sorted({record.path for record in manifest.files} - {*directory.files()}):
                incomplete[attempt] = f"files of its manifest are missing: {', '.join(missing[:3])}"
            else:
                head = manifest.head
                complete[attempt] = LedgerTag(attempt, head.sequence, head.pinned, head.created)
        except FileNotFoundError:
            continue  # it was never finished
        except CheckpointError as error:
            incomplete[attempt] = str(error)
        finally:
            directory.close()
    return complete, incomplete


def complete_among(store: ObjectStore, attempts: Iterable[str]) -> dict[str, LedgerTag]:
    """Those attempts that are complete."""
    return judged(store, attempts)[0]


def check_not_lost(store: ObjectStore, tags: Iterable[str] | None = None) -> None:
    """Check that a root whose ledger has no commit has not lost the ledger that had some.

    Args:
        store: The root. It may be a look at an earlier state: the ledger is read anew.
        tags: The names that are looked at; None for all.

    Raises:
        CorruptCheckpointError: It has. A job would train anew, and a save would begin a ledger without these tags.
        OSError: The storage refused.
    """
    attempts = attempts_in(store, tags)  # first: what another process begins meanwhile is in the ledger then
    if not attempts:
        return
    ledger = LedgerRecord(store.look().object_store or store).read()
    complete = (attempt for attempt in _unnamed(ledger, attempts) if complete_among(store, [attempt]))
    if lost := list(itertools.islice(complete, LOST_IN_ERROR)):
        raise CorruptCheckpointError(
            "there are complete tags, and no record of them: somebody has removed it",
            path=store.path,
            found=", ".join(lost),
            hint="xla-ckpt adopt ROOT makes a new one from the manifests. Or save to another directory.",
        )


def _unnamed(ledger: Ledger, attempts: Iterable[str]) -> list[str]:
    named = rules.named(ledger)
    return [attempt for attempt in attempts if attempt not in named]


def clean_unnamed(store: ObjectStore, attempts: Iterable[str], ledger: Ledger) -> Cleaned:
    """Delete the files of attempts that the ledger does not name, which was read after they were listed.

    So they were given up: an attempt is in the ledger before it has files. They came late, from a process that was
    stopped. Complete ones stay: they may have been tags, and the ledger was lost.
    """
    unnamed = _unnamed(ledger, attempts)
    kept = complete_among(store, unnamed)
    removed = [attempt for attempt in unnamed if attempt not in kept]
    for attempt in removed:
        store.remove(attempt)
    reason = "complete, and in no record: xla-ckpt adopt makes a tag of it, if there is no newer one of its name"
    return Cleaned(tuple(removed), dict.fromkeys(kept, reason))


def clean_placed(store: ObjectStore) -> Cleaned:
    """Remove the records of writers that were killed while they wrote something with a fixed name (`Placed`)."""
    removed, kept = [], {}
    before = (time.time() - UNCHANGED) * 1e9
    for record in store.names():
        if not record.startswith(NEW_PREFIX):
            continue
        name = record.removeprefix(NEW_PREFIX)
        if max(store.modified(record) or 0, store.modified(name) or 0) > before:
            kept[record] = f"somebody wrote {name} a short time ago, and may still do so"
            continue
        store.remove(record)
        removed.append(record)
        if store.has(name):
            kept[name] = "its writer was killed, perhaps before it was complete: remove it if you do not need it"
    return Cleaned(tuple(removed), kept)


def parsed_or_empty(data: bytes) -> Ledger:
    """The ledger in a record; an empty one if it is damaged."""
    try:
        return rules.parse_ledger(data)
    except FormatError:
        return Ledger()
