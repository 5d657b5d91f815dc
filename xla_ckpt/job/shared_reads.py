"""Reading together: ranks that want the same bytes, or parts of the same rows, read a part each and send it on.

Ranks find out through the store who wants what, so nothing is assumed about mesh or shardings
(`plan/shared_reads.py` decides who reads what); the bytes then travel in process groups of their own, gloo over host
memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from xla_ckpt.job.round import Round
from xla_ckpt.job.verdict import put_together
from xla_ckpt.plan.restore_plan import Want
from xla_ckpt.plan.shared_reads import Mixed, ReadShare, Together, find_common, share_out
from xla_ckpt.sharding.box import Box
from xla_ckpt.sharding.ranges import runs


class SharedReads:
    """Reading together, as `xla_ckpt.engine.restore` asks for it."""

    def agree(self, exchange: Round, wants: Sequence[Want]) -> ReadShare:
        own = [(want.leaf, want.box.start, want.box.stop) for want in wants]

        def united(all_wants: list[Any]) -> Any:
            return find_common([[(leaf, Box(tuple(a), tuple(b))) for leaf, a, b in its] for its in all_wants]).to_json()

        common = put_together(exchange, "wants", own, united, range(exchange.size))
        return share_out(exchange.rank, Together.from_json(common), wants)

    def send_on(
        self,
        share: ReadShare,
        slots: Sequence[memoryview],
        rows: Sequence[tuple[Mixed, Want]],
        itemsize: Mapping[str, int],
    ) -> None:
        distributed: Any = torch.distributed
        sets = sorted({ranks for _, _, ranks in share.common.same} | {m.members for m in share.common.mixed})
        groups = {members: distributed.new_group(list(members), backend="gloo") for members in sets}
        try:
            for leaf, box, ranks in share.common.same:  # in the same order on all ranks
                slot = share.slots.get((leaf, box)) if share.rank in ranks else None
                if slot is not None and len(slots[slot]):
                    data = torch.frombuffer(slots[slot], dtype=torch.uint8)
                    distributed.broadcast(data, src=share.readers[slot][0], group=groups[ranks])
            read = {id(mixed): slots[want.slot] for mixed, want in rows}
            for mixed in share.common.mixed:
                if share.rank in mixed.members:
                    _exchange(share, mixed, slots, read.get(id(mixed)), itemsize[mixed.leaf], groups[mixed.members])
        finally:
            for group in groups.values():
                if distributed.get_rank(group) >= 0:
                    distributed.destroy_process_group(group)


def _exchange(
    share: ReadShare, mixed: Mixed, slots: Sequence[memoryview], read: memoryview | None, itemsize: int, group: Any
) -> None:
    """Exchange one leaf: every member sends to each other one the part of its rows that the other one wants."""
    pending = _send_rows(share, mixed, slots, read, itemsize, group)
    _receive_rows(share, mixed, slots, itemsize, group)
    for work, _ in pending:
        work.wait()


def _send_rows(
    share: ReadShare, mixed: Mixed, slots: Sequence[memoryview], read: memoryview | None, itemsize: int, group: Any
) -> list[tuple[Any, Any]]:
    """Send what this rank read, and copy its own part. (Work, data) of what is on its way: data must be kept so long.

    Nothing waits here: if all members sent first and waited, nobody would receive.
    """
    distributed: Any = torch.distributed
    pending: list[tuple[Any, Any]] = []
    own = mixed.rows(share.rank)
    if own is None or read is None:
        return pending
    for tag, (box, ranks) in enumerate(mixed.boxes):
        part = own.intersect(box)
        if part is None:
            continue
        data = torch.from_numpy(_cut(read, own, part, itemsize))
        for rank in ranks:
            if rank == share.rank:
                place = _place(slots[share.slots[mixed.leaf, box]], box, part, itemsize)
                np.copyto(np.frombuffer(place, np.uint8), data.numpy())
            else:
                pending.append((distributed.isend(data, rank, group=group, tag=tag), data))
    return pending


def _receive_rows(share: ReadShare, mixed: Mixed, slots: Sequence[memoryview], itemsize: int, group: Any) -> None:
    """Receive what other members read of the boxes that this rank wants. The tag of a message is the box's number."""
    distributed: Any = torch.distributed
    own_boxes = [(tag, box) for tag, (box, ranks) in enumerate(mixed.boxes) if share.rank in ranks]
    for reader in mixed.members:
        rows_read = mixed.rows(reader)
        if reader == share.rank or rows_read is None:
            continue
        for tag, box in own_boxes:
            part = rows_read.intersect(box)
            if part is not None:
                place = _place(slots[share.slots[mixed.leaf, box]], box, part, itemsize)
                distributed.recv(torch.frombuffer(place, dtype=torch.uint8), reader, group=group, tag=tag)


def _cut(memory: memoryview, box: Box, part: Box, itemsize: int) -> Any:
    """The bytes of a part of what a buffer holds, as a contiguous array."""
    array = np.frombuffer(memory, np.uint8).reshape(*box.shape, itemsize)
    chosen = array[part.relative_to(box).slices]
    return np.ascontiguousarray(chosen).reshape(-1)


def _place(memory: memoryview, box: Box, part: Box, itemsize: int) -> memoryview:
    """The memory of whole rows of a box."""
    where = runs(part, box, itemsize)
    assert where.contiguous
    return memory[where.offset : where.offset + where.nbytes]
