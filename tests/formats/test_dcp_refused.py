"""Damaged and hostile directories of DCP's: one error that names file and key; nothing is loaded, nothing run."""

from __future__ import annotations

import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

import xla_ckpt
from tests.formats.dcp_saves import add_digests, change, save, small
from tests.formats.stock_dcp import stock
from tests.jobs import run_on_ranks
from xla_ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    UnsupportedStateError,
    UntrustedObjectError,
)
from xla_ckpt.formats.dcp.metadata import METADATA_FILE, DcpContents, parse_metadata
from xla_ckpt.formats.digests import DIGESTS


def copy(path: Path, to: Path) -> Path:
    shutil.copytree(path, to)
    return to


def refused(path: Path, kind: type[CheckpointError] = CorruptCheckpointError, match: str = "") -> CheckpointError:
    """What a load into a model, a restore and `verify` say; the model stays as it is."""
    model = {"w": torch.full((4, 3), -1.0), "x": torch.full((4, 3), -1.0)}
    with pytest.raises(kind, match=match) as caught:
        xla_ckpt.load_checkpoint(path, model=model, trust_pickle=True)
    assert all((tensor == -1).all() for tensor in model.values())
    with pytest.raises(kind, match=match):
        xla_ckpt.restore(path)
    if kind is CorruptCheckpointError:
        report = xla_ckpt.verify(path)
        assert any(re.search(match, str(problem)) for problem in report.problems), report.problems
    return caught.value


@pytest.fixture
def here(tmp_path: Path) -> Path:
    return save(small(), tmp_path / "c")


def test_a_sound_one_is_read(here: Path) -> None:
    assert xla_ckpt.verify(here).ok
    assert xla_ckpt.restore(here).tree["n"] == 7


# Files.


def test_a_missing_file_is_named(here: Path) -> None:
    (here / "__0_0.distcp").unlink()
    error = refused(here, match="missing")
    assert (error.file, error.tag) == ("__0_0.distcp", "c")


@pytest.mark.parametrize("left", [0, 100, 2000, -1])
def test_a_file_that_is_cut_off_is_named(here: Path, left: int) -> None:
    data = (here / "__0_0.distcp").read_bytes()
    (here / "__0_0.distcp").write_bytes(data[:left])
    error = refused(here, match="cut off")
    assert (error.file, error.leaf in ("n", "w", "x")) == ("__0_0.distcp", True)


def test_a_file_that_is_cut_off_is_one_problem(tmp_path: Path) -> None:
    """Each key had one, with another size of the same file."""
    path = save({f"w{i:02}": torch.full((100,), float(i)) for i in range(24)}, tmp_path / "c")
    file, flipped = path / "__0_0.distcp", torch.full((100,), 1.0).numpy().tobytes()
    data = file.read_bytes()
    changed = bytearray(data[: data.index(torch.full((100,), 20.0).numpy().tobytes())])
    changed[changed.index(flipped)] ^= 1
    file.write_bytes(bytes(changed))
    cut, other = sorted(xla_ckpt.verify(path).problems, key=lambda problem: "CRC-32" in str(problem))
    assert re.search(r"cut off, and 3 more of its keys are not whole", str(cut))
    assert (cut.leaf, cut.file, cut.found) == ("w20", file.name, len(changed))
    assert other.leaf == "w01", "what is whole in the file is still checked"


def test_a_save_that_did_not_end_is_no_tag_and_says_so(here: Path) -> None:
    (here / METADATA_FILE).unlink()
    assert xla_ckpt.list_tags(here.parent) == []
    error = refused(here, match="has not ended")
    assert error.file == METADATA_FILE


def test_a_file_of_another_save_is_noticed(here: Path, tmp_path: Path) -> None:
    other = save({**small(), "w": torch.zeros(3, 4)}, tmp_path / "other")
    shutil.copy(other / "__0_0.distcp", here / "__0_0.distcp")
    error = refused(here, match="is not what .metadata says")
    assert (error.leaf, error.expected, error.found) == ("w", "float32 [4, 3] at [0, 0]", "float32 [3, 4]")


def test_a_flipped_bit_in_a_tensor_is_found(here: Path) -> None:
    data = bytearray((here / "__0_0.distcp").read_bytes())
    data[data.index(torch.tensor([7.0, 8.0]).numpy().tobytes())] ^= 1
    (here / "__0_0.distcp").write_bytes(bytes(data))
    refused(here, match="CRC-32")
    (problem,) = xla_ckpt.verify(here).problems
    assert (problem.leaf, problem.file) == ("w", "__0_0.distcp")
    assert "CRC-32" in str(problem)


def test_zips_without_checksums_are_read(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        path = save(small(), tmp_path / "c")
    finally:
        torch.serialization.set_crc32_options(before)
    assert xla_ckpt.verify(path).ok
    assert xla_ckpt.restore(path).tree["w"].equal(small()["w"])


def test_a_tag_of_ours_that_is_damaged_is_not_taken_for_one_of_dcp(here: Path) -> None:
    (here / "manifest.json").write_text("{}")
    with pytest.raises(CorruptCheckpointError, match="manifest"):
        xla_ckpt.restore(here.parent, "c")


# .metadata.


def chunks(metadata: Any, key: str = "w") -> list[ChunkStorageMetadata]:
    return metadata.state_dict_metadata[key].chunks


def resized(metadata: Any, sizes: tuple[int, ...], offsets: tuple[int, ...] = (0, 0)) -> None:
    chunks(metadata)[0] = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))


def overlapping(metadata: Any) -> None:
    metadata.state_dict_metadata["w"].size = torch.Size((6, 3))
    chunks(metadata).append(ChunkStorageMetadata(offsets=torch.Size((2, 0)), sizes=torch.Size((4, 3))))
    held = metadata.storage_data[MetadataIndex("x", [0, 0])]
    metadata.storage_data[MetadataIndex("w", [2, 0])] = held


def lost(metadata: Any) -> None:
    del metadata.storage_data[MetadataIndex("w", [0, 0])]


def to(file: str) -> Callable[[Any], None]:
    def edit(metadata: Any) -> None:
        held = metadata.storage_data[MetadataIndex("w", [0, 0])]
        metadata.storage_data[MetadataIndex("w", [0, 0])] = _StorageInfo(file, held.offset, held.length)

    return edit


def same_path(metadata: Any) -> None:
    metadata.planner_data["x"] = ("w",)


def clashing(metadata: Any) -> None:
    metadata.planner_data["x"] = ("w", "x")


def grown(metadata: Any) -> None:
    metadata.state_dict_metadata["w"].size = torch.Size((8, 3))


def no_places(metadata: Any) -> None:
    metadata.storage_data = None


BAD: dict[str, tuple[Callable[[Any], None], str, str | None]] = {
    "missing": (grown, "shards are missing", "w"),
    "overlapping": (overlapping, "hold the same elements", "w"),
    "outside": (lambda m: resized(m, (4, 4)), "outside of its tensor", "w"),
    "behind": (lambda m: resized(m, (4, 3), (1, 0)), "outside of its tensor", "w"),
    "dims": (lambda m: resized(m, (12,), (0,)), "another number of dims", "w"),
    "no place": (lost, "nothing says where a chunk", "w"),
    "no places": (no_places, "nothing says where the tensors", None),
    "no place of a value": (lambda m: m.storage_data.pop(MetadataIndex("n")), "nothing says where this value", "n"),
    "above": (to("../c/__0_0.distcp"), "outside of its tag", "w"),
    "absolute": (to("/etc/passwd"), "outside of its tag", "w"),
    "no such file": (to("__1_0.distcp"), "missing", None),
    "no file": (lambda m: to(7)(m), "names no file", "w"),  # type: ignore[arg-type]
    "one path": (same_path, "two keys have one place", "x"),
    "a value in a value": (clashing, "a value and is a container", None),
}


@pytest.mark.parametrize("name", BAD)
def test_metadata_that_contradicts_itself_names_the_key(here: Path, name: str) -> None:
    edit, match, key = BAD[name]
    change(here, edit)
    error = refused(here, match=match)
    assert key is None or error.leaf == key


def test_a_chunk_with_two_places_is_refused(here: Path) -> None:
    def drop(metadata: Any) -> None:
        del metadata.state_dict_metadata["x"], metadata.planner_data["x"]

    change(here, drop)
    data = (here / METADATA_FILE).read_bytes()
    (here / METADATA_FILE).write_bytes(data.replace(b"\x8c\x01x", b"\x8c\x01w"))
    error = refused(here, match="two places are said to hold")
    assert error.leaf == "w"


class Hostile:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


@pytest.mark.parametrize("where", ["storage_meta", "planner_data", "a key"])
def test_metadata_that_would_run_code_is_refused_by_name(here: Path, tmp_path: Path, where: str) -> None:
    def edit(metadata: Any) -> None:
        evil = Hostile(f"touch {tmp_path}/ran")
        if where == "a key":
            metadata.state_dict_metadata[evil] = 1
        else:
            setattr(metadata, where, evil)

    change(here, edit)
    error = refused(here, UntrustedObjectError, "posix.system.*nothing ran")
    assert error.file == METADATA_FILE
    assert not (tmp_path / "ran").exists()


def test_a_value_that_would_run_code_needs_trust(tmp_path: Path) -> None:
    path = save({**small(), "evil": {"a": [Hostile(f"touch {tmp_path}/ran")]}}, tmp_path / "c")
    with pytest.raises(UntrustedObjectError, match="posix.system") as caught:
        xla_ckpt.restore(path)
    assert (caught.value.file, caught.value.leaf) == ("__0_0.distcp", "evil/a")
    assert not (tmp_path / "ran").exists()
    assert xla_ckpt.verify(path).ok
    model = {"w": torch.zeros(4, 3), "x": torch.zeros(4, 3)}
    xla_ckpt.load_checkpoint(path, model=model)  # what is not asked for needs no trust
    assert model["w"].equal(small()["w"])
    assert xla_ckpt.restore(path, trust_pickle=True).tree["evil"] == {"a": [0]}
    assert (tmp_path / "ran").exists()


def test_what_stands_for_more_than_its_bytes_is_refused(here: Path) -> None:
    shared = [ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((0, 0)))] * 1000

    def edit(metadata: Any) -> None:
        entry = metadata.state_dict_metadata["w"]
        for i in range(1000):
            metadata.state_dict_metadata[f"w{i}"] = type(entry)(entry.properties, torch.Size((0, 0)), shared)

    change(here, edit)
    refused(here, match="more than its bytes can hold")


def test_a_value_that_holds_itself_is_refused(tmp_path: Path) -> None:
    deep: list[Any] = []
    for _ in range(60):
        deep = [deep, deep]
    path = save({**small(), "deep": (deep,)}, tmp_path / "c")
    with pytest.raises(CorruptCheckpointError, match="stands for more than"):
        xla_ckpt.restore(path)


def test_a_lazily_conjugated_tensor_is_refused(tmp_path: Path) -> None:
    path = save({"c": torch.ones(2, dtype=torch.complex64).conj()}, tmp_path / "c")
    with pytest.raises(UntrustedObjectError, match="a tensor of the kind torch:conj") as caught:
        xla_ckpt.restore(path)
    assert caught.value.leaf == "c"


def test_a_compressed_directory_is_refused_and_says_what_to_do(here: Path) -> None:
    descriptor = ZStandard().get_descriptor() if ZStandard.is_available() else "stream.zstd/1"  # type: ignore[attr-defined]

    def edit(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            info.transform_descriptors = [descriptor]

    change(here, edit)
    refused(here, UnsupportedStateError, "an extension of DCP .*zstd.*without _extensions=")


@pytest.mark.parametrize(
    ("name", "kind", "match"),
    [
        ("zstandard", UnsupportedStateError, "an extension of DCP .*zstd.*without _extensions="),
        ("as_safetensors", UnsupportedStateError, "FileSystemWriter.*as safetensors"),
        ("quantized", IncompatibleCheckpointError, "quantized.*QuantizedHuggingFaceStorageReader"),
    ],
)
def test_what_is_not_read_is_refused_and_says_what_to_do(name: str, kind: type[CheckpointError], match: str) -> None:
    with pytest.raises(kind, match=match):
        xla_ckpt.restore(stock(name).path)


DATA = (stock("fsdp2").path / METADATA_FILE).read_bytes()


@given(st.lists(st.tuples(st.integers(0, len(DATA) - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_mutated_metadata_gives_only_errors_of_ours(changes: list[tuple[int, int]]) -> None:
    data = bytearray(DATA)
    for place, value in changes:
        if value in b"rjB":  # large memo numbers and lengths only cost memory
            continue
        data[place] = value
    try:
        assert isinstance(parse_metadata(bytes(data)), DcpContents)
    except CheckpointError:
        pass


@given(st.integers(0, len(DATA)))
def test_metadata_that_is_cut_off_gives_only_errors_of_ours(size: int) -> None:
    if size < len(DATA):
        with pytest.raises(CorruptCheckpointError):
            parse_metadata(DATA[:size])


# Digests.


@pytest.fixture
def digested(tmp_path: Path) -> Path:
    path = add_digests(copy(stock("fsdp2").path, tmp_path / "d"))
    report = xla_ckpt.verify(path)
    assert (report.ok, report.digests, report.strangers) == (True, True, [])
    return path


def test_with_digests_every_flipped_byte_is_found(digested: Path) -> None:
    for name in ("__0_0.distcp", "__1_0.distcp", METADATA_FILE, DIGESTS):
        data = (digested / name).read_bytes()
        for at in range(0, len(data), max(len(data) // 40, 1)):
            bad = bytearray(data)
            bad[at] ^= 1
            (digested / name).write_bytes(bytes(bad))
            assert not xla_ckpt.verify(digested).ok, (name, at)
        (digested / name).write_bytes(data)


def test_with_digests_a_flipped_bit_stops_a_load(digested: Path) -> None:
    data = bytearray((digested / "__1_0.distcp").read_bytes())
    weight = stock("fsdp2").contents()["model.net1.weight"][8:].contiguous()
    data[data.index(weight.numpy().tobytes()) + 5] ^= 1
    (digested / "__1_0.distcp").write_bytes(bytes(data))
    with pytest.raises(CorruptCheckpointError) as caught:
        xla_ckpt.restore(digested)
    assert (caught.value.file, caught.value.leaf) == ("__1_0.distcp", "model/net1.weight")


def test_digests_of_another_save_are_refused(digested: Path, tmp_path: Path) -> None:
    other = copy(stock("tp").path, tmp_path / "other")
    shutil.copy(digested / DIGESTS, other / DIGESTS)
    for path in (digested, other):
        if path is digested:
            (path / METADATA_FILE).write_bytes((stock("tp").path / METADATA_FILE).read_bytes())
        with pytest.raises(CorruptCheckpointError, match="saved over it.*remove xla_ckpt_digests.json") as caught:
            xla_ckpt.restore(path)
        assert caught.value.file == METADATA_FILE
        assert not xla_ckpt.verify(path).ok
    (other / DIGESTS).unlink()
    assert xla_ckpt.verify(other).ok


def test_a_file_that_the_digests_do_not_know_is_refused(digested: Path) -> None:
    with (digested / "__0_0.distcp").open("ab") as file:
        file.write(b"x")
    with pytest.raises(CorruptCheckpointError, match="is not as xla_ckpt_digests.json says"):
        xla_ckpt.restore(digested)


# Ranks.


def loads_a_damaged_one(rank: int, path: Path) -> str:
    model = {"w": torch.full((4, 3), -1.0), "x": torch.full((4, 3), -1.0)}
    with pytest.raises(CorruptCheckpointError) as caught:
        xla_ckpt.load_checkpoint(path, model=model, options=xla_ckpt.LoadOptions(timeout=60))
    assert all((tensor == -1).all() for tensor in model.values())
    return f"{caught.value.file} {caught.value.leaf}"


def test_all_ranks_say_the_same(here: Path) -> None:
    data = (here / "__0_0.distcp").read_bytes()
    (here / "__0_0.distcp").write_bytes(data[:-1])
    said = run_on_ranks(loads_a_damaged_one, 2, here)
    assert said[0] == said[1] in ("__0_0.distcp w", "__0_0.distcp x", "__0_0.distcp n")


# Not damage.


def test_what_no_ordinary_tensor_is_comes_back(tmp_path: Path) -> None:
    state = {
        "turned": torch.arange(12.0).reshape(3, 4).t(),
        "last": torch.arange(48.0).reshape(2, 3, 4, 2).contiguous(memory_format=torch.channels_last),
        "every other": torch.arange(10.0)[::2],
        "expanded": torch.arange(3.0)[None].expand(4, 3),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(3),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "uint16": torch.arange(4).to(torch.uint16),
        "float8": torch.ones(3).to(torch.float8_e4m3fn),
        "inside": (torch.arange(12.0).reshape(3, 4).t(), [torch.ones(2)], {"x": (torch.zeros(1),)}),
    }
    found = xla_ckpt.restore(save(state, tmp_path / "c")).tree
    for name in ("turned", "last", "every other", "expanded", "empty", "scalar", "parameter", "uint16"):
        assert found[name].equal(state[name].detach()), name
    assert found["float8"].view(torch.uint8).equal(state["float8"].view(torch.uint8))
    assert found["inside"][0].equal(state["inside"][0])
    assert found["inside"][1][0].equal(torch.ones(2))


def test_too_scattered_a_tensor_is_refused(tmp_path: Path) -> None:
    path = save({"t": torch.zeros(70_000, 2).t().contiguous().t()}, tmp_path / "c")
    assert xla_ckpt.restore(path).tree["t"].shape == (70_000, 2)
    path = save({"t": torch.zeros(2, 70_000).t().contiguous().t()}, tmp_path / "d")
    with pytest.raises(UnsupportedStateError, match="too many parts") as caught:
        xla_ckpt.restore(path)
    assert caught.value.leaf == "t"


def test_opening_reads_no_tensor_and_few_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from xla_ckpt.storage.local_file import LocalFileReader

    state = {f"big{i}": torch.zeros(1 << 20) for i in range(4)} | {f"n{i}": i for i in range(500)}
    path = save({**state, "m": {"w.x": torch.zeros(2)}}, tmp_path / "c")
    reads: list[int] = []
    stock_read = LocalFileReader.read_into

    def counted(self: Any, buffer: memoryview, offset: int) -> int:
        reads.append(len(buffer))
        return stock_read(self, buffer, offset)

    monkeypatch.setattr(LocalFileReader, "read_into", counted)
    assert xla_ckpt.explain(path, mesh="dp=1").ok
    assert sum(reads) < 3 << 20  # of 16 MiB of tensors none
    assert len(reads) < 60


def test_pickles_of_the_metadata_of_this_torch_are_known() -> None:
    assert (
        pickle.loads(DATA).state_dict_metadata.keys()
        == {**parse_metadata(DATA).tensors, **parse_metadata(DATA).objects}.keys()
    )
