"""Rank files in the folders ``model`` and ``optim`` of a tag, as neuronx-distributed and optimum-neuron have them.

``<tag>/model/dp_rank_00_tp_rank_01_pp_rank_00.pt`` has the tensors of a rank, or references to them, of which each then
lies in a file of its own in ``...pt.tensors``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from xla_ckpt.errors import UnsupportedStateError
from xla_ckpt.layouts.by_rank.arrays import Copies
from xla_ckpt.layouts.by_rank.content import Content, content_of, mesh_of, plain_file
from xla_ckpt.layouts.by_rank.form import RankOptimizer
from xla_ckpt.layouts.by_rank.grid import RankAt, RankGrid, RankName, largest_of, placed_by
from xla_ckpt.layouts.by_rank.state import Stage, stages, trees
from xla_ckpt.layouts.nxd.adapters import mixed_adapters, with_ordered_config
from xla_ckpt.layouts.nxd.optimizer import stored_optimizer
from xla_ckpt.layouts.nxd.tags import FOLDERS, OF_EXPERTS, OF_RANK
from xla_ckpt.layouts.nxd.tensor_files import TensorFiles
from xla_ckpt.manifest.records import UnknownArray
from xla_ckpt.plan.hints import ArrayHint, Hints
from xla_ckpt.sharding.mesh import Mesh
from xla_ckpt.tree import lora, schema

MODEL, OPTIM = FOLDERS

OF_ALL = RankName("full_tp_rank_{tp:02}_pp_rank_{pp:02}.pt")
OF_ALL_EXPERTS = RankName("full_ep_rank_{ep:02}_tp_rank_{tp:02}_pp_rank_{pp:02}.pt")
"""What neuronx-distributed's converter calls the states of all dp ranks together."""


_LOST_EXPERTS = (
    "They were lost, or never written: neuronx-distributed leaves out the optimizer of expert-parallel ranks from 1 on "
    "unless use_xser is set."
)


class FolderFiles(TensorFiles):
    """The files of such a tag. A layout derives a class from it for what it has around the folders."""

    def lost(self, sizes: RankAt) -> str:
        return _LOST_EXPERTS if sizes.ep > 1 else super().lost(sizes)

    def grids(self) -> dict[str, RankGrid]:
        """Model and optimizer were written by the same ranks, so what is missing in one of them shows in the other."""
        of_kind = {
            kind: RankGrid.of(paths)
            for kind in FOLDERS
            if (paths := placed_by(self.names, (OF_RANK, OF_EXPERTS, OF_ALL, OF_ALL_EXPERTS), f"{self.below}{kind}/"))
        }
        largest = largest_of(of_kind.values())
        grids = {}
        for kind, grid in of_kind.items():
            sizes = replace(grid.sizes, tp=largest.tp, pp=largest.pp)
            # Only a ZeRO-1 optimizer has a file for each dp rank, so dp is not compared. Without ZeRO-1 the optimizer
            # of a job with experts has a file for each ep rank, and the model says how many there are.
            if kind == OPTIM and sizes.dp == 1 and any("_ep_rank_" in path for path in grid.paths.values()):
                sizes = replace(sizes, ep=largest.ep)
            grids[kind] = RankGrid(grid.paths, sizes)
        return grids

    def whole_grids(self) -> dict[str, RankGrid]:
        """The same.

        Raises:
            CorruptCheckpointError: Some files are missing.
        """
        grids = self.grids()
        for kind, grid in grids.items():
            grid.check(kind, self.lost(grid.sizes))
        return grids

    def checks(self) -> list[Callable[[], object]]:
        return [self.check_optimizer, *super().checks()]

    def check_optimizer(self) -> None:
        """Refuse an optimizer that cannot be read.

        Raises:
            UnsupportedStateError: It was saved in torch's distributed format.
        """
        if (file := f"{self.below}{OPTIM}/.metadata") in self.names:
            raise UnsupportedStateError(
                "the optimizer was saved with use_zero1_dcp, which neuronx-distributed itself cannot load",
                file=file,
                hint="Load the model without it.",
            )

    def content(self, hints: Hints) -> Content:
        if hints.optimizer:
            self.check_optimizer()
        grids = self.whole_grids()
        model = stages(with_ordered_config(trees(self, grids[MODEL], dp=0))) if MODEL in grids else {}
        mesh = mesh_of(grids.values())
        hints = self.hints(model, mesh, hints)
        optimizers = grids[OPTIM].sizes if OPTIM in grids else None

        def optim() -> dict[RankAt, RankOptimizer]:
            return {at: stored_optimizer(tree) for at, tree in trees(self, grids[OPTIM]).items()}

        content = content_of(self, hints, model, optimizers, optim, mesh)
        content.parts.update(self.parts())
        return content

    def misfit(self, name: str, copies: Copies, mesh: Mesh, hint: ArrayHint) -> UnknownArray | None:
        return mixed_adapters(self, copies, mesh, hint) if lora.ADAPTER in name else None

    # What lies around the folders, and is known of the arrays in them.

    def hints(self, model: Mapping[int, Stage], mesh: Mesh, hints: Hints) -> Hints:
        """What is known of the arrays: here only what the program says that wants them.

        Args:
            model: What the ranks hold of the model, by pipeline stage.
            mesh: How the ranks were arranged that wrote it.

        Raises:
            CheckpointError: What the tag says of them is damaged, or is not about this tag.
        """
        return hints

    def parts(self) -> dict[str, Any]:
        """The parts of the state that have a file of their own.

        Raises:
            CorruptCheckpointError: One of them is damaged.
        """
        return {
            part: plain_file(self, file)
            for part in (schema.SCHEDULER, schema.USER_CONTENT)
            if (file := f"{self.below}{part}.pt") in self.names
        }
