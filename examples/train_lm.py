"""Train a small byte-level language model on an XLA device, and survive anything.

The text is the source code of the standard library of the python that runs this: real text, on every machine. A
checkpoint is saved asynchronously every few steps; started again, the run goes on from the latest one, bit for bit.

    python examples/train_lm.py --root runs/lm            # train, or go on
    xla-ckpt ls runs/lm                                   # look at what it saved
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sysconfig
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("PJRT_DEVICE", "CPU")

import torch
import torch_xla
from torch import Tensor, nn
from torch.nn import functional as F

import xla_ckpt


class Block(nn.Module):
    """One Llama-style layer: RMSNorm, rotary attention, SwiGLU."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.attention_norm, self.mlp_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.gate_up, self.down = nn.Linear(dim, 6 * dim, bias=False), nn.Linear(3 * dim, dim, bias=False)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        batch, length, dim = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.attention_norm(x)).chunk(3, dim=-1)
        )
        scores = rotate(q, rotary) @ rotate(k, rotary).transpose(-1, -2) / math.sqrt(dim // self.heads) + mask
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, dim)
        x = x + F.dropout(self.out(mixed), self.dropout, self.training)
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + F.dropout(self.down(F.silu(gate) * up), self.dropout, self.training)


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary position embedding."""
    left, right = x.chunk(2, dim=-1)
    return x * rotary[0] + torch.cat((-right, left), dim=-1) * rotary[1]


class LanguageModel(nn.Module):
    """A byte-level transformer with tied embeddings."""

    def __init__(
        self, dim: int = 256, layers: int = 4, heads: int = 4, context: int = 64, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, dim)
        self.layers = nn.ModuleList(Block(dim, heads, dropout) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, 256, bias=False)
        frequencies = 10000.0 ** (-torch.arange(0, dim // heads, 2) / (dim // heads))
        angles = torch.outer(torch.arange(context), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        self.register_buffer("mask", torch.full((context, context), float("-inf")).triu(1))
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        self.tie()

    def tie(self) -> None:
        """Share the embedding with the output layer (moving a module to XLA unties them)."""
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, (self.cos, self.sin), self.mask)
        return self.head(self.norm(x))


class SourceCode:
    """Random excerpts of the standard library, from a generator whose state is part of every checkpoint."""

    def __init__(self, batch: int, context: int, seed: int) -> None:
        library = Path(sysconfig.get_paths()["stdlib"])
        text = b"".join(path.read_bytes() for path in sorted(library.glob("*.py")))
        self.data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.batch, self.context = batch, context
        self.random = torch.Generator().manual_seed(seed)

    def __next__(self) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(self.data) - self.context - 1, (self.batch,), generator=self.random)
        rows = torch.stack([self.data[s : s + self.context + 1] for s in starts.tolist()]).long()
        return rows[:, :-1], rows[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"random": self.random.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.random.set_state(state["random"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--root", default="runs/lm", help="where checkpoints go: a directory, or s3://bucket/path")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, help="append one JSON line a step")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    torch_xla.manual_seed(args.seed)
    device = torch_xla.device()
    model = LanguageModel().to(device)
    model.tie()
    # The learning rate is a tensor on the device: as a python number it would be a new program to compile each step.
    # It does not fall to zero, which would be a program of its own, too.
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(3e-3, device=device), capturable=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: torch.tensor(0.5 * (1 + math.cos(math.pi * min(step / (args.steps + 1), 1)))).to(device)
    )
    data = SourceCode(batch=8, context=64, seed=args.seed)
    extras = {"rng": xla_ckpt.RNGState(), "data": data}

    step = 0
    if xla_ckpt.has_checkpoint(args.root):
        loaded = xla_ckpt.load_checkpoint(
            args.root, model=model, optimizer=optimizer, scheduler=scheduler, extras=extras
        )
        step, report = loaded.user_content["step"], loaded.report
        print(f"resumed from {report.tag}: {report.arrays} arrays in {report.seconds:.2f} s", flush=True)

    while step < args.steps:
        tokens, targets = (part.to(device) for part in next(data))
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        torch_xla.sync()
        step += 1
        line: dict[str, Any] = {"step": step, "loss": loss.item().hex()}
        if step % args.save_every == 0:
            began = time.perf_counter()
            xla_ckpt.save_checkpoint(
                args.root, f"step_{step}", model, optimizer, scheduler, {"step": step},
                num_kept_ckpts=3, async_save=True, extras=extras,
            )  # fmt: skip
            line["stall_ms"] = 1000 * (time.perf_counter() - began)
        stall = f"  save of step_{step} begun in {line['stall_ms']:.1f} ms" if "stall_ms" in line else ""
        print(f"step {step:4d}  loss {loss.item():.6f}{stall}", flush=True)
        if args.log:
            with args.log.open("a") as log:
                log.write(json.dumps(line) + "\n")
    xla_ckpt.finalize_checkpoint()


if __name__ == "__main__":
    main()
