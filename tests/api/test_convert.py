"""`convert`: from any layout and topology to any other, verified, within bounded memory, atomically."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import xla_ckpt
from tests.formats.same import as_theirs, content, rank_files
from tests.formats.writing import as_kwargs, save_as_job, toy
from tests.runs import names_in
from tests.same import differences
from xla_ckpt import Mesh
from xla_ckpt.cli.main import main

RULES = [("embed|up", ("tp",)), ("qkv", (("tp", 3), None)), ("down.weight", (None, ("tp", 2)))]


class Small(torch.nn.Module):
    """With padding (13 rows over tp), strided splits of both dims, a tied parameter, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(13, 4)
        self.layers = torch.nn.ModuleList(torch.nn.ModuleDict({
            "qkv": torch.nn.Linear(4, 12, bias=False), "up": torch.nn.Linear(4, 8), "down": torch.nn.Linear(8, 4),
        }) for _ in range(2))  # fmt: skip
        self.head = torch.nn.Linear(4, 13, bias=False)
        self.head.weight = self.embed.weight
        self.scale = torch.nn.Parameter(torch.tensor(2.0))
        self.register_buffer("low", torch.arange(5).to(torch.bfloat16))


def state(seed: int) -> tuple[Small, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = Small()
    plain, other = [p for p in model.parameters() if p.ndim == 2], [p for p in model.parameters() if p.ndim != 2]
    optimizer = torch.optim.AdamW([{"params": plain}, {"params": other, "weight_decay": 0.0}])
    for p in model.parameters():
        optimizer.state[p] = {k: torch.randn_like(p) for k in ("exp_avg", "exp_avg_sq")} | {"step": torch.tensor(3.0)}
    return model, optimizer


CONTENT = {"step": 7, "pair": (1, 2.5), "sampler": torch.arange(6), "none": None}


def make(root: Path, tag: str = "a", seed: int = 0, **more: Any) -> tuple[Small, torch.optim.AdamW]:
    model, optimizer = state(seed)
    extras = {"loader": {"at": 5, "order": torch.randperm(10)}}
    xla_ckpt.save_checkpoint(root, tag, model, optimizer, {"last": 1}, CONTENT, extras=extras, shardings=RULES, **more)
    return model, optimizer


def everything(root: Path, tag: str) -> Any:
    return xla_ckpt.restore(root, tag).tree


MESHES = ["dp=1", "tp=2", "dp=3,tp=2", "pp=2,dp=2,tp=2"]


@pytest.mark.parametrize(("to", "mesh"), list(itertools.product(["native", "xser", "pt", "smp"], MESHES)))
def test_there_and_back(to: str, mesh: str, tmp_path: Path) -> None:
    make(tmp_path)
    cuts = ["layers.0"] if "pp=2" in mesh else []
    report = xla_ckpt.convert(
        tmp_path,
        tmp_path / "b",
        to=to,
        mesh=mesh,
        shardings=RULES,
        pipeline_cuts=cuts,
        zero1="dp" in mesh,
        options=xla_ckpt.ConvertOptions(max_memory=100),
    )
    assert (report.tag, report.layout, Mesh.parse(report.mesh)) == ("a", to, Mesh.parse(mesh))
    assert xla_ckpt.verify(tmp_path / "b").ok
    assert not differences(everything(tmp_path, "a"), everything(tmp_path / "b", "a"), order=False)
    model, optimizer = state(1)
    assert not differences(xla_ckpt.load_checkpoint(tmp_path / "b", None, model, optimizer).user_content, CONTENT)
    assert model.head.weight is model.embed.weight
    xla_ckpt.convert(tmp_path / "b", tmp_path / "c", to="native")
    assert not differences(everything(tmp_path, "a"), everything(tmp_path / "c", "a"), order=False)


def test_memory_does_not_change_a_byte(tmp_path: Path) -> None:
    make(tmp_path)
    for to in ("native", "xser", "pt", "smp"):
        for name, limit in (("wide", 1 << 30), ("narrow", 1)):
            xla_ckpt.convert(
                tmp_path,
                tmp_path / name,
                to=to,
                as_tag=to,
                mesh="dp=2,tp=2",
                shardings=RULES,
                zero1=True,
                options=xla_ckpt.ConvertOptions(max_memory=limit),
            )
        files = [f for f in (tmp_path / "wide" / to).rglob("*") if f.is_file() and f.name[0] not in "_m"]
        assert len(files) > 6
        for file in files:
            other = tmp_path / "narrow" / file.relative_to(tmp_path / "wide")
            assert file.read_bytes() == other.read_bytes() or file.name == "commit_success.txt"


def test_zero1_files_as_the_optimizer_itself_deals_rows_out(tmp_path: Path) -> None:
    model, optimizer = make(tmp_path)
    xla_ckpt.convert(tmp_path, tmp_path / "b", to="pt", mesh="dp=3", zero1=True)
    parts = [content(tmp_path / f"b/a/optim/dp_rank_{dp:02d}_tp_rank_00_pp_rank_00.pt") for dp in range(3)]
    ordered = [p for g in optimizer.param_groups for p in g["params"]]
    for i, parameter in enumerate(ordered):
        shape = list(parameter.shape)
        assert parts[0]["shape_info"][i] == shape
        held = [p["base_state"][i]["exp_avg"] for p in parts]
        if not shape:
            assert all(torch.equal(h, optimizer.state[parameter]["exp_avg"]) for h in held)
            continue
        rows = -(-shape[0] // 3)
        assert [h.shape[0] for h in held] == [rows] * 3
        assert torch.equal(torch.cat(held)[: shape[0]], optimizer.state[parameter]["exp_avg"])
        assert not torch.cat(held)[shape[0] :].any()  # padding
    assert parts[0]["state"] == {}


def test_master_weights_of_one_dp_rank_become_zero1_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such an optimizer deals out no rows, but its master weights have a place in ZeRO-1 files only."""
    mesh = Mesh(tp=2)
    save_as_job(monkeypatch, mesh, tmp_path, "a", lambda r: as_kwargs(toy(mesh, r, zero=True)))
    xla_ckpt.convert(tmp_path, tmp_path / "b", to="pt", mesh="tp=2")
    held = content(tmp_path / "b/a/optim/dp_rank_00_tp_rank_00_pp_rank_00.pt")
    assert held["sharded_master_weights"].keys() == held["base_state"].keys()


def test_stages_hold_their_own_layers_and_shared_ones_both(tmp_path: Path) -> None:
    make(tmp_path)
    xla_ckpt.convert(tmp_path, tmp_path / "b", to="xser", mesh="pp=2", pipeline_cuts=["layers.0"])
    names = [[*content(tmp_path / f"b/a/model/dp_rank_00_tp_rank_00_pp_rank_{s:02d}.pt")] for s in (0, 1)]
    assert "layers.0.qkv.weight" in names[0]
    assert {"layers.1.qkv.weight", "head.weight"} < set(names[1])
    assert not set(names[0]) & set(names[1])
    states = [content(tmp_path / f"b/a/optim/dp_rank_00_tp_rank_00_pp_rank_{s:02d}.pt")["state"] for s in (0, 1)]
    # The embedding comes first, and the same weight as the head where the last stage has that: behind its layer.
    (at,) = [n for n, state in states[1].items() if state["exp_avg"].shape == states[0][0]["exp_avg"].shape]
    assert at > 0
    assert not differences(states[0][0], states[1][at])


def test_the_next_conversion_splits_as_this_one_did(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(8)).sum().backward()
    optimizer.step()
    xla_ckpt.save_checkpoint(tmp_path, "a", model, optimizer)
    rules = [("weight", ("tp", None))]
    for to in ("native", "pt"):
        xla_ckpt.convert(tmp_path, tmp_path, "a", to=to, mesh="dp=2,tp=2", as_tag=to, shardings=rules, zero1=True)
        xla_ckpt.convert(tmp_path, tmp_path, to, to="pt", mesh="dp=2,tp=4", as_tag=f"{to}_next")
        weight = content(tmp_path / f"{to}_next/model/dp_rank_00_tp_rank_03_pp_rank_00.pt")["weight"]
        assert torch.equal(weight, model.weight[6:])
        files = rank_files(tmp_path / f"{to}_next")
        dealt = to == "pt"  # the native layout does not deal rows out
        assert [f for f in files if f.startswith("optim/dp_rank_01")] == [f for f in files if "dp_rank_01" in f]
        assert any("optim/dp_rank_01" in f for f in files) == dealt
        assert not differences(everything(tmp_path, "a"), everything(tmp_path, f"{to}_next"), order=False)


def test_safetensors(tmp_path: Path) -> None:
    model, _ = make(tmp_path)
    report = xla_ckpt.convert(
        tmp_path, tmp_path / "hf", to="safetensors", options=xla_ckpt.ConvertOptions(max_memory=64)
    )
    held = safetensors.torch.load_file(tmp_path / "hf/model.safetensors")
    wanted = {k: v for k, v in model.state_dict().items() if k != "head.weight"}
    assert not differences(wanted, held, order=False)
    assert (report.layout, report.files) == ("safetensors", 1)


def flipped(root: Path) -> None:
    (file,) = (root / "a/model").iterdir()
    data = bytearray(file.read_bytes())
    data[4096 + 50] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("to", ["native", "xser", "pt", "safetensors"])
def test_damage_is_found_and_nothing_is_written(to: str, tmp_path: Path) -> None:
    make(tmp_path)
    make(tmp_path / "b", "old", seed=5)
    flipped(tmp_path)
    with pytest.raises(xla_ckpt.CorruptCheckpointError, match="stored bytes are damaged"):
        xla_ckpt.convert(tmp_path, tmp_path / ("hf" if to == "safetensors" else "b"), to=to)
    assert xla_ckpt.list_tags(tmp_path / "b") == ["old"]
    assert names_in(tmp_path) == ["a", "b"]
    assert names_in(tmp_path / "b") == ["old"]


@dataclasses.dataclass
class Mine:
    at: int


class Odd:
    """No plain value: it is pickled."""

    def __init__(self, at: int) -> None:
        self.at = at


@pytest.mark.filterwarnings("ignore:.*will be pickled")
def test_objects_go_along_and_are_run_only_with_trust(tmp_path: Path) -> None:
    xla_ckpt.save_checkpoint(tmp_path, "a", {"w": torch.ones(2)}, user_content={"odd": Odd(4), "mine": Mine(5)})
    xla_ckpt.convert(tmp_path, tmp_path, to="native", as_tag="b")
    held = xla_ckpt.load_checkpoint(tmp_path, "b", trust_pickle=True).user_content
    assert (held["odd"].at, held["mine"]) == (4, Mine(5))
    with pytest.raises(xla_ckpt.UntrustedObjectError):
        xla_ckpt.load_checkpoint(tmp_path, "b")
    with pytest.raises(xla_ckpt.UntrustedObjectError, match="Odd"):
        xla_ckpt.convert(tmp_path, tmp_path, "a", to="pt", as_tag="c")
    assert xla_ckpt.list_tags(tmp_path) == ["a", "b"]
    xla_ckpt.convert(tmp_path, tmp_path, "a", to="pt", as_tag="c", trust_pickle=True)
    assert torch.load(tmp_path / "c/user_content.pt", weights_only=False)["odd"].at == 4


def test_bad_arguments(tmp_path: Path) -> None:
    make(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    for how, error, said in (
        ({"to": "zip"}, xla_ckpt.UsageError, "no such layout"),
        ({"to": "native"}, xla_ckpt.UsageError, "would replace the old one"),
        ({"to": "pt", "as_tag": "b", "mesh": "pp=2"}, xla_ckpt.UsageError, r"need 1 cut \[.*found none"),
        ({"to": "pt", "as_tag": "b", "mesh": "pp=2", "pipeline_cuts": ["x"]}, xla_ckpt.UsageError, "no parameter"),
        ({"to": "pt", "as_tag": "b", "mesh": "dp=x"}, xla_ckpt.UsageError, "mesh makes no sense"),
        ({"to": "pt", "as_tag": "b/c"}, xla_ckpt.InvalidTagError, "b/c"),
        ({"to": "pt", "as_tag": "b", "tag": "no"}, xla_ckpt.NoCheckpointError, "no such checkpoint"),
        ({"to": "pt", "as_tag": "b", "llama": "config.json"}, xla_ckpt.UsageError, "expected xla_ckpt.LlamaJob"),
        ({"to": "pt", "as_tag": "b", "mesh": "tp=5", "shardings": RULES}, ValueError, "cannot be split over"),
        ({"to": "safetensors", "destination": tmp_path / "full"}, xla_ckpt.UsageError, "must not exist"),
        ({"to": "safetensors", "destination": "m.safetensors"}, xla_ckpt.UsageError, r"Name the directory: .*/m\."),
    ):  # fmt: skip
        with pytest.raises(error, match=said):
            xla_ckpt.convert(tmp_path, **{"destination": tmp_path, **how})  # type: ignore[arg-type]
    assert names_in(tmp_path) == ["a", "full"]


def test_what_is_most_likely_not_meant(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    xla_ckpt.save_checkpoint(tmp_path, "a", torch.nn.Linear(4, 7), mesh="dp=1")
    with pytest.raises(xla_ckpt.UsageError, match="nothing is split over tp"):
        xla_ckpt.convert(tmp_path, tmp_path, to="pt", mesh="tp=2", as_tag="b")
    rules = [("weight", ("tp", None)), ("wieght", ("tp", None))]
    xla_ckpt.convert(tmp_path, tmp_path, to="pt", mesh="tp=2", as_tag="b", shardings=rules)
    assert "('wieght', ('tp', None)) fits" in caplog.text
    assert "padded, because they do not divide over pp=1,dp=1,ep=1,cp=1,tp=2: model/weight" in caplog.text
    with pytest.raises(xla_ckpt.UsageError, match="a tag of this name already"):
        xla_ckpt.convert(tmp_path, tmp_path, "a", as_tag="b")
    for mesh, why in (
        ("tp=x", "'tp=x' is no mesh axis"),
        ({"dp": 2}, "neither a Mesh nor text"),
        (4, "neither a Mesh"),
    ):
        with pytest.raises(xla_ckpt.UsageError, match=f"a mesh makes no sense: .*{why}"):
            xla_ckpt.convert(tmp_path, tmp_path, "a", as_tag="c", mesh=mesh)  # type: ignore[arg-type]
        with pytest.raises(xla_ckpt.UsageError, match="a mesh makes no sense"):
            xla_ckpt.save(tmp_path, "c", {"x": 1}, mesh=mesh)  # type: ignore[arg-type]
    assert xla_ckpt.list_tags(tmp_path) == ["a", "b"]


def test_an_export_of_less_than_the_model_is_refused(tmp_path: Path) -> None:
    make(tmp_path)
    xla_ckpt.convert(tmp_path, tmp_path, "a", to="xser", mesh="tp=2", as_tag="b", shardings=RULES)
    as_theirs(tmp_path / "b")
    for rules in ([], [("qkv", (("tp", 3), None))]):
        with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="ambiguous"):
            xla_ckpt.export_hf(tmp_path, tmp_path / "hf", "b", shardings=rules)
        assert not (tmp_path / "hf").exists()


def model_of_mine() -> tuple[Small, torch.optim.AdamW]:
    model, optimizer = state(3)
    model.embed.weight.unpadded_shape = (13, 4)  # what is beyond is padding
    return model, optimizer


def test_attributes_that_contradict_the_shape_of_their_parameter_are_refused(tmp_path: Path) -> None:
    """Else what is written has twice as many rows, and half of the columns."""
    model = torch.nn.Linear(8, 4, bias=False)
    xla_ckpt.save_checkpoint(tmp_path, "a", model)
    xla_ckpt.convert(tmp_path, tmp_path / "b", to="nxd", mesh="tp=2", shardings=[("weight", (None, "tp"))])
    as_theirs(tmp_path / "b/a")
    weight: Any = model.weight
    weight.tensor_model_parallel, weight.partition_dim = True, 0
    for call in (
        lambda: xla_ckpt.convert(tmp_path / "b", tmp_path / "c", to="native", model=model),
        lambda: xla_ckpt.export_hf(tmp_path / "b", tmp_path / "c", model=model),
        lambda: xla_ckpt.explain(tmp_path / "b", mesh="tp=2", model=model),
    ):
        with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match=r"\[8, 4\] of what .* Correct partition_dim"):
            call()
        assert not (tmp_path / "c").exists()
    weight.partition_dim = 1
    xla_ckpt.convert(tmp_path / "b", tmp_path / "c", to="native", model=model)
    assert torch.equal(xla_ckpt.restore(tmp_path / "c").tree["model"]["weight"], model.weight)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path)
    rules = ["--sharding", "embed|up", "tp", "--sharding", "qkv", "tp*3,_", "--sharding", "down.weight", "_,tp*2"]
    where = [str(tmp_path), str(tmp_path / "b")]
    assert main(["convert", *where, "--to", "xser", "--mesh", "dp=2,tp=2", "--zero1", *rules, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["layout"] == "xser"
    assert len(rank_files(tmp_path / "b/a")) == 14
    as_theirs(tmp_path / "b/a")
    assert main(["ls", str(tmp_path / "b")]) == 0
    assert "neuronx-distributed" in capsys.readouterr().out
    assert main(["convert", str(tmp_path / "b"), str(tmp_path / "c"), "--to", "native"]) == 1
    assert "numbers its parameters" in capsys.readouterr().err
    like = ["--like", f"{__name__}:model_of_mine", *rules]
    assert main(["convert", str(tmp_path / "b"), str(tmp_path / "c"), "--to", "native", *like]) == 0
    assert main(["explain", str(tmp_path / "b"), "--mesh", "tp=2", *like]) == 0
    assert main(["show", str(tmp_path / "b"), *like]) == 0
    assert main(["verify", str(tmp_path / "b")]) == 0
    assert main(["export", str(tmp_path / "b"), str(tmp_path / "hf"), *like]) == 0
    back, original = everything(tmp_path / "c", "a"), everything(tmp_path, "a")
    assert not differences(original["model"], back["model"], order=False)
    assert not differences(original["optimizer"], back["optimizer"], order=False)
    capsys.readouterr()
    assert main(["convert", *where, "--to", "nxd", "--as", "same"]) == 0
    assert xla_ckpt.restore(tmp_path / "b", "same").tree.keys() == original.keys()
    assert len(rank_files(tmp_path / "b/same")) == 4
    assert main(["convert", *where, "--to", "native", "--as", "x", "--like", "nowhere:at_all"]) == 2
    assert "MODULE:FUNCTION" in capsys.readouterr().err
