"""The directory of tensors that neuronx-distributed makes beside each rank file of the layout xser."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import xla_ckpt
from tests.formats.same import as_theirs
from tests.formats.writing import save_as_job
from tests.runs import names_in
from xla_ckpt import Mesh


def test_it_is_there_without_tensors_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs look whether it is there: an optimizer before its first step, or SGD, has no tensor at all."""
    mesh = Mesh(dp=2, tp=2)

    def state(_: int) -> dict[str, object]:
        model = torch.nn.Linear(2, 2)
        model.load_state_dict({"weight": torch.ones(2, 2), "bias": torch.ones(2)})
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.5), "mesh": mesh}

    save_as_job(monkeypatch, mesh, tmp_path, "a", state, layout="xser")
    xla_ckpt.convert(tmp_path, tmp_path, "a", to="xser", mesh="tp=2", as_tag="b", shardings=[("weight", ("tp", None))])
    save_as_job(monkeypatch, mesh, tmp_path, "pt", state, layout="pt")
    for tag in ("a", "b"):
        for tp in range(2):
            folder = tmp_path / tag / f"optim/dp_rank_00_tp_rank_{tp:02d}_pp_rank_00.pt.tensors"
            assert folder.is_dir()
            assert names_in(folder) == []
        assert xla_ckpt.verify(tmp_path, tag).strangers == []
        assert xla_ckpt.verify(tmp_path, tag).ok
    assert not list((tmp_path / "pt").rglob("*.tensors"))
    as_theirs(tmp_path / "a")
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    xla_ckpt.load_checkpoint(tmp_path, "a", model, optimizer)
    assert (model.weight == 1).all()
    assert optimizer.param_groups[0]["lr"] == 0.5
