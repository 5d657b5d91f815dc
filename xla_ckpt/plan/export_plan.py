"""Which file of an export holds which array. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from xla_ckpt.dtypes import DType
from xla_ckpt.errors import UnsupportedStateError, UsageError
from xla_ckpt.format.manifest import Manifest
from xla_ckpt.format.payload import ALIGNMENT
from xla_ckpt.layout.box import Box
from xla_ckpt.tree import path as paths

SINGLE = "model.safetensors"
"""Name of the only file, where one is enough: Hugging Face's convention."""

INDEX = "model.safetensors.index.json"
"""Name of the list of files, where there are several."""


@dataclass(frozen=True, slots=True)
class Exported:
    """An array on its way to a file."""

    leaf: str
    name: str
    dtype: DType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return Box.whole(self.shape).size * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class ExportFile:
    """One safetensors file: a header, then whole arrays one after the other."""

    name: str
    arrays: tuple[Exported, ...]

    @property
    def header(self) -> bytes:
        """The first bytes of the file, up to where its data begins."""
        at, entries = 0, {}
        for array in self.arrays:
            entries[array.name] = {
                "dtype": array.dtype.safetensors, "shape": list(array.shape), "data_offsets": [at, at + array.nbytes],
            }  # fmt: skip
            at += array.nbytes
        text = json.dumps({"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % ALIGNMENT)
        return len(text).to_bytes(8, "little") + text

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(a.nbytes for a in self.arrays)


def plan_export(manifest: Manifest, part: str, max_shard_bytes: int) -> list[ExportFile]:
    """Deal the arrays of a part of a state (``model``) out to files, in their order. Shared arrays go once.

    Raises:
        UsageError: There is no array in that part, or the size makes no sense.
        UnsupportedStateError: An element type that safetensors has no name for, or two arrays of one name.
    """
    if max_shard_bytes < 1:
        raise UsageError("files of an export hold at least one byte", found=max_shard_bytes)
    arrays = []
    for leaf, record in manifest.arrays.items():
        if not paths.is_under(leaf, part) or leaf == part:
            continue
        below = paths.split(leaf)[len(paths.split(part)) :]
        name = ".".join(paths.unescape(component) for component in below)
        if record.dtype.safetensors is None:
            raise UnsupportedStateError(f"safetensors has no element type {record.dtype.name}", leaf=leaf)
        arrays.append(Exported(leaf, name, record.dtype, record.shape))
    if not arrays:
        raise UsageError("the checkpoint holds no arrays there", leaf=part)
    if len({a.name for a in arrays}) != len(arrays):
        raise UnsupportedStateError("two arrays would have the same name in the export", leaf=part)
    groups: list[list[Exported]] = [[]]
    for array in arrays:
        if groups[-1] and sum(a.nbytes for a in groups[-1]) + array.nbytes > max_shard_bytes:
            groups.append([])
        groups[-1].append(array)
    return [ExportFile(_name(i, len(groups)), _aligned(group)) for i, group in enumerate(groups)]


def _aligned(arrays: Sequence[Exported]) -> tuple[Exported, ...]:
    """Wide element types first, so that all are aligned."""
    return tuple(sorted(arrays, key=lambda a: -a.dtype.itemsize))


def _name(i: int, count: int) -> str:
    return SINGLE if count == 1 else f"model-{i + 1:05d}-of-{count:05d}.safetensors"


def index(files: Sequence[ExportFile]) -> bytes:
    """The list of files, as Hugging Face's loaders read it."""
    where = {a.name: f.name for f in files for a in f.arrays}
    content = {
        "metadata": {"total_size": sum(f.nbytes for f in files)},
        "weight_map": dict(sorted(where.items())),
    }
    return (json.dumps(content, indent=2) + "\n").encode()
