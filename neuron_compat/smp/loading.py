"""Loading a `DistributedModel`: what is stored is compared with the model first, on all ranks, and then put into it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from neuron_compat.smp import comm, job, wire
from neuron_compat.smp.entries import Entry, without_marks
from neuron_compat.smp.errors import (
    UNCHANGED,
    IncompatibleCheckpointFoundError,
    MissingKeysInCheckpointError,
    SMPCheckpointError,
    SMPInvalidArgumentError,
)
from neuron_compat.smp.gathering import guard
from neuron_compat.smp.meeting import together
from neuron_compat.smp.stored import Source, StoredState
from neuron_compat.smp.wire import TensorType
from xla_ckpt.display import join_lines
from xla_ckpt.facade import IS_PARTIAL, LOAD_INFO, hosted, part_of_whole
from xla_ckpt.logs import get_logger

logger = get_logger(__name__)

CALL = "model.load_state_dict()"


def load_model_state(
    model: Any,
    state: Mapping[str, Any],
    strict: bool,
    translate: Callable[[dict[str, Any]], Mapping[str, Any]] | None,
    same_partition_load: bool,
    strict_partitions: bool,
) -> Any:
    """See `DistributedModel.load_state_dict`."""
    if not isinstance(state, Mapping):
        raise SMPInvalidArgumentError("a state dict is a dict", found=type(state).__name__)
    if state.get(IS_PARTIAL):
        return _load_partial(model, state, strict, same_partition_load, strict_partitions)
    whole: Mapping[str, Any] = without_marks(state)
    if translate is not None and IS_PARTIAL not in state:  # with the mark, SMP saved it without translating it
        whole = translate(dict(whole))
    return _load_full(model, whole, strict)


# -- a full state dict


def _load_full(model: Any, state: Mapping[str, Any], strict: bool) -> Any:
    """Load this rank's part of whole tensors; the missing and the unexpected names."""
    entries = model.entries()
    keys = check_names(entries, state, strict and not _renames(model.module))
    wanted = {e.name: tuple(e.global_shape) for e in entries if e.is_tensor}
    check_shapes(wanted, {n: tuple(v.shape) for n, v in state.items() if isinstance(v, torch.Tensor)})
    place = {e.name: e for e in entries if e.is_tensor}
    own = {name: _own_part(place[name], value) if name in place else value for name, value in state.items()}
    _install(model.module, own, strict)
    return keys


def _own_part(entry: Entry, whole: Any) -> Any:
    """This rank's part of a whole tensor; any other value as it is."""
    if not isinstance(whole, torch.Tensor):
        return whole
    return part_of_whole(whole, entry.place(job.rank()), entry.value.shape)


def check_names(entries: Sequence[Entry], names: Mapping[str, Any], strict: bool) -> Any:
    """The missing and the unexpected names.

    Raises:
        MissingKeysInCheckpointError: Some are missing, and `strict` is True.
        SMPCheckpointError: Some are unexpected, and `strict` is True.
    """
    own = {entry.name for entry in entries}
    missing = [entry.name for entry in entries if entry.name not in names]
    unexpected = [name for name in names if name not in own]
    if strict and missing:
        inside = next((k for k, v in names.items() if isinstance(v, Mapping) and any(n in v for n in missing)), None)
        hint = None if inside is None else f"They are in its entry {inside!r}: pass that."
        raise MissingKeysInCheckpointError.of(missing, job.tp_rank()).at(leaf=missing[0], hint=hint)
    if strict and unexpected:
        raise SMPCheckpointError(
            f"Loaded checkpoint contains parameter {unexpected[0]} that does not exist in the current model!",
            details=join_lines(unexpected[1:11]) or None,
        )
    return torch.nn.modules.module._IncompatibleKeys(missing, unexpected)


def check_shapes(wanted: Mapping[str, tuple[int, ...]], stored: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse a tensor of another shape, or in the place of something else.

    Raises:
        SMPCheckpointError: There is one.
    """
    for name, shape in wanted.items():
        if name in stored and stored[name] != shape:
            raise SMPCheckpointError(
                "a tensor of another shape is stored", leaf=name, expected=list(shape), found=list(stored[name])
            )


def _renames(module: torch.nn.Module) -> bool:
    """Whether a module changes names when it is loaded, so that torch has to say which of them are missing."""
    return any(part._load_state_dict_pre_hooks for part in module.modules())


def _install(module: torch.nn.Module, state: Mapping[str, Any], strict: bool) -> None:
    """Put this rank's state into the module."""
    try:
        module.load_state_dict(state, strict=strict and _renames(module))
    except RuntimeError as error:
        raise SMPCheckpointError(f"the model did not take its state: {error}") from error


# -- this rank's part


@dataclass(frozen=True, slots=True)
class _Inventory:
    """What a rank says of its part of a stored model. It travels as JSON, by the names of the fields."""

    fits: bool
    """Whether the part is of a job of these degrees."""
    source: bool
    """Whether the rank knows the whole set of files."""
    tensors: Mapping[str, tuple[Sequence[int], str]]
    """Name -> (shape, name of the element type)."""
    others: Sequence[str]
    """The names of what is no tensor."""


@dataclass(frozen=True, slots=True)
class _Origin:
    """Where the stages of a pipeline have an entry of a stored model."""

    stage: int
    """The first stage that has it."""
    tensor: TensorType | None
    """None for what is no tensor."""


def _load_partial(
    model: Any, state: Mapping[str, Any], strict: bool, same_partition_load: bool, strict_partitions: bool
) -> Any:
    """Load the parts of all ranks of a model; or, if they do not fit as they are, all files of their set."""
    info = state.get(LOAD_INFO)
    stored = without_marks(state)
    fits = not isinstance(state, StoredState) or state.fits

    def prepare() -> dict[str, Any]:
        if strict_partitions:
            _refuse_other_degrees(info, fits)
        inventory = _Inventory(
            fits=fits and _same_degrees(info),
            source=_source_of(state) is not None,
            tensors={n: (list(v.shape), str(v.dtype)) for n, v in stored.items() if isinstance(v, torch.Tensor)},
            others=[n for n, v in stored.items() if not isinstance(v, torch.Tensor)],
        )
        return asdict(inventory)

    inventories = [_Inventory(**said) for said in together("mp", CALL, prepare, guard=guard())]
    entries = model.entries()
    try:
        if not all(inventory.fits for inventory in inventories):
            raise _other_ranks(info)
        _check_alike(inventories)
        origins = _origins(inventories)
        keys = check_names(entries, origins, strict and not _renames(model.module))
        check_shapes({e.name: tuple(e.value.shape) for e in entries if e.is_tensor}, _shapes(origins))
    except SMPCheckpointError as error:
        if strict_partitions or not all(inventory.source for inventory in inventories):
            raise
        source = _source_of(state)
        assert source is not None
        logger.info("these parts do not fit as they are (%s): loading from all files of the set", error.problem)
        source.load(model=model, strict=strict)
        return torch.nn.modules.module._IncompatibleKeys([], [])
    if same_partition_load:
        _take_partitions(model, info)
    _install(model.module, _exchanged(stored, origins), strict)
    return keys


def _source_of(state: Any) -> Source | None:
    """The whole set of files that a state is a part of; None if it knows none."""
    return state.source if isinstance(state, StoredState) else None


def _same_degrees(info: Any) -> bool:
    """Whether a state was saved with these degrees. Older versions of SMP did not say theirs."""
    if not isinstance(info, Mapping):
        return True
    cfg = job.state.cfg
    names = ("pipeline_parallel_degree", "tensor_parallel_degree")
    return all(info.get(name) == getattr(cfg, name) for name in names)


def _other_ranks(info: Any) -> SMPCheckpointError:
    """The error for a part of another job, of which no other part is known."""
    said = info if isinstance(info, Mapping) else {}
    return SMPCheckpointError(
        "a partial state of other ranks or other partitions",
        expected=f"pipeline_parallel_degree {job.pp_size()}, tensor_parallel_degree {job.tp_size()}",
        found=f"{said.get('pipeline_parallel_degree')}, {said.get('tensor_parallel_degree')}",
        hint=UNCHANGED,
    )


def _refuse_other_degrees(info: Any, fits: bool) -> None:
    """Raise what SMP does for a part of a job of other degrees."""
    if fits and _same_degrees(info):
        return
    said = info if isinstance(info, Mapping) else {}
    parts = int(said.get("pipeline_parallel_degree", 1)) * int(said.get("tensor_parallel_degree", 1))
    raise IncompatibleCheckpointFoundError.of(parts, (job.pp_size(), job.tp_size(), job.rdp_size()), [])


def _column() -> list[int]:
    """The places of this process' pipeline in what the ranks of a model said, in the order of the stages."""
    ranks = job.ranks().groups
    return [ranks["mp"].index(rank) for rank in ranks["pp"]]


def _origins(inventories: Sequence[_Inventory], column: Sequence[int] | None = None) -> dict[str, _Origin]:
    """Name -> where it comes from, in this process' pipeline, or in that of a `column`."""
    origins: dict[str, _Origin] = {}
    for stage, index in enumerate(_column() if column is None else column):
        for name in inventories[index].others:
            origins.setdefault(name, _Origin(stage, None))
        for name, shape_and_type in inventories[index].tensors.items():
            origins.setdefault(name, _Origin(stage, TensorType.from_json(*shape_and_type)))
    return origins


def _shapes(origins: Mapping[str, _Origin]) -> dict[str, tuple[int, ...]]:
    """The shapes of those that are tensors."""
    return {name: origin.tensor.shape for name, origin in origins.items() if origin.tensor is not None}


def _check_alike(inventories: Sequence[_Inventory]) -> None:
    """Refuse tensor-parallel ranks whose parts are not of one model."""
    size = job.tp_size()
    first, *others = (_origins(inventories, range(tp, len(inventories), size)) for tp in range(size))
    for tp, theirs in enumerate(others, start=1):
        if theirs.keys() != first.keys() or _shapes(theirs) != _shapes(first):
            differing = sorted(first.keys() ^ theirs.keys())
            raise SMPCheckpointError(
                f"the parts of tensor-parallel ranks 0 and {tp} differ",
                leaf=differing[0] if differing else None,
                hint="Parts of two saves, or of two models, were loaded together.",
            )


def _take_partitions(model: Any, info: Any) -> None:
    """Have the model be partitioned as the stored one was, as SMP does."""
    if not isinstance(info, Mapping):
        if job.pp_size() > 1:
            logger.warning(
                "same_partition_load is enabled but smp load info is not saved. To use same_partition_load, make sure "
                "the checkpoint is saved with the most recent smp release"
            )
        return
    said = info.get("partition_info")
    partitions = enforced(said, model.module, job.pp_size()) if isinstance(said, Mapping) else None
    if partitions is not None:
        model.enforce_partitions(partitions)
    elif job.pp_size() > 1:
        logger.warning(
            "same_partition_load is enabled, ensure that the model partitioning decision hasn't changed between the "
            "save and load runs."
        )


@torch.no_grad()
def _exchanged(stored: Mapping[str, Any], origins: Mapping[str, _Origin]) -> dict[str, Any]:
    """What all stages of this process' pipeline have, together. Each tensor comes from the first stage that has it."""
    if job.pp_size() == 1:
        return dict(stored)
    others = comm.allgather({n: v for n, v in stored.items() if not isinstance(v, torch.Tensor)}, comm.PP_GROUP)
    stages = job.get_pp_group()
    state: dict[str, Any] = {}
    for name, origin in origins.items():
        if origin.tensor is None:
            state[name] = others[origin.stage][name]
            continue
        source = stages[origin.stage]
        own = hosted([stored[name]])[0] if source == job.rank() else None
        state[name] = wire.broadcast(own, origin.tensor.shape, origin.tensor.dtype, source, "pp")
    return state


def enforced(info: Mapping[str, Any], model: torch.nn.Module, count: int) -> dict[str, int] | None:
    """The partitions that a checkpoint's ``partition_info`` says; None if it is of other modules.

    SMP calls the modules ``main``, ``main/module``, ``main/module/module`` and so on, from its wrapper inwards.
    """
    named = {_own_name(str(name)): index for name, index in info.items()}
    partitions = {name: named.get(name) for name, _ in model.named_modules()}
    if any(type(index) is not int or not 0 <= index < count for index in partitions.values()):
        return None
    return {name: index for name, index in partitions.items() if index is not None}


def _own_name(name: str) -> str:
    """A module's name without SMP's wrappers.

    >>> _own_name("main/module/module/layers/0"), _own_name("layers.0"), _own_name("main")
    ('layers.0', 'layers.0', '')
    """
    first, *steps = name.split("/")
    if first != "main":
        return name
    while steps and steps[0] == "module":
        del steps[0]
    return ".".join(steps)
