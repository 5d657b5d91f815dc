"""The format: exact bytes, round trips, and typed errors for everything else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import cuts_of, full_shapes, some_dtypes
from xla_ckpt.core import checksum, dtypes, json_data
from xla_ckpt.core.files import safetensors as payload
from xla_ckpt.core.files.file_layout import Region, RegionTable
from xla_ckpt.core.manifest import manifest_json
from xla_ckpt.core.manifest.arrays import ArrayMetadata, ArrayRecord, ArrayTable, Shard, create_array_record
from xla_ckpt.core.manifest.manifest import FileRecord, Manifest, ManifestHeader
from xla_ckpt.core.sharding.box import Box, Grid
from xla_ckpt.errors import CheckpointError, CorruptCheckpointError, FormatError, UnsupportedVersionError


@given(st.lists(st.integers(0, 1 << 40), max_size=30))
def test_integers_survive(values: list[int]) -> None:
    assert json_data.unpack_ints(json.loads(json.dumps(json_data.pack_ints(values))), len(values)) == tuple(values)


@given(st.integers(0, 1000), st.integers(-5, 1000), st.integers(4, 5000))
def test_progressions_are_short(first: int, step: int, count: int) -> None:
    values = [first + step * k for k in range(count)]
    if values[-1] >= 0:
        assert len(json.dumps(json_data.pack_ints(values))) < 40
        assert json_data.unpack_ints(json_data.pack_ints(values), count) == tuple(values)


@pytest.mark.parametrize(
    ("packed", "count"),
    [([1, 2], 3), ([1, 2], 1), ([[0, 1, 10**12]], 5), ("x", 1), (-1, 1), ([True], 1), ([[0, -1, 3]], 3), ([[1, 2]], 2),
     ([1.5], 1), (None, 2), ([[0, 1, 0]], 1), (1 << 63, 1)],
)  # fmt: skip
def test_broken_integer_lists(packed: Any, count: int) -> None:
    with pytest.raises(FormatError):
        json_data.unpack_ints(packed, count)


@given(st.integers(0, 1 << 40))
def test_blocks_cover_a_region_with_few_digests(nbytes: int) -> None:
    block, count = checksum.compute_block_size(nbytes), checksum.count_blocks(nbytes)
    assert checksum.MIN_BLOCK <= block <= checksum.MAX_BLOCK
    assert (count - 1) * block < nbytes <= count * block or nbytes == count == 0
    assert count <= 64 or block == checksum.MAX_BLOCK


@given(st.lists(st.integers(0, (1 << 64) - 1), max_size=9))
def test_digest_tables_survive(digests: list[int]) -> None:
    text = checksum.pack_digests(digests)
    assert checksum.unpack_digests(text, len(digests)) == tuple(digests)
    assert len(text) == len(checksum.pack_digests([0] * len(digests)))
    with pytest.raises(FormatError):
        checksum.unpack_digests(text, len(digests) + 1)


@st.composite
def files_with_regions(draw: st.DrawFn, path: str) -> FileRecord:
    """A file whose regions the manifest lists."""
    at, regions, gaps = 0, [], 0
    for gap, nbytes in draw(st.lists(st.tuples(st.integers(0, 1 << 34), st.integers(1, 1 << 20)), min_size=1)):
        regions.append((at + gap, nbytes))
        at, gaps = at + gap + nbytes, gaps + gap
    tail = draw(st.integers(1 << 20, 1 << 21))  # manifests() has shards anywhere in the first MiB
    count = sum(checksum.count_blocks(nbytes) for _, nbytes in regions)
    digests = (
        draw(st.lists(st.integers(0, (1 << 64) - 1), min_size=count, max_size=count)) if count < 9 else range(count)
    )
    return FileRecord(
        path=path,
        size=at + tail,
        framing_bytes=gaps + tail,
        framing_digest=draw(st.integers(0, (1 << 64) - 1)),
        regions=tuple(regions),
        block_digests=tuple(digests),
    )


@st.composite
def frames_of(draw: st.DrawFn, cells: list[Box]) -> tuple[Box | None, ...] | None:
    """A frame for some of the cells; None for no frames at all."""
    found: list[Box | None] = []
    for cell in cells:
        before = [draw(st.integers(0, min(a, 2))) for a in cell.start]
        after = [draw(st.integers(0, 2)) for _ in cell.stop]
        frame = Box(tuple(a - n for a, n in zip(cell.start, before, strict=True)),
                    tuple(b + n for b, n in zip(cell.stop, after, strict=True)))  # fmt: skip
        found.append(frame if draw(st.booleans()) else None)
    return tuple(found) if any(f is not None for f in found) else None


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    size = draw(st.integers(1 << 20, 1 << 40))
    files = tuple(
        draw(files_with_regions(f"model/{i}.pt")) if draw(st.booleans())
        else FileRecord(path=f"model/{i}.safetensors", size=size, framing_bytes=4096, framing_digest=i)
        for i in range(draw(st.integers(1, 4)))
    )  # fmt: skip
    arrays = {}
    for name in draw(st.lists(st.text(max_size=8), max_size=4, unique=True)):
        shape = draw(full_shapes)
        grid = Grid(draw(cuts_of(shape)))
        places = [draw(st.integers(0, len(files) - 1)) for _ in range(grid.cell_count)]
        offsets = [draw(st.integers(0, 1 << 17)) for _ in range(grid.cell_count)]
        frames = draw(frames_of([grid.get_cell(i) for i in range(grid.cell_count)]))
        arrays[f"model/{name}"] = ArrayRecord(
            metadata=ArrayMetadata(dtype=draw(some_dtypes), shape=shape, grids=(grid,)),
            files=tuple(places),
            offsets=tuple(offsets),
            parent_boxes=frames,
        )
    head = ManifestHeader(
        tag=draw(st.text(max_size=9)),
        sequence=draw(st.integers(1, 1 << 50)),
        pinned=draw(st.booleans()),
        created="2026-01-01T00:00:00Z",
    )
    aliases = {"model/tied": next(iter(arrays))} if arrays and "model/tied" not in arrays else {}
    return Manifest(
        header=head,
        skeleton={"model": {"n": [1, 2.5, None, "x"]}},
        arrays=ArrayTable.from_records(arrays),
        files=files,
        aliases=aliases,
        mesh=draw(st.none() | st.just("tp=2")),
    )


@given(manifests())
def test_manifests_survive(manifest: Manifest) -> None:
    data = manifest_json.dump_manifest(manifest)
    assert manifest_json.parse_manifest(data) == manifest
    assert manifest_json.dump_manifest(manifest_json.parse_manifest(data)) == data
    assert manifest_json.parse_header(data[: manifest_json.MAX_HEADER_BYTES]) == manifest.header
    json.loads(data)  # it is plain JSON


@given(manifests(), st.data())
def test_columns_of_arrays_are_put_in_order_and_together(manifest: Manifest, data: st.DataObject) -> None:
    arrays = manifest.arrays
    names = data.draw(st.permutations(list(arrays)))
    in_order = arrays.order_by(names)
    assert (list(in_order), dict(in_order)) == (names, dict(arrays))
    assert [min(rows.tolist()) for rows in in_order.rows_by_metadata] == sorted(
        min(rows.tolist()) for rows in in_order.rows_by_metadata
    )
    half = len(names) // 2
    parts = [ArrayTable.from_records({name: arrays[name] for name in some}) for some in (names[:half], names[half:])]
    assert dict(ArrayTable.concatenate(parts)) == dict(arrays)


@given(manifests(), st.data())
def test_every_flipped_bit_of_a_manifest_is_found(manifest: Manifest, data: st.DataObject) -> None:
    good = bytearray(manifest_json.dump_manifest(manifest))
    bit = data.draw(st.integers(0, 8 * len(good) - 1))
    good[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptCheckpointError):
        manifest_json.parse_manifest(bytes(good))


@given(manifests(), st.data())
def test_every_truncation_of_a_manifest_is_found(manifest: Manifest, data: st.DataObject) -> None:
    good = manifest_json.dump_manifest(manifest)
    with pytest.raises(CorruptCheckpointError):
        manifest_json.parse_manifest(good[: data.draw(st.integers(0, len(good) - 1))])


def seal(head: dict[str, Any], members: dict[str, Any]) -> bytes:
    """A manifest with right digests around any content."""
    first = json.dumps({"format": "xla_ckpt", "version": 2, "tag": "t", "sequence": 1, "pinned": False, "created": "",
                        **head}, separators=(",", ":")).encode()[:-1]  # fmt: skip
    lines = [first + b',"head":"%016x"' % checksum.compute_digest(first)]
    whole = {
        "mesh": None,
        "world": 1,
        "skeleton": None,
        "arrays": {} if head.get("version") == 1 else [],
        "aliases": {},
        "objects": [],
        "files": [],
        **members,
    }
    lines += [json.dumps(k).encode() + b":" + json.dumps(v).encode() for k, v in whole.items()]
    body = b",\n".join(lines)
    return body + b',\n"digest":"%016x"}\n' % checksum.compute_digest(body)


def test_sealed_manifests_parse() -> None:
    assert manifest_json.parse_manifest(seal({}, {})).header.tag == "t"


FILE = ["a", 8192, 4096, "0" * 16]


DIGEST = checksum.pack_digests([1])
TWO = checksum.pack_digests([1, 2])


def framed(frames: Any) -> dict[str, Any]:
    return array(grids=[[[[0, 4]], 0, 4096, frames]])


def array(**changes: Any) -> dict[str, Any]:
    """An array of a manifest of version 1."""
    return {"dtype": "float32", "shape": [4], "grids": [[[[0, 4]], 0, 4096]], **changes}


def form(**changes: Any) -> dict[str, Any]:
    """Arrays of one form."""
    return {"dtype": "float32", "shape": [4], "cuts": [[[0, 4]]], "names": ["w"], "files": 0, "offsets": 4096,
            **changes}  # fmt: skip


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ([form(shape=[5])], "shards are missing"),
        ([form(shape=[3])], "outside of its array"),
        ([form(dtype="float31")], "float31"),
        ([form(files=1)], "lies in no file"),
        ([form(offsets=8180)], "past the end of its file"),
        ([form(offsets=-4)], "broken array record"),
        ([form(offsets=[1, 2])], "wrong length"),
        ([form(names=["a", "b"], offsets=[4096, 8180])], "past the end of its file"),
        ([form(cuts=[[[0, 2, 4]], [[2, 4]]], files=0, offsets=0)], "same elements"),
        ([form(cuts=[[[4, 0]]])], "do not ascend"),
        ([form(cuts=[[[[0, 1, 10**15]]]])], "too long"),
        ([form(cuts=7)], "'cuts' is missing or broken"),
        ([form(cuts=[7])], "broken grid"),
        ([form(shape=[2] * 70)], "impossible shape"),
        ([form(shape=[-1])], "impossible shape"),
        ([form(shape=[2**40] * 4, cuts=[[[[0, 1, 2**13]]] * 4])], "too many"),
        ([form(names=["a", "a"])], "listed twice"),
        ([form(), form()], "listed twice"),
        ([form(names=[3])], "broken list of names"),
        ([form(names="w")], "'names' is missing or broken"),
        ([7], "'names' is missing or broken"),
        ([form(frames=[])], "needs a frame, or null, for each"),
        ([form(frames=[None, None])], "needs a frame, or null, for each"),
        ([form(frames=[[[0], [4, 4]]])], "broken frame"),
        ([form(frames=[[[1], [4]]])], "past the end of its frame"),
        ([form(frames=[[[0], [1025]]])], "past the end of its frame"),
        ({}, "'arrays' is missing or broken"),
    ],
)  # fmt: skip
def test_hostile_forms_are_refused(arrays: Any, words: str) -> None:
    with pytest.raises(FormatError, match=words):
        manifest_json.parse_manifest(seal({}, {"files": [FILE], "arrays": arrays}))


def test_a_manifest_of_version_1_says_the_same_as_one_of_version_2() -> None:
    """Arrays of one form in several forms of text, cells in several grids, and frames."""
    frame = [[0], [6]]
    arrays_1 = {
        "a": array(),
        "b": array(grids=[[[[0, 4]], 0, 4112, [frame]]]),
        "c": array(grids=[[[[0, 3]], 0, 4096], [[[3, 4]], 0, 5000, [None]]], spec=["tp"], divergent=True),
        "d": array(shape=[0], grids=[]),
        "e": array(grids=[[[[0, 4]], 0, 4128]]),
    }
    arrays_2 = [
        form(names=["a", "b", "e"], offsets=[4096, 4112, 4128], frames=[None, frame, None]),
        form(names=["c"], cuts=[[[0, 3]], [[3, 4]]], offsets=[4096, 5000], spec=["tp"], divergent=True),
        form(names=["d"], shape=[0], cuts=[], offsets=[]),
    ]
    old = manifest_json.parse_manifest(seal({"version": 1}, {"files": [FILE], "arrays": arrays_1}))
    new = manifest_json.parse_manifest(seal({}, {"files": [FILE], "arrays": arrays_2}))
    assert dict(old.arrays) == dict(new.arrays)
    assert new.arrays["b"].parent_boxes == (Box((0,), (6,)),)
    assert new.divergent_leaves == ("c",)


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"files": [["../x", 1, 1, "0" * 16]]}, "outside of its tag"),
        ({"files": [["/etc/passwd", 1, 1, "0" * 16]]}, "outside of its tag"),
        ({"files": [["a/./b", 1, 1, "0" * 16]]}, "outside of its tag"),
        ({"files": [["a", 1, 2, "0" * 16]]}, "impossible file size"),
        ({"files": [["a", -1, 0, "0" * 16]]}, "impossible file size"),
        ({"files": [["a", 1, 1, "zz"]]}, "broken file record"),
        ({"files": [FILE, FILE]}, "listed twice"),
        ({"files": [FILE], "arrays": {"w": array(shape=[5])}}, "shards are missing"),
        ({"files": [FILE], "arrays": {"w": array(shape=[3])}}, "outside of its array"),
        ({"files": [FILE], "arrays": {"w": array(dtype="float31")}}, "float31"),
        ({"files": [FILE], "arrays": {"w": array(grids=[[[[0, 4]], 1, 0]])}}, "lies in no file"),
        ({"files": [FILE], "arrays": {"w": array(grids=[[[[0, 4]], 0, 8180]])}}, "past the end"),
        ({"files": [FILE], "arrays": {"w": array(grids=[[[[0, 4]], 0, -4]])}}, "broken array record"),
        ({"files": [FILE], "arrays": {"w": array(grids=[[[[0, 2, 4]], 0, 0], [[[2, 4]], 0, 0]])}}, "same elements"),
        ({"files": [FILE], "arrays": {"w": array(grids=[[[[4, 0]], 0, 0]])}}, "do not ascend"),
        ({"files": [FILE], "arrays": {"w": array(grids=[[[[[0, 1, 10**15]]], 0, 0]])}}, "too long"),
        ({"files": [FILE], "arrays": {"w": array(shape=[2] * 70)}}, "impossible shape"),
        ({"files": [FILE], "arrays": {"w": array(shape=[-1])}}, "impossible shape"),
        ({"files": [FILE], "arrays": {"w": array(shape=[2**40] * 4, grids=[[[[[0, 1, 2**13]]] * 4, 0, 0]])}}, "too"),
        ({"aliases": {"a": "b"}}, "points nowhere"),
        ({"objects": [0]}, "lies in no file"),
        ({"objects": ["x"]}, "broken list of objects"),
        ({"arrays": []}, "'arrays' is missing or broken"),
        ({"world": "x"}, "'world' is missing or broken"),
        ({"mesh": 3}, "broken mesh"),
        ({"files": [[*FILE, [1, 4096, 4096]]]}, "broken file record"),
        ({"files": [[*FILE, [1, 4096, 4096, 5]]]}, "broken file record"),
        ({"files": [[*FILE, []]]}, "broken file record"),
        ({"files": [[*FILE, [0, [], [], ""]]]}, "broken file record"),
        ({"files": [[*FILE, [2**25, 0, 0, ""]]]}, "broken file record"),
        ({"files": [[*FILE, [1, 4096, 4096, "????"]]]}, "broken table of digests"),
        ({"files": [[*FILE, [1, 4096, 4096, TWO]]]}, "digests of the wrong size"),
        ({"files": [[*FILE, [1, 4096, 4000, DIGEST]]]}, "do not add up"),
        ({"files": [[*FILE, [1, 6000, 4096, DIGEST]]]}, "do not add up"),
        ({"files": [[*FILE, [1, -4096, 4096, DIGEST]]]}, "list of integers"),
        ({"files": [[*FILE, [2, [4096, 5000], [2048, 2048], TWO]]]}, "overlap"),
        ({"files": [[*FILE, [2, [4096, 8192], [4096, 0], DIGEST]]]}, "overlap"),
        ({"files": [FILE], "arrays": {"w": framed([])}}, "needs a frame, or null, for each"),
        ({"files": [FILE], "arrays": {"w": framed([None, None])}}, "needs a frame, or null, for each"),
        ({"files": [FILE], "arrays": {"w": framed(7)}}, "needs a frame, or null, for each"),
        ({"files": [FILE], "arrays": {"w": framed([[[0]]])}}, "broken frame"),
        ({"files": [FILE], "arrays": {"w": framed([[[0], [4, 4]]])}}, "broken frame"),
        ({"files": [FILE], "arrays": {"w": framed([[[0], [True]]])}}, "broken frame"),
        ({"files": [FILE], "arrays": {"w": framed([[[-1], [4]]])}}, "broken frame"),
        ({"files": [FILE], "arrays": {"w": framed([[[0], [1 << 62]]])}}, "broken frame"),
        ({"files": [FILE], "arrays": {"w": framed([[[1], [4]]])}}, "past the end of its frame"),
        ({"files": [FILE], "arrays": {"w": framed([[[0], [1025]]])}}, "past the end of its frame"),
        ({"files": [FILE], "arrays": {"w": array(grids=[[[[0, 4]], 0, 4096, [None], 1]])}}, "broken grid"),
    ],
)  # fmt: skip
def test_hostile_manifests_are_refused(members: dict[str, Any], words: str) -> None:
    with pytest.raises(FormatError, match=words):
        manifest_json.parse_manifest(seal({"version": 1}, members))


def test_newer_versions_are_refused_with_advice() -> None:
    with pytest.raises(UnsupportedVersionError, match="Install a newer xla_ckpt"):
        manifest_json.parse_manifest(seal({"version": 3}, {}))
    for head in ({"version": 0}, {"sequence": 0}, {"sequence": "1"}, {"tag": 5}, {"format": "other"}):
        with pytest.raises(FormatError):
            manifest_json.parse_manifest(seal(head, {}))


@given(st.binary(max_size=300))
def test_garbage_is_no_manifest(data: bytes) -> None:
    with pytest.raises(CorruptCheckpointError):
        manifest_json.parse_manifest(data)


json_any = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-2, 9), st.text(max_size=3), st.floats(allow_nan=False)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=12,
)


@given(
    st.dictionaries(st.sampled_from(["arrays", "files", "aliases", "objects", "mesh", "world", "skeleton"]), json_any)
)
def test_sealed_garbage_raises_typed_errors(members: dict[str, Any]) -> None:
    for version in (1, 2):
        try:
            manifest_json.parse_manifest(seal({"version": version}, members))
        except CheckpointError:
            pass


@given(json_any, json_any, json_any)
def test_sealed_garbage_in_an_array_raises_typed_errors(shape: Any, grids: Any, cuts: Any) -> None:
    for entry in (
        array(shape=shape),
        array(grids=grids),
        array(grids=[[cuts, 0, 0]]),
        array(grids=[[[[0, 4]], cuts, 0]]),
        framed(grids),
        framed([cuts]),
        framed([[cuts, [4]]]),
    ):
        try:
            manifest_json.parse_manifest(seal({"version": 1}, {"files": [FILE], "arrays": {"w": entry}}))
        except CheckpointError:
            pass
    for group in (form(shape=shape), form(cuts=cuts), form(names=grids), form(offsets=cuts), form(frames=grids), cuts):
        try:
            manifest_json.parse_manifest(seal({}, {"files": [FILE], "arrays": [group]}))
        except CheckpointError:
            pass


@given(json_any, json_any, json_any)
def test_sealed_garbage_in_a_file_raises_typed_errors(table: Any, offsets: Any, text: Any) -> None:
    for entry in (
        table,
        [1, offsets, 4096, DIGEST],
        [1, 4096, offsets, DIGEST],
        [1, 4096, 4096, text],
        [text, 0, 0, ""],
    ):
        try:
            manifest_json.parse_manifest(seal({}, {"files": [[*FILE, entry]]}))
        except CheckpointError:
            pass


def test_records_are_built_from_shards_in_any_order() -> None:
    f32 = dtypes.get_dtype("float32")
    shards = [Shard(Box((2, 0), (4, 3)), 1, 64), Shard(Box((0, 0), (2, 3)), 0, 0)]
    record = create_array_record(f32, (4, 3), shards)
    assert [grid.cell_count for grid in record.metadata.grids] == [2]
    assert sorted(record, key=lambda s: s.file) == sorted(shards, key=lambda s: s.file)
    with pytest.raises(FormatError, match="shards are missing"):
        create_array_record(f32, (5, 3), shards)
    assert create_array_record(f32, (0, 3), []).nbytes == 0
    for huge in (Shard(Box((0,), (1 << 63,)), 0, 0), Shard(Box((0,), (1,)), 0, 1 << 64)):
        with pytest.raises(FormatError, match="impossible place"):
            create_array_record(f32, (1 << 64,), [huge, huge])


regions = st.lists(
    st.builds(
        lambda name, d, shape: Region(name, d, Box.from_shape(shape)),
        st.text(min_size=1, max_size=6).filter(lambda n: n != "__metadata__"), some_dtypes, full_shapes,
    ),
    max_size=5, unique_by=lambda r: r.key,
)  # fmt: skip


@given(regions)
def test_headers_know_their_digests(some: list[Region]) -> None:
    ordered = [some[i] for i in payload.sort_regions(some)]
    count = sum(checksum.count_blocks(r.nbytes) for r in ordered)
    head = payload.build_header(ordered, list(range(count)))
    assert len(head) == len(payload.build_header(ordered))
    assert len(head) % payload.REGION_ALIGNMENT == 0
    table = payload.parse_block_table(head)
    seen = []
    places = payload.SafetensorsFile(RegionTable.from_regions(ordered)).region_ranges
    for region, at in zip(ordered, [at - len(head) for at, _ in places], strict=True):
        assert at % region.dtype.itemsize == 0
        assert json.loads(head[8:])[region.key] == payload.build_entry(region, at)
        if region.nbytes:
            seen += table.get_digests(len(head) + at, region.nbytes)
    assert seen == list(range(count))


@given(st.binary(max_size=200))
def test_garbage_is_no_header(data: bytes) -> None:
    with pytest.raises(FormatError):
        payload.parse_block_table(data)


@given(json_any)
def test_json_garbage_is_no_header(value: Any) -> None:
    text = json.dumps({"__metadata__": {payload.DIGESTS_KEY: ""}, "w": value}).encode()
    try:
        payload.parse_block_table(len(text).to_bytes(8, "little") + text)
    except FormatError:
        pass
