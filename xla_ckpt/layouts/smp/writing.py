"""Saves and conversions to the directories of SMP's ``save_checkpoint``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from xla_ckpt.layouts.base import Rewriting, StoredState, Topology
from xla_ckpt.layouts.by_rank.layout import RankLayout
from xla_ckpt.layouts.by_rank.new_job import NewJob
from xla_ckpt.layouts.by_rank.plan import Laying, stem
from xla_ckpt.layouts.by_rank.rewriting import new_job, rewritten
from xla_ckpt.layouts.by_rank.writing import RankWriting
from xla_ckpt.layouts.smp.file_contents import (
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
from xla_ckpt.layouts.smp.tags import (
    FP16_SET,
    JOB_CONFIG,
    MODEL_SET,
    OPTIMIZER_SETS,
    SCHEDULER_FILE,
    USER_CONTENT_FILE,
    written_names,
)
from xla_ckpt.layouts.torch_save.pickle_writer import LeafAt
from xla_ckpt.lightweight import cached_property
from xla_ckpt.plan.file_plan import FilePlan
from xla_ckpt.plan.save_plan import SavePlan
from xla_ckpt.state.describe import Description
from xla_ckpt.tree import schema


@dataclass(frozen=True, kw_only=True)
class SmpWriting(RankWriting):
    """What one rank writes: SMP's files for what it has a place for, native ones for the rest."""

    given: Given
    """What the program says of its job."""

    @property
    def _stage(self) -> dict[str, Any]:
        parts = self.laying.state.parts
        return told(parts, modules_of(self.description.state.model, parts.get(schema.MODEL)))

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
        files = files_of(stored_job_of(stages, self.given.partitions), self.laying, self.given)
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


def smp_writing(layout: RankLayout, description: Description) -> SmpWriting:
    """How a rank writes its state (see `xla_ckpt.layouts.base.Layout.writing`)."""
    has_extras = schema.EXTRAS in (description.structure or {})
    extras = description.tree(schema.EXTRAS, lambda path, _: LeafAt(path)) if has_extras else {}
    return SmpWriting.of(layout, description, given=given(extras))


def files_of(job: StoredJob, laying: Laying, known: Given) -> list[FilePlan]:
    """The files of SMP's that one rank writes.

    Raises:
        UnsupportedStateError: Something cannot be pickled, or is no dict.
    """
    mesh, state, zero1 = laying.mesh, laying.state, laying.state.zero1
    plans: list[FilePlan] = []
    if schema.MODEL in state.parts:
        plans += laying.shared(written_names(MODEL_SET), model_file(state, job, mesh), schema.MODEL)
    if schema.OPTIMIZER in state.parts:
        names = written_names(OPTIMIZER_SETS[-1])
        plans += laying.shared(names, optimizer_file(state, job), schema.OPTIMIZER, dealt=zero1)
        if has_masters(state):
            masters = masters_file(state, job, known.fp16)
            plans += laying.shared(written_names(FP16_SET), masters, schema.OPTIMIZER, dealt=zero1)
    for part, file in ((schema.SCHEDULER, SCHEDULER_FILE), (schema.USER_CONTENT, USER_CONTENT_FILE)):
        if part in state.parts:
            plans += laying.common(file, state.parts[part], part)
    settings = config_file(known.config, mesh, zero1=zero1)
    return [*plans, *laying.common(JOB_CONFIG, settings, schema.in_extras(stem(JOB_CONFIG)))]


def smp_rewriting(layout: RankLayout, stored: StoredState, to: Topology) -> Rewriting:
    """The files of a stored state, for another job (see `xla_ckpt.layouts.base.Layout.rewriting`).

    The rows of an optimizer's states are put together, unless it is asked for that they are dealt out: SMP reads whole
    states only.
    """
    target = new_job(layout, stored, to)
    has_extras = schema.EXTRAS in stored.manifest.skeleton
    known = given(stored.tree(schema.EXTRAS, lambda path, _: LeafAt(path)) if has_extras else {})
    job = _job(target)
    return rewritten(layout, target, to, lambda laying: files_of(job, laying, known))


def _job(target: NewJob) -> StoredJob:
    """What the files of a new job say of all of it. Its optimizer's parameters stay in the order of the old one."""
    stages: list[dict[str, Any]] = [
        {"names": [name for name, of in target.stages.items() if of == stage], "modules": [], "groups": []}
        for stage in range(target.mesh.pp)
    ]
    stages[0] |= {"groups": told(target.trees)["groups"]}
    return stored_job_of(stages)
