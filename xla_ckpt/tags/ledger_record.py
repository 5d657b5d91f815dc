"""The ledger as a record in an object store: read, and replaced on the condition that nobody has come before."""

from __future__ import annotations

import errno
import random
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial

from xla_ckpt.errors import CheckpointError, naming, storage_errors
from xla_ckpt.logs import get_logger
from xla_ckpt.storage.base import Changed, ObjectStore
from xla_ckpt.tags import ledger_rules as rules
from xla_ckpt.tags.ledger_rules import Ledger
from xla_ckpt.tags.names import LEDGER

logger = get_logger(__name__)

TRIES = 3
"""How often a change of a record is tried that the storage refuses, or does not answer.

S3 refuses a write of a record at times for an instant (409), although nobody else has changed it.
"""


FIRST_PAUSE, LAST_PAUSE = 0.05, 1.0
"""Seconds before a change is made anew that somebody else has come before: at most, the first time and in the end."""

REFUSALS = frozenset({errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT, errno.EROFS})
"""By these the storage says no: what it has refused so is not done, and is not done later either."""


class Unanswered(OSError):  # noqa: N818  # no error of its own: what became of a write is still to be found out
    """Nobody knows whether the ledger was replaced, or will be: a request may still be on its way."""


class LedgerRecord:
    """The ledger of a root in an object store."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self._last: tuple[Ledger, str | None] | None = None
        """The ledger and its version, as an edit left it. Another process may have changed it since."""

    @property
    def path(self) -> str:
        """The root, as users call it."""
        return self.store.path

    def exists(self) -> bool:
        """Whether there is one, be it damaged."""
        with naming(path=self.path, file=LEDGER), storage_errors("reading the record of the tags", path=self.path):
            return self.store.read_record(LEDGER) is not None

    def read(self) -> Ledger:
        """The ledger as it is now.

        Raises:
            CheckpointError: It is damaged, or cannot be read.
        """
        return self._read(rules.parse_ledger)[0]

    def last(self) -> Ledger:
        """The ledger as the last edit left it; as it is now, if there was none."""
        return self.read() if self._last is None else self._last[0]

    def _read(self, parse: Callable[[bytes], Ledger]) -> tuple[Ledger, str | None]:
        about = {"path": self.path, "file": LEDGER}
        with naming(**about), storage_errors("reading the record of the tags", **about):
            record = self.store.read_record(LEDGER)
            return (Ledger(), None) if record is None else (parse(record[0]), record[1])

    def edit(self, change: Callable[[Ledger], Ledger], parse: Callable[[bytes], Ledger] = rules.parse_ledger) -> Ledger:
        """Replace the ledger by what `change` makes of it, which is asked again if somebody else has changed it.

        The last edit's ledger is tried first: a write on the condition that it is still there costs no look before. It
        proves nothing unless it is written.

        Raises:
            Unanswered: The storage does not say what became of it.
            OSError: The storage refused.
        """
        last, self._last = self._last, None
        if last is not None and not _changes(change, last[0]):
            last = None
        pause = FIRST_PAUSE
        while True:
            (before, version), last = last or self._read(parse), None
            after = change(before)
            if after == before:
                self._last = before, version
                return before
            write, refused = uuid.uuid4().hex, None
            try:
                self._last = after, self._write(rules.ledger_json(after, write), version)
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
            time.sleep(random.uniform(0, pause))  # noqa: S311  # writers that lose at one time come back at different ones
            pause = min(2 * pause, LAST_PAUSE)

    def _write(self, data: bytes, version: str | None) -> str:
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
        if attempts:
            self.edit(partial(rules.swept, attempts=attempts))


def _changes(change: Callable[[Ledger], Ledger], ledger: Ledger) -> bool:
    """Whether a change would do something to a ledger, and does not refuse it."""
    try:
        return change(ledger) != ledger
    except (CheckpointError, OSError):
        return False  # it is asked again, with the ledger as it is
