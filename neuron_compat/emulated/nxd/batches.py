"""Batches whose sequences are dealt out to context-parallel ranks, with neuronx-distributed's names."""

from __future__ import annotations

from typing import Any

import torch

from neuron_compat.emulated import parallel_state

IGNORED = -100
"""A label that no loss counts."""

Batch = dict[str, Any]


def shift_labels(batch: Batch) -> Batch:
    """A batch whose ``labels`` [batch, length] are each that of the next token."""
    shifted = dict(batch)
    if "labels" in batch:
        shifted["labels"] = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
    return shifted


def get_batch_on_this_context_parallel_rank(batch: Batch) -> Batch:
    """This rank's part of the sequences of a batch, whose labels are shifted; the batch as it is, if there is one rank.

    Raises:
        ValueError: A length does not divide by the number of context-parallel ranks.
    """
    size, rank = parallel_state.size("cp"), parallel_state.rank("cp")
    if size == 1:
        return batch
    return {name: _part(name, value, size, rank) for name, value in shift_labels(batch).items()}


def _part(name: str, value: Any, size: int, rank: int) -> Any:
    """A context-parallel rank's part of a value, [batch, sequence, ...]; with sequences of length 1, all of it."""
    if value is None or value.shape[1] == 1:
        return value
    if value.shape[1] % size:
        raise ValueError(f"{name} has sequences of {value.shape[1]}, which {size} context-parallel ranks do not divide")
    return value.chunk(size, 1)[rank]
