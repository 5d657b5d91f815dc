"""What DCP's HuggingFaceStorageWriter leaves of several ranks: safetensors without any `.metadata`."""

from __future__ import annotations

import json
import logging
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import xla_ckpt
from tests.jobs import run_on_ranks
from xla_ckpt.errors import CorruptCheckpointError, IncompatibleCheckpointError

ODD = torch.arange(35.0).reshape(7, 5)
EVEN = torch.arange(24.0).reshape(8, 3) + 100
BIAS = torch.arange(3.0) + 200


def saves(rank: int, path: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (4,))
    state = {
        "odd.weight": distribute_tensor(ODD, mesh, [Shard(0)]),
        "even.weight": distribute_tensor(EVEN, mesh, [Shard(0)]),
        "bias": distribute_tensor(BIAS, mesh, [Replicate()]),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(str(path), save_distributed=True))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shards") / "hf"
    run_on_ranks(saves, 4, path)
    return path


@pytest.fixture
def here(written: Path, tmp_path: Path) -> Path:
    (tmp_path / "hf").mkdir()
    for file in written.iterdir():
        (tmp_path / "hf" / file.name).write_bytes(file.read_bytes())
    return tmp_path / "hf"


def model() -> dict[str, torch.Tensor]:
    return {"odd.weight": torch.zeros(7, 5), "even.weight": torch.zeros(8, 3), "bias": torch.zeros(3)}


def test_parts_are_put_together(here: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        tree = xla_ckpt.restore(here).tree["model"]
    assert "4 files are there" in caplog.text
    assert all(tree[name].equal(value) for name, value in (("odd.weight", ODD), ("even.weight", EVEN), ("bias", BIAS)))
    caplog.clear()
    held = model()
    xla_ckpt.load_checkpoint(here, model=held)
    assert held["odd.weight"].equal(ODD)
    assert caplog.text == ""
    report = xla_ckpt.verify(here)
    assert (report.ok, report.digests, report.strangers) == (True, False, [])
    assert xla_ckpt.list_tags(here.parent) == ["hf"]


@pytest.mark.parametrize("number", [1, 2])
def test_a_shard_that_is_missing_is_named(here: Path, number: int) -> None:
    (here / f"shard-{number:05}-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(CorruptCheckpointError, match="missing") as caught:
        xla_ckpt.restore(here)
    assert caught.value.file == f"shard-{number:05}"
    assert not xla_ckpt.verify(here).ok


def test_a_missing_last_shard_does_not_shrink_an_array(here: Path) -> None:
    (here / "shard-00004-model-00001-of-00001.safetensors").unlink()
    held = model()
    with pytest.raises(
        IncompatibleCheckpointError, match="end before the array does.*A file of the directory"
    ) as caught:
        xla_ckpt.load_checkpoint(here, model=held)
    assert (caught.value.expected, caught.value.found) in (("[8, 3]", "[6, 3]"), ("[7, 5]", "[6, 5]"))
    assert not held["bias"].any()


def part(path: Path, number: int, start: int, rows: int, of: int = 1, name: str = "w") -> None:
    about = {"DCP_SHARDING_INFO": json.dumps({name: {"saved_offsets": [start, 0]}})}
    save_file({name: torch.ones(rows, 2)}, path / f"shard-{number:05}-model-00001-of-{of:05}.safetensors", about)


@pytest.mark.parametrize(
    ("parts", "match"),
    [
        ([(1, 0, 2), (2, 3, 2)], "shards are missing"),
        ([(1, 0, 2), (2, 1, 2)], "hold the same elements"),
        ([(1, 0, 2), (2, 0, 2)], "hold the same elements"),
        ([(1, 0, 2), (2, 2, 2, 3)], "files of two saves"),
        ([(1, 0, 2, 2)], "missing"),
        ([(1, 0, 2), (10**9, 2, 2)], "missing"),
    ],
)
def test_parts_that_make_no_array_are_refused(tmp_path: Path, parts: list[tuple[int, ...]], match: str) -> None:
    (tmp_path / "hf").mkdir()
    for one in parts:
        part(tmp_path / "hf", *one)
    with pytest.raises(CorruptCheckpointError, match=match):
        xla_ckpt.restore(tmp_path / "hf")


def test_a_damaged_header_is_refused(here: Path) -> None:
    file = here / "shard-00002-model-00001-of-00001.safetensors"
    data = file.read_bytes()
    for bad in (data[:-1], data[:20], data.replace(b"saved_offsets", b"saved_offsetz"), data.replace(b"[2, ", b"[-2,")):
        file.write_bytes(bad)
        with pytest.raises(CorruptCheckpointError) as caught:
            xla_ckpt.restore(here)
        assert caught.value.file == file.name


@pytest.mark.parametrize("name", ["model.safetensors", "shard-00001-model-00001-of-00001.safetensors"])
def test_quantized_weights_are_refused_and_others_are_read(tmp_path: Path, name: str) -> None:
    (tmp_path / "hf").mkdir()
    tensors = {
        "a.weight": torch.ones(4, 4).to(torch.float8_e4m3fn),
        "a.weight_scale_inv": torch.ones(1, 1),
        "b.weight": torch.ones(2),
    }
    save_file(tensors, tmp_path / "hf" / name, {"format": "pt"})
    with pytest.raises(IncompatibleCheckpointError, match="quantized.*QuantizedHuggingFaceStorageReader") as caught:
        xla_ckpt.restore(tmp_path / "hf")
    assert caught.value.leaf == "model/a.weight"
    like = {"model": {"b.weight": xla_ckpt.ArraySpec((2,), torch.float32)}}
    assert xla_ckpt.restore(tmp_path / "hf", like=like).tree["model"]["b.weight"].equal(torch.ones(2))
    assert xla_ckpt.verify(tmp_path / "hf").ok
