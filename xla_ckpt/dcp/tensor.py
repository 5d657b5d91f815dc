"""`GlobalTensor`: a global tensor with the shards of this process, in the form that DCP's planners expect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from xla_ckpt.arrays.declared_chunks import has_declared_chunks, is_checkpointable
from xla_ckpt.arrays.registry import require_adapter
from xla_ckpt.arrays.torch_elements import narrow_to_box
from xla_ckpt.core.sharding.box import Box
from xla_ckpt.core.sharding.local_array import LocalArray
from xla_ckpt.errors import UnsupportedStateError

TensorRegion = tuple[Box, torch.Tensor]
"""A region of a global tensor, and a tensor of that shape with its elements, which a load overwrites."""


class GlobalTensor(torch.Tensor):
    """A tensor of global shape that DCP saves and loads region by region. It supports no other operations.

    It has no elements itself. Its regions are tensors of the program, or views of them, so that a load fills these. It
    implements the same protocol for DCP's planners as DTensor.
    """

    regions: tuple[TensorRegion, ...]

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, regions: Sequence[TensorRegion]) -> GlobalTensor:
        """Create a global tensor; `regions` are disjoint, and may be empty."""
        make: Any = torch.Tensor._make_wrapper_subclass
        tensor: GlobalTensor = make(cls, tuple(shape), dtype=dtype, device=torch.device("cpu"), requires_grad=False)
        tensor.regions = tuple(regions)
        return tensor

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        boxes = ", ".join(str(box) for box, _ in self.regions)
        return f"GlobalTensor({list(self.shape)}, {self.dtype}, held: {boxes or 'nothing'})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return GlobalTensor, (tuple(self.shape), self.dtype, self.regions)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as torch documents it
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is torch.ops.aten.detach.default:
            return args[0]
        raise UnsupportedStateError(
            f"a GlobalTensor is made for the calls of torch.distributed.checkpoint, and has no {function}",
            hint="Use the tensor that it was made of.",
        )

    def __create_write_items__(self, fqn: str, value: Any) -> list[WriteItem]:
        """Return the DCP write items of its regions."""
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(chunk.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(self.shape)),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return the DCP metadata of its regions."""
        return [ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.shape)) for box, _ in self.regions]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """Return the tensor of the region at an index.

        Raises:
            UnsupportedStateError: If there is no such region.
        """
        start = tuple(index.offset or ())
        for box, tensor in self.regions:
            if box.start == start:
                return tensor
        raise UnsupportedStateError(f"no region begins at {list(start)}", leaf=index.fqn, found=repr(self))


def create_global_tensor(value: torch.Tensor, local: LocalArray) -> GlobalTensor:
    """Create the global tensor of a shard: `value`, or the local tensor of a DTensor."""
    held = getattr(value, "_local_tensor", value).detach()
    return GlobalTensor(
        local.shape, value.dtype, [(piece.global_box, narrow_to_box(held, piece.local_box)) for piece in local.pieces]
    )


def check_can_plan(value: torch.Tensor, key: str) -> None:
    """Check that a planner has not returned a `CheckpointableTensor` unwrapped, since its chunks were not planned.

    Raises:
        UnsupportedStateError: If `value` is a `CheckpointableTensor`.
    """
    if value.dim() and is_checkpointable(value):
        raise UnsupportedStateError(
            f"the planner of torch {torch.__version__} takes a CheckpointableTensor for a whole tensor",
            leaf=key,
            hint="Call xla_ckpt.dcp.save and load without planner=, pass xla_ckpt.dcp.sharded(state_dict) in place of "
            "the state dict, or use torch 2.15 or newer.",
        )


def wrap_declared_chunks(value: Any, key: str) -> Any:
    """Wrap a tensor with declared chunks in a `GlobalTensor`; return any other value unchanged.

    DCP's planners support the attributes of a `CheckpointableTensor` from torch 2.15 on.

    Raises:
        UnsupportedStateError: If the chunks do not fit.
    """
    if not isinstance(value, torch.Tensor) or not has_declared_chunks(value):
        return value
    local = require_adapter(value, key).locate(value, key)
    assert local is not None, "it names its place"
    return create_global_tensor(value, local)
