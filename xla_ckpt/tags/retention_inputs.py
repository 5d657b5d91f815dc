"""Inputs of retention policies: read metrics and steps that are saved with tags, and select tags to retire."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from xla_ckpt.core.manifest import manifest_json
from xla_ckpt.core.tree import path as paths
from xla_ckpt.core.tree.schema import USER_CONTENT
from xla_ckpt.core.tree.skeleton import get_children
from xla_ckpt.core.tree.values import ValueCodec
from xla_ckpt.errors import CheckpointError, FormatError, UsageError, annotate_errors, wrap_os_errors
from xla_ckpt.logs import get_logger
from xla_ckpt.storage.base import Store, open_unlocked, read_file
from xla_ckpt.storage.process_state import fork_safe_lock
from xla_ckpt.tags.entry import MANIFEST_FILE, TagEntry
from xla_ckpt.tags.retention import BestN, EveryNSteps, Retention, TagInfo, find_tags_to_delete

logger = get_logger(__name__)

METRIC_CACHE_SIZE = 10_000
"""Maximum number of cached metric values, so that each is read once instead of in every save."""

_NUMPY_SCALARS = {f"$numpy.{dtype.name}": dtype for dtype in map(np.dtype, "efdbBhHiIlLqQ")}
"""Skeleton markers of numpy scalars -> their dtypes."""

_lock = fork_safe_lock()
_metric_cache: dict[tuple[str, str, int, str, str], float | None] = {}
"""(root, tag, commit number, time of the commit, name) -> the number, in order of insertion."""


def load_tag_infos(store: Store, entries: Iterable[TagEntry]) -> list[TagInfo]:
    """Return the retention inputs of listed tags. Numbers are read from the manifest when a policy needs them."""
    return [
        TagInfo(
            entry.tag,
            entry.sequence,
            entry.pinned,
            entry.created,
            partial(_load_metric, store, entry),
            readable=entry.damage is None,
        )
        for entry in entries
    ]


def select_tags_to_retire(store: Store, entries: Iterable[TagEntry], policy: Retention) -> list[str]:
    """Return the tags that a policy does not keep, oldest first. Missing steps or metrics are logged.

    If the policy needs information that cannot be read, a warning is logged and all tags are kept.

    Raises:
        UsageError: The policy failed.
    """
    facts = load_tag_infos(store, entries)
    try:
        retired = find_tags_to_delete(facts, policy)
    except UsageError:
        raise
    except CheckpointError as error:
        logger.warning("%s: no older tag is deleted: %s", store.path, error)
        return []
    if any(isinstance(part, EveryNSteps) for part in policy.parts):
        _warn_missing_steps(store.path, facts)
    for part in policy.parts if not retired else ():  # a metric that no tag has keeps all tags
        if isinstance(part, BestN) and part.is_unknown(facts):
            _warn_unknown_metric(store.path, part.metric)
    return retired


def _warn_missing_steps(path: str, facts: Sequence[TagInfo]) -> None:
    """Warn about tags without a step, once per root instead of in every save."""
    if path in _warned_roots:
        return
    without = next((fact.tag for fact in facts if fact.readable and fact.step is None), None)
    if without is not None:
        _warned_roots.add(path)
        logger.warning(
            "%s: EveryNSteps keeps tags without a step in their names or in user_content, such as %s: name tags "
            "like step_100, or save user_content={'step': 100, ...}",
            path,
            without,
        )


_warned_roots: set[str] = set()
"""Roots for which `_warn_missing_steps` has logged a warning."""


@functools.cache  # once per metric instead of in every save
def _warn_unknown_metric(path: str, metric: str) -> None:
    logger.warning(
        "%s: BestN(%r) keeps all tags, since none has this number in user_content: is it spelt as there, and a number "
        "(loss.item(), not a tensor)?",
        path,
        metric,
    )


def _load_metric(store: Store, entry: TagEntry, name: str) -> float | None:
    """Return a number saved with a tag, or None if there is none.

    Raises:
        CheckpointError: The manifest cannot be read, which is logged.
    """
    key = (store.path, entry.tag, entry.sequence, entry.created, name)
    with _lock:
        if key in _metric_cache:
            return _metric_cache[key]
    try:
        with annotate_errors(path=store.path, tag=entry.tag), wrap_os_errors("reading a number for retention"):
            number = find_number(_load_user_content(store, entry), name)
    except CheckpointError as error:
        logger.warning("the tag is kept, as %s is not known of it: %s", name, error)
        raise
    with _lock:
        _metric_cache[key] = number
        while len(_metric_cache) > METRIC_CACHE_SIZE:
            del _metric_cache[next(iter(_metric_cache))]
    return number


def _load_user_content(store: Store, entry: TagEntry) -> Any:
    """Return the skeleton of a tag's ``user_content``, or the entire skeleton if there is none."""
    with contextlib.closing(open_unlocked(store, entry.directory)) as directory:
        skeleton = manifest_json.parse_skeleton(read_file(directory, MANIFEST_FILE))
    return skeleton.get(USER_CONTENT, skeleton) if isinstance(skeleton, dict) else skeleton


def find_number(skeleton: Any, path: str) -> float | None:
    """Return the number at a dotted path, or None if there is none. Keys may contain dots.

    >>> find_number({"eval": {"loss.mean": 0.5, "ok": True}}, "eval.loss.mean"), find_number({"a": 1}, "b")
    (0.5, None)
    """
    if not path:
        return _parse_number(skeleton)
    below = get_children(skeleton) or {}
    words = path.split(".")
    for count in range(len(words), 0, -1):
        key = paths.escape(".".join(words[:count]))
        if key in below and (number := find_number(below[key], ".".join(words[count:]))) is not None:
            return number
    return None


def _parse_number(json: Any) -> float | None:
    """Return the number that a part of a skeleton encodes, or None if it is something else.

    Raises:
        FormatError: The encoded number is corrupt.
    """
    if type(json) in (int, float):
        return json  # type: ignore[no-any-return]
    if not isinstance(json, dict) or len(json) != 1:
        return None
    ((kind, body),) = json.items()
    if kind == "$float":
        return float(ValueCodec().decode(json))
    if (dtype := _NUMPY_SCALARS.get(kind)) is None:
        return None
    try:
        return np.frombuffer(bytes.fromhex(body), dtype)[0].item()  # type: ignore[no-any-return]
    except (ValueError, TypeError, IndexError) as error:
        raise FormatError("broken number in the skeleton", found=str(body)[:80]) from error
