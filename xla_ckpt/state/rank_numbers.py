"""What is loaded of the numbers that a model has for each rank of its job (see `xla_ckpt.plan.rank_numbers`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from xla_ckpt.arrays.torch_objects import is_torch_tensor
from xla_ckpt.plan.rank_numbers import axes_of_numbers, has_numbers, same_numbers
from xla_ckpt.sharding.mesh import Mesh
from xla_ckpt.state.loading import Stored
from xla_ckpt.state.problems import Problem
from xla_ckpt.tree import path as paths

if TYPE_CHECKING:
    import torch

_STAYS = "it says something of each rank of a job, and the ranks that saved were arranged otherwise: it stays as it is"


def unfit(stored: Stored, entries: Mapping[Any, Any]) -> dict[Any, Problem]:
    """The entries of a model whose numbers the ranks that saved cannot give to those of this job, with what is told."""
    saved, here = Mesh.parse(stored.manifest.mesh or ""), stored.shardings.placement.mesh
    problems = {}
    for key, value, path in _integers(stored, entries):
        adapter = stored.shardings.adapters.of(value)
        if adapter is None:
            continue  # a tensor that consists of several, such as a quantized one
        local = stored.shardings.local(path, value, adapter)
        axes = axes_of_numbers(adapter.dtype(value, path), local.shape, local.spec, here)
        record = stored.manifest.arrays.get(stored.manifest.aliases.get(path, path))
        fits = record is not None and record.shape == local.shape and same_numbers(axes, saved, here)
        if not fits and (axes or (record is not None and has_numbers(record, saved))):
            problems[key] = Problem(path, _STAYS, stays=True)
    return problems


def unwanted(stored: Stored, names: Iterable[Any]) -> set[Any]:
    """Which of these stored members of a model are numbers of the ranks that saved: this job has no place for them."""
    saved = Mesh.parse(stored.manifest.mesh or "")
    numbers = set()
    for name in names:
        path = paths.join(stored.prefix, paths.escape(str(name)))
        array = stored.manifest.unknown.get(path) or stored.manifest.arrays.get(path)
        if array is not None and has_numbers(array, saved):
            numbers.add(name)
    return numbers


def _integers(stored: Stored, entries: Mapping[Any, Any]) -> Iterator[tuple[Any, torch.Tensor, str]]:
    for key, value in entries.items():
        if is_torch_tensor(value) and not (value.is_floating_point() or value.is_complex()):
            yield key, value, paths.join(stored.prefix, paths.escape(str(key)))
