"""StateShardings of other makers: FSDP1's sharded state dict, DTensor's tensor parallelism, jax's NamedSharding."""

from __future__ import annotations

from pathlib import Path

import xla_ckpt
from tests.jobs import job
from tests.runs import run

FSDP1 = """
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, StateDictType, ShardedStateDictConfig
root = sys.argv[1]
torch.manual_seed(0)
plain = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
want = {k: v.clone() for k, v in plain.state_dict().items()}
def wrapped(model):
    made = FSDP(model, device_id=torch.device("cpu"), use_orig_params=True)
    FSDP.set_state_dict_type(made, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(offload_to_cpu=False))
    return made
model = wrapped(plain)
state = model.state_dict()
say(type(state["0.weight"]).__name__)
xla_ckpt.save_checkpoint(root, "fsdp1", state, timeout=60)
stored = xla_ckpt.restore(root, "fsdp1").tree["model"]
assert all(torch.equal(stored[k], v) for k, v in want.items()), stored
with torch.no_grad():
    for parameter in model.parameters():
        parameter.zero_()
state = model.state_dict()
assert not state["0.weight"].local_shards() or not state["0.weight"].local_shards()[0].tensor.any()
xla_ckpt.load_checkpoint(root, "fsdp1", state, timeout=60)
model.load_state_dict(state)
with FSDP.summon_full_params(model):
    again = {k.replace("_fsdp_wrapped_module.", ""): v for k, v in model.named_parameters()}
    assert all(torch.equal(again[k], v) for k, v in want.items())
say("done")
"""


def test_fsdp1_sharded_state_dict(tmp_path: Path) -> None:
    said = job(FSDP1, 4, tmp_path, tmp_path / "ckpt")
    assert said.count("done") == 4
    assert said.count("ShardedTensor") == 4


TENSOR_PARALLEL = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
root = sys.argv[1]
def build(seed, mesh):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 5))
    whole = {k: v.clone() for k, v in model.state_dict().items()}
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}), whole
four = init_device_mesh("cpu", (4,))
model, whole = build(0, four)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
model(torch.ones(2, 6)).sum().backward()
optimizer.step()
want = {k: v.full_tensor() for k, v in model.state_dict().items()}
xla_ckpt.save_checkpoint(root, "tp", model, optimizer, timeout=60)
stored = xla_ckpt.restore(root, "tp").tree
assert all(torch.equal(stored["model"][k], v) for k, v in want.items())
two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
other, _ = build(1, two["tp"])
fresh = torch.optim.AdamW(other.parameters(), lr=0.1)
xla_ckpt.load_checkpoint(root, "tp", other, fresh, timeout=60)
assert all(torch.equal(v.full_tensor(), want[k]) for k, v in other.state_dict().items())
for name, parameter in other.named_parameters():
    moment = fresh.state[parameter]["exp_avg"]
    assert isinstance(moment, DTensor) and moment.placements == parameter.placements
    assert torch.equal(moment.full_tensor(), stored["optimizer"]["state"][name]["exp_avg"])
# replicas that a DTensor's own mesh does not know of (it lies along tp only): each writes, one copy is kept
xla_ckpt.save_checkpoint(root, "sub", other, fresh, timeout=60)
assert all(torch.equal(v, want[k]) for k, v in xla_ckpt.restore(root, "sub").tree["model"].items())
with torch.no_grad():
    if rank >= 2:
        other[0].weight.to_local().add_(1)
for call in (
    lambda: xla_ckpt.save_checkpoint(root, "bad", other, timeout=60),
    lambda: xla_ckpt.save(root, "bad", {"p": DTensor.from_local(torch.ones(2), four, [Partial()])}, timeout=60),
):
    try:
        call()
    except xla_ckpt.CheckpointError as error:
        say(type(error).__name__, error.leaf)
like = distribute_tensor(torch.zeros(8, 6), four, [Replicate()])
again = xla_ckpt.restore(root, "tp", {"model": {"0.weight": like}}).tree
assert torch.equal(again["model"]["0.weight"].to_local(), want["0.weight"])
assert xla_ckpt.list_tags(root) == ["tp", "sub"]
say("done")
"""


def test_dtensor_tensor_parallelism(tmp_path: Path) -> None:
    said = job(TENSOR_PARALLEL, 4, tmp_path, tmp_path / "ckpt")
    assert said.count("done") == 4
    assert said.count("DivergentReplicasError model/0.weight") == 4
    assert said.count("UnsupportedStateError p") == 4


def test_jax_named_shardings_both_ways(tmp_path: Path) -> None:
    run(
        """
        import sys
        import jax, jax.numpy as jnp, numpy as np
        from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
        import xla_ckpt
        root = sys.argv[1]
        mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
        whole = {"w": np.arange(128, dtype=np.float32).reshape(8, 16), "b": np.arange(8, dtype=np.float32)}
        specs = {"w": P("x", "y"), "b": P("y")}
        tree = {k: jax.device_put(v, NamedSharding(mesh, specs[k])) for k, v in whole.items()}
        xla_ckpt.save(root, "a", tree)
        other = {"w": NamedSharding(mesh, P(None, ("y", "x"))), "b": NamedSharding(mesh, P())}
        like = {k: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=other[k]) for k, v in whole.items()}
        report = xla_ckpt.LoadReport()
        again = xla_ckpt.restore(root, "a", like, report=report).tree
        for k, v in whole.items():
            assert again[k].sharding == other[k]
            assert (np.asarray(again[k]) == v).all()
        assert report.needed_bytes == sum(v.nbytes for v in whole.values())  # replicas are read once
        same = xla_ckpt.restore(root, "a", tree).tree
        assert all(same[k].sharding == tree[k].sharding and (np.asarray(same[k]) == v).all() for k, v in whole.items())
        """,
        tmp_path, env={"XLA_FLAGS": "--xla_force_host_platform_device_count=8"},
    )  # fmt: skip
    tree = xla_ckpt.restore(tmp_path, "a").tree
    assert tree["w"].shape == (8, 16)
    assert tree["b"].tolist() == list(range(8))
