"""The fixtures of stock DCP are what they claim, and what stock DCP itself does in some cases that matter."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import hf_storage, quantized_hf_storage

import xla_ckpt
from tests.formats.stock_dcp import STOCK, Stock, differences, stock
from tests.runs import names_in
from tests.same import same

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]


def read_by_stock(reader: dcp.StorageReader) -> dict[str, Any]:
    """What stock `dcp.load` of the present torch makes of a checkpoint, by DCP's key."""
    state: dict[str, Any] = {
        key: torch.full(item.size, 1, dtype=item.properties.dtype) if hasattr(item, "size") else "to be read"
        for key, item in reader.read_metadata().state_dict_metadata.items()
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


@pytest.mark.parametrize("case", [case for case in STOCK if case.readable], ids=str)
def test_stock_reads_the_true_contents(case: Stock) -> None:
    assert differences(read_by_stock(dcp.FileSystemReader(case.path)), {**case.contents(), **case.objects()}) == []


def test_the_contents_cover_what_they_are_there_for() -> None:
    contents = stock("process").contents()
    assert {str(tensor.dtype).removeprefix("torch.") for tensor in contents.values()} == {
        "float32", "bfloat16", "int64", "uint8", "bool", "complex64",
    }  # fmt: skip
    assert same(contents["model.embedding.weight"], contents["model.head.weight"])
    assert contents["model.nothing"].shape == (0, 4)
    assert contents["model.scale"].shape == ()
    assert len({tuple(tensor.flatten().tolist()) for tensor in contents.values() if tensor.numel() > 9}) > 10
    assert {type(value).__name__ for value in stock("process").objects().values()} == {
        "int", "float", "bool", "str", "NoneType", "list", "tuple", "bytes", "Size", "dtype", "device", "set",
        "complex", "ndarray", "float64", "int64", "datetime", "timedelta",
    }  # fmt: skip


def test_paths_are_those_of_the_metadata() -> None:
    for case in STOCK:
        if case.readable and case.name != "not_flat":  # which has none
            mapping = dcp.FileSystemReader(case.path).read_metadata().planner_data
            lost = case.recipe.get("lost", [])
            assert {key: path for key, path in mapping.items() if key not in lost} == case.paths(), case


@pytest.mark.parametrize("name", ["hugging_face", "hugging_face_consolidated"])
def test_stock_reads_safetensors(name: str) -> None:
    wanted = stock(name).contents()
    assert differences(read_by_stock(hf_storage.HuggingFaceStorageReader(str(stock(name).path))), wanted) == []
    shards = stock(name).path / "sharded"
    if shards.exists():
        assert differences(read_by_stock(hf_storage.HuggingFaceStorageReader(str(shards))), wanted) == []


def test_stock_reads_quantized_weights() -> None:
    reader = quantized_hf_storage.QuantizedHuggingFaceStorageReader(str(stock("quantized").path))
    wanted = stock("quantized").contents()
    found = {key: torch.zeros_like(tensor) for key, tensor in wanted.items()}
    dcp.load(found, storage_reader=reader, no_dist=True)
    assert differences(found, wanted) == []


def test_each_rank_of_no_collectives_has_its_own() -> None:
    case, seen = stock("fsdp2_no_collectives"), dict.fromkeys(stock("fsdp2_no_collectives").contents(), 0)
    assert not (case.path / ".metadata").exists()
    for rank in (0, 1):
        metadata = dcp.FileSystemReader(case.path).read_metadata(rank=rank)
        for index, info in metadata.storage_data.items():
            item = (case.path / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
            value = torch.load(io.BytesIO(item), weights_only=True)
            if index.offset is None:
                assert value == case.objects()[index.fqn]
            else:
                box = tuple(slice(at, at + size) for at, size in zip(index.offset, value.shape, strict=True))
                assert torch.equal(value, case.contents()[index.fqn][box])
                seen[index.fqn] += value.numel()
    assert seen == {key: tensor.numel() for key, tensor in case.contents().items()}


# --- what stock cannot read ---------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.__version__ >= "2.10", reason="it is about 2.9")
def test_torch_2_9_cannot_read_the_metadata_of_2_15() -> None:
    with pytest.raises(ValueError, match="too many values to unpack"):
        dcp.FileSystemReader(stock("2.15_few").path).read_metadata()


def test_places_of_safetensors_in_distcp_are_all_one() -> None:
    case = stock("as_safetensors")
    places = dcp.FileSystemReader(case.path).read_metadata().storage_data
    assert len({info.offset for index, info in places.items() if index.offset is not None}) == 1
    with pytest.raises(dcp.api.CheckpointException):
        read_by_stock(dcp.FileSystemReader(case.path))


def test_compressed_items_need_zstandard() -> None:
    case = stock("zstandard")
    infos = dcp.FileSystemReader(case.path).read_metadata().storage_data.values()
    assert [info.transform_descriptors for info in infos] == [["stream.zstd/1"]] * len(infos)


def test_names_and_numbers_of_the_manager() -> None:
    root = stock("manager", "10").root
    assert names_in(root) == ["10", "20"]
    assert names_in(root / "10") == [".manager_metadata", ".metadata", "__0_0.distcp"]


def test_recipes_say_who_wrote_them() -> None:
    for folder in {case.folder for case in STOCK}:
        recipe = json.loads(Path(folder, "recipe.json").read_text())
        version = recipe["torch"].split("+")[0]
        assert version.startswith(folder.name.partition("_")[0] if folder.name[0].isdigit() else "2.9.1"), folder


def test_a_conversion_says_that_parameters_stay_numbers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=tmp_path / "stock", no_dist=True)
    xla_ckpt.convert(tmp_path / "stock", tmp_path / "numbers")
    assert "numbers its parameters, and so does the new tag" in caplog.text
    assert [*xla_ckpt.restore(tmp_path / "numbers").tree["optimizer"]["state"]] == [0, 1]
    caplog.clear()
    xla_ckpt.convert(tmp_path / "stock", tmp_path / "model", to="safetensors")
    xla_ckpt.convert(tmp_path / "stock", tmp_path / "names", model=model, optimizer=optimizer)
    assert "numbers its parameters" not in caplog.text
    assert [*xla_ckpt.restore(tmp_path / "names").tree["optimizer"]["state"]] == ["weight", "bias"]
