"""What any torch writes, an older one reads: ``.metadata`` is a pickle of classes that have grown."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
import xla_ckpt.dcp as dcp


class Properties:
    """`TensorProperties` as torch 2.3 to 2.9 unpickle them."""

    found: list[torch.dtype] = []

    def __setstate__(self, state: Any) -> None:
        (dtype, layout, requires_grad, memory_format, pin_memory) = state
        self.found.append(dtype)


class Old(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return Properties if name == "TensorProperties" else super().find_class(module, name)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_tensors_are_described_as_older_versions_know_it(tmp_path: Path) -> None:
    state = {"w": torch.ones(2, 3, dtype=torch.bfloat16), "n": 1}
    xla_ckpt.save_checkpoint(tmp_path / "tags", "a", model=state, layout="dcp")
    dcp.save(state, checkpoint_id=tmp_path / "b")
    for path in (tmp_path / "tags" / "a", tmp_path / "b"):
        Properties.found.clear()
        metadata = Old(io.BytesIO((path / ".metadata").read_bytes())).load()
        assert Properties.found == [torch.bfloat16]
        assert len(metadata.state_dict_metadata) == 2
