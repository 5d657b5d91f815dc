"""orbax's directories in a root directory. Looks at names and time stamps only, and needs no framework.

A step of a `CheckpointManager` is ``<root>/<step>/<item>/``, where one item or several lie; a `Checkpointer` makes a
single item. An item of arrays has the file ``_METADATA``. Steps are complete when they have their name: until then
``.orbax-checkpoint-tmp`` is a part of it. A run of MaxText's keeps its steps in ``<run>/checkpoints/``, so they are the
tags of the run, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence

from xla_ckpt.errors import CorruptCheckpointError
from xla_ckpt.layouts.foreign_tags import by_numbers, time_text
from xla_ckpt.storage.base import Store
from xla_ckpt.tags.entry import TREE_METADATA, TagEntry
from xla_ckpt.tags.listing import ORBAX_METADATA, orbax_member
from xla_ckpt.tags.names import TMP_SUFFIX, is_tag_name

OCDBT = "manifest.ocdbt"
"""The index of an item whose arrays lie together in one database. Older versions of orbax wrote it alone."""

_OF_PROCESS = "ocdbt.process_"
"""Begins the name of what one process wrote of an item: it is a database, too, and holds a part of the arrays."""


_MAX_SHOWN = 5
"""Names of items that an error has."""

_STEPS = "checkpoints"
"""Where a run of MaxText's has its steps (`checkpoint_dir` in its `configs/types.py`)."""


def find_orbax_tag(store: Store, tag: str) -> TagEntry | None:
    """The checkpoint of orbax's that has this name, complete or not; None if there is none."""
    if not _may_be_named(tag):
        return None
    places = (tag, f"{_STEPS}/{tag}") if is_step(tag) else (tag,)
    return next((entry for place in places if (entry := _entry_at(store, tag, place)) is not None), None)


def _entry_at(store: Store, tag: str, directory: str) -> TagEntry | None:
    damage = None
    try:
        if not _is_item(store, directory):  # only then is each name in it asked for: an object store counts requests
            inside = (f"{directory}/{name}" for name in store.names(directory) if _may_be_named(name))
            has_items = any(store.is_directory(name) and _is_below(store, name) for name in inside)
            damage = _without_items(store, tag, directory)
            if damage is None and not has_items:
                return None
        time = store.modified(f"{directory}/{ORBAX_METADATA}") or store.modified(directory)
    except OSError:
        return None
    created = time_text(time or 0)
    return TagEntry(tag=tag, created=created, directory=directory, complete=damage is None, damage=damage)


def _without_items(store: Store, tag: str, directory: str) -> CorruptCheckpointError | None:
    """What is wrong with a step that lacks items of arrays: its own record says which it was saved with; None if none.

    The managers of orbax's take such a step for a good one, as after a copy that was cut off.
    """
    handlers = orbax_member(store, directory, "item_handlers")
    items = sorted(item for item, handler in handlers.items() if is_tag_name(item) and _is_of_arrays(handler))
    lost = [item for item in items if not _is_item(store, f"{directory}/{item}")]
    if not lost:
        return None
    none = "none of the" if lost == items else "not all"
    return CorruptCheckpointError(
        f"a step of orbax's has {none} items of arrays that it was saved with",
        path=store.path,
        tag=tag,
        file=f"{lost[0]}/{TREE_METADATA}",
        expected=f"the items {', '.join(items[:_MAX_SHOWN])}" if items[1:] else f"the item {items[0]}",
        hint="A copy was cut off, or somebody has removed them. Copy the step anew, or take another one.",
    )


def _is_of_arrays(handler: object) -> bool:
    """Whether orbax's name of the class that wrote an item is that of a class for trees of arrays.

    >>> _is_of_arrays("orbax.checkpoint._src.handlers.standard_checkpoint_handler.StandardCheckpointHandler")
    True
    >>> _is_of_arrays("orbax.checkpoint._src.handlers.json_checkpoint_handler.JsonCheckpointHandler")
    False
    """
    return isinstance(handler, str) and handler.rpartition(".")[2].startswith(("Standard", "PyTree"))


def is_step(tag: str) -> bool:
    """Whether a manager of orbax's may take this for the name of a step, given its options.

    They are ``step_prefix``, which an underscore follows, and ``step_format_fixed_length``, which is about zeros before
    the number. (orbax/checkpoint/_src/path/step.py, 0.12)

    >>> is_step("100"), is_step("step_0100"), is_step("best"), is_step("step100")
    (True, True, False, False)
    """
    prefix, _, number = tag.rpartition("_")
    return number.isdecimal() and number.isascii() and (bool(prefix) or tag == number)


def _may_be_named(name: str) -> bool:
    """Whether a finished checkpoint, or an item, may have this name."""
    return TMP_SUFFIX not in name and not name.startswith(_OF_PROCESS)


def _is_item(store: Store, directory: str) -> bool:
    return store.has(f"{directory}/{TREE_METADATA}") or store.has(f"{directory}/{OCDBT}")


def _is_below(store: Store, directory: str) -> bool:
    """Whether a directory is an item of the checkpoint that it lies in; else it may be one by itself, in its root."""
    return _is_item(store, directory) and not store.has(f"{directory}/{ORBAX_METADATA}")


def orbax_tags(store: Store, names: Iterable[str]) -> list[TagEntry]:
    """The complete checkpoints among some names, oldest first: steps are ordered by their numbers."""
    names = {*names}
    if _STEPS in names:
        with contextlib.suppress(OSError):  # it is a file, or somebody else's
            names |= {name for name in store.names(_STEPS) if is_step(name)}
    entries = (find_orbax_tag(store, name) for name in names)
    return by_numbers(entry for entry in entries if entry is not None and entry.complete)


def items_of(files: Sequence[str]) -> list[str]:
    """The items of arrays in a checkpoint whose files these are; ``""`` is the checkpoint itself.

    >>> items_of(["state/_METADATA", "state/d/0a", "meta/metadata"])
    ['state']
    """
    heads = {path.rpartition("/")[0] for path in files if path.rpartition("/")[2] in (TREE_METADATA, OCDBT)}
    return [""] if "" in heads else sorted(head for head in heads if "/" not in head and _may_be_named(head))


def missing_metadata(files: Sequence[str]) -> list[str]:
    """The files ``_METADATA`` that items in such a checkpoint lack.

    >>> missing_metadata(["state/manifest.ocdbt", "state/d/0a", "other/_METADATA"])
    ['state/_METADATA']
    """
    wanted = [f"{item}/{TREE_METADATA}".lstrip("/") for item in items_of(files)]
    return [file for file in wanted if file not in files]


def json_items_of(files: Sequence[str]) -> list[str]:
    """The items in such a checkpoint that are JSON, as `JsonSave` writes them.

    >>> json_items_of(["state/_METADATA", "state/d/0a", "meta/metadata"])
    ['meta']
    """
    heads = {head for path in files for head, _, name in [path.rpartition("/")] if name == "metadata"}
    return sorted(head for head in heads if head and "/" not in head)
