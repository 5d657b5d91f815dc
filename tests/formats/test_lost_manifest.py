"""A tag whose manifest is lost or cut off: what its error says to do where the files are another library's, too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import xla_ckpt

ORIGIN = {
    "pt": "neuronx-distributed", "xser": "neuronx-distributed", "dcp": "torch.distributed.checkpoint",
    "torchtitan": "torch.distributed.checkpoint", "smp": "SageMaker model parallel", "orbax": "orbax",
    "torch_checkpointing": "torch_checkpointing",
}  # fmt: skip
"""Layout -> the library that reads it without our manifest."""


@pytest.mark.parametrize("layout", ORIGIN)
@pytest.mark.parametrize("cut", [True, False])
def test_without_its_marks_it_loads_as_another_librarys(layout: str, cut: bool, tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    xla_ckpt.save_checkpoint(tmp_path, "1", model, layout=layout)
    manifest, mark = tmp_path / "1/manifest.json", tmp_path / "1/commit_success.txt"
    manifest.write_bytes(manifest.read_bytes()[:-40] if cut else b"")
    if not cut:
        manifest.unlink()
    other = torch.nn.Linear(3, 2)
    says = f"remove manifest.json and commit_success.txt from the tag: then it is read as {ORIGIN[layout]}'s"
    with pytest.raises(xla_ckpt.CorruptCheckpointError, match=says):
        xla_ckpt.load_checkpoint(tmp_path, "1", other)
    assert says in str(xla_ckpt.verify(tmp_path, "1").problems[0])
    for path in (manifest, mark):
        path.unlink(missing_ok=True)
    xla_ckpt.load_checkpoint(tmp_path, "1", other)
    assert torch.equal(other.weight, model.weight)


def test_a_tag_of_the_native_layout_has_no_other_reader(tmp_path: Path) -> None:
    xla_ckpt.save_checkpoint(tmp_path, "1", torch.nn.Linear(3, 2))
    (tmp_path / "1/manifest.json").unlink()
    with pytest.raises(xla_ckpt.CorruptCheckpointError, match=r"restore this file from a copy\.$"):
        xla_ckpt.load_checkpoint(tmp_path, "1", torch.nn.Linear(3, 2))
