"""Patterns of jax arrays that do not fit to what is stored."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import xla_ckpt
from tests.formats.orbax_saves import eight_devices
from tests.runs import ROOT


def test_a_mesh_that_does_not_divide_an_array(tmp_path: Path) -> None:
    xla_ckpt.save(tmp_path, "a", {"w": np.ones((10, 4), np.float32)})
    code = """
import sys, jax, numpy as np, xla_ckpt
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
for kind in (jax.ShapeDtypeStruct, xla_ckpt.ArraySpec):
    for spec, words in ((P("x"), "dim 0, which the mesh splits along 'x' of 4"), (P(None, ("x", "y")), "of 8")):
        like = {"w": kind((10, 4), np.float32, sharding=NamedSharding(mesh, spec))}
        try:
            xla_ckpt.restore(sys.argv[1], like=like)
        except xla_ckpt.UsageError as error:
            assert error.leaf == "w" and words in str(error) and "shape [10, 4]" in str(error), error
        else:
            raise AssertionError(spec)
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, env=eight_devices(), check=True)


KEY = jax.random.key(3)


@pytest.mark.parametrize("like", [np.zeros(2, np.uint32), jax.ShapeDtypeStruct((2,), np.uint32)], ids=type)
def test_the_numbers_of_a_key_that_is_stored(tmp_path: Path, like: object) -> None:
    xla_ckpt.save(tmp_path, "a", {"k": KEY})
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="typed key .* is stored") as refused:
        xla_ckpt.restore(tmp_path, like={"k": like})
    assert refused.value.leaf == "k"
    assert "jax.random.key_data(key)" in (refused.value.hint or "")


@pytest.mark.parametrize("like", [KEY, jax.ShapeDtypeStruct((), KEY.dtype)], ids=["key", "spec"])
def test_a_key_whose_numbers_are_stored(tmp_path: Path, like: object) -> None:
    xla_ckpt.save(tmp_path, "a", {"k": jax.random.key_data(KEY)})
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="typed key .* is wanted") as refused:
        xla_ckpt.restore(tmp_path, like={"k": like})
    assert refused.value.leaf == "k"
    assert "wrap_key_data" in (refused.value.hint or "")


def test_an_array_that_is_being_traced(tmp_path: Path) -> None:
    def step(w: jax.Array) -> jax.Array:
        xla_ckpt.save(tmp_path, "a", {"w": w})
        return w

    with pytest.raises(xla_ckpt.UnsupportedStateError, match=r"is being traced.*leaf w.*outside of functions"):
        jax.jit(step)(np.ones(2, np.float32))
    assert xla_ckpt.list_tags(tmp_path) == []
