"""What killed and replaced saves leave in a root directory, and its removal."""

from __future__ import annotations

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
    for name in sorted(os.listdir(root)):
        path = os.path.join(root, name)
        if name.startswith(OLD_PREFIX) and not os.path.lexists(final := os.path.join(root, name[len(OLD_PREFIX) :])):
            logger.warning("%s: a replacement of tag %s was interrupted; the old version is back", root, final)
            os.rename(path, final)
            sync_directory(root)
        elif name.startswith(OLD_PREFIX) or (name.endswith(TMP_SUFFIX) and os.path.isdir(path)):
            remove_unused(path)
        elif name == TRASH:
            for doomed in os.listdir(path):
                remove_unused(os.path.join(path, doomed))
            if not os.listdir(path):
                os.rmdir(path)


def remove_unused(path: str) -> None:
    """Remove a directory, unless somebody writes or reads it."""
    if in_use(path):
        return
    try:
        shutil.rmtree(path)
    except OSError as error:
        logger.warning("could not remove %s: %s", path, error)
