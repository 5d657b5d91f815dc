"""Each contender's load into a live state, of what the save of the same contender left.

A load takes the `State` to be filled, and the directory. What it leaves is compared by the digest of all values.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.peers.installed import moonclip_manager, needs, torch_checkpointing_manager
from benchmarks.peers.states import State, wait_for_device


def ours(state: State, directory: Path) -> None:
    import xla_ckpt

    xla_ckpt.load_checkpoint(directory, "a", model=state.module)


def restored(state: State, directory: Path) -> None:
    import xla_ckpt

    state.arrays = xla_ckpt.restore(directory, "a").tree["model"]


def ours_jax(state: State, directory: Path) -> None:
    import xla_ckpt

    state.arrays = xla_ckpt.restore(directory, "a", {"model": state.arrays}).tree["model"]


def install(state: State, values: dict[str, Any], *, mapped: bool = False) -> None:
    """Put host values into the state in the way that costs a peer least.

    XLA's parameters take new buffers from one batched transfer; those on the CPU are copied into. Where the memory is
    to be new, values that are a `map_tensors` file are copied into it, and others are it.
    """
    if state.device == "new":
        state.arrays = {name: value.clone() for name, value in values.items()} if mapped else values
        return
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

    install(state, torch.load(directory / "f.pt", mmap=True), mapped=True)


def xser(state: State, directory: Path) -> None:
    import torch_xla.utils.serialization as serialization

    install(state, serialization.load(str(directory / "f.pt")))


def safetensors(state: State, directory: Path) -> None:
    from safetensors.torch import load_file

    install(state, load_file(directory / "f.safetensors"), mapped=True)


def dcp(state: State, directory: Path) -> None:
    import torch
    import torch.distributed.checkpoint as stock

    if state.device == "new":
        state.arrays = {str(i): torch.empty(shape) for i, shape in enumerate(state.shapes)}
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


@needs("fastsafetensors")
def fastsafetensors(state: State, directory: Path) -> None:
    """Of every file that is there: `safetensors` leaves one, and its own save several."""
    from fastsafetensors import fastsafe_open

    with fastsafe_open(sorted(map(str, directory.glob("*.safetensors"))), device="cpu", nogds=True) as file:
        install(state, {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118  # it is no mapping


@needs("runai_model_streamer")
def runai(state: State, directory: Path) -> None:
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_file(str(directory / "f.safetensors"))
        install(state, dict(streamer.get_tensors()))


@needs("tensorizer")
def tensorizer(state: State, directory: Path) -> None:
    from tensorizer import TensorDeserializer

    with TensorDeserializer(str(directory / "f.tensors"), device="cpu", verify_hash=True) as values:
        install(state, dict(values))


@needs("torch_checkpointing")
def torch_checkpointing(state: State, directory: Path) -> None:
    """It fills the tensors that it is given."""
    torch_checkpointing_manager("sync").load(str(directory / "t"), into={"model": state.state_dict()})


@needs("torch_checkpointing")
def torch_checkpointing_stored(state: State, directory: Path) -> None:
    torch_checkpointing_manager("stored").load(str(directory / "t"), into={"model": state.state_dict()})


@needs("moonclip.pytorch")
def moonclip(state: State, directory: Path) -> None:
    moonclip_manager(directory).load_latest(model=state.module)
