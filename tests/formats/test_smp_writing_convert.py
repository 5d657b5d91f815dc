"""Conversions to SMP's files, from every layout and back."""

from __future__ import annotations

import json
import tracemalloc
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import xla_ckpt
from tests.covering import some_of
from tests.formats.gold import LOST, Gold, Target, cases, few_of
from tests.formats.same import content, names, rank_files
from tests.formats.smp_files import toy_model, toy_optimizer, write_set, write_tag
from tests.formats.test_dcp_writing import stock
from tests.formats.test_smp_writing import groups, load_info, model_of, optimizer_of, read
from tests.formats.writing import as_job, as_kwargs, save_as_job, toy, unlike
from tests.same import differences
from tests.topology.state import differences as unlike_toy
from tests.topology.state import known, whole
from xla_ckpt import Mesh
from xla_ckpt.cli.main import main

CASES = [case for case in cases() if case[0] != LOST and "ep2" not in case[0]]


# A conversion goes on from a manifest, whatever layout that is of.
@pytest.mark.parametrize(
    ("source", "mesh"),
    some_of([*product(["native", "xser", "dcp"], ["pp=2,tp=2", "dp=2,tp=4", "pp=2,dp=2"])], lambda case: case),
)
def test_a_tag_of_any_layout_becomes_the_files_that_a_job_would_have_saved(
    source: str, mesh: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = Mesh(dp=2, tp=2), Mesh.parse(mesh)
    states = [toy(old, rank) for rank in range(old.size)]
    save_as_job(monkeypatch, old, tmp_path, "a", lambda rank: as_kwargs(states[rank]), layout=source)
    cuts = ["layers.0"] if new.pp > 1 else []
    options: dict[str, Any] = {
        "to": "smp",
        "mesh": mesh,
        "pipeline_cuts": cuts,
        "options": xla_ckpt.ConvertOptions(max_memory=200),
    }
    report = xla_ckpt.convert(tmp_path, tmp_path / "b", "a", as_tag="a_partial", **options)
    assert (report.layout, report.tag) == ("smp", "a_partial")
    assert xla_ckpt.verify(tmp_path / "b", "a_partial").ok
    folder = tmp_path / "b/a_partial"
    for pp in range(new.pp):
        for tp in range(new.tp):
            held, wanted = read(folder, f"model_{pp}_{tp}.pt"), model_of(new, pp, tp)
            if pp:
                del wanted["seen"]  # a conversion knows one of it, and where it belongs by its place in the model
            info = held.pop("_smp_load_info")
            assert held.pop("_smp_is_partial")
            assert held.keys() == wanted.keys()
            assert not differences(wanted, {name: held[name] for name in wanted})
            theirs = load_info(new, held)
            if new.tp == 1:  # it keeps in mind how they were split
                info["xla_ckpt"]["specs"] = theirs["xla_ckpt"]["specs"]
            assert info == theirs
            assert unlike(read(folder, f"optimizer_states_{pp}_{tp}.pt"), optimizer_of(new, pp, tp)) == []
    other = Mesh(dp=2)
    made = [toy(other, rank, blank=True) for rank in range(2)]

    def load(rank: int) -> list[str]:
        xla_ckpt.load_checkpoint(tmp_path / "b", None, *made[rank])
        return unlike_toy(made[rank][1], made[rank][0].by_name, other, rank)

    assert as_job(monkeypatch, other, "load", load) == [[], []]


@pytest.mark.parametrize(("case", "tag"), few_of(CASES))
def test_neuronx_distributed_to_smp_and_back_is_the_same(case: str, tag: str, tmp_path: Path) -> None:
    """The files that neuronx-distributed itself wrote: what is in them, to the bit."""
    gold = Gold(case, tag)
    config = gold.topology["config"]
    target, back = Target(gold), Mesh(**{a: config[a] for a in ("pp", "dp", "ep", "cp", "tp")})
    mesh = Mesh(pp=2, tp=2 if back.tp > 1 else 1)  # a job without tp says of nothing how it would be split
    xla_ckpt.convert(
        gold.root,
        tmp_path,
        tag,
        to="smp",
        mesh=mesh,
        as_tag="smp",
        model=target.model,
        optimizer=target.optimizer,
        pipeline_cuts=["model.layers.0"],
        options=xla_ckpt.ConvertOptions(max_memory=10_000),
    )
    assert {n for n in names(tmp_path / "smp") if n.startswith(("model", "optim"))} == {
        f"{kind}_{pp}_{tp}.pt" for kind in ("model", "optimizer_states") for pp in (0, 1) for tp in range(mesh.tp)
    }
    assert xla_ckpt.verify(tmp_path, "smp").ok
    again = Target(gold)
    xla_ckpt.load_checkpoint(tmp_path, "smp", again.model, again.optimizer)
    assert not again.differences()
    xla_ckpt.convert(
        tmp_path,
        tmp_path,
        "smp",
        to="xser" if "xser" in case else "pt",
        mesh=back,
        as_tag="theirs",
        pipeline_cuts=["model.layers.0"] * (back.pp - 1),
        zero1=bool(config["zero1"]),
        options=xla_ckpt.ConvertOptions(max_memory=10_000),
    )
    if "legacy" in case:
        return
    stored = gold.root / tag
    assert names(tmp_path / "theirs") == names(stored)
    for name in rank_files(stored):
        assert not differences(content(stored / name), content(tmp_path / "theirs" / name), name)


@pytest.mark.parametrize("made_as", ["set", "directory"])
def test_files_of_smp_itself_to_neuronx_distributed_and_back(made_as: str, tmp_path: Path) -> None:
    """Made by hand. What SMP loads again is the same; on tp ranks above 0 there are states in place of empty ones."""
    mesh = Mesh(pp=2, tp=2)
    if made_as == "set":
        source, called = tmp_path / "c.pt", "c"
        write_set(source, mesh, "documents")
    else:
        source, called = write_tag(tmp_path, "c", mesh, user_content={"epoch": 3}), "c"
    model, optimizer = toy(Mesh(), 0)
    like = {"model": model, "optimizer": optimizer}
    xla_ckpt.convert(source, tmp_path / "n", to="xser", mesh="dp=2,tp=2", zero1=True, **like)  # type: ignore[arg-type]
    options: dict[str, Any] = {"mesh": "pp=2,tp=2", "pipeline_cuts": ["layers.0"]}
    xla_ckpt.convert(tmp_path / "n", tmp_path / "s", called, to="smp", as_tag="c_partial", **options)
    for pp in (0, 1):
        for tp in (0, 1):
            held, theirs = read(tmp_path / "s/c_partial", f"model_{pp}_{tp}.pt"), toy_model(mesh, pp, tp)
            for one in (held, theirs):
                del one["_smp_load_info"]
                one.pop("seen", None)  # a buffer behind the module that the first stage ends with
            assert not differences(theirs, held, order=False)
            held = read(tmp_path / "s/c_partial", f"optimizer_states_{pp}_{tp}.pt")
            theirs = toy_optimizer(mesh, pp, tp)
            assert held["state"].keys() == theirs["state"].keys()
            split = {n: state for n, state in theirs["state"].items() if state}
            assert not differences(split, {n: held["state"][n] for n in split}, order=False)
            first = toy_optimizer(mesh, pp, 0)["state"]
            whole_ones = {n: first[n] for n in theirs["state"] if n not in split}
            assert not differences(whole_ones, {n: held["state"][n] for n in whole_ones}, order=False)
            for group, other in zip(held["param_groups"], theirs["param_groups"], strict=True):
                assert {key: group[key] for key in other} == other
    content = read(tmp_path / "s/c_partial", "user_content.pt")
    assert content["epoch"] == 3
    # In one step, from their degrees to others, without a program: their files say all but how arrays were split.
    rules = [("qkv", (("tp", 3), None)), ("out", (None, "tp")), ("experts", (None, "tp", None)), ("embed", ("tp",))]
    xla_ckpt.convert(source, tmp_path / "t", to="smp", mesh="tp=4", as_tag="d", shardings=[*rules, ("", None)], **like)  # type: ignore[arg-type]
    held = read(tmp_path / "t/d", "model_0_3.pt")
    wanted = model_of(Mesh(tp=4), 0, 3)
    assert not differences(wanted, {name: held[name] for name in wanted})
    if made_as == "directory":
        assert read(tmp_path / "t/d", "smp_config.pt")["tensor_parallel_degree"] == 4


def test_rows_are_put_together_unless_it_is_asked_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SMP reads whole states only. Master weights have their file in both forms."""
    mesh = Mesh(dp=2, tp=2)
    states = [toy(mesh, rank, zero=True) for rank in range(mesh.size)]
    save_as_job(monkeypatch, mesh, tmp_path, "a", lambda rank: as_kwargs(states[rank]))
    xla_ckpt.convert(tmp_path, tmp_path, "a", to="smp", mesh="dp=2", as_tag="whole")
    assert names(tmp_path / "whole") == {
        "model_0_0.pt", "optimizer_states_0_0.pt", "fp16_states_0_0.pt", "smp_config.pt",
    }  # fmt: skip
    held = read(tmp_path / "whole", "optimizer_states_0_0.pt")
    assert unlike(held["state"], optimizer_of(Mesh(), 0, 0)["state"]) == []
    assert "xla_ckpt" not in held
    masters = read(tmp_path / "whole", "fp16_states_0_0.pt")
    named = [group["param_names"] for group in groups()]
    assert unlike(masters["fp32_from_fp16"], [[known(name, "master") for name in group] for group in named]) == []
    xla_ckpt.convert(tmp_path, tmp_path, "whole", to="smp", mesh="dp=3", as_tag="rows", zero1=True)
    assert names(tmp_path / "rows") == {
        "model_0_0.pt", "smp_config.pt",
        *(f"{kind}_0_0_{dp}.pt" for kind in ("optimizer_states", "fp16_states") for dp in range(3)),
    }  # fmt: skip
    parts = [read(tmp_path / "rows", f"optimizer_states_0_0_{dp}.pt")["state"][0]["exp_avg"] for dp in range(3)]
    assert [len(part) for part in parts] == [4, 4, 4]
    assert torch.equal(torch.cat(parts)[:10], known("embed.weight", "exp_avg"))
    for tag in ("whole", "rows"):
        made = toy(Mesh(), 0, zero=True, blank=True)
        xla_ckpt.load_checkpoint(tmp_path, tag, *made)
        assert unlike_toy(made[1], made[0].by_name, Mesh(), 0, masters=True) == []


def test_a_directory_that_stock_dcp_wrote(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    held = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    stock(lambda: dcp.save(held, checkpoint_id=tmp_path / "d", no_dist=True))
    rules = [(r"0\.(weight|bias)", ("tp",)), (r"1\.weight", (None, "tp"))]
    xla_ckpt.convert(
        tmp_path / "d", tmp_path, to="smp", mesh="pp=2,tp=2", as_tag="b", model=model, optimizer=optimizer,
        shardings=rules, pipeline_cuts=["0"],
    )  # fmt: skip
    first = [read(tmp_path / "b", f"model_0_{tp}.pt") for tp in (0, 1)]
    assert torch.equal(torch.cat([part["0.weight"] for part in first]), model[0].weight)
    assert [list(part)[:2] for part in first] == [["0.weight", "0.bias"]] * 2
    second = [read(tmp_path / "b", f"optimizer_states_1_{tp}.pt") for tp in (0, 1)]
    assert [list(part["state"]) for part in second] == [[2, 3]] * 2
    moments = torch.cat([part["state"][2]["exp_avg"] for part in second], 1)
    assert torch.equal(moments, optimizer.state[model[1].weight]["exp_avg"])
    assert all(torch.equal(part["state"][3]["exp_avg"], second[0]["state"][3]["exp_avg"]) for part in second)
    xla_ckpt.convert(tmp_path, tmp_path, "b", to="dcp", as_tag="c")
    found = {"model": {name: torch.zeros_like(value) for name, value in model.state_dict().items()}}
    stock(lambda: dcp.load(found, checkpoint_id=tmp_path / "c", no_dist=True))
    assert all(torch.equal(found["model"][name], value) for name, value in model.state_dict().items())


def test_the_command_writes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))
    extras = {"smp_config": {"microbatches": 2, "tensor_parallel_degree": 8}, "partition_info": {"main": 5}}
    xla_ckpt.save_checkpoint(tmp_path, "a", model, user_content={"n": 1}, extras=extras)
    where = [str(tmp_path), str(tmp_path / "b"), "--tag", "a", "--as", "a_partial"]
    rules = ["--sharding", "0.weight", "tp,_", "--sharding", "1.weight", "_,tp"]
    assert main(["convert", *where, "--to", "smp", "--mesh", "pp=2,tp=2", "--cut", "0", *rules, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layout"] == "smp"
    folder = tmp_path / "b/a_partial"
    assert torch.equal(torch.cat([read(folder, f"model_1_{tp}.pt")["1.weight"] for tp in (0, 1)], 1), model[1].weight)
    config = read(folder, "smp_config.pt")
    assert (config["microbatches"], config["pipeline_parallel_degree"], config["tensor_parallel_degree"]) == (2, 2, 2)
    # What the old job said of its stages is not true of the new one.
    assert read(folder, "model_0_0.pt")["_smp_load_info"]["partition_info"] == {
        "main": 0, "main/module": 0, "main/module/module": 0, "main/module/module/0": 0, "main/module/module/1": 1,
    }  # fmt: skip
    assert main(["ls", str(tmp_path / "b"), "--json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)["tags"]
    assert (listed["tag"], listed["layout"]) == ("a_partial", "smp")
    assert main(["verify", str(tmp_path / "b")]) == 0


def test_what_makes_no_sense_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))
    xla_ckpt.save_checkpoint(tmp_path, "a", model, extras={"x": {"n": 1}})
    for problem, options in {
        "2 pipeline stages need 1 cut": {"mesh": "pp=2"},
        "1 pipeline stages need 0 cuts.*The mesh says": {"pipeline_cuts": ["0"]},
        "no parameter belongs to a module of this name": {"mesh": "pp=2", "pipeline_cuts": ["7"]},
        "nothing is split over tp": {"mesh": "tp=2"},
    }.items():
        with pytest.raises(xla_ckpt.UsageError, match=problem):
            xla_ckpt.convert(tmp_path, tmp_path / "b", "a", to="smp", **options)  # type: ignore[arg-type]
    with pytest.raises(xla_ckpt.UnsupportedStateError, match="no place for what ranks along ep"):
        xla_ckpt.convert(tmp_path, tmp_path / "b", "a", to="smp", mesh="dp=2,ep=2")
    xla_ckpt.save(tmp_path, "tree", {"params": torch.ones(2)})
    with pytest.raises(xla_ckpt.UsageError, match="holds nothing that the layout smp has a place for.*to dcp"):
        xla_ckpt.convert(tmp_path, tmp_path / "b", "tree", to="smp")
    assert not (tmp_path / "b").exists()


def test_a_damaged_part_is_not_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = Mesh(pp=2, tp=2)
    states = [toy(mesh, rank) for rank in range(mesh.size)]
    save_as_job(monkeypatch, mesh, tmp_path, "a", lambda rank: as_kwargs(states[rank]), layout="smp")
    path = tmp_path / "a/model_1_1.pt"
    data = bytearray(path.read_bytes())
    at = data.index(whole("layers.1.out.weight")[:, 6:].contiguous().numpy().tobytes())
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(xla_ckpt.CorruptCheckpointError) as caught:
        xla_ckpt.convert(tmp_path, tmp_path / "b", "a", to="native")
    assert (caught.value.file, caught.value.leaf) == ("model_1_1.pt", "model/layers.1.out.weight")
    assert xla_ckpt.list_tags(tmp_path) == ["a"]


def test_half_precision_keeps_its_masters_and_its_scaler(tmp_path: Path) -> None:
    """A directory as SMP writes it with fp16, for other degrees."""
    weights = {"a": torch.randn(4, 3).half(), "b": torch.randn(3).half()}
    states = {n: {"step": 5, "exp_avg": value.float() * 2} for n, value in enumerate(weights.values())}
    scaler = {"dynamic_loss_scale": True, "overflow": True, "first_closure_call_this_step": False, "loss_scaler": None}
    folder = tmp_path / "a_partial"
    folder.mkdir()
    info = {"tensor_parallel_degree": 1, "pipeline_parallel_degree": 1}
    torch.save({**weights, "_smp_is_partial": True, "_smp_load_info": info}, folder / "model_0_0.pt")
    held = {"state": states, "param_groups": [{"lr": 0.5, "params": [0, 1]}], "_smp_is_partial": True}
    torch.save(held, folder / "optimizer_states_0_0.pt")
    masters = [value.float() + 1e-5 for value in weights.values()]
    torch.save({**scaler, "fp32_from_fp16": [masters]}, folder / "fp16_states_0_0.pt")
    torch.save({**info, "smp_version": "1.12.1", "fp16": True, "microbatches": 3}, folder / "smp_config.pt")
    rules = [("a", ("tp", None)), ("b", None)]
    xla_ckpt.convert(tmp_path, tmp_path / "b", "a_partial", to="smp", mesh="tp=2", shardings=rules, as_tag="b_partial")
    for tp in (0, 1):
        found = read(tmp_path / "b/b_partial", f"fp16_states_0_{tp}.pt")
        assert {name: found[name] for name in scaler} == scaler
        ((first, second),) = found["fp32_from_fp16"]
        assert torch.equal(first, masters[0].chunk(2)[tp])
        assert torch.equal(second, masters[1])
        assert torch.equal(read(tmp_path / "b/b_partial", f"model_0_{tp}.pt")["a"], weights["a"].chunk(2)[tp])
    assert read(tmp_path / "b/b_partial", "smp_config.pt") == {
        "tensor_parallel_degree": 2, "pipeline_parallel_degree": 1, "smp_version": "1.12.1", "fp16": True,
        "microbatches": 3, "ddp": True, "sharded_data_parallel_degree": 1, "shard_optimizer_state": False,
    }  # fmt: skip
    for path in (folder, tmp_path / "b/b_partial"):
        tree = xla_ckpt.restore(path).tree
        assert torch.equal(tree["optimizer"]["master"]["a"], masters[0]), path
        assert tree["extras"]["fp16_states"] == scaler


def test_it_takes_no_more_memory_than_it_is_given(tmp_path: Path) -> None:
    """Sixteen arrays of 1 MiB, in files that hold all of them."""
    weights = {f"layers.{n}.w": torch.full((256, 1024), float(n)) for n in range(16)}
    xla_ckpt.save_checkpoint(tmp_path, "a", weights)
    rules = [("w", ("tp", None))]
    peaks = {}
    for name, limit in (("narrow", 1 << 20), ("wide", 64 << 20)):
        tracemalloc.start()
        try:
            xla_ckpt.convert(
                tmp_path,
                tmp_path / name,
                "a",
                to="smp",
                mesh="pp=2,tp=2",
                shardings=rules,
                pipeline_cuts=["layers.7"],
                options=xla_ckpt.ConvertOptions(max_memory=limit, num_workers=1),
            )
            peaks[name] = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peaks["narrow"] < 3 << 20 < 4 << 20 < peaks["wide"], "a file has 4 MiB, and was in memory"
    held = read(tmp_path / "narrow/a", "model_1_1.pt")
    assert [int(held[f"layers.{n}.w"].mean()) for n in range(8, 16)] == [*range(8, 16)]
