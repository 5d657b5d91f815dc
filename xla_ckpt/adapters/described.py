"""A flattened state as leaves: each array once, where it is, and who is the same as whom."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from xla_ckpt.adapters.base import ArrayAdapter
from xla_ckpt.adapters.layouts import Layouts
from xla_ckpt.adapters.registry import require
from xla_ckpt.layout.local import Local
from xla_ckpt.plan.leaf import Leaf, leaf_of
from xla_ckpt.snapshot.take import HostShard


@dataclass(frozen=True, slots=True)
class Described:
    """The arrays of a state on this rank."""

    leaves: tuple[Leaf, ...]
    values: Mapping[str, tuple[Any, Local]]
    """The array of each leaf, and where it lies."""

    aliases: Mapping[str, str]
    """Leaf path of a shared array -> leaf path under which it is described."""


def describe(arrays: Mapping[str, Any], layouts: Layouts, together: frozenset[str] = frozenset()) -> Described:
    """Describe the arrays of a flattened state.

    `together` names the leaves whose copies need not be equal (buffers): one rank writes all of such an array.

    Raises:
        UnsupportedStateError: One of them cannot be stored.
        UsageError: A sharding rule does not fit.
    """
    first: dict[Any, str] = {}
    values: dict[str, tuple[Any, Local]] = {}
    aliases: dict[str, str] = {}
    leaves: list[Leaf] = []
    for path, value in arrays.items():
        adapter = require(value, path)
        dtype = adapter.dtype(value, path)
        identity = adapter.identity(value)
        if identity is not None and (same := first.setdefault(identity, path)) != path:
            aliases[path] = same
            continue
        local = layouts.local(path, value)
        values[path] = value, local
        leaves.append(leaf_of(path, dtype, local, together=path in together))
    return Described(tuple(leaves), values, aliases)


def host_shards(values: Mapping[str, tuple[Any, Local]]) -> dict[tuple[str, int], HostShard]:
    """The bytes of all local shards, by (leaf path, shard). One batch for each kind of array."""
    batches: dict[int, tuple[ArrayAdapter, list[str]]] = {}
    for path, (value, _) in values.items():
        adapter = require(value, path)
        batches.setdefault(id(adapter), (adapter, []))[1].append(path)
    shards: dict[tuple[str, int], HostShard] = {}
    for adapter, paths in batches.values():
        for path, held in zip(paths, adapter.host([values[p] for p in paths]), strict=True):
            shards |= {(path, i): shard for i, shard in enumerate(held)}
    return shards
