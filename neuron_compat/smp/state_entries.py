"""Entries of a model's state dict: the partitions that own each, and how it is split over tensor-parallel ranks."""

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
"""Name of a module, as `named_modules` has it ("" is the model itself) -> its partition."""


@dataclass(frozen=True, slots=True)
class StateEntry:
    """An entry of a state dict."""

    name: str
    value: Any
    """The live tensor, or any other value."""
    owners: tuple[int, ...]
    """The partitions that own it: several if it is tied."""
    sharding: Sharding | None = None
    """How it lies in the global array; None if every tensor-parallel rank has it whole."""

    @property
    def is_tensor(self) -> bool:
        """Whether it is a tensor."""
        return isinstance(self.value, torch.Tensor)

    @property
    def is_split(self) -> bool:
        """Whether tensor-parallel ranks hold different parts of it."""
        return self.sharding is not None and "tp" in self.sharding.axes

    def place(self, rank: int, shape: Sequence[int] | None = None) -> LocalArray:
        """Where a rank's part lies in the global array; `shape` is that of another part than the value's."""
        local = tuple(self.value.shape if shape is None else shape)
        return (self.sharding or Sharding()).map_local_shape(local, job.get_rank_info().mesh, rank)

    @property
    def global_shape(self) -> tuple[int, ...]:
        """The shape of the whole, without padding."""
        return self.place(job.rank()).shape


def find_entry_sharding(value: Any, name: str, mesh: Mesh, rules: ParsedRules = ()) -> Sharding | None:
    """How a parameter or buffer is split: as a rule says, or its own attributes.

    Raises:
        xla_ckpt.UnsupportedStateError: The attributes contradict each other, the value or the mesh.
    """
    rule = find_sharding(rules, f"model/{name}", name)
    sharding = get_declared_sharding(value, name, mesh) if rule is None else rule
    return sharding if sharding is not None and (sharding.shape is not None or any(sharding.dims)) else None


def list_state_entries(module: torch.nn.Module, partitions: Partitions, rules: ParsedRules = ()) -> list[StateEntry]:
    """The entries of a module's state dict, in its order.

    A parameter or buffer belongs to the partitions of all modules that it is registered in, under each of its names, as
    in SMP. Any other value, such as the extra state of a module, belongs to the module that its name begins with.
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
    """The partition of a module, or of the one that a name begins with. One that was added later goes with its parent.

    >>> find_partition("layers.0.weight", {"": 0, "layers.0": 1}), find_partition("head", {"": 0, "layers.0": 1})
    (1, 0)
    """
    while name not in partitions:
        name = name.rpartition(".")[0]
    return partitions[name]


def strip_smp_entries(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict without SMP's own entries."""
    return {name: value for name, value in state.items() if name not in (IS_PARTIAL, LOAD_INFO)}


def get_plain_spec(entry: StateEntry) -> list[Any]:
    """How an entry is split, as plain lists, names and numbers: the spec that a manifest of ours has."""
    plain: list[Any] = _convert_tuples_to_lists(entry.place(job.rank()).spec)
    return plain


def _convert_tuples_to_lists(value: Any) -> Any:
    """The same with lists in the place of tuples."""
    return [_convert_tuples_to_lists(v) for v in value] if isinstance(value, tuple | list) else value
