"""Members of extras that differ between ranks, and resharding of data positions to another number of ranks.

Data-parallel ranks read the samples of one order in turn: rank r of n reads the samples r, r + n, r + 2 n, ... After
each has read k, the first k n samples are consumed, and m ranks continue with a count of k n / m each. The resharding
functions support data loaders of torch, torchdata, grain and Hugging Face, and raise an error if samples would be
repeated or skipped.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from xla_ckpt.arrays.torch_objects import is_torch_tensor
from xla_ckpt.core.sharding.mesh import RankInfo, parse_mesh
from xla_ckpt.core.tree import path as paths
from xla_ckpt.core.tree import schema
from xla_ckpt.core.tree.optimizer_schema import Reshard
from xla_ckpt.core.tree.skeleton import get_children
from xla_ckpt.errors import IncompatibleCheckpointError, UsageError, annotate_errors
from xla_ckpt.keywords import check_arguments
from xla_ckpt.logs import get_logger
from xla_ckpt.state import stateful
from xla_ckpt.state.part_load import PartLoadPlan, StoredPart, plan_arrays
from xla_ckpt.state.rng import RNGState
from xla_ckpt.state.state_dict_load import StateDictLoad, backup_state_dict

logger = get_logger(__name__)


class PerRank:
    """A member of `extras` with a separate state on every rank, such as a data loader over a part of the data.

    ``extras={"data": xla_ckpt.PerRank(loader)}`` stores the state of `loader` on every rank, and loads each rank's
    state back. Without it a member that differs between ranks fails the save, so that no rank's state is lost.

    Another mesh cannot use these states directly. For supported data loaders and samplers (docs/objects.md), the
    library computes the states of the new ranks so that no sample is repeated or skipped, or raises an error. For other
    objects pass one of the following; otherwise the load raises an error:

    Args:
        member: The object, with ``state_dict`` and ``load_state_dict``, or with ``get_state`` and ``set_state``.
        reshard: Called as ``reshard(states, rank, world)`` with the states of all ranks that saved; returns the state
            of this rank.
        position: Key in the state of a sampler that holds the number of samples that this rank has read. Data-parallel
            rank r of n must read the samples r, r + n, r + 2 n, ... of an order that does not depend on n. The rest of
            the state, such as the epoch, must be equal on all ranks.

    Raises:
        UsageError: If both are passed, or the member is already wrapped.
    """

    @check_arguments
    def __init__(self, member: Any, reshard: Reshard | None = None, *, position: str | None = None) -> None:
        if isinstance(member, PerRank):
            raise UsageError("a PerRank member is wrapped twice")
        if reshard is not None and position is not None:
            raise UsageError("reshard= and position= of PerRank both say how another number of ranks takes over")
        self.member = member
        self.reshard = reshard
        self.position = position


def is_per_rank(member: Any) -> bool:
    """Return True if a member differs between ranks: it is wrapped in `PerRank`, or its class declares it."""
    return isinstance(member, PerRank) or getattr(member, schema.RANK_COUNT, False) is True


def _get_inner_member(member: Any) -> Any:
    return stateful.with_state_dict(member.member if isinstance(member, PerRank) else member)


def get_extra_tree(member: Any, name: str, placement: RankInfo) -> Any:
    """Return the state of a member, or this rank's part of it if it differs between ranks."""
    state = stateful.get_member_tree(_get_inner_member(member), name)
    if not is_per_rank(member):
        return state
    return {
        schema.RANK_COUNT: placement.world_size,
        schema.MESH: str(placement.mesh),
        schema.RANKS: {str(placement.rank): state},
    }


def get_extra_rank_path(name: str, rank: int) -> str:
    """Return the leaf path of a member's state on one rank."""
    return schema.get_rank_path(schema.get_extras_path(name), rank)


def plan_extra_load(stored: StoredPart, member: Any) -> PartLoadPlan:
    """Plan the load of a member of `extras`, whether or not it is, or was when saved, per rank."""
    where, inner = stored.shardings.placement, _get_inner_member(member)
    saved_by = schema.get_saved_rank_count(stored.skeleton)
    if not is_per_rank(member):
        if saved_by is None:
            return stateful.plan_member_load(stored, inner)
        return _plan_rejected_load(stored, "every rank's own state is stored; wrap the member in xla_ckpt.PerRank")
    if saved_by is None:  # saved by an older version or without PerRank: one state for all ranks
        saved_by, mesh, alike, parts = 1, None, where.world_size == 1, {0: stored}
    else:
        mesh = parse_mesh(stored.skeleton.get(schema.MESH))
        alike = schema.has_same_ranks(stored.skeleton, where.world_size, str(where.mesh))
        parts = {
            r: part
            for r in range(saved_by)
            if (part := stored.find_part(schema.get_rank_path(paths.ROOT, r))) is not None
        }
    own = parts.get(where.rank)
    if isinstance(inner, RNGState) and own is not None and "python" not in (get_children(own.skeleton) or ()):
        # Its generators would be set last, after all other objects have their new state.
        return _plan_rejected_load(
            stored, "another object's state is stored under this name, and none of random generators"
        )
    wrapped = member if isinstance(member, PerRank) else PerRank(member)
    if alike and where.rank in parts:
        return stateful.plan_member_load(parts[where.rank], inner)
    if (reshard := wrapped.reshard) is not None:
        return _plan_resharded_load(
            list(parts.values()), inner, lambda states: reshard(states, where.rank, where.world_size)
        )
    if isinstance(inner, RNGState):
        return _keep_generators(stored, where.rank, saved_by) if own is None else stateful.plan_member_load(own, inner)
    deal = find_position_reshard(wrapped.member, wrapped.position)
    replicas = [] if mesh is None else [parts[r] for i in range(mesh.dp) if (r := mesh.rank({"dp": i})) in parts]
    if deal is None or mesh is None or len(replicas) < mesh.dp:
        return _plan_rejected_load(
            stored,
            f"it is the state of {saved_by} ranks, this job has {where.world_size}"
            f"{'' if mesh is None else f' ({where.mesh} in the place of {mesh})'}: say with position= or reshard= of "
            "PerRank how they take it over",
        )
    rank, world = where.mesh.coordinates(where.rank)["dp"], where.mesh.dp
    if world == mesh.dp:
        return stateful.plan_member_load(replicas[rank], inner)
    dealt = _plan_resharded_load(replicas, inner, lambda states: deal(states, rank, world))
    if not dealt.targets:  # plain values: report the error with all other problems, or ignore it as one of them
        try:
            deal([part.build() for part in replicas], rank, world)
        except IncompatibleCheckpointError as error:
            return _plan_rejected_load(stored, f"{error.problem}. {error.hint}")
    return dealt


def _plan_rejected_load(stored: StoredPart, why: str) -> PartLoadPlan:
    loading = PartLoadPlan()
    loading.add_problem(stored.prefix, why, has_fix=True)
    return loading


def _keep_generators(stored: StoredPart, rank: int, saved_by: int) -> PartLoadPlan:
    """Plan to keep the random generators of a rank without a stored state, with a warning."""
    text = (
        "%s: no state of random generators is stored for rank %d, since %d saved: they stay as they are. Seed them "
        "by the rank, if ranks are to draw different numbers: torch.manual_seed(seed + rank)"
    )
    return PartLoadPlan(finish=lambda arrays: logger.warning(text, stored.prefix, rank, saved_by))


def _plan_resharded_load(parts: Sequence[StoredPart], inner: Any, reshard: Callable[[list[Any]], Any]) -> PartLoadPlan:
    """Plan the load of a state that `reshard` computes from the states of several ranks."""
    loading = PartLoadPlan()
    for part in parts:
        plan_arrays(part, loading, {})
        part.build()  # detect objects that may not be loaded before anything is changed

    def take(arrays: Mapping[str, Any]) -> None:
        with annotate_errors(leaf=leaf):
            inner.load_state_dict(reshard([part.build(lambda path, _: arrays[path]) for part in parts]))

    leaf = next((schema.get_rank_parent(part.prefix) or part.prefix for part in parts), schema.EXTRAS)
    loading.state_dict_load = StateDictLoad(leaf=leaf, load=take, backup=lambda: backup_state_dict(inner))
    return loading


ReshardPosition = Callable[[Sequence[Any], int, int], Any]
"""Function of the states of all data-parallel ranks that saved, a rank, and the current number of ranks, that
returns the state of that rank."""

_RESHARD_HINT = (
    "Load it on as many data-parallel ranks as saved it, give PerRank a function of your own (reshard=), or leave the "
    "member out of extras."
)

_DEFAULT_POSITION_KEY = "yielded"
"""Key for the number of samples read in the state of a torchdata sampler."""


def find_position_reshard(member: Any, position: str | None) -> ReshardPosition | None:
    """Return the function that reshards the data position of a member; None for unsupported members.

    Args:
        member: The object of the program.
        position: The `position` argument of `PerRank`.
    """
    of_torchdata = _is_class_named(member, "torchdata", "StatefulDataLoader")
    if of_torchdata and (position is not None or _is_class_named(member.sampler, "torch", "DistributedSampler")):
        return partial(_reshard_torchdata, member, position or _DEFAULT_POSITION_KEY)
    if position is not None or _is_class_named(member, "torch", "DistributedSampler"):
        return partial(_reshard_counted, position or _DEFAULT_POSITION_KEY)
    if of_torchdata and _is_class_named(member.dataset, "datasets", "IterableDataset"):
        return partial(_reshard_torchdata_over_iterable, member)
    if _is_class_named(member, "grain", "DataLoaderIterator"):
        return _reshard_grain
    if _is_class_named(member, "datasets", "IterableDataset"):
        return partial(_reshard_iterable_dataset, member)
    return None


def _is_class_named(member: Any, package: str, name: str) -> bool:
    """Return True if an object's class, or a base class, has this name. Nothing is imported."""
    return any(cls.__name__ == name and cls.__module__.split(".")[0] == package for cls in type(member).__mro__)


def _reshard_counted(key: str, states: Sequence[Any], _rank: int, world: int) -> Any:
    """Reshard states in which one key counts the samples, and the rest is equal on all ranks.

    Raises:
        IncompatibleCheckpointError: If a state has no such key, or the rest differs.
    """
    if not all(isinstance(state, Mapping) and key in state for state in states):
        raise _create_reshard_error(f"not every rank's state has the member {key!r}, which is to count the samples")
    rests = [{k: v for k, v in state.items() if k != key} for state in states]
    _check_same_states(rests, "beside the number of samples that were taken")
    return {**states[0], key: _compute_samples_per_worker([state[key] for state in states], world)}


def _reshard_torchdata(loader: Any, key: str, states: Sequence[Any], rank: int, world: int) -> Any:
    """Reshard the states of a `StatefulDataLoader` whose sampler assigns samples to ranks in turn.

    Raises:
        IncompatibleCheckpointError: If samples would be repeated or skipped.
    """
    sampler = loader.sampler
    is_torchs = _is_class_named(sampler, "torch", "DistributedSampler")
    if is_torchs and (sampler.num_replicas, sampler.rank) != (world, rank):
        raise _create_reshard_error(
            f"the loader's DistributedSampler does not follow the mesh: it has rank={sampler.rank} and "
            f"num_replicas={sampler.num_replicas}, and this is data-parallel rank {rank} of {world}"
        )
    if any(one.get("_steps_since_snapshot") for one in states):
        raise _create_reshard_error(
            "batches were taken since the last snapshot of the loader, and their samples are not counted",
            hint=f"Make the loader with snapshot_every_n_steps=1. {_RESHARD_HINT}",
        )
    # Each state has its own seed for the workers. A copied state gets a new seed, so that no two ranks draw the same
    # numbers.
    state, copies = copy.deepcopy(states[rank % len(states)]), rank // len(states)
    main, samplers = _get_main_state(state), [_get_main_state(one)["_sampler_iter_state"] for one in states]
    if "_base_seed" in main:
        main["_base_seed"] = (main["_base_seed"] + (copies << 40)) % (1 << 63)
    if all(one["_iterator_finished"] for one in states):
        _check_same_states(samplers, "at the end of an epoch")
        main["_sampler_iter_state"] = {**samplers[0], "samples_yielded": len(sampler)}
        return state
    if not all(_is_sample_count(one, key) for one in samplers) or any(map(_has_dataset_state, states)):
        raise _create_reshard_error(
            "the dataset, or the sampler, has a state of its own beside the number of samples taken",
            hint=f"Where it is in the sampler's state, position= of PerRank names it. {_RESHARD_HINT}",
        )
    _check_same_states(
        [_replace_count(one, 0, key) for one in samplers], "beside the number of samples that were taken"
    )
    counts = [one["samples_yielded"] for one in samplers]
    # torch's sampler has padded the ranks' parts, or dropped the last samples, depending on the number of ranks.
    over = is_torchs and min(counts) * len(counts) >= len(sampler.dataset)
    main["_sampler_iter_state"] = _replace_count(
        samplers[0], len(sampler) if over else _compute_samples_per_worker(counts, world), key
    )
    return state


def _get_main_state(state: Mapping[str, Any]) -> Any:
    """Return the main process's part of a loader state, without its workers."""
    return state["_snapshot"]["_main_snapshot"] if "_snapshot" in state else state


def _is_sample_count(state: Any, key: str) -> bool:
    """Return True if a sampler state counts samples, and the state of a stateful sampler has the same count."""
    counts = isinstance(state, Mapping) and "samples_yielded" in state
    return counts and _is_equal_state(state, _replace_count(state, state["samples_yielded"], key))


def _replace_count(state: Mapping[str, Any], taken: int, key: str) -> dict[str, Any]:
    own = {"sampler_state": {**state["sampler_state"], key: taken}} if "sampler_state" in state else {}
    return {"samples_yielded": taken, **own}


def _has_dataset_state(state: Mapping[str, Any]) -> bool:
    """Return True if a dataset has a state, in this process or in a worker."""
    workers = state["_snapshot"]["_worker_snapshots"].values() if "_snapshot" in state else [state]
    return any(one["dataset_state"] is not None or one["fetcher_state"] is not None for one in workers)


def _reshard_grain(states: Sequence[Any], rank: int, world: int) -> Any:
    """Reshard the states of a grain `DataLoader` iterator, whose sampler is equal on all ranks while the loader shards.

    Each worker stores the last index that it has seen: worker w of W on rank r of n reads r + w n, and every n W-th
    after it.

    Raises:
        IncompatibleCheckpointError: If samples would be repeated or skipped.
    """
    loaded = [json.loads(state) for state in states]
    _check_same_states(
        [{k: one[k] for k in ("version", "worker_count", "sampler", "data_source")} for one in loaded],
        "(a sampler with shard_options gives each rank a part of the data that depends on their number: give "
        "shard_options= to the DataLoader, and none to the sampler)",
    )
    old, workers = len(states), max(1, loaded[0]["worker_count"])
    rounds = []
    for number, one in enumerate(loaded):
        for worker in range(workers):
            beyond = one["last_seen_indices"][str(worker)] - number - worker * old
            taken, uneven = divmod(beyond + old * workers, old * workers)
            if uneven:
                raise _create_reshard_error(
                    f"the samples of data-parallel rank {number} are not those of shard_index={number}"
                )
            rounds.append(taken)
    each = _compute_samples_per_worker(rounds, world, workers)
    last = {str(w): rank + w * world + (each - 1) * world * workers for w in range(workers)}
    return json.dumps({**loaded[0], "last_seen_indices": last, "last_worker_index": -1}).encode()


def _reshard_iterable_dataset(dataset: Any, states: Sequence[Any], _rank: int, _world: int) -> Any:
    """Reshard the states of a Hugging Face `IterableDataset` that every rank reads whole, keeping one example in n.

    The states contain the position of all ranks, and so are equal on all of them. If ranks read different files, or
    examples are buffered, the states do not determine which examples all ranks have read together.

    Raises:
        IncompatibleCheckpointError: If the common position is unknown.
    """
    stepped = all(_is_example_sharded(state["examples_iterable"]) for state in (*states, dataset.state_dict()))
    if not stepped or _has_buffer(dataset._ex_iterable):
        raise _create_reshard_error(
            "the examples that ranks have read are not the first ones of all: ranks have files of their own, read "
            "tables of several rows, or shuffle in a buffer",
            hint='split_dataset_by_node(..., strategy="examples") of a dataset of plain examples can be. '
            f"{_RESHARD_HINT}",
        )
    _check_same_states(states, "which say how far all have read")
    return states[0]


def _reshard_torchdata_over_iterable(loader: Any, states: Sequence[Any], rank: int, world: int) -> Any:
    """Reshard the states of a `StatefulDataLoader` without workers, over an `IterableDataset`.

    Raises:
        IncompatibleCheckpointError: If the common position is unknown.
    """
    if any("_snapshot" in state for state in states):
        raise _create_reshard_error("each worker of the loader reads a part of its own", hint=_RESHARD_HINT)
    _reshard_iterable_dataset(loader.dataset, [state["dataset_state"] for state in states], rank, world)
    _check_same_states(states, "which say how far all have read")
    return states[0]


def _is_example_sharded(state: Mapping[str, Any]) -> bool:
    """Return True if a part of a dataset assigns single examples of one order to ranks."""
    return (state["type"], state.get("stepped")) == ("StepExamplesIterable", 0)


def _has_buffer(examples: Any) -> bool:
    """Return True if examples are buffered, which no state contains. `datasets` keeps nested iterables in these
    attributes.
    """
    if examples is None:
        return False
    below = [getattr(examples, "ex_iterable", None), *getattr(examples, "ex_iterables", ())]
    return "Buffer" in type(examples).__name__ or any(map(_has_buffer, below))


def _compute_samples_per_worker(counts: Sequence[Any], world: int, workers: int = 1) -> int:
    """Compute the number of samples that each worker of each rank has read, if they continue from `counts`.

    Raises:
        IncompatibleCheckpointError: If the samples read cannot be divided equally.
    """
    if not all(type(count) is int for count in counts) or len(set(counts)) > 1:
        raise _create_reshard_error(f"ranks, or their workers, have not taken equally many samples, but {list(counts)}")
    taken: int = sum(counts)
    each, over = divmod(taken, world * workers)
    if over:
        raise _create_reshard_error(
            f"{taken} samples were taken, which {world} ranks{f' of {workers} workers' * (workers > 1)} cannot have "
            "taken in turn: some would be repeated, or left out",
            hint=f"Load a tag of a step at which their number is a multiple of {world * workers}, such as the end of "
            f"an epoch. {_RESHARD_HINT}",
        )
    return each


def _check_same_states(states: Sequence[Any], description: str) -> None:
    for number, state in enumerate(states):
        if not _is_equal_state(state, states[0]):
            raise _create_reshard_error(f"the states of data-parallel ranks 0 and {number} differ {description}")


def _is_equal_state(one: Any, other: Any) -> bool:
    if is_torch_tensor(one) and is_torch_tensor(other):
        return one.equal(other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_is_equal_state(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_is_equal_state, one, other))
    return type(one) is type(other) and bool(one == other)


def _create_reshard_error(why: str, *, hint: str = _RESHARD_HINT) -> IncompatibleCheckpointError:
    return IncompatibleCheckpointError(f"its position cannot be dealt out to other ranks: {why}", hint=hint)
