"""Arrays of neuronx-distributed's of which nobody says how they were split: their copies are compared."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from tests.formats.gold import Gold, Target, as_rank, cases
from tests.formats.same import as_theirs
from tests.formats.test_nxd_layouts import rank_file
from tests.formats.writing import LAYOUTS, State, Zero1, as_job, save_as_job
from tests.jobs import run_on_ranks
from tests.runs import names_in
from xla_ckpt import Mesh
from xla_ckpt.cli.main import main
from xla_ckpt.storage.local_file import LocalFileReader

FUSED = pytest.mark.parametrize(("case", "tag"), cases(fused=True))
QKV = "model.layers.0.self_attn.qkv_proj.weight_qkv"


# What neuronx-distributed wrote: weight_qkv, whose attributes it loses.


@FUSED
@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "tp=2", "dp=3,tp=2"])
def test_a_job_over_the_same_tp_ranks_has_each_ranks_own(
    case: str, tag: str, mesh: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Model, states and master weights, with ZeRO-1 and without."""
    gold, over = Gold(case, tag), Mesh.parse(mesh)
    for zero in (True, False):
        states = [State(gold, over, rank, zero=zero, layers=False) for rank in range(over.size)]
        with caplog.at_level(logging.WARNING):
            as_job(
                monkeypatch,
                over,
                "load",
                lambda rank: (
                    xla_ckpt.load_checkpoint(gold.root, tag, states[rank].model, states[rank].optimizer).user_content
                ),
            )
        assert [state.differences() for state in states] == [[]] * over.size
        (told,) = [r.getMessage() for r in caplog.records if "each rank gets its own" in r.getMessage()]
        assert f"model/{QKV}" in told
        caplog.clear()


@FUSED
@pytest.mark.parametrize("mesh", ["tp=1", "dp=2", "tp=4", "dp=2,ep=2,tp=2"])
def test_any_other_job_is_told_what_it_is_about(
    case: str, tag: str, mesh: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gold, over = Gold(case, tag), Mesh.parse(mesh)
    local = torch.zeros_like(gold.part(QKV, gold.truth["params"][QKV], Mesh(tp=2), 0))
    targets = [Target(gold, Mesh(tp=2), 0, layers=False) for _ in range(over.size)]
    errors: dict[int, Any] = {}

    def noted(rank: int, load: Callable[[int], Any]) -> None:
        try:
            load(rank)
        except xla_ckpt.IncompatibleCheckpointError as error:
            errors[rank] = error
            raise

    for load in (
        lambda r: xla_ckpt.restore(gold.root, tag, {"model": {QKV: local}}).tree,
        lambda r: xla_ckpt.load_checkpoint(gold.root, tag, targets[r].model, targets[r].optimizer).user_content,
    ):
        with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="different tensors of this name"):
            as_job(monkeypatch, over, "load", lambda rank: noted(rank, load))  # noqa: B023
        assert (len(errors), len({str(e) for e in errors.values()})) == (over.size, 1)
        error = errors[0]
        assert (error.tag, error.path) == (tag, str(gold.root))
        assert "(tp 1) differs from (tp 0)" in str(error.found)
        is_restore = "restore" in load.__code__.co_names
        said = "like= (ArraySpec)" if is_restore else "model= (--like)"
        for words in (said, "shardings=", "docs/parallelism.md", "A job of tp=2, ep=1"):
            assert words in str(error.hint)
        if is_restore:
            assert error.leaf == f"model/{QKV}"
            assert str(error.found).startswith(f"{list(local.shape)} on each rank")
        errors.clear()
    assert all((p == 7).all() for target in targets for p in target.parameters.values())


@FUSED
def test_a_rule_is_taken_at_its_word(case: str, tag: str) -> None:
    gold = Gold(case, tag)
    first = gold.part(QKV, gold.truth["params"][QKV], Mesh(tp=2), 0)
    like = {"model": {QKV: torch.zeros_like(first)}}
    assert torch.equal(xla_ckpt.restore(gold.root, tag, like, shardings=[("qkv", None)]).tree["model"][QKV], first)


@FUSED
def test_specs_and_parts_of_larger_arrays_are_not_filled_rank_by_rank(
    case: str, tag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An array of a spec, or a DTensor, is one array for all ranks: ranks must not have different values of it."""
    gold, mesh = Gold(case, tag), Mesh(tp=2)
    own = gold.part(QKV, gold.truth["params"][QKV], mesh, 1)
    as_rank(monkeypatch, mesh, 1)
    found = xla_ckpt.restore(gold.root, tag, {"model": {QKV: torch.zeros_like(own)}}).tree
    assert torch.equal(found["model"][QKV], own)
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="different tensors of this name"):
        xla_ckpt.restore(gold.root, tag, {"model": {QKV: xla_ckpt.ArraySpec(own.shape, own.dtype)}})


def built_for_one_rank() -> Any:
    """As a program builds the model of one tp rank, for the command line."""
    (case, tag), *_ = cases(fused=True)
    target = Target(Gold(case, tag), Mesh(tp=2), 0, layers=False)
    return target.model, target.optimizer


@FUSED
def test_tools_say_the_same(case: str, tag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gold = Gold(case, tag)
    target = Target(gold, Mesh(tp=2), 0, layers=False)
    given: dict[str, Any] = {"model": target.model, "optimizer": target.optimizer}
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="different tensors of this name") as caught:
        xla_ckpt.convert(gold.root, tmp_path / "native", **given)
    assert str(caught.value.leaf).startswith("model/")
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="different tensors of this name"):
        xla_ckpt.export_hf(gold.root, tmp_path / "hf", model=target.model)
    assert not names_in(tmp_path)
    explained = xla_ckpt.explain(gold.root, mesh="tp=2", **given)
    assert not explained.ok
    assert any("different tensors of this name" in str(p) for p in explained.problems)
    assert xla_ckpt.verify(gold.root).ok  # the files are whole: what is missing is what nobody wrote down
    if "small" in case:
        like = ["--like", f"{__name__}:built_for_one_rank"]
        assert main(["show", str(gold.root), "--leaf", "model/*", *like]) == 0
        assert "different tensors of this name" in capsys.readouterr().out
        assert main(["explain", str(gold.root), "--mesh", "tp=2", *like]) == 1
        assert "different tensors of this name" in capsys.readouterr().out
        assert main(["verify", str(gold.root)]) == 0


# Small states of the tests' own, in both layouts and with both kinds of optimizer.


class Tied(torch.nn.Module):
    """An embedding that is the head, too, and a norm; one rank's part of them."""

    def __init__(self, mesh: Mesh, rank: int, *, blank: bool = False) -> None:
        super().__init__()
        tp = mesh.coordinates(rank)["tp"]
        self.embed, self.head = torch.nn.Module(), torch.nn.Module()
        part = torch.arange(24.0).reshape(8, 3).chunk(mesh.tp)[tp]
        self.embed.weight = torch.nn.Parameter(torch.zeros_like(part) if blank else part.clone())
        self.head.weight = self.embed.weight
        self.norm = torch.nn.Parameter(torch.zeros(3) if blank else torch.full((3,), 5.0))
        self.values = {"embed.weight": part, "norm": torch.full((3,), 5.0)}

    def attributes(self) -> Tied:
        self.embed.weight.tensor_model_parallel = True
        self.embed.weight.partition_dim, self.embed.weight.partition_stride = 0, 1
        return self


def rows(value: torch.Tensor, mesh: Mesh, rank: int) -> torch.Tensor:
    return value.chunk(mesh.dp)[mesh.coordinates(rank)["dp"]].clone()


def optimizer_of(model: Tied, mesh: Mesh, rank: int, *, zero: bool, blank: bool = False) -> Any:
    """With states that are the weight plus 1 and plus 2, and master weights that are the weight plus 0.5."""
    parameters = {"embed.weight": model.embed.weight, "norm": model.norm}
    parameters = {n: p for n, p in parameters.items() if not zero or n == "embed.weight"}
    cut = (lambda v: rows(v, mesh, rank)) if zero else torch.clone
    if not zero:
        made: Any = torch.optim.AdamW(parameters.values())
        keys = dict(parameters)
    else:
        keys = {n: torch.nn.Parameter(cut(torch.zeros_like(model.values[n]))) for n in parameters}
        made = Zero1([[(parameters[n], keys[n]) for n in parameters]], [{}], mesh, rank, masters=True)
    inner = made.base_optimizer if zero else made
    for name, key in keys.items() if not blank else ():
        value = model.values[name]
        if zero:
            key.data = cut(value + 0.5)
        inner.state[key] = {"step": torch.tensor(3.0), "exp_avg": cut(value + 1), "exp_avg_sq": cut(value + 2)}
    made.keys, made.inner = keys, inner
    return made


def wrong(model: Tied, optimizer: Any, mesh: Mesh, rank: int, *, zero: bool) -> list[str]:
    cut = (lambda v: rows(v, mesh, rank)) if zero else torch.clone
    bad = [
        n
        for n, p in (("embed.weight", model.embed.weight), ("norm", model.norm))
        if not torch.equal(p, model.values[n])
    ]
    for name, key in optimizer.keys.items():
        state = optimizer.inner.state[key]
        if zero and not torch.equal(key, cut(model.values[name] + 0.5)):
            bad.append(f"master of {name}")
        for kind, more in (("exp_avg", 1), ("exp_avg_sq", 2)):
            if not torch.equal(state[kind], cut(model.values[name] + more)):
                bad.append(f"{kind} of {name}")
    return bad


def written(monkeypatch: pytest.MonkeyPatch, root: Path, mesh: Mesh, layout: str, *, zero: bool) -> None:
    def state(rank: int) -> dict[str, Any]:
        model = Tied(mesh, rank).attributes()
        return {"model": model, "optimizer": optimizer_of(model, mesh, rank, zero=zero)}

    save_as_job(monkeypatch, mesh, root, "t", state, layout=layout)
    as_theirs(root / "t")


@LAYOUTS
@pytest.mark.parametrize("zero", [False, True], ids=["plain", "zero1"])
def test_a_tied_embedding_that_lost_its_attributes(
    layout: str, zero: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = Mesh(dp=2, tp=2)
    written(monkeypatch, tmp_path, mesh, layout, zero=zero)

    def loaded(over: Mesh, rank: int, part_of: Mesh, **options: Any) -> list[str]:
        model = Tied(part_of, rank % part_of.size, blank=True)
        optimizer = optimizer_of(model, part_of, rank % part_of.size, zero=zero, blank=True)
        xla_ckpt.load_checkpoint(tmp_path, "t", model, optimizer, **options)
        return wrong(model, optimizer, part_of, rank % part_of.size, zero=zero)

    for replica_read in ("each",):
        found = as_job(
            monkeypatch,
            mesh,
            "load",
            lambda r: loaded(mesh, r, mesh, options=xla_ckpt.LoadOptions(replica_read=replica_read)),
        )
        assert found == [[]] * 4
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="different tensors of this name") as caught:
        as_job(monkeypatch, Mesh(dp=2), "load", lambda r: loaded(Mesh(dp=2), r, Mesh(dp=2, tp=2)))
    assert "weight" in str(caught.value.leaf)
    for part in ("model", "optimizer"):
        alone = Tied(mesh, 0, blank=True)
        given = {"model": alone} if part == "model" else {"optimizer": optimizer_of(alone, mesh, 0, zero=False)}
        if part == "optimizer" and zero:
            continue  # an optimizer alone has no names
        with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match=r"different tensors|ambiguous"):
            xla_ckpt.load_checkpoint(tmp_path, "t", **given)
    # With attributes, with a rule, or from the whole shape, any topology has it, whole.
    whole = Tied(Mesh(), 0, blank=True)
    xla_ckpt.load_checkpoint(tmp_path, "t", whole)
    assert torch.equal(whole.embed.weight, whole.values["embed.weight"])
    assert as_job(
        monkeypatch, mesh, "load", lambda r: loaded(mesh, r, mesh, shardings=[("embed|head", ("tp", None))])
    ) == [[]] * 4  # fmt: skip


@pytest.mark.parametrize("axis", ["tp", "ep"])
def test_equal_copies_are_one_array_for_any_job(
    axis: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for i in range(2):
        rank_file(tmp_path / "a/model", {"norm": torch.full((3,), 2.0), "own": torch.full((3,), float(i))}, **{axis: i})
    (tmp_path / "a/done").write_text("1")
    for mesh in (Mesh(), Mesh(tp=4)):
        as_rank(monkeypatch, mesh, mesh.size - 1)
        found = xla_ckpt.restore(tmp_path, "a", {"model": {"norm": torch.zeros(3)}}).tree
        assert found["model"]["norm"].tolist() == [2, 2, 2]
        model = {"norm": torch.zeros(3), "own": torch.zeros(3)}
        with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match=rf"\({axis} 1\) differs from \({axis} 0\)"):
            xla_ckpt.load_checkpoint(tmp_path, "a", model)
        assert [v.tolist() for v in model.values()] == [[0] * 3] * 2
    with caplog.at_level(logging.WARNING):
        for rank in range(2):
            as_rank(monkeypatch, Mesh(tp=2) if axis == "tp" else Mesh(dp=2, ep=2), rank)
            model = {"norm": torch.zeros(3), "own": torch.zeros(3)}
            xla_ckpt.load_checkpoint(tmp_path, "a", model)
            assert (model["norm"].tolist(), model["own"].tolist()) == ([2, 2, 2], [rank] * 3)
    assert len([r for r in caplog.records if "each rank gets its own" in r.getMessage()]) == 1


def test_norms_that_drifted_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As neuronx-distributed lets them, over tp. The same job gets each rank's own; any other one has to choose."""
    for tp in range(2):
        model = {"up": torch.full((2, 3), float(tp)), "norm": torch.full((3,), float(tp)), "same": torch.ones(3)}
        rank_file(tmp_path / "a/model", model, tp=tp)
    (tmp_path / "a/done").write_text("1")
    up, norm = ("up", ("tp", None)), ("norm|same", None)

    def loaded(mesh: Mesh, *rules: Any) -> tuple[list[Any], list[str]]:
        caplog.clear()
        models = [
            {"up": torch.zeros(4 // mesh.tp, 3), "norm": torch.zeros(3), "same": torch.zeros(3)}
            for _ in range(mesh.size)
        ]
        with caplog.at_level(logging.WARNING):
            as_job(
                monkeypatch, mesh, "load",
                lambda r: xla_ckpt.load_checkpoint(tmp_path, "a", models[r], shardings=rules).report,
            )  # fmt: skip
        return models, [r.getMessage() for r in caplog.records]

    models, told = loaded(Mesh(dp=2, tp=2), up)
    assert [model["norm"].tolist() for model in models] == [[0] * 3, [1] * 3] * 2
    assert [("each rank gets its own" in line, "model/norm" in line) for line in told] == [(True, True)]
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match=r"\(tp 1\) differs from \(tp 0\)") as caught:
        loaded(Mesh(dp=2), up)
    assert caught.value.leaf == "model/norm"
    assert "None)] (--sharding" in str(caught.value.hint)
    for mesh in (Mesh(dp=2), Mesh(tp=2)):
        models, told = loaded(mesh, up, norm)
        assert [model["norm"].tolist() for model in models] == [[0] * 3] * 2
        assert len(told) == 1
        assert "the replicas of 1 array differed, and the bytes of the first are stored: model/norm" in told[0]
    assert [n for n in xla_ckpt.explain(tmp_path, mesh="tp=1", shardings=[up, norm]).notes if "model/norm" in n]
    xla_ckpt.convert(tmp_path, tmp_path / "native", shardings=[up, norm])
    with caplog.at_level(logging.WARNING):
        caplog.clear()
        assert xla_ckpt.restore(tmp_path / "native").tree["model"]["norm"].tolist() == [0] * 3
    assert "the replicas of 1 array differed" in caplog.text


def test_states_that_are_not_split_as_their_parameter_is_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Statistics of the rows have fewer dims than the parameter: its attributes say nothing of them."""
    for tp in range(2):
        rank_file(tmp_path / "a/model", {"w": torch.full((2, 3), float(tp))}, tp=tp)
        state = {"step": torch.tensor(1.0 + tp), "exp_avg": torch.full((2, 3), float(tp))}
        state |= {"rows": torch.full((2,), float(tp)), "columns": torch.ones(3)}
        content = {"state": {0: state}, "param_groups": [{"lr": 1.0, "params": [0]}]}
        rank_file(tmp_path / "a/optim", content, tp=tp)
    (tmp_path / "a/done").write_text("1")

    def weight(n: int) -> torch.nn.Parameter:
        made = torch.nn.Parameter(torch.zeros(n, 3))
        made.tensor_model_parallel, made.partition_dim = True, 0
        return made

    for rank in range(2):
        as_rank(monkeypatch, Mesh(tp=2), rank)
        mine = weight(2)
        optimizer = torch.optim.SGD([mine], lr=0.5)
        optimizer.state[mine] = {"step": torch.tensor(0.0), "exp_avg": torch.zeros(2, 3)}
        optimizer.state[mine] |= {"rows": torch.zeros(2), "columns": torch.zeros(3)}
        xla_ckpt.load_checkpoint(tmp_path, "a", {"w": mine}, optimizer)
        held = optimizer.state[mine]
        assert (mine[0, 0], held["step"], held["rows"].tolist()) == (rank, 1 + rank, [rank] * 2)
        assert held["columns"].tolist() == [1, 1, 1]
    monkeypatch.undo()
    whole = weight(4)
    xla_ckpt.load_checkpoint(tmp_path, "a", {"w": whole})
    assert whole[:, 0].tolist() == [0, 0, 1, 1]
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="different tensors of this name") as caught:
        xla_ckpt.load_checkpoint(tmp_path, "a", {"w": whole}, torch.optim.SGD([whole], lr=0.5))
    assert str(caught.value.leaf).startswith("optimizer/state/w/")


def test_parts_of_a_storage_are_read(tmp_path: Path) -> None:
    """The one CRC-32 of a storage says nothing of each of two tensors in it."""
    for tp in range(2):
        storage = torch.arange(1 << 19, dtype=torch.float32)
        storage[-1] = tp
        rank_file(tmp_path / "a/model", {"equal": storage[: 1 << 18], "last": storage[1 << 18 :]}, tp=tp)
    (tmp_path / "a/done").write_text("1")
    found = xla_ckpt.restore(tmp_path, "a", {"model": {"equal": torch.zeros(1 << 18)}}).tree
    assert found["model"]["equal"][-1] == (1 << 18) - 1
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="different tensors of this name"):
        xla_ckpt.restore(tmp_path, "a", {"model": {"last": torch.zeros(1 << 18)}})


def test_comparing_reads_no_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for tp in range(2):
        rank_file(tmp_path / "a/model", {"same": torch.ones(1 << 18), "other": torch.full((1 << 18,), 1.0 + tp)}, tp=tp)
    (tmp_path / "a/done").write_text("1")
    counted, read = [], LocalFileReader.read_into

    def counting(self: LocalFileReader, buffer: memoryview, offset: int) -> int:
        counted.append(len(buffer))
        return read(self, buffer, offset)

    monkeypatch.setattr(LocalFileReader, "read_into", counting)
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match=r"model/other"):
        xla_ckpt.load_checkpoint(tmp_path, "a", {"same": torch.zeros(1 << 18), "other": torch.zeros(1 << 18)})
    assert 0 < sum(counted) < 32 * 1024


def load_together(rank: int, root: str) -> list[Any]:
    """On each of four ranks: what is each rank's own is not sent to the others, and errors are the same on all."""
    mesh, told = Mesh(dp=2, tp=2), list[Any]()
    for replica_read in ("each", "share"):
        model = Tied(mesh, rank, blank=True)
        optimizer = optimizer_of(model, mesh, rank, zero=False, blank=True)
        xla_ckpt.load_checkpoint(
            root, "t", model, optimizer, mesh=mesh, options=xla_ckpt.LoadOptions(replica_read=replica_read)
        )
        told.append(wrong(model, optimizer, mesh, rank, zero=False))
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError) as caught:
        xla_ckpt.load_checkpoint(root, "t", Tied(mesh, rank, blank=True))
    return [*told, caught.value.leaf, caught.value.found]


def test_a_real_job_that_shares_its_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(monkeypatch, tmp_path / "ckpt", Mesh(dp=2, tp=2), "xser", zero=False)
    differs = "[4, 3] on each rank; (tp 1) differs from (tp 0)"
    told = run_on_ranks(load_together, 4, str(tmp_path / "ckpt"))
    assert told == [[[], [], "model/embed.weight", differs]] * 4
