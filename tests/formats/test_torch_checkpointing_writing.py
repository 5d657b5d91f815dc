"""What is saved in torch_checkpointing's layout, and converted to it. The real package judges, where it is there."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from tests.fixtures.dcp import make
from tests.fixtures.torch_checkpointing import package
from tests.formats.same import as_theirs
from tests.formats.tckpt_package import needs_package, run_package
from tests.jobs import run_on_ranks
from tests.same import differences
from xla_ckpt.core.sharding.box import Box
from xla_ckpt.errors import UnsupportedStateError
from xla_ckpt.formats.torch_checkpointing.writing import find_chunk_position, split_into_items

LAYOUT = "torch_checkpointing"


def state(spread: Any = None) -> dict[str, Any]:
    """What `package.load` compares with."""
    trained = package.model() if spread is None else spread(package.model())
    return {
        "model": trained.state_dict(),
        "optimizer": package.optimizer_state(trained, package.stepped(trained)),
        "step": 7,
    }


def same_state(tree: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    states = {
        f"{name}.{kind}": value for name, of in wanted["optimizer"]["state"].items() for kind, value in of.items()
    }
    read = {f"{name}.{kind}": value for name, of in tree["optimizer"]["state"].items() for kind, value in of.items()}
    return [*differences(tree["model"], wanted["model"], order=False), *differences(read, states, order=False)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("run")
    xla_ckpt.save(root, "a", state(), layout=LAYOUT).result()
    return root


def test_one_rank_writes_a_file_for_each_item(saved: Path) -> None:
    assert {p.name for p in (saved / "a").iterdir()} >= {"model_0.pt", "optimizer_0.pt", "step_0.pt", "metadata.pkl"}
    assert torch.load(saved / "a/step_0.pt") == 7
    assert differences(torch.load(saved / "a/model_0.pt"), state()["model"], order=False) == []
    assert xla_ckpt.verify(saved, "a").digests
    assert xla_ckpt.verify(saved, "a").problems == []


def test_it_is_read_by_the_manifest_and_without_it(saved: Path, tmp_path: Path) -> None:
    assert same_state(xla_ckpt.restore(saved, "a").tree, state()) == []
    xla_ckpt.convert(saved, tmp_path, "a", to=LAYOUT)
    tree = xla_ckpt.restore(as_theirs(tmp_path / "a")).tree
    assert same_state(tree, state()) == []
    assert tree["extras"] == {"step": 7}


@pytest.fixture(scope="module")
def split(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For two ranks; 3 rows of `1.weight` are 2 and 1."""
    root = tmp_path_factory.mktemp("split")
    xla_ckpt.convert(saved, root, "a", to=LAYOUT, mesh="dp=2", shardings=[("0.weight", ("dp", None))])
    return root


def test_a_conversion_for_two_ranks_has_the_parts_of_each(split: Path) -> None:
    parts = [torch.load(split / f"a/model_{rank}.pt") for rank in range(2)]
    whole = state()["model"]
    assert torch.equal(torch.cat([part["0.weight"] for part in parts]), whole["0.weight"])
    assert torch.equal(parts[0]["1.bias"], whole["1.bias"])
    assert "1.bias" not in parts[1]
    assert same_state(xla_ckpt.restore(split, "a").tree, state()) == []


def saves_over_two(_: int, root: str) -> None:
    xla_ckpt.save(root, "a", state(make.by_fsdp2), layout=LAYOUT).result()


@pytest.fixture(scope="module")
def by_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("by_two")
    run_on_ranks(saves_over_two, 2, str(root))
    return root


def test_a_job_of_two_ranks_saves_its_parts(by_two: Path) -> None:
    assert same_state(xla_ckpt.restore(by_two, "a").tree, state()) == []
    assert xla_ckpt.verify(by_two, "a").problems == []
    said = pickle.loads((by_two / "a/metadata.pkl").read_bytes())
    (group,) = said["metadata"]["model"]["nested_path_to_metadata"]['["1.weight"]']
    assert (said["world_size"], group["ranks"]) == (2, (0, 1))


def test_the_parts_are_put_together_without_the_manifest(by_two: Path, tmp_path: Path) -> None:
    xla_ckpt.convert(by_two, tmp_path, "a", to=LAYOUT, mesh="dp=2", shardings=[("weight", ("dp", None))])
    assert same_state(xla_ckpt.restore(as_theirs(tmp_path / "a")).tree, state()) == []


@needs_package
def test_the_package_loads_what_one_rank_saved(saved: Path) -> None:
    run_package("load", 1, saved / "a", "--plain")


@needs_package
def test_the_package_loads_what_two_ranks_saved_onto_two(by_two: Path) -> None:
    run_package("load", 2, by_two / "a")


@needs_package
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_package_loads_a_conversion_onto_other_ranks(saved: Path, tmp_path: Path, ranks: int) -> None:
    columns = [("0.weight", (None, "dp"))] if ranks == 2 else []
    xla_ckpt.convert(saved, tmp_path, "a", to=LAYOUT, mesh=f"dp={ranks}", shardings=columns)
    run_package("load", ranks, tmp_path / "a")


def test_boxes_that_are_no_chunks_are_refused() -> None:
    assert find_chunk_position(Box((2,), (3,)), (3,), "w") == ((2, 1),)
    assert find_chunk_position(Box((), ()), (), "w") == ()
    for box in (Box((1,), (3,)), Box((4,), (7,)), Box((3,), (5,))):
        with pytest.raises(UnsupportedStateError, match="equal chunks"):
            find_chunk_position(box, (8,), "w")


def test_members_that_cannot_be_items_are_refused() -> None:
    for members in ({"a/b": 1}, {"step": 1, "extras": {"step": 2}}, {"": 1}):
        with pytest.raises(UnsupportedStateError):
            split_into_items(members, 0, 1)
    own = {"extras": {"loader": {"per_rank": 2, "ranks": {"0": "a", "1": "b"}}}}
    assert [split_into_items(own, rank, 2)["loader"] for rank in range(2)] == ["a", "b"]
