"""What ranks may and may not do: rules, experts, members per rank, replicas that differ, I/O that is counted."""

from __future__ import annotations

import logging
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from tests.jobs import run_on_ranks
from xla_ckpt import Mesh
from xla_ckpt.core.sharding.sharding import DimSharding, Sharding, find_group_axes

FULL = torch.arange(48.0).reshape(8, 6)


def column_of(rank: int) -> torch.Tensor:
    """The rows of a rank of four."""
    return FULL.chunk(4, 0)[rank].clone()


def split_module(value: torch.Tensor, dim: int) -> torch.nn.Module:
    """A parameter with neuronx-distributed's attributes."""
    module = torch.nn.Module()
    module.w = torch.nn.Parameter(value)
    module.w.tensor_model_parallel, module.w.partition_dim, module.w.partition_stride = True, dim, 1
    return module


def column_to_row(rank: int, root: Path) -> None:
    """Tensor-parallel, by rules alone, with the functional calls."""
    rules = [(r"up\.?/w$", ("tp", None))]
    tree = {"up": {"w": column_of(rank)}, "n": torch.ones(3)}
    xla_ckpt.save(root, "column", tree, mesh=Mesh(tp=4), shardings=rules)

    def restored(like: Any, mesh: Mesh, **options: Any) -> torch.Tensor:
        return xla_ckpt.restore(root, "column", {"up": {"w": like}}, mesh=mesh, **options).tree["up"]["w"]

    row = restored(torch.empty(8, 3), Mesh(dp=2, tp=2), shardings=[("w", (None, "tp"))])
    assert torch.equal(row, FULL.chunk(2, 1)[rank % 2])
    part = restored(xla_ckpt.ArraySpec((8, 6), torch.float32, (("dp", "tp"), None)), Mesh(dp=2, tp=2))
    assert torch.equal(part, FULL.chunk(4, 0)[rank])
    uneven = restored(xla_ckpt.ArraySpec((8, 6), "float32", (None, "tp")), Mesh(tp=4))
    assert torch.equal(uneven, FULL.split(2, 1)[rank] if rank < 3 else torch.empty(8, 0))
    assert torch.equal(xla_ckpt.restore(root, "column").tree["up"]["w"], FULL)


def experts_inside_of_dp(rank: int, root: Path) -> None:
    """Dim 0 over ep, tensor parallel along another dim."""
    mesh = Mesh(dp=2, ep=2, tp=2)
    at = mesh.coordinates(rank)
    experts = torch.arange(4 * 3 * 4.0).reshape(4, 3, 4)
    model = split_module(experts.chunk(2, 0)[at["ep"]].chunk(2, 2)[at["tp"]].contiguous(), 2)
    model.w.expert_model_parallel = True
    xla_ckpt.save_checkpoint(root, "experts", model, mesh=mesh)
    assert torch.equal(xla_ckpt.restore(root, "experts").tree["model"]["w"], experts)


def adafactor(rank: int, root: Path) -> None:
    """Its row statistics follow the dim that they keep."""
    factored = split_module(column_of(rank), 0)
    optimizer = torch.optim.Adafactor(factored.parameters())
    optimizer.state[factored.w] = {
        "step": torch.tensor(1.0), "row_var": FULL[:, :1].chunk(4, 0)[rank].clone(), "col_var": FULL[:1].clone(),
    }  # fmt: skip
    xla_ckpt.save_checkpoint(root, "factored", factored, optimizer, mesh=Mesh(tp=4))
    stored = xla_ckpt.restore(root, "factored").tree["optimizer"]["state"]["w"]
    assert torch.equal(stored["row_var"], FULL[:, :1])
    assert torch.equal(stored["col_var"], FULL[:1])


def mesh_of_the_parallel_state(rank: int, root: Path) -> None:
    """The mesh of an initialised parallel state is found, and one that does not fit is refused."""
    name = "neuronx_distributed.parallel_layers.parallel_state"
    answers: dict[str, Any] = {
        "model_parallel_is_initialized": lambda: True,
        "get_tensor_model_parallel_size": lambda: 4,
        "get_pipeline_model_parallel_size": lambda: 1,
        "get_tensor_model_parallel_rank": lambda: rank,
        "get_pipeline_model_parallel_rank": lambda: 0,
    }
    sys.modules[name] = state = types.ModuleType(name)
    state.__dict__.update(answers)
    named = split_module(column_of(rank), 0)
    xla_ckpt.save_checkpoint(root, "found", named)
    assert torch.equal(xla_ckpt.restore(root, "found").tree["model"]["w"], FULL)
    state.__dict__["get_tensor_model_parallel_rank"] = lambda: (rank + 1) % 4
    with pytest.raises(xla_ckpt.UsageError, match="another order"):
        xla_ckpt.save_checkpoint(root, "x", named)
    with pytest.raises(xla_ckpt.UsageError, match="another order"):
        xla_ckpt.load_checkpoint(root, "found", named)
    del sys.modules[name]
    for mesh in (Mesh(tp=8), Mesh(dp=3)):
        with pytest.raises(xla_ckpt.UsageError, match="does not fit the job"):
            xla_ckpt.save_checkpoint(root, "x", named, mesh=mesh)


def rules_and_meshes(rank: int, root: Path) -> set[str]:
    """All of these in one job; what is said against bad rules."""
    for part in (column_to_row, experts_inside_of_dp, adafactor, mesh_of_the_parallel_state):
        part(rank, root)
    problems = set()
    for rules in ([("w",)], [("w", ("zz",))], [("(", None)], [("w", (None, None, "tp"))], [("w", "tp")]):
        with pytest.raises(xla_ckpt.UsageError) as caught:
            xla_ckpt.save(root, "x", {"w": column_of(rank)}, mesh=Mesh(tp=4), shardings=rules)
        problems.add(caught.value.problem)
    assert xla_ckpt.list_tags(root) == ["column", "experts", "factored", "found"]
    return problems


def test_rules_experts_and_meshes(tmp_path: Path) -> None:
    problems = run_on_ranks(rules_and_meshes, 4, tmp_path / "ckpt")
    assert len(problems[0]) == 5
    assert problems == [problems[0]] * 4


def model_of(weight: float = 0.0, buffer: float = 0.0) -> torch.nn.Module:
    made = torch.nn.Linear(64, 64)
    with torch.no_grad():
        made.weight.fill_(weight)
        made.bias.fill_(1.0)
    made.register_buffer("mean", torch.full((40000,), buffer))
    return made


class Loader:
    def __init__(self, at: int) -> None:
        self.at = at

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "seen": torch.full((3,), float(self.at))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]
        assert state["seen"][0] == self.at


class Heard(logging.Handler):
    """What this rank logs."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")


def differ(rank: int, root: Path) -> dict[str, Any]:
    heard = Heard()
    logging.getLogger().addHandler(heard)
    told: dict[str, Any] = {}

    def refused(**state: Any) -> str:
        with pytest.raises(xla_ckpt.DivergentReplicasError) as caught:
            xla_ckpt.save_checkpoint(root, "bad", options=xla_ckpt.SaveOptions(timeout=60), **state)
        return str(caught.value)

    told["weight"] = refused(model=model_of(weight=float(rank == 2)))
    told["plain"] = refused(model=model_of(), extras={"data": Loader(rank)})
    told["lr"] = refused(optimizer=torch.optim.SGD(model_of().parameters(), lr=0.1 * (1 + (rank == 1))))
    assert xla_ckpt.list_tags(root) == []
    handle = xla_ckpt.save_checkpoint(
        root, "async", model_of(weight=float(rank > 1)), async_save=True, options=xla_ckpt.SaveOptions(timeout=60)
    )
    with pytest.raises(xla_ckpt.DivergentReplicasError) as caught:
        handle.result()
    told["async"] = caught.value.leaf, caught.value.expected, caught.value.found

    # a buffer that differs is one rank's, whole, and a member that differs is every rank's own
    extras = {"data": xla_ckpt.PerRank(Loader(10 + rank)), "rng": xla_ckpt.RNGState()}
    xla_ckpt.save_checkpoint(
        root, "good", model_of(buffer=float(rank)), options=xla_ckpt.SaveOptions(timeout=60), extras=extras
    )
    kept = xla_ckpt.restore(root, "good").tree["model"]["mean"]
    assert (kept == 0).all(), kept
    loader = Loader(0)
    torch.manual_seed(rank)
    xla_ckpt.save_checkpoint(root, "rng", options=xla_ckpt.SaveOptions(timeout=60), extras={"rng": xla_ckpt.RNGState()})
    want = torch.rand(3)
    torch.manual_seed(99)
    xla_ckpt.load_checkpoint(root, "rng", extras={"rng": xla_ckpt.RNGState()})
    assert torch.equal(torch.rand(3), want)
    xla_ckpt.load_checkpoint(root, "good", extras={"data": xla_ckpt.PerRank(loader)})
    assert loader.at == 10 + rank
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError) as unwrapped:
        xla_ckpt.load_checkpoint(root, "good", extras={"data": loader})
    told["unwrapped"] = unwrapped.value.details
    # what only rank 0 has
    xla_ckpt.save_checkpoint(
        root,
        "content",
        user_content={"rank": rank, "t": torch.full((5,), float(rank))},
        options=xla_ckpt.SaveOptions(timeout=60),
    )
    content = xla_ckpt.load_checkpoint(root, "content").user_content
    assert content["rank"] == 0
    assert (content["t"] == 0).all()
    return {**told, "log": heard.lines}


def test_replicas_that_differ_are_caught(tmp_path: Path) -> None:
    root = tmp_path / "ckpt"
    told = run_on_ranks(differ, 4, root)
    (text,) = {t["weight"] for t in told}  # the same words on all ranks
    for fact in ("model/weight", "rank 0", "rank 2", "tensor parallelism", "shardings="):
        assert fact in text
    assert "rank 1" not in text
    for t in told:
        assert t["async"] == ("model/weight", "the bytes of rank 0", "others on ranks 2, 3")
        assert "PerRank" in t["plain"]
        assert "extras/data" in t["plain"]
        assert "leaf optimizer" in t["lr"]
        assert "xla_ckpt.PerRank" in t["unwrapped"]
    (warned,) = [line for t in told for line in t["log"] if line.startswith("WARNING") and "buffer model/mean" in line]
    assert "ranks 1, 2, 3" in warned
    # another number of ranks: random generators that nobody saved stay, other members need to be told how
    loader = Loader(0)
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="the state of 4 ranks, this job has 1"):
        xla_ckpt.load_checkpoint(root, "good", extras={"data": xla_ckpt.PerRank(loader)})
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="the state of 4 ranks, this job has 1"):
        xla_ckpt.load_checkpoint(root, "good", extras={"data": LoaderOfItsOwn(0)})
    xla_ckpt.load_checkpoint(root, "good", extras={"rng": xla_ckpt.PerRank(xla_ckpt.RNGState())})
    wrapped = xla_ckpt.PerRank(loader, reshard=sum_of)
    xla_ckpt.load_checkpoint(root, "good", extras={"data": wrapped, "rng": xla_ckpt.RNGState()})
    assert loader.at == 10 + 11 + 12 + 13


class LoaderOfItsOwn(Loader):
    """A loader that says by itself that every rank has its own."""

    per_rank = True


def sum_of(states: list[dict[str, Any]], rank: int, world: int) -> dict[str, Any]:
    at = sum(s["at"] for s in states)
    return {"at": at, "seen": torch.full((3,), float(at))}


def rushes(rank: int, root: Path, gate: Path) -> list[tuple[str, int | None]]:
    while rank == 1 and not gate.exists():
        time.sleep(0.01)
    told = []
    for i in range(12):
        with pytest.raises(xla_ckpt.CheckpointError) as caught:
            xla_ckpt.save(
                root,
                "no/tag" if rank == 0 else f"tag_{i}",
                {"w": torch.ones(3)},
                options=xla_ckpt.SaveOptions(timeout=30),
            )
        told.append((type(caught.value).__name__, caught.value.rank))
    if rank == 0:
        gate.touch()
    return told


def test_a_rank_hears_of_calls_that_rank_0_left_long_ago(tmp_path: Path) -> None:
    """Rank 0 fails, and fails again, and ends, before the other has begun with the first call."""
    told = run_on_ranks(rushes, 2, tmp_path / "ckpt", tmp_path / "gate")
    assert told == [[("InvalidTagError", 0)] * 12] * 2


RULES = [("up", ("tp", None)), ("down", (None, "tp"))]


def counters() -> dict[str, int]:
    """What the system counts of this process."""
    return {k: int(v) for k, v in (line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())}


def counted(counter: str, action: Callable[[], object]) -> int:
    before = counters()
    action()
    return counters()[counter] - before[counter]


def shares_out(rank: int, root: Path) -> dict[str, Any]:
    """Bytes: planned, and as the system counts them."""
    mesh = Mesh(dp=2, tp=2)
    tp = mesh.coordinates(rank)["tp"]
    generator = torch.Generator().manual_seed(1)
    tree = {}
    for i in range(6):
        tree[f"up{i}"] = torch.randn(2048, 512, generator=generator).chunk(2, 0)[tp].contiguous()
        tree[f"down{i}"] = torch.randn(512, 2048, generator=generator).chunk(2, 1)[tp].contiguous()
        tree[f"norm{i}"] = torch.randn(512, generator=generator)
    xla_ckpt.save(root, "warm", {"x": torch.ones(3)})  # imports are read from the disk, too
    saved: list[xla_ckpt.SaveReport] = []
    system = counted("write_bytes", lambda: saved.append(
        xla_ckpt.save(root, "a", {"model": tree}, mesh=mesh, shardings=RULES).result()))  # fmt: skip
    told: dict[str, Any] = {"wrote": (saved[0].nbytes, system), "read": []}

    def like(cut: int) -> dict[str, torch.Tensor]:
        shapes = {"up": (2048 // cut, 512), "down": (512, 2048 // cut), "norm": (512,)}
        return {k: torch.zeros(shapes[k[:-1]]) for k in tree}

    for target, cut in ((Mesh(tp=4), 4), (Mesh(dp=4), 1)):
        # columns of what was stored in columns of twice the width would be read whole
        wanted = {k: v for k, v in like(cut).items() if "down" not in k or cut == 1}
        reports: list[xla_ckpt.LoadReport] = []

        def restore(over: Mesh = target, like: Any = wanted, reports: list[xla_ckpt.LoadReport] = reports) -> None:
            restored = xla_ckpt.restore(root, "a", {"model": like}, mesh=over, shardings=RULES)
            reports.append(restored.report)

        system = counted("rchar", restore)
        told["read"].append((reports[0].needed_bytes, reports[0].read_bytes, system))

    whole = like(1)
    report = xla_ckpt.load_checkpoint(
        root, "a", whole, mesh=Mesh(dp=4), options=xla_ckpt.LoadOptions(replica_read="share")
    ).report
    told["shared"] = report.needed_bytes, report.read_bytes
    for k, v in whole.items():
        assert torch.equal(v if "norm" in k else v.chunk(2, 0 if "up" in k else 1)[tp], tree[k])

    # columns of what was stored whole: alone every rank would read all of it, together they read it once
    downs = {k: v for k, v in whole.items() if "down" in k}
    xla_ckpt.save(root, "whole", downs)
    columns = {k: torch.zeros(512, 512) for k in downs}
    over = {"mesh": Mesh(tp=4), "shardings": RULES}
    alone = xla_ckpt.restore(root, "whole", columns, **over)
    together = xla_ckpt.restore(root, "whole", columns, options=xla_ckpt.LoadOptions(replica_read="share"), **over)
    for k in downs:
        assert torch.equal(together.tree[k], downs[k].chunk(4, 1)[rank])
        assert torch.equal(alone.tree[k], together.tree[k])
    share = together.report
    return {**told, "columns": (share.needed_bytes, share.read_bytes, alone.report.read_bytes)}


def test_bytes_are_shared_out_and_counted_by_the_system(tmp_path: Path) -> None:
    told = run_on_ranks(shares_out, 4, tmp_path / "ckpt")
    total = sum(t["wrote"][0] for t in told)
    assert total == 6 * (2 * 2048 * 512 + 512) * 4
    assert max(t["wrote"][0] for t in told) <= 1.05 * total / 4
    for ours, system in (t["wrote"] for t in told):
        if system:  # zero where the file system does not count (overlay on tmpfs)
            assert ours <= system <= 1.05 * ours + 256 * 1024
    for needed, planned, system in (r for t in told for r in t["read"]):
        assert needed <= planned <= 1.05 * needed
        assert planned <= system <= 1.05 * planned + 512 * 1024  # headers and the manifest
    for needed, share, each in (t["columns"] for t in told):
        assert each == 4 * needed
        assert share <= 1.05 * needed
    shared = [t["shared"] for t in told]
    assert [needed for needed, _ in shared] == [total] * 4
    # The storage is read once, for all four (twice here: live memory is overwritten only after it is verified).
    assert total * 2 <= sum(read for _, read in shared) <= 1.05 * total * 2
    assert max(read for _, read in shared) <= 1.2 * total * 2 / 4


def test_shardings_by_hand() -> None:
    mesh = Mesh(pp=2, dp=4, ep=2, tp=2)
    expert = Sharding((DimSharding(("ep",)), None, DimSharding(("tp",)))).map_local_shape((2, 3, 5), mesh, 3)
    assert expert.shape == (4, 3, 10)
    assert str(expert.pieces[0].global_box) == "[2:4, 0:3, 5:10]"
    assert (expert.replica, expert.replicas) == (0, 2)  # copies lie along edp
    assert Sharding.parse((("tp", 3), None)).dims[0] == DimSharding.from_stride(("tp",), 3)
    assert find_group_axes([0, 2, 4, 6], mesh, 0) == ("dp",)
    assert find_group_axes([0, 4], mesh, 0) == ("edp",)
    assert find_group_axes([0, 3], mesh, 0) is None
    for bad in ("tp", ("tp", "tp"), (("dp", "ep"),), ((1,),), (3,)):
        with pytest.raises(ValueError, match=r".+"):
            Sharding.parse(bad)
