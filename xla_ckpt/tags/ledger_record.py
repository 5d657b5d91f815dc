"""The ledger as a record in an object store: read, and replaced on the condition that nobody has come before."""

from __future__ import annotations

import errno
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
"""How often a change of a record is tried that the storage refuses, or does not answer.

S3 refuses a write of a record at times for an instant (409), although nobody else has changed it.
"""


REFUSALS = frozenset({errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT, errno.EROFS})
"""By these the storage says no: what it has refused so is not done, and is not done later either."""


class Unanswered(OSError):  # noqa: N818  # no error of its own: what became of a write is still to be found out
    """Nobody knows whether the ledger was replaced, or will be: a request may still be on its way."""


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
            Unanswered: The storage does not say what became of it.
            OSError: The storage refused.
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
            try:
                now = self._read(parse)[0]
            except OSError as error:
                raise Unanswered(error.errno, error.strerror or str(error)) from error
            if write in now.recent:
                return after
            if refused is not None and refused.errno in REFUSALS:
                raise refused
            if refused is not None:
                raise Unanswered(refused.errno, refused.strerror or str(refused)) from refused

    def _write(self, data: bytes, version: str | None) -> None:
        """Write it, several times if need be. Of all errors that is raised which says least."""
        raised: OSError | None = None
        for _ in range(TRIES):
            try:
                return self.store.write_record(LEDGER, data, version)
            except OSError as error:
                logger.debug("%s: its ledger could not be written: %s", self.path, error)
                if raised is None or raised.errno in REFUSALS:
                    raised = error
        assert raised is not None, "it was tried"
        raise raised

    def sweep(self, attempts: Sequence[str]) -> None:
        """Delete the files of attempts that nobody needs any more."""
        for attempt in attempts:
            self.store.remove(attempt)
        self.edit(partial(rules.swept, attempts=attempts))
