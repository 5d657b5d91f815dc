"""Programs with packages for jax."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import xla_ckpt
from tests.objects.trial import Case


@dataclass(slots=True)
class Functional:
    """A state, and a function from it to the next one and a loss."""

    held: Any
    update: Callable[[Any], tuple[Any, Any]]

    def step(self) -> float:
        """Train one step; its loss."""
        self.held, loss = self.update(self.held)
        return float(loss)

    def save(self, root: Path, *, asynchronous: bool) -> xla_ckpt.SaveHandle:
        """Save it under the tag `a`."""
        return xla_ckpt.save(root, "a", self.held, async_save=asynchronous)

    def load(self, root: Path) -> None:
        """Load it, by the state of now as a pattern."""
        self.held = xla_ckpt.restore(root, "a", self.held).tree

    def state(self) -> Any:
        """All that has to be equal after a load."""

        def plain(leaf: Any) -> Any:
            typed = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            return np.asarray(jax.random.key_data(leaf) if typed else leaf)

        return [plain(leaf) for leaf in jax.tree.leaves(self.held)]


BATCH = np.linspace(-1, 1, 30, dtype=np.float32).reshape(5, 6)


def optax() -> Iterator[Case]:
    """States of its optimizers, beside plain parameters."""
    import optax as package

    def functional(make: Callable[[], Any], seed: int) -> Functional:
        step = make()
        key = jax.random.key(seed)
        parameters = {"w": jax.random.normal(key, (6, 4)), "b": jnp.zeros(4)}

        @jax.jit
        def update(held: Any) -> Any:
            def loss(p: Any) -> Any:
                return ((jnp.tanh(BATCH @ p["w"] + p["b"]) - 0.5) ** 2).mean()

            value, gradients = jax.value_and_grad(loss)(held["params"])
            moved, state = step.update(gradients, held["state"], held["params"])
            return {"params": package.apply_updates(held["params"], moved), "state": state}, value

        return Functional({"params": parameters, "state": step.init(parameters)}, update)

    makers = {
        **{
            n: partial(getattr(package, n), 1e-2)
            for n in ("adam", "adamw", "lamb", "lion", "adafactor", "sgd", "rmsprop")
        },
        "chain(clip, adam, schedule)": lambda: package.chain(
            package.clip_by_global_norm(1.0), package.adam(package.cosine_decay_schedule(1e-2, 10))
        ),
        "MultiSteps(adam)": lambda: package.MultiSteps(package.adam(1e-2), 2),
        "inject_hyperparams(adam)": lambda: package.inject_hyperparams(package.adam)(learning_rate=1e-2),
        "masked(adam)": lambda: package.masked(package.adam(1e-2), {"w": True, "b": False}),
        "multi_transform": lambda: package.multi_transform(
            {"a": package.adam(1e-2), "b": package.sgd(1e-2)}, {"w": "a", "b": "b"}
        ),
    }
    for name, make in makers.items():
        yield Case(package="optax", name=name, make=partial(functional, make))


def flax() -> Iterator[Case]:
    """linen with a TrainState, FrozenDict, and nnx with dropout."""
    import optax as package
    from flax import linen, nnx
    from flax.core import freeze
    from flax.training.train_state import TrainState

    class Dense(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            return linen.Dense(4)(linen.LayerNorm()(linen.Dense(8)(x)))

    class Train(TrainState):  # type: ignore[misc]
        key: Any

    def linear(seed: int, *, frozen: bool) -> Functional:
        model, step = Dense(), package.adamw(1e-2)
        parameters = model.init(jax.random.key(seed), BATCH)["params"]
        start = freeze(parameters) if frozen else parameters
        state = Train.create(apply_fn=model.apply, params=start, tx=step, key=jax.random.key(seed))

        @jax.jit
        def update(held: Any) -> Any:
            key, own = jax.random.split(held.key)
            noise = jax.random.normal(own, BATCH.shape)
            value, gradients = jax.value_and_grad(lambda p: (held.apply_fn({"params": p}, BATCH + noise) ** 2).mean())(
                held.params
            )
            return held.apply_gradients(grads=gradients).replace(key=key), value

        return Functional(state, update)

    for frozen in (False, True):
        name = f"linen, TrainState{' of a FrozenDict' if frozen else ''}, typed key"
        yield Case(package="flax", name=name, make=partial(linear, frozen=frozen))

    class Net(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.first, self.drop = nnx.Linear(6, 8, rngs=rngs), nnx.Dropout(0.2, rngs=rngs)
            self.norm, self.last = nnx.BatchNorm(8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.last(self.drop(self.norm(self.first(x))))

    def stateful(seed: int) -> Functional:
        model = Net(nnx.Rngs(seed))
        optimizer = nnx.Optimizer(model, package.adamw(1e-2), wrt=nnx.Param)
        structure, state = nnx.split((model, optimizer))

        @jax.jit
        def update(held: Any) -> Any:
            net, steps = nnx.merge(structure, held)
            value, gradients = nnx.value_and_grad(lambda m: (m(BATCH) ** 2).mean())(net)
            steps.update(net, gradients)
            return nnx.state((net, steps)), value

        return Functional(state, update)

    yield Case(package="flax", name="nnx.State of module, BatchNorm, Dropout, Optimizer", make=stateful)


ALL = (optax, flax)
"""What makes the cases of each package."""
