"""When positions of ranks are dealt out to other ranks, and when that is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DistributedSampler

import xla_ckpt
from tests.integrations.environment import needs
from xla_ckpt.errors import IncompatibleCheckpointError, UsageError
from xla_ckpt.state.per_rank import ReshardPosition, find_position_reshard

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 with torch 2.15

SAMPLES = list(range(48))


def dealt(deal: ReshardPosition | None, states: list[Any], world: int) -> list[Any]:
    """The states of all ranks of now."""
    assert deal is not None
    return [deal(states, rank, world) for rank in range(world)]


def counted(*indexes: Any, epoch: int = 1, key: str = "index") -> list[dict[str, Any]]:
    return [{"epoch": epoch, key: index} for index in indexes]


@pytest.mark.parametrize(
    ("old", "new"), [([6, 6, 6, 6], [12, 12]), ([12, 12], [3] * 8), ([5, 5, 5], [15]), ([0, 0], [0, 0, 0])]
)
def test_a_number_of_samples_is_shared(old: list[int], new: list[int]) -> None:
    assert dealt(find_position_reshard(object(), "index"), counted(*old), len(new)) == counted(*new)


@pytest.mark.parametrize(
    ("states", "world", "why"),
    [
        (counted(5, 4), 1, "ranks, or their workers, have not taken equally many samples"),
        (counted(5, 5), 4, "10 samples were taken, which 4 ranks cannot have taken in turn"),
        (counted(5.0, 5.0), 1, "equally many"),
        ([*counted(5), *counted(5, epoch=2)], 1, "data-parallel ranks 0 and 1 differ beside the number of samples"),
        (counted(5, 5, key="at"), 1, "not every rank's state has the member 'index'"),
        ([5, 5], 1, "not every rank's state has the member 'index'"),
    ],
)
def test_what_would_repeat_samples_is_refused(states: list[Any], world: int, why: str) -> None:
    with pytest.raises(IncompatibleCheckpointError, match=why):
        dealt(find_position_reshard(object(), "index"), states, world)


def test_what_is_known() -> None:
    assert find_position_reshard(object(), None) is None
    assert (
        dealt(find_position_reshard(DistributedSampler(SAMPLES, 1, 0), None), [{"yielded": 4}] * 2, 4)
        == [{"yielded": 2}] * 4
    )  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="both"):
        xla_ckpt.PerRank(object(), reshard=lambda states, rank, world: states[0], position="index")


def loader_of(rank: int, world: int, batch: int, **how: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    sampler = how.pop("sampler", DistributedSampler(SAMPLES, world, rank, seed=2)) or None  # type: ignore[arg-type]
    return StatefulDataLoader(how.pop("data", SAMPLES), batch, sampler=sampler, **how)


def states_after(steps: int, loaders: list[Any]) -> list[Any]:
    states = []
    for loader in loaders:
        batches = iter(loader)
        for _ in range(steps):
            next(batches, None)
        states.append(loader.state_dict())
    return states


@pytest.mark.parametrize("steps", [8, 20])
@needs("torchdata")
def test_loaders_at_the_end_of_an_epoch_begin_the_next_one(steps: int) -> None:
    """After 8 steps a loader has given all that it has, and does not know yet."""
    states = states_after(steps, [loader_of(rank, 3, 2) for rank in range(3)])
    assert {state["_iterator_finished"] for state in states} == {steps > 8}
    seen = []
    for rank, state in enumerate(dealt_to_loaders(states, new := [loader_of(rank, 5, 2) for rank in range(5)])):
        new[rank].load_state_dict(state)
        seen += [sample for _ in range(1 + (steps == 8)) for batch in new[rank] for sample in batch.tolist()]
    assert set(seen) == set(SAMPLES)
    assert len(seen) == 5 * 10  # 48 samples, filled up


def dealt_to_loaders(states: list[Any], loaders: list[Any]) -> list[Any]:
    deals = [find_position_reshard(loader, None) for loader in loaders]
    return [deal(states, rank, len(loaders)) for rank, deal in enumerate(deals) if deal is not None]


class Backwards:
    """A sampler of a program's own."""

    index = 0

    def __init__(self, rank: int, world: int) -> None:
        self.order = SAMPLES[::-1][rank::world]

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[int]:
        while self.index < len(self.order):
            self.index += 1
            yield self.order[self.index - 1]
        self.index = 0

    def state_dict(self) -> dict[str, int]:
        return {"index": self.index}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.index = state["index"]


@pytest.mark.parametrize("steps", [6, 20])
@needs("torchdata")
def test_loaders_with_a_sampler_of_their_own(steps: int) -> None:
    states = states_after(steps, [loader_of(rank, 3, 2, sampler=Backwards(rank, 3)) for rank in range(3)])
    new = [loader_of(rank, 4, 2, sampler=Backwards(rank, 4)) for rank in range(4)]
    for rank, state in enumerate(dealt(find_position_reshard(new[0], "index"), states, 4)):
        new[rank].load_state_dict(state)
    left = [sample for loader in new for batch in loader for sample in batch.tolist()]
    assert sorted(left) == (SAMPLES if steps == 20 else SAMPLES[:12])


@needs("torchdata")
def test_loaders_of_which_some_samples_are_not_counted_are_refused() -> None:
    states = states_after(3, [loader_of(rank, 2, 2, num_workers=1, snapshot_every_n_steps=2) for rank in range(2)])
    with pytest.raises(IncompatibleCheckpointError, match="batches were taken since the last snapshot"):
        dealt_to_loaders(states, [loader_of(0, 1, 4)])


@needs("torchdata")
def test_workers_of_new_ranks_draw_other_numbers() -> None:
    states = states_after(3, [loader_of(rank, 2, 2, num_workers=1) for rank in range(2)])
    new = dealt_to_loaders(states, [loader_of(rank, 4, 1, num_workers=1) for rank in range(4)])
    assert len({state["_snapshot"]["_main_snapshot"]["_base_seed"] for state in new}) == 4


@needs("torchdata")
def test_loaders_that_do_not_follow_the_mesh_are_refused() -> None:
    states = states_after(3, [loader_of(rank, 2, 2) for rank in range(2)])
    with pytest.raises(IncompatibleCheckpointError, match="does not follow the mesh"):
        dealt_to_loaders(states, [loader_of(0, 2, 2)])


class WithState(list):  # type: ignore[type-arg]
    """Data with a state."""

    def state_dict(self) -> dict[str, int]:
        return {"at": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert state


@needs("torchdata")
def test_loaders_with_other_states_are_refused() -> None:
    new = [loader_of(0, 1, 4)]
    shuffled = states_after(3, [loader_of(0, 1, 2, sampler=False, shuffle=True)])
    for states in (shuffled, states_after(3, [loader_of(rank, 2, 2, data=WithState(SAMPLES)) for rank in range(2)])):
        with pytest.raises(IncompatibleCheckpointError, match="the dataset, or the sampler, has a state of its own"):
            dealt_to_loaders(states, new)
    assert find_position_reshard(loader_of(0, 1, 2, sampler=False, shuffle=True), None) is None  # each rank reads all


def grain_iterators(world: int, *, sharded: bool = False, **how: Any) -> list[Any]:
    import grain.python as grain
    from absl.flags import FLAGS

    FLAGS.mark_as_parsed()  # workers read flags of a program that has a main
    iterators = []
    for rank in range(world):
        shard = grain.ShardOptions(rank, world, drop_remainder=True)
        sampler = grain.IndexSampler(48, shard if sharded else grain.NoSharding(), shuffle=True, num_epochs=1, seed=3)
        source = grain.RangeDataSource(0, 48, 1)
        iterators.append(iter(grain.DataLoader(data_source=source, sampler=sampler, shard_options=shard, **how)))
    return iterators


def after(steps: int, iterators: list[Any]) -> list[bytes]:
    for iterator in iterators:
        for _ in range(steps):
            next(iterator)
    return [iterator.get_state() for iterator in iterators]


@needs("grain")
def test_grain_with_and_without_workers() -> None:
    order = [int(sample) for sample in grain_iterators(1)[0]]
    for how in ({}, {"worker_count": 2}):
        states = after(6, grain_iterators(2, **how))
        new = grain_iterators(3, **how)
        for rank, state in enumerate(dealt(find_position_reshard(new[0], None), states, 3)):
            assert json.loads(state).keys() == json.loads(states[0]).keys()
            new[rank].set_state(state)
        left = [[int(sample) for sample in iterator] for iterator in new]
        assert [sample for turn in zip(*left, strict=True) for sample in turn] == order[12:]


@needs("grain")
def test_what_grain_cannot_say_is_refused() -> None:
    deal = find_position_reshard(grain_iterators(1)[0], None)
    with pytest.raises(IncompatibleCheckpointError, match="a sampler with shard_options"):
        dealt(deal, after(6, grain_iterators(2, sharded=True)), 3)
    with pytest.raises(IncompatibleCheckpointError, match="or their workers, have not taken equally many"):
        dealt(deal, after(5, grain_iterators(2, worker_count=2)), 1)
    with pytest.raises(IncompatibleCheckpointError, match="are not those of shard_index=0"):
        dealt(deal, after(6, grain_iterators(2))[::-1], 1)


def examples(parts: list[int]) -> Any:
    for part in parts:
        yield from ({"i": 10 * part + i} for i in range(10))


def of_datasets(world: int, parts: int, *, shuffle: bool = False, tables: bool = False) -> list[Any]:
    import datasets
    from datasets.distributed import split_dataset_by_node

    if tables:
        data = datasets.Dataset.from_dict({"i": list(range(30))}).to_iterable_dataset(num_shards=parts)
    else:
        data = datasets.IterableDataset.from_generator(examples, gen_kwargs={"parts": list(range(parts))})
    if shuffle:
        data = data.shuffle(seed=1, buffer_size=5)
    return [split_dataset_by_node(data, rank, world) for rank in range(world)]


@needs("datasets")
@pytest.mark.parametrize("how", [{"parts": 4}, {"parts": 3, "shuffle": True}, {"parts": 3, "tables": True}])
def test_datasets_that_do_not_say_what_all_have_read_are_refused(how: dict[str, Any]) -> None:
    states = states_after(3, ranks := of_datasets(2, **how))
    with pytest.raises(IncompatibleCheckpointError, match="are not the first ones of all"):
        dealt(find_position_reshard(ranks[0], None), states, 1)


@needs("datasets", "torchdata")
def test_workers_of_a_loader_over_datasets_are_refused() -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    loaders = [StatefulDataLoader(one, 2, num_workers=1) for one in of_datasets(2, 3)]
    with pytest.raises(IncompatibleCheckpointError, match="each worker of the loader reads a part"):
        dealt(find_position_reshard(loaders[0], None), states_after(3, loaders), 1)
