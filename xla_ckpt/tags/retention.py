"""Retention policies (`LatestN`, `BestN`, ...) and the decision which tags to keep or delete. Pure.

A policy is a value; ``a | b`` keeps the tags that either keeps. `find_tags_to_delete` and `explain_kept` apply a policy
to `TagInfo` objects. Policies are parsed from arguments and from the JSON that a checkpoint records.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from xla_ckpt.errors import CheckpointError, UsageError
from xla_ckpt.keywords import check_choice, check_fields

PERIOD_NAMES = {3600: "hour", 86400: "day"}
"""Names of common periods (s)."""

Extreme = Literal["min", "max"]

STEP_NAMES = ("step", "global_step", "iteration")
"""Common names of the step in ``user_content``."""

_END = r"(?![0-9a-z])"
"""End of a number, excluding sizes (``7b``) and parts of hashes (``5f3a``); matches lower case."""

_LABELS = (r"step", r"steps", r"(?<![a-z])(?:iter|iters|iteration|iterations)", r"(?<![a-z])(?:updates?|ba)")
"""Words that label an adjacent number as the step, the most specific first."""

_NUMBER = r"[0-9]{1,3}(?:_[0-9]{3})+(?![0-9_])|[0-9]+"
"""A number, also as formatted by ``f"{step:_}"``: ``1_000``."""

_LABELLED = (
    *(re.compile(rf"{label}[-_=: .]*({_NUMBER}){_END}") for label in _LABELS),
    *(re.compile(rf"(?<![0-9a-z.])([0-9]+)[-_ ]?{label}(?![a-z]|[-_=: .]*[0-9])") for label in _LABELS),
    re.compile(r"^(?:checkpoint|ckpt)?[-_=]?([0-9]+)$"),
)

_OTHER_NUMBERS = re.compile(
    r"\.(?:[a-z_]+|h5)$"  # suffix of a file name
    r"|[-_.]v[0-9]+(?=$|\.[a-z_]+$)"  # version suffix of a file whose name was in use
    r"|(?<![0-9])(?:19|20)[0-9]{2}-[0-9]{2}-[0-9]{2}(?:t[0-9:.-]+z?|[-_ ][0-9]{2}[-:][0-9]{2}[-:][0-9]{2})?"  # a date
    r"|(?<![0-9])20[0-9]{6}[-_t]?[0-9]{6}(?![0-9])"
    r"|(?<![a-z])(?:samples|tokens|loss|acc|accuracy|score|ppl|lr|seed|rank|fold|val)[-_=: .]*[0-9]+(?:\.[0-9]+)*"
    r"|(?:max|total|num|warmup|every|every_n)_steps?[-_=: ]*[0-9]+"
    r"|(?<![0-9])[0-9]+(?:\.[0-9]+)+"  # a decimal
)
"""Parts of a lower-case name with numbers that are not steps."""


def _strip_other_numbers(tag: str) -> str:
    return _OTHER_NUMBERS.sub(" ", tag.lower()).strip()


@functools.lru_cache(maxsize=10_000)  # a policy needs the step of each tag several times per save
def parse_labelled_step(tag: str) -> int | None:
    """Return the labelled step in a tag name: ``step_400``, ``iter_0000400``, ``checkpoint-400``, ``400``.

    >>> [parse_labelled_step(tag) for tag in ("epoch=1-step=400-v1", "400.ckpt", "step_1_400", "run-7b", "epoch_4")]
    [400, 400, 1400, None, None]
    """
    name = _strip_other_numbers(tag)
    found = (numbers[-1] for pattern in _LABELLED if (numbers := pattern.findall(name)))
    return next(map(int, found), None)


@functools.lru_cache(maxsize=10_000)
def parse_bare_number(tag: str) -> int | None:
    """Return the number at the end of a tag name, or at its start if it is the only number.

    Skips dates, versions, decimals and other numbers that are not steps, and epochs if there are other numbers.

    >>> [parse_bare_number(tag) for tag in ("epoch_4", "checkpoint_3_400", "400-best", "last-v2", "llama3-8b")]
    [4, 400, 400, None, None]
    """
    name = _strip_other_numbers(tag)
    found = re.findall(rf"(?<![0-9a-z])([a-z]*)[-_=.]?(?<![0-9])([0-9]+){_END}", name)
    steps = [(word, number) for word, number in found if word not in ("epoch", "ep")] or found
    if not steps:
        return None
    word, number = steps[-1]
    is_only = len(steps) == 1 and word in ("", "checkpoint", "ckpt")
    return int(number) if is_only or name.endswith(number) else None


@dataclass(frozen=True, slots=True)
class TagInfo:
    """The properties of a tag that retention policies use."""

    tag: str
    sequence: int
    """Commit number, which orders tags."""

    pinned: bool = False
    created: str = ""
    """Time of the commit: UTC, ISO 8601; empty if unknown."""

    metric: Callable[[str], float | None] = field(default=lambda name: None, repr=False, compare=False)
    """Function that returns a number saved with the tag by its name, or None if there is none. It is read when a
    policy needs it, and raises a `CheckpointError` if that fails.
    """

    readable: bool = True
    """True unless its manifest is known to be unreadable."""

    @property
    def step(self) -> int | None:
        """Step of the tag, or None if unknown.

        In order: the labelled step in the name, one of `STEP_NAMES` in the ``user_content`` of the tag, or an
        unlabelled number in the name.

        >>> TagInfo("epoch=0-step=500-v1", 7).step, TagInfo("run2", 7, metric={"step": 400}.get).step
        (500, 400)
        >>> TagInfo("run2", 7).step, TagInfo("best", 7).step
        (2, None)
        """
        if (step := parse_labelled_step(self.tag)) is not None:
            return step
        try:
            saved = [self.metric(name) for name in STEP_NAMES]
        except CheckpointError:
            return None  # the error is already logged
        steps = [int(number) for number in saved if number is not None and number == number // 1]
        return steps[0] if steps else parse_bare_number(self.tag)

    @property
    def time(self) -> datetime.datetime | None:
        """Time of the commit; None if unknown."""
        try:
            time = datetime.datetime.fromisoformat(self.created)
        except ValueError:
            return None
        return time if time.tzinfo is not None else time.replace(tzinfo=datetime.UTC)


class Retention(ABC):
    """Base class of retention policies. ``a | b`` keeps the tags that one of the two keeps.

    The newest tag, pinned tags and unreadable tags are always kept. Policies do not count pinned and unreadable tags.
    """

    __slots__ = ()

    @abstractmethod
    def keeps(self, facts: Sequence[TagInfo]) -> Collection[TagInfo]:
        """Return the tags to keep, given all unpinned tags, oldest first.

        A save calls this before its commit, and fails if it raises an error.
        """

    def reason(self, facts: Sequence[TagInfo]) -> str:  # derived classes may use the tags
        """Return the reason for which the policy keeps tags."""
        return str(self)

    def unknown(self, fact: TagInfo) -> str:
        """Return the missing information for which a tag is kept, or an empty string."""
        return ""

    @property
    def parts(self) -> tuple[Retention, ...]:
        """Policies that this policy combines."""
        return (self,)

    def __or__(self, other: Retention) -> AnyOf:
        return AnyOf((*self.parts, *other.parts)) if isinstance(other, Retention) else NotImplemented


@check_fields
@dataclass(frozen=True, slots=True)
class LatestN(Retention):
    """A policy that keeps the `n` newest tags.

    Args:
        n: Number of tags to keep.

    Raises (on construction):
        UsageError: `n` is not a positive int.
    """

    n: int

    def __post_init__(self) -> None:
        _check_count("LatestN", "n", self.n)

    def __str__(self) -> str:
        return f"of the newest {self.n}"

    def keeps(self, facts: Sequence[TagInfo]) -> Collection[TagInfo]:
        return facts[-self.n :]


@check_fields
@dataclass(frozen=True, slots=True)
class BestN(Retention):
    """A policy that keeps the `n` tags with the best values of a number saved in ``user_content``.

    The newer of equal tags is better, and NaN is the worst value. Tags without the number are not among the best.
    If no tag has it, all are kept. A tag whose number cannot be read is kept.

    Args:
        metric: Name of the number, or its dotted path in nested containers: ``"loss"``, ``"eval.accuracy"``. For a tree
            saved with `save` without ``user_content``, the path begins at the tree.
        n: Number of tags to keep.
        mode: ``"min"`` if the smallest value is the best, ``"max"`` if the largest is.

    Raises (on construction):
        UsageError: An argument is invalid.
    """

    metric: str
    n: int = 1
    mode: Extreme = "min"

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str) or not self.metric:
            raise UsageError(
                "BestN: metric is no name of a number", expected="a text such as 'loss'", found=repr(self.metric)
            )
        _check_count("BestN", "n", self.n)
        check_choice("mode", self.mode, get_args(Extreme))

    def __str__(self) -> str:
        return f"of the {self.n} with the {'smallest' if self.mode == 'min' else 'largest'} {self.metric}"

    def reason(self, facts: Sequence[TagInfo]) -> str:
        return (
            str(self) if self._collect_numbers(facts)[0] else f"no tag has the number {self.metric} in its user_content"
        )

    def is_unknown(self, facts: Sequence[TagInfo]) -> bool:
        """Return True if no tag has the number, so that nothing is deleted: its name may be misspelled."""
        return bool(facts) and self._collect_numbers(facts) == ([], [])

    def keeps(self, facts: Sequence[TagInfo]) -> Collection[TagInfo]:
        numbers, unread = self._collect_numbers(facts)
        if not numbers:
            return facts
        return [*unread, *(facts[-i] for _, i in sorted(numbers)[: self.n])]

    def _collect_numbers(self, facts: Sequence[TagInfo]) -> tuple[list[tuple[float, int]], list[TagInfo]]:
        """Return (number, -index) of each tag with the number, to be sorted best first, and the unreadable tags."""
        numbers, unread = list[tuple[float, int]](), list[TagInfo]()
        for i, fact in enumerate(facts):
            try:
                number = fact.metric(self.metric)
            except CheckpointError:
                unread.append(fact)  # it may be the best; the error is already logged
                continue
            if number is not None:
                signed = number if self.mode == "min" else -number
                numbers.append((math.inf if signed != signed else signed, -i))
        return numbers, unread


@check_fields
@dataclass(frozen=True, slots=True)
class EveryNSteps(Retention):
    """A policy that keeps each tag whose step is a multiple of `interval_steps`.

    The step is the labelled number in the tag's name, as in ``step_400``, ``epoch=1-step=400-v1``, ``iter_0000400``,
    ``checkpoint-400`` and ``400``; otherwise the number ``step`` (or ``global_step``, ``iteration``) in
    ``user_content``; otherwise the only number in the name, or the one at its end. A tag without any of these is kept.

    Args:
        interval_steps: Interval (steps).

    Raises (on construction):
        UsageError: `interval_steps` is not a positive int.
    """

    interval_steps: int

    def __post_init__(self) -> None:
        _check_count("EveryNSteps", "interval_steps", self.interval_steps)

    def __str__(self) -> str:
        return f"of every {self.interval_steps} steps"

    def unknown(self, fact: TagInfo) -> str:
        return "its step is not known" if fact.step is None else ""

    def keeps(self, facts: Sequence[TagInfo]) -> Collection[TagInfo]:
        return [fact for fact in facts if (step := fact.step) is None or step % self.interval_steps == 0]


@check_fields
@dataclass(frozen=True, slots=True)
class EveryNSeconds(Retention):
    """A policy that keeps the first tag of each period of `interval_secs` seconds, such as 3600 or 86400.

    Periods are aligned to UTC: 3600 is each hour, and 86400 each day.

    Tags with an unknown time are kept.

    Args:
        interval_secs: Length of a period (s).

    Raises (on construction):
        UsageError: `interval_secs` is not a positive int.
    """

    interval_secs: int

    def __post_init__(self) -> None:
        _check_count("EveryNSeconds", "interval_secs", self.interval_secs)

    def __str__(self) -> str:
        return f"the first of a {PERIOD_NAMES.get(self.interval_secs, f'period of {self.interval_secs} s')}"

    def unknown(self, fact: TagInfo) -> str:
        return "its time is not known" if fact.time is None else ""

    def keeps(self, facts: Sequence[TagInfo]) -> Collection[TagInfo]:
        firsts, undated = dict[int, TagInfo](), list[TagInfo]()
        for fact in facts:
            if fact.time is None:
                undated.append(fact)
            else:
                firsts.setdefault(int(fact.time.timestamp() // self.interval_secs), fact)
        return [*undated, *firsts.values()]


@check_fields
@dataclass(frozen=True, slots=True)
class LatestDuration(Retention):
    """A policy that keeps the tags that are at most `duration` older than the newest.

    Because ages are relative to the newest tag, a run that pauses for a month loses nothing when it continues. Tags
    with an unknown time are kept.

    Args:
        duration: Maximum age relative to the newest tag.

    Raises (on construction):
        UsageError: `duration` is not a positive timedelta.
    """

    duration: datetime.timedelta

    def __post_init__(self) -> None:
        if not isinstance(self.duration, datetime.timedelta) or not self.duration > datetime.timedelta():
            raise UsageError(
                "LatestDuration: duration is no duration above 0",
                expected="a datetime.timedelta such as timedelta(days=7)",
                found=repr(self.duration),
            )

    def __str__(self) -> str:
        return f"of the last {str(self.duration).removesuffix(', 0:00:00')}"

    def unknown(self, fact: TagInfo) -> str:
        return "its time is not known" if fact.time is None else ""

    def keeps(self, facts: Sequence[TagInfo]) -> Collection[TagInfo]:
        times = [fact.time for fact in facts]
        newest = max((time for time in times if time is not None), default=None)
        return [
            fact
            for fact, time in zip(facts, times, strict=True)
            if time is None or newest is None or newest - time <= self.duration
        ]


@check_fields
@dataclass(frozen=True, slots=True)
class AnyOf(Retention):
    """A policy that keeps the tags that at least one of `policies` keeps, like ``LatestN(3) | BestN("loss")``.

    Args:
        policies: The policies to combine.

    Raises (on construction):
        UsageError: `policies` is empty, or contains a value that is not a policy.
    """

    policies: tuple[Retention, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.policies, tuple) or not self.policies:
            raise UsageError("AnyOf: policies are none", expected="a tuple of policies", found=repr(self.policies))
        for policy in self.policies:
            check_policy("policies", policy)

    def __str__(self) -> str:
        return ", or ".join(map(str, self.policies))

    @property
    def parts(self) -> tuple[Retention, ...]:
        return tuple(part for policy in self.policies for part in policy.parts)

    def keeps(self, facts: Sequence[TagInfo]) -> Collection[TagInfo]:
        kept = {fact.tag for policy in self.policies for fact in policy.keeps(facts)}
        return [fact for fact in facts if fact.tag in kept]


def check_policy(name: str, policy: Any) -> None:
    """Check that a value is a retention policy.

    Raises:
        UsageError: It is not a policy.
    """
    if not isinstance(policy, Retention):
        raise UsageError(
            f"{name} is no policy of retention",
            expected="a value such as xla_ckpt.LatestN(3) | xla_ckpt.BestN('loss')",
            found=repr(policy)[:80],
        )


def _check_count(policy: str, name: str, count: Any) -> None:
    if type(count) is not int or count < 1:
        raise UsageError(f"{policy}: {name} makes no sense", expected="an int of at least 1", found=repr(count))


_POLICY_TYPES: dict[str, Any] = {
    kind.__name__: kind for kind in (LatestN, BestN, EveryNSteps, EveryNSeconds, LatestDuration)
}
"""Policies that a checkpoint can record, by name."""


def resolve_policy(num_kept: int | None, retention: Retention | None) -> Retention | None:
    """Return the policy given by one of two arguments; None keeps all tags.

    Raises:
        UsageError: Both are given, or `num_kept` is invalid: it must be a positive int, or None or -1, which keep all.
    """
    if num_kept is not None and (type(num_kept) is not int or num_kept < -1 or num_kept == 0):
        raise UsageError(
            f"num_kept_ckpts={num_kept!r} is no number of tags to keep",
            expected="an int of at least 1; or None or -1, which keep all",
        )
    if num_kept is None or num_kept == -1:  # neuronx-distributed scripts pass -1
        return retention
    if retention is not None:
        raise UsageError(
            "num_kept_ckpts= and retention= both say which tags are kept",
            expected="one of them",
            found=f"num_kept_ckpts={num_kept}, retention={retention!r}",
            hint=f"Say retention=LatestN({num_kept}) | ..., without num_kept_ckpts=.",
        )
    return LatestN(num_kept)


def encode_policy(policy: Retention | None) -> Any:
    """Return the JSON that a checkpoint records for a policy; None for no policy or a user-defined one.

    >>> encode_policy(LatestN(3) | BestN("loss"))
    [['LatestN', 3], ['BestN', 'loss', 1, 'min']]
    """
    parts = () if policy is None else policy.parts
    if not parts or not all(type(part) in _POLICY_TYPES.values() for part in parts):
        return None
    values = [[getattr(part, field.name) for field in dataclasses.fields(part)] for part in parts]  # type: ignore[arg-type]
    return [
        [type(part).__name__, *(v.total_seconds() if isinstance(v, datetime.timedelta) else v for v in its)]
        for part, its in zip(parts, values, strict=True)
    ]


def parse_policy(json: Any) -> Retention | None:
    """Return the policy recorded in a checkpoint; None if there is none, or it is unknown to this version.

    >>> parse_policy(encode_policy(LatestN(3) | BestN("loss"))) == LatestN(3) | BestN("loss"), parse_policy([["?"]])
    (True, None)
    """
    try:
        parts = tuple(_parse_part(*part) for part in json)
        return parts[0] if len(parts) == 1 else AnyOf(parts)
    except (TypeError, ValueError, KeyError, OverflowError, UsageError):
        return None


def _parse_part(name: str, *values: Any) -> Retention:
    if name == LatestDuration.__name__:
        return LatestDuration(*(datetime.timedelta(seconds=value) for value in values))
    policy: Retention = _POLICY_TYPES[name](*values)
    return policy


def explain_kept(facts: Sequence[TagInfo], policy: Retention | None) -> dict[str, tuple[str, ...]]:
    """Return the reasons for which each tag is kept, oldest tag first; empty for tags to be deleted.

    >>> explain_kept([TagInfo("a", 1), TagInfo("b", 2, pinned=True), TagInfo("c", 3), TagInfo("d", 4)], LatestN(1))
    {'a': (), 'b': ('pinned',), 'c': (), 'd': ('the newest', 'of the newest 1')}

    Raises:
        UsageError: The policy failed.
        CheckpointError: The policy needs information of a tag that cannot be read.
    """
    ordered = sorted(facts, key=lambda fact: (fact.sequence, fact.created, fact.tag))
    reasons: dict[str, list[str]] = {fact.tag: ["pinned"] if fact.pinned else [] for fact in ordered}
    for fact in ordered:
        if not fact.readable:  # it may be repaired, and must not cause the deletion of valid tags
            reasons[fact.tag].append("its manifest cannot be read")
    readable = [fact for fact in ordered if fact.readable]
    if readable:
        reasons[readable[-1].tag].append("the newest")
    live = [fact for fact in readable if not fact.pinned]
    if policy is not None:
        with _wrap_policy_errors(policy):
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
def _wrap_policy_errors(policy: Retention) -> Iterator[None]:
    """Convert exceptions of a policy, which may be user code, to an error that names the policy.

    Raises:
        UsageError: The policy failed.
        CheckpointError: The policy needs information of a tag (`TagInfo.metric`) that cannot be read.
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


def find_tags_to_delete(facts: Sequence[TagInfo], policy: Retention | None) -> list[str]:
    """Return the tags to delete, oldest first.

    >>> tags = [TagInfo("a", 1), TagInfo("best", 2, pinned=True), TagInfo("b", 3), TagInfo("c", 4)]
    >>> find_tags_to_delete(tags, LatestN(2))
    ['a']
    """
    return [tag for tag, reasons in explain_kept(facts, policy).items() if not reasons]
