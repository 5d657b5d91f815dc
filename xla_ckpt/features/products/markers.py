"""Marker files in directories exported from tags, and retention of those directories.

Retention deletes only directories with a marker, which records the tag and the metrics that a policy needs.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable

from xla_ckpt.logs import get_logger
from xla_ckpt.storage.base import Store, open_unlocked, write_file
from xla_ckpt.tags.directory_operations import clean_root, move_to_trash, remove_directory, retire_each
from xla_ckpt.tags.retention import BestN, EveryNSteps, Retention, TagInfo, find_tags_to_delete

logger = get_logger(__name__)

MARKER_FILE = "xla_ckpt.json"
"""The file by which such a directory is known. It says of which tag it was made."""

MAX_MARKER_BYTES = 1 << 16
"""No more bytes of a mark are read."""


def write_marker(store: Store, name: str, fact: TagInfo, retention: Retention, get_name: Callable[[str], str]) -> None:
    """Say in a directory of which tag it was made, and what `retention` will have to know of that tag.

    It is the newest of those whose names are `get_name` of their tags: the number of the tag's commit says nothing
    where a run has begun anew, or another one has its products here, too.

    Raises:
        CheckpointError: A number cannot be read.
        OSError: The storage refused.
    """
    metrics = {part.metric: fact.metric(part.metric) for part in retention.parts if isinstance(part, BestN)}
    if any(isinstance(part, EveryNSteps) for part in retention.parts):
        metrics |= {"step": fact.step}
    sequence = 1 + max((other.sequence for other in _list_marked(store, get_name)), default=0)
    about = {"tag": fact.tag, "sequence": sequence, "created": fact.created, "metrics": metrics}
    with contextlib.closing(open_unlocked(store, name)) as directory:
        write_file(directory, MARKER_FILE, json.dumps(about).encode())
        directory.sync()


def retire_marked(store: Store, get_name: Callable[[str], str], retention: Retention) -> None:
    """Delete the marked directories that a policy does not keep. `get_name` says how that of a tag is called.

    Raises:
        OSError: The storage refused.
    """

    def retire(name: str) -> None:
        if store.object_store is not None:
            store.object_store.remove(name)
        elif store.file_system is not None:
            # By one rename: nobody is to find a half of it under its name.
            remove_directory(store.file_system, move_to_trash(store.file_system, name))
            clean_root(store.file_system, name)

    retire_each(store, map(get_name, find_tags_to_delete(_list_marked(store, get_name), retention)), retire)


def _list_marked(store: Store, get_name: Callable[[str], str]) -> list[TagInfo]:
    """What the marks say of the directories that have the names of their tags."""
    found = ((name, _read_marker(store, name)) for name in store.list_names())
    return [fact for name, fact in found if fact is not None and name == get_name(fact.tag)]


def _read_marker(store: Store, name: str) -> TagInfo | None:
    """What the mark of a directory says; None if there is none."""
    try:
        about = json.loads(store.read_start(f"{name}/{MARKER_FILE}", MAX_MARKER_BYTES, links=False))
        metrics = {name: value if value is None else float(value) for name, value in about["metrics"].items()}
        return TagInfo(str(about["tag"]), int(about["sequence"]), created=str(about["created"]), metric=metrics.get)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        logger.warning("%s in %s is left alone: its mark is damaged: %s", name, store.path, error)
        return None
