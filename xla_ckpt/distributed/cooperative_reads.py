"""Cooperative reads of replicated data: each rank reads a part and sends it to the others.

Implements `replica_read="share"`. Ranks publish the regions that they need, `plan.shared_reads` assigns the reads, and
the bytes are broadcast or sent point to point in dedicated gloo process groups. No other module transfers array bytes
between ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from xla_ckpt.core.plan.restore_plan import ReadRequest
from xla_ckpt.core.plan.shared_reads import (
    OverlappingReads,
    ReadGroups,
    ReadShare,
    assign_readers,
    group_reads,
)
from xla_ckpt.core.sharding.box import Box
from xla_ckpt.core.sharding.memory_layout import compute_runs
from xla_ckpt.distributed.consensus import gather_and_combine
from xla_ckpt.distributed.exchange import Exchange


class TorchCooperativeReader:
    """The `torch.distributed` implementation of the cooperative reader of `xla_ckpt.loading.restore`."""

    def agree(self, exchange: Exchange, wants: Sequence[ReadRequest]) -> ReadShare:
        own = [(want.leaf, want.box.start, want.box.stop) for want in wants]

        def united(all_wants: list[Any]) -> Any:
            return group_reads([[(leaf, Box(tuple(a), tuple(b))) for leaf, a, b in its] for its in all_wants]).to_json()

        common = gather_and_combine(exchange, "wants", own, united, range(exchange.size))
        return assign_readers(exchange.rank, ReadGroups.from_json(common), wants)

    def exchange(
        self,
        share: ReadShare,
        buffers: Sequence[memoryview],
        rows: Sequence[tuple[OverlappingReads, ReadRequest]],
        itemsize: Mapping[str, int],
    ) -> None:
        distributed: Any = torch.distributed
        sets = sorted({ranks for _, _, ranks in share.groups.identical} | {m.members for m in share.groups.overlapping})
        groups = {members: distributed.new_group(list(members), backend="gloo") for members in sets}
        try:
            for leaf, box, ranks in share.groups.identical:  # in the same order on all ranks
                slot = share.slots.get((leaf, box)) if share.rank in ranks else None
                if slot is not None and len(buffers[slot]):
                    data = torch.frombuffer(buffers[slot], dtype=torch.uint8)
                    distributed.broadcast(data, src=share.readers[slot][0], group=groups[ranks])
            read = {id(mixed): buffers[want.slot] for mixed, want in rows}
            for mixed in share.groups.overlapping:
                if share.rank in mixed.members:
                    _exchange_leaf(
                        share, mixed, buffers, read.get(id(mixed)), itemsize[mixed.leaf], groups[mixed.members]
                    )
        finally:
            for group in groups.values():
                if distributed.get_rank(group) >= 0:
                    distributed.destroy_process_group(group)


def _exchange_leaf(
    share: ReadShare,
    mixed: OverlappingReads,
    slots: Sequence[memoryview],
    read: memoryview | None,
    itemsize: int,
    group: Any,
) -> None:
    """Exchange one leaf: each member sends every other member the part of its rows that the other needs."""
    pending = _send_rows(share, mixed, slots, read, itemsize, group)
    _receive_rows(share, mixed, slots, itemsize, group)
    for work, _ in pending:
        work.wait()


def _send_rows(
    share: ReadShare,
    mixed: OverlappingReads,
    slots: Sequence[memoryview],
    read: memoryview | None,
    itemsize: int,
    group: Any,
) -> list[tuple[Any, Any]]:
    """Send the rows that this rank read, and copy its own part. Return the pending (work, data) pairs.

    The caller must keep `data` until the work completes. This function does not wait: if all members waited after
    sending, none would receive.
    """
    distributed: Any = torch.distributed
    pending: list[tuple[Any, Any]] = []
    own = mixed.assign_rows(share.rank)
    if own is None or read is None:
        return pending
    for tag, (box, ranks) in enumerate(mixed.boxes):
        part = own.intersect(box)
        if part is None:
            continue
        data = torch.from_numpy(_extract_part(read, own, part, itemsize))
        for rank in ranks:
            if rank == share.rank:
                place = _get_rows_view(slots[share.slots[mixed.leaf, box]], box, part, itemsize)
                np.copyto(np.frombuffer(place, np.uint8), data.numpy())
            else:
                pending.append((distributed.isend(data, rank, group=group, tag=tag), data))
    return pending


def _receive_rows(
    share: ReadShare, mixed: OverlappingReads, slots: Sequence[memoryview], itemsize: int, group: Any
) -> None:
    """Receive the parts of this rank's boxes that other members read. The message tag is the index of the box."""
    distributed: Any = torch.distributed
    own_boxes = [(tag, box) for tag, (box, ranks) in enumerate(mixed.boxes) if share.rank in ranks]
    for reader in mixed.members:
        rows_read = mixed.assign_rows(reader)
        if reader == share.rank or rows_read is None:
            continue
        for tag, box in own_boxes:
            part = rows_read.intersect(box)
            if part is not None:
                place = _get_rows_view(slots[share.slots[mixed.leaf, box]], box, part, itemsize)
                distributed.recv(torch.frombuffer(place, dtype=torch.uint8), reader, group=group, tag=tag)


def _extract_part(memory: memoryview, box: Box, part: Box, itemsize: int) -> Any:
    """Return the bytes of a part of a buffer as a contiguous array."""
    array = np.frombuffer(memory, np.uint8).reshape(*box.shape, itemsize)
    chosen = array[part.relative_to(box).slices]
    return np.ascontiguousarray(chosen).reshape(-1)


def _get_rows_view(memory: memoryview, box: Box, part: Box, itemsize: int) -> memoryview:
    """Return the memory of complete rows of a box."""
    where = compute_runs(part, box, itemsize)
    assert where.is_contiguous
    return memory[where.offset : where.offset + where.run_bytes]
