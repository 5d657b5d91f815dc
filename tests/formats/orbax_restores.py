"""Stock orbax restores a tree onto eight devices of jax: python -m tests.formats.orbax_restores TAG RESULT [ITEM].

Each way to restore is tried: v0 and v1, with a target of sharded arrays and without one. v0 wants the item in a step.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests.formats.orbax_saves import eight_devices
from tests.runs import ROOT


def restored(tag: Path, result: Path, item: str = "") -> dict[str, Any]:
    """Name of each way -> the tree that a process of eight devices has restored, with arrays of numpy's."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.formats.orbax_restores", str(tag), str(result), item]
    done = subprocess.run(command, cwd=ROOT, env=eight_devices(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    trees: dict[str, Any] = pickle.loads(result.read_bytes())
    return trees


def main(tag: Path, result: Path, name: str) -> None:
    """Restore it in all ways."""
    import jax
    import orbax.checkpoint as v0
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    from orbax.checkpoint import v1

    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))

    def target(leaf: Any) -> Any:
        """The description of an array whose dims are split over the devices as far as they divide."""
        if not isinstance(leaf, np.ndarray):
            return leaf
        axes = [axis if n % size == 0 else None for n, (axis, size) in zip(leaf.shape, (("x", 4), ("y", 2)))]
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes)))

    item = tag / name
    plain = v0.StandardCheckpointer().restore(item)
    like = jax.tree.map(target, plain)
    trees = {
        "v0": plain,
        "v0 PyTree": v0.PyTreeCheckpointer().restore(item),
        "v1": v1.load(tag),
        "v0 with a target": v0.StandardCheckpointer().restore(item, like),
        "v1 with a target": v1.load(tag, like),
    }
    for name, tree in trees.items():
        leaves = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
        assert all(leaf.sharding.device_set == set(jax.devices()) for leaf in leaves), name
        assert bool(leaves) == name.endswith("target"), name
    arrays = jax.tree.map(lambda leaf: np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf, trees)
    result.write_bytes(pickle.dumps(arrays))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
