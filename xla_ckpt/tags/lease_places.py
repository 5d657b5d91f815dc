"""Where the lease of a root lies: a directory with a lock on file systems, a record in object stores."""

from __future__ import annotations

import errno
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from xla_ckpt.errors import NotAFileError
from xla_ckpt.logs import get_logger
from xla_ckpt.storage.base import Changed, FileSystem, LocalFiles, ObjectStore
from xla_ckpt.tags.cleaning import check_is_directory, remove
from xla_ckpt.tags.lease_rules import Owner, owner_of
from xla_ckpt.tags.ledger_record import TRIES
from xla_ckpt.tags.listing import entries
from xla_ckpt.tags.names import LEASE, NEW_PREFIX

logger = get_logger(__name__)

DIRECTORY_SILENCE = 60.0
"""The lease of a directory that shows no sign of life for so long (s) is taken over, unless its lock says that its
owner runs. A program may keep its threads from running for some seconds, while it compiles for instance.
"""

RECORD_SILENCE = 30.0
"""The same in an object store. The ledger refuses whoever was taken over by mistake, so that it may be shorter."""

OWNER = "owner.json"
"""The file in the directory that says whose it is."""

MAX_OWNER = 1 << 14
"""No more bytes of that file are read."""

FREE = b"{}"
"""What the record of a lease says that nobody has: a record cannot be removed on a condition."""


class LeasePlace(Protocol):
    """The place of one lease, which is there or is not. Methods raise OSError where the storage refuses."""

    @property
    def path(self) -> str:
        """The root, as users call it."""

    @property
    def silence(self) -> float:
        """Seconds without a sign of life, after which the lease belongs to a process that does not run any more."""

    def read(self) -> bytes | None:
        """What the lease says, perhaps nothing that can be understood; None if nobody has it."""

    def locked(self) -> bool | None:
        """Whether somebody has a lock on it; None where there are no locks."""

    def take(self, owner: Owner) -> Owner | None:
        """Make the lease where there is none, and what it says then; None if another process was faster."""

    def beat(self, owner: Owner) -> None:
        """Have the lease that this place took say something else. Nothing, if another process has taken it over."""

    def remove(self, token: str) -> None:
        """Remove the lease of the owner with this token ("": of an unknown one)."""

    def close(self) -> None:
        """Let go of what `take` holds open. The lease stays."""

    def successor(self, token: str, sequence: int) -> str | None:
        """Who has saved here instead of the owner with this token since the commit with that number, if one has."""


class LeaseDirectory:
    """The lease of a root directory: a directory in it, with a file, and with a lock that ends with its owner."""

    def __init__(self, store: FileSystem) -> None:
        self._store = store
        self._directory: LocalFiles | None = None

    @property
    def path(self) -> str:
        return self._store.path

    @property
    def silence(self) -> float:
        return DIRECTORY_SILENCE

    def read(self) -> bytes | None:
        check_is_directory(self._store, LEASE)
        return self._read(LEASE)

    def _read(self, name: str) -> bytes | None:
        try:
            return self._store.start_of(f"{name}/{OWNER}", MAX_OWNER, links=False)
        except (FileNotFoundError, NotAFileError):
            return b"" if self._store.has(name) else None

    def locked(self) -> bool | None:
        return self._store.held(LEASE)

    def take(self, owner: Owner) -> Owner | None:
        directory = self._store.make(_new_name())
        try:
            owner = replace(owner, locked=self._store.held(directory.name) is True)
            directory.replace(OWNER, owner.to_json())
            self._store.rename(directory.name, LEASE)
        except OSError as error:
            directory.close()
            remove(self._store, directory.name)
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            return None
        self._directory = directory
        return owner

    def beat(self, owner: Owner) -> None:
        assert self._directory is not None, "only a lease that was taken beats"
        self._directory.replace(OWNER, owner.to_json())

    def remove(self, token: str) -> None:
        place = _new_name()
        try:
            self._store.rename(LEASE, place)
        except FileNotFoundError:
            return  # another process was faster
        if _token_of(self._read(place) or b"") != token:
            # Another process has taken it over since it was looked at. It has it again, unless a third one was faster.
            try:
                self._store.rename(place, LEASE)
            except OSError as error:
                logger.debug("%s: two leases were taken at once: %s", self.path, error)
            else:
                return
        remove(self._store, place)

    def close(self) -> None:
        if self._directory is not None:
            self._directory.close()

    def successor(self, token: str, sequence: int) -> str | None:
        newer = [entry.tag for entry in entries(self._store) if entry.sequence > sequence]
        return f"tag {newer[-1]}, which another process has saved since" if newer else None


class LeaseRecord:
    """The lease of a root in an object store: a record, which is replaced by whoever has read it as it is.

    Args:
        store: The root.
        owner: Gives the token of the lease under which the ledger was taken last.
    """

    def __init__(self, store: ObjectStore, owner: Callable[[], str]) -> None:
        self._store, self._owner = store, owner

    @property
    def path(self) -> str:
        return self._store.path

    @property
    def silence(self) -> float:
        return RECORD_SILENCE

    def read(self) -> bytes | None:
        record = self._store.read_record(LEASE)
        return None if record is None or record[0] == FREE else record[0]

    def locked(self) -> None:
        """Nobody can tell."""

    def take(self, owner: Owner) -> Owner | None:
        record = self._store.read_record(LEASE)
        if record is not None and record[0] != FREE:
            return None
        return owner if self._write(owner.to_json(), None if record is None else record[1]) else None

    def beat(self, owner: Owner) -> None:
        self._replace(owner.token, owner.to_json())

    def remove(self, token: str) -> None:
        self._replace(token, FREE)

    def _replace(self, token: str, data: bytes) -> None:
        for _ in range(TRIES):
            record = self._store.read_record(LEASE)
            if record is None or record[0] == FREE or _token_of(record[0]) != token:
                return
            if self._write(data, record[1]):
                return

    def _write(self, data: bytes, version: str | None) -> bool:
        """Write the record; False if somebody else has written it meanwhile."""
        try:
            self._store.write_record(LEASE, data, version)
        except (Changed, OSError) as error:
            record = self._store.read_record(LEASE)  # it may be this write, whose answer was lost
            if record is not None and record[0] == data:
                return True
            if isinstance(error, OSError):
                raise
            return False
        return True

    def close(self) -> None:
        """Nothing is open."""

    def successor(self, token: str, sequence: int) -> str | None:
        return None if self._owner() in ("", token) else "a process that has ended since"


def _token_of(data: bytes) -> str:
    owner = owner_of(data)
    return owner.token if owner else ""


def _new_name() -> str:
    """A name that nobody else uses. What a killed process leaves under it is cleaned up as an unfinished tag is."""
    return f"{NEW_PREFIX}{LEASE}-{uuid.uuid4().hex}"
