"""The native layout: safetensors files, distributed over all ranks, with a manifest (docs/format.md).

It stores any state and loads on any topology. A conversion first computes the shard of each array on every rank of the
target job (`assign_leaves_to_ranks`), and then plans the files like a save.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from xla_ckpt.core.lightweight import cached_property
from xla_ckpt.core.manifest.manifest import Manifest
from xla_ckpt.core.plan.leaf import ArrayLeaf, create_leaf
from xla_ckpt.core.plan.save_plan import FileNaming, FilePlan, SavePlan, plan_save
from xla_ckpt.core.plan.stored_sharding import compute_local_array, find_leaf_rule, resolve_sharding
from xla_ckpt.errors import IncompatibleCheckpointError
from xla_ckpt.formats.base import ConversionPlan, Layout, StoredState, TargetTopology
from xla_ckpt.saving.finalize import IndexBuilder, WritePlanner, build_no_index

if TYPE_CHECKING:
    from xla_ckpt.state.describe import StateDescription


RESHARD_HINT = "Give another rule of shardings= (--sharding) for it, or choose another mesh."
"""Hint for an array that cannot be sharded over a mesh by its rule."""


def assign_leaves_to_ranks(
    manifest: Manifest, leaf_paths: Iterable[str], to: TargetTopology
) -> tuple[list[list[ArrayLeaf]], dict[str, tuple[object, ...] | None]]:
    """Return the array leaves of each rank for stored arrays, and the sharding spec of each array.

    The pipeline stage of an array is unknown here, so the ranks of the first stage hold all arrays.

    Raises:
        IncompatibleCheckpointError: An array cannot be sharded over the mesh.
    """
    shardings = {}
    for path in leaf_paths:
        try:
            shardings[path] = resolve_sharding(path, manifest, to.rules)
        except ValueError as error:
            raise _make_split_error(path, manifest, to, error) from error
    ranks: list[list[ArrayLeaf]] = []
    for rank in range(to.mesh.size):
        leaves = []
        for path, sharding in shardings.items() if to.mesh.coordinates(rank)["pp"] == 0 else ():
            record = manifest.arrays[path]
            try:
                local = compute_local_array(path, sharding, record.shape, to.mesh, rank)
            except ValueError as error:
                raise _make_split_error(path, manifest, to, error) from error
            leaves.append(create_leaf(path, record.dtype, local))
        ranks.append(leaves)
    specs = {
        path: manifest.arrays[path].spec if find_leaf_rule(path, to.rules) is None else sharding.spec
        for path, sharding in shardings.items()
    }
    return ranks, specs


def _make_split_error(
    path: str, manifest: Manifest, to: TargetTopology, error: ValueError
) -> IncompatibleCheckpointError:
    return IncompatibleCheckpointError(
        f"it cannot be split over {to.mesh}: {error}",
        leaf=path,
        found=list(manifest.arrays[path].shape),
        hint=RESHARD_HINT,
    )


class NativeLayout(Layout):
    """Layout of safetensors files and a manifest. Stores any state, and loads on any topology."""

    name = "native"
    saves = True
    keeps_masters = True
    shares = True
    takes_apart = True

    def wrote(self, manifest: Manifest) -> bool:
        return True  # any tag that no other layout recognizes

    def writing(self, description: StateDescription) -> NativeWritePlanner:
        return NativeWritePlanner(description, description.leaves)

    def rewriting(self, stored: StoredState, to: TargetTopology) -> ConversionPlan:
        files, specs = plan_native_files(stored.manifest, stored.manifest.arrays, to)
        return ConversionPlan(files, specs)


@dataclass(frozen=True)
class NativeWritePlanner(WritePlanner):
    """Write plan of one rank for all or some leaves: each array is distributed over the ranks that hold it."""

    description: StateDescription
    leaves: Sequence[ArrayLeaf]
    file_naming: FileNaming | None = None
    """Naming and layout of the files, if they differ from the native layout."""

    index: IndexBuilder = build_no_index

    @cached_property
    def plan(self) -> SavePlan:
        from xla_ckpt.arrays.registry import count_local_devices

        placement = self.description.placement
        return plan_save(
            self.leaves, placement.rank, placement.world_size, count_local_devices(), file_naming=self.file_naming
        )


def plan_native_files(
    manifest: Manifest, leaf_paths: Iterable[str], to: TargetTopology, file_naming: FileNaming | None = None
) -> tuple[list[tuple[FilePlan, ...]], dict[str, tuple[object, ...] | None]]:
    """Plan the files of each rank for stored arrays. Return them, and the sharding spec of each array.

    Args:
        file_naming: See `NativeWritePlanner`.

    Raises:
        IncompatibleCheckpointError: An array cannot be sharded over the mesh.
    """
    leaves, specs = assign_leaves_to_ranks(manifest, leaf_paths, to)
    return [
        plan_save(of_rank, rank, to.mesh.size, file_naming=file_naming).files for rank, of_rank in enumerate(leaves)
    ], specs
