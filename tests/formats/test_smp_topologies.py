"""SageMaker model parallel's files on any other topology: split, padded and strided parameters, and their states."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from tests.formats.smp_files import ORDER, described_content, load_info, toy_model, toy_optimizer, write_set, write_tag
from tests.formats.writing import as_job, toy
from tests.topology.state import GROUPS, WHOLE, differences, known
from xla_ckpt import Mesh

SOURCES = [Mesh(pp=2, tp=2), Mesh(tp=4), Mesh(pp=4), Mesh(tp=3), Mesh(pp=3, tp=2), Mesh()]
TARGETS = [
    (Mesh(), False), (Mesh(tp=4), False), (Mesh(pp=4), False), (Mesh(pp=2, tp=2), False), (Mesh(dp=3, tp=2), True),
    (Mesh(dp=4), True), (Mesh(pp=2, dp=2), True),
]  # fmt: skip


def loads_anywhere(monkeypatch: pytest.MonkeyPatch, path: Path, targets: Any = TARGETS) -> None:
    for target, zero in targets:
        states = [toy(target, rank, zero=zero, blank=True) for rank in range(target.size)]
        as_job(monkeypatch, target, "load", lambda rank: xla_ckpt.load_checkpoint(path, None, *states[rank]))
        for rank, (model, optimizer) in enumerate(states):
            assert differences(optimizer, model.by_name, target, rank) == [], (target, rank)
            assert model.seen == 5
            assert [g["lr"] for g in optimizer.param_groups] == [g["lr"] for g in GROUPS]


@pytest.mark.parametrize("mesh", SOURCES, ids=str)
def test_a_set_loads_on_any_topology(mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SMP itself refuses another number of parts."""
    write_set(tmp_path / "c.pt", mesh, "1.12")
    loads_anywhere(monkeypatch, tmp_path / "c.pt")


def test_a_directory_loads_on_any_topology(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads_anywhere(monkeypatch, write_tag(tmp_path, "t", Mesh(pp=2, tp=2)))


def shares(mesh: Mesh, pp: int, tp: int, rdp: int, ranks: int) -> dict[str, Any]:
    """With sharded state each rank of an rdp group has that of some parameters."""
    held = toy_optimizer(mesh, pp, tp, keep=lambda number: number % ranks == rdp)
    for group in held["param_groups"]:
        group["param_names"] = [ORDER[n] for n in group["params"]]
    # Without the exchange that empties it, each tp rank has all states of what is not split.
    held["state"] |= {
        n: toy_optimizer(mesh, pp, 0)["state"][n]
        for n, members in held["state"].items() if not members
    }  # fmt: skip
    return held


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_sharded_states_in_lists(ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`local_state_dict` of a job with shard_optimizer_state: lists over the ranks of an rdp group."""
    mesh = Mesh(pp=2, tp=2)

    def content(pp: int, tp: int) -> Mapping[str, Any]:
        parts = [shares(mesh, pp, tp, rdp, ranks) for rdp in range(ranks)]
        optimizer = {key: [part[key] for part in parts] for key in ("state", "param_groups")}
        return {"model": toy_model(mesh, pp, tp), "optimizer": {**optimizer, "_smp_is_partial": True}}

    write_set(tmp_path / "c.pt", mesh, "1.12", content)
    loads_anywhere(monkeypatch, tmp_path / "c.pt", TARGETS[:4])


def test_sharded_states_in_files_of_each_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = Mesh(pp=2, dp=2, tp=2)
    folder = write_tag(tmp_path, "t", Mesh(pp=2, tp=2))
    for file in folder.glob("optimizer_states_*"):
        file.unlink()
    for rank in range(mesh.size):
        pp, rdp, tp = (mesh.coordinates(rank)[axis] for axis in ("pp", "dp", "tp"))
        torch.save(shares(Mesh(pp=2, tp=2), pp, tp, rdp, 2), folder / f"optimizer_states_{pp}_{tp}_{rdp}.pt")
    loads_anywhere(monkeypatch, folder, TARGETS[:4])
    assert xla_ckpt.verify(folder).ok


def test_names_and_splits_in_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What this library adds to SMP's dicts: then no model is needed to read them."""
    mesh = Mesh(pp=2, tp=4)  # ten rows over four ranks are padded
    write_set(tmp_path / "c.pt", mesh, "documents", lambda pp, tp: described_content(mesh, pp, tp))
    tree = xla_ckpt.restore(tmp_path / "c.pt").tree
    for name in WHOLE:
        assert tuple(tree["model"][name].shape) == WHOLE[name][0]
        assert torch.equal(tree["optimizer"]["state"][name]["exp_avg"], known(name, "exp_avg"))
    report = xla_ckpt.convert(tmp_path / "c.pt", tmp_path / "native")
    assert report.tag == "c"
    assert xla_ckpt.verify(tmp_path / "native").ok
    loads_anywhere(monkeypatch, tmp_path / "native", TARGETS[:3])
    loads_anywhere(monkeypatch, tmp_path / "c.pt", TARGETS[:3])


def test_converted_with_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of SMP's own say less: a model and an optimizer say the rest."""
    write_set(tmp_path / "c.pt", Mesh(pp=2, tp=2), "1.12")
    model, optimizer = toy(Mesh(), 0, blank=True)
    report = xla_ckpt.convert(
        tmp_path / "c.pt", tmp_path / "x", to="xser", mesh="tp=2", model=model, optimizer=optimizer
    )
    assert report.layout == "xser"
    loads_anywhere(monkeypatch, tmp_path / "x", TARGETS[:2])
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="nothing says what the whole is"):
        xla_ckpt.convert(tmp_path / "c.pt", tmp_path / "y")
    assert not (tmp_path / "y").exists() or xla_ckpt.list_tags(tmp_path / "y") == []


def test_a_model_that_is_not_partial(tmp_path: Path) -> None:
    """A full file, as `smp.save(..., partial=False)` and `save_checkpoint(partial=False)` write it."""
    model, optimizer = toy(Mesh(), 0)
    state = {**model.state_dict(), "_smp_is_partial": False}
    for held in (
        state,
        {"model_state_dict": state},
        {"model_state_dict": {**state, "_smp_load_info": load_info(1, 1)}},
    ):
        torch.save(held, tmp_path / "full.pt")
        other, _ = toy(Mesh(), 0, blank=True)
        xla_ckpt.load_checkpoint(tmp_path / "full.pt", model=other)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
        tree = xla_ckpt.restore(tmp_path / "full.pt").tree
        assert list(tree) == ["model"]
        assert not [name for name in tree["model"] if name.startswith("_smp")]
