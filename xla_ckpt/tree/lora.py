"""Adapters of a model (LoRA): how their weights and their configuration are called in its state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xla_ckpt.tree import schema
from xla_ckpt.tree.skeleton import children

LORA_CONFIG = "lora_config"
"""What neuronx-distributed calls the configuration of adapters in the state of a model."""

ADAPTER = "lora_"
"""What the names of adapters' weights contain, and no other names."""

BASE_LAYER = ".base_layer"
"""What an adapter adds to the name of the layer that it is for."""


def has_adapters_alone(skeleton: Any) -> bool:
    """Whether a state has adapters with their configuration, and not the weights of the layers that they are for.

    >>> alone = dict.fromkeys(("lora_config", "q.lora_A.weight", "q.base_layer.bias", "head.weight"))
    >>> has_adapters_alone({"model": alone}), has_adapters_alone({"model": {**alone, "q.base_layer.weight": None}})
    (True, False)
    """
    names = children((children(skeleton) or {}).get(schema.MODEL)) or {}
    adapted = {name.partition(f".{ADAPTER}")[0] for name in names if f".{ADAPTER}" in name}
    weights = {name.rpartition(".")[0] for name in names if not name.endswith(".bias")}
    return LORA_CONFIG in names and not adapted <= {name.removesuffix(BASE_LAYER) for name in weights}


def lora_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration of adapters with its lists in order: some are made of sets, and differ between ranks.

    >>> lora_fields({"r": 8, "target_modules": ["v", "q"]})
    {'r': 8, 'target_modules': ['q', 'v']}
    """
    return {k: sorted(v, key=str) if isinstance(v, set | list) else v for k, v in config.items()}
