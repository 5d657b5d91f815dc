"""Whether a save has the model of the save before it, although training went on.

An asynchronous save that was taken from the wrong tensors, a model that was copied before its training, an optimizer
that has other parameters: such a run saves the same weights again and again, and nobody sees it before the resume. The
digests of two tags tell, without reading a byte of an array.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from xla_ckpt.engine.difference import same_digests
from xla_ckpt.engine.tag_reader import TagReader
from xla_ckpt.errors import CheckpointError
from xla_ckpt.logs import get_logger
from xla_ckpt.manifest.records import Manifest
from xla_ckpt.storage.process_state import process_lock
from xla_ckpt.tags.entry import TagEntry
from xla_ckpt.tags.root import Root
from xla_ckpt.tree import path as paths
from xla_ckpt.tree.schema import EXTRAS, MODEL, member_of

logger = get_logger(__name__)


KEPT_MANIFESTS = 4
"""Root directories of which the last manifest is kept in memory: parsing one of 20,000 arrays takes as long as to save
them."""

_lock = process_lock()
_last: dict[str, Manifest] = {}
"""The manifest of the last tag that this process has committed, by root directory, the latest at the end."""


def remember(root: Root, manifest: Manifest) -> None:
    """Keep the manifest of a tag that has been committed for the next save to compare with."""
    with _lock:
        _last.pop(root.path, None)
        _last[root.path] = manifest
        while len(_last) > KEPT_MANIFESTS:
            del _last[next(iter(_last))]


def remembered(root: Root, tag: str, sequence: int) -> Manifest | None:
    """The manifest of a tag, if this process has kept it."""
    known = _last.get(root.path)
    is_it = known is not None and (known.head.tag, known.head.sequence) == (tag, sequence)  # else another job has saved
    return known if is_it else None


def stale_since(root: Root, newest: TagEntry | None, new: TagReader) -> tuple[str, str] | None:
    """The newest tag that is committed, if `new`, which is about to be, repeats its model, and what shows that training
    went on; else None.

    All arrays of the model have the same bytes then, and something else has not: the number in the tag's name is
    higher, or a whole number such as a step, or another array has changed. What only one of the tags has says nothing,
    nor do extras: random generators move without training. The same state under two names is no mistake.
    """
    if newest is None:
        return None
    known = remembered(root, newest.tag, newest.sequence)
    try:
        with TagReader(root.open_listed(newest), root.path, newest.tag, known) as old:
            evidence = _evidence(old, new)
            return None if evidence is None else (old.tag, evidence)
    except (CheckpointError, OSError) as error:
        # Another job may delete that tag now, or it is damaged. This save has nothing to do with it.
        logger.debug("tag %s was not compared with the one before it: %s", new.tag, error)
        return None


def _evidence(old: TagReader, new: TagReader) -> str | None:
    """What shows that training went on, if the model has not changed."""
    model = _of_model(new.manifest)
    if not model or model != _of_model(old.manifest) or any(_differs(old, new, leaf) for leaf in model):
        return None
    if (name := _went_on(old.tag, new.tag)) is not None:
        return name
    if (number := _grown(old.manifest.skeleton, new.manifest.skeleton, paths.ROOT)) is not None:
        return number
    common = new.manifest.arrays.keys() & old.manifest.arrays.keys() - set(model)
    others = sorted(leaf for leaf in common if member_of(leaf) != EXTRAS)
    changed = next((leaf for leaf in others if _differs(old, new, leaf)), None)
    return None if changed is None else f"{changed} has changed"


def _of_model(manifest: Manifest) -> list[str]:
    """The leaf paths of the model's arrays; of all arrays in a tree that was saved without `save_checkpoint`."""
    leaves = sorted(leaf for leaf in manifest.arrays if member_of(leaf) == MODEL)
    return leaves or sorted(manifest.arrays)


def _went_on(old: str, new: str) -> str | None:
    """That a number in the name of a tag is higher, if two are called alike but for their numbers.

    >>> _went_on("step_10", "step_20")
    'the tag is step_20 after step_10'
    >>> _went_on("step_10", "best"), _went_on("best", "best"), _went_on("run1_step_9", "run1_step_8")
    (None, None, None)
    """
    numbers = [[int(number) for number in re.findall(r"\d+", tag)] for tag in (old, new)]
    alike = re.sub(r"\d+", "#", old) == re.sub(r"\d+", "#", new)
    return f"the tag is {new} after {old}" if alike and numbers[1] > numbers[0] else None


def _grown(old: Any, new: Any, path: str) -> str | None:
    """The first whole number that is higher than it was, in the plain values of a state; not those of model and extras.

    >>> _grown({"user_content": {"step": 10, "lr": 0.5}}, {"user_content": {"step": 11, "lr": 0.25}}, "")
    'user_content/step went from 10 to 11'
    """
    if path in (MODEL, EXTRAS):
        return None
    if type(old) is int and type(new) is int:
        return f"{path} went from {old} to {new}" if new > old else None
    pairs: Iterable[tuple[str, Any, Any]] = ()
    if isinstance(old, dict) and isinstance(new, dict):
        # Marks of the skeleton, such as "$tuple", are no part of the path.
        pairs = ((path if k.startswith("$") else paths.join(path, k), old[k], new[k]) for k in new if k in old)
    elif isinstance(old, list | tuple) and isinstance(new, list | tuple):
        pairs = ((paths.join(path, str(i)), a, b) for i, (a, b) in enumerate(zip(old, new, strict=False)))
    return next((growth for name, a, b in pairs if (growth := _grown(a, b, name)) is not None), None)


def _differs(old: TagReader, new: TagReader, leaf: str) -> bool:
    """Whether an array is stored in other pieces than before, or with other digests."""
    a, b = old.manifest.arrays[leaf], new.manifest.arrays[leaf]
    return (a.dtype, a.shape) != (b.dtype, b.shape) or not same_digests(old, a, new, b)
