"""Export plan: distributes arrays over Hugging Face safetensors files, and builds the weight index."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from xla_ckpt.core.dtypes import DType
from xla_ckpt.core.files.file_layout import Region, RegionTable
from xla_ckpt.core.files.safetensors import SafetensorsFile, sort_regions
from xla_ckpt.core.manifest.manifest import Manifest
from xla_ckpt.core.plan.save_plan import FileEntry, FilePlan
from xla_ckpt.core.sharding.box import Box
from xla_ckpt.core.tree import path as paths
from xla_ckpt.errors import UnsupportedStateError, UsageError

SINGLE_FILE = "model.safetensors"
"""File name if one file suffices, by Hugging Face's convention."""

WEIGHT_INDEX_FILE = "model.safetensors.index.json"
"""Name of the weight index, if there are several files."""


@dataclass(frozen=True, slots=True)
class _ExportedArray:
    leaf: str
    region: Region
    cast: DType | None
    """Dtype in the file, if it differs from the stored one."""


def plan_export(manifest: Manifest, part: str, max_shard_bytes: int, dtype: DType | None = None) -> list[FilePlan]:
    """Distribute the arrays of one part of a state (``model``) over files, in their order. Tied arrays are written
    once.

    Args:
        manifest: Manifest of the checkpoint.
        part: Leaf path of the part.
        max_shard_bytes: Maximum bytes per file. A larger array is written to a separate file.
        dtype: Dtype of all floating-point arrays in the files, or None to keep each array's own.

    Raises:
        UsageError: The part contains no arrays, or `max_shard_bytes` is invalid.
        UnsupportedStateError: safetensors does not support a dtype, or two arrays have the same name.
    """
    if max_shard_bytes < 1:
        raise UsageError(
            "max_shard_bytes= (--max-shard-size) is no number of bytes", expected="at least 1", found=max_shard_bytes
        )
    arrays: list[_ExportedArray] = []
    for leaf, record in manifest.arrays.items():
        if not paths.is_under(leaf, part) or leaf == part:
            continue
        below = paths.split(leaf)[len(paths.split(part)) :]
        name = ".".join(paths.unescape(component) for component in below)
        cast = dtype if dtype is not None and record.dtype.is_floating and record.dtype != dtype else None
        written = cast or record.dtype
        if written.safetensors is None or (written.packed and not record.shape):
            raise UnsupportedStateError(f"safetensors has no element type {written.name} for it", leaf=leaf)
        arrays.append(_ExportedArray(leaf, Region(name, written, Box.from_shape(record.shape)), cast))
    if not arrays:
        hint = (
            "Name another part of it, or '' for all: export_hf(part=...) (xla-ckpt export --part). "
            f"Leaf paths of its arrays begin with: {paths.format_top_parts(manifest.arrays)}."
            if manifest.arrays
            else "It has plain values alone."
        )
        raise UsageError("the checkpoint holds no arrays there", leaf=part, hint=hint)
    if len({array.region.key for array in arrays}) != len(arrays):
        raise UnsupportedStateError("two arrays would have the same name in the export", leaf=part)
    groups: list[list[_ExportedArray]] = [[]]
    nbytes = 0
    for array in arrays:
        if groups[-1] and nbytes + array.region.nbytes > max_shard_bytes:
            groups.append([])
            nbytes = 0
        groups[-1].append(array)
        nbytes += array.region.nbytes
    return [_build_file_plan(_format_file_name(i, len(groups)), group) for i, group in enumerate(groups)]


def _build_file_plan(name: str, arrays: Sequence[_ExportedArray]) -> FilePlan:
    ordered = [arrays[i] for i in sort_regions([array.region for array in arrays])]
    codec = SafetensorsFile(RegionTable.from_regions([array.region for array in ordered]), is_plain=True)
    return FilePlan(
        path=name,
        layout=codec,
        entries=tuple(FileEntry(leaf=a.leaf, box=a.region.box, region=i, cast=a.cast) for i, a in enumerate(ordered)),
    )


def _format_file_name(i: int, count: int) -> str:
    return SINGLE_FILE if count == 1 else f"model-{i + 1:05d}-of-{count:05d}.safetensors"


def build_weight_index(files: Sequence[FilePlan]) -> bytes:
    """Return the weight index in Hugging Face's format."""
    regions = [(r, f.path) for f in files if isinstance(f.layout, SafetensorsFile) for r in f.layout.regions]
    content = {
        "metadata": {"total_size": sum(region.nbytes for region, _ in regions)},
        "weight_map": dict(sorted((region.key, path) for region, path in regions)),
    }
    return (json.dumps(content, indent=2) + "\n").encode()
