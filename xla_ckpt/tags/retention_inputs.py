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
"""Numbers that are kept in memory: each is read once, and not with every save."""

_NUMPY_SCALARS = {f"$numpy.{dtype.name}": dtype for dtype in map(np.dtype, "efdbBhHiIlLqQ")}
"""Marks of numpy's numbers in a skeleton -> their types."""

_lock = fork_safe_lock()
_metric_cache: dict[tuple[str, str, int, str, str], float | None] = {}
"""(root, tag, commit number, time of the commit, name) -> the number; those that were read last at the end."""


def load_tag_infos(store: Store, entries: Iterable[TagEntry]) -> list[TagInfo]:
    """What retention knows of listed tags. A number is read from a tag's manifest if a policy asks for it."""
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
    """Which of these tags a policy does not keep, oldest first. That tags lack what it goes by is logged.

    If the policy cannot look something up in a tag, that is logged, and all tags are kept.

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
    for part in policy.parts if not retired else ():  # a number that no tag has keeps all
        if isinstance(part, BestN) and part.is_unknown(facts):
            _warn_unknown_metric(store.path, part.metric)
    return retired


def _warn_missing_steps(path: str, facts: Sequence[TagInfo]) -> None:
    """Warn of tags without a step, once for each root and not with every save."""
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
"""The roots that `_warn_missing_steps` has warned of."""


@functools.cache  # once, and not with every save
def _warn_unknown_metric(path: str, metric: str) -> None:
    logger.warning(
        "%s: BestN(%r) keeps all tags, since none has this number in user_content: is it spelt as there, and a number "
        "(loss.item(), not a tensor)?",
        path,
        metric,
    )


def _load_metric(store: Store, entry: TagEntry, name: str) -> float | None:
    """A number that the program saved with a tag; None if there is none.

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
    """The skeleton of what a program saved besides its objects."""
    with contextlib.closing(open_unlocked(store, entry.directory)) as directory:
        skeleton = manifest_json.parse_skeleton(read_file(directory, MANIFEST_FILE))
    return skeleton.get(USER_CONTENT, skeleton) if isinstance(skeleton, dict) else skeleton


def find_number(skeleton: Any, path: str) -> float | None:
    """The number at a path with dots; None if there is none. A key may itself have dots.

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
    """The number that a part of a skeleton is; None if it is something else."""
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
