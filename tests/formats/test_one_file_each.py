"""A layout of rank files that is no more than a form: what it gets for nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from tests.formats.writing import as_kwargs, save_as_job, toy
from tests.same import differences
from tests.topology.state import differences as unlike_toy
from xla_ckpt import Mesh
from xla_ckpt.core.tree import schema
from xla_ckpt.formats.rank_files.file_names import RankCoords, RankFileName
from xla_ckpt.formats.rank_files.layout import (
    RankContent,
    RankFileFormat,
    RankLayout,
    RankOptimizer,
    parse_numbered_optimizer,
)
from xla_ckpt.formats.rank_files.writing import RankState
from xla_ckpt.formats.registry import find_layout, register_layout, unregister_layout
from xla_ckpt.formats.tags import open_tag
from xla_ckpt.storage.resolve import open_store

Stages = tuple[tuple[str, ...], ...]
"""The modules of each pipeline stage."""

SPLIT = {"up.weight": 0, "up.bias": 0, "down.weight": 1}
"""The dim of each parameter that is split over tp."""

TP = 2
STAGES = ("up", "down")
RULES = [("up.weight", ("tp", None)), ("up.bias", ("tp",)), ("down.weight", (None, "tp"))]


def optimizer_in(tree: Mapping[Any, Any]) -> RankOptimizer:
    stored = parse_numbered_optimizer(tree["inner"])
    return replace(stored, masters=dict(enumerate(tree["masters"])))


def tree_of(state: RankState, _: RankCoords) -> dict[str, Any]:
    """The way back."""
    optimizer = state.get_members(schema.OPTIMIZER)
    names = schema.get_parameter_names(optimizer)
    inner = schema.rename_parameters(optimizer, {name: i for i, name in enumerate(names)})
    return {
        "model": state.get_members(schema.MODEL),
        "optim": {
            "inner": {key: inner[key] for key in (schema.STATE, schema.PARAM_GROUPS)},
            "masters": [optimizer[schema.MASTER][name] for name in names if schema.MASTER in optimizer],
        },
        **state.parts.get(schema.USER_CONTENT, {}),  # of a job that saves only rank 0 has it
    }


class Trainer(RankLayout):
    name = origin = "trainer"
    saves = True
    file_format = RankFileFormat(
        file_names=[RankFileName("mp_rank_{tp:02}/state.pt"), RankFileName("mp_rank_{tp:02}_{pp:03}/state.pt")],
        parse_content=lambda tree, _: RankContent(
            model=tree["model"], optimizer=tree["optim"], parts={schema.USER_CONTENT: {"step": tree["step"]}}
        ),
        parse_optimizer=optimizer_in,
        build_tree=tree_of,
    )


def numbered(model: Mapping[Any, Any], more: int) -> dict[str, Any]:
    """The parts of a model under names with other numbers of layers."""
    return {f"{int(layer) + more}.{name}": part for key, part in model.items() for layer, name in [key.split(".")]}


class FromZero(RankLayout):
    """Of a trainer whose pipeline stages, of one layer each, number their layers from 0."""

    name = origin = "from_zero"
    saves = True
    file_format = RankFileFormat(
        file_names=[RankFileName("stage_{pp}.pt")],
        parse_content=lambda tree, at: RankContent(model=numbered(tree, at.pp)),
        build_tree=lambda state, at: numbered(state.get_members(schema.MODEL), -at.pp),
    )


def rank_files(tag: Path) -> list[str]:
    return sorted(str(path.relative_to(tag)) for path in tag.glob("mp_rank_*/state.pt"))


@pytest.fixture(autouse=True)
def trainers() -> Iterator[None]:
    layouts = [register_layout(Trainer()), register_layout(FromZero())]
    yield
    for layout in layouts:
        unregister_layout(layout)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(4, 6)
        self.down = torch.nn.Linear(6, 4)


def trained() -> tuple[Net, torch.optim.Optimizer]:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def write(at: Path, model: Net, optimizer: torch.optim.Optimizer, step: int, stages: Stages) -> None:
    """The files that such a trainer would write, of two tp ranks in each pipeline stage."""
    names = [name for name, _ in model.named_parameters()]
    weights, stored = model.state_dict(), optimizer.state_dict()

    def part(name: str, tensor: torch.Tensor, tp: int) -> torch.Tensor:
        return tensor.chunk(TP, SPLIT[name])[tp].clone() if name in SPLIT and tensor.ndim else tensor.clone()

    for pp, modules in enumerate(stages):
        own = [name for name in names if name.split(".")[0] in modules]
        for tp in range(TP):
            states = {
                i: {key: part(name, value, tp) for key, value in stored["state"][names.index(name)].items()}
                for i, name in enumerate(own)
            }
            inner = {"state": states, "param_groups": [{**stored["param_groups"][0], "params": [*range(len(own))]}]}
            tree = {
                "model": {name: part(name, weights[name], tp) for name in own},
                "optim": {"inner": inner, "masters": [part(name, weights[name].double(), tp) for name in own]},
                "step": step,
            }
            folder = at / (f"mp_rank_{tp:02d}_{pp:03d}" if len(stages) > 1 else f"mp_rank_{tp:02d}")
            folder.mkdir(parents=True)
            torch.save(tree, folder / "state.pt")


@pytest.mark.parametrize("stages", [(STAGES,), tuple((stage,) for stage in STAGES)], ids=["pp=1", "pp=2"])
def test_model_and_optimizer_load(tmp_path: Path, stages: Stages) -> None:
    model, optimizer = trained()
    write(tmp_path / "a", model, optimizer, 7, stages)
    write(tmp_path / "b", model, optimizer, 8, stages)
    assert xla_ckpt.list_tags(tmp_path) == ["a", "b"]
    assert xla_ckpt.verify(tmp_path, "a").ok
    fresh = Net()
    other = torch.optim.AdamW(fresh.parameters(), lr=0.1)
    loaded = xla_ckpt.load_checkpoint(tmp_path, "a", fresh, other)
    assert loaded.user_content == {"step": 7}
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in fresh.state_dict().items())
    assert other.param_groups[0]["lr"] == 0.5
    for number, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, other.state_dict()["state"][number][key]) for key, value in state.items())


def test_it_converts_and_its_master_weights_go_along(tmp_path: Path) -> None:
    model, optimizer = trained()
    write(tmp_path / "a", model, optimizer, 7, tuple((stage,) for stage in STAGES))
    other, fresh = trained()
    xla_ckpt.convert(tmp_path, tmp_path / "native", "a", model=other, optimizer=fresh, shardings=RULES)
    tree = xla_ckpt.restore(tmp_path / "native").tree
    assert torch.equal(tree["optimizer"]["master"]["down.weight"], model.down.weight.double())


@pytest.mark.parametrize("stages", [(STAGES,), tuple((stage,) for stage in STAGES)], ids=["pp=1", "pp=2"])
def test_what_is_converted_to_it_are_the_files_of_such_a_trainer(tmp_path: Path, stages: Stages) -> None:
    model, optimizer = trained()
    write(tmp_path / "a", model, optimizer, 7, stages)
    xla_ckpt.convert(tmp_path, tmp_path / "native", "a", model=model, optimizer=optimizer, shardings=RULES)
    mesh, cuts = Mesh(pp=len(stages), dp=2, tp=TP), ["up"] * (len(stages) - 1)
    xla_ckpt.convert(tmp_path / "native", tmp_path / "b", to="trainer", mesh=mesh, pipeline_cuts=cuts)
    files = rank_files(tmp_path / "b/a")
    assert files == rank_files(tmp_path / "a")
    assert find_layout(open_tag(open_store(tmp_path / "b"), "a").manifest).name == "trainer"
    for name in files:
        ours, theirs = (torch.load(root / "a" / name, weights_only=True) for root in (tmp_path / "b", tmp_path))
        assert not differences(theirs, ours, name)


def test_a_job_saves_in_it_what_ranks_of_other_jobs_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = Mesh(pp=2, dp=2, tp=2)
    states = [toy(mesh, rank) for rank in range(mesh.size)]
    content = {"user_content": {"step": 7}, "layout": "trainer"}
    save_as_job(monkeypatch, mesh, tmp_path, "a", lambda rank: as_kwargs(states[rank]), **content)
    assert rank_files(tmp_path / "a") == [f"mp_rank_{tp:02d}_{pp:03d}/state.pt" for tp in range(2) for pp in range(2)]
    assert xla_ckpt.verify(tmp_path, "a").ok
    loaded, optimizer = toy(Mesh(), 0, blank=True)
    assert xla_ckpt.load_checkpoint(tmp_path, "a", loaded, optimizer).user_content == {"step": 7}
    assert unlike_toy(optimizer, loaded.by_name, Mesh(), 0) == []


def test_a_job_whose_ranks_the_names_do_not_tell_apart_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = Mesh(dp=2)
    states = [toy(mesh, rank, zero=True) for rank in range(mesh.size)]
    with pytest.raises(xla_ckpt.UnsupportedStateError, match=r"no place for what ranks along dp have of their own"):
        save_as_job(monkeypatch, mesh, tmp_path, "a", lambda rank: as_kwargs(states[rank]), layout="trainer")
    assert xla_ckpt.list_tags(tmp_path) == []


def test_a_tag_without_the_file_of_a_rank_is_damaged(tmp_path: Path) -> None:
    write(tmp_path / "a", *trained(), 7, tuple((stage,) for stage in STAGES))
    (tmp_path / "a/mp_rank_01_000/state.pt").unlink()
    with pytest.raises(xla_ckpt.CorruptCheckpointError, match="1 of 4 rank files are missing"):
        xla_ckpt.load_checkpoint(tmp_path, "a", Net())
    assert not xla_ckpt.verify(tmp_path, "a").ok


def test_a_file_that_holds_something_else_is_damaged(tmp_path: Path) -> None:
    """A load of the newest tag passes it over, as any damaged one."""
    write(tmp_path / "a", *trained(), 7, tuple((stage,) for stage in STAGES))
    write(tmp_path / "b", *trained(), 8, tuple((stage,) for stage in STAGES))
    torch.save({"weights": {}}, tmp_path / "b/mp_rank_01_000/state.pt")
    with pytest.raises(xla_ckpt.CorruptCheckpointError, match="does not hold what such files have.*KeyError"):
        xla_ckpt.load_checkpoint(tmp_path, "b", Net())
    assert not xla_ckpt.verify(tmp_path, "b").ok
    assert xla_ckpt.load_checkpoint(tmp_path, model=Net()).tag == "a"


def test_a_directory_without_such_files_is_no_tag(tmp_path: Path) -> None:
    (tmp_path / "a/mp_rank_00").mkdir(parents=True)
    (tmp_path / "a/mp_rank_00/other.pt").write_bytes(b"")
    assert xla_ckpt.list_tags(tmp_path) == []


def test_equal_names_of_two_stages_are_refused_unless_their_arrays_are_equal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The array of the later stage was dropped without a word."""

    def save(tag: str, values: tuple[float, float]) -> None:
        for pp, value in enumerate(values):
            folder = tmp_path / tag / f"mp_rank_00_{pp:03d}"
            folder.mkdir(parents=True)
            optimizer = {"inner": {"state": {}, "param_groups": []}, "masters": []}
            model = {"0.weight": torch.full((2, 2), value)}
            torch.save({"model": model, "optim": optimizer, "step": 1}, folder / "state.pt")

    save("a", (1.0, 2.0))
    save("b", (3.0, 3.0))
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False))
    with pytest.raises(
        xla_ckpt.IncompatibleCheckpointError, match=r"pipeline stages hold different arrays.*pp 1 differs"
    ):
        xla_ckpt.load_checkpoint(tmp_path, "a", model)
    xla_ckpt.load_checkpoint(tmp_path, "a", model, shardings=[("0.weight", (None, None))])
    assert model[0].weight[0, 0] == 1.0
    assert "A rule of shardings= (--sharding) makes them replicas" in caplog.text
    xla_ckpt.load_checkpoint(tmp_path, "b", model)
    assert model[0].weight[0, 0] == 3.0


def test_stages_may_number_their_layers_from_zero(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for pp in range(2):
        torch.save({"0.weight": torch.full((2, 2), 1.0 + pp)}, tmp_path / f"a/stage_{pp}.pt")
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2, bias=False) for _ in range(2)))
    xla_ckpt.load_checkpoint(tmp_path, "a", model)
    assert [layer.weight[0, 0].item() for layer in model] == [1.0, 2.0]
    xla_ckpt.convert(tmp_path, tmp_path / "native", "a", model=model)
    xla_ckpt.convert(tmp_path / "native", tmp_path / "b", to="from_zero", mesh="pp=2", pipeline_cuts=["0"])
    for pp in range(2):
        (weight,) = torch.load(tmp_path / f"b/a/stage_{pp}.pt", weights_only=True).items()
        assert (weight[0], weight[1].tolist()) == ("0.weight", [[1.0 + pp] * 2] * 2)
