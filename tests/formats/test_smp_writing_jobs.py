"""SMP's files from jobs of real processes: under torchrun, asynchronous, killed, and with a rank that fails."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from tests.formats.same import as_theirs
from tests.formats.test_smp_writing import OURS, model_of, optimizer_of, read
from tests.formats.writing import as_job, names, toy, unlike
from tests.jobs import run_on_ranks
from tests.nursery import Call, bear
from tests.runs import names_in
from tests.topology.state import differences
from xla_ckpt import Mesh
from xla_ckpt.saving import finalize as engine

MESH = Mesh(pp=2, tp=2)


def saves_and_trains_on(rank: int, root: Path) -> float:
    """Save without waiting, and overwrite everything at once; how long the caller waited (s)."""
    model, optimizer = toy(MESH, rank)
    handle = xla_ckpt.save_checkpoint(
        root, "a_partial", model, optimizer, user_content={"step": 7}, layout="smp", mesh=MESH, async_save=True
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(-3.0)
            optimizer.state[parameter]["exp_avg"].fill_(-3.0)
    return handle.result().stall


def loads(rank: int, root: Path, mesh: Mesh) -> list[str]:
    model, optimizer = toy(mesh, rank, blank=True)
    assert xla_ckpt.load_checkpoint(root, None, model, optimizer, mesh=mesh).user_content == {"step": 7}
    return differences(optimizer, model.by_name, mesh, rank)


def test_four_processes_save_what_others_resume(tmp_path: Path) -> None:
    run_on_ranks(saves_and_trains_on, 4, tmp_path)
    folder = tmp_path / "a_partial"
    for pp in (0, 1):
        for tp in (0, 1):
            held, wanted = read(folder, f"model_{pp}_{tp}.pt"), model_of(MESH, pp, tp)
            assert unlike({name: held[name] for name in wanted}, wanted) == []
            assert unlike(read(folder, f"optimizer_states_{pp}_{tp}.pt"), optimizer_of(MESH, pp, tp)) == []
    assert xla_ckpt.verify(tmp_path, "a_partial").ok
    assert run_on_ranks(loads, 4, tmp_path, Mesh(tp=4)) == [[]] * 4
    as_theirs(folder)
    assert run_on_ranks(loads, 4, tmp_path, Mesh(pp=2, dp=2)) == [[]] * 4
    assert loads(0, tmp_path, Mesh()) == []


def saves_again_and_again(rank: int, root: Path) -> list[str]:
    """Five saves in the background, of which two are to be kept; the tags that are there."""
    model, optimizer = toy(MESH, rank)
    for step in range(5):
        xla_ckpt.save_checkpoint(
            root, f"step_{step}_partial", model, optimizer, user_content={"step": step + 3}, layout="smp", mesh=MESH,
            num_kept_ckpts=2, async_save=True, pinned=step == 1,
        )  # fmt: skip
    xla_ckpt.finalize_checkpoint()
    return xla_ckpt.list_tags(root)


def test_they_are_kept_and_deleted_like_all_tags(tmp_path: Path) -> None:
    there = ["step_1_partial", "step_3_partial", "step_4_partial"]
    assert run_on_ranks(saves_again_and_again, 4, tmp_path)[0] == there
    assert names_in(tmp_path) == there
    assert all(xla_ckpt.verify(tmp_path, tag).ok for tag in there)
    assert unlike(read(tmp_path / "step_4_partial", "optimizer_states_1_0.pt"), optimizer_of(MESH, 1, 0)) == []
    assert loads(0, tmp_path, Mesh()) == []


@pytest.mark.parametrize("mesh", [Mesh(pp=2, dp=2), Mesh(pp=3)], ids=str)
@pytest.mark.parametrize("last", [False, True])
def test_a_rank_that_fails_is_not_waited_for(
    mesh: Mesh, last: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stages wait for what the first rank of each other one tells: its error reaches them at once."""
    fails = mesh.rank({"pp": mesh.pp - 1 if last else 1})
    states = [toy(mesh, rank)[0] for rank in range(mesh.size)]

    def save(rank: int) -> Any:
        model: Any = {"w": torch.ones(2, device="meta")} if rank == fails else states[rank]
        return xla_ckpt.save_checkpoint(
            tmp_path, "a", model, layout="smp", options=xla_ckpt.SaveOptions(timeout=600)
        ).result()

    began = time.monotonic()
    with pytest.raises(xla_ckpt.UnsupportedStateError) as caught:
        as_job(monkeypatch, mesh, "save", save, timeout=600)
    assert (caught.value.rank, caught.value.leaf) == (fails, "model/w")
    assert time.monotonic() - began < 60  # and not the timeout of 600
    assert not xla_ckpt.has_checkpoint(tmp_path)


def saves_and_stops(root: Path) -> None:
    """Stop for ever when all files of the second save are there, and its manifest is not."""
    xla_ckpt.save_checkpoint(root, "a_partial", {"w": torch.zeros(1000)}, user_content=1, layout="smp")
    write = engine.write_file

    def stops(directory: Any, name: str, data: bytes) -> None:
        if name == "manifest.json":
            print("all but that", flush=True)
            signal.pause()
        write(directory, name, data)

    engine.write_file = stops  # type: ignore[assignment]
    xla_ckpt.save_checkpoint(root, "a_partial", {"w": torch.ones(1000)}, user_content=2, layout="smp")


@pytest.mark.crash
def test_kill_nine_leaves_the_old_tag(tmp_path: Path) -> None:
    process = bear(Call.of(saves_and_stops, tmp_path), live=True)
    assert process.stdout.readline() == "all but that\n"
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert xla_ckpt.list_tags(tmp_path) == ["a_partial"]
    model = {"w": torch.full((1000,), -1.0)}
    assert xla_ckpt.load_checkpoint(tmp_path, model=model).user_content == 1
    assert not model["w"].any()
    xla_ckpt.save_checkpoint(tmp_path, "a_partial", {"w": torch.ones(1000)}, user_content=3, layout="smp")
    xla_ckpt.finalize_checkpoint()
    assert names_in(tmp_path) == ["a_partial"]
    assert names(tmp_path / "a_partial") - OURS == {"model_0_0.pt", "user_content.pt", "smp_config.pt"}
    assert xla_ckpt.load_checkpoint(tmp_path, model=model).user_content == 3
