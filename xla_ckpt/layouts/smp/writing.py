"""Saves and conversions to the directories of SMP's ``save_checkpoint``."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from xla_ckpt.engine.stages import Staged
from xla_ckpt.errors import UnsupportedStateError, UsageError
from xla_ckpt.layouts.base import Rewriting, StoredState, Topology
from xla_ckpt.layouts.by_rank.new_job import NewJob
from xla_ckpt.layouts.by_rank.plan import PARTS, SHARING, Laying, RankState, check_common, check_rows, stem
from xla_ckpt.layouts.by_rank.writing import RankWriting, held_by_rank
from xla_ckpt.layouts.native import native_files
from xla_ckpt.layouts.smp.form import (
    WHOSE,
    Given,
    Job,
    config_file,
    given,
    has_masters,
    job_of,
    masters_file,
    model_file,
    optimizer_file,
    told,
)
from xla_ckpt.layouts.smp.tags import CONFIG
from xla_ckpt.layouts.torch_save.pickle_writer import LeafAt
from xla_ckpt.plan.save_plan import FilePlan, SavePlan
from xla_ckpt.sharding.mesh import Mesh
from xla_ckpt.state.describe import Description
from xla_ckpt.tree import schema

logger = logging.getLogger(__name__)

_NO_EXPERTS = f"{WHOSE} layout has no place for expert parallelism"


@dataclass(frozen=True, kw_only=True)
class SmpWriting(RankWriting, Staged):
    """What one rank writes: SMP's files for what it has a place for, native ones for the rest."""

    given: Given
    """What the program says of its job."""

    @cached_property
    def _state(self) -> RankState:
        return self.state()

    @property
    def told(self) -> Any:
        """See `Staged`."""
        return told(self._state.parts, modules_of(self.description.state.model, self._state.parts.get(schema.MODEL)))

    @cached_property
    def plan(self) -> SavePlan:
        """See `xla_ckpt.engine.save.Writing`. In a job of several pipeline stages only its sources are final."""
        return self.among([self.told])

    def among(self, stages: Sequence[Any]) -> SavePlan:
        """See `Staged`."""
        placement = self.description.placement
        job = job_of(stages, self.given.partitions)
        theirs = files_of(self._state, job, placement.mesh, placement.rank, self.given)
        return SavePlan((*self.rest.plan.files, *theirs))


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


def writing_of(description: Description, name: str) -> SmpWriting:
    """How a rank writes its state (see `xla_ckpt.layouts.base.Layout.writing`)."""
    held, rest = held_by_rank(description, WHOSE, name)
    mesh = description.placement.mesh
    check_rows(held, mesh, description.state.zero1 or (), WHOSE)
    if mesh.ep > 1:
        raise UnsupportedStateError(
            _NO_EXPERTS,
            leaf=next((tensor.leaf for tensor in held.tensors.values() if tensor.expert), None),
            found=str(mesh),
            hint="Save in the native format, which holds any state and loads on any topology.",
        )
    here: Any = description.structure
    extras = description.tree(schema.EXTRAS, lambda path, _: LeafAt(path)) if schema.EXTRAS in here else {}
    return SmpWriting(description=description, held=held, rest=rest, given=given(extras))


def files_of(state: RankState, job: Job, mesh: Mesh, rank: int, known: Given) -> list[FilePlan]:
    """The files of SMP's that one rank writes.

    Args:
        state: What the rank has.
        job: What all ranks have together.
        mesh: How they are arranged.
        rank: Which one it is.
        known: What a program says of its job.

    Raises:
        UnsupportedStateError: Something cannot be pickled, or is no dict.
    """
    laying, at = Laying(mesh, rank, state.tensors), mesh.coordinates(rank)
    numbers = f"{at['pp']}_{at['tp']}"
    made: list[FilePlan] = []
    if schema.MODEL in state.parts:
        tree = model_file(state, job, mesh)
        made += laying.shared(f"model_{numbers}.pt", tree, schema.MODEL, SHARING)
    if schema.OPTIMIZER in state.parts:
        # Each dp rank has rows of its own, if ZeRO-1 has dealt them out.
        numbers, sharing = (f"{numbers}_{at['dp']}", ("cp",)) if state.zero1 else (numbers, SHARING)
        tree = optimizer_file(state, job)
        made += laying.shared(f"optimizer_states_{numbers}.pt", tree, schema.OPTIMIZER, sharing)
        if has_masters(state):
            masters = masters_file(state, job, known.fp16)
            made += laying.shared(f"fp16_states_{numbers}.pt", masters, schema.OPTIMIZER, sharing)
    if rank == 0:
        everybody = tuple(mesh.sizes)
        for part in (schema.SCHEDULER, schema.USER_CONTENT):
            if part in state.parts:
                made.append(laying.whole(f"{part}.pt", state.parts[part], part, everybody))
        settings = config_file(known.config, mesh, zero1=state.zero1)
        made.append(laying.whole(CONFIG, settings, schema.in_extras(stem(CONFIG)), everybody))
    return made


def rewriting_of(stored: StoredState, to: Topology, name: str) -> Rewriting:
    """The files of a stored state, for another job (see `xla_ckpt.layouts.base.Layout.rewriting`).

    The rows of an optimizer's states are put together, unless it is asked for that they are dealt out: SMP reads whole
    states only.
    """
    manifest = stored.manifest
    held = manifest.skeleton if isinstance(manifest.skeleton, dict) else {}
    theirs = [part for part in PARTS if part in held]
    native, specs = native_files(manifest, [p for p in manifest.arrays if schema.member_of(p) not in theirs], to)
    if not theirs:
        raise UsageError(f"the tag holds nothing that {name} has a place for", expected=", ".join(PARTS))
    check_common(held, WHOSE)
    if to.mesh.ep > 1:
        raise UsageError(_NO_EXPERTS, found=str(to.mesh))
    trees = {part: stored.tree(part, lambda path, _: LeafAt(path)) for part in theirs}
    known = given(stored.tree(schema.EXTRAS, lambda path, _: LeafAt(path)) if schema.EXTRAS in held else {})
    target = NewJob(
        manifest=manifest, trees=trees, mesh=to.mesh, rules=to.rules, cuts=to.pipeline_cuts, zero1=bool(to.zero1)
    )
    for message in target.doubts():
        logger.warning("%s", message)
    job = _job(target)
    files = []
    for rank in range(to.mesh.size):
        mine = SavePlan(tuple(files_of(target.state(rank), job, to.mesh, rank, known)))
        files.append((*native[rank], *mine.minus(target.of_earlier_stages(rank)).files))
    specs |= {path: target.spec(path) for path in manifest.arrays if path not in specs}
    return Rewriting(files, specs)


def _job(target: NewJob) -> Job:
    """What the files of a new job say of all of it. Its optimizer's parameters stay in the order of the old one."""
    stages: list[dict[str, Any]] = [
        {"names": [name for name, of in target.stages.items() if of == stage], "modules": [], "groups": []}
        for stage in range(target.mesh.pp)
    ]
    stages[0] |= {"groups": told(target.trees)["groups"]}
    return job_of(stages)
