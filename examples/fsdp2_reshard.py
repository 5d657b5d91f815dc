"""FSDP2 on four ranks, resumed on two, and in one plain process: PyTorch's DCP tutorial, with this library.

    python examples/fsdp2_reshard.py                                     # all three, one after the other
    torchrun --nproc-per-node=4 examples/fsdp2_reshard.py save DIR       # or each by hand
    torchrun --nproc-per-node=2 examples/fsdp2_reshard.py load DIR
    python examples/fsdp2_reshard.py load DIR

Against the tutorial: no `Stateful` wrapper, no `get_state_dict`, no planner, no conversion for the plain process. Every
rank says which part of each tensor it holds; whoever loads says which part it wants.
"""

import os
import subprocess
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

import xla_ckpt


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(16, 30)  # 30 rows on 4 ranks: 8, 8, 8 and 6
        self.net2 = nn.Linear(30, 8)

    def forward(self, x):
        return self.net2(F.relu(self.net1(x)))


def build():
    torch.manual_seed(0)
    model = ToyModel()
    if dist.is_initialized():
        fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def loss_of(model):
    """The same on any number of ranks: all of them see the same batch."""
    x = torch.linspace(-1, 1, 8 * 16).reshape(8, 16)
    return model(x).pow(2).mean()


def save(root):
    model, optimizer = build()
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
    loss = float(loss_of(model).detach())
    xla_ckpt.save_checkpoint(root, "step_3", model, optimizer, user_content={"loss": loss})
    return loss, loss


def load(root):
    model, optimizer = build()  # blank, and sharded as this job is
    content = xla_ckpt.load_checkpoint(root, model=model, optimizer=optimizer).user_content
    return content["loss"], float(loss_of(model).detach())


def main(command, root):
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    saved, now = {"save": save, "load": load}[command](root)
    if not dist.is_initialized() or dist.get_rank() == 0:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        print(f"{command} on {ranks} rank(s): loss when saved {saved:.7f}, now {now:.7f}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()
    if abs(saved - now) > 1e-6 * abs(saved):
        sys.exit("the losses differ")


def all_three():
    with tempfile.TemporaryDirectory() as root:
        for ranks, command in ((4, "save"), (2, "load"), (1, "load")):
            torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            subprocess.run([sys.executable, *torchrun, __file__, command, root], check=True, env=environment)
        subprocess.run([sys.executable, "-m", "xla_ckpt", "show", root, "--leaf", "model"], check=True)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        main(sys.argv[1], sys.argv[2])
    else:
        all_three()
