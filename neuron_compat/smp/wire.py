"""Tensors on their way between ranks, over gloo: bytes, whatever their element type, in pieces of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from neuron_compat.smp import job

distributed: Any = torch.distributed

PIECE = 256 * 1024 * 1024
"""Bytes of the largest message."""


@dataclass(frozen=True, slots=True)
class TensorType:
    """What a rank knows of a tensor that comes from another one."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def from_json(cls, shape: Sequence[int], dtype: str) -> Self:
        """As the other rank said it: `dtype` is a name such as ``torch.float32``."""
        return cls(tuple(shape), getattr(torch, dtype.removeprefix("torch.")))


def _moved(
    value: torch.Tensor | None, shape: Sequence[int], dtype: torch.dtype, move: Callable[[torch.Tensor], None]
) -> torch.Tensor:
    """Run `move` on the bytes of each piece of a value, or of memory for one; the tensor whose pieces they were."""
    tensor = torch.empty(tuple(shape), dtype=dtype, device="cpu") if value is None else value.contiguous()
    if tensor.numel():
        for piece in torch.split(tensor.reshape(-1).view(torch.uint8), PIECE):  # they share its memory
            move(piece)
    return tensor


def broadcast(
    value: torch.Tensor | None, shape: Sequence[int], dtype: torch.dtype, source: int, kind: str
) -> torch.Tensor:
    """The value of one rank on all ranks of a group; all of them make the same call.

    Args:
        value: On the source a CPU tensor; None elsewhere.
        source: The rank in the world that has it.
        kind: The group, as `job.KINDS` names it.
    """
    group = job.process_group(kind)
    sent = value if job.rank() == source else None
    return _moved(sent, shape, dtype, lambda piece: distributed.broadcast(piece, src=source, group=group))


def send(value: torch.Tensor, to: int, kind: str) -> None:
    """Send a CPU tensor to a rank of the world, which calls `receive`."""
    group = job.process_group(kind)
    _moved(value, value.shape, value.dtype, lambda piece: distributed.send(piece, dst=to, group=group))


def receive(shape: Sequence[int], dtype: torch.dtype, source: int, kind: str) -> torch.Tensor:
    """The tensor that a rank of the world sends."""
    group = job.process_group(kind)
    return _moved(None, shape, dtype, lambda piece: distributed.recv(piece, src=source, group=group))
