"""What killed and replaced saves leave in a root directory, and its removal."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator

from xla_ckpt.storage.base import Store
from xla_ckpt.tags.names import NEW_PREFIX, OLD_PREFIX, TMP_SUFFIX, TRASH

logger = logging.getLogger(__name__)


def clean(store: Store) -> None:
    """Remove what killed or replaced saves left: unfinished directories, old versions, trash.

    Directories that somebody writes or reads are left alone; they go next time. Undoes a replacement that was
    killed half-way.

    Raises:
        OSError: The storage refused.
    """
    for name in store.names():
        with _left_to_others(store, name):
            if name.startswith(OLD_PREFIX) and not store.has(tag := name[len(OLD_PREFIX) :]):
                logger.warning("%s: a replacement of tag %s was interrupted; the old version is back", store.path, tag)
                store.rename(name, tag)
                store.sync()
            elif name.startswith(OLD_PREFIX):
                move_to_trash(store, name)  # also if it is read: the next replacement of its tag needs the name
            elif name.startswith(NEW_PREFIX) or name.endswith(TMP_SUFFIX):
                remove_unused(store, name)
    if store.is_directory(TRASH):
        # A tag whose files are gone must not have its name again after a loss of power, nor the tag that replaced it
        # have lost its own.
        store.sync()
        with _left_to_others(store, TRASH):
            for doomed in store.names(TRASH):  # orbax moves the tags there that retention gives up
                remove_unused(store, f"{TRASH}/{doomed}")
            with contextlib.suppress(FileNotFoundError):  # another program that cleans up came first
                # Not `remove`: somebody may move a tag there at this moment, which may still be read.
                store.remove_empty(TRASH)


_told: set[tuple[str, str]] = set()
"""(root directory, name) of what could not be removed, and has been told of: a save an hour tells it once."""


@contextlib.contextmanager
def _left_to_others(store: Store, name: str) -> Iterator[None]:
    """Leave what this user may not touch: another user's leftovers are no reason for a save to fail."""
    try:
        yield
    except PermissionError as error:
        _tell(store, name, error)


def _tell(store: Store, name: str, error: OSError) -> None:
    if (store.path, name) not in _told:
        _told.add((store.path, name))
        logger.warning("could not remove %s in %s: %s", name, store.path, error)


def move_to_trash(store: Store, name: str) -> str:
    """Move a directory away, under a name that is free there, and return that. Who reads it does not notice.

    Raises:
        OSError: The storage refused, or the directory is gone.
    """
    places = (f"{TRASH}/{name}-{n}" for n in itertools.count())
    while True:
        if not store.is_directory(TRASH):
            with contextlib.suppress(FileExistsError):
                store.make(TRASH).close()
        place = next(place for place in places if not store.has(place))
        try:
            store.rename(name, place)
        except FileNotFoundError:
            if not store.has(name):
                raise
            continue  # another program that cleans up has removed the trash
        return place


def remove_unused(store: Store, name: str) -> None:
    """Remove a directory, unless somebody writes or reads it; that it cannot be removed is logged."""
    if store.is_directory(name):
        _remove(store, name, store.remove_unused)


def remove(store: Store, name: str) -> None:
    """Remove a directory; that it cannot be removed is logged."""
    _remove(store, name, store.remove)


def _remove(store: Store, name: str, how: Callable[[str], object]) -> None:
    try:
        how(name)
    except FileNotFoundError:
        logger.debug("%s in %s: another program removed it", name, store.path)
    except OSError as error:
        _tell(store, name, error)
