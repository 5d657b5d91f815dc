"""State dict entries of a model: the partitions that own each, and its sharding over tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from neuron_compat.smp import job
from xla_ckpt import Mesh
from xla_ckpt.facade import (
    IS_PARTIAL,
    LOAD_INFO,
    LocalArray,
    ParsedRules,
    Sharding,
    find_sharding,
    get_declared_sharding,
)

Partitions = dict[str, int]
"""Module name, as in `named_modules` ("" is the model itself) -> its partition."""


@dataclass(frozen=True, slots=True)
class StateEntry:
    """Entry of a state dict."""

    name: str
    value: Any
    """Live tensor, or any other value."""
    owners: tuple[int, ...]
    """Partitions that own it: several if it is tied."""
    sharding: Sharding | None = None
    """Sharding of the global array; None if it is replicated on every tensor-parallel rank."""

    @property
    def is_tensor(self) -> bool:
        """True if it is a tensor."""
        return isinstance(self.value, torch.Tensor)

    @property
    def is_split(self) -> bool:
        """True if it is sharded over tensor-parallel ranks."""
        return self.sharding is not None and "tp" in self.sharding.axes

    def place(self, rank: int, shape: Sequence[int] | None = None) -> LocalArray:
        """Return the location of a rank's shard in the global array; `shape` replaces the shape of the value."""
        local = tuple(self.value.shape if shape is None else shape)
        return (self.sharding or Sharding()).map_local_shape(local, job.get_rank_info().mesh, rank)

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Global shape, without padding."""
        return self.place(job.rank()).shape


def find_entry_sharding(value: Any, name: str, mesh: Mesh, rules: ParsedRules = ()) -> Sharding | None:
    """Return the sharding of a parameter or buffer, from a rule or its own attributes.

    Raises:
        xla_ckpt.UnsupportedStateError: The attributes contradict each other, the value or the mesh.
    """
    rule = find_sharding(rules, f"model/{name}", name)
    sharding = get_declared_sharding(value, name, mesh) if rule is None else rule
    return sharding if sharding is not None and (sharding.shape is not None or any(sharding.dims)) else None


def list_state_entries(module: torch.nn.Module, partitions: Partitions, rules: ParsedRules = ()) -> list[StateEntry]:
    """Return the entries of a module's state dict, in its order.

    A parameter or buffer belongs to the partitions of all modules that it is registered in, under each of its names, as
    in SMP. Other values, such as the extra state of a module, belong to the module that their names begin with.
    """
    owners: dict[int, set[int]] = {}
    for name, part in module.named_modules():
        for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
            owners.setdefault(id(tensor), set()).add(find_partition(name, partitions))
    mesh = job.get_rank_info().mesh
    entries = []
    for name, value in module.state_dict(keep_vars=True).items():
        owning = tuple(sorted(owners.get(id(value), ()))) or (find_partition(name, partitions),)
        sharding = find_entry_sharding(value, name, mesh, rules) if isinstance(value, torch.Tensor) else None
        entries.append(StateEntry(name, value, owning, sharding))
    return entries


def find_partition(name: str, partitions: Partitions) -> int:
    """Return the partition of a module, or of an entry of it. A module that was added later belongs to its parent's.

    >>> find_partition("layers.0.weight", {"": 0, "layers.0": 1}), find_partition("head", {"": 0, "layers.0": 1})
    (1, 0)
    """
    while name not in partitions:
        name = name.rpartition(".")[0]
    return partitions[name]


def strip_smp_entries(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict without SMP's own entries."""
    return {name: value for name, value in state.items() if name not in (IS_PARTIAL, LOAD_INFO)}


def get_plain_spec(entry: StateEntry) -> list[Any]:
    """Return the sharding spec of an entry as plain lists, names and numbers, as in an xla_ckpt manifest."""
    plain: list[Any] = _convert_tuples_to_lists(entry.place(job.rank()).spec)
    return plain


def _convert_tuples_to_lists(value: Any) -> Any:
    """Convert tuples to lists, recursively."""
    return [_convert_tuples_to_lists(v) for v in value] if isinstance(value, tuple | list) else value
