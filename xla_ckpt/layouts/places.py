"""Where something lies in what a program nested. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xla_ckpt.tree.nested import Keys

MODEL_NAMES = ("model", "model_state_dict", "model_state", "state_dict", "module", "net")
"""What a model's state dict is called, the likeliest first."""

OPTIMIZER_NAMES = (
    "optimizer",
    "optimizer_state_dict",
    "optimizer_state",
    "optimizer_states",
    "optim",
    "optim_state_dict",
)
"""What an optimizer's state dict is called, where there are several of them."""

SCHEDULER_NAMES = ("scheduler", "lr_scheduler", "scheduler_state_dict", "lr_scheduler_state_dict", "sched")
"""What a scheduler's state dict is called, the likeliest first."""

MAX_NESTING = 3
"""How deep in a state dict a model or an optimizer is looked for."""


@dataclass(frozen=True, slots=True)
class DictAt:
    """A dict somewhere in a state."""

    path: Keys
    members: Mapping[str, Any]
    keys: tuple[str, ...] | None = None
    """Which members of the dict there are meant; None: all of them."""

    @property
    def taken(self) -> set[Keys]:
        """The paths of what is meant."""
        return {self.path} if self.keys is None else {(*self.path, key) for key in self.keys}

    @property
    def name(self) -> str:
        """What it is called."""
        return ".".join(map(str, self.path)) or "the state itself"


def places_in(tree: Mapping[str, Any], path: Keys = ()) -> Iterator[DictAt]:
    """The dicts in a state, those further up first within their branch. Those with other keys than texts are values."""
    yield DictAt(path, tree)
    if len(path) < MAX_NESTING:
        for key, value in tree.items():
            if has_names(value):
                yield from places_in(value, (*path, key))


def is_below(path: Keys, others: Collection[Keys]) -> bool:
    """Whether a path is one of others, or lies below one."""
    return any(path[:n] in others for n in range(len(path) + 1))


def has_names(value: Any) -> bool:
    """Whether a value is a container of a state: a dict whose keys are all texts."""
    return isinstance(value, dict) and all(type(key) is str for key in value)


def without_paths(tree: Mapping[Any, Any], paths: Collection[Sequence[Any]]) -> dict[Any, Any]:
    """What lies in a tree of dicts beside some members, whose paths these are; dicts that are empty then are left out.

    >>> without_paths({"a": {"b": 1, "c": 2}, "d": {"e": 3}, "f": {}}, [("a", "b"), ("d", "e")])
    {'a': {'c': 2}, 'f': {}}
    """
    below: dict[Any, list[Sequence[Any]]] = {}
    for path in paths:
        below.setdefault(path[0], []).append(path[1:])
    others: dict[Any, Any] = {}
    for key, value in tree.items():
        if key not in below or not isinstance(value, Mapping):
            if key not in below or all(below[key]):
                others[key] = value
        elif all(below[key]) and (members := without_paths(value, below[key])):
            others[key] = members
    return others


def best(places: Sequence[DictAt], score: Callable[[DictAt], int]) -> list[DictAt]:
    """Those that score highest, none of which is nothing."""
    scores = [score(place) for place in places]
    highest = max(scores, default=0)
    return [place for place, n in zip(places, scores, strict=True) if n == highest and highest]
