"""PyTorch state dicts: module metadata, and names of parameters.

torch stores the metadata of modules (above all the version of each) as the attribute ``_metadata`` of the OrderedDict
that `state_dict` returns: module -> a dict, which `load_state_dict` gives to `_load_from_state_dict` of the module.
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
"""What torch's `load_state_dict` adds for the time of a load."""


def get_module_metadata(value: Any) -> Mapping[str, Mapping[str, Any]] | None:
    """Return the metadata of a module's state dict; None for any other value."""
    metadata = getattr(value, "_metadata", None)
    if not isinstance(metadata, Mapping):
        return None
    plain = all(isinstance(name, str) and isinstance(of, Mapping) for name, of in metadata.items())
    return metadata if plain else None


def attach_module_metadata(
    members: Mapping[Any, Any], metadata: Mapping[str, Mapping[str, Any]]
) -> collections.OrderedDict[Any, Any]:
    """Return a state dict of these members and metadata, as torch's `state_dict` does."""
    state: Any = collections.OrderedDict(members)
    state._metadata = collections.OrderedDict(metadata)
    return state  # type: ignore[no-any-return]


def copy_module_metadata(source: Any, members: dict[Any, Any]) -> dict[Any, Any]:
    """Return members that were made of those of a state dict, with its metadata; as they are if it has none."""
    metadata = get_module_metadata(source)
    return members if metadata is None else attach_module_metadata(members, metadata)


def rename_module_metadata(
    metadata: Mapping[str, Mapping[str, Any]], names: Mapping[str, str]
) -> dict[str, Mapping[str, Any]]:
    """Return metadata under the names that modules have after members of a state dict were renamed.

    Args:
        metadata: By module.
        names: Former name of each member -> its name.

    >>> rename_module_metadata({"": {"version": 1}, "module": {"version": 2}}, {"module.weight": "weight"})
    {'': {'version': 2}}
    """
    new = {"": ""}  # with a dot before each name, so that what is around all modules is the start of each of them

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
"""Steps of a name that stand for a wrapper around the module: DistributedDataParallel, torch.compile, FSDP."""

RESERVED_WRAPPERS = WRAPPER_MODULES - {"module"}
"""Those of them that no program gives to a module of its own."""


def strip_wrappers(name: str, wrappers: Set[str] = WRAPPER_MODULES) -> str:
    """A name without the wrappers around the modules.

    >>> strip_wrappers("module._orig_mod.layers.0.weight")
    'layers.0.weight'
    """
    return ".".join(step for step in name.split(".") if step not in wrappers) if "mod" in name else name


def match_parameter_names(
    stored: Mapping[str, Any], wanted: Mapping[str, Any], wrappers: Set[str] = WRAPPER_MODULES
) -> dict[str, str]:
    """Stored name -> the program's name of the same parameter.

    Names that are equal are the same; so are those that are without wrappers, if only one of either side is.
    """
    same = {name: name for name in stored if name in wanted}
    stored_by_canonical = _index_unique_names((name for name in stored if name not in same), wrappers)
    by_canonical = _index_unique_names((name for name in wanted if name not in same), wrappers)
    return same | {
        stored_by_canonical[bare]: by_canonical[bare] for bare in stored_by_canonical if bare in by_canonical
    }


def _index_unique_names(names: Iterable[str], wrappers: Set[str]) -> dict[str, str]:
    """Canonical name -> name, where there is only one."""
    by_bare = sorted((strip_wrappers(name, wrappers), name) for name in names)
    groups = ((bare, [name for _, name in some]) for bare, some in groupby(by_bare, key=operator.itemgetter(0)))
    return {bare: some[0] for bare, some in groups if len(some) == 1}


def infer_parameter_names(
    groups: Sequence[Sequence[int]], shapes: Mapping[int, tuple[int, ...] | None], names: Mapping[str, tuple[int, ...]]
) -> dict[int, str] | None:
    """The names of the numbers of some groups, if the order and the shapes of the parameters leave only one choice.

    A group has its parameters in the order of the model, and each parameter is in one of them. So the model's order is
    that of the groups, mixed; a parameter fits to the next number of a group if their shapes are the same.

    Args:
        groups: The numbers of each group.
        shapes: Local shape of each number, where known.
        names: Local shape of each parameter, in the order of the model.

    >>> names = {"a": (4, 4), "a.bias": (4,), "b": (4, 4)}
    >>> infer_parameter_names([[0, 2], [1]], {0: (4, 4), 1: (4,), 2: (4, 4)}, names)
    {2: 'b', 1: 'a.bias', 0: 'a'}
    """
    begin = (0,) * len(groups)
    steps: list[dict[tuple[int, ...], tuple[tuple[int, ...], int]]] = []
    ways = {begin: 1}  # how many numbers of each group are taken -> in how many ways (2 stands for more)
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
"""Beyond so many possible beginnings nobody looks for the only end."""
