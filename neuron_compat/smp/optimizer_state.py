"""The state of a `DistributedOptimizer`: of this rank's partition, or of the whole model, gathered tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from neuron_compat.smp import comm, job
from neuron_compat.smp.entries import Entry
from neuron_compat.smp.errors import SMPUnsupportedError
from neuron_compat.smp.gathering import Part, collected, guard
from neuron_compat.smp.meeting import together
from neuron_compat.smp.wire import TensorType
from xla_ckpt.facade import IS_PARTIAL, LocalArray, changed_tensors, hosted, whole

MASTERS = "fp32_from_fp16"
MASTER_NAMES = "fp32_from_fp16_names"
"""The names of the master weights, group by group: SMP has none, and leaves alone what it does not know."""

CALL = "optimizer.state_dict()"

MASTER = "\0master"
"""A master weight among the states of a parameter, while they are exchanged: no optimizer has such a state."""


# -- this rank's


def own_state(optimizer: Any, *, cast_to_cpu: bool, drops_copies: bool) -> dict[str, Any]:
    """The states of this rank's partition, as a dict of torch's with SMP's mark.

    Args:
        cast_to_cpu: Bring tensors on an XLA device to the CPU.
        drops_copies: On tensor-parallel ranks above 0, leave out states of what is not split.
    """
    packed = optimizer.xla_ckpt_plain.state_dict()
    entries = optimizer._smp.entries(optimizer)
    here, first = job.pp_rank(), job.tp_rank() == 0
    state: dict[Any, Any] = {}
    for number, of_one in packed["state"].items():
        entry = entries[number] if isinstance(number, int) else None
        if entry is None or here in entry.owners:
            drops = entry is not None and drops_copies and not first and not entry.is_split
            state[number] = {} if drops else of_one
    own = {"state": state, "param_groups": named_groups(optimizer, packed["param_groups"])}
    return {**(on_cpu(own) if cast_to_cpu else own), IS_PARTIAL: True}


def named_groups(optimizer: Any, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The groups of a state dict, with the names of their parameters (torch's own key for them)."""
    names = optimizer._smp.names(optimizer)
    return [{**group, "param_names": [names[number] for number in group["params"]]} for group in groups]


def on_cpu(value: Any) -> Any:
    """The same dicts, lists and tuples with their tensors on the CPU, brought there in one batch."""
    tensors: list[torch.Tensor] = []
    changed_tensors(value, tensors.append)
    moved = iter(hosted(tensors))
    return changed_tensors(value, lambda _: next(moved))


def own_masters(optimizer: Any) -> dict[str, Any]:
    """The master weights of this rank's partition, group by group, and their names; nothing without any.

    With ``shard_optimizer_state`` they are those of this rank's share.
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
        MASTERS: on_cpu([[masters[number] for number in group] for group in groups]),
        MASTER_NAMES: [[names[number] for number in group] for group in groups],
    }


def fp16_state(optimizer: Any) -> dict[str, Any]:
    """What SMP stores of a loss scale."""
    return {
        "loss_scaler": optimizer._smp.stored_scale(),
        "dynamic_loss_scale": optimizer.dynamic_loss_scale,
        "overflow": optimizer.overflow,
        "first_closure_call_this_step": optimizer.first_closure_call_this_step,
    }


def local_state(optimizer: Any, *, cast_to_cpu: bool, gather: bool, bare: bool) -> dict[str, Any]:
    """See `Distributed.local_state_dict`."""
    sharded = optimizer._smp.shares(optimizer) is not None
    inner = own_state(optimizer, cast_to_cpu=cast_to_cpu, drops_copies=not sharded)
    masters = {} if bare else own_masters(optimizer)
    if sharded and gather:
        hint = "With shard_optimizer_state call it on all ranks, and save on those with smp.rdp_rank() == 0."
        together("rdp", "optimizer.local_state_dict()", guard=hint)
        parts = comm.gather((inner, masters), comm.RDP_GROUP)
        if parts is not None:
            inner = {key: [part[key] for part, _ in parts] for key in ("state", "param_groups")} | {IS_PARTIAL: True}
            masters = {key: [of_rank[key] for _, of_rank in parts] for key in masters}
    if job.state.cfg.fp16 and not bare:
        return {"optimizer_state_dict": inner, **fp16_state(optimizer), **masters}
    return {**inner, **masters}


# -- the whole


Description = dict[str, Any]
"""What a state is, as JSON: ``shape`` and ``dtype`` of a tensor, ``value`` of a plain value, nothing of any other."""


def described(states: Mapping[str, Any]) -> dict[str, Description]:
    """What the states of a parameter are, by key."""
    return {key: _description(value) for key, value in states.items()}


def _description(value: Any) -> Description:
    """What a state is."""
    if isinstance(value, torch.Tensor):
        return {"shape": list(value.shape), "dtype": str(value.dtype)}
    return {"value": value} if value is None or type(value) in (bool, int, float, str) else {}


def lies_like(entry: Entry, shape: Sequence[int], key: str) -> bool:
    """Whether a state is split as its parameter is; otherwise all tensor-parallel ranks have the same.

    Raises:
        SMPUnsupportedError: Nobody knows.
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


def states_of(optimizer: Any, packed: Mapping[str, Any], *, bare: bool) -> dict[int, dict[str, Any]]:
    """The states of each parameter by number, its master weight among them."""
    states = {n: dict(of_one) for n, of_one in packed["state"].items() if isinstance(n, int)}
    if not bare:
        for number, master in optimizer._smp.masters_by_number(optimizer).items():
            states.setdefault(number, {})[MASTER] = master.detach()
    return states


def full_state(optimizer: Any, to_rank0: bool, *, bare: bool) -> dict[str, Any]:
    """See `Distributed.state_dict`."""
    runtime = optimizer._smp
    entries, shares = runtime.entries(optimizer), runtime.shares(optimizer)
    kind = "mp" if shares is None else "world"
    if to_rank0 and shares is None and job.rdp_rank() > 0:
        return {}
    packed = optimizer.xla_ckpt_plain.state_dict()
    states = states_of(optimizer, packed, bare=bare)
    to_send: dict[StateKey, torch.Tensor] = {}

    def prepare() -> dict[str, Any]:
        for number, of_one in states.items():
            for key, value in of_one.items():
                if isinstance(value, torch.Tensor):
                    lies_like(entries[number], value.shape, key)
        own = {
            (n, key): value
            for n, of_one in states.items()
            if job.rank() in _sources(entries[n], shares, n, split=True)
            for key, value in of_one.items()
            if isinstance(value, torch.Tensor)
        }
        to_send.update(zip(own, hosted(list(own.values())), strict=True))
        return {str(n): described(of_one) for n, of_one in states.items()}

    hint = guard() if shares is None else "With shard_optimizer_state call it on all ranks of the job."
    descriptions = dict(zip(job.ranks().groups[kind], together(kind, CALL, prepare, guard=hint), strict=True))
    parts, stored = _parts(entries, shares, descriptions)
    tensors = collected(parts, to_send, kind, to_rank0)
    objects = comm.allgather(_objects(states), comm.MP_GROUP if kind == "mp" else comm.WORLD)
    if to_rank0 and job.rank() != 0:
        return {}
    gathered: dict[int, dict[str, Any]] = {}
    ranks = job.ranks().groups[kind]
    for number, key, source, description in stored:
        if "shape" in description:
            value = tensors[(number, key)]
        elif "value" in description:
            value = description["value"]
        else:
            value = objects[ranks.index(source)][number][key]
        gathered.setdefault(number, {})[key] = value
    return _assembled(optimizer, packed, gathered, bare=bare)


def _sources(entry: Entry, shares: Sequence[int] | None, number: int, *, split: bool) -> tuple[int, ...]:
    """The ranks that the states of a parameter come from."""
    here = job.ranks()
    rdp = here.of("rdp") if shares is None else shares[number]
    tps = range(job.tp_size() if split and entry.is_split else 1)
    return tuple(here.mesh.rank({"pp": entry.owners[0], "dp": rdp, "tp": tp}) for tp in tps)


StateKey = tuple[int, str]
"""(number of a parameter, key of a state)."""

StateOf = tuple[int, str, int, Description]
"""(number of a parameter, key of a state, rank that it comes from, what `described` says of it)."""


def _parts(
    entries: Sequence[Entry],
    shares: Sequence[int] | None,
    descriptions: Mapping[int, Mapping[str, Mapping[str, Description]]],
) -> tuple[dict[StateKey, Part], list[StateOf]]:
    """What is gathered, and all states in the order of the parameters; the same on all ranks.

    Args:
        descriptions: Rank -> number of a parameter, as text -> key of a state -> what the state is.
    """
    parts: dict[StateKey, Part] = {}
    stored: list[StateOf] = []
    for number, entry in enumerate(entries):
        first = _sources(entry, shares, number, split=False)[0]
        for key, description in descriptions[first].get(str(number), {}).items():
            stored.append((number, key, first, description))
            if "shape" not in description:
                continue
            tensor = TensorType.from_json(**description)
            split = lies_like(entry, tensor.shape, key)
            sources = _sources(entry, shares, number, split=split)
            places: tuple[LocalArray, ...] = tuple(entry.place(r) if split else whole(tensor.shape) for r in sources)
            parts[(number, key)] = Part(tensor.shape, tensor.dtype, sources, places)
    return parts, stored


def _objects(states: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """The states that are neither tensors nor plain values."""
    objects = {n: {k: v for k, v in of_one.items() if not _description(v)} for n, of_one in states.items()}
    return {n: of_one for n, of_one in objects.items() if of_one}


def _assembled(
    optimizer: Any, packed: Mapping[str, Any], states: dict[int, dict[str, Any]], *, bare: bool
) -> dict[str, Any]:
    """The state dict that SMP makes of the states of all parameters."""
    masters = {number: of_one.pop(MASTER) for number, of_one in states.items() if MASTER in of_one}
    inner = {
        "state": {
            **{number: of_one for number, of_one in states.items() if of_one},
            **{key: on_cpu(value) for key, value in packed["state"].items() if not isinstance(key, int)},
        },
        "param_groups": on_cpu(named_groups(optimizer, packed["param_groups"])),
    }
    extra: dict[str, Any] = {}
    if optimizer._smp.masters is not None and not bare:
        names = optimizer._smp.names(optimizer)
        numbers = [[n for n in group["params"] if n in masters] for group in packed["param_groups"]]
        extra = {
            MASTERS: [[masters[n] for n in group] for group in numbers],
            MASTER_NAMES: [[names[n] for n in group] for group in numbers],
            "param_name_groups": [{names[n]: i for i, n in enumerate(group)} for group in numbers],
        }
    if job.state.cfg.fp16 and not bare:
        return {"optimizer_state_dict": inner, **fp16_state(optimizer), **extra}
    return {**inner, **extra}
