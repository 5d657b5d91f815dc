"""DCP's calls of several ranks: every kind of parallelism, ours and stock's in both directions; one error for all."""

from __future__ import annotations

import gc
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.api import ShardedOptimStateDictConfig, ShardedStateDictConfig, StateDictType
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import xla_ckpt
import xla_ckpt.dcp as dcp
from tests.jobs import run_on_ranks

KINDS = ("ddp", "fsdp1", "fsdp2", "tp", "hsdp")


def trained(kind: str, seed: int, world: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model after a step, on every rank."""
    warnings.simplefilter("ignore")
    torch.manual_seed(seed)
    plain = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.ReLU(), torch.nn.Linear(12, 4))
    model: Any = plain
    if kind == "ddp":
        model = DistributedDataParallel(plain)
    elif kind == "fsdp1":
        model = FullyShardedDataParallel(plain, device_id=torch.device("cpu"), use_orig_params=True)
        FullyShardedDataParallel.set_state_dict_type(
            model, StateDictType.SHARDED_STATE_DICT,
            ShardedStateDictConfig(offload_to_cpu=False), ShardedOptimStateDictConfig(offload_to_cpu=False),
        )  # fmt: skip
    elif kind == "fsdp2":
        fully_shard(plain, mesh=init_device_mesh("cpu", (world,)))
    elif kind == "hsdp":
        fully_shard(plain, mesh=init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("r", "s")))
    elif kind == "tp":
        mesh = init_device_mesh("cpu", (world,))
        parallelize_module(plain, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch.manual_seed(seed)  # the same input everywhere
    model(torch.randn(3, 6)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


class Plain:
    """The true state, by a process alone."""

    def __init__(self, path: Path) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.ReLU(), torch.nn.Linear(12, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        model, optimizer = get_state_dict(self.model, self.optimizer)
        held = {"model": model, "optim": optimizer}
        stock.load(held, checkpoint_id=path, no_dist=True)
        self.values = {k: v.clone() for k, v in flat(held).items()}


def flat(held: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    if isinstance(held, torch.Tensor):
        return {prefix: held}
    found = {}
    for k, v in held.items() if isinstance(held, dict) else ():
        found |= flat(v, f"{prefix}.{k}" if prefix else str(k))
    return found


def saves_and_loads(rank: int, root: Path, kind: str, world: int) -> None:
    model, optimizer = trained(kind, 1, world)
    held = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    dcp.save(held, checkpoint_id=root / "ours")
    stock.save(held, checkpoint_id=root / "stock")
    dcp.async_save(held, checkpoint_id=root / "async").result()
    truth = Plain(root / "stock").values
    assert truth["model.0.weight"].any()
    for name in ("ours", "async"):
        again = Plain(root / name).values
        assert again.keys() == truth.keys()
        assert all(torch.equal(v, truth[k]) for k, v in again.items()), (kind, name)
    for loader, name in ((stock, "ours"), (dcp, "stock"), (dcp, "ours"), (dcp, "async")):
        other, its_optimizer = trained(kind, 2, world)
        target = dict(zip(("model", "optim"), get_state_dict(other, its_optimizer), strict=True))
        loader.load(target, checkpoint_id=root / name)
        set_state_dict(other, its_optimizer, model_state_dict=target["model"], optim_state_dict=target["optim"])
        dist.barrier()
        found = dict(zip(("model", "optim"), get_state_dict(other, its_optimizer), strict=True))
        check = root / f"check-{name}-{'stock' if loader is stock else 'dcp'}"
        stock.save(found, checkpoint_id=check)
        again = Plain(check).values
        assert all(torch.equal(v, truth[k]) for k, v in again.items()), (kind, loader, name)


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_parallelism(tmp_path: Path, kind: str) -> None:
    world = 4 if kind == "hsdp" else 2
    run_on_ranks(saves_and_loads, world, tmp_path, kind, world)


def saves_as(rank: int, root: Path, kind: str, world: int) -> None:
    model, optimizer = trained(kind, 1, world)
    dcp.save(dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True)), checkpoint_id=root / "a")


def loads_as(rank: int, root: Path, kind: str, world: int) -> None:
    truth = Plain(root / "a").values
    model, optimizer = trained(kind, 2, world)
    held = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    dcp.load(held, checkpoint_id=root / "a")
    found = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in flat(held).items()}
    assert all(torch.equal(v, truth[k]) for k, v in found.items())


def test_four_ranks_of_fsdp_into_two_of_tensor_parallelism(tmp_path: Path) -> None:
    run_on_ranks(saves_as, 4, tmp_path, "fsdp2", 4)
    run_on_ranks(loads_as, 2, tmp_path, "tp", 2)
    names = sorted(p.name for p in (tmp_path / "a").glob("*.safetensors"))
    assert names == [f"0000{i}-of-00004.safetensors" for i in range(1, 5)]


def raises(kind: type[BaseException], call: Any) -> Any:
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


class Refusing:
    """A `Stateful` that refuses on one rank."""

    def __init__(self, rank: int, saving: bool) -> None:
        self.rank, self.saving = rank, saving

    def state_dict(self) -> dict[str, Any]:
        if self.saving and self.rank == 1:
            raise ValueError("not now")
        return {"x": 1}

    def load_state_dict(self, held: dict[str, Any]) -> None:
        if not self.saving and self.rank == 1:
            raise ValueError("not that")


class RefusingPlanner(dcp.DefaultSavePlanner):
    def __init__(self, rank: int, step: str) -> None:
        super().__init__()
        self.rank, self.step = rank, step

    def resolve_data(self, item: Any) -> Any:
        if self.rank == 1 and self.step == "resolve":
            raise ValueError("cannot resolve")
        return super().resolve_data(item)

    def finish_plan(self, plan: Any) -> Any:
        if self.rank == 1 and self.step == "finish":
            raise ValueError("cannot finish")
        return super().finish_plan(plan)

    def create_local_plan(self) -> Any:
        if self.rank == 1 and self.step == "plan":
            raise ValueError("cannot plan")
        return super().create_local_plan()


def errors_on_all_ranks(rank: int, root: Path) -> None:
    good = {"w": torch.ones(5), "own": {f"rank{rank}": torch.full((300,), float(rank))}}
    path = root / "a"
    dcp.save(good, checkpoint_id=path)
    before = sorted(p.name for p in root.iterdir())
    told: list[str] = []
    for step in ("plan", "finish", "resolve"):
        planner = RefusingPlanner(rank, step)
        error = raises(
            xla_ckpt.SaveError, lambda p=planner: dcp.save({**good, "w": torch.zeros(5)}, checkpoint_id=path, planner=p)
        )
        told.append(str(error))
        assert error.rank == 1
        # Stock's own calls raise stock's own exception, which holds the error, and leave nothing either.
        planner, writer = RefusingPlanner(rank, step), dcp.StorageWriter(path)
        gathered = raises(
            dcp.CheckpointException, lambda p=planner, w=writer: stock.save(good, storage_writer=w, planner=p)
        )
        assert f"cannot {step}" in str(gathered)
        del gathered, writer, planner
        gc.collect()  # DCP tells no writer of a rank that fails before it writes: the draft goes with the writer
        dist.barrier()
        assert sorted(p.name for p in root.iterdir()) == before, step
    error = raises(xla_ckpt.SaveError, lambda: dcp.save({"s": Refusing(rank, True)}, checkpoint_id=path))
    told.append(str(error))
    assert (error.rank, error.leaf) == (1, "s")
    future = dcp.async_save({"s": Refusing(rank, True)}, checkpoint_id=path)
    told.append(str(future.exception()))
    assert isinstance(future.exception(), xla_ckpt.SaveError)
    dcp.save({"s": Refusing(rank, False)}, checkpoint_id=root / "s")
    error = raises(xla_ckpt.LoadError, lambda: dcp.load({"s": Refusing(rank, False)}, checkpoint_id=root / "s"))
    told.append(str(error))
    assert (error.rank, error.leaf) == (1, "s")
    told.append(
        str(raises(xla_ckpt.NoCheckpointError, lambda: dcp.load({"w": torch.ones(5)}, checkpoint_id=root / "none")))
    )
    # A key that one rank alone asks for, and that is not there.
    target = {"w": torch.zeros(5), **({"more": torch.zeros(1)} if rank == 1 else {})}
    error = raises(xla_ckpt.IncompatibleCheckpointError, lambda: dcp.load(target, checkpoint_id=path))
    told.append(str(error))
    assert not target["w"].any()
    # A flipped bit in what rank 1 alone needs.
    file = next(f for f in path.glob("*.safetensors") if torch.full((300,), 1.0).numpy().tobytes() in f.read_bytes())
    dist.barrier()
    if rank == 0:
        data = bytearray(file.read_bytes())
        data[bytes(data).index(torch.full((300,), 1.0).numpy().tobytes()) + 100] ^= 1
        file.write_bytes(data)
    dist.barrier()
    target = {"w": torch.zeros(5), "own": {f"rank{rank}": torch.full((300,), -1.0)}}
    error = raises(xla_ckpt.CorruptCheckpointError, lambda: dcp.load(target, checkpoint_id=path))
    told.append(str(error))
    assert (error.leaf, error.file, error.rank) == ("own.rank1", file.name, 1)
    assert not target["w"].any()
    assert (target["own"][f"rank{rank}"] == -1).all()
    everybody: list[Any] = [None, None]
    dist.all_gather_object(everybody, told)
    assert everybody[0] == everybody[1]


def test_one_error_on_all_ranks(tmp_path: Path) -> None:
    run_on_ranks(errors_on_all_ranks, 2, tmp_path)


def trains_meanwhile(rank: int, root: Path) -> None:
    """Collectives of training, and saves in the background, on the same default group."""
    w = torch.ones(1000)
    futures = []
    for i in range(4):
        w.add_(1)
        futures.append(dcp.async_save({"w": w, "i": i}, checkpoint_id=root / f"step-{i}"))
        for _ in range(20):
            total = torch.tensor([float(rank)])
            dist.all_reduce(total)
            assert total.item() == 1.0
    for i, future in enumerate(futures):
        future.result()
        target = {"w": torch.zeros(1000), "i": -1}
        dcp.load(target, checkpoint_id=root / f"step-{i}")
        assert (target["w"] == i + 2).all()
        assert target["i"] == i


def test_saves_in_the_background_do_not_mix_with_training(tmp_path: Path) -> None:
    run_on_ranks(trains_meanwhile, 2, tmp_path)


def saves_in_subgroups(rank: int, root: Path) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = groups[rank // 2]
    dcp.save({"w": torch.full((3,), float(rank // 2))}, checkpoint_id=root / f"{rank // 2}", process_group=mine)
    future = dcp.async_save({"w": torch.full((3,), 5.0)}, checkpoint_id=root / f"a{rank // 2}", process_group=mine)
    future.result()
    dist.barrier()
    for name, value in (("0", 0.0), ("1", 1.0), ("a0", 5.0), ("a1", 5.0)):
        target = {"w": torch.full((3,), -1.0)}
        dcp.load(target, checkpoint_id=root / name, process_group=mine)
        assert (target["w"] == value).all()
    dcp.save({"w": torch.full((3,), float(rank))}, checkpoint_id=root / f"alone{rank}", no_dist=True)
    target = {"w": torch.full((3,), -1.0)}
    dcp.load(target, checkpoint_id=root / f"alone{rank}", no_dist=True)
    assert (target["w"] == rank).all()


def test_groups_of_some_ranks(tmp_path: Path) -> None:
    run_on_ranks(saves_in_subgroups, 4, tmp_path)


def replicas_that_differ(rank: int, root: Path) -> None:
    held = {
        "model": {
            "big": torch.zeros(5000),
            "w": torch.full((4, 2), float(rank)),
            "bn.running_mean": torch.full((3,), rank + 0.0),
        }
    }
    for call in (dcp.save, lambda s, checkpoint_id: dcp.async_save(s, checkpoint_id=checkpoint_id).result()):
        error = raises(xla_ckpt.DivergentReplicasError, lambda c=call: c(held, checkpoint_id=root / "a"))
        assert error.leaf == "model.w"
        assert "rank 0" in str(error)
        assert "rank 1" in str(error)
        assert "xla_ckpt.dcp.sharded" in str(error)
        assert list(root.iterdir()) == []
    gathered = raises(dcp.CheckpointException, lambda: stock.save(held, storage_writer=dcp.StorageWriter(root / "a")))
    assert "DivergentReplicasError" in str(gathered)
    assert list(root.iterdir()) == []
    dcp.save(held, checkpoint_id=root / "a", options=xla_ckpt.SaveOptions(replicas="first"))
    held["model"]["w"].zero_()
    dcp.save(held, checkpoint_id=root / "a")  # what a BatchNorm has counted may differ
    shapes = {"w": torch.zeros(4 + rank, 2)}
    assert raises(xla_ckpt.DivergentReplicasError, lambda: dcp.save(shapes, checkpoint_id=root / "a")).leaf == "w"


def test_replicas_that_differ_are_no_replicas(tmp_path: Path) -> None:
    run_on_ranks(replicas_that_differ, 2, tmp_path)
