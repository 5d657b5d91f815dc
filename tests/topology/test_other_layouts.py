"""StateShardings of other makers: FSDP1's sharded state dict, DTensor's tensor parallelism, jax's NamedSharding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardedStateDictConfig, StateDictType
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import xla_ckpt
from tests.jobs import run_alone, run_on_ranks


def fsdp1(rank: int, root: Path) -> str:
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    want = {k: v.clone() for k, v in plain.state_dict().items()}
    model = FSDP(plain, device_id=torch.device("cpu"), use_orig_params=True)
    FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(offload_to_cpu=False))
    state = model.state_dict()
    kind = type(state["0.weight"]).__name__
    xla_ckpt.save_checkpoint(root, "fsdp1", state, options=xla_ckpt.SaveOptions(timeout=60))
    stored = xla_ckpt.restore(root, "fsdp1").tree["model"]
    assert all(torch.equal(stored[k], v) for k, v in want.items()), stored
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state = model.state_dict()
    assert not state["0.weight"].local_shards() or not state["0.weight"].local_shards()[0].tensor.any()
    xla_ckpt.load_checkpoint(root, "fsdp1", state, options=xla_ckpt.LoadOptions(timeout=60))
    model.load_state_dict(state)
    with FSDP.summon_full_params(model):
        again = {k.replace("_fsdp_wrapped_module.", ""): v for k, v in model.named_parameters()}
        assert all(torch.equal(again[k], v) for k, v in want.items())
    return kind


def test_fsdp1_sharded_state_dict(tmp_path: Path) -> None:
    assert run_on_ranks(fsdp1, 4, tmp_path / "ckpt") == ["ShardedTensor"] * 4


def parallel(seed: int, mesh: DeviceMesh) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 5))
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def tensor_parallel(rank: int, root: Path) -> None:
    four = init_device_mesh("cpu", (4,))
    model = parallel(0, four)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    want = {k: v.full_tensor() for k, v in model.state_dict().items()}
    xla_ckpt.save_checkpoint(root, "tp", model, optimizer, options=xla_ckpt.SaveOptions(timeout=60))
    stored = xla_ckpt.restore(root, "tp").tree
    assert all(torch.equal(stored["model"][k], v) for k, v in want.items())
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    other = parallel(1, two["tp"])
    fresh = torch.optim.AdamW(other.parameters(), lr=0.1)
    xla_ckpt.load_checkpoint(root, "tp", other, fresh, options=xla_ckpt.LoadOptions(timeout=60))
    assert all(torch.equal(v.full_tensor(), want[k]) for k, v in other.state_dict().items())
    for name, parameter in other.named_parameters():
        moment = fresh.state[parameter]["exp_avg"]
        assert isinstance(moment, DTensor)
        assert moment.placements == parameter.placements
        assert torch.equal(moment.full_tensor(), stored["optimizer"]["state"][name]["exp_avg"])
    # replicas that a DTensor's own mesh does not know of (it lies along tp only): each writes, one copy is kept
    xla_ckpt.save_checkpoint(root, "sub", other, fresh, options=xla_ckpt.SaveOptions(timeout=60))
    assert all(torch.equal(v, want[k]) for k, v in xla_ckpt.restore(root, "sub").tree["model"].items())
    with torch.no_grad():
        if rank >= 2:
            other[0].weight.to_local().add_(1)
    with pytest.raises(xla_ckpt.DivergentReplicasError) as differ:
        xla_ckpt.save_checkpoint(root, "bad", other, options=xla_ckpt.SaveOptions(timeout=60))
    assert differ.value.leaf == "model/0.weight"
    with pytest.raises(xla_ckpt.UnsupportedStateError) as partial:
        xla_ckpt.save(
            root,
            "bad",
            {"p": DTensor.from_local(torch.ones(2), four, [Partial()])},
            options=xla_ckpt.SaveOptions(timeout=60),
        )
    assert partial.value.leaf == "p"
    like = distribute_tensor(torch.zeros(8, 6), four, [Replicate()])
    again = xla_ckpt.restore(root, "tp", {"model": {"0.weight": like}}).tree
    assert torch.equal(again["model"]["0.weight"].to_local(), want["0.weight"])
    assert xla_ckpt.list_tags(root) == ["tp", "sub"]


def test_dtensor_tensor_parallelism(tmp_path: Path) -> None:
    run_on_ranks(tensor_parallel, 4, tmp_path / "ckpt")


def jax_both_ways(root: Path) -> None:
    import jax
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    whole = {"w": np.arange(128, dtype=np.float32).reshape(8, 16), "b": np.arange(8, dtype=np.float32)}
    specs = {"w": P("x", "y"), "b": P("y")}
    tree = {k: jax.device_put(v, NamedSharding(mesh, specs[k])) for k, v in whole.items()}
    xla_ckpt.save(root, "a", tree)
    other = {"w": NamedSharding(mesh, P(None, ("y", "x"))), "b": NamedSharding(mesh, P())}
    like = {k: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=other[k]) for k, v in whole.items()}
    restored = xla_ckpt.restore(root, "a", like)
    again, report = restored.tree, restored.report
    for k, v in whole.items():
        assert again[k].sharding == other[k]
        assert (np.asarray(again[k]) == v).all()
    assert report.needed_bytes == sum(v.nbytes for v in whole.values())  # replicas are read once
    same = xla_ckpt.restore(root, "a", tree).tree
    assert all(same[k].sharding == tree[k].sharding and (np.asarray(same[k]) == v).all() for k, v in whole.items())


def test_jax_named_shardings_both_ways(tmp_path: Path) -> None:
    run_alone(jax_both_ways, tmp_path, env={"XLA_FLAGS": "--xla_force_host_platform_device_count=8"})
    tree = xla_ckpt.restore(tmp_path, "a").tree
    assert tree["w"].shape == (8, 16)
    assert tree["b"].tolist() == list(range(8))
