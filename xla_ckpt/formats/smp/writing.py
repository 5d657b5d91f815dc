"""Plan SMP checkpoint directories, for saves and conversions, and build the contents of each file.

SMP 1.12 keeps a module's own names, adds two entries to them, and keeps torch's own optimizer state. Unlike in NxD
files, the optimizer's numbers run through the parameters of the whole model, in the order of its groups: all pipeline
stages have the same groups, and each has the states of its own parameters. Our additions are stored under the key
``xla_ckpt``, and in ``param_names`` of the groups: with them the files are readable without a program that knows names
and shardings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch

from xla_ckpt.core.lightweight import cached_property
from xla_ckpt.core.plan.save_plan import FilePlan, SavePlan
from xla_ckpt.core.sharding.mesh import Mesh
from xla_ckpt.core.tree import schema
from xla_ckpt.core.tree.state_dict import copy_module_metadata
from xla_ckpt.formats.base import ConversionPlan, StoredState, TargetTopology
from xla_ckpt.formats.numbered_parameters import PARAM_NAMES_KEY, sort_by_number
from xla_ckpt.formats.rank_files.conversion import ReshardedState, plan_rank_file_conversion, reshard_state
from xla_ckpt.formats.rank_files.layout import RankLayout
from xla_ckpt.formats.rank_files.writing import RankFilePlanner, RankState, RankWritePlanner, get_stem
from xla_ckpt.formats.smp.model import EXTENSION_KEY, MASTERS_KEY, SHAPES_KEY, SPECS_KEY
from xla_ckpt.formats.smp.tags import (
    FP16_SET,
    IS_PARTIAL,
    JOB_CONFIG,
    LOAD_INFO,
    MODEL_SET,
    OPTIMIZER_SETS,
    SCHEDULER_FILE,
    USER_CONTENT_FILE,
    get_written_names,
)
from xla_ckpt.formats.torch_save.pickler import LeafPlaceholder, iterate_leaf_paths
from xla_ckpt.state.describe import StateDescription

SMP_VERSION = "1.12.1"
"""Version of SMP whose file format is written."""

NUMBERS_KEY = "numbers"
"""Key of the numbers of the parameters whose master weights are in a file, by group."""

PARTITIONS_KEY = "partition_info"
"""SMP key of the pipeline stage of each module; a program passes it as a member of `extras` with this name."""

_ROOT_MODULE = "main"
_WRAPPED_MODULE = "main/module/module"
"""SMP names of the model and of the user's module in it (for a job with ``ddp``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDescription:
    """Description of the whole job in the files of a rank."""

    groups: tuple[tuple[Any, ...], ...] = ()
    """Names of the parameters in each group of the optimizer; empty if its state is not keyed by name."""

    partitions: Mapping[str, int]
    """Pipeline stage of each module, by SMP name."""

    @property
    def parameter_numbers(self) -> dict[Any, int]:
        """Number of each parameter of the optimizer."""
        return {name: i for i, name in enumerate(name for group in self.groups for name in group)}


def describe_stage(parts: Mapping[str, Any], modules: Iterable[str] = ()) -> dict[str, Any]:
    """Return the description of a pipeline stage for the other stages, as plain JSON."""
    model = parts.get(schema.MODEL)
    return {
        "names": [str(name) for name in model] if isinstance(model, Mapping) else [],
        "modules": list(modules),
        "groups": [list(names) for names in get_group_names(parts.get(schema.OPTIMIZER))],
    }


def merge_stages(stages: Sequence[Mapping[str, Any]], partitions: Mapping[str, int] | None = None) -> JobDescription:
    """Merge the descriptions of all stages.

    Args:
        stages: The descriptions, in the order of the stages.
        partitions: Pipeline stage of each module, if the program provides it.
    """
    groups = [
        tuple(dict.fromkeys(name for part in parts for name in part))
        for parts in zip_longest(*(stage["groups"] for stage in stages), fillvalue=())
    ]
    if partitions is None:
        partitions = build_partition_info([s["names"] for s in stages], [s["modules"] for s in stages])
    return JobDescription(groups=tuple(groups), partitions=partitions)


def get_group_names(optimizer: Any) -> list[list[Any]]:
    """Return the names of the parameters in each group of an optimizer; empty if its state is not keyed by name."""
    groups = schema.get_groups(optimizer)
    if groups is None or not isinstance(optimizer.get(schema.STATE), Mapping):
        return []
    names = [list(group[schema.PARAMS]) for group in groups]
    return names if all(isinstance(name, str) for group in names for name in group) else []


def build_partition_info(names: Sequence[Sequence[str]], modules: Sequence[Iterable[str]] = ()) -> dict[str, int]:
    """Build the pipeline stage of each module, by SMP name: the first stage that has a parameter or buffer in it.

    A module without parameters and buffers is in the stage of its parent module.

    Args:
        names: Names of the parameters and buffers of each stage.
        modules: Names of further modules of each stage.

    >>> build_partition_info([["a.w"], ["b.w"]], [["a"], ["b", "b.drop"]])["main/module/module/b/drop"]
    1
    """
    stages = {_ROOT_MODULE: 0, _WRAPPED_MODULE.rpartition("/")[0]: 0, _WRAPPED_MODULE: 0}
    for stage, of_stage in enumerate(names):
        for name in of_stage:
            steps = name.split(".")[:-1]
            for depth in range(1, len(steps) + 1):
                stages.setdefault("/".join([_WRAPPED_MODULE, *steps[:depth]]), stage)
    for name in sorted(name for of_stage in modules for name in of_stage if name):
        called = f"{_WRAPPED_MODULE}/{name.replace('.', '/')}"
        stages.setdefault(called, stages.get(called.rpartition("/")[0], 0))
    return stages


def build_model_file(state: RankState, job: JobDescription, mesh: Mesh) -> dict[Any, Any]:
    """Build the content of ``model_{pp}_{tp}.pt``.

    Raises:
        UnsupportedStateError: The model is not a dict.
    """
    tree = state.get_members(schema.MODEL)
    tensors = {name: state.tensors[at.path] for name, at in tree.items() if isinstance(at, LeafPlaceholder)}
    ours = {
        SPECS_KEY: {name: tensor.spec for name, tensor in tensors.items()},
        # If tensors are padded, their shapes do not determine the global shape.
        SHAPES_KEY: {name: tensor.global_shape for name, tensor in tensors.items()},
    }
    info = {
        "tensor_parallel_degree": mesh.tp,
        "pipeline_parallel_degree": mesh.pp,
        PARTITIONS_KEY: dict(job.partitions),
        EXTENSION_KEY: ours,
    }
    return copy_module_metadata(tree, {**tree, IS_PARTIAL: True, LOAD_INFO: info})


def build_optimizer_file(state: RankState, job: JobDescription) -> dict[Any, Any]:
    """Build the content of ``optimizer_states_{pp}_{tp}.pt``, or with ZeRO-1 of the file of each dp rank.

    All tensor-parallel ranks also store the states of replicated parameters, because 1.12 loads each file as it is,
    without communication between ranks.

    Raises:
        UnsupportedStateError: The optimizer's state is not a dict.
    """
    tree = state.get_members(schema.OPTIMIZER)
    if not job.groups:
        return {**tree, IS_PARTIAL: True}
    number = job.parameter_numbers
    content = {
        "state": sort_by_number(tree[schema.STATE], number),
        "param_groups": [
            _build_group(group, names, number)
            for group, names in zip(tree[schema.PARAM_GROUPS], job.groups, strict=False)
        ],
        **{key: value for key, value in tree.items() if key not in schema.OPTIMIZER_MEMBERS},
        IS_PARTIAL: True,
    }
    if state.zero1:
        own = {number[name]: list(shape) for name, shape in state.local_shapes.items() if name in number}
        content[EXTENSION_KEY] = {SHAPES_KEY: own}
    return content


def _build_group(group: Mapping[str, Any], names: Sequence[Any], number: Mapping[Any, int]) -> dict[str, Any]:
    """Build a group of the optimizer with the parameters of all stages."""
    options = {key: value for key, value in group.items() if key != schema.PARAMS}
    named = {} if any(name.startswith("#") for name in names) else {PARAM_NAMES_KEY: list(names)}
    return {**options, schema.PARAMS: [number[name] for name in names], **named}


def build_masters_file(state: RankState, job: JobDescription, fp16_state: Mapping[str, Any]) -> dict[str, Any]:
    """Build the content of ``fp16_states_{pp}_{tp}.pt``: the master weights of this stage, by group.

    SMP also stores its loss scaler there, an object of an SMP class. Without one in `fp16_state`, the values are those
    of a job without loss scaling.
    """
    masters = state.parts[schema.OPTIMIZER][schema.MASTER]
    names = [[name for name in group if name in masters] for group in job.groups]
    return {
        "loss_scaler": None,
        "dynamic_loss_scale": False,
        "overflow": False,
        "first_closure_call_this_step": True,
        **fp16_state,
        MASTERS_KEY: [[masters[name] for name in group] for group in names],
        EXTENSION_KEY: {NUMBERS_KEY: [[job.parameter_numbers[name] for name in group] for group in names]},
    }


def has_masters(state: RankState) -> bool:
    """Return True if an optimizer has master weights that are keyed by parameter name."""
    optimizer = state.parts.get(schema.OPTIMIZER)
    return isinstance(optimizer, Mapping) and schema.MASTER in optimizer and bool(get_group_names(optimizer))


def build_config_file(config: Mapping[str, Any], mesh: Mesh, *, zero1: bool) -> dict[str, Any]:
    """Build the content of ``smp_config.pt``: the configuration of the job, with the degrees of the files.

    Args:
        config: Configuration from the program.
        zero1: True if the rows of the optimizer's states are sharded.
    """
    return {
        "ddp": True,
        "sharded_data_parallel_degree": 1,
        "smp_version": SMP_VERSION,
        **config,
        "pipeline_parallel_degree": mesh.pp,
        "tensor_parallel_degree": mesh.tp,
        "shard_optimizer_state": zero1,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSettings:
    """Job settings from the program: members of `extras` with SMP names."""

    config: Mapping[str, Any]
    """Configuration of the job: ``extras={"smp_config": {...}}``."""

    partitions: Mapping[str, int] | None
    """Pipeline stage of each module: ``extras={"partition_info": {...}}``."""

    fp16: Mapping[str, Any]
    """State of a half-precision optimizer other than master weights: ``extras={"fp16_states": {...}}``."""


def read_job_settings(extras: Any) -> JobSettings:
    """Read the job settings from the program's extras. Members with arrays are ignored."""
    members = extras if isinstance(extras, Mapping) else {}
    config, partitions, fp16 = (
        {key: value for key, value in member.items() if not any(iterate_leaf_paths(value))}
        if isinstance(member := members.get(name), Mapping)
        else None
        for name in (get_stem(JOB_CONFIG), PARTITIONS_KEY, FP16_SET)
    )
    return JobSettings(config=config or {}, partitions=partitions, fp16=fp16 or {})


@dataclass(frozen=True, kw_only=True)
class SmpWritePlanner(RankWritePlanner):
    """Planner of one rank's writes: SMP files for the state that SMP supports, native files for the rest."""

    job_settings: JobSettings
    """Job settings from the program."""

    @property
    def _stage_description(self) -> dict[str, Any]:
        parts = self.file_planner.state.parts
        return describe_stage(parts, list_module_names(self.description.state.model, parts.get(schema.MODEL)))

    @property
    def shared_info(self) -> Any:
        placement = self.description.placement
        return self._stage_description if placement.mesh.pp > 1 and placement.is_stage_leader else None

    def combine_infos(self, infos: Sequence[Any]) -> Any:
        mesh = self.description.placement.mesh
        return [infos[mesh.rank({"pp": stage})] for stage in range(mesh.pp)] if mesh.pp > 1 else None

    @cached_property
    def plan(self) -> SavePlan:
        """Plan of the files (see `xla_ckpt.saving.finalize.WritePlanner`).

        In a job with several pipeline stages only its sources are final.
        """
        return self._plan_stages([self._stage_description])

    def plan_with(self, combined: Any) -> SavePlan:
        return self.plan if combined is None else self._plan_stages(combined)

    def _plan_stages(self, stages: Sequence[Any]) -> SavePlan:
        files = plan_rank_files(
            merge_stages(stages, self.job_settings.partitions), self.file_planner, self.job_settings
        )
        return SavePlan((*self.native_planner.plan.files, *files))


def list_module_names(model: Any, entries: Any) -> list[str]:
    """Return the names of a model's modules if its entries belong to them; for a wrapped model, the inner module's.

    Args:
        model: A module, or another object that a program saves as a model.
        entries: Its parameters and buffers, by name.
    """
    homes = {str(name).rpartition(".")[0] for name in entries} if isinstance(entries, Mapping) else set()
    for module in (model, *getattr(model, "parts", ())):
        if isinstance(module, torch.nn.Module):
            names = [name for name, _ in module.named_modules()]
            if homes <= set(names):
                return names
    return []


def make_write_planner(layout: RankLayout, description: StateDescription) -> SmpWritePlanner:
    """Return the planner of a rank's writes (see `xla_ckpt.formats.base.Layout.writing`)."""
    has_extras = schema.EXTRAS in (description.structure or {})
    extras = description.build_tree(schema.EXTRAS, lambda path, _: LeafPlaceholder(path)) if has_extras else {}
    return SmpWritePlanner.from_description(layout, description, job_settings=read_job_settings(extras))


def plan_rank_files(job: JobDescription, planner: RankFilePlanner, job_settings: JobSettings) -> list[FilePlan]:
    """Plan the SMP files that one rank writes.

    Raises:
        UnsupportedStateError: Something cannot be pickled, or is not a dict.
    """
    mesh, state, zero1 = planner.mesh, planner.state, planner.state.zero1
    plans: list[FilePlan] = []
    if schema.MODEL in state.parts:
        plans += planner.plan_shared_file(
            get_written_names(MODEL_SET), build_model_file(state, job, mesh), schema.MODEL
        )
    if schema.OPTIMIZER in state.parts:
        names = get_written_names(OPTIMIZER_SETS[-1])
        plans += planner.plan_shared_file(names, build_optimizer_file(state, job), schema.OPTIMIZER, per_dp=zero1)
        if has_masters(state):
            masters = build_masters_file(state, job, job_settings.fp16)
            plans += planner.plan_shared_file(get_written_names(FP16_SET), masters, schema.OPTIMIZER, per_dp=zero1)
    for part, file in ((schema.SCHEDULER, SCHEDULER_FILE), (schema.USER_CONTENT, USER_CONTENT_FILE)):
        if part in state.parts:
            plans += planner.plan_common_file(file, state.parts[part], part)
    settings = build_config_file(job_settings.config, mesh, zero1=zero1)
    return [*plans, *planner.plan_common_file(JOB_CONFIG, settings, schema.get_extras_path(get_stem(JOB_CONFIG)))]


def plan_smp_conversion(layout: RankLayout, stored: StoredState, to: TargetTopology) -> ConversionPlan:
    """Plan the files of a stored state for another job (see `xla_ckpt.formats.base.Layout.rewriting`).

    The rows of an optimizer's states are gathered unless ZeRO-1 is requested, because SMP reads only whole states.
    """
    target = reshard_state(layout, stored, to)
    has_extras = schema.EXTRAS in stored.manifest.skeleton
    known = read_job_settings(stored.tree(schema.EXTRAS, lambda path, _: LeafPlaceholder(path)) if has_extras else {})
    job = _describe_target_job(target)
    return plan_rank_file_conversion(layout, target, to, lambda laying: plan_rank_files(job, laying, known))


def _describe_target_job(target: ReshardedState) -> JobDescription:
    """Describe the target job. Its optimizer's parameters keep the order of the source."""
    stages: list[dict[str, Any]] = [
        {"names": [name for name, of in target.stages.items() if of == stage], "modules": [], "groups": []}
        for stage in range(target.mesh.pp)
    ]
    stages[0] |= {"groups": describe_stage(target.trees)["groups"]}
    return merge_stages(stages)
