"""Targets that cannot be filled as they are: they are refused before anything is changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import xla_ckpt
from tests import xla


class Expanded(torch.nn.Module):
    def __init__(self, *, hooked: bool = False) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.register_buffer("mask", torch.zeros(1).expand(4))
        if hooked:
            self.register_load_state_dict_post_hook(lambda module, keys: None)


def read_only() -> Any:
    array = np.zeros(4, np.float32)
    array.setflags(write=False)
    return array


UNWRITABLE: dict[str, Callable[[], Any]] = {
    "expanded": lambda: torch.zeros(1).expand(4),
    "overlapping": lambda: torch.zeros(3).unfold(0, 2, 1),
    "read-only": read_only,
    "overlapping numpy": lambda: np.lib.stride_tricks.as_strided(np.zeros(1, np.float32), (4,), (0,)),
}


@pytest.mark.parametrize("kind", UNWRITABLE)
def test_a_target_that_nothing_can_be_written_to_is_refused(tmp_path: Path, kind: str) -> None:
    target = UNWRITABLE[kind]()
    stored = torch.ones(tuple(target.shape))
    xla_ckpt.save_checkpoint(tmp_path, "a", {"before": torch.ones(4), "w": stored})
    before = torch.zeros(4)
    with pytest.raises(xla_ckpt.UsageError, match=r"loaded into.*model/w"):
        xla_ckpt.load_checkpoint(tmp_path, "a", model={"before": before, "w": target})
    assert not before.any()


@pytest.mark.parametrize("hooked", [False, True])
def test_a_module_with_an_expanded_buffer_is_not_changed(tmp_path: Path, hooked: bool) -> None:
    model = Expanded(hooked=hooked)
    with torch.no_grad():
        model.layer.weight.fill_(7)
    xla_ckpt.save_checkpoint(tmp_path, "a", model)
    target = Expanded(hooked=hooked)
    before = target.layer.weight.detach().clone()
    with pytest.raises(xla_ckpt.UsageError, match="model/mask"):
        xla_ckpt.load_checkpoint(tmp_path, "a", model=target)
    assert torch.equal(target.layer.weight, before)


class Two(torch.nn.Module):
    def __init__(self, *, tied: bool, device: Any = "cpu") -> None:
        super().__init__()
        self.a = torch.nn.Linear(3, 3, bias=False, device=device)
        self.b = torch.nn.Linear(3, 3, bias=False, device=device)
        if tied:
            self.b.weight = self.a.weight


@pytest.mark.parametrize("kind", xla.DEVICES)
def test_different_values_for_tied_weights_are_refused(tmp_path: Path, kind: str) -> None:
    device = xla.device() if kind == "xla" else kind
    xla_ckpt.save_checkpoint(tmp_path, "a", Two(tied=False, device=device))
    target = Two(tied=True, device=device)
    before = target.a.weight.detach().clone().cpu()
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match=r"different values.*a\.weight, model/b\.weight"):
        xla_ckpt.load_checkpoint(tmp_path, "a", model=target)
    assert torch.equal(target.a.weight.detach().cpu(), before)


@pytest.mark.parametrize("kind", xla.DEVICES)
def test_equal_values_for_tied_weights_are_loaded(tmp_path: Path, kind: str) -> None:
    device = xla.device() if kind == "xla" else kind
    source = Two(tied=False, device=device)
    with torch.no_grad():
        source.b.weight.copy_(source.a.weight)
    xla_ckpt.save_checkpoint(tmp_path, "a", source)
    target = Two(tied=True, device=device)
    xla_ckpt.load_checkpoint(tmp_path, "a", model=target)
    assert torch.equal(target.a.weight.cpu(), source.a.weight.cpu())
    assert target.a.weight is target.b.weight


def test_one_stored_array_for_tied_weights_is_loaded(tmp_path: Path) -> None:
    source, target = Two(tied=True), Two(tied=True)
    xla_ckpt.save_checkpoint(tmp_path, "a", source)
    assert xla_ckpt.load_checkpoint(tmp_path, "a", model=target).report.read_bytes == 36
    assert torch.equal(target.b.weight, source.a.weight)


@pytest.mark.parametrize("agree", [True, False])
def test_views_that_overlap_are_loaded_if_the_stored_values_agree(tmp_path: Path, agree: bool) -> None:
    x, y = torch.arange(6.0), torch.arange(4.0, 10.0)
    y[0] += not agree
    xla_ckpt.save_checkpoint(tmp_path, "a", {"x": x, "y": y})
    memory = torch.zeros(10)
    target = {"x": memory[:6], "y": memory[4:]}
    if agree:
        xla_ckpt.load_checkpoint(tmp_path, "a", model=target)
        assert torch.equal(memory, torch.arange(10.0))
        return
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="different values"):
        xla_ckpt.load_checkpoint(tmp_path, "a", model=target)
    assert not memory.any()


def test_columns_of_one_tensor_are_loaded(tmp_path: Path) -> None:
    xla_ckpt.save_checkpoint(tmp_path, "a", {"even": torch.ones(4, 3), "odd": torch.full((4, 3), 2.0)})
    memory = torch.zeros(4, 6)
    xla_ckpt.load_checkpoint(tmp_path, "a", model={"even": memory[:, ::2], "odd": memory[:, 1::2]})
    assert torch.equal(memory, torch.tensor([1.0, 2.0] * 3).expand(4, 6))


@pytest.mark.parametrize("agree", [True, False])
def test_values_of_another_type_are_compared_as_they_are_stored(tmp_path: Path, agree: bool) -> None:
    a = torch.arange(4, dtype=torch.bfloat16)
    xla_ckpt.save_checkpoint(tmp_path, "a", {"a": a, "b": a.clone() if agree else a + 1})
    memory = torch.zeros(4)
    if agree:
        xla_ckpt.load_checkpoint(tmp_path, "a", model={"a": memory, "b": memory}, cast=True)
        assert torch.equal(memory, torch.arange(4.0))
        return
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="different values"):
        xla_ckpt.load_checkpoint(tmp_path, "a", model={"a": memory, "b": memory}, cast=True)


def test_a_tensor_and_the_array_under_it_share_memory(tmp_path: Path) -> None:
    xla_ckpt.save_checkpoint(tmp_path, "a", {"a": torch.ones(4), "b": torch.zeros(4)})
    memory = np.full(4, 5, np.float32)
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="different values"):
        xla_ckpt.load_checkpoint(tmp_path, "a", model={"a": torch.from_numpy(memory), "b": memory})
    assert (memory == 5).all()
