"""A training script for SageMaker model parallel, on CPUs, saved and resumed on any number of ranks.

    torchrun --nproc-per-node=4 examples/smp_train.py --checkpoint_dir runs/smp --tp 2            # tp 2 x rdp 2
    torchrun --nproc-per-node=4 examples/smp_train.py --checkpoint_dir runs/smp --tp 2 --pp 2
    python examples/smp_train.py --checkpoint_dir runs/smp                                        # one process

Each command trains 4 steps, and goes on where the last one stopped, whatever its degrees were. The losses are those of
a run that never stops. With --full, one file holds the whole model and the optimizer (SMP has no place for the latter).

The calls are those of a script for SMP; the import is another one. Layers whose weights are split come from
neuron_compat.nxd.parallel_layers, and the ranks of a tensor-parallel group get the same batch.
"""

import argparse
import os

import torch

import neuron_compat.smp as smp  # was: import smdistributed.modelparallel.torch as smp
from neuron_compat.nxd.parallel_layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear

WORDS, HIDDEN, LENGTH, BATCH = 64, 32, 16, 8


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(HIDDEN)
        self.up = ColumnParallelLinear(HIDDEN, 4 * HIDDEN, gather_output=False)
        self.down = RowParallelLinear(4 * HIDDEN, HIDDEN, input_is_parallel=True)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Model(torch.nn.Module):
    """Guesses the next word from the word."""

    def __init__(self):
        super().__init__()
        self.embed = ParallelEmbedding(WORDS, HIDDEN)
        self.blocks = torch.nn.Sequential(Block(), Block())
        self.head = ColumnParallelLinear(HIDDEN, WORDS, bias=False)

    def forward(self, words):
        return self.head(self.blocks(self.embed(words)))


@smp.step
def train_step(model, words):
    logits = model(words[:, :-1])
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, WORDS), words[:, 1:].reshape(-1))
    model.backward(loss)
    return loss


def batch_of(step):
    """This replica's part of the batch of a step: every third word."""
    first = torch.randint(WORDS, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    words = (first + 3 * torch.arange(LENGTH + 1)) % WORDS
    return words.chunk(smp.rdp_size())[smp.rdp_rank()]


def save_full(path, model, optimizer, step):
    """As SMP's documents do it. All ranks that hold a model together come here."""
    if smp.rdp_rank() == 0:
        state = {
            "model_state_dict": model.state_dict(gather_to_rank0=True),
            "optimizer_state_dict": optimizer.state_dict(),
            "step": step,
        }
        smp.save(state, path, partial=False)
    smp.barrier()


def load_full(path, model, optimizer):
    state = smp.load(path, partial=False)
    model.load_state_dict(state["model_state_dict"])
    optimizer.load_state_dict(state["optimizer_state_dict"])
    return state["step"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--checkpoint_dir", required=True)
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel degree")
    parser.add_argument("--pp", type=int, default=1, help="pipeline parallel degree")
    parser.add_argument("--steps", type=int, default=4, help="steps of this run")
    parser.add_argument("--full", action="store_true", help="save the whole model and the optimizer in one file")
    args = parser.parse_args()

    smp.init({
        "pipeline_parallel_degree": args.pp,
        "tensor_parallel_degree": args.tp,
        "microbatches": 2,
        "ddp": True,
    })  # fmt: skip
    torch.manual_seed(0)
    model = smp.DistributedModel(Model().double())  # sums in another order differ by less than the losses show
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

    done, full = 0, f"{args.checkpoint_dir}/full.pt"
    if args.full and os.path.exists(full):
        done = load_full(full, model, optimizer)
    elif not args.full and os.path.exists(f"{args.checkpoint_dir}/newest"):
        done = smp.resume_from_checkpoint(args.checkpoint_dir)["step"]
    if done and smp.rank() == 0:
        print(f"resumed after step {done}")

    for step in range(done + 1, done + 1 + args.steps):
        optimizer.zero_grad()
        loss = train_step(model, batch_of(step)).reduce_mean()
        optimizer.step()
        means = smp.allgather(loss.item(), smp.RDP_GROUP)
        if smp.rank() == 0:
            print(f"step {step}: loss {sum(means) / len(means):.6f}")
        if args.full:
            save_full(full, model, optimizer, step)
        else:
            smp.save_checkpoint(
                args.checkpoint_dir,
                f"step_{step}",
                model=model,
                optimizer=optimizer,
                user_content={"step": step},
                num_kept_partial_checkpoints=2,
            )


if __name__ == "__main__":
    main()
