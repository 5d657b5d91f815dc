"""Names of SMP's layers: all unsupported; each raises an error with a hint."""

from __future__ import annotations

from neuron_compat.lazy_imports import attach_lazy_names

_NORM_HINT = "Use torch.nn.LayerNorm."
_LAYERS_HINT = (
    "Use the layers of neuron_compat.nxd.parallel_layers: ColumnParallelLinear, RowParallelLinear, ParallelEmbedding."
)
_TRANSFORMER_HINT = f"Make the transformer of torch's own modules. {_LAYERS_HINT}"

__getattr__, __dir__ = attach_lazy_names(
    __name__,
    {},
    missing={
        "FusedLayerNorm": _NORM_HINT,
        "DistributedLayerNorm": _NORM_HINT,
        "DistributedModule": _LAYERS_HINT,
        "DistributedLinear": _LAYERS_HINT,
        "DistributedEmbedding": _LAYERS_HINT,
        "DistributedTransformer": _TRANSFORMER_HINT,
        "DistributedTransformerLayer": _TRANSFORMER_HINT,
        "DistributedTransformerLMHead": _TRANSFORMER_HINT,
        "DistributedTransformerOutputLayer": _TRANSFORMER_HINT,
        "DistributedAttentionLayer": _TRANSFORMER_HINT,
        "huggingface": _TRANSFORMER_HINT,
    },
)
