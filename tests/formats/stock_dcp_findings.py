"""What stock DCP (and torch_xla's part of it) does in cases that matter, each as a function that returns the outcome.

A test shows that it is so for stock, and that ours does otherwise.
"""

from __future__ import annotations

import io
import os
import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem

from tests.fixtures.dcp import make
from tests.formats.stock_dcp_jobs import as_stock_warns, group_of_one

NAMES = [f"w{number}" for number in range(8)]


def filled(value: float) -> dict[str, torch.Tensor]:
    """Eight tensors of one value."""
    return {name: torch.full((64,), value) for name in NAMES}


def loaded(path: Path) -> dict[str, torch.Tensor]:
    """The same eight, by stock `dcp.load` in this process."""
    state = filled(-1.0)
    with as_stock_warns():
        dcp.load(state, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return state


def saved(path: Path, value: float) -> None:
    """Save eight tensors by stock DCP in this process."""
    with as_stock_warns():
        dcp.save(filled(value), checkpoint_id=path, no_dist=True)


# 1 -- `run_alone(..., xla=True)`


def async_save_of_xla_tensors(path: Path) -> str:
    """What `dcp.async_save` of tensors on an XLA device raises; "" if it saves them."""
    import torch_xla

    group_of_one()
    state = {name: tensor.to(torch_xla.device()) for name, tensor in filled(1.0).items()}
    torch_xla.sync()
    try:
        with as_stock_warns():
            dcp.async_save(state, checkpoint_id=path).result()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


# 2 -- `run_on_ranks(..., 2, xla=True)`


def tensor_parallel_shards(rank: int, path: Path) -> list[float]:
    """Two ranks save different shards under one name, as plain XLA tensors; the first value that each loads back."""
    import torch_xla

    shard = torch.full((4, 4), 1.0 + rank).to(torch_xla.device())
    state = {"model": {"column.weight": shard}}
    with as_stock_warns():
        dcp.save(state, checkpoint_id=path)
        state["model"]["column.weight"] = torch.zeros(4, 4).to(torch_xla.device())
        dcp.load(state, checkpoint_id=path)
    return sorted({float(value) for value in state["model"]["column.weight"].cpu().flatten()})


# 3 -- `run_alone(..., xla=True, env=EIGHT)`


def spmd_to_hugging_face(path: Path) -> tuple[int, int]:
    """Save shards of eight devices by HuggingFaceStorageWriter: how many rows come back right, and of how many."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
    from torch_xla.experimental.distributed_checkpoint import SPMDSavePlanner

    group_of_one()
    truth, state = make.of_devices()
    writer = HuggingFaceStorageWriter(str(path), save_distributed=True)
    found = {"rows": torch.zeros_like(truth["model"]["rows"])}
    with as_stock_warns():
        dcp.save({"rows": state["model"]["rows"]}, storage_writer=writer, planner=SPMDSavePlanner())
        reader = HuggingFaceStorageReader(str(path))
        size = reader.read_metadata().state_dict_metadata["rows"].size
        if size == found["rows"].shape:
            dcp.load(found, storage_reader=reader, no_dist=True)
    right = (found["rows"] == truth["model"]["rows"]).all(1)
    return int(right.sum()), len(right)


def spmd_with_copies(path: Path) -> tuple[set[str], set[str]]:
    """Save arrays of eight devices by SPMDSavePlanner: the names that were saved, and those that are then stored."""
    from torch_xla.experimental.distributed_checkpoint import SPMDSavePlanner

    group_of_one()
    _, state = make.of_devices()
    with as_stock_warns():
        dcp.save(state["model"], checkpoint_id=path, planner=SPMDSavePlanner())
    return set(state["model"]), set(dcp.FileSystemReader(path).read_metadata().state_dict_metadata)


# 4 -- in any process


@dataclass
class _FullForWorkers(FileSystem):
    """Files of all threads but the caller's are on a full disk; the caller's is written after one of those failed."""

    failed: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        if threading.current_thread() is threading.main_thread():
            if ".metadata" not in str(path):
                assert self.failed.wait(60)
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        try:
            with super().create_stream("/dev/full", mode) as stream:
                yield stream
        finally:
            self.failed.set()


def disk_full_in_a_worker(path: Path, monkeypatch: Any) -> tuple[str, int]:
    """Save eight tensors by two threads, one of which finds the disk full.

    Returns what is raised ("" if nothing), and how many tensors the checkpoint then has.
    """
    writer = dcp.FileSystemWriter(path, thread_count=2)
    writer.fs = _FullForWorkers()
    raised: list[BaseException] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: raised.append(args.exc_value))  # nobody else sees it
    try:
        with as_stock_warns():
            dcp.save(filled(1.0), storage_writer=writer, no_dist=True)
    except Exception as error:
        return f"{type(error).__name__}: {error}", 0
    assert [error.errno for error in raised if isinstance(error, OSError)] == [28], raised  # ENOSPC
    return "", len(dcp.FileSystemReader(path).read_metadata().storage_data)


# 5 -- in any process


def flip_a_bit(path: Path) -> None:
    """Flip one bit in the values of the first tensor that a checkpoint has."""
    (file,) = path.glob("*.distcp")
    contents = bytearray(file.read_bytes())
    at = bytes(contents).index(torch.full((64,), 1.0).numpy().tobytes())
    contents[at + 3] ^= 0x40
    file.write_bytes(contents)


def load_with_a_flipped_bit(path: Path) -> tuple[str, int]:
    """Save ones, flip a bit, load: what is raised ("" if nothing), and how many values are then not one."""
    saved(path, 1.0)
    flip_a_bit(path)
    try:
        state = loaded(path)
    except Exception as error:
        return f"{type(error).__name__}: {error}", 0
    return "", sum(int((tensor != 1.0).sum()) for tensor in state.values())


# 6 -- `run_on_ranks(..., 2)`


class _Dying(dcp.FileSystemWriter):
    """A writer that dies before its rank has written anything."""

    def write_data(self, *args: Any) -> Any:
        raise OSError("this rank is dead")


def overwrite_and_die(rank: int, path: Path) -> tuple[str, list[float]]:
    """Save ones, and over them twos while rank 1 fails: what the save raises, and the values then loaded."""
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    of = lambda value: {"w": DTensor.from_local(torch.full((4,), value), mesh, [Shard(0)])}  # noqa: E731
    why = ""
    with as_stock_warns():
        dcp.save(of(1.0), checkpoint_id=path)
        try:
            dcp.save(of(2.0), storage_writer=(_Dying if rank == 1 else dcp.FileSystemWriter)(path))
        except dcp.api.CheckpointException as error:
            why = str(error)
        dist.barrier()
        state = {"w": torch.zeros(8)}
        dcp.load(state, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return why, state["w"].tolist()


class _NeverFinishes(dcp.FileSystemWriter):
    def finish(self, *args: Any, **options: Any) -> None:
        raise OSError("the process is dead")


def overwrite_without_finish(path: Path) -> tuple[str, set[float]]:
    """Save ones and then, over them, twos, without `finish`: what the save raises, and the values then loaded."""
    saved(path, 1.0)
    why = ""
    try:
        with as_stock_warns():
            dcp.save(filled(2.0), storage_writer=_NeverFinishes(path), no_dist=True)
    except dcp.api.CheckpointException as error:
        why = str(error)
    return why, {float(value) for tensor in loaded(path).values() for value in tensor}


# 7 -- in any process


@dataclass
class _Trap:
    """What, when it is unpickled, makes a directory."""

    directory: str

    def __reduce__(self) -> Any:
        return os.mkdir, (self.directory,)


def trap_metadata(path: Path, sprung: Path) -> None:
    """Have the `.metadata` of a checkpoint make the directory `sprung` when it is unpickled; else it is as it was."""
    metadata = dcp.FileSystemReader(path).read_metadata()
    metadata.planner_data = {**metadata.planner_data, "trap": _Trap(str(sprung))}
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def trap_item(path: Path, sprung: Path) -> None:
    """Save a checkpoint, of which the object `epoch` makes the directory `sprung` when it is unpickled."""
    with as_stock_warns():
        dcp.save({**filled(1.0), "epoch": _Trap(str(sprung))}, checkpoint_id=path, no_dist=True)


def load_a_trapped_checkpoint(path: Path, sprung: Path, kind: str) -> bool:
    """Load a checkpoint with a trap in its "metadata" or in an "item": whether its code has run."""
    if kind == "metadata":
        saved(path, 1.0)
        trap_metadata(path, sprung)
        loaded(path)
    else:
        trap_item(path, sprung)
        assert not sprung.exists()
        with as_stock_warns():
            dcp.load({**filled(0.0), "epoch": 0}, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return sprung.exists()


# 8 -- `run_on_ranks(..., 4)`


def set_uneven_rows(rank: int) -> list[str]:
    """Give a tensor-parallel, fully sharded model a whole state by `set_model_state_dict`: what is then wrong."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    with as_stock_warns():
        model = make.by_tp_and_fsdp2(make.fill(make.Mlp(odd=5, bias=False), 2))
        wanted = make.by_tp_and_fsdp2(make.fill(make.Mlp(odd=5, bias=False), 1))
        whole = make.fill(make.Mlp(odd=5, bias=False), 1).state_dict()
        set_model_state_dict(model, whole, options=StateDictOptions(full_state_dict=True))
    pairs = zip(model.named_parameters(), wanted.parameters(), strict=True)
    return [name for (name, a), b in pairs if not torch.equal(a.to_local(), b.to_local())]  # type: ignore[operator]


def memory_order(path: Path) -> tuple[list[float], tuple[int, ...], str]:
    """Save a transposed [[0, 1, 2], [3, 4, 5]].

    Returns the values as they lie in the file, the strides there, and the memory format that `.metadata` says.
    """
    import zipfile

    turned = torch.arange(6.0).reshape(2, 3).t().contiguous().t()
    with as_stock_warns():
        dcp.save({"turned": turned}, checkpoint_id=path, no_dist=True)
    metadata = dcp.FileSystemReader(path).read_metadata()
    (info,) = metadata.storage_data.values()
    item = (path / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
    with zipfile.ZipFile(io.BytesIO(item)) as archive:
        values = torch.frombuffer(bytearray(archive.read("archive/data/0")), dtype=torch.float32).tolist()
    strides = torch.load(io.BytesIO(item), weights_only=True).stride()
    return values, strides, str(metadata.state_dict_metadata["turned"].properties.memory_format)
