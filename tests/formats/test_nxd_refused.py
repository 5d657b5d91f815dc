"""What neuronx-distributed's layouts have no place for is refused, and what they leave over stands beside them."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import xla_ckpt
from tests.formats.writing import LAYOUTS, Zero1, as_job, as_kwargs, names, save_as_job, toy, unlike
from tests.jobs import run_alone
from tests.runs import names_in
from xla_ckpt import Mesh


def zero1_over(axes: str, **sizes: int) -> tuple[Mesh, Any]:
    mesh = Mesh(**sizes)

    def state(rank: int) -> dict[str, Any]:
        weight = torch.nn.Parameter(torch.arange(16.0))
        optimizer = Zero1([[(weight, torch.nn.Parameter(torch.zeros(1)))]], [{}], mesh, rank, axes=axes)
        position = optimizer.local_rank
        rows = 16 // optimizer.local_world_size
        shard = optimizer.base_optimizer.param_groups[0]["params"][0]
        shard.data = weight.data[position * rows : (position + 1) * rows].clone()
        optimizer.base_optimizer.state[shard] = {
            "step": torch.tensor(1.0),
            "exp_avg": shard.data + 1,
            "exp_avg_sq": shard.data + 2,
        }
        model = torch.nn.Module()
        model.w = weight
        return {"model": model, "optimizer": optimizer}

    return mesh, state


@LAYOUTS
@pytest.mark.parametrize(
    ("axes", "sizes", "words"),
    [
        ("dp cp", {"dp": 2, "cp": 2}, "dealt out over dp and cp"),
        ("cp", {"cp": 2}, "dealt out over cp"),
        ("tp", {"tp": 2}, "dealt out over tp"),
        ("cp", {"dp": 2, "cp": 2}, "dealt out over cp"),
        ("", {"dp": 2}, "not dealt out over dp"),
    ],
)
def test_zero1_that_their_files_have_no_place_for(
    axes: str, sizes: dict[str, int], words: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    mesh, state = zero1_over(axes, **sizes)
    with pytest.raises(xla_ckpt.UnsupportedStateError, match=words) as caught:
        save_as_job(monkeypatch, mesh, tmp_path, "t", state, layout=layout)
    assert caught.value.leaf == "optimizer"
    assert names_in(tmp_path) == []
    with caplog.at_level(logging.WARNING):
        save_as_job(monkeypatch, mesh, tmp_path, "t", state, layout=(layout, "native"))
    assert f"the native layout is written in place of {layout}" in caplog.text
    assert not names(tmp_path / "t") & {"done", "checkpoint"}
    assert any(n.endswith(".safetensors") for n in names(tmp_path / "t"))
    weight = torch.nn.Parameter(torch.zeros(16))
    model = torch.nn.Module()
    model.w = weight
    optimizer = torch.optim.AdamW([weight])
    xla_ckpt.load_checkpoint(tmp_path, "t", model, optimizer)
    assert torch.equal(optimizer.state[weight]["exp_avg"], torch.arange(16.0) + 1)


def test_layouts_that_make_no_sense(tmp_path: Path) -> None:
    for options in ({"layout": "nxd"}, {"layout": ()}, {"layout": "pt", "use_xser": True}, {"layout": ("xser", "x")}):
        with pytest.raises(xla_ckpt.UsageError, match=r"no such layout|asks for another layout|not of the kind"):
            xla_ckpt.save_checkpoint(tmp_path, "t", {"w": torch.ones(1)}, **options)
    with pytest.raises(xla_ckpt.UnsupportedStateError, match="nothing of it is here"):
        xla_ckpt.save(tmp_path, "t", {"w": torch.ones(1)}, layout="xser")
    with pytest.raises(xla_ckpt.UnsupportedStateError, match="nothing of it is here"):
        xla_ckpt.save(tmp_path, "t", [torch.ones(1)], layout="pt")
    assert names_in(tmp_path) == []


@LAYOUTS
def test_the_rest_of_a_state_is_beside_it_in_the_native_format(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh, rng = Mesh(dp=2, tp=2), {r: torch.full((4,), float(r)) for r in range(4)}

    def state(rank: int) -> dict[str, Any]:
        extras = {"data": xla_ckpt.PerRank({"at": rng[rank]}), "ema": {"w": torch.arange(4.0)}}
        return {**as_kwargs(toy(mesh, rank)), "extras": extras, "user_content": {"t": torch.ones(2)}}

    save_as_job(monkeypatch, mesh, tmp_path, "t", state, layout=layout)
    assert xla_ckpt.verify(tmp_path, "t").ok
    found: dict[int, Any] = {r: {"data": {}, "ema": {}} for r in range(4)}

    def load(rank: int) -> Any:
        extras = {"data": xla_ckpt.PerRank(found[rank]["data"]), "ema": found[rank]["ema"]}
        return xla_ckpt.load_checkpoint(tmp_path, "t", extras=extras).user_content

    content = as_job(monkeypatch, mesh, "load", load)
    assert [unlike(c, {"t": torch.ones(2)}) for c in content] == [[]] * 4
    for r in range(4):
        assert unlike(found[r], {"data": {"at": rng[r]}, "ema": {"w": torch.arange(4.0)}}) == []


def spmd_arrays(root: Path) -> list[str]:
    """Save an array that is spread over devices; what is logged."""
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr

    xr.use_spmd()
    n = xr.global_runtime_device_count()
    assert n == 4
    value = torch.arange(32.0).reshape(8, 4).to("xla")
    sharded = xs.mark_sharding(value, xs.Mesh(np.arange(n), (n,), ("x",)), ("x", None))
    for layout in ("xser", "pt"):
        with pytest.raises(xla_ckpt.UnsupportedStateError) as caught:
            xla_ckpt.save_checkpoint(root, "t", model={"w": sharded}, layout=layout)
        assert caught.value.leaf == "model/w"
        assert xla_ckpt.list_tags(root) == []
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    xla_ckpt.save_checkpoint(root, "t", model={"w": sharded}, layout=("xser", "native"))
    assert xla_ckpt.restore(root, "t").tree["model"]["w"].sum().item() == 496.0
    return lines


@pytest.mark.xla
def test_spmd_arrays_are_refused(tmp_path: Path) -> None:
    (said,) = run_alone(spmd_arrays, tmp_path / "run", xla=True, env={"CPU_NUM_DEVICES": "4"})
    assert "the native layout is written in place of xser" in said
    assert "done" not in os.listdir(tmp_path / "run/t")


@LAYOUTS
def test_they_export_and_explain_like_the_native_one(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = Mesh(dp=2, tp=2)
    exported = {}
    for tag in (layout, "native"):
        save_as_job(monkeypatch, mesh, tmp_path, tag, lambda rank: as_kwargs(toy(mesh, rank, zero=True)), layout=tag)
        xla_ckpt.export_hf(tmp_path, tmp_path / f"hf {tag}", tag)
        exported[tag] = {p.name: p.read_bytes() for p in (tmp_path / f"hf {tag}").iterdir()}
    assert exported[layout] == exported["native"]
    theirs, ours = (xla_ckpt.explain(tmp_path, tag, mesh="tp=3") for tag in (layout, "native"))
    assert theirs.ok
    assert theirs.split == ours.split
    assert [r.needed_bytes for r in theirs.readings] == [r.needed_bytes for r in ours.readings]
