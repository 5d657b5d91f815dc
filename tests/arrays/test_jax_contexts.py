"""Saves and restores inside of contexts of jax: transfer guards, and meshes that are set."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.formats.orbax_saves import eight_devices
from tests.runs import ROOT

BEGIN = """
import sys, jax, jax.numpy as jnp, numpy as np, xla_ckpt
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
root = sys.argv[1]
mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
split, whole = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
state = {
    "split": jax.device_put(jnp.arange(16.0).reshape(8, 2), split), "whole": jax.device_put(jnp.ones(2), whole),
    "empty": jax.device_put(jnp.zeros((0, 2)), split), "free": jnp.zeros(3), "weak": jnp.asarray(0.1), "step": 3,
    "key": jax.device_put(jax.random.split(jax.random.key(1), 4), split),
}
"""


def run(root: Path, code: str) -> None:
    subprocess.run([sys.executable, "-c", BEGIN + code, str(root)], cwd=ROOT, env=eight_devices(), check=True)


def test_a_guard_against_implicit_transfers(tmp_path: Path) -> None:
    code = """
array = jnp.zeros((), jnp.int32)
with jax.transfer_guard("disallow"):
    xla_ckpt.save(root, "a", state)
    for like in (None, state, {**state, "step": array}, jax.eval_shape(lambda: state)):
        found = xla_ckpt.restore(root, "a", like).tree
        if like is not None and like is not state and like["step"] is array:
            assert isinstance(found["step"], jax.Array)
    model = {name: state[name] for name in ("split", "whole", "free")}
    xla_ckpt.save_checkpoint(root, "b", model)
    xla_ckpt.load_checkpoint(root, "b", model)
found = xla_ckpt.restore(root, "a", state).tree
for name in ("split", "whole", "empty", "free", "weak"):
    assert found[name].sharding == state[name].sharding, name
    assert found[name].committed == state[name].committed, name
    assert (found[name] == state[name]).all(), name
assert found["key"].sharding == state["key"].sharding
"""
    run(tmp_path, code)


def test_a_pattern_over_an_abstract_mesh_takes_that_of_the_context(tmp_path: Path) -> None:
    code = """
xla_ckpt.save(root, "a", state)
explicit = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
with jax.set_mesh(explicit):
    like = jax.eval_shape(lambda: {"split": jax.sharding.reshard(jnp.zeros((8, 2)), P("y", None))})
    assert isinstance(like["split"].sharding.mesh, jax.sharding.AbstractMesh)
    found = xla_ckpt.restore(root, "a", like).tree["split"]
    assert found.sharding == NamedSharding(explicit, P("y", None)), found.sharding
    assert (np.asarray(found) == np.asarray(state["split"])).all()
with jax.set_mesh(mesh):
    shape = jax.ShapeDtypeStruct((8, 2), jnp.float32, sharding=NamedSharding(mesh.abstract_mesh, P("x", "y")))
    assert xla_ckpt.restore(root, "a", {"split": shape}).tree["split"].sharding == NamedSharding(mesh, P("x", "y"))
other = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
for given, words in ((None, "no mesh"), (other, "a mesh of {'x': 2, 'y': 4}")):
    try:
        if given is None:
            xla_ckpt.restore(root, "a", like)
        else:
            with jax.set_mesh(given):
                xla_ckpt.restore(root, "a", like)
    except xla_ckpt.UsageError as error:
        assert error.leaf == "split" and words in str(error) and "jax.set_mesh" in str(error), error
    else:
        raise AssertionError(words)
"""
    run(tmp_path, code)
