"""The manifest as bytes: canonical JSON, one member a line, the first and the last line covered by digests.

```
{"format":"xla_ckpt","version":2,"tag":"step_10","sequence":12,"pinned":false,"created":"...","head":"<16 hex>",
"mesh":null,
...
"digest":"<16 hex>"}
```

``head`` is the digest of the first line up to that place, so that a listing of tags reads one line of each manifest.
``digest`` is the digest of all bytes before it, so that nothing in the file can change unnoticed.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import numpy as np

from xla_ckpt import dtypes
from xla_ckpt.errors import CheckpointError, CorruptCheckpointError, FormatError, UnsupportedVersionError
from xla_ckpt.manifest import intseq
from xla_ckpt.manifest.arrays import ArrayForm, ArrayRecord, Arrays, form_of
from xla_ckpt.manifest.digest import block_count, digest, pack_digests, sealed, to_hex, unpack_digests, unsealed
from xla_ckpt.manifest.records import FORMAT_VERSION, FileRecord, Head, Manifest
from xla_ckpt.sharding.box import MAX_DIMS, Box
from xla_ckpt.sharding.grid import Grid
from xla_ckpt.tree.json_object import json_object

HEAD_BYTES = 4096
"""The first line of a manifest is shorter than this."""

MAX_CELLS = 1 << 24
"""Most shards that one manifest may list."""

FEW_CELLS = 1 << 16
CELLS_PER_BYTE = 32
"""A manifest may list so many shards, and so many more for each of its bytes: runs of numbers are short, whatever they
stand for, and to load a shard takes time. With a rank's shard of each array there are at most a few of a byte."""

_HEAD_END = re.compile(rb',"head":"([0-9a-f]{16})",\n')


def _dump(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def dump(manifest: Manifest) -> bytes:
    """The bytes of a manifest file: equal manifests give equal bytes."""
    members: dict[str, Any] = {
        "mesh": manifest.mesh,
        "world": manifest.world,
        "skeleton": manifest.skeleton,
        "arrays": [_form_json(manifest.arrays, number) for number in range(len(manifest.arrays.forms))],
        "aliases": dict(manifest.aliases),
        "objects": list(manifest.objects),
        "files": [file_json(f) for f in manifest.files],
        **({} if manifest.retention is None else {"retention": manifest.retention}),
    }
    lines = [_first_line(replace(manifest.head, version=FORMAT_VERSION))]
    lines += [_dump(name) + b":" + _dump(value) for name, value in members.items()]
    return sealed(b",\n".join(lines))


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


def with_pin(data: bytes, pinned: bool) -> bytes:
    """The bytes of the same manifest with another pin. All but the first and the last line stay as they are.

    Raises:
        CorruptCheckpointError: A digest does not match.
        UnsupportedVersionError: A newer version wrote it.
    """
    head = parse_head(data[:HEAD_BYTES])
    _, _, others = unsealed(data, "the manifest").partition(b",\n")
    return sealed(_first_line(replace(head, pinned=pinned)) + b",\n" + others)


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


def _form_json(arrays: Arrays, number: int) -> dict[str, Any]:
    """All arrays of one form."""
    form, cells = arrays.forms[number], arrays.cells_of(number).reshape(-1)
    split = form.spec is not None and any(form.spec)
    frames = [arrays.frames.get(cell) for cell in cells.tolist()] if arrays.frames else []
    return {
        "dtype": form.dtype.name,
        "shape": list(form.shape),
        **({"spec": form.spec} if split else {}),
        **({"divergent": True} if form.divergent else {}),
        "cuts": [[intseq.pack_ints(cuts) for cuts in grid.cuts] for grid in form.grids],
        "names": [arrays.names[row] for row in arrays.by_form[number].tolist()],
        "files": intseq.pack_ints(arrays.file[cells]),
        "offsets": intseq.pack_ints(arrays.offset[cells]),
        **({"frames": [f and [list(f.start), list(f.stop)] for f in frames]} if any(frames) else {}),
    }


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
    raw = json_object(first + b"}", "the manifest")
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


def parse(data: bytes) -> Manifest:
    """The manifest in these bytes.

    Raises:
        CorruptCheckpointError: A digest does not match, or the content makes no sense.
        UnsupportedVersionError: Written by a newer version.
    """
    head = parse_head(data[:HEAD_BYTES])
    body = unsealed(data, "the manifest")
    raw = json_object(body + b"}", "the manifest")
    budget = min(MAX_CELLS, FEW_CELLS + CELLS_PER_BYTE * len(data))
    if head.version == 1:
        arrays = _parse_arrays_1(_get(raw, "arrays", dict), budget)
    else:
        arrays = _parse_arrays(_get(raw, "arrays", list), budget)
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
    claimed, available = arrays.nbytes, sum(record.size for record in files)
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
        retention=raw.get("retention"),
    )


def skeleton_of(data: bytes) -> Any:
    """The skeleton in the bytes of a manifest. Its arrays, of which there may be thousands, are not looked at.

    Raises:
        CorruptCheckpointError: A digest does not match, or there is no skeleton.
        UnsupportedVersionError: Written by a newer version.
    """
    parse_head(data[:HEAD_BYTES])
    for line in unsealed(data, "the manifest").split(b",\n"):
        if line.startswith(b'"skeleton":'):
            return json_object(b"{" + line + b"}", "the manifest")["skeleton"]
    raise FormatError("the manifest has no skeleton")


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


def _parse_arrays(groups: list[Any], budget: int) -> Arrays:
    """All arrays, of which those of one form are said together."""
    forms: list[ArrayForm] = []
    names: list[str] = []
    counts: list[int] = []
    files, offsets, frames = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], dict[int, Box]()
    cells = 0
    for group in groups:
        try:
            of_form = _get(group, "names", list)
            if not all(type(name) is str for name in of_form):
                raise FormatError("broken list of names")
            form = _parse_form(group, _get(group, "cuts", list), budget - cells)
            count = form.cells * len(of_form)
            if count > budget - cells:
                raise FormatError("too many shards", expected=f"at most {MAX_CELLS}")
            files.append(intseq.unpack_column(group.get("files"), count))
            offsets.append(intseq.unpack_column(group.get("offsets"), count))
            if "frames" in group:
                parsed = _parse_frames(group["frames"], count, len(form.shape))
                frames |= {cells + i: frame for i, frame in enumerate(parsed) if frame is not None}
        except (CheckpointError, ValueError, TypeError, RecursionError) as error:
            raise FormatError(f"broken array record: {error}", leaf=_first_name(group)) from error
        forms.append(form)
        names += of_form
        counts.append(len(of_form))
        cells += count
    return Arrays(
        names=names,
        forms=tuple(forms),
        form=np.repeat(np.arange(len(forms)), counts),
        file=np.concatenate(files),
        offset=np.concatenate(offsets),
        frames=frames,
    )


def _first_name(group: Any) -> str | None:
    names = group.get("names") if isinstance(group, dict) else None
    return str(names[0])[:80] if isinstance(names, list) and names else None


def _parse_arrays_1(entries: dict[str, Any], budget: int) -> Arrays:
    """The arrays of a manifest of version 1, in which each says its own form."""
    records: dict[str, ArrayRecord] = {}
    forms: dict[str, ArrayForm] = {}
    for leaf, entry in entries.items():
        try:
            grids = _get(entry, "grids", list)
            if not all(isinstance(grid, list) and 3 <= len(grid) <= 4 for grid in grids):
                raise FormatError("broken grid of shards", found=str(grids)[:80])
            cuts = [grid[0] for grid in grids]
            about = str([entry.get(name) for name in ("dtype", "shape", "spec", "divergent")])
            form = forms.get(key := f"{about}{cuts}") or forms.setdefault(key, _parse_form(entry, cuts, budget))
            budget -= form.cells
            if budget < 0:
                raise FormatError("too many shards", expected=f"at most {MAX_CELLS}")
            files: list[int] = []
            offsets: list[int] = []
            frames: list[Box | None] = []
            for (_, file, offset, *frame), grid in zip(grids, form.grids, strict=True):
                files += intseq.unpack_ints(file, grid.cells)
                offsets += intseq.unpack_ints(offset, grid.cells)
                frames += _parse_frames(frame[0], grid.cells, len(form.shape)) if frame else [None] * grid.cells
            records[leaf] = ArrayRecord(
                form=form,
                files=tuple(files),
                offsets=tuple(offsets),
                frames=tuple(frames) if any(frame is not None for frame in frames) else None,
            )
        except (CheckpointError, ValueError, TypeError, RecursionError) as error:
            raise FormatError(f"broken array record: {error}", leaf=leaf) from error
    return Arrays.of(records)


def _parse_form(entry: Any, grids: list[Any], budget: int) -> ArrayForm:
    """The form that an entry names, with the cuts of each grid, of at most `budget` cells."""
    shape = tuple(_get(entry, "shape", list))
    if len(shape) > MAX_DIMS or not all(type(n) is int and 0 <= n < intseq.LIMIT for n in shape):
        raise FormatError("impossible shape", found=str(shape)[:80])
    cells = []
    for cuts in grids:
        if not isinstance(cuts, list) or len(cuts) != len(shape):
            raise FormatError("broken grid of shards", found=str(cuts)[:80])
        cells.append(Grid(tuple(intseq.unpack_any(_as_list(c), budget + 1) for c in cuts)))
        budget -= cells[-1].cells
        if budget < 0:
            raise FormatError("too many shards", expected=f"at most {MAX_CELLS}")
    return form_of(
        dtype=dtypes.dtype(_get(entry, "dtype", str)),
        shape=shape,
        grids=tuple(cells),
        spec=_parse_spec(entry, len(shape)),
        divergent="divergent" in entry and _get(entry, "divergent", bool),
    )


def _parse_frames(entries: Any, cells: int, dims: int) -> list[Box | None]:
    if not isinstance(entries, list) or len(entries) != cells:
        raise FormatError("a grid of shards needs a frame, or null, for each", expected=cells)
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
    return frames


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


def _get(raw: Any, name: str, kind: type) -> Any:
    value = raw.get(name) if isinstance(raw, dict) else None
    if type(value) is not kind:
        raise FormatError(
            f"the manifest's {name!r} is missing or broken", expected=kind.__name__, found=str(value)[:80]
        )
    return value
