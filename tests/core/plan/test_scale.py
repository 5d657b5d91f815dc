"""The simulation of benchmarks/scale.py on few ranks: what it counts is right. What it times is not tested here."""

from __future__ import annotations

import pytest

from benchmarks import scale
from tests.boxes import is_partition
from xla_ckpt.core.plan.save_plan import SavePlan, plan_save
from xla_ckpt.core.sharding.box import Box


@pytest.fixture(scope="module")
def results() -> dict[int, scale.Result]:
    return {world: scale.simulate(world) for world in (8, 64)}


@pytest.mark.parametrize("world", [8, 64])
def test_every_byte_is_written_once(results: dict[int, scale.Result], world: int) -> None:
    result = results[world]
    arrays = result.manifest.arrays
    parameters = scale.LLAMA.parameters()
    assert 68e9 < parameters < 70e9
    assert len(arrays) == 5 * 723
    assert sum(result.written) == result.manifest.nbytes == parameters * (2 + 3 * 4) + 4 * 723
    assert result.shards == sum(1 for record in arrays.values() for _ in record)
    for leaf, record in arrays.items():
        assert is_partition([s.box for s in record], Box.from_shape(record.shape)), leaf
    assert sum(f.size - f.framing_bytes for f in result.manifest.files) == result.manifest.nbytes
    used = {s.file for record in arrays.values() for s in record}
    assert used == set(range(len(result.manifest.files)))


@pytest.mark.parametrize("world", [8, 64])
def test_ranks_write_alike(results: dict[int, scale.Result], world: int) -> None:
    result = results[world]
    assert result.stage_balance < 1.001
    assert result.balance < 1.05  # the first and the last stage also have the embedding and the head


@pytest.mark.parametrize("world", [8, 64])
def test_restores_read_what_they_need(results: dict[int, scale.Result], world: int) -> None:
    for number in range(len(scale.topologies(world))):
        assert 1 <= results[world].facts[f"ratio{number}"] <= 1.05


def plan_of(world: int, stage: int, tp: int) -> tuple[int, SavePlan]:
    mesh = scale.mesh_of(world)
    rank = mesh.rank({"pp": stage, "dp": mesh.dp - 1, "tp": tp})
    leaves = scale.leaves_of(scale.LLAMA, mesh, rank)
    return len(leaves), plan_save(leaves, rank, world)


@pytest.mark.parametrize("stage", [0, 3, 7])
def test_a_save_plan_does_not_grow_with_the_world(stage: int) -> None:
    """Norms and steps are dealt out among the replicas: the more there are, the fewer fall to one."""

    def large(plan: SavePlan) -> list[str]:
        return sorted(e.leaf for f in plan.files for e in f.entries if not ("norm" in e.leaf or "/step" in e.leaf))

    few, small_world = plan_of(64, stage, 1)
    for world in (512, 16384):
        many, plan = plan_of(world, stage, 1)
        assert many == few
        assert len(plan.files) == len(small_world.files) == 2
        assert sum(len(f.entries) for f in plan.files) <= sum(len(f.entries) for f in small_world.files) + 4
        if world == 512:
            assert large(plan) == large(small_world)


def test_the_document_names_what_was_run(results: dict[int, scale.Result]) -> None:
    text = scale.document(list(results.values()), "python benchmarks/scale.py --ranks 8,64", 1.0)
    assert "| 8 |" in text
    assert "| 64 |" in text
    assert "4,096" not in text.split("## Targets")[1]  # no word about worlds that were not run
