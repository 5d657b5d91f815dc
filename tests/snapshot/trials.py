"""Random training runs that save, go on at once, and look whether the tag has what was there at the call."""

from __future__ import annotations

import contextlib
import copy
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

import xla_ckpt
from xla_ckpt.saving import run as save
from xla_ckpt.saving import write
from xla_ckpt.snapshot import arena, snapshot

SEGMENT = 8 * 1024
SLAB = 16 * 1024
"""Of saves of some 100 KiB: then the smallest budget, a slab, is far below the state."""

LAYOUTS = ("native", "native", "native", "pt", "xser", "dcp")

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p),
    "lbfgs": lambda p: torch.optim.LBFGS(p, max_iter=2, history_size=2),
}


@contextlib.contextmanager
def small_pieces() -> Iterator[None]:
    """Have small states take as many pieces, segments and slabs as large ones do."""
    in_small_segments = functools.partial(write.write_files, segment_bytes=SEGMENT)
    with (
        mock.patch.object(save, "write_files", in_small_segments),
        mock.patch.object(arena, "MAX_BLOCK_BYTES", SLAB),
        mock.patch.object(snapshot, "SMALL_COPY_BYTES", 64),
    ):
        xla_ckpt.finalize_checkpoint()  # slabs of the usual size are kept
        yield
        xla_ckpt.finalize_checkpoint()


class Net(torch.nn.Module):
    """Parameters of several sizes, and buffers. Unless it is `plain`, one is not contiguous, and one is bfloat16."""

    def __init__(self, width: int, *, plain: bool) -> None:
        super().__init__()
        self.up = torch.nn.Linear(8, width)
        self.norm = torch.nn.BatchNorm1d(width)
        self.down = torch.nn.Linear(width, 8)
        self.turned = torch.nn.Parameter(torch.randn(8, width) if plain else torch.randn(width, 8).T)
        self.low = torch.nn.Parameter(torch.randn(8, 8) if plain else torch.randn(8, 8).bfloat16())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (
            self.down(self.norm(self.up(x)))
            + x @ self.turned @ self.turned.T
            + (x.to(self.low.dtype) @ self.low).float()
        )


class Run:
    """A training run on a device."""

    def __init__(self, optimizer: str, width: int, device: str) -> None:
        self.model = Net(width, plain=optimizer == "lbfgs").to(device)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.device = device

    def loss(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.model(torch.randn(4, 8).to(self.device)).square().mean()
        loss.backward()
        return loss

    def step(self) -> None:
        if isinstance(self.optimizer, torch.optim.LBFGS):
            self.optimizer.step(self.loss)
        else:
            self.loss()
            self.optimizer.step()

    def state(self) -> dict[str, Any]:
        """A copy of all that is saved, as the tag has it."""
        names = [name for name, _ in self.model.named_parameters()]
        states = self.optimizer.state_dict()["state"]
        held = {"model": self.model.state_dict(), "optimizer": {names[i]: state for i, state in states.items()}}
        return copy.deepcopy(held)


def different(found: Any, wanted: Any, path: str = "") -> list[str]:
    """Paths of what is not bit for bit the same."""
    if isinstance(wanted, torch.Tensor):
        return [] if torch.equal(found.cpu(), wanted.cpu()) and found.dtype == wanted.dtype else [path]
    if isinstance(wanted, dict):
        pairs = [(key, found[key], value) for key, value in wanted.items()]
    elif isinstance(wanted, list | tuple):
        pairs = [(str(i), a, b) for i, (a, b) in enumerate(zip(found, wanted, strict=True))]
    else:
        return [] if found == wanted else [path]
    return [bad for key, a, b in pairs for bad in different(a, b, f"{path}/{key}")]


def stored(root: str, tag: str) -> dict[str, Any]:
    """What a tag has of the state of a run."""
    tree = xla_ckpt.restore(root, tag).tree
    return {"model": tree["model"], "optimizer": tree["optimizer"]["state"]}


def trial(seed: int, mode: Any, device: str = "cpu", without: tuple[str, ...] = ()) -> list[str]:
    """One run: some steps, a save, and at once more of them. What the tag has otherwise than it was at the call."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    name = chance.choice([name for name in OPTIMIZERS if name not in without])
    run = Run(name, chance.choice([3, 64, 500]), device)
    for _ in range(chance.randint(0, 2)):
        run.step()
    wanted, root, tag = run.state(), f"memory://trials-{mode}-{device}", f"tag-{seed}"
    handle = xla_ckpt.save_checkpoint(
        root,
        tag,
        run.model,
        run.optimizer,
        async_save=True,
        num_kept_ckpts=1,
        options=xla_ckpt.SaveOptions(snapshot=mode, snapshot_budget=chance.choice([1, 3 * SLAB, 1 << 20])),
        layout=chance.choice(LAYOUTS),
    )
    for _ in range(chance.randint(1, 3)):
        what = chance.choice(["step", "step", "forward", "load", "replace", "other"])
        if what == "step":
            run.step()
        elif what == "forward":
            run.loss()  # writes to the buffers
        elif what == "load":
            run.model.load_state_dict(Run(name, run.model.down.in_features, device).model.state_dict())
        elif what == "replace":
            for parameter in run.model.parameters():
                parameter.data = torch.zeros_like(parameter)
        else:
            Run(name, 3, device).step()
    handle.result()
    return [f"seed {seed}, {name}: {path}" for path in different(stored(root, tag), wanted)]


def trials(count: int, mode: Any, device: str = "cpu", without: tuple[str, ...] = ()) -> list[str]:
    """What is wrong in any of so many runs."""
    with small_pieces():
        return [bad for seed in range(count) for bad in trial(seed, mode, device, without)]
