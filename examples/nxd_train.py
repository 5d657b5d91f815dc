"""A training script for neuronx-distributed: TP 2 x DP 2, ZeRO-1, xser, asynchronous saves, resume.

    torchrun --nproc-per-node=4 examples/nxd_train.py --checkpoint_dir runs/nxd --steps 4

It trains 4 steps and stops; the same command again trains the next 4. The newest two tags are kept, in
neuronx-distributed's own layout of files.

Its calls are those of a script for neuronx-distributed. Two lines are not: the import of `neuron_compat.nxd`, and
`emulate()`, which has torch_xla's collectives reach all processes of the torchrun job, so that it runs on CPUs. On
Trainium that line goes (unverified: none was at hand).
"""

import argparse
import os

os.environ.setdefault("PJRT_DEVICE", "CPU")

import torch
import torch_xla
import torch_xla.core.xla_model as xm

import neuron_compat.nxd as nxd  # was: import neuronx_distributed as nxd
from neuron_compat import emulate
from neuron_compat.nxd.optimizer import NeuronZero1Optimizer
from neuron_compat.nxd.parallel_layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear, parallel_state

WORDS, HIDDEN, LENGTH, BATCH = 64, 32, 16, 8


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.RMSNorm(HIDDEN)
        self.up = ColumnParallelLinear(HIDDEN, 4 * HIDDEN, bias=False, gather_output=False)
        self.down = RowParallelLinear(4 * HIDDEN, HIDDEN, bias=False, input_is_parallel=True)

    def forward(self, x):
        return x + self.down(torch.nn.functional.silu(self.up(self.norm(x))))


class Model(torch.nn.Module):
    """Guesses the next word from the word."""

    def __init__(self):
        super().__init__()
        self.embed = ParallelEmbedding(WORDS, HIDDEN)
        self.blocks = torch.nn.Sequential(Block(), Block())
        self.head = ColumnParallelLinear(HIDDEN, WORDS, bias=False)

    def forward(self, words):
        return self.head(self.blocks(self.embed(words)))


def batch_of(step):
    """This data-parallel rank's part of the batch of a step: every third word."""
    first = torch.randint(WORDS, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    words = (first + 3 * torch.arange(LENGTH + 1)) % WORDS
    return words.chunk(parallel_state.get_data_parallel_size())[parallel_state.get_data_parallel_rank()].to("xla")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--checkpoint_dir", required=True)
    parser.add_argument("--steps", type=int, default=4, help="steps of this run")
    parser.add_argument("--save_every", type=int, default=1, help="steps from save to save")
    args = parser.parse_args()

    emulate()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    replicas = parallel_state.get_data_parallel_replica_groups()
    torch.manual_seed(0)
    model = Model().to("xla")
    optimizer = NeuronZero1Optimizer(
        model.parameters(),
        torch.optim.AdamW,
        lr=1e-2,
        pin_layout=False,
        sharding_groups=replicas,
        grad_norm_groups=parallel_state.get_tensor_model_parallel_replica_groups(),
    )
    lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))

    total_steps = 0
    if nxd.has_checkpoint(args.checkpoint_dir):
        user_content = nxd.load_checkpoint(
            args.checkpoint_dir,  # checkpoint path; no tag: the newest
            model=model,
            optimizer=optimizer,
            scheduler=lr_scheduler,
        )
        total_steps = user_content["total_steps"]
        xm.master_print(f"resumed after step {total_steps}")

    for _ in range(args.steps):
        words = batch_of(total_steps)
        logits = model(words[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, WORDS), words[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        lr_scheduler.step()
        torch_xla.sync()
        total_steps += 1
        mean = xm.all_reduce(xm.REDUCE_SUM, loss.detach(), scale=1 / len(replicas[0]), groups=replicas)
        xm.master_print(f"step {total_steps}: loss {mean.item():.6f}")
        if total_steps % args.save_every == 0:
            nxd.save_checkpoint(
                args.checkpoint_dir,  # checkpoint path
                tag=f"step_{total_steps}",  # tag, sub-directory under checkpoint path
                model=model,
                optimizer=optimizer,
                scheduler=lr_scheduler,
                user_content={"total_steps": total_steps, "cli_args": args.__dict__},
                use_xser=True,
                async_save=True,
                num_kept_ckpts=2,
            )
    nxd.finalize_checkpoint()  # wait for the saves in flight


if __name__ == "__main__":
    main()
