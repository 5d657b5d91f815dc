"""Whether two stored arrays hold the same bytes, read within bounded memory."""

from __future__ import annotations

from xla_ckpt.engine.crew import Crew
from xla_ckpt.engine.read import read_into
from xla_ckpt.engine.tag_reader import TagReader
from xla_ckpt.plan.restore_plan import Want, plan_restore
from xla_ckpt.sharding.box import Box
from xla_ckpt.sharding.ranges import pieces
from xla_ckpt.storage.pool import READERS


def same_bytes(reader: TagReader, one: str, other: str, *, max_memory: int, workers: int = READERS) -> bool:
    """Whether two arrays have the same element type, shape and bytes. What is read is verified.

    Args:
        reader: The tag.
        one: Leaf path.
        other: Another leaf path.
        max_memory: Bytes of array data in memory at a time.
        workers: Threads that read, at most.

    Raises:
        CorruptCheckpointError: The tag is damaged.
        IncompatibleCheckpointError: Nothing says how one of them was split.
    """
    a, b = reader.manifest.array(one), reader.manifest.array(other)
    if a is None or b is None or (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    whole, itemsize = Box.whole(a.shape), a.dtype.itemsize
    for part in pieces(whole, whole, itemsize, max(max_memory // 2, 1)):
        slots = [memoryview(bytearray(part.size * itemsize)) for _ in range(2)]
        wants = [Want(leaf, part, slot) for slot, leaf in enumerate((one, other))]
        read_into(reader, plan_restore(reader.manifest, wants), slots, Crew(workers=workers))
        if slots[0] != slots[1]:
            return False
    return True
