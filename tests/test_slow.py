"""What `make test` leaves out is what took long."""

from __future__ import annotations

import pytest

from tests.runs import ROOT
from tests.slow import LIST, listed, mark, slow_of, times

PRINTED = """
============================= slowest durations ==============================
3.25s setup    tests/a/test_x.py::test_one[some words-1]
0.50s call     tests/a/test_x.py::test_one[some words-1]
0.90s call     tests/a/test_x.py::test_two
5.00s call     tests/a/test_y.py::test_three
4.00s call     tests/a/test_y.py::test_four
0.01s teardown tests/a/test_y.py::test_four

(20 durations < 0.005s hidden.  Use -vv to show these durations.)
"""


def test_a_test_is_slow_with_its_fixtures_and_the_quickest_of_a_file_never() -> None:
    seconds = times(PRINTED.splitlines(keepends=True))
    assert seconds == {
        "tests/a/test_x.py::test_one[some words-1]": 3.75, "tests/a/test_x.py::test_two": 0.9,
        "tests/a/test_y.py::test_three": 5.0, "tests/a/test_y.py::test_four": pytest.approx(4.01),
    }  # fmt: skip
    assert slow_of(seconds) == {
        "tests/a/test_x.py::test_one[some words-1]": 3.75, "tests/a/test_y.py::test_three": 5.0
    }  # fmt: skip


def test_the_list_is_of_tests_that_are_there() -> None:
    for test in listed():
        file, _, rest = test.partition("::")
        assert f"def {rest.partition('[')[0]}(" in (ROOT / file).read_text(), f"{LIST.name}: {test}"


def test_what_is_listed_is_marked(request: pytest.FixtureRequest) -> None:
    mark([request.node], {"tests/another.py::test"})
    assert request.node.get_closest_marker("slow") is None
    mark([request.node], {request.node.nodeid})
    assert request.node.get_closest_marker("slow") is not None
