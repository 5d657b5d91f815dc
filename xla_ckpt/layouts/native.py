"""The native layout: safetensors files, dealt out to all ranks, with our manifest (docs/format.md)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from xla_ckpt.engine.writing import Writing
from xla_ckpt.layouts.base import Layout, Rewriting, StoredState, Topology
from xla_ckpt.layouts.new_ranks import leaves_of_ranks
from xla_ckpt.manifest.records import Manifest
from xla_ckpt.plan.file_plan import FilePlan
from xla_ckpt.plan.leaf import Leaf
from xla_ckpt.plan.save_plan import SavePlan, plan_save

if TYPE_CHECKING:
    from xla_ckpt.state.describe import Description


class Native(Layout):
    """safetensors files and a manifest. It holds any state, and loads on any topology."""

    name = "native"
    saves = True
    shares = True
    takes_apart = True

    def wrote(self, manifest: Manifest) -> bool:
        return True  # a tag that no other layout knows as its own

    def writing(self, description: Description) -> NativeWriting:
        return NativeWriting(description, description.leaves)

    def rewriting(self, stored: StoredState, to: Topology) -> Rewriting:
        files, specs = native_files(stored.manifest, stored.manifest.arrays, to)
        return Rewriting(files, specs)


@dataclass(frozen=True)
class NativeWriting(Writing):
    """What one rank writes in the native layout: of some leaves, which may be all."""

    description: Description
    leaves: Sequence[Leaf]

    @cached_property
    def plan(self) -> SavePlan:
        from xla_ckpt.arrays.registry import local_lanes

        placement = self.description.placement
        return plan_save(self.leaves, placement.rank, placement.world, local_lanes())


def native_files(
    manifest: Manifest, paths: Iterable[str], to: Topology
) -> tuple[list[tuple[FilePlan, ...]], dict[str, tuple[object, ...] | None]]:
    """The files of each rank that holds some stored arrays in the native layout, and how each array is split.

    Raises:
        IncompatibleCheckpointError: An array cannot be split over the mesh.
    """
    leaves, specs = leaves_of_ranks(manifest, paths, to)
    return [plan_save(of_rank, rank, to.mesh.size).files for rank, of_rank in enumerate(leaves)], specs
