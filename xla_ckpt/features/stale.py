"""Detect stale saves: a model that has not changed since the previous tag, although training continued.

Causes are an asynchronous save of the wrong tensors, a model that was copied before training, or an optimizer with
other parameters. Such a run saves the same weights repeatedly, which is only noticed at a resume. The digests of two
tags show it without reading any array. The manifests of the last commits are cached for this.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from xla_ckpt.core.manifest.manifest import Manifest
from xla_ckpt.core.tree import path as paths
from xla_ckpt.core.tree.schema import EXTRAS, MODEL, get_member
from xla_ckpt.errors import CheckpointError
from xla_ckpt.loading.compare import has_same_digests
from xla_ckpt.loading.tag_reader import TagReader
from xla_ckpt.logs import get_logger
from xla_ckpt.storage.process_state import fork_safe_lock
from xla_ckpt.tags.entry import TagEntry
from xla_ckpt.tags.root import Root

logger = get_logger(__name__)


MAX_CACHED_MANIFESTS = 4
"""Number of root directories whose last manifest is cached, because parsing one with 20,000 arrays takes as long as
saving the arrays.
"""

_lock = fork_safe_lock()
_manifests: dict[str, Manifest] = {}
"""Root directory -> manifest of the last tag committed by this process, the latest at the end."""


def cache_manifest(root: Root, manifest: Manifest) -> None:
    """Cache the manifest of a committed tag for comparison with the next save."""
    with _lock:
        _manifests.pop(root.path, None)
        _manifests[root.path] = manifest
        while len(_manifests) > MAX_CACHED_MANIFESTS:
            del _manifests[next(iter(_manifests))]


def get_cached_manifest(root: Root, tag: str, sequence: int) -> Manifest | None:
    """Return the manifest of a tag if this process has cached it, otherwise None."""
    known = _manifests.get(root.path)
    is_it = known is not None and (known.header.tag, known.header.sequence) == (
        tag,
        sequence,
    )  # otherwise another job has saved
    return known if is_it else None


def find_stale_evidence(root: Root, newest: TagEntry | None, new: TagReader) -> tuple[str, str] | None:
    """Return the newest committed tag and evidence of continued training, if `new` has the same model; otherwise None.

    All arrays of the model are equal, but the number in the tag's name is higher, an integer such as a step has
    increased, or another array has changed. Values in only one of the tags are not evidence, nor are extras: random
    generators change without training. Saving the same state under two names is not an error.
    """
    if newest is None:
        return None
    known = get_cached_manifest(root, newest.tag, newest.sequence)
    try:
        with TagReader(root.open_listed(newest), root.path, newest.tag, known) as old:
            evidence = _find_evidence(old, new)
            return None if evidence is None else (old.tag, evidence)
    except (CheckpointError, OSError) as error:
        # Another job may be deleting that tag, or it is corrupt. This must not affect the save.
        logger.debug("tag %s was not compared with the one before it: %s", new.tag, error)
        return None


def _find_evidence(old: TagReader, new: TagReader) -> str | None:
    """Return evidence of continued training if the model has not changed, otherwise None."""
    model = _list_model_leaves(new.manifest)
    if not model or model != _list_model_leaves(old.manifest) or any(_is_different(old, new, leaf) for leaf in model):
        return None
    if (name := _compare_tag_numbers(old.tag, new.tag)) is not None:
        return name
    if (number := _find_increased_number(old.manifest.skeleton, new.manifest.skeleton, paths.ROOT)) is not None:
        return number
    common = new.manifest.arrays.keys() & old.manifest.arrays.keys() - set(model)
    others = sorted(leaf for leaf in common if get_member(leaf) != EXTRAS)
    changed = next((leaf for leaf in others if _is_different(old, new, leaf)), None)
    return None if changed is None else f"{changed} has changed"


def _list_model_leaves(manifest: Manifest) -> list[str]:
    """Return the leaf paths of the model's arrays; of all arrays if the tree was saved without `save_checkpoint`."""
    leaves = sorted(leaf for leaf in manifest.arrays if get_member(leaf) == MODEL)
    return leaves or sorted(manifest.arrays)


def _compare_tag_numbers(old: str, new: str) -> str | None:
    """Return a description if two tags only differ in numbers that have increased, otherwise None.

    >>> _compare_tag_numbers("step_10", "step_20")
    'the tag is step_20 after step_10'
    >>> pairs = [("step_10", "best"), ("best", "best"), ("run1_step_9", "run1_step_8")]
    >>> [_compare_tag_numbers(saved, now) for saved, now in pairs]
    [None, None, None]
    """
    numbers = [[int(number) for number in re.findall(r"\d+", tag)] for tag in (old, new)]
    alike = re.sub(r"\d+", "#", old) == re.sub(r"\d+", "#", new)
    return f"the tag is {new} after {old}" if alike and numbers[1] > numbers[0] else None


def _find_increased_number(old: Any, new: Any, path: str) -> str | None:
    """Return a description of the first integer that has increased in the plain values of a state, or None.

    Values of the model and of extras are skipped.

    >>> saved, now = {"user_content": {"step": 10, "lr": 0.5}}, {"user_content": {"step": 11, "lr": 0.25}}
    >>> _find_increased_number(saved, now, "")
    'user_content/step went from 10 to 11'
    """
    if path in (MODEL, EXTRAS):
        return None
    if type(old) is int and type(new) is int:
        return f"{path} went from {old} to {new}" if new > old else None
    pairs: Iterable[tuple[str, Any, Any]] = ()
    if isinstance(old, dict) and isinstance(new, dict):
        # Skeleton markers such as "$tuple" are not part of the path.
        pairs = ((path if k.startswith("$") else paths.join(path, k), old[k], new[k]) for k in new if k in old)
    elif isinstance(old, list | tuple) and isinstance(new, list | tuple):
        pairs = ((paths.join(path, str(i)), a, b) for i, (a, b) in enumerate(zip(old, new, strict=False)))
    return next((growth for name, a, b in pairs if (growth := _find_increased_number(a, b, name)) is not None), None)


def _is_different(old: TagReader, new: TagReader, leaf: str) -> bool:
    """Return True if an array differs in dtype or shape, or is stored in different pieces or with different digests."""
    a, b = old.manifest.arrays[leaf], new.manifest.arrays[leaf]
    return (a.dtype, a.shape) != (b.dtype, b.shape) or not has_same_digests(old, a, new, b)
