"""Restore arrays: fill the memory of all targets from a checkpoint, verifying every byte.

No memory that the program uses is overwritten before all ranks have verified their part. Targets that share memory
are filled only if the checkpoint contains the same values for all of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol

import numpy as np

from xla_ckpt.core.plan.read_costs import DIRECT_BYTES
from xla_ckpt.core.plan.restore_plan import ReadRequest, RestorePlan, plan_restore
from xla_ckpt.core.plan.shared_reads import OverlappingReads, ReadShare
from xla_ckpt.core.sharding.box import Box
from xla_ckpt.core.sharding.memory_layout import StridedMemory
from xla_ckpt.core.tree.path import format_leaves
from xla_ckpt.distributed.consensus import LatePeerLoss, raise_on_all_ranks
from xla_ckpt.distributed.exchange import Exchange
from xla_ckpt.errors import IncompatibleCheckpointError, wrap_os_errors
from xla_ckpt.garbage_collection import pause_gc
from xla_ckpt.loading.read import read_into, verify_reads
from xla_ckpt.loading.tag_reader import TagReader
from xla_ckpt.loading.target import Target, apply_by_kind
from xla_ckpt.progress import IoContext, ProgressBar
from xla_ckpt.reports import PhaseRecorder
from xla_ckpt.snapshot.memory import ByteArray, SlabAllocator
from xla_ckpt.storage.threads import READ_THREADS, get_worker_count

MAX_STAGED_BYTES = 128 * 1024 * 1024
"""Maximum number of bytes of small arrays in the program's memory that are staged and copied instead of being read
twice. For a large array, page faults of the staging memory would cost more than a second read from the page cache."""

MAX_UNCACHED_STAGED_BYTES = 4 << 30
"""The same limit for storage without a page cache, for arrays of any size: a second read would be a second transfer."""


MAX_UNCHECKED_BYTES = 1 << 30
"""Maximum number of bytes of new memory that are allocated before the sizes of the files are checked."""


class CooperativeReader(Protocol):
    """Cooperative reads by ranks that need the same bytes (`xla_ckpt.distributed.cooperative_reads`)."""

    def agree(self, exchange: Exchange, wants: Sequence[ReadRequest]) -> ReadShare:
        """Find the ranks that need the same bytes, and assign the reads to them."""

    def exchange(
        self,
        share: ReadShare,
        buffers: Sequence[memoryview],
        rows: Sequence[tuple[OverlappingReads, ReadRequest]],
        itemsize: Mapping[str, int],
    ) -> None:
        """Send bytes that this rank read for others, and receive bytes that they read for it. All ranks call this.

        `rows` are the reads of overlapping boxes, whose memory is also in `buffers`; `itemsize` is in bytes, by leaf
        path.
        """


@dataclass(frozen=True, slots=True)
class TargetMemory:
    """Memory of all requested boxes."""

    buffers: list[memoryview]
    requests: list[ReadRequest]
    live: frozenset[int]
    """Slots in memory of the program. They are written only after all their bytes have been verified."""

    slabs: SlabAllocator
    """Allocator of the new memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreContext:
    """Settings of a restore, and its connection to the other ranks."""

    exchange: Exchange
    """Message exchange with the other ranks."""

    phases: PhaseRecorder
    """Recorder of the time spent."""

    on_verified: Callable[[], None] = lambda: None
    """Callback on all ranks when everything is verified, and before memory of the program is overwritten."""

    unshared_leaves: Collection[str] = ()
    """Leaf paths of targets in new memory that must be filled before `on_verified`: this rank reads them itself."""

    cooperative_reader: CooperativeReader | None = None
    """Cooperative reads by ranks that need the same bytes; None if each rank reads its own."""

    late_loss: LatePeerLoss | None = None
    """Receiver of the error if a rank is lost after all ranks have verified their part, and this rank does not depend
    on it: the memory of this rank is filled nevertheless. None raises the error."""

    workers: int = READ_THREADS
    """Maximum number of reader threads."""

    show_progress: bool | None = False
    """True if a progress bar is shown; None decides automatically."""


def restore_targets(reader: TagReader, targets: Mapping[str, Target], context: RestoreContext) -> tuple[int, int]:
    """Fill the memory of all targets. All ranks of the job call this; all raise the same error.

    Bytes for memory that the program uses are read twice: once to verify them, and once to overwrite the memory. Small
    arrays are read once into staging memory; from an object store large ones, too (`MAX_UNCACHED_STAGED_BYTES`). No
    rank overwrites memory before all ranks have verified their part, so a damaged tag changes nothing on any rank.

    Args:
        reader: Reader of the tag.
        targets: Leaf path -> target of the array.
        context: Settings of the restore.

    Returns:
        Bytes that the targets need, and bytes that were read for them.

    Raises:
        CorruptCheckpointError: The tag is damaged.
        IncompatibleCheckpointError: Targets share memory, and different values are stored for them.
        StorageError: The storage failed.
        RankFailedError: Another rank was lost.
    """
    exchange, phases, sharing = context.exchange, context.phases, context.cooperative_reader
    with phases.measure("plan"):
        with raise_on_all_ranks(exchange, "planning"), pause_gc():
            _check_sizes(reader, targets)
            check_overlaps(reader, targets)
            memory = allocate_memory(targets)
            plan = plan_restore(reader.manifest, memory.requests)
        itemsize = {path: target.dtype.itemsize for path, target in targets.items()}
        shared: _SharedReadPlan | None = None
        if sharing is not None and exchange.size > 1:
            shared = _plan_shared_reads(reader, memory, plan, itemsize, context)
        slots = memory.buffers if shared is None else shared.buffers
        reads = plan if shared is None else shared.reads
        # No staging with cooperative reads: bytes from other ranks arrive after the staged bytes are in place.
        with pause_gc():
            staged = {} if shared is not None else _allocate_staging(memory, cached=reader.directory.costs.is_cached)
            slots = [staged.get(i, slot) for i, slot in enumerate(slots)]
            twice = memory.live - staged.keys()
            to_live = reads.match_slots(twice)
            in_use, fresh = reads.select(to_live), reads.select(~to_live)
            total = fresh.read_bytes + 2 * in_use.read_bytes
    # The bytes of `in_use` count twice: they are verified before anything is overwritten, and then read again.
    what = f"load {reader.tag} (verify, then read)" if len(in_use) else f"load {reader.tag}"
    with ProgressBar(what, total, context.show_progress) as bar:
        crew = IoContext(workers=context.workers, progress=bar, phases=phases)
        with raise_on_all_ranks(exchange, "reading"), wrap_os_errors("reading a tag", path=reader.root, tag=reader.tag):
            read_into(reader, fresh, slots, crew, slabs=memory.slabs)
            verify_reads(reader, in_use, crew)
        with phases.measure("install"):
            context.on_verified()
        # From here on memory of the program changes: every byte to be written there has been verified, on every rank. A
        # rank that sends bytes to others depends on them until the end.
        ending = raise_on_all_ranks(exchange, "overwriting")
        if context.late_loss is not None and shared is None:
            ending = context.late_loss.raise_on_all_ranks("overwriting")
        with ending, wrap_os_errors("reading a tag", path=reader.root, tag=reader.tag):
            read_into(reader, in_use, slots, replace(crew, workers=get_worker_count(context.workers, 3)))
            with phases.measure("install"):
                for slot, data in staged.items():  # verified bytes go into the memory of the program
                    memory.buffers[slot][:] = data
    if sharing is not None and shared is not None:
        with phases.measure("read"):
            sharing.exchange(shared.share, slots, shared.rows, itemsize)
    return plan.needed_bytes, total


def _check_sizes(reader: TagReader, targets: Mapping[str, Target]) -> None:
    """Check the sizes of the files before much memory is allocated for them, because a manifest may contain any size.

    Raises:
        CorruptCheckpointError: A file is missing, or has another size.
    """
    wanted = 0
    for leaf, target in targets.items():
        if not target.live:
            for box in target.boxes:
                wanted += box.size * target.dtype.itemsize
        if wanted > MAX_UNCHECKED_BYTES and (record := reader.manifest.find_array(leaf)) is not None:
            for file in {shard.file for box in target.boxes for shard in record.find_overlapping(box)}:
                reader.open_file(file)


def _allocate_staging(memory: TargetMemory, *, cached: bool) -> dict[int, memoryview]:
    """Allocate staging memory for slots in the program's memory, in order, up to the limit; returned by slot."""
    small = [slot for slot in sorted(memory.live) if not cached or len(memory.buffers[slot]) < DIRECT_BYTES]
    sizes = [len(memory.buffers[slot]) for slot in small]
    fitting = bisect_right(list(accumulate(sizes)), MAX_STAGED_BYTES if cached else MAX_UNCACHED_STAGED_BYTES)
    return dict(zip(small[:fitting], memory.slabs.allocate_views(sizes[:fitting]), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class _SharedReadPlan:
    """Reads of this rank in a cooperative read."""

    share: ReadShare
    rows: list[tuple[OverlappingReads, ReadRequest]]
    """Reads of boxes in the same rows, which this rank performs for all ranks that need one of them."""

    buffers: list[memoryview]
    """Memory of all requested boxes, followed by the memory of `rows`."""

    reads: RestorePlan


def _plan_shared_reads(
    reader: TagReader, memory: TargetMemory, plan: RestorePlan, itemsize: Mapping[str, int], context: RestoreContext
) -> _SharedReadPlan:
    """Agree with the other ranks on the assignment of reads; `plan` contains this rank's reads without cooperation."""
    assert context.cooperative_reader is not None
    common, alone = [], frozenset(context.unshared_leaves)
    for want in memory.requests:
        record = reader.manifest.find_array(want.leaf)
        # Rank-local arrays are not the same bytes, although leaf path and box are the same.
        if record is not None and not record.is_rank_local and want.leaf not in alone:
            common.append(want)
    share = context.cooperative_reader.agree(context.exchange, common)
    rows = share.plan_overlapping_reads(len(memory.buffers))
    slabs = SlabAllocator()
    own_memory = [slabs.allocate(want.box.size * itemsize[want.leaf]).data for _, want in rows]
    more = plan_restore(reader.manifest, [want for _, want in rows])
    return _SharedReadPlan(
        share=share,
        rows=rows,
        buffers=[*memory.buffers, *own_memory],
        reads=RestorePlan.concatenate([share.select_own_reads(plan), more]),
    )


def allocate_memory(targets: Mapping[str, Target]) -> TargetMemory:
    """Allocate the memory of the boxes of all targets, as numbered slots."""
    slots: list[memoryview] = []
    wants: list[ReadRequest] = []
    live: set[int] = set()
    slabs = SlabAllocator()
    of_each = apply_by_kind(targets.values(), lambda kind, some: kind.allocate_all(some, slabs))
    for (path, target), memories in zip(targets.items(), of_each, strict=True):
        is_live = target.live
        for box, memory in zip(target.boxes, memories, strict=True):
            if is_live:
                live.add(len(slots))
            wants.append(ReadRequest(path, box, len(slots)))
            slots.append(memory)
    return TargetMemory(slots, wants, frozenset(live), slabs)


@dataclass(frozen=True, slots=True)
class _TargetRegion:
    """Box of a target, and the memory of the program into which it is written."""

    leaf: str
    box: Box
    memory: StridedMemory


def check_overlaps(reader: TagReader, targets: Mapping[str, Target]) -> None:
    """Check that targets that share memory get the same values, before anything is overwritten.

    The stored values are read into other memory for this check. Aliases of one stored array need no check.

    Raises:
        IncompatibleCheckpointError: The values differ; the load would leave the values of the target that is filled
            last.
        CorruptCheckpointError: The bytes that are read for this check are damaged.
    """
    for places in _find_overlaps(targets):
        aliases = reader.manifest.aliases
        distinct = {(aliases.get(p.leaf, p.leaf), p.box, p.memory): p for p in places}
        if len(distinct) > 1:
            _check_values(reader, targets, list(distinct.values()))


def _find_overlaps(targets: Mapping[str, Target]) -> Iterator[list[_TargetRegion]]:
    """Yield groups of regions whose spans of memory overlap."""
    spans: dict[Hashable, list[tuple[int, int, str]]] = {}
    of_each = apply_by_kind(targets.values(), lambda kind, some: kind.list_spans(some))
    for leaf, of_target in zip(targets, of_each, strict=True):
        for space, low, high in of_target:
            spans.setdefault(space, []).append((low, high, leaf))
    # Nearly every target has memory of its own; boxes are compared only for the others.
    for meeting in spans.values():
        if len(meeting) > 1:
            near = _find_overlapping_leaves(meeting)
            yield from _group_overlapping_regions(
                {leaf: target for leaf, target in targets.items() if leaf in near} if near else {}
            )


def _find_overlapping_leaves(spans: Sequence[tuple[int, int, str]]) -> set[str]:
    """Return the leaf paths whose span overlaps another one."""
    low, high = np.array([span[:2] for span in spans], np.int64).T
    order = np.lexsort((high, low))
    reach = np.maximum.accumulate(high[order])
    meets = low[order][1:] < reach[:-1]
    both = np.r_[meets, False] | np.r_[False, meets]
    return {spans[i][2] for i in order[both].tolist()}


def _group_overlapping_regions(targets: Mapping[str, Target]) -> Iterator[list[_TargetRegion]]:
    """Yield groups of regions of some targets whose spans of memory overlap."""
    spaces: dict[object, list[tuple[int, int, _TargetRegion]]] = {}
    for leaf, target in targets.items():
        for box, memory in zip(target.boxes, target.get_aliased_memory(), strict=False):
            if box.size:
                spaces.setdefault(memory.memory_space, []).append((*memory.span, _TargetRegion(leaf, box, memory)))
    for places in spaces.values():
        places.sort(key=lambda p: p[:2])
        met: list[_TargetRegion] = []
        end = 0
        for low, high, place in places:
            if met and low >= end:
                if len(met) > 1:
                    yield met
                met = []
            met.append(place)
            end = max(end, high)
        if len(met) > 1:
            yield met


def _check_values(reader: TagReader, targets: Mapping[str, Target], regions: list[_TargetRegion]) -> None:
    """Write the stored values into a copy of the program's memory layout, and check that each region keeps its values.

    Raises:
        IncompatibleCheckpointError: Types or values differ.
    """
    leaves = list(dict.fromkeys(place.leaf for place in regions))
    stored = {targets[leaf].dtype for leaf in leaves}
    if len(stored) > 1:
        raise _make_overlap_error(leaves, "types: " + ", ".join(sorted(dtype.name for dtype in stored)))
    arrays = [np.empty(place.box.size * targets[place.leaf].dtype.itemsize, np.uint8) for place in regions]
    wants = [ReadRequest(place.leaf, place.box, i) for i, place in enumerate(regions)]
    read_into(reader, plan_restore(reader.manifest, wants), [values.data for values in arrays])
    low = min(place.memory.span[0] for place in regions)
    high = max(place.memory.span[1] for place in regions)
    itemsize = next(iter(stored)).itemsize
    trial_memory = np.zeros((high - low) * itemsize // regions[0].memory.itemsize, np.uint8)
    views = [_view_memory(trial_memory, place.memory, low, itemsize) for place in regions]
    for view, values in zip(views, arrays, strict=True):
        view[...] = values.reshape(view.shape)
    for view, values in zip(views, arrays, strict=True):
        if not np.array_equal(view, values.reshape(view.shape)):
            raise _make_overlap_error(leaves, "values")


def _view_memory(memory: ByteArray, place: StridedMemory, low: int, itemsize: int) -> ByteArray:
    """Return a view of a region's bytes, in memory that starts at address `low`, for another item size (of a cast)."""
    first = (place.address - low) * itemsize // place.itemsize
    steps = (*(step * itemsize // place.itemsize for step in place.strides), 1)
    return np.lib.stride_tricks.as_strided(memory[first:], (*place.shape, itemsize), steps)


def _make_overlap_error(leaves: list[str], what: str) -> IncompatibleCheckpointError:
    return IncompatibleCheckpointError(
        f"arrays of the target share memory, and the checkpoint holds different {what} for them; nothing was changed",
        expected="equal values, or arrays with memory of their own",
        found=format_leaves(leaves),
        hint="Give each its own memory (clone() it, or do not tie the weights); or load from a tag that was saved with "
        "them tied.",
    )
