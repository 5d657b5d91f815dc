"""Whether a save has the model of the save before it, although training went on.

An asynchronous save that was taken from the wrong tensors, a model that was copied before its training, an optimizer
that has other parameters: such a run saves the same weights again and again, and nobody sees it before the resume. The
digests of two tags tell, without reading a byte of an array.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Iterable

from xla_ckpt.engine.difference import same_digests
from xla_ckpt.engine.tag_reader import TagReader
from xla_ckpt.errors import CheckpointError
from xla_ckpt.manifest.records import Manifest
from xla_ckpt.storage.base import Store
from xla_ckpt.tags.directory import TagEntry, open_directory
from xla_ckpt.tree.schema import MODEL, member_of

logger = logging.getLogger(__name__)


KEPT = 4
"""Root directories of which the last manifest is kept in memory: parsing one of 20,000 arrays takes as long as to save
them."""

_lock = threading.Lock()
_last: dict[str, Manifest] = {}
"""The manifest of the last tag that this process has committed, by root directory, the latest at the end."""


def remember(store: Store, manifest: Manifest) -> None:
    """Keep the manifest of a tag that has been committed for the next save to compare with."""
    with _lock:
        _last.pop(store.path, None)
        _last[store.path] = manifest
        while len(_last) > KEPT:
            del _last[next(iter(_last))]


def stale_since(store: Store, newest: TagEntry | None, new: TagReader) -> str | None:
    """The newest tag that is committed, if `new`, which is about to be, repeats its model; else None.

    It does so if all arrays of the model have the same bytes, and something else says that training went on: the number
    in the tag's name, a plain value such as a step, or another array. The same state under two names is no mistake.
    """
    if newest is None:
        return None
    known = _last.get(store.path)
    if known is not None and (known.head.tag, known.head.sequence) != (newest.tag, newest.sequence):
        known = None  # another job has saved since
    try:
        with TagReader(open_directory(store, newest.tag), store.path, newest.tag, known) as old:
            return old.tag if _repeats(old, new) else None
    except (CheckpointError, OSError) as error:
        # Another job may delete that tag now, or it is damaged. This save has nothing to do with it.
        logger.debug("tag %s was not compared with the one before it: %s", new.tag, error)
        return None


def _repeats(old: TagReader, new: TagReader) -> bool:
    model = _of_model(new.manifest)
    if not model or model != _of_model(old.manifest) or not _same(old, new, model):
        return False
    others = new.manifest.arrays.keys() - set(model)
    return (
        _went_on(old.tag, new.tag)
        or _plain(old.manifest) != _plain(new.manifest)
        or list(old.manifest.arrays) != list(new.manifest.arrays)
        or not _same(old, new, others)
    )


def _of_model(manifest: Manifest) -> list[str]:
    """The leaf paths of the model's arrays; of all arrays in a tree that was saved without `save_checkpoint`."""
    found = sorted(leaf for leaf in manifest.arrays if member_of(leaf) == MODEL)
    return found or sorted(manifest.arrays)


def _plain(manifest: Manifest) -> str:
    """The plain values of a state. Of two manifests one was read from a file, and has lists for tuples."""
    return json.dumps(manifest.skeleton, sort_keys=True)


def _went_on(old: str, new: str) -> bool:
    """Whether two tags are called alike, but for their numbers.

    >>> _went_on("step_10", "step_20"), _went_on("step_10", "best"), _went_on("best", "best")
    (True, False, False)
    """
    return old != new and re.sub(r"\d+", "#", old) == re.sub(r"\d+", "#", new)


def _same(old: TagReader, new: TagReader, leaves: Iterable[str]) -> bool:
    """Whether arrays are stored in the same pieces, with the same digests. It ends at the first that is not."""
    pairs = ((old.manifest.arrays[leaf], new.manifest.arrays[leaf]) for leaf in leaves)
    return all((a.dtype, a.shape) == (b.dtype, b.shape) and same_digests(old, a, new, b) for a, b in pairs)
