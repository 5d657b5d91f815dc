"""What neuronx-distributed's `LoraModel` does to adapters and their configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xla_ckpt.layouts.by_rank.arrays import Copies
from xla_ckpt.layouts.by_rank.files import RankFiles
from xla_ckpt.layouts.by_rank.grid import RankAt
from xla_ckpt.manifest.records import UnknownArray
from xla_ckpt.plan.hints import ArrayHint
from xla_ckpt.sharding.mesh import Mesh
from xla_ckpt.tree.lora import LORA_CONFIG, lora_fields


def with_ordered_config(models: Mapping[RankAt, Any]) -> dict[RankAt, Any]:
    """The models of all ranks with their configurations of adapters in order, which else differ between ranks."""
    return {
        at: {**model, LORA_CONFIG: lora_fields(config)}
        if isinstance(config := model.get(LORA_CONFIG), Mapping)
        else model
        for at, model in models.items()
    }


def mixed_adapters(files: RankFiles, copies: Copies, mesh: Mesh, hint: ArrayHint) -> UnknownArray | None:
    """Why adapters of queries, keys and values cannot be read that `LoraModel` has joined; None if they can.

    It puts the rows of all ranks one behind the other in each file, and of more than one copy of the keys it keeps as
    many rows as one copy has, of the queries, too (`merge_sharded_lora`, which is its default).

    Raises:
        CorruptCheckpointError: A file is missing, or holds another tensor.
    """
    split = next((s for s in (hint.sharding.dims if hint.sharding else ()) if s is not None and s.named), None)
    if split is None or hint.ruled or mesh.tp == 1:
        return None
    first, *others = copies.values()
    if first.shape == hint.shape:
        spoilt = len(split.sections) > 1 or any(s.adjacent and s.copies < mesh.tp for s in split.sections)
        what_is_stored = "the rows of each rank one behind the other, and not all queries first"
    else:
        parted = any(s.copies < mesh.tp for s in split.sections)
        spoilt = parted and not files.zero(first) and all(files.same(first, other) for other in others)
        what_is_stored = "the same rows in the files of all ranks, which are those of the first ones"
    if not spoilt:
        return None
    return UnknownArray(
        problem="neuronx-distributed has joined the adapters of all ranks, and has not put them into their order",
        expected=f"parts as in {hint.sharding.spec if hint.sharding else None}",
        found=what_is_stored,
        hint="Save them apart, with merge_sharded_lora=False in LoraConfig, or with this library.",
    )
