"""The soak for some seconds, and that what it judges by can fail (docs/measured/reliability.md: `make soak`)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.crash.soak import PATIENCE
from tests.crash.soak_judge import Ask, Event, Found, Sample, lost, outcomes, said_wrongly, trend
from tests.runs import environment, names_in

SEED = "23"
"""With this one the disk is full in the first life, and all ranks are killed then, unless the job was faster."""

TIMEOUT = 4 * PATIENCE
"""The soak itself sees what hangs, and shows where: it waits for a job's first save, for a life and for the end."""


@pytest.mark.crash
def test_some_seconds_of_the_soak(tmp_path: Path) -> None:
    file = tmp_path / "result"
    done = subprocess.run(
        [sys.executable, "-m", "tests.crash.soak", *f"--minutes 0.2 --kills 1 --seed {SEED} --json".split(), str(file)],
        env=environment({"TMPDIR": str(tmp_path)}), capture_output=True, text=True, timeout=TIMEOUT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(file.read_text())
    assert result["problems"] == []
    assert result["loads"] > 10
    became = [word for life in result["lives"] for word in life["became"].values()]
    assert became.count("done") > 5
    assert {life["ending"] for life in result["lives"]} > {"orderly"}, "nothing was killed"
    assert names_in(tmp_path) == ["result"], "the soak leaves files"


def ask(number: int, tag: str, kept: int = 3) -> Ask:
    return Ask(
        number=number, tag=tag, layout="native", rows=8, kept=kept, pinned=False, parity=None, mode="sync"
    )  # fmt: skip


ASKED = [ask(3, "c"), ask(4, "b"), ask(5, "d", kept=2)]
BEFORE: Found = [("a", 1), ("b", 2)]
ALL_DONE = {3: "done", 4: "done", 5: "done"}


@pytest.mark.parametrize(
    ("became", "found"),
    [
        (ALL_DONE, [("b", 4), ("d", 5)]),
        (ALL_DONE, [("c", 3), ("b", 4), ("d", 5)]),  # retention did not come to its end
        ({3: "done", 4: "failed"}, [("a", 1), ("b", 2), ("c", 3)]),
        ({3: "done", 4: "unknown"}, [("a", 1), ("b", 2), ("c", 3)]),
        ({3: "done", 4: "unknown"}, [("a", 1), ("c", 3), ("b", 4)]),
        ({}, BEFORE),
    ],
)
def test_what_is_right(became: dict[int, str], found: Found) -> None:
    assert lost(BEFORE, ASKED, became, found) == []


@pytest.mark.parametrize(
    ("became", "found", "problem"),
    [
        (ALL_DONE, [("b", 4), ("d", 6)], "never saved under that name"),
        (ALL_DONE, [("b", 3), ("d", 5)], "never saved under that name"),
        (ALL_DONE, [("d", 5), ("b", 4)], "not in the order"),
        (ALL_DONE, [("c", 3), ("b", 4)], "5 was committed"),
        (ALL_DONE, [("b", 2), ("d", 5)], "4 was committed"),
        (ALL_DONE, [("d", 5)], "tag b, number 4, is gone"),
        ({3: "done", 4: "failed"}, [("a", 1), ("c", 3), ("b", 4)], "whose save failed"),
        ({3: "done", 4: "failed"}, [("a", 1), ("c", 3)], "tag b, number 2, is gone"),
        ({}, [("b", 2)], "tag a, number 1, is gone"),
    ],
)
def test_what_is_lost(became: dict[int, str], found: Found, problem: str) -> None:
    assert any(problem in text for text in lost(BEFORE, ASKED, became, found))


def test_a_pinned_tag_is_never_gone() -> None:
    asked = [ask(2, "c", 1), ask(3, "d", 1)]
    assert lost([("a", 1)], asked, {2: "done", 3: "done"}, [("d", 3)]) == []
    assert lost([("best", 1)], asked, {2: "done", 3: "done"}, [("d", 3)]) != []


def test_what_the_ranks_say() -> None:
    events = [
        Event(number=3, word="begun"), Event(number=3, word="done"),
        Event(number=3, word="failed", error="StorageError"),
        Event(number=4, word="failed", error="StorageError"), Event(number=5, word="failed", error="RankFailedError"),
    ]  # fmt: skip
    assert outcomes(ASKED, events) == {3: "done", 4: "failed", 5: "unknown"}
    assert len(said_wrongly(events, ["StorageError"])) == 2
    assert said_wrongly(events[3:], ["StorageError", "RankFailedError"]) == []
    assert said_wrongly([Event(number=1, word="failed", error="OSError", typed=False)], ["OSError"]) != []


def samples(rise: int = 0, threads: int = 0, descriptors: int = 0) -> list[Sample]:
    return [
        Sample(
            seconds=n, calls=n * 1000, rss=(500 << 20) + n * rise, threads=4 + n * threads,
            descriptors=["socket"] * (5 + n * descriptors),
        )
        for n in range(30)
    ]  # fmt: skip


def test_what_leaks() -> None:
    for whole, words in ((samples(), []), (samples(rise=100_000), [])):
        found = trend(whole)
        assert found is not None
        assert list(found.problems) == words
    for leaking, word in (
        (samples(rise=5_000_000), "resident"), (samples(threads=1), "threads"), (samples(descriptors=1), "descriptors")
    ):  # fmt: skip
        found = trend(leaking)
        assert found is not None
        assert word in found.problems[0]
    assert trend(samples()[:5]) is None
