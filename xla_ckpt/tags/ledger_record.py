"""The ledger as a record in an object store: read, and replaced on the condition that nobody has come before."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Sequence
from functools import partial

from xla_ckpt.errors import naming, storage_errors
from xla_ckpt.storage.base import Changed, ObjectStore
from xla_ckpt.tags import ledger_rules as rules
from xla_ckpt.tags.ledger_rules import Ledger
from xla_ckpt.tags.names import LEDGER

logger = logging.getLogger(__name__)

TRIES = 3
"""How often a write of the ledger is tried that the storage refuses, or does not answer."""


class LedgerRecord:
    """The ledger of a root in an object store."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store

    @property
    def path(self) -> str:
        """The root, as users call it."""
        return self.store.path

    def read(self) -> Ledger:
        """The ledger as it is now.

        Raises:
            CheckpointError: It is damaged, or cannot be read.
        """
        return self._read(rules.parse_ledger)[0]

    def _read(self, parse: Callable[[bytes], Ledger]) -> tuple[Ledger, str | None]:
        about = {"path": self.path, "file": LEDGER}
        with naming(**about), storage_errors("reading the record of the tags", **about):
            record = self.store.read_record(LEDGER)
            return (Ledger(), None) if record is None else (parse(record[0]), record[1])

    def edit(self, change: Callable[[Ledger], Ledger], parse: Callable[[bytes], Ledger] = rules.parse_ledger) -> Ledger:
        """Replace the ledger by what `change` makes of it, which is asked again if somebody else has changed it.

        Raises:
            OSError: The storage refused, or does not say what became of it.
        """
        while True:
            before, version = self._read(parse)
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
            if write in self._read(parse)[0].recent:
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

    def sweep(self, attempts: Sequence[str]) -> None:
        """Delete the files of attempts that nobody needs any more."""
        for attempt in attempts:
            self.store.remove(attempt)
        self.edit(partial(rules.swept, attempts=attempts))
