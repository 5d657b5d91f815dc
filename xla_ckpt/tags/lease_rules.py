"""Rules of leases: who may save to a root, given the lease that it contains. Pure.

A lease names its owner. On one machine a lock shows whether the owner is alive; otherwise its heartbeat does, a
counter that is watched without comparing clocks of machines. (After C. Gray and D. Cheriton, "Leases", SOSP 1989.)
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

LeaseAction = Literal["take", "share", "take over", "wait", "refuse"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseOwner:
    """What a lease says of the process that has it."""

    token: str
    host: str
    node: str
    pid: int
    started: int
    user: str
    program: str
    since: str
    """When it took the lease: UTC, ISO 8601, by its own clock."""

    locked: bool
    """Whether its lock works, so that a lease without one belongs to nobody."""

    saved: str = ""
    """The tag that it saved last."""

    beat: int = 0
    """How often it has said that it runs."""

    def to_json(self) -> bytes:
        """As the lease has it."""
        return json.dumps(asdict(self)).encode()

    def __str__(self) -> str:
        text = (
            f"process {self.pid} of {_quote_text(self.user)} on {_quote_text(self.node)} ({_quote_text(self.program)})"
        )
        text += f", which has saved there since {_quote_text(self.since)}"
        return f"{text}, last tag {_quote_text(self.saved)}" if self.saved else text


def _quote_text(text: str) -> str:
    """A text that a file gives, fit for a message: anybody may have written the file."""
    return repr(text[:200]) if not text.isprintable() or len(text) > 200 or not text else text


def parse_owner(data: bytes) -> LeaseOwner | None:
    """The owner that a lease names; None if it is damaged, or is just being written.

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
    """A lease, as somebody sees it who wants to save."""

    owner: LeaseOwner | None
    """None: nobody can tell."""

    is_locked: bool | None
    """Whether somebody has a lock on it; None where there are no locks."""

    is_own: bool = False
    """Whether this process has it, or one that it was started by, or that it has started."""

    is_local: bool = False
    """Whether its owner ran on this machine, since that was started."""

    has_changed: bool = False
    """Whether it has changed since it was first looked at."""

    observed_seconds: float = 0.0
    """How long it has been watched (s)."""


def decide_lease(
    observation: LeaseObservation | None, *, expiry_seconds: float, was_lost: bool = False, forced: bool = False
) -> LeaseAction:
    """What to do about a lease that was found, or about none.

    Args:
        observation: What was found; None: there is no lease.
        expiry_seconds: A lease that has not changed for so long (s) belongs to a process that does not run any more.
        was_lost: Whether this process had a lease there, and another one has taken it over.
        forced: Whether the user said that the lease is to be taken.

    Returns:
        ``"take"`` a new one, ``"share"`` that which is there, ``"take over"``, ``"wait"`` and look again, or
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
        # Also if nobody has it now: a job that was stopped for long would put old steps on top of newer ones.
        return "refuse"
    if observation is None:
        return "take"
    its_lock_tells = observation.owner is not None and observation.is_local and observation.owner.locked
    if its_lock_tells and observation.is_locked is False:
        return "take over"
    if observation.has_changed:
        return "refuse"
    if observation.observed_seconds < expiry_seconds:
        return "wait"
    return "refuse" if its_lock_tells and observation.is_locked else "take over"
