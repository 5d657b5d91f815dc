"""A step that donates the state while a save still writes it: the tag has the numbers of the call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xla_ckpt
from tests.jobs import run_alone
from xla_ckpt.saving import run as engine

ARRAYS, STEPS = 4, 12


def state_and_step(*, sharded: bool) -> tuple[dict[str, Any], Callable[[Any], Any]]:
    """Arrays that are all n after n steps, and a step whose result takes the memory of its argument."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    place = NamedSharding(mesh, PartitionSpec("x", "y")) if sharded else jax.devices()[0]
    state = {f"w{n}": jax.device_put(np.zeros((256, 256), np.float32), place) for n in range(ARRAYS)}
    return state, jax.jit(lambda tree: jax.tree.map(lambda a: a + 1, tree), donate_argnums=0)


def memory_of(array: Any) -> int:
    return int(array.block_until_ready().addressable_shards[0].data.unsafe_buffer_pointer())


def train_beside_a_save(root: Path, sharded: bool) -> None:
    import jax

    state, step = state_and_step(sharded=sharded)
    state = step(state)
    before, state = memory_of(state["w0"]), step(state)
    assert memory_of(state["w0"]) == before, "else nothing is donated here, and this test shows nothing"

    gate, writes = threading.Event(), engine.write_files

    def write_late(*args: Any, **kwargs: Any) -> Any:
        assert gate.wait(120)
        return writes(*args, **kwargs)

    engine.write_files = write_late
    for number in (2, 2 + STEPS, 2 + 2 * STEPS):
        gate.clear()
        handle = xla_ckpt.save(root, f"at_{number}", state, async_save=True)
        for _ in range(STEPS):
            state = step(state)
        over = [jax.numpy.full((256, 256), -1.0) for _ in range(2 * ARRAYS)]  # takes memory that was given back
        jax.block_until_ready((state, over))
        gate.set()
        handle.result()
        assert xla_ckpt.verify(root, f"at_{number}").ok
        for name, array in xla_ckpt.restore(root, f"at_{number}").tree.items():
            assert (np.asarray(array) == number).all(), (number, name)


@pytest.mark.parametrize("sharded", [False, True])
def test_donated_arrays_are_saved_as_they_were(tmp_path: Path, *, sharded: bool) -> None:
    run_alone(train_beside_a_save, tmp_path, sharded, env={"XLA_FLAGS": "--xla_force_host_platform_device_count=8"})


def test_an_array_that_is_gone_is_refused(tmp_path: Path) -> None:
    import jax.numpy as jnp

    gone = jnp.ones(3)
    gone.delete()
    with pytest.raises(xla_ckpt.UnsupportedStateError, match=r"float32 \[3\], was deleted before the save"):
        xla_ckpt.save(tmp_path, "a", {"w": gone})
    xla_ckpt.save(tmp_path, "a", {"w": jnp.arange(3.0)})
    assert xla_ckpt.restore(tmp_path, "a", {"w": gone}).tree["w"].tolist() == [0, 1, 2], "as a pattern it will do"


def donate_what_was_restored(root: Path) -> None:
    import jax

    step = jax.jit(lambda tree: jax.tree.map(lambda a: a + 1, tree), donate_argnums=0)
    saved = {"large": jax.numpy.ones((1024, 1024)), "small": jax.numpy.ones(4)}
    xla_ckpt.save(root, "a", saved)
    for like in (saved, None):
        restored = xla_ckpt.restore(root, like=like).tree
        seen = {name: np.asarray(array) for name, array in restored.items()}
        after = step(restored)
        assert all((np.asarray(array) == 2).all() for array in after.values())
        assert all((array == 1).all() for array in seen.values())


def test_restored_arrays_can_be_donated(tmp_path: Path) -> None:
    run_alone(donate_what_was_restored, tmp_path)
