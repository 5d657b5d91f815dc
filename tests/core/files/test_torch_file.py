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
from xla_ckpt.arrays.torch_elements import get_tensor_bytes
from xla_ckpt.core import checksum, dtypes
from xla_ckpt.core.checksum import combine_crc32, compute_crc32
from xla_ckpt.core.files.torch_file import TorchFile
from xla_ckpt.core.manifest.manifest import FileRecord
from xla_ckpt.core.plan.save_plan import FileEntry, FilePlan, RegionSource, SavePlan
from xla_ckpt.core.sharding.box import Box
from xla_ckpt.errors import UnsupportedStateError
from xla_ckpt.formats.torch_save.pickler import FileTensor, LeafPlaceholder, dump_tree
from xla_ckpt.formats.torch_save.zip_reader import TensorLocation, read_torch_file
from xla_ckpt.progress import IoContext
from xla_ckpt.saving.write import write_files
from xla_ckpt.storage.local import LocalDirectory

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

    def in_file(leaf: str) -> FileTensor:
        value = named[leaf]
        return FileTensor(numbers[leaf], dtypes.get_dtype(str(value.dtype).removeprefix("torch.")), tuple(value.shape))

    codec = TorchFile(
        archive_name="b",
        pickled=dump_tree({name: LeafPlaceholder(name) for name in named}, "", in_file),
        storages=tuple(cuts),
    )
    sources = [
        RegionSource(leaf=name, shard_index=0, offset=sum(parts[:i]), nbytes=parts[i])
        for name, parts in zip(named, cuts, strict=True) for i in range(len(parts))
    ]  # fmt: skip
    entries = tuple(FileEntry(leaf=s.leaf, box=Box.from_shape((s.nbytes,)), region=i) for i, s in enumerate(sources))
    return FilePlan(path=path, layout=codec, sources=tuple(sources), entries=entries)


def bits(value: torch.Tensor) -> bytes:
    return bytes(get_tensor_bytes(value.contiguous()))


def check_record(record: FileRecord, data: bytes, nbytes: int) -> None:
    """Gaps and regions are the file, each byte once, and all digests are right."""
    assert record.size == len(data)
    assert sum(n for _, n in record.regions) == nbytes
    spans = sorted([*record.framing_ranges, *record.regions])
    assert all(a + n == b for (a, n), (b, _) in zip(spans, spans[1:], strict=False))
    assert spans[0][0] == 0
    assert sum(spans[-1]) == len(data)
    assert (
        checksum.compute_digest(b"".join(data[at : at + n] for at, n in record.framing_ranges)) == record.framing_digest
    )
    blocks = []
    for at, n in record.regions:
        size = checksum.compute_block_size(n)
        blocks += [checksum.compute_digest(data[at + k : at + min(k + size, n)]) for k in range(0, n, size)]
    assert tuple(blocks) == record.block_digests


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
        written = write_files(directory, SavePlan((plan,)), memory, IoContext(workers=2), segment_bytes=segment_bytes)
        found = read_torch_file(directory, "a/b.pt")
        content = Path(folder, "a/b.pt").read_bytes() if local else directory.objects["a/b.pt"]
        directory.close()
    assert len(content) == plan.layout.size
    made = torch.load(io.BytesIO(content), weights_only=True)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        assert archive.testzip() is None
        assert {i.compress_type for i in archive.infolist()} == {zipfile.ZIP_STORED}
    starts = iter(plan.layout.region_ranges)
    for (name, value), parts in zip(named.items(), cuts, strict=True):
        places = [next(starts) for _ in parts]
        assert (made[name].dtype, made[name].shape) == (value.dtype, value.shape)
        assert bits(made[name]) == bits(value)
        at = found[name]
        assert isinstance(at, TensorLocation)
        assert (getattr(torch, at.dtype.name), at.shape) == (value.dtype, tuple(value.shape))
        assert places[0][0] == at.offset
        assert at.offset % 64 == 0
        assert content[at.offset :][: len(bits(value))] == bits(value)
        assert [n for _, n in places] == list(parts)
    (record,) = written.files
    check_record(record, content, sum(map(len, map(bits, values))))
    assert written.shards.leaf == [source.leaf for source in plan.sources]
    assert written.shards.shards.offset.tolist() == [at for at, _ in plan.layout.region_ranges]


def test_torch_finds_storages_without_looking_at_their_headers(tmp_path: Path) -> None:
    """It did not: it took them to lie as its own writer places them, behind which it has 16 bytes more of each."""
    options = pytest.importorskip("torch.utils.serialization", reason="needs torch 2.6").config
    named = {name: torch.arange(count, dtype=torch.float32) for name, count in {"a": 5, "b": 16, "c": 1000}.items()}
    plan = plan_of(named, [(len(bits(value)),) for value in named.values()], "b.pt")
    memory = {(name, 0): memoryview(bits(value)) for name, value in named.items()}
    directory = LocalDirectory(str(tmp_path))
    write_files(directory, SavePlan((plan,)), memory, IoContext(workers=2))
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
        write_files(directory, SavePlan((plan,)), memory, IoContext(workers=workers), segment_bytes=segment_bytes)
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
    kind = dtypes.get_dtype("uint8")
    pickled = dump_tree({f"t{i}": LeafPlaceholder(str(i)) for i in range(len(sizes))}, "",
                    lambda leaf: FileTensor(int(leaf), kind, (sizes[int(leaf)],)))  # fmt: skip
    codec = TorchFile(archive_name="big", pickled=pickled, storages=tuple((n // 2, n - n // 2) for n in sizes))
    path = tmp_path / "big.pt"
    path.touch()
    os.truncate(path, codec.size)
    zeros = [(zero_crc(n // 2), zero_crc(n - n // 2)) for n in sizes]
    glue = codec.build_framing([], [crc for pair in zeros for crc in pair])
    with path.open("r+b") as file:
        for at, text in glue:
            file.seek(at)
            file.write(text)
        for i, at in enumerate(a for a, _ in codec.region_ranges[::2]):
            file.seek(at)
            file.write(bytes([i + 1]))
            file.seek(at + sizes[i] - 1)
            file.write(bytes([i + 101]))
    assert path.stat().st_size == codec.size
    with zipfile.ZipFile(path) as archive:
        infos = [i for i in archive.infolist() if "/data/" in i.filename]
        assert [i.file_size for i in infos] == [i.compress_size for i in infos] == sizes
        assert [i.CRC for i in infos] == [combine_crc32([(a, n // 2), (b, n - n // 2)])
                                          for (a, b), n in zip(zeros, sizes, strict=True)]  # fmt: skip
        assert archive.read("big/version") == b"3\n"
        assert all(archive.open(i).read(1) == bytes([k + 1]) for k, i in enumerate(infos))
    directory = LocalDirectory(tmp_path)
    found = read_torch_file(directory, "big.pt")
    directory.close()
    assert [found[f"t{i}"].offset for i in range(len(sizes))] == [at for at, _ in codec.region_ranges[::2]]
    made = torch.load(path, mmap=True, weights_only=True)
    for i, n in enumerate(sizes):
        assert made[f"t{i}"].shape == (n,)
        assert made[f"t{i}"][[0, 1, -2, -1]].tolist() == [i + 1, 0, 0, i + 101]
    size, at = path.stat().st_size, 0
    blocks = sum(checksum.count_blocks(n) for _, n in codec.region_ranges)
    record = FileRecord(
        path="big.pt",
        size=size,
        framing_bytes=sum(len(t) for _, t in glue),
        framing_digest=0,
        regions=tuple(codec.region_ranges),
        block_digests=(0,) * blocks,
    )
    for start, nbytes in sorted([*record.framing_ranges, *record.regions]):
        assert start == at
        at += nbytes
    assert at == size
    assert [(start, len(text)) for start, text in glue] == list(record.framing_ranges)


def zero_crc(nbytes: int) -> int:
    """CRC-32 of so many zero bytes, by doubling."""
    if nbytes < 1024:
        return zlib.crc32(bytes(nbytes))
    half = zero_crc(nbytes // 2)
    return combine_crc32([(half, nbytes // 2), (half, nbytes // 2), (zero_crc(nbytes % 2), nbytes % 2)])


def test_more_records_than_the_counters_of_a_zip_hold(tmp_path: Path) -> None:
    count, some = 66_000, (0, 1, 65_535, 65_536, 65_999)
    kind = dtypes.get_dtype("uint8")
    pickled = dump_tree([LeafPlaceholder(str(i)) for i in some], "", lambda leaf: FileTensor(int(leaf), kind, (1,)))
    codec = TorchFile(archive_name="f", pickled=pickled, storages=((1,),) * count)
    content = bytearray(codec.size)
    for i, (at, _) in enumerate(codec.region_ranges):
        content[at] = i % 251
    for at, text in codec.build_framing([], [zlib.crc32(bytes([i % 251])) for i in range(count)]):
        content[at : at + len(text)] = text
    (tmp_path / "f.pt").write_bytes(content)
    with zipfile.ZipFile(tmp_path / "f.pt") as archive:
        assert len(archive.infolist()) == count + 4
        assert [archive.read(f"f/data/{i}") for i in some] == [bytes([i % 251]) for i in some]
    directory = LocalDirectory(tmp_path)
    assert [t.offset for t in read_torch_file(directory, "f.pt")] == [codec.region_ranges[i][0] for i in some]
    directory.close()
    assert [int(t) for t in torch.load(tmp_path / "f.pt", weights_only=True)] == [i % 251 for i in some]


@given(st.lists(st.binary(max_size=200), max_size=8))
def test_checksums_of_parts_are_joined(parts: list[bytes]) -> None:
    assert combine_crc32((compute_crc32(p), len(p)) for p in parts) == zlib.crc32(b"".join(parts))


def test_checksums_of_large_parts_are_joined() -> None:
    a, b = bytes(range(256)) * 5000, b"\xff" * 3_000_001
    assert combine_crc32([(compute_crc32(a), len(a)), (compute_crc32(b), len(b))]) == zlib.crc32(a + b)


@given(trees)
def test_any_tree_is_pickled_as_it_is(tree: Any) -> None:
    """With tensors where arrays stood; every type that the state may hold comes back from a stock pickle."""
    numbers: list[str] = []

    def marked(value: Any) -> Any:
        if isinstance(value, FakeArray):
            numbers.append(str(value.number))
            return LeafPlaceholder(numbers[-1])
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

    def tensor(leaf: str) -> FileTensor:
        return FileTensor(int(leaf), dtypes.get_dtype("int64"), ())

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: Any) -> Any:
            return torch.UntypedStorage(list(int(pid[2]).to_bytes(8, "little")))

        def find_class(self, module: str, name: str) -> Any:
            if name == "_rebuild_tensor_v2":
                return lambda storage, *_: int.from_bytes(bytes(storage.tolist()), "little")
            return super().find_class(module, name)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = dump_tree(marked(tree), "", tensor)
    assert same(Unpickler(io.BytesIO(text)).load(), number(tree))


def test_what_cannot_be_pickled_is_named() -> None:
    for value in (lambda: 1, {"deep": [(i for i in ())]}):
        with pytest.raises(UnsupportedStateError, match="cannot be pickled") as caught:
            dump_tree(value, "user_content")
        assert caught.value.leaf == "user_content"
    with pytest.raises(UnsupportedStateError, match="an array where none can be"):
        dump_tree([LeafPlaceholder("x")], "user_content")
