"""Every dtype, every memory layout, every framework: the same bits come back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import xla_ckpt
from tests import xla
from tests.jobs import run_program
from xla_ckpt.core.sharding.local_array import create_unsharded

xla.begin()

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip
ON_XLA = [d for d in DTYPES if "fnuz" not in str(d) and "e8m0" not in str(d)]


def random_bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Any bit pattern: NaN payloads, -0.0, infinities, denormals."""
    raw = torch.from_numpy(np.random.default_rng(7).integers(0, 256, (*shape, dtype.itemsize), dtype=np.uint8))
    return (raw & 1 if dtype is torch.bool else raw).view(dtype)[..., 0]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def on_xla(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(xla.device())


def held_bits(tensor: torch.Tensor) -> bytes:
    """The bits of an XLA tensor, by the way that does not quiet NaNs (`.cpu()` does for float16)."""
    from xla_ckpt.arrays.xla_tensor import XlaAdapter

    ((shard,),) = XlaAdapter().get_host_shards([(tensor, create_unsharded(tuple(tensor.shape)))])
    return shard.data.tobytes()


@pytest.mark.parametrize("async_save", [False, True])
def test_all_dtypes_on_the_cpu(tmp_path: Path, async_save: bool) -> None:
    tree = {str(d): random_bits(d, 5, 3) for d in DTYPES}
    xla_ckpt.save(tmp_path, "a", tree, async_save=async_save).result()
    again = xla_ckpt.restore(tmp_path, "a").tree
    assert {k: v.dtype for k, v in again.items()} == {k: v.dtype for k, v in tree.items()}
    assert {k: bits(v) for k, v in again.items()} == {k: bits(v) for k, v in tree.items()}


@pytest.mark.xla
def test_all_dtypes_on_xla_and_back_to_either(tmp_path: Path) -> None:
    tree = {str(d): random_bits(d, 5, 3) for d in ON_XLA}
    device_tree = {k: on_xla(v) for k, v in tree.items()}
    xla_ckpt.save(tmp_path, "a", device_tree)
    for like in (tree, device_tree):
        again = xla_ckpt.restore(tmp_path, "a", like).tree
        assert {k: v.device.type for k, v in again.items()} == {k: v.device.type for k, v in like.items()}
        found = {k: held_bits(v) if v.device.type == "xla" else bits(v) for k, v in again.items()}
        assert found == {k: bits(v) for k, v in tree.items()}
    into: dict[str, Any] = {k: torch.zeros_like(v) for k, v in device_tree.items()}
    xla_ckpt.save_checkpoint(tmp_path, "m", model=device_tree)
    xla_ckpt.load_checkpoint(tmp_path, "m", model=into)
    different = [k for k, v in into.items() if held_bits(v) != bits(tree[k]) and "float16" not in k]
    assert different == []


def shapes_and_views() -> dict[str, torch.Tensor]:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    return {
        "0-d": torch.tensor(3.5), "0-d int": torch.tensor(3), "empty": torch.empty(0), "empty 2d": torch.empty(3, 0, 2),
        "one": torch.ones(1), "transposed": base.t(), "strided": base[::2, 1::2], "offset": base[2:, 3:],
        "expanded": torch.arange(3.0).expand(5, 3), "flipped": base.flip(0),
        "conj": torch.randn(3, dtype=torch.complex64).conj(),
        "neg": torch.randn(3, dtype=torch.complex64).conj().imag, "channels_last": torch.randn(2, 3, 4, 5).to(
            memory_format=torch.channels_last), "parameter": torch.nn.Parameter(base.clone()),
    }  # fmt: skip


@pytest.mark.parametrize("async_save", [False, True])
def test_all_memory_layouts(tmp_path: Path, async_save: bool) -> None:
    tree = shapes_and_views()
    xla_ckpt.save(tmp_path, "a", tree, async_save=async_save).result()
    again = xla_ckpt.restore(tmp_path, "a", tree).tree
    for name, tensor in tree.items():
        assert again[name].shape == tensor.shape
        assert torch.equal(again[name], tensor.detach().resolve_conj().resolve_neg()), name


@pytest.mark.xla
def test_all_memory_layouts_on_xla(tmp_path: Path) -> None:
    tree = {k: on_xla(v.detach()) for k, v in shapes_and_views().items() if k != "neg"}
    base = on_xla(torch.arange(24.0).reshape(4, 6))
    tree |= {"lazy": base @ base.t(), "view": base.t()[1:], "constant": torch.full((3,), 2.0, device=base.device),
             "scalar constant": torch.ones((), device=base.device)}  # fmt: skip
    xla_ckpt.save(tmp_path, "a", tree)
    again = xla_ckpt.restore(tmp_path, "a").tree
    for name, tensor in tree.items():
        assert torch.equal(again[name], tensor.cpu().resolve_conj()), name


def test_layouts_of_the_target_do_not_matter(tmp_path: Path) -> None:
    data = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    xla_ckpt.save_checkpoint(tmp_path, "a", model={"w": data})
    for target in (torch.zeros(6, 4).t(), torch.zeros(4, 12)[:, ::2], torch.zeros(5, 6)[1:]):
        alias = target
        xla_ckpt.load_checkpoint(tmp_path, "a", model={"w": target})
        assert torch.equal(alias, data)


@pytest.mark.parametrize("device", xla.DEVICES)
def test_frameworks_mix_in_one_tree(tmp_path: Path, device: str) -> None:
    tree = {
        "torch": torch.arange(4.0), "device": torch.arange(5.0).to(device), "numpy": np.arange(6, dtype=np.uint16),
        "jax": jnp.arange(7, dtype=jnp.bfloat16), "nested": [(np.float32(1.5), jnp.ones(())), {"k": np.ones((2, 0))}],
    }  # fmt: skip
    xla_ckpt.save(tmp_path, "a", tree)
    for like in (None, tree):
        again = xla_ckpt.restore(tmp_path, "a", like).tree
        assert isinstance(again["jax"], jax.Array)
        assert isinstance(again["numpy"], np.ndarray)
        assert again["device"].device.type == ("cpu" if like is None else device)
        assert again["torch"].tolist() == [0, 1, 2, 3]
        assert again["device"].tolist() == [0, 1, 2, 3, 4]
        assert (again["numpy"].dtype, again["numpy"].tolist()) == (np.uint16, [0, 1, 2, 3, 4, 5])
        assert (again["jax"].dtype, again["jax"].tolist()) == (jnp.bfloat16, [0, 1, 2, 3, 4, 5, 6])
        assert (type(again["nested"][0][0]), again["nested"][0][0]) == (np.float32, 1.5)
        assert again["nested"][1]["k"].shape == (2, 0)


def test_jax_dtypes(tmp_path: Path) -> None:
    names = ["float32", "bfloat16", "float16", "int8", "uint32", "bool", "complex64", "float8_e4m3fn", "float8_e5m2",
             "float8_e4m3b11fnuz", "int4", "uint4"]  # fmt: skip
    tree = {n: jnp.array([0, 1, 1, 0], dtype=n) for n in names}
    xla_ckpt.save(tmp_path, "a", tree)
    again = xla_ckpt.restore(tmp_path, "a", {n: jax.ShapeDtypeStruct((4,), n) for n in names}).tree
    for name, value in tree.items():
        assert again[name].dtype == value.dtype
        assert (np.asarray(again[name]) == np.asarray(value)).all()


def test_numpy_targets_are_overwritten_in_place(tmp_path: Path) -> None:
    xla_ckpt.save_checkpoint(tmp_path, "a", model={"w": np.arange(6.0).reshape(2, 3)})
    whole, strided = np.zeros((2, 3)), np.zeros((2, 6))[:, ::2]
    for target in (whole, strided):
        xla_ckpt.load_checkpoint(tmp_path, "a", model={"w": target})
        assert target.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_specs_choose_the_framework(tmp_path: Path) -> None:
    xla_ckpt.save(tmp_path, "a", {"w": torch.arange(4, dtype=torch.bfloat16)})
    spec = xla_ckpt.ArraySpec
    cpu = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    for like, kind in (
        (spec((4,), torch.bfloat16), torch.Tensor),
        (spec([4], "bfloat16"), torch.Tensor),
        (spec((4,), np.dtype(jnp.bfloat16)), np.ndarray),
        (spec((4,), jnp.bfloat16, cpu), jax.Array),
    ):
        again = xla_ckpt.restore(tmp_path, "a", {"w": like}).tree["w"]
        assert isinstance(again, kind)
        assert "bfloat16" in str(again.dtype)
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match=r"shape \[4\] is stored, \[5\] wanted"):
        xla_ckpt.restore(tmp_path, "a", {"w": spec((5,), "bfloat16")})
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="bfloat16 is stored, float32 wanted"):
        xla_ckpt.restore(tmp_path, "a", {"w": spec((4,), "float32")})


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.eye(3).to_mkldnn(), "layout torch._mkldnn"),
        (torch.ones(3, device="meta"), "meta device"),
        (torch.nn.parameter.UninitializedParameter(), "lazy parameter"),
    ],
)
def test_what_cannot_be_stored_is_named(tmp_path: Path, value: Any, words: str) -> None:
    with pytest.raises(xla_ckpt.UnsupportedStateError, match=words) as caught:
        xla_ckpt.save(tmp_path, "a", {"model": {"bad one": value}})
    assert caught.value.leaf == "model/bad one"
    assert xla_ckpt.list_tags(tmp_path) == []


@pytest.mark.parametrize("device", xla.DEVICES)
def test_restore_mutates_nothing(tmp_path: Path, device: str) -> None:
    xla_ckpt.save(tmp_path, "a", {"t": torch.ones(3), "x": torch.ones(3).to(device), "n": np.ones(3)})
    like = {"t": torch.zeros(3), "x": torch.zeros(3).to(device), "n": np.zeros(3)}
    again = xla_ckpt.restore(tmp_path, "a", like).tree
    assert all(float(v.sum()) == 3 for v in again.values())
    assert all(float(v.sum()) == 0 for v in like.values())


@pytest.mark.parametrize("device", xla.DEVICES)
def test_an_async_save_is_a_snapshot_of_everything(tmp_path: Path, device: str) -> None:
    """Whatever changes after the call (tensors, arrays, XLA state, plain values) is not in the checkpoint."""
    state = {
        "t": torch.ones(1000),
        "x": torch.ones(1000).to(device),
        "n": np.ones(1000),
        "l": [1],
        "b": bytearray(b"1"),
    }
    donated = jnp.ones(1000)
    for trial in range(5):
        handle = xla_ckpt.save(tmp_path, str(trial), {**state, "j": donated}, async_save=True)
        state["t"].mul_(2), state["x"].mul_(2), np.multiply(state["n"], 2, out=state["n"])
        xla.sync()
        donated = jax.jit(lambda a: a * 2, donate_argnums=0)(donated)
        state["l"][0] *= 2
        state["b"][:] = b"changed"
        handle.result()
        again = xla_ckpt.restore(tmp_path, str(trial)).tree
        for name in "txnj":
            assert float(again[name].sum()) == 1000 * 2**trial, name
        assert again["l"] == [2**trial]
        assert again["b"] == (b"1" if trial == 0 else b"changed")


@pytest.mark.xla
def test_a_save_from_xla_loads_without_torch_xla(tmp_path: Path) -> None:
    tree = {"w": on_xla(torch.arange(6.0).reshape(2, 3)), "h": on_xla(random_bits(torch.float16, 9))}
    xla_ckpt.save_checkpoint(tmp_path, "a", model=tree)
    code = f"""
        import sys, torch, xla_ckpt
        model = {{"w": torch.zeros(2, 3), "h": torch.zeros(9, dtype=torch.float16)}}
        xla_ckpt.load_checkpoint({str(tmp_path)!r}, model=model)
        assert "torch_xla" not in sys.modules  # jax and orbax come in the background, for a save that may follow
        xla_ckpt.save_checkpoint({str(tmp_path)!r}, "b", model=model)
        assert "torch_xla" not in sys.modules
    """
    run_program(code)
    model = {k: torch.zeros_like(v) for k, v in tree.items()}
    xla_ckpt.load_checkpoint(tmp_path, "b", model=model)
    assert model["w"].tolist() == [[0, 1, 2], [3, 4, 5]]


@settings(max_examples=25)
@given(st.lists(st.lists(st.integers(0, 50), max_size=3), min_size=1, max_size=8), st.booleans())
def test_any_state_dict(tmp_path_factory: pytest.TempPathFactory, shapes: list[list[int]], async_save: bool) -> None:
    root = tmp_path_factory.mktemp("any")
    tree = {f"p{i}": torch.randn(shape) for i, shape in enumerate(shapes)}
    xla_ckpt.save_checkpoint(root, "a", model=tree, async_save=async_save)
    into: dict[str, Any] = {k: torch.zeros_like(v) for k, v in tree.items()}
    xla_ckpt.load_checkpoint(root, model=into)
    assert all(torch.equal(into[k], tree[k]) for k in tree)
    empty: dict[str, Any] = {}
    xla_ckpt.load_checkpoint(root, model=empty)
    assert all(torch.equal(empty[k], tree[k]) for k in tree)
