"""The loss over logits of which every tensor-parallel rank holds a part of the vocabulary."""

from __future__ import annotations

import torch

from neuron_compat.emulated import collectives, parallel_state
from neuron_compat.emulated.mappings import reduce_from_tensor_model_parallel_region
from xla_ckpt import UsageError


def parallel_cross_entropy(
    vocab_parallel_logits: torch.Tensor, target: torch.Tensor, label_smoothing: float = 0.0
) -> torch.Tensor:
    """The cross-entropy of each token, the same on all ranks of the group. The logits stay as they are.

    A target outside of the vocabulary, such as -100, has the logarithm of the sum: mask it.

    Args:
        vocab_parallel_logits: [..., part of the vocabulary].
        target: [...], numbers in the whole vocabulary.
        label_smoothing: 0.

    Raises:
        xla_ckpt.UsageError: Labels would be smoothed.
    """
    if label_smoothing:
        raise UsageError(
            "label_smoothing is not there where the vocabulary is split",
            hint="Join the logits (gather_output=True), and call torch's own cross_entropy.",
        )
    rows = vocab_parallel_logits.shape[-1]
    own = target - rows * parallel_state.rank("tp")
    is_own = (own >= 0) & (own < rows)
    highest = vocab_parallel_logits.detach().amax(-1)
    collectives.reduce_in_place([highest], collectives.ranks_of("tp"), collectives.MAX)
    logits = vocab_parallel_logits - highest.unsqueeze(-1)
    picked = logits.gather(-1, (own * is_own).unsqueeze(-1)).squeeze(-1) * is_own
    total = reduce_from_tensor_model_parallel_region(logits.exp().sum(-1))
    return total.log() - reduce_from_tensor_model_parallel_region(picked)
