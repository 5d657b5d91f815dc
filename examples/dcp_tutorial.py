"""PyTorch's tutorial "Getting Started with Distributed Checkpoint (DCP)", on this library by its import line.

    python examples/dcp_tutorial.py                 # with FSDP1, with FSDP2, and with modules on an XLA device
    python examples/dcp_tutorial.py fsdp2           # with one of them

    torchrun --nproc-per-node=4 examples/dcp_tutorial.py save fsdp2 DIR     # or each program by hand
    torchrun --nproc-per-node=2 examples/dcp_tutorial.py load fsdp2 DIR
    python examples/dcp_tutorial.py plain fsdp2 DIR

The tutorial has three programs: ranks save, ranks load, and one process without a process group loads into a plain
module. Here they are, under gloo on CPUs. What they call of DCP is the tutorial's; the import line is not. Beyond the
tutorial they train on and compare: every value and every loss has to be equal bit for bit. And the first one saves once
more with `async_save`, and trains on while that is written. (Stock `dcp.async_save` fails with tensors on XLA. Here a
stager of this library freezes them.)
"""

import importlib.util
import os
import subprocess
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

import xla_ckpt.dcp as dcp  # the tutorial: import torch.distributed.checkpoint as dcp

STEPS = 3


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(16, 16)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(16, 8)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))


def setup():
    # The tutorial sets MASTER_ADDR and MASTER_PORT itself, the port as "12355 ", with a space that does not belong
    # there. torchrun sets them here.
    dist.init_process_group("gloo")


def cleanup():
    dist.destroy_process_group()


def wrap(kind, model):
    """The model as the ranks have it; on XLA each has all of it, in its own device."""
    if kind == "fsdp1":
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    if kind == "fsdp2":
        return fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),)))
    return model.to("xla")


def train(model, optimizer, steps):
    """Train, and return the losses. All ranks see the same batches, so that any number of them gets the same losses."""
    device = next(model.parameters()).device
    losses = []
    for step in steps:
        batch = torch.rand(8, 16, generator=torch.Generator().manual_seed(step)).to(device)
        optimizer.zero_grad()
        loss = model(batch).pow(2).mean()
        loss.backward()
        optimizer.step()
        if device.type == "xla":
            import torch_xla

            torch_xla.sync()  # one graph for each step, as in any training, so that sums are made in one order
        losses.append(loss.detach().cpu())
    return torch.stack(losses)


def whole_state(model_state_dict, optimizer_state_dict):
    """Copies of all tensors by name, of which ranks with FSDP have parts: on rank 0."""
    named = dict(model_state_dict)
    for parameter, state in optimizer_state_dict["state"].items():
        named |= {f"{parameter}.{key}": value for key, value in state.items()}
    return {name: whole(value).cpu().clone() for name, value in named.items()}


def whole(tensor):
    if isinstance(tensor, DTensor):  # FSDP2
        return tensor.full_tensor()
    if isinstance(tensor, ShardedTensor):  # FSDP1
        gathered = torch.empty(tensor.size())
        tensor.gather(0, gathered if dist.get_rank() == 0 else None)
        return gathered
    return tensor


def run_checkpoint_save_example(kind, directory):
    setup()
    torch.manual_seed(0)
    model = wrap(kind, ToyModel())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    train(model, optimizer, range(STEPS))

    model_state_dict, optimizer_state_dict = get_state_dict(model, optimizer)
    state_dict = {"model": model_state_dict, "optimizer": optimizer_state_dict}
    saved = whole_state(model_state_dict, optimizer_state_dict)
    future = dcp.async_save(state_dict, checkpoint_id=f"{directory}/async")
    first = train(model, optimizer, range(STEPS, STEPS + 1))  # the tensors of state_dict change while they are written
    future.result()

    model_state_dict, optimizer_state_dict = get_state_dict(model, optimizer)
    state_dict = {"model": model_state_dict, "optimizer": optimizer_state_dict}
    later = whole_state(model_state_dict, optimizer_state_dict)
    dcp.save(state_dict, checkpoint_id=f"{directory}/sync")
    losses = torch.cat([first, train(model, optimizer, range(STEPS + 1, 2 * STEPS))])
    if dist.get_rank() == 0:
        assert saved.keys() == later.keys()
        assert not any(torch.equal(saved[name], later[name]) for name in saved), "training has changed every tensor"
        torch.save({"async": saved, "sync": later, "losses": losses}, f"{directory}/truth.pt")
        ranks = dist.get_world_size()
        print(f"{kind}: {ranks} ranks saved {len(saved)} tensors, and trained on while they were written")
    cleanup()


def run_checkpoint_load_example(kind, directory):
    setup()
    torch.manual_seed(1)  # other weights than those that were saved
    model = wrap(kind, ToyModel())
    # The tutorial's second program never makes this optimizer, and ends with a NameError in the line after it.
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    truth = torch.load(f"{directory}/truth.pt", weights_only=True)

    for how, trained in (("sync", STEPS + 1), ("async", STEPS)):
        # The tensors of this state are what is loaded into.
        model_state_dict, optimizer_state_dict = get_state_dict(model, optimizer)
        state_dict = {"model": model_state_dict, "optimizer": optimizer_state_dict}
        dcp.load(state_dict=state_dict, checkpoint_id=f"{directory}/{how}")
        set_state_dict(model, optimizer, model_state_dict=model_state_dict, optim_state_dict=optimizer_state_dict)

        loaded = whole_state(*get_state_dict(model, optimizer))
        if dist.get_rank() == 0:
            compare(loaded, truth[how])
        losses = train(model, optimizer, range(trained, 2 * STEPS))
        assert torch.equal(losses, truth["losses"][trained - STEPS :]), (losses, truth["losses"])
    if dist.get_rank() == 0:
        print(f"{kind}: {dist.get_world_size()} ranks loaded both checkpoints: all tensors and losses bit-identical")
    cleanup()


def run_checkpoint_load_into_a_plain_module(kind, directory):
    truth = torch.load(f"{directory}/truth.pt", weights_only=True)
    for how in ("sync", "async"):
        model = ToyModel()
        state_dict = {"model": model.state_dict()}
        dcp.load(state_dict=state_dict, checkpoint_id=f"{directory}/{how}")
        model.load_state_dict(state_dict["model"])
        compare(model.state_dict(), {name: truth[how][name] for name in model.state_dict()})
    print(f"{kind}: one process loaded both models without a process group: all tensors bit-identical")


def compare(loaded, wanted):
    assert loaded.keys() == wanted.keys(), loaded.keys() ^ wanted.keys()
    differ = [name for name, value in wanted.items() if not torch.equal(loaded[name], value)]
    assert not differ, differ


def all_three(kind):
    with tempfile.TemporaryDirectory() as directory:
        for program, ranks in (("save", 4), ("load", 2), ("plain", 1)):
            torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            command = [sys.executable, *torchrun, __file__, program, kind, directory]
            subprocess.run(command, check=True, env=environment)


def main(args):
    if len(args) < 3:
        has_xla = importlib.util.find_spec("torch_xla") is not None
        for kind in args or ["fsdp1", "fsdp2", *(["xla"] if has_xla else [])]:
            all_three(kind)
        return
    program, kind, directory = args
    if kind == "xla":
        os.environ.setdefault("PJRT_DEVICE", "CPU")
        import torch_xla  # noqa: F401  # gives torch the device "xla"
    {
        "save": run_checkpoint_save_example,
        "load": run_checkpoint_load_example,
        "plain": run_checkpoint_load_into_a_plain_module,
    }[program](kind, directory)


if __name__ == "__main__":
    main(sys.argv[1:])
