"""The native layout: safetensors files, dealt out to all ranks, with our manifest (docs/format.md)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from xla_ckpt.engine.seal import Index, no_index
from xla_ckpt.engine.writing import Writing
from xla_ckpt.layouts.base import Layout, Rewriting, StoredState, Topology
from xla_ckpt.layouts.new_ranks import leaves_of_ranks
from xla_ckpt.lightweight import cached_property
from xla_ckpt.manifest.records import Manifest
from xla_ckpt.plan.file_plan import FilePlan
from xla_ckpt.plan.leaf import Leaf
from xla_ckpt.plan.save_plan import Filing, SavePlan, plan_save

if TYPE_CHECKING:
    from xla_ckpt.state.describe import Description


class Native(Layout):
    """safetensors files and a manifest. It holds any state, and loads on any topology."""

    name = "native"
    saves = True
    keeps_masters = True
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
    """What one rank writes of some leaves, which may be all: each array is dealt out to the ranks that hold it."""

    description: Description
    leaves: Sequence[Leaf]
    filing: Filing | None = None
    """What the files are, if they are not those of the native layout."""

    index: Index = no_index

    @cached_property
    def plan(self) -> SavePlan:
        from xla_ckpt.arrays.registry import local_lanes

        placement = self.description.placement
        return plan_save(self.leaves, placement.rank, placement.world, local_lanes(), filing=self.filing)


def native_files(
    manifest: Manifest, paths: Iterable[str], to: Topology, filing: Filing | None = None
) -> tuple[list[tuple[FilePlan, ...]], dict[str, tuple[object, ...] | None]]:
    """The files of each rank that holds some stored arrays, and how each array is split.

    Args:
        filing: See `NativeWriting`.

    Raises:
        IncompatibleCheckpointError: An array cannot be split over the mesh.
    """
    leaves, specs = leaves_of_ranks(manifest, paths, to)
    return [plan_save(of_rank, rank, to.mesh.size, filing=filing).files for rank, of_rank in enumerate(leaves)], specs
