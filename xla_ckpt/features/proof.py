"""Verify a load: read the program's arrays back from their devices, and compare them with the checkpoint.

Arrays that the program's own code has loaded, or whose dtype was converted, cannot be compared and are listed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xla_ckpt.arrays.base import ArrayAdapter
from xla_ckpt.arrays.registry import AdapterRegistry
from xla_ckpt.core.lightweight import slots_dataclass
from xla_ckpt.core.plan.restore_plan import ReadRequest, plan_restore
from xla_ckpt.core.sharding.box import Box
from xla_ckpt.core.sharding.local_array import LocalArray
from xla_ckpt.loading.read import verify_loaded
from xla_ckpt.loading.tag_reader import TagReader
from xla_ckpt.progress import IoContext
from xla_ckpt.state.load_plan import LoadPlan

BATCH_BYTES = 1 << 30
"""Maximum number of bytes copied from devices to host memory at a time; at least one array is copied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadVerification:
    """Result of verifying the arrays of a load."""

    nbytes: int = 0
    """Number of bytes that were compared and match the tag."""

    unverified: tuple[str, ...] = ()
    """Leaf paths of arrays that cannot be compared, with the reason."""


@slots_dataclass()
class _InstalledArray:
    """An array of the program after its load."""

    leaf: str
    value: Any
    local: LocalArray
    adapter: ArrayAdapter

    @property
    def nbytes(self) -> int:
        """Total size of its pieces (bytes)."""
        return (
            sum(piece.global_box.size for piece in self.local.pieces)
            * self.adapter.get_dtype(self.value, self.leaf).itemsize
        )


def verify_load(reader: TagReader, plan: LoadPlan, crew: IoContext) -> LoadVerification:
    """Compare the arrays of a finished load with their stored bytes.

    Raises:
        UnprovenLoadError: An array has different bytes.
        CorruptCheckpointError: The tag, parts of which are read again, has become corrupt.
    """
    adapters, unproven, installed = AdapterRegistry(), [], []
    taken_by_program = plan.state_dict_paths
    for leaf, target in plan.targets.items():
        value = plan.installed[leaf]
        adapter = adapters.require(value, leaf)
        if leaf in taken_by_program:
            unproven.append(f"{leaf}: code of the program has taken it")
        elif (dtype := adapter.get_dtype(value, leaf)) != target.dtype:
            unproven.append(f"{leaf}: {target.dtype.name} is stored, and was converted to {dtype.name}")
        else:
            installed.append(_InstalledArray(leaf, value, target.local, adapter))
    for group in _split_batches(installed):
        _compare_batch(reader, group, crew)
    return LoadVerification(nbytes=sum(array.nbytes for array in installed), unverified=tuple(unproven))


def _split_batches(arrays: Sequence[_InstalledArray]) -> Iterator[list[_InstalledArray]]:
    """Yield batches of arrays with the same adapter that fit in host memory together."""
    group: list[_InstalledArray] = []
    nbytes = 0
    for array in sorted(arrays, key=lambda a: id(a.adapter)):
        if group and (array.adapter is not group[0].adapter or nbytes + array.nbytes > BATCH_BYTES):
            yield group
            group, nbytes = [], 0
        group.append(array)
        nbytes += array.nbytes
    if group:
        yield group


def _compare_batch(reader: TagReader, batch: Sequence[_InstalledArray], crew: IoContext) -> None:
    """Compare arrays with the same adapter with their stored bytes."""
    with crew.phases.measure("prove"):
        shards_of_each = batch[0].adapter.get_host_shards([(array.value, array.local) for array in batch])
    aliases: Mapping[str, str] = reader.manifest.aliases
    pieces = [
        (array.leaf, piece.global_box, shard)
        for array, shards in zip(batch, shards_of_each, strict=True)
        for piece, shard in zip(array.local.pieces, shards, strict=True)
        if piece.global_box.size
    ]
    while pieces:
        # The same stored bytes may be on several devices and under several names: each copy is compared.
        wants: list[ReadRequest] = []
        slots: list[memoryview] = []
        taken: dict[str, list[Box]] = {}
        again = []
        for leaf, box, shard in pieces:
            boxes = taken.setdefault(aliases.get(leaf, leaf), [])
            if any(box.intersect(other) is not None for other in boxes):
                again.append((leaf, box, shard))
                continue
            boxes.append(box)
            wants.append(ReadRequest(leaf, box, len(slots)))
            slots.append(shard.data)
        verify_loaded(reader, plan_restore(reader.manifest, wants), slots, crew)
        pieces = again
