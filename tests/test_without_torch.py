"""Programs of jax and numpy where torch cannot be imported, because it is not there."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path

import pytest
import torch

import xla_ckpt
from tests.formats.gold import SMALL
from tests.runs import ROOT, environment

TORCHS = ("torch", "functorch", "_xlac", "triton", "nvidia", "xla_ckpt", "__editable__")


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All installed packages but torch's, as links: what an environment without torch has."""
    folder = tmp_path_factory.mktemp("packages")
    for name in os.listdir(installed := Path(sysconfig.get_paths()["purelib"])):
        if not name.lower().startswith(TORCHS) and not name.endswith(".pth"):
            (folder / name).symlink_to(installed / name)
    return folder


def run_without(packages: Path, *words: object, devices: int = 1) -> str:
    """Run python as it is where torch is not installed; what it printed."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    done = subprocess.run(
        [sys.executable, "-S", *map(str, words)],
        env=environment({"PYTHONPATH": f"{packages}:{ROOT}", "XLA_FLAGS": flags}),
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def program(text: str) -> str:
    """A program that fails if any of torch was imported in it."""
    return f"import sys\n{textwrap.dedent(text)}\nassert not [m for m in sys.modules if m.startswith('torch')]\n"


def test_a_state_of_jax_goes_to_another_mesh(packages: Path, tmp_path: Path) -> None:
    text = """
    import jax, jax.numpy as jnp, numpy as np
    import xla_ckpt
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

    meshes = [Mesh(np.array(jax.devices()).reshape(shape), ("x", "y")) for shape in ((4, 2), (2, 4))]
    def lay(array, spec, mesh=meshes[0]):
        return jax.device_put(array, NamedSharding(mesh, spec))
    w = np.arange(64 * 32, dtype=np.float32).reshape(64, 32)
    tree = {
        "both": lay(w, P("x", "y")), "rows": lay(w, P("x")), "copies": lay(w, P()), "pairs": lay(w, P(("y", "x"))),
        "bfloat16": lay(w.astype(jnp.bfloat16), P("y", "x")), "float8": lay(w.astype(jnp.float8_e4m3fn), P("x")),
        "int4": lay(np.arange(-8, 8).astype(jnp.int4), P("y")), "step": jnp.int32(7),
        "key": jax.random.key(3), "keys": lay(jax.random.split(jax.random.key(1), 8), P("x")),
        "numpy": np.ones(3), "plain": (1, "text", None),
    }
    def numbers(leaf):
        key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if key else leaf)
    def same(one, other):
        assert jax.tree.structure(one) == jax.tree.structure(other)
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
            assert (a.dtype == b.dtype if hasattr(a, "dtype") else a == b)
            assert numbers(a).tobytes() == numbers(b).tobytes()

    root = sys.argv[1]
    report = xla_ckpt.save(root, "a", tree, async_save=True).result()
    assert report.nbytes == sum(numbers(leaf).nbytes for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype"))
    assert xla_ckpt.verify(root, "a").ok

    def elsewhere(leaf):
        if not isinstance(leaf, jax.Array):
            return leaf
        spec = P("y") if leaf.ndim else P()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(meshes[1], spec))
    pattern = jax.tree.map(elsewhere, tree)
    for like in (tree, pattern):
        again = xla_ckpt.restore(root, "a", like).tree
        same(again, tree)
        for leaf, wanted in zip(jax.tree.leaves(again), jax.tree.leaves(like), strict=True):
            if isinstance(leaf, jax.Array):
                assert leaf.sharding == wanted.sharding, (leaf.sharding, wanted.sharding)
    same(xla_ckpt.restore(root, "a").tree, tree)

    model = {"w": lay(np.zeros_like(w), P("x"), meshes[1])}
    xla_ckpt.save_checkpoint(root, "b", {"w": tree["both"]}, user_content={"s": 1}, extras={"r": xla_ckpt.RNGState()})
    loaded = xla_ckpt.load_checkpoint(root, "b", model, extras={"r": xla_ckpt.RNGState()})
    assert loaded.user_content == {"s": 1}
    same(model["w"], tree["both"])
    assert model["w"].sharding == NamedSharding(meshes[1], P("x"))
    half = xla_ckpt.restore(root, "a", {"rows": jax.ShapeDtypeStruct(w.shape, jnp.bfloat16)}, cast=True).tree
    same(half["rows"], jnp.asarray(tree["bfloat16"]))
    """
    run_without(packages, "-c", program(text), tmp_path, devices=8)
    one = tmp_path / "a"
    for words in (["ls", tmp_path], ["show", one], ["verify", tmp_path], ["diff", one, one]):
        run_without(packages, "-m", "xla_ckpt", *words)


def test_what_needs_torch_says_so(packages: Path, tmp_path: Path) -> None:
    tree = {"w": torch.arange(3.0), "sparse": torch.eye(3).to_sparse(), "type": torch.float16, "n": 1}
    xla_ckpt.save(tmp_path, "a", tree)
    xla_ckpt.save(tmp_path, "packed", {"w": torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)})
    text = """
    import numpy as np
    import xla_ckpt

    def refused(call, kind, *words):
        try:
            call()
        except kind as error:
            assert all(word in str(error) for word in (*words, "pip install 'xla-ckpt[torch]'")), error
        else:
            raise AssertionError(words)

    root = sys.argv[1]
    for pattern in (None, xla_ckpt.ArraySpec((3,), "float32"), np.zeros(3, np.float32)):
        array = xla_ckpt.restore(root, "a", {"w": pattern}).tree["w"]
        assert type(array) is np.ndarray and array.tolist() == [0, 1, 2], "a tensor is read as an array of numpy's"
    for like, word in ((None, ""), ({"sparse": None}, "torch:sparse_coo"), ({"type": None}, "dtype")):
        missing = xla_ckpt.IncompatibleCheckpointError
        refused(lambda: xla_ckpt.restore(root, "a", like), missing, "torch is not installed", word)
    unsupported = xla_ckpt.UnsupportedStateError
    refused(lambda: xla_ckpt.restore(root, "packed"), unsupported, "float4_e2m1fn_x2")
    refused(lambda: xla_ckpt.restore(sys.argv[2]), xla_ckpt.UsageError, "neuronx-distributed")
    for layout in ("xser", "pt"):
        save = lambda: xla_ckpt.save_checkpoint(root, "b", {"w": np.ones(2)}, layout=layout)
        refused(save, xla_ckpt.UsageError, f"layout {layout}")
    xla_ckpt.save(root + "/native", "1", {"model": {"w": np.ones(2)}})
    for layout in ("xser", "smp", "dcp", "torch"):
        convert = lambda: xla_ckpt.convert(root + "/native", root + "/other", to=layout)
        refused(convert, xla_ckpt.UsageError, f"layout {layout}")
    def imported():
        import xla_ckpt.dcp
    refused(imported, ImportError, "xla_ckpt.dcp", "xla-ckpt[torch]")
    """
    run_without(packages, "-c", program(text), tmp_path, SMALL / "tp2_dp2_z1m/ckpt")
