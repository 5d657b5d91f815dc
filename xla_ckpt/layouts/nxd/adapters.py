"""Adapters of neuronx-distributed's `LoraModel`: the configuration that lies beside their tags, and not in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xla_ckpt.errors import naming
from xla_ckpt.layouts.by_rank.folders import FolderFiles
from xla_ckpt.layouts.peft import ADAPTER_CONFIG, MAX_ADAPTER_CONFIG, lora_config, parsed
from xla_ckpt.storage.base import Directory, Store
from xla_ckpt.tree import schema


class NxdFiles(FolderFiles):
    """The rank files of a tag, and what lies beside it in its root.

    Unless `save_lora_config_adapter` is set, the configuration is a file in `lora_save_dir`.

    neuronx-distributed loads adapters from the tags in that directory, so that it is their root.
    """

    def __init__(self, directory: Directory, store: Store) -> None:
        super().__init__(directory)
        self.store = store

    def beside_model(self, model: Mapping[str, Any]) -> dict[str, Any]:
        has_adapters = any(schema.ADAPTER in name for name in model)
        if schema.LORA_CONFIG in model or not has_adapters or not self.store.has(ADAPTER_CONFIG):
            return {}
        with naming(file=ADAPTER_CONFIG):
            return {schema.LORA_CONFIG: lora_config(parsed(self.store.start_of(ADAPTER_CONFIG, MAX_ADAPTER_CONFIG)))}
