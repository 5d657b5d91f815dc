"""StateShardings of neuronx-distributed that no fixture has: made here, file by file."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from tests.formats.gold import Gold, Target
from tests.formats.references import opened
from tests.formats.same import as_theirs
from xla_ckpt import Mesh
from xla_ckpt.storage.local import LocalDirectory
from xla_ckpt.storage.local_file import LocalFileReader


def rank_file(folder: Path, content: Any, **at: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    name = f"dp_rank_{at.get('dp', 0):02d}_"
    name += f"ep_rank_{at['ep']:02d}_" if "ep" in at else ""
    torch.save(content, folder / f"{name}tp_rank_{at.get('tp', 0):02d}_pp_rank_{at.get('pp', 0):02d}.pt")


def tag_at(root: Path, tag: str, value: float, *, done: bool = True, time: int | None = None) -> None:
    rank_file(root / tag / "model", {"w": torch.full((4,), float(value))})
    torch.save({"value": value}, root / tag / "user_content.pt")
    for mark in ("checkpoint", "done") if done else ("checkpoint",):
        (root / tag / mark).write_text("1")
        if time is not None:
            os.utime(root / tag / mark, (time, time))


def test_the_newest_done_marker_counts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tag_at(tmp_path, "step_10", 10, time=3000)
    tag_at(tmp_path, "step_20", 20, time=1000)
    tag_at(tmp_path, "step_100", 100, time=2000)
    tag_at(tmp_path, "step_9", 9, time=2000)
    tag_at(tmp_path, "step_30", 30, done=False)
    (tmp_path / "logs").mkdir()
    assert xla_ckpt.list_tags(tmp_path) == ["step_20", "step_9", "step_100", "step_10"]
    assert xla_ckpt.latest_tag(tmp_path) == "step_10"
    assert xla_ckpt.has_checkpoint(tmp_path)
    assert not xla_ckpt.has_checkpoint(tmp_path / "logs")
    model = {"w": torch.zeros(4)}
    assert xla_ckpt.load_checkpoint(tmp_path, model=model).user_content == {"value": 10}
    assert model["w"].tolist() == [10] * 4
    with caplog.at_level(logging.WARNING):
        assert xla_ckpt.load_checkpoint(tmp_path, "step_30", model=model).user_content == {"value": 30}
    assert "step_30 has no done marker" in caplog.text
    with pytest.raises(xla_ckpt.NoCheckpointError):
        xla_ckpt.load_checkpoint(tmp_path, "step_31", model=model)


def test_the_file_of_a_rank_is_no_checkpoint(tmp_path: Path) -> None:
    """Its arrays have the names of the whole model's, and are parts of them."""
    tag_at(tmp_path, "step_1", 1)
    model = tmp_path / "step_1" / "model"
    with pytest.raises(xla_ckpt.UsageError, match=r"no checkpoint by itself.*Pass the root directory"):
        xla_ckpt.restore(model / "dp_rank_00_tp_rank_00_pp_rank_00.pt")
    with pytest.raises(xla_ckpt.NoCheckpointError, match="It is a part of a checkpoint: pass .*/step_1"):
        xla_ckpt.restore(model)


def test_a_float32_model_without_its_optimizer_hears_of_master_weights(tmp_path: Path) -> None:
    tag_at(tmp_path, "step_1", 1)
    rank_file(tmp_path / "step_1" / "model", {"w": torch.ones(4, dtype=torch.bfloat16)})
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match=r"cast=True.*master weights.*optimizer="):
        xla_ckpt.load_checkpoint(tmp_path, model={"w": torch.zeros(4)})


@pytest.mark.parametrize(("tag", "begins"), [(None, "there is no checkpoint"), ("step_31", "there is no such")])
def test_a_root_of_tags_without_marks_says_that_they_can_be_named(tmp_path: Path, tag: str | None, begins: str) -> None:
    """`ls` listed the tag as not complete, and these calls said that no tag is there."""
    tag_at(tmp_path, "step_30", 30, done=False)
    told = rf"^{begins}.* neuronx-distributed's mark that a save ended is missing in step_30: name a tag"
    with pytest.raises(xla_ckpt.NoCheckpointError, match=told) as error:
        xla_ckpt.load_checkpoint(tmp_path, tag, model={"w": torch.zeros(4)})
    assert ("did you mean 'step_30'?" in str(error.value)) == (tag is not None)
    with pytest.raises(xla_ckpt.NoCheckpointError, match=told):
        xla_ckpt.verify(tmp_path, tag)


def test_a_tag_of_theirs_that_seems_newer_is_mentioned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = {"w": torch.zeros(4)}
    tag_at(tmp_path, "old", 1, time=2000)
    xla_ckpt.save_checkpoint(tmp_path, "ours", {"w": torch.full((4,), 2.0)})
    xla_ckpt.load_checkpoint(tmp_path, model=model)
    assert "newer time stamp" not in caplog.text
    tag_at(tmp_path, "trained_on_with_nxd", 3, time=2**31)
    xla_ckpt.load_checkpoint(tmp_path, model=model)
    assert model["w"].tolist() == [2] * 4
    assert (
        "tag trained_on_with_nxd, in the form of neuronx-distributed, has a newer time stamp than ours" in caplog.text
    )


def test_our_tags_continue_theirs(tmp_path: Path) -> None:
    tag_at(tmp_path, "step_10", 10, time=2**31)
    model = {"w": torch.zeros(4)}
    xla_ckpt.load_checkpoint(tmp_path, model=model)
    xla_ckpt.save_checkpoint(tmp_path, "step_20", model=model, user_content="ours")
    assert xla_ckpt.list_tags(tmp_path) == ["step_10", "step_20"]
    assert xla_ckpt.load_checkpoint(tmp_path, model=model).user_content == "ours"
    assert xla_ckpt.load_checkpoint(tmp_path, "step_10", model=model).user_content == {"value": 10}


def test_a_damaged_newest_tag_is_passed_over(tmp_path: Path) -> None:
    tag_at(tmp_path, "a", 1, time=1000)
    tag_at(tmp_path, "b", 2, time=2000)
    file = tmp_path / "b/model/dp_rank_00_tp_rank_00_pp_rank_00.pt"
    file.write_bytes(file.read_bytes()[:-20])
    loaded = xla_ckpt.load_checkpoint(tmp_path, model={"w": torch.zeros(4)})
    assert loaded.user_content == {"value": 1}
    assert loaded.report.corrupt_tags == ("b",)


def test_differences_are_reported_as_ever(tmp_path: Path) -> None:
    tag_at(tmp_path, "a", 1)
    for model in ({"w": torch.zeros(5)}, {"w": torch.zeros(4).int()}, {"v": torch.zeros(4)}):
        with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="does not fit") as caught:
            xla_ckpt.load_checkpoint(tmp_path, "a", model=model)
        assert caught.value.tag == "a"


def test_shapes_that_fit_in_two_ways_are_ambiguous(tmp_path: Path) -> None:
    for tp in range(2):
        for ep in range(2):
            rank_file(tmp_path / "a/model", {"w": torch.full((2, 3), 2.0 * ep + tp)}, tp=tp, ep=ep)
    (tmp_path / "a/done").write_text("1")
    model = {"w": torch.zeros(4, 3)}
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="in 2 ways") as caught:
        xla_ckpt.load_checkpoint(tmp_path, "a", model=model)
    assert caught.value.leaf == "model/w"
    assert (caught.value.expected, caught.value.found) == ("[4, 3]", "[2, 3] on each rank")
    assert len(str(caught.value)) - len(str(tmp_path)) < 480, "what to do is said in few words"
    xla_ckpt.load_checkpoint(tmp_path, "a", model=model, shardings=[("w", ("ep", None))])
    assert model["w"][:, 0].tolist() == [0, 0, 2, 2]
    xla_ckpt.load_checkpoint(tmp_path, "a", model=model, shardings=[("w", ("tp", None))])
    assert model["w"][:, 0].tolist() == [0, 0, 1, 1]
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="no split over 2 tp"):
        xla_ckpt.load_checkpoint(tmp_path, "a", model={"w": torch.zeros(5, 3)})


def test_padding_of_a_declared_size_stays_behind(tmp_path: Path) -> None:
    full = torch.arange(30.0).reshape(10, 3)
    padded = torch.cat([full, torch.full((2, 3), -1.0)])
    for tp in range(4):
        rank_file(tmp_path / "a/model", {"w": padded.chunk(4)[tp].contiguous()}, tp=tp)
    (tmp_path / "a/done").write_text("1")
    weight = torch.nn.Parameter(torch.zeros(10, 3))
    weight.tensor_model_parallel, weight.partition_dim, weight.unpadded_shape = True, 0, (10, 3)
    xla_ckpt.load_checkpoint(tmp_path, "a", model={"w": weight})
    assert torch.equal(weight.detach(), full)


def test_files_of_ranks_that_do_not_fit_together(tmp_path: Path) -> None:
    rank_file(tmp_path / "a/model", {"w": torch.zeros(2)}, tp=0)
    rank_file(tmp_path / "a/model", {"v": torch.zeros(2)}, tp=1)
    (tmp_path / "a/done").write_text("1")
    with pytest.raises(xla_ckpt.CorruptCheckpointError, match="different names"):
        xla_ckpt.load_checkpoint(tmp_path, "a", model={"w": torch.zeros(4)})
    rank_file(tmp_path / "a/model", {"w": torch.zeros(3)}, tp=1)
    with pytest.raises(xla_ckpt.CorruptCheckpointError, match="do not fit together"):
        xla_ckpt.load_checkpoint(tmp_path, "a", model={"w": torch.zeros(4)})


def test_left_over_files_of_a_larger_dp(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.zeros(8))
    rank_file(tmp_path / "a/model", {"w": torch.zeros(8)})
    for dp in range(3):
        state = {0: {"step": torch.tensor(1.0), "exp_avg": torch.zeros(4), "exp_avg_sq": torch.zeros(4)}}
        content = {"state": {}, "param_groups": [{"lr": 1.0, "params": [0]}], "base_state": state}
        rank_file(tmp_path / "a/optim", {**content, "shape_info": {0: [8]}}, dp=dp)
    (tmp_path / "a/done").write_text("1")
    with pytest.raises(xla_ckpt.CorruptCheckpointError, match=r"do not fit to the number.*another dp size"):
        xla_ckpt.load_checkpoint(tmp_path, "a", model={"w": weight}, optimizer=torch.optim.AdamW([weight]))


@pytest.mark.parametrize("dp", [2, 4])
def test_zero1_with_experts(tmp_path: Path, dp: int) -> None:
    gold = Gold("tp2_ep2_dp2__xser_sync", "step_40")
    shutil.copytree(gold.root, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "step_40/optim")
    mesh = Mesh(dp=dp, ep=2, tp=2)
    names = [n for n in gold.truth["exp_avg"] if len(gold.truth["exp_avg"][n].shape) > 1]
    flat = [n for n in gold.truth["exp_avg"] if n not in names]
    expert = {n: gold.infos[n]["expert_model_parallel"] for n in gold.truth["exp_avg"]}
    order = [n for g in (names, flat) for n in g if not expert[n]] + [n for n in names if expert[n]]
    ordinary = sum(not e for e in expert.values())
    hyper = [{"weight_decay": 0.01, "lr": 1.0}, {"weight_decay": 0.0, "lr": 1.0}]
    count = sum(not expert[n] for n in names)
    groups = [
        {**hyper[0], "params": list(range(count))},
        {**hyper[1], "params": list(range(count, ordinary))},
        {**hyper[0], "params": list(range(len(order) - ordinary))},
    ]
    for rank in range(mesh.size):
        at = mesh.coordinates(rank)
        state, shapes = {}, {}
        for i, name in enumerate(order):
            shapes[i] = list(gold.part(name, gold.truth["exp_avg"][name], mesh, rank).shape)
            state[i] = {"step": torch.tensor(40.0)}
            for kind in ("exp_avg", "exp_avg_sq"):
                part = gold.part(name, gold.truth[kind][name], mesh, rank)
                ranks, mine = (dp // 2, at["edp"]) if expert[name] else (dp, at["dp"])
                pad = -part.shape[0] % ranks
                part = torch.cat([part, torch.zeros(pad, *part.shape[1:])])
                state[i][kind] = part.chunk(ranks)[mine].clone()
        offsets = {"ep_param_id_offset": 1, "ep_param_group_offset": 2, "ep_base_state_offset": ordinary,
                   "ep_shape_info_offset": ordinary}  # fmt: skip
        content = {"state": {}, "param_groups": groups, "base_state": state, "shape_info": shapes, **offsets}
        rank_file(tmp_path / "step_40/optim", content, dp=at["dp"], tp=at["tp"])
    target = Target(gold)
    xla_ckpt.load_checkpoint(tmp_path, "step_40", target.model, target.optimizer)
    assert target.differences() == []


@pytest.mark.parametrize("layout", ["xser", "pt"])
def test_a_conversion_deals_out_the_rows_of_experts_over_the_ranks_that_have_them(layout: str, tmp_path: Path) -> None:
    gold = Gold("tp2_ep2_dp2__xser_small", "step_40")
    about = Target(gold)
    xla_ckpt.convert(
        gold.root, tmp_path, to=layout, mesh="dp=4,ep=2,tp=2", zero1=True, model=about.model, optimizer=about.optimizer
    )
    files = [
        tmp_path / f"step_40/optim/dp_rank_0{dp}_tp_rank_0{tp}_pp_rank_00.pt" for dp in range(4) for tp in range(2)
    ]
    assert all(file.is_file() for file in files)
    if layout == "pt":
        held = opened(files[0])
        ordinary = held["ep_base_state_offset"]
        assert [g["params"][:1] for g in held["param_groups"]] == [[0], [ordinary - 3], [0], []]
        assert ordinary == held["ep_shape_info_offset"] < len(held["base_state"]) == len(held["shape_info"])
        for number, shape in held["shape_info"].items():
            rows = held["base_state"][number]["exp_avg"].shape[0]
            assert rows == -(-shape[0] // (2 if number >= ordinary else 4))
    for manifest in (True, False):
        if not manifest:
            as_theirs(tmp_path / "step_40")
        target = Target(gold)
        xla_ckpt.load_checkpoint(tmp_path, "step_40", target.model, target.optimizer)
        assert target.differences() == []


def test_a_parameter_before_the_experts_has_no_state(tmp_path: Path) -> None:
    """Experts follow the last of the others that has an entry: in the states that is another one than in the shapes."""
    for dp in range(2):
        rank_file(tmp_path / "a/model", {"w": torch.ones(4), "frozen": torch.ones(4), "e": torch.ones(1, 3)}, ep=dp)
        moments = torch.full((2,), 1.0 + dp), torch.full((1, 3), 3.0 + dp)
        states = {n: {"step": torch.tensor(1.0), "exp_avg": m, "exp_avg_sq": m} for n, m in enumerate(moments)}
        content = {
            "state": {}, "param_groups": [{"lr": 1.0, "params": [0, 1]}, {"lr": 1.0, "params": [0]}],
            "base_state": states, "shape_info": {0: [4], 1: [4], 2: [1, 3]}, "ep_param_id_offset": 1,
            "ep_param_group_offset": 1, "ep_base_state_offset": 1, "ep_shape_info_offset": 2,
        }  # fmt: skip
        rank_file(tmp_path / "a/optim", content, dp=dp)
    (tmp_path / "a/done").write_text("1")
    sizes = {"w": (4,), "frozen": (4,), "e": (2, 3)}
    model = {name: torch.nn.Parameter(torch.zeros(size)) for name, size in sizes.items()}
    optimizer = torch.optim.AdamW(model.values())
    xla_ckpt.load_checkpoint(tmp_path, "a", model, optimizer)
    assert {name: p in optimizer.state for name, p in model.items()} == {"w": True, "frozen": False, "e": True}
    assert optimizer.state[model["w"]]["exp_avg"].tolist() == [1, 1, 2, 2]
    assert optimizer.state[model["e"]]["exp_avg"][:, 0].tolist() == [3, 4]


class Own:
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Own)


def test_user_content_of_own_classes_needs_trust(tmp_path: Path) -> None:
    tag_at(tmp_path, "a", 1)
    torch.save({"config": Own(), "ema": torch.ones(2)}, tmp_path / "a/user_content.pt")
    model = {"w": torch.zeros(4)}
    with pytest.raises(xla_ckpt.UntrustedObjectError, match=r"Own.*trust_pickle=True") as caught:
        xla_ckpt.load_checkpoint(tmp_path, model=model)
    assert caught.value.file == "user_content.pt"
    assert model["w"].tolist() == [0] * 4
    assert xla_ckpt.restore(tmp_path, "a", {"model": model}).tree["model"]["w"].tolist() == [1] * 4
    content = xla_ckpt.load_checkpoint(tmp_path, model=model, trust_pickle=True).user_content
    assert content["config"] == Own()
    assert content["ema"].tolist() == [1, 1]
    assert model["w"].tolist() == [1] * 4


def test_opening_reads_no_tensor_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank_file(tmp_path / "a/model", {f"w{i}": torch.zeros(1 << 18) for i in range(8)})
    (tmp_path / "a/done").write_text("1")
    counted, whole = [], LocalFileReader.read_into

    def counting(self: LocalFileReader, buffer: memoryview, offset: int) -> int:
        counted.append(len(buffer))
        return whole(self, buffer, offset)

    monkeypatch.setattr(LocalFileReader, "read_into", counting)
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError):
        xla_ckpt.load_checkpoint(tmp_path, "a", model={"w0": torch.zeros(3)})
    assert 0 < sum(counted) < 64 * 1024  # of 8 MiB: headers, a directory and a pickle


def test_files_of_tensors_are_looked_at_several_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one for each tensor of each rank, and a look at a file of a bucket takes as long as a request."""
    inside, two, alone = set[str](), threading.Event(), LocalDirectory.open

    def in_company(self: LocalDirectory, path: str, size: int | None = None) -> LocalFileReader:
        if ".tensors/" in path:
            inside.add(path)
            if len(inside) == 2:
                two.set()
            two.wait(30)
        return alone(self, path, size)

    monkeypatch.setattr(LocalDirectory, "open", in_company)
    gold = Gold("tp2_dp2_z1m__xser_small", "step_40")
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError):
        xla_ckpt.load_checkpoint(gold.root, gold.tag, model={"w": torch.zeros(3)})
    assert two.is_set()
    assert len(inside) > 2


def test_tensors_anywhere_are_arrays(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    rank_file(tmp_path / "a/model", {"w": torch.ones(2), "extra": {"scale": torch.full((3,), 2.0), "n": (1,)}})
    group = {"lr": torch.tensor(0.25), "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.0, "params": [0]}
    state = {0: {"step": torch.tensor(3.0), "exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}}
    rank_file(tmp_path / "a/optim", {"state": state, "param_groups": [group]})
    torch.save({"ema": [torch.arange(3.0)]}, tmp_path / "a/user_content.pt")
    (tmp_path / "a/done").write_text("1")
    optimizer = torch.optim.AdamW([weight], lr=torch.tensor(1.0), foreach=False)
    model = {"w": weight, "extra": {"scale": torch.zeros(3), "n": (0,)}}
    content = xla_ckpt.load_checkpoint(tmp_path, "a", model=model, optimizer=optimizer).user_content
    assert content["ema"][0].tolist() == [0, 1, 2]
    assert model["extra"]["scale"].tolist() == [2, 2, 2]
    assert model["extra"]["n"] == (1,)
    assert float(optimizer.param_groups[0]["lr"]) == 0.25
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.95)
    assert weight.tolist() == [1, 1]


def test_an_embedding_that_the_last_stage_has_under_its_other_name(tmp_path: Path) -> None:
    stages = (["embed.weight", "layers.0.weight"], ["layers.1.weight", "head.weight"])
    value = {"embed.weight": 1.0, "layers.0.weight": 2.0, "layers.1.weight": 3.0, "head.weight": 1.0}
    for pp, names in enumerate(stages):
        rank_file(tmp_path / "a/model", {n: torch.full((4, 4), value[n]) for n in names}, pp=pp)
        state = {i: {"step": torch.tensor(1.0), "exp_avg": torch.full((4, 4), value[n]),
                     "exp_avg_sq": torch.full((4, 4), value[n])} for i, n in enumerate(names)}  # fmt: skip
        rank_file(tmp_path / "a/optim", {"state": state, "param_groups": [{"lr": 0.5, "params": [0, 1]}]}, pp=pp)
    (tmp_path / "a/done").write_text("1")
    model = torch.nn.Module()
    for name in ("embed", "layers", "head"):
        model.add_module(name, torch.nn.Linear(4, 4, bias=False) if name != "layers" else torch.nn.ModuleList())
    model.layers.extend([torch.nn.Linear(4, 4, bias=False) for _ in range(2)])
    model.head.weight = model.embed.weight
    optimizer = torch.optim.AdamW(model.parameters())
    xla_ckpt.load_checkpoint(tmp_path, model=model, optimizer=optimizer)
    for name, parameter in model.named_parameters():
        assert (parameter == value[name]).all(), name
        assert (optimizer.state[parameter]["exp_avg"] == value[name]).all(), name
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_lost_tensors_are_not_taken_for_weights_that_were_left_out(tmp_path: Path) -> None:
    gold = Gold("tp2_dp2_z1__xser_sync", "step_40")
    shutil.copytree(gold.root, tmp_path, dirs_exist_ok=True)
    for file in (tmp_path / "step_40/model").glob("*.tensors/*"):
        file.unlink()
    target = Target(gold)
    with pytest.raises(xla_ckpt.CorruptCheckpointError, match="no master weights"):
        xla_ckpt.load_checkpoint(tmp_path, "step_40", target.model, target.optimizer, strict=False)


@pytest.mark.parametrize("layout", ["native", "pt", "xser"])
def test_a_tag_of_ours_without_its_manifest_is_damaged_in_any_layout(layout: str, tmp_path: Path) -> None:
    weights = {"w": torch.zeros(3)}
    for tag in ("a", "b"):
        xla_ckpt.save_checkpoint(tmp_path, tag, weights, extras={"x": {"at": 1}}, layout=layout)
    (tmp_path / "b/manifest.json").unlink()
    (problem,) = xla_ckpt.verify(tmp_path, "b").problems
    assert "no manifest" in str(problem)
    with pytest.raises(xla_ckpt.CorruptCheckpointError, match="no manifest"):
        xla_ckpt.restore(tmp_path, "b")
    restored = xla_ckpt.restore(tmp_path)
    assert restored.tree["extras"] == {"x": {"at": 1}}
    assert restored.report.tag == "a"


def test_an_optimizer_that_they_saved_with_dcp_is_refused_and_the_model_loads(tmp_path: Path) -> None:
    tag_at(tmp_path, "a", 3)
    (tmp_path / "a/optim").mkdir()
    (tmp_path / "a/optim/.metadata").write_bytes(b"")
    model = {"w": torch.zeros(4)}
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(4))], lr=0.1)
    with pytest.raises(xla_ckpt.UnsupportedStateError, match="use_zero1_dcp"):
        xla_ckpt.load_checkpoint(tmp_path, "a", model, optimizer)
    assert model["w"].tolist() == [0] * 4
    assert ["use_zero1_dcp" in str(p) for p in xla_ckpt.verify(tmp_path, "a").problems] == [True]
    xla_ckpt.load_checkpoint(tmp_path, "a", model)
    assert model["w"].tolist() == [3] * 4
