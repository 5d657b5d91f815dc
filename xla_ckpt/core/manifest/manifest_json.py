"""The manifest as bytes: canonical JSON, one member per line, with checksums of the first line and of the whole file.

```
{"format":"xla_ckpt","version":2,"tag":"step_10","sequence":12,"pinned":false,"created":"...","head":"<16 hex>",
"mesh":null, ... "digest":"<16 hex>"}
```

``head`` is the checksum of the first line up to that place, so that listing checkpoints reads one line per manifest.
``digest`` is the checksum of all bytes before it, so that every change is detected. Arrays with equal metadata share
one entry. Invalid content raises an error, and the size of the file limits the number of shards.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from xla_ckpt.core import dtypes, json_data
from xla_ckpt.core.checksum import (
    compute_digest,
    count_blocks,
    pack_digests,
    seal_json,
    to_hex,
    unpack_digests,
    unseal_json,
)
from xla_ckpt.core.json_data import parse_json_object
from xla_ckpt.core.manifest.arrays import ArrayMetadata, ArrayRecord, ArrayTable, create_metadata
from xla_ckpt.core.manifest.manifest import FORMAT_VERSION, FileRecord, Manifest, ManifestHeader
from xla_ckpt.core.sharding.box import MAX_DIMS, Box, Grid
from xla_ckpt.errors import CheckpointError, CorruptCheckpointError, FormatError, UnsupportedVersionError

MAX_SHARDS = 1 << 24
"""Maximum number of shards per manifest."""


def dump_array_group(arrays: ArrayTable, number: int) -> dict[str, Any]:
    """Serialize all arrays with one metadata."""
    form, cells = arrays.metadata[number], arrays.get_shard_rows(number).reshape(-1)
    split = form.spec is not None and any(form.spec)
    frames = [arrays.parent_boxes.get(cell) for cell in cells.tolist()] if arrays.parent_boxes else []
    return {
        "dtype": form.dtype.name,
        "shape": list(form.shape),
        **({"spec": form.spec} if split else {}),
        **({"divergent": True} if form.is_divergent else {}),
        **({} if form.weak_type is None else {"weak_type": form.weak_type}),
        "cuts": [[json_data.pack_ints(cuts) for cuts in grid.cuts] for grid in form.grids],
        "names": [arrays.names[row] for row in arrays.rows_by_metadata[number].tolist()],
        "files": json_data.pack_ints(arrays.file[cells]),
        "offsets": json_data.pack_ints(arrays.offset[cells]),
        **({"frames": [f and [list(f.start), list(f.stop)] for f in frames]} if any(frames) else {}),
    }


def parse_arrays(groups: list[Any], budget: int) -> ArrayTable:
    """Parse all arrays, grouped by metadata.

    Args:
        groups: One entry per metadata.
        budget: Maximum number of shards.

    Raises:
        FormatError: The entries are malformed, or list too many shards.
    """
    forms: list[ArrayMetadata] = []
    names: list[str] = []
    counts: list[int] = []
    files, offsets, frames = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], dict[int, Box]()
    cells = 0
    for group in groups:
        try:
            of_form = get_member(group, "names", list)
            if not all(type(name) is str for name in of_form):
                raise FormatError("broken list of names")
            form = _parse_array_metadata(group, get_member(group, "cuts", list), budget - cells)
            count = form.shard_count * len(of_form)
            if count > budget - cells:
                raise FormatError("too many shards", expected=f"at most {MAX_SHARDS}")
            files.append(json_data.unpack_int_array(group.get("files"), count))
            offsets.append(json_data.unpack_int_array(group.get("offsets"), count))
            if "frames" in group:
                parsed = _parse_parent_boxes(group["frames"], count, len(form.shape))
                frames |= {cells + i: frame for i, frame in enumerate(parsed) if frame is not None}
        except (CheckpointError, ValueError, TypeError, RecursionError) as error:
            raise FormatError(f"broken array record: {error}", leaf=_find_first_name(group)) from error
        forms.append(form)
        names += of_form
        counts.append(len(of_form))
        cells += count
    return ArrayTable(
        names=names,
        metadata=tuple(forms),
        metadata_index=np.repeat(np.arange(len(forms)), counts),
        file=np.concatenate(files),
        offset=np.concatenate(offsets),
        parent_boxes=frames,
    )


def _find_first_name(group: Any) -> str | None:
    names = group.get("names") if isinstance(group, dict) else None
    return str(names[0])[:80] if isinstance(names, list) and names else None


def parse_arrays_v1(entries: dict[str, Any], budget: int) -> ArrayTable:
    """Parse the arrays of a version 1 manifest, in which each array has its own metadata.

    Args:
        entries: One entry per leaf path.
        budget: Maximum number of shards.

    Raises:
        FormatError: The entries are malformed, or list too many shards.
    """
    records: dict[str, ArrayRecord] = {}
    forms: dict[str, ArrayMetadata] = {}
    for leaf, entry in entries.items():
        try:
            grids = get_member(entry, "grids", list)
            if not all(isinstance(grid, list) and 3 <= len(grid) <= 4 for grid in grids):
                raise FormatError("broken grid of shards", found=str(grids)[:80])
            cuts = [grid[0] for grid in grids]
            about = str([entry.get(name) for name in ("dtype", "shape", "spec", "divergent")])
            form = forms.get(key := f"{about}{cuts}") or forms.setdefault(
                key, _parse_array_metadata(entry, cuts, budget)
            )
            budget -= form.shard_count
            if budget < 0:
                raise FormatError("too many shards", expected=f"at most {MAX_SHARDS}")
            files: list[int] = []
            offsets: list[int] = []
            frames: list[Box | None] = []
            for (_, file, offset, *frame), grid in zip(grids, form.grids, strict=True):
                files += json_data.unpack_ints(file, grid.cell_count)
                offsets += json_data.unpack_ints(offset, grid.cell_count)
                frames += (
                    _parse_parent_boxes(frame[0], grid.cell_count, len(form.shape))
                    if frame
                    else [None] * grid.cell_count
                )
            records[leaf] = ArrayRecord(
                metadata=form,
                files=tuple(files),
                offsets=tuple(offsets),
                parent_boxes=tuple(frames) if any(frame is not None for frame in frames) else None,
            )
        except (CheckpointError, ValueError, TypeError, RecursionError) as error:
            raise FormatError(f"broken array record: {error}", leaf=leaf) from error
    return ArrayTable.from_records(records)


def _parse_array_metadata(entry: Any, grids: list[Any], budget: int) -> ArrayMetadata:
    """Parse the metadata of an entry, with the cuts of each grid, of at most `budget` cells.

    Raises:
        FormatError: The entry is malformed.
    """
    shape = tuple(get_member(entry, "shape", list))
    if len(shape) > MAX_DIMS or not all(type(n) is int and 0 <= n < json_data.MAX_INT for n in shape):
        raise FormatError("impossible shape", found=str(shape)[:80])
    cells = []
    for cuts in grids:
        if not isinstance(cuts, list) or len(cuts) != len(shape):
            raise FormatError("broken grid of shards", found=str(cuts)[:80])
        cells.append(Grid(tuple(json_data.unpack_variable_ints(_as_list(c), budget + 1) for c in cuts)))
        budget -= cells[-1].cell_count
        if budget < 0:
            raise FormatError("too many shards", expected=f"at most {MAX_SHARDS}")
    return create_metadata(
        dtype=dtypes.get_dtype(get_member(entry, "dtype", str)),
        shape=shape,
        grids=tuple(cells),
        spec=_parse_spec(entry, len(shape)),
        is_divergent="divergent" in entry and get_member(entry, "divergent", bool),
        weak_type=get_member(entry, "weak_type", bool) if "weak_type" in entry else None,
    )


def _parse_parent_boxes(entries: Any, cells: int, dims: int) -> list[Box | None]:
    if not isinstance(entries, list) or len(entries) != cells:
        raise FormatError("a grid of shards needs a frame, or null, for each", expected=cells)
    frames: list[Box | None] = []
    for entry in entries:
        match entry:
            case None:
                frames.append(None)
            case [[*start], [*stop]] if len(start) == len(stop) == dims and all(
                type(n) is int and 0 <= n < json_data.MAX_INT for n in (*start, *stop)
            ):
                frames.append(Box(tuple(start), tuple(stop)))
            case _:
                raise FormatError("broken frame of a shard", found=str(entry)[:80])
    return frames


def _parse_spec(entry: Any, dims: int) -> tuple[Any, ...] | None:
    """Parse a spec: None, or per tensor dim None, a name, or names with an optional final integer or list."""
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
    """Return the cuts along a dim. A box without elements has two equal cuts, which `pack_ints` writes as one."""
    return [cuts, cuts] if type(cuts) is int else cuts


def get_member(raw: Any, name: str, expected_type: type) -> Any:
    """Return a member of an object in a manifest.

    Raises:
        FormatError: The member is missing, or has another type.
    """
    value = raw.get(name) if isinstance(raw, dict) else None
    if type(value) is not expected_type:
        raise FormatError(
            f"the manifest's {name!r} is missing or broken", expected=expected_type.__name__, found=str(value)[:80]
        )
    return value


MAX_HEADER_BYTES = 4096
"""Upper limit of the length of a manifest's first line (bytes)."""

MIN_SHARD_BUDGET = 1 << 16
SHARDS_PER_BYTE = 32
"""Shards that a manifest may list, in addition to `MIN_SHARD_BUDGET`, per byte of its size. Runs of numbers are short
in JSON however many shards they represent, and each shard takes time to load. A real manifest has at most a few per
byte."""

_HEADER_END = re.compile(rb',"head":"([0-9a-f]{16})",\n')


def _dump_json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def dump_manifest(manifest: Manifest) -> bytes:
    """Serialize a manifest. Equal manifests give equal bytes."""
    members: dict[str, Any] = {
        "mesh": manifest.mesh,
        "world": manifest.world_size,
        "skeleton": manifest.skeleton,
        "arrays": [dump_array_group(manifest.arrays, number) for number in range(len(manifest.arrays.metadata))],
        "aliases": dict(manifest.aliases),
        "objects": list(manifest.object_files),
        "files": [dump_file_record(f) for f in manifest.files],
        **({"module_metadata": _dump_module_metadata(manifest.module_metadata)} if manifest.module_metadata else {}),
        **({} if manifest.retention is None else {"retention": manifest.retention}),
        **({} if manifest.parity is None else {"parity": manifest.parity}),
    }
    lines = [_format_header(replace(manifest.header, version=FORMAT_VERSION))]
    lines += [_dump_json(name) + b":" + _dump_json(value) for name, value in members.items()]
    return seal_json(b",\n".join(lines))


def _dump_module_metadata(by_path: Mapping[str, Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Serialize module metadata: per leaf path the distinct metadata, and the index of each module's."""
    packed = {}
    for path, of_modules in by_path.items():
        numbers: dict[bytes, int] = {}
        modules = {
            name: numbers.setdefault(_dump_json(metadata), len(numbers)) for name, metadata in of_modules.items()
        }
        packed[path] = [[json.loads(text) for text in numbers], modules]
    return packed


def _parse_module_metadata(raw: Any) -> dict[str, dict[str, Any]]:
    by_path: dict[str, dict[str, Any]] = {}
    for path, packed in raw.items() if isinstance(raw, dict) else [("", raw)]:
        kinds, modules = packed if isinstance(packed, list) and len(packed) == 2 else (None, None)
        if not isinstance(kinds, list) or not isinstance(modules, dict) or not all(isinstance(k, dict) for k in kinds):
            raise FormatError("broken metadata of modules", leaf=path, found=str(packed)[:80])
        if not all(type(number) is int and 0 <= number < len(kinds) for number in modules.values()):
            raise FormatError("broken metadata of modules", leaf=path, found=str(modules)[:80])
        by_path[path] = {name: kinds[number] for name, number in modules.items()}
    return by_path


def _format_header(header: ManifestHeader) -> bytes:
    """Return the first line of a manifest, with its checksum, without the trailing comma."""
    first = _dump_json(
        {
            "format": "xla_ckpt",
            "version": header.version,
            "tag": header.tag,
            "sequence": header.sequence,
            "pinned": header.pinned,
            "created": header.created,
        }
    )[:-1]
    return first + b',"head":"' + to_hex(compute_digest(first)).encode() + b'"'


def set_pin(data: bytes, pinned: bool) -> bytes:
    """Return the bytes of a manifest with `pinned` set. Only the first and the last line change.

    Raises:
        CorruptCheckpointError: A checksum does not match.
        UnsupportedVersionError: A newer version wrote the manifest.
    """
    head = parse_header(data[:MAX_HEADER_BYTES])
    _, _, others = unseal_json(data, "the manifest").partition(b",\n")
    return seal_json(_format_header(replace(head, pinned=pinned)) + b",\n" + others)


def compute_pin_digests(data: bytes) -> frozenset[int]:
    """Return the checksums of a manifest with and without a pin, because a pin does not change the saved content.

    Raises:
        CorruptCheckpointError: A checksum in it does not match.
        UnsupportedVersionError: A newer version wrote the manifest.
    """
    return frozenset(compute_digest(set_pin(data, pinned)) for pinned in (True, False))


def dump_file_record(record: FileRecord) -> list[Any]:
    """Serialize a file record."""
    entry = [record.path, record.size, record.framing_bytes, to_hex(record.framing_digest)]
    if not record.regions:
        return entry
    offsets, sizes = zip(*record.regions, strict=True)
    return [
        *entry,
        [len(offsets), json_data.pack_ints(offsets), json_data.pack_ints(sizes), pack_digests(record.block_digests)],
    ]


def parse_header(start: bytes) -> ManifestHeader:
    """Parse the header of a manifest from its first bytes (`MAX_HEADER_BYTES` suffice).

    Raises:
        CorruptCheckpointError: The data is damaged, or not a manifest.
        UnsupportedVersionError: A newer version wrote the manifest.
    """
    end = _HEADER_END.search(start)
    if end is None:
        raise FormatError("this is no manifest of xla_ckpt, or its first line is damaged")
    first = start[: end.start()]
    if to_hex(compute_digest(first)) != end.group(1).decode():
        raise CorruptCheckpointError("the first line of the manifest is damaged: its digest does not match")
    raw = parse_json_object(first + b"}", "the manifest")
    if raw.get("format") != "xla_ckpt":
        raise FormatError("this is no manifest of xla_ckpt", found=str(raw.get("format"))[:40])
    version = get_member(raw, "version", int)
    if version > FORMAT_VERSION:
        raise UnsupportedVersionError(
            "the checkpoint was written by a newer version of this library",
            expected=f"format version {FORMAT_VERSION} or older",
            found=version,
            hint="Install a newer xla_ckpt.",
        )
    if version < 1:
        raise FormatError("unknown format version", found=version)
    sequence = get_member(raw, "sequence", int)
    if not 0 < sequence < json_data.MAX_INT:
        raise FormatError("impossible commit sequence", found=sequence)
    return ManifestHeader(
        tag=get_member(raw, "tag", str),
        sequence=sequence,
        pinned=get_member(raw, "pinned", bool),
        created=get_member(raw, "created", str),
        version=version,
    )


def parse_manifest(data: bytes) -> Manifest:
    """Parse the bytes of a manifest.

    Raises:
        CorruptCheckpointError: A checksum does not match, or the content is invalid.
        UnsupportedVersionError: A newer version wrote the manifest.
    """
    head = parse_header(data[:MAX_HEADER_BYTES])
    body = unseal_json(data, "the manifest")
    raw = parse_json_object(body + b"}", "the manifest")
    budget = min(MAX_SHARDS, MIN_SHARD_BUDGET + SHARDS_PER_BYTE * len(data))
    if head.version == 1:
        arrays = parse_arrays_v1(get_member(raw, "arrays", dict), budget)
    else:
        arrays = parse_arrays(get_member(raw, "arrays", list), budget)
    aliases = get_member(raw, "aliases", dict)
    if not all(isinstance(target, str) for target in aliases.values()):
        raise FormatError("broken list of tied arrays")
    objects = get_member(raw, "objects", list)
    if not all(type(n) is int for n in objects):
        raise FormatError("broken list of objects")
    mesh = raw.get("mesh")
    if mesh is not None and not isinstance(mesh, str):
        raise FormatError("broken mesh", found=str(mesh)[:80])
    parity = raw.get("parity")
    if parity is not None and not isinstance(parity, str):
        raise FormatError("it does not say what the tag survives", found=str(parity)[:80])
    files = tuple(parse_file_record(entry) for entry in get_member(raw, "files", list))
    claimed, available = arrays.nbytes, sum(record.size for record in files)
    if claimed > available:
        raise FormatError("the arrays are larger than the files in which they lie", expected=available, found=claimed)
    return Manifest(
        header=head,
        skeleton=raw.get("skeleton"),
        arrays=arrays,
        files=files,
        aliases=aliases,
        object_files=tuple(objects),
        mesh=mesh,
        world_size=get_member(raw, "world", int),
        module_metadata=_parse_module_metadata(raw.get("module_metadata", {})),
        retention=raw.get("retention"),
        parity=parity,
    )


def parse_skeleton(data: bytes) -> Any:
    """Parse only the skeleton of a manifest. The arrays, of which there may be thousands, are skipped.

    Raises:
        CorruptCheckpointError: A checksum does not match, or there is no skeleton.
        UnsupportedVersionError: A newer version wrote the manifest.
    """
    parse_header(data[:MAX_HEADER_BYTES])
    for line in unseal_json(data, "the manifest").split(b",\n"):
        if line.startswith(b'"skeleton":'):
            return parse_json_object(b"{" + line + b"}", "the manifest")["skeleton"]
    raise FormatError("the manifest has no skeleton")


def parse_file_record(entry: Any) -> FileRecord:
    """Parse a file record that `dump_file_record` wrote.

    Raises:
        FormatError: The entry is malformed.
    """
    match entry:
        case [str(path), int(size), int(head), str(text)] if re.fullmatch("[0-9a-f]{16}", text):
            return FileRecord(path=path, size=size, framing_bytes=head, framing_digest=int(text, 16))
        case [str(path), int(size), int(head), str(text), [int(count), offsets, sizes, str(table)]] if re.fullmatch(
            "[0-9a-f]{16}", text
        ) and 0 < count <= min(MAX_SHARDS, MIN_SHARD_BUDGET + len(table)):
            regions = tuple(
                zip(json_data.unpack_ints(offsets, count), json_data.unpack_ints(sizes, count), strict=True)
            )
            digests = unpack_digests(table, sum(count_blocks(nbytes) for _, nbytes in regions))
            return FileRecord(
                path=path,
                size=size,
                framing_bytes=head,
                framing_digest=int(text, 16),
                regions=regions,
                block_digests=digests,
            )
    raise FormatError("broken file record", found=str(entry)[:80])
