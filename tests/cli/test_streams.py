"""Standard streams that are closed, replaced or of another encoding; names that are no text; no working directory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

import xla_ckpt
import xla_ckpt.dcp
from tests.runs import environment


@dataclass(frozen=True)
class Surroundings:
    """What a process finds."""

    kind: str = "ordinary"
    """What the program replaces, as tests/cli/all_calls.py has it."""

    shell: str = ""
    """Redirections."""

    env: dict[str, str] = field(default_factory=dict)
    folder: bytes = b"r"
    """Name of the directory that all roots lie in."""

    answers: bool = True
    """Whether a command can give an answer."""


C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
NO_TEXT = b"n\xc3\xa9 \xff\x9b"

SURROUNDINGS = {
    "ordinary": Surroundings(),
    "stderr closed": Surroundings(shell="2>&-"),
    "stdin and stderr closed": Surroundings(shell="<&- 2>&-"),
    "stdout closed": Surroundings(shell=">&-", answers=False),
    "all closed": Surroundings(shell="<&- >&- 2>&-", answers=False),
    "stderr bare": Surroundings(kind="bare stderr"),
    "all bare": Surroundings(kind="bare stdout stderr"),
    "ascii": Surroundings(env={"PYTHONIOENCODING": "ascii"}),
    "ascii, a name that is no text": Surroundings(env={"PYTHONIOENCODING": "ascii"}, folder=NO_TEXT),
    "C": Surroundings(env=C_LOCALE),
    "C, a name that is no text": Surroundings(env=C_LOCALE, folder=NO_TEXT),
    "a name that is no text": Surroundings(folder=NO_TEXT),
    "working directory removed": Surroundings(kind="removed"),
}

OF_PROGRAMS = {
    "stderr None": Surroundings(kind="none stderr"),
    "all None": Surroundings(kind="none stdin stdout stderr"),
    "stderr a closed object": Surroundings(kind="closed stderr"),
    "stderr failing": Surroundings(kind="failing stderr"),
}
"""What a program may do to its streams. A command has a process of its own."""


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Roots with tags, to be copied."""
    root = tmp_path_factory.mktemp("roots") / "r"
    tree = {
        "model": {"é.weight": torch.ones(4, 2), "日本": torch.ones(2), "half\udcff": torch.ones(2)},
        "user_content": {"é": "日本", "half\udcff": "half\udcff", "step": 1},
    }
    for name in ("run", "more", "damaged"):
        for step in (1, 2):
            xla_ckpt.save(root / name, f"step_{step}", {**tree, "n": step})
    (weights,) = (root / "damaged" / "step_2" / "model").iterdir()
    weights.write_bytes(weights.read_bytes()[:-1] + b"\xff")
    torch.save({"é": torch.ones(2)}, root / "old.pt")
    with warnings.catch_warnings(action="ignore"):  # stock's, about a process group
        xla_ckpt.dcp.save({"é": torch.ones(2)}, checkpoint_id=root / "dcp", no_dist=True)
    return root


def run_all(what: str, around: Surroundings, roots: Path, tmp_path: Path) -> tuple[dict[str, list[object]], str]:
    """What each command or call did, and what all of them printed."""
    folder = os.fsencode(tmp_path) + b"/" + around.folder
    if what == "commands":
        shutil.copytree(os.fsencode(roots), folder)
    result = tmp_path / "work" / "result.json"
    command = [sys.executable, "-m", "tests.cli.all_calls", around.kind, what, folder, str(result)]
    shell = ["sh", "-c", f'exec "$@" {around.shell}', "sh", *command] if around.shell else command
    with open(tmp_path / "printed", "wb") as printed:
        subprocess.run(
            shell, stdout=printed, stderr=printed, env=environment(around.env), cwd=tmp_path, timeout=240, check=False
        )
    text = (tmp_path / "printed").read_bytes().decode(errors="backslashreplace")
    assert result.exists(), text
    return json.loads(result.read_text()), text


@pytest.mark.parametrize("around", SURROUNDINGS.values(), ids=SURROUNDINGS)
def test_commands(around: Surroundings, roots: Path, tmp_path: Path) -> None:
    results, printed = run_all("commands", around, roots, tmp_path)
    wrong = {
        name: (code, error)
        for name, (expected, code, error) in results.items()
        if code != expected and not (not around.answers and (code, error) == (2, ""))
    }
    assert not wrong, wrong
    assert "Traceback" not in printed
    assert "UnicodeEncodeError" not in printed


@pytest.mark.parametrize("around", [*SURROUNDINGS.values(), *OF_PROGRAMS.values()], ids=[*SURROUNDINGS, *OF_PROGRAMS])
def test_calls(around: Surroundings, roots: Path, tmp_path: Path) -> None:
    results, printed = run_all("calls", around, roots, tmp_path)
    wrong = {name: error for name, (raised, error) in results.items() if raised}
    assert not wrong, wrong
    assert "Traceback" not in printed
