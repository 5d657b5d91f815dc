"""Data that ranks take turns at, in jobs of other meshes than the one that saved: no sample twice, none left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler

import xla_ckpt
from tests.integrations.environment import needs
from tests.jobs import run_on_ranks
from xla_ckpt import Mesh, PerRank

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 with torch 2.15

SAMPLES, GLOBAL_BATCH = 96, 8
MESHES = ["dp=4", "dp=2,tp=2", "dp=8"]
"""Of the jobs that go on one after the other. The second one has as many ranks as the first one."""


class Numbers:
    """A dataset of numbers."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


class Turns(DistributedSampler):  # type: ignore[type-arg]
    """A sampler of a program's own, with an epoch and an index in its state."""

    index = 0

    def __iter__(self) -> Iterator[int]:
        for sample in list(super().__iter__())[self.index :]:
            self.index += 1
            yield sample
        self.index = 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "index": self.index}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.index = state["epoch"], state["index"]


@dataclass
class Data:
    """What a rank reads, once it has been told where to begin."""

    member: Any
    position: str | None
    batches: Callable[[], Iterator[Any]]
    """Begins to read."""

    per_rank: bool = True
    """Whether the states of ranks differ."""

    @property
    def extras(self) -> dict[str, Any]:
        return {"data": PerRank(self.member, position=self.position) if self.per_rank else self.member}


def of_sampler(rank: int, world: int) -> Data:
    return _of_sampler(Turns(Numbers(), world, rank, seed=3), "index")  # type: ignore[arg-type]


def _of_sampler(sampler: Any, position: str | None) -> Data:
    sampler.set_epoch(1)

    def batches() -> Iterator[list[int]]:
        samples = iter(sampler)
        while True:
            yield [next(samples) for _ in range(GLOBAL_BATCH // sampler.num_replicas)]

    return Data(sampler, position, batches)


def of_loader(rank: int, world: int) -> Data:
    return _of_loader(DistributedSampler(Numbers(), world, rank, seed=3), None)  # type: ignore[arg-type]


def of_loader_and_sampler(rank: int, world: int) -> Data:
    return _of_loader(Turns(Numbers(), world, rank, seed=3), "index")  # type: ignore[arg-type]


def of_loader_with_workers(rank: int, world: int) -> Data:
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    return _of_loader(StatefulDistributedSampler(Numbers(), world, rank, seed=3), None, workers=2)


def _of_loader(sampler: Any, position: str | None, workers: int = 0) -> Data:
    from torchdata.stateful_dataloader import StatefulDataLoader

    sampler.set_epoch(1)
    loader = StatefulDataLoader(Numbers(), GLOBAL_BATCH // sampler.num_replicas, sampler=sampler, num_workers=workers)
    return Data(loader, position, lambda: iter(loader))


def of_torchdata_sampler(rank: int, world: int) -> Data:
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    return _of_sampler(StatefulDistributedSampler(Numbers(), world, rank, seed=3), None)


def of_grain(rank: int, world: int) -> Data:
    import grain.python as grain

    loader = grain.DataLoader(
        data_source=grain.RangeDataSource(0, SAMPLES, 1),
        sampler=grain.IndexSampler(SAMPLES, shuffle=True, num_epochs=1, seed=3),
        shard_options=grain.ShardOptions(rank, world, drop_remainder=True),
        operations=[grain.Batch(GLOBAL_BATCH // world)],
    )
    data = iter(loader)
    return Data(data, None, lambda: data)


def of_elastic_grain(rank: int, world: int) -> Data:
    import grain.python as grain
    from grain.experimental import ElasticIterator

    data = ElasticIterator(
        grain.MapDataset.range(SAMPLES).shuffle(seed=3), GLOBAL_BATCH, grain.ShardOptions(rank, world)
    )
    return Data(data, None, lambda: iter(data), per_rank=False)


def _examples(parts: list[int]) -> Iterator[dict[str, int]]:
    for part in parts:
        for sample in range(part * SAMPLES // 3, (part + 1) * SAMPLES // 3):
            yield {"sample": sample}


def of_datasets(rank: int, world: int) -> Data:
    import datasets
    from datasets.distributed import split_dataset_by_node

    whole = datasets.IterableDataset.from_generator(_examples, gen_kwargs={"parts": [0, 1, 2]})
    data = split_dataset_by_node(whole, rank, world)  # 3 parts are no multiple of the ranks: examples are dealt out

    def batches() -> Iterator[list[int]]:
        examples = iter(data)
        while True:
            yield [next(examples)["sample"] for _ in range(GLOBAL_BATCH // world)]

    return Data(data, None, batches)


def of_loader_over_datasets(rank: int, world: int) -> Data:
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader = StatefulDataLoader(of_datasets(rank, world).member, GLOBAL_BATCH // world)
    return Data(loader, None, lambda: (batch["sample"] for batch in loader))


OF_TORCHDATA = (of_loader, of_loader_and_sampler, of_loader_with_workers, of_torchdata_sampler)
KINDS = [
    of_sampler,
    *(pytest.param(f, marks=needs("torchdata")) for f in OF_TORCHDATA),
    *(pytest.param(f, marks=needs("grain")) for f in (of_grain, of_elastic_grain)),
    pytest.param(of_datasets, marks=needs("datasets")),
    pytest.param(of_loader_over_datasets, marks=needs("datasets", "torchdata")),
]


def reads(rank: int, root: Path, make: Callable[[int, int], Data], number: int, steps: int) -> list[list[int]]:
    """The samples of each step of this rank, in the job of this number, which goes on from the one before."""
    mesh = Mesh.parse(MESHES[number])
    data = make(mesh.coordinates(rank)["dp"], mesh.dp)
    if number:
        xla_ckpt.load_checkpoint(root, f"job_{number - 1}", extras=data.extras, mesh=mesh)
    batches = data.batches()
    samples = [torch.as_tensor(next(batches)).tolist() for _ in range(steps)]
    xla_ckpt.save_checkpoint(root, f"job_{number}", extras=data.extras, mesh=mesh)
    return samples


def of_steps(make: Callable[[int, int], Data]) -> list[set[int]]:
    """The samples of each step of a run that nothing interrupts, on one rank."""
    batches = make(0, 1).batches()
    return [set(torch.as_tensor(next(batches)).tolist()) for _ in range(SAMPLES // GLOBAL_BATCH)]


@pytest.mark.parametrize("make", KINDS)
def test_every_sample_is_seen_once(tmp_path: Path, make: Callable[[int, int], Data]) -> None:
    seen: list[set[int]] = []
    for number, steps in enumerate((3, 4, 5)):
        mesh = Mesh.parse(MESHES[number])
        told = run_on_ranks(reads, mesh.size, tmp_path / "ckpt", make, number, steps)
        assert all(told[rank] == told[rank - 1] for rank in range(1, mesh.size, 2) if mesh.tp == 2)
        seen += [{sample for rank in told[:: mesh.tp] for sample in rank[step]} for step in range(steps)]
    assert seen == of_steps(make)
    assert sorted(sample for step in seen for sample in step) == list(range(SAMPLES))


def stands(rank: int, root: Path) -> int:
    """What a rank gets back where the ranks that read the same samples are others, and as many."""
    before, now = (Mesh.parse(text).coordinates(rank)["dp"] for text in ("dp=2,tp=2", "pp=2,dp=2"))
    sampler = Turns(Numbers(), 2, now)  # type: ignore[arg-type]
    sampler.index = 10 + before
    extras = {"data": PerRank(sampler, position="index")}
    xla_ckpt.save_checkpoint(root, "a", extras=extras, mesh="dp=2,tp=2")
    xla_ckpt.load_checkpoint(root, "a", extras=extras, mesh="pp=2,dp=2")
    return sampler.index


def test_ranks_that_read_the_same_samples_count_as_one(tmp_path: Path) -> None:
    assert run_on_ranks(stands, 4, tmp_path / "ckpt") == [10, 11, 10, 11]


def saved_and_changed(rank: int, root: Path) -> tuple[Turns, torch.nn.Linear]:
    """A sampler and a model of ones that are saved; then the model has twos."""
    sampler, model = Turns(Numbers(), 4, rank), torch.nn.Linear(2, 2)  # type: ignore[arg-type]
    with torch.no_grad():
        model.weight.fill_(1.0)
    xla_ckpt.save_checkpoint(root, "dp", model, extras={"data": PerRank(sampler)})
    with torch.no_grad():
        model.weight.fill_(2.0)
    return sampler, model


def changes_nothing(rank: int, root: Path) -> list[tuple[str, str]]:
    """Loads that are refused, for one rank's reason or all ranks': what each of them raises."""
    options = xla_ckpt.LoadOptions(timeout=60)
    sampler, model = saved_and_changed(rank, root)

    def fails_on_one(_states: list[Any], of: int, _world: int) -> Any:
        return {"epoch": 0, "index": 1 // (1 - of)}

    def refused(member: PerRank) -> tuple[str, str]:
        with pytest.raises(xla_ckpt.CheckpointError) as caught:
            xla_ckpt.load_checkpoint(root, "dp", model, extras={"data": member}, mesh="dp=2,tp=2", options=options)
        assert (model.weight == 2.0).all()
        assert sampler.state_dict() == {"epoch": 0, "index": 0}
        return type(caught.value).__name__, str(caught.value)

    wrong = PerRank(sampler, position="step")
    return [refused(member) for member in (PerRank(Unknown()), wrong, PerRank(sampler, reshard=fails_on_one))]


def leaves_alone(rank: int, root: Path) -> list[str]:
    """What a load that is not strict skips, where a position cannot be dealt out."""
    sampler, model = saved_and_changed(rank, root)
    extras = {"data": PerRank(sampler, position="step")}
    loaded = xla_ckpt.load_checkpoint(root, "dp", model, extras=extras, mesh="dp=2,tp=2", strict=False)
    assert (model.weight == 1.0).all()
    assert sampler.state_dict() == {"epoch": 0, "index": 0}
    return list(loaded.report.skipped)


def test_a_load_that_is_not_strict_leaves_alone_what_cannot_be_dealt_out(tmp_path: Path) -> None:
    for (skipped,) in run_on_ranks(leaves_alone, 4, tmp_path / "ckpt"):
        assert skipped.startswith("extras/data: its position cannot be dealt out to other ranks")
        assert "as many data-parallel ranks" in skipped


class Unknown:
    """An object of which the library knows nothing."""

    def state_dict(self) -> dict[str, int]:
        return {"epoch": 0, "index": 0}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise AssertionError(state)


def test_a_refusal_is_one_on_all_ranks_and_changes_nothing(tmp_path: Path) -> None:
    told = run_on_ranks(changes_nothing, 4, tmp_path / "ckpt")
    unknown, wrong, raises = told[0]
    assert all([kind for kind, _ in other] == [kind for kind, _ in told[0]] for other in told)
    assert unknown[0] == "IncompatibleCheckpointError"
    assert "in the place of pp=1,dp=4,ep=1,cp=1,tp=1" in unknown[1]
    assert "position= or reshard= of PerRank" in unknown[1]
    assert "strict=False" not in unknown[1]  # it would train on some samples again
    assert wrong[0] == "IncompatibleCheckpointError"
    assert "'step'" in wrong[1]
    assert "extras/data" in wrong[1]
    assert raises[0] == "LoadError"
    assert "ZeroDivisionError" in raises[1]
    assert all("rank 1" in other[2][1] for other in told)
