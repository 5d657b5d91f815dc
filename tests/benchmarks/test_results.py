"""What follows from the numbers of a benchmark: medians, ratios, targets, and whether a later run fell below them."""

from __future__ import annotations

import json

import pytest

from benchmarks.peers import plots, render
from benchmarks.peers.check import compare, missing, uncommitted
from benchmarks.peers.figures import Figure, Ratio, Reading
from benchmarks.peers.results import Outcome, Results
from benchmarks.peers.rows import Group, Row
from benchmarks.peers.starts import imports
from benchmarks.peers.targets import TARGETS

MAPPED = "`torch.load(mmap=True)`"
ABOUT = {
    "command": "make bench", "gb": 1.0, "rounds": 2, "machine": "a machine", "load_before": 0.1, "speed": "it is fast",
    "unquiet": 0, "measured": 40,
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


def test_results_go_through_json() -> None:
    results = cold([1.0], [2.0])
    results.outcome("cold", "a peer").error = "RuntimeError: no"
    assert Results.from_json(json.loads(json.dumps(results.to_json()))) == results


def seconds(group: str, **rows: list[float]) -> Results:
    """A group whose rows have these seconds, of 2 GB."""
    runs = {
        name: Outcome([{"seconds": s, "processor": s / 2, "nbytes": 2e9} for s in each]) for name, each in rows.items()
    }
    return Results(dict(ABOUT), {group: runs})


def test_a_ratio_is_the_median_of_those_of_the_rounds() -> None:
    results = seconds("g", xla_ckpt=[1.0, 5.0, 1.2], slow=[2.0, 4.0, 6.0], fast=[1.5, 1.5])
    slow = Ratio("g", "slow").read(results)
    assert slow == Reading(0.5, "1.20 s", "4.00 s", [0.5, 1.25, pytest.approx(0.2)])
    best = Ratio("g").read(results)
    assert best is not None
    assert (best.value, best.beside) == (2.0, "1.50 s (fast)")
    processor = Ratio("g", "slow", figure="processor").read(results)
    assert processor is not None
    assert (processor.value, processor.ours) == (0.5, "0.60 s")
    assert Ratio("g", "absent").read(results) is None
    assert Ratio("absent").read(results) is None


def test_a_ratio_of_rates_is_larger_where_we_are_faster() -> None:
    reading = Ratio("g", "slow", rate=True).read(seconds("g", xla_ckpt=[1.0], slow=[2.0]))
    assert reading == Reading(2.0, "2.00 GB/s", "1.00 GB/s", [2.0])


def test_a_figure_is_in_its_unit_and_may_be_a_part_of_another_one() -> None:
    results = seconds("g", xla_ckpt=[0.004, 0.002])
    assert Figure("g", unit="ms").read(results) == Reading(pytest.approx(3.0), "3 ms", rounds=[4.0, 2.0])
    assert Figure("g", unit="x", over="processor").read(results) == Reading(
        pytest.approx(2.0), "2 x", rounds=[2.0, 2.0]
    )
    assert Figure("g", "absent").read(results) is None


def test_the_table_says_of_each_target_whether_it_is_met() -> None:
    results = seconds("small-load", xla_ckpt=[0.6, 0.8], safetensors=[1.0, 1.0])
    results.rows |= seconds("save", xla_ckpt=[1.0], **{"raw limit": [0.9]}).rows
    table = render.targets_table(results)
    assert "| load onto XLA | <= 0.7 of safetensors | 0.7 | 0.6 to 0.8 | 0.70 s | 1.00 s | met |" in table
    assert "| >= 0.95 of raw limit | 0.9 | one round | 2.00 GB/s | 2.22 GB/s | **not met** |" in table
    assert "| save of XLA tensors | <= 0.6 of safetensors | not measured | | | | |" in table
    assert f"Of {len(TARGETS)} targets 1 are met, 1 are not, and {len(TARGETS) - 2} were not measured." in table


@pytest.mark.parametrize(("ours", "fell"), [(1.33, False), (1.34, True)])
def test_a_ratio_whose_speed_is_a_quarter_below_the_committed_one_has_fallen(ours: float, fell: bool) -> None:
    committed, measured = cold([1.0], [2.0]), cold([ours], [2.0])
    (compared,) = compare(committed, measured)
    assert (compared.has_fallen, compared.is_doubtful) == (fell, True)
    if fell:
        assert str(compared) == (
            f"FALLEN Loads: onto XLA, cold, against {MAPPED}: 0.67 x, of one round; committed 0.5 x, of one round: "
            "75% of that speed"
        )


def test_a_ratio_of_rates_falls_downwards() -> None:
    def saves(ours: float) -> Results:
        return seconds("save", xla_ckpt=[ours], **{"raw limit": [1.0]})

    assert [each.has_fallen for each in compare(saves(1.0), saves(1.33))] == [False]
    assert [each.has_fallen for each in compare(saves(1.0), saves(1.34))] == [True]


@pytest.mark.parametrize(("ours", "doubtful"), [(0.5, False), (1.14, False), (1.15, True)])
def test_a_ratio_is_in_doubt_before_it_has_fallen(ours: float, doubtful: bool) -> None:
    (compared,) = compare(cold([1.0], [2.0]), cold([ours], [2.0]))
    assert compared.is_doubtful == doubtful
    assert not compared.has_fallen


def test_the_best_peer_is_that_of_the_rows_which_both_runs_have() -> None:
    committed = seconds("warm", xla_ckpt=[1.0], a=[1.0], b=[4.0])
    (compared,) = compare(committed, seconds("warm", xla_ckpt=[1.0], b=[4.0]))
    assert compared.expected.value == compared.found.value == 0.25


def test_a_row_that_failed_is_no_ratio_that_held() -> None:
    what = f"Loads: onto XLA, cold, against {MAPPED}"
    committed, measured = cold([1.0], [2.0]), cold([1.0], [])
    assert compare(committed, measured) == []
    assert missing(committed, measured) == [what]
    assert missing(committed, Results(dict(ABOUT))) == []  # that group was not asked for
    assert (missing(measured, committed), uncommitted(measured, committed)) == ([], [what])


def test_a_document_ranks_the_rows_and_says_which_failed() -> None:
    results = cold([1.0, 1.1], [0.8, 0.9])
    results.outcome("cold", "a peer").error = "RuntimeError: no storage"
    rows = tuple(Row(name, imports, ()) for name in ("xla_ckpt", MAPPED, "a peer"))
    text = render.document(results, [Group("cold", "Load", rows, rate=True, plot=True)])
    lines = [line for line in text[text.index("\n## Load\n") :].splitlines() if line.startswith("| ")]
    assert lines[1:] == [
        f"| {MAPPED} | 0.85 s | 0.80 s to 0.90 s | 2 | 2.35 | 2100 MB | 0.81 |",
        "| xla_ckpt | 1.05 s | 1.00 s to 1.10 s | 2 | 1.90 | 2100 MB | 1.00 |",
        "| a peer | failed: RuntimeError: no storage | | | | | |",
    ]
    assert "The machine was quiet" in text
    assert "![Load](performance/cold.svg)" in text


def test_a_noisy_run_says_so() -> None:
    assert "The machine was not quiet" in render.document(cold([1.0, 1.3], [1.0, 1.3]), [])


def test_a_run_of_groups_without_targets_has_their_tables_alone() -> None:
    results = Results(dict(ABOUT), {"jax-load": {"orbax v1": Outcome([{"seconds": 2.0}])}})
    text = render.document(results, [Group("jax-load", "Load of jax arrays", (Row("orbax v1", imports, ()),))])
    assert "| orbax v1 | 2.00 s |" in text
    assert "The machine may not have been quiet" in text
    assert "* *orbax*: " in text
    assert "Targets" not in text
    assert "tensorizer" not in text


def test_bars_are_as_long_as_their_values() -> None:
    svg = plots.bars("A & B", [plots.Bar("a<b", 2.0, "2.00", True), plots.Bar("c", 1.0, "1.00", False)])
    assert "A &amp; B" in svg
    assert "a&lt;b" in svg
    widths = [float(line.partition('width="')[2].partition('"')[0]) for line in svg.splitlines() if "<rect" in line]
    assert widths[0] == 2 * widths[1] > 0
    with pytest.raises(ValueError, match="nothing to draw for 'none'"):
        plots.bars("none", [])
