"""Pipelines of the real neuronx-distributed with a weight that two stages share: what is trained on from each tag."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.neuron.real import pipelines
from tests.neuron.real_nxd import needs_nxd, run_on_nxd

pytestmark = [needs_nxd, pytest.mark.xla, pytest.mark.timeout(1200)]

KINDS = [("ours", "pt"), ("ours", "xser"), ("theirs", "pt"), ("theirs", "xser")]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """Where a pipeline was saved by both libraries, and the losses of its ranks after that."""
    root = tmp_path_factory.mktemp("run")
    return root, run_on_nxd(pipelines.trains, 4, root, timeout=600)


def tags_of(root: Path) -> list[list[str]]:
    return [["ours", str(root), "native"], *(["ours", str(root / who), tag] for who, tag in KINDS)]


def test_a_pipeline_resumes_with_the_losses_of_the_unbroken_run(run: tuple[Path, list[Any]], tmp_path: Path) -> None:
    """Whoever saved it; and neuronx-distributed resumes from what is saved again."""
    root, losses = run
    assert [None in row for row in losses] == [True, True, False, False]  # the last stage has them
    got = run_on_nxd(pipelines.resumes, 4, 2, 1, 2, tags_of(root), tmp_path, timeout=600)
    for rank, want in enumerate(losses):
        assert len(got[rank]) == 5 + 2
        assert {name: row for name, row in got[rank].items() if row != want} == {}


@pytest.mark.parametrize("tp", [1, 2])
def test_a_pipeline_goes_on_without_stages_and_back(run: tuple[Path, list[Any]], tmp_path: Path, tp: int) -> None:
    """As one stage of tp ranks, whose losses are the means; back in the pipeline they are those of the unbroken run."""
    root, losses = run
    means = [sum(rows) / 2 for rows in zip(*losses[2:], strict=True)]
    for rank in run_on_nxd(pipelines.resumes, tp, 3, tp, 1, tags_of(root), tmp_path / "one", timeout=600):
        assert len(rank) == 5 + 2
        for name, row in rank.items():
            assert row == pytest.approx(means, rel=1e-5), name
    # In these files the weight that both stages have is one parameter.
    back = [["ours", str(tmp_path / "one" / who), tag] for who, tag in KINDS]
    got = run_on_nxd(pipelines.resumes, 4, 4, 1, 2, back, tmp_path / "back", timeout=600)
    for rank, want in enumerate(losses):
        assert {name: row for name, row in got[rank].items() if row != want} == {}
