"""flax, optax and grain, the real packages: their states through this library, and of two of them through orbax.

`make test-objects` installs them, and runs these tests with them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xla_ckpt
from tests.objects import of_jax
from tests.objects.of_jax import BATCH
from tests.objects.trial import Case, tried

for package in ("flax", "optax", "grain"):
    pytest.importorskip(package, reason=f"{package} is not installed: make test-objects")

CASES: list[Case] = [case for cases in of_jax.ALL for case in cases()]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.package} {case.name}")
def test_a_program_goes_on(case: Case) -> None:
    outcome = tried(case)
    assert not outcome.error
    assert not outcome.pickled


def linen_state(seed: int) -> Any:
    """A TrainState of flax's, with states of optax that have fields, and one that has none."""
    import optax
    from flax import linen
    from flax.training.train_state import TrainState

    model = linen.Dense(4)
    step = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    parameters = model.init(jax.random.key(seed), BATCH)["params"]
    state = TrainState.create(apply_fn=model.apply, params=parameters, tx=step)
    return state.apply_gradients(grads=jax.tree.map(lambda p: jnp.full_like(p, 0.5 + seed), parameters))


def nnx_state(seed: int) -> Any:
    """The state of a module of nnx, with its optimizer."""
    import optax
    from flax import nnx

    model = nnx.Linear(6, 4, rngs=nnx.Rngs(seed))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    optimizer.update(model, nnx.grad(lambda m: (m(BATCH) ** 2).mean())(model))
    return nnx.state((model, optimizer))


STATES = [linen_state, nnx_state]


def assert_restored(one: Any, like: Any, other: Any) -> None:
    """It is of the classes of `like`, functions included, with the numbers of another one."""
    assert jax.tree.structure(one) == jax.tree.structure(like)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert np.asarray(a).dtype == np.asarray(b).dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.fixture(params=STATES, ids=lambda make: make.__name__)
def states(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """A state, and another one of the same classes."""
    return request.param(0), request.param(1)


def test_orbax_saves_and_this_library_restores(tmp_path: Path, states: tuple[Any, Any]) -> None:
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, args=ocp.args.StandardSave(states[0]))
    assert_restored(xla_ckpt.restore(tmp_path / "run", like=states[1]).tree, states[1], states[0])


def test_this_library_saves_and_orbax_restores(tmp_path: Path, states: tuple[Any, Any]) -> None:
    import orbax.checkpoint as ocp

    xla_ckpt.save(tmp_path / "run", "1", states[0], layout="orbax-manager")
    like = jax.tree.map(ocp.utils.to_shape_dtype_struct, states[1])
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        assert_restored(manager.restore(1, args=ocp.args.StandardRestore(like)), like, states[0])
    assert_restored(xla_ckpt.restore(tmp_path / "run", like=states[1]).tree, states[1], states[0])


def iterator_of_a_loader() -> Any:
    import grain.python as grain

    sampler = grain.IndexSampler(100, shuffle=True, seed=3, num_epochs=1, shard_options=grain.NoSharding())
    return iter(grain.DataLoader(data_source=grain.RangeDataSource(0, 100, 1), sampler=sampler, worker_count=0))


def iterator_of_a_dataset() -> Any:
    import grain.python as grain

    return iter(grain.MapDataset.range(100).shuffle(seed=4).batch(3).to_iter_dataset())


@pytest.mark.parametrize("iterator", [iterator_of_a_loader, iterator_of_a_dataset])
def test_an_iterator_of_grain_goes_on_where_it_was(tmp_path: Path, iterator: Callable[[], Any]) -> None:
    first, again = iterator(), iterator()
    for _ in range(7):
        next(first)
    xla_ckpt.save_checkpoint(tmp_path, "a", {"w": jnp.ones(2)}, extras={"data": first})
    expected = [np.asarray(next(first)).tolist() for _ in range(5)]
    xla_ckpt.load_checkpoint(tmp_path, model={"w": jnp.zeros(2)}, extras={"data": again})
    assert [np.asarray(next(again)).tolist() for _ in range(5)] == expected
