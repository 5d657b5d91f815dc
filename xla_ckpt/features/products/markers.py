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
"""File that marks an exported directory and records its tag."""

MAX_MARKER_BYTES = 1 << 16
"""Maximum number of bytes read from a marker."""


def write_marker(store: Store, name: str, fact: TagInfo, retention: Retention, get_name: Callable[[str], str]) -> None:
    """Write the marker of an exported directory, with its tag and the metrics that `retention` needs.

    The directory gets a sequence number above the other marked directories, whose names are `get_name` of
    their tags. The sequence number of the tag is not usable, because a run may have been restarted, or another run may
    export here too.

    Raises:
        CheckpointError: A metric cannot be read.
        OSError: The storage failed.
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
    """Delete the marked directories that a policy does not keep. `get_name` returns the directory name of a tag.

    Raises:
        OSError: The storage failed.
    """

    def retire(name: str) -> None:
        if store.object_store is not None:
            store.object_store.remove(name)
        elif store.file_system is not None:
            # With one rename, so that a partially deleted directory never has this name.
            remove_directory(store.file_system, move_to_trash(store.file_system, name))
            clean_root(store.file_system, name)

    retire_each(store, map(get_name, find_tags_to_delete(_list_marked(store, get_name), retention)), retire)


def _list_marked(store: Store, get_name: Callable[[str], str]) -> list[TagInfo]:
    """Return the retention inputs of marked directories with the names of their tags."""
    found = ((name, _read_marker(store, name)) for name in store.list_names())
    return [fact for name, fact in found if fact is not None and name == get_name(fact.tag)]


def _read_marker(store: Store, name: str) -> TagInfo | None:
    """Return the retention inputs in a directory's marker, or None if it is missing or corrupt."""
    try:
        about = json.loads(store.read_start(f"{name}/{MARKER_FILE}", MAX_MARKER_BYTES, links=False))
        metrics = {name: value if value is None else float(value) for name, value in about["metrics"].items()}
        return TagInfo(str(about["tag"]), int(about["sequence"]), created=str(about["created"]), metric=metrics.get)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        logger.warning("%s in %s is left alone: its mark is damaged: %s", name, store.path, error)
        return None
