"""The state of one save on one rank: its context, prepared state and cancellation.

`SaveContext` contains where and how a tag is saved, `SaveTiming` what is measured, `PreparedSave` the described and
snapshotted state, and `Cancellation` lets a signal handler abort the save until its commit begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from xla_ckpt.core.plan.leaf import LeafTable
from xla_ckpt.core.plan.rank_consistency import ArrayInfo
from xla_ckpt.distributed.handshake import CallSignature
from xla_ckpt.errors import SaveError
from xla_ckpt.features.local_first.upload import Uploader
from xla_ckpt.features.reuse.buffer_cache import FrozenParameter
from xla_ckpt.garbage_collection import pause_gc
from xla_ckpt.options import SaveOptions
from xla_ckpt.reports import PhaseRecorder, Trace
from xla_ckpt.saving.finalize import WritePlanner
from xla_ckpt.saving.write import WRITER_THREADS
from xla_ckpt.snapshot.snapshot import Snapshot
from xla_ckpt.storage.process_state import fork_safe_lock
from xla_ckpt.storage.synchronization import Notifier
from xla_ckpt.tags.retention import Retention, resolve_policy
from xla_ckpt.tags.root import Root


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveContext:
    """What a program wants saved where, as far as it concerns the writing."""

    root: Root
    tag: str
    call: CallSignature
    """What the program called, for the other ranks to compare."""

    options: SaveOptions = field(default_factory=SaveOptions)
    pinned: bool | None = None
    num_kept: int | None = None
    """How many of the newest tags are kept, if `options` do not say it."""

    uploader: Uploader | None = None
    """What brings the tag to an object store from the directory in which it is committed."""

    check_destination: Callable[[], object] | None = None
    """Is called on rank 0 before anything is written, and raises what refuses the save; None if that was looked at
    before the save was begun."""

    on_commit: Callable[[int], object] = lambda number: None
    """Is called on rank 0 after the commit, with its number. What it raises is logged."""

    workers: int = WRITER_THREADS
    show_progress: bool | None = None
    """Whether this rank shows a progress bar; None decides by itself."""

    @property
    def retention(self) -> Retention | None:
        """Which tags are kept after the commit; None keeps all.

        Raises:
            UsageError: `num_kept` makes no sense, or `options` say it, too.
        """
        return resolve_policy(self.num_kept, self.options.retention)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveTiming:
    """What is measured of a save."""

    phases: PhaseRecorder = field(default_factory=PhaseRecorder)
    stall: float = 0.0
    """Seconds that the caller waited before the save was begun."""

    trace: Trace | None = None
    """Where a trace goes, if one is wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedSave:
    """What one rank has of the state that is saved: frozen, and described."""

    leaves: LeafTable

    layout: str
    """The name of the layout in which it is written."""

    planner: WritePlanner
    snapshot: Snapshot
    skeleton: Any
    """The structure of the state, if this rank speaks for its stage; else what only this rank has of it, or None."""

    module_metadata: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """As `Manifest.module_metadata`, of the state dicts in `skeleton`."""

    aliases: Mapping[str, str] = field(default_factory=dict)
    objects: Sequence[bytes] = ()
    """Pickled objects, by their index in the skeleton."""

    is_reporting_rank: bool = True
    """Whether this rank reports type and shape of its leaves for its whole pipeline stage."""

    rank_local_prefixes: tuple[str, ...] = ()
    """Prefixes of the leaf paths that this rank reports in any case: nobody else has them."""

    structure_fingerprints: Mapping[str, str] = field(default_factory=dict)
    """Part of the state -> fingerprint of its plain values, which all ranks have in common."""

    untrained_parameters: Mapping[str, FrozenParameter] = field(default_factory=dict)
    """Parameters that are not trained, by leaf path; known only where `SaveOptions.share` asks for it."""

    def is_reported_here(self, path: str) -> bool:
        """Whether this rank reports type and shape of a leaf."""
        return self.is_reporting_rank or path.startswith(self.rank_local_prefixes)

    def is_shared_leaf(self, path: str) -> bool:
        """Whether all ranks of this pipeline stage have a leaf."""
        return not path.startswith(self.rank_local_prefixes)

    def collect_array_facts(self, predicate: Callable[[str], bool]) -> dict[str, ArrayInfo]:
        """What the manifest says of some leaves, by leaf path."""
        with pause_gc():
            leaves = self.leaves
            facts = [(dtype.name, holding.shape, holding.spec, holding.weak_type) for dtype, holding in leaves.kinds]
            rows = zip(leaves.paths, leaves.kind.tolist(), strict=True)
            return {path: facts[form] for path, form in rows if predicate(path)}


class Cancellation:
    """Whether one rank's part of a save is to end without a tag. The first word counts: a request, or `begin_commit`.

    The caller of a save may write to its memory once it has an exception in its hands. So the save says when it reads
    that memory, and a request waits for the end of that.
    """

    def __init__(self) -> None:
        self._lock = fork_safe_lock()
        self._changed = Notifier()
        self._cause: BaseException | None = None
        self._is_committing = False
        self._is_reading = False

    def cancel(self, cause: BaseException) -> bool:
        """Have the save end without a tag; whether it does. A second request is the same as the first.

        When it returns, the save reads no memory of the program's, and will read none any more.
        """
        with self._lock:
            if not self._is_committing:
                self._cause = self._cause or cause
        self._changed.wait_for(lambda: not self._is_reading)
        return self._cause is not None

    def raise_if_cancelled(self) -> None:
        """Go on only if nobody has given the save up.

        Raises:
            SaveError: Somebody has.
        """
        if self._cause is not None:
            raise SaveError(
                f"the save was given up: its caller was interrupted by {type(self._cause).__name__}",
                hint="The tag is as it was before. Save again.",
            ) from self._cause

    @contextmanager
    def track_memory_reads(self) -> Iterator[None]:
        """A block that reads the program's memory, and calls `raise_if_cancelled` from time to time.

        Raises:
            SaveError: The save was given up before it began to read.
        """
        with self._lock:
            self.raise_if_cancelled()
            self._is_reading = True
        try:
            yield
        finally:
            self._is_reading = False
            self._changed.notify()

    def begin_commit(self) -> None:
        """From here on it is too late to give the save up: it is about to be committed.

        Raises:
            SaveError: Somebody has given it up before.
        """
        with self._lock:
            self.raise_if_cancelled()
            self._is_committing = True
