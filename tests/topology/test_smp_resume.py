"""Real processes: what a job of SageMaker model parallel's left is resumed on other topologies, with equal steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

import xla_ckpt
from tests.formats.smp_files import described_content, load_info, write_set
from tests.jobs import run_on_ranks
from tests.topology.kinds import build, emulate, possible
from tests.topology.state import Toy, adamw, give_gradients, names_of, tp_part, truth, without_padding
from tests.xla import HAS_XLA
from xla_ckpt import Mesh

KINDS = possible("tp=4", "pp=2,tp=2", "tp=2,dp=2 zero1", "dp=4 zero1", "pp=2,dp=2 zero1")
JOB = Mesh(pp=2, tp=2)
STEPS = 3


def loads(rank: int, path: Path, kinds: Sequence[str]) -> list[str]:
    emulate()
    bad = []
    for kind in kinds:
        held = build(kind, blank=True)
        found = xla_ckpt.load_checkpoint(
            path, None, held.model, held.optimizer, options=xla_ckpt.LoadOptions(timeout=60), **held.options
        )
        assert found.user_content == {"epoch": 3}
        differences = held.differences()
        bad += [f"as {kind}: {differences}"] if differences else []
    return bad


def test_four_processes_resume_a_set(tmp_path: Path) -> None:
    write_set(tmp_path / "checkpoint.pt", JOB, "documents")
    assert run_on_ranks(loads, 4, tmp_path / "checkpoint.pt", KINDS, xla=HAS_XLA) == [[]] * 4


def test_four_processes_resume_a_set_that_describes_itself(tmp_path: Path) -> None:
    """A model of FSDP2's does not say how its parameters would be split over tp ranks."""
    write_set(tmp_path / "c", JOB, "1.12", lambda pp, tp: described_content(JOB, pp, tp))
    kinds = (*KINDS, *possible("fsdp2", "hsdp"))
    assert run_on_ranks(loads, 4, tmp_path / "c", kinds, xla=HAS_XLA) == [[]] * 4


def write_trained(prefix: Path) -> None:
    """A set by hand of a job that has trained for some steps: each rank has what a real one would."""
    for rank in range(JOB.size):
        at = JOB.coordinates(rank)
        model = Toy(JOB, rank)
        optimizer = adamw(model.by_name)
        for step in range(STEPS):
            give_gradients(model.by_name.items(), step, JOB.tp, at["tp"])
            optimizer.step()
        held = {**{n: p.detach() for n, p in model.by_name.items()}, "_smp_is_partial": True}
        held |= {"_smp_load_info": load_info(JOB.pp, JOB.tp), **({} if at["pp"] else {"seen": torch.tensor(5.0)})}
        torch.save({"model_state_dict": held, "optimizer_state_dict": numbered(model, optimizer)}, part(prefix, at))


def part(prefix: Path, at: dict[str, int]) -> Path:
    return Path(f"{prefix}_{at['pp']}_{at['tp']}.pt")


def numbered(model: Toy, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """Numbers that count over all stages: the optimizer of a whole model says which parameter has which."""
    whole = Toy(Mesh(), 0)
    everything = adamw(whole.by_name)
    by_id = {id(p): name for name, p in whole.by_name.items()}
    order = [by_id[id(p)] for group in everything.param_groups for p in group["params"]]
    state = {order.index(name): optimizer.state[p] for name, p in model.by_name.items()}
    return {"state": state, "param_groups": everything.state_dict()["param_groups"], "_smp_is_partial": True}


def trains_on(rank: int, path: Path, mesh: Mesh) -> list[str]:
    """Resume, take one step more, and compare with what the whole model has after as many steps in one go."""
    model = Toy(mesh, rank, blank=True)
    optimizer = adamw(model.by_name)
    xla_ckpt.load_checkpoint(path, None, model, optimizer, mesh=mesh, options=xla_ckpt.LoadOptions(timeout=60))
    at = mesh.coordinates(rank)
    give_gradients(model.by_name.items(), STEPS, mesh.tp, at["tp"])
    optimizer.step()
    wanted = {n: tp_part(of["weight"], n, mesh.tp, at["tp"]) for n, of in truth(STEPS + 1).items()}
    return [
        name for name in names_of(mesh, rank)
        if not torch.equal(without_padding(model.by_name[name], wanted[name], name, mesh, rank), wanted[name])
    ]  # fmt: skip


def test_the_next_step_is_that_of_a_run_in_one_go(tmp_path: Path) -> None:
    write_trained(tmp_path / "c")
    for mesh in (Mesh(tp=4), Mesh(pp=4), Mesh(pp=2, tp=2)):
        assert run_on_ranks(trains_on, 4, tmp_path / "c", mesh) == [[]] * 4, mesh
