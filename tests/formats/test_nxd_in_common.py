"""What is no tensor of a parameter in neuronx-distributed's own tags: ranks are compared, not the first believed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from tests.formats.gold import as_rank
from tests.formats.test_nxd_layouts import rank_file
from tests.formats.writing import Zero1
from xla_ckpt import Mesh
from xla_ckpt.formats.nxd.zero1_conversion import convert_zero_checkpoints

NESTED = {
    "factors": [torch.ones(2), (torch.zeros(3), 5)],
    "history": {"norms": [torch.tensor(2.0)], "seen": 1, "worst": math.nan},
    "span": (0.5, "ema", None),
}


def weight(n: int = 2) -> torch.nn.Parameter:
    made = torch.nn.Parameter(torch.zeros(n, 3))
    made.tensor_model_parallel, made.partition_dim = True, 0  # type: ignore[attr-defined]
    return made


def written(root: Path, states: dict[int, Any], *, axis: str = "tp", shared: dict[int, Any] | None = None) -> None:
    """A tag whose ranks along `axis` hold these states beside a momentum, and these that belong to no parameter."""
    for rank, state in states.items():
        at = {axis: rank}
        if axis == "tp" or rank == 0:
            rank_file(root / "a/model", {"w": torch.full((2, 3), float(rank))}, **at)
        held: Any = {0: {"exp_avg": torch.full((2, 3), float(rank)), **state}, **(shared or {}).get(rank, {})}
        content = {"state": held, "param_groups": [{"lr": 1.0, "params": [0]}]}
        if axis == "dp":
            held[0]["exp_avg"] = torch.full((1, 3), float(rank))
            content = {**content, "state": {}, "base_state": held, "shape_info": {0: [2, 3]}}
        rank_file(root / "a/optim", content, **at)
    (root / "a/done").write_text("1")


def loaded(monkeypatch: pytest.MonkeyPatch, root: Path, mesh: Mesh, rank: int) -> Any:
    with monkeypatch.context() as patch:
        as_rank(patch, mesh, rank)
        mine = weight()
        optimizer = torch.optim.SGD([mine], lr=0.5)
        xla_ckpt.load_checkpoint(root, "a", {"w": mine}, optimizer)
    return mine, optimizer


@pytest.mark.parametrize("axis", ["tp", "dp"])
def test_what_is_the_same_is_loaded(axis: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, {0: NESTED, 1: NESTED}, axis=axis, shared=dict.fromkeys((0, 1), {"own": NESTED}))
    mesh = Mesh(tp=2) if axis == "tp" else Mesh()
    for rank in range(mesh.size):
        mine, optimizer = loaded(monkeypatch, tmp_path, mesh, rank)
        for held in (optimizer.state[mine], optimizer.state["own"]):
            assert held["factors"][0].tolist() == [1, 1]
            assert (held["factors"][1][0].tolist(), held["factors"][1][1]) == ([0, 0, 0], 5)
            assert held["history"]["norms"][0] == 2
            assert math.isnan(held["history"]["worst"])
            assert held["span"] == (0.5, "ema", None)


DIFFERENCES = [
    ({"factors": [torch.ones(2), (torch.full((3,), 4.0), 5)]}, "factors/1/0"),
    ({"factors": [torch.ones(2), (torch.zeros(3), 6)]}, "factors/1/1"),
    ({"factors": [torch.ones(2), (torch.zeros(4), 5)]}, "factors/1/0"),
    ({"factors": [torch.ones(2)]}, "factors"),
    ({"factors": torch.ones(2)}, "factors"),
    ({"history": {**NESTED["history"], "seen": True}}, "history/seen"),
    ({"history": {**NESTED["history"], "more": 1}}, "history"),
    ({"span": (0.5, "sum", None)}, "span/1"),
    ({"late": 1}, "late"),
]


@pytest.mark.parametrize("first", [0, 1], ids=["the second rank's differs", "the first rank's differs"])
@pytest.mark.parametrize(("change", "leaf"), DIFFERENCES, ids=lambda v: v if isinstance(v, str) else "")
@pytest.mark.parametrize("where", ["state", "shared"])
def test_what_differs_is_refused_with_leaf_and_ranks(
    where: str, change: Any, leaf: str, first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {first: NESTED, 1 - first: {**NESTED, **change}}
    if where == "state":
        written(tmp_path, values)
    else:
        written(tmp_path, {0: {}, 1: {}}, shared={rank: {"own": value} for rank, value in values.items()})
    within = "" if leaf == "late" else f"/{leaf}"  # of a container with other members nothing is compared further
    for rank in range(2):
        with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="the ranks hold different values") as caught:
            loaded(monkeypatch, tmp_path, Mesh(tp=2), rank)
        assert caught.value.leaf == (
            f"optimizer/state/w/{leaf}" if where == "state" else f"optimizer/state/own{within}"
        )
        assert str(caught.value.found) == "(tp 1) differs from (tp 0)"
    assert xla_ckpt.restore(tmp_path, "a", {"model": {"w": torch.zeros(2, 3)}}, shardings=[("w", None)])
    assert not xla_ckpt.explain(tmp_path, "a", mesh="tp=2", model={"w": weight(4)}).ok


def test_zero1_ranks_are_named_by_dp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of factors of each rank's own rows, for one: every rank would have got those of the first."""
    written(tmp_path, {0: {"factors": [torch.ones(2)]}, 1: {"factors": [torch.zeros(2)]}}, axis="dp")
    mesh = Mesh(dp=2)
    mine, shard = weight(), torch.nn.Parameter(torch.zeros(1, 3))
    as_rank(monkeypatch, mesh, 1)
    optimizer = Zero1([[(mine, shard)]], [{}], mesh, 1)
    optimizer.base_optimizer = torch.optim.SGD([shard])  # AdamW would need its own members of the state
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match=r"\(dp 1\) differs from \(dp 0\)") as caught:
        xla_ckpt.load_checkpoint(tmp_path, "a", {"w": mine}, optimizer)
    assert caught.value.leaf == "optimizer/state/w/factors/0"
    assert shard.tolist() == [[0] * 3]


def test_the_converter_of_zero1_files_compares_them_too(tmp_path: Path) -> None:
    """What is the same goes along, tensors in containers included; the rows of the first rank alone would be lost."""
    for tag, other in (("same", NESTED), ("list", {**NESTED, "factors": []}), ("plain", {**NESTED, "span": 1})):
        written(tmp_path / tag, {0: NESTED, 1: other}, axis="dp", shared=dict.fromkeys((0, 1), {"own": NESTED}))
    convert_zero_checkpoints(tmp_path / "same/a", tmp_path / "full", dp_size=None)
    held = torch.load(tmp_path / "full/optim/full_tp_rank_00_pp_rank_00.pt", weights_only=True)["base_state"]
    assert held[0]["factors"][0].tolist() == held["own"]["factors"][0].tolist() == [1, 1]
    assert held[0]["exp_avg"].tolist() == [[0] * 3, [1] * 3]
    for tag, leaf in (("list", "factors"), ("plain", "span")):
        with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match=r"\(dp 1\) differs from \(dp 0\)") as caught:
            convert_zero_checkpoints(tmp_path / tag / "a", tmp_path / f"full {tag}", dp_size=None)
        assert caught.value.leaf == f"0/0/base_state/0/{leaf}"
        assert not (tmp_path / f"full {tag}").exists()


class Scaled(torch.nn.Module):
    """Keeps a value that is no tensor in its state."""

    def __init__(self, scale: Any) -> None:
        super().__init__()
        self.w, self.scale = torch.nn.Parameter(torch.zeros(2)), scale

    def get_extra_state(self) -> Any:
        return self.scale

    def set_extra_state(self, state: Any) -> None:
        self.scale = state


@pytest.mark.parametrize(
    ("scales", "leaf"), [((1.0, 2.0), ""), (([torch.ones(2)], [torch.zeros(2)]), "/0"), (({"a": 1}, {"a": 2}), "/a")]
)
def test_extra_state_of_a_module(scales: Any, leaf: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for tag, held in (("same", (scales[0],) * 2), ("a", scales)):
        for tp, scale in enumerate(held):
            rank_file(tmp_path / tag / "model", dict(Scaled(scale).state_dict()), tp=tp)
        (tmp_path / tag / "done").write_text("1")
    for rank in range(2):
        as_rank(monkeypatch, Mesh(tp=2), rank)
        model = Scaled(type(scales[0])())
        xla_ckpt.load_checkpoint(tmp_path, "same", model)
        assert str(model.scale) == str(scales[0])
        with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="the ranks hold different values") as caught:
            xla_ckpt.load_checkpoint(tmp_path, "a", model)
        assert caught.value.leaf == f"model/_extra_state{leaf}"
        assert xla_ckpt.restore(tmp_path, "a", {"model": {"w": torch.zeros(2)}})
