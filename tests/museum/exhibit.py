"""What the museum's checkpoints hold. `python -m tests.museum.exhibit tests/museum/vN` writes a room with today's code.

A checkpoint is added when the format gets a new version, and none is ever changed: they must load for ever.
"""

from __future__ import annotations

import datetime
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from xla_ckpt.tags.entry import ORBAX_COMMITTED_FILE


def tree() -> dict[str, Any]:
    """A small state with something of everything."""
    shared = torch.arange(6.0).reshape(2, 3)
    return {
        "model": {
            "embed.weight": shared,
            "head.weight": shared,
            "norm": torch.tensor([1.0, -0.0, float("inf"), float("nan")], dtype=torch.bfloat16),
            "wide": torch.tensor([1 + 2j], dtype=torch.complex128),
            "scale": torch.tensor([1.5, -2.0]).to(torch.float8_e4m3fn),
            "odd": torch.tensor([1.0]).to(torch.float8_e5m2fnuz),
            "scalar": torch.tensor(7, dtype=torch.int64),
            "empty": torch.empty(0, 3),
            "large": torch.arange(20_000, dtype=torch.int32),
        },
        "optimizer": {
            "state": {"embed.weight": {"step": torch.tensor(3.0), "exp_avg": torch.full((2, 3), 0.5)}},
            "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "params": ["embed.weight"]}],
        },
        "scheduler": {"last_epoch": 3, "_last_lr": [0.1, float("inf")]},
        "extras": {"rng": {"numpy": ("MT19937", np.arange(4, dtype=np.uint32), 2, 0, 0.0)}},
        "user_content": {
            "tuple": (1, None, True), 5: b"\x00\xff", "when": datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
            "dtype": torch.bfloat16, "set": {1, 2}, "a/b~c": "path", "": "empty key",
        },
        "more": [np.float32(1.5), {"deep": torch.ones(1, dtype=torch.bool)}],
    }  # fmt: skip


LAYOUTS = ("xser", "pt")
"""neuronx-distributed's, in tags of these names: rows of a ZeRO-1 optimizer, padding, columns in strided blocks."""

RULES = [("embed|head", (None, "tp")), ("large", (("tp", 2),))]


def remove_path_of_machine(room: Path) -> None:
    """Replace the path in orbax's marks, which is that of the machine that wrote the tags.

    Readers look only whether a mark is there, and no digest covers it.
    """
    for mark in room.glob(f"*/{ORBAX_COMMITTED_FILE}"):
        mark.write_text(f"Checkpoint commit was successful to /tests/museum/{room.name}/{mark.parent.name}")


if __name__ == "__main__":
    import xla_ckpt

    xla_ckpt.save(sys.argv[1], "exhibit", tree(), pinned=True)
    for layout in LAYOUTS:
        xla_ckpt.convert(
            sys.argv[1], sys.argv[1], "exhibit", to=layout, as_tag=layout, mesh="dp=2,tp=2", shardings=RULES, zero1=True
        )
    remove_path_of_machine(Path(sys.argv[1]).resolve())
