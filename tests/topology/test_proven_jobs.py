"""Loads with ``prove=True`` over several devices and ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import xla_ckpt
from tests.broken import after_install, broken_after
from tests.jobs import run_alone, run_on_ranks
from xla_ckpt import LoadOptions, UnprovenLoadError

PROVE = LoadOptions(prove=True)


def spmd_devices(root: Path) -> dict[str, Any]:
    """Prove arrays over four devices, then with one copy of one of them broken."""
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr

    from xla_ckpt.arrays import xla_tensor

    xr.use_spmd()
    mesh = xs.Mesh(np.arange(4), (2, 2), ("a", "b"))

    def made(value: float) -> dict[str, Any]:
        arrays = {"split": ("a", "b"), "half": ("a", None), "uneven": (("a", "b"), None), "none": (None, None)}
        return {
            name: xs.mark_sharding(torch.full((6, 4), value + i).to("xla"), mesh, spec)
            for i, (name, spec) in enumerate(arrays.items())
        }

    xla_ckpt.save_checkpoint(root, "t", made(1.0))
    state = made(0.0)
    report = xla_ckpt.load_checkpoint(root, "t", state, options=PROVE).report
    found: dict[str, Any] = {"bytes": report.proven_bytes, "unproven": report.unproven}
    load = xla_tensor._XLAC._load_local_shards

    def breaking(name: str, lane: int) -> Callable[..., None]:
        def broken(tensor: torch.Tensor, shards: list[torch.Tensor], devices: list[str]) -> None:
            own = [shard.clone() for shard in shards]
            if tensor is getattr(state[name], "global_tensor", state[name]):
                own[lane][0, 0] += 1
            load(tensor, own, devices)

        return broken

    for name in ("split", "half"):
        for lane in range(4):
            xla_tensor._XLAC._load_local_shards = breaking(name, lane)
            try:
                xla_ckpt.load_checkpoint(root, "t", state, options=PROVE)
            except UnprovenLoadError as error:
                found[f"{name} {lane}"] = error.leaf
    return found


@pytest.mark.xla
def test_each_device_of_spmd_is_read_back(tmp_path: Path) -> None:
    found = run_alone(spmd_devices, tmp_path, xla=True, env={"CPU_NUM_DEVICES": "4"})
    nbytes = 6 * 4 * 4
    assert found.pop("bytes") == nbytes * (1 + 2 + 1 + 4)  # each copy counts
    assert found.pop("unproven") == ()
    assert found == {f"{name} {lane}": f"model/{name}" for name in ("split", "half") for lane in range(4)}


def test_jax_arrays_are_proven_on_each_device(tmp_path: Path) -> None:
    assert run_alone(jax_devices, tmp_path, env={"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}) == []


def jax_devices(root: Path) -> list[str]:
    """Prove jax arrays, then break the copy on each of the devices; what went wrong."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b"))
    like = jax.device_put(np.arange(32.0, dtype=np.float32).reshape(8, 4), NamedSharding(mesh, PartitionSpec("a")))
    xla_ckpt.save(root, "t", {"w": like})
    report = xla_ckpt.restore(root, "t", {"w": like}, options=PROVE).report
    problems = [] if report.proven_bytes == 2 * like.nbytes else [f"{report.proven_bytes} bytes"]
    make = jax.make_array_from_single_device_arrays
    for lane in range(4):

        def broken(shape: Any, sharding: Any, parts: Any, lane: int = lane) -> Any:
            parts = list(parts)
            parts[lane] = jax.device_put(np.asarray(parts[lane]) + 1, parts[lane].devices().pop())
            return make(shape, sharding, parts)

        jax.make_array_from_single_device_arrays = broken
        try:
            xla_ckpt.restore(root, "t", {"w": like}, options=PROVE)
            problems.append(f"device {lane} is not looked at")
        except UnprovenLoadError as error:
            problems += [] if error.leaf == "w" else [str(error)]
    return problems


ROWS, COLUMNS = [("model/w", ("tp", None))], [("model/w", (None, "tp"))]


def saves_rows(rank: int, root: Path) -> None:
    w = torch.arange(64 * 512.0).reshape(64, 512)
    part = w[32 * rank : 32 * rank + 32].clone()
    xla_ckpt.save_checkpoint(root, "a", {"w": part}, mesh=xla_ckpt.Mesh(tp=2), shardings=ROWS)
    xla_ckpt.finalize_checkpoint()


def proves_columns(rank: int, root: Path) -> list[Any]:
    """What each rank says of a load that is good, and of one that is not on rank 1."""
    where: dict[str, Any] = {"mesh": xla_ckpt.Mesh(tp=2), "shardings": COLUMNS}
    state = {"w": torch.zeros(64, 256)}
    said: list[Any] = []
    for share in ("each", "share"):
        options = LoadOptions(prove=True, replica_read=share)  # type: ignore[arg-type]
        report = xla_ckpt.load_checkpoint(root, "a", state, options=options, **where).report
        said.append(report.proven_bytes)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            broken_after(patch, "model/w", 64 * 256 - 1)
        with pytest.raises(UnprovenLoadError) as caught:
            xla_ckpt.load_checkpoint(root, "a", state, options=PROVE, **where)
    error = caught.value
    said.append([error.leaf, error.rank, error.problem, error.hint])
    stored = torch.arange(256.0, 512.0).numpy().tobytes()
    (file,) = (f for f in (root / "a").rglob("*.safetensors") if stored in f.read_bytes())

    def damage(arrays: Mapping[str, Any]) -> None:
        """Change what the other rank holds of a block, of which this one reads it again."""
        file.write_bytes(file.read_bytes().replace(stored, b"\1" + stored[1:]))

    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            after_install(patch, damage)
        with pytest.raises(xla_ckpt.CorruptCheckpointError) as damaged:
            xla_ckpt.load_checkpoint(root, "a", state, options=PROVE, **where)
    said.append([damaged.value.rank, damaged.value.problem])
    return said


def test_all_ranks_of_another_topology_raise_the_same(tmp_path: Path) -> None:
    run_on_ranks(saves_rows, 2, tmp_path)
    one, other = run_on_ranks(proves_columns, 2, tmp_path)
    assert one == other
    assert one[:2] == [64 * 256 * 4] * 2
    leaf, rank, problem, _ = one[2]
    assert one[3][0] == 0
    assert one[3][1].startswith("stored bytes are damaged")  # a device is not blamed for that
    assert (leaf, rank) == ("model/w", 1)
    assert "block 15 of a shard" in problem  # 64 KiB of 32 rows in blocks of 4 KiB
