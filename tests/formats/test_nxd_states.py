"""States that no fixture has, in neuronx-distributed's layouts: splits, padding, ties, and experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import xla_ckpt
from tests.formats.gold import as_rank
from tests.formats.references import opened, whole
from tests.formats.same import as_theirs
from tests.formats.writing import LAYOUTS, Zero1, as_job, as_kwargs, save_as_job, toy, unlike
from tests.topology.state import GROUPS, differences
from xla_ckpt import Mesh
from xla_ckpt.core.manifest import manifest_json

SOURCES = [
    (Mesh(pp=2, dp=2, tp=2), True), (Mesh(dp=3, tp=2), True), (Mesh(dp=4), True), (Mesh(dp=2, tp=4), True),
    (Mesh(dp=2, cp=2, tp=2), False), (Mesh(pp=3, tp=2), False), (Mesh(cp=2, tp=4), False),
]  # fmt: skip
TARGETS = [
    (Mesh(), False), (Mesh(tp=3), False), (Mesh(dp=3, tp=2), True), (Mesh(pp=2, tp=4), False), (Mesh(pp=2, dp=2), True),
]  # fmt: skip


@LAYOUTS
@pytest.mark.parametrize(("mesh", "zero"), SOURCES, ids=str)
def test_any_topology_to_any(
    mesh: Mesh, zero: bool, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strided and padded splits, padding rows of ZeRO-1 shards, copies over dp and cp."""
    reports = save_as_job(
        monkeypatch, mesh, tmp_path, "t", lambda rank: as_kwargs(toy(mesh, rank, zero=zero)), layout=layout
    )
    check = xla_ckpt.verify(tmp_path, "t")
    assert (check.problems, check.strangers) == ([], [])
    assert sum(r.nbytes for r in reports) == check.nbytes  # each byte was written once, copies and padding included
    for target, wants_zero in [(mesh, zero), *TARGETS]:
        states = [toy(target, rank, zero=wants_zero, blank=True) for rank in range(target.size)]
        as_job(
            monkeypatch,
            target,
            "load",
            lambda rank: xla_ckpt.load_checkpoint(tmp_path, "t", *states[rank]).user_content,
        )
        for rank, (model, optimizer) in enumerate(states):
            masters = zero and wants_zero
            assert differences(optimizer, model.by_name, target, rank, masters=masters or None) == [], (target, rank)
            assert model.seen == 5
            assert [g["lr"] for g in optimizer.param_groups] == [g["lr"] for g in GROUPS]


@LAYOUTS
def test_the_whole_tensor_is_in_the_file_padding_included(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program of neuronx-distributed's loads it by its shape; and what it held in its padding was its own."""
    mesh, states = Mesh(dp=3, tp=4), {}

    def state(rank: int) -> dict[str, Any]:
        states[rank] = toy(mesh, rank, zero=True)
        if mesh.coordinates(rank)["tp"] == 3:
            states[rank][0].by_name["embed.weight"].data[-2:] = 3.0  # 10 rows over 4 ranks
        return as_kwargs(states[rank])

    save_as_job(monkeypatch, mesh, tmp_path, "t", state, layout=layout)
    for tp in range(4):
        at = f"tp_rank_{tp:02d}_pp_rank_00.pt"
        model = whole(tmp_path / f"t/model/dp_rank_00_{at}")
        assert unlike(model, {k: v.detach() for k, v in states[tp][0].state_dict().items()}) == []
        for dp in range(3):
            rank = mesh.rank({"dp": dp, "tp": tp})
            found = whole(tmp_path / f"t/optim/dp_rank_{dp:02d}_{at}")
            params = [p for g in states[rank][1].base_optimizer.param_groups for p in g["params"]]
            assert unlike(found["sharded_master_weights"], {i: p.data for i, p in enumerate(params)}) == []
            assert (
                unlike(found["base_state"], {i: states[rank][1].base_optimizer.state[p] for i, p in enumerate(params)})
                == []
            )
            assert found["shape_info"] == {
                i: list(p.shape) for i, p in enumerate(p for g in states[rank][1].param_groups for p in g["params"])
            }


@LAYOUTS
@pytest.mark.parametrize("mesh", [Mesh(tp=2), Mesh(dp=3, tp=2)], ids=str)
def test_strided_blocks_of_columns(mesh: Mesh, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No run of bytes of the file is a box of the array: its shards are parts of a frame."""
    full = torch.arange(4 * 24.0).reshape(4, 24)

    def split(mesh: Mesh, rank: int, zero: bool, fill: bool) -> tuple[Any, Any]:
        blocks = full.chunk(mesh.tp * 2, 1)
        own = torch.cat([blocks[mesh.coordinates(rank)["tp"] + k * mesh.tp] for k in range(2)], 1).contiguous()
        weight = torch.nn.Parameter(own.clone() if fill else torch.zeros_like(own))
        weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = True, 1, 2
        rows = torch.cat([own, torch.zeros(-4 % mesh.dp, own.shape[1])]).chunk(mesh.dp)[mesh.coordinates(rank)["dp"]]
        shard = torch.nn.Parameter(rows.clone()) if zero else weight
        optimizer: Any = torch.optim.AdamW([weight])
        if zero:
            optimizer = Zero1([[(weight, shard)]], [{}], mesh, rank)
        inner = optimizer.base_optimizer if zero else optimizer
        if fill:
            inner.state[shard] = {
                "step": torch.tensor(1.0),
                "exp_avg": shard.data + 0.5,
                "exp_avg_sq": shard.data + 0.25,
            }
        model = torch.nn.Module()
        model.w = weight
        return (model, optimizer), (own, rows, inner, shard)

    zero = mesh.dp > 1
    save_as_job(monkeypatch, mesh, tmp_path, "t", lambda r: as_kwargs(split(mesh, r, zero, True)[0]), layout=layout)
    manifest = manifest_json.parse_manifest((tmp_path / "t/manifest.json").read_bytes())
    assert all(shard.parent_box is not None for shard in manifest.arrays["model/w"])
    assert xla_ckpt.verify(tmp_path, "t").ok
    for target, wants_zero in [(mesh, zero), (Mesh(), False), (Mesh(tp=4), False), (Mesh(dp=2, tp=3), True)]:
        for rank in range(target.size):
            with monkeypatch.context() as patch:
                as_rank(patch, target, rank)
                (model, optimizer), (own, rows, inner, shard) = split(target, rank, wants_zero, False)
                xla_ckpt.load_checkpoint(tmp_path, "t", model, optimizer)
            assert torch.equal(model.w, own), (target, rank)
            want = rows if wants_zero else own
            real = min(max(4 - target.coordinates(rank)["dp"] * want.shape[0], 0), want.shape[0])
            for key, more in (("exp_avg", 0.5), ("exp_avg_sq", 0.25)):
                assert torch.equal(inner.state[shard][key][:real], want[:real] + more), (target, rank, key)


@LAYOUTS
def test_what_is_tied_over_stages_is_in_the_files_of_both(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = Mesh(pp=2, dp=2)

    def stage(rank: int, fill: float) -> tuple[Any, Any]:
        pp = mesh.coordinates(rank)["pp"]
        model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(30, 4), f"layer{pp}": torch.nn.Linear(4, 4)})
        optimizer = torch.optim.AdamW([{"params": list(model["embed"].parameters()), "lr": 0.5},
                                       {"params": list(model[f"layer{pp}"].parameters()), "lr": 0.25}])  # fmt: skip
        for i, (name, p) in enumerate(model.named_parameters()):
            p.data.fill_(fill + (i if "embed" in name else 10 * pp + i))
            optimizer.state[p] = {"step": torch.tensor(fill), "exp_avg": p.data + 1, "exp_avg_sq": p.data + 2}
        return model, optimizer

    save_as_job(monkeypatch, mesh, tmp_path, "t", lambda rank: as_kwargs(stage(rank, 3.0)), layout=layout)
    for pp in range(2):
        model = whole(tmp_path / f"t/model/dp_rank_00_tp_rank_00_pp_rank_{pp:02d}.pt")
        assert list(model) == ["embed.weight", f"layer{pp}.weight", f"layer{pp}.bias"]
        assert (model["embed.weight"] == 3).all()
        optim = whole(tmp_path / f"t/optim/dp_rank_00_tp_rank_00_pp_rank_{pp:02d}.pt")
        assert [g["params"] for g in optim["param_groups"]] == [[0], [1, 2]]
        assert (optim["state"][0]["exp_avg"] == 4).all()
    states = [stage(rank, 0.0) for rank in range(4)]
    as_job(monkeypatch, mesh, "load", lambda rank: xla_ckpt.load_checkpoint(tmp_path, "t", *states[rank]).user_content)
    for rank, (model, optimizer) in enumerate(states):
        like = stage(rank, 3.0)
        for p, q in zip(model.parameters(), like[0].parameters(), strict=True):
            assert unlike(p.data, q.data) == unlike(optimizer.state[p], like[1].state[q]) == []
    report = xla_ckpt.verify(tmp_path, "t")
    assert report.ok
    tree = xla_ckpt.restore(tmp_path, "t").tree
    assert sorted(tree["model"]) == ["embed.weight", "layer0.bias", "layer0.weight", "layer1.bias", "layer1.weight"]

    # The manifest knows one copy, and digests both.
    file = tmp_path / "t/model/dp_rank_00_tp_rank_00_pp_rank_01.pt"
    if layout == "xser":
        file = file.with_name(file.name + ".tensors") / "tensor_0.pt"
    data = file.read_bytes()
    at = data.index(np.full(4, 3, np.float32).tobytes())
    file.write_bytes(data[: at + 5] + bytes([data[at + 5] ^ 1]) + data[at + 6 :])
    (problem,) = xla_ckpt.verify(tmp_path, "t").problems
    assert problem.file == str(file.relative_to(tmp_path / "t"))


@LAYOUTS
def test_experts_without_zero1(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """N4: the optimizers of all expert-parallel ranks are there."""
    mesh = Mesh(dp=4, ep=2, tp=2)

    def rank_state(mesh: Mesh, rank: int, fill: bool) -> tuple[Any, Any]:
        at = mesh.coordinates(rank)
        experts = torch.arange(4 * 6 * 4.0).reshape(4, 6, 4).chunk(mesh.ep, 0)[at["ep"]].chunk(mesh.tp, 2)[at["tp"]]
        values = {"norm": torch.arange(6.0), "experts": experts.contiguous()}
        model = torch.nn.Module()
        for name, value in values.items():
            model.register_parameter(name, torch.nn.Parameter(value.clone() if fill else torch.zeros_like(value)))
        model.experts.tensor_model_parallel, model.experts.partition_dim = True, 2
        if mesh.ep > 1:  # otherwise neuronx-distributed does not say it
            model.experts.expert_model_parallel = True
        optimizer = torch.optim.AdamW(model.parameters())
        for p in model.parameters():
            if fill:
                optimizer.state[p] = {"step": torch.tensor(2.0), "exp_avg": p.data + 1, "exp_avg_sq": p.data + 2}
        return model, optimizer

    save_as_job(monkeypatch, mesh, tmp_path, "t", lambda rank: as_kwargs(rank_state(mesh, rank, True)), layout=layout)
    for part in ("model", "optim"):
        names = {f"dp_rank_00_ep_rank_{e:02d}_tp_rank_{t:02d}_pp_rank_00.pt" for e in range(2) for t in range(2)}
        found = {p.name: p for p in (tmp_path / "t" / part).iterdir()}
        ends = ("", ".info.pt", ".tensors") if layout == "xser" else ("",)
        assert set(found) == {n + end for n in names for end in ends}
        if layout == "pt":
            for name in names:
                rank = mesh.rank({"dp": int(name[19:21]), "tp": int(name[30:32])})
                model, optimizer = rank_state(mesh, rank, True)
                held = opened(found[name])
                want = (
                    dict(model.state_dict())
                    if part == "model"
                    else {i: optimizer.state[p] for i, p in enumerate(model.parameters())}
                )
                assert unlike(held if part == "model" else held["state"], want) == []
        else:
            for name in names:
                tids = {int(p.name[7:-3]) for p in found[name + ".tensors"].iterdir()}
                experts = {
                    tid for tid, info in opened(found[name + ".info.pt"]).items() if info["expert_model_parallel"]
                }
                assert experts == ({1} if part == "model" else {3, 4, 5})
                assert tids == (experts if "_ep_rank_01" in name else set(opened(found[name + ".info.pt"])))
    assert xla_ckpt.verify(tmp_path, "t").ok
    for manifest in (True, False):
        if not manifest:
            as_theirs(tmp_path / "t")
        for target in (mesh, Mesh(), Mesh(dp=2, tp=4), Mesh(dp=4, ep=4)):
            for rank in range(target.size):
                with monkeypatch.context() as patch:
                    as_rank(patch, target, rank)
                    (model, optimizer), like = rank_state(target, rank, False), rank_state(target, rank, True)
                    xla_ckpt.load_checkpoint(tmp_path, "t", model, optimizer)
                for p, q in zip(model.parameters(), like[0].parameters(), strict=True):
                    assert unlike(p.data, q.data) == unlike(optimizer.state[p], like[1].state[q]) == [], (target, rank)
