"""Leases: only one job at a time saves to a root.

The first save of a process acquires the lease, a background thread sends heartbeats, and the exit of the process
releases it. A lease of a dead process is taken over, at once if its lock is free, otherwise when its heartbeat has
expired. `DirectoryLease` stores it in a locked directory, `RecordLease` in a conditional record. Readers need no
lease.
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
"""The lease of a directory that shows no sign of life for so long (s) is taken over, unless its lock says that its
owner runs. A program may keep its threads from running for some seconds, while it compiles for instance.
"""

RECORD_EXPIRY_SECONDS = 30.0
"""The same in an object store. The ledger refuses whoever was taken over by mistake, so that it may be shorter."""

OWNER_FILE = "owner.json"
"""The file in the directory that says whose it is."""

MAX_OWNER_BYTES = 1 << 14
"""No more bytes of that file are read."""

FREE_RECORD = b"{}"
"""What the record of a lease says that nobody has: a record cannot be removed on a condition."""


class LeaseBackend(Protocol):
    """The place of one lease, which is there or is not. Methods raise OSError where the storage refuses."""

    @property
    def path(self) -> str:
        """The root, as users call it."""

    @property
    def expiry_seconds(self) -> float:
        """Seconds without a sign of life, after which the lease belongs to a process that does not run any more."""

    def read(self) -> bytes | None:
        """What the lease says, perhaps nothing that can be understood; None if nobody has it."""

    def get_lock_state(self) -> bool | None:
        """Whether somebody has a lock on it; None where there are no locks."""

    def take(self, owner: LeaseOwner) -> LeaseOwner | None:
        """Make the lease where there is none, and what it says then; None if another process was faster."""

    def write_heartbeat(self, owner: LeaseOwner) -> None:
        """Have the lease that this place took say something else. Nothing, if another process has taken it over."""

    def remove(self, token: str) -> None:
        """Remove the lease of the owner with this token ("": of an unknown one)."""

    def close(self) -> None:
        """Let go of what `take` holds open. The lease stays."""

    def find_successor(self, token: str, sequence: int) -> str | None:
        """Who has saved here instead of the owner with this token since the commit with that number, if one has."""


class DirectoryLease:
    """The lease of a root directory: a directory in it, with a file, and with a lock that ends with its owner."""

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
            # Another process has taken it over since it was looked at. It has it again, unless a third one was faster.
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
    def expiry_seconds(self) -> float:
        return RECORD_EXPIRY_SECONDS

    def read(self) -> bytes | None:
        record = self._store.read_record(LEASE_NAME)
        return None if record is None or record[0] == FREE_RECORD else record[0]

    def get_lock_state(self) -> None:
        """Nobody can tell."""

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
        """Write the record; False if somebody else has written it meanwhile."""
        try:
            self._store.write_record(LEASE_NAME, data, version)
        except (VersionConflict, OSError) as error:
            record = self._store.read_record(LEASE_NAME)  # it may be this write, whose answer was lost
            if record is not None and record[0] == data:
                return True
            if isinstance(error, OSError):
                raise
            return False
        return True

    def close(self) -> None:
        """Nothing is open."""

    def find_successor(self, token: str, sequence: int) -> str | None:
        return None if self._owner() in ("", token) else "a process that has ended since"


def _parse_token(data: bytes) -> str:
    owner = parse_owner(data)
    return owner.token if owner else ""


def _make_draft_name() -> str:
    """A name that nobody else uses. What a killed process leaves under it is cleaned up as an unfinished tag is."""
    return f"{DRAFT_PREFIX}{LEASE_NAME}-{uuid.uuid4().hex}"


HEARTBEAT_SECONDS = 5.0
"""Seconds between two signs of life."""

POLL_SECONDS = 0.2
"""Seconds between two looks at a lease that is watched."""

MAX_LEASES = 16
"""Roots whose leases a process has at a time. Each takes a thread, and a descriptor if it is a directory."""

LEASE_VARIABLE = "XLA_CKPT_LEASE"
"""Environment variable: ``take`` takes the lease from whoever has it, ``off`` saves without one."""


@dataclass(slots=True)
class _HeldLease:
    """A lease that this process has."""

    backend: LeaseBackend
    owner: LeaseOwner
    lock: threading.Lock = field(default_factory=fork_safe_lock)
    sequence: int | None = None
    """Number of the last commit that this process knows of; None if it knows nothing of commits yet."""

    released: Latch = field(default_factory=Latch)
    """Set when it is given back: nothing is written to it any more."""

    worker: Worker = field(default_factory=lambda: Worker("xla_ckpt-lease", daemon=True))
    """Says that this process runs."""

    last_heartbeat: float = field(default_factory=time.monotonic)
    """When that was said last."""

    def start_heartbeat(self) -> None:
        """Say again and again that this process runs, on a thread of its own: another storage may not answer.

        Without that thread the lease's lock says so, and where there are no locks, `LeaseRegistry.renew`.
        """
        self.worker.submit(self._run_heartbeat, self._log_heartbeat_failure)

    def _log_heartbeat_failure(self, error: BaseException) -> None:
        logger.warning("%s: from now on saves alone say that this process runs: %s", self.backend.path, error)

    def _run_heartbeat(self) -> None:
        while not self.released.wait(HEARTBEAT_SECONDS):
            self.send_heartbeat()

    def send_heartbeat(self) -> None:
        """Say that this process runs."""
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
    """The lease of another process, as it was when this one first saw it."""

    token: str
    data: bytes
    since: float = field(default_factory=time.monotonic)


class LeaseRegistry:
    """The leases of this process."""

    def __init__(self) -> None:
        self._lock = fork_safe_lock()
        self._held_leases: dict[str, _HeldLease] = {}
        self._lost: dict[str, str] = {}
        """Root -> who has taken over the lease that this process had there."""

        self._leaseless_roots: set[str] = set()
        """Roots where another user's lease lies, and who runs this has been told so."""

        self._observed: dict[str, _ObservedLease] = {}
        self._jobs: dict[str, frozenset[str]] = {}
        """Root -> the tokens of the processes of the job that saves there with this one."""

    def share_with(self, path: str, tokens: Iterable[str]) -> None:
        """Take these processes' leases of a root for leases of this one: they are one job, on several hosts."""
        self._jobs[path] = frozenset(tokens)

    def _is_own(self, path: str, owner: LeaseOwner) -> bool:
        """Whether a root's owner is this process, one of its job, or one that started it, or that it has started."""
        me = get_process_identity()
        is_of_job = owner.token in (me.token, *self._jobs.get(path, ()))
        return is_of_job or (owner.host == me.host and is_related(owner.pid, owner.started))

    def acquire(self, backend: LeaseBackend, within: float, check: Callable[[], object]) -> str | None:
        """Have the lease of a root. Waits until it is clear whether another process has it.

        Args:
            backend: Where it lies. The root exists.
            within: Seconds to wait at most.
            check: Is called while this waits, and raises to end the wait.

        Returns:
            The token of the process whose lease it is, this one or one of its job; None if it saves without a lease.

        Raises:
            RootInUseError: Another process saves there, or nobody can tell in that time whether it still runs.
            UsageError: The environment variable has a value that means nothing.
            OSError: The storage refused.
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
                        self._held_leases[path] = lease  # the last one to be given back
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
        """Make sure, before a tag is committed with this number, that the lease has not been taken over meanwhile.

        Raises:
            RootInUseError: It has.
            OSError: The storage refused.
        """
        if (lease := self._held_leases.get(path)) is not None:
            self._detect_loss(lease, sequence - 1, lease.backend.read())
            if lease.released.is_set():
                raise self._make_refusal(path, None)

    def record_commit(self, path: str, tag: str, sequence: int) -> None:
        """Keep in mind what was saved last ("": not by this job). The lease says so from its next sign of life on."""
        if (lease := self._held_leases.get(path)) is not None:
            with lease.lock:
                lease.owner, lease.sequence = replace(lease.owner, saved=tag or lease.owner.saved), sequence

    def renew(self, path: str) -> None:
        """Say that this process runs, if no thread does so and it is time: whoever writes calls this between parts."""
        lease = self._held_leases.get(path)
        if (
            lease is not None
            and not lease.worker.is_running
            and time.monotonic() - lease.last_heartbeat >= HEARTBEAT_SECONDS
        ):
            lease.send_heartbeat()

    def release_all(self) -> None:
        """Give all leases back: the process ends, or will not save there any more."""
        with self._lock:
            leases, self._held_leases = list(self._held_leases.values()), {}
        for lease in leases:
            lease.release()

    def reset_after_fork(self) -> None:
        """In a forked process: the leases are those of its parent, and so is their heartbeat."""
        leases = self._held_leases
        self.__init__()  # type: ignore[misc]
        for lease in leases.values():
            # As long as a descriptor is open, the lock says that the parent runs.
            lease.backend.close()

    def _observe(self, backend: LeaseBackend, data: bytes | None) -> LeaseObservation | None:
        """The lease, of which `data` was read just now; None if there is none."""
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
        """Take a lease where there is none; False if another process was faster."""
        owner = backend.take(LeaseOwner(**asdict(get_process_identity()), since=_format_now(), locked=False))
        if owner is None:
            return False
        lease = _HeldLease(backend, owner)
        with self._lock:
            gone = self._held_leases.pop(backend.path, None)  # somebody has removed the root, and that lease with it
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
        """Remove the lease of a process that does not run any more; False if this user may not."""
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
        """Find out whether another process has taken over a lease, also one that has given it back since.

        `data` is what the lease says now. Then there is a successor. Without any, somebody has removed the lease, or
        all of the root, and nothing is in the way.
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
"""The leases of this process."""
