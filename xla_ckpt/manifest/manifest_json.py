"""The manifest as bytes: canonical JSON, one member a line, the first and the last line covered by digests.

```
{"format":"xla_ckpt","version":1,"tag":"step_10","sequence":12,"pinned":false,"created":"...","head":"<16 hex>",
"mesh":null,
...
"digest":"<16 hex>"}
```

``head`` is the digest of the first line up to that place, so that a listing of tags reads one line of each manifest.
``digest`` is the digest of all bytes before it, so that nothing in the file can change unnoticed.
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import replace
from typing import Any

from xla_ckpt import dtypes
from xla_ckpt.errors import CheckpointError, CorruptCheckpointError, FormatError, UnsupportedVersionError
from xla_ckpt.manifest import intseq
from xla_ckpt.manifest.digest import block_count, digest, pack_digests, to_hex, unpack_digests
from xla_ckpt.manifest.records import FORMAT_VERSION, ArrayRecord, FileRecord, Head, Manifest, ShardGrid
from xla_ckpt.sharding.box import MAX_DIMS, Box
from xla_ckpt.sharding.grid import Grid

HEAD_BYTES = 4096
"""The first line of a manifest is shorter than this."""

MAX_CELLS = 1 << 24
"""Most shards that one manifest may list."""

FEW_CELLS = 1 << 16
CELLS_PER_BYTE = 32
"""A manifest may list so many shards, and so many more for each of its bytes: runs of numbers are short, whatever they
stand for, and to load a shard takes time. With a rank's shard of each array there are at most a few of a byte."""

_HEAD_END = re.compile(rb',"head":"([0-9a-f]{16})",\n')
_TAIL = re.compile(rb',\n"digest":"([0-9a-f]{16})"}\n\Z')


def _dump(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def dump(manifest: Manifest) -> bytes:
    """The bytes of a manifest file: equal manifests give equal bytes."""
    members: dict[str, Any] = {
        "mesh": manifest.mesh,
        "world": manifest.world,
        "skeleton": manifest.skeleton,
        "arrays": {leaf: _array_json(record) for leaf, record in manifest.arrays.items()},
        "aliases": dict(manifest.aliases),
        "objects": list(manifest.objects),
        "files": [file_json(f) for f in manifest.files],
    }
    lines = [_first_line(manifest.head)]
    lines += [_dump(name) + b":" + _dump(value) for name, value in members.items()]
    return _ended(b",\n".join(lines))


def _first_line(head: Head) -> bytes:
    """The first line of a manifest, with its digest, without the comma behind it."""
    first = _dump(
        {
            "format": "xla_ckpt",
            "version": head.version,
            "tag": head.tag,
            "sequence": head.sequence,
            "pinned": head.pinned,
            "created": head.created,
        }
    )[:-1]
    return first + b',"head":"' + to_hex(digest(first)).encode() + b'"'


def _ended(body: bytes) -> bytes:
    """A manifest, from all that is before its last line."""
    return body + b',\n"digest":"' + to_hex(digest(body)).encode() + b'"}\n'


def with_pin(data: bytes, pinned: bool) -> bytes:
    """The bytes of the same manifest with another pin. All but the first and the last line stay as they are.

    Raises:
        CorruptCheckpointError: A digest does not match.
        UnsupportedVersionError: A newer version wrote it.
    """
    head = parse_head(data[:HEAD_BYTES])
    _, _, others = _body(data).partition(b",\n")
    return _ended(_first_line(replace(head, pinned=pinned)) + b",\n" + others)


def digests_of(data: bytes) -> frozenset[int]:
    """The digests of a manifest with a pin and without: a pin changes nothing of what was saved.

    Raises:
        CorruptCheckpointError: A digest in it does not match.
        UnsupportedVersionError: A newer version wrote it.
    """
    return frozenset(digest(with_pin(data, pinned)) for pinned in (True, False))


def file_json(record: FileRecord) -> list[Any]:
    """A file record as plain JSON."""
    entry = [record.path, record.size, record.head, to_hex(record.digest)]
    if not record.regions:
        return entry
    offsets, sizes = zip(*record.regions, strict=True)
    return [*entry, [len(offsets), intseq.pack_ints(offsets), intseq.pack_ints(sizes), pack_digests(record.digests)]]


def _array_json(record: ArrayRecord) -> dict[str, Any]:
    split = record.spec is not None and any(record.spec)
    return {
        "dtype": record.dtype.name,
        "shape": list(record.shape),
        **({"spec": record.spec} if split else {}),
        **({"divergent": True} if record.divergent else {}),
        "grids": [
            [
                _cuts_json(g.grid),
                intseq.pack_ints(g.files),
                intseq.pack_ints(g.offsets),
                *_frames_json(g),
            ]
            for g in record.grids
        ],
    }


@functools.lru_cache(maxsize=4096)
def _cuts_json(grid: Grid) -> list[Any]:
    return [intseq.pack_ints(cuts) for cuts in grid.cuts]


def _frames_json(grid: ShardGrid) -> list[Any]:
    if grid.frames is None:
        return []
    return [[None if f is None else [list(f.start), list(f.stop)] for f in grid.frames]]


def parse_head(start: bytes) -> Head:
    """The head of the manifest that begins with these bytes (`HEAD_BYTES` of them suffice).

    Raises:
        CorruptCheckpointError: Damaged, or no manifest at all.
        UnsupportedVersionError: Written by a newer version.
    """
    end = _HEAD_END.search(start)
    if end is None:
        raise FormatError("this is no manifest of xla_ckpt, or its first line is damaged")
    first = start[: end.start()]
    if to_hex(digest(first)) != end.group(1).decode():
        raise CorruptCheckpointError("the first line of the manifest is damaged: its digest does not match")
    raw = _loads(first + b"}")
    if raw.get("format") != "xla_ckpt":
        raise FormatError("this is no manifest of xla_ckpt", found=str(raw.get("format"))[:40])
    version = _get(raw, "version", int)
    if version > FORMAT_VERSION:
        raise UnsupportedVersionError(
            "the checkpoint was written by a newer version of this library",
            expected=f"format version {FORMAT_VERSION} or older",
            found=version,
            hint="Install a newer xla_ckpt.",
        )
    if version < 1:
        raise FormatError("unknown format version", found=version)
    sequence = _get(raw, "sequence", int)
    if not 0 < sequence < intseq.LIMIT:
        raise FormatError("impossible commit sequence", found=sequence)
    return Head(
        tag=_get(raw, "tag", str),
        sequence=sequence,
        pinned=_get(raw, "pinned", bool),
        created=_get(raw, "created", str),
        version=version,
    )


def _body(data: bytes) -> bytes:
    """All of a manifest before its last line, compared with the digest there."""
    tail = _TAIL.search(data[-64:])
    if tail is None:
        raise CorruptCheckpointError("the manifest is cut off: it does not end with its digest")
    body = data[: len(data) - 64 + tail.start()] if len(data) > 64 else data[: tail.start()]
    if to_hex(digest(body)) != tail.group(1).decode():
        raise CorruptCheckpointError("the manifest is damaged: its digest does not match")
    return body


def parse(data: bytes) -> Manifest:
    """The manifest in these bytes.

    Raises:
        CorruptCheckpointError: A digest does not match, or the content makes no sense.
        UnsupportedVersionError: Written by a newer version.
    """
    head = parse_head(data[:HEAD_BYTES])
    body = _body(data)
    raw = _loads(body + b"}")
    arrays: dict[str, ArrayRecord] = {}
    budget = min(MAX_CELLS, FEW_CELLS + CELLS_PER_BYTE * len(data))
    grids = _Grids()
    for leaf, entry in _get(raw, "arrays", dict).items():
        try:
            arrays[leaf] = _parse_array(entry, budget, grids)
        except (CheckpointError, ValueError, TypeError, RecursionError) as error:
            raise FormatError(f"broken array record: {error}", leaf=leaf) from error
        budget -= sum(g.grid.cells for g in arrays[leaf].grids)
    aliases = _get(raw, "aliases", dict)
    if not all(isinstance(target, str) for target in aliases.values()):
        raise FormatError("broken list of shared arrays")
    objects = _get(raw, "objects", list)
    if not all(type(n) is int for n in objects):
        raise FormatError("broken list of objects")
    mesh = raw.get("mesh")
    if mesh is not None and not isinstance(mesh, str):
        raise FormatError("broken mesh", found=str(mesh)[:80])
    files = tuple(parse_file(entry) for entry in _get(raw, "files", list))
    claimed, available = sum(record.nbytes for record in arrays.values()), sum(record.size for record in files)
    if claimed > available:
        raise FormatError("the arrays are larger than the files in which they lie", expected=available, found=claimed)
    return Manifest(
        head=head,
        skeleton=raw.get("skeleton"),
        arrays=arrays,
        files=files,
        aliases=aliases,
        objects=tuple(objects),
        mesh=mesh,
        world=_get(raw, "world", int),
    )


def parse_file(entry: Any) -> FileRecord:
    """The file record that `file_json` wrote.

    Raises:
        FormatError: It is none, or it makes no sense.
    """
    match entry:
        case [str(path), int(size), int(head), str(text)] if re.fullmatch("[0-9a-f]{16}", text):
            return FileRecord(path=path, size=size, head=head, digest=int(text, 16))
        case [str(path), int(size), int(head), str(text), [int(count), offsets, sizes, str(table)]] if re.fullmatch(
            "[0-9a-f]{16}", text
        ) and 0 < count <= min(MAX_CELLS, FEW_CELLS + len(table)):
            regions = tuple(zip(intseq.unpack_ints(offsets, count), intseq.unpack_ints(sizes, count), strict=True))
            digests = unpack_digests(table, sum(block_count(nbytes) for _, nbytes in regions))
            return FileRecord(path=path, size=size, head=head, digest=int(text, 16), regions=regions, digests=digests)
    raise FormatError("broken file record", found=str(entry)[:80])


class _Grids:
    """The grids of a manifest that is parsed. Arrays that are cut alike have one in common: few are made for many."""

    def __init__(self) -> None:
        self._made: dict[str, Grid] = {}

    def grid(self, cuts: list[Any], limit: int) -> Grid:
        """The grid of some packed cuts, of at most `limit` each.

        Raises:
            FormatError: They are no cuts.
            ValueError: They do not ascend.
        """
        text = str(cuts)
        grid = self._made.get(text)
        if grid is None:
            grid = Grid(tuple(intseq.unpack_any(_as_list(c), limit) for c in cuts))
            self._made[text] = grid
        return grid


def _parse_array(entry: Any, budget: int, known: _Grids) -> ArrayRecord:
    shape = tuple(_get(entry, "shape", list))
    if len(shape) > MAX_DIMS or not all(type(n) is int and 0 <= n < intseq.LIMIT for n in shape):
        raise FormatError("impossible shape", found=str(shape)[:80])
    grids = []
    for packed in _get(entry, "grids", list):
        match packed:
            case [list(cuts), files, offsets, *frames] if len(cuts) == len(shape) and len(frames) < 2:
                grid = known.grid(cuts, budget + 1)
                budget -= grid.cells
                if budget < 0:
                    raise FormatError("too many shards", expected=f"at most {MAX_CELLS}")
                grids.append(
                    ShardGrid(
                        grid=grid,
                        files=intseq.unpack_ints(files, grid.cells),
                        offsets=intseq.unpack_ints(offsets, grid.cells),
                        frames=_parse_frames(frames[0], grid, len(shape)) if frames else None,
                    )
                )
            case _:
                raise FormatError("broken grid of shards", found=str(packed)[:80])
    return ArrayRecord(
        dtype=dtypes.dtype(_get(entry, "dtype", str)),
        shape=shape,
        grids=tuple(grids),
        spec=_parse_spec(entry, len(shape)),
        divergent="divergent" in entry and _get(entry, "divergent", bool),
    )


def _parse_frames(entries: Any, grid: Grid, dims: int) -> tuple[Box | None, ...]:
    if not isinstance(entries, list) or len(entries) != grid.cells:
        raise FormatError("a grid of shards needs a frame, or null, for each", expected=grid.cells)
    frames: list[Box | None] = []
    for entry in entries:
        match entry:
            case None:
                frames.append(None)
            case [[*start], [*stop]] if len(start) == len(stop) == dims and all(
                type(n) is int and 0 <= n < intseq.LIMIT for n in (*start, *stop)
            ):
                frames.append(Box(tuple(start), tuple(stop)))
            case _:
                raise FormatError("broken frame of a shard", found=str(entry)[:80])
    return tuple(frames)


def _parse_spec(entry: Any, dims: int) -> tuple[Any, ...] | None:
    """None, or for each tensor dim None, a name, or a list of names with perhaps an integer or a list at the end."""
    spec = entry.get("spec")
    if spec is None:
        return None
    if not isinstance(spec, list) or len(spec) > dims:
        raise FormatError("broken spec", found=str(spec)[:80])
    parsed: list[Any] = []
    for split in spec:
        match split:
            case None | str():
                parsed.append(split)
            case [*names] if names and all(map(_is_word, names)):
                parsed.append(tuple(names))
            case [*names, [*sections]] if all(map(_is_word, (*names, *sections))):
                parsed.append((*names, tuple(sections)))
            case _:
                raise FormatError("broken spec", found=str(spec)[:80])
    return tuple(parsed)


def _is_word(value: Any) -> bool:
    return isinstance(value, str) or type(value) is int


def _as_list(cuts: Any) -> Any:
    """The cuts along a dim. Those of a box without elements are two equal values, which `pack_ints` writes as one."""
    return [cuts, cuts] if type(cuts) is int else cuts


def _loads(data: bytes) -> dict[str, Any]:
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError("the manifest is no JSON") from error
    if not isinstance(raw, dict):
        raise FormatError("the manifest is no JSON object")
    return raw


def _get(raw: Any, name: str, kind: type) -> Any:
    value = raw.get(name) if isinstance(raw, dict) else None
    if type(value) is not kind:
        raise FormatError(
            f"the manifest's {name!r} is missing or broken", expected=kind.__name__, found=str(value)[:80]
        )
    return value
