"""PyTorch state dicts: module metadata and parameter names.

torch stores the metadata of modules (mainly the version of each) as the attribute ``_metadata`` of the OrderedDict that
`state_dict` returns: module -> a dict, which `load_state_dict` passes to `_load_from_state_dict` of the module.
Parameter names are matched without the prefixes of wrappers (DistributedDataParallel, torch.compile, FSDP). If an
optimizer numbers its parameters, `infer_parameter_names` finds their names if order and shapes allow only one choice.
"""

from __future__ import annotations

import collections
import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import groupby
from typing import Any

ASSIGN_KEY = "assign_to_params_buffers"
"""Key that torch's `load_state_dict` adds during a load."""


def get_module_metadata(value: Any) -> Mapping[str, Mapping[str, Any]] | None:
    """Return the metadata of a module's state dict, or None for any other value."""
    metadata = getattr(value, "_metadata", None)
    if not isinstance(metadata, Mapping):
        return None
    plain = all(isinstance(name, str) and isinstance(of, Mapping) for name, of in metadata.items())
    return metadata if plain else None


def attach_module_metadata(
    members: Mapping[Any, Any], metadata: Mapping[str, Mapping[str, Any]]
) -> collections.OrderedDict[Any, Any]:
    """Return a state dict with these members and metadata, as torch's `state_dict` does."""
    state: Any = collections.OrderedDict(members)
    state._metadata = collections.OrderedDict(metadata)
    return state  # type: ignore[no-any-return]


def copy_module_metadata(source: Any, members: dict[Any, Any]) -> dict[Any, Any]:
    """Return members derived from a state dict with its metadata attached, or unchanged if there is no metadata."""
    metadata = get_module_metadata(source)
    return members if metadata is None else attach_module_metadata(members, metadata)


def rename_module_metadata(
    metadata: Mapping[str, Mapping[str, Any]], names: Mapping[str, str]
) -> dict[str, Mapping[str, Any]]:
    """Return module metadata renamed to match renamed state dict members.

    Args:
        metadata: Metadata by module.
        names: Former name of each member -> its new name.

    >>> rename_module_metadata({"": {"version": 1}, "module": {"version": 2}}, {"module.weight": "weight"})
    {'': {'version': 2}}
    """
    new = {"": ""}  # with a dot before each name, so that the root module is a prefix of every name

    def called(module: str) -> str:
        if module not in new:
            above, _, own = module.rpartition(".")
            new[module] = f"{called(above)}.{own}"
        return new[module]

    for before, after in names.items():
        module, renamed = f".{before}".rpartition(".")[0], f".{after}".rpartition(".")[0]
        while module and new.setdefault(module, renamed) == renamed:
            above, _, own = module.rpartition(".")
            module, renamed = above, renamed.removesuffix(f".{own}")
            if module in new:
                break
    return {called(f".{name}" if name else "")[1:]: of for name, of in metadata.items()}


WRAPPER_MODULES = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Components of a name that represent a wrapper around the module: DistributedDataParallel, torch.compile, FSDP."""

RESERVED_WRAPPERS = WRAPPER_MODULES - {"module"}
"""Wrapper components that programs do not use as names of their own modules."""


def strip_wrappers(name: str, wrappers: Set[str] = WRAPPER_MODULES) -> str:
    """Return a name without the components of wrappers.

    >>> strip_wrappers("module._orig_mod.layers.0.weight")
    'layers.0.weight'
    """
    return ".".join(step for step in name.split(".") if step not in wrappers) if "mod" in name else name


def match_parameter_names(
    stored: Mapping[str, Any], wanted: Mapping[str, Any], wrappers: Set[str] = WRAPPER_MODULES
) -> dict[str, str]:
    """Return stored name -> the program's name of the same parameter.

    Equal names match. Names that are equal without wrappers also match, if they are unique on both sides.
    """
    same = {name: name for name in stored if name in wanted}
    stored_by_canonical = _index_unique_names((name for name in stored if name not in same), wrappers)
    by_canonical = _index_unique_names((name for name in wanted if name not in same), wrappers)
    return same | {
        stored_by_canonical[bare]: by_canonical[bare] for bare in stored_by_canonical if bare in by_canonical
    }


def _index_unique_names(names: Iterable[str], wrappers: Set[str]) -> dict[str, str]:
    """Map names without wrappers to names, where they are unique."""
    by_bare = sorted((strip_wrappers(name, wrappers), name) for name in names)
    groups = ((bare, [name for _, name in some]) for bare, some in groupby(by_bare, key=operator.itemgetter(0)))
    return {bare: some[0] for bare, some in groups if len(some) == 1}


def infer_parameter_names(
    groups: Sequence[Sequence[int]], shapes: Mapping[int, tuple[int, ...] | None], names: Mapping[str, tuple[int, ...]]
) -> dict[int, str] | None:
    """Return the names of numbered parameters if their order and shapes allow only one choice, otherwise None.

    A group contains its parameters in the order of the model, and each parameter is in one group. The model's order is
    therefore an interleaving of the groups. A parameter matches the next number of a group if their shapes are equal.

    Args:
        groups: Parameter numbers of each group.
        shapes: Local shape of each number, if known.
        names: Local shape of each parameter, in the order of the model.

    >>> names = {"a": (4, 4), "a.bias": (4,), "b": (4, 4)}
    >>> infer_parameter_names([[0, 2], [1]], {0: (4, 4), 1: (4,), 2: (4, 4)}, names)
    {2: 'b', 1: 'a.bias', 0: 'a'}
    """
    begin = (0,) * len(groups)
    steps: list[dict[tuple[int, ...], tuple[tuple[int, ...], int]]] = []
    ways = {begin: 1}  # used numbers of each group -> number of ways (2: two or more)
    for shape in names.values():
        after: dict[tuple[int, ...], int] = {}
        step: dict[tuple[int, ...], tuple[tuple[int, ...], int]] = {}
        for taken, count in ways.items():
            for n, group in enumerate(groups):
                if taken[n] < len(group) and shapes.get(group[taken[n]]) == shape:
                    now = (*taken[:n], taken[n] + 1, *taken[n + 1 :])
                    after[now] = min(2, after.get(now, 0) + count)
                    step[now] = (taken, n)
        if not after or len(after) > _MAX_STATES:
            return None
        ways = after
        steps.append(step)
    at = tuple(len(group) for group in groups)
    if ways.get(at) != 1:
        return None
    name_of = {}
    for name, step in zip(reversed(list(names)), reversed(steps), strict=True):
        at, n = step[at]
        name_of[groups[n][at[n]]] = name
    return name_of


_MAX_STATES = 10_000
"""Maximum number of partial interleavings before the search stops."""
