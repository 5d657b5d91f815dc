"""Names of parameters, with and without the steps of what wraps their modules. Pure."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Set
from itertools import groupby
from typing import Any

WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Steps of a name that stand for a wrapper around the module: DistributedDataParallel, torch.compile, FSDP."""

UNMISTAKABLE = WRAPPERS - {"module"}
"""Those of them that no program gives to a module of its own."""


def canonical(name: str, wrappers: Set[str] = WRAPPERS) -> str:
    """A name without the wrappers around the modules.

    >>> canonical("module._orig_mod.layers.0.weight")
    'layers.0.weight'
    """
    return ".".join(step for step in name.split(".") if step not in wrappers) if "mod" in name else name


def program_names(
    stored: Mapping[str, Any], wanted: Mapping[str, Any], wrappers: Set[str] = WRAPPERS
) -> dict[str, str]:
    """Stored name -> the program's name of the same parameter.

    Names that are equal are the same; so are those that are without wrappers, if only one of either side is.
    """
    same = {name: name for name in stored if name in wanted}
    stored_by_canonical = _unique((name for name in stored if name not in same), wrappers)
    by_canonical = _unique((name for name in wanted if name not in same), wrappers)
    return same | {
        stored_by_canonical[bare]: by_canonical[bare] for bare in stored_by_canonical if bare in by_canonical
    }


def _unique(names: Iterable[str], wrappers: Set[str]) -> dict[str, str]:
    """Canonical name -> name, where there is only one."""
    by_bare = sorted((canonical(name, wrappers), name) for name in names)
    groups = ((bare, [name for _, name in some]) for bare, some in groupby(by_bare, key=operator.itemgetter(0)))
    return {bare: some[0] for bare, some in groups if len(some) == 1}
