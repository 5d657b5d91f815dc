"""What lies in tags that neuronx-distributed wrote: of the present layout, and of an older one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from xla_ckpt.errors import CorruptCheckpointError, naming
from xla_ckpt.layouts.by_rank.content import Content
from xla_ckpt.layouts.by_rank.files import RankFiles, StoredTensor
from xla_ckpt.layouts.by_rank.folders import MODEL, OPTIM, FolderFiles, content_of_grids
from xla_ckpt.layouts.by_rank.grid import RankGrid, RankName, placed_by
from xla_ckpt.layouts.by_rank.state import stages, trees
from xla_ckpt.layouts.nxd.layout import OLDER, OLDER_FOLDERS
from xla_ckpt.layouts.peft import ADAPTER_CONFIG, MAX_ADAPTER_CONFIG, parsed_config
from xla_ckpt.plan.hints import Hints
from xla_ckpt.storage.base import Directory, Store
from xla_ckpt.tree import schema


class NxdFiles(FolderFiles):
    """The rank files of a tag, and what lies beside it in its root.

    That is the configuration of adapters, unless `save_lora_config_adapter` is set: a file in `lora_save_dir`, from
    whose tags neuronx-distributed loads adapters.
    """

    def __init__(self, directory: Directory, store: Store) -> None:
        super().__init__(directory)
        self.store = store

    def beside_model(self, model: Mapping[str, Any]) -> dict[str, Any]:
        has_adapters = any(schema.ADAPTER in name for name in model)
        if schema.LORA_CONFIG in model or not has_adapters or not self.store.has(ADAPTER_CONFIG):
            return {}
        with naming(file=ADAPTER_CONFIG):
            return {schema.LORA_CONFIG: parsed_config(self.store.start_of(ADAPTER_CONFIG, MAX_ADAPTER_CONFIG))}


_OPTIMIZER = RankName("optim.dp_rank_{dp:02}.tp_rank_{tp:02}")
"""Name of a file that `save_sharded_state_dict` of a ZeRO-1 optimizer leaves beside them. It names no stage."""


_BESIDE = "optim.dp_rank_*"
"""What errors call those files."""


class LegacyFiles(RankFiles):
    """The files of a tag of the older layout, in which a rank has one file for all parts of the state."""

    def grids(self) -> dict[str, RankGrid]:
        grids = {"tag": RankGrid.of(placed_by(self.names, (*OLDER, *OLDER_FOLDERS)))}
        if beside := placed_by(self.names, [_OPTIMIZER]):
            own, tp = RankGrid.of(beside), grids["tag"].sizes.tp
            grids[_BESIDE] = replace(own, sizes=replace(own.sizes, tp=max(tp, own.sizes.tp)))
        return grids

    def zips(self) -> list[str]:
        return sorted(n for n in self.names if n.endswith(".pt") or "." not in n or _OPTIMIZER.at(n) is not None)

    def content(self, hints: Hints) -> Content:
        grids = self.grids()
        grid, beside = grids["tag"], grids.get(_BESIDE)
        grid.check("tag")
        by_rank = trees(self, grid)
        first = by_rank[min(by_rank)]
        if "model" not in first and all(isinstance(v, StoredTensor) for v in first.values()):
            # Nothing but tensors: the program saved a bare state dict of its model.
            by_rank = {at: {"model": tree} for at, tree in by_rank.items()}
            first = by_rank[min(by_rank)]
        # All dp ranks have the same model, and the same optimizer if ZeRO-1 did not deal it out.
        models, optim = (
            {at: tree[kind] for at, tree in by_rank.items() if isinstance(tree.get(kind), Mapping)}
            for kind in ("model", "optimizer")
        )
        models = {at: tree for at, tree in models.items() if at.dp == 0}
        if optim and "base_state" not in optim[min(optim)]:
            optim = {at: tree for at, tree in optim.items() if at.dp == 0}
        of_kind = {MODEL: grid}
        if optim:
            of_kind[OPTIM] = grid
        elif hints.optimizer and beside is not None:
            _check_stages(beside, grid.sizes.pp)
            optim, of_kind[OPTIM] = trees(self, beside), beside
        content = content_of_grids(self, hints, of_kind, stages(models), lambda: optim)
        others = {k: v for k, v in first.items() if k not in ("model", "optimizer")}
        if "scheduler" in others:
            content.parts[schema.SCHEDULER] = others.pop("scheduler")
        if others:
            content.parts[schema.USER_CONTENT] = others
        return content


def _check_stages(beside: RankGrid, pp: int) -> None:
    """Check that the files of a ZeRO-1 optimizer are those of all ranks."""
    if pp > 1:
        raise CorruptCheckpointError(
            "the names of these optimizer files do not say the pipeline stage, so that the stages wrote over each "
            "other's: the states of all stages but one are lost",
            file=min(beside.paths.values()),
            found=f"{pp} pipeline stages",
            hint="Load the model without the optimizer. nxd.save_checkpoint saves all of it.",
        )
    beside.check(_BESIDE)
