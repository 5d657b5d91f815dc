"""Checkpoints by real orbax, v0 and v1, over eight devices of jax: python -m tests.formats.orbax_saves FOLDER."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tests.runs import ROOT

ITEMS = {
    "pytree": "", "pytree-zarr3": "", "pytree-files": "", "standard": "", "manager/12": "default",
    "host": "", "host-files": "", "composite/3": "state", "v1": "state", "v1-zarr2": "state", "v1-named": "left",
    "v1-run/5": "state",
}  # fmt: skip
"""Each checkpoint, and the item in it that has the tree."""

SHAPE, MESH = (64, 30), (4, 2)


def arrays() -> dict[str, Any]:
    """The arrays of the tree, by name: numbers that no two places have in common, and odd ones."""
    whole = np.arange(64 * 30, dtype=np.float32).reshape(SHAPE) / 8
    odd = np.array([0x7FC00001, 0x80000000, 0x7F800000, 0xFF800000, 1], np.uint32).view(np.float32)
    return {
        "whole": whole,
        "half": whole.astype(ml_dtypes.bfloat16),
        "eighth": whole.astype(ml_dtypes.float8_e4m3fn),
        "tiny": np.arange(-8, 8).astype(ml_dtypes.int4),
        "flags": whole > 100,
        "odd": odd,
        "complex": odd[:4].view(np.complex64),
        "none left": np.float32(2.5),
    }


def tree() -> dict[str, Any]:
    """What is saved: arrays of numpy's stand for those that are jax's."""
    named = arrays()
    return {
        "params": {"a.b/c": named["whole"], "deep": {"er": [named["half"], named["eighth"]]}},
        "opt": [{"mu": named["tiny"], "nu": named["flags"]}, None, {}],
        "odd": {"x": named["odd"], "y": named["complex"], "z": named["none left"]},
        "step": 12,
        "rate": 0.125,
    }


def _on_devices(value: Any) -> Any:
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()).reshape(MESH), ("x", "y"))

    def placed(leaf: Any) -> Any:
        if not isinstance(leaf, np.ndarray | np.generic):
            return leaf
        return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(*("x", "y")[: np.ndim(leaf) // 2 * 2])))

    return jax.tree.map(placed, value)


def eight_devices() -> dict[str, str]:
    """The environment of a process in which jax has eight devices."""
    return {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}


def save_all(folder: Path) -> None:
    """Have a process of its own make all of them: it has eight devices, and this one has none."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.formats.orbax_saves", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=eight_devices(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def main(folder: Path) -> None:
    """Make all of them."""
    import jax
    import orbax.checkpoint as v0
    from orbax.checkpoint import v1

    state = _on_devices(tree())

    def pytree(name: str, value: Any, **options: Any) -> None:
        with v0.Checkpointer(v0.PyTreeCheckpointHandler(**options)) as checkpointer:
            checkpointer.save(folder / name, value)

    pytree("pytree", state, use_ocdbt=True)
    pytree("pytree-zarr3", state, use_ocdbt=True, use_zarr3=True)
    pytree("pytree-files", state, use_ocdbt=False)
    # Of a number of numpy's orbax keeps the value alone, and not its type.
    host = jax.tree.map(lambda leaf: np.asarray(leaf) if isinstance(leaf, np.generic) else leaf, tree())
    pytree("host", host, use_ocdbt=True)
    pytree("host-files", host, use_ocdbt=False)
    pytree("texts", {"name": "run", "key": jax.random.key(3), "keys": jax.random.split(jax.random.key(4), 2)})
    pytree("clash", {"a": {"b": np.ones(2)}, "a.b": np.zeros(2)})
    average = {"weight": np.ones((8, 4), np.float32), "bias": np.ones(8, np.float32)}
    pytree("average", {"ema": average, "step": 1})
    weight = np.arange(12, dtype=np.float32).reshape(3, 4)
    pytree("torch", {"model": {"0.weight": weight, "0.bias": np.ones(3, np.float32)}})
    with v0.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "standard", state)
    with v0.CheckpointManager(folder / "manager") as manager:
        for step in (1, 12, 2):
            manager.save(step, args=v0.args.StandardSave(state if step == 12 else {"step": step}), force=True)
    with v0.CheckpointManager(folder / "composite") as manager:
        items = v0.args.Composite(state=v0.args.StandardSave(state), about=v0.args.JsonSave({"seen": [1, 2]}))
        manager.save(3, args=items)
    v1.save(folder / "v1", state)
    with v1.training.Checkpointer(folder / "v1-run") as trainer:
        trainer.save(5, state)
    with v1.Context(array_options=v1.options.ArrayOptions(saving=v1.options.ArrayOptions.Saving(use_zarr3=False))):
        v1.save(folder / "v1-zarr2", state)
    v1.save_checkpointables(folder / "v1-named", {"left": state, "right": {"step": 3}})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
