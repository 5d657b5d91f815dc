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
from xla_ckpt.tags.retention import (
    TagInfo,
    encode_policy,
    explain_kept,
    find_tags_to_delete,
    parse_policy,
    resolve_policy,
)

START = datetime.datetime(2026, 3, 1, 22, tzinfo=datetime.UTC)
HOUR = 3600


def fact(tag: str, sequence: int, hours: float | None = 0, pinned: bool = False, **numbers: float) -> TagInfo:
    created = "" if hours is None else (START + datetime.timedelta(hours=hours)).isoformat()
    return TagInfo(tag, sequence, pinned, created, numbers.get)


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
def facts(draw: st.DrawFn) -> list[TagInfo]:
    listed = []
    for number in range(draw(st.integers(0, 9))):
        numbers = draw(st.dictionaries(st.sampled_from(["loss", "other"]), NUMBERS))
        hours = draw(st.one_of(st.none(), st.integers(0, 30)))
        name = draw(st.sampled_from(["step_", "best", "run1-"])) + str(number)
        listed.append(fact(name, number + 1, hours, draw(st.booleans()), **numbers))
    return draw(st.permutations(listed))


def left(listed: list[TagInfo], policy: Retention) -> list[TagInfo]:
    gone = find_tags_to_delete(listed, policy)
    return [one for one in listed if one.tag not in gone]


@given(facts(), st.one_of(POLICIES, UNIONS))
def test_the_newest_and_pinned_tags_stay_and_a_second_look_deletes_nothing(
    listed: list[TagInfo], policy: Retention
) -> None:
    stay = left(listed, policy)
    assert {one.tag for one in listed if one.pinned} <= {one.tag for one in stay}
    assert max(listed, key=lambda one: one.sequence, default=None) in [*stay, None]
    assert left(stay, policy) == stay
    assert find_tags_to_delete(listed, None) == []


@given(facts(), POLICIES, POLICIES)
def test_a_union_keeps_what_one_of_its_parts_keeps(listed: list[TagInfo], one: Retention, other: Retention) -> None:
    of_both = {f.tag for f in (*left(listed, one), *left(listed, other))}
    assert {f.tag for f in left(listed, one | other)} == of_both
    assert (one | other).parts == (one, other)
    assert left(listed, AnyOf((one | other,))) == left(listed, one | other)


def kept(listed: list[TagInfo], policy: Retention) -> list[str]:
    """The tags that stay for another reason than that they are the newest."""
    return [tag for tag, reasons in explain_kept(listed, policy).items() if set(reasons) - {"the newest"}]


def test_what_each_policy_keeps() -> None:
    listed = [fact(f"step_{n}00", n, n, loss=abs(n - 3)) for n in range(1, 8)]
    assert kept(listed, LatestN(2)) == ["step_600", "step_700"]
    assert kept(listed, BestN("loss", 2)) == ["step_300", "step_400"], "of equal ones the newer"
    assert kept(listed, BestN("loss", mode="max")) == ["step_700"]
    assert kept(listed, EveryNSteps(300)) == ["step_300", "step_600"]
    assert kept(listed, EveryNSeconds(86400)) == ["step_100", "step_200"], "2026-03-01 23:00, and 2026-03-02 00:00"
    assert kept(listed, LatestDuration(datetime.timedelta(hours=1))) == ["step_600", "step_700"]
    assert explain_kept(listed, LatestN(1) | BestN("loss"))["step_700"] == ("the newest", "of the newest 1")


NAMES = [
    "{}", "{:08}", "step_{}", "step_{:08}", "step-{}", "step={}", "step{}", "Step {}", "STEP_{:06}",
    "global_step{}", "global_step_{}", "GlobalStep{}", "iter_{:07}", "iter-{:06}-ckpt", "iteration_{}", "iter={}",
    "checkpoint-{}", "checkpoint_{}", "ckpt-{}", "ckpt_{}", "checkpoint_3_{}", "update_{}", "epoch=0-step={}",
    "epoch=0-step={}-v1", "epoch=3-step={}.ckpt", "step={}-val=0.25", "step={}-val_loss=1.5-last",
    "epoch=3-step={}-v2.ckpt", "step={}-epoch=12", "epoch_12_step_{}", "best-epoch=2-step={}",
    "megatron_gpt--val_loss=1.23-step={}-consumed_samples=64000.0", "gpt--step={}-consumed_samples=640-last",
    "ep0-ba{}-rank0", "ep12-ba{}", "step{}-unsharded", "step-{}-max_steps=90000", "warmup_steps=100-step={}",
    "{}.ckpt", "{}.pt", "model_{}.pth", "step_{}.dcp", "{}.h5", "{}-best", "{}_steps", "{}steps-best",
    "checkpoint-{}-merged", "llama-7b_step_{}", "step_{}_7b", "iter_{:07}_hf", "run2-step-{}", "step_{}-v3",
    "best_{}", "exp12-checkpoint-{}", "2026-01-31_{}", "2026-01-31T12:30:00-step{}", "step{}_20260131-123000",
    "run_2026-01-31_12-30-00_{}", "0-{}", "{}_epoch3",
]  # fmt: skip
"""How people, Lightning, transformers, Megatron, NeMo, fairseq, Composer, OLMo, orbax, MaxText and torchtitan name the
tag of a step."""

WITHOUT = [
    "best", "last", "last-v1", "final", "run-a", "7b", "llama3-8b", "step_500k", "llama-3-step-500k", "9f86d081",
    "step_1.5", "2026-01-31", "20260131-123000", "2026-01-31T12:30:00", "epoch=3-val=0.25", "weights.05-0.32",
    "ckpt-500k", "max_steps=900", "model--val_loss=2.00-epoch=1-consumed_samples=4000", "1-500-final", "v1.2.3",
    "best-loss=3", "seed=1",
]  # fmt: skip
"""Names that say no step, although numbers are in some."""


@pytest.mark.parametrize("name", NAMES)
def test_the_step_is_found_wherever_it_is_in_a_name(name: str) -> None:
    steps = [0, 7, 300, 1000, 123400]
    assert [TagInfo(name.format(step), 1).step for step in steps] == steps
    listed = [fact(name.format(step), n) for n, step in enumerate([100, 250, 500, 750, 900, 1000, 1100])]
    assert kept(listed, EveryNSteps(500)) == [name.format(500), name.format(1000)]


@pytest.mark.parametrize("name", WITHOUT)
def test_a_name_without_a_step_has_that_of_the_user_content_or_is_kept(name: str) -> None:
    assert TagInfo(name, 7).step is None
    for key in ("step", "global_step", "iteration"):
        assert TagInfo(name, 7, metric={key: 500}.get).step == 500
        assert TagInfo(name, 7, metric={key: 500.5}.get).step is None
    listed = [fact("step_1", 1), fact("step_2", 2), fact(name, 3), fact("step_4", 4), fact("step_5", 5)]
    assert explain_kept(listed, EveryNSteps(2)) == {
        "step_1": (), "step_2": ("of every 2 steps",), name: ("its step is not known",),
        "step_4": ("of every 2 steps",), "step_5": ("the newest",),
    }  # fmt: skip


@given(st.text(max_size=40))
def test_any_name_has_a_step_that_is_in_it_or_none(name: str) -> None:
    step = TagInfo(name, 7).step
    assert step is None or str(step) in name


def test_a_number_that_names_no_step_yields_to_the_user_content() -> None:
    assert TagInfo("run2", 7).step == 2
    assert TagInfo("run2", 7, metric={"step": 500}.get).step == 500
    assert TagInfo("step_2", 7, metric={"step": 500}.get).step == 2


def test_a_tag_without_the_number_is_not_among_the_best_unless_none_has_it() -> None:
    listed = [fact("a", 1), fact("b", 2, loss=math.nan), fact("c", 3), fact("d", 4)]
    assert kept(listed, BestN("loss")) == ["b"]
    assert kept(listed, BestN("los")) == ["a", "b", "c", "d"], "a name that is misspelt deletes nothing"
    assert kept([*listed, fact("e", 5, loss=math.inf)], BestN("loss", mode="max")) == ["e"], "NaN is the worst"


def test_what_is_not_known_deletes_nothing() -> None:
    def unreadable(name: str) -> float:
        raise CorruptCheckpointError("damaged")

    listed = [fact("a", 1, None, loss=3), TagInfo("b", 2, created="yesterday", metric=unreadable), fact("c", 3, loss=2)]
    listed += [fact("d", 4, loss=1), fact("e", 5, loss=4)]
    assert kept(listed, BestN("loss")) == ["b", "d"]
    for policy in (EveryNSeconds(HOUR), LatestDuration(datetime.timedelta(hours=1))):
        assert {"a", "b"} < set(kept(listed, policy))


def test_what_cannot_be_read_stays_and_is_not_counted() -> None:
    """Else a damaged tag, as the newest, would have all good ones deleted."""
    facts = [fact("a", 1), fact("b", 2), replace(fact("c", 3), readable=False), replace(fact("d", 4), readable=False)]
    assert find_tags_to_delete(facts, LatestN(1)) == ["a"]
    assert explain_kept(facts, LatestN(1))["d"] == ("its manifest cannot be read",)


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
    assert resolve_policy(None, None) is None
    assert resolve_policy(3, None) == LatestN(3) == resolve_policy(None, LatestN(3))
    with pytest.raises(UsageError, match=r"num_kept_ckpts= and retention=.*LatestN\(3\) \|"):
        resolve_policy(3, BestN("loss"))
    with pytest.raises(UsageError, match=r"retention is no policy.*xla_ckpt.LatestN\(3\).*found 3"):
        xla_ckpt.SaveOptions(retention=3)  # type: ignore[arg-type]


def test_a_number_that_no_tag_has_is_the_reason_why_all_stay() -> None:
    facts = [TagInfo("a", 1), TagInfo("b", 2)]
    assert explain_kept(facts, BestN("los")) == {
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
    said = parse_policy(json.loads(json.dumps(encode_policy(policy))))
    assert said is not None
    assert said.parts == policy.parts


@pytest.mark.parametrize(
    "said",
    [None, 7, "LatestN", [], [[]], [["LatestN"]], [["LatestN", 0]], [["LatestN", 1, 2]], [[["LatestN"], 1]],
     [["Newer", 1]], [["LatestDuration", 1e300]], [["LatestDuration", "a"]], [["BestN", 7]], {"LatestN": 3}],
)  # fmt: skip
def test_what_a_tag_says_may_be_no_policy(said: Any) -> None:
    assert parse_policy(said) is None
