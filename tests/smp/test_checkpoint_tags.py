"""Tags of full checkpoints that are no name for a file of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import neuron_compat.smp as smp
from tests.runs import names_in
from tests.smp.test_files_load import alone  # noqa: F401  # a fixture


@pytest.mark.parametrize("tag", ["", "..", "../outside", "newest"])
@pytest.mark.usefixtures("alone")
def test_a_full_checkpoint_takes_no_other_place(tag: str, tmp_path: Path) -> None:
    root = tmp_path / "root"
    model = smp.DistributedModel(torch.nn.Linear(2, 2))
    smp.save_checkpoint(root, "a", model=model)
    with pytest.raises(smp.SMPCheckpointError, match="the tag of a full checkpoint is the name of its file"):
        smp.save_checkpoint(root, tag, partial=False, model=model)
    assert (root / "newest").read_text() == "a_partial\n"
    assert names_in(tmp_path) == ["root"]
