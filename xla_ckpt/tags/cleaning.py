"""What killed and replaced saves leave in a root directory, and its removal."""

from __future__ import annotations

import itertools
import logging
import os
import shutil

from xla_ckpt.storage.local import sync_directory
from xla_ckpt.tags.directory import in_use
from xla_ckpt.tags.names import OLD_PREFIX, TMP_SUFFIX, TRASH

logger = logging.getLogger(__name__)


def clean(root: str) -> None:
    """Remove what killed or replaced saves left: unfinished directories, old versions, trash.

    Directories that somebody writes or reads are left alone; they go next time. Undoes a replacement that was
    killed half-way.
    """
    trash = os.path.join(root, TRASH)
    for name in sorted(os.listdir(root)):
        path = os.path.join(root, name)
        if name.startswith(OLD_PREFIX) and not os.path.lexists(final := os.path.join(root, name[len(OLD_PREFIX) :])):
            logger.warning("%s: a replacement of tag %s was interrupted; the old version is back", root, final)
            os.rename(path, final)
            sync_directory(root)
        elif name.startswith(OLD_PREFIX):
            _move(path, trash)  # also if it is read: the next replacement of its tag needs the name
        elif name.endswith(TMP_SUFFIX) and os.path.isdir(path):
            remove_unused(path)
    if os.path.isdir(trash):
        for doomed in os.listdir(trash):
            remove_unused(os.path.join(trash, doomed))
        if not os.listdir(trash):
            os.rmdir(trash)


def _move(path: str, folder: str) -> None:
    """Move a directory into a folder, under a name that is free there. Who reads it does not notice."""
    os.makedirs(folder, exist_ok=True)
    places = (os.path.join(folder, f"{os.path.basename(path)}-{n}") for n in itertools.count())
    os.rename(path, next(place for place in places if not os.path.lexists(place)))


def remove_unused(path: str) -> None:
    """Remove a directory, unless somebody writes or reads it."""
    if not in_use(path):
        remove(path)


def remove(path: str) -> None:
    """Remove a directory."""
    try:
        shutil.rmtree(path)
    except OSError as error:
        logger.warning("could not remove %s: %s", path, error)
