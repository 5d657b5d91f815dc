"""Jobs of several ranks in one process that write neuronx-distributed's layouts, and states to write."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from tests.formats.gold import HYPER, Gold, Target
from tests.formats.references import opened
from tests.topology.state import GROUPS, Toy, adamw, fill, groups, known, zero1_part
from xla_ckpt import Mesh
from xla_ckpt.core.sharding.mesh import RankInfo
from xla_ckpt.distributed.current_job import JOB_OVERRIDE, Job
from xla_ckpt.distributed.exchange import Exchange, InProcessCommunicator
from xla_ckpt.distributed.job import ExchangeSequence
from xla_ckpt.reports import SaveReport
from xla_ckpt.saving import save as api_save
from xla_ckpt.saving.background import SaveRegistry

LAYOUTS = pytest.mark.parametrize("layout", ["xser", "pt"])


class _PerThread(SaveRegistry, threading.local):
    """The saves of a thread that stands for a process."""


def as_job(
    monkeypatch: pytest.MonkeyPatch, mesh: Mesh, doing: str, call: Callable[[int], Any], timeout: float = 60
) -> list[Any]:
    """Make the same call on all ranks of a job, each in a thread of its own; what they return.

    Where they raise, all of them do, and what the first of them raised is raised here.
    """
    solo = InProcessCommunicator(0, mesh.size)
    outcome: dict[int, Any] = {}

    def rank_of_job(rank: int) -> None:
        JOB_OVERRIDE.job = Job(
            Exchange(solo.create_peer(rank), doing, timeout),
            RankInfo(rank, mesh.size, mesh),
            ExchangeSequence(solo.create_peer(rank)),
        )
        try:
            outcome[rank] = call(rank)
        except Exception as error:
            outcome[rank] = error

    with monkeypatch.context() as patch:
        patch.setattr(api_save, "SAVES", _PerThread())
        threads = [threading.Thread(target=rank_of_job, args=(rank,)) for rank in range(mesh.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    errors = [e for e in outcome.values() if isinstance(e, Exception)]
    assert len(errors) in (0, mesh.size), f"ranks disagree: {outcome}"
    for error in errors:
        raise error
    return [outcome[rank] for rank in range(mesh.size)]


def save_as_job(
    monkeypatch: pytest.MonkeyPatch, mesh: Mesh, root: Path, tag: str, state: Callable[[int], Mapping[str, Any]],
    **options: Any,
) -> list[SaveReport]:  # fmt: skip
    """Save what `state` says for each rank."""
    states = [state(rank) for rank in range(mesh.size)]
    return as_job(
        monkeypatch, mesh, "save", lambda rank: xla_ckpt.save_checkpoint(root, tag, **states[rank], **options).result()
    )


class Zero1(torch.optim.Optimizer):
    """torch_xla's ZeRO-1 wrapper as one rank has it, made of shards that are there already: no job is needed."""

    def __init__(
        self, pairs: list[list[tuple[Any, torch.Tensor]]], hyper: list[dict[str, Any]], mesh: Mesh, rank: int, *,
        masters: bool = False, axes: str = "dp",
    ) -> None:  # fmt: skip
        super().__init__([{"params": [p for p, _ in g], **h} for g, h in zip(pairs, hyper, strict=True)], {})
        self.base_optimizer = torch.optim.AdamW(
            [{"params": [s for _, s in g], **h} for g, h in zip(pairs, hyper, strict=True)]
        )
        at = mesh.coordinates(rank)
        others = [a for a in ("pp", "dp", "cp", "tp") if a not in axes.split()]
        group = [r for r in range(mesh.size) if all(mesh.coordinates(r)[a] == at[a] for a in others)]
        self.inited, self.sharding_groups, self.local_world_size = True, [group], len(group)
        self.save_master_weights, self.local_rank = masters, group.index(rank)


Zero1.__module__ = "torch_xla.distributed.zero_redundancy_optimizer"  # this is how one is recognised


def mesh_of(gold: Gold) -> Mesh:
    """The mesh of the job that wrote a fixture."""
    config = gold.topology["config"]
    return Mesh(**{axis: config[axis] for axis in ("pp", "dp", "ep", "cp", "tp")})


def names(folder: Path) -> set[str]:
    """All files below, relative to it."""
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


class State:
    """What a rank had that wrote a fixture, or what it has that loads it: by code of the test's own."""

    def __init__(self, gold: Gold, mesh: Mesh, rank: int, *, zero: bool | None = None, layers: bool = True) -> None:
        config = gold.topology["config"]
        self.gold, self.mesh, self.rank = gold, mesh, rank
        stage = mesh.coordinates(rank)["pp"] if mesh.pp > 1 else None
        self.target = Target(gold, mesh, rank, stage=stage, layers=layers)
        self.model = self.target.model
        self.zero = config["zero1"] if zero is None else zero
        self.masters = self.zero and bool(config["master"])
        self.int_step = config["opt"] == "adamw_fp32"
        self.cut = gold.shard if self.zero else gold.part
        names = {id(p): n for n, p in reversed(self.target.parameters.items())}
        self.keys: dict[str, Any] = {}
        """What the optimizer steps, by the name of the parameter."""
        for parameter in (p for g in self.target.groups for p in g["params"]):
            name = names[id(parameter)]
            self.keys[name] = parameter
            if self.zero:
                self.keys[name] = torch.nn.Parameter(torch.zeros_like(self._weight(name)))
        self.optimizer: Any = self.target.optimizer
        if self.zero:
            pairs = [[(p, self.keys[names[id(p)]]) for p in g["params"]] for g in self.target.groups]
            self.optimizer = Zero1(pairs, [HYPER, HYPER], mesh, rank, masters=self.masters)
        self.inner = self.optimizer.base_optimizer if self.zero else self.optimizer

    def _weight(self, name: str) -> torch.Tensor:
        return self.cut(name, self.gold.truth["master" if self.masters else "params"][name], self.mesh, self.rank)

    def _state(self, name: str) -> dict[str, Any]:
        truth, step = self.gold.truth, self.gold.truth["step"]
        return {
            "step": step if self.int_step else torch.tensor(float(step)),
            **{k: self.cut(name, truth[k][name], self.mesh, self.rank).clone() for k in ("exp_avg", "exp_avg_sq")},
        }

    def fill(self, hyper: list[dict[str, Any]]) -> State:
        """Give it the values of the truth; hyper-parameters are not among those."""
        for name, parameter in self.target.parameters.items():
            parameter.data = self.gold.part(name, self.gold.truth["params"][name], self.mesh, self.rank)
        for name, buffer in self.model.named_buffers():
            buffer.copy_(self.gold.truth["buffers"][name])
        for name, key in self.keys.items():
            key.data = self._weight(name).clone()
            self.inner.state[key] = self._state(name)
        for optimizer in (self.inner, self.optimizer):
            for group, values in zip(optimizer.param_groups, hyper, strict=True):
                params = group["params"]
                group.clear()
                group.update({**values, "params": params})
        return self

    def differences(self) -> list[str]:
        """What is not bit for bit this rank's part of the truth."""
        gold, bad = self.gold, []
        for name, value in self.model.state_dict().items():
            truth = gold.truth["params"].get(name, gold.truth["buffers"].get(name))
            bad += unlike(value, gold.part(name, truth, self.mesh, self.rank) if name in gold.infos else truth, name)
        for name, key in self.keys.items():
            found, wanted = self.inner.state[key], self._state(name)
            wanted["step"] = torch.as_tensor(wanted["step"], dtype=torch.float32)  # torch's AdamW makes it one
            bad += unlike({k: found.get(k) for k in wanted}, wanted, name)
            bad += unlike(key.data, self._weight(name), f"weight of {name}")
        return bad


def hyper_of(gold: Gold) -> list[dict[str, Any]]:
    """The hyper-parameters of the groups, which the truth does not tell: from any of the fixture's optimizer files."""
    file = min((gold.root / gold.tag / "optim").glob("*.pt"))
    groups = opened(file)["param_groups"]
    return [{k: tuple(v) if k == "betas" else v for k, v in g.items() if k != "params"} for g in groups]


def unlike(found: Any, wanted: Any, at: str = "") -> list[str]:
    """Where two trees differ: in types, in keys and their order, or in values, bit for bit."""
    if type(found) is not type(wanted):
        return [f"{at}: a {type(found).__name__}, not a {type(wanted).__name__}"]
    if type(wanted).__name__ == "TensorReference":
        return unlike(vars(found), vars(wanted), at)
    if isinstance(wanted, torch.Tensor):
        same = found.dtype == wanted.dtype and torch.equal(found, wanted) and found.is_contiguous()
        return [] if same else [f"{at}: {found.dtype} {tuple(found.shape)}, not {wanted.dtype} {tuple(wanted.shape)}"]
    if isinstance(wanted, dict):
        if list(found) != list(wanted):
            return [f"{at}: {list(found)}, not {list(wanted)}"]
        return [d for k, v in wanted.items() for d in unlike(found[k], v, f"{at}/{k}")]
    if isinstance(wanted, list | tuple):
        if len(found) != len(wanted):
            return [f"{at}: {len(found)} items, not {len(wanted)}"]
        return [d for i, v in enumerate(wanted) for d in unlike(found[i], v, f"{at}/{i}")]
    return [] if found == wanted else [f"{at}: {found!r}, not {wanted!r}"]


def toy(mesh: Mesh, rank: int, *, zero: bool = False, axes: str = "dp", blank: bool = False) -> tuple[Toy, Any]:
    """One rank's model and optimizer, with the known state or without any."""
    model = Toy(mesh, rank, blank=blank)
    if not zero:
        optimizer: Any = adamw(model.by_name)
    else:
        name_of = {id(p): n for n, p in model.by_name.items()}
        pairs = [
            [(p, torch.nn.Parameter(torch.zeros_like(zero1_part(known(n, "master"), n, mesh, rank))))
             for p in g["params"] for n in [name_of[id(p)]]]
            for g in groups(model.by_name)
        ]  # fmt: skip
        optimizer = Zero1(pairs, list(GROUPS), mesh, rank, masters=True, axes=axes)
    if not blank:
        fill(optimizer, model.by_name, mesh, rank, masters=zero)
    return model, optimizer


def as_kwargs(made: tuple[Any, Any]) -> dict[str, Any]:
    return {"model": made[0], "optimizer": made[1]}
