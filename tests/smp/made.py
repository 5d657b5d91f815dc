"""Files as SMP leaves them, made with nothing but torch.save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

GENERATIONS = {
    "1.6": "{f}_{pp}",
    "documents": "{f}_{pp}_{tp}",
    "1.12": "{f}_{pp}_{tp}.pt",
    "v3": "{f}_{pp}_{tp}_{rdp}.pt",
}
"""The names of parts by who wrote them."""


def part(pp: int, tp: int, sizes: tuple[int, int] = (2, 2), rdp: int = 0) -> dict[str, Any]:
    """What a rank saves: a parameter of its own stage that is split over tp, a replicated one, plain values."""
    return {
        "model_state_dict": {
            f"stage{pp}.weight": torch.arange(8.0).reshape(4, 2)[2 * tp : 2 * tp + 2] + 10 * pp,
            f"stage{pp}.bias": torch.full((2,), float(pp)),
            "_smp_is_partial": True,
            "_smp_load_info": {
                "tensor_parallel_degree": sizes[1],
                "pipeline_parallel_degree": sizes[0],
                "partition_info": {f"stage{n}": n for n in range(sizes[0])},
            },
        },
        "epoch": 7,
        "saved_by": [pp, tp, rdp],
        "loss": torch.tensor(0.25),
    }


def write_parts(folder: Path, generation: str, pp: int = 2, tp: int = 2, rdp: int = 1, name: str = "c.pt") -> list[str]:
    """The files of a job of these degrees; their names."""
    folder.mkdir(parents=True, exist_ok=True)
    made = {}
    for p in range(pp):
        for t in range(tp):
            for r in range(rdp):
                file = GENERATIONS[generation].format(f=name, pp=p, tp=t, rdp=r)
                made[file] = part(p, t, (pp, tp), r)
    for file, value in made.items():
        torch.save(value, folder / file)
    return sorted(made)
