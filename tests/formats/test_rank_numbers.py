"""What a model knows of each rank, as neuronx-distributed's `SPMDRank` does: it is loaded by the same ranks alone."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from tests.formats.same import as_theirs
from tests.formats.writing import as_job, save_as_job
from xla_ckpt import Mesh

LEAVES = ("model/spmd_rank.rank", "model/spmd_rank.local_expert_indices")
SAVED = Mesh(dp=4, ep=2, tp=2)


def model_of(mesh: Mesh, rank: int, *, numbers: bool = True, wiped: bool = False) -> torch.nn.Module:
    """A model that has the number of its rank, and those of the rank's experts."""
    at = mesh.coordinates(rank)
    model, spmd = torch.nn.Module(), torch.nn.Module()
    model.up = torch.nn.Parameter(torch.arange(12.0).reshape(4, 3).chunk(mesh.tp)[at["tp"]] * (not wiped))
    model.up.tensor_model_parallel, model.up.partition_dim = True, 0
    values = {"rank": [rank], "local_expert_indices": [[2 * at["ep"], 2 * at["ep"] + 1]]}
    for name, value in values.items() if numbers else ():
        number = torch.nn.Parameter(torch.tensor(value, dtype=torch.int32), requires_grad=False)
        number.data.fill_(-1) if wiped else None
        number.tensor_model_parallel, number.partition_dim, number.num_partitions = True, 0, mesh.size
        spmd.register_parameter(name, number)
    model.spmd_rank = spmd
    return model


def loaded(monkeypatch: pytest.MonkeyPatch, root: Path, mesh: Mesh, **options: Any) -> list[tuple[Any, Any]]:
    """On each rank of a job: its model after a strict load, and what was left alone."""

    def load(rank: int) -> tuple[Any, Any]:
        model = model_of(mesh, rank, wiped=True, **options)
        return dict(model.state_dict()), xla_ckpt.load_checkpoint(root, "a", model).report.skipped

    return as_job(monkeypatch, mesh, "load", load)


@pytest.mark.parametrize("layout", ["native", "xser", "pt"])
def test_the_same_ranks_get_theirs_and_others_keep_what_they_have(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save_as_job(monkeypatch, SAVED, tmp_path, "a", lambda rank: {"model": model_of(SAVED, rank)}, layout=layout)
    assert xla_ckpt.verify(tmp_path, "a").ok
    for rank, (held, skipped) in enumerate(loaded(monkeypatch, tmp_path, SAVED)):
        want = model_of(SAVED, rank).state_dict()
        assert all(torch.equal(held[name], value) for name, value in want.items())
        assert skipped == ()
    assert "stays as it is" not in caplog.text
    # as many ranks, arranged otherwise; fewer; one
    for mesh in (Mesh(dp=8, ep=2), Mesh(dp=8, ep=4), Mesh(dp=2, ep=2), Mesh(tp=2), Mesh()):
        for rank, (held, skipped) in enumerate(loaded(monkeypatch, tmp_path, mesh)):
            assert torch.equal(held["up"], model_of(mesh, rank).up)
            assert (held["spmd_rank.rank"] == held["spmd_rank.local_expert_indices"]).all()  # -1
            assert [text.partition(": ")[0] for text in skipped] == list(LEAVES)
    assert "the ranks that saved were arranged otherwise: it stays as it is" in caplog.text
    for held, skipped in loaded(monkeypatch, tmp_path, Mesh(dp=2), numbers=False):
        assert held["up"].shape == (4, 3)
        assert skipped == ()


def test_a_model_that_has_none_of_them_was_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    xla_ckpt.save_checkpoint(tmp_path, "a", model_of(Mesh(), 0, numbers=False))
    for held, skipped in loaded(monkeypatch, tmp_path, Mesh(dp=2, ep=2)):
        assert held["up"].any()
        assert len(skipped) == 2
    missing = model_of(Mesh(), 0)
    missing.more = torch.nn.Parameter(torch.zeros(1, dtype=torch.int32), requires_grad=False)
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match=r"model/more: wanted, but not stored"):
        xla_ckpt.load_checkpoint(tmp_path, "a", missing)


@pytest.mark.parametrize("layout", ["xser", "pt"])
def test_what_neuronx_distributed_would_have_written(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rank files hold the numbers of the first of the ranks that share them."""
    mesh = Mesh(dp=2, ep=2, tp=2)
    save_as_job(monkeypatch, mesh, tmp_path, "a", lambda rank: {"model": model_of(mesh, rank)}, layout=layout)
    as_theirs(tmp_path / "a")
    for rank, (held, _) in enumerate(loaded(monkeypatch, tmp_path, mesh)):
        assert held["spmd_rank.rank"].tolist() == [rank]
    for other in (Mesh(dp=4, ep=2, tp=2), Mesh(dp=2, ep=2)):
        for held, skipped in loaded(monkeypatch, tmp_path, other):
            assert held["spmd_rank.rank"].tolist() == [-1]
            assert len(skipped) == 2
    for held, skipped in loaded(monkeypatch, tmp_path, Mesh(), numbers=False):
        assert held["up"].any()
        assert skipped == ()


@pytest.mark.parametrize("to", ["native", "pt"])
def test_a_conversion_leaves_them_out(
    to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save_as_job(monkeypatch, SAVED, tmp_path / "in", "a", lambda rank: {"model": model_of(SAVED, rank)})
    with caplog.at_level(logging.WARNING):
        xla_ckpt.convert(tmp_path / "in", tmp_path / "out", "a", to=to, mesh="dp=2,tp=2")
    assert f"of the job that saved: {', '.join(sorted(LEAVES))}" in caplog.text
    for held, _ in loaded(monkeypatch, tmp_path / "out", Mesh(tp=2), numbers=False):
        assert held["up"].any()
