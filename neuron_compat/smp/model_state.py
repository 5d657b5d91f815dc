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
    """What a `DistributedModel` does about its state. It has `module`, and says what this rank owns of it."""

    module: torch.nn.Module
    _rules: ParsedRules
    """How parameters are split that do not say it themselves."""

    @property
    def partitions(self) -> Partitions:
        """The partition of each module, by its name."""
        raise NotImplementedError

    def enforce_partitions(self, partitions: Partitions) -> None:
        """Take the partitions of a checkpoint."""
        raise NotImplementedError

    def taken(self) -> None:
        """Called when a state was loaded."""
        raise NotImplementedError

    @property
    def xla_ckpt_plain(self) -> torch.nn.Module:
        """What `xla_ckpt` saves and loads in the place of this: the module that was given."""
        return self.module

    def entries(self) -> list[StateEntry]:
        """The entries of the module's state dict, with their partitions and splits."""
        return list_state_entries(self.module, self.partitions, self._rules)

    def local_entries(self) -> list[StateEntry]:
        """The entries that this rank's partition owns."""
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
        """What this rank's partition owns, and this rank's part of what is split; no other rank is asked.

        Args:
            cast_to_cpu: Bring tensors on an XLA device to the CPU, all in one batch.
            destination: A dict to put it in.
            prefix: What to put before the names.
            keep_vars: Parameters themselves, not their values.

        Returns:
            The entries by name, with ``_smp_is_partial: True`` and ``_smp_load_info``: the degrees, the partition of
            each module, and under ``xla_ckpt`` how parameters are split (``specs``) and the shapes of padded ones.
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
        """What a partial state says of the job that saved it: ``_smp_load_info``."""
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
        cast_to_cpu: bool = True,  # it is gathered on the CPU in any case
        gather_to_rank0: bool = True,
    ) -> Any:
        """The whole model, on the CPU, gathered from the owners of its parts tensor by tensor.

        All ranks with ``smp.rdp_rank() == 0`` make the call (without tensor parallelism: ``smp.dp_rank() == 0``), or
        all ranks of the job.

        Args:
            destination: A dict to put it in.
            prefix: What to put before the names.
            keep_vars: Parameters themselves, where this rank has the model for itself.
            cast_to_cpu: Accepted.
            gather_to_rank0: Rank 0 alone gets it, and the other ranks an empty dict. With False all ranks get it.

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
        """Load a full state dict, or this rank's partial one. The dict stays as it is; the load is done at once.

        A full one is loaded by every rank on its own. With a partial one, all ranks of a model make the call together:
        a pipeline rank runs the whole model, so it takes the other partitions from their ranks. If the parts are not of
        this number of ranks and these partitions, they are loaded from their files (`smp.load` returns dicts that know
        them), on any topology; then all ranks of the job make the call.

        Args:
            state_dict: What `state_dict`, `local_state_dict` or `smp.load` returned.
            strict: Whether names that are missing or unknown are an error.
            translate_function: Makes names of this model of those of a full state dict of another one.
            same_partition_load: Take the partitions of the checkpoint, if the degrees are the same.
            strict_partitions: Refuse a partial state of another number of ranks, as SMP does.

        Returns:
            The missing and the unexpected names, as `torch.nn.Module.load_state_dict` does.

        Raises:
            MissingKeysInCheckpointError: Names of the model are missing, and `strict` is True.
            SMPCheckpointError: There are unknown names, and `strict` is True; or a shape differs. Nothing was changed.
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
    """See `DistributedModel.load_state_dict`."""
    if not isinstance(state, Mapping):
        raise SMPInvalidArgumentError("a state dict is a dict", found=type(state).__name__)
    if state.get(IS_PARTIAL):
        return _load_partial(model, state, strict, same_partition_load, strict_partitions)
    whole: Mapping[str, Any] = strip_smp_entries(state)
    if translate is not None and IS_PARTIAL not in state:  # with the mark, SMP saved it without translating it
        whole = translate(dict(whole))
    return _load_full(model, whole, strict)


# -- a full state dict


def _load_full(model: Any, state: Mapping[str, Any], strict: bool) -> Any:
    """Load this rank's part of whole tensors; the missing and the unexpected names."""
    entries = model.entries()
    keys = check_names(entries, state, strict and not _has_load_hooks(model.module))
    wanted = {e.name: tuple(e.global_shape) for e in entries if e.is_tensor}
    check_shapes(wanted, {n: tuple(v.shape) for n, v in state.items() if isinstance(v, torch.Tensor)})
    place = {e.name: e for e in entries if e.is_tensor}
    own = {name: _cut_own_part(place[name], value) if name in place else value for name, value in state.items()}
    _load_into_module(model.module, own, strict)
    return keys


def _cut_own_part(entry: StateEntry, whole: Any) -> Any:
    """This rank's part of a whole tensor; any other value as it is."""
    if not isinstance(whole, torch.Tensor):
        return whole
    return slice_rank_part(whole, entry.place(job.rank()), entry.value.shape)


def check_names(entries: Sequence[StateEntry], names: Mapping[str, Any], strict: bool) -> Any:
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


def _has_load_hooks(module: torch.nn.Module) -> bool:
    """Whether a module changes names when it is loaded, so that torch has to say which of them are missing."""
    return any(part._load_state_dict_pre_hooks for part in module.modules())


def _load_into_module(module: torch.nn.Module, state: Mapping[str, Any], strict: bool) -> None:
    """Put this rank's state into the module."""
    try:
        module.load_state_dict(state, strict=strict and _has_load_hooks(module))
    except RuntimeError as error:
        raise SMPCheckpointError(f"the model did not take its state: {error}") from error


# -- this rank's part


@dataclass(frozen=True, slots=True)
class _PartDescription:
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
class _EntryOrigin:
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
    """The whole set of files that a state is a part of; None if it knows none."""
    return state.source if isinstance(state, StoredState) else None


def _has_same_degrees(info: Any) -> bool:
    """Whether a state was saved with these degrees. Older versions of SMP did not say theirs."""
    if not isinstance(info, Mapping):
        return True
    cfg = job.state.cfg
    names = ("pipeline_parallel_degree", "tensor_parallel_degree")
    return all(info.get(name) == getattr(cfg, name) for name in names)


def _build_degrees_error(info: Any) -> SMPCheckpointError:
    """The error for a part of another job, of which no other part is known."""
    said = info if isinstance(info, Mapping) else {}
    return SMPCheckpointError(
        "a partial state of other ranks or other partitions",
        expected=f"pipeline_parallel_degree {job.pp_size()}, tensor_parallel_degree {job.tp_size()}",
        found=f"{said.get('pipeline_parallel_degree')}, {said.get('tensor_parallel_degree')}",
        hint=UNCHANGED_HINT,
    )


def _check_same_degrees(info: Any, fits: bool) -> None:
    """Raise what SMP does for a part of a job of other degrees."""
    if fits and _has_same_degrees(info):
        return
    said = info if isinstance(info, Mapping) else {}
    parts = int(said.get("pipeline_parallel_degree", 1)) * int(said.get("tensor_parallel_degree", 1))
    raise IncompatibleCheckpointFoundError.of(parts, (job.pp_size(), job.tp_size(), job.rdp_size()), [])


def _get_pipeline_indices() -> list[int]:
    """The places of this process' pipeline in what the ranks of a model said, in the order of the stages."""
    ranks = job.get_rank_info().groups
    return [ranks["mp"].index(rank) for rank in ranks["pp"]]


def _find_origins(
    descriptions: Sequence[_PartDescription], column: Sequence[int] | None = None
) -> dict[str, _EntryOrigin]:
    """Name -> where it comes from, in this process' pipeline, or in that of a `map_column`."""
    origins: dict[str, _EntryOrigin] = {}
    for stage, index in enumerate(_get_pipeline_indices() if column is None else column):
        for name in descriptions[index].others:
            origins.setdefault(name, _EntryOrigin(stage, None))
        for name, shape_and_type in descriptions[index].tensors.items():
            origins.setdefault(name, _EntryOrigin(stage, TensorType.from_json(*shape_and_type)))
    return origins


def _get_shapes(origins: Mapping[str, _EntryOrigin]) -> dict[str, tuple[int, ...]]:
    """The shapes of those that are tensors."""
    return {name: origin.tensor.shape for name, origin in origins.items() if origin.tensor is not None}


def _check_same_tensors(descriptions: Sequence[_PartDescription]) -> None:
    """Refuse tensor-parallel ranks whose parts are not of one model."""
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
    """Have the model be partitioned as the stored one was, as SMP does."""
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
        own = move_to_host([stored[name]])[0] if source == job.rank() else None
        state[name] = tensor_transport.broadcast_tensor(own, origin.tensor.shape, origin.tensor.dtype, source, "pp")
    return state


def parse_partition_info(info: Mapping[str, Any], model: torch.nn.Module, count: int) -> dict[str, int] | None:
    """The partitions that a checkpoint's ``build_partition_info`` says; None if it is of other modules.

    SMP calls the modules ``main``, ``main/module``, ``main/module/module`` and so on, from its wrapper inwards.
    """
    named = {_strip_wrapper_names(str(name)): index for name, index in info.items()}
    partitions = {name: named.get(name) for name, _ in model.named_modules()}
    if any(type(index) is not int or not 0 <= index < count for index in partitions.values()):
        return None
    return {name: index for name, index in partitions.items() if index is not None}


def _strip_wrapper_names(name: str) -> str:
    """A module's name without SMP's wrappers.

    >>> [_strip_wrapper_names(name) for name in ("main/module/module/layers/0", "layers.0", "main")]
    ['layers.0', 'layers.0', '']
    """
    first, *steps = name.split("/")
    if first != "main":
        return name
    while steps and steps[0] == "module":
        del steps[0]
    return ".".join(steps)
