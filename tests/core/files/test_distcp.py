"""A payload file for DCP is a row of zips of torch.save, and a safetensors file: four ways to read the same bytes."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from tests.memory import MemoryDirectory
from xla_ckpt.core import dtypes
from xla_ckpt.core.files.dcp_file import DcpFile
from xla_ckpt.core.plan.save_plan import FilePlan, RegionSource, SavePlan
from xla_ckpt.core.sharding.box import Box
from xla_ckpt.errors import FormatError, UnsupportedStateError
from xla_ckpt.formats.dcp.writing import locate_zip, make_chunk, make_object_zip, make_value_zip
from xla_ckpt.progress import IoContext
from xla_ckpt.saving.write import write_files

NAMED = ["float64", "float32", "bfloat16", "int8", "uint16", "bool", "complex64", "float8_e4m3fn", "float8_e5m2fnuz"]


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).clone().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def written(tensors: dict[str, torch.Tensor]) -> tuple[DcpFile, bytes]:
    """The file that holds these tensors, each whole."""
    codec = DcpFile(
        "one", tuple(make_chunk(name, dtype_of(t), Box.from_shape(tuple(t.shape))) for name, t in tensors.items())
    )
    data = bytearray(b"\xff" * codec.size)
    for (at, nbytes), tensor in zip(codec.region_ranges, tensors.values(), strict=True):
        data[at : at + nbytes] = raw(tensor)
    for at, text in codec.build_framing((), ()):
        data[at : at + len(text)] = text
    return codec, bytes(data)


def dtype_of(tensor: torch.Tensor) -> dtypes.DType:
    return dtypes.get_dtype(str(tensor.dtype).removeprefix("torch."))


@given(
    st.lists(
        st.tuples(st.sampled_from(NAMED), st.lists(st.integers(0, 5), max_size=3), st.integers(0, 2**32 - 1)),
        max_size=6,
    )
)
def test_four_ways_to_read_a_tensor(made: list[tuple[str, list[int], int]]) -> None:
    tensors = {
        f"key.{i}": torch.from_numpy(np.random.default_rng(seed).integers(0, 2, shape)).to(getattr(torch, name))
        for i, (name, shape, seed) in enumerate(made)
    }
    codec, data = written(tensors)
    assert len(data) == codec.size
    for (at, nbytes), (first, length), tensor in zip(
        codec.region_ranges, codec.zip_ranges, tensors.values(), strict=True
    ):
        assert data[at : at + nbytes] == raw(tensor)
        assert at % 64 == 0  # where torch reads it by mmap
        found = torch.load(io.BytesIO(data[first : first + length]), weights_only=True)
        assert (found.dtype, found.shape, raw(found)) == (tensor.dtype, tensor.shape, raw(tensor))
        assert locate_zip(dtype_of(tensor), tuple(tensor.shape), at) == (first, length)


@pytest.mark.parametrize("segment_bytes", [4096, 8192, 1 << 24])
def test_the_bytes_do_not_depend_on_segments(segment_bytes: int) -> None:
    """What stands around the regions goes out with them, also where it begins in one segment and ends in another."""
    tensors = {f"key.{i}": torch.arange(i * 100, dtype=torch.int16) for i in range(40)}
    codec, data = written(tensors)
    assert codec.header_nbytes > 8192
    sources = [RegionSource(leaf=name, shard_index=0, offset=0, nbytes=t.nbytes) for name, t in tensors.items()]
    memory = {(name, 0): memoryview(raw(tensor)) for name, tensor in tensors.items()}
    plan = SavePlan((FilePlan(path="one", layout=codec, sources=tuple(sources)),))
    directory = MemoryDirectory()
    write_files(directory, plan, memory, IoContext(workers=3), segment_bytes=segment_bytes)
    assert directory.objects["one"] == data


def test_safetensors_opens_it(tmp_path: Path) -> None:
    tensors = {"w": torch.randn(3, 5), "n": torch.tensor(4), "none": torch.empty(0, 2), "h": torch.randn(7).bfloat16()}
    (tmp_path / "a").write_bytes(written(tensors)[1])
    with safe_open(tmp_path / "a", framework="pt") as opened:
        assert set(opened.keys()) == {*tensors, "one/0", "one/1", "one/2", "one/3", "one/4"}
        for name, tensor in tensors.items():
            assert torch.equal(opened.get_tensor(name), tensor)


def test_a_part_of_an_array_says_where_it_begins() -> None:
    codec = DcpFile("one", (make_chunk("w", dtypes.get_dtype("float32"), Box((2, 0), (4, 3))),))
    assert rb"\"w\":{\"saved_offsets\":[2,0]}" in codec.build_framing((), ())[0][1]


def test_a_file_less_some_regions_is_the_file_of_the_others() -> None:
    chunks = tuple(make_chunk(name, dtypes.get_dtype("int8"), Box.from_shape((n,))) for n, name in enumerate("abcd"))
    assert DcpFile("one", chunks).exclude_regions(frozenset({0, 2})) == DcpFile("one", (chunks[1], chunks[3]))


def test_a_name_stands_once_in_a_file() -> None:
    twice = make_chunk("w", dtypes.get_dtype("int8"), Box.from_shape((2,)))
    with pytest.raises(FormatError, match="twice"):
        DcpFile("one", (twice, twice))


def test_an_element_type_that_torch_does_not_have_is_refused() -> None:
    with pytest.raises(UnsupportedStateError, match="float8_e3m4"):
        make_chunk("w", dtypes.get_dtype("float8_e3m4"), Box.from_shape((2,)))


def test_values_are_files_of_torch_save() -> None:
    value = {"lr": 1e-3, "betas": (0.9, 0.95), "names": ["a", "b"], "none": None, "raw": b"\0\1"}
    assert torch.load(io.BytesIO(make_value_zip(value, "groups")), weights_only=True) == value
    assert torch.load(io.BytesIO(make_object_zip(b"\x80\x02]q\x00.")), weights_only=True) == []
