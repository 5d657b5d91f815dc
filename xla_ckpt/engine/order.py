"""What a program wants of a save, and what is measured of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from xla_ckpt.engine.phases import Phases
from xla_ckpt.engine.trace import Trace
from xla_ckpt.engine.upload import Uploader
from xla_ckpt.engine.write import WRITERS
from xla_ckpt.job.call import Call
from xla_ckpt.options import SaveOptions
from xla_ckpt.tags.kept import policy_of
from xla_ckpt.tags.retention import Retention
from xla_ckpt.tags.root import Root


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a program wants saved where, as far as it concerns the writing."""

    root: Root
    tag: str
    call: Call
    """What the program called, for the other ranks to compare."""

    options: SaveOptions = field(default_factory=SaveOptions)
    pinned: bool | None = None
    num_kept: int | None = None
    """How many of the newest tags are kept, if `options` do not say it."""

    uploader: Uploader | None = None
    """What brings the tag to an object store from the directory in which it is committed."""

    check: Callable[[], object] | None = None
    """Is called on rank 0 before anything is written, and raises what refuses the save; None if that was looked at
    before the save was begun."""

    committed: Callable[[int], object] = lambda number: None
    """Is called on rank 0 after the commit, with its number. What it raises is logged."""

    workers: int = WRITERS
    shown: bool | None = None
    """Whether this rank shows a progress bar; None decides by itself."""

    @property
    def retention(self) -> Retention | None:
        """Which tags are kept after the commit; None keeps all.

        Raises:
            UsageError: `num_kept` makes no sense, or `options` say it, too.
        """
        return policy_of(self.num_kept, self.options.retention)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """What is measured of a save."""

    phases: Phases = field(default_factory=Phases)
    stall: float = 0.0
    """Seconds that the caller waited before the save was begun."""

    trace: Trace | None = None
    """Where a trace goes, if one is wanted."""
