"""Models and optimizers whose modules are wrapped: what one set of wrappers saved loads into any other."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import xla_ckpt
from tests.covering import pairs_of_values, some_of
from tests.jobs import run_on_ranks

LAYOUTS = ("native", "dcp", "torchtitan", "xser", "pt", "orbax", "torch_checkpointing", "smp")

Wrap = Callable[[Any], Any]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(3, 3)
        self.norm = nn.LayerNorm(3)


def compiled(module: Any) -> Any:
    return torch.compile(module, backend="eager")


def inside(wrap: Wrap) -> Wrap:
    """Return what wraps a layer of a block."""

    def wrapped(block: Block) -> Block:
        block._modules["l"] = wrap(block.l)
        return block

    return wrapped


def same(module: Any) -> Any:
    return module


KINDS: dict[str, tuple[Wrap, Wrap]] = {
    "bare": (same, same),
    "checkpoint": (checkpoint_wrapper, same),
    "compile": (compiled, same),
    "compile of checkpoint": (lambda block: compiled(checkpoint_wrapper(block)), same),
    "checkpoint of compile": (lambda block: checkpoint_wrapper(compiled(block)), same),
    "checkpoint around compile": (lambda block: checkpoint_wrapper(inside(compiled)(block)), same),
    "checkpoint twice": (lambda block: checkpoint_wrapper(inside(checkpoint_wrapper)(block)), same),
    "offload": (offload_wrapper, same),
    "whole checkpoint": (checkpoint_wrapper, checkpoint_wrapper),
    "data parallel": (checkpoint_wrapper, lambda model: nn.DataParallel(compiled(model))),
    "compile of data parallel": (same, lambda model: compiled(nn.DataParallel(model))),
}
"""Name -> (what wraps each block, what wraps the model)."""


def program(kind: str, seed: int) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    block, whole = KINDS[kind]
    model = whole(nn.Sequential(block(Block()), block(Block())))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Do a step with gradients that depend on the weights, and on the order of the parameters."""
    for i, parameter in enumerate(model.parameters()):
        parameter.grad = parameter.detach().sin() + i
    optimizer.step()


def trained(kind: str) -> tuple[Any, torch.optim.Optimizer]:
    model, optimizer = program(kind, 1)
    step(model, optimizer)
    return model, optimizer


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    return [(p.tolist(), *(optimizer.state[p][key].tolist() for key in MOMENTS)) for p in model.parameters()]


MOMENTS = ("step", "exp_avg", "exp_avg_sq")


def check_goes_on(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Check that a program has the state of `trained`, and has the same one after two more steps."""
    right = trained("bare")
    for _ in range(3):
        assert values(model, optimizer) == values(*right)
        step(model, optimizer)
        step(*right)


@pytest.mark.parametrize(
    ("saved", "loaded", "layout"), some_of([*product(KINDS, KINDS, LAYOUTS)], lambda case: pairs_of_values(case))
)
def test_any_wrappers_load_what_any_others_saved(saved: str, loaded: str, layout: str, tmp_path: Path) -> None:
    xla_ckpt.save_checkpoint(tmp_path, "t", *trained(saved), layout=layout)
    model, optimizer = program(loaded, 2)
    xla_ckpt.load_checkpoint(tmp_path, "t", model, optimizer)
    check_goes_on(model, optimizer)


@pytest.mark.parametrize("kind", KINDS)
def test_leaves_have_the_names_without_wrappers(kind: str, tmp_path: Path) -> None:
    xla_ckpt.save_checkpoint(tmp_path, "t", *trained(kind))
    tree = xla_ckpt.restore(tmp_path, "t").tree
    bare, _ = program("bare", 1)
    assert tree["model"].keys() == bare.state_dict().keys()
    assert [name for group in tree["optimizer"]["param_groups"] for name in group["params"]] == list(
        dict(bare.named_parameters())
    )
    assert tree["optimizer"]["state"].keys() == dict(bare.named_parameters()).keys()


NEIGHBOURS = [*zip(KINDS, [*KINDS][3:] + [*KINDS][:3], strict=True)]


OWN_STEPS = {"checkpoint of compile", "data parallel", "compile of data parallel"}
"""Kinds in whose names stock's `get_state_dict` leaves ``_orig_mod`` or ``module``."""


@pytest.mark.parametrize(("saved", "loaded"), [pair for pair in NEIGHBOURS if pair[1] not in OWN_STEPS])
@pytest.mark.filterwarnings("ignore")
def test_stock_dcp_loads_what_any_wrappers_saved(saved: str, loaded: str, tmp_path: Path) -> None:
    xla_ckpt.save_checkpoint(tmp_path, "t", *trained(saved), layout="dcp")
    model, optimizer = program(loaded, 2)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    stock.load(state, checkpoint_id=tmp_path / "t", no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    check_goes_on(model, optimizer)


@pytest.mark.parametrize(("saved", "loaded"), NEIGHBOURS)
@pytest.mark.filterwarnings("ignore")
def test_any_wrappers_load_what_stock_dcp_saved(saved: str, loaded: str, tmp_path: Path) -> None:
    state = dict(zip(("model", "optimizer"), get_state_dict(*trained(saved)), strict=True))
    stock.save(state, checkpoint_id=tmp_path / "t", no_dist=True)
    model, optimizer = program(loaded, 2)
    xla_ckpt.load_checkpoint(tmp_path / "t", model=model, optimizer=optimizer)
    check_goes_on(model, optimizer)


def save_as_before(root: Path, layout: str, model: nn.Module) -> None:
    """Save as earlier versions did: the optimizer has the names of `named_parameters`, the model those of its state."""
    named = [*model.named_parameters()]
    optimizer = torch.optim.AdamW(named, lr=0.1)
    step(model, optimizer)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    xla_ckpt.save_checkpoint(root, "t", state, optimizer, layout=layout)
    stored = xla_ckpt.restore(root, "t").tree["optimizer"]["param_groups"][0]["params"]
    assert stored in ([name for name, _ in named], list(range(len(named))))


@pytest.mark.parametrize(
    ("saved", "loaded", "layout"),
    some_of(
        [
            *product(
                [kind for kind in KINDS if "parallel" not in kind],
                ["bare", "checkpoint", "checkpoint of compile"],
                LAYOUTS,
            )
        ],
        lambda case: pairs_of_values(case),
    ),
)
def test_names_of_earlier_versions_are_known(saved: str, loaded: str, layout: str, tmp_path: Path) -> None:
    save_as_before(tmp_path, layout, program(saved, 1)[0])
    model, optimizer = program(loaded, 2)
    xla_ckpt.load_checkpoint(tmp_path, "t", model, optimizer)
    check_goes_on(model, optimizer)


def test_names_of_wrapped_blocks_of_earlier_versions_are_known(tmp_path: Path) -> None:
    """A step ``module`` may be a module of the program: only one that is wrapped in the same way has its names."""

    def model_of(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.DataParallel(Block()), nn.DataParallel(Block()))

    save_as_before(tmp_path, "native", model_of(1))
    model = model_of(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    xla_ckpt.load_checkpoint(tmp_path, "t", model, optimizer)
    check_goes_on(model, optimizer)


def tied(wrap: Wrap, seed: int) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(wrap(nn.Linear(3, 3)), nn.LayerNorm(3), wrap(nn.Linear(3, 3)))
    one, _, other = (next(iter(part.modules())) for part in model)
    inner = [m for m in (*one.modules(), *other.modules()) if type(m) is nn.Linear]
    inner[1].weight = inner[0].weight
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


@pytest.mark.parametrize("layout", ["native", "dcp"])
def test_tied_parameters_of_earlier_versions_are_known(layout: str, tmp_path: Path) -> None:
    save_as_before(tmp_path, layout, tied(checkpoint_wrapper, 1)[0])
    right = tied(same, 1)
    step(*right)
    for wrap in (same, checkpoint_wrapper, compiled):
        model, optimizer = tied(wrap, 2)
        xla_ckpt.load_checkpoint(tmp_path, "t", model, optimizer)
        assert values(model, optimizer) == values(*right)


def test_an_optimizer_that_lacks_a_parameter_is_refused_by_its_own_name(tmp_path: Path) -> None:
    model, _ = program("checkpoint", 1)
    optimizer = torch.optim.AdamW([p for name, p in model.named_parameters() if "norm" not in name], lr=0.1)
    step(model, optimizer)
    xla_ckpt.save_checkpoint(tmp_path, "t", model, optimizer)
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match=r"state/0\.norm\.weight: the optimizer has"):
        xla_ckpt.load_checkpoint(tmp_path, "t", *program("compile", 2))


def parallel(wrap: Wrap, how: str, seed: int) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model: Any = nn.Sequential(wrap(Block()), wrap(Block()))
    if how == "ddp":
        model = compiled(DistributedDataParallel(model))
    if how == "fsdp2":
        mesh = init_device_mesh("cpu", (2,))
        for part in (*model, model):
            fully_shard(part, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    state = [[p.data, *(optimizer.state[p][key] for key in MOMENTS)] for p in model.parameters()]
    return [[getattr(t, "full_tensor", lambda t=t: t)().tolist() for t in of] for of in state]


def on_ranks(rank: int, root: Path) -> None:
    wraps = (same, lambda block: compiled(checkpoint_wrapper(block)), checkpoint_wrapper)
    hows = ("ddp", "fsdp2")
    right = parallel(same, "", 1)
    step(*right)
    for number, (wrap, how) in enumerate(product(wraps[1:], hows)):
        made = parallel(wrap, how, 1)
        step(*made)
        xla_ckpt.save_checkpoint(root, f"t{number}", *made)
        for other, its_how in zip(wraps, ("fsdp2", "fsdp2", "ddp"), strict=True):
            again = parallel(other, its_how, 2)
            xla_ckpt.load_checkpoint(root, f"t{number}", *again)
            assert whole(*again) == whole(*right)


def test_models_of_several_ranks_have_the_names_without_wrappers(tmp_path: Path) -> None:
    run_on_ranks(on_ranks, 2, tmp_path)
