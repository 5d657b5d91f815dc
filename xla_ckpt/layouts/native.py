"""The native layout: safetensors files, dealt out to all ranks, with our manifest (docs/format.md)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from xla_ckpt.errors import IncompatibleCheckpointError
from xla_ckpt.layouts.base import Layout, Rewriting, StoredState, Topology
from xla_ckpt.manifest.records import Manifest
from xla_ckpt.plan.leaf import Leaf, leaf_of
from xla_ckpt.plan.place import place, rule_for, sharding_of
from xla_ckpt.plan.save_plan import FilePlan, SavePlan, plan_save

if TYPE_CHECKING:
    from xla_ckpt.state.describe import Description


class Native(Layout):
    """safetensors files and a manifest. It holds any state, and loads on any topology."""

    name = "native"
    saves = True

    def wrote(self, manifest: Manifest) -> bool:
        return True  # a tag that no other layout knows as its own

    def writing(self, description: Description) -> NativeWriting:
        return NativeWriting(description, description.leaves)

    def rewriting(self, stored: StoredState, to: Topology) -> Rewriting:
        files, specs = native_files(stored.manifest, stored.manifest.arrays, to)
        return Rewriting(files, specs)


@dataclass(frozen=True)
class NativeWriting:
    """What one rank writes in the native layout: of some leaves, which may be all."""

    description: Description
    leaves: tuple[Leaf, ...]

    whole: frozenset[str] = frozenset()

    @property
    def marks(self) -> Mapping[str, bytes]:
        return {}

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
    shardings = {}
    for path in paths:
        try:
            shardings[path] = sharding_of(path, manifest, to.rules)
        except ValueError as error:
            raise _unfit(path, manifest, to, error) from error
    files = []
    for rank in range(to.mesh.size):
        leaves = []
        # The layout knows no stages: the ranks of the first one write all.
        for path, sharding in shardings.items() if to.mesh.coordinates(rank)["pp"] == 0 else ():
            record = manifest.arrays[path]
            try:
                local = place(path, sharding, record.shape, to.mesh, rank)
            except ValueError as error:
                raise _unfit(path, manifest, to, error) from error
            leaves.append(leaf_of(path, record.dtype, local))
        files.append(plan_save(leaves, rank, to.mesh.size).files)
    specs = {
        path: manifest.arrays[path].spec if rule_for(path, to.rules) is None else sharding.spec
        for path, sharding in shardings.items()
    }
    return files, specs


def _unfit(path: str, manifest: Manifest, to: Topology, error: ValueError) -> IncompatibleCheckpointError:
    return IncompatibleCheckpointError(
        f"it cannot be split over {to.mesh}: {error}", leaf=path, found=list(manifest.arrays[path].shape)
    )
