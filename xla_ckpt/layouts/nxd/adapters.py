"""Adapters of neuronx-distributed's `LoraModel`: the configuration that lies beside their tags, and not in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xla_ckpt.errors import naming
from xla_ckpt.layouts.nxd.scan import Around
from xla_ckpt.layouts.peft import ADAPTER_CONFIG, MAX_ADAPTER_CONFIG, parsed_config
from xla_ckpt.storage.base import Store
from xla_ckpt.tree import schema


class BesideRoot(Around):
    """Unless `save_lora_config_adapter` is set, the configuration is a file in `lora_save_dir`.

    neuronx-distributed loads adapters from the tags in that directory, so that it is their root.
    """

    def __init__(self, store: Store) -> None:
        self.store = store

    def of_model(self, model: Mapping[str, Any]) -> dict[str, Any]:
        has_adapters = any(schema.ADAPTER in name for name in model)
        if schema.LORA_CONFIG in model or not has_adapters or not self.store.has(ADAPTER_CONFIG):
            return {}
        with naming(file=ADAPTER_CONFIG):
            return {schema.LORA_CONFIG: parsed_config(self.store.start_of(ADAPTER_CONFIG, MAX_ADAPTER_CONFIG))}
