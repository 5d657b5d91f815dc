"""Tags in which each rank has one file: they are read by what their `RankForm` says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xla_ckpt.errors import CorruptCheckpointError
from xla_ckpt.layouts.by_rank.content import Content, content_of, mesh_of
from xla_ckpt.layouts.by_rank.files import RankFiles
from xla_ckpt.layouts.by_rank.form import RankContent, RankForm, RankOptimizer
from xla_ckpt.layouts.by_rank.grid import RankAt, RankGrid, listed_names, placed_by
from xla_ckpt.layouts.by_rank.state import stages, trees
from xla_ckpt.plan.hints import Hints
from xla_ckpt.storage.base import ReadDirectory

TAG = "tag"
"""What errors call the files."""


class OneFileEach(RankFiles):
    """The files of such a tag.

    Args:
        form: How they are called, and what they hold.
        below: Where in the tag's directory they lie.
    """

    def __init__(self, directory: ReadDirectory, form: RankForm, below: str = "") -> None:
        super().__init__(directory, below)
        self.form = form

    def grids(self) -> dict[str, RankGrid]:
        return {TAG: RankGrid.of(placed_by(self.names, self.form.names, self.below))}

    def zips(self) -> list[str]:
        return sorted({*super().zips(), *self.rank_files()})

    def content(self, hints: Hints) -> Content:
        grid = self.grids()[TAG]
        grid.check(TAG, self.lost(grid.sizes))
        of_ranks = {at: self._meaning(tree, at, grid.paths[at]) for at, tree in trees(self, grid).items()}
        # All dp ranks have the same model, and the same optimizer if its rows are not dealt out.
        models = {at: has.model for at, has in of_ranks.items() if has.model is not None and not at.dp}
        stored = {at: has.optimizer for at, has in of_ranks.items() if has.optimizer is not None}
        optimizers, of_optimizers = self.optimizers(stored, grid, hints)

        def optim() -> dict[RankAt, RankOptimizer]:
            read = {at: self.form.optimizer(tree) for at, tree in optimizers.items()}
            dealt = any(optimizer.shapes is not None for optimizer in read.values())
            return {at: optimizer for at, optimizer in read.items() if dealt or not at.dp}

        sizes, mesh = (of_optimizers.sizes if optimizers else None), mesh_of([grid, of_optimizers])
        content = content_of(self, hints, stages(models), sizes, optim, mesh)
        content.parts.update(of_ranks[min(of_ranks)].parts)
        return content

    def _meaning(self, tree: Mapping[Any, Any], at: RankAt, path: str) -> RankContent:
        """What a rank file means.

        Raises:
            CorruptCheckpointError: It is not as the program writes it.
        """
        try:
            return self.form.content(tree, at)
        except (KeyError, TypeError, AttributeError) as error:
            raise CorruptCheckpointError(
                f"a rank file does not hold what such files have: {type(error).__name__}: {error}",
                file=path,
                found=listed_names([*map(str, tree)]) or "nothing",
            ) from error

    def optimizers(
        self, stored: Mapping[RankAt, Mapping[Any, Any]], grid: RankGrid, hints: Hints
    ) -> tuple[Mapping[RankAt, Mapping[Any, Any]], RankGrid]:
        """The states of the optimizers, none if none is stored, and the files that they are in.

        Args:
            stored: Those in the files of the ranks.
            grid: These files.
            hints: What is wanted.
        """
        return stored, grid
