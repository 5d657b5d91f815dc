"""Random state that a process has no generator for."""

from __future__ import annotations

import logging
import sys

import pytest
import torch

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
