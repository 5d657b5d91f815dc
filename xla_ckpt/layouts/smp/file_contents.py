"""What the files of one rank hold in a tag of SMP's, made of the tree of a training state. Pure.

SMP 1.12 keeps a module's own names, with two entries of its own beside them, and torch's own state of an optimizer.
Unlike in neuronx-distributed's files, the optimizer's numbers run through the parameters of the whole model, in the
order of its groups: all pipeline stages have the same groups, and each has the states of its own parameters.

What SMP does not have is below the key ``xla_ckpt``, and in ``param_names`` of the groups, as torch has it for
optimizers of named parameters. It makes the files readable without a program that knows names and splits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from xla_ckpt.layouts.by_rank.plan import RankState, stem
from xla_ckpt.layouts.parameter_numbers import PARAM_NAMES, by_number
from xla_ckpt.layouts.smp.marks import IS_PARTIAL, LOAD_INFO
from xla_ckpt.layouts.smp.members import MASTERS
from xla_ckpt.layouts.smp.model import ADDED_KEY, SHAPES, SPECS
from xla_ckpt.layouts.smp.tags import FP16_SET, JOB_CONFIG
from xla_ckpt.layouts.torch_save.pickle_writer import LeafAt, leaves_in
from xla_ckpt.sharding.mesh import Mesh
from xla_ckpt.tree import schema
from xla_ckpt.tree.module_metadata import with_metadata_of

SMP_VERSION = "1.12.1"
"""Version of SMP whose files these are."""

NUMBERS = "numbers"
"""Key of the numbers of the parameters whose master weights a file has, group by group."""

PARTITIONS = "partition_info"
"""SMP's key for the pipeline stage of each module; a program gives it in a member of `extras` of this name."""

_MAIN = "main"
_WRAPPED = "main/module/module"
"""SMP's names for the model and, in it, for the module that the program made (of a job with ``ddp``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredJob:
    """What the files of a rank say of the whole job."""

    groups: tuple[tuple[Any, ...], ...] = ()
    """Names of the parameters in each group of the optimizer; none if it is not kept by name."""

    partitions: Mapping[str, int]
    """Module -> pipeline stage, under SMP's names."""

    @property
    def number(self) -> dict[Any, int]:
        """The number of each parameter of the optimizer."""
        return {name: i for i, name in enumerate(name for group in self.groups for name in group)}


def told(parts: Mapping[str, Any], modules: Iterable[str] = ()) -> dict[str, Any]:
    """What the other pipeline stages have to know of one, as plain JSON."""
    model = parts.get(schema.MODEL)
    return {
        "names": [str(name) for name in model] if isinstance(model, Mapping) else [],
        "modules": list(modules),
        "groups": [list(names) for names in names_of_groups(parts.get(schema.OPTIMIZER))],
    }


def stored_job_of(stages: Sequence[Mapping[str, Any]], partitions: Mapping[str, int] | None = None) -> StoredJob:
    """What all stages together know of the job.

    Args:
        stages: What each of them has told, in their order.
        partitions: Module -> stage, where the program says so.
    """
    groups = [
        tuple(dict.fromkeys(name for part in parts for name in part))
        for parts in zip_longest(*(stage["groups"] for stage in stages), fillvalue=())
    ]
    if partitions is None:
        partitions = partition_info([s["names"] for s in stages], [s["modules"] for s in stages])
    return StoredJob(groups=tuple(groups), partitions=partitions)


def names_of_groups(optimizer: Any) -> list[list[Any]]:
    """The names of the parameters in each group of an optimizer; none if it is not kept by parameter name."""
    groups = schema.groups_of(optimizer)
    if groups is None or not isinstance(optimizer.get(schema.STATE), Mapping):
        return []
    names = [list(group[schema.PARAMS]) for group in groups]
    return names if all(isinstance(name, str) for group in names for name in group) else []


def partition_info(names: Sequence[Sequence[str]], modules: Sequence[Iterable[str]] = ()) -> dict[str, int]:
    """The pipeline stage of each module, under SMP's names: the first one that has a parameter or buffer in it.

    A module that has none is where the module is that it belongs to.

    Args:
        names: Names of the parameters and buffers of each stage.
        modules: Names of further modules, likewise.

    >>> partition_info([["a.w"], ["b.w"]], [["a"], ["b", "b.drop"]])["main/module/module/b/drop"]
    1
    """
    stages = {_MAIN: 0, _WRAPPED.rpartition("/")[0]: 0, _WRAPPED: 0}
    for stage, of_stage in enumerate(names):
        for name in of_stage:
            steps = name.split(".")[:-1]
            for depth in range(1, len(steps) + 1):
                stages.setdefault("/".join([_WRAPPED, *steps[:depth]]), stage)
    for name in sorted(name for of_stage in modules for name in of_stage if name):
        called = f"{_WRAPPED}/{name.replace('.', '/')}"
        stages.setdefault(called, stages.get(called.rpartition("/")[0], 0))
    return stages


def model_file(state: RankState, job: StoredJob, mesh: Mesh) -> dict[Any, Any]:
    """What ``model_{pp}_{tp}.pt`` holds.

    Raises:
        UnsupportedStateError: The model is no dict.
    """
    tree = state.members(schema.MODEL)
    tensors = {name: state.tensors[at.path] for name, at in tree.items() if isinstance(at, LeafAt)}
    ours = {
        SPECS: {name: tensor.spec for name, tensor in tensors.items()},
        # Where a split has padded the tensors, their shapes do not say how large the whole is.
        SHAPES: {name: tensor.full for name, tensor in tensors.items()},
    }
    info = {
        "tensor_parallel_degree": mesh.tp,
        "pipeline_parallel_degree": mesh.pp,
        PARTITIONS: dict(job.partitions),
        ADDED_KEY: ours,
    }
    return with_metadata_of(tree, {**tree, IS_PARTIAL: True, LOAD_INFO: info})


def optimizer_file(state: RankState, job: StoredJob) -> dict[Any, Any]:
    """What ``optimizer_states_{pp}_{tp}.pt`` holds, or, for rows that ZeRO-1 dealt out, a file of each dp rank.

    All tensor-parallel ranks have the states of parameters that are not split, too: 1.12 loads each file as it is, and
    asks no other rank.

    Raises:
        UnsupportedStateError: The optimizer's state is no dict.
    """
    tree = state.members(schema.OPTIMIZER)
    if not job.groups:
        return {**tree, IS_PARTIAL: True}
    number = job.number
    content = {
        "state": by_number(tree[schema.STATE], number),
        "param_groups": [
            _group(group, names, number) for group, names in zip(tree[schema.GROUPS], job.groups, strict=False)
        ],
        **{key: value for key, value in tree.items() if key not in schema.OF_OPTIMIZER},
        IS_PARTIAL: True,
    }
    if state.zero1:
        own = {number[name]: list(shape) for name, shape in state.shapes.items() if name in number}
        content[ADDED_KEY] = {SHAPES: own}
    return content


def _group(group: Mapping[str, Any], names: Sequence[Any], number: Mapping[Any, int]) -> dict[str, Any]:
    """A group of the optimizer, with the parameters of all stages."""
    options = {key: value for key, value in group.items() if key != schema.PARAMS}
    named = {} if any(name.startswith("#") for name in names) else {PARAM_NAMES: list(names)}
    return {**options, schema.PARAMS: [number[name] for name in names], **named}


def masters_file(state: RankState, job: StoredJob, known: Mapping[str, Any]) -> dict[str, Any]:
    """What ``fp16_states_{pp}_{tp}.pt`` holds: the master weights of this stage, group by group.

    SMP also has its loss scaler there, an object of a class of its own. Where nobody gives one (`known`), the values
    are those of a job that scales no loss.
    """
    masters = state.parts[schema.OPTIMIZER][schema.MASTER]
    names = [[name for name in group if name in masters] for group in job.groups]
    return {
        "loss_scaler": None,
        "dynamic_loss_scale": False,
        "overflow": False,
        "first_closure_call_this_step": True,
        **known,
        MASTERS: [[masters[name] for name in group] for group in names],
        ADDED_KEY: {NUMBERS: [[job.number[name] for name in group] for group in names]},
    }


def has_masters(state: RankState) -> bool:
    """Whether an optimizer keeps master weights by parameter name."""
    optimizer = state.parts.get(schema.OPTIMIZER)
    return isinstance(optimizer, Mapping) and schema.MASTER in optimizer and bool(names_of_groups(optimizer))


def config_file(known: Mapping[str, Any], mesh: Mesh, *, zero1: bool) -> dict[str, Any]:
    """What ``smp_config.pt`` holds: the configuration of the job, of which the degrees have to be those of the files.

    Args:
        known: What the program says of it.
        zero1: Whether the rows of the optimizer's states are dealt out.
    """
    return {
        "ddp": True,
        "sharded_data_parallel_degree": 1,
        "smp_version": SMP_VERSION,
        **known,
        "pipeline_parallel_degree": mesh.pp,
        "tensor_parallel_degree": mesh.tp,
        "shard_optimizer_state": zero1,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What a program says of its job, in members of `extras` that are called as SMP calls them."""

    config: Mapping[str, Any]
    """Its configuration: ``extras={"smp_config": {...}}``."""

    partitions: Mapping[str, int] | None
    """Module -> pipeline stage: ``extras={"partition_info": {...}}``."""

    fp16: Mapping[str, Any]
    """What an optimizer of half precision keeps beside master weights: ``extras={"fp16_states": {...}}``."""


def given(extras: Any) -> Given:
    """What a program says of its job. What has arrays in it is left where it is."""
    members = extras if isinstance(extras, Mapping) else {}
    config, partitions, fp16 = (
        {key: value for key, value in member.items() if not any(leaves_in(value))}
        if isinstance(member := members.get(name), Mapping)
        else None
        for name in (stem(JOB_CONFIG), PARTITIONS, FP16_SET)
    )
    return Given(config=config or {}, partitions=partitions, fp16=fp16 or {})
