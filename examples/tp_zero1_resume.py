"""Tensor parallelism and ZeRO-1 on four ranks, resumed on four, and on two in another shape.

    python examples/tp_zero1_resume.py

Trains a small MLP over TP 2 x DP 2 with torch_xla's ZeroRedundancyOptimizer for 18 steps, with an asynchronous save in
the middle. Then that checkpoint is resumed as TP 2 x DP 2, where every loss must be the same to the last bit, and as
TP 1 x DP 2 on two ranks, where sums are made in another order, so that losses may differ in the last digits.

It runs on CPUs: `neuron_compat.emulate()` has torch_xla's collectives reach all processes of the torchrun job. On real
devices that line goes, and nothing else changes (unverified: no TPU or Trainium was at hand).
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

STEPS, SAVED = 18, 8


def train(root, shape, log):
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm
    from torch_xla.distributed.zero_redundancy_optimizer import ZeroRedundancyOptimizer

    import neuron_compat
    import xla_ckpt

    neuron_compat.emulate()
    rank = torch.distributed.get_rank()
    mesh = xla_ckpt.Mesh.parse(shape)
    at = mesh.coordinates(rank)
    tp_groups = [[d * mesh.tp + t for t in range(mesh.tp)] for d in range(mesh.dp)]
    dp_groups = [[d * mesh.tp + t for d in range(mesh.dp)] for t in range(mesh.tp)]

    class Copy(torch.autograd.Function):
        """Into a tensor-parallel region: the same forward, gradients are summed backward."""

        @staticmethod
        def forward(_, x):
            return x.clone()

        @staticmethod
        def backward(_, gradient):
            return xm.all_reduce(xm.REDUCE_SUM, gradient, groups=tp_groups)

    class Reduce(torch.autograd.Function):
        """Out of a tensor-parallel region: partial results are summed forward."""

        @staticmethod
        def forward(_, x):
            return xm.all_reduce(xm.REDUCE_SUM, x, groups=tp_groups)

        @staticmethod
        def backward(_, gradient):
            return gradient

    def parallel(full, dim):
        """A parameter of which this rank holds its tensor-parallel part, and that says so as NxD's do."""
        parameter = torch.nn.Parameter(full.chunk(mesh.tp, dim)[at["tp"]].contiguous().to("xla"))
        parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, dim, 1
        return parameter

    class MLP(torch.nn.Module):
        def __init__(self):
            super().__init__()
            random = torch.Generator().manual_seed(0)
            self.up = parallel(torch.randn(32, 16, generator=random) / 4, 0)  # column parallel
            self.down = parallel(torch.randn(16, 32, generator=random) / 6, 1)  # row parallel
            self.scale = torch.nn.Parameter(torch.ones(16, device="xla"))

        def forward(self, x):
            return x + self.scale * Reduce.apply(torch.tanh(Copy.apply(x) @ self.up.T) @ self.down.T)

    model = MLP()
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, sharding_groups=dp_groups, grad_clipping=False, pin_layout=False,
        save_master_weights=True, lr=1e-2, weight_decay=0.1,
    )  # fmt: skip
    first = 0
    if xla_ckpt.has_checkpoint(root):
        first = xla_ckpt.load_checkpoint(root, model=model, optimizer=optimizer, mesh=mesh).user_content["step"]

    handle = None
    for step in range(first, STEPS):
        random = torch.Generator().manual_seed(step)
        batch = torch.randn(8, 16, generator=random).chunk(mesh.dp)[at["dp"]].to("xla")  # data parallel
        loss = (model(batch) - batch.roll(1, dims=1)).pow(2).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        torch_xla.sync()
        mean = xm.all_reduce(xm.REDUCE_SUM, loss.detach(), scale=1 / mesh.dp, groups=dp_groups)
        if rank == 0:
            with Path(log).open("a") as file:
                print(json.dumps({"step": step, "loss": float(mean).hex()}), file=file)
        if step + 1 == SAVED and first == 0:
            handle = xla_ckpt.save_checkpoint(
                root, f"step_{step + 1}", model, optimizer, user_content={"step": step + 1}, mesh=mesh, async_save=True
            )
    if handle is not None:
        report = handle.result()
        print(f"rank {rank} wrote {report.nbytes} bytes and stalled {report.stall * 1e3:.1f} ms", flush=True)
    torch.distributed.destroy_process_group()


def run(root, shape):
    """One torchrun job; its losses by step."""
    from xla_ckpt import Mesh

    log = Path(tempfile.mkstemp(suffix=".jsonl")[1])
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={Mesh.parse(shape).size}",
         __file__, root, shape, str(log)],
        check=True, env={**os.environ, "PJRT_DEVICE": "CPU", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    log.unlink()
    return {line["step"]: float.fromhex(line["loss"]) for line in lines}


def main():
    good = True
    with tempfile.TemporaryDirectory() as root:
        unbroken = run(root, "tp=2,dp=2")
        for shape in ("tp=2,dp=2", "tp=1,dp=2"):
            resumed = run(root, shape)
            assert sorted(resumed) == list(range(SAVED, STEPS))
            worst = max(abs(loss - unbroken[step]) / unbroken[step] for step, loss in resumed.items())
            right = worst == 0.0 if shape == "tp=2,dp=2" else worst < 1e-4
            how = "bit-identical" if worst == 0.0 else f"largest relative difference {worst:.1e}"
            print(f"{len(resumed)} losses after the resume as {shape}: {how}, {'right' if right else 'WRONG'}")
            good = good and right
    sys.exit(0 if good else "a resumed run differs")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(*sys.argv[1:])
    else:
        main()
