"""What DCP calls the parts of a state: the keys that its planners make of nested dicts and lists.

A key is the path to a value, joined by dots. Dicts are walked into, and lists that hold a dict or an array; any other
value is one item: ``optimizer.param_groups.0.betas``. (torch/distributed/checkpoint/_traverse.py, 2.4 to 2.15.)

Stock DCP would pickle a tuple that holds an array as a whole. Here it is walked into as a list is, and other containers
of arrays as dicts are, so that their arrays are stored as arrays.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace

from xla_ckpt.errors import UnsupportedStateError
from xla_ckpt.layouts.dcp.metadata import KeyPath
from xla_ckpt.tree import path as paths
from xla_ckpt.tree import schema
from xla_ckpt.tree.codec import Json
from xla_ckpt.tree.flatten import component
from xla_ckpt.tree.skeleton import children, is_array, is_object


@dataclass(frozen=True, slots=True)
class Item:
    """A value that DCP stores under a key."""

    path: KeyPath
    leaf: str
    """Leaf path of the value."""

    part: Json
    """What stands there in the skeleton."""

    @property
    def key(self) -> str:
        """What DCP calls it."""
        return ".".join(map(str, self.path))


def items(skeleton: Json, *, flat: bool = False) -> list[Item]:
    """All values of a state.

    With `flat` they are called as torchtitan has them. The model has no name of its own, and so its keys are those of
    ``model.state_dict()``. The optimizer is one dict as ``StateDictOptions(flatten_optimizer_state_dict=True)`` makes
    it: each parameter has the options of its group. The scheduler is called ``lr_scheduler``.

    Raises:
        UnsupportedStateError: DCP would call two of them the same.

    >>> [item.key for item in items({"model": {"a.w": {"$array": "torch"}}, "groups": [{"lr": 1, "params": ["a"]}]})]
    ['model.a.w', 'groups.0.lr', 'groups.0.params']
    """
    by_key: dict[str, Item] = {}
    for item in _flattened(skeleton) if flat else _below(skeleton, (), paths.ROOT):
        if (other := by_key.setdefault(item.key, item)) is not item:
            raise UnsupportedStateError(
                f"torch.distributed.checkpoint would call this {item.key!r}, as it would {other.leaf}",
                leaf=item.leaf,
                hint="Rename one of the two, or save in another layout.",
            )
    return list(by_key.values())


def _flattened(skeleton: Json) -> Iterator[Item]:
    """The values of a state, called as torchtitan has them."""
    for item in _below(skeleton, (), paths.ROOT):
        match item.path:
            case (schema.MODEL, *rest) if rest:
                yield replace(item, path=tuple(rest))
            case (schema.OPTIMIZER, schema.STATE, *rest) if rest:
                yield replace(item, path=(schema.OPTIMIZER, ".".join(map(str, (schema.STATE, *rest)))))
            case (schema.OPTIMIZER, schema.GROUPS, int(number), *rest):
                called = skeleton[schema.OPTIMIZER][schema.GROUPS][number][schema.PARAMS]
                for name in called if rest != [schema.PARAMS] else ():
                    yield replace(item, path=(schema.OPTIMIZER, ".".join(map(str, (schema.GROUPS, name, *rest)))))
            case (schema.SCHEDULER, *rest):
                yield replace(item, path=("lr_scheduler", *rest))
            case (schema.EXTRAS, *rest) if rest:
                yield replace(item, path=tuple(rest))
            case _:
                yield item


def _below(part: Json, path: KeyPath, leaf: str) -> Iterator[Item]:
    members = None if is_array(part) else _members(part)
    if members is None:
        # The state itself may be one value. DCP knows only dicts, so it gets a name there.
        yield Item(path or ("value",), leaf, part)
        return
    for key, below, child in members:
        yield from _below(child, (*path, key), paths.join(leaf, below))


def _members(part: Json) -> list[tuple[str | int, str, Json]] | None:
    """(key, path component, part) of what a container holds; None for a value that is one item."""
    below = children(part)
    if below is None:
        return None
    if isinstance(part, list):
        return None if _is_one_item(part) else [(i, str(i), child) for i, child in enumerate(part)]
    wrapped = next(iter(part)) if len(part) == 1 and next(iter(part)).startswith("$") else ""
    if not wrapped:
        return [(key, paths.escape(key), child) for key, child in part.items()]
    body = part[wrapped][1] if wrapped == "$defaultdict" else part[wrapped]
    if wrapped in _DICTS:
        return [(_text(key), component(key), child) for key, child in body]
    if not any(map(_holds_array, below.values())):
        return None
    if all(name.isdigit() for name in below):
        return [(int(name), name, child) for name, child in below.items()]
    return [(paths.unescape(name), name, child) for name, child in below.items()]


_DICTS = frozenset({"$dict", "$OrderedDict", "$Counter", "$defaultdict"})


def _text(key: Json) -> str:
    """A key of a dict as DCP spells it: as ``str`` does.

    >>> _text({"$tuple": [1, {"$tuple": ["a"]}]})
    "(1, ('a',))"
    """
    return _repr(key) if isinstance(key, dict) else str(key)


def _repr(key: Json) -> str:
    if not isinstance(key, dict):
        return repr(key)
    if "$tuple" not in key:
        return json.dumps(key)
    members = [_repr(member) for member in key["$tuple"]]
    return f"({members[0]},)" if len(members) == 1 else f"({', '.join(members)})"


def _is_one_item(values: list[Json]) -> bool:
    """Whether a list is stored as one value: nothing in it has a key of its own."""
    return not any(is_array(v) or is_object(v) or _members(v) is not None for v in values)


def _holds_array(part: Json) -> bool:
    if is_array(part) or is_object(part):
        return True
    return any(map(_holds_array, (children(part) or {}).values()))
