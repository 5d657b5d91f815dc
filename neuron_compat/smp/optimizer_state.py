"""State dicts of a `DistributedOptimizer`: collect, gather and load them.

`OptimizerStateMixin` has SMP's methods. Local state dicts contain this rank's partition; full ones are gathered
tensor by tensor. On loading, full states are sharded, and partial ones are exchanged among the ranks of a model, or
loaded from all files of their set if they are of another topology.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from neuron_compat.smp import comm, job, tensor_transport
from neuron_compat.smp.errors import (
    UNCHANGED_HINT,
    RdpSizeError,
    SMPCheckpointError,
    SMPInvalidArgumentError,
    SMPUnsupportedError,
    SMPValidationError,
)
from neuron_compat.smp.rank_sync import run_on_all_ranks
from neuron_compat.smp.state_entries import StateEntry
from neuron_compat.smp.stored import Source, StoredState
from neuron_compat.smp.tensor_transport import GatheredTensor, TensorType, gather_tensors, get_required_ranks_hint
from xla_ckpt.facade import IS_PARTIAL, LocalArray, create_unsharded, map_tensors, move_to_host, slice_rank_part
from xla_ckpt.logs import get_logger


class OptimizerStateMixin:
    """State dict methods of a `DistributedOptimizer`."""

    _smp: Any
    """Indices, names and shares of its parameters, its master weights and its loss scale."""
    param_groups: Any
    state: Any

    def local_state_dict(
        self, cast_to_cpu: bool = True, gather_if_shard: bool = True, fp32_states_only: bool = False
    ) -> dict[str, Any]:
        """Return the states of this rank's partition, with parameter indices over all parameters, as in torch.

        Args:
            cast_to_cpu: Copy tensors on an XLA device to the CPU.
            gather_if_shard: With ``shard_optimizer_state``, rank ``rdp_rank() == 0`` gathers the states of all ranks
                that hold the same parameters, and all of them make the call: ``state`` and ``param_groups`` are then
                lists.
            fp32_states_only: Omit the loss scale and the master weights.

        Returns:
            ``state``, ``param_groups`` and ``_smp_is_partial: True``. On tensor-parallel ranks above 0, the state of a
            replicated parameter is an empty dict. With ``fp16`` these are in ``optimizer_state_dict``, next to the loss
            scale and the master weights (``fp32_from_fp16``); with ``bf16`` the latter are next to them.

        Raises:
            TooFewRanksError: Not all of these ranks made the call in time.
        """
        return build_local_state_dict(
            self, cast_to_cpu=cast_to_cpu, gather=gather_if_shard, without_masters=fp32_states_only
        )

    def local_optimizer_state_dict(self, cast_to_cpu: bool = True) -> dict[str, Any]:
        """Return this rank's states of the parameters in its partition, including those replicated on other ranks."""
        return collect_local_state(self, cast_to_cpu=cast_to_cpu, drop_replicas=False)

    def local_fp16_state_dict(self) -> dict[str, Any]:
        """Return the loss scale, and the master weights of this rank's partition.

        Raises:
            SMPValidationError: There are no master weights.
        """
        if self._smp.masters is None:
            raise SMPValidationError("opt.local_fp16_state_dict can only be called when fp16 is enabled")
        return {**collect_fp16_state(self), **collect_local_masters(self)}

    def state_dict(
        self, cast_to_cpu: bool = True, fp32_states_only: bool = False, gather_to_rank0: bool = False
    ) -> dict[str, Any]:
        """Return the states of all parameters, full and on the CPU, gathered tensor by tensor.

        All ranks with ``smp.rdp_rank() == 0`` make the call (without tensor parallelism: ``smp.dp_rank() == 0``), or
        all ranks of the job; with ``shard_optimizer_state`` all ranks of the job.

        Args:
            cast_to_cpu: Accepted: they are always gathered on the CPU.
            fp32_states_only: Omit the loss scale and the master weights.
            gather_to_rank0: Only rank 0 gets them, and the other ranks an empty dict.

        Returns:
            ``state`` and ``param_groups``, as in a job of one process.

        Raises:
            TooFewRanksError: Not all of these ranks made the call in time.
            SMPUnsupportedError: A state of a sharded parameter has another shape than the parameter.
        """
        return gather_state_dict(self, gather_to_rank0, without_masters=fp32_states_only)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], gather_if_shard: bool = False, strict_partitions: bool = False
    ) -> None:
        """Load a full state dict, or this rank's partial one, immediately. The dict is unchanged.

        With a partial one, all ranks of a model make the call. If the parts are of other ranks or partitions, they are
        loaded from their files, on any topology (see `DistributedModel.load_state_dict`).

        Args:
            state_dict: The result of `state_dict`, `local_state_dict` or `smp.load`.
            gather_if_shard: Accepted.
            strict_partitions: Raise an error for a state that does not fit as it is.

        Raises:
            SMPCheckpointError: It belongs to another optimizer or model. Nothing was changed.
            RdpSizeError: It is sharded over another number of ranks, and its files are unknown.
            TooFewRanksError: Not all ranks of a model made the call in time.
        """
        load_optimizer_state(self, state_dict, strict_partitions)

    def load_local_optimizer_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the result of `local_optimizer_state_dict` on this rank.

        Raises:
            SMPCheckpointError: It is not partial; or see `load_state_dict`.
        """
        if not isinstance(state_dict, Mapping) or not state_dict.get(IS_PARTIAL):
            raise SMPCheckpointError(
                "load_local_optimizer_state_dict does not support loading non-partial optimizer states",
                hint="Use load_state_dict.",
            )
        self.load_state_dict(state_dict)

    def load_local_fp16_state_dict(self, fp16_states: Mapping[str, Any]) -> None:
        """Load the result of `local_fp16_state_dict` on this rank. Call it on all ranks of a model.

        Raises:
            SMPValidationError: There are no master weights to load into.
            SMPCheckpointError: It belongs to another model.
        """
        if self._smp.masters is None:
            raise SMPValidationError("opt.load_local_fp16_state_dict can only be called when fp16 is enabled")
        load_master_weights(self, fp16_states)

    def drop_others(self) -> None:
        """Remove the states of parameters in the shares of other ranks, with ``shard_optimizer_state``."""
        shares = self._smp.shares(self)
        if shares is not None:
            for parameter, rank in zip(self._smp.parameters(self), shares, strict=True):
                if rank != job.rdp_rank():
                    self.state.pop(parameter, None)


MASTERS_KEY = "fp32_from_fp16"
MASTER_NAMES_KEY = "fp32_from_fp16_names"
"""Key for the names of the master weights, group by group. SMP has none, and ignores unknown keys."""

STATE_DICT_CALL = "optimizer.state_dict()"

MASTER_STATE_KEY = "\0master"
"""Key for a master weight among the states of a parameter, while they are exchanged. No optimizer uses this key."""


# -- local states


def collect_local_state(optimizer: Any, *, cast_to_cpu: bool, drop_replicas: bool) -> dict[str, Any]:
    """Return the states of this rank's partition, as a torch state dict with SMP's partial flag.

    Args:
        cast_to_cpu: Copy tensors on an XLA device to the CPU.
        drop_replicas: On tensor-parallel ranks above 0, omit states of replicated parameters.
    """
    packed = optimizer.xla_ckpt_plain.state_dict()
    entries = optimizer._smp.entries(optimizer)
    here, first = job.pp_rank(), job.tp_rank() == 0
    state: dict[Any, Any] = {}
    for number, of_one in packed["state"].items():
        entry = entries[number] if isinstance(number, int) else None
        if entry is None or here in entry.owners:
            drops = entry is not None and drop_replicas and not first and not entry.is_split
            state[number] = {} if drops else of_one
    own = {"state": state, "param_groups": add_parameter_names(optimizer, packed["param_groups"])}
    return {**(move_to_cpu(own) if cast_to_cpu else own), IS_PARTIAL: True}


def add_parameter_names(optimizer: Any, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the groups of a state dict with the names of their parameters, under torch's key."""
    names = optimizer._smp.names(optimizer)
    return [{**group, "param_names": [names[number] for number in group["params"]]} for group in groups]


def move_to_cpu(value: Any) -> Any:
    """Return the same dicts, lists and tuples with their tensors on the CPU, copied in one batch."""
    tensors: list[torch.Tensor] = []
    map_tensors(value, tensors.append)
    moved = iter(move_to_host(tensors))
    return map_tensors(value, lambda _: next(moved))


def collect_local_masters(optimizer: Any) -> dict[str, Any]:
    """Return the master weights of this rank's partition, group by group, and their names; an empty dict without any.

    With ``shard_optimizer_state``, only this rank's share is included.
    """
    runtime = optimizer._smp
    if runtime.masters is None:
        return {}
    entries, names, shares = runtime.entries(optimizer), runtime.names(optimizer), runtime.shares(optimizer)
    masters = {
        number: master.detach()
        for number, master in runtime.masters_by_number(optimizer).items()
        if job.pp_rank() in entries[number].owners and (shares is None or shares[number] == job.rdp_rank())
    }
    groups = [[number for number in group if number in masters] for group in runtime.numbers(optimizer)]
    return {
        MASTERS_KEY: move_to_cpu([[masters[number] for number in group] for group in groups]),
        MASTER_NAMES_KEY: [[names[number] for number in group] for group in groups],
    }


def collect_fp16_state(optimizer: Any) -> dict[str, Any]:
    """Return the loss scale in SMP's stored form."""
    return {
        "loss_scaler": optimizer._smp.stored_scale(),
        "dynamic_loss_scale": optimizer.dynamic_loss_scale,
        "overflow": optimizer.overflow,
        "first_closure_call_this_step": optimizer.first_closure_call_this_step,
    }


def build_local_state_dict(optimizer: Any, *, cast_to_cpu: bool, gather: bool, without_masters: bool) -> dict[str, Any]:
    """Build a local state dict; see `OptimizerStateMixin.local_state_dict`."""
    sharded = optimizer._smp.shares(optimizer) is not None
    inner = collect_local_state(optimizer, cast_to_cpu=cast_to_cpu, drop_replicas=not sharded)
    masters = {} if without_masters else collect_local_masters(optimizer)
    if sharded and gather:
        hint = "With shard_optimizer_state call it on all ranks, and save on those with smp.rdp_rank() == 0."
        run_on_all_ranks("rdp", "optimizer.local_state_dict()", hint=hint)
        parts = comm.gather((inner, masters), comm.RDP_GROUP)
        if parts is not None:
            inner = {key: [part[key] for part, _ in parts] for key in ("state", "param_groups")} | {IS_PARTIAL: True}
            masters = {key: [of_rank[key] for _, of_rank in parts] for key in masters}
    if job.state.cfg.fp16 and not without_masters:
        return {"optimizer_state_dict": inner, **collect_fp16_state(optimizer), **masters}
    return {**inner, **masters}


# -- full states: gather


Description = dict[str, Any]
"""Description of a state as JSON: ``shape`` and ``dtype`` of a tensor, ``value`` of a plain value, empty for others."""


def describe_states(states: Mapping[str, Any]) -> dict[str, Description]:
    """Return the descriptions of a parameter's states, by key."""
    return {key: _describe_state(value) for key, value in states.items()}


def _describe_state(value: Any) -> Description:
    """Return the description of a state."""
    if isinstance(value, torch.Tensor):
        return {"shape": list(value.shape), "dtype": str(value.dtype)}
    return {"value": value} if value is None or type(value) in (bool, int, float, str) else {}


def is_split_like_parameter(entry: StateEntry, shape: Sequence[int], key: str) -> bool:
    """Return True if a state is sharded like its parameter; otherwise it is replicated on all tensor-parallel ranks.

    Raises:
        SMPUnsupportedError: This cannot be determined.
    """
    if not entry.is_split:
        return False
    if tuple(shape) == tuple(entry.value.shape):
        return True
    if torch.Size(shape).numel() == 1:
        return False
    raise SMPUnsupportedError(
        f"the state {key} of a parameter that is split has another shape, so that its parts cannot be joined",
        leaf=entry.name,
        expected=list(entry.value.shape),
        found=list(shape),
        hint="Save partial states: local_state_dict().",
    )


def collect_states(optimizer: Any, packed: Mapping[str, Any], *, without_masters: bool) -> dict[int, dict[str, Any]]:
    """Return the states of each parameter by index, including its master weight."""
    states = {n: dict(of_one) for n, of_one in packed["state"].items() if isinstance(n, int)}
    if not without_masters:
        for number, master in optimizer._smp.masters_by_number(optimizer).items():
            states.setdefault(number, {})[MASTER_STATE_KEY] = master.detach()
    return states


def gather_state_dict(optimizer: Any, to_rank0: bool, *, without_masters: bool) -> dict[str, Any]:
    """Gather a full state dict; see `OptimizerStateMixin.state_dict`."""
    runtime = optimizer._smp
    entries, shares = runtime.entries(optimizer), runtime.shares(optimizer)
    kind = "mp" if shares is None else "world"
    if to_rank0 and shares is None and job.rdp_rank() > 0:
        return {}
    packed = optimizer.xla_ckpt_plain.state_dict()
    states = collect_states(optimizer, packed, without_masters=without_masters)
    to_send: dict[StateKey, torch.Tensor] = {}

    def prepare() -> dict[str, Any]:
        for number, of_one in states.items():
            for key, value in of_one.items():
                if isinstance(value, torch.Tensor):
                    is_split_like_parameter(entries[number], value.shape, key)
        own = {
            (n, key): value
            for n, of_one in states.items()
            if job.rank() in _find_source_ranks(entries[n], shares, n, split=True)
            for key, value in of_one.items()
            if isinstance(value, torch.Tensor)
        }
        to_send.update(zip(own, move_to_host(list(own.values())), strict=True))
        return {str(n): describe_states(of_one) for n, of_one in states.items()}

    hint = (
        get_required_ranks_hint() if shares is None else "With shard_optimizer_state call it on all ranks of the job."
    )
    descriptions = dict(
        zip(job.get_rank_info().groups[kind], run_on_all_ranks(kind, STATE_DICT_CALL, prepare, hint=hint), strict=True)
    )
    parts, stored = _plan_gather(entries, shares, descriptions)
    tensors = gather_tensors(parts, to_send, kind, to_rank0)
    objects = comm.allgather(_select_objects(states), comm.MP_GROUP if kind == "mp" else comm.WORLD)
    if to_rank0 and job.rank() != 0:
        return {}
    gathered: dict[int, dict[str, Any]] = {}
    ranks = job.get_rank_info().groups[kind]
    for number, key, source, description in stored:
        if "shape" in description:
            value = tensors[(number, key)]
        elif "value" in description:
            value = description["value"]
        else:
            value = objects[ranks.index(source)][number][key]
        gathered.setdefault(number, {})[key] = value
    return _assemble_state_dict(optimizer, packed, gathered, without_masters=without_masters)


def _find_source_ranks(entry: StateEntry, shares: Sequence[int] | None, number: int, *, split: bool) -> tuple[int, ...]:
    """Return the ranks that the states of a parameter come from."""
    here = job.get_rank_info()
    rdp = here.get_rank("rdp") if shares is None else shares[number]
    tps = range(job.tp_size() if split and entry.is_split else 1)
    return tuple(here.mesh.rank({"pp": entry.owners[0], "dp": rdp, "tp": tp}) for tp in tps)


StateKey = tuple[int, str]
"""(index of a parameter, key of a state)."""

StateOrigin = tuple[int, str, int, Description]
"""(index of a parameter, key of a state, rank that it comes from, its description)."""


def _plan_gather(
    entries: Sequence[StateEntry],
    shares: Sequence[int] | None,
    descriptions: Mapping[int, Mapping[str, Mapping[str, Description]]],
) -> tuple[dict[StateKey, GatheredTensor], list[StateOrigin]]:
    """Return the tensors to gather, and all states in the order of the parameters; the same on all ranks.

    Args:
        descriptions: Rank -> index of a parameter, as a string -> key of a state -> its description.
    """
    parts: dict[StateKey, GatheredTensor] = {}
    stored: list[StateOrigin] = []
    for number, entry in enumerate(entries):
        first = _find_source_ranks(entry, shares, number, split=False)[0]
        for key, description in descriptions[first].get(str(number), {}).items():
            stored.append((number, key, first, description))
            if "shape" not in description:
                continue
            tensor = TensorType.from_json(**description)
            split = is_split_like_parameter(entry, tensor.shape, key)
            sources = _find_source_ranks(entry, shares, number, split=split)
            places: tuple[LocalArray, ...] = tuple(
                entry.place(r) if split else create_unsharded(tensor.shape) for r in sources
            )
            parts[(number, key)] = GatheredTensor(tensor.shape, tensor.dtype, sources, places)
    return parts, stored


def _select_objects(states: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return the states that are neither tensors nor plain values."""
    objects = {n: {k: v for k, v in of_one.items() if not _describe_state(v)} for n, of_one in states.items()}
    return {n: of_one for n, of_one in objects.items() if of_one}


def _assemble_state_dict(
    optimizer: Any, packed: Mapping[str, Any], states: dict[int, dict[str, Any]], *, without_masters: bool
) -> dict[str, Any]:
    """Build SMP's state dict from the states of all parameters."""
    masters = {number: of_one.pop(MASTER_STATE_KEY) for number, of_one in states.items() if MASTER_STATE_KEY in of_one}
    inner = {
        "state": {
            **{number: of_one for number, of_one in states.items() if of_one},
            **{key: move_to_cpu(value) for key, value in packed["state"].items() if not isinstance(key, int)},
        },
        "param_groups": move_to_cpu(add_parameter_names(optimizer, packed["param_groups"])),
    }
    extra: dict[str, Any] = {}
    if optimizer._smp.masters is not None and not without_masters:
        names = optimizer._smp.names(optimizer)
        numbers = [[n for n in group["params"] if n in masters] for group in packed["param_groups"]]
        extra = {
            MASTERS_KEY: [[masters[n] for n in group] for group in numbers],
            MASTER_NAMES_KEY: [[names[n] for n in group] for group in numbers],
            "param_name_groups": [{names[n]: i for i, n in enumerate(group)} for group in numbers],
        }
    if job.state.cfg.fp16 and not without_masters:
        return {"optimizer_state_dict": inner, **collect_fp16_state(optimizer), **extra}
    return {**inner, **extra}


logger = get_logger(__name__)

LOAD_CALL = "optimizer.load_state_dict()"

States = dict[int, dict[str, Any]]
"""Index of a parameter of this optimizer -> its states, and its master weight."""


@dataclass(slots=True)
class ParsedStateDict:
    """State dict to load, in a normalized form."""

    is_partial: bool
    groups: list[dict[str, Any]]
    states: dict[Any, dict[str, Any]]
    masters: list[list[Any]]
    master_names: list[list[str]] | None
    scale: Mapping[str, Any]
    source: Source | None
    fits: bool = True
    rdp: int | None = None
    """Number of ranks over which it is sharded; None if it is not."""


@dataclass(frozen=True, slots=True)
class _PartDescription:
    """Description of a rank's part of a stored optimizer, sent as JSON with the names of the fields."""

    source: bool
    """True if the rank knows the whole set of files."""
    states: Mapping[str, Mapping[str, Description]]
    """Index of a parameter, as a string -> descriptions of its states, by key."""
    fits: bool = True
    """True if the part is of this job's ranks and partitions."""


def parse_state_dict(state: Any) -> ParsedStateDict:
    """Parse a state dict in any form that SMP writes.

    Raises:
        SMPInvalidArgumentError: It is not a dict.
        SMPCheckpointError: It is not an optimizer state dict.
    """
    if not isinstance(state, Mapping):
        raise SMPInvalidArgumentError("a state dict is a dict", found=type(state).__name__)
    inner = state.get("optimizer_state_dict", state)
    if not isinstance(inner, Mapping) or "state" not in inner or "param_groups" not in inner:
        raise SMPCheckpointError(
            "this is no state dict of an optimizer", expected="state and param_groups", found=", ".join(map(str, state))
        )
    states, groups, rdp = inner["state"], inner["param_groups"], None
    masters, names = state.get(MASTERS_KEY), state.get(MASTER_NAMES_KEY, _get_master_names(state))
    if isinstance(states, list):
        rdp = len(states)
        states = {n: of_one for part in states for n, of_one in part.items() if of_one}
        groups = groups[0]
        if masters is not None:
            masters = [[m for part in masters for m in part[i]] for i in range(len(groups))]
            names = None if names is None else [[n for part in names for n in part[i]] for i in range(len(groups))]
    stored = [s for s in (state, inner) if isinstance(s, StoredState)]
    return ParsedStateDict(
        is_partial=bool(inner.get(IS_PARTIAL)),
        groups=[dict(group) for group in groups],
        states={n: dict(of_one) if isinstance(of_one, Mapping) else of_one for n, of_one in states.items()},
        masters=[list(group) for group in masters or []],
        master_names=names,
        scale=state if inner is not state else {},
        source=next((s.source for s in stored if s.source is not None), None),
        fits=all(s.fits for s in stored),
        rdp=rdp,
    )


def _get_master_names(state: Mapping[str, Any]) -> list[list[str]] | None:
    """Return the names of full master weights, as SMP stores them."""
    groups = state.get("param_name_groups")
    return None if groups is None else [sorted(group, key=group.get) for group in groups]


def load_optimizer_state(optimizer: Any, state: Any, strict_partitions: bool) -> None:
    """Load a state dict; see `OptimizerStateMixin.load_state_dict`."""
    given = parse_state_dict(state)
    if given.is_partial:
        _load_partial(optimizer, given, strict_partitions)
        return
    states = _renumber_states(optimizer, given)
    entries = optimizer._smp.entries(optimizer)
    cut = {n: {k: _cut_state(entries[n], k, v) for k, v in of_one.items()} for n, of_one in states.items()}
    _load_into_optimizer(optimizer, given, cut)


def load_master_weights(optimizer: Any, stored: Mapping[str, Any]) -> None:
    """Load master weights; see `OptimizerStateMixin.load_local_fp16_state_dict`."""
    given = ParsedStateDict(
        True, [], {}, [list(g) for g in stored[MASTERS_KEY]], stored.get(MASTER_NAMES_KEY), stored, None
    )
    entries = optimizer._smp.entries(optimizer)
    answers = run_on_all_ranks(
        "mp",
        LOAD_CALL,
        lambda: _describe_part(given, _get_master_states(optimizer, given)),
        hint=get_required_ranks_hint(),
    )
    inventories = [_PartDescription(**said) for said in answers]
    _check_shapes(entries, inventories)
    _restore_master_weights(optimizer, _exchange_states(entries, _get_master_states(optimizer, given), inventories))
    optimizer._smp.take_scale(given.scale)


# -- parameter indices and names


def _renumber_states(optimizer: Any, parsed: ParsedStateDict) -> States:
    """Return the states, and the master weights, by the parameter indices of this optimizer.

    Raises:
        SMPCheckpointError: It belongs to other parameters.
    """
    numbers = _map_parameter_numbers(optimizer, parsed.groups)
    states: States = {}
    for number, of_one in parsed.states.items():
        if not isinstance(number, int):
            continue
        if number not in numbers:
            raise SMPCheckpointError("there are states of a parameter that no group has", found=number)
        if of_one:
            states[numbers[number]] = dict(of_one)
    for number, of_one in _get_master_states(optimizer, parsed).items():
        states.setdefault(number, {}).update(of_one)
    return states


def _map_parameter_numbers(optimizer: Any, groups: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """Return {stored parameter index: index here}, matched by name if names are stored."""
    names = optimizer._smp.names(optimizer)
    stored = [number for group in groups for number in group["params"]]
    if len(stored) != len(names):
        raise SMPCheckpointError("the state is of another number of parameters", expected=len(names), found=len(stored))
    called = [name for group in groups for name in group.get("param_names") or []]
    if len(called) != len(stored) or called == names:
        sizes, own = [len(g["params"]) for g in groups], [len(g["params"]) for g in optimizer.param_groups]
        if sizes != own and called != names:
            raise SMPCheckpointError("the state is of other groups of parameters", expected=own, found=sizes)
        return {number: i for i, number in enumerate(stored)}
    own_number = {name: i for i, name in enumerate(names)}
    unknown = [name for name in called if name not in own_number]
    if unknown:
        raise SMPCheckpointError("the state is of a parameter that is not in the optimizer", leaf=unknown[0])
    return {number: own_number[name] for number, name in zip(stored, called, strict=True)}


def _build_param_groups(optimizer: Any, parsed: ParsedStateDict) -> list[dict[str, Any]]:
    """Return the stored options for each group here: the options of its first parameter."""
    numbers = _map_parameter_numbers(optimizer, parsed.groups)
    group_of = {numbers[n]: group for group in parsed.groups for n in group["params"]}
    groups = []
    for group, own in zip(optimizer.param_groups, optimizer._smp.numbers(optimizer), strict=True):
        options = group_of[own[0]] if own else group
        kept = {k: v for k, v in options.items() if k not in ("params", "param_names")}
        if "param_names" in group:
            kept["param_names"] = group["param_names"]
        groups.append({**kept, "params": list(own)})
    return groups


def _get_master_states(optimizer: Any, parsed: ParsedStateDict) -> States:
    """Return the stored master weights by the indices of their parameters.

    Raises:
        SMPCheckpointError: Their number differs.
    """
    runtime = optimizer._smp
    if runtime.masters is None or not parsed.masters:
        return {}
    if parsed.master_names is not None:
        own_number = {name: i for i, name in enumerate(runtime.names(optimizer))}
        called = [name for group in parsed.master_names for name in group]
        numbers = [own_number.get(name) for name in called]
    else:
        # Without names: the parameters of a rank's partition, or of the model, in the order of the groups.
        entries, here = runtime.entries(optimizer), job.pp_rank()
        numbers = [
            n for n in runtime.masters_by_number(optimizer) if not parsed.is_partial or here in entries[n].owners
        ]
    masters = [master for group in parsed.masters for master in group]
    if len(masters) != len(numbers) or None in numbers:
        raise SMPCheckpointError("there is another number of master weights", expected=len(numbers), found=len(masters))
    return {
        number: {MASTER_STATE_KEY: master}
        for number, master in zip(numbers, masters, strict=True)
        if number is not None
    }


# -- full states: load


def _cut_state(entry: StateEntry, key: str, value: Any) -> Any:
    """Return this rank's shard of a state.

    Raises:
        SMPCheckpointError: It has as many dims as the parameter, but another shape.
    """
    if not isinstance(value, torch.Tensor) or value.numel() == 1:
        return value
    shape = tuple(value.shape)
    if entry.is_split and shape == entry.global_shape:
        return slice_rank_part(value, entry.place(job.rank()), entry.value.shape)
    _check_state_shape(entry, key, shape, entry.global_shape)
    return value


def _check_state_shape(entry: StateEntry, key: str, shape: Sequence[int], wanted: Sequence[int]) -> None:
    """Raise an error for a state that has as many dims as its parameter, but another shape."""
    if len(shape) == len(wanted) and tuple(shape) != tuple(wanted) and torch.Size(shape).numel() > 1:
        raise SMPCheckpointError(
            f"the state {'of the master weight' if key == MASTER_STATE_KEY else key} has another shape than its "
            "parameter",
            leaf=entry.name,
            expected=list(wanted),
            found=list(shape),
        )


# -- partial states: load


def _load_partial(optimizer: Any, parsed: ParsedStateDict, strict_partitions: bool) -> None:
    """Load the parts of all ranks of a model; or, if they do not fit, all files of their set."""
    entries = optimizer._smp.entries(optimizer)
    states: States = {}

    def prepare() -> dict[str, Any]:
        problem = None
        try:
            states.update(_renumber_states(optimizer, parsed))
        except SMPCheckpointError as error:
            problem = error
            if parsed.source is None or strict_partitions:
                raise
        return {**_describe_part(parsed, states), "fits": parsed.fits and problem is None}

    inventories = [
        _PartDescription(**said) for said in run_on_all_ranks("mp", LOAD_CALL, prepare, hint=get_required_ranks_hint())
    ]
    try:
        if not all(inventory.fits for inventory in inventories):
            raise SMPCheckpointError("a partial state of other ranks or other partitions", hint=UNCHANGED_HINT)
        if job.state.cfg.shard_optimizer_state and parsed.rdp not in (None, job.rdp_size()):
            raise RdpSizeError.of(parsed.rdp or 0, job.rdp_size())
        _check_shapes(entries, inventories)
    except SMPCheckpointError as error:
        if strict_partitions or parsed.source is None or not all(inventory.source for inventory in inventories):
            raise
        logger.info("these parts do not fit as they are (%s): loading from all files of the set", error.problem)
        parsed.source.load(optimizer=optimizer)
        optimizer.drop_others()
        return
    _load_into_optimizer(optimizer, parsed, _exchange_states(entries, states, inventories))


def _describe_part(parsed: ParsedStateDict, states: States) -> dict[str, Any]:
    """Return the description of a rank's part that is sent to the others: fields of a `_PartDescription`, as JSON."""
    return {
        "source": parsed.source is not None,
        "states": {str(n): describe_states(of_one) for n, of_one in states.items()},
    }


def _find_holder(entry: StateEntry, number: int, descriptions: Sequence[_PartDescription], tp: int) -> int | None:
    """Return the first rank of a model, by `mp_rank`, that has the states that a tensor-parallel rank needs."""
    size = job.tp_size()
    places = (i for i in range(len(descriptions)) if not entry.is_split or i % size == tp)
    return next((i for i in places if descriptions[i].states.get(str(number))), None)


def _check_shapes(entries: Sequence[StateEntry], inventories: Sequence[_PartDescription]) -> None:
    """Raise an error for states of other shapes than their parameters, the same on all ranks."""
    for inventory in inventories:
        for number, descriptions in inventory.states.items():
            entry = entries[int(number)]
            for key, description in descriptions.items():
                if "shape" in description:
                    _check_state_shape(entry, key, description["shape"], entry.value.shape)


@torch.no_grad()
def _exchange_states(entries: Sequence[StateEntry], own: States, descriptions: Sequence[_PartDescription]) -> States:
    """Exchange the states of all parameters, so that this tensor-parallel rank has those it needs."""
    if len(descriptions) == 1:
        return own
    members, here = job.get_mp_group(), job.get_rank_info().get_rank("mp")
    objects = comm.allgather(
        {n: {k: v for k, v in of_one.items() if not isinstance(v, torch.Tensor)} for n, of_one in own.items()},
        comm.MP_GROUP,
    )
    states: States = {}
    for number, entry in enumerate(entries):
        holder = _find_holder(entry, number, descriptions, job.tp_rank())
        if holder is None:
            continue
        kind = "pp" if entry.is_split else "mp"
        states[number] = {}
        for key, description in descriptions[holder].states[str(number)].items():
            if "shape" not in description:
                states[number][key] = objects[holder][number][key]
                continue
            value = move_to_host([own[number][key]])[0] if holder == here else None
            tensor = TensorType.from_json(**description)
            states[number][key] = tensor_transport.broadcast_tensor(
                value, tensor.shape, tensor.dtype, members[holder], kind
            )
    return states


# -- installation


def _load_into_optimizer(optimizer: Any, parsed: ParsedStateDict, states: States) -> None:
    """Load states, options, master weights and loss scale into the optimizer."""
    plain = optimizer.xla_ckpt_plain
    # Copies, because torch's optimizers keep the given tensors, and steps would change the argument.
    copies = {
        n: {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in of_one.items() if k != MASTER_STATE_KEY}
        for n, of_one in states.items()
    }
    others = {k: v for k, v in parsed.states.items() if not isinstance(k, int)}
    state = {n: of_one for n, of_one in copies.items() if of_one}
    try:
        plain.load_state_dict({"state": {**state, **others}, "param_groups": _build_param_groups(optimizer, parsed)})
    except (ValueError, KeyError) as error:
        raise SMPCheckpointError(f"the optimizer did not take its state: {error}") from error
    _restore_master_weights(optimizer, states)
    optimizer._smp.take_scale(parsed.scale)
    optimizer.drop_others()


@torch.no_grad()
def _restore_master_weights(optimizer: Any, states: States) -> None:
    """Copy stored values to the master weights, and the master weights to the parameters."""
    has_masters = False
    for number, parameter in enumerate(optimizer._smp.parameters(optimizer)):
        if MASTER_STATE_KEY in states.get(number, {}):
            parameter.copy_(states[number][MASTER_STATE_KEY])
            has_masters = True
    if has_masters:
        optimizer._smp.masters.give_weights()
