"""The threads that move the bytes of a save, a load or a conversion, and whom they report to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from xla_ckpt.engine.phases import Phases
from xla_ckpt.storage.pool import READERS


@dataclass(frozen=True, slots=True, kw_only=True)
class Crew:
    """How many threads there are, at most, and what hears of their work."""

    workers: int = READERS
    """Threads that read or write, at most."""

    progress: Callable[[int], None] = lambda _: None
    """Called with the number of bytes that have just been dealt with, from any thread."""

    phases: Phases = field(default_factory=Phases)
    """Receives what is measured."""
