"""neuronx-distributed's layouts as this library writes them: the files of the fixtures, and their state back."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

import xla_ckpt
from tests.covering import some_of
from tests.formats.gold import LOST, Gold, Target, as_rank, cases, few_of, words_of
from tests.formats.references import opened
from tests.formats.same import OURS, as_theirs, content
from tests.formats.writing import State, as_job, hyper_of, mesh_of, names, save_as_job, unlike
from xla_ckpt import Mesh

CASES = [c for c in cases() if c[0] != LOST and "legacy" not in c[0]]
AT_40 = [case for case in CASES if case[1] == "step_40"]
IN_EACH_LAYOUT = [(case, layout) for (case, _), layout in product(AT_40, ("xser", "pt"))]
FIRST = "dp_rank_00_tp_rank_00_pp_rank_00.pt"


def layout_of(case: str) -> str:
    return "xser" if "xser" in case else "pt"


def written(monkeypatch: pytest.MonkeyPatch, gold: Gold, root: Path, layout: str, mesh: Mesh | None = None) -> Path:
    """The state of a fixture, saved by a job over a mesh (that of the fixture); the directory of the tag."""
    mesh = mesh or mesh_of(gold)
    hyper, folder = hyper_of(gold), gold.root / gold.tag
    others = {"scheduler": opened(folder / "scheduler.pt"), "user_content": opened(folder / "user_content.pt")}

    def state(rank: int) -> dict[str, Any]:
        made = State(gold, mesh, rank).fill(hyper)
        return {"model": made.model, "optimizer": made.optimizer, **others}

    save_as_job(monkeypatch, mesh, root, gold.tag, state, layout=layout)
    return root / gold.tag


@pytest.mark.parametrize(("case", "tag"), CASES)
def test_the_files_are_those_of_neuronx_distributed(
    case: str, tag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By name, and by what torch and torch_xla load: types, order of keys, numbers of tensors, and every value."""
    gold = Gold(case, tag)
    theirs, ours = gold.root / tag, written(monkeypatch, gold, tmp_path, layout_of(case))
    assert names(ours) - {*OURS} == names(theirs)
    for name in sorted(names(theirs)):
        if name in ("checkpoint", "done"):
            assert (ours / name).read_bytes() == (theirs / name).read_bytes()
        else:
            assert unlike(opened(ours / name), opened(theirs / name), name) == []
    for first in (f"{part}/{FIRST}" for part in ("model", "optim") if f"{part}/{FIRST}.info.pt" in names(theirs)):
        assert unlike(*(content(folder / first) for folder in (ours, theirs)), first) == []
    report = xla_ckpt.verify(tmp_path, tag)
    assert (report.problems, report.strangers) == ([], [])


# That each state is written is shown above; here the files are read, which depends on how each array was split.
@pytest.mark.parametrize(("case", "layout"), some_of(IN_EACH_LAYOUT, lambda case: product(words_of(case[0]), case[1:])))
def test_without_the_manifest_it_is_a_checkpoint_of_neuronx_distributed(
    case: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gold, mesh = Gold(case, "step_40"), Mesh(dp=2, tp=2)
    as_theirs(written(monkeypatch, gold, tmp_path, layout))
    whole = Target(gold)
    content = xla_ckpt.load_checkpoint(tmp_path, "step_40", whole.model, whole.optimizer).user_content
    assert whole.differences() == []
    assert content["cli_args"] == {"lr": 0.001, "name": "gold", "betas": (0.9, 0.95)}
    for rank in range(mesh.size):
        with monkeypatch.context() as patch:
            as_rank(patch, mesh, rank)
            target = Target(gold, mesh, rank)
            xla_ckpt.load_checkpoint(tmp_path, None, target.model, target.optimizer)
            assert target.differences() == [], rank


MESHES = (Mesh(), Mesh(tp=4), Mesh(dp=3, tp=2), Mesh(dp=2, ep=2, tp=2))


@pytest.mark.parametrize(("case", "tag"), few_of(AT_40))
def test_with_the_manifest_it_loads_on_any_topology(
    case: str, tag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gold = Gold(case, tag)
    hyper, own = hyper_of(gold), mesh_of(gold)
    written(monkeypatch, gold, tmp_path, "pt" if "xser" in case else "xser")  # the one that the fixture is not

    def loaded(state: State) -> list[str]:
        content = xla_ckpt.load_checkpoint(tmp_path, "step_40", state.model, state.optimizer, {}).user_content
        groups = [{k: g[k] for k in hyper[0]} for g in state.optimizer.param_groups]
        return [*state.differences(), *unlike(groups, hyper), *unlike(content["total_steps"], 40)]

    states = [State(gold, own, rank) for rank in range(own.size)]
    assert as_job(monkeypatch, own, "load", lambda rank: loaded(states[rank])) == [[]] * own.size
    if "gqa" in case:
        return  # a job over another number of ranks has k and v another number of times: another model
    if not gold.tied:
        staged = Mesh(pp=2, tp=2)
        states = [State(gold, staged, rank) for rank in range(staged.size)]
        assert as_job(monkeypatch, staged, "load", lambda rank: loaded(states[rank])) == [[]] * staged.size
    for mesh in MESHES:
        for rank in range(mesh.size):
            with monkeypatch.context() as patch:
                as_rank(patch, mesh, rank)
                for zero in (False, True) if mesh.ep == 1 else (False,):
                    assert loaded(State(gold, mesh, rank, zero=zero)) == [], (mesh, rank, zero)
