"""Each contender's save, at its best reasonable settings: `NOTES` in `contenders` says which.

A save takes a `State` and a fresh directory, and returns when the contender says that it is saved. An asynchronous one
returns as soon as the caller may go on, with a function that waits for the rest.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.peers.installed import moonclip_manager, needs, torch_checkpointing_manager
from benchmarks.peers.states import MIB, State

Wait = Callable[[], object]


def ours(state: State, directory: Path, **options: Any) -> None:
    import xla_ckpt

    xla_ckpt.save_checkpoint(directory, "a", model=state.module, **options)


def ours_xser(state: State, directory: Path) -> None:
    ours(state, directory, use_xser=True)


def ours_dcp_layout(state: State, directory: Path) -> None:
    ours(state, directory, layout="dcp")


def ours_torch_checkpointing_layout(state: State, directory: Path) -> None:
    ours(state, directory, layout="torch_checkpointing")


def ours_async(state: State, directory: Path, **options: Any) -> Wait:
    import xla_ckpt

    handle = xla_ckpt.save_checkpoint(directory, "a", model=state.module, async_save=True, **options)
    return handle.result


def ours_dcp_layout_async(state: State, directory: Path) -> Wait:
    return ours_async(state, directory, layout="dcp")


def _snapshot(mode: Any) -> Any:
    import xla_ckpt

    return xla_ckpt.SaveOptions(snapshot=mode)


def ours_host(state: State, directory: Path) -> Wait:
    return ours_async(state, directory, options=_snapshot("host"))


def ours_device(state: State, directory: Path) -> Wait:
    return ours_async(state, directory, options=_snapshot("device"))


def ours_overlap(state: State, directory: Path) -> Wait:
    return ours_async(state, directory, options=_snapshot("overlap"))


def raw(state: State, directory: Path) -> None:
    """The limit: zero-copy views, written through O_DIRECT by three threads, no names, no digests."""
    import numpy as np

    step, at = 8 * MIB, 0
    pieces: list[tuple[Any, int]] = []
    for view in state.host_bytes():
        for i in range(0, len(view), step):
            pieces.append((view[i : i + step], at))
            at += -(-len(view[i : i + step]) // 4096) * 4096
    descriptor = os.open(directory / "raw", os.O_CREAT | os.O_WRONLY | os.O_DIRECT)
    os.posix_fallocate(descriptor, 0, at)
    todo, lock = iter(pieces), threading.Lock()

    def write() -> None:
        buffer = mmap.mmap(-1, step, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        buffer.madvise(mmap.MADV_HUGEPAGE)  # of ordinary pages a request to the disk may have no more than 1 MiB
        target = np.frombuffer(buffer, np.uint8)
        while True:
            with lock:
                piece = next(todo, None)
            if piece is None:
                return
            np.copyto(target[: len(piece[0])], piece[0])
            os.pwrite(descriptor, memoryview(buffer)[: -(-len(piece[0]) // 4096) * 4096], piece[1])

    threads = [threading.Thread(target=write) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.fsync(descriptor)
    os.close(descriptor)


def on_host(state: State) -> dict[str, Any]:
    """The tensors on the host: XLA's in one batched transfer."""
    if state.device != "xla":
        return state.state_dict()
    import torch_xla.core.xla_model as xm

    moved: dict[str, Any] = xm._maybe_convert_to_cpu(state.state_dict())
    return moved


def torch_save(state: State, directory: Path) -> None:
    import torch

    torch.save(on_host(state), directory / "f.pt")


def xser(state: State, directory: Path) -> None:
    import torch_xla.utils.serialization as serialization

    serialization.save(state.state_dict(), str(directory / "f.pt"))


def safetensors(state: State, directory: Path) -> None:
    from safetensors.torch import save_file

    save_file(on_host(state), directory / "f.safetensors")


def dcp(state: State, directory: Path) -> None:
    import torch.distributed.checkpoint as stock

    stock.save(state.state_dict(), storage_writer=_stock_writer(directory), no_dist=True)


def _stock_writer(directory: Path) -> Any:
    import torch.distributed.checkpoint as stock

    return stock.FileSystemWriter(directory / "d", sync_files=False, thread_count=os.cpu_count() or 1)


def dcp_ours(state: State, directory: Path) -> None:
    import xla_ckpt.dcp as dcp

    dcp.save(state.state_dict(), checkpoint_id=directory / "d", no_dist=True)


def dcp_our_writer(state: State, directory: Path) -> None:
    import torch.distributed.checkpoint as stock

    from xla_ckpt.dcp import StorageWriter

    stock.save(state.state_dict(), storage_writer=StorageWriter(directory / "d"), no_dist=True)


def dcp_ours_async(state: State, directory: Path) -> Wait:
    import xla_ckpt.dcp as dcp

    future: Any = dcp.async_save(state.state_dict(), checkpoint_id=directory / "d", no_dist=True)
    return future.result  # type: ignore[no-any-return]


def dcp_our_stager(state: State, directory: Path) -> Wait:
    import torch.distributed.checkpoint as stock

    from xla_ckpt.dcp import AsyncStager, StorageWriter

    future: Any = stock.async_save(
        state.state_dict(), storage_writer=StorageWriter(directory / "d"), async_stager=AsyncStager(), no_dist=True
    )
    return future.result  # type: ignore[no-any-return]


def dcp_thread(state: State, directory: Path) -> Wait:
    return _dcp_async(state, directory)


def dcp_process(state: State, directory: Path) -> Wait:
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    _alone()
    return _dcp_async(state, directory, async_checkpointer_type=AsyncCheckpointerType.PROCESS, no_dist=False)


_STAGERS: list[Any] = []


def dcp_stager(state: State, directory: Path) -> Wait:
    """A stager that is kept between saves, as torchtitan keeps it: its memory is warm from the second one on."""
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    if not _STAGERS:
        options = StagingOptions(use_pinned_memory=False, use_async_staging=False, use_non_blocking_copy=False)
        _STAGERS.append(DefaultStager(options))
    return _dcp_async(state, directory, async_stager=_STAGERS[0])


def _dcp_async(state: State, directory: Path, *, no_dist: bool = True, **options: Any) -> Wait:
    import torch.distributed.checkpoint as stock

    said: Any = stock.async_save(
        state.state_dict(), storage_writer=_stock_writer(directory), no_dist=no_dist, **options
    )
    future = getattr(said, "upload_completion", said)
    return future.result  # type: ignore[no-any-return]


def _alone() -> None:
    """A group of one process, which stock's saver in a process of its own asks for."""
    import torch.distributed as dist

    from tests.jobs import free_port

    if not dist.is_initialized():
        address = f"tcp://127.0.0.1:{free_port()}"
        dist.init_process_group("gloo", init_method=address, rank=0, world_size=1)


def raw_later(state: State, directory: Path) -> Wait:
    """The limit, in the hands of whoever runs what is returned."""
    return partial(raw, state, directory)


def transfer_then_thread(state: State, directory: Path) -> Wait:
    """What neuronx-distributed's asynchronous save does."""
    import torch

    thread = threading.Thread(target=torch.save, args=(on_host(state), directory / "f.pt"))
    thread.start()
    return thread.join


def each_then_thread(state: State, directory: Path) -> Wait:
    """Copy every tensor to the host, one after the other, and write in a thread."""
    import torch

    host = {name: value.cpu() for name, value in state.state_dict().items()}
    thread = threading.Thread(target=torch.save, args=(host, directory / "f.pt"))
    thread.start()
    return thread.join


_WARM: list[Any] = []


def memcpy(state: State, directory: Path) -> Wait:
    """No save: one copy of the state into memory that is there already, the floor of a snapshot by copying."""
    import numpy as np

    if not _WARM:
        _WARM.extend(np.ones(len(part), np.uint8) for part in state.host_bytes())
    for target, part in zip(_WARM, state.host_bytes(), strict=True):
        np.copyto(target, part)
    return lambda: None


def ours_jax(state: State, directory: Path) -> None:
    import xla_ckpt

    xla_ckpt.save(directory, "a", {"model": state.arrays})


def orbax_v0(state: State, directory: Path) -> None:
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        checkpointer.save(directory / "o", args=ocp.args.StandardSave(state.arrays))


def orbax_v1(state: State, directory: Path) -> None:
    import orbax.checkpoint.experimental.v1 as ocp

    ocp.save(directory / "o", state.arrays)


_CHECKPOINTERS: list[Any] = []


def orbax_async(state: State, directory: Path) -> Wait:
    import orbax.checkpoint as ocp

    if not _CHECKPOINTERS:
        _CHECKPOINTERS.append(ocp.StandardCheckpointer())
    _CHECKPOINTERS[0].save(directory / "o", state.arrays)
    return _CHECKPOINTERS[0].wait_until_finished  # type: ignore[no-any-return]


def orbax_v1_async(state: State, directory: Path) -> Wait:
    import orbax.checkpoint.experimental.v1 as ocp

    return ocp.save_async(directory / "o", state.arrays).result  # type: ignore[no-any-return]


@needs("moonclip.pytorch")
def moonclip(state: State, directory: Path) -> None:
    moonclip_manager(directory, async_save=False).save(step=1, model=state.module)


@needs("moonclip.pytorch")
def moonclip_async(state: State, directory: Path) -> Wait:
    manager = moonclip_manager(directory)
    manager.save(step=1, model=state.module)
    return manager.flush  # type: ignore[no-any-return]


@needs("tensorizer")
def tensorizer(state: State, directory: Path) -> None:
    from tensorizer import TensorSerializer

    serializer = TensorSerializer(str(directory / "f.tensors"))
    serializer.write_state_dict(state.state_dict())
    serializer.close()


@needs("fastsafetensors")
def fastsafetensors(state: State, directory: Path) -> None:
    from fastsafetensors import ParallelSaver

    ParallelSaver(fsync=True).save(state.state_dict(), str(directory / "f"))


@needs("torch_checkpointing")
def torch_checkpointing(state: State, directory: Path) -> None:
    torch_checkpointing_manager("sync").save(str(directory / "t"), {"model": state.state_dict()})


@needs("torch_checkpointing")
def torch_checkpointing_stored(state: State, directory: Path) -> None:
    torch_checkpointing_manager("stored").save(str(directory / "t"), {"model": state.state_dict()})


@needs("torch_checkpointing")
def torch_checkpointing_copied(state: State, directory: Path) -> Wait:
    return _torch_checkpointing_async("copied", state, directory)


@needs("torch_checkpointing")
def torch_checkpointing_async(state: State, directory: Path) -> Wait:
    return _torch_checkpointing_async("async", state, directory)


def _torch_checkpointing_async(kind: str, state: State, directory: Path) -> Wait:
    manager = torch_checkpointing_manager(kind)
    return manager.save(str(directory / "t"), {"model": state.state_dict()}).result  # type: ignore[no-any-return]
