"""From what a program gave to torch.save to the tree of a training state. Pure.

Model, optimizer and scheduler are found as in directories of torch.distributed.checkpoint. What is added here is what
only single files have: lists of optimizers, an optimizer that numbers its parameters, keys that are no text.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from xla_ckpt.layouts.parameter_numbers import with_names
from xla_ckpt.layouts.scanned import is_scanned_array
from xla_ckpt.layouts.smp.marks import STATE_DICT_MARKS
from xla_ckpt.layouts.training_state import training_state
from xla_ckpt.plan.hints import Hints
from xla_ckpt.tree import schema
from xla_ckpt.tree.module_metadata import module_metadata, with_metadata_of
from xla_ckpt.tree.nested import leaves

_LISTED = {"optimizer_states": "optimizer_states", "lr_schedulers": "lr_scheduler"}
"""Where Lightning has a list of all optimizers, and of all schedulers -> what the only one of them is called."""


@dataclass(frozen=True, slots=True)
class FileMembers:
    """What a file holds."""

    tree: Any
    """The tree of a training state; or what was saved, where nothing of one is recognised in it."""

    guessed: bool = False
    """Whether the numbers of the optimizer were named after the order of the model."""


def file_members(tree: Any, hints: Hints) -> FileMembers:
    """The members of the training state that a file holds.

    Args:
        tree: What was saved, with a record or an `UnknownArray` for each array.
    """
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        return FileMembers(tree)
    tree = _without_marks(tree)
    parts = training_state(_unlisted(tree), hints, is_scanned_array)
    if tree.keys() <= set(schema.MEMBERS):
        parts = _as_ours(tree, parts)
    return FileMembers(*with_names(parts, hints, guess=True))


def is_model_alone(tree: Any) -> bool:
    """Whether a file holds the state dict of a model and nothing else: arrays, and by its names none that is nested.

    Args:
        tree: As in `file_members`.
    """
    return (
        isinstance(tree, dict)
        and any(map(is_scanned_array, tree.values()))
        and not any(is_scanned_array(leaf) for v in tree.values() if not is_scanned_array(v) for leaf in leaves(v))
    )


def _without_marks(tree: dict[Any, Any]) -> dict[Any, Any]:
    """A tree without SageMaker model parallel's marks on state dicts, which are no names of a model's."""
    plain = (dict, collections.OrderedDict)
    members = {key: _without_marks(v) if type(v) in plain else v for key, v in tree.items()}
    if not STATE_DICT_MARKS.isdisjoint(members) and any(map(is_scanned_array, members.values())):
        members = {key: value for key, value in members.items() if key not in STATE_DICT_MARKS}
    if module_metadata(tree) is None and type(tree) is collections.OrderedDict:
        return collections.OrderedDict(members)
    return with_metadata_of(tree, members)


def _as_ours(tree: Mapping[str, Any], parts: dict[str, Any]) -> dict[str, Any]:
    """The parts of a state whose members are called as ours are: as such, and in the order of the file.

    One of them may have a structure that is not recognised: the state of an optimizer that is not torch's, say.
    """
    extras = dict(parts.get(schema.EXTRAS, {}))
    own = {name: extras.pop(name) for name in tree if name in extras and name not in parts}
    members = {**parts, **own, schema.EXTRAS: extras}
    if not extras and schema.EXTRAS not in tree:
        del members[schema.EXTRAS]
    return {name: members[name] for name in (*tree, *members) if name in members}


def _unlisted(tree: dict[str, Any]) -> dict[str, Any]:
    """The same state, with a dict in place of a list of only one optimizer, or of only one scheduler."""
    state = with_metadata_of(tree, dict(tree))
    for name, called in _LISTED.items():
        listed = tree.get(name)
        if (
            isinstance(listed, list)
            and len(listed) == 1
            and isinstance(listed[0], dict)
            and called not in state.keys() - {name}
        ):
            del state[name]
            state[called] = listed[0]
    return state
