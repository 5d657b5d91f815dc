"""Files of torch.save that this library writes: what torch, zipfile, and its own scanner make of them."""

from __future__ import annotations

import io
import os
import pickle
import tempfile
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.memory import MemoryDirectory
from tests.strategies import FakeArray, same, trees
from xla_ckpt import dtypes
from xla_ckpt.arrays.torch_elements import bytes_of
from xla_ckpt.engine.crew import Crew
from xla_ckpt.engine.write import write_files
from xla_ckpt.errors import UnsupportedStateError
from xla_ckpt.files.crc32 import crc32, joined_crc32
from xla_ckpt.files.torch_file import TorchFile
from xla_ckpt.layouts.torch_save.pickle_writer import InFile, LeafAt, dumps
from xla_ckpt.layouts.torch_save.zip_reader import TensorAt, read
from xla_ckpt.manifest import digest
from xla_ckpt.manifest.records import FileRecord
from xla_ckpt.plan.file_plan import Entry, FilePlan, RegionSource
from xla_ckpt.plan.save_plan import SavePlan
from xla_ckpt.sharding.box import Box
from xla_ckpt.storage.local_directory import LocalDirectory

DTYPES = [
    "bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "bfloat16", "float32",
    "float64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
]  # fmt: skip
MIB, GIB = 1 << 20, 1 << 30


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = getattr(torch, draw(st.sampled_from(DTYPES)))
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    shape = draw(st.sampled_from([shape, shape, (3000,), (40, 70)]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    return (torch.randn(shape, generator=generator) * 3).to(torch.bool if dtype is torch.bool else dtype)


@st.composite
def regions_of(draw: st.DrawFn, nbytes: int) -> tuple[int, ...]:
    """A storage's bytes, cut at any places."""
    cuts = sorted({0, nbytes, *draw(st.lists(st.integers(0, nbytes), max_size=3))})
    return tuple(b - a for a, b in zip(cuts, cuts[1:], strict=False)) or (0,)


def plan_of(named: dict[str, torch.Tensor], cuts: list[tuple[int, ...]], path: str = "a/b.pt") -> FilePlan:
    """A file with a dict of tensors, each of them a storage that consists of regions."""
    numbers = {name: i for i, name in enumerate(named)}

    def in_file(leaf: str) -> InFile:
        value = named[leaf]
        return InFile(numbers[leaf], dtypes.dtype(str(value.dtype).removeprefix("torch.")), tuple(value.shape))

    codec = TorchFile(
        stem="b", pickled=dumps({name: LeafAt(name) for name in named}, "", in_file), storages=tuple(cuts)
    )
    sources = [
        RegionSource(leaf=name, shard=0, offset=sum(parts[:i]), nbytes=parts[i])
        for name, parts in zip(named, cuts, strict=True) for i in range(len(parts))
    ]  # fmt: skip
    entries = tuple(Entry(leaf=s.leaf, box=Box.whole((s.nbytes,)), region=i) for i, s in enumerate(sources))
    return FilePlan(path=path, codec=codec, sources=tuple(sources), entries=entries)


def bits(value: torch.Tensor) -> bytes:
    return bytes(bytes_of(value.contiguous()))


def check_record(record: FileRecord, data: bytes, nbytes: int) -> None:
    """Gaps and regions are the file, each byte once, and all digests are right."""
    assert record.size == len(data)
    assert sum(n for _, n in record.regions) == nbytes
    spans = sorted([*record.gaps, *record.regions])
    assert all(a + n == b for (a, n), (b, _) in zip(spans, spans[1:], strict=False))
    assert spans[0][0] == 0
    assert sum(spans[-1]) == len(data)
    assert digest.digest(b"".join(data[at : at + n] for at, n in record.gaps)) == record.digest
    blocks = []
    for at, n in record.regions:
        size = digest.block_size(n)
        blocks += [digest.digest(data[at + k : at + min(k + size, n)]) for k in range(0, n, size)]
    assert tuple(blocks) == record.digests


@given(st.data(), st.lists(tensors(), max_size=6), st.sampled_from([4096, 8192, 1 << 20]), st.booleans())
def test_torch_zipfile_and_our_scanner_read_it(
    data: st.DataObject, values: list[torch.Tensor], segment_bytes: int, local: bool
) -> None:
    named = {f"t{i}": v for i, v in enumerate(values)}
    cuts = [data.draw(regions_of(len(bits(v)))) for v in values]
    plan = plan_of(named, cuts)
    memory = {(name, 0): memoryview(bits(v)) for name, v in named.items()}
    with tempfile.TemporaryDirectory() as folder:
        directory: Any = LocalDirectory(folder) if local else MemoryDirectory()
        written = write_files(directory, SavePlan((plan,)), memory, Crew(workers=2), segment_bytes=segment_bytes)
        found = read(directory, "a/b.pt")
        content = Path(folder, "a/b.pt").read_bytes() if local else directory.objects["a/b.pt"]
        directory.close()
    assert len(content) == plan.codec.size
    made = torch.load(io.BytesIO(content), weights_only=True)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        assert archive.testzip() is None
        assert {i.compress_type for i in archive.infolist()} == {zipfile.ZIP_STORED}
    starts = iter(plan.codec.places)
    for (name, value), parts in zip(named.items(), cuts, strict=True):
        places = [next(starts) for _ in parts]
        assert (made[name].dtype, made[name].shape) == (value.dtype, value.shape)
        assert bits(made[name]) == bits(value)
        at = found[name]
        assert isinstance(at, TensorAt)
        assert (getattr(torch, at.dtype.name), at.shape) == (value.dtype, tuple(value.shape))
        assert places[0][0] == at.offset
        assert at.offset % 64 == 0
        assert content[at.offset :][: len(bits(value))] == bits(value)
        assert [n for _, n in places] == list(parts)
    (record,) = written.files
    check_record(record, content, sum(map(len, map(bits, values))))
    assert written.shards.leaf == [source.leaf for source in plan.sources]
    assert written.shards.columns.offset.tolist() == [at for at, _ in plan.codec.places]


def test_torch_finds_storages_without_looking_at_their_headers(tmp_path: Path) -> None:
    """It did not: it took them to lie as its own writer places them, behind which it has 16 bytes more of each."""
    options = pytest.importorskip("torch.utils.serialization", reason="needs torch 2.6").config
    named = {name: torch.arange(count, dtype=torch.float32) for name, count in {"a": 5, "b": 16, "c": 1000}.items()}
    plan = plan_of(named, [(len(bits(value)),) for value in named.values()], "b.pt")
    memory = {(name, 0): memoryview(bits(value)) for name, value in named.items()}
    directory = LocalDirectory(str(tmp_path))
    write_files(directory, SavePlan((plan,)), memory, Crew(workers=2))
    directory.close()
    with options.patch({"load.calculate_storage_offsets": True}):
        read_back = torch.load(tmp_path / "b.pt", mmap=True)
    assert {name: bits(value) for name, value in read_back.items()} == {name: bits(v) for name, v in named.items()}


def test_the_bytes_depend_on_nothing_but_the_state() -> None:
    """Neither on the size of segments nor on the number of threads; and torch's own version of it is no shorter."""
    value = torch.arange(50_000, dtype=torch.int32)
    plan = plan_of({"w": value}, [(100_000, 100_000)])
    contents = set()
    for segment_bytes, workers in ((4096, 1), (4096, 3), (12288, 2), (1 << 24, 1)):
        directory = MemoryDirectory()
        memory = {("w", 0): memoryview(bits(value))}
        write_files(directory, SavePlan((plan,)), memory, Crew(workers=workers), segment_bytes=segment_bytes)
        contents.add(directory.objects["a/b.pt"])
    (content,) = contents
    torch.save({"w": value}, buffer := io.BytesIO())
    assert len(content) <= len(buffer.getvalue())
    assert zipfile.ZipFile(io.BytesIO(content)).testzip() is None


@pytest.mark.parametrize(
    "sizes", [[5 * GIB], [3 * GIB, 3 * GIB, MIB], [4 * GIB - 1, 4 * GIB, MIB], [MIB, 6 * GIB, MIB]]
)
def test_files_beyond_four_gib(tmp_path: Path, sizes: list[int]) -> None:
    """Only what stands between the regions is written: the regions are holes of a sparse file."""
    kind = dtypes.dtype("uint8")
    pickled = dumps({f"t{i}": LeafAt(str(i)) for i in range(len(sizes))}, "",
                    lambda leaf: InFile(int(leaf), kind, (sizes[int(leaf)],)))  # fmt: skip
    codec = TorchFile(stem="big", pickled=pickled, storages=tuple((n // 2, n - n // 2) for n in sizes))
    path = tmp_path / "big.pt"
    path.touch()
    os.truncate(path, codec.size)
    zeros = [(zero_crc(n // 2), zero_crc(n - n // 2)) for n in sizes]
    glue = codec.glue([], [crc for pair in zeros for crc in pair])
    with path.open("r+b") as file:
        for at, text in glue:
            file.seek(at)
            file.write(text)
        for i, at in enumerate(a for a, _ in codec.places[::2]):
            file.seek(at)
            file.write(bytes([i + 1]))
            file.seek(at + sizes[i] - 1)
            file.write(bytes([i + 101]))
    assert path.stat().st_size == codec.size
    with zipfile.ZipFile(path) as archive:
        infos = [i for i in archive.infolist() if "/data/" in i.filename]
        assert [i.file_size for i in infos] == [i.compress_size for i in infos] == sizes
        assert [i.CRC for i in infos] == [joined_crc32([(a, n // 2), (b, n - n // 2)])
                                          for (a, b), n in zip(zeros, sizes, strict=True)]  # fmt: skip
        assert archive.read("big/version") == b"3\n"
        assert all(archive.open(i).read(1) == bytes([k + 1]) for k, i in enumerate(infos))
    directory = LocalDirectory(tmp_path)
    found = read(directory, "big.pt")
    directory.close()
    assert [found[f"t{i}"].offset for i in range(len(sizes))] == [at for at, _ in codec.places[::2]]
    made = torch.load(path, mmap=True, weights_only=True)
    for i, n in enumerate(sizes):
        assert made[f"t{i}"].shape == (n,)
        assert made[f"t{i}"][[0, 1, -2, -1]].tolist() == [i + 1, 0, 0, i + 101]
    size, at = path.stat().st_size, 0
    blocks = sum(digest.block_count(n) for _, n in codec.places)
    record = FileRecord(
        path="big.pt",
        size=size,
        head=sum(len(t) for _, t in glue),
        digest=0,
        regions=tuple(codec.places),
        digests=(0,) * blocks,
    )
    for start, nbytes in sorted([*record.gaps, *record.regions]):
        assert start == at
        at += nbytes
    assert at == size
    assert [(start, len(text)) for start, text in glue] == list(record.gaps)


def zero_crc(nbytes: int) -> int:
    """CRC-32 of so many zero bytes, by doubling."""
    if nbytes < 1024:
        return zlib.crc32(bytes(nbytes))
    half = zero_crc(nbytes // 2)
    return joined_crc32([(half, nbytes // 2), (half, nbytes // 2), (zero_crc(nbytes % 2), nbytes % 2)])


def test_more_records_than_the_counters_of_a_zip_hold(tmp_path: Path) -> None:
    count, some = 66_000, (0, 1, 65_535, 65_536, 65_999)
    kind = dtypes.dtype("uint8")
    pickled = dumps([LeafAt(str(i)) for i in some], "", lambda leaf: InFile(int(leaf), kind, (1,)))
    codec = TorchFile(stem="f", pickled=pickled, storages=((1,),) * count)
    content = bytearray(codec.size)
    for i, (at, _) in enumerate(codec.places):
        content[at] = i % 251
    for at, text in codec.glue([], [zlib.crc32(bytes([i % 251])) for i in range(count)]):
        content[at : at + len(text)] = text
    (tmp_path / "f.pt").write_bytes(content)
    with zipfile.ZipFile(tmp_path / "f.pt") as archive:
        assert len(archive.infolist()) == count + 4
        assert [archive.read(f"f/data/{i}") for i in some] == [bytes([i % 251]) for i in some]
    directory = LocalDirectory(tmp_path)
    assert [t.offset for t in read(directory, "f.pt")] == [codec.places[i][0] for i in some]
    directory.close()
    assert [int(t) for t in torch.load(tmp_path / "f.pt", weights_only=True)] == [i % 251 for i in some]


@given(st.lists(st.binary(max_size=200), max_size=8))
def test_checksums_of_parts_are_joined(parts: list[bytes]) -> None:
    assert joined_crc32((crc32(p), len(p)) for p in parts) == zlib.crc32(b"".join(parts))


def test_checksums_of_large_parts_are_joined() -> None:
    a, b = bytes(range(256)) * 5000, b"\xff" * 3_000_001
    assert joined_crc32([(crc32(a), len(a)), (crc32(b), len(b))]) == zlib.crc32(a + b)


@given(trees)
def test_any_tree_is_pickled_as_it_is(tree: Any) -> None:
    """With tensors where arrays stood; every type that the state may hold comes back from a stock pickle."""
    numbers: list[str] = []

    def marked(value: Any) -> Any:
        if isinstance(value, FakeArray):
            numbers.append(str(value.number))
            return LeafAt(numbers[-1])
        if type(value) in (list, tuple):
            return type(value)(map(marked, value))
        return {k: marked(v) for k, v in value.items()} if type(value) is dict else value

    def number(value: Any) -> Any:
        """The tree in which the number of each array stands for it."""
        if isinstance(value, FakeArray):
            return value.number
        if type(value) in (list, tuple):
            return type(value)(map(number, value))
        return {k: number(v) for k, v in value.items()} if type(value) is dict else value

    def tensor(leaf: str) -> InFile:
        return InFile(int(leaf), dtypes.dtype("int64"), ())

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: Any) -> Any:
            return torch.UntypedStorage(list(int(pid[2]).to_bytes(8, "little")))

        def find_class(self, module: str, name: str) -> Any:
            if name == "_rebuild_tensor_v2":
                return lambda storage, *_: int.from_bytes(bytes(storage.tolist()), "little")
            return super().find_class(module, name)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = dumps(marked(tree), "", tensor)
    assert same(Unpickler(io.BytesIO(text)).load(), number(tree))


def test_what_cannot_be_pickled_is_named() -> None:
    for value in (lambda: 1, {"deep": [(i for i in ())]}):
        with pytest.raises(UnsupportedStateError, match="cannot be pickled") as caught:
            dumps(value, "user_content")
        assert caught.value.leaf == "user_content"
    with pytest.raises(UnsupportedStateError, match="an array where none can be"):
        dumps([LeafAt("x")], "user_content")
