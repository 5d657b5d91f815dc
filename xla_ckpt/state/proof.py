"""The proof of a load: what the program holds is read back from where it lies, and compared with the tag."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xla_ckpt.arrays.base import ArrayAdapter
from xla_ckpt.arrays.registry import Adapters
from xla_ckpt.engine.crew import Crew
from xla_ckpt.engine.read import check_slots
from xla_ckpt.engine.tag_reader import TagReader
from xla_ckpt.lightweight import lightweight
from xla_ckpt.plan.restore_plan import Want, plan_restore
from xla_ckpt.sharding.box import Box
from xla_ckpt.sharding.local_array import LocalArray
from xla_ckpt.state.loadings import Loadings

GROUP_BYTES = 1 << 30
"""So many bytes of a device's memory are in host memory at a time, and at least one array."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What was found out about the arrays of a load."""

    nbytes: int = 0
    """Bytes that were compared, and are those of the tag."""

    unproven: tuple[str, ...] = ()
    """Leaf paths of arrays that cannot be compared, with the reason."""


@lightweight()
class _Installed:
    """An array of the program that has its stored bytes now."""

    leaf: str
    value: Any
    local: LocalArray
    adapter: ArrayAdapter

    @property
    def nbytes(self) -> int:
        """Bytes of all its pieces."""
        return sum(piece.box.size for piece in self.local.pieces) * self.adapter.dtype(self.value, self.leaf).itemsize


def prove(reader: TagReader, loadings: Loadings, crew: Crew) -> Proof:
    """Compare the arrays of a load that is done with what is stored of them.

    Raises:
        UnprovenLoadError: An array has other bytes.
        CorruptCheckpointError: The tag is damaged by now, where it has to be read again.
    """
    adapters, unproven, installed = Adapters(), [], []
    taken_by_program = loadings.alone
    for leaf, target in loadings.targets.items():
        value = loadings.installed[leaf]
        adapter = adapters.require(value, leaf)
        if leaf in taken_by_program:
            unproven.append(f"{leaf}: code of the program has taken it")
        elif (dtype := adapter.dtype(value, leaf)) != target.dtype:
            unproven.append(f"{leaf}: {target.dtype.name} is stored, and was converted to {dtype.name}")
        else:
            installed.append(_Installed(leaf, value, target.local, adapter))
    for group in _groups(installed):
        _compare(reader, group, crew)
    return Proof(nbytes=sum(array.nbytes for array in installed), unproven=tuple(unproven))


def _groups(arrays: Sequence[_Installed]) -> Iterator[list[_Installed]]:
    """The arrays, of one kind at a time, and not more than may be in host memory together."""
    group: list[_Installed] = []
    nbytes = 0
    for array in sorted(arrays, key=lambda a: id(a.adapter)):
        if group and (array.adapter is not group[0].adapter or nbytes + array.nbytes > GROUP_BYTES):
            yield group
            group, nbytes = [], 0
        group.append(array)
        nbytes += array.nbytes
    if group:
        yield group


def _compare(reader: TagReader, group: Sequence[_Installed], crew: Crew) -> None:
    """Compare some arrays of one kind with what is stored of them."""
    with crew.phases.timed("prove"):
        shards_of_each = group[0].adapter.host([(array.value, array.local) for array in group])
    aliases: Mapping[str, str] = reader.manifest.aliases
    pieces = [
        (array.leaf, piece.box, shard)
        for array, shards in zip(group, shards_of_each, strict=True)
        for piece, shard in zip(array.local.pieces, shards, strict=True)
        if piece.box.size
    ]
    while pieces:
        # The same stored bytes may be held on several devices, and under several names: each of them is compared.
        wants: list[Want] = []
        slots: list[memoryview] = []
        taken: dict[str, list[Box]] = {}
        again = []
        for leaf, box, shard in pieces:
            boxes = taken.setdefault(aliases.get(leaf, leaf), [])
            if any(box.intersect(other) is not None for other in boxes):
                again.append((leaf, box, shard))
                continue
            boxes.append(box)
            wants.append(Want(leaf, box, len(slots)))
            slots.append(shard.data)
        check_slots(reader, plan_restore(reader.manifest, wants), slots, crew)
        pieces = again
