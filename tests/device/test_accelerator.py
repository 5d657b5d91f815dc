"""Saves of tensors on an accelerator: the simulated one of sim.cpp, through torch.accelerator."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

import xla_ckpt
from tests.broken import after_install
from tests.device import sim
from tests.jobs import run_alone, run_on_ranks
from tests.snapshot.trials import SLAB, different, small_pieces, trials
from xla_ckpt.arrays import torch_tensor
from xla_ckpt.arrays.torch_tensor import TorchDeviceShard
from xla_ckpt.snapshot.shards import SampleWindows
from xla_ckpt.state.guard import WRITE_BARRIER

pytestmark = pytest.mark.skipif(sim.missing() is not None, reason=str(sim.missing()))

MODES = ("host", "device", "overlap")
PIECES = 8
BYTES = 64 * 1024
"""Of each piece."""


@pytest.fixture(scope="module", autouse=True)
def device() -> None:
    sim.build()


def model_of(value: float) -> torch.nn.Module:
    """Pieces on the device, all elements of which have one value."""
    made = torch.nn.ParameterList(torch.full((BYTES // 4,), value) for _ in range(PIECES))
    for parameter in made:
        parameter.grad = torch.ones_like(parameter)
    return made.to("sim")


def values(root: Any, tag: str) -> list[float]:
    """All values that are stored of it."""
    weights = xla_ckpt.restore(root, tag).tree["model"].values()
    return torch.cat([w.reshape(-1).cpu() for w in weights]).unique().tolist()


def runs(mode: str, count: int) -> list[str]:
    torch.set_num_threads(1)
    sim.load().bandwidth(0.2)  # GB/s: a copy of the state takes about a millisecond
    return trials(count, mode, "sim", without=("fused", "foreach"))


@pytest.mark.parametrize("mode", MODES)
def test_what_a_tag_has_is_what_was_there_at_the_call(mode: str) -> None:
    assert run_alone(runs, mode, settings().max_examples) == []


def saves_are_counted(root: Path) -> dict[str, Any]:
    """What the device counts of one save of each kind, each with the value that is stored."""
    device, found = sim.load(), {}
    with small_pieces():
        for kind in (*MODES, "waits"):
            model = model_of(1.0)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            device.bandwidth(0.02)
            device.reset()
            before = device.stats()
            options = xla_ckpt.SaveOptions(snapshot_budget=SLAB, snapshot="host" if kind == "waits" else kind)
            handle = xla_ckpt.save_checkpoint(root, kind, model, optimizer, async_save=kind != "waits", options=options)
            at_return = device.stats()
            optimizer.step()
            report = handle.result()
            after = device.stats()
            device.bandwidth(0)
            found[kind] = {
                "values": values(root, kind),
                "blocking": after["d2h_blocking"],
                "asynchronous": after["d2h_async"],
                "bytes": after["d2h_bytes"],
                "begun at return": at_return["d2h_async"],
                "cloned": (after["peak"] - before["in_use"]) // BYTES,
                "stall": report.stall,
                "waited": handle._snapshot_progress.stall_seconds,
                "changed": model[0][0].item(),
            }
    return found


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_alone(saves_are_counted, tmp_path_factory.mktemp("counted"))


@pytest.mark.parametrize("kind", [*MODES, "waits"])
def test_each_piece_comes_once_and_no_copy_blocks(counted: dict[str, Any], kind: str) -> None:
    found = counted[kind]
    assert (found["values"], found["changed"], found["blocking"]) == ([1.0], 0.0, 0)
    assert found["asynchronous"] >= PIECES
    assert PIECES * BYTES <= found["bytes"] < 1.5 * PIECES * BYTES  # digest blocks reach beyond their segments


def test_host_copies_all_in_one_batch_before_the_call_returns(counted: dict[str, Any]) -> None:
    assert counted["host"]["begun at return"] == counted["host"]["asynchronous"] == PIECES


def test_device_clones_and_lets_the_step_go_on(counted: dict[str, Any]) -> None:
    assert counted["device"]["waited"] == 0.0
    assert PIECES <= counted["device"]["cloned"] <= PIECES + 2


def test_overlap_clones_nothing_and_has_the_step_wait(counted: dict[str, Any]) -> None:
    found = counted["overlap"]
    assert found["cloned"] <= 2
    assert found["begun at return"] < found["asynchronous"]
    assert found["stall"] >= found["waited"] > 0.0


def unguarded(root: Path) -> str:
    device = sim.load()
    WRITE_BARRIER.watch = lambda *_, **__: None  # type: ignore[method-assign]
    model = model_of(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    device.bandwidth(0.02)
    handle = xla_ckpt.save_checkpoint(
        root, "a", model, optimizer, async_save=True, options=xla_ckpt.SaveOptions(snapshot="overlap")
    )
    optimizer.step()
    with pytest.raises(xla_ckpt.ChangedStateError) as raised:
        handle.result()
    return str(raised.value.leaf)


def test_without_the_guard_the_save_fails(tmp_path: Path) -> None:
    assert run_alone(unguarded, tmp_path).startswith("model/")


def odd_values() -> dict[str, torch.Tensor]:
    """Tensors in CPU memory, each of another kind."""
    return {
        "turned": torch.arange(12.0).reshape(3, 4).T,
        "strided": torch.arange(100)[::3],
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 3),
        "bool": torch.tensor([True, False]),
        "complex": torch.tensor([1 + 2j, 3 - 4j]),
        "bfloat16": torch.tensor([1.0, 2.0]).bfloat16(),
    }


def odd_tensors(root: Path) -> list[str]:
    sim.load()
    wanted = odd_values()
    tree: dict[str, Any] = {name: value.to("sim") for name, value in wanted.items()}
    tree["strided"] = torch.arange(100).to("sim")[::3]
    wanted["parameter"] = wanted["turned"]
    tree["parameter"] = torch.nn.Parameter(torch.arange(12.0).reshape(3, 4).to("sim").T)
    bad = []
    for mode in MODES:
        for waits in (True, False):
            tag = f"{mode}-{waits}"
            xla_ckpt.save(root, tag, tree, async_save=not waits, options=xla_ckpt.SaveOptions(snapshot=mode)).result()
            bad += [f"{tag}{path}" for path in different(xla_ckpt.restore(root, tag).tree, wanted)]
    shard = TorchDeviceShard(torch.arange(40, dtype=torch.uint8).to("sim"))
    assert shard.read_sample(SampleWindows(offset=2, count=3, stride=10, nbytes=2)) == bytes([2, 3, 12, 13, 22, 23])
    return bad


def test_tensors_of_every_kind(tmp_path: Path) -> None:
    assert run_alone(odd_tensors, tmp_path) == []


def replicas(rank: int, root: Path) -> list[Any]:
    device = sim.load()
    found: list[Any] = []
    for number, mode in enumerate(MODES):
        model = model_of(1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        device.bandwidth(0.1)
        device.reset()
        handle = xla_ckpt.save_checkpoint(
            root, f"t{number}", model, optimizer, async_save=True, options=xla_ckpt.SaveOptions(snapshot=mode)
        )
        optimizer.step()
        report = handle.result()
        copied = device.stats()["d2h_bytes"]
        device.bandwidth(0)
        found.append((values(root, f"t{number}"), report.nbytes < PIECES * BYTES, copied < 0.75 * PIECES * BYTES))
    with torch.no_grad():
        model[3].add_(rank)  # drifts apart
    with pytest.raises(xla_ckpt.DivergentReplicasError) as raised:
        xla_ckpt.save_checkpoint(
            root, "b", model, async_save=True, options=xla_ckpt.SaveOptions(snapshot="overlap")
        ).result()
    return [*found, raised.value.leaf]


def test_each_rank_copies_what_it_writes_and_replicas_are_compared(tmp_path: Path) -> None:
    assert run_on_ranks(replicas, 2, tmp_path) == [[([1.0], True, True)] * 3 + ["model/3"]] * 2


def random_states(root: Path) -> list[Any]:
    sim.load()
    module = torch.get_device_module("sim")
    members = {"rng": xla_ckpt.RNGState()}
    module.manual_seed_all(7)
    xla_ckpt.save_checkpoint(root, "a", extras=members)
    module.manual_seed_all(8)
    xla_ckpt.load_checkpoint(root, "a", extras=members)
    return [module.get_rng_state()[0].item(), list(members["rng"].state_dict())]


def test_the_random_state_of_any_accelerator(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert run_alone(random_states, tmp_path) == [7, ["python", "numpy", "torch", "sim"]]
    with caplog.at_level(logging.WARNING):
        xla_ckpt.load_checkpoint(tmp_path, "a", extras={"rng": xla_ckpt.RNGState()})
    assert "1 random generators of sim devices were saved, and 0 are here" in caplog.text


def without_streams(root: Path) -> list[Any]:
    """A backend that has neither streams nor pinned memory."""
    device = sim.load()
    torch_tensor._create_side_stream = lambda device: None
    torch_tensor._allocate_pinned = lambda nbytes: None
    found = []
    for mode in MODES:
        model = model_of(1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        device.bandwidth(0.1)
        handle = xla_ckpt.save_checkpoint(
            root, mode, model, optimizer, async_save=True, options=xla_ckpt.SaveOptions(snapshot=mode)
        )
        optimizer.step()
        handle.result()
        found += values(root, mode)
    return found


def test_a_backend_without_streams_and_pinned_memory(tmp_path: Path) -> None:
    assert run_alone(without_streams, tmp_path) == [1.0, 1.0, 1.0]


def proofs(root: Path) -> list[Any]:
    """What a load into the device's memory says that is good, and of one after which a byte there is another one."""
    sim.load()
    xla_ckpt.save_checkpoint(root, "a", model_of(1.0))
    model, options = model_of(2.0), xla_ckpt.LoadOptions(prove=True)
    report = xla_ckpt.load_checkpoint(root, "a", model, options=options).report
    broken = torch.full((BYTES // 4,), 1.0)
    broken[-1] = 3.0
    with pytest.MonkeyPatch.context() as patch:
        after_install(patch, lambda arrays: arrays["model/5"].data.copy_(broken))
        with pytest.raises(xla_ckpt.UnprovenLoadError) as caught:
            xla_ckpt.load_checkpoint(root, "a", model, options=options)
    return [report.proven_bytes, report.unproven, caught.value.leaf]


def test_a_load_is_proven_in_the_memory_of_the_device(tmp_path: Path) -> None:
    assert run_alone(proofs, tmp_path) == [PIECES * BYTES, (), "model/5"]
