"""Saves and conversions to the directories of SMP's ``save_checkpoint``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from xla_ckpt.errors import UnsupportedStateError, UsageError
from xla_ckpt.layouts.base import Rewriting, StoredState, Topology
from xla_ckpt.layouts.by_rank.new_job import NewJob
from xla_ckpt.layouts.by_rank.plan import SHARING, Laying, RankState, stem
from xla_ckpt.layouts.by_rank.rewriting import members_of_ranks, rewritten
from xla_ckpt.layouts.by_rank.writing import RankWriting, held_by_rank
from xla_ckpt.layouts.smp.file_contents import (
    WHOSE_SMP,
    Given,
    StoredJob,
    config_file,
    given,
    has_masters,
    masters_file,
    model_file,
    optimizer_file,
    stored_job_of,
    told,
)
from xla_ckpt.layouts.smp.tags import JOB_CONFIG
from xla_ckpt.layouts.torch_save.pickle_writer import LeafAt
from xla_ckpt.plan.file_plan import FilePlan
from xla_ckpt.plan.save_plan import SavePlan
from xla_ckpt.sharding.mesh import Mesh
from xla_ckpt.state.describe import Description
from xla_ckpt.tree import schema

_NO_EXPERTS = f"{WHOSE_SMP} layout has no place for expert parallelism"


@dataclass(frozen=True, kw_only=True)
class SmpWriting(RankWriting):
    """What one rank writes: SMP's files for what it has a place for, native ones for the rest."""

    given: Given
    """What the program says of its job."""

    @cached_property
    def _state(self) -> RankState:
        return self.state()

    @property
    def _stage(self) -> dict[str, Any]:
        return told(self._state.parts, modules_of(self.description.state.model, self._state.parts.get(schema.MODEL)))

    @property
    def told(self) -> Any:
        placement = self.description.placement
        return self._stage if placement.mesh.pp > 1 and placement.speaks else None

    def unite(self, words: Sequence[Any]) -> Any:
        mesh = self.description.placement.mesh
        return [words[mesh.rank({"pp": stage})] for stage in range(mesh.pp)] if mesh.pp > 1 else None

    @cached_property
    def plan(self) -> SavePlan:
        """See `xla_ckpt.engine.writing.Writing`. In a job of several pipeline stages only its sources are final."""
        return self._plan_of([self._stage])

    def plan_among(self, united: Any) -> SavePlan:
        return self.plan if united is None else self._plan_of(united)

    def _plan_of(self, stages: Sequence[Any]) -> SavePlan:
        placement = self.description.placement
        job = stored_job_of(stages, self.given.partitions)
        files = files_of(self._state, job, placement.mesh, placement.rank, self.given)
        return SavePlan((*self.native.plan.files, *files))


def modules_of(model: Any, entries: Any) -> list[str]:
    """Names of a model's modules, if those are the names to which its entries belong; of a wrapped one the inner's.

    Args:
        model: A module; or what else a program saves as one.
        entries: Its parameters and buffers, by name.
    """
    homes = {str(name).rpartition(".")[0] for name in entries} if isinstance(entries, Mapping) else set()
    for module in (model, *getattr(model, "parts", ())):
        if isinstance(module, torch.nn.Module):
            names = [name for name, _ in module.named_modules()]
            if homes <= set(names):
                return names
    return []


def smp_writing(description: Description, name: str) -> SmpWriting:
    """How a rank writes its state (see `xla_ckpt.layouts.base.Layout.writing`)."""
    rank_state, native = held_by_rank(description, WHOSE_SMP, name)
    mesh = description.placement.mesh
    if mesh.ep > 1:
        raise UnsupportedStateError(
            _NO_EXPERTS,
            leaf=next((tensor.leaf for tensor in rank_state.tensors.values() if tensor.expert), None),
            found=str(mesh),
            hint="Save in the native format, which holds any state and loads on any topology.",
        )
    members: Any = description.structure
    extras = description.tree(schema.EXTRAS, lambda path, _: LeafAt(path)) if schema.EXTRAS in members else {}
    return SmpWriting(description=description, rank_state=rank_state, native=native, given=given(extras))


def files_of(state: RankState, job: StoredJob, mesh: Mesh, rank: int, known: Given) -> list[FilePlan]:
    """The files of SMP's that one rank writes.

    Raises:
        UnsupportedStateError: Something cannot be pickled, or is no dict.
    """
    laying, at = Laying(mesh, rank, state.tensors), mesh.coordinates(rank)
    numbers = f"{at['pp']}_{at['tp']}"
    plans: list[FilePlan] = []
    if schema.MODEL in state.parts:
        tree = model_file(state, job, mesh)
        plans += laying.shared(f"model_{numbers}.pt", tree, schema.MODEL, SHARING)
    if schema.OPTIMIZER in state.parts:
        # Each dp rank has rows of its own, if ZeRO-1 has dealt them out.
        numbers, sharing = (f"{numbers}_{at['dp']}", ("cp",)) if state.zero1 else (numbers, SHARING)
        tree = optimizer_file(state, job)
        plans += laying.shared(f"optimizer_states_{numbers}.pt", tree, schema.OPTIMIZER, sharing)
        if has_masters(state):
            masters = masters_file(state, job, known.fp16)
            plans += laying.shared(f"fp16_states_{numbers}.pt", masters, schema.OPTIMIZER, sharing)
    settings = config_file(known.config, mesh, zero1=state.zero1)
    config = laying.shared(JOB_CONFIG, settings, schema.in_extras(stem(JOB_CONFIG)), tuple(mesh.sizes))
    return [*plans, *laying.common(state), *config]


def smp_rewriting(stored: StoredState, to: Topology, name: str) -> Rewriting:
    """The files of a stored state, for another job (see `xla_ckpt.layouts.base.Layout.rewriting`).

    The rows of an optimizer's states are put together, unless it is asked for that they are dealt out: SMP reads whole
    states only.
    """
    trees = members_of_ranks(stored, name, WHOSE_SMP)
    if to.mesh.ep > 1:
        raise UsageError(_NO_EXPERTS, found=str(to.mesh))
    has_extras = schema.EXTRAS in stored.manifest.skeleton
    known = given(stored.tree(schema.EXTRAS, lambda path, _: LeafAt(path)) if has_extras else {})
    target = NewJob(
        manifest=stored.manifest,
        trees=trees,
        mesh=to.mesh,
        rules=to.rules,
        cuts=to.pipeline_cuts,
        zero1=bool(to.zero1),
    )
    job = _job(target)
    return rewritten(target, to, lambda rank: files_of(target.state(rank), job, to.mesh, rank, known))


def _job(target: NewJob) -> StoredJob:
    """What the files of a new job say of all of it. Its optimizer's parameters stay in the order of the old one."""
    stages: list[dict[str, Any]] = [
        {"names": [name for name, of in target.stages.items() if of == stage], "modules": [], "groups": []}
        for stage in range(target.mesh.pp)
    ]
    stages[0] |= {"groups": told(target.trees)["groups"]}
    return stored_job_of(stages)
