"""Where stock torch.distributed.checkpoint fails or loses a state, beside what this library does: one test for each.

In each test stock goes first. If one of these halves fails, torch has become better: take it out.
"""

from __future__ import annotations

import pickle
import resource
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from safetensors import safe_open

import xla_ckpt
import xla_ckpt.dcp as dcp
from tests.jobs import run_alone, run_on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated")


def loaded(path: Path, load: Callable[..., None] = stock.load, **blank: torch.Tensor) -> dict[str, Any]:
    """What is under these keys, by stock in one process if nothing else is said."""
    load(blank, checkpoint_id=path, no_dist=True)
    return blank


# 1. An asynchronous save of XLA tensors.


def saves_in_the_background(root: Path) -> None:
    import torch_xla

    warnings.simplefilter("ignore")
    parameter = torch.nn.Parameter(torch.arange(6.0, device=torch_xla.device()).reshape(2, 3))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    with pytest.raises((stock.CheckpointException, RuntimeError), match="storage"):
        stock.async_save({"w": parameter}, checkpoint_id=root / "stock", no_dist=True).result()
    futures = [
        dcp.async_save({"w": parameter}, checkpoint_id=root / "ours"),
        stock.async_save({"w": parameter}, checkpoint_id=root / "staged", async_stager=dcp.AsyncStager(), no_dist=True),
    ]
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    torch_xla.sync()
    for future, name in zip(futures, ("ours", "staged"), strict=True):
        future.result()
        assert loaded(root / name, w=torch.zeros(2, 3))["w"].flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert parameter.detach().cpu().flatten().tolist() == [-1, 0, 1, 2, 3, 4]


@pytest.mark.xla
def test_xla_tensors_are_saved_in_the_background(tmp_path: Path) -> None:
    run_alone(saves_in_the_background, tmp_path, xla=True)


# 2. Tensor-parallel shards in plain tensors.


def saves_a_shard(rank: int, root: Path, on_xla: bool) -> None:
    warnings.simplefilter("ignore")
    device: Any = "cpu"
    if on_xla:
        import torch_xla

        device = torch_xla.device()
    held = {"w": torch.full((2, 3), float(rank), device=device)}
    stock.save(held, checkpoint_id=root / "stock")
    kept = loaded(root / "stock", w=torch.zeros(2, 3))["w"]
    assert kept[0, 0] in (0, 1), "one of two"
    assert (kept == kept[0, 0]).all(), "the shard of one rank is all there is, and nobody was told"

    rules: Any = [("w", ("tp", None))]
    for name, call in (("stock", stock), ("ours", dcp)):
        call.save(dcp.sharded(held, mesh="tp=2", shardings=rules), checkpoint_id=root / f"sharded-{name}")
        found = loaded(root / f"sharded-{name}", w=torch.zeros(4, 3))["w"]
        assert found.tolist() == [[0.0] * 3] * 2 + [[1.0] * 3] * 2
    xla_ckpt.save_checkpoint(root, "tag", held, mesh="tp=2", shardings=[("w", ("tp", None))], layout="dcp")
    target = {"model": {"w": torch.zeros(4, 3)}}
    stock.load(target, checkpoint_id=root / "tag", no_dist=True)
    assert target["model"]["w"].tolist() == [[0.0] * 3] * 2 + [[1.0] * 3] * 2
    with pytest.raises(xla_ckpt.DivergentReplicasError, match="xla_ckpt.dcp.sharded"):
        dcp.save(held, checkpoint_id=root / "refused")


@pytest.mark.parametrize("on_xla", [False, pytest.param(True, marks=pytest.mark.xla)])
def test_no_tensor_parallel_shard_is_lost(tmp_path: Path, on_xla: bool) -> None:
    run_on_ranks(saves_a_shard, 2, tmp_path, on_xla, xla=on_xla)


# 3. Shards of SPMD devices as safetensors.


def saves_eight_shards(root: Path) -> None:
    import numpy as np
    import torch_xla
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr
    from torch_xla.experimental.distributed_checkpoint import SPMDSavePlanner

    warnings.simplefilter("ignore")
    xr.use_spmd()
    whole = torch.arange(48.0).reshape(16, 3)
    held = {"w": whole.to(torch_xla.device())}
    xs.mark_sharding(held["w"], xs.Mesh(np.arange(8), (8, 1), ("x", "y")), ("x", "y"))
    torch_xla.sync()
    (root / "stock").mkdir()
    writer = stock.HuggingFaceStorageWriter(str(root / "stock"), save_distributed=True)
    stock.save(held, storage_writer=writer, planner=SPMDSavePlanner(), no_dist=True)
    target = {"w": torch.full((16, 3), -1.0)}
    stock.load(target, storage_reader=stock.HuggingFaceStorageReader(str(root / "stock")), no_dist=True)
    right = [row for row in range(16) if torch.equal(target["w"][row], whole[row])]
    assert len(right) == 2, "one of eight shards is stored, and a load of it succeeds"

    xla_ckpt.save_checkpoint(root, "tag", held, layout="dcp")
    dcp.save(held, checkpoint_id=root / "ours")
    for name, key in (("tag", "model.w"), ("ours", "w")):
        parts = []
        for file in sorted((root / name).glob("*.safetensors")):
            with safe_open(file, "pt") as opened:
                parts += [opened.get_tensor(key)] if key in opened.keys() else []  # noqa: SIM118  # it is no dict
        assert torch.equal(torch.cat(parts), whole)
        target = {key: torch.full((16, 3), -1.0)}
        stock.load(target, storage_reader=stock.HuggingFaceStorageReader(str(root / name)), no_dist=True)
        assert torch.equal(target[key], whole)


@pytest.mark.xla
def test_all_spmd_shards_are_in_safetensors(tmp_path: Path) -> None:
    run_alone(saves_eight_shards, tmp_path, xla=True, env={"CPU_NUM_DEVICES": "8"})


# 4. A file that cannot be written, by one of several threads.


def cannot_write_large_files(root: Path) -> None:
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    held = {"large": torch.ones(1 << 19), **{f"small{i}": torch.ones(4) for i in range(6)}}
    lost = None
    for attempt in range(50):  # whether a thread or the caller gets the large file is chance
        path = root / f"stock{attempt}"
        try:
            stock.save(held, storage_writer=stock.FileSystemWriter(path, thread_count=4), no_dist=True)
        except stock.CheckpointException:
            continue
        lost = held.keys() - {index.fqn for index in stock.FileSystemReader(path).read_metadata().storage_data}
        break
    assert lost is not None, "stock reports a success"
    assert "large" in lost, "of a save without its largest tensor"

    for save in (
        lambda: dcp.save(held, checkpoint_id=root / "ours"),
        lambda: dcp.save(held, storage_writer=dcp.FileSystemWriter(root / "ours", thread_count=4)),
        lambda: dcp.async_save(held, checkpoint_id=root / "ours").result(),
        lambda: xla_ckpt.save_checkpoint(root / "tags", "ours", held, layout="dcp"),
    ):
        with pytest.raises(xla_ckpt.StorageError, match="File too large"):
            save()
    assert not (root / "ours").exists()
    assert xla_ckpt.list_tags(root / "tags") == []


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    run_alone(cannot_write_large_files, tmp_path)


# 5. A flipped bit.


@pytest.mark.parametrize("saver", ["stock", "ours", "tag"])
def test_a_flipped_bit_is_found(tmp_path: Path, saver: str) -> None:
    held = {"w": torch.arange(1000.0)}
    path, key = tmp_path / saver, "model.w" if saver == "tag" else "w"
    if saver == "stock":
        stock.save(held, checkpoint_id=path)
    elif saver == "ours":
        dcp.save(held, checkpoint_id=path)
    else:
        xla_ckpt.save_checkpoint(tmp_path, saver, held, layout="dcp")
    (file,) = [*path.glob("*.distcp"), *path.glob("*.safetensors")]
    data = bytearray(file.read_bytes())
    data[bytes(data).index(held["w"].numpy().tobytes()) + 2] ^= 64
    file.write_bytes(data)
    found = loaded(path, **{key: torch.zeros(1000)})[key]
    assert not torch.equal(found, held["w"]), "stock loads it"
    target = {key: torch.full((1000,), -1.0)}
    with pytest.raises(xla_ckpt.CorruptCheckpointError) as caught:
        dcp.load(target, checkpoint_id=path)
    assert (caught.value.leaf, caught.value.file) == (key, file.name)
    assert (target[key] == -1).all()
    assert not xla_ckpt.verify(tmp_path, saver).ok
    if saver != "stock":
        with pytest.raises(xla_ckpt.CorruptCheckpointError):
            xla_ckpt.restore(tmp_path, saver)


# 6. A save over an older one that does not come to its end.


class DiesLast(stock.FileSystemWriter):
    """As a process that is killed when all data is written, and `.metadata` is not."""

    def finish(self, *_: Any, **__: Any) -> None:
        raise KeyboardInterrupt


class OursDiesLast(dcp.StorageWriter):
    def finish(self, *_: Any, **__: Any) -> None:
        raise KeyboardInterrupt


@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
def test_an_interrupted_save_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    old, new = ({"a": torch.full((9,), v), "b": torch.full((9,), v)} for v in (1.0, 2.0))
    for name, save, writer in (("stock", stock.save, DiesLast), ("ours", dcp.save, OursDiesLast)):
        path = tmp_path / name
        save(old, checkpoint_id=path, no_dist=True)
        with pytest.raises((stock.CheckpointException, KeyboardInterrupt)):
            save(new, storage_writer=writer(path), no_dist=True)
        found = loaded(path, a=torch.zeros(9), b=torch.zeros(9))
        mixed = [v for v in (1.0, 2.0) if all((t == v).all() for t in found.values())]
        assert mixed == ([2.0] if name == "stock" else [1.0]), "what stock was not to have saved is loaded"


# 7. A `.metadata` that runs code.


RAN: list[str] = []


def runs(what: str) -> None:
    RAN.append(what)


class Evil:
    def __init__(self, what: str) -> None:
        self.what = what

    def __reduce__(self) -> Any:
        return runs, (self.what,)


def test_no_code_of_a_checkpoint_runs(tmp_path: Path) -> None:
    stock.save({"w": torch.ones(3), "n": Evil("value")}, checkpoint_id=tmp_path / "a")
    stock.load({"n": 0}, checkpoint_id=tmp_path / "a")
    assert RAN == ["value"]
    with pytest.raises(xla_ckpt.UntrustedObjectError) as caught:
        dcp.load({"n": 0}, checkpoint_id=tmp_path / "a")
    assert caught.value.leaf == "n"
    with pytest.raises(xla_ckpt.UntrustedObjectError):
        xla_ckpt.restore(tmp_path, "a")
    (tmp_path / "a/.metadata").write_bytes(pickle.dumps(Evil("metadata")))
    with pytest.raises((stock.CheckpointException, AttributeError)):
        stock.load({"w": torch.zeros(3)}, checkpoint_id=tmp_path / "a")
    assert RAN == ["value", "metadata"]
    for call in (
        lambda: dcp.load({"w": torch.zeros(3)}, checkpoint_id=tmp_path / "a", trust_pickle=True),
        lambda: xla_ckpt.restore(tmp_path, "a", trust_pickle=True),
    ):
        with pytest.raises(xla_ckpt.UntrustedObjectError):
            call()
    assert RAN == ["value", "metadata"]
    RAN.clear()
