"""What four ranks save with stock torch.distributed.checkpoint, others resume: ZeRO-1, pipelines, SPMD, one process.

Nobody maps a name: the directory is opened as DCP wrote it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

import xla_ckpt
from tests.jobs import run_alone, run_on_ranks
from tests.topology.kinds import build, emulate, pairs, possible
from tests.topology.state import WHOLE, known, whole
from tests.xla import HAS_XLA

SAVED = ("fsdp2", "hsdp", "tp_fsdp")
FORMS = ("nested", "flattened", "titan", "app")


THIRD_OR_ALL = pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.rest)])
"""Of the pairs. That each of them is planned right is proved without jobs, in test_all_pairs.py."""


def state_of(held: object, form: str) -> dict[str, object]:
    """The state as programs give it to DCP."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    flat = form in ("flattened", "titan")
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optimizer = get_state_dict(held.model, held.optimizer, options=options)  # type: ignore[attr-defined]
    if form == "titan":
        return {**model, "optimizer": optimizer, "train_state": {"step": torch.tensor(7)}}
    if form == "app":
        return {"app": {"model": model, "optim": optimizer}, "epoch": 3}
    return {"model": model, "optimizer": optimizer}


def saves(rank: int, root: Path) -> None:
    import torch.distributed.checkpoint as dcp

    for kind in SAVED:
        held = build(kind, blank=False)
        for form in FORMS:
            dcp.save(state_of(held, form), checkpoint_id=root / f"{kind}-{form}")


def loads(rank: int, root: Path, jobs: Sequence[tuple[str, str]], mode: str) -> list[str]:
    """Load directories as kinds; what is not as it was saved."""
    emulate()
    bad = []
    for source, kind in jobs:
        held = build(kind, blank=True)
        options = xla_ckpt.LoadOptions(timeout=60, replica_read=mode)
        xla_ckpt.load_checkpoint(root / source, None, held.model, held.optimizer, options=options, **held.options)
        found = [*held.differences(), *(["buffer"] if float(held.model.seen) != 5.0 else [])]
        bad += [f"{source} as {kind}: {found}"] if found else []
    return bad


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved by four ranks with stock DCP."""
    root = tmp_path_factory.mktemp("dcp") / "ckpt"
    run_on_ranks(saves, 4, root)
    return root


DIRECTORIES = [f"{kind}-{form}" for kind in SAVED for form in FORMS]


@THIRD_OR_ALL
def test_four_ranks_resume_as_four_others(root: Path, every: int) -> None:
    kinds = possible("tp=4", "dp=4 zero1", "pp=2,dp=2 zero1", "tp=2,dp=2 zero1", "fsdp2", "tp_fsdp")
    assert run_on_ranks(loads, 4, root, pairs(DIRECTORIES[::2], kinds, every), "each", xla=HAS_XLA) == [[]] * 4


@THIRD_OR_ALL
def test_two_ranks_resume(root: Path, every: int) -> None:
    jobs = pairs(DIRECTORIES[1::2], possible("dp=2 zero1", "fsdp2", "tp=2"), every)
    assert run_on_ranks(loads, 2, root, jobs, "share", xla=HAS_XLA) == [[]] * 2


def loads_alone(root: Path) -> list[str]:
    bad = []
    for source in DIRECTORIES:
        held = build("dp=1 cpu", blank=True)
        xla_ckpt.load_checkpoint(root / source, model=held.model, optimizer=held.optimizer)
        bad += [f"{source}: {found}" for found in held.differences()]
        assert [g["lr"] for g in held.optimizer.param_groups] == [0.1, 0.03]
    return [*bad, *(["torch_xla was imported"] if "torch_xla" in sys.modules else [])]


def test_a_plain_process_resumes(root: Path) -> None:
    assert run_alone(loads_alone, root) == []


def resumes_on_spmd_devices(root: Path) -> None:
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr

    xr.use_spmd()
    mesh = xs.Mesh(np.arange(8), (4, 2), ("a", "b"))
    for source in DIRECTORIES[::5]:
        held = build("dp=1", blank=True)
        for i, (_, p) in enumerate(held.model.named_parameters()):
            if p.dim() == 2:
                xs.mark_sharding(p, mesh, (("a", None), ("a", "b"), (None, "b"), (("a", "b"), None))[i % 4])
        xla_ckpt.load_checkpoint(root / source, model=held.model, optimizer=held.optimizer)
        assert held.differences() == [], (source, held.differences())


@pytest.mark.xla
def test_spmd_devices_resume(root: Path) -> None:
    run_alone(resumes_on_spmd_devices, root, xla=True, env={"CPU_NUM_DEVICES": "8"})


def test_a_directory_is_converted_and_explained(root: Path, tmp_path: Path) -> None:
    source = root / "tp_fsdp-flattened"
    assert xla_ckpt.explain(source, mesh="tp=2").ok
    xla_ckpt.convert(source, tmp_path, mesh="dp=2")
    tree = xla_ckpt.restore(tmp_path).tree
    for name in WHOLE:
        assert tree["model"][name].equal(whole(name))
        assert tree["optimizer"]["state"][name]["exp_avg"].equal(known(name, "exp_avg"))
