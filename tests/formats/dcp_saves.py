"""Directories that stock torch.distributed.checkpoint writes here and now, and their `.metadata` changed."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from xla_ckpt.core.checksum import BlockDigester, compute_digest
from xla_ckpt.core.manifest.manifest import FileRecord
from xla_ckpt.formats import digests
from xla_ckpt.formats.dcp.metadata import METADATA_FILE
from xla_ckpt.formats.digests import DIGESTS
from xla_ckpt.formats.tags import open_tag
from xla_ckpt.storage.resolve import open_store


def save(state: Mapping[str, Any], path: Path, **options: Any) -> Path:
    """Save with stock DCP, in one process; the directory."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it has deprecated parts of torch, and tells of the process group
        dcp.save(dict(state), storage_writer=dcp.FileSystemWriter(path, **options), no_dist=True)
    return path


def change(path: Path, edit: Callable[[Any], None]) -> None:
    """Change what `.metadata` says."""
    metadata = pickle.loads((path / METADATA_FILE).read_bytes())
    edit(metadata)
    (path / METADATA_FILE).write_bytes(pickle.dumps(metadata))


def add_digests(path: Path) -> Path:
    """Write the digests of all files beside `.metadata`; each region is the elements of one chunk. The directory."""
    regions: dict[str, set[tuple[int, int]]] = {}
    with open_tag(open_store(path.parent), path.name) as reader:
        for record in reader.manifest.arrays.values():
            for shard in record:
                name = reader.manifest.files[shard.file].path
                regions.setdefault(name, set()).add((shard.offset, shard.box.size * record.dtype.itemsize))
    records = []
    for file in sorted(p for p in path.iterdir() if p.name != DIGESTS):
        records.append(record_of(file.name, file.read_bytes(), sorted(regions.get(file.name, ()))))
    (path / DIGESTS).write_bytes(digests.dump_digests(records))
    return path


def record_of(name: str, data: bytes, regions: list[tuple[int, int]]) -> FileRecord:
    if not regions:
        return digests.make_file_record(name, data)
    blocks: list[int] = []
    rest, at = b"", 0
    for offset, nbytes in regions:
        digester = BlockDigester(nbytes)
        digester.update(memoryview(data)[offset : offset + nbytes])
        blocks += digester.digests
        rest += data[at:offset]
        at = offset + nbytes
    rest += data[at:]
    return FileRecord(
        path=name,
        size=len(data),
        framing_bytes=len(rest),
        framing_digest=compute_digest(rest),
        regions=tuple(regions),
        block_digests=tuple(blocks),
    )


def small() -> dict[str, Any]:
    """A state of one model, whose names are one letter, and a number."""
    return {"w": torch.arange(12.0).reshape(4, 3), "x": torch.arange(12.0).reshape(4, 3) + 50, "n": 7}
