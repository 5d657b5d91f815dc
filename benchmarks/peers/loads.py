"""Each contender's load into a live state, of what the save of the same contender left.

A load takes the `State` to be filled, and the directory. What it leaves is compared by the digest of all values.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.peers.saves import moonclip_manager
from benchmarks.peers.states import State, wait_for_device


def ours(state: State, directory: Path) -> None:
    import xla_ckpt

    xla_ckpt.load_checkpoint(directory, "a", model=state.module)


def install(state: State, values: dict[str, Any]) -> None:
    """Put host values into the live module in the way that costs a peer least.

    XLA's parameters take new buffers from one batched transfer; those on the CPU are copied into.
    """
    if state.device == "cpu":
        for name, parameter in state.state_dict().items():
            parameter.copy_(values[name])
        return
    import torch_xla
    import torch_xla.core.xla_model as xm

    moved = xm.send_cpu_data_to_device([values[name] for name in state.state_dict()], torch_xla.device())
    for parameter, value in zip(state.module.parameters(), moved, strict=True):
        parameter.data = value
    wait_for_device("xla")


def torch_load(state: State, directory: Path) -> None:
    import torch

    install(state, torch.load(directory / "f.pt"))


def torch_load_mapped(state: State, directory: Path) -> None:
    import torch

    install(state, torch.load(directory / "f.pt", mmap=True))


def xser(state: State, directory: Path) -> None:
    import torch_xla.utils.serialization as serialization

    install(state, serialization.load(str(directory / "f.pt")))


def safetensors(state: State, directory: Path) -> None:
    from safetensors.torch import load_file

    install(state, load_file(directory / "f.safetensors"))


def dcp(state: State, directory: Path) -> None:
    import torch.distributed.checkpoint as stock

    stock.load(state.state_dict(), checkpoint_id=str(directory / "d"), no_dist=True)


def dcp_ours(state: State, directory: Path) -> None:
    import xla_ckpt.dcp as dcp

    dcp.load(state.state_dict(), checkpoint_id=directory / "d", no_dist=True)


def dcp_our_reader(state: State, directory: Path) -> None:
    import torch.distributed.checkpoint as stock

    from xla_ckpt.dcp import StorageReader

    stock.load(state.state_dict(), storage_reader=StorageReader(directory / "d"), no_dist=True)


def orbax_v0(state: State, directory: Path) -> None:
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        state.arrays = checkpointer.restore(directory / "o", args=ocp.args.StandardRestore(state.arrays))


def orbax_v1(state: State, directory: Path) -> None:
    import orbax.checkpoint.experimental.v1 as ocp

    state.arrays = ocp.load(directory / "o", state.arrays)


def moonclip(state: State, directory: Path) -> None:
    moonclip_manager(directory).load_latest(model=state.module)
