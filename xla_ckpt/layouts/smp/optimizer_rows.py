"""Optimizers whose states were dealt out by rows, as this library writes those of ZeRO-1 into files for each rdp rank.

SMP's own ``shard_optimizer_state`` deals out pieces of flat buffers, which only the job can find again. Such files have
nothing in common with these but their names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xla_ckpt.errors import CorruptCheckpointError
from xla_ckpt.layouts.by_rank.grid import RankAt
from xla_ckpt.layouts.smp.file_contents import NUMBERS
from xla_ckpt.layouts.smp.members import INNER, MASTERS
from xla_ckpt.layouts.smp.model import ADDED_KEY, SHAPES
from xla_ckpt.tree import schema

STORED_MASTERS = "sharded_master_weights"
"""Where the reader of optimizers looks for master weights, by number."""


def are_rows(parts: Mapping[RankAt, Mapping[Any, Any]]) -> bool:
    """Whether the parts of an optimizer hold rows of its states."""
    return any(_ours(tree.get(INNER, tree), SHAPES) is not None for tree in parts.values())


def of_rows(parts: Mapping[RankAt, Mapping[Any, Any]]) -> dict[RankAt, dict[str, Any]]:
    """One tree for each tp and rdp rank, of all pipeline stages, as the reader of ZeRO-1 optimizers takes them.

    Args:
        parts: What each part holds of the optimizer.

    Raises:
        CorruptCheckpointError: Some of the parts hold no rows.
    """
    trees: dict[RankAt, dict[str, Any]] = {}
    for at, tree in sorted(parts.items()):
        inner = tree.get(INNER, tree)
        shapes, groups, state = _ours(inner, SHAPES), inner.get(schema.GROUPS), inner.get(schema.STATE)
        if not isinstance(shapes, Mapping) or not isinstance(groups, list) or not isinstance(state, Mapping):
            raise CorruptCheckpointError(
                "some parts of the optimizer hold rows of its states, and others do not: they are of two saves",
                leaf=schema.OPTIMIZER,
                found=f"none at pp {at.pp}, tp {at.tp}, rdp {at.dp}",
            )
        merged = trees.setdefault(
            RankAt(tp=at.tp, dp=at.dp), {schema.STATE: {}, schema.GROUPS: groups, "base_state": {}, "shape_info": {}}
        )
        merged["base_state"] |= state
        merged["shape_info"] |= shapes
        if MASTERS in tree:
            merged.setdefault(STORED_MASTERS, {}).update(masters_by_number(tree) or {})
    return trees


def masters_by_number(tree: Mapping[Any, Any]) -> dict[int, Any] | None:
    """The master weights of a part by number; None if it does not say which numbers they have."""
    numbers, weights = _ours(tree, NUMBERS), tree.get(MASTERS)
    if not isinstance(numbers, list) or not isinstance(weights, list):
        return None
    groups = zip(numbers, weights, strict=False)
    return {
        n: weight
        for of_group, weights_of_group in groups
        for n, weight in zip(of_group, weights_of_group, strict=False)
    }


def _ours(tree: Mapping[Any, Any], key: str) -> Any:
    """What this library has noted in a file; None if it has not."""
    added = tree.get(ADDED_KEY)
    return added.get(key) if isinstance(added, Mapping) else None
