"""Names of the files of partial checkpoints, and what SMP 1.12 says of files that do not fit."""

from __future__ import annotations

import pytest

from neuron_compat.smp.errors import (
    IncompatibleCheckpointFoundError,
    IncompatibleCheckpointRankFoundError,
    SMPInvalidArgumentError,
)
from neuron_compat.smp.files import (
    RankPlace,
    build_incomplete_error,
    find_missing_parts,
    find_smp_error,
    format_part_path,
    has_same_sizes,
    infer_sizes,
)

RANK_FOUND = (
    "The {kind} of a checkpoint file ({rank}) exceeds the total number of unique {kind} checkpoint files ({n}) "
    "matching given prefix (c.pt). Please ensure all checkpoint parts are available for loading at the given location."
)
FOUND = (
    "Can not load a {n} parts checkpoint to a model with {pp} (pipeline) partitions, {tp} (tensor parallel) "
    "partitions, and {rdp} reduced-data-parallel ranks. Please save the full model and load that instead when changing "
    "the number of partitions across runs. Matching files: {files}"
)


def place(pp: int, tp: int, rdp: int = 1) -> RankPlace:
    return RankPlace(pp_size=pp, tp_size=tp, rdp_size=rdp)


def parts(*numbers: tuple[int, ...]) -> dict[tuple[int, ...], str]:
    return {n: "c.pt_" + "_".join(map(str, n)) for n in numbers}


def grid(*sizes: int) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for size in sizes:
        found = [(*before, n) for before in found for n in range(size)]
    return found


@pytest.mark.parametrize(
    ("where", "options", "name"),
    [
        (RankPlace(pp=1, pp_size=2, rdp=1, rdp_size=2), {}, "c.pt_1"),
        (RankPlace(pp=1, pp_size=2, tp_size=2), {}, "c.pt_1_0"),
        (RankPlace(tp=1, tp_size=2), {}, "c.pt_0_1"),
        (RankPlace(pp=1, pp_size=2), {"naming": "1.12"}, "c.pt_1_0.pt"),
        (RankPlace(tp=1, tp_size=2, rdp=1, rdp_size=2), {"v3": True}, "c.pt_0_1_1.pt"),
        (RankPlace(), {"v3": True, "naming": "1.12"}, "c.pt_0_0_0.pt"),
    ],
)
def test_a_part_is_named_as_the_documents_say(where: RankPlace, options: dict[str, object], name: str) -> None:
    assert format_part_path("c.pt", where, **options) == name  # type: ignore[arg-type]


def test_another_naming_is_refused() -> None:
    with pytest.raises(SMPInvalidArgumentError, match="no such naming"):
        format_part_path("c.pt", RankPlace(), naming="v2")


@pytest.mark.parametrize(
    ("numbers", "where"),
    [
        (grid(4), place(4, 1, 2)),
        (grid(2, 2), place(2, 2)),
        (grid(2, 2, 2), place(2, 2, 2)),
        (grid(1), place(1, 1)),
    ],
)
def test_a_set_of_the_same_degrees_fits(numbers: list[tuple[int, ...]], where: RankPlace) -> None:
    assert has_same_sizes(numbers, where)
    assert find_smp_error(parts(*numbers), where, "c.pt") is None
    assert not find_missing_parts(numbers, [1 + max(axis) for axis in zip(*numbers, strict=True)])


@pytest.mark.parametrize(
    ("numbers", "where", "text"),
    [
        (grid(4), place(2, 1), FOUND.format(n=4, pp=2, tp=1, rdp=1, files=[f"c.pt_{i}" for i in range(4)])),
        (grid(2), place(1, 2), FOUND.format(n=2, pp=1, tp=2, rdp=1, files=["c.pt_0", "c.pt_1"])),
        (grid(1, 2), place(2, 2), RANK_FOUND.format(kind="tp_rank", rank=1, n=1)),
        (grid(2, 1), place(1, 1), FOUND.format(n=2, pp=1, tp=1, rdp=1, files=["c.pt_0_0", "c.pt_1_0"])),
        (grid(1, 1, 2), place(1, 1, 1), FOUND.format(
            n=2, pp=1, tp=1, rdp=1, files=["c.pt_0_0_0", "c.pt_0_0_1"])),
    ],
)  # fmt: skip
def test_what_smp_says_of_other_degrees(numbers: list[tuple[int, ...]], where: RankPlace, text: str) -> None:
    error = find_smp_error(parts(*numbers), where, "c.pt")
    assert error is not None
    assert str(error) == text
    assert not has_same_sizes(numbers, where)


@pytest.mark.parametrize(
    ("numbers", "where", "kind", "text"),
    [
        ([(0,), (2,)], place(3, 1), IncompatibleCheckpointRankFoundError, RANK_FOUND.format(kind="rank", rank=2, n=2)),
        (
            [(0, 0), (0, 1), (1, 0)], place(2, 2), IncompatibleCheckpointRankFoundError,
            RANK_FOUND.format(kind="tp_rank", rank=1, n=1),
        ),
        (
            [(0, 0, 0), (0, 0, 1), (0, 1, 1), (0, 1, 2)], place(1, 2, 2), IncompatibleCheckpointRankFoundError,
            RANK_FOUND.format(kind="rdp_rank", rank=2, n=2),
        ),
    ],
)  # fmt: skip
def test_what_smp_says_of_missing_parts(
    numbers: list[tuple[int, ...]], where: RankPlace, kind: type[Exception], text: str
) -> None:
    error = find_smp_error(parts(*numbers), where, "c.pt")
    assert type(error) is kind
    assert str(error) == text


def test_holes_that_pass_as_the_right_number_are_found() -> None:
    """SMP counts files and compares each rank with the count: (0, 0) and (1, 1) in place of (0, 0) and (0, 1)."""
    held = parts((0, 0), (1, 1), (2, 1), (3, 1))
    assert find_missing_parts(held, (4, 2)) == [(0, 1), (1, 0), (2, 0), (3, 0)]
    error = build_incomplete_error(held, place(4, 1), "c.pt", (4, 2))
    assert "Parts are missing: 0_1, 1_0, 2_0, 3_0." in str(error)
    assert isinstance(error, IncompatibleCheckpointFoundError | IncompatibleCheckpointRankFoundError)


def test_the_wrong_guard_is_named() -> None:
    error = build_incomplete_error(parts((0, 0), (1, 0)), place(2, 2), "c.pt", (2, 2))
    assert str(error).startswith(RANK_FOUND.format(kind="pp_rank", rank=1, n=1))
    assert "Parts are missing: 0_1, 1_1." in str(error)
    assert "smp.rdp_rank() == 0" in str(error)
    assert "not `if smp.dp_rank() == 0`" in str(error)


def test_the_sizes_are_those_of_the_largest_ranks() -> None:
    assert infer_sizes(grid(2, 3)) == (2, 3, 1)
    assert infer_sizes(grid(2, 1, 4)) == (2, 1, 4)
    assert infer_sizes([(5,)]) == (6, 1, 1)
