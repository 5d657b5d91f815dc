"""Directories that were made of tags and are none themselves: each is marked, so that retention takes no other one."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable

from xla_ckpt.logs import get_logger
from xla_ckpt.storage.base import Store, directory_in
from xla_ckpt.storage.small_files import write_small
from xla_ckpt.tags.cleaning import clean, move_to_trash, remove, retire_each
from xla_ckpt.tags.kept import superfluous
from xla_ckpt.tags.retention import BestN, EveryNSteps, Retention, TagFact

logger = get_logger(__name__)

MARK = "xla_ckpt.json"
"""The file by which such a directory is known. It says of which tag it was made."""

MAX_MARK = 1 << 16
"""No more bytes of a mark are read."""


def mark(store: Store, name: str, fact: TagFact, retention: Retention, name_of: Callable[[str], str]) -> None:
    """Say in a directory of which tag it was made, and what `retention` will have to know of that tag.

    It is the newest of those whose names are `name_of` of their tags: the number of the tag's commit says nothing where
    a run has begun anew, or another one has its products here, too.

    Raises:
        CheckpointError: A number cannot be read.
        OSError: The storage refused.
    """
    metrics = {part.metric: fact.metric(part.metric) for part in retention.parts if isinstance(part, BestN)}
    if any(isinstance(part, EveryNSteps) for part in retention.parts):
        metrics |= {"step": fact.step}
    sequence = 1 + max((other.sequence for other in _marked_in(store, name_of)), default=0)
    about = {"tag": fact.tag, "sequence": sequence, "created": fact.created, "metrics": metrics}
    with contextlib.closing(directory_in(store, name)) as directory:
        write_small(directory, MARK, json.dumps(about).encode())
        directory.sync()


def retire_marked(store: Store, name_of: Callable[[str], str], retention: Retention) -> None:
    """Delete the marked directories that a policy does not keep. `name_of` says how that of a tag is called.

    Raises:
        OSError: The storage refused.
    """

    def retire(name: str) -> None:
        if store.object_store is not None:
            store.object_store.remove(name)
        elif store.file_system is not None:
            # By one rename: nobody is to find a half of it under its name.
            remove(store.file_system, move_to_trash(store.file_system, name))
            clean(store.file_system, name)

    retire_each(store, map(name_of, superfluous(_marked_in(store, name_of), retention)), retire)


def _marked_in(store: Store, name_of: Callable[[str], str]) -> list[TagFact]:
    """What the marks say of the directories that have the names of their tags."""
    found = ((name, _marked(store, name)) for name in store.names())
    return [fact for name, fact in found if fact is not None and name == name_of(fact.tag)]


def _marked(store: Store, name: str) -> TagFact | None:
    """What the mark of a directory says; None if there is none."""
    try:
        about = json.loads(store.start_of(f"{name}/{MARK}", MAX_MARK, links=False))
        metrics = {name: value if value is None else float(value) for name, value in about["metrics"].items()}
        return TagFact(str(about["tag"]), int(about["sequence"]), created=str(about["created"]), metric=metrics.get)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        logger.warning("%s in %s is left alone: its mark is damaged: %s", name, store.path, error)
        return None
