"""Random state that a process has no generator for."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest
import torch

import xla_ckpt
from xla_ckpt import RNGState


@pytest.mark.parametrize("blocked", [False, True])
def test_xlas_generator_is_missed_with_a_warning(
    blocked: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    monkeypatch.delitem(sys.modules, "torch_xla", raising=False)
    if blocked:
        monkeypatch.setitem(sys.modules, "torch_xla", None)  # as a program does that keeps it from being imported
    state = {**RNGState().state_dict(), "xla": 5}
    with caplog.at_level(logging.WARNING):
        RNGState().load_state_dict(state)
    assert "torch_xla is not loaded here" in caplog.text


def test_another_objects_state_is_refused_before_anything_is_changed(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    for tag, member in (("of each rank", xla_ckpt.PerRank({"epoch": 1})), ("of all", {"epoch": 1})):
        xla_ckpt.save_checkpoint(tmp_path, tag, model, extras={"data": member})
        fresh = torch.nn.Linear(2, 2)
        before = fresh.weight.clone()
        with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="another object's state"):
            xla_ckpt.load_checkpoint(tmp_path, tag, fresh, extras={"data": xla_ckpt.RNGState()})
        assert torch.equal(fresh.weight, before)
