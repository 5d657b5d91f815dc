"""Rules of leases: which process may save to a root, given the lease that it contains. Pure.

A lease names its owner. On one machine a lock shows if the owner is alive; otherwise its heartbeat does, a counter that
is observed without comparing clocks of machines. (After C. Gray and D. Cheriton, "Leases", SOSP 1989.)
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

LeaseAction = Literal["take", "share", "take over", "wait", "refuse"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseOwner:
    """Owner of a lease, as recorded in it."""

    token: str
    host: str
    node: str
    pid: int
    started: int
    user: str
    program: str
    since: str
    """Time of acquisition: UTC, ISO 8601, by the owner's clock."""

    locked: bool
    """True if its lock works, so that an unlocked lease has no running owner."""

    saved: str = ""
    """Last tag saved by the owner."""

    beat: int = 0
    """Number of heartbeats sent."""

    def to_json(self) -> bytes:
        """Return the contents of the lease."""
        return json.dumps(asdict(self)).encode()

    def __str__(self) -> str:
        text = (
            f"process {self.pid} of {_quote_text(self.user)} on {_quote_text(self.node)} ({_quote_text(self.program)})"
        )
        text += f", which has saved there since {_quote_text(self.since)}"
        return f"{text}, last tag {_quote_text(self.saved)}" if self.saved else text


def _quote_text(text: str) -> str:
    """Return a text from a file in a form that is safe in messages, because the file may have any content."""
    return repr(text[:200]) if not text.isprintable() or len(text) > 200 or not text else text


def parse_owner(data: bytes) -> LeaseOwner | None:
    """Return the owner recorded in a lease, or None if it is corrupt or partially written.

    >>> parse_owner(b"{"), parse_owner(b'{"token": 3}')
    (None, None)
    """
    try:
        record: Any = json.loads(data)
    except (ValueError, RecursionError):
        return None
    kinds = {"pid": int, "started": int, "beat": int, "locked": bool}
    names = LeaseOwner.__dataclass_fields__
    if not isinstance(record, dict) or any(type(record.get(name)) is not kinds.get(name, str) for name in names):
        return None
    return LeaseOwner(**{name: record[name] for name in names})


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseObservation:
    """A lease as observed by a process that wants to save."""

    owner: LeaseOwner | None
    """Owner; None if unknown."""

    is_locked: bool | None
    """True if a process holds its lock; None if locks are unsupported."""

    is_own: bool = False
    """True if it belongs to this process, an ancestor or a descendant."""

    is_local: bool = False
    """True if its owner runs on this machine since its last boot."""

    has_changed: bool = False
    """True if it has changed since the first observation."""

    observed_seconds: float = 0.0
    """Time since the first observation (s)."""


def decide_lease(
    observation: LeaseObservation | None, *, expiry_seconds: float, was_lost: bool = False, forced: bool = False
) -> LeaseAction:
    """Return the action for an observed lease.

    Args:
        observation: The lease; None if it is free.
        expiry_seconds: Time without a change after which the owner of a lease is considered dead (s).
        was_lost: True if this process held the lease and another one has taken it over.
        forced: True if the user requested to take over the lease.

    Returns:
        ``"take"`` a new lease, ``"share"`` the existing one, ``"take over"``, ``"wait"`` and observe again, or
        ``"refuse"`` to save.

    >>> decide_lease(None, expiry_seconds=60)
    'take'
    >>> decide_lease(LeaseObservation(owner=None, is_locked=None, observed_seconds=61), expiry_seconds=60)
    'take over'
    """
    if observation is not None and observation.is_own:
        return "share"
    if forced:
        return "take" if observation is None else "take over"
    if was_lost:
        # Even if it is free now: a job that was suspended for long would save old steps after newer ones.
        return "refuse"
    if observation is None:
        return "take"
    lock_is_conclusive = observation.owner is not None and observation.is_local and observation.owner.locked
    if lock_is_conclusive and observation.is_locked is False:
        return "take over"
    if observation.has_changed:
        return "refuse"
    if observation.observed_seconds < expiry_seconds:
        return "wait"
    return "refuse" if lock_is_conclusive and observation.is_locked else "take over"
