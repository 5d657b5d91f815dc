"""What a plan of DCP's has a rank write: its tensors as files, its other values as one, and samples of the tensors."""

from __future__ import annotations

import io
import pickle
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from xla_ckpt.arrays.torch_elements import dtype_of
from xla_ckpt.dcp.memory import in_host_memory
from xla_ckpt.dcp.replicas import Held, Place, may_differ
from xla_ckpt.dcp.tensor import check_planned
from xla_ckpt.errors import UnsupportedStateError, naming
from xla_ckpt.files.distcp import Chunk, Distcp
from xla_ckpt.layouts.dcp.chunks import chunk_of
from xla_ckpt.manifest.digest import BlockDigester
from xla_ckpt.manifest.records import FileRecord
from xla_ckpt.plan.file_plan import FilePlan, RegionSource
from xla_ckpt.plan.save_plan import SavePlan as FilePlans
from xla_ckpt.sharding.box import Box
from xla_ckpt.snapshot.shards import HostShard, sample
from xla_ckpt.storage.base import Directory
from xla_ckpt.storage.small_files import write_small


def is_tensor(item: WriteItem) -> bool:
    """Whether an item is a tensor, or a part of one."""
    return item.type != WriteItemType.BYTE_IO


@dataclass(frozen=True, slots=True)
class TensorItem:
    """An item of a plan that is a tensor, and what this rank has of it."""

    item: WriteItem
    value: torch.Tensor
    shard: HostShard
    """Its bytes."""

    @property
    def chunk(self) -> Chunk:
        """The region of a file that it is."""
        assert self.item.tensor_data is not None
        stored, key = self.item.tensor_data.chunk, self.item.index.fqn
        stop = tuple(low + n for low, n in zip(stored.offsets, stored.sizes, strict=True))
        with naming(leaf=key):
            return chunk_of(key, dtype_of(self.value), Box(tuple(stored.offsets), stop))

    def sampled(self, *, written: bool) -> tuple[Place, Held]:
        """A sample of it, and the place that it is of."""
        key, shape = self.item.index.fqn, tuple(self.value.shape)
        loose = may_differ(key, self.value.dtype is torch.uint8, shape)
        described = _description(self.value.dtype, shape)
        return (key, tuple(self.item.index.offset or ())), Held(described, sample([self.shard.data]), written, loose)


def tensors_of(items: Sequence[WriteItem], planner: SavePlanner) -> list[TensorItem]:
    """What this rank has of the tensors among some items, as the planner gives them.

    Raises:
        UnsupportedStateError: One is not what the planner told the other ranks of.
    """
    tensors = [*filter(is_tensor, items)]
    values = [(item.index.fqn, _resolved(item, planner)) for item in tensors]
    shards = in_host_memory(values)
    return [TensorItem(item, value, shard) for item, (_, value), shard in zip(tensors, values, shards, strict=True)]


def _resolved(item: WriteItem, planner: SavePlanner) -> torch.Tensor:
    value: Any = planner.resolve_data(item)
    if isinstance(value, torch.Tensor):
        check_planned(value, item.index.fqn)
    shard = getattr(value, "__get_tensor_shard__", None)  # some planners give the whole sharded tensor
    value = value if shard is None else shard(item.index)
    described = item.tensor_data
    assert described is not None
    key = item.index.fqn
    if not isinstance(value, torch.Tensor):
        raise UnsupportedStateError("the planner gave no tensor", leaf=key, found=type(value).__name__)
    wanted, actual = (described.properties.dtype, tuple(described.chunk.sizes)), (value.dtype, tuple(value.shape))
    if wanted != actual:
        raise UnsupportedStateError(
            "a tensor is not what the metadata would say of it: it could not be loaded", leaf=key,
            expected=_description(*wanted), found=_description(*actual),
            hint="The planner's create_local_plan and resolve_data have to agree.",
        )  # fmt: skip
    return value.detach()


def planned(tensors: Sequence[TensorItem], stem: str) -> tuple[FilePlans, list[WriteResult]]:
    """The files of some tensors, and where each will lie. The leaf of a region is the number of its tensor."""
    # Readers of safetensors know one region of a name in a file: a second one goes to a further file.
    again: Counter[str] = Counter()
    by_file: dict[int, list[tuple[int, TensorItem]]] = {}
    for i, tensor in enumerate(tensors):
        key = tensor.item.index.fqn
        by_file.setdefault(again[key], []).append((i, tensor))
        again[key] += 1
    plans, results = [], []
    for number, members in sorted(by_file.items()):
        name = f"{stem}-{number + 1}" if number else stem
        codec = Distcp(f"~{name}", tuple(tensor.chunk for _, tensor in members))
        sources = tuple(RegionSource(leaf=str(i), shard=0, offset=0, nbytes=len(t.shard.data)) for i, t in members)
        plans.append(FilePlan(path=f"{name}.safetensors", codec=codec, sources=sources))
        results += [
            _result(tensor.item.index, plans[-1].path, offset, nbytes)
            for (_, tensor), (offset, nbytes) in zip(members, codec.spans, strict=True)
        ]
    return FilePlans(tuple(plans)), results


def _description(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def write_values(
    directory: Directory, stem: str, items: Sequence[WriteItem], planner: SavePlanner
) -> tuple[list[WriteResult], FileRecord | None]:
    """Write what is no tensor into one file, one thing behind the other."""
    if not items:
        return [], None
    path = f"objects-{stem}.distcp"
    data, results, regions, digests = bytearray(), [], [], []
    for item in items:
        try:
            value: Any = planner.resolve_data(item)
        except (pickle.PicklingError, AttributeError, TypeError) as error:  # what pickle raises; it names no key
            raise UnsupportedStateError(
                f"it cannot be pickled: {error}",
                leaf=item.index.fqn,
                hint="Store plain values, tensors, or an object with state_dict().",
            ) from error
        if not isinstance(value, io.BytesIO):
            raise UnsupportedStateError("the planner gave no bytes", leaf=item.index.fqn, found=type(value).__name__)
        text = value.getvalue()
        results.append(_result(item.index, path, len(data), len(text)))
        if text:
            regions.append((len(data), len(text)))
            digester = BlockDigester(len(text))
            digester.update(memoryview(text))
            digests += digester.digests
        data += text
    write_small(directory, path, bytes(data))
    record = FileRecord(path=path, size=len(data), head=0, regions=tuple(regions), digests=tuple(digests))
    return results, record


def _result(index: MetadataIndex, path: str, offset: int, nbytes: int) -> WriteResult:
    return WriteResult(index=index, size_in_bytes=nbytes, storage_data=_StorageInfo(path, offset, nbytes))
