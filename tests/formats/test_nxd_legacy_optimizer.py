"""What `NeuronZero1Optimizer.save_sharded_state_dict` leaves beside the older layout: optim.dp_rank_xx.tp_rank_xx."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import xla_ckpt
from tests.formats.gold import Gold, Target
from tests.formats.references import whole
from tests.formats.writing import State, as_job
from xla_ckpt import Mesh
from xla_ckpt.cli.main import main

CASE = "tp2_dp2_z1m__xser_small"


def written(root: Path) -> Gold:
    """A fixture as the GPT-NeoX scripts of neuronx-distributed would have saved it: two calls, one directory."""
    gold = Gold(CASE, "step_40")
    tag, made = gold.root / gold.tag, root / "old"
    made.mkdir(parents=True)
    for tp in range(2):
        (made / f"tp_rank_{tp:02d}_pp_rank_00").mkdir()
        model = whole(tag / f"model/dp_rank_00_tp_rank_{tp:02d}_pp_rank_00.pt")
        torch.save({"model": model, "global_step": 40}, made / f"tp_rank_{tp:02d}_pp_rank_00/checkpoint.pt")
        for dp in range(2):
            content = whole(tag / f"optim/dp_rank_{dp:02d}_tp_rank_{tp:02d}_pp_rank_00.pt")
            content |= {"dp_rank": dp, "tp_rank": tp}
            torch.save(content, made / f"optim.dp_rank_{dp:02d}.tp_rank_{tp:02d}")
    return gold


@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "dp=3", "tp=2", "tp=1"])
def test_it_loads_on_any_topology(mesh: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gold, over = written(tmp_path), Mesh.parse(mesh)
    states = [State(gold, over, rank) for rank in range(over.size)]
    content = as_job(
        monkeypatch, over, "load",
        lambda r: xla_ckpt.load_checkpoint(tmp_path, "old", states[r].model, states[r].optimizer).user_content,
    )  # fmt: skip
    assert content == [{"global_step": 40}] * over.size
    assert [state.differences() for state in states] == [[]] * over.size


def test_it_is_verified_and_converted(tmp_path: Path) -> None:
    gold = written(tmp_path)
    report = xla_ckpt.verify(tmp_path, "old")
    assert report.ok
    assert report.files == 6
    assert main(["show", str(tmp_path), "--tag", "old"]) == 0
    target = Target(gold)
    xla_ckpt.convert(tmp_path, tmp_path / "ours", "old", model=target.model, optimizer=target.optimizer)
    again = Target(gold)
    xla_ckpt.load_checkpoint(tmp_path / "ours", "old", again.model, again.optimizer)
    assert not again.differences()
    file = tmp_path / "old/optim.dp_rank_01.tp_rank_01"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert not xla_ckpt.verify(tmp_path, "old").ok


def test_missing_files_are_named(tmp_path: Path) -> None:
    gold = written(tmp_path)
    (tmp_path / "old/optim.dp_rank_01.tp_rank_01").unlink()
    target = Target(gold)
    with pytest.raises(xla_ckpt.CorruptCheckpointError, match="1 of 4 rank files are missing") as caught:
        xla_ckpt.load_checkpoint(tmp_path, "old", target.model, target.optimizer)
    assert "(dp 1, ep 0, tp 1, pp 0)" in str(caught.value.found)
    assert not xla_ckpt.verify(tmp_path, "old").ok
    xla_ckpt.load_checkpoint(tmp_path, "old", target.model)


def test_pipeline_stages_wrote_over_each_other(tmp_path: Path) -> None:
    gold = written(tmp_path)
    for tp in range(2):
        folder = tmp_path / f"old/tp_rank_{tp:02d}_pp_rank_01"
        folder.mkdir()
        torch.save({"model": {"more": torch.ones(2)}, "global_step": 40}, folder / "checkpoint.pt")
    target = Target(gold)
    with pytest.raises(xla_ckpt.CorruptCheckpointError, match="do not say the pipeline stage") as caught:
        xla_ckpt.load_checkpoint(tmp_path, "old", target.model, target.optimizer)
    assert "without the optimizer" in str(caught.value.hint)
    assert all((p == 7).all() for p in target.parameters.values())
    (problem,) = xla_ckpt.verify(tmp_path, "old").problems
    assert "pipeline stage" in problem.problem
    xla_ckpt.load_checkpoint(tmp_path, "old", target.model, strict=False)
    assert not (target.parameters["model.embed_tokens.weight"] == 7).any()


def test_the_optimizer_of_the_rank_files_counts(tmp_path: Path) -> None:
    """Files of an earlier save may lie beside them."""
    gold = Gold("tp2_pp2_dp1_legacy__pt", "step_40")
    shutil.copytree(gold.root, tmp_path, dirs_exist_ok=True)
    torch.save({"base_state": {}, "param_groups": []}, tmp_path / "step_40/optim.dp_rank_00.tp_rank_00")
    target = Target(gold)
    xla_ckpt.load_checkpoint(tmp_path, "step_40", target.model, target.optimizer)
    assert not target.differences()
