"""What a checkpoint of DCP's may replace: an older one, and nothing else that lies there."""

from __future__ import annotations

import re

from xla_ckpt.errors import UsageError
from xla_ckpt.layouts.digests import DIGESTS
from xla_ckpt.storage.base import Store
from xla_ckpt.storage.door import is_working_directory
from xla_ckpt.tags.roots import root_of

_OF_DCP = re.compile(
    r"\.metadata(\.tmp)?|__\d+\.metadata(\.tmp)?|\.manager_metadata|.*\.distcp|.*\.safetensors|"
    r"model\.safetensors\.index\.json|" + re.escape(DIGESTS)
)
"""Names of files that make up a checkpoint of DCP's."""

_SURELY_DCP = re.compile(r"\.metadata|__\d+\.metadata|.*\.distcp|" + re.escape(DIGESTS))
"""Names of files that nothing else has: a directory with others, but without one of these, is not replaced."""


def check_target(path: str | None, store: Store, name: str, *, overwrite: bool) -> None:
    """Refuse to replace anything that is no checkpoint of DCP's, and the directory in which the program works.

    Args:
        store: What holds it.
        name: Its name there.

    Raises:
        UsageError: Something else has that name.
    """
    if path is not None and is_working_directory(path):
        raise UsageError(
            "the checkpoint would replace the directory in which this program works",
            path=path,
            hint="Give the checkpoint a directory of its own.",
        )
    if not store.has(name):
        return
    names = store.names(name)
    other = [n for n in names if not _OF_DCP.fullmatch(n) or store.is_directory(f"{name}/{n}")]
    if root_of(store).is_ours(name):
        problem, hint = "there is a tag of this library", "Choose another path, or delete the tag."
    elif not store.is_directory(name):
        problem, hint = "there is a file", "A checkpoint is a directory."
    elif other or (names and not any(map(_SURELY_DCP.fullmatch, names))):
        problem = "the directory holds something else than a checkpoint of DCP's, which would be lost"
        hint = "Give the checkpoint a directory of its own."
        names = other or names
    elif names and not overwrite:
        # Programs look for these words of stock's.
        problem, hint = "Checkpoint already exists, and overwrite=False", "Choose another path."
    else:
        return
    raise UsageError(problem, path=path, found=", ".join(names[:8]) or None, hint=hint)
