"""Replicas that have drifted apart, in real jobs: the choice that saves one of them."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

import neuron_compat.nxd as nxd
import xla_ckpt
from tests.jobs import run_on_ranks
from tests.topology.test_rank_rules import Heard


class Drifted(torch.nn.Module):
    """A norm that is another one on each rank, and a counter that is a buffer."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.norm = torch.nn.Parameter(torch.full((70000,), float(rank)))
        self.register_buffer("count", torch.full((2,), float(rank)))


def real_job(rank: int, root: Path) -> list[str]:
    """Every way to save, by real processes; what this rank has heard."""
    heard = Heard()
    logging.getLogger().addHandler(heard)
    model = Drifted(rank)
    optimizer = torch.optim.AdamW(model.parameters())
    model.norm.grad = torch.full((70000,), 1.0 + rank)
    optimizer.step()
    rank_0 = {k: v.clone() for k, v in Drifted(0).state_dict().items()}
    with pytest.raises(xla_ckpt.DivergentReplicasError):
        nxd.save_checkpoint(root, "equal", model, optimizer)
    for use_xser in (False, True):
        nxd.save_checkpoint(
            root,
            f"nxd{use_xser:d}",
            model,
            optimizer,
            use_xser=use_xser,
            options=xla_ckpt.SaveOptions(replicas="first"),
        )
    xla_ckpt.save(root, "tree", {"w": model.norm.detach()}, options=xla_ckpt.SaveOptions(replicas="first", timeout=60))
    moment = xla_ckpt.restore(root, "nxd0").tree["optimizer"]["state"]["norm"]["exp_avg"]
    assert moment.unique().tolist() == [pytest.approx(0.1)]  # 0.1 of rank 0's gradient, everywhere
    for tag in ("nxd0", "nxd1"):
        found = xla_ckpt.restore(root, tag).tree["model"]
        assert found["norm"].unique().numel() == 1
        assert torch.equal(found["count"], rank_0["count"])
    # what ranks must agree about is compared before anything is written
    with pytest.raises(xla_ckpt.UsageError, match="different calls") as caught:
        xla_ckpt.save_checkpoint(
            root, "bad", model, options=xla_ckpt.SaveOptions(replicas="first" if rank else "equal", timeout=60)
        )
    assert "replicas=" in str(caught.value)
    assert xla_ckpt.list_tags(root) == ["nxd0", "nxd1", "tree"]
    return heard.lines


def test_a_real_job(tmp_path: Path) -> None:
    lines = run_on_ranks(real_job, 2, tmp_path / "ckpt")
    saves = [line for line in lines[0] if "the replicas of" in line and "differ, and" in line]
    assert [line.count("model/norm: rank 0 against rank 1") for line in saves] == [1, 1, 0]
    assert all("count" not in line for line in saves)  # a buffer may differ, and has a line of its own
    assert not any("replicas of" in line for line in lines[1])


def apart(rank: int, root: Path) -> None:
    """Two groups of ranks that do not know of each other have a DTensor each: both write all of it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    tp = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
    value = distribute_tensor(torch.arange(12.0).reshape(4, 3) + 100 * (rank // 2), tp, [Shard(0)])
    with pytest.raises(xla_ckpt.DivergentReplicasError, match="two ranks hold different values") as caught:
        xla_ckpt.save(root, "bad", {"w": value}, options=xla_ckpt.SaveOptions(timeout=60))
    assert "replicas='first'" in str(caught.value.hint)
    heard = Heard()
    logging.getLogger().addHandler(heard)
    xla_ckpt.save(root, "a", {"w": value}, options=xla_ckpt.SaveOptions(replicas="first", timeout=60))
    assert (rank == 0) == any("w: rank 0 against rank 2" in line for line in heard.lines)
    assert torch.equal(xla_ckpt.restore(root, "a").tree["w"], torch.arange(12.0).reshape(4, 3))
    (form,) = json.loads((root / "a/manifest.json").read_text())["arrays"]
    assert (form["names"], form["divergent"]) == (["w"], True)


def test_replicas_that_do_not_know_of_each_other(tmp_path: Path) -> None:
    run_on_ranks(apart, 4, tmp_path / "ckpt")
