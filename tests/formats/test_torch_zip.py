"""Files of torch.save as byte ranges: what torch writes is found, and nothing that a file says is run."""

from __future__ import annotations

import argparse
import collections
import datetime
import io
import os
import pickle
import re
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import xla_ckpt
from tests.memory import MemoryDirectory
from tests.runs import names_in
from xla_ckpt.formats.torch_save.zip_reader import TensorLocation, check_zip_file, read_torch_file
from xla_ckpt.storage.local import LocalDirectory


class Hostile:
    def __init__(self, call: Any, *args: Any) -> None:
        self.call = call, args

    def __reduce__(self) -> Any:
        return self.call


def scan(data: bytes, **kwargs: Any) -> Any:
    directory = MemoryDirectory()
    directory.objects["f.pt"] = data
    return read_torch_file(directory, "f.pt", **kwargs)


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def content(data: bytes, at: TensorLocation) -> torch.Tensor:
    dtype = getattr(torch, at.dtype.name)
    count = int(np.prod(at.shape, dtype=np.int64))
    if not count:
        return torch.empty(at.shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype, count=count, offset=at.offset).reshape(at.shape)


DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint16,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_type_are_found(dtype: torch.dtype) -> None:
    base = (torch.arange(60) % 2).to(dtype).reshape(12, 5)
    tensors = {"whole": base, "view": base[3:7], "scalar": base[1, 1], "empty": base[:0], "one": base[:1, :1]}
    data = saved(tensors)
    found = scan(data)
    for name, value in tensors.items():
        assert found[name].shape == tuple(value.shape)
        made = content(data, found[name])
        assert made.dtype == dtype
        assert torch.equal(made.to(torch.complex128), value.to(torch.complex128))


def test_parameters_and_tensors_with_attributes_are_tensors() -> None:
    parameter = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    marked = torch.arange(4.0)
    marked.partition_dim = 0
    data = saved(collections.OrderedDict(p=parameter, m=marked))
    found = scan(data)
    assert torch.equal(content(data, found["p"]), parameter)
    assert torch.equal(content(data, found["m"]), marked)


PLAIN = {
    "numbers": [1, 2.5, True, None, 10**40, 1 + 2j], "text": "ä", "bytes": b"\0\xff", "array": bytearray(b"ab"),
    "tuple": (1, (2, [3])), "set": {1, 2}, "frozen": frozenset([3]), "ordered": collections.OrderedDict(a=1),
    "default": collections.defaultdict(list, {1: [2]}), "counter": collections.Counter("aab"),
    "time": datetime.datetime(2024, 1, 2, tzinfo=datetime.UTC), "delta": datetime.timedelta(days=1),
    "names": argparse.Namespace(lr=0.1, nested={"x": (1,)}), "size": torch.Size([1, 2]), "dtype": torch.bfloat16,
    "device": torch.device("cpu"), "scalar": np.float64(0.5), "integer": np.int32(7), "slice": slice(1, None, 2),
    "path": Path("/a/b"), "deque": collections.deque([1, 2], 5),
}  # fmt: skip


@pytest.mark.parametrize("name", PLAIN)
def test_plain_values_come_back_as_they_were(name: str) -> None:
    found = scan(saved({"v": PLAIN[name]}))["v"]
    assert found == PLAIN[name]
    assert type(found) is type(PLAIN[name])


HOSTILE = {
    "posix.system": Hostile(os.system, "touch ran"),
    "builtins.eval": Hostile(eval, "open('ran', 'w')"),
    "builtins.getattr": Hostile(getattr, "x", "load"),
    "subprocess.check_output": Hostile(subprocess.check_output, ["touch", "ran"]),
    "torch.serialization.load": Hostile(torch.load, "x"),
    "builtins.exec": {"deep": [1, (Hostile(exec, "1"),)]},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_pickle_is_refused_by_name_and_nothing_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(xla_ckpt.UntrustedObjectError, match=f"{re.escape(name)}, .*nothing ran") as caught:
        scan(saved({"weight": torch.ones(2), "evil": HOSTILE[name]}))
    assert caught.value.file == "f.pt"
    assert names_in(tmp_path) == []


def test_a_hostile_rank_file_stops_a_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "ckpt" / "t" / "model"
    folder.mkdir(parents=True)
    evil = {"w": torch.ones(2), "evil": Hostile(os.system, f"touch {tmp_path}/ran")}
    torch.save(evil, folder / "dp_rank_00_tp_rank_00_pp_rank_00.pt")
    for mark in ("checkpoint", "done"):
        (folder.parent / mark).write_text("1")
    model = {"w": torch.zeros(2)}
    with pytest.raises(xla_ckpt.UntrustedObjectError, match="system") as caught:
        xla_ckpt.load_checkpoint(tmp_path / "ckpt", model=model, trust_pickle=True)
    assert (caught.value.tag, caught.value.file) == ("t", "model/dp_rank_00_tp_rank_00_pp_rank_00.pt")
    assert not (tmp_path / "ran").exists()
    assert model["w"].tolist() == [0, 0]


def test_what_cannot_be_read_is_said() -> None:
    with pytest.raises(xla_ckpt.UnsupportedStateError, match="not contiguous"):
        scan(saved(torch.ones(3, 4).t()))
    buffer = io.BytesIO()
    torch.save({"w": torch.ones(2)}, buffer, _use_new_zipfile_serialization=False)
    with pytest.raises(xla_ckpt.UnsupportedStateError, match=r"torch before 1\.6"):
        scan(buffer.getvalue())
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("a/b", b"1")
    with pytest.raises(xla_ckpt.CorruptCheckpointError, match=r"no data\.pkl"):
        scan(made.getvalue())
    with pytest.raises(xla_ckpt.CorruptCheckpointError, match="missing"):
        read_torch_file(MemoryDirectory(), "f.pt")


def rewritten(data: bytes, method: int = zipfile.ZIP_STORED, **records: bytes | None) -> bytes:
    """The zip with some of its records replaced or, with None, left out."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(made, "w", method) as new:
        for name in old.namelist():
            key = name.rpartition("/")[2].replace(".", "_")
            value = records.get(key, old.read(name))
            if value is not None:
                new.writestr(name, value)
    return made.getvalue()


def test_zips_that_torch_did_not_write() -> None:
    data = saved(torch.ones(100))
    assert scan(rewritten(data)).shape == (100,)
    with pytest.raises(
        xla_ckpt.UnsupportedStateError, match=r"compressed or encrypted, or the file is damaged.*from a copy"
    ):
        scan(rewritten(data, zipfile.ZIP_DEFLATED))
    with pytest.raises(xla_ckpt.UnsupportedStateError, match="little-endian"):
        scan(rewritten(data, byteorder=b"big"))
    with pytest.raises(xla_ckpt.CorruptCheckpointError, match="data/0 is missing"):
        scan(rewritten(data, **{"0": None}))
    with pytest.raises(xla_ckpt.CorruptCheckpointError, match="past the end of its storage"):
        scan(rewritten(data, **{"0": b"short"}))
    with pytest.raises(xla_ckpt.CorruptCheckpointError, match="pickle is damaged"):
        scan(rewritten(data, data_pkl=pickle.dumps(1)[:-1]))


def test_a_truncated_file_is_damaged(tmp_path: Path) -> None:
    data = saved({"w": torch.arange(100.0)})
    for size in range(0, len(data), 37):
        (tmp_path / "f.pt").write_bytes(data[:size])
        directory = LocalDirectory(tmp_path)
        with pytest.raises(xla_ckpt.CorruptCheckpointError) as caught:
            read_torch_file(directory, "f.pt")
        assert caught.value.file == "f.pt"
        directory.close()


def test_zips_without_checksums_have_none() -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        data = saved(torch.arange(100.0))
    finally:
        torch.serialization.set_crc32_options(before)
    assert scan(saved(torch.arange(100.0))).crc is not None
    assert scan(data).crc is None
    directory = MemoryDirectory()
    directory.objects["f.pt"] = data
    assert check_zip_file(directory, "f.pt") == len(data)


def test_a_record_that_is_not_what_its_checksum_says_is_found() -> None:
    data = bytearray(saved(torch.arange(100.0)))
    data[scan(bytes(data)).offset + 7] ^= 1
    directory = MemoryDirectory()
    directory.objects["f.pt"] = data
    with pytest.raises(xla_ckpt.CorruptCheckpointError, match="data/0 is not what its CRC-32 says"):
        check_zip_file(directory, "f.pt")


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (torch.ones(2, dtype=torch.complex64).conj(), "torch:conj"),
        (torch._neg_view(torch.ones(2)), "torch:neg"),
        (torch.eye(2).to_sparse(), "torch:sparse_coo"),
    ],
)
def test_a_tensor_that_is_no_array_is_refused_where_arrays_alone_can_be(value: torch.Tensor, kind: str) -> None:
    with pytest.raises(xla_ckpt.UntrustedObjectError, match=f"tensor of the kind {kind}.*save plain tensors"):
        scan(saved(value))


def test_a_pickle_that_stands_for_too_many_values_is_refused() -> None:
    deep: list[Any] = []
    for _ in range(60):
        deep = [deep, deep]
    with pytest.raises(xla_ckpt.CorruptCheckpointError, match="stands for more than"):
        scan(saved(deep))


SMALL = saved({"w": torch.arange(4.0), "n": (1, "x")})


@given(st.lists(st.tuples(st.integers(0, len(SMALL) - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_flipped_bytes_give_only_errors_of_ours(changes: list[tuple[int, int]]) -> None:
    data = bytearray(SMALL)
    for place, value in changes:
        data[place] = value
    try:
        found = scan(bytes(data))
    except xla_ckpt.CheckpointError:
        return
    for at in found.values() if isinstance(found, dict) else ():
        if isinstance(at, TensorLocation):
            assert 0 <= at.offset <= at.offset + 4 * int(np.prod(at.shape)) <= len(data)


PICKLE = next(zipfile.ZipFile(io.BytesIO(SMALL)).read(n) for n in zipfile.ZipFile(io.BytesIO(SMALL)).namelist()
              if n.endswith("data.pkl"))  # fmt: skip


@given(st.lists(st.tuples(st.integers(0, len(PICKLE) - 1), st.integers(0, 127)), min_size=1, max_size=4))
def test_damaged_pickles_with_a_right_checksum_give_only_errors_of_ours(changes: list[tuple[int, int]]) -> None:
    data = bytearray(PICKLE)
    for place, value in changes:
        if data[place] in b"rj" or value in b"rjB":  # large memo numbers and lengths only cost memory
            continue
        data[place] = value
    try:
        scan(rewritten(SMALL, data_pkl=bytes(data)))
    except xla_ckpt.CheckpointError:
        pass
