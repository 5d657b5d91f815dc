"""The lease of a root: one job saves there, and a second one by mistake is told before it changes anything.

The first save of a process takes the lease, which lies in the root (`tags/lease_places.py`); a thread keeps it alive,
and the end of the process gives it back. What a killed process left is taken over: at once where its lock is seen to be
free, else when it has been silent for a while. Readers need no lease, nor do calls that work on single tags.
"""

from __future__ import annotations

import datetime
import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace

from xla_ckpt.errors import RootInUseError, UsageError
from xla_ckpt.logs import get_logger
from xla_ckpt.storage.process_state import process_lock, process_wide
from xla_ckpt.storage.this_process import is_kin, setting, this_process
from xla_ckpt.storage.waiting import Latch
from xla_ckpt.storage.worker import Worker
from xla_ckpt.tags.lease_places import LeasePlace
from xla_ckpt.tags.lease_rules import Owner, Sight, decide, owner_of

logger = get_logger(__name__)

BEAT = 5.0
"""Seconds between two signs of life."""

LOOK = 0.2
"""Seconds between two looks at a lease that is watched."""

KEPT_LEASES = 16
"""Roots whose leases a process has at a time. Each takes a thread, and a descriptor if it is a directory."""

LEASE_VARIABLE = "XLA_CKPT_LEASE"
"""Environment variable: ``take`` takes the lease from whoever has it, ``off`` saves without one."""


@dataclass(slots=True)
class _Held:
    """A lease that this process has."""

    place: LeasePlace
    owner: Owner
    lock: threading.Lock = field(default_factory=process_lock)
    sequence: int | None = None
    """Number of the last commit that this process knows of; None if it knows nothing of commits yet."""

    over: Latch = field(default_factory=Latch)
    """Set when it is given back: nothing is written to it any more."""

    worker: Worker = field(default_factory=lambda: Worker("xla_ckpt-lease", daemon=True))
    """Says that this process runs."""

    beaten: float = field(default_factory=time.monotonic)
    """When that was said last."""

    def keep_alive(self) -> None:
        """Say again and again that this process runs, on a thread of its own: another storage may not answer.

        Without that thread the lease's lock says so, and where there are no locks, `Leases.renew`.
        """
        self.worker.submit(self._beats, self._failed)

    def _failed(self, error: BaseException) -> None:
        logger.warning("%s: from now on saves alone say that this process runs: %s", self.place.path, error)

    def _beats(self) -> None:
        while not self.over.wait(BEAT):
            self.beat()

    def beat(self) -> None:
        """Say that this process runs."""
        with self.lock:
            if self.over.is_set():
                return
            self.owner, self.beaten = replace(self.owner, beat=self.owner.beat + 1), time.monotonic()
            try:
                self.place.beat(self.owner)
            except OSError as error:
                logger.debug("%s: no sign of life could be written: %s", self.place.path, error)

    def end(self) -> None:
        with self.lock:
            self.over.set()
            self.place.close()

    def give_back(self) -> None:
        self.end()
        try:
            self.place.remove(self.owner.token)
        except OSError as error:
            logger.debug("%s: the lease stays, for others to take over: %s", self.place.path, error)


@dataclass(slots=True)
class _Watch:
    """The lease of another process, as it was when this one first saw it."""

    token: str
    data: bytes
    began: float = field(default_factory=time.monotonic)


class Leases:
    """The leases of this process."""

    def __init__(self) -> None:
        self._lock = process_lock()
        self._held: dict[str, _Held] = {}
        self._lost: dict[str, str] = {}
        """Root -> who has taken over the lease that this process had there."""

        self._without: set[str] = set()
        """Roots where another user's lease lies, and who runs this has been told so."""

        self._watched: dict[str, _Watch] = {}
        self._jobs: dict[str, frozenset[str]] = {}
        """Root -> the tokens of the processes of the job that saves there with this one."""

    def share_with(self, path: str, tokens: Iterable[str]) -> None:
        """Take these processes' leases of a root for leases of this one: they are one job, on several hosts."""
        self._jobs[path] = frozenset(tokens)

    def _is_mine(self, path: str, owner: Owner) -> bool:
        """Whether a root's owner is this process, one of its job, or one that started it, or that it has started."""
        me = this_process()
        is_of_job = owner.token in (me.token, *self._jobs.get(path, ()))
        return is_of_job or (owner.host == me.host and is_kin(owner.pid, owner.started))

    def hold(self, place: LeasePlace, within: float, check: Callable[[], object]) -> str | None:
        """Have the lease of a root. Waits until it is clear whether another process has it.

        Args:
            place: Where it lies. The root exists.
            within: Seconds to wait at most.
            check: Is called while this waits, and raises to end the wait.

        Returns:
            The token of the process whose lease it is, this one or one of its job; None if it saves without a lease.

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
            return None
        path, until, warned = place.path, time.monotonic() + within, False
        while True:
            data = place.read()
            if (lease := self._held.get(path)) is not None and lease.sequence is not None:
                self._find_loss(lease, lease.sequence, data)
            sight = self._look(place, data)
            verdict = decide(sight, silence=place.silence, lost=path in self._lost, by_force=orders == "take")
            if verdict == "share":
                assert sight is not None
                assert sight.owner is not None, "by its owner a lease is known as this process's"
                with self._lock:
                    if (lease := self._held.pop(path, None)) is not None:
                        self._held[path] = lease  # the last one to be given back
                return sight.owner.token
            if verdict == "take":
                if self._take(place):
                    return this_process().token
                continue
            if sight is None or verdict == "refuse" or time.monotonic() + LOOK > until:
                raise self._refusal(path, sight)
            if verdict == "take over":
                if not self._take_over(place, sight):
                    return None
                continue
            if not warned:
                warned = True
                logger.warning(
                    "%s: waiting to see whether its last owner still runs, for at most %.0f s: %s. While it runs, it "
                    "says so every %.0f s. With %s=take in the environment a job does not wait, and takes it over",
                    path,
                    place.silence,
                    sight.owner or "an unknown process",
                    BEAT,
                    LEASE_VARIABLE,
                )
            check()
            time.sleep(LOOK)

    def check(self, path: str, sequence: int) -> None:
        """Make sure, before a tag is committed with this number, that the lease has not been taken over meanwhile.

        Raises:
            RootInUseError: It has.
            OSError: The storage refused.
        """
        if (lease := self._held.get(path)) is not None:
            self._find_loss(lease, sequence - 1, lease.place.read())
            if lease.over.is_set():
                raise self._refusal(path, None)

    def note(self, path: str, tag: str, sequence: int) -> None:
        """Keep in mind what was saved last ("": not by this job). The lease says so from its next sign of life on."""
        if (lease := self._held.get(path)) is not None:
            with lease.lock:
                lease.owner, lease.sequence = replace(lease.owner, saved=tag or lease.owner.saved), sequence

    def renew(self, path: str) -> None:
        """Say that this process runs, if no thread does so and it is time: whoever writes calls this between parts."""
        lease = self._held.get(path)
        if lease is not None and not lease.worker.is_running and time.monotonic() - lease.beaten >= BEAT:
            lease.beat()

    def give_back(self) -> None:
        """Give all leases back: the process ends, or will not save there any more."""
        with self._lock:
            leases, self._held = list(self._held.values()), {}
        for lease in leases:
            lease.give_back()

    def reset_after_fork(self) -> None:
        """In a forked process: the leases are those of its parent, and so is their heartbeat."""
        leases = self._held
        self.__init__()  # type: ignore[misc]
        for lease in leases.values():
            # As long as a descriptor is open, the lock says that the parent runs.
            lease.place.close()

    def _look(self, place: LeasePlace, data: bytes | None) -> Sight | None:
        """The lease, of which `data` was read just now; None if there is none."""
        if data is None:
            self._watched.pop(place.path, None)
            return None
        owner = owner_of(data)
        if owner is not None and self._is_mine(place.path, owner):
            return Sight(owner=owner, locked=None, mine=True)
        watch = self._watched.get(place.path)
        if watch is None or watch.token != (owner.token if owner else ""):
            watch = self._watched[place.path] = _Watch(owner.token if owner else "", data)
        return Sight(
            owner=owner,
            locked=place.locked(),
            here=owner is not None and owner.host == this_process().host,
            changed=data != watch.data,
            watched=time.monotonic() - watch.began,
        )

    def _take(self, place: LeasePlace) -> bool:
        """Take a lease where there is none; False if another process was faster."""
        owner = place.take(Owner(**asdict(this_process()), since=_now(), locked=False))
        if owner is None:
            return False
        lease = _Held(place, owner)
        with self._lock:
            gone = self._held.pop(place.path, None)  # somebody has removed the root, and that lease with it
            self._held[place.path] = lease
            too_many = [self._held.pop(path) for path in list(self._held)[:-KEPT_LEASES]]
            self._lost.pop(place.path, None)
        lease.keep_alive()
        if gone is not None:
            gone.end()
        for other in too_many:
            other.give_back()
        return True

    def _take_over(self, place: LeasePlace, sight: Sight) -> bool:
        """Remove the lease of a process that does not run any more; False if this user may not."""
        gone = sight.here and sight.locked is False
        try:
            place.remove(sight.owner.token if sight.owner else "")
        except PermissionError as error:
            if place.path not in self._without:
                self._without.add(place.path)
                logger.warning("%s: saving without a lease, that of %s stays: %s", place.path, sight.owner, error)
            return False
        logger.log(
            logging.INFO if gone else logging.WARNING,
            "%s: taking over the lease of %s, %s",
            place.path,
            sight.owner or "an unknown process",
            "which has ended" if gone else f"not heard of for {sight.watched:.0f} s",
        )
        return True

    def _find_loss(self, lease: _Held, sequence: int, data: bytes | None) -> None:
        """Find out whether another process has taken over a lease, also one that has given it back since.

        `data` is what the lease says now. Then there is a successor. Without any, somebody has removed the lease, or
        all of the root, and nothing is in the way.
        """
        owner = owner_of(data) if data else None
        if owner is not None and not self._is_mine(lease.place.path, owner):
            taker = str(owner)
        elif data is None and (successor := lease.place.successor(lease.owner.token, sequence)) is not None:
            taker = successor
        else:
            return
        with self._lock:
            self._lost[lease.place.path] = taker
            self._held.pop(lease.place.path, None)
        lease.end()

    def _refusal(self, path: str, sight: Sight | None) -> RootInUseError:
        taker = self._lost.get(path)
        if taker is not None:
            return RootInUseError(
                "another process has taken over the lease of this root: nothing is saved there any more",
                path=path,
                found=taker,
                hint="It was stopped or silent for long, or had to yield. Start it again to go on from the newest tag.",
            )
        owner = "a lease that cannot be read" if sight is None or sight.owner is None else str(sight.owner)
        if sight is not None and sight.changed:
            owner += f"; it was watched for {sight.watched:.1f} s, and has said in that time that it runs"
        return RootInUseError(
            "another process saves to this root",
            path=path,
            found=owner,
            hint="Save to another root, or end that process. With "
            f"{LEASE_VARIABLE}=take in its environment, this job saves there, and that one no more; with "
            f"{LEASE_VARIABLE}=off for both, two share it, under different tags.",
        )


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


LEASES = process_wide(Leases(), Leases.reset_after_fork)
"""The leases of this process."""
