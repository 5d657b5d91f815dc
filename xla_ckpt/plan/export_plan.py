"""Which file of an export holds which array. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from xla_ckpt.dtypes import DType
from xla_ckpt.errors import UnsupportedStateError, UsageError
from xla_ckpt.files.regions import Region, Regions
from xla_ckpt.files.safetensors import Safetensors, file_order
from xla_ckpt.manifest.records import Manifest
from xla_ckpt.plan.file_plan import Entry, FilePlan
from xla_ckpt.sharding.box import Box
from xla_ckpt.tree import path as paths

SINGLE = "model.safetensors"
"""Name of the only file, where one is enough: Hugging Face's convention."""

WEIGHT_INDEX = "model.safetensors.index.json"
"""Name of the list of files, where there are several."""


@dataclass(frozen=True, slots=True)
class _Array:
    leaf: str
    region: Region
    cast: DType | None
    """The type that it is written in, if it is stored in another one."""


def plan_export(manifest: Manifest, part: str, max_shard_bytes: int, dtype: DType | None = None) -> list[FilePlan]:
    """Deal the arrays of a part of a state (``model``) out to files, in their order. Shared arrays go once.

    Args:
        manifest: What is stored.
        part: Leaf path of the part.
        max_shard_bytes: A further file is begun when one would grow beyond this.
        dtype: The element type of all floating-point arrays in the files; None leaves each as it is.

    Raises:
        UsageError: There is no array in that part, or the size makes no sense.
        UnsupportedStateError: An element type that safetensors has no name for, or two arrays of one name.
    """
    if max_shard_bytes < 1:
        raise UsageError(
            "max_shard_bytes= (--max-shard-size) is no number of bytes", expected="at least 1", found=max_shard_bytes
        )
    arrays: list[_Array] = []
    for leaf, record in manifest.arrays.items():
        if not paths.is_under(leaf, part) or leaf == part:
            continue
        below = paths.split(leaf)[len(paths.split(part)) :]
        name = ".".join(paths.unescape(component) for component in below)
        cast = dtype if dtype is not None and record.dtype.floating and record.dtype != dtype else None
        written = cast or record.dtype
        if written.safetensors is None or (written.packed and not record.shape):
            raise UnsupportedStateError(f"safetensors has no element type {written.name} for it", leaf=leaf)
        arrays.append(_Array(leaf, Region(name, written, Box.whole(record.shape)), cast))
    if not arrays:
        hint = (
            "Name another part of it, or '' for all: export_hf(part=...) (xla-ckpt export --part). "
            f"Leaf paths of its arrays begin with: {paths.tops(manifest.arrays)}."
            if manifest.arrays
            else "It has plain values alone."
        )
        raise UsageError("the checkpoint holds no arrays there", leaf=part, hint=hint)
    if len({array.region.name for array in arrays}) != len(arrays):
        raise UnsupportedStateError("two arrays would have the same name in the export", leaf=part)
    groups: list[list[_Array]] = [[]]
    nbytes = 0
    for array in arrays:
        if groups[-1] and nbytes + array.region.nbytes > max_shard_bytes:
            groups.append([])
            nbytes = 0
        groups[-1].append(array)
        nbytes += array.region.nbytes
    return [_file(_name(i, len(groups)), group) for i, group in enumerate(groups)]


def _file(name: str, arrays: Sequence[_Array]) -> FilePlan:
    ordered = [arrays[i] for i in file_order([array.region for array in arrays])]
    codec = Safetensors(Regions.of([array.region for array in ordered]), plain=True)
    return FilePlan(
        path=name,
        codec=codec,
        entries=tuple(Entry(leaf=a.leaf, box=a.region.box, region=i, cast=a.cast) for i, a in enumerate(ordered)),
    )


def _name(i: int, count: int) -> str:
    return SINGLE if count == 1 else f"model-{i + 1:05d}-of-{count:05d}.safetensors"


def index(files: Sequence[FilePlan]) -> bytes:
    """The list of files, as Hugging Face's loaders read it."""
    regions = [(r, f.path) for f in files if isinstance(f.codec, Safetensors) for r in f.codec.regions]
    content = {
        "metadata": {"total_size": sum(region.nbytes for region, _ in regions)},
        "weight_map": dict(sorted((region.name, path) for region, path in regions)),
    }
    return (json.dumps(content, indent=2) + "\n").encode()
