"""Who may save to a root directory, given what lies there. Pure.

The lease of a root directory names the process that saves there. Whether that process still runs is told by its lock,
on one machine, and by its heartbeat: a number in the lease that grows. The heartbeat is watched, and no clock is read:
the clocks of two machines differ. (After C. Gray and D. Cheriton, "Leases", SOSP 1989; there, too, an owner that is
silent for long enough has lost its lease.)
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

Verdict = Literal["take", "share", "take over", "wait", "refuse"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
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
        text = f"process {self.pid} of {_plain(self.user)} on {_plain(self.node)} ({_plain(self.program)})"
        text += f", which has saved there since {_plain(self.since)}"
        return f"{text}, last tag {_plain(self.saved)}" if self.saved else text


def _plain(text: str) -> str:
    """A text that a file gives, fit for a message: anybody may have written the file."""
    return repr(text[:200]) if not text.isprintable() or len(text) > 200 or not text else text


def owner_of(data: bytes) -> Owner | None:
    """The owner that a lease names; None if it is damaged, or is just being written.

    >>> owner_of(b"{"), owner_of(b'{"token": 3}')
    (None, None)
    """
    try:
        record: Any = json.loads(data)
    except (ValueError, RecursionError):
        return None
    kinds = {"pid": int, "started": int, "beat": int, "locked": bool}
    names = Owner.__dataclass_fields__
    if not isinstance(record, dict) or any(type(record.get(name)) is not kinds.get(name, str) for name in names):
        return None
    return Owner(**{name: record[name] for name in names})


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """A lease, as somebody sees it who wants to save."""

    owner: Owner | None
    """None: nobody can tell."""

    locked: bool | None
    """Whether somebody has a lock on it; None where there are no locks."""

    mine: bool = False
    """Whether this process has it, or one that it was started by, or that it has started."""

    here: bool = False
    """Whether its owner ran on this machine, since that was started."""

    changed: bool = False
    """Whether it has changed since it was first looked at."""

    watched: float = 0.0
    """How long it has been watched (s)."""


def decide(sight: Sight | None, *, silence: float, lost: bool = False, by_force: bool = False) -> Verdict:
    """What to do about a lease that was found, or about none.

    Args:
        sight: What was found; None: there is no lease.
        silence: A lease that has not changed for so long (s) belongs to a process that does not run any more.
        lost: Whether this process had a lease there, and another one has taken it over.
        by_force: Whether the user said that the lease is to be taken.

    Returns:
        ``"take"`` a new one, ``"share"`` that which is there, ``"take over"``, ``"wait"`` and look again, or
        ``"refuse"`` to save.

    >>> decide(None, silence=60)
    'take'
    >>> decide(Sight(owner=None, locked=None, watched=61), silence=60)
    'take over'
    """
    if sight is not None and sight.mine:
        return "share"
    if by_force:
        return "take" if sight is None else "take over"
    if lost:
        # Also if nobody has it now: a job that was stopped for long would put old steps on top of newer ones.
        return "refuse"
    if sight is None:
        return "take"
    its_lock_tells = sight.owner is not None and sight.here and sight.owner.locked
    if its_lock_tells and sight.locked is False:
        return "take over"
    if sight.changed:
        return "refuse"
    if sight.watched < silence:
        return "wait"
    return "refuse" if its_lock_tells and sight.locked else "take over"
