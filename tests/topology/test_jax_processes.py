"""Jobs whose processes have met by jax.distributed, without torch.distributed: saves and loads on any mesh."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import xla_ckpt
from tests.jobs import run_on_jax_processes
from xla_ckpt.saving import run as engine

AT_ONCE = 60.0
"""Seconds within which a failure is told, on a busy machine; a rank that nobody told would wait for half an hour."""

WHOLE = {
    "both": np.arange(48 * 16, dtype=np.float32).reshape(48, 16),
    "first": np.arange(48 * 4, dtype=np.int32).reshape(48, 4),
    "copies": np.arange(10, dtype=np.float64).astype(np.float32),
    "pairs": np.arange(16, dtype=np.int8),
    "bfloat16": np.arange(64, dtype=np.float32).reshape(8, 8),
}
SPLIT = {"both": ("x", "y"), "first": ("x",), "copies": (), "pairs": (("y", "x"),), "bfloat16": (None, "y")}


def tree_on(shape: tuple[int, int], *, zeros: bool = False) -> dict[str, Any]:
    """The state over all devices of all processes, arranged so."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()).reshape(shape), ("x", "y"))
    tree: dict[str, Any] = {}
    for name, whole in WHOLE.items():
        typed = whole.astype(jnp.bfloat16) if name == "bfloat16" else whole
        content = np.zeros_like(typed) if zeros else typed
        sharding = NamedSharding(mesh, PartitionSpec(*SPLIT[name]))
        tree[name] = jax.make_array_from_callback(whole.shape, sharding, content.__getitem__)
    seeds = jax.random.split(jax.random.key(0 if zeros else 5), 8)
    data = np.asarray(jax.random.key_data(seeds))
    rows = jax.make_array_from_callback(data.shape, NamedSharding(mesh, PartitionSpec("x")), data.__getitem__)
    return {**tree, "keys": jax.random.wrap_key_data(rows), "numpy": np.zeros(3) + (not zeros), "step": 7}


def check(tree: dict[str, Any], shape: tuple[int, int]) -> None:
    """All that this process has of the state is as it was saved, and lies as it is wanted."""
    import jax

    expected = tree_on(shape)
    assert tree.keys() == expected.keys()
    assert (tree["step"], tree["numpy"].tolist()) == (7, [1, 1, 1])
    for name in ("keys", *WHOLE):
        one, other = tree[name], expected[name]
        assert one.dtype == other.dtype
        assert one.sharding == other.sharding
        if name == "keys":
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        for here, there in zip(one.addressable_shards, other.addressable_shards, strict=True):
            assert here.index == there.index
            assert np.asarray(here.data).tobytes() == np.asarray(there.data).tobytes(), name


def saves(rank: int, root: Path) -> None:
    import jax

    assert (jax.process_count(), len(jax.local_devices())) == (2, 4)
    tree = tree_on((4, 2))
    handle = xla_ckpt.save(root, "a", tree, async_save=True)
    assert handle.result().files
    check(xla_ckpt.restore(root, "a", tree_on((4, 2), zeros=True)).tree, (4, 2))
    check(xla_ckpt.restore(root, "a", tree_on((2, 4), zeros=True)).tree, (2, 4))
    model = {"both": tree_on((1, 8), zeros=True)["both"]}
    xla_ckpt.save_checkpoint(root, "b", {"both": tree["both"]}, user_content={"epoch": 3})
    assert xla_ckpt.load_checkpoint(root, "b", model).user_content == {"epoch": 3}
    check({**tree_on((1, 8)), "both": model["both"]}, (1, 8))


def loads(rank: int, root: Path, shape: tuple[int, int]) -> None:
    check(xla_ckpt.restore(root, "a", tree_on(shape, zeros=True)).tree, shape)


def test_processes_of_jax_save_what_they_have_and_others_load_it(tmp_path: Path) -> None:
    run_on_jax_processes(saves, 2, 4, tmp_path)
    report = xla_ckpt.verify(tmp_path, "a")
    assert report.ok
    arrays = [*WHOLE.values(), np.zeros(8 * 2, np.uint32), np.zeros(3)]
    assert report.nbytes == sum(array.nbytes for array in arrays) - WHOLE["bfloat16"].nbytes // 2, "each copy once"
    run_on_jax_processes(loads, 4, 2, tmp_path, (2, 4))
    run_on_jax_processes(loads, 1, 8, tmp_path, (8, 1))


def full(*args: object, **kwargs: object) -> None:
    raise OSError(28, "No space left on device")


def told(call: Callable[[], object]) -> tuple[str, float]:
    """The error of a call, as JSON, and how long it took."""
    began = time.monotonic()
    try:
        call()
    except xla_ckpt.CheckpointError as error:
        return json.dumps(error.to_json(), sort_keys=True), time.monotonic() - began
    return "none", time.monotonic() - began


def fails(rank: int, root: Path) -> list[tuple[str, float]]:
    tree, writes = tree_on((4, 2)), engine.write_files
    if rank == 1:
        engine.write_files = full  # type: ignore[assignment]
    cannot_write = told(lambda: xla_ckpt.save(root, "a", tree))
    engine.write_files = writes
    other_tag = told(lambda: xla_ckpt.save(root, f"tag_{rank}", tree))
    fits = tree if rank == 0 else {**tree, "both": np.zeros((3, 3))}
    xla_ckpt.save(root, "b", tree)
    other_shape = told(lambda: xla_ckpt.restore(root, "b", fits))
    shared = told(lambda: xla_ckpt.restore(root, "b", tree, options=xla_ckpt.LoadOptions(replica_read="share")))
    check(xla_ckpt.restore(root, "b", tree_on((4, 2), zeros=True)).tree, (4, 2))
    return [cannot_write, other_tag, other_shape, shared]


def test_what_fails_in_one_process_is_raised_in_all(tmp_path: Path) -> None:
    of_ranks = run_on_jax_processes(fails, 2, 4, tmp_path)
    expected = ("No space left", "the ranks make different calls", "wanted", "replica_read")
    for words, (here, there) in zip(expected, zip(*of_ranks, strict=True), strict=True):
        assert here[0] == there[0]
        assert words in here[0]
        assert max(here[1], there[1]) < AT_ONCE
    assert xla_ckpt.list_tags(tmp_path) == ["b"]
