"""Rotary position embeddings, with neuronx-distributed's names and arguments."""

from __future__ import annotations

import torch

from neuron_compat.nxd.exports import attach_exports

__getattr__, __dir__ = attach_exports(__name__)


def rotate_half(x: torch.Tensor, flash_attn: bool, transpose: bool) -> torch.Tensor:
    """Swap the two halves of the features, and negate the former second half.

    Features are the last dim, or the second-to-last in inputs that are transposed for flash attention.
    """
    dim = -2 if flash_attn and transpose else -1
    first, second = x.tensor_split(2, dim)
    return torch.cat([second.neg(), first], dim)


def apply_rotary_pos_emb(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None,
    flash_attn: bool,
    transpose_nki_inputs: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys by the angles of their positions.

    Args:
        q: [batch, heads, length, features]; transposed: [batch, heads, features, length].
        k: As `q`.
        cos: [batch, length, features], or for all positions [length, features] with `position_ids`.
        sin: As `cos`.
        position_ids: Position of each token.
        flash_attn: True if flash attention receives the result.
        transpose_nki_inputs: True if they are transposed for flash attention.
    """
    angles = [value if position_ids is None else value[position_ids] for value in (cos, sin)]
    if flash_attn and transpose_nki_inputs:
        angles = [value.transpose(-1, -2) for value in angles]
    cosines, sines = (value.unsqueeze(1) for value in angles)  # the same for all heads
    turned_q, turned_k = (x * cosines + rotate_half(x, flash_attn, transpose_nki_inputs) * sines for x in (q, k))
    return turned_q, turned_k
