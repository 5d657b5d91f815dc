"""torch's older FullyShardedDataParallel: the model as it is, the optimizer by torch's own `get_state_dict`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

import xla_ckpt
from tests.jobs import run_on_ranks
from xla_ckpt import UnsupportedStateError


def bare(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 2))


def sharded(seed: int, kind: StateDictType, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    model: Any = bare(seed)
    cpu = torch.device("cpu")
    model[0] = FullyShardedDataParallel(checkpoint_wrapper(model[0]), device_id=cpu, **options)
    model = FullyShardedDataParallel(model, device_id=cpu, **options)
    FullyShardedDataParallel.set_state_dict_type(model, kind)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.arange(12.0).reshape(4, 3)).pow(2).sum().backward()
    optimizer.step()


def whole(model: Any) -> dict[str, list[Any]]:
    with FullyShardedDataParallel.summon_full_params(model):
        steps = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
        named = {name: p.tolist() for name, p in model.named_parameters()}
        return {name.replace(steps[0], "").replace(steps[1], ""): value for name, value in named.items()}


def fsdp1(rank: int, root: Path) -> None:
    kinds = (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT)
    for kind, original in zip(kinds, (True, False), strict=True):
        model, optimizer = sharded(1, kind, use_orig_params=original)
        step(model, optimizer)
        xla_ckpt.save_checkpoint(root, kind.name, model)
        for other in kinds:
            again, _ = sharded(2, other, use_orig_params=original)
            xla_ckpt.load_checkpoint(root, kind.name, again)
            assert whole(again) == whole(model)
        unsharded = bare(3)
        xla_ckpt.load_checkpoint(root, kind.name, unsharded)
        assert {name: p.tolist() for name, p in unsharded.named_parameters()} == whole(model)
        for call in (xla_ckpt.save_checkpoint, xla_ckpt.load_checkpoint):
            with pytest.raises(UnsupportedStateError, match="fully_shard"):
                call(root, kind.name, model, optimizer)
    # As the error advises.
    model, optimizer = sharded(1, StateDictType.SHARDED_STATE_DICT, use_orig_params=True)
    step(model, optimizer)
    xla_ckpt.save(root, "states", dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)))
    again, its_optimizer = sharded(2, StateDictType.SHARDED_STATE_DICT, use_orig_params=True)
    like = dict(zip(("model", "optimizer"), get_state_dict(again, its_optimizer), strict=True))
    tree = xla_ckpt.restore(root, "states", like=like).tree
    set_state_dict(again, its_optimizer, model_state_dict=tree["model"], optim_state_dict=tree["optimizer"])
    for each in ((model, optimizer), (again, its_optimizer)):
        step(*each)
    assert whole(again) == whole(model)


def test_models_in_fsdp1_are_saved_and_loaded(tmp_path: Path) -> None:
    run_on_ranks(fsdp1, 2, tmp_path)
