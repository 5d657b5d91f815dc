"""Policies of retention: what they keep, and what none of them may delete. Pure."""

from __future__ import annotations

import datetime
import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import xla_ckpt
from xla_ckpt import AnyOf, BestN, EveryNSeconds, EveryNSteps, LatestDuration, LatestN, Retention, UsageError
from xla_ckpt.errors import CorruptCheckpointError
from xla_ckpt.tags.kept import parsed_policy, policy_json, policy_of, superfluous, why_kept
from xla_ckpt.tags.retention import TagFact

START = datetime.datetime(2026, 3, 1, 22, tzinfo=datetime.UTC)
HOUR = 3600


def fact(tag: str, sequence: int, hours: float | None = 0, pinned: bool = False, **numbers: float) -> TagFact:
    created = "" if hours is None else (START + datetime.timedelta(hours=hours)).isoformat()
    return TagFact(tag, sequence, pinned, created, numbers.get)


COUNTS = st.integers(1, 4)
POLICIES = st.one_of(
    st.builds(LatestN, COUNTS),
    st.builds(BestN, st.sampled_from(["loss", "other"]), COUNTS, st.sampled_from(["min", "max"])),
    st.builds(EveryNSteps, COUNTS),
    st.builds(EveryNSeconds, st.sampled_from([HOUR, 5 * HOUR])),
    st.builds(LatestDuration, st.timedeltas(datetime.timedelta(seconds=1), datetime.timedelta(hours=9))),
)
UNIONS = st.lists(POLICIES, min_size=1, max_size=3).map(lambda policies: AnyOf(tuple(policies)))
NUMBERS = st.one_of(st.sampled_from([0.5, math.nan, math.inf, 10**400]), st.floats())


@st.composite
def facts(draw: st.DrawFn) -> list[TagFact]:
    listed = []
    for number in range(draw(st.integers(0, 9))):
        numbers = draw(st.dictionaries(st.sampled_from(["loss", "other"]), NUMBERS))
        hours = draw(st.one_of(st.none(), st.integers(0, 30)))
        name = draw(st.sampled_from(["step_", "best", "run1-"])) + str(number)
        listed.append(fact(name, number + 1, hours, draw(st.booleans()), **numbers))
    return draw(st.permutations(listed))


def left(listed: list[TagFact], policy: Retention) -> list[TagFact]:
    gone = superfluous(listed, policy)
    return [one for one in listed if one.tag not in gone]


@given(facts(), st.one_of(POLICIES, UNIONS))
def test_the_newest_and_pinned_tags_stay_and_a_second_look_deletes_nothing(
    listed: list[TagFact], policy: Retention
) -> None:
    stay = left(listed, policy)
    assert {one.tag for one in listed if one.pinned} <= {one.tag for one in stay}
    assert max(listed, key=lambda one: one.sequence, default=None) in [*stay, None]
    assert left(stay, policy) == stay
    assert superfluous(listed, None) == []


@given(facts(), POLICIES, POLICIES)
def test_a_union_keeps_what_one_of_its_parts_keeps(listed: list[TagFact], one: Retention, other: Retention) -> None:
    of_both = {f.tag for f in (*left(listed, one), *left(listed, other))}
    assert {f.tag for f in left(listed, one | other)} == of_both
    assert (one | other).parts == (one, other)
    assert left(listed, AnyOf((one | other,))) == left(listed, one | other)


def kept(listed: list[TagFact], policy: Retention) -> list[str]:
    """The tags that stay for another reason than that they are the newest."""
    return [tag for tag, reasons in why_kept(listed, policy).items() if set(reasons) - {"the newest"}]


def test_what_each_policy_keeps() -> None:
    listed = [fact(f"step_{n}00", n, n, loss=abs(n - 3)) for n in range(1, 8)]
    assert kept(listed, LatestN(2)) == ["step_600", "step_700"]
    assert kept(listed, BestN("loss", 2)) == ["step_300", "step_400"], "of equal ones the newer"
    assert kept(listed, BestN("loss", mode="max")) == ["step_700"]
    assert kept(listed, EveryNSteps(300)) == ["step_300", "step_600"]
    assert kept(listed, EveryNSeconds(86400)) == ["step_100", "step_200"], "2026-03-01 23:00, and 2026-03-02 00:00"
    assert kept(listed, LatestDuration(datetime.timedelta(hours=1))) == ["step_600", "step_700"]
    assert why_kept(listed, LatestN(1) | BestN("loss"))["step_700"] == ("the newest", "of the newest 1")


def test_a_name_without_a_number_has_the_step_of_its_commit() -> None:
    listed = [fact("a", 1), fact("b", 2), fact("epoch_1-step_4", 3), fact("step_5", 4)]
    assert kept(listed, EveryNSteps(2)) == ["b", "epoch_1-step_4"]


def test_a_tag_without_the_number_is_not_among_the_best_unless_none_has_it() -> None:
    listed = [fact("a", 1), fact("b", 2, loss=math.nan), fact("c", 3), fact("d", 4)]
    assert kept(listed, BestN("loss")) == ["b"]
    assert kept(listed, BestN("los")) == ["a", "b", "c", "d"], "a name that is misspelt deletes nothing"
    assert kept([*listed, fact("e", 5, loss=math.inf)], BestN("loss", mode="max")) == ["e"], "NaN is the worst"


def test_what_is_not_known_deletes_nothing() -> None:
    def unreadable(name: str) -> float:
        raise CorruptCheckpointError("damaged")

    listed = [fact("a", 1, None, loss=3), TagFact("b", 2, created="yesterday", metric=unreadable), fact("c", 3, loss=2)]
    listed += [fact("d", 4, loss=1), fact("e", 5, loss=4)]
    assert kept(listed, BestN("loss")) == ["b", "d"]
    for policy in (EveryNSeconds(HOUR), LatestDuration(datetime.timedelta(hours=1))):
        assert {"a", "b"} < set(kept(listed, policy))


def test_what_cannot_be_read_stays_and_is_not_counted() -> None:
    """Else a damaged tag, as the newest, would have all good ones deleted."""
    facts = [fact("a", 1), fact("b", 2), replace(fact("c", 3), readable=False), replace(fact("d", 4), readable=False)]
    assert superfluous(facts, LatestN(1)) == ["a"]
    assert why_kept(facts, LatestN(1))["d"] == ("its manifest cannot be read",)


def test_pinned_tags_are_not_counted() -> None:
    listed = [fact("a", 1, loss=3), fact("b", 2, pinned=True, loss=1), fact("c", 3, loss=2), fact("d", 4, loss=4)]
    assert kept(listed, BestN("loss", 1)) == ["b", "c"]


@pytest.mark.parametrize(
    ("kind", "wrong", "names"),
    [
        (LatestN, (0,), "LatestN: n"),
        (LatestN, (True,), "LatestN: n"),
        (BestN, ("",), "BestN: metric"),
        (BestN, (lambda content: content["loss"],), "BestN: metric"),
        (BestN, ("loss", 0), "BestN: n"),
        (BestN, ("loss", 1, "least"), "mode"),
        (EveryNSteps, (-1,), "EveryNSteps: interval_steps"),
        (EveryNSeconds, (0.5,), "EveryNSeconds: interval_secs"),
        (LatestDuration, (3600,), r"LatestDuration: duration.*timedelta\(days=7\)"),
        (LatestDuration, (datetime.timedelta(0),), "LatestDuration: duration"),
        (AnyOf, ((),), "AnyOf: policies"),
        (AnyOf, ((3,),), "policies is no policy"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_when_it_is_made(kind: Any, wrong: tuple[Any, ...], names: str) -> None:
    with pytest.raises(UsageError, match=names):
        kind(*wrong)


def test_an_argument_that_does_not_exist_is_told() -> None:
    with pytest.raises(TypeError, match="did you mean 'mode'"):
        BestN("loss", mod="min")  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        LatestN(3) | 3  # type: ignore[operator]


def test_it_is_said_in_one_of_two_ways() -> None:
    assert policy_of(None, None) is None
    assert policy_of(3, None) == LatestN(3) == policy_of(None, LatestN(3))
    with pytest.raises(UsageError, match=r"num_kept_ckpts= and retention=.*LatestN\(3\) \|"):
        policy_of(3, BestN("loss"))
    with pytest.raises(UsageError, match=r"retention is no policy.*xla_ckpt.LatestN\(3\).*found 3"):
        xla_ckpt.SaveOptions(retention=3)  # type: ignore[arg-type]


def test_a_number_that_no_tag_has_is_the_reason_why_all_stay() -> None:
    facts = [TagFact("a", 1), TagFact("b", 2)]
    assert why_kept(facts, BestN("los")) == {
        "a": ("no tag has the number los in its user_content",),
        "b": ("the newest", "no tag has the number los in its user_content"),
    }


@pytest.mark.parametrize(
    "policy",
    [
        LatestN(3),
        BestN("eval.loss", 2, "max") | EveryNSteps(100),
        EveryNSeconds(3600) | LatestDuration(datetime.timedelta(days=7, seconds=1)),
        AnyOf((AnyOf((LatestN(1), LatestN(2))), EveryNSteps(3))),
    ],
    ids=str,
)
def test_a_tag_says_a_policy(policy: Retention) -> None:
    said = parsed_policy(json.loads(json.dumps(policy_json(policy))))
    assert said is not None
    assert said.parts == policy.parts


@pytest.mark.parametrize(
    "said",
    [None, 7, "LatestN", [], [[]], [["LatestN"]], [["LatestN", 0]], [["LatestN", 1, 2]], [[["LatestN"], 1]],
     [["Newer", 1]], [["LatestDuration", 1e300]], [["LatestDuration", "a"]], [["BestN", 7]], {"LatestN": 3}],
)  # fmt: skip
def test_what_a_tag_says_may_be_no_policy(said: Any) -> None:
    assert parsed_policy(said) is None
