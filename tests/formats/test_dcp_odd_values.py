"""Odd values in DCP's directories, by whoever wrote them: keys that are no strings, tensors inside of values, numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as stock

import xla_ckpt
import xla_ckpt.dcp as dcp
from tests.runs import names_in
from xla_ckpt.errors import CorruptCheckpointError, IncompatibleCheckpointError, UnsupportedStateError

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]

INSIDE = {"pair": (torch.arange(3.0), ("a", torch.full((2, 2), 7)), None), "other": (torch.zeros(0), 1)}


@pytest.mark.parametrize("saver", [stock, dcp])
def test_tensors_inside_of_values_are_restored(tmp_path: Path, saver: Any) -> None:
    saver.save({"w": torch.ones(2), **INSIDE}, checkpoint_id=tmp_path / "a")
    tree = xla_ckpt.restore(tmp_path, "a").tree
    assert tree["pair"][0].tolist() == [0, 1, 2]
    assert tree["pair"][1][0] == "a"
    assert tree["pair"][1][1].equal(INSIDE["pair"][1][1])
    assert tree["other"][0].shape == (0,)
    assert xla_ckpt.verify(tmp_path, "a").ok
    xla_ckpt.convert(tmp_path, tmp_path / "native", "a")
    assert xla_ckpt.restore(tmp_path / "native").tree["pair"][1][1].equal(INSIDE["pair"][1][1])


def test_a_damaged_value_is_found_by_its_digest(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(2), **INSIDE}, checkpoint_id=tmp_path / "a")
    (file,) = (tmp_path / "a").glob("objects*")
    data = bytearray(file.read_bytes())
    data[bytes(data).index(INSIDE["pair"][0].numpy().tobytes()) + 5] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptCheckpointError) as caught:
        xla_ckpt.restore(tmp_path, "a")
    assert (caught.value.leaf, caught.value.file) == ("pair", file.name)


@pytest.mark.parametrize("saver", [stock, dcp])
def test_numpy_in_either_order_of_bytes(tmp_path: Path, saver: Any) -> None:
    held = {"big": np.arange(3, dtype=">i4"), "small": np.arange(3, dtype="<f8"), "one": np.arange(3, dtype=">f4")[1]}
    saver.save({"w": torch.ones(2), **held}, checkpoint_id=tmp_path / "a")
    tree = xla_ckpt.restore(tmp_path, "a").tree
    assert {key: np.asarray(tree[key]).tolist() for key in held} == {key: held[key].tolist() for key in held}
    target = {"w": torch.zeros(2), **dict.fromkeys(held)}
    dcp.load(target, checkpoint_id=tmp_path / "a")
    assert {key: np.asarray(target[key]).tolist() for key in held} == {key: held[key].tolist() for key in held}


def test_keys_are_spelled_as_stock_does(tmp_path: Path) -> None:
    held = {(1, "a"): torch.ones(1), (2,): 2, None: 3, True: torch.zeros(2), 1.5: 4, -7: 5}
    xla_ckpt.save_checkpoint(tmp_path, "a", user_content=held, layout="dcp")
    stock.save({"user_content": held}, checkpoint_id=tmp_path / "b")
    keys = [stock.FileSystemReader(tmp_path / name).read_metadata().state_dict_metadata.keys() for name in "ab"]
    assert keys[0] == keys[1]
    blank = {str(k): torch.full_like(v, 9) if isinstance(v, torch.Tensor) else 0 for k, v in held.items()}
    stock.load({"user_content": blank}, checkpoint_id=tmp_path / "a")
    assert [v.tolist() if isinstance(v, torch.Tensor) else v for v in blank.values()] == [[1], 2, 3, [0, 0], 4, 5]
    assert list(xla_ckpt.restore(tmp_path, "a").tree["user_content"]) == list(held)


def test_what_cannot_be_pickled_is_named(tmp_path: Path) -> None:
    for value in (lambda: 1, torch.channels_last):
        with pytest.raises(UnsupportedStateError, match="pickle") as caught:
            dcp.save({"w": torch.ones(2), "odd": value}, checkpoint_id=tmp_path / "a")
        assert caught.value.leaf == "odd"
        assert names_in(tmp_path) == []


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_an_element_type_that_is_not_known_costs_its_tensor_alone(tmp_path: Path) -> None:
    half = torch.zeros(2, dtype=torch.complex32)
    stock.save({"w": torch.ones(3), "half": half, "n": 5}, checkpoint_id=tmp_path / "a")
    target = {"w": torch.zeros(3), "n": 0}
    dcp.load(target, checkpoint_id=tmp_path / "a")
    assert (target["w"].tolist(), target["n"]) == ([1, 1, 1], 5)  # type: ignore[attr-defined]
    model = {"w": torch.zeros(3)}
    xla_ckpt.load_checkpoint(tmp_path, "a", model=model)
    assert model["w"].tolist() == [1, 1, 1]
    for load in (
        lambda: dcp.load({"half": half}, checkpoint_id=tmp_path / "a"),
        lambda: stock.load({"half": half}, storage_reader=dcp.StorageReader(tmp_path / "a")),
        lambda: xla_ckpt.restore(tmp_path, "a"),
    ):
        with pytest.raises((IncompatibleCheckpointError, stock.CheckpointException), match="complex32"):
            load()
