"""Real processes, real tensors: what four ranks save in one way, any number of ranks resume in another."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

import xla_ckpt
from tests.jobs import run_alone, run_on_ranks
from tests.runs import names_in
from tests.topology.kinds import build, emulate, pairs, possible
from tests.topology.state import WHOLE, known, whole
from tests.xla import HAS_XLA

FLOAT = possible("tp=4", "tp=2,dp=2 zero1", "dp=4 zero1", "pp=2,tp=2", "pp=2,dp=2 zero1", "fsdp2", "hsdp", "tp_fsdp")
HALF = possible("tp=2,dp=2 zero1 bf16", "pp=2,dp=2 zero1 bf16")


SOME_OR_ALL = pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.rest)])
"""Of the pairs a fourth, in which each kind saves and each one loads: what a job adds is how a kind takes its tensors
apart, and how it fills them. That each pair is planned right is proved without jobs, in test_all_pairs.py."""


def saves(rank: int, root: Path, kinds: Sequence[str]) -> None:
    emulate()
    for n, kind in enumerate(kinds):
        held = build(kind, blank=False)
        xla_ckpt.save_checkpoint(
            root,
            str(n),
            held.model,
            held.optimizer,
            user_content=kind,
            options=xla_ckpt.SaveOptions(timeout=60),
            async_save=n % 2 == 0,
            extras={"rng": xla_ckpt.RNGState()},
            **held.options,
        ).result()


def loads(rank: int, root: Path, jobs: Sequence[tuple[str, str]], mode: str) -> list[str]:
    """Load tags as kinds; what is not as it was saved."""
    emulate()
    bad = []
    for source, kind in jobs:
        held = build(kind, blank=True)
        content = xla_ckpt.load_checkpoint(
            root,
            tag_of(source),
            held.model,
            held.optimizer,
            options=xla_ckpt.LoadOptions(timeout=60, replica_read=mode),
            **held.options,
        ).user_content
        differences = [*held.differences(), *(["buffer"] if float(held.model.seen) != 5.0 else [])]
        bad += [f"{source} as {kind}: {differences}"] if differences or content != source else []
    return bad


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved by four ranks: one tag for each of the kinds."""
    root = tmp_path_factory.mktemp("jobs") / "ckpt"
    run_on_ranks(saves, 4, root, FLOAT + HALF, xla=HAS_XLA)
    return root


def tag_of(kind: str) -> str:
    return str((FLOAT + HALF).index(kind))


@SOME_OR_ALL
def test_four_ranks_resume_as_four_others(root: Path, every: int) -> None:
    jobs = pairs(FLOAT, (*FLOAT, "dp=2,cp=2 cpu"), every)
    assert run_on_ranks(loads, 4, root, jobs, "each", xla=HAS_XLA) == [[]] * 4


def test_four_ranks_share_what_they_read(root: Path) -> None:
    jobs = pairs(FLOAT[1::3], ("tp=4", "dp=4", "fsdp2"))
    assert run_on_ranks(loads, 4, root, jobs, "share", xla=HAS_XLA) == [[]] * 4


@pytest.mark.xla
def test_master_weights_go_along(root: Path) -> None:
    jobs = pairs(HALF, (*HALF, "tp=4 zero1 bf16", "dp=4 zero1 bf16", "dp=4 bf16"))
    assert run_on_ranks(loads, 4, root, jobs, "each", xla=True) == [[]] * 4


@SOME_OR_ALL
def test_three_ranks_resume_what_four_saved(root: Path, every: int) -> None:
    jobs = pairs(FLOAT, possible("dp=3 zero1", "tp=3", "dp=3", "fsdp2"), every)
    assert run_on_ranks(loads, 3, root, jobs, "each", xla=HAS_XLA) == [[]] * 3


def loads_alone(root: Path) -> list[str]:
    bad = []
    for source in FLOAT:
        held = build("dp=1 cpu", blank=True)
        xla_ckpt.load_checkpoint(root, tag_of(source), held.model, held.optimizer)
        bad += [f"{source}: {found}" for found in held.differences()]
    return [*bad, *(["torch_xla was imported"] if "torch_xla" in sys.modules else [])]


def test_a_plain_process_resumes_what_four_ranks_saved(root: Path) -> None:
    assert run_alone(loads_alone, root) == []


def test_what_is_stored_is_stored_once(root: Path) -> None:
    for n, kind in enumerate(FLOAT):
        report = xla_ckpt.verify(root, str(n))
        assert report.ok, kind
        steps, rng_and_buffer = 4 * len(WHOLE), 4
        arrays = sum(4 * whole(name).numel() * 3 for name in WHOLE) + steps + rng_and_buffer
        tree = xla_ckpt.restore(root, str(n)).tree
        assert sorted(tree["extras"]["rng"]["ranks"]) == ["0", "1", "2", "3"]
        rng = sum(t["torch"].numel() for t in tree["extras"]["rng"]["ranks"].values())
        rng += sum(t["numpy"][1].nbytes for t in tree["extras"]["rng"]["ranks"].values())
        assert report.nbytes == arrays + rng, kind
        for name in WHOLE:
            assert tree["model"][name].equal(whole(name))
            assert tree["optimizer"]["state"][name]["exp_avg"].equal(known(name, "exp_avg"))


def resumes_on_spmd_devices(root: Path, target: Path) -> None:
    import torch_xla
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr

    xr.use_spmd()
    mesh = xs.Mesh(np.arange(8), (4, 2), ("a", "b"))

    def spec_of(tensor: torch.Tensor) -> str:
        return torch_xla._XLAC._get_xla_sharding_spec(tensor)

    held = build("dp=1", blank=True)
    for source in FLOAT[:3]:
        held = build("dp=1", blank=True)
        for i, (_, p) in enumerate(held.model.named_parameters()):
            if p.dim() == 2:
                xs.mark_sharding(p, mesh, (("a", None), ("a", "b"), (None, "b"), (("a", "b"), None))[i % 4])
            elif p.dim() == 1 and i % 2:
                xs.mark_sharding(p, mesh, ("b",))
        xla_ckpt.load_checkpoint(root, tag_of(source), held.model, held.optimizer)
        assert held.differences() == [], (source, held.differences())
        assert sum(bool(spec_of(p)) for p in held.model.parameters()) >= 6
        # new optimizer state lies as its parameter does
        for p in held.model.parameters():
            assert spec_of(held.optimizer.state[p]["exp_avg"]) == spec_of(p), p.shape
    xla_ckpt.save_checkpoint(target, "spmd", held.model, held.optimizer, async_save=True).result()
    tree = xla_ckpt.restore(target, "spmd", {"model": dict(held.model.named_parameters())}).tree
    for name, p in held.model.named_parameters():
        again = tree["model"][name]
        assert torch.equal(again.cpu(), p.cpu())
        assert spec_of(again) == spec_of(p)


@pytest.mark.xla
def test_spmd_devices_resume_what_four_ranks_saved_and_a_plain_process_what_they_save(
    root: Path, tmp_path: Path
) -> None:
    run_alone(resumes_on_spmd_devices, root, tmp_path, xla=True, env={"CPU_NUM_DEVICES": "8"})
    tree = xla_ckpt.restore(tmp_path, "spmd").tree
    for name in WHOLE:
        assert tree["model"][name].equal(whole(name))
        assert tree["optimizer"]["state"][name]["exp_avg_sq"].equal(known(name, "exp_avg_sq"))
    files = names_in(tmp_path / "spmd" / "model")
    assert len(files) >= 6  # one for each device that holds a first copy of anything
    assert all(name.endswith("-of-00008.safetensors") for name in files)


def spmd_tensors_change_after_each_save(root: Path) -> None:
    import numpy as np
    import torch_xla
    import torch_xla.distributed.spmd as xs

    torch_xla.runtime.use_spmd()
    mesh = xs.Mesh(np.arange(8), (4, 2), ("x", "y"))
    specs = ("x", None), ("x", "y"), (None, None), ("x", None), ("x", "y")
    shapes = (64, 33), (64, 34), (7, 5), (30, 9), (10, 7)  # the last two are padded
    state = {str(i): torch.rand(shape).to(torch_xla.device()) for i, shape in enumerate(shapes)}
    for value, spec in zip(state.values(), specs, strict=True):
        xs.mark_sharding(value, mesh, spec)
    for mode in ("host", "device", "overlap"):
        for waits in (True, False):
            tag, options = f"{mode}_{waits}", xla_ckpt.SaveOptions(snapshot=mode)
            before = {name: value.cpu() for name, value in state.items()}
            handle = xla_ckpt.save(root, tag, state, async_save=not waits, options=options)
            for value in state.values():
                value.add_(1)
            torch_xla.sync(wait=True)
            handle.result()
            saved = xla_ckpt.restore(root, tag).tree
            assert all(torch.equal(saved[name], value) for name, value in before.items()), tag


def spmd_tensors_are_saved_while_their_step_runs(root: Path) -> None:
    import torch_xla
    import torch_xla.distributed.spmd as xs

    torch_xla.runtime.use_spmd()
    mesh = xs.Mesh(np.arange(8), (8,), ("x",))
    value, split = (torch.eye(512).to("xla") for _ in range(2))
    xs.mark_sharding(split, mesh, ("x", None))
    for step in range(2):
        for _ in range(8):
            value = value @ value
            split = split @ value
        xs.mark_sharding(split, mesh, ("x", None))
        torch_xla.sync()  # begins to compute, and does not wait
        xla_ckpt.save(root, f"step_{step}", {"value": value, "split": split})
    tree = xla_ckpt.restore(root).tree
    assert torch.equal(tree["value"], torch.eye(512))
    assert torch.equal(tree["split"], torch.eye(512))


@pytest.mark.xla
def test_spmd_tensors_are_saved_right_after_the_sync_of_their_step(tmp_path: Path) -> None:
    """torch_xla answers where a tensor lies only when it has been computed, and fails before."""
    run_alone(spmd_tensors_are_saved_while_their_step_runs, tmp_path, xla=True, env={"CPU_NUM_DEVICES": "8"})


@pytest.mark.xla
def test_a_save_of_spmd_tensors_holds_what_they_were_in_each_mode_of_snapshots(tmp_path: Path) -> None:
    run_alone(spmd_tensors_change_after_each_save, tmp_path, xla=True, env={"CPU_NUM_DEVICES": "8"})
