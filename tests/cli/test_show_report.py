"""``xla-ckpt show --report``: where the time of a save went, as the tag itself keeps it."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import xla_ckpt
from tests.cli.test_cli import call
from tests.jobs import run_on_ranks
from xla_ckpt.rendering import reports
from xla_ckpt.reports import MAX_RECORDED_RANKS, Phase, RankTimings, select_slowest_ranks

STAGES = ["describe", "plan", "snapshot", "copy", "digest", "write", "fsync", "meet", "commit"]


def saves(rank: int, root: Path) -> None:
    tree = {"w": torch.full((1 << 20,), float(rank))}
    xla_ckpt.save(root, "a", tree, mesh=xla_ckpt.Mesh(tp=2), shardings=[("w", ("tp",))], async_save=True).result()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved")
    run_on_ranks(saves, 2, path)
    return path


def rows(shown: str) -> list[str]:
    """The names of the stages that are shown."""
    return re.findall(r"^(\w+) .*\d (?:ms|s)\b", shown, re.MULTILINE)


def test_each_rank_has_its_stages_and_the_slowest_is_marked(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "show", root, "--report")
    assert (code, err) == (0, "")
    assert out.startswith(f"a in {root}: saved by 2 ranks, ")
    first, *others = re.findall(r"^rank (\d)(.*): 4.2 MB in 1 file, its part done after ", out, re.MULTILINE)
    assert {first[0], others[0][0]} == {"0", "1"}
    assert (first[1], others[0][1]) == (" (the slowest)", "")
    told = json.loads(call(capsys, "show", root, "--report", "--json", "--tag", "a")[1])
    assert (told["tag"], told["ranks"], [m["nbytes"] for m in told["measured"]]) == ("a", 2, [4 << 20, 4 << 20])
    assert told["measured"][0]["done"] >= told["measured"][1]["done"]
    for measured in told["measured"]:
        expected = [s for s in STAGES if measured["rank"] == 0 or s != "commit"]
        assert [*measured["phases"]] == expected
        assert measured["phases"]["write"]["nbytes"] >= 4 << 20
        assert all(0 <= p["began"] <= p["ended"] <= told["seconds"] for p in measured["phases"].values())
    shown = [name for name in rows(out) if name in STAGES]
    assert shown == [name for m in told["measured"] for name in m["phases"]]


@pytest.mark.parametrize("width", [60, 100])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_it_fits_into_narrow_terminals_and_plain_ones(root: Path, width: int, encoding: str) -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    Console(file=file, width=width, force_terminal=True, no_color=True).print(
        reports.render_save_report(xla_ckpt.Checkpoints(root).timings("a"))
    )
    file.seek(0)
    lines = re.sub(r"\x1b\[[\d;]*m", "", file.read()).splitlines()
    assert max(map(len, lines)) <= width
    (write, _) = (line for line in lines if line.startswith("write "))
    bar = "█" if encoding == "utf-8" else "#"
    assert re.fullmatch(rf"write +{bar}+ +[\d.]+ m?s +4\.\d MB +[\d.]+ [MG]B/s *", write)


def test_a_replaced_tag_has_the_report_of_its_last_save(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for count in (2, 3):
        xla_ckpt.save(tmp_path, "a", {"w": torch.ones(count)})
    assert json.loads(call(capsys, "show", tmp_path, "--report", "--json")[1])["measured"][0]["nbytes"] == 12
    assert (xla_ckpt.verify(tmp_path).problems, xla_ckpt.verify(tmp_path).strangers) == ([], [])


def test_tags_without_one_are_told_from_tags_that_are_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    xla_ckpt.save(tmp_path, "a", {"model": {"w": torch.ones(2)}})
    xla_ckpt.convert(tmp_path, tmp_path, "a", to="native", as_tag="b")
    torch.save({"w": torch.ones(2)}, tmp_path / "c.pt")
    museum = Path(__file__).parent.parent / "museum/v1"
    for path, args in ((tmp_path, ("--tag", "b")), (tmp_path / "c.pt", ()), (museum, ("--tag", "exhibit"))):
        code, out, err = call(capsys, "show", path, "--report", *args)
        assert (code, out) == (2, "")
        assert "this tag has no report of its save" in err
    assert "there is no such checkpoint" in call(capsys, "show", tmp_path, "--report", "--tag", "d")[2]


DAMAGED: list[Any] = [
    7,
    {},
    {"ranks": 1, "measured": 3},
    {"ranks": "x", "measured": []},
    {"ranks": 1, "measured": [[]]},
    {"ranks": 1, "measured": [[0, 0, 0, 0, [["write", 0, 1, None, 0, 0]]]]},
    {"ranks": 1, "measured": [[0, 0, 0, 0, [["write", 0, float("nan"), 1, 8, 0]]]]},
    {"ranks": 1, "measured": [[0, 0, 0, 0, [["write", 0, 1, 1, float("inf"), 0]]]]},
]


@pytest.mark.parametrize("damaged", DAMAGED)
def test_a_damaged_report_is_an_error_and_harms_nothing_else(
    damaged: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    xla_ckpt.save(tmp_path, "a", {"w": torch.ones(2)})
    file = tmp_path / "a" / "_CHECKPOINT_METADATA"
    told = json.loads(file.read_text())
    told["custom_metadata"]["report"] = damaged
    file.write_text(json.dumps(told))
    code, _, err = call(capsys, "show", tmp_path, "--report")
    assert (code, "the report of the save is damaged" in err) == (1, True)
    assert xla_ckpt.list_tags(tmp_path) == ["a"]
    assert torch.equal(xla_ckpt.restore(tmp_path).tree["w"], torch.ones(2))


def test_of_very_many_ranks_the_slowest_are_kept() -> None:
    phases = {name: Phase(1.0, 8, 1, 0.0, 1.0) for name in STAGES}
    all_ranks = [
        RankTimings(
            rank=r, stall=0.1, nbytes=8, files=1, phases={**phases, "fsync": Phase(1.0, 0, 1, 1.0, 2.0 + r % 1000)}
        )
        for r in range(5000)
    ]
    told = select_slowest_ranks(all_ranks)
    assert (told["ranks"], len(told["measured"]), told["measured"][0][0]) == (5000, MAX_RECORDED_RANKS, 999)
    assert RankTimings.from_json(json.loads(json.dumps(told["measured"][0]))) == all_ranks[999]
    assert len(json.dumps(told)) < 1 << 16
