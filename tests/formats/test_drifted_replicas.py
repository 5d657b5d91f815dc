"""Replicas that have drifted apart: the choice that saves one of them, and what the tag says of it."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from tests.formats.same import as_theirs
from tests.formats.writing import as_job, save_as_job
from xla_ckpt import Mesh
from xla_ckpt.cli.main import main

MESH = Mesh(dp=2, tp=2)
RULES = [("up", ("tp", None))]
BIG = (1024, 64)
"""Half of it is more than what replicas write whole: they would share it by rows."""


def model_of(rank: int) -> dict[str, torch.Tensor]:
    """``up`` is split over tp and has drifted along dp; ``norm`` has drifted along tp; ``head`` is the same."""
    at = MESH.coordinates(rank)
    part = torch.arange(BIG[0] * BIG[1], dtype=torch.float32).reshape(BIG).chunk(2)[at["tp"]]
    return {
        "up": part + 0.5 * at["dp"],
        "norm": torch.full((BIG[0] * 64,), float(at["tp"])),
        "head": torch.full((3,), 7.0),
    }


def first() -> dict[str, torch.Tensor]:
    """What the first replicas hold."""
    return {**model_of(0), "up": torch.cat([model_of(0)["up"], model_of(1)["up"]])}


def is_first(found: Any) -> bool:
    return found.keys() == first().keys() and all(torch.equal(found[name], value) for name, value in first().items())


@pytest.mark.parametrize("layout", ["native", "xser", "pt", "smp"])
@pytest.mark.parametrize("async_save", [False, True])
def test_the_first_replica_is_stored_whole(
    layout: str,
    async_save: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def saved(tag: str, **options: Any) -> None:
        options |= {"layout": layout, "shardings": RULES, "async_save": async_save}
        save_as_job(monkeypatch, MESH, tmp_path, tag, lambda rank: {"model": model_of(rank)}, **options)

    with pytest.raises(xla_ckpt.DivergentReplicasError, match="2 replicated arrays differ") as caught:
        saved("equal")
    assert "replicas='first'" in str(caught.value.hint)
    with caplog.at_level(logging.WARNING):
        saved("first", options=xla_ckpt.SaveOptions(replicas="first"))
    (told,) = [r.getMessage() for r in caplog.records if "the replicas of 2 arrays differ" in r.getMessage()]
    assert "model/up: rank 0 against ranks 2, 3" in told
    assert "model/norm: rank 0 against ranks 1, 3" in told
    assert "head" not in told
    assert xla_ckpt.list_tags(tmp_path) == ["first"]
    caplog.clear()

    with caplog.at_level(logging.WARNING):
        as_job(monkeypatch, MESH, "load", lambda rank: xla_ckpt.restore(tmp_path, "first", shardings=RULES).tree)
        assert is_first(xla_ckpt.restore(tmp_path, "first").tree["model"])
    told_by_loads = [r.getMessage() for r in caplog.records if "replicas of 2 arrays differed" in r.getMessage()]
    assert len(told_by_loads) == 2  # once by each of the two loads, whatever the number of ranks
    assert "model/up, model/norm" in told_by_loads[0]
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        xla_ckpt.restore(tmp_path, "first", {"model": {"head": torch.zeros(3)}})
    assert not caplog.records  # nothing that differed was loaded

    arrays = json.loads((tmp_path / "first/manifest.json").read_text())["arrays"]
    marked = {leaf: form.get("divergent") for form in arrays for leaf in form["names"]}
    assert marked == {"model/up": True, "model/norm": True, "model/head": None}
    assert xla_ckpt.verify(tmp_path, "first").ok
    (note,) = [n for n in xla_ckpt.explain(tmp_path, "first", mesh="tp=2").notes if "replicas" in n]
    assert "model/up, model/norm" in note
    assert main(["show", str(tmp_path), "--tag", "first"]) == 0
    assert "replicas differed, and the bytes of the first are stored: model/up, model/norm" in _flat(capsys)
    assert main(["show", str(tmp_path), "--tag", "first", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["divergent"] == ["model/up", "model/norm"]


def _flat(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("layout", ["xser", "pt"])
def test_files_of_neuronx_distributed_hold_what_each_tp_rank_had(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it saves them itself: of ranks that share a file the first one's, whole."""
    state = {"model": model_of(0)}
    save_as_job(
        monkeypatch, MESH, tmp_path, "a", lambda rank: {"model": model_of(rank)},
        layout=layout, shardings=RULES, options=xla_ckpt.SaveOptions(replicas="first"),
    )  # fmt: skip
    as_theirs(tmp_path / "a")
    for rank in (0, 1):
        want = model_of(rank)
        found = as_job(
            monkeypatch, MESH, "load",
            lambda r: xla_ckpt.restore(tmp_path, "a", {"model": model_of(0)}, shardings=RULES[:0]).tree["model"],
        )[rank]  # fmt: skip
        assert all(torch.equal(found[name], want[name]) for name in state["model"])


def test_conversions_keep_the_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state = {rank: {"model": model_of(rank)} for rank in range(MESH.size)}
    save_as_job(
        monkeypatch,
        MESH,
        tmp_path,
        "a",
        state.__getitem__,
        shardings=RULES,
        options=xla_ckpt.SaveOptions(replicas="first"),
    )
    for to in ("native", "pt", "xser", "smp"):
        with caplog.at_level(logging.WARNING):
            xla_ckpt.convert(tmp_path, tmp_path / to, "a", to=to, mesh="tp=2", shardings=RULES)
        assert "tag a: the replicas of 2 arrays differed" in caplog.text
        caplog.clear()
        arrays = json.loads((tmp_path / to / "a/manifest.json").read_text())["arrays"]
        marked = [leaf for form in arrays if "divergent" in form for leaf in form["names"]]
        assert marked == ["model/up", "model/norm"]
        assert is_first(xla_ckpt.restore(tmp_path / to, "a").tree["model"])
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        xla_ckpt.export_hf(tmp_path, tmp_path / "hf", "a")
    assert "the replicas of 2 arrays differed" in caplog.text


def test_a_choice_that_makes_no_sense(tmp_path: Path) -> None:
    with pytest.raises(xla_ckpt.UsageError, match="no such choice for replicas") as caught:
        xla_ckpt.save(tmp_path / "new", "a", {"w": torch.ones(2)}, options=xla_ckpt.SaveOptions(replicas="last"))  # type: ignore[arg-type]
    assert caught.value.found == "'last'"
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("layout", ["native", "xser", "pt", "smp"])
def test_keys_and_values_that_several_ranks_hold(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Sections with copies: two of four tp ranks hold the same keys and values, and these have drifted apart."""
    mesh, rules = Mesh(tp=4), [("qkv", (("tp", [8, "4x2"]), None))]

    def held(rank: int) -> torch.Tensor:
        queries = torch.arange(2.0) + 2 * rank
        keys = torch.arange(2.0) + 100 + 2 * (rank % 2) + 1000 * (rank // 2)
        return torch.cat([queries, keys])[:, None] * torch.ones(1, 3)

    def saved(tag: str, **options: Any) -> None:
        save_as_job(
            monkeypatch, mesh, tmp_path, tag, lambda rank: {"model": {"qkv": held(rank)}},
            layout=layout, shardings=rules, **options,
        )  # fmt: skip

    with pytest.raises(xla_ckpt.DivergentReplicasError):
        saved("equal")
    saved("first", options=xla_ckpt.SaveOptions(replicas="first"))
    found = xla_ckpt.restore(tmp_path, "first").tree["model"]["qkv"][:, 0].tolist()
    assert found == [*range(8), 100, 101, 102, 103]
    if layout == "native":
        return
    as_theirs(tmp_path / "first")
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        (own, *_) = as_job(
            monkeypatch, mesh, "load",
            lambda _: xla_ckpt.restore(tmp_path, "first", {"model": {"qkv": held(0)}}, shardings=rules).tree,
        )  # fmt: skip
    assert torch.equal(own["model"]["qkv"], held(0))
    assert "the replicas of 1 array differed, and the bytes of the first are stored: model/qkv" in caplog.text
