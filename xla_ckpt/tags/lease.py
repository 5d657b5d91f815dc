"""Leases: only one job at a time saves to a root.

The first save of a process acquires the lease, a background thread sends heartbeats, and the exit of the process
releases it. A lease of a dead process is taken over, at once if its lock is free, otherwise when its heartbeat has
expired. `DirectoryLease` stores it in a locked directory, `RecordLease` in a conditional record. Readers need no lease.
"""

from __future__ import annotations

import datetime
import errno
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Protocol

from xla_ckpt.errors import NotAFileError, RootInUseError, UsageError
from xla_ckpt.logs import get_logger
from xla_ckpt.storage.base import FileSystem, FileSystemDirectory, ObjectStore, VersionConflict
from xla_ckpt.storage.process_state import fork_safe_lock, register_fork_reset
from xla_ckpt.storage.synchronization import Latch
from xla_ckpt.storage.system_info import get_env, get_process_identity, is_related
from xla_ckpt.storage.threads import Worker
from xla_ckpt.tags.directory_operations import check_is_directory, remove_directory
from xla_ckpt.tags.entry import DRAFT_PREFIX, LEASE_NAME
from xla_ckpt.tags.lease_rules import LeaseObservation, LeaseOwner, decide_lease, parse_owner
from xla_ckpt.tags.ledger_record import WRITE_ATTEMPTS
from xla_ckpt.tags.listing import list_entries

logger = get_logger(__name__)

DIRECTORY_EXPIRY_SECONDS = 60.0
"""Time without a heartbeat after which the lease of a directory is taken over (s), unless its lock is held.

A program may block its threads for some seconds, for example during compilation.
"""

RECORD_EXPIRY_SECONDS = 30.0
"""Expiry in an object store (s). It may be shorter, because the ledger rejects a process that lost its lease by
mistake.
"""

OWNER_FILE = "owner.json"
"""File in the lease directory that describes the owner."""

MAX_OWNER_BYTES = 1 << 14
"""Maximum number of bytes read from that file."""

FREE_RECORD = b"{}"
"""Contents of the record of a free lease, because a record cannot be deleted conditionally."""


class LeaseBackend(Protocol):
    """Storage of one lease. Methods raise OSError if the storage fails."""

    @property
    def path(self) -> str:
        """Path or address of the root, as users write it."""

    @property
    def expiry_seconds(self) -> float:
        """Seconds without a heartbeat after which the owner of the lease is considered dead."""

    def read(self) -> bytes | None:
        """Return the contents of the lease, which may be corrupt, or None if it is free."""

    def get_lock_state(self) -> bool | None:
        """Return True if a process holds a lock on it, or None if locks are unsupported."""

    def take(self, owner: LeaseOwner) -> LeaseOwner | None:
        """Create the lease if it is free, and return its owner record; return None if another process was faster."""

    def write_heartbeat(self, owner: LeaseOwner) -> None:
        """Update the lease acquired through this object. Does nothing if another process has taken it over."""

    def remove(self, token: str) -> None:
        """Remove the lease of the owner with this token ("" if the owner is unknown)."""

    def close(self) -> None:
        """Release resources held since `take`. The lease stays."""

    def find_successor(self, token: str, sequence: int) -> str | None:
        """Return a description of a process that has saved since commit `sequence` of the owner with this token, or
        None.
        """


class DirectoryLease:
    """The lease of a root directory: a directory in it with a file, and a lock that ends with its owner."""

    def __init__(self, store: FileSystem) -> None:
        self._store = store
        self._directory: FileSystemDirectory | None = None

    @property
    def path(self) -> str:
        return self._store.path

    @property
    def expiry_seconds(self) -> float:
        return DIRECTORY_EXPIRY_SECONDS

    def read(self) -> bytes | None:
        check_is_directory(self._store, LEASE_NAME)
        return self._read(LEASE_NAME)

    def _read(self, name: str) -> bytes | None:
        try:
            return self._store.read_start(f"{name}/{OWNER_FILE}", MAX_OWNER_BYTES, links=False)
        except (FileNotFoundError, NotAFileError):
            return b"" if self._store.has(name) else None

    def get_lock_state(self) -> bool | None:
        return self._store.get_lock_state(LEASE_NAME)

    def take(self, owner: LeaseOwner) -> LeaseOwner | None:
        directory = self._store.make_directory(_make_draft_name())
        try:
            owner = replace(owner, locked=self._store.get_lock_state(directory.name) is True)
            directory.write_atomic(OWNER_FILE, owner.to_json())
            self._store.rename(directory.name, LEASE_NAME)
        except OSError as error:
            directory.close()
            remove_directory(self._store, directory.name)
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            return None
        self._directory = directory
        return owner

    def write_heartbeat(self, owner: LeaseOwner) -> None:
        assert self._directory is not None, "only a lease that was taken beats"
        self._directory.write_atomic(OWNER_FILE, owner.to_json())

    def remove(self, token: str) -> None:
        place = _make_draft_name()
        try:
            self._store.rename(LEASE_NAME, place)
        except FileNotFoundError:
            return  # another process was faster
        if _parse_token(self._read(place) or b"") != token:
            # Another process has taken it over since the check. Rename it back, unless a third process was faster.
            try:
                self._store.rename(place, LEASE_NAME)
            except OSError as error:
                logger.debug("%s: two leases were taken at once: %s", self.path, error)
            else:
                return
        remove_directory(self._store, place)

    def close(self) -> None:
        if self._directory is not None:
            self._directory.close()

    def find_successor(self, token: str, sequence: int) -> str | None:
        newer = [entry.tag for entry in list_entries(self._store) if entry.sequence > sequence]
        return f"tag {newer[-1]}, which another process has saved since" if newer else None


class RecordLease:
    """The lease of a root in an object store: a record that is replaced with conditional writes.

    Args:
        store: The root.
        owner: Return the token of the last owner of the ledger.
    """

    def __init__(self, store: ObjectStore, owner: Callable[[], str]) -> None:
        self._store, self._owner = store, owner

    @property
    def path(self) -> str:
        return self._store.path

    @property
    def expiry_seconds(self) -> float:
        return RECORD_EXPIRY_SECONDS

    def read(self) -> bytes | None:
        record = self._store.read_record(LEASE_NAME)
        return None if record is None or record[0] == FREE_RECORD else record[0]

    def get_lock_state(self) -> None:
        """Return None: object stores have no locks."""

    def take(self, owner: LeaseOwner) -> LeaseOwner | None:
        record = self._store.read_record(LEASE_NAME)
        if record is not None and record[0] != FREE_RECORD:
            return None
        return owner if self._write(owner.to_json(), None if record is None else record[1]) else None

    def write_heartbeat(self, owner: LeaseOwner) -> None:
        self._replace(owner.token, owner.to_json())

    def remove(self, token: str) -> None:
        self._replace(token, FREE_RECORD)

    def _replace(self, token: str, data: bytes) -> None:
        for _ in range(WRITE_ATTEMPTS):
            record = self._store.read_record(LEASE_NAME)
            if record is None or record[0] == FREE_RECORD or _parse_token(record[0]) != token:
                return
            if self._write(data, record[1]):
                return

    def _write(self, data: bytes, version: str | None) -> bool:
        """Write the record. Return False if another process has written it in the meantime."""
        try:
            self._store.write_record(LEASE_NAME, data, version)
        except (VersionConflict, OSError) as error:
            record = self._store.read_record(LEASE_NAME)  # this write may have succeeded, with its response lost
            if record is not None and record[0] == data:
                return True
            if isinstance(error, OSError):
                raise
            return False
        return True

    def close(self) -> None:
        """Do nothing: no resource is held."""

    def find_successor(self, token: str, sequence: int) -> str | None:
        return None if self._owner() in ("", token) else "a process that has ended since"


def _parse_token(data: bytes) -> str:
    owner = parse_owner(data)
    return owner.token if owner else ""


def _make_draft_name() -> str:
    """Return a unique name. If the process is killed, it is cleaned up like a draft."""
    return f"{DRAFT_PREFIX}{LEASE_NAME}-{uuid.uuid4().hex}"


HEARTBEAT_SECONDS = 5.0
"""Seconds between two heartbeats."""

POLL_SECONDS = 0.2
"""Seconds between two checks of an observed lease."""

MAX_LEASES = 16
"""Maximum number of leases of one process. Each uses a thread, and in a directory also a descriptor."""

LEASE_VARIABLE = "XLA_CKPT_LEASE"
"""Environment variable: ``take`` takes over the lease from any owner, ``off`` saves without a lease."""


@dataclass(slots=True)
class _HeldLease:
    """A lease held by this process."""

    backend: LeaseBackend
    owner: LeaseOwner
    lock: threading.Lock = field(default_factory=fork_safe_lock)
    sequence: int | None = None
    """Number of the last commit known to this process; None if unknown."""

    released: Latch = field(default_factory=Latch)
    """Set when the lease is released, after which it is not written any more."""

    worker: Worker = field(default_factory=lambda: Worker("xla_ckpt-lease", daemon=True))
    """Background thread that sends heartbeats."""

    last_heartbeat: float = field(default_factory=time.monotonic)
    """Time of the last heartbeat (s of `time.monotonic`)."""

    def start_heartbeat(self) -> None:
        """Start sending heartbeats on a background thread.

        Each lease has its own thread, because a storage may hang. If the thread cannot be started, the lock of the
        lease, or `LeaseRegistry.renew` on a file system without locks, shows that this process is running.
        """
        self.worker.submit(self._run_heartbeat, self._log_heartbeat_failure)

    def _log_heartbeat_failure(self, error: BaseException) -> None:
        logger.warning("%s: from now on saves alone say that this process runs: %s", self.backend.path, error)

    def _run_heartbeat(self) -> None:
        while not self.released.wait(HEARTBEAT_SECONDS):
            self.send_heartbeat()

    def send_heartbeat(self) -> None:
        """Write a heartbeat, unless the lease was released."""
        with self.lock:
            if self.released.is_set():
                return
            self.owner, self.last_heartbeat = replace(self.owner, beat=self.owner.beat + 1), time.monotonic()
            try:
                self.backend.write_heartbeat(self.owner)
            except OSError as error:
                logger.debug("%s: no sign of life could be written: %s", self.backend.path, error)

    def close(self) -> None:
        with self.lock:
            self.released.set()
            self.backend.close()

    def release(self) -> None:
        self.close()
        try:
            self.backend.remove(self.owner.token)
        except OSError as error:
            logger.debug("%s: the lease stays, for others to take over: %s", self.backend.path, error)


@dataclass(slots=True)
class _ObservedLease:
    """The lease of another process when this process first observed it."""

    token: str
    data: bytes
    since: float = field(default_factory=time.monotonic)


class LeaseRegistry:
    """The leases of this process."""

    def __init__(self) -> None:
        self._lock = fork_safe_lock()
        self._held_leases: dict[str, _HeldLease] = {}
        self._lost: dict[str, str] = {}
        """Root -> description of the process that has taken over this process's lease."""

        self._leaseless_roots: set[str] = set()
        """Roots with another user's lease, for which a warning was logged."""

        self._observed: dict[str, _ObservedLease] = {}
        self._jobs: dict[str, frozenset[str]] = {}
        """Root -> tokens of the processes of this process's job."""

    def share_with(self, path: str, tokens: Iterable[str]) -> None:
        """Treat leases of these processes for a root as leases of this process, because they are one job."""
        self._jobs[path] = frozenset(tokens)

    def _is_own(self, path: str, owner: LeaseOwner) -> bool:
        """Return True if the owner is this process, a process of its job, an ancestor or a descendant."""
        me = get_process_identity()
        is_of_job = owner.token in (me.token, *self._jobs.get(path, ()))
        return is_of_job or (owner.host == me.host and is_related(owner.pid, owner.started))

    def acquire(self, backend: LeaseBackend, within: float, check: Callable[[], object]) -> str | None:
        """Acquire the lease of a root, waiting until it is known if another process holds it.

        Args:
            backend: Storage of the lease. The root must exist.
            within: Maximum seconds to wait.
            check: Called repeatedly during the wait; an exception ends the wait.

        Returns:
            The token of the owner, which is this process or one of its job; None if saving without a lease.

        Raises:
            RootInUseError: Another process saves to this root, or it is still unknown if its owner is running.
            UsageError: The environment variable has an invalid value.
            OSError: The storage failed.
        """
        orders = get_env(LEASE_VARIABLE)
        if orders not in ("", "take", "off"):
            raise UsageError(
                f"no such value of {LEASE_VARIABLE}", expected="'take', 'off', or none at all", found=repr(orders)
            )
        if orders == "off":
            return None
        path, until, warned = backend.path, time.monotonic() + within, False
        while True:
            data = backend.read()
            if (lease := self._held_leases.get(path)) is not None and lease.sequence is not None:
                self._detect_loss(lease, lease.sequence, data)
            sight = self._observe(backend, data)
            verdict = decide_lease(
                sight, expiry_seconds=backend.expiry_seconds, was_lost=path in self._lost, forced=orders == "take"
            )
            if verdict == "share":
                assert sight is not None
                assert sight.owner is not None, "by its owner a lease is known as this process's"
                with self._lock:
                    if (lease := self._held_leases.pop(path, None)) is not None:
                        self._held_leases[path] = lease  # moves it to the end: released last
                return sight.owner.token
            if verdict == "take":
                if self._take(backend):
                    return get_process_identity().token
                continue
            if sight is None or verdict == "refuse" or time.monotonic() + POLL_SECONDS > until:
                raise self._make_refusal(path, sight)
            if verdict == "take over":
                if not self._take_over(backend, sight):
                    return None
                continue
            if not warned:
                warned = True
                logger.warning(
                    "%s: waiting to see whether its last owner still runs, for at most %.0f s: %s. While it runs, it "
                    "says so every %.0f s. With %s=take in the environment a job does not wait, and takes it over",
                    path,
                    backend.expiry_seconds,
                    sight.owner or "an unknown process",
                    HEARTBEAT_SECONDS,
                    LEASE_VARIABLE,
                )
            check()
            time.sleep(POLL_SECONDS)

    def check(self, path: str, sequence: int) -> None:
        """Raise an error if the lease has been taken over, before a tag is committed with this number.

        Raises:
            RootInUseError: The lease was taken over.
            OSError: The storage failed.
        """
        if (lease := self._held_leases.get(path)) is not None:
            self._detect_loss(lease, sequence - 1, lease.backend.read())
            if lease.released.is_set():
                raise self._make_refusal(path, None)

    def record_commit(self, path: str, tag: str, sequence: int) -> None:
        """Record the last commit ("" as the tag if it was not by this job). The next heartbeat contains it."""
        if (lease := self._held_leases.get(path)) is not None:
            with lease.lock:
                lease.owner, lease.sequence = replace(lease.owner, saved=tag or lease.owner.saved), sequence

    def renew(self, path: str) -> None:
        """Send a heartbeat if it is due and no thread sends it. Writers call this between parts."""
        lease = self._held_leases.get(path)
        if (
            lease is not None
            and not lease.worker.is_running
            and time.monotonic() - lease.last_heartbeat >= HEARTBEAT_SECONDS
        ):
            lease.send_heartbeat()

    def release_all(self) -> None:
        """Release all leases, at exit or when this process no longer saves."""
        with self._lock:
            leases, self._held_leases = list(self._held_leases.values()), {}
        for lease in leases:
            lease.release()

    def reset_after_fork(self) -> None:
        """Drop all leases in a forked process. They belong to the parent, which sends their heartbeats."""
        leases = self._held_leases
        self.__init__()  # type: ignore[misc]
        for lease in leases.values():
            # While a descriptor is open, the lock would indicate that the parent is running.
            lease.backend.close()

    def _observe(self, backend: LeaseBackend, data: bytes | None) -> LeaseObservation | None:
        """Return an observation of the lease with contents `data`, or None if it is free."""
        if data is None:
            self._observed.pop(backend.path, None)
            return None
        owner = parse_owner(data)
        if owner is not None and self._is_own(backend.path, owner):
            return LeaseObservation(owner=owner, is_locked=None, is_own=True)
        watch = self._observed.get(backend.path)
        if watch is None or watch.token != (owner.token if owner else ""):
            watch = self._observed[backend.path] = _ObservedLease(owner.token if owner else "", data)
        return LeaseObservation(
            owner=owner,
            is_locked=backend.get_lock_state(),
            is_local=owner is not None and owner.host == get_process_identity().host,
            has_changed=data != watch.data,
            observed_seconds=time.monotonic() - watch.since,
        )

    def _take(self, backend: LeaseBackend) -> bool:
        """Take a free lease. Return False if another process was faster."""
        owner = backend.take(LeaseOwner(**asdict(get_process_identity()), since=_format_now(), locked=False))
        if owner is None:
            return False
        lease = _HeldLease(backend, owner)
        with self._lock:
            gone = self._held_leases.pop(backend.path, None)  # the root was removed, together with that lease
            self._held_leases[backend.path] = lease
            too_many = [self._held_leases.pop(path) for path in list(self._held_leases)[:-MAX_LEASES]]
            self._lost.pop(backend.path, None)
        lease.start_heartbeat()
        if gone is not None:
            gone.close()
        for other in too_many:
            other.release()
        return True

    def _take_over(self, backend: LeaseBackend, observation: LeaseObservation) -> bool:
        """Remove the lease of a dead process. Return False if this user lacks the permission."""
        gone = observation.is_local and observation.is_locked is False
        try:
            backend.remove(observation.owner.token if observation.owner else "")
        except PermissionError as error:
            if backend.path not in self._leaseless_roots:
                self._leaseless_roots.add(backend.path)
                logger.warning(
                    "%s: saving without a lease, that of %s stays: %s", backend.path, observation.owner, error
                )
            return False
        logger.log(
            logging.INFO if gone else logging.WARNING,
            "%s: taking over the lease of %s, %s",
            backend.path,
            observation.owner or "an unknown process",
            "which has ended" if gone else f"not heard of for {observation.observed_seconds:.0f} s",
        )
        return True

    def _detect_loss(self, lease: _HeldLease, sequence: int, data: bytes | None) -> None:
        """Detect if another process has taken over a lease, even if it has released it since.

        `data` is the current content of the lease. A released lease has a successor in the commits. Without one, the
        lease or the root was removed, which is not a conflict.
        """
        owner = parse_owner(data) if data else None
        if owner is not None and not self._is_own(lease.backend.path, owner):
            taker = str(owner)
        elif data is None and (successor := lease.backend.find_successor(lease.owner.token, sequence)) is not None:
            taker = successor
        else:
            return
        with self._lock:
            self._lost[lease.backend.path] = taker
            self._held_leases.pop(lease.backend.path, None)
        lease.close()

    def _make_refusal(self, path: str, observation: LeaseObservation | None) -> RootInUseError:
        taker = self._lost.get(path)
        if taker is not None:
            return RootInUseError(
                "another process has taken over the lease of this root: nothing is saved there any more",
                path=path,
                found=taker,
                hint="It was stopped or silent for long, or had to yield. Start it again to go on from the newest tag.",
            )
        owner = (
            "a lease that cannot be read"
            if observation is None or observation.owner is None
            else str(observation.owner)
        )
        if observation is not None and observation.has_changed:
            owner += (
                f"; it was watched for {observation.observed_seconds:.1f} s, and has said in that time that it runs"
            )
        return RootInUseError(
            "another process saves to this root",
            path=path,
            found=owner,
            hint="Save to another root, or end that process. With "
            f"{LEASE_VARIABLE}=take in its environment, this job saves there, and that one no more; with "
            f"{LEASE_VARIABLE}=off for both, two share it, under different tags.",
        )


def _format_now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


LEASES = register_fork_reset(LeaseRegistry(), LeaseRegistry.reset_after_fork)
"""Leases of this process."""
