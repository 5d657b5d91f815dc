"""How many tags `neuron_compat.nxd.save_checkpoint` keeps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import neuron_compat.nxd as nxd
import xla_ckpt


def test_minus_one_keeps_all_tags(tmp_path: Path) -> None:
    """The scripts of neuronx-distributed have it as the default of their --num_kept_checkpoint."""
    for step in range(3):
        nxd.save_checkpoint(tmp_path, f"step_{step}", {"w": torch.ones(2)}, num_kept_ckpts=-1)
    assert xla_ckpt.list_tags(tmp_path) == ["step_0", "step_1", "step_2"]
    for count in (0, -2):
        with pytest.raises(xla_ckpt.UsageError, match=f"num_kept_ckpts={count} .*or None or -1, which keep all"):
            nxd.save_checkpoint(tmp_path, "step_3", {"w": torch.ones(2)}, num_kept_ckpts=count)
    nxd.save_checkpoint(tmp_path, "step_3", {"w": torch.ones(2)}, num_kept_ckpts=1)
    assert xla_ckpt.list_tags(tmp_path) == ["step_3"]
