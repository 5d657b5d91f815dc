"""What each rank of the job that a conversion is for would hold of the stored arrays."""

from __future__ import annotations

from collections.abc import Iterable

from xla_ckpt.errors import IncompatibleCheckpointError
from xla_ckpt.layouts.base import Topology
from xla_ckpt.manifest.records import Manifest
from xla_ckpt.plan.leaf import Leaf, leaf_of
from xla_ckpt.plan.stored_shardings import local_array_of, rule_for, sharding_of

CORRECT = "Give another rule of shardings= (--sharding) for it, or choose another mesh."
"""What to do about an array that cannot be split over a mesh as it is said to be."""


def leaves_of_ranks(
    manifest: Manifest, paths: Iterable[str], to: Topology
) -> tuple[list[list[Leaf]], dict[str, tuple[object, ...] | None]]:
    """The leaves that each rank holds of some stored arrays, and how each array is split.

    Nothing here says which pipeline stage has which array, so the ranks of the first stage hold all of them.

    Raises:
        IncompatibleCheckpointError: An array cannot be split over the mesh.
    """
    shardings = {}
    for path in paths:
        try:
            shardings[path] = sharding_of(path, manifest, to.rules)
        except ValueError as error:
            raise _unfit(path, manifest, to, error) from error
    ranks: list[list[Leaf]] = []
    for rank in range(to.mesh.size):
        leaves = []
        for path, sharding in shardings.items() if to.mesh.coordinates(rank)["pp"] == 0 else ():
            record = manifest.arrays[path]
            try:
                local = local_array_of(path, sharding, record.shape, to.mesh, rank)
            except ValueError as error:
                raise _unfit(path, manifest, to, error) from error
            leaves.append(leaf_of(path, record.dtype, local))
        ranks.append(leaves)
    specs = {
        path: manifest.arrays[path].spec if rule_for(path, to.rules) is None else sharding.spec
        for path, sharding in shardings.items()
    }
    return ranks, specs


def _unfit(path: str, manifest: Manifest, to: Topology, error: ValueError) -> IncompatibleCheckpointError:
    return IncompatibleCheckpointError(
        f"it cannot be split over {to.mesh}: {error}",
        leaf=path,
        found=list(manifest.arrays[path].shape),
        hint=CORRECT,
    )
