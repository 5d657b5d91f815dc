"""The names of other systems with the address of a bucket: what works, and what is refused before anything is done."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from neuron_compat import nxd, smp
from tests.buckets.content import names_below, upload
from tests.buckets.test_saves_and_loads import model_and_optimizer
from tests.formats.gold import FUSED, SMALL
from tests.jobs import run_on_ranks


def trains_and_saves(rank: int, root: str) -> None:
    from tests.neuron.training import begin, build, train

    begin()
    model, optimizer, scheduler = build(0)
    for step in range(3):
        train(model, optimizer, scheduler, step)
        nxd.save_checkpoint(
            root, f"step_{step}", model, optimizer, scheduler, {"step": step},
            use_xser=step > 0, async_save=step == 1, num_kept_ckpts=2,
        )  # fmt: skip
    nxd.finalize_checkpoint()


def resumes(rank: int, root: str, tag: str) -> tuple[Any, list[float]]:
    """Load; the user content, and the sums of a few parameters."""
    from tests.neuron.training import begin, build

    begin()
    model, optimizer, scheduler = build(1)
    content = nxd.load_checkpoint(root, tag, model, optimizer, scheduler)
    return content, [float(p.detach().cpu().double().sum()) for p in model.parameters()]


@pytest.mark.xla
def test_a_job_of_neuronx_distributed(root: str) -> None:
    run_on_ranks(trains_and_saves, 4, root, xla=True)
    assert nxd.has_checkpoint(root)
    assert xla_ckpt.list_tags(root) == ["step_1", "step_2"]
    assert all(xla_ckpt.verify(root, tag).ok for tag in ("step_1", "step_2"))
    four = run_on_ranks(resumes, 4, root, "step_2", xla=True)
    two = run_on_ranks(resumes, 2, root, "step_2", xla=True)
    assert [content for content, _ in (*four, *two)] == [{"step": 2}] * 6
    assert [sums for _, sums in four[:2]] == [sums for _, sums in two]


def test_zero1_files_for_another_number_of_ranks(root: str, tmp_path: Path) -> None:
    from xla_ckpt.facade import convert_zero_checkpoints

    upload(SMALL / f"{FUSED}/ckpt", root)  # of few files
    convert_zero_checkpoints(f"{root}/step_40", f"{root}/dp4", 4)
    convert_zero_checkpoints(f"{root}/step_40", str(tmp_path / "dp4"), 4)
    local = sorted(str(file.relative_to(tmp_path / "dp4")) for file in (tmp_path / "dp4").rglob("*") if file.is_file())
    assert names_below(f"{root}/dp4") == local
    assert xla_ckpt.list_tags(root) == ["step_40", "dp4"]
    assert xla_ckpt.verify(root, "dp4").ok
    with pytest.raises(xla_ckpt.UsageError, match="has an optimizer already"):
        convert_zero_checkpoints(f"{root}/step_40", f"{root}/dp4", 4)


@pytest.mark.xla
@pytest.mark.parametrize("xser", [False, True])
def test_the_older_calls_write_no_address(root: str, xser: bool, tmp_path: Path, monkeypatch: Any) -> None:
    import torch_xla

    from neuron_compat.nxd import parallel_layers
    from neuron_compat.nxd.parallel_layers import parallel_state

    monkeypatch.chdir(tmp_path)
    parallel_state.initialize_model_parallel()
    try:
        state = {"w": torch.ones(2).to(torch_xla.device())}
        with pytest.raises(xla_ckpt.UsageError, match=r"only a file system does.*nxd.save_checkpoint"):
            parallel_layers.save(state, root, save_xser=xser)
        assert os.listdir(tmp_path) == []
        assert names_below(root) == []
        parallel_layers.save(state, tmp_path, save_xser=xser)
        upload(tmp_path, root)  # somebody else has brought it there
        assert parallel_layers.load(root, load_xser=xser)["w"].tolist() == [1, 1]
    finally:
        parallel_state.destroy_model_parallel()


def test_smp_has_files_only(root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for call in (
        lambda: smp.save({"a": 1}, f"{root}/a.pt"),
        lambda: smp.load(f"{root}/a.pt"),
        lambda: smp.resume_from_checkpoint(root),
    ):
        with pytest.raises(smp.SMPInvalidArgumentError, match="path of a file system"):
            call()
    assert os.listdir(tmp_path) == []
    assert names_below(root) == []


def test_sagemakers_layout_is_a_layout_as_others_are(root: str) -> None:
    model, optimizer = model_and_optimizer()
    xla_ckpt.save_checkpoint(root, "a", model, optimizer, layout="smp")
    other, its_optimizer = model_and_optimizer()
    torch.nn.init.zeros_(other[0].weight)
    xla_ckpt.load_checkpoint(root, "a", other, its_optimizer)
    assert torch.equal(other[0].weight, model[0].weight)
