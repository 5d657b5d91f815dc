"""State dicts of a `DistributedModel`: collect, gather and load them.

`ModelStateMixin` has SMP's methods. A load first compares the stored state with the model on all ranks, and then
changes the model. Parts of another topology are loaded from all files of their set.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from neuron_compat.smp import comm, job, tensor_transport
from neuron_compat.smp.errors import (
    UNCHANGED_HINT,
    IncompatibleCheckpointFoundError,
    MissingKeysInCheckpointError,
    SMPCheckpointError,
    SMPInvalidArgumentError,
)
from neuron_compat.smp.rank_sync import run_on_all_ranks
from neuron_compat.smp.state_entries import (
    Partitions,
    StateEntry,
    get_plain_spec,
    list_state_entries,
    strip_smp_entries,
)
from neuron_compat.smp.stored import Source, StoredState
from neuron_compat.smp.tensor_transport import TensorType, gather_full_state, get_required_ranks_hint
from xla_ckpt.display import join_lines
from xla_ckpt.facade import IS_PARTIAL, LOAD_INFO, ParsedRules, move_to_host, slice_rank_part
from xla_ckpt.keywords import check_argument_names
from xla_ckpt.logs import get_logger


class ModelStateMixin:
    """State dict methods of a `DistributedModel`. Subclasses provide `module`, and the entries that this rank owns."""

    module: torch.nn.Module
    _rules: ParsedRules
    """Sharding rules for parameters without sharding attributes."""

    @property
    def partitions(self) -> Partitions:
        """Partition of each module, by name."""
        raise NotImplementedError

    def enforce_partitions(self, partitions: Partitions) -> None:
        """Use the partitions of a checkpoint."""
        raise NotImplementedError

    def taken(self) -> None:
        """Run after a state was loaded."""
        raise NotImplementedError

    @property
    def xla_ckpt_plain(self) -> torch.nn.Module:
        """Inner module, which `xla_ckpt` saves and loads instead of this one."""
        return self.module

    def entries(self) -> list[StateEntry]:
        """Return the entries of the module's state dict, with their partitions and shardings."""
        return list_state_entries(self.module, self.partitions, self._rules)

    def local_entries(self) -> list[StateEntry]:
        """Return the entries that this rank's partition owns."""
        here = job.pp_rank()
        return [entry for entry in self.entries() if here in entry.owners]

    @check_argument_names()
    def local_state_dict(
        self,
        cast_to_cpu: bool = True,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> OrderedDict[str, Any]:
        """Return the entries of this rank's partition, with this rank's shards, without communication.

        Args:
            cast_to_cpu: Copy tensors on an XLA device to the CPU, all in one batch.
            destination: A dict to add the entries to.
            prefix: Prefix of the names.
            keep_vars: Return parameters themselves, not their values.

        Returns:
            The entries by name, with ``_smp_is_partial: True`` and ``_smp_load_info``: the degrees, the partition of
            each module, and under ``xla_ckpt`` the shardings of parameters (``specs``) and the shapes of padded ones.
        """
        job.state.apply_pending_loads()
        entries = self.local_entries()
        state: OrderedDict[str, Any] = OrderedDict() if destination is None else destination
        tensors = [entry.value for entry in entries if entry.is_tensor]
        if not keep_vars:
            tensors = move_to_host(tensors) if cast_to_cpu else [tensor.detach() for tensor in tensors]
        values = iter(tensors)
        for entry in entries:
            state[prefix + entry.name] = next(values) if entry.is_tensor else entry.value
        state[IS_PARTIAL] = True
        state[LOAD_INFO] = self._build_load_info(entries)
        return state

    def _build_load_info(self, entries: Sequence[StateEntry]) -> dict[str, Any]:
        """Return the description of the job in a partial state: ``_smp_load_info``."""
        cfg = job.state.cfg
        split = [e for e in entries if e.sharding is not None]
        padded = {e.name: list(e.global_shape) for e in split if e.sharding is not None and e.sharding.shape}
        return {
            "tensor_parallel_degree": cfg.tensor_parallel_degree,
            "pipeline_parallel_degree": cfg.pipeline_parallel_degree,
            "partition_info": dict(self.partitions),
            "xla_ckpt": {"specs": {e.name: get_plain_spec(e) for e in split}, **({"shapes": padded} if padded else {})},
        }

    @check_argument_names()
    def state_dict(  # SMP's signature
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        cast_to_cpu: bool = True,  # always gathered on the CPU
        gather_to_rank0: bool = True,
    ) -> Any:
        """Return the state dict of the whole model on the CPU, gathered tensor by tensor from the owner ranks.

        All ranks with ``smp.rdp_rank() == 0`` make the call (without tensor parallelism: ``smp.dp_rank() == 0``), or
        all ranks of the job.

        Args:
            destination: A dict to add the entries to.
            prefix: Prefix of the names.
            keep_vars: Return parameters themselves, if this rank has the whole model.
            cast_to_cpu: Accepted.
            gather_to_rank0: Only rank 0 gets the entries, and the other ranks an empty dict. With False, all ranks get
                them.

        Raises:
            TooFewRanksError: Not all of these ranks made the call in time.
            SMPRuntimeError: The ranks have different models.
        """
        job.state.apply_pending_loads()
        state: OrderedDict[str, Any] = OrderedDict() if destination is None else destination
        if gather_to_rank0 and job.get_rank_info().get_rank("rdp") > 0:
            return state
        entries = self.entries()
        alone = len(job.get_mp_group()) == 1
        whole = gather_full_state(entries, "model.state_dict()", gather_to_rank0)
        if alone and keep_vars:
            whole = OrderedDict((e.name, e.value) for e in entries)
        state.update((prefix + name, value) for name, value in whole.items())
        return state

    @check_argument_names()
    def load_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        translate_function: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None,
        same_partition_load: bool = True,
        strict_partitions: bool = False,
    ) -> Any:
        """Load a full state dict, or this rank's partial one, immediately. The dict is unchanged.

        Every rank loads a full one independently. With a partial one, all ranks of a model make the call: a pipeline
        rank runs the whole model, so it receives the other partitions from their ranks. If the parts are of another
        number of ranks or other partitions, they are loaded from their files (`smp.load` returns dicts that reference
        them), on any topology; in that case, all ranks of the job make the call.

        Args:
            state_dict: The result of `state_dict`, `local_state_dict` or `smp.load`.
            strict: True raises an error for missing or unexpected names.
            translate_function: Converts a full state dict of another model to the names of this model.
            same_partition_load: Use the partitions of the checkpoint, if the degrees are the same.
            strict_partitions: Raise an error for a partial state of another number of ranks, as SMP does.

        Returns:
            The missing and the unexpected names, as in `torch.nn.Module.load_state_dict`.

        Raises:
            MissingKeysInCheckpointError: Names of the model are missing, and `strict` is True.
            SMPCheckpointError: There are unexpected names, and `strict` is True; or a shape differs. Nothing was
                changed.
            IncompatibleCheckpointFoundError: See `strict_partitions`.
            TooFewRanksError: Not all ranks of a model made the call in time.
        """
        keys = load_model_state(self, state_dict, strict, translate_function, same_partition_load, strict_partitions)
        self.taken()
        return keys


logger = get_logger(__name__)

LOAD_CALL = "model.load_state_dict()"


def load_model_state(
    model: Any,
    state: Mapping[str, Any],
    strict: bool,
    translate: Callable[[dict[str, Any]], Mapping[str, Any]] | None,
    same_partition_load: bool,
    strict_partitions: bool,
) -> Any:
    """Load a state dict into a model; see `DistributedModel.load_state_dict`."""
    if not isinstance(state, Mapping):
        raise SMPInvalidArgumentError("a state dict is a dict", found=type(state).__name__)
    if state.get(IS_PARTIAL):
        return _load_partial(model, state, strict, same_partition_load, strict_partitions)
    whole: Mapping[str, Any] = strip_smp_entries(state)
    if translate is not None and IS_PARTIAL not in state:  # with this key, SMP saved it without translation
        whole = translate(dict(whole))
    return _load_full(model, whole, strict)


# -- a full state dict


def _load_full(model: Any, state: Mapping[str, Any], strict: bool) -> Any:
    """Load this rank's shards of full tensors, and return the missing and the unexpected names."""
    entries = model.entries()
    keys = check_names(entries, state, strict and not _has_load_hooks(model.module))
    wanted = {e.name: tuple(e.global_shape) for e in entries if e.is_tensor}
    check_shapes(wanted, {n: tuple(v.shape) for n, v in state.items() if isinstance(v, torch.Tensor)})
    place = {e.name: e for e in entries if e.is_tensor}
    own = {name: _cut_own_part(place[name], value) if name in place else value for name, value in state.items()}
    _load_into_module(model.module, own, strict)
    return keys


def _cut_own_part(entry: StateEntry, whole: Any) -> Any:
    """Return this rank's shard of a full tensor; other values unchanged."""
    if not isinstance(whole, torch.Tensor):
        return whole
    return slice_rank_part(whole, entry.place(job.rank()), entry.value.shape)


def check_names(entries: Sequence[StateEntry], names: Mapping[str, Any], strict: bool) -> Any:
    """Return the missing and the unexpected names.

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
    """Raise an error if a shape differs, or if only one of the two values is a tensor.

    Raises:
        SMPCheckpointError: There is such an entry.
    """
    for name, shape in wanted.items():
        if name in stored and stored[name] != shape:
            raise SMPCheckpointError(
                "a tensor of another shape is stored", leaf=name, expected=list(shape), found=list(stored[name])
            )


def _has_load_hooks(module: torch.nn.Module) -> bool:
    """Return True if a module changes names when it is loaded, so that torch must determine the missing ones."""
    return any(part._load_state_dict_pre_hooks for part in module.modules())


def _load_into_module(module: torch.nn.Module, state: Mapping[str, Any], strict: bool) -> None:
    """Load this rank's state into the module."""
    try:
        module.load_state_dict(state, strict=strict and _has_load_hooks(module))
    except RuntimeError as error:
        raise SMPCheckpointError(f"the model did not take its state: {error}") from error


# -- partial state dicts


@dataclass(frozen=True, slots=True)
class _PartDescription:
    """Description of a rank's part of a stored model, sent as JSON with the names of the fields."""

    fits: bool
    """True if the part is of a job with the same degrees."""
    source: bool
    """True if the rank knows the whole set of files."""
    tensors: Mapping[str, tuple[Sequence[int], str]]
    """Name -> (shape, dtype name)."""
    others: Sequence[str]
    """Names of entries that are not tensors."""


@dataclass(frozen=True, slots=True)
class _EntryOrigin:
    """Pipeline stage that has an entry of a stored model."""

    stage: int
    """First stage that has it."""
    tensor: TensorType | None
    """Type of the tensor; None for other values."""


def _load_partial(
    model: Any, state: Mapping[str, Any], strict: bool, same_partition_load: bool, strict_partitions: bool
) -> Any:
    """Load the parts of all ranks of a model; or, if they do not fit, all files of their set."""
    info = state.get(LOAD_INFO)
    stored = strip_smp_entries(state)
    fits = not isinstance(state, StoredState) or state.fits

    def prepare() -> dict[str, Any]:
        if strict_partitions:
            _check_same_degrees(info, fits)
        inventory = _PartDescription(
            fits=fits and _has_same_degrees(info),
            source=_get_source(state) is not None,
            tensors={n: (list(v.shape), str(v.dtype)) for n, v in stored.items() if isinstance(v, torch.Tensor)},
            others=[n for n, v in stored.items() if not isinstance(v, torch.Tensor)],
        )
        return asdict(inventory)

    inventories = [
        _PartDescription(**said) for said in run_on_all_ranks("mp", LOAD_CALL, prepare, hint=get_required_ranks_hint())
    ]
    entries = model.entries()
    try:
        if not all(inventory.fits for inventory in inventories):
            raise _build_degrees_error(info)
        _check_same_tensors(inventories)
        origins = _find_origins(inventories)
        keys = check_names(entries, origins, strict and not _has_load_hooks(model.module))
        check_shapes({e.name: tuple(e.value.shape) for e in entries if e.is_tensor}, _get_shapes(origins))
    except SMPCheckpointError as error:
        if strict_partitions or not all(inventory.source for inventory in inventories):
            raise
        source = _get_source(state)
        assert source is not None
        logger.info("these parts do not fit as they are (%s): loading from all files of the set", error.problem)
        source.load(model=model, strict=strict)
        return torch.nn.modules.module._IncompatibleKeys([], [])
    if same_partition_load:
        _restore_partitions(model, info)
    _load_into_module(model.module, _exchange_entries(stored, origins), strict)
    return keys


def _get_source(state: Any) -> Source | None:
    """Return the whole set of files that a state belongs to; None if it is unknown."""
    return state.source if isinstance(state, StoredState) else None


def _has_same_degrees(info: Any) -> bool:
    """Return True if a state was saved with these degrees. Older versions of SMP did not store them."""
    if not isinstance(info, Mapping):
        return True
    cfg = job.state.cfg
    names = ("pipeline_parallel_degree", "tensor_parallel_degree")
    return all(info.get(name) == getattr(cfg, name) for name in names)


def _build_degrees_error(info: Any) -> SMPCheckpointError:
    """Return the error for a part of another job whose other parts are unknown."""
    said = info if isinstance(info, Mapping) else {}
    return SMPCheckpointError(
        "a partial state of other ranks or other partitions",
        expected=f"pipeline_parallel_degree {job.pp_size()}, tensor_parallel_degree {job.tp_size()}",
        found=f"{said.get('pipeline_parallel_degree')}, {said.get('tensor_parallel_degree')}",
        hint=UNCHANGED_HINT,
    )


def _check_same_degrees(info: Any, fits: bool) -> None:
    """Raise SMP's error for a part of a job with other degrees."""
    if fits and _has_same_degrees(info):
        return
    said = info if isinstance(info, Mapping) else {}
    parts = int(said.get("pipeline_parallel_degree", 1)) * int(said.get("tensor_parallel_degree", 1))
    raise IncompatibleCheckpointFoundError.of(parts, (job.pp_size(), job.tp_size(), job.rdp_size()), [])


def _get_pipeline_indices() -> list[int]:
    """Return the indices of this process's pipeline in the descriptions of a model's ranks, in stage order."""
    ranks = job.get_rank_info().groups
    return [ranks["mp"].index(rank) for rank in ranks["pp"]]


def _find_origins(
    descriptions: Sequence[_PartDescription], column: Sequence[int] | None = None
) -> dict[str, _EntryOrigin]:
    """Return {name: origin} in this process's pipeline, or in the given `column` of descriptions."""
    origins: dict[str, _EntryOrigin] = {}
    for stage, index in enumerate(_get_pipeline_indices() if column is None else column):
        for name in descriptions[index].others:
            origins.setdefault(name, _EntryOrigin(stage, None))
        for name, shape_and_type in descriptions[index].tensors.items():
            origins.setdefault(name, _EntryOrigin(stage, TensorType.from_json(*shape_and_type)))
    return origins


def _get_shapes(origins: Mapping[str, _EntryOrigin]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors."""
    return {name: origin.tensor.shape for name, origin in origins.items() if origin.tensor is not None}


def _check_same_tensors(descriptions: Sequence[_PartDescription]) -> None:
    """Raise an error if the parts of tensor-parallel ranks do not belong to one model."""
    size = job.tp_size()
    first, *others = (_find_origins(descriptions, range(tp, len(descriptions), size)) for tp in range(size))
    for tp, theirs in enumerate(others, start=1):
        if theirs.keys() != first.keys() or _get_shapes(theirs) != _get_shapes(first):
            differing = sorted(first.keys() ^ theirs.keys())
            raise SMPCheckpointError(
                f"the parts of tensor-parallel ranks 0 and {tp} differ",
                leaf=differing[0] if differing else None,
                hint="Parts of two saves, or of two models, were loaded together.",
            )


def _restore_partitions(model: Any, info: Any) -> None:
    """Partition the model as the stored one, as SMP does."""
    if not isinstance(info, Mapping):
        if job.pp_size() > 1:
            logger.warning(
                "same_partition_load is enabled but smp load info is not saved. To use same_partition_load, make sure "
                "the checkpoint is saved with the most recent smp release"
            )
        return
    said = info.get("partition_info")
    partitions = parse_partition_info(said, model.module, job.pp_size()) if isinstance(said, Mapping) else None
    if partitions is not None:
        model.enforce_partitions(partitions)
    elif job.pp_size() > 1:
        logger.warning(
            "same_partition_load is enabled, ensure that the model partitioning decision hasn't changed between the "
            "save and load runs."
        )


@torch.no_grad()
def _exchange_entries(stored: Mapping[str, Any], origins: Mapping[str, _EntryOrigin]) -> dict[str, Any]:
    """Gather the entries of all stages in this process's pipeline, each tensor from the first stage that has it."""
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
        own = move_to_host([stored[name]])[0] if source == job.rank() else None
        state[name] = tensor_transport.broadcast_tensor(own, origin.tensor.shape, origin.tensor.dtype, source, "pp")
    return state


def parse_partition_info(info: Mapping[str, Any], model: torch.nn.Module, count: int) -> dict[str, int] | None:
    """Return the partitions in a checkpoint's ``partition_info``; None if it contains other modules.

    SMP calls the modules ``main``, ``main/module``, ``main/module/module`` and so on, from its wrapper inwards.
    """
    named = {_strip_wrapper_names(str(name)): index for name, index in info.items()}
    partitions = {name: named.get(name) for name, _ in model.named_modules()}
    if any(type(index) is not int or not 0 <= index < count for index in partitions.values()):
        return None
    return {name: index for name, index in partitions.items() if index is not None}


def _strip_wrapper_names(name: str) -> str:
    """Return a module's name without SMP's wrappers.

    >>> [_strip_wrapper_names(name) for name in ("main/module/module/layers/0", "layers.0", "main")]
    ['layers.0', 'layers.0', '']
    """
    first, *steps = name.split("/")
    if first != "main":
        return name
    while steps and steps[0] == "module":
        del steps[0]
    return ".".join(steps)
