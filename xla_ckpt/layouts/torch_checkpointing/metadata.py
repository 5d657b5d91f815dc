"""``metadata.pkl``: where the files of each item lie, and how its tensors were cut. It is a pickle of plain values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from xla_ckpt.errors import CorruptCheckpointError, UnsupportedStateError
from xla_ckpt.layouts.torch_checkpointing.tags import ITEMS_METADATA, file_of
from xla_ckpt.layouts.torch_save.restricted_pickle import loads
from xla_ckpt.layouts.torch_save.stand_ins import of_type, sizes_in
from xla_ckpt.sharding.mesh_cuts import MeshCut, MeshCutting, cutting_of
from xla_ckpt.tree.nested import Keys

VERSION_WRITTEN = "2.0"
"""The version of the file that is read and written here."""

FORMATS = {"TorchSerialization": "torch", "JsonSerialization": "json", "RawSerialization": "raw",
           "SafetensorsSerialization": "safetensors"}  # fmt: skip
"""What the package calls a form of a file -> what this folder does."""


@dataclass(frozen=True, slots=True)
class ItemMetadata:
    """What is said of an item."""

    files: Mapping[int, tuple[str, str]]
    """Rank -> (path, format) of its file."""

    cuttings: Mapping[int, Mapping[Keys, MeshCutting]] = field(default_factory=dict)
    """Rank -> how its tensors are cut, by the keys that lead to them."""


def said_of_items(data: bytes) -> dict[str, ItemMetadata]:
    """What such a file says, by item.

    Raises:
        CorruptCheckpointError: It is damaged.
        UntrustedObjectError: It names classes. Nothing of it has run.
        UnsupportedStateError: It is of another version.
    """
    content = loads(data, ITEMS_METADATA)
    try:
        if content["version"] != VERSION_WRITTEN:
            raise UnsupportedStateError(
                "metadata of another version are not read",
                file=ITEMS_METADATA,
                expected=VERSION_WRITTEN,
                found=content["version"],
            )
        return {of_type(str, item): _item(item, about) for item, about in content["metadata"].items()}
    except (LookupError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpointError(f"the metadata are damaged: {error}"[:300], file=ITEMS_METADATA) from error


def _item(item: str, about: Any) -> ItemMetadata:
    files = {_number(rank): _file(item, rank, layout) for rank, layout in about["rank_to_layout_info"].items()}
    cuttings: dict[int, dict[Keys, MeshCutting]] = {}
    for text, groups in about["nested_path_to_metadata"].items():
        keys = tuple(key if type(key) is int else of_type(str, key) for key in json.loads(text))
        for group in groups:
            sharding = group["sharding_metadata"]
            if sharding["type"] == "DTensorShardingMetadata":
                for rank in group["ranks"]:
                    cuttings.setdefault(_number(rank), {})[keys] = _cutting(sharding["data"], rank)
    return ItemMetadata(files, cuttings)


def _file(item: str, rank: int, layout: Any) -> tuple[str, str]:
    if layout is None:
        return file_of(item, rank), "torch"
    return of_type(str, layout["file_path"]), FORMATS[layout["serialization_format"]["type"]]


def _cutting(data: Any, rank: int) -> MeshCutting:
    """How the tensor of a rank was cut."""
    mesh = data["mesh_spec"]
    sizes, ranks = sizes_in(mesh["mesh_shape"]), sizes_in(mesh["mesh_data"])
    if len(ranks) != prod(sizes):
        raise ValueError("a mesh has not as many ranks as it has places")
    coordinate = tuple(int(index) for index in np.unravel_index(ranks.index(rank), sizes)) if sizes else ()
    placements = [
        MeshCut(None) if placement["type"] == "Replicate" else _shard(placement) for placement in data["placements"]
    ]
    names = mesh["mesh_dim_names"]
    called = None if names is None else tuple(of_type(str, name) for name in names)
    return cutting_of(sizes_in(data["global_shape"]), sizes, coordinate, placements, called)


def _shard(placement: Any) -> MeshCut:
    if placement["type"] not in ("Shard", "StridedShard"):
        raise ValueError("a placement of another kind")
    return MeshCut(_number(placement["dim"]), _number(placement.get("split_factor", 1)))


def _number(value: Any) -> int:
    return sizes_in([value])[0]
