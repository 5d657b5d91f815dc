"""A directory or a file in an object store that other libraries know by its name, so that it is no attempt of a tag."""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from xla_ckpt.errors import UsageError
from xla_ckpt.logs import get_logger
from xla_ckpt.storage.base import Changed, Directory, ObjectStore
from xla_ckpt.tags.entry import TagEntry
from xla_ckpt.tags.ledger_record import TRIES
from xla_ckpt.tags.names import NEW_PREFIX
from xla_ckpt.tags.retention import Retention

logger = get_logger(__name__)


@dataclass(slots=True, kw_only=True)
class Placed:
    """One that is being written, in place. Nothing was there.

    A file appears whole. By the marks that `Transaction.seal` writes last readers know that a directory is complete. A
    record ``.new-<name>``, made on the condition that there is none, keeps other writers away. That of a killed writer
    goes when somebody cleans up (`clean_placed` in `tags/ledger_cleaning.py`); the rest has to be removed by hand.
    """

    store: ObjectStore
    name: str
    directory: Directory
    sequence: int = 0
    newest: TagEntry | None = None
    is_open: bool = True

    @classmethod
    def begin(cls, store: ObjectStore, name: str, directory: Directory) -> Placed:
        """Begin to write one.

        Raises:
            UsageError: Something has the name, or is being written under it.
            OSError: The storage refused.
        """
        record, token = NEW_PREFIX + name, uuid.uuid4().hex.encode()
        try:
            store.write_record(record, token, None)
        except (Changed, OSError) as error:
            its = store.read_record(record)
            is_mine = its is not None and its[0] == token  # then only the answer was lost
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
        self.is_open = False  # it is complete: nothing that fails from here on may remove it
        self.directory.close()
        record = NEW_PREFIX + self.name
        for _ in range(TRIES):
            try:
                self.store.remove(record)
                break
            except OSError as error:
                logger.warning("%s: %s is complete, and %s stays: %s", self.store.path, self.name, record, error)
        return 0.0

    def abandon(self) -> None:
        if not self.is_open:
            return
        self.is_open = False
        self.directory.close()
        try:
            self.store.remove(self.name)  # before the record: whoever comes next finds nothing, or is refused
            self.store.remove(NEW_PREFIX + self.name)
        except OSError as error:
            logger.warning("%s: what was not finished of %s stays: %s", self.store.path, self.name, error)
