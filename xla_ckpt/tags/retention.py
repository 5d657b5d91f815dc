"""Retention policies (`LatestN`, `BestN`, ...) and the decision which tags to keep or delete. Pure.

A policy is a value; ``a | b`` keeps what either keeps. `find_tags_to_delete` and `explain_kept` apply one to
`TagInfo` facts. Policies are parsed from arguments and from the JSON that a checkpoint records.
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
"""Periods that have a name (s)."""

Extreme = Literal["min", "max"]

STEP_NAMES = ("step", "global_step", "iteration")
"""What programs call the step in ``user_content``."""

_END = r"(?![0-9a-z])"
"""Ends a number that is no size (``7b``) and no part of a hash (``5f3a``), in lower case."""

_LABELS = (r"step", r"steps", r"(?<![a-z])(?:iter|iters|iteration|iterations)", r"(?<![a-z])(?:updates?|ba)")
"""Words that say that the number behind or before them is the step, the clearest first."""

_NUMBER = r"[0-9]{1,3}(?:_[0-9]{3})+(?![0-9_])|[0-9]+"
"""A number, also as ``f"{step:_}"`` writes it: ``1_000``."""

_LABELLED = (
    *(re.compile(rf"{label}[-_=: .]*({_NUMBER}){_END}") for label in _LABELS),
    *(re.compile(rf"(?<![0-9a-z.])([0-9]+)[-_ ]?{label}(?![a-z]|[-_=: .]*[0-9])") for label in _LABELS),
    re.compile(r"^(?:checkpoint|ckpt)?[-_=]?([0-9]+)$"),
)

_OTHER_NUMBERS = re.compile(
    r"\.(?:[a-z_]+|h5)$"  # the ending of the name of a file
    r"|[-_.]v[0-9]+(?=$|\.[a-z_]+$)"  # the version of a file whose name was taken
    r"|(?<![0-9])(?:19|20)[0-9]{2}-[0-9]{2}-[0-9]{2}(?:t[0-9:.-]+z?|[-_ ][0-9]{2}[-:][0-9]{2}[-:][0-9]{2})?"  # a date
    r"|(?<![0-9])20[0-9]{6}[-_t]?[0-9]{6}(?![0-9])"
    r"|(?<![a-z])(?:samples|tokens|loss|acc|accuracy|score|ppl|lr|seed|rank|fold|val)[-_=: .]*[0-9]+(?:\.[0-9]+)*"
    r"|(?:max|total|num|warmup|every|every_n)_steps?[-_=: ]*[0-9]+"
    r"|(?<![0-9])[0-9]+(?:\.[0-9]+)+"  # a decimal
)
"""What of a name in lower case counts no steps, although it may be a number."""


def _strip_other_numbers(tag: str) -> str:
    return _OTHER_NUMBERS.sub(" ", tag.lower()).strip()


@functools.lru_cache(maxsize=10_000)  # a policy asks for the step of each tag several times in each save
def parse_labelled_step(tag: str) -> int | None:
    """Return the step in the name of a tag that says so: ``step_400``, ``iter_0000400``, ``checkpoint-400``, ``400``.

    >>> [parse_labelled_step(tag) for tag in ("epoch=1-step=400-v1", "400.ckpt", "step_1_400", "run-7b", "epoch_4")]
    [400, 400, 1400, None, None]
    """
    name = _strip_other_numbers(tag)
    found = (numbers[-1] for pattern in _LABELLED if (numbers := pattern.findall(name)))
    return next(map(int, found), None)


@functools.lru_cache(maxsize=10_000)
def parse_bare_number(tag: str) -> int | None:
    """Return the number at the end of the name of a tag, or at its start, if it is the only one there.

    Dates, versions, decimals and numbers that count something else than steps are passed over, and so are those of
    epochs where there are others.

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
    """What retention knows of a tag."""

    tag: str
    sequence: int
    """Commit number: the order of tags."""

    pinned: bool = False
    created: str = ""
    """Time of the commit: UTC, ISO 8601; empty if it is not known."""

    metric: Callable[[str], float | None] = field(default=lambda name: None, repr=False, compare=False)
    """A number that the program saved with the tag, by its name; None if there is none. It is looked up when a policy
    asks, and raises a `CheckpointError` if that cannot be done."""

    readable: bool = True
    """Whether its manifest can be read, as far as somebody has looked."""

    @property
    def step(self) -> int | None:
        """The step in the name; else the one that the program saved with the tag, in ``user_content``, as one of
        `STEP_NAMES`; else a number of which the name does not say what it counts. None if there is none of these.

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
            return None  # whoever looked it up has told of the error
        steps = [int(number) for number in saved if number is not None and number == number // 1]
        return steps[0] if steps else parse_bare_number(self.tag)

    @property
    def time(self) -> datetime.datetime | None:
        """Time of the commit; None if it is not known."""
        try:
            time = datetime.datetime.fromisoformat(self.created)
        except ValueError:
            return None
        return time if time.tzinfo is not None else time.replace(tzinfo=datetime.UTC)


class Retention(ABC):
    """Which tags are kept: a policy, as a value. ``a | b`` keeps what one of the two keeps.

    The newest tag is kept in any case, and so are pinned tags and those that cannot be read, which no policy counts.
    """

    __slots__ = ()

    @abstractmethod
    def keeps(self, facts: Sequence[TagInfo]) -> Collection[TagInfo]:
        """Those tags that are kept, of all that are not pinned, oldest first.

        A save asks before its commit: what is raised here fails it.
        """

    def reason(self, facts: Sequence[TagInfo]) -> str:  # of derived classes one depends on the tags
        """Why it keeps those of these tags that it keeps."""
        return str(self)

    def unknown(self, fact: TagInfo) -> str:
        """What it does not know of a tag, and keeps it for; empty if it knows all that it asks for."""
        return ""

    @property
    def parts(self) -> tuple[Retention, ...]:
        """The policies of which it consists."""
        return (self,)

    def __or__(self, other: Retention) -> AnyOf:
        return AnyOf((*self.parts, *other.parts)) if isinstance(other, Retention) else NotImplemented


@check_fields
@dataclass(frozen=True, slots=True)
class LatestN(Retention):
    """Keep the `n` newest tags.

    Raises (on construction):
        UsageError: `n` is no number of tags.
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
    """Keep the `n` tags with the best values of a number that is saved with them in ``user_content``.

    Of equal ones the newer are better, and NaN is the worst. A tag without this number is not among the best; where no
    tag has it, all are kept, and so is one whose number cannot be read.

    Args:
        metric: Name of the number; its path, with dots, where containers hold it: ``"loss"``, ``"eval.accuracy"``. In a
            tree of `save` without ``user_content``, the path begins at the tree.
        n: How many.
        mode: Whether the smallest (``"min"``) or the largest (``"max"``) is the best.

    Raises (on construction):
        UsageError: There is no such choice, or a value makes no sense.
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
        """Whether the number is in none of these tags, so that nothing is deleted for it: it may be misspelt."""
        return bool(facts) and self._collect_numbers(facts) == ([], [])

    def keeps(self, facts: Sequence[TagInfo]) -> Collection[TagInfo]:
        numbers, unread = self._collect_numbers(facts)
        if not numbers:
            return facts
        return [*unread, *(facts[-i] for _, i in sorted(numbers)[: self.n])]

    def _collect_numbers(self, facts: Sequence[TagInfo]) -> tuple[list[tuple[float, int]], list[TagInfo]]:
        """(number, -row) of each tag that has it, so that the best come first; and the tags that cannot be read."""
        numbers, unread = list[tuple[float, int]](), list[TagInfo]()
        for i, fact in enumerate(facts):
            try:
                number = fact.metric(self.metric)
            except CheckpointError:
                unread.append(fact)  # it may be the best: whoever looked it up has told of the error
                continue
            if number is not None:
                signed = number if self.mode == "min" else -number
                numbers.append((math.inf if signed != signed else signed, -i))
        return numbers, unread


@check_fields
@dataclass(frozen=True, slots=True)
class EveryNSteps(Retention):
    """Keep each tag whose step is a multiple of `interval_steps`.

    The step is the number in the tag's name that says so, as in ``step_400``, ``epoch=1-step=400-v1``,
    ``iter_0000400``, ``checkpoint-400`` and ``400``. Where there is none, it is the number ``step`` (or
    ``global_step``, ``iteration``) in ``user_content``; else the only number in the name, or the one at its end. A tag
    without any of these is kept.

    Raises (on construction):
        UsageError: `interval_steps` is no number of steps.
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
    """Keep the first tag of each period of `interval_secs` seconds: 3600 is each hour, and 86400 each day, of UTC.

    A tag is kept whose time is not known.

    Raises (on construction):
        UsageError: `interval_secs` is no number of seconds.
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
    """Keep the tags that are at most `duration` older than the newest.

    So a run that rests for a month loses nothing when it goes on. A tag is kept whose time is not known.

    Raises (on construction):
        UsageError: `duration` is no duration above 0.
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
    """Keep what one of several `policies` keeps: ``LatestN(3) | BestN("loss")`` is short for it.

    Raises (on construction):
        UsageError: Something is no policy, or there is none.
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
    """Refuse what is no policy.

    Raises:
        UsageError: It is none.
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
"""The policies that a tag can say, by name."""


def resolve_policy(num_kept: int | None, retention: Retention | None) -> Retention | None:
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


def encode_policy(policy: Retention | None) -> Any:
    """A policy, as a tag says it; None for none, and for one that a program has made itself.

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
    """The policy that a tag says; None if it says none, or one that only another version of this library knows.

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
    """Each tag, oldest first -> the reasons for which it is kept: none for one that is to be deleted.

    >>> explain_kept([TagInfo("a", 1), TagInfo("b", 2, pinned=True), TagInfo("c", 3), TagInfo("d", 4)], LatestN(1))
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
    """Raise what a policy raises, which may be the program's own, as an error that names the policy.

    Raises:
        UsageError: The policy failed.
        CheckpointError: It has looked something up in a tag (`TagInfo.metric`) that cannot be read.
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
    """The tags to delete, oldest first.

    >>> tags = [TagInfo("a", 1), TagInfo("best", 2, pinned=True), TagInfo("b", 3), TagInfo("c", 4)]
    >>> find_tags_to_delete(tags, LatestN(2))
    ['a']
    """
    return [tag for tag, reasons in explain_kept(facts, policy).items() if not reasons]
