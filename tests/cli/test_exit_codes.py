"""Exit codes: docs/command-line.md has the table, and every command keeps to it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import xla_ckpt
from tests.runs import ROOT
from xla_ckpt.cli import main as command_line
from xla_ckpt.errors import ERROR_TYPES

PLACES = {
    "ls": "PATH", "show": "PATH", "verify": "PATH", "explain": "PATH --mesh dp=2", "diff": "PATH PATH",
    "view": "PATH --html out.html", "export": "PATH out", "convert": "PATH out --to native", "rm": "PATH a --yes",
    "retain": "PATH --newest 1 --yes", "pin": "PATH a", "unpin": "PATH a", "clean": "PATH", "adopt": "PATH",
    "selftest": "PATH", "upload": "PATH s3://b/run",
}  # fmt: skip
"""The commands that take a path, and words that make sense behind each."""

WRONG = {
    "ls": "ROOT --local ROOT", "show": "ROOT --leaf nothing", "verify": "ROOT a --repair",
    "explain": "ROOT --mesh dp=0", "diff": "ROOT/a b --leaf nothing", "view": "ROOT --mesh dp=2",
    "export": "ROOT out --dtype bloat16", "convert": "ROOT ROOT --to native --tag a", "rm": "ROOT a b --yes",
    "retain": "ROOT --last soon --yes", "pin": "ROOT", "unpin": "ROOT", "clean": "ROOT/a", "adopt": "ROOT",
    "selftest": "memory://run", "upload": "ROOT ROOT", "completion": "bsh",
}  # fmt: skip
"""Words that each command refuses."""


def code_of(words: list[str]) -> object:
    try:
        return command_line.main(words)
    except SystemExit as ended:
        return ended.code


def files_in(folder: Path) -> dict[Path, int]:
    """The files below a directory, and when each was changed, without the lease, which the save of this process had."""
    files = (path for path in folder.rglob("*") if path.is_file() and ".lease" not in path.parts)
    return {path: path.stat().st_mtime_ns for path in files}


def test_all_commands_are_tried() -> None:
    assert {*PLACES, "completion"} == {*WRONG} == {*command_line.COMMANDS}


@pytest.mark.parametrize("command", PLACES)
def test_nothing_at_the_path_is_a_problem(tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = PLACES[command].replace("PATH", str(tmp_path / "nowhere")).replace("out", str(tmp_path / "out"))
    assert code_of([command, *words.split()]) == 1
    assert capsys.readouterr().out == ""
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("command", WRONG)
def test_what_makes_no_sense_is_refused(tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "root"
    for tag in "ab":
        xla_ckpt.save(root, tag, {"model": {"w": torch.ones(2)}}, pinned=tag == "b")
    before = files_in(tmp_path)
    words = WRONG[command].replace("ROOT", str(root)).replace("out", str(tmp_path / "out"))
    assert code_of([command, *words.split()]) == 2
    out, err = capsys.readouterr()
    assert (out, "Traceback" in err) == ("", False)
    assert files_in(tmp_path) == before


@pytest.mark.parametrize("kind", sorted(ERROR_TYPES))
def test_the_table_has_the_code_of_each_error(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: object) -> int:
        raise ERROR_TYPES[kind]("it failed")

    monkeypatch.setattr(command_line, "parse_arguments", lambda _: type("Args", (), {"action": staticmethod(fails)}))
    page = (ROOT / "docs/command-line.md").read_text()
    (row,) = re.findall(r"^\| 2 \|.*$", page, re.MULTILINE)
    assert command_line.main(["ls", "."]) == (2 if f"`{kind}`" in row else 1)
