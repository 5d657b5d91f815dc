"""Loading a `DistributedOptimizer`: full states are cut, partial ones exchanged among the ranks of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from neuron_compat.smp import comm, job, wire
from neuron_compat.smp.entries import Entry
from neuron_compat.smp.errors import UNCHANGED, RdpSizeError, SMPCheckpointError, SMPInvalidArgumentError
from neuron_compat.smp.gathering import guard
from neuron_compat.smp.meeting import together
from neuron_compat.smp.optimizer_state import MASTER, MASTER_NAMES, MASTERS, Description, described
from neuron_compat.smp.stored import Source, StoredState
from neuron_compat.smp.wire import TensorType
from xla_ckpt.facade import IS_PARTIAL, hosted, part_of_whole
from xla_ckpt.logs import get_logger

logger = get_logger(__name__)

CALL = "optimizer.load_state_dict()"

States = dict[int, dict[str, Any]]
"""Number of a parameter of this optimizer -> its states, and its master weight."""


@dataclass(slots=True)
class Incoming:
    """A state dict that is loaded, in one form."""

    is_partial: bool
    groups: list[dict[str, Any]]
    states: dict[Any, dict[str, Any]]
    masters: list[list[Any]]
    master_names: list[list[str]] | None
    scale: Mapping[str, Any]
    source: Source | None
    fits: bool = True
    rdp: int | None = None
    """Over how many ranks it is sharded; None if it is not."""


@dataclass(frozen=True, slots=True)
class _Inventory:
    """What a rank says of its part of a stored optimizer. It travels as JSON, by the names of the fields."""

    source: bool
    """Whether the rank knows the whole set of files."""
    states: Mapping[str, Mapping[str, Description]]
    """Number of a parameter, as text -> what its states are, by key."""
    fits: bool = True
    """Whether the part is of this job's ranks and partitions."""


def incoming(state: Any) -> Incoming:
    """A state dict of any of SMP's forms.

    Raises:
        SMPInvalidArgumentError: It is no dict.
        SMPCheckpointError: It is no state dict of an optimizer.
    """
    if not isinstance(state, Mapping):
        raise SMPInvalidArgumentError("a state dict is a dict", found=type(state).__name__)
    inner = state.get("optimizer_state_dict", state)
    if not isinstance(inner, Mapping) or "state" not in inner or "param_groups" not in inner:
        raise SMPCheckpointError(
            "this is no state dict of an optimizer", expected="state and param_groups", found=", ".join(map(str, state))
        )
    states, groups, rdp = inner["state"], inner["param_groups"], None
    masters, names = state.get(MASTERS), state.get(MASTER_NAMES, _names_of(state))
    if isinstance(states, list):
        rdp = len(states)
        states = {n: of_one for part in states for n, of_one in part.items() if of_one}
        groups = groups[0]
        if masters is not None:
            masters = [[m for part in masters for m in part[i]] for i in range(len(groups))]
            names = None if names is None else [[n for part in names for n in part[i]] for i in range(len(groups))]
    stored = [s for s in (state, inner) if isinstance(s, StoredState)]
    return Incoming(
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


def _names_of(state: Mapping[str, Any]) -> list[list[str]] | None:
    """The names of full master weights, as SMP stores them."""
    groups = state.get("param_name_groups")
    return None if groups is None else [sorted(group, key=group.get) for group in groups]


def load(optimizer: Any, state: Any, strict_partitions: bool) -> None:
    """See `Distributed.load_state_dict`."""
    given = incoming(state)
    if given.is_partial:
        _load_partial(optimizer, given, strict_partitions)
        return
    states = _numbered(optimizer, given)
    entries = optimizer._smp.entries(optimizer)
    cut = {n: {k: _cut(entries[n], k, v) for k, v in of_one.items()} for n, of_one in states.items()}
    _install(optimizer, given, cut)


def load_masters(optimizer: Any, stored: Mapping[str, Any]) -> None:
    """See `Distributed.load_local_fp16_state_dict`."""
    given = Incoming(True, [], {}, [list(g) for g in stored[MASTERS]], stored.get(MASTER_NAMES), stored, None)
    entries = optimizer._smp.entries(optimizer)
    answers = together("mp", CALL, lambda: _say(given, _master_states(optimizer, given)), guard=guard())
    inventories = [_Inventory(**said) for said in answers]
    _check(entries, inventories)
    _put_masters(optimizer, _exchanged(entries, _master_states(optimizer, given), inventories))
    optimizer._smp.take_scale(given.scale)


# -- numbers and names


def _numbered(optimizer: Any, given: Incoming) -> States:
    """The states by the numbers that the parameters have here, and their master weights.

    Raises:
        SMPCheckpointError: It is of other parameters.
    """
    numbers = _own_numbers(optimizer, given.groups)
    states: States = {}
    for number, of_one in given.states.items():
        if not isinstance(number, int):
            continue
        if number not in numbers:
            raise SMPCheckpointError("there are states of a parameter that no group has", found=number)
        if of_one:
            states[numbers[number]] = dict(of_one)
    for number, of_one in _master_states(optimizer, given).items():
        states.setdefault(number, {}).update(of_one)
    return states


def _own_numbers(optimizer: Any, groups: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """Stored number of a parameter -> its number here: by its name, if names are stored."""
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


def _own_groups(optimizer: Any, given: Incoming) -> list[dict[str, Any]]:
    """The stored options for each group here: those that its first parameter had."""
    numbers = _own_numbers(optimizer, given.groups)
    group_of = {numbers[n]: group for group in given.groups for n in group["params"]}
    groups = []
    for group, own in zip(optimizer.param_groups, optimizer._smp.numbers(optimizer), strict=True):
        options = group_of[own[0]] if own else group
        kept = {k: v for k, v in options.items() if k not in ("params", "param_names")}
        if "param_names" in group:
            kept["param_names"] = group["param_names"]
        groups.append({**kept, "params": list(own)})
    return groups


def _master_states(optimizer: Any, given: Incoming) -> States:
    """The stored master weights by the numbers of their parameters.

    Raises:
        SMPCheckpointError: There is another number of them.
    """
    runtime = optimizer._smp
    if runtime.masters is None or not given.masters:
        return {}
    if given.master_names is not None:
        own_number = {name: i for i, name in enumerate(runtime.names(optimizer))}
        called = [name for group in given.master_names for name in group]
        numbers = [own_number.get(name) for name in called]
    else:
        # Without names: those of a rank's partition, or of the model, in the order of the groups.
        entries, here = runtime.entries(optimizer), job.pp_rank()
        numbers = [n for n in runtime.masters_by_number(optimizer) if not given.is_partial or here in entries[n].owners]
    masters = [master for group in given.masters for master in group]
    if len(masters) != len(numbers) or None in numbers:
        raise SMPCheckpointError("there is another number of master weights", expected=len(numbers), found=len(masters))
    return {number: {MASTER: master} for number, master in zip(numbers, masters, strict=True) if number is not None}


# -- full states


def _cut(entry: Entry, key: str, value: Any) -> Any:
    """This rank's part of a state.

    Raises:
        SMPCheckpointError: It has as many dims as the parameter, and another shape.
    """
    if not isinstance(value, torch.Tensor) or value.numel() == 1:
        return value
    shape = tuple(value.shape)
    if entry.is_split and shape == entry.global_shape:
        return part_of_whole(value, entry.place(job.rank()), entry.value.shape)
    _check_shape(entry, key, shape, entry.global_shape)
    return value


def _check_shape(entry: Entry, key: str, shape: Sequence[int], wanted: Sequence[int]) -> None:
    """Refuse a state that has as many dims as its parameter, and another shape."""
    if len(shape) == len(wanted) and tuple(shape) != tuple(wanted) and torch.Size(shape).numel() > 1:
        raise SMPCheckpointError(
            f"the state {'of the master weight' if key == MASTER else key} has another shape than its parameter",
            leaf=entry.name,
            expected=list(wanted),
            found=list(shape),
        )


# -- partial states


def _load_partial(optimizer: Any, given: Incoming, strict_partitions: bool) -> None:
    """Load the parts of all ranks of a model; or, if they do not fit as they are, all files of their set."""
    entries = optimizer._smp.entries(optimizer)
    states: States = {}

    def prepare() -> dict[str, Any]:
        problem = None
        try:
            states.update(_numbered(optimizer, given))
        except SMPCheckpointError as error:
            problem = error
            if given.source is None or strict_partitions:
                raise
        return {**_say(given, states), "fits": given.fits and problem is None}

    inventories = [_Inventory(**said) for said in together("mp", CALL, prepare, guard=guard())]
    try:
        if not all(inventory.fits for inventory in inventories):
            raise SMPCheckpointError("a partial state of other ranks or other partitions", hint=UNCHANGED)
        if job.state.cfg.shard_optimizer_state and given.rdp not in (None, job.rdp_size()):
            raise RdpSizeError.of(given.rdp or 0, job.rdp_size())
        _check(entries, inventories)
    except SMPCheckpointError as error:
        if strict_partitions or given.source is None or not all(inventory.source for inventory in inventories):
            raise
        logger.info("these parts do not fit as they are (%s): loading from all files of the set", error.problem)
        given.source.load(optimizer=optimizer)
        optimizer.drop_others()
        return
    _install(optimizer, given, _exchanged(entries, states, inventories))


def _say(given: Incoming, states: States) -> dict[str, Any]:
    """What a rank tells the others of its part: fields of an `_Inventory`, as JSON."""
    return {"source": given.source is not None, "states": {str(n): described(of_one) for n, of_one in states.items()}}


def _holder(entry: Entry, number: int, inventories: Sequence[_Inventory], tp: int) -> int | None:
    """The first rank of a model, by its `mp_rank`, that has the states that a tensor-parallel rank needs."""
    size = job.tp_size()
    places = (i for i in range(len(inventories)) if not entry.is_split or i % size == tp)
    return next((i for i in places if inventories[i].states.get(str(number))), None)


def _check(entries: Sequence[Entry], inventories: Sequence[_Inventory]) -> None:
    """Refuse states of other shapes than their parameters, with the same error on all ranks."""
    for inventory in inventories:
        for number, descriptions in inventory.states.items():
            entry = entries[int(number)]
            for key, description in descriptions.items():
                if "shape" in description:
                    _check_shape(entry, key, description["shape"], entry.value.shape)


@torch.no_grad()
def _exchanged(entries: Sequence[Entry], own: States, inventories: Sequence[_Inventory]) -> States:
    """The states of all parameters, as this tensor-parallel rank needs them: from the ranks that have them."""
    if len(inventories) == 1:
        return own
    members, here = job.get_mp_group(), job.ranks().of("mp")
    objects = comm.allgather(
        {n: {k: v for k, v in of_one.items() if not isinstance(v, torch.Tensor)} for n, of_one in own.items()},
        comm.MP_GROUP,
    )
    states: States = {}
    for number, entry in enumerate(entries):
        holder = _holder(entry, number, inventories, job.tp_rank())
        if holder is None:
            continue
        kind = "pp" if entry.is_split else "mp"
        states[number] = {}
        for key, description in inventories[holder].states[str(number)].items():
            if "shape" not in description:
                states[number][key] = objects[holder][number][key]
                continue
            value = hosted([own[number][key]])[0] if holder == here else None
            tensor = TensorType.from_json(**description)
            states[number][key] = wire.broadcast(value, tensor.shape, tensor.dtype, members[holder], kind)
    return states


# -- the end of all ways


def _install(optimizer: Any, given: Incoming, states: States) -> None:
    """Put states, options, master weights and loss scale into the optimizer."""
    plain = optimizer.xla_ckpt_plain
    # Copies, as torch's optimizers keep the tensors that they are given: steps would change the argument.
    copies = {
        n: {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in of_one.items() if k != MASTER}
        for n, of_one in states.items()
    }
    others = {k: v for k, v in given.states.items() if not isinstance(k, int)}
    state = {n: of_one for n, of_one in copies.items() if of_one}
    try:
        plain.load_state_dict({"state": {**state, **others}, "param_groups": _own_groups(optimizer, given)})
    except (ValueError, KeyError) as error:
        raise SMPCheckpointError(f"the optimizer did not take its state: {error}") from error
    _put_masters(optimizer, states)
    optimizer._smp.take_scale(given.scale)
    optimizer.drop_others()


@torch.no_grad()
def _put_masters(optimizer: Any, states: States) -> None:
    """Give the master weights the values that are stored, and the parameters those of the master weights."""
    has_masters = False
    for number, parameter in enumerate(optimizer._smp.parameters(optimizer)):
        if MASTER in states.get(number, {}):
            parameter.copy_(states[number][MASTER])
            has_masters = True
    if has_masters:
        optimizer._smp.masters.give_weights()
