"""Saves and loads of tensors on a real accelerator of torch's: CUDA's, or another one that torch.accelerator names.

Skipped where a machine has none. There, ``python -m pytest tests/device/test_real.py`` needs torch, pytest, hypothesis,
psutil, and what ``pip install xla-ckpt`` brings, and neither orbax nor torch_xla. What such a run gave is in
docs/measured/reliability.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

import xla_ckpt
from tests.device.test_accelerator import odd_values
from tests.jobs import run_on_ranks
from tests.snapshot.trials import different, trials
from xla_ckpt.arrays import torch_tensor
from xla_ckpt.arrays.torch_tensor import get_copy_engine

pytestmark = pytest.mark.skipif(not torch.accelerator.is_available(), reason="torch sees no accelerator here")

MODES = ("host", "device", "overlap")
LARGE = 1 << 24
"""Elements of a tensor, a copy of which takes milliseconds."""


def device() -> torch.device:
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return found


def saved(root: Path, tag: str, mode: Any, tree: dict[str, Any]) -> xla_ckpt.SaveHandle:
    return xla_ckpt.save(root, tag, tree, async_save=True, options=xla_ckpt.SaveOptions(snapshot=mode))


@pytest.mark.parametrize("mode", MODES)
def test_what_a_tag_has_is_what_was_there_at_the_call(mode: str) -> None:
    assert trials(100, mode, device().type) == []


@pytest.mark.parametrize("mode", MODES)
def test_tensors_of_every_kind(tmp_path: Path, mode: str) -> None:
    wanted = odd_values() | {"float8": torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn).view(torch.uint8)}
    tree = {name: value.to(device()) for name, value in wanted.items()}
    tree["strided"] = torch.arange(100).to(device())[::3]
    tree["conjugate"] = tree["complex"].conj()
    wanted["conjugate"] = wanted["complex"].conj().resolve_conj()
    saved(tmp_path, "a", mode, tree).result()
    assert different(xla_ckpt.restore(tmp_path, "a").tree, wanted) == []


@pytest.mark.parametrize("mode", MODES)
def test_what_another_stream_has_yet_to_compute_is_waited_for(tmp_path: Path, mode: str) -> None:
    """A copy on a stream of the save's own would else read what was there before."""
    value = torch.zeros(LARGE, device=device())
    torch.accelerator.synchronize()
    work = torch.rand(4096, 4096, device=device())
    stream = torch.Stream(device=device())
    stream.wait_stream(torch.accelerator.current_stream())
    with stream:
        for _ in range(100):
            work = work @ work.softmax(0)  # tens of milliseconds, after which the value is there
        value.add_(1.0 + 0.0 * work[0, 0])
        handle = saved(tmp_path, "a", mode, {"w": value})
        value.add_(1.0)
    handle.result()
    assert xla_ckpt.restore(tmp_path, "a").tree["w"].unique().tolist() == [1.0]
    torch.accelerator.synchronize()
    assert value.unique().tolist() == [2.0]


@pytest.mark.parametrize("mode", MODES)
def test_memory_that_the_program_frees_is_not_read_after_it_has_another_use(tmp_path: Path, mode: str) -> None:
    """The allocator gives freed memory to the next tensor at once, in the order of the program's own stream."""
    tree = {str(number): torch.full((LARGE // 8,), float(number), device=device()) for number in range(8)}
    handle = saved(tmp_path, "a", mode, tree)
    tree.clear()
    others = [torch.full((LARGE // 8,), -1.0, device=device()) for _ in range(8)]
    handle.result()
    tags = xla_ckpt.restore(tmp_path, "a").tree
    assert [tags[str(number)].unique().tolist() for number in range(8)] == [[float(number)] for number in range(8)]
    assert all(other[0].item() == -1.0 for other in others)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="only CUDA replays graphs")
@pytest.mark.parametrize("mode", MODES)
def test_a_replayed_graph_writes_without_being_counted(tmp_path: Path, mode: str) -> None:
    """No version of a tensor tells of it, and no hook has it wait, so that "overlap" needs `frozen` before it."""
    value, graph = torch.nn.Parameter(torch.ones(LARGE, device="cuda"), requires_grad=False), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value.mul_(2.0)
    handle = saved(tmp_path, "a", mode, {"w": value})
    if mode == "overlap":
        handle.frozen()
    graph.replay()
    handle.result()
    assert xla_ckpt.restore(tmp_path, "a").tree["w"].unique().tolist() == [1.0]
    assert value.unique().tolist() == [2.0]


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="other backends pin memory through torch")


@needs_cuda
@pytest.mark.parametrize("nbytes", [1000, LARGE, LARGE * 8 + 1000])
def test_memory_is_pinned_as_long_as_somebody_has_it(nbytes: int) -> None:
    memory = get_copy_engine(device()).allocate(nbytes)
    address, tensor = memory.ctypes.data, torch.from_numpy(memory)
    del memory
    assert tensor.is_pinned()
    assert torch.equal(tensor.copy_(torch.full((nbytes,), 7, device=device())), torch.full((nbytes,), 7))
    del tensor
    with pytest.raises(torch.cuda.CudaError):
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(address))
    with pytest.raises(RuntimeError):
        torch.zeros(1, device=device())  # what CUDA refuses is reported by the next operation, too


@needs_cuda
def test_memory_that_is_not_pinned_is_no_error_of_the_program(caplog: Any, monkeypatch: Any) -> None:
    taken = get_copy_engine(device()).allocate(LARGE)
    monkeypatch.setattr(torch_tensor, "allocate_touched", lambda nbytes: taken[:nbytes])  # CUDA pins nothing twice
    memory = get_copy_engine(device()).allocate(LARGE)
    assert "no pinned memory" in caplog.text
    assert memory.ctypes.data == taken.ctypes.data
    assert torch.ones(3, device=device()).sum().item() == 3.0


def test_training_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """Weights, a fused optimizer and the device's random generator are as in the run that went on."""

    def run() -> tuple[torch.nn.Module, torch.optim.Optimizer, dict[str, Any]]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Dropout(0.5), torch.nn.Linear(256, 64))
        model.to(device())
        return model, torch.optim.AdamW(model.parameters(), fused=True), {"rng": xla_ckpt.RNGState()}

    def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        losses = []
        for _ in range(5):
            optimizer.zero_grad()
            loss = model(torch.randn(32, 64, device=device())).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    model, optimizer, extras = run()
    steps(model, optimizer)
    xla_ckpt.save_checkpoint(tmp_path, "a", model, optimizer, extras=extras, async_save=True).result()
    wanted = steps(model, optimizer)
    model, optimizer, extras = run()
    options = xla_ckpt.LoadOptions(prove=True)
    report = xla_ckpt.load_checkpoint(tmp_path, "a", model, optimizer, extras=extras, options=options).report
    assert (report.unproven, steps(model, optimizer)) == ((), wanted)


WHOLE = torch.rand(48, 1000, generator=torch.Generator().manual_seed(0))

Part = tuple[torch.Tensor, torch.Tensor]
"""What a rank has of a parameter, and of one of its moments."""


def sharded(rank: int, value: torch.Tensor) -> tuple[torch.nn.ParameterDict, torch.optim.Optimizer]:
    """A model that is sharded over all ranks of the job, each with its part on the accelerator that they share."""
    ranks = torch.distributed.get_world_size()
    part = value.chunk(ranks)[rank].to(device())  # before the mesh is made, which would else give each rank a device
    mesh = torch.distributed.device_mesh.DeviceMesh(device().type, list(range(ranks)))
    model = torch.nn.ParameterDict({"w": torch.nn.Parameter(DTensor.from_local(part, mesh, [Shard(0)]))})
    return model, torch.optim.AdamW(model.parameters())


def part_of(model: torch.nn.ParameterDict, optimizer: torch.optim.Optimizer) -> Part:
    parameter = model["w"]
    return parameter.data.to_local().cpu().clone(), optimizer.state[parameter]["exp_avg"].to_local().cpu().clone()


def saves_its_shard(rank: int, root: str, mode: Any) -> Part:
    model, optimizer = sharded(rank, WHOLE)
    model["w"].grad = model["w"].detach() * 3.0
    optimizer.step()
    saved_part = part_of(model, optimizer)
    options = xla_ckpt.SaveOptions(snapshot=mode)
    handle = xla_ckpt.save_checkpoint(root, "a", model, optimizer, async_save=True, options=options)
    optimizer.step()
    handle.result()
    return saved_part


def loads_its_shard(rank: int, root: str) -> Part:
    model, optimizer = sharded(rank, torch.zeros_like(WHOLE))
    xla_ckpt.load_checkpoint(root, "a", model, optimizer)
    return part_of(model, optimizer)


@pytest.mark.parametrize("mode", MODES)
def test_shards_of_several_ranks_are_loaded_by_other_ranks(tmp_path: Path, mode: str) -> None:
    wanted = [torch.cat(parts) for parts in zip(*run_on_ranks(saves_its_shard, 4, str(tmp_path), mode), strict=True)]
    for ranks in (4, 2, 3, 1):
        found = zip(*run_on_ranks(loads_its_shard, ranks, str(tmp_path)), strict=True)
        assert [torch.equal(torch.cat(parts), whole) for parts, whole in zip(found, wanted, strict=True)] == [True] * 2
