"""The lease of a root directory: one job saves there, and a second one by mistake is told before it changes anything.

The first save of a process takes the lease, a directory ``.lease`` in the root directory; a thread keeps it alive, and
the end of the process gives it back. What a killed process left is taken over: at once where its lock is seen to be
free, else when it has been silent for `SILENCE`. Readers need no lease, nor do calls that work on single tags.
"""

from __future__ import annotations

import datetime
import errno
import logging
import threading
import time
import uuid
from dataclasses import asdict, dataclass, field, replace

from xla_ckpt.errors import NotAFileError, RootInUseError, UsageError
from xla_ckpt.storage.base import FileSystem, LocalFiles
from xla_ckpt.storage.this_process import after_fork, is_kin, setting, this_process
from xla_ckpt.tags.cleaning import remove
from xla_ckpt.tags.lease_rules import Owner, Sight, decide, owner_of
from xla_ckpt.tags.listing import entries
from xla_ckpt.tags.names import LEASE, NEW_PREFIX

logger = logging.getLogger(__name__)

BEAT = 10.0
"""Seconds between two signs of life."""

SILENCE = 60.0
"""A lease without a sign of life for so long (s) is taken over, unless its lock says that its owner runs.

A program may keep its threads from running for some seconds, while it compiles for instance.
"""

LOOK = 0.2
"""Seconds between two looks at a lease that is watched."""

KEPT_LEASES = 16
"""Root directories whose leases a process has at a time. Each takes a descriptor."""

OWNER = "owner.json"
"""The file in it that says whose it is."""

MAX_OWNER = 1 << 14
"""No more bytes of that file are read."""

LEASE_VARIABLE = "XLA_CKPT_LEASE"
"""Environment variable: ``take`` takes the lease from whoever has it, ``off`` saves without one."""


@dataclass(slots=True)
class _Held:
    """A lease that this process has."""

    store: FileSystem
    directory: LocalFiles
    owner: Owner
    lock: threading.Lock = field(default_factory=threading.Lock)
    sequence: int = 0
    """Commit number of the tag that was saved last; 0 if none was."""

    over: bool = False
    """Whether it is given back: nothing is written to it any more."""

    def beat(self) -> None:
        """Say that this process runs."""
        with self.lock:
            if not self.over:
                self.owner = replace(self.owner, beat=self.owner.beat + 1)
                self.directory.replace(OWNER, self.owner.to_json())

    def end(self) -> None:
        with self.lock:
            self.over = True
            self.directory.close()


@dataclass(slots=True)
class _Watch:
    """The lease of another process, as it was when this one first saw it."""

    token: str
    data: bytes
    began: float = field(default_factory=time.monotonic)


class Leases:
    """The leases of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[str, _Held] = {}
        self._lost: dict[str, str] = {}
        """Root directory -> who has taken over the lease that this process had there."""

        self._without: set[str] = set()
        """Root directories where another user's lease lies, and who runs this has been told so."""

        self._watched: dict[str, _Watch] = {}
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def hold(self, store: FileSystem, within: float) -> None:
        """Have the lease of a root directory, which exists. Waits until it is clear whether another process has it.

        Args:
            store: The root directory.
            within: Seconds to wait at most.

        Raises:
            RootInUseError: Another process saves there, or nobody can tell in that time whether it still runs.
            UsageError: The environment variable has a value that means nothing.
            OSError: The storage refused.
        """
        orders = setting(LEASE_VARIABLE)
        if orders not in ("", "take", "off"):
            raise UsageError(
                f"no such value of {LEASE_VARIABLE}", expected="'take', 'off', or none at all", found=repr(orders)
            )
        if orders == "off":
            return
        if (lease := self._held.get(store.path)) is not None and lease.sequence:
            self._find_loss(store, lease, lease.sequence)
        until, warned = time.monotonic() + within, False
        while True:
            sight = self._look(store)
            verdict = decide(sight, silence=SILENCE, lost=store.path in self._lost, by_force=orders == "take")
            if verdict == "share":
                with self._lock:
                    if (lease := self._held.pop(store.path, None)) is not None:
                        self._held[store.path] = lease  # the last one to be given back
                return
            if verdict == "take":
                if self._take(store):
                    return
                continue
            if sight is None or verdict == "refuse" or time.monotonic() + LOOK > until:
                raise self._refusal(store, sight.owner if sight else None)
            if verdict == "take over":
                if not self._take_over(store, sight):
                    return
                continue
            if not warned:
                warned = True
                logger.warning("%s: waiting to see whether its last owner still runs: %s", store.path, sight.owner)
            time.sleep(LOOK)

    def check(self, store: FileSystem, sequence: int) -> None:
        """Make sure, before a tag is committed with this number, that the lease has not been taken over meanwhile.

        Raises:
            RootInUseError: It has.
            OSError: The storage refused.
        """
        if (lease := self._held.get(store.path)) is not None:
            self._find_loss(store, lease, sequence - 1)
            if lease.over:
                raise self._refusal(store, None)

    def note(self, store: FileSystem, tag: str, sequence: int) -> None:
        """Keep in mind what was saved last. The lease says so from its next sign of life on."""
        if (lease := self._held.get(store.path)) is not None:
            with lease.lock:
                lease.owner, lease.sequence = replace(lease.owner, saved=tag), sequence

    def give_back(self) -> None:
        """Give all leases back: the process ends, or will not save there any more."""
        self._end.set()
        with self._lock:
            leases, self._held = list(self._held.values()), {}
        for lease in leases:
            _give_back(lease)

    def forked(self) -> None:
        """What a forked process does first: the leases are those of its parent, and so is their heartbeat."""
        leases = self._held
        self.__init__()  # type: ignore[misc]  # the locks may have been taken by threads that the child does not have
        for lease in leases.values():
            # As long as a descriptor is open, the lock says that the parent runs.
            lease.directory.close()

    def _look(self, store: FileSystem) -> Sight | None:
        """The lease as it is now; None if there is none."""
        data = _read(store, LEASE)
        if data is None:
            self._watched.pop(store.path, None)
            return None
        owner = owner_of(data)
        if owner is not None and _is_mine(owner):
            return Sight(owner=owner, locked=None, mine=True)
        watch = self._watched.get(store.path)
        if watch is None or watch.token != (owner.token if owner else ""):
            watch = self._watched[store.path] = _Watch(owner.token if owner else "", data)
        return Sight(
            owner=owner,
            locked=store.held(LEASE),
            here=owner is not None and owner.host == this_process().host,
            changed=data != watch.data,
            watched=time.monotonic() - watch.began,
        )

    def _take(self, store: FileSystem) -> bool:
        """Take a lease where there is none; False if another process was faster."""
        me = this_process()
        directory = store.make(_new_name())
        try:
            owner = Owner(**asdict(me), since=_now(), locked=store.held(directory.name) is True)
            directory.replace(OWNER, owner.to_json())
            store.rename(directory.name, LEASE)
        except OSError as error:
            directory.close()
            remove(store, directory.name)
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            return False
        with self._lock:
            gone = self._held.pop(store.path, None)  # somebody has removed the root directory, and that lease with it
            self._held[store.path] = _Held(store, directory, owner)
            too_many = [self._held.pop(path) for path in list(self._held)[:-KEPT_LEASES]]
            self._lost.pop(store.path, None)
            if self._thread is None:
                self._thread = threading.Thread(target=self._beat, name="xla_ckpt-lease", daemon=True)
                self._thread.start()
        if gone is not None:
            gone.end()
        for lease in too_many:
            _give_back(lease)
        return True

    def _take_over(self, store: FileSystem, sight: Sight) -> bool:
        """Remove the lease of a process that does not run any more; False if this user may not."""
        gone = sight.here and sight.locked is False
        try:
            _move_away(store, sight.owner.token if sight.owner else "")
        except PermissionError as error:
            if store.path not in self._without:
                self._without.add(store.path)
                logger.warning("%s: saving without a lease, that of %s stays: %s", store.path, sight.owner, error)
            return False
        logger.log(
            logging.INFO if gone else logging.WARNING,
            "%s: taking over the lease of %s, %s",
            store.path,
            sight.owner or "an unknown process",
            "which has ended" if gone else f"not heard of for {sight.watched:.0f} s",
        )
        return True

    def _find_loss(self, store: FileSystem, lease: _Held, sequence: int) -> None:
        """Find out whether another process has taken over a lease, also one that has given it back since.

        Then there are tags of its own, with higher commit numbers than this one. Without any, somebody has removed the
        lease, or all of the root directory, and nothing is in the way.
        """
        data = _read(store, LEASE)
        owner = owner_of(data) if data else None
        if owner is not None and not _is_mine(owner):
            taker = str(owner)
        elif data is None and (newer := [e.tag for e in entries(store) if e.sequence > sequence]):
            taker = f"tag {newer[-1]}, which another process has saved since"
        else:
            return
        with self._lock:
            self._lost[store.path] = taker
            self._held.pop(store.path, None)
        lease.end()

    def _refusal(self, store: FileSystem, owner: Owner | None) -> RootInUseError:
        taker = self._lost.get(store.path)
        if taker is not None:
            return RootInUseError(
                "another process has taken over the lease of this directory: nothing is saved there any more",
                path=store.path,
                found=taker,
                hint="It was stopped or silent for long, or had to yield. Start it again to go on from the newest tag.",
            )
        return RootInUseError(
            "another process saves to this directory",
            path=store.path,
            found=str(owner or "a lease that cannot be read"),
            hint="Save to another directory, or end that process. With "
            f"{LEASE_VARIABLE}=take in its environment, this job saves there, and that one no more; with "
            f"{LEASE_VARIABLE}=off for both, two share it, under different tags.",
        )

    def _beat(self) -> None:
        """Keep the leases alive, on a thread."""
        while not self._end.wait(BEAT):
            for lease in list(self._held.values()):
                try:
                    lease.beat()
                except OSError as error:
                    logger.debug("%s: no sign of life could be written: %s", lease.store.path, error)


def _give_back(lease: _Held) -> None:
    lease.end()
    try:
        _move_away(lease.store, lease.owner.token)
    except OSError as error:
        logger.debug("%s: the lease stays, for others to take over: %s", lease.store.path, error)


def _read(store: FileSystem, name: str) -> bytes | None:
    """What a lease says; nothing if it says nothing, None if there is none."""
    try:
        return store.start_of(f"{name}/{OWNER}", MAX_OWNER, links=False)
    except (FileNotFoundError, NotAFileError):
        return b"" if store.has(name) else None


def _move_away(store: FileSystem, token: str) -> None:
    """Remove the lease of the owner with this token ("": of an unknown one)."""
    place = _new_name()
    try:
        store.rename(LEASE, place)
    except FileNotFoundError:
        return  # another process was faster
    moved = owner_of(_read(store, place) or b"")
    if (moved.token if moved else "") != token:
        # Another process has taken it over since it was looked at. It has it again, unless a third one was faster.
        try:
            store.rename(place, LEASE)
        except OSError as error:
            logger.debug("%s: two leases were taken at once: %s", store.path, error)
        else:
            return
    remove(store, place)


def _new_name() -> str:
    """A name that nobody else uses. What a killed process leaves under it is cleaned up as an unfinished tag is."""
    return f"{NEW_PREFIX}{LEASE}-{uuid.uuid4().hex}"


def _is_mine(owner: Owner) -> bool:
    """Whether an owner is this process, or one that started it, or that it has started: they are one job."""
    me = this_process()
    return owner.token == me.token or (owner.host == me.host and is_kin(owner.pid, owner.started))


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


LEASES = Leases()
"""The leases of this process."""

after_fork(LEASES.forked)
