"""A job under FSDP2, which resumes whatever model a tag holds, without torch_xla."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import xla_ckpt


class Container(torch.nn.Module):
    """Parameters under their names, with modules above them."""

    def __init__(self, shapes: dict[str, list[int]]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            at: Any = self
            *above, last = name.split(".")
            for step in above:
                if not hasattr(at, step):
                    at.add_module(step, torch.nn.Module())
                at = getattr(at, step)
            at.register_parameter(last, torch.nn.Parameter(torch.zeros(shape)))


def resumes_with_fsdp2(rank: int, root: Path, shapes: dict[str, list[int]]) -> None:
    model = Container(shapes)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    xla_ckpt.load_checkpoint(root / "run", "start", model)
    xla_ckpt.save_checkpoint(root / "fsdp", "end", model, user_content={"rank": 0})
    assert "torch_xla" not in sys.modules
