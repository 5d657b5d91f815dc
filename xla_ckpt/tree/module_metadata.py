"""The metadata of modules that torch keeps beside a state dict: the version of each module, above all. Pure.

torch has them as the attribute ``_metadata`` of the OrderedDict that `state_dict` returns: module -> a dict, which
`load_state_dict` gives to `_load_from_state_dict` of the module.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

ASSIGNED = "assign_to_params_buffers"
"""What torch's `load_state_dict` adds for the time of a load."""


def module_metadata(value: Any) -> Mapping[str, Mapping[str, Any]] | None:
    """Return the metadata of a module's state dict; None for any other value."""
    metadata = getattr(value, "_metadata", None)
    if not isinstance(metadata, Mapping):
        return None
    plain = all(isinstance(name, str) and isinstance(of, Mapping) for name, of in metadata.items())
    return metadata if plain else None


def with_module_metadata(
    members: Mapping[Any, Any], metadata: Mapping[str, Mapping[str, Any]]
) -> collections.OrderedDict[Any, Any]:
    """Return a state dict of these members and metadata, as torch's `state_dict` does."""
    state: Any = collections.OrderedDict(members)
    state._metadata = collections.OrderedDict(metadata)
    return state  # type: ignore[no-any-return]


def with_metadata_of(value: Any, members: dict[Any, Any]) -> dict[Any, Any]:
    """Return members that were made of those of a state dict, with its metadata; as they are if it has none."""
    metadata = module_metadata(value)
    return members if metadata is None else with_module_metadata(members, metadata)


def renamed_metadata(
    metadata: Mapping[str, Mapping[str, Any]], names: Mapping[str, str]
) -> dict[str, Mapping[str, Any]]:
    """Return metadata under the names that modules have after members of a state dict were renamed.

    Args:
        metadata: By module.
        names: Former name of each member -> its name.

    >>> renamed_metadata({"": {"version": 1}, "module": {"version": 2}}, {"module.weight": "weight"})
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
