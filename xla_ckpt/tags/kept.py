"""Which tags a policy keeps, and why; how callers and tags say a policy. Pure: facts go in, a decision comes out."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
from collections.abc import Iterator, Sequence
from typing import Any

from xla_ckpt.errors import CheckpointError, UsageError
from xla_ckpt.tags.retention import (
    AnyOf,
    BestN,
    EveryNSeconds,
    EveryNSteps,
    LatestDuration,
    LatestN,
    Retention,
    TagFact,
)

_KINDS: dict[str, Any] = {kind.__name__: kind for kind in (LatestN, BestN, EveryNSteps, EveryNSeconds, LatestDuration)}
"""The policies that a tag can say, by name."""


def policy_of(num_kept: int | None, retention: Retention | None) -> Retention | None:
    """What a caller says who may say it in one of two ways; None keeps all.

    Raises:
        UsageError: Both are given, or `num_kept` is neither an int of at least 1 nor None or -1, which keep all.
    """
    if num_kept is not None and (type(num_kept) is not int or num_kept < -1 or num_kept == 0):
        raise UsageError(
            f"num_kept_ckpts={num_kept!r} is no number of tags to keep",
            expected="an int of at least 1; or None or -1, which keep all",
        )
    if num_kept is None or num_kept == -1:  # scripts of neuronx-distributed say -1
        return retention
    if retention is not None:
        raise UsageError(
            "num_kept_ckpts= and retention= both say which tags are kept",
            expected="one of them",
            found=f"num_kept_ckpts={num_kept}, retention={retention!r}",
            hint=f"Say retention=LatestN({num_kept}) | ..., without num_kept_ckpts=.",
        )
    return LatestN(num_kept)


def policy_json(policy: Retention | None) -> Any:
    """A policy, as a tag says it; None for none, and for one that a program has made itself.

    >>> policy_json(LatestN(3) | BestN("loss"))
    [['LatestN', 3], ['BestN', 'loss', 1, 'min']]
    """
    parts = () if policy is None else policy.parts
    if not parts or not all(type(part) in _KINDS.values() for part in parts):
        return None
    values = [[getattr(part, field.name) for field in dataclasses.fields(part)] for part in parts]  # type: ignore[arg-type]
    return [
        [type(part).__name__, *(v.total_seconds() if isinstance(v, datetime.timedelta) else v for v in its)]
        for part, its in zip(parts, values, strict=True)
    ]


def parsed_policy(json: Any) -> Retention | None:
    """The policy that a tag says; None if it says none, or one that only another version of this library knows.

    >>> parsed_policy(policy_json(LatestN(3) | BestN("loss"))) == LatestN(3) | BestN("loss"), parsed_policy([["?"]])
    (True, None)
    """
    try:
        parts = tuple(_parsed(*part) for part in json)
        return parts[0] if len(parts) == 1 else AnyOf(parts)
    except (TypeError, ValueError, KeyError, OverflowError, UsageError):
        return None


def _parsed(name: str, *values: Any) -> Retention:
    if name == LatestDuration.__name__:
        return LatestDuration(*(datetime.timedelta(seconds=value) for value in values))
    policy: Retention = _KINDS[name](*values)
    return policy


def why_kept(facts: Sequence[TagFact], policy: Retention | None) -> dict[str, tuple[str, ...]]:
    """Each tag, oldest first -> the reasons for which it is kept: none for one that is to be deleted.

    >>> why_kept([TagFact("a", 1), TagFact("b", 2, pinned=True), TagFact("c", 3), TagFact("d", 4)], LatestN(1))
    {'a': (), 'b': ('pinned',), 'c': (), 'd': ('the newest', 'of the newest 1')}

    Raises:
        UsageError: The policy failed.
        CheckpointError: It asked for something that cannot be read of a tag.
    """
    ordered = sorted(facts, key=lambda fact: (fact.sequence, fact.created, fact.tag))
    reasons: dict[str, list[str]] = {fact.tag: ["pinned"] if fact.pinned else [] for fact in ordered}
    for fact in ordered:
        if not fact.readable:  # it may be mended; and counted among the newest, it would have good ones deleted
            reasons[fact.tag].append("its manifest cannot be read")
    readable = [fact for fact in ordered if fact.readable]
    if readable:
        reasons[readable[-1].tag].append("the newest")
    live = [fact for fact in readable if not fact.pinned]
    if policy is not None:
        with _naming_policy(policy):
            for part in policy.parts:
                kept = part.keeps(live)
                reason = part.reason(live)
                for fact in kept:
                    reasons[fact.tag].append(part.unknown(fact) or reason)
    if policy is None:
        for fact in live:
            reasons[fact.tag].append("all are kept")
    return {tag: tuple(whys) for tag, whys in reasons.items()}


@contextlib.contextmanager
def _naming_policy(policy: Retention) -> Iterator[None]:
    """Raise what a policy raises, which may be the program's own, as an error that names the policy.

    Raises:
        UsageError: The policy failed.
        CheckpointError: It has looked something up in a tag (`TagFact.metric`) that cannot be read.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise UsageError(
            f"the retention policy {type(policy).__name__} failed: {type(error).__name__}: {error}",
            expected="some of the tags that it was given",
            hint="Correct its method `keeps`, or save with another policy. No tag was changed.",
        ) from error


def superfluous(facts: Sequence[TagFact], policy: Retention | None) -> list[str]:
    """The tags to delete, oldest first.

    >>> superfluous([TagFact("a", 1), TagFact("best", 2, pinned=True), TagFact("b", 3), TagFact("c", 4)], LatestN(2))
    ['a']
    """
    return [tag for tag, reasons in why_kept(facts, policy).items() if not reasons]
