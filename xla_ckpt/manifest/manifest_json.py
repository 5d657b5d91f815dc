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
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from xla_ckpt.errors import CorruptCheckpointError, FormatError, UnsupportedVersionError
from xla_ckpt.manifest import intseq
from xla_ckpt.manifest.arrays_json import MAX_CELLS, form_json, member, parse_arrays, parse_arrays_1
from xla_ckpt.manifest.digest import block_count, digest, pack_digests, sealed, to_hex, unpack_digests, unsealed
from xla_ckpt.manifest.records import FORMAT_VERSION, FileRecord, Head, Manifest
from xla_ckpt.tree.json_object import json_object

HEAD_BYTES = 4096
"""The first line of a manifest is shorter than this."""

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
        "arrays": [form_json(manifest.arrays, number) for number in range(len(manifest.arrays.forms))],
        "aliases": dict(manifest.aliases),
        "objects": list(manifest.objects),
        "files": [file_json(f) for f in manifest.files],
        **({"module_metadata": _metadata_json(manifest.module_metadata)} if manifest.module_metadata else {}),
        **({} if manifest.retention is None else {"retention": manifest.retention}),
        **({} if manifest.parity is None else {"parity": manifest.parity}),
    }
    lines = [_first_line(replace(manifest.head, version=FORMAT_VERSION))]
    lines += [_dump(name) + b":" + _dump(value) for name, value in members.items()]
    return sealed(b",\n".join(lines))


def _metadata_json(by_path: Mapping[str, Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The metadata of modules as plain JSON: under each leaf path those that differ, and which of them a module has."""
    packed = {}
    for path, of_modules in by_path.items():
        numbers: dict[bytes, int] = {}
        modules = {name: numbers.setdefault(_dump(metadata), len(numbers)) for name, metadata in of_modules.items()}
        packed[path] = [[json.loads(text) for text in numbers], modules]
    return packed


def _parse_metadata(raw: Any) -> dict[str, dict[str, Any]]:
    by_path: dict[str, dict[str, Any]] = {}
    for path, packed in raw.items() if isinstance(raw, dict) else [("", raw)]:
        kinds, modules = packed if isinstance(packed, list) and len(packed) == 2 else (None, None)
        if not isinstance(kinds, list) or not isinstance(modules, dict) or not all(isinstance(k, dict) for k in kinds):
            raise FormatError("broken metadata of modules", leaf=path, found=str(packed)[:80])
        if not all(type(number) is int and 0 <= number < len(kinds) for number in modules.values()):
            raise FormatError("broken metadata of modules", leaf=path, found=str(modules)[:80])
        by_path[path] = {name: kinds[number] for name, number in modules.items()}
    return by_path


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
    version = member(raw, "version", int)
    if version > FORMAT_VERSION:
        raise UnsupportedVersionError(
            "the checkpoint was written by a newer version of this library",
            expected=f"format version {FORMAT_VERSION} or older",
            found=version,
            hint="Install a newer xla_ckpt.",
        )
    if version < 1:
        raise FormatError("unknown format version", found=version)
    sequence = member(raw, "sequence", int)
    if not 0 < sequence < intseq.LIMIT:
        raise FormatError("impossible commit sequence", found=sequence)
    return Head(
        tag=member(raw, "tag", str),
        sequence=sequence,
        pinned=member(raw, "pinned", bool),
        created=member(raw, "created", str),
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
        arrays = parse_arrays_1(member(raw, "arrays", dict), budget)
    else:
        arrays = parse_arrays(member(raw, "arrays", list), budget)
    aliases = member(raw, "aliases", dict)
    if not all(isinstance(target, str) for target in aliases.values()):
        raise FormatError("broken list of tied arrays")
    objects = member(raw, "objects", list)
    if not all(type(n) is int for n in objects):
        raise FormatError("broken list of objects")
    mesh = raw.get("mesh")
    if mesh is not None and not isinstance(mesh, str):
        raise FormatError("broken mesh", found=str(mesh)[:80])
    parity = raw.get("parity")
    if parity is not None and not isinstance(parity, str):
        raise FormatError("it does not say what the tag survives", found=str(parity)[:80])
    files = tuple(parse_file(entry) for entry in member(raw, "files", list))
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
        world=member(raw, "world", int),
        module_metadata=_parse_metadata(raw.get("module_metadata", {})),
        retention=raw.get("retention"),
        parity=parity,
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
