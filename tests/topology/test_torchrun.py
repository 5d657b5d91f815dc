"""Under the real torchrun: its ranks have imported nothing before, and its agent holds the store."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import xla_ckpt
from tests.jobs import torchrun
from tests.xla import HAS_XLA

FRAMEWORKS = ("orbax", "jax", "torch_xla")


def saves_and_resumes(rank: int, root: Path) -> tuple[list[str], list[str]]:
    """Save with what torch alone has, then with torch_xla if it is there; what the first imported, what is wrong."""
    import torch

    mesh, rules = xla_ckpt.Mesh(tp=2), [("w", ("tp",))]
    xla_ckpt.save(root, "a", {"w": torch.full((3,), float(rank))}, mesh=mesh, shardings=rules)
    imported = [name for name in FRAMEWORKS if name in sys.modules]

    import neuron_compat
    from tests.topology.kinds import build

    with neuron_compat.emulate() if HAS_XLA else contextlib.nullcontext():
        held = build("dp=2 zero1" if HAS_XLA else "fsdp2", blank=False)
        xla_ckpt.save_checkpoint(root, "b", held.model, held.optimizer, async_save=True, **held.options)
        xla_ckpt.finalize_checkpoint()
        fresh = build("tp=2", blank=True)
        xla_ckpt.load_checkpoint(root, "b", fresh.model, fresh.optimizer, **fresh.options)
    assert os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True"
    return imported, fresh.differences()


def test_two_ranks_save_and_resume_and_neither_imports_orbax(tmp_path: Path) -> None:
    root = tmp_path / "ckpt"
    assert torchrun(saves_and_resumes, 2, tmp_path, root) == [([], []), ([], [])]
    assert xla_ckpt.restore(root, "a").tree["w"].tolist() == [0, 0, 0, 1, 1, 1]
    assert xla_ckpt.verify(root, "b").ok
