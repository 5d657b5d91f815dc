"""What follows from the numbers of a benchmark: medians, ratios, targets, and whether a later run fell below them."""

from __future__ import annotations

import json

import pytest

from benchmarks.peers import plots, render
from benchmarks.peers.contenders import Group, Row
from benchmarks.peers.results import Outcome, Results, quotient
from benchmarks.peers.starts import imports
from benchmarks.peers.targets import TARGETS, falls, missing

MAPPED = "`torch.load(mmap=True)`"
ABOUT = {
    "command": "make bench", "gb": 1.0, "rounds": 2, "machine": "a machine", "load_before": 0.1, "unquiet": 0,
    "measured": 40,
}  # fmt: skip


def cold(ours: list[float], mapped: list[float]) -> Results:
    rows = {
        name: Outcome([{"seconds": s, "nbytes": 2e9, "rss": 2.1e9} for s in seconds])
        for name, seconds in (("xla_ckpt", ours), (MAPPED, mapped))
    }
    return Results(dict(ABOUT), {"cold": rows})


def test_a_median_is_that_of_the_rounds_that_have_the_figure() -> None:
    outcome = Outcome([{"seconds": 3.0}, {"seconds": 1.0, "rss": 7.0}, {"seconds": 2.0}])
    assert outcome.median() == 2.0
    assert outcome.median("rss") == 7.0
    assert outcome.median("returned") is None
    assert outcome.spread() == 3.0
    assert Outcome([{"seconds": 1.0}]).spread() is None
    assert Outcome(error="it broke").median() is None


def test_a_quotient_needs_both_sides() -> None:
    assert quotient(3.0, 2.0) == 1.5
    assert quotient(None, 2.0) is None
    assert quotient(1.0, None) is None
    assert quotient(1.0, 0.0) is None


def test_results_go_through_json() -> None:
    results = cold([1.0], [2.0])
    results.outcome("cold", "a peer").error = "RuntimeError: no"
    assert Results.from_json(json.loads(json.dumps(results.to_json()))) == results


def test_targets_are_ratios_of_medians_and_bytes_beyond_the_new_state() -> None:
    results = cold([1.0, 5.0, 1.0], [2.0, 1.4, 1.4])
    values = {t.what: t.value(results) for t in TARGETS}
    assert values[f"cold load against {MAPPED}"] == pytest.approx(1.4)
    assert values["extra memory of a load of XLA tensors, beyond the new state"] == pytest.approx(100)
    assert values["cold load against safetensors"] is None
    table = render.targets_table(results)
    assert f"| cold load against {MAPPED} | >= 1.5 x | 1.4 x | **not met** |" in table
    assert "| extra memory of a load of XLA tensors, beyond the new state | <= 256 MB | 100 MB | met |" in table


@pytest.mark.parametrize(("seconds", "fell"), [(1.33, False), (1.34, True)])
def test_a_ratio_a_quarter_below_the_committed_one_has_fallen(seconds: float, fell: bool) -> None:
    committed, measured = cold([1.0], [2.0]), cold([seconds], [2.0])
    found = falls(committed, measured)
    assert bool(found) == fell
    if fell:
        assert str(found[0]) == (
            f"cold load against {MAPPED}: expected at least 1.50 x (2.00 x is committed, and a fall of 25% is "
            "allowed), found 1.49 x"
        )


def test_a_ratio_that_is_to_be_small_falls_upwards() -> None:
    def stalls(ours: float) -> Results:
        names = ("xla_ckpt", "one memcpy of the state into warm memory")
        rows = {name: Outcome([{"seconds": s}]) for name, s in zip(names, (ours, 1.0), strict=True)}
        return Results(dict(ABOUT), {"cpu-stall": rows})

    assert falls(stalls(1.0), stalls(1.33)) == []
    (fall,) = falls(stalls(1.0), stalls(1.34))
    assert "expected at most 1.33 x" in str(fall)
    assert "found 1.34 x" in str(fall)


def test_a_row_that_failed_is_no_ratio_that_held() -> None:
    committed, measured = cold([1.0], [2.0]), cold([1.0], [])
    assert falls(committed, measured) == []
    assert missing(committed, measured) == [f"cold load against {MAPPED}"]
    assert missing(committed, Results(dict(ABOUT))) == []  # that group was not asked for


def test_a_document_ranks_the_rows_and_says_which_failed() -> None:
    results = cold([1.0, 1.1], [0.8, 0.9])
    results.outcome("cold", "a peer").error = "RuntimeError: no storage"
    rows = tuple(Row(name, imports, ()) for name in ("xla_ckpt", MAPPED, "a peer"))
    text = render.document(results, [Group("cold", "Load", rows, rate=True, plot=True)])
    lines = [line for line in text[text.index("## Load") :].splitlines() if line.startswith("| ")]
    assert lines[1:] == [
        f"| {MAPPED} | 0.85 s | 0.80 s to 0.90 s | 2 | 2.35 | 2100 MB | 0.81 |",
        "| xla_ckpt | 1.05 s | 1.00 s to 1.10 s | 2 | 1.90 | 2100 MB | 1.00 |",
        "| a peer | failed: RuntimeError: no storage | | | | | |",
    ]
    assert "The machine was quiet" in text
    assert "![Load](performance/cold.svg)" in text


def test_a_noisy_run_says_so() -> None:
    assert "The machine was not quiet" in render.document(cold([1.0, 1.3], [1.0, 1.3]), [])


def test_bars_are_as_long_as_their_values() -> None:
    svg = plots.bars("A & B", [plots.Bar("a<b", 2.0, "2.00", True), plots.Bar("c", 1.0, "1.00", False)])
    assert "A &amp; B" in svg
    assert "a&lt;b" in svg
    widths = [float(line.partition('width="')[2].partition('"')[0]) for line in svg.splitlines() if "<rect" in line]
    assert widths[0] == 2 * widths[1] > 0
    with pytest.raises(ValueError, match="nothing to draw for 'none'"):
        plots.bars("none", [])
