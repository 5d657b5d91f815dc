"""Jobs that save, and jobs of other degrees that go on: their losses are those of the first.

What they have after the load is what was saved, to the bit. Losses of other degrees differ by what sums differ by in
another order: the layers add up in float32.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

import neuron_compat.smp as smp
import xla_ckpt
from tests.jobs import run_alone, run_on_ranks, torchrun
from tests.smp.training import begin, trained, wrapped

FORMS = ("partial", "1.12", "full", "tag")
Degrees = tuple[int, int, int]


def saves(rank: int, root: str, pp: int, tp: int, config: dict[str, Any] | None = None) -> list[float]:
    """Two steps, a save in each form, and two more: the losses of these."""
    begin(pp, tp, **(config or {}))
    model, optimizer = wrapped()
    trained(model, optimizer, 0, 2)
    local = {
        "model_state_dict": model.local_state_dict(),
        "optimizer_state_dict": optimizer.local_state_dict(),
        "step": 2,
    }
    if smp.rdp_rank() == 0:
        smp.save(local, f"{root}/partial.pt")
        smp.save(local, f"{root}/1.12", naming="1.12")
    whole = {"model_state_dict": model.state_dict(), "optimizer_state_dict": optimizer.state_dict(), "step": 2}
    smp.save(whole, f"{root}/full.pt", partial=False)
    smp.save_checkpoint(f"{root}/tags", "two", model=model, optimizer=optimizer, user_content={"step": 2})
    return trained(model, optimizer, 2, 4)


def unlike(found: Any, saved: Any, path: str = "") -> list[str]:
    """Where two trees differ, if in one bit only. Options that only one torch has, and names, do not count."""
    if isinstance(saved, dict):
        return [
            p for k, v in saved.items() if k in found or path.count("/") < 2 for p in unlike(found[k], v, f"{path}/{k}")
        ]
    if isinstance(saved, list):
        return [p for i, v in enumerate(saved) for p in unlike(found[i], v, f"{path}/{i}")]
    if isinstance(saved, torch.Tensor):
        same = found.dtype == saved.dtype and torch.equal(found.cpu().view(-1), saved.view(-1))
        return [] if same else [path]
    return [] if found == saved else [path]


def goes_on(rank: int, root: str, pp: int, tp: int, config: dict[str, Any] | None = None) -> dict[str, list[float]]:
    """The losses of the two steps after a load, for each form."""
    saved = torch.load(f"{root}/full.pt")
    begin(pp, tp, **(config or {}))
    found = {}
    for form in FORMS:
        smp.reset()
        if form == "tag":  # before there is a model
            assert smp.resume_from_checkpoint(f"{root}/tags") == {"step": 2}
        model, optimizer = wrapped(seed=11, lr=0.9, scale=2.0)
        if form != "tag":
            name = form if form == "1.12" else f"{form}.pt"
            checkpoint = smp.load(f"{root}/{name}", partial=form != "full")
            assert checkpoint["step"] == 2
            model.load_state_dict(checkpoint["model_state_dict"])
            optimizer.load_state_dict(checkpoint["optimizer_state_dict"])
        has = {
            "model_state_dict": model.state_dict(gather_to_rank0=False),
            "optimizer_state_dict": optimizer.state_dict(),
            "step": 2,
        }
        differing = unlike(has, saved)
        assert not differing, (form, differing)
        found[form] = trained(model, optimizer, 2, 4)
    return found


PAIRS = [((1, 2, 1), (1, 1, 1)), ((4, 1, 1), (2, 2, 1))]


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=str)
def test_a_job_of_other_degrees_goes_on(tmp_path: Path, source: Degrees, target: Degrees) -> None:
    torch.manual_seed(0)
    world, saving = prod(target), prod(source)
    if world == 1:  # a job under the real torchrun, and a program without a launcher
        unbroken = torchrun(saves, saving, tmp_path, str(tmp_path), *source[:2])
        found = [run_alone(goes_on, 0, str(tmp_path), 1, 1)]
    else:
        unbroken = run_on_ranks(saves, saving, str(tmp_path), *source[:2])
        found = run_on_ranks(goes_on, world, str(tmp_path), *target[:2])
    for losses in found:
        for form in FORMS:
            assert losses[form] == pytest.approx(unbroken[0], rel=1e-6), form
    for name in ("partial.pt", "1.12", "full.pt", "tags/two_partial"):
        assert xla_ckpt.verify(tmp_path / name).ok, name


def test_a_job_of_the_same_degrees_goes_on_to_the_bit(tmp_path: Path) -> None:
    unbroken = run_on_ranks(saves, 4, str(tmp_path), 2, 2)
    for losses, same in zip(run_on_ranks(goes_on, 4, str(tmp_path), 2, 2), unbroken, strict=True):
        assert losses == dict.fromkeys(FORMS, same)


SHARDED = {"shard_optimizer_state": True}


def goes_on_as_each(rank: int, root: str, targets: list[tuple[int, int, dict[str, Any]]]) -> list[dict[str, Any]]:
    """What `goes_on` says, as a job of each of these degrees."""
    found = []
    for target in targets:
        found.append(goes_on(rank, root, *target))
        smp.shutdown()
    return found


def test_sharded_states_of_the_optimizer(tmp_path: Path) -> None:
    """Each data-parallel rank has the states of a share of the parameters; others have other shares, or none."""
    targets = [(1, 2, {}), (2, 2, SHARDED), (1, 1, SHARDED)]
    unbroken = run_on_ranks(saves, 4, str(tmp_path), 1, 2, SHARDED)
    for of_rank in run_on_ranks(goes_on_as_each, 4, str(tmp_path), targets):
        for target, losses in zip(targets, of_rank, strict=True):
            for form in FORMS:
                assert losses[form] == pytest.approx(unbroken[0], rel=1e-6), (target, form)


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_master_weights_and_loss_scale(tmp_path: Path, kind: str) -> None:
    unbroken = run_on_ranks(saves, 4, str(tmp_path), 2, 2, {kind: True})
    for losses in run_on_ranks(goes_on, 4, str(tmp_path), 2, 1, {kind: True}):
        for form in FORMS:
            assert losses[form] == pytest.approx(unbroken[0], rel=0.1), form


def saves_apart(rank: int, root: str) -> list[float]:
    """Model and optimizer in sets of their own, each a state dict at its top."""
    begin(2, 2)
    model, optimizer = wrapped()
    trained(model, optimizer, 0, 2)
    smp.save(model.local_state_dict(), f"{root}/model")
    smp.save(optimizer.local_state_dict(), f"{root}/optimizer", naming="1.12")
    return trained(model, optimizer, 2, 4)


def loads_apart(rank: int, root: str, degrees: list[tuple[int, int]]) -> list[list[float]]:
    found = []
    for pp, tp in degrees:
        begin(pp, tp)
        model, optimizer = wrapped(seed=11, lr=0.9)
        model.load_state_dict(smp.load(f"{root}/model"))
        optimizer.load_state_dict(smp.load(f"{root}/optimizer"))
        found.append(trained(model, optimizer, 2, 4))
        smp.shutdown()
    return found


def test_model_and_optimizer_in_sets_of_their_own(tmp_path: Path) -> None:
    degrees = [(2, 2), (1, 4), (4, 1), (1, 1)]
    unbroken = run_on_ranks(saves_apart, 4, str(tmp_path))
    for of_rank in run_on_ranks(loads_apart, 4, str(tmp_path), degrees):
        for losses, at in zip(of_rank, degrees, strict=True):
            assert losses == pytest.approx(unbroken[0], rel=1e-6), at
