"""The ledger of an object store: whatever happens to it, no tag loses its files, and none is forgotten."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xla_ckpt.core.checksum import seal_json
from xla_ckpt.errors import CheckpointError, FormatError, UnsupportedVersionError
from xla_ckpt.tags import ledger_rules as rules
from xla_ckpt.tags.ledger_rules import (
    RETENTION_COMMITS,
    Ledger,
    LedgerTag,
    encode_ledger,
    make_attempt_name,
    parse_ledger,
)
from xla_ckpt.tags.retention import TagInfo, find_tags_to_delete, resolve_policy

TAGS = ["a", "b", "c"]
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "commit", "give up", "retire", "pin", "take", "clean"]),
        st.sampled_from(TAGS),
        st.sampled_from([None, 1, 2]),
    ),
    max_size=40,
)


def tag_of(attempt: str) -> str:
    return attempt.partition("/")[0]


def retained(ledger: Ledger, number: int | None) -> Ledger:
    """What retention makes of a ledger after a commit."""
    facts = [TagInfo(tag, its.sequence, its.pinned) for tag, its in ledger.tags.items()]
    return rules.retire_tags(ledger, find_tags_to_delete(facts, resolve_policy(number, None)))


@settings(deadline=None)
@given(EVENTS)
def test_files_go_when_nobody_can_need_them_any_more(events: list[tuple[str, str, int | None]]) -> None:
    """The files of each attempt are followed from its begin until it is swept."""
    ledger, stored, token = (
        Ledger(),
        dict[str, int](),
        0,
    )  # of each attempt, the commit that ended it; -1: nobody reads it
    for event, tag, number in events:
        writing = [attempt for attempt in ledger.open if tag_of(attempt) == tag]
        before = ledger
        if event == "begin":
            token += 1
            attempt = make_attempt_name(tag, f"{token:x}")
            ledger, stored[attempt] = rules.begin_attempt(ledger, attempt, "one" if number else "other"), -1
        elif event == "commit" and writing:
            sequence, is_pinned = ledger.sequence + 1, tag == "c"
            ledger = retained(rules.commit_attempt(ledger, tag, LedgerTag(writing[0], sequence, is_pinned, "")), number)
            assert ledger.tags[tag].attempt == writing[0]
            kept = [its for its in ledger.tags.values() if not its.pinned]
            assert number is None or len(kept) <= max(number, 1) + (tag == "c")
            assert {name for name, its in before.tags.items() if its.pinned} <= ledger.tags.keys()
        elif event == "give up":
            ledger = rules.give_up_attempts(ledger, writing)
        elif event == "retire" and tag in ledger.tags:
            ledger = rules.retire_tags(ledger, [tag])
        elif event == "pin" and tag in ledger.tags:
            ledger = rules.set_pinned(ledger, tag, not ledger.tags[tag].pinned)
        elif event == "take":
            ledger = rules.take_ownership(ledger, "one" if number else "other")
        elif event == "clean":
            ledger = rules.give_up_dead(ledger, "one", frozenset(writing))
            swept = rules.list_expired(ledger)
            for attempt in swept:
                assert stored.pop(attempt) <= max(ledger.sequence - RETENTION_COMMITS, -1)
            ledger = rules.forget_attempts(ledger, swept)
        for ended in {its.attempt for its in before.tags.values()} - {its.attempt for its in ledger.tags.values()}:
            stored[ended] = ledger.sequence
        known = [*ledger.open, *ledger.doomed, *(its.attempt for its in ledger.tags.values())]
        assert sorted(known) == sorted(stored), "each attempt that has files is known, and in one place"
        assert all(tag_of(its.attempt) == name for name, its in ledger.tags.items())
        assert len({its.sequence for its in ledger.tags.values()}) == len(ledger.tags)
        assert (ledger.sequence, ledger.epoch) >= (before.sequence, before.epoch)
        assert replace(parse_ledger(encode_ledger(ledger, "w")), recent=()) == replace(ledger, recent=())


def test_a_job_that_takes_over_ends_what_others_have_begun() -> None:
    ledger = rules.begin_attempt(rules.take_ownership(Ledger(), "job"), "a/.1", "one")
    assert rules.take_ownership(ledger, "job") == ledger, "it has the root already"
    assert rules.give_up_dead(ledger, "one", frozenset({"a/.1"})) == ledger
    assert rules.give_up_dead(ledger, "other", frozenset()) == ledger, "another process of the job writes it"
    assert rules.list_expired(rules.give_up_dead(ledger, "one", frozenset())) == ["a/.1"], (
        "a save that could not give it up"
    )
    taken = rules.take_ownership(ledger, "next job")
    assert (taken.epoch, taken.owner) == (1, "next job")
    assert rules.list_expired(rules.give_up_dead(taken, "other", frozenset())) == ["a/.1"]


@settings(deadline=None)
@given(EVENTS, st.booleans(), st.booleans(), EVENTS)
def test_a_commit_that_was_given_up_and_was_not_answered_has_the_fate_that_is_told(
    before: list[tuple[str, str, int | None]],
    is_applied: bool,
    takes_over: bool,
    after: list[tuple[str, str, int | None]],
) -> None:
    """Whatever others do before and after: nothing is told to have failed that is a tag, or was one."""
    ledger = played(Ledger(), before)
    ledger = rules.begin_attempt(ledger, "mine/.a", "one")
    if takes_over:
        ledger = rules.take_ownership(ledger, "somebody")
    if is_applied and ledger.open["mine/.a"].epoch == ledger.epoch:
        ledger = rules.commit_attempt(ledger, "mine", LedgerTag("mine/.a", ledger.sequence + 1, False, ""))
        expected = {"committed", "unknown"}
    else:
        expected = {"given up", "unknown"}
    ledger = rules.give_up_attempts(played(ledger, after), ["mine/.a"])
    assert rules.find_outcome(ledger, "mine/.a") in expected
    assert "mine/.a" not in ledger.open, "a request that comes late is refused"
    if not after:
        assert rules.find_outcome(ledger, "mine/.a") != "unknown"


def played(ledger: Ledger, events: list[tuple[str, str, int | None]]) -> Ledger:
    """What other processes of the job, and other jobs, do with other attempts."""
    for at, (event, tag, number) in enumerate(events):
        writing = [attempt for attempt in ledger.open if tag_of(attempt) == tag]
        if event == "begin":
            ledger = rules.begin_attempt(ledger, make_attempt_name(tag, f"{at:x}"), "other")
        elif event == "commit" and writing:
            its = LedgerTag(writing[0], ledger.sequence + 1, False, "")
            ledger = retained(rules.commit_attempt(ledger, tag, its), number)
        elif event == "retire" and "mine" in ledger.tags:
            ledger = rules.retire_tags(ledger, ["mine"])
        elif event == "take":
            ledger = rules.take_ownership(ledger, tag)
        elif event == "clean":
            ledger = rules.give_up_dead(ledger, "other", frozenset(writing))
            ledger = rules.forget_attempts(ledger, rules.list_expired(ledger))
    return ledger


def test_the_last_writes_are_named() -> None:
    ledger = Ledger()
    for number in range(rules.RECENT_WRITES + 5):
        ledger = parse_ledger(encode_ledger(ledger, f"w{number}"))
    assert (ledger.recent[0], ledger.recent[-1], len(ledger.recent)) == (
        "w5",
        f"w{rules.RECENT_WRITES + 4}",
        rules.RECENT_WRITES,
    )


RECORD = encode_ledger(rules.begin_attempt(Ledger(tags={"a": LedgerTag("a/.1", 1, False, "")}), "a/.2", "one"), "w")
RAW = {name: value for name, value in json.loads(RECORD).items() if name != "digest"}


def record_of(raw: dict[str, object]) -> bytes:
    """A record that has its digest, whatever it says."""
    return seal_json(json.dumps(raw).removesuffix("}").encode())


@given(st.integers(0, len(RECORD) - 1), st.integers(0, 7))
def test_a_flipped_bit_is_noticed(at: int, bit: int) -> None:
    changed = bytearray(RECORD)
    changed[at] ^= 1 << bit
    with pytest.raises(FormatError, match="damaged"):
        parse_ledger(bytes(changed))


@given(st.sampled_from(sorted(RAW)), st.none() | st.integers(-2, 9) | st.text(max_size=3) | st.lists(st.integers()))
def test_a_damaged_ledger_is_refused_or_whole(name: str, value: object) -> None:
    try:
        ledger = parse_ledger(record_of({**RAW, name: value}))
    except CheckpointError:
        return
    assert set(asdict(ledger)) == set(RAW) - {"format", "version"}


@pytest.mark.parametrize("name", ["", "a", "../.1", "a/../.1", "a/b", ".ledger"])
def test_nothing_but_attempts_can_be_doomed(name: str) -> None:
    """All files below a doomed name are deleted."""
    with pytest.raises(FormatError, match="damaged"):
        parse_ledger(record_of({**RAW, "doomed": {name: 0}}))


def test_a_ledger_of_a_newer_version_is_left_alone() -> None:
    with pytest.raises(UnsupportedVersionError):
        parse_ledger(record_of({**RAW, "version": 2}))


ATTEMPTS = st.dictionaries(
    st.builds(
        lambda tag, number: make_attempt_name(tag, f"{number:x}"), st.sampled_from([*TAGS, "d"]), st.integers(0, 9)
    ),
    st.integers(1, 50),
    max_size=8,
)


@settings(deadline=None)
@given(EVENTS, ATTEMPTS)
def test_what_is_adopted_is_the_last_of_its_name_and_takes_no_tags_place(
    events: list[tuple[str, str, int | None]], lying: dict[str, int]
) -> None:
    ledger = played(Ledger(), events)
    complete = {attempt: LedgerTag(attempt, sequence, False, "") for attempt, sequence in lying.items()}
    after = rules.adopt_attempts(ledger, complete)
    assert ledger.tags.items() <= after.tags.items(), "what is a tag stays it"
    assert ledger.open == after.open
    assert rules.collect_attempts(after) - complete.keys() == rules.collect_attempts(ledger) - complete.keys()
    unknown = complete.keys() - rules.collect_attempts(ledger)
    for tag in after.tags.keys() | {tag_of(attempt) for attempt in unknown}:
        its = after.tags[tag]
        older = {attempt for attempt in unknown if tag_of(attempt) == tag and attempt != its.attempt}
        if tag in ledger.tags:
            assert {a for a in older if lying[a] <= its.sequence} == older & after.doomed.keys()
        else:
            assert its.sequence == max(lying[attempt] for attempt in (*older, its.attempt))
            assert older <= after.doomed.keys()
    assert set(rules.list_expired(after)) <= set(ledger.doomed), "who reads it has time"
    assert after.sequence >= max((its.sequence for its in after.tags.values()), default=0)
    assert rules.adopt_attempts(after, complete) == after
