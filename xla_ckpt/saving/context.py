"""The state of one save on one rank: its context, prepared state and cancellation.

`SaveContext` contains where and how a tag is saved, `SaveTiming` the measurements, `PreparedSave` the described and
snapshotted state. `Cancellation` lets a signal handler abort the save until its commit begins.
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
    """Destination and settings of a save, as needed to write it."""

    root: Root
    tag: str
    call: CallSignature
    """Call signature of this rank, which is compared with the other ranks' signatures."""

    options: SaveOptions = field(default_factory=SaveOptions)
    pinned: bool | None = None
    num_kept: int | None = None
    """Number of the newest tags to keep, if `options` do not contain a retention policy."""

    uploader: Uploader | None = None
    """Uploader from the directory in which the tag is committed to an object store, if any."""

    check_destination: Callable[[], object] | None = None
    """Function that rank 0 calls before anything is written, and that raises an error if the destination is not
    acceptable; None if it was checked before the save began."""

    on_commit: Callable[[int], object] = lambda number: None
    """Callback that rank 0 runs after the commit, with the sequence number. Errors that it raises are logged."""

    workers: int = WRITER_THREADS
    show_progress: bool | None = None
    """True if this rank shows a progress bar; None decides automatically."""

    @property
    def retention(self) -> Retention | None:
        """Retention policy that is applied after the commit; None keeps all tags.

        Raises:
            UsageError: `num_kept` is invalid, or `options` contain a policy, too.
        """
        return resolve_policy(self.num_kept, self.options.retention)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveTiming:
    """Measurements of a save."""

    phases: PhaseRecorder = field(default_factory=PhaseRecorder)
    stall: float = 0.0
    """Seconds that the caller waited before the save began."""

    trace: Trace | None = None
    """Trace to write, if requested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedSave:
    """One rank's prepared save: the described state, its plan and its snapshot."""

    leaves: LeafTable

    layout: str
    """Name of the layout in which the state is written."""

    planner: WritePlanner
    snapshot: Snapshot
    skeleton: Any
    """Structure of the state, if this rank reports for its stage; otherwise only its rank-local part, or None."""

    module_metadata: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Module metadata of the state dicts in `skeleton`, as in `Manifest.module_metadata`."""

    aliases: Mapping[str, str] = field(default_factory=dict)
    objects: Sequence[bytes] = ()
    """Pickled objects, by their index in the skeleton."""

    is_reporting_rank: bool = True
    """True if this rank reports dtype and shape of its leaves for its whole pipeline stage."""

    rank_local_prefixes: tuple[str, ...] = ()
    """Prefixes of the leaf paths that this rank always reports, because no other rank has them."""

    structure_fingerprints: Mapping[str, str] = field(default_factory=dict)
    """Part of the state -> fingerprint of its plain values, which must be the same on all ranks."""

    untrained_parameters: Mapping[str, FrozenParameter] = field(default_factory=dict)
    """Parameters that are not trained, by leaf path; filled only if `SaveOptions.share` is set."""

    def is_reported_here(self, path: str) -> bool:
        """Return True if this rank reports dtype and shape of a leaf."""
        return self.is_reporting_rank or path.startswith(self.rank_local_prefixes)

    def is_shared_leaf(self, path: str) -> bool:
        """Return True if all ranks of this pipeline stage have a leaf."""
        return not path.startswith(self.rank_local_prefixes)

    def collect_array_facts(self, predicate: Callable[[str], bool]) -> dict[str, ArrayInfo]:
        """Return dtype, shape, spec and weak type of the leaves that satisfy `predicate`, by leaf path."""
        with pause_gc():
            leaves = self.leaves
            facts = [(dtype.name, holding.shape, holding.spec, holding.weak_type) for dtype, holding in leaves.kinds]
            rows = zip(leaves.paths, leaves.kind.tolist(), strict=True)
            return {path: facts[form] for path, form in rows if predicate(path)}


class Cancellation:
    """Cancellation of one rank's part of a save. The first of `cancel` and `begin_commit` decides.

    The caller of a save may write to its memory as soon as it receives an exception. Therefore the save marks when it
    reads that memory, and `cancel` waits for the end of the read.
    """

    def __init__(self) -> None:
        self._lock = fork_safe_lock()
        self._changed = Notifier()
        self._cause: BaseException | None = None
        self._is_committing = False
        self._is_reading = False

    def cancel(self, cause: BaseException) -> bool:
        """Request that the save ends without a tag, and return True if it will. Repeated calls have no further effect.

        When this method returns, the save does not read the program's memory and will not read it again.
        """
        with self._lock:
            if not self._is_committing:
                self._cause = self._cause or cause
        self._changed.wait_for(lambda: not self._is_reading)
        return self._cause is not None

    def raise_if_cancelled(self) -> None:
        """Raise an error if the save was cancelled.

        Raises:
            SaveError: The save was cancelled.
        """
        if self._cause is not None:
            raise SaveError(
                f"the save was given up: its caller was interrupted by {type(self._cause).__name__}",
                hint="The tag is as it was before. Save again.",
            ) from self._cause

    @contextmanager
    def track_memory_reads(self) -> Iterator[None]:
        """Mark a block that reads the program's memory; the block calls `raise_if_cancelled` from time to time.

        Raises:
            SaveError: The save was cancelled before the read began.
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
        """Mark the start of the commit, after which the save cannot be cancelled.

        Raises:
            SaveError: The save was cancelled before.
        """
        with self._lock:
            self.raise_if_cancelled()
            self._is_committing = True
