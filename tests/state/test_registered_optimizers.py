"""Optimizers whose states do not lie as their parameters do: on the same topology, and on another one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from tests import xla
from tests.formats.same import as_theirs
from tests.formats.writing import Zero1, as_job, save_as_job
from tests.jobs import run_on_ranks
from xla_ckpt import Mesh, OptimizerSchema
from xla_ckpt.state import optimizer as registered
from xla_ckpt.state.optimizer import get_optimizer_schema

FULL = {"up": torch.arange(48.0).reshape(8, 6), "down": torch.arange(24.0).reshape(6, 4) + 100, "norm": torch.ones(6)}
SPLIT = {"up": 0, "down": 1, "norm": None}
"""Which dim tensor parallelism splits."""


class Special(torch.optim.Optimizer):
    """Has a state of every kind, each a function of the whole parameter: so any rank's part is known."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "rank": 2})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise NotImplementedError("these tests fill its state")


SCHEMA = OptimizerSchema(
    elementwise=["mean"],
    dims={
        "row": (..., -2), "column": (..., -1),  # statistics as Adafactor's
        "left": (0, None), "right": (None, 1), "transposed": (1, 0),  # factors of low rank
    },
    replicated=["basis", "scale"],
    host=["seen"],
    per_rank={"error": None, "seed": lambda states, rank, world: sum(states) + 1000 * rank},
)  # fmt: skip


@pytest.fixture(autouse=True)
def nobody_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registered, "_registered_schemas", {})


@pytest.fixture
def known(nobody_registered: None) -> None:
    xla_ckpt.register_optimizer(Special, SCHEMA)


def part(name: str, mesh: Mesh, rank: int) -> torch.Tensor:
    dim = SPLIT[name]
    whole = FULL[name]
    return whole.clone() if dim is None else whole.chunk(mesh.tp, dim)[mesh.coordinates(rank)["tp"]].contiguous()


def states_of(name: str, mesh: Mesh, rank: int) -> dict[str, Any]:
    """The states that a rank has in common with others."""
    full, mine = FULL[name], part(name, mesh, rank)
    tp = mesh.coordinates(rank)["tp"]

    def along(value: torch.Tensor, dim: int, of: int) -> torch.Tensor:
        """A rank's part of a state whose dim `dim` is the parameter's dim `of`."""
        return value.chunk(mesh.tp, dim)[tp].contiguous() if SPLIT[name] == of else value.clone()

    made: dict[str, Any] = {
        "mean": mine + 0.5, "scale": full.norm(), "seen": torch.tensor(3.0), "basis": torch.full((2, 2), full.sum()),
    }  # fmt: skip
    if full.ndim == 2:
        made["row"] = along(full.mean(1), 0, 0)
        made["column"] = along(full.mean(0), 0, 1)
        made["left"] = along(full[:, :2].clone(), 0, 0)
        made["right"] = along(full[:2].clone(), 1, 1)
        made["transposed"] = mine.t().contiguous() * 2
    return made


def built(mesh: Mesh, rank: int, *, kind: Callable[[Any], Any] = Special, fill: bool = True) -> tuple[Any, Any]:
    model = torch.nn.Module()
    for name, dim in SPLIT.items():
        value = part(name, mesh, rank)
        parameter = torch.nn.Parameter(value if fill else torch.zeros_like(value))
        if dim is not None:
            parameter.tensor_model_parallel, parameter.partition_dim = True, dim  # type: ignore[attr-defined]
        model.register_parameter(name, parameter)
    optimizer = kind(model.parameters())
    for name, parameter in model.named_parameters() if fill else ():
        optimizer.state[parameter] = states_of(name, mesh, rank)
    return model, optimizer


def with_own(mesh: Mesh, rank: int) -> tuple[Any, Any]:
    """With states of each rank's own: tensors of the size of its part, plain values, and one of no parameter."""
    model, optimizer = built(mesh, rank)
    for parameter in model.parameters():
        optimizer.state[parameter]["error"] = [torch.full_like(parameter.data, rank + 0.25), rank]
        optimizer.state[parameter]["seed"] = rank + 1
    optimizer.state["seed"] = 10 * (rank + 1)
    return model, optimizer


def wrong(optimizer: Any, model: Any, mesh: Mesh, rank: int) -> list[str]:
    """What a rank has not got right of what ranks have in common."""
    bad = []
    for name, parameter in model.named_parameters():
        held, wanted = optimizer.state[parameter], states_of(name, mesh, rank)
        bad += [f"{name}: {sorted(held)}"] if set(wanted) - set(held) else []
        bad += [f"{name} {k}" for k, v in wanted.items() if k in held and not torch.equal(held[k], v)]
    return bad


MESHES = [Mesh(), Mesh(tp=2), Mesh(dp=2, tp=2), Mesh(dp=2)]


@pytest.mark.parametrize("source", MESHES, ids=str)
@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "stepped"])
def test_any_topology_to_any(
    source: Mesh, fresh: bool, known: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_as_job(monkeypatch, source, tmp_path, "a", lambda r: dict(zip(("model", "optimizer"), built(source, r))))
    for target in MESHES:
        loaded = [built(target, rank, fill=not fresh) for rank in range(target.size)]
        for _, optimizer in () if fresh else loaded:
            for held in optimizer.state.values():
                held.update({k: torch.zeros_like(v) for k, v in held.items()})
        as_job(monkeypatch, target, "load", lambda r: xla_ckpt.load_checkpoint(tmp_path, "a", *loaded[r]).user_content)  # noqa: B023
        assert [wrong(o, m, target, rank) for rank, (m, o) in enumerate(loaded)] == [[]] * target.size, target
    stored = xla_ckpt.restore(tmp_path, "a").tree["optimizer"]["state"]
    assert torch.equal(stored["up"]["row"], FULL["up"].mean(1))
    assert torch.equal(stored["down"]["column"], FULL["down"].mean(0))
    assert torch.equal(stored["down"]["transposed"], FULL["down"].t() * 2)
    assert stored["up"]["basis"].shape == (2, 2)


def test_nothing_of_it_is_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who registers nothing is told of it by the save, before a tag is there."""
    mesh = Mesh(tp=2)
    with pytest.raises(xla_ckpt.DivergentReplicasError) as caught:
        save_as_job(monkeypatch, mesh, tmp_path, "a", lambda r: dict(zip(("model", "optimizer"), built(mesh, r))))
    assert str(caught.value.leaf).startswith("optimizer/state/")
    assert "register_optimizer" in str(caught.value.hint)
    assert not xla_ckpt.list_tags(tmp_path)


class Unregistered(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise NotImplementedError


def unregistered(mesh: Mesh, rank: int, *, fill: bool) -> tuple[Any, Any]:
    """States of other shapes than their parameters', each the same on all ranks."""
    model, optimizer = built(mesh, rank, kind=Unregistered, fill=False)
    for parameter in model.parameters() if fill else ():
        optimizer.state[parameter] = {
            "basis": torch.arange(6.0).reshape(2, 3), "factor": torch.arange(8.0).reshape(8, 1),
            "scale": torch.tensor(5.0), "flat": torch.arange(7), "list": [torch.ones(3), 4],
        }  # fmt: skip
    return model, optimizer


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_what_nobody_registered_loads_on_the_same_topology(
    mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = [unregistered(mesh, rank, fill=True) for rank in range(mesh.size)]
    save_as_job(monkeypatch, mesh, tmp_path, "a", lambda r: dict(zip(("model", "optimizer"), states[r])))
    loaded = [unregistered(mesh, rank, fill=False) for rank in range(mesh.size)]
    as_job(monkeypatch, mesh, "load", lambda r: xla_ckpt.load_checkpoint(tmp_path, "a", *loaded[r]).user_content)
    for (model, optimizer), (_, before) in zip(loaded, states, strict=True):
        for parameter, wanted in zip(model.parameters(), before.state.values(), strict=True):
            held = optimizer.state[parameter]
            assert {k: str(v) for k, v in held.items()} == {k: str(v) for k, v in wanted.items()}


def test_statistics_that_keep_their_dims_reach_a_fresh_optimizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own Adafactor: a rank got those of all rows, where its optimizer had not stepped yet."""
    saved, loaded = Mesh(tp=2), Mesh(tp=4)

    def of(mesh: Mesh, rank: int, fill: bool) -> tuple[Any, Any]:
        mine = FULL["up"].chunk(mesh.tp)[rank].contiguous()
        weight = torch.nn.Parameter(mine if fill else torch.zeros_like(mine))
        weight.tensor_model_parallel, weight.partition_dim = True, 0  # type: ignore[attr-defined]
        model = torch.nn.Module()
        model.register_parameter("w", weight)
        optimizer = torch.optim.Adafactor(model.parameters())
        if fill:
            rows = FULL["up"][:, :1].chunk(mesh.tp)[rank].clone()
            optimizer.state[weight] = {"step": torch.tensor(1.0), "row_var": rows, "col_var": FULL["up"][:1].clone()}
        return model, optimizer

    save_as_job(monkeypatch, saved, tmp_path, "a", lambda r: dict(zip(("model", "optimizer"), of(saved, r, True))))
    for mesh in (saved, loaded, Mesh()):
        made = [of(mesh, rank, False) for rank in range(mesh.size)]
        as_job(monkeypatch, mesh, "load", lambda r: xla_ckpt.load_checkpoint(tmp_path, "a", *made[r]).user_content)  # noqa: B023
        for rank, (model, optimizer) in enumerate(made):
            held = optimizer.state[model.w]
            assert torch.equal(held["row_var"], FULL["up"][:, :1].chunk(mesh.tp)[rank])
            assert torch.equal(held["col_var"], FULL["up"][:1])


# States that every rank has its own of.


def test_each_rank_gets_its_own_back(known: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for mesh in MESHES:
        save_as_job(
            monkeypatch,
            mesh,
            tmp_path,
            str(mesh.size),
            lambda r: dict(zip(("model", "optimizer"), with_own(mesh, r))),  # noqa: B023
        )
        loaded = [built(mesh, rank, fill=False) for rank in range(mesh.size)]
        as_job(
            monkeypatch,
            mesh,
            "load",
            lambda r: xla_ckpt.load_checkpoint(tmp_path, str(mesh.size), *loaded[r]).user_content,
        )  # noqa: B023, E501
        for rank, (model, optimizer) in enumerate(loaded):
            assert wrong(optimizer, model, mesh, rank) == []
            assert optimizer.state["seed"] == 10 * (rank + 1)
            for parameter in model.parameters():
                error, number = optimizer.state[parameter]["error"]
                assert (number, optimizer.state[parameter]["seed"]) == (rank, rank + 1)
                assert torch.equal(error, torch.full_like(parameter, rank + 0.25))


def test_a_rank_that_had_none_gets_none(known: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the same mesh nothing is made of what others had, though a function is there."""
    mesh = Mesh(dp=2)

    def of(rank: int) -> dict[str, Any]:
        model, optimizer = built(mesh, rank)
        if rank == 1:
            optimizer.state[model.up]["seed"] = 7
        return {"model": model, "optimizer": optimizer}

    save_as_job(monkeypatch, mesh, tmp_path, "a", of)
    loaded = [built(mesh, rank, fill=False) for rank in range(2)]
    as_job(monkeypatch, mesh, "load", lambda r: xla_ckpt.load_checkpoint(tmp_path, "a", *loaded[r]).user_content)
    assert [optimizer.state[model.up].get("seed") for model, optimizer in loaded] == [None, 7]


def test_pipeline_stages_have_their_own_parameters(
    known: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = Mesh(pp=2, dp=2)

    def stage(rank: int, fill: bool) -> tuple[Any, Any]:
        name = f"layer{mesh.coordinates(rank)['pp']}"
        model = torch.nn.ModuleDict({name: torch.nn.Linear(3, 2)})
        optimizer = Special(model.parameters())
        for parameter in model.parameters() if fill else ():
            parameter.data.fill_(mesh.coordinates(rank)["pp"])
            optimizer.state[parameter] = {"error": torch.full((rank + 1,), float(rank)), "seed": rank}
        return model, optimizer

    save_as_job(monkeypatch, mesh, tmp_path, "a", lambda r: dict(zip(("model", "optimizer"), stage(r, True))))
    loaded = [stage(rank, False) for rank in range(4)]
    as_job(monkeypatch, mesh, "load", lambda r: xla_ckpt.load_checkpoint(tmp_path, "a", *loaded[r]).user_content)
    for rank, (_, optimizer) in enumerate(loaded):
        for held in optimizer.state.values():
            assert (held["error"].tolist(), held["seed"]) == ([rank] * (rank + 1), rank)
    assert xla_ckpt.verify(tmp_path, "a").ok


def test_another_topology_needs_a_function(known: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one of as many ranks: a rank of the same number has other parts of the parameters there."""
    source = Mesh(dp=2)
    save_as_job(monkeypatch, source, tmp_path, "a", lambda r: dict(zip(("model", "optimizer"), with_own(source, r))))
    for target in (Mesh(tp=2), Mesh(dp=2, tp=2), Mesh()):
        loaded = [built(target, rank, fill=False) for rank in range(target.size)]
        for model, optimizer in loaded:
            optimizer.state[model.up]["error"] = "kept"
        load: Callable[..., Any] = lambda r, **more: xla_ckpt.load_checkpoint(tmp_path, "a", *loaded[r], **more)  # noqa: B023, E731
        with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="each of 2 ranks had its own of") as caught:
            as_job(monkeypatch, target, "load", lambda r: load(r).user_content)  # noqa: B023
        assert "optimizer/state/up/error" in str(caught.value)
        assert "seed" not in str(caught.value)
        assert not loaded[0][0].up.any()
        as_job(monkeypatch, target, "load", lambda r: load(r, strict=False).user_content)  # noqa: B023
        for rank, (model, optimizer) in enumerate(loaded):
            assert wrong(optimizer, model, target, rank) == []
            assert optimizer.state[model.up]["error"] == "kept"
            assert "error" not in optimizer.state[model.down]
            assert optimizer.state[model.up]["seed"] == 1 + 2 + 1000 * rank
            assert optimizer.state["seed"] == 10 + 20 + 1000 * rank
    notes = xla_ckpt.explain(tmp_path, "a", mesh="tp=2").notes
    assert any("optimizer/state_per_rank holds state of each of 2 ranks" in note for note in notes)
    assert not any("state_per_rank" in note for note in xla_ckpt.explain(tmp_path, "a", mesh="dp=2").notes)


def test_a_function_may_make_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    xla_ckpt.register_optimizer(
        "Special", OptimizerSchema(per_rank={"error": lambda states, rank, world: torch.stack(states).sum(0) / world})
    )
    source, target = Mesh(dp=2), Mesh(dp=4)

    def of(mesh: Mesh, rank: int, fill: bool) -> tuple[Any, Any]:
        model = torch.nn.Linear(3, 2)
        optimizer = Special(model.parameters())
        for parameter in model.parameters():
            parameter.data.zero_()
            if fill:
                optimizer.state[parameter] = {"error": torch.full_like(parameter.data, rank + 1.0)}
        return model, optimizer

    save_as_job(monkeypatch, source, tmp_path, "a", lambda r: dict(zip(("model", "optimizer"), of(source, r, True))))
    loaded = [of(target, rank, False) for rank in range(4)]
    as_job(monkeypatch, target, "load", lambda r: xla_ckpt.load_checkpoint(tmp_path, "a", *loaded[r]).user_content)
    for model, optimizer in loaded:
        assert torch.equal(optimizer.state[model.weight]["error"], torch.full((2, 3), 0.75))


def test_a_program_that_registered_nothing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    xla_ckpt.register_optimizer(Special, OptimizerSchema(per_rank=["own"]))
    model, optimizer = torch.nn.Linear(3, 2), None
    optimizer = Special(model.parameters())
    optimizer.state[model.weight] = {"own": torch.ones(2), "mean": torch.ones(2, 3)}
    xla_ckpt.save_checkpoint(tmp_path, "a", model, optimizer)
    monkeypatch.setattr(registered, "_registered_schemas", {})
    fresh = Special(model.parameters())
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="each rank's own is stored"):
        xla_ckpt.load_checkpoint(tmp_path, "a", model, fresh)
    xla_ckpt.load_checkpoint(tmp_path, "a", model, fresh, strict=False)
    assert list(fresh.state[model.weight]) == ["mean"]


@pytest.mark.parametrize("layout", ["xser", "pt"])
def test_their_layouts_have_no_place_for_it(
    layout: str, known: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = Mesh(dp=2)
    states = {r: dict(zip(("model", "optimizer"), with_own(mesh, r))) for r in range(2)}
    with pytest.raises(xla_ckpt.UnsupportedStateError, match="every rank has its own of"):
        save_as_job(monkeypatch, mesh, tmp_path / "no", "a", states.__getitem__, layout=layout)
    save_as_job(monkeypatch, mesh, tmp_path / "old", "a", states.__getitem__, layout=[layout, "native"])
    with pytest.raises(xla_ckpt.UnsupportedStateError, match="every rank has its own of"):
        xla_ckpt.convert(tmp_path / "old", tmp_path / "new", to=layout, mesh="dp=2")
    xla_ckpt.convert(tmp_path / "old", tmp_path / "same", to="native", mesh="dp=2")
    model, optimizer = built(Mesh(), 0, fill=False)
    xla_ckpt.load_checkpoint(tmp_path / "same", "a", model, optimizer, strict=False)
    assert optimizer.state["seed"] == 30
    xla_ckpt.convert(tmp_path / "old", tmp_path / "other", to="native", mesh="tp=2")
    loaded = [built(Mesh(tp=2), rank, fill=False) for rank in range(2)]
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="each of 2 ranks had its own of"):
        as_job(
            monkeypatch,
            Mesh(tp=2),
            "load",
            lambda r: xla_ckpt.load_checkpoint(tmp_path / "other", "a", *loaded[r]).user_content,
        )


# The layouts of neuronx-distributed, and its ZeRO-1 optimizer.


@pytest.mark.parametrize("layout", ["xser", "pt"])
def test_through_their_files(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With our manifest and without it; and converted from our own layout."""
    xla_ckpt.register_optimizer(Special, replace(SCHEMA, per_rank=()))
    mesh = Mesh(dp=2, tp=2)
    states = {r: dict(zip(("model", "optimizer"), built(mesh, r))) for r in range(4)}
    save_as_job(monkeypatch, mesh, tmp_path / "theirs", "a", states.__getitem__, layout=layout)
    save_as_job(monkeypatch, mesh, tmp_path / "ours", "a", states.__getitem__)
    xla_ckpt.convert(tmp_path / "ours", tmp_path / "converted", to=layout, mesh="dp=2,tp=2")
    for root in ("theirs", "converted"):
        for manifest in (True, False):
            if not manifest:
                as_theirs(tmp_path / root / "a")
            for target in MESHES:
                loaded = [built(target, rank, fill=False) for rank in range(target.size)]
                as_job(
                    monkeypatch,
                    target,
                    "load",
                    lambda r: xla_ckpt.load_checkpoint(tmp_path / root, "a", *loaded[r]).user_content,
                )  # noqa: B023, E501
                told = [wrong(o, m, target, rank) for rank, (m, o) in enumerate(loaded)]
                assert told == [[]] * target.size, (root, manifest, target)


class Inner(Special):
    """The optimizer that a ZeRO-1 optimizer of these tests wraps."""


def dealt(mesh: Mesh, rank: int, *, fill: bool) -> tuple[Any, Any, Any]:
    model, _ = built(mesh, rank, fill=fill)
    at = mesh.coordinates(rank)["dp"]

    def rows(value: torch.Tensor) -> torch.Tensor:
        n = -(-value.shape[0] // mesh.dp)
        padded = torch.cat([value, torch.zeros(n * mesh.dp - value.shape[0], *value.shape[1:])])
        return padded[at * n : (at + 1) * n].clone()

    pairs = [(p, torch.nn.Parameter(rows(p.data))) for p in (model.up, model.norm)]
    optimizer = Zero1([pairs], [{}], mesh, rank)
    optimizer.base_optimizer.__class__ = Inner
    wanted = {}
    for (parameter, shard), name in zip(pairs, ("up", "norm"), strict=True):
        whole = states_of(name, mesh, rank)
        wanted[shard] = {k: rows(whole[k]) for k in ("mean", "row", "left") if k in whole}
        wanted[shard] |= {k: whole[k] for k in ("scale", "basis", "seen")}
        if fill:
            optimizer.base_optimizer.state[shard] = wanted[shard]
    return model, optimizer, wanted


def test_zero1_deals_out_the_rows_of_what_has_rows(
    known: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Mesh(dp=2, tp=2)
    save_as_job(
        monkeypatch, source, tmp_path, "a", lambda r: dict(zip(("model", "optimizer"), dealt(source, r, fill=True)))
    )
    stored = xla_ckpt.restore(tmp_path, "a").tree["optimizer"]["state"]["up"]
    assert torch.equal(stored["row"], FULL["up"].mean(1))
    assert torch.equal(stored["left"], FULL["up"][:, :2])
    for target in (source, Mesh(dp=4), Mesh(dp=3), Mesh(dp=1, tp=2)):
        loaded = [dealt(target, rank, fill=False) for rank in range(target.size)]
        as_job(
            monkeypatch, target, "load", lambda r: xla_ckpt.load_checkpoint(tmp_path, "a", *loaded[r][:2]).user_content
        )  # noqa: B023, E501
        for rank, (_, optimizer, wanted) in enumerate(loaded):
            for shard, states in wanted.items():
                held = optimizer.base_optimizer.state[shard]
                assert sorted(held) == sorted(states)
                assert [k for k, v in states.items() if not torch.equal(held[k], v)] == [], (target, rank)


# Real processes, devices, and mistakes.


def as_rank(rank: int, root: Path) -> list[Any]:
    """On each of four real ranks: there and back over the same mesh, and over another one."""
    xla_ckpt.register_optimizer(f"{Special.__module__}.Special", SCHEMA)
    source, target = Mesh(dp=2, tp=2), Mesh(tp=2, dp=2, cp=1)
    model, optimizer = with_own(source, rank)
    xla_ckpt.save_checkpoint(root, "a", model, optimizer, mesh=source, async_save=True).result()
    told: list[Any] = []
    for mesh, strict in ((target, True), (Mesh(dp=4), False)):
        again, fresh = built(mesh, rank, fill=False)
        xla_ckpt.load_checkpoint(root, "a", again, fresh, mesh=mesh, strict=strict)
        told += [wrong(fresh, again, mesh, rank), fresh.state[again.up]["seed"], "error" in fresh.state[again.up]]
    return told


def test_a_real_job(tmp_path: Path) -> None:
    told = run_on_ranks(as_rank, 4, tmp_path / "ckpt")
    assert told == [[[], rank + 1, True, [], 1 + 2 + 3 + 4 + 1000 * rank, False] for rank in range(4)]
    assert xla_ckpt.verify(tmp_path / "ckpt").ok


def test_the_class_its_name_and_those_derived_from_it() -> None:
    class Derived(Special):
        pass

    optimizer = Derived(torch.nn.Linear(1, 1).parameters())
    one, two, three = OptimizerSchema(host=["a"]), OptimizerSchema(host=["b"]), OptimizerSchema(host=["c"])
    xla_ckpt.register_optimizer("Special", one)
    assert get_optimizer_schema(optimizer) is one
    xla_ckpt.register_optimizer(f"{Special.__module__}.Special", two)
    assert get_optimizer_schema(optimizer) is two
    xla_ckpt.register_optimizer(Derived, three)
    assert get_optimizer_schema(optimizer) is three
    assert get_optimizer_schema(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])) is get_optimizer_schema({})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"host": "step"}, "strings, in a tuple or a set"),
        ({"elementwise": [3]}, "strings, in a tuple or a set"),
        ({"elementwise": ["a"], "host": ["a"]}, "lie in two ways"),
        ({"dims": {"a": (0, 0)}}, "make no sense"),
        ({"dims": {"a": (..., 0, ...)}}, "make no sense"),
        ({"dims": {"a": ("tp",)}}, "make no sense"),
    ],
)
def test_schemas_that_make_no_sense(arguments: Any, message: str) -> None:
    with pytest.raises(xla_ckpt.UsageError, match=message):
        OptimizerSchema(**arguments)


def test_registering_something_else() -> None:
    with pytest.raises(xla_ckpt.UsageError, match="named by its class"):
        xla_ckpt.register_optimizer(Special([torch.nn.Parameter(torch.ones(1))]), SCHEMA)  # type: ignore[arg-type]
    with pytest.raises(xla_ckpt.UsageError, match="is an OptimizerSchema"):
        xla_ckpt.register_optimizer(Special, {"host": ["a"]})  # type: ignore[arg-type]


@pytest.mark.parametrize(("key", "shape"), [("mean", (2,)), ("row", (3,)), ("left", (5, 2)), ("right", (2,))])
def test_a_state_that_is_not_what_was_registered(key: str, shape: Any, known: None, tmp_path: Path) -> None:
    """Refused by a save; a load of what was saved before refuses it, too, and changes nothing."""
    model, optimizer = built(Mesh(), 0)
    optimizer.state[model.up][key] = torch.ones(shape)
    with pytest.raises(xla_ckpt.UsageError, match="what is registered of the optimizer does not fit") as caught:
        xla_ckpt.save_checkpoint(tmp_path, "a", model, optimizer)
    assert caught.value.leaf == f"optimizer/state/up/{key}"
    xla_ckpt.register_optimizer(Special, OptimizerSchema())
    xla_ckpt.save_checkpoint(tmp_path, "a", model, optimizer)
    xla_ckpt.register_optimizer(Special, SCHEMA)
    again, fresh = built(Mesh(), 0, fill=False)
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError):
        xla_ckpt.load_checkpoint(tmp_path, "a", again, fresh)
    assert not again.up.any()


@pytest.mark.xla
def test_a_kept_host_state_and_a_replicated_one_on_a_device(known: None, tmp_path: Path) -> None:
    model, optimizer = built(Mesh(), 0)
    xla_ckpt.save_checkpoint(tmp_path, "a", model, optimizer)
    again = torch.nn.Module()
    for name, value in FULL.items():
        again.register_parameter(name, torch.nn.Parameter(torch.zeros_like(value).to(xla.device())))
    fresh = Special(again.parameters())
    xla_ckpt.load_checkpoint(tmp_path, "a", again, fresh)
    places = {key: value.device.type for key, value in fresh.state[again.up].items()}
    assert places.pop("seen") == "cpu"
    assert set(places.values()) == {"xla"}
    for parameter in again.parameters():
        fresh.state[parameter] = {key: value.cpu() for key, value in fresh.state[parameter].items()}
    assert wrong(fresh, again, Mesh(), 0) == []
