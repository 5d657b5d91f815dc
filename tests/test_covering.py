"""What is chosen of a matrix shows all that the matrix shows."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from tests.covering import covering, pairs_of_values

CASES = st.lists(st.frozensets(st.integers(0, 9)))


@given(CASES)
def test_what_any_case_shows_a_chosen_one_shows(cases: list[frozenset[int]]) -> None:
    chosen = covering(cases, lambda case: case)
    assert set().union(*chosen) == set().union(*cases)
    rest = iter(cases)
    assert all(case in rest for case in chosen)  # in their order


@given(CASES)
def test_none_is_chosen_that_shows_nothing_of_its_own_when_it_is(cases: list[frozenset[int]]) -> None:
    assert len(covering(cases, lambda case: case)) <= len(set().union(*cases))


def test_pairs_of_values() -> None:
    cases = list(product("abc", range(3), (True, False), (True, False)))
    chosen = covering(cases, pairs_of_values)
    for first, second in product(range(4), range(4)):
        assert {(c[first], c[second]) for c in chosen} == {(c[first], c[second]) for c in cases}
    assert len(cases) == 36
    assert len(chosen) <= 12  # nine are needed for the pairs of the first two axes
