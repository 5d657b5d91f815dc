"""SMP's layers: each name is an error that says what to use instead."""

from __future__ import annotations

from neuron_compat.lazy import lazily

_NORM = "Use torch.nn.LayerNorm."
_LAYERS = (
    "Use the layers of neuron_compat.nxd.parallel_layers: ColumnParallelLinear, RowParallelLinear, ParallelEmbedding."
)
_TRANSFORMER = f"Make the transformer of torch's own modules. {_LAYERS}"

__getattr__, __dir__ = lazily(
    __name__,
    {},
    missing={
        "FusedLayerNorm": _NORM,
        "DistributedLayerNorm": _NORM,
        "DistributedModule": _LAYERS,
        "DistributedLinear": _LAYERS,
        "DistributedEmbedding": _LAYERS,
        "DistributedTransformer": _TRANSFORMER,
        "DistributedTransformerLayer": _TRANSFORMER,
        "DistributedTransformerLMHead": _TRANSFORMER,
        "DistributedTransformerOutputLayer": _TRANSFORMER,
        "DistributedAttentionLayer": _TRANSFORMER,
        "huggingface": _TRANSFORMER,
    },
)
