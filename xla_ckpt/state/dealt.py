"""Positions in data that ranks share, for another number of ranks than the one that saved them.

Data-parallel ranks take turns at the samples of one order: rank r of n takes the samples r, r + n, r + 2 n, ... When
each has taken k, the first k n samples are taken, and m ranks go on there if each is said to have taken k n / m. What
follows are functions of the states of all ranks. They refuse what would repeat samples or leave some out.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from xla_ckpt.arrays.torch_objects import is_torch_tensor
from xla_ckpt.errors import IncompatibleCheckpointError

Deal = Callable[[Sequence[Any], int, int], Any]
"""From the states of all data-parallel ranks that saved, a rank and how many there are now, to that rank's state."""

_ELSEWHERE = (
    "Load it on as many data-parallel ranks as saved it, give PerRank a function of your own (reshard=), or leave the "
    "member out of extras."
)

_YIELDED = "yielded"
"""What torchdata's own sampler calls the number of samples that a rank has taken."""


def deal_of(member: Any, position: str | None) -> Deal | None:
    """How the position of a member is dealt out anew; None if nothing is known of it.

    Args:
        member: The object of the program.
        position: What `PerRank` was told.
    """
    of_torchdata = _is_of(member, "torchdata", "StatefulDataLoader")
    if of_torchdata and (position is not None or _is_of(member.sampler, "torch", "DistributedSampler")):
        return partial(_of_torchdata, member, position or _YIELDED)
    if position is not None or _is_of(member, "torch", "DistributedSampler"):
        return partial(_counted, position or _YIELDED)
    if of_torchdata and _is_of(member.dataset, "datasets", "IterableDataset"):
        return partial(_of_torchdata_over_datasets, member)
    if _is_of(member, "grain", "DataLoaderIterator"):
        return _of_grain
    if _is_of(member, "datasets", "IterableDataset"):
        return partial(_of_datasets, member)
    return None


def _is_of(member: Any, package: str, name: str) -> bool:
    """Whether an object is of a class of this name, or of one that is derived from it. Nothing is imported for it."""
    return any(cls.__name__ == name and cls.__module__.split(".")[0] == package for cls in type(member).__mro__)


def _counted(key: str, states: Sequence[Any], _rank: int, world: int) -> Any:
    """States of which one member counts the samples, and the rest is the same on all ranks."""
    if not all(isinstance(state, Mapping) and key in state for state in states):
        raise _refused(f"not every rank's state has the member {key!r}, which is to count the samples")
    rests = [{k: v for k, v in state.items() if k != key} for state in states]
    _check_same(rests, "beside the number of samples that were taken")
    return {**states[0], key: _share([state[key] for state in states], world)}


def _of_torchdata(loader: Any, key: str, states: Sequence[Any], rank: int, world: int) -> Any:
    """States of a `StatefulDataLoader` whose sampler deals out samples in turn."""
    sampler = loader.sampler
    is_torchs = _is_of(sampler, "torch", "DistributedSampler")
    if is_torchs and (sampler.num_replicas, sampler.rank) != (world, rank):
        raise _refused(
            f"the loader's DistributedSampler does not follow the mesh: it has rank={sampler.rank} and "
            f"num_replicas={sampler.num_replicas}, and this is data-parallel rank {rank} of {world}"
        )
    if any(one.get("_steps_since_snapshot") for one in states):
        raise _refused(
            "batches were taken since the last snapshot of the loader, and their samples are not counted",
            hint=f"Make the loader with snapshot_every_n_steps=1. {_ELSEWHERE}",
        )
    # Every state has its own seed for the workers: the copy of another rank's gets another one, lest they draw alike.
    state, copies = copy.deepcopy(states[rank % len(states)]), rank // len(states)
    main, samplers = _main(state), [_main(one)["_sampler_iter_state"] for one in states]
    if "_base_seed" in main:
        main["_base_seed"] = (main["_base_seed"] + (copies << 40)) % (1 << 63)
    if all(one["_iterator_finished"] for one in states):
        _check_same(samplers, "at the end of an epoch")
        main["_sampler_iter_state"] = {**samplers[0], "samples_yielded": len(sampler)}
        return state
    if not all(_is_a_count(one, key) for one in samplers) or any(map(_states_of_data, states)):
        raise _refused(
            "the dataset, or the sampler, has a state of its own beside the number of samples taken",
            hint=f"Where it is in the sampler's state, position= of PerRank names it. {_ELSEWHERE}",
        )
    _check_same([_with_count(one, 0, key) for one in samplers], "beside the number of samples that were taken")
    counts = [one["samples_yielded"] for one in samplers]
    # torch's sampler has filled up the ranks' parts, or left the last samples out, as their number demanded.
    over = is_torchs and min(counts) * len(counts) >= len(sampler.dataset)
    main["_sampler_iter_state"] = _with_count(samplers[0], len(sampler) if over else _share(counts, world), key)
    return state


def _main(state: Mapping[str, Any]) -> Any:
    """The part of a loader's state that the process of the rank has, not its workers."""
    return state["_snapshot"]["_main_snapshot"] if "_snapshot" in state else state


def _is_a_count(state: Any, key: str) -> bool:
    """Whether a sampler's part says how many samples were taken, and a stateful sampler says the same."""
    counts = isinstance(state, Mapping) and "samples_yielded" in state
    return counts and _same(state, _with_count(state, state["samples_yielded"], key))


def _with_count(state: Mapping[str, Any], taken: int, key: str) -> dict[str, Any]:
    own = {"sampler_state": {**state["sampler_state"], key: taken}} if "sampler_state" in state else {}
    return {"samples_yielded": taken, **own}


def _states_of_data(state: Mapping[str, Any]) -> bool:
    """Whether a dataset has a state, in this process or in workers."""
    workers = state["_snapshot"]["_worker_snapshots"].values() if "_snapshot" in state else [state]
    return any(one["dataset_state"] is not None or one["fetcher_state"] is not None for one in workers)


def _of_grain(states: Sequence[Any], rank: int, world: int) -> Any:
    """States of the iterator of a grain `DataLoader`, where the sampler is alike on all ranks and the loader shards.

    Each worker has the last index that it has seen: worker w of W on rank r of n takes r + w n, and every n W-th after.
    """
    loaded = [json.loads(state) for state in states]
    _check_same(
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
                raise _refused(f"the samples of data-parallel rank {number} are not those of shard_index={number}")
            rounds.append(taken)
    each = _share(rounds, world, workers)
    last = {str(w): rank + w * world + (each - 1) * world * workers for w in range(workers)}
    return json.dumps({**loaded[0], "last_seen_indices": last, "last_worker_index": -1}).encode()


def _of_datasets(dataset: Any, states: Sequence[Any], _rank: int, _world: int) -> Any:
    """States of a Hugging Face `IterableDataset` of which every rank reads all, and keeps one example in n.

    They say where all ranks are, and so are the same on all of them. Where ranks have files of their own, or examples
    wait in a buffer, the states do not say what all ranks together have read.
    """
    stepped = all(_is_stepped(state["examples_iterable"]) for state in (*states, dataset.state_dict()))
    if not stepped or _has_buffer(dataset._ex_iterable):
        raise _refused(
            "the examples that ranks have read are not the first ones of all: ranks have files of their own, read "
            "tables of several rows, or shuffle in a buffer",
            hint=f'split_dataset_by_node(..., strategy="examples") of a dataset of plain examples can be. {_ELSEWHERE}',
        )
    _check_same(states, "which say how far all have read")
    return states[0]


def _of_torchdata_over_datasets(loader: Any, states: Sequence[Any], rank: int, world: int) -> Any:
    """States of a `StatefulDataLoader` without workers, over an `IterableDataset` as above."""
    if any("_snapshot" in state for state in states):
        raise _refused("each worker of the loader reads a part of its own", hint=_ELSEWHERE)
    _of_datasets(loader.dataset, [state["dataset_state"] for state in states], rank, world)
    _check_same(states, "which say how far all have read")
    return states[0]


def _is_stepped(state: Mapping[str, Any]) -> bool:
    """Whether a part of a dataset deals out single examples of one order."""
    return (state["type"], state.get("stepped")) == ("StepExamplesIterable", 0)


def _has_buffer(examples: Any) -> bool:
    """Whether examples wait in a buffer, which no state has. `datasets` keeps what is below an iterable in these."""
    if examples is None:
        return False
    below = [getattr(examples, "ex_iterable", None), *getattr(examples, "ex_iterables", ())]
    return "Buffer" in type(examples).__name__ or any(map(_has_buffer, below))


def _share(counts: Sequence[Any], world: int, workers: int = 1) -> int:
    """What each worker of each rank has taken, if they all go on where others, which count for themselves, stand."""
    if not all(type(count) is int for count in counts) or len(set(counts)) > 1:
        raise _refused(f"ranks, or their workers, have not taken equally many samples, but {list(counts)}")
    taken: int = sum(counts)
    each, over = divmod(taken, world * workers)
    if over:
        raise _refused(
            f"{taken} samples were taken, which {world} ranks{f' of {workers} workers' * (workers > 1)} cannot have "
            "taken in turn: some would be repeated, or left out",
            hint=f"Load a tag of a step at which their number is a multiple of {world * workers}, such as the end of "
            f"an epoch. {_ELSEWHERE}",
        )
    return each


def _check_same(states: Sequence[Any], what: str) -> None:
    for number, state in enumerate(states):
        if not _same(state, states[0]):
            raise _refused(f"the states of data-parallel ranks 0 and {number} differ {what}")


def _same(one: Any, other: Any) -> bool:
    if is_torch_tensor(one) and is_torch_tensor(other):
        return one.equal(other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and bool(one == other)


def _refused(why: str, *, hint: str = _ELSEWHERE) -> IncompatibleCheckpointError:
    return IncompatibleCheckpointError(f"its position cannot be dealt out to other ranks: {why}", hint=hint)
