"""Directories of Hugging Face's as they come: broken and hostile files are errors before anything is written."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

import xla_ckpt
from tests.runs import names_in
from xla_ckpt.conversion.llama.config import parse_config
from xla_ckpt.core.files.safetensors import get_header_size, parse_arrays
from xla_ckpt.errors import CheckpointError


def file_of(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(first: int, last: int, dtype: str = "F32", shape: Any = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(last - first) // 4] if shape is None else shape, "data_offsets": [first, last]}


BROKEN = {
    "shorter than a number": b"abc",
    "a header that is longer than the file": struct.pack("<Q", 1 << 62) + b"{}",
    "no JSON": file_of(b"{nonsense"),
    "deep": file_of(b"[" * 100_000),
    "a list": file_of([]),
    "twice": file_of(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, '
                     b'"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}', bytes(4)),
    "no entry": file_of({"a": 1}),
    "negative": file_of({"a": entry(0, 4, shape=[-1])}, bytes(4)),
    "a huge shape": file_of({"a": entry(0, 4, shape=[1 << 60, 1 << 60])}, bytes(4)),
    "many dims": file_of({"a": entry(0, 4, shape=[1] * 1000)}, bytes(4)),
    "another size": file_of({"a": entry(0, 4, shape=[2])}, bytes(4)),
    "backwards": file_of({"a": entry(4, 0, shape=[1])}, bytes(4)),
    "past the end": file_of({"a": entry(0, 8)}, bytes(4)),
    "overlapping": file_of({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12)),
    "a hole": file_of({"a": entry(4, 8)}, bytes(8)),
    "bytes that are nobody's": file_of({"a": entry(0, 4)}, bytes(8)),
    "a bool": file_of({"a": entry(0, 4, shape=[True])}, bytes(4)),
}  # fmt: skip


@pytest.mark.parametrize("why", BROKEN)
def test_a_broken_file_is_named(why: str, tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/model.safetensors").write_bytes(BROKEN[why])
    with pytest.raises(xla_ckpt.CorruptCheckpointError) as caught:
        xla_ckpt.convert(tmp_path / "hf", tmp_path / "run")
    assert caught.value.file == "model.safetensors"
    assert not xla_ckpt.verify(tmp_path, "hf").ok
    assert names_in(tmp_path) == ["hf"]


@pytest.mark.parametrize("why", BROKEN)
def test_a_broken_file_of_any_name_is_named(why: str, tmp_path: Path) -> None:
    (tmp_path / "weights.safetensors").write_bytes(BROKEN[why])
    with pytest.raises(xla_ckpt.CorruptCheckpointError) as caught:
        xla_ckpt.restore(tmp_path / "weights.safetensors")
    assert caught.value.file == "weights.safetensors"
    assert not xla_ckpt.verify(tmp_path / "weights.safetensors").ok


def test_a_file_of_any_name_is_a_model(tmp_path: Path) -> None:
    """It was called a file that torch.save did not write, with the advice to pass a directory, which did not help."""
    model, other = torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)
    file = tmp_path / "weights.safetensors"
    safetensors.torch.save_file(model.state_dict(), file)
    assert xla_ckpt.load_checkpoint(file, model=other).tag == "weights.safetensors"
    assert torch.equal(other.weight, model.weight)
    assert xla_ckpt.verify(file).ok
    assert xla_ckpt.has_checkpoint(file)
    assert xla_ckpt.list_tags(file) == xla_ckpt.list_tags(tmp_path) == []
    with pytest.raises(xla_ckpt.NoCheckpointError, match=r"lie there, weights\.safetensors: pass the path"):
        xla_ckpt.restore(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")
    with pytest.raises(xla_ckpt.NoCheckpointError, match=r"of a directory of Hugging Face's, model\.safetensors or"):
        xla_ckpt.restore(tmp_path / "empty")
    xla_ckpt.convert(file, tmp_path / "run")
    assert xla_ckpt.list_tags(tmp_path / "run") == ["weights"]
    assert torch.equal(xla_ckpt.restore(tmp_path / "run").tree["model"]["weight"], model.weight)


@pytest.mark.parametrize("of", ["tag", "index"])
def test_a_file_with_a_part_of_a_checkpoint_is_no_model(tmp_path: Path, of: str) -> None:
    model = torch.nn.Linear(2, 3)
    if of == "tag":
        xla_ckpt.save_checkpoint(tmp_path, "a", model)
    else:
        (tmp_path / "a").mkdir()
        safetensors.torch.save_file(model.state_dict(), tmp_path / "a/model-00001-of-00002.safetensors")
        (tmp_path / "a/model.safetensors.index.json").write_text("{}")
    (file,) = (tmp_path / "a").rglob("*.safetensors")
    with pytest.raises(xla_ckpt.UsageError, match=r"Pass the .*directory of the checkpoint to which it belongs"):
        xla_ckpt.load_checkpoint(file, model=model)


@pytest.mark.parametrize("name", ["model", "diffusion_pytorch_model"])
def test_shards_without_their_index(tmp_path: Path, name: str) -> None:
    """One shard was taken for a model by itself, and offered as the checkpoint that lies there."""
    folder, model = tmp_path / "hf", torch.nn.Linear(2, 3)
    folder.mkdir()
    shards = [folder / f"{name}-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for shard in shards:
        safetensors.torch.save_file(torch.nn.Linear(2, 3).state_dict(), shard)
    held = {leaf: tensor.clone() for leaf, tensor in model.state_dict().items()}
    for path, said in (
        (shards[0], rf"{shards[0].name} is one of 2 shards of a model, and model.safetensors.index.json is missing"),
        (folder, "the index of a model in shards is missing"),
    ):
        with pytest.raises(xla_ckpt.CorruptCheckpointError, match=rf"{said}.*Restore the index"):
            xla_ckpt.load_checkpoint(path, model=model, strict=False)
        (problem,) = xla_ckpt.verify(path).problems
        assert problem.file == "model.safetensors.index.json"
    assert all(torch.equal(tensor, held[leaf]) for leaf, tensor in model.state_dict().items())


@given(st.binary(max_size=200))
def test_any_bytes_are_tensors_or_an_error(data: bytes) -> None:
    try:
        head = get_header_size(data, len(data))
        parse_arrays(data[:head], len(data))
    except CheckpointError:
        return


@pytest.fixture
def several(tmp_path: Path) -> Path:
    (tmp_path / "hf").mkdir()
    for number, name in enumerate("ab"):
        safetensors.torch.save_file({name: torch.full((3,), float(number))}, tmp_path / f"hf/{name}.safetensors")
    index = {"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}
    (tmp_path / "hf/model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path / "hf"


def test_several_files_through_links(several: Path, tmp_path: Path) -> None:
    """As in Hugging Face's cache, where names are links to files that are named by their digests."""
    (tmp_path / "cache").mkdir()
    for name in os.listdir(several):
        (tmp_path / "cache" / name).symlink_to(several / name)
    report = xla_ckpt.convert(tmp_path / "cache", tmp_path / "run")
    assert report.tag == "cache"
    tree = xla_ckpt.restore(tmp_path / "run").tree["model"]
    assert {name: t.tolist() for name, t in tree.items()} == {"a": [0.0] * 3, "b": [1.0] * 3}
    assert xla_ckpt.list_tags(tmp_path) == []  # no root has it among its tags


@pytest.mark.parametrize(
    ("index", "said"),
    [
        (b"{", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        ({"weight_map": []}, "no weight_map"),
        ({"weight_map": {"a": "../a.safetensors"}}, "not one beside it"),
        ({"weight_map": {"a": 1}}, "not one beside it"),
        ({"weight_map": {"a": "c.safetensors"}}, "a file of the index is missing"),
        ({"weight_map": {"a": "a.safetensors", "c": "a.safetensors"}}, "the first that differs is c"),
    ],
)
def test_an_index_that_is_not_true(index: Any, said: str, several: Path, tmp_path: Path) -> None:
    text = index if isinstance(index, bytes) else json.dumps(index).encode()
    (several / "model.safetensors.index.json").write_bytes(text)
    with pytest.raises(xla_ckpt.CorruptCheckpointError, match=said):
        xla_ckpt.convert(several, tmp_path / "run")
    assert not (tmp_path / "run").exists()


SIZES = {"hidden_size": 32, "num_attention_heads": 8, "intermediate_size": 48, "vocab_size": 64, "num_hidden_layers": 2}


def test_a_config_may_leave_out_what_follows() -> None:
    found = parse_config(SIZES)
    assert (found.kv_heads, found.head_dim, found.tied, found.attention_bias) == (8, 4, False, None)
    assert parse_config({**SIZES, "head_dim": 7, "num_key_value_heads": 2}).q_rows == 56


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b"[]", "a JSON object"),
        ({**SIZES, "hidden_size": None}, "needs hidden_size"),
        ({**SIZES, "hidden_size": "32"}, "needs hidden_size.*'32'"),
        ({**SIZES, "vocab_size": True}, "needs vocab_size"),
        ({**SIZES, "vocab_size": -1}, "needs vocab_size"),
        ({**SIZES, "intermediate_size": 1 << 80}, "needs intermediate_size"),
        ({**SIZES, "num_hidden_layers": 1 << 30}, "impossible number of layers"),
        ({**SIZES, "num_attention_heads": 7}, "no head_dim is given.*7, hidden_size 32"),
        ({**SIZES, "num_key_value_heads": 3}, "do not divide.*8 and 3"),
        ({**SIZES, "tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ],
)
def test_a_config_that_makes_no_sense(content: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(xla_ckpt.UsageError, match=said):
        parse_config(content)
    path = tmp_path / "config.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    xla_ckpt.save_checkpoint(tmp_path / "run", "a", {"w": torch.ones(2)})
    with pytest.raises(xla_ckpt.UsageError, match=said):
        xla_ckpt.export_hf(tmp_path / "run", tmp_path / "hf", llama=xla_ckpt.LlamaJob(path))
    path.write_bytes(b" " * (1 << 20) + b"{}")
    with pytest.raises(xla_ckpt.UsageError, match="too large"):
        xla_ckpt.export_hf(tmp_path / "run", tmp_path / "hf", llama=xla_ckpt.LlamaJob(path))
