"""Jobs in which stock DCP saves and loads at test time, for tests in which our side writes or reads.

A test runs these with `run_on_ranks`, and puts ours in the place of one half:

    run_on_ranks(save_by_stock, RANKS[kind], path, kind)         # then load `made(kind, 2)` by ours, and ask `unequal`
    run_on_ranks(load_by_stock, RANKS[other], path, other)       # after ours has saved `made(kind, 1)`

Nothing that distributes states takes part in what is compared: a model has its values before it is spread over the
ranks, so a second one that was made in the same way says what each rank should hold.

It is a program, too, which torchrun starts by the interpreter of another torch (`with_other_torch`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.fixtures.dcp import make

SPREAD: dict[str, tuple[int, Callable[[torch.nn.Module], torch.nn.Module]]] = {
    "plain": (1, make.alone),
    "ddp": (2, make.by_ddp),
    "fsdp1": (2, make.by_fsdp1),
    "fsdp2": (2, make.by_fsdp2),
    "fsdp2_on_4": (4, make.by_fsdp2),
    "hsdp": (4, make.by_hsdp),
    "tp": (2, make.by_tp),
    "tp_fsdp2": (4, make.by_tp_and_fsdp2),
}
RANKS = {kind: ranks for kind, (ranks, _) in SPREAD.items()}
EPOCH = 3


@dataclass(frozen=True)
class Made:
    """A model and its AdamW, as a rank holds them."""

    model: torch.nn.Module
    optimizer: torch.optim.AdamW

    def state(self) -> dict[str, Any]:
        """{"model", "optimizer", "epoch"}, as a program gives it to `dcp.save` and `dcp.load`."""
        return {**make.state_of(self.model, self.optimizer), "epoch": EPOCH}

    def held(self) -> dict[str, Any]:
        """What lies in this rank's memory, by name."""
        parts: dict[str, Any] = {}
        moments = self.optimizer.state
        for name, parameter in self.model.named_parameters():
            parts[name] = parameter
            if parameter.numel():  # FSDP1 keeps no moments of a parameter of which a rank has no part
                parts |= {f"{name}.{kind}": moments[parameter][kind] for kind in ("step", "exp_avg", "exp_avg_sq")}
        parts |= dict(self.model.named_buffers())
        local = {name: getattr(tensor, "_local_tensor", tensor).detach() for name, tensor in parts.items()}
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        return {**local, "groups": groups}


def small() -> torch.nn.Module:
    """The model: five rows in one layer, and one layer in bfloat16."""
    return make.Mlp(odd=5, low=True)


def made(kind: str, step: int = 1) -> Made:
    """A model of one kind, with the values that training had after a number of steps. All ranks call it."""
    return Made(*make.adam(small, SPREAD[kind][1], step))


def unequal(found: Made, wanted: Made) -> list[str]:
    """What this rank holds that is not, bit for bit, what it should hold."""
    a, b = found.held(), wanted.held()
    bad = [
        name
        for name in b
        if name != "groups" and not (a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]))
    ]
    return bad + [f"groups: {a['groups']}"] * (a["groups"] != b["groups"])


def contents(step: int = 1) -> dict[str, torch.Tensor]:
    """The whole tensors of the state, by DCP's key; in any process."""
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        flat, _ = flatten_state_dict(made("plain", step).state())
    return {key: make.own(value) for key, value in flat.items() if isinstance(value, torch.Tensor)}


def save_by_stock(rank: int, path: Path, kind: str, step: int = 1) -> None:
    """Save the state of a kind of model by stock DCP. All ranks call it."""
    with as_stock_warns():
        dcp.save(made(kind, step).state(), checkpoint_id=path)


def load_by_stock(rank: int, path: Path, kind: str, step: int = 1) -> list[str]:
    """Load by stock DCP into a kind of model, as PyTorch's recipe does; what this rank then holds that is wrong."""
    from torch.distributed.checkpoint.state_dict import set_state_dict

    with as_stock_warns():
        found = made(kind, step + 1)
        state = found.state()
        state["epoch"] = 0
        dcp.load(state, checkpoint_id=path)
        set_state_dict(
            found.model, found.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        wrong = unequal(found, made(kind, step))
    return wrong + [f"epoch: {state['epoch']}"] * (state["epoch"] != EPOCH)


@contextmanager
def as_stock_warns() -> Iterator[None]:
    """Stock DCP warns of what is deprecated in torch itself, and the tests take warnings for errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# --- eight devices of one process: `run_alone(..., xla=True, env=EIGHT)` ----------------------------------------

EIGHT = {"CPU_NUM_DEVICES": "8"}


def save_by_spmd(path: Path, step: int = 1) -> None:
    """Save arrays on eight devices by torch_xla's SPMDSavePlanner."""
    from torch_xla.experimental.distributed_checkpoint import SPMDSavePlanner

    group_of_one()
    with as_stock_warns():
        dcp.save(_without_copies(step)[1], checkpoint_id=path, planner=SPMDSavePlanner())


def load_by_spmd(path: Path, step: int = 1) -> list[str]:
    """Load arrays onto eight devices by torch_xla's SPMDLoadPlanner; what is then wrong."""
    from torch_xla.experimental.distributed_checkpoint import SPMDLoadPlanner

    group_of_one()
    with as_stock_warns():
        truth = _without_copies(step)[0]
        _, state = _without_copies(step + 1)
        dcp.load(state, checkpoint_id=path, planner=SPMDLoadPlanner())
    bad = [name for name, wanted in truth["model"].items() if not torch.equal(state["model"][name].cpu(), wanted)]
    return bad + [f"epoch: {state['epoch']}"] * (state["epoch"] != step)


def spmd_contents(step: int = 1) -> dict[str, torch.Tensor]:
    """The whole arrays that `save_by_spmd` saves; in any process."""
    return {
        f"model.{name}": make.numbers(f"{name}@{step}", shape)
        for name, shape in make.ON_DEVICES.items()
        if name != "partly"
    }


def _without_copies(step: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state, without the array that SPMDSavePlanner loses."""
    truth, state = make.of_devices(step)
    del truth["model"]["partly"], state["model"]["partly"]
    return truth, state


def group_of_one() -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


# --- by another version of torch --------------------------------------------------------------------------------


def with_other_torch(python: str, action: str, path: Path, kind: str, step: int = 1, timeout: float = 300) -> list[str]:
    """`save_by_stock` or `load_by_stock` ("save", "load") by another interpreter; what any of its ranks found wrong."""
    root = Path(__file__).resolve().parents[2]
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS[kind]}"]
    done = subprocess.run(
        [python, "-W", "ignore", *launch, "-m", "tests.formats.stock_dcp_jobs", action, str(path), kind, str(step)],
        cwd=root, env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = [
        json.loads(line.removeprefix("wrong: ")) for line in done.stdout.splitlines() if line.startswith("wrong: ")
    ]
    assert len(found) == RANKS[kind], done.stdout[-4000:]
    return [one for rank in found for one in rank]


def _main(action: str, path: str, kind: str, step: str) -> None:
    dist.init_process_group("gloo")
    act = {"save": save_by_stock, "load": load_by_stock}[action]
    wrong = act(dist.get_rank(), Path(path), kind, int(step)) or []
    sys.stdout.write(f"wrong: {json.dumps(wrong)}\n")
    sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(*sys.argv[1:])
