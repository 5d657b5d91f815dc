"""A flattened state as leaves: each array once, where it is, and who is the same as whom."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from xla_ckpt.arrays.base import ArrayAdapter
from xla_ckpt.arrays.registry import require
from xla_ckpt.plan.leaf import Leaf, leaf_of
from xla_ckpt.sharding.local_array import Local
from xla_ckpt.snapshot.take import HostShard
from xla_ckpt.state.placing import Layouts


@dataclass(frozen=True, slots=True)
class Placed:
    """An array, and where it lies."""

    value: Any
    local: Local
    adapter: ArrayAdapter


@dataclass(frozen=True, slots=True)
class Described:
    """The arrays of a state on this rank."""

    leaves: tuple[Leaf, ...]
    placed: Mapping[str, Placed]
    """The array of each leaf."""

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
    placed: dict[str, Placed] = {}
    aliases: dict[str, str] = {}
    leaves: list[Leaf] = []
    for path, value in arrays.items():
        adapter = require(value, path)
        dtype = adapter.dtype(value, path)
        identity = adapter.identity(value)
        if identity is not None and (same := first.setdefault(identity, path)) != path:
            aliases[path] = same
            continue
        local = layouts.local(path, value, adapter)
        placed[path] = Placed(value, local, adapter)
        leaves.append(leaf_of(path, dtype, local, together=path in together))
    return Described(tuple(leaves), placed, aliases)


def host_shards(placed: Mapping[str, Placed]) -> dict[tuple[str, int], HostShard]:
    """The bytes of all local shards, by (leaf path, shard). One batch for each kind of array."""
    batches: dict[int, tuple[ArrayAdapter, list[str]]] = {}
    for path, array in placed.items():
        batches.setdefault(id(array.adapter), (array.adapter, []))[1].append(path)
    shards: dict[tuple[str, int], HostShard] = {}
    for adapter, paths in batches.values():
        pairs = [(placed[p].value, placed[p].local) for p in paths]
        for path, held in zip(paths, adapter.host(pairs), strict=True):
            shards |= {(path, i): shard for i, shard in enumerate(held)}
    return shards
