"""A restore: the memory of all targets is filled from a tag, and every byte is verified on the way."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol

from xla_ckpt.engine.crew import Crew
from xla_ckpt.engine.garbage_collection import collector_paused
from xla_ckpt.engine.overlaps import check_overlaps
from xla_ckpt.engine.phases import Phases
from xla_ckpt.engine.progress import Progress
from xla_ckpt.engine.read import check_reads, read_into
from xla_ckpt.engine.tag_reader import TagReader
from xla_ckpt.engine.target import Target, by_kind
from xla_ckpt.errors import storage_errors
from xla_ckpt.job.round import Round
from xla_ckpt.job.verdict import LateLoss, agreed
from xla_ckpt.plan.costs import STRAIGHT_BYTES
from xla_ckpt.plan.restore_plan import RestorePlan, Want, plan_restore
from xla_ckpt.plan.shared_reads import Mixed, ReadShare
from xla_ckpt.snapshot.memory import Slabs
from xla_ckpt.storage.pool import READERS, threads

STAGED_BYTES = 128 * 1024 * 1024
"""Bytes of small arrays in the program's memory, at most, that are read into other memory and copied, in place of being
read twice. Of a large one the pages of that memory would cost more than a second read from the page cache."""

FAR_STAGED_BYTES = 4 << 30
"""The same of arrays of any size, where no cache keeps what was read: a second read would be a second transfer."""


UNCHECKED_BYTES = 1 << 30
"""Bytes of new memory that are taken without a look at the files that are to fill it."""


class Sharing(Protocol):
    """How ranks that need the same bytes read them together (`xla_ckpt.job.shared_reads`)."""

    def agree(self, exchange: Round, wants: Sequence[Want]) -> ReadShare:
        """Find out which ranks want the same, and deal the reading out among them."""

    def send_on(
        self,
        share: ReadShare,
        slots: Sequence[memoryview],
        rows: Sequence[tuple[Mixed, Want]],
        itemsize: Mapping[str, int],
    ) -> None:
        """Send on what this rank read for others, and receive what they read for it. All ranks of the job call it.

        `rows` are the reads for mixed boxes, whose memory is in `slots`, too; `itemsize` is in bytes, by leaf path.
        """


@dataclass(frozen=True, slots=True)
class WantedMemory:
    """The memory of all wanted boxes."""

    slots: list[memoryview]
    wants: list[Want]
    live: frozenset[int]
    """Slots that are memory of the program. They are written only after all their bytes have been verified."""

    slabs: Slabs
    """Where the new memory among them comes from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filling:
    """How targets are filled, and with whom."""

    exchange: Round
    """Where the ranks meet."""

    phases: Phases
    """Receives what is measured."""

    hand_over: Callable[[], None] = lambda: None
    """Called on all ranks when everything is verified, and no memory that the program uses is overwritten."""

    alone: Collection[str] = ()
    """Leaf paths of targets of new memory that have to be filled by then: this rank reads them itself."""

    sharing: Sharing | None = None
    """Ranks that need the same bytes read them together; None if each reads its own."""

    late_loss: LateLoss | None = None
    """Keeps the error if a rank is lost after all ranks have verified their part, and this one does not depend on it:
    the memory of this rank is filled all the same. None raises it."""

    workers: int = READERS
    """Threads that read, at most."""

    shown: bool | None = False
    """Whether a progress bar is shown; None decides by itself."""


def fill(reader: TagReader, targets: Mapping[str, Target], how: Filling) -> tuple[int, int]:
    """Fill the memory of all targets. All ranks of the job call it; all raise the same error.

    What goes into memory that the program uses is read twice: once to verify it, and once to overwrite the memory.
    Small arrays are read once, and wait in other memory; from an object store large ones, too (`FAR_STAGED_BYTES`). No
    rank overwrites before all ranks have verified their part, so a damaged tag changes nothing anywhere.

    Args:
        reader: The tag.
        targets: Leaf path -> where the array goes.
        how: How they are filled, and with whom.

    Returns:
        Bytes that the targets need, and bytes that were read for them.

    Raises:
        CorruptCheckpointError: The tag is damaged.
        IncompatibleCheckpointError: Targets share memory, and different values are stored for them.
        StorageError: The storage refused.
        RankFailedError: Another rank was lost.
    """
    exchange, phases, sharing = how.exchange, how.phases, how.sharing
    with phases.timed("plan"):
        with agreed(exchange, "planning"), collector_paused():
            _check_sizes(reader, targets)
            check_overlaps(reader, targets)
            memory = memory_of(targets)
            plan = plan_restore(reader.manifest, memory.wants)
        itemsize = {path: target.dtype.itemsize for path, target in targets.items()}
        shared: _SharedPart | None = None
        if sharing is not None and exchange.size > 1:
            shared = _shared_part(reader, memory, plan, itemsize, how)
        slots = memory.slots if shared is None else shared.slots
        reads = plan if shared is None else shared.reads
        # What other ranks send would go to the wrong memory: it comes when the staged bytes are in place.
        with collector_paused():
            staged = {} if shared is not None else _staged(memory, cached=reader.directory.costs.cached)
            slots = [staged.get(i, slot) for i, slot in enumerate(slots)]
            twice = memory.live - staged.keys()
            to_live = reads.of_slots(twice)
            in_use, fresh = reads.rows(to_live), reads.rows(~to_live)
            total = fresh.read_bytes + 2 * in_use.read_bytes
    # The bytes of `in_use` count twice: they are verified before anything is overwritten, and then read again.
    what = f"load {reader.tag} (verify, then read)" if len(in_use) else f"load {reader.tag}"
    with Progress(what, total, how.shown) as bar:
        crew = Crew(workers=how.workers, progress=bar, phases=phases)
        with agreed(exchange, "reading"), storage_errors("reading a tag", path=reader.root, tag=reader.tag):
            read_into(reader, fresh, slots, crew, slabs=memory.slabs)
            check_reads(reader, in_use, crew)
        with phases.timed("install"):
            how.hand_over()
        # From here on memory of the program changes: every byte that goes there has been verified, on every rank.
        # Who has to send on what it read depends on the others to the end.
        ending = agreed(exchange, "overwriting")
        if how.late_loss is not None and shared is None:
            ending = how.late_loss.agreed("overwriting")
        with ending, storage_errors("reading a tag", path=reader.root, tag=reader.tag):
            read_into(reader, in_use, slots, replace(crew, workers=threads(how.workers, 3)))
            with phases.timed("install"):
                for slot, data in staged.items():  # what is verified goes into the memory of the program
                    memory.slots[slot][:] = data
    if sharing is not None and shared is not None:
        with phases.timed("read"):
            sharing.send_on(shared.share, slots, shared.rows, itemsize)
    return plan.needed_bytes, total


def _check_sizes(reader: TagReader, targets: Mapping[str, Target]) -> None:
    """Look at the sizes of the files before much memory is taken for them: a manifest may claim any size.

    Raises:
        CorruptCheckpointError: A file is missing, or has another size.
    """
    wanted = 0
    for leaf, target in targets.items():
        if not target.live:
            for box in target.boxes:
                wanted += box.size * target.dtype.itemsize
        if wanted > UNCHECKED_BYTES and (record := reader.manifest.array(leaf)) is not None:
            for file in {shard.file for box in target.boxes for shard in record.touching(box)}:
                reader.source(file)


def _staged(memory: WantedMemory, *, cached: bool) -> dict[int, memoryview]:
    """Other memory for slots of the program's that are not read twice, in their order, as many as may be; by slot."""
    small = [slot for slot in sorted(memory.live) if not cached or len(memory.slots[slot]) < STRAIGHT_BYTES]
    sizes = [len(memory.slots[slot]) for slot in small]
    fitting = bisect_right(list(accumulate(sizes)), STAGED_BYTES if cached else FAR_STAGED_BYTES)
    return dict(zip(small[:fitting], memory.slabs.views(sizes[:fitting]), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class _SharedPart:
    """What this rank reads when ranks read together."""

    share: ReadShare
    rows: list[tuple[Mixed, Want]]
    """What this rank reads of boxes that lie in the same rows, on behalf of all ranks that want one of them."""

    slots: list[memoryview]
    """The memory of all wanted boxes, and behind it that of `rows`."""

    reads: RestorePlan


def _shared_part(
    reader: TagReader, memory: WantedMemory, plan: RestorePlan, itemsize: Mapping[str, int], how: Filling
) -> _SharedPart:
    """Agree with the other ranks on who reads what; `plan` is what this rank would read without them."""
    assert how.sharing is not None
    common, alone = [], frozenset(how.alone)
    for want in memory.wants:
        record = reader.manifest.array(want.leaf)
        # What each rank has of its own is not the same bytes, although leaf path and box are the same.
        if record is not None and not record.own and want.leaf not in alone:
            common.append(want)
    share = how.sharing.agree(how.exchange, common)
    rows = share.rows(len(memory.slots))
    slabs = Slabs()
    own_memory = [slabs.take(want.box.size * itemsize[want.leaf]).data for _, want in rows]
    more = plan_restore(reader.manifest, [want for _, want in rows])
    return _SharedPart(
        share=share,
        rows=rows,
        slots=[*memory.slots, *own_memory],
        reads=RestorePlan.joined([share.alone(plan), more]),
    )


def memory_of(targets: Mapping[str, Target]) -> WantedMemory:
    """The memory of the boxes of all targets, numbered."""
    slots: list[memoryview] = []
    wants: list[Want] = []
    live: set[int] = set()
    slabs = Slabs()
    of_each = by_kind(targets.values(), lambda kind, some: kind.memory_of(some, slabs))
    for (path, target), memories in zip(targets.items(), of_each, strict=True):
        is_live = target.live
        for box, memory in zip(target.boxes, memories, strict=True):
            if is_live:
                live.add(len(slots))
            wants.append(Want(path, box, len(slots)))
            slots.append(memory)
    return WantedMemory(slots, wants, frozenset(live), slabs)
