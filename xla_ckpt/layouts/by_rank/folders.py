"""Rank files in the folders ``model`` and ``optim`` of a tag, as neuronx-distributed and optimum-neuron have them.

``<tag>/model/dp_rank_00_tp_rank_01_pp_rank_00.pt`` has the tensors of a rank, or references to them, of which each then
lies in a file of its own in ``...pt.tensors``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from xla_ckpt.errors import UnsupportedStateError
from xla_ckpt.layouts.by_rank.content import Content, content_of, plain_file
from xla_ckpt.layouts.by_rank.files import RankFiles
from xla_ckpt.layouts.by_rank.grid import RankAt, RankGrid, RankName, placed_by
from xla_ckpt.layouts.by_rank.state import ScannedState, Stage, Trees, stages, trees
from xla_ckpt.layouts.by_rank.tags import FOLDERS
from xla_ckpt.plan.hints import Hints
from xla_ckpt.sharding.mesh import Mesh
from xla_ckpt.tree import schema

MODEL, OPTIM = FOLDERS

OF_RANK = RankName("dp_rank_{dp:02}_tp_rank_{tp:02}_pp_rank_{pp:02}.pt")
OF_EXPERTS = RankName("dp_rank_{dp:02}_ep_rank_{ep:02}_tp_rank_{tp:02}_pp_rank_{pp:02}.pt")
"""What the file of a rank is called in a job without and with expert parallelism."""

OF_ALL = RankName("full_tp_rank_{tp:02}_pp_rank_{pp:02}.pt")
OF_ALL_EXPERTS = RankName("full_ep_rank_{ep:02}_tp_rank_{tp:02}_pp_rank_{pp:02}.pt")
"""What neuronx-distributed's converter calls the states of all dp ranks together."""


class FolderFiles(RankFiles):
    """The files of such a tag. A layout derives a class from it for what it has around the folders."""

    def grids(self) -> dict[str, RankGrid]:
        """Model and optimizer were written by the same ranks, so what is missing in one of them shows in the other."""
        of_kind = {
            kind: RankGrid.of(paths)
            for kind in FOLDERS
            if (paths := placed_by(self.names, (OF_RANK, OF_EXPERTS, OF_ALL, OF_ALL_EXPERTS), f"{self.below}{kind}/"))
        }
        largest = largest_of(of_kind)
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
            grid.check(kind)
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
        model = stages(trees(self, grids[MODEL], dp=0)) if MODEL in grids else {}
        hints = self.hints(model, mesh_of(grids), hints)
        content = content_of_grids(self, hints, grids, model, lambda: trees(self, grids[OPTIM]))
        if model:
            content.parts[schema.MODEL] |= self.beside_model(content.parts[schema.MODEL])
        content.parts.update(self.parts())
        return content

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

    def beside_model(self, model: Mapping[str, Any]) -> dict[str, Any]:
        """Plain values of the model that are in no rank file; `model` is what is in them.

        Raises:
            CorruptCheckpointError: They are damaged.
        """
        return {}


def largest_of(grids: Mapping[str, RankGrid]) -> RankAt:
    """The largest number of files along each axis."""
    sizes = [grid.sizes for grid in grids.values()] or [RankAt(pp=1, dp=1, ep=1, tp=1)]
    pp, dp, ep, tp = (max(getattr(size, axis) for size in sizes) for axis in ("pp", "dp", "ep", "tp"))
    return RankAt(pp=pp, dp=dp, ep=ep, tp=tp)


def mesh_of(grids: Mapping[str, RankGrid]) -> Mesh:
    """How the ranks were arranged, as far as the files show it."""
    size = largest_of(grids)
    # Without ZeRO-1 there are no files for dp ranks but the first: there were at least as many as ep ranks.
    return Mesh(pp=size.pp, dp=size.dp if size.dp % size.ep == 0 else size.ep, ep=size.ep, tp=size.tp)


def content_of_grids(
    files: RankFiles,
    hints: Hints,
    grids: Mapping[str, RankGrid],
    model: Mapping[int, Stage],
    optim: Callable[[], Trees],
) -> Content:
    """Model and optimizer, with a record or an `UnknownArray` for each tensor."""
    mesh = mesh_of(grids)
    state = ScannedState(files, hints, model, Mesh(dp=mesh.ep, ep=mesh.ep, tp=mesh.tp))
    return content_of(state, grids[OPTIM].sizes if OPTIM in grids else None, optim, mesh)
