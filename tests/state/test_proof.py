"""Loads with ``prove=True``: what is in memory after a load is compared with the tag, wherever it lies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import xla_ckpt
from tests import xla
from tests.broken import broken_after
from xla_ckpt import LoadOptions, UnprovenLoadError
from xla_ckpt.features import proof

xla.begin()

PROVE = LoadOptions(prove=True)


class Trained:
    """A model and an optimizer that have made a step; every value depends on the seed."""

    def __init__(self, device: Any, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(40, 300), torch.nn.BatchNorm1d(300)).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.model(torch.randn(4, 40).to(device)).square().sum().backward()
        self.optimizer.step()
        xla.sync()

    @property
    def arrays(self) -> list[torch.Tensor]:
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        return [tensor.detach().cpu() for tensor in (*self.model.state_dict().values(), *states)]


@pytest.mark.parametrize("device", xla.DEVICES)
@pytest.mark.parametrize("group_bytes", [1, proof.BATCH_BYTES])
def test_all_of_a_training_is_proven(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, group_bytes: int
) -> None:
    monkeypatch.setattr(proof, "BATCH_BYTES", group_bytes)
    saved, found = Trained(device, 1), Trained(device, 2)
    xla_ckpt.save_checkpoint(tmp_path, "a", saved.model, saved.optimizer)
    report = xla_ckpt.load_checkpoint(tmp_path, "a", found.model, found.optimizer, options=PROVE).report
    assert all(map(torch.equal, found.arrays, saved.arrays))
    assert report.unproven == ()
    assert report.proven_bytes == report.needed_bytes == sum(array.nbytes for array in saved.arrays)
    assert report.phases["prove"].nbytes >= report.proven_bytes
    again = xla_ckpt.load_checkpoint(tmp_path, "a", found.model, found.optimizer).report
    assert (again.proven_bytes, "prove" in again.phases) == (0, False)


@pytest.mark.parametrize("leaf", ["model/0.weight", "optimizer/state/1.bias/exp_avg"])
def test_a_changed_byte_of_memory_in_use_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leaf: str) -> None:
    saved, found = Trained("cpu", 1), Trained("cpu", 2)
    xla_ckpt.save_checkpoint(tmp_path, "a", saved.model, saved.optimizer)
    broken_after(monkeypatch, leaf, 200)
    with pytest.raises(UnprovenLoadError, match="block 0 of a shard") as caught:
        xla_ckpt.load_checkpoint(tmp_path, model=found.model, optimizer=found.optimizer, options=PROVE)
    error = caught.value
    assert (error.leaf, error.tag, error.path) == (leaf, "a", str(tmp_path))
    assert error.expected != error.found
    assert "cannot be undone" in (error.hint or "")
    # The load is complete, but for the element that changed.
    different = sum(int((a != b).sum()) for a, b in zip(found.arrays, saved.arrays, strict=True))
    assert different == 1
    xla_ckpt.load_checkpoint(tmp_path, model=found.model, optimizer=found.optimizer)  # nobody looks


@pytest.mark.xla
@pytest.mark.parametrize("new", [False, True])
def test_a_broken_copy_to_a_device_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new: bool) -> None:
    from xla_ckpt.arrays import xla_tensor as xla_arrays

    saved, found = Trained("xla", 1), Trained("xla", 2)
    xla_ckpt.save_checkpoint(tmp_path, "a", saved.model, saved.optimizer)
    adopt = xla_arrays._import_buffer

    def flipping(memory: Any) -> torch.Tensor:
        tensor = adopt(memory)
        if tensor.shape == (300, 40):
            tensor[299, 39] += 1
        return tensor

    monkeypatch.setattr(xla_arrays, "_import_buffer", flipping)
    like = {"model": {"0.weight": found.model[0].weight}}
    with pytest.raises(UnprovenLoadError) as caught:
        xla_ckpt.restore(tmp_path, like=like, options=PROVE) if new else xla_ckpt.load_checkpoint(
            tmp_path, "a", found.model, found.optimizer, options=PROVE
        )
    assert "0.weight" in str(caught.value.leaf)


def test_numpy_and_new_arrays_are_proven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {"torch": torch.randn(70_000), "numpy": np.arange(9.0), "scalar": torch.tensor(3), "none": torch.empty(0, 3)}
    xla_ckpt.save(tmp_path, "a", tree)
    restored = xla_ckpt.restore(tmp_path, options=PROVE)
    assert restored.report.proven_bytes == restored.report.needed_bytes == 70_000 * 4 + 9 * 8 + 8
    broken_after(monkeypatch, "numpy", 8)
    with pytest.raises(UnprovenLoadError, match="leaf numpy"):
        xla_ckpt.restore(tmp_path, options=PROVE)


def test_what_is_converted_or_handed_over_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved = torch.nn.Linear(4, 4)
    xla_ckpt.save_checkpoint(tmp_path, "a", saved)
    half = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
    report = xla_ckpt.load_checkpoint(tmp_path, "a", half, cast=True, options=PROVE).report
    why = "float32 is stored, and was converted to bfloat16"
    assert sorted(report.unproven) == [f"model/bias: {why}", f"model/weight: {why}"]
    assert report.proven_bytes == 0
    assert "tag a: not proven: model/bias" in caplog.text
    hooked = torch.nn.Linear(4, 4)
    hooked.register_load_state_dict_post_hook(lambda module, keys: None)
    report = xla_ckpt.load_checkpoint(tmp_path, "a", hooked, options=PROVE).report
    assert sorted(report.unproven) == [f"model/{n}: code of the program has taken it" for n in ("bias", "weight")]


def test_each_name_of_one_stored_array_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tied = torch.randn(1000)
    xla_ckpt.save_checkpoint(tmp_path, "a", {"one": tied, "other": tied})
    state = {"one": torch.zeros(1000), "other": torch.zeros(1000)}
    assert xla_ckpt.load_checkpoint(tmp_path, "a", state, options=PROVE).report.proven_bytes == 8000
    for leaf in ("model/one", "model/other"):
        with monkeypatch.context() as patch:
            broken_after(patch, leaf, 999)
            with pytest.raises(UnprovenLoadError) as caught:
                xla_ckpt.load_checkpoint(tmp_path, "a", state, options=PROVE)
        assert caught.value.leaf == leaf


def test_a_file_without_digests_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = {"w": torch.randn(300, 300), "b": torch.randn(3)}
    torch.save(stored, tmp_path / "model.pt")
    state = {"w": torch.zeros(300, 300), "b": torch.zeros(3)}
    report = xla_ckpt.load_checkpoint(tmp_path / "model.pt", model=state, options=PROVE).report
    assert report.proven_bytes == report.needed_bytes == 300 * 300 * 4 + 12
    broken_after(monkeypatch, "model/w", 89_999)
    with pytest.raises(UnprovenLoadError) as caught:
        xla_ckpt.load_checkpoint(tmp_path / "model.pt", model=state, options=PROVE)
    assert caught.value.leaf == "model/w"
