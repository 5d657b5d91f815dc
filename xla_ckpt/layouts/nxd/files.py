"""What lies in tags that neuronx-distributed wrote: of the present layout, and of an older one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from xla_ckpt.errors import CorruptCheckpointError, naming
from xla_ckpt.layouts.by_rank.content import Content
from xla_ckpt.layouts.by_rank.grid import RankAt, RankGrid, RankName, placed_by
from xla_ckpt.layouts.by_rank.one_file_each import TAG, OneFileEach
from xla_ckpt.layouts.by_rank.state import trees
from xla_ckpt.layouts.nxd.folders import FolderFiles
from xla_ckpt.layouts.nxd.tensor_files import TensorFiles
from xla_ckpt.layouts.peft import ADAPTER_CONFIG, MAX_ADAPTER_CONFIG, parsed_config
from xla_ckpt.plan.hints import Hints
from xla_ckpt.storage.base import Directory, Store
from xla_ckpt.tree import lora, schema


class NxdFiles(FolderFiles):
    """The rank files of a tag, and what lies beside it in its root.

    That is the configuration of adapters, unless `save_lora_config_adapter` is set: a file in `lora_save_dir`, from
    whose tags neuronx-distributed loads adapters.
    """

    def __init__(self, directory: Directory, store: Store) -> None:
        super().__init__(directory)
        self.store = store

    def content(self, hints: Hints) -> Content:
        content = super().content(hints)
        model = content.parts.get(schema.MODEL, {})
        has_adapters = any(lora.ADAPTER in name for name in model)
        if has_adapters and lora.LORA_CONFIG not in model and self.store.has(ADAPTER_CONFIG):
            with naming(file=ADAPTER_CONFIG):
                config = parsed_config(self.store.start_of(ADAPTER_CONFIG, MAX_ADAPTER_CONFIG))
            model[lora.LORA_CONFIG] = config
        return content


_OPTIMIZER = RankName("optim.dp_rank_{dp:02}.tp_rank_{tp:02}")
"""Name of a file that `save_sharded_state_dict` of a ZeRO-1 optimizer leaves beside them. It names no stage."""


_BESIDE = "optim.dp_rank_*"
"""What errors call those files."""


class LegacyFiles(TensorFiles, OneFileEach):
    """The files of a tag of the older form, and those of a ZeRO-1 optimizer beside them."""

    def grids(self) -> dict[str, RankGrid]:
        grids = super().grids()
        if beside := placed_by(self.names, [_OPTIMIZER]):
            own, tp = RankGrid.of(beside), grids[TAG].sizes.tp
            grids[_BESIDE] = replace(own, sizes=replace(own.sizes, tp=max(tp, own.sizes.tp)))
        return grids

    def optimizers(
        self, stored: Mapping[RankAt, Mapping[Any, Any]], grid: RankGrid, hints: Hints
    ) -> tuple[Mapping[RankAt, Mapping[Any, Any]], RankGrid]:
        beside = self.grids().get(_BESIDE)
        if stored or beside is None or not hints.optimizer:
            return stored, grid
        if grid.sizes.pp > 1:
            raise CorruptCheckpointError(
                "the names of these optimizer files do not say the pipeline stage, so that the stages wrote over each "
                "other's: the states of all stages but one are lost",
                file=min(beside.paths.values()),
                found=f"{grid.sizes.pp} pipeline stages",
                hint="Load the model without the optimizer. nxd.save_checkpoint saves all of it.",
            )
        beside.check(_BESIDE, self.lost(beside.sizes))
        return trees(self, beside), beside
