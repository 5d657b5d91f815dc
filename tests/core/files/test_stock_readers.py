"""Payload files open without us: the safetensors package, and the stock reader of torch.distributed.checkpoint."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file

import xla_ckpt
from xla_ckpt.core import dtypes
from xla_ckpt.core.plan.leaf import ArrayLeaf, LocalLayout, LocalShard
from xla_ckpt.core.plan.save_plan import plan_save
from xla_ckpt.core.sharding.box import Box
from xla_ckpt.saving.write import write_files
from xla_ckpt.storage.local import LocalDirectory

NAMED = ["float64", "float32", "float16", "bfloat16", "int8", "int64", "uint8", "bool", "complex64", "float8_e4m3fn"]


def test_safetensors_opens_a_payload(tmp_path: Path) -> None:
    tree: dict[str, Any] = {n: torch.ones(3, 2).to(getattr(torch, n)) for n in NAMED}
    tree |= {"scalar": torch.tensor(2.0), "empty": torch.empty(0, 3), "odd": torch.arange(3, dtype=torch.int8)}
    xla_ckpt.save_checkpoint(tmp_path, "a", model={**tree, "wide": torch.full((2,), 1 + 2j, dtype=torch.complex128)})
    file = tmp_path / "a/model/00001-of-00001.safetensors"
    loaded = load_file(file)
    wide = loaded.pop("wide")
    assert (wide.dtype, wide.shape) == (torch.uint8, (2, 16))
    assert loaded.keys() == tree.keys() - {"empty"} | (loaded.keys() & {"empty"})
    for name, tensor in loaded.items():
        assert torch.equal(tensor, tree[name]), name
    with safe_open(file, framework="pt") as opened:
        assert opened.metadata()["format"] == "pt"


def test_optimizer_state_has_readable_names(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    xla_ckpt.save_checkpoint(tmp_path, "a", model, optimizer)
    names = set(load_file(tmp_path / "a/optimizer/00001-of-00001.safetensors"))
    assert names == {f"state/{p}/{k}" for p in ("weight", "bias") for k in ("step", "exp_avg", "exp_avg_sq")}


def dcp_load(directory: Path, state: dict[str, Any]) -> None:
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that no process group exists
        dcp.load(state, storage_reader=HuggingFaceStorageReader(str(directory)), no_dist=True)


def test_dcp_loads_a_payload(tmp_path: Path) -> None:
    tree = {"a.weight": torch.randn(5, 3), "b": torch.arange(7), "c": torch.randn(4).bfloat16()}
    xla_ckpt.save_checkpoint(tmp_path, "a", model=tree)
    state = {k: torch.zeros_like(v) for k, v in tree.items()}
    dcp_load(tmp_path / "a/model", state)
    assert all(torch.equal(state[k], tree[k]) for k in tree)


@pytest.mark.parametrize("strided", [False, True])
def test_dcp_loads_a_sharded_payload(tmp_path: Path, strided: bool) -> None:
    """Four ranks, a 2 x 2 grid; or two boxes of a name on each of two ranks."""
    whole = torch.randn(8, 6)
    boxes = [Box((r, c), (r + 4, c + 3)) for r in (0, 4) for c in (0, 3)]
    held = [boxes[0::2], boxes[1::2]] if strided else [[b] for b in boxes]
    directory = LocalDirectory(tmp_path)
    for rank, mine in enumerate(held):
        holding = LocalLayout(shape=(8, 6), shards=tuple(LocalShard(box=b) for b in mine))
        leaf = ArrayLeaf("model/w", dtypes.get_dtype("float32"), holding)
        parts = [whole[b.start[0] : b.stop[0], b.start[1] : b.stop[1]].contiguous().numpy() for b in mine]
        memory = {("model/w", i): memoryview(p.reshape(-1).view("u1")) for i, p in enumerate(parts)}
        write_files(directory, plan_save([leaf], rank, len(held)), memory)
    state = {"w": torch.zeros(8, 6)}
    dcp_load(tmp_path / "model", state)
    assert torch.equal(state["w"], whole)
