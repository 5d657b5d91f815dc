"""Tensors on their way between ranks, over gloo: bytes, whatever their element type, in pieces of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from neuron_compat.smp import job

distributed: Any = torch.distributed

PIECE = 256 * 1024 * 1024
"""Bytes of the largest message."""


def _moved(
    value: torch.Tensor | None, shape: Sequence[int], dtype: torch.dtype, move: Callable[[torch.Tensor], None]
) -> torch.Tensor:
    """Run `move` on the bytes of each piece of a value, or of memory for one; the tensor whose pieces they were."""
    held = torch.empty(tuple(shape), dtype=dtype) if value is None else value.contiguous()
    if held.numel():
        for piece in torch.split(held.reshape(-1).view(torch.uint8), PIECE):  # they share its memory
            move(piece)
    return held


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
    mine = value if job.rank() == source else None
    return _moved(mine, shape, dtype, lambda piece: distributed.broadcast(piece, src=source, group=group))


def send(value: torch.Tensor, to: int, kind: str) -> None:
    """Send a CPU tensor to a rank of the world, which calls `receive`."""
    group = job.process_group(kind)
    _moved(value, value.shape, value.dtype, lambda piece: distributed.send(piece, dst=to, group=group))


def receive(shape: Sequence[int], dtype: torch.dtype, source: int, kind: str) -> torch.Tensor:
    """The tensor that a rank of the world sends."""
    group = job.process_group(kind)
    return _moved(None, shape, dtype, lambda piece: distributed.recv(piece, src=source, group=group))
