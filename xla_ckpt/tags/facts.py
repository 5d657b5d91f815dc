"""What retention has to know of tags: what a listing says, and numbers that programs have saved with them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from xla_ckpt.errors import CheckpointError, FormatError, UsageError, naming, storage_errors
from xla_ckpt.logs import get_logger
from xla_ckpt.manifest import manifest_json
from xla_ckpt.storage.base import Store, directory_in
from xla_ckpt.storage.process_state import process_lock
from xla_ckpt.storage.small_files import read_whole
from xla_ckpt.tags.entry import MANIFEST, TagEntry
from xla_ckpt.tags.kept import superfluous
from xla_ckpt.tags.retention import BestN, EveryNSteps, Retention, TagFact
from xla_ckpt.tree import path as paths
from xla_ckpt.tree.codec import ValueCodec
from xla_ckpt.tree.schema import USER_CONTENT
from xla_ckpt.tree.skeleton import children

logger = get_logger(__name__)

KEPT_METRICS = 10_000
"""Numbers that are kept in memory: each is read once, and not with every save."""

_SCALARS = {f"$numpy.{dtype.name}": dtype for dtype in map(np.dtype, "efdbBhHiIlLqQ")}
"""Marks of numpy's numbers in a skeleton -> their types."""

_lock = process_lock()
_metrics: dict[tuple[str, str, int, str, str], float | None] = {}
"""(root, tag, commit number, time of the commit, name) -> the number; those that were read last at the end."""


def facts_of(store: Store, entries: Iterable[TagEntry]) -> list[TagFact]:
    """What retention knows of listed tags. A number is read from a tag's manifest if a policy asks for it."""
    return [
        TagFact(
            entry.tag,
            entry.sequence,
            entry.pinned,
            entry.created,
            partial(_metric, store, entry),
            readable=entry.damage is None,
        )
        for entry in entries
    ]


def tags_to_retire(store: Store, entries: Iterable[TagEntry], policy: Retention) -> list[str]:
    """Which of these tags a policy does not keep, oldest first. That tags lack what it goes by is logged.

    If the policy cannot look something up in a tag, that is logged, and all tags are kept.

    Raises:
        UsageError: The policy failed.
    """
    facts = facts_of(store, entries)
    try:
        retired = superfluous(facts, policy)
    except UsageError:
        raise
    except CheckpointError as error:
        logger.warning("%s: no older tag is deleted: %s", store.path, error)
        return []
    if any(isinstance(part, EveryNSteps) for part in policy.parts):
        _warn_of_missing_steps(store.path, facts)
    for part in policy.parts if not retired else ():  # a number that no tag has keeps all
        if isinstance(part, BestN) and part.is_unknown(facts):
            _tell_unknown(store.path, part.metric)
    return retired


def _warn_of_missing_steps(path: str, facts: Sequence[TagFact]) -> None:
    """Warn of tags without a step, once for each root and not with every save."""
    if path in _told_of_steps:
        return
    without = next((fact.tag for fact in facts if fact.readable and fact.step is None), None)
    if without is not None:
        _told_of_steps.add(path)
        logger.warning(
            "%s: EveryNSteps keeps tags without a step in their names or in user_content, such as %s: name tags "
            "like step_100, or save user_content={'step': 100, ...}",
            path,
            without,
        )


_told_of_steps: set[str] = set()
"""The roots that `_warn_of_missing_steps` has warned of."""


@functools.cache  # once, and not with every save
def _tell_unknown(path: str, metric: str) -> None:
    logger.warning(
        "%s: BestN(%r) keeps all tags, since none has this number in user_content: is it spelt as there, and a number "
        "(loss.item(), not a tensor)?",
        path,
        metric,
    )


def _metric(store: Store, entry: TagEntry, name: str) -> float | None:
    """A number that the program saved with a tag; None if there is none.

    Raises:
        CheckpointError: The manifest cannot be read, which is logged.
    """
    key = (store.path, entry.tag, entry.sequence, entry.created, name)
    with _lock:
        if key in _metrics:
            return _metrics[key]
    try:
        with naming(path=store.path, tag=entry.tag), storage_errors("reading a number for retention"):
            number = number_at(_content(store, entry), name)
    except CheckpointError as error:
        logger.warning("the tag is kept, as %s is not known of it: %s", name, error)
        raise
    with _lock:
        _metrics[key] = number
        while len(_metrics) > KEPT_METRICS:
            del _metrics[next(iter(_metrics))]
    return number


def _content(store: Store, entry: TagEntry) -> Any:
    """The skeleton of what a program saved besides its objects."""
    with contextlib.closing(directory_in(store, entry.directory)) as directory:
        skeleton = manifest_json.skeleton_of(read_whole(directory, MANIFEST))
    return skeleton.get(USER_CONTENT, skeleton) if isinstance(skeleton, dict) else skeleton


def number_at(skeleton: Any, path: str) -> float | None:
    """The number at a path with dots; None if there is none. A key may itself have dots.

    >>> number_at({"eval": {"loss.mean": 0.5, "ok": True}}, "eval.loss.mean"), number_at({"a": 1}, "b")
    (0.5, None)
    """
    if not path:
        return _number(skeleton)
    below = children(skeleton) or {}
    words = path.split(".")
    for count in range(len(words), 0, -1):
        key = paths.escape(".".join(words[:count]))
        if key in below and (number := number_at(below[key], ".".join(words[count:]))) is not None:
            return number
    return None


def _number(json: Any) -> float | None:
    """The number that a part of a skeleton is; None if it is something else."""
    if type(json) in (int, float):
        return json  # type: ignore[no-any-return]
    if not isinstance(json, dict) or len(json) != 1:
        return None
    ((kind, body),) = json.items()
    if kind == "$float":
        return float(ValueCodec().decode(json))
    if (dtype := _SCALARS.get(kind)) is None:
        return None
    try:
        return np.frombuffer(bytes.fromhex(body), dtype)[0].item()  # type: ignore[no-any-return]
    except (ValueError, TypeError, IndexError) as error:
        raise FormatError("broken number in the skeleton", found=str(body)[:80]) from error
