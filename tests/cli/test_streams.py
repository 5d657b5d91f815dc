"""Standard streams that are closed, replaced or of another encoding; names that are no text; no working directory."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import unicodedata
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import xla_ckpt
import xla_ckpt.dcp
from tests.runs import environment, run
from xla_ckpt.logs import get_logger


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
    "stderr failing": Surroundings(kind="failing stderr"),
}
"""What a program may do to its streams. A command has a process of its own."""


def make_roots(root: Path, names: list[str]) -> Path:
    """Roots whose leaf paths, values and files have names."""
    tree = {
        "model": {"weight": torch.ones(4, 2), **{name: torch.ones(2) for name in names}},
        "user_content": {"step": 1, **dict(zip(names, names, strict=True))},
    }
    for name in ("run", "more", "damaged"):
        for step in (1, 2):
            plain = {f"k{name}": f"{step}{name}" for name in names}
            model = {leaf: value + step for leaf, value in tree["model"].items()}
            xla_ckpt.save(
                root / name, f"step_{step}", {**tree, "model": model, **plain, f"only_in_{step}{names[0]}": 1}
            )
    (weights,) = (root / "damaged" / "step_2" / "model").iterdir()
    weights.write_bytes(bytes(len(weights.read_bytes())))
    torch.save({name: torch.ones(2) for name in names}, root / "old.pt")
    with warnings.catch_warnings(action="ignore"):  # stock's, about a process group
        state = {name: torch.ones(2) for name in names if name.isprintable()}
        xla_ckpt.dcp.save(state or {"w": torch.ones(2)}, checkpoint_id=root / "dcp", no_dist=True)
    return root


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Roots with tags, to be copied."""
    return make_roots(tmp_path_factory.mktemp("roots") / "r", ["é", "日本", "half\udcff"])


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


def cases(surroundings: dict[str, Surroundings], covered: set[str]) -> list[Any]:
    """All of these as parameters, of which only those that are covered run without --rest."""
    return [
        pytest.param(around, id=name, marks=() if name in covered else pytest.mark.rest)
        for name, around in surroundings.items()
    ]


@pytest.mark.parametrize("around", cases(SURROUNDINGS, {"stdin and stderr closed", "C, a name that is no text"}))
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


@pytest.mark.parametrize("around", cases(SURROUNDINGS | OF_PROGRAMS, {"stderr closed", "C", "stderr failing"}))
def test_calls(around: Surroundings, roots: Path, tmp_path: Path) -> None:
    results, printed = run_all("calls", around, roots, tmp_path)
    wrong = {name: error for name, (raised, error) in results.items() if raised}
    assert not wrong, wrong
    assert "Traceback" not in printed


def test_a_name_that_the_encoding_of_the_file_system_lacks(tmp_path: Path) -> None:
    """It was a UnicodeEncodeError, or a SaveError with the text of one."""
    program = """
        import os, sys, numpy as np, xla_ckpt
        root = sys.argv[1]
        for call in (
            lambda: xla_ckpt.save(root, "\\xe9", {"w": np.ones(2)}), lambda: xla_ckpt.restore(root, "\\xe9"),
            lambda: xla_ckpt.save(root + "\\xe9", "a", {"w": np.ones(2)}),
            lambda: xla_ckpt.has_checkpoint(root + "\\xe9"),
        ):
            try:
                call()
            except xla_ckpt.UsageError as error:
                print(ascii(str(error)))
    """
    printed = run(program, tmp_path / "r", env=C_LOCALE).stdout.splitlines()
    assert len(printed) == 4
    assert all("expected characters that ascii has" in line and "PYTHONUTF8=1" in line for line in printed), printed


@pytest.mark.parametrize(
    "call",
    [
        lambda root: xla_ckpt.save(f"{root}\0", "a", {"w": np.ones(2)}),
        lambda root: xla_ckpt.save(root, "a", {"w\0": np.ones(2)}, layout="orbax"),  # a directory has the name
        lambda root: xla_ckpt.restore(f"{root}\0"),
        lambda root: xla_ckpt.has_checkpoint(f"{root}\0"),
        lambda root: xla_ckpt.list_tags(f"{root}\0"),
    ],
    ids=["save", "leaf", "restore", "has_checkpoint", "list_tags"],
)
def test_a_name_with_nul_is_named(call: Callable[[Path], object], tmp_path: Path) -> None:
    """It was a bare ValueError of Python's: "embedded null byte"."""
    with pytest.raises(xla_ckpt.UsageError, match="the character NUL"):
        call(tmp_path / "r")
    assert xla_ckpt.list_tags(tmp_path / "r") == []


HOSTILE = [
    *(f"a{character}FORGED" for character in "\x1b\x07\x08\x0b\x7f\x9b\x85\n\r\t\u200f\u2028\u2029\u061c\U000e0041"),
    *(f"a{chr(code)}FORGED" for code in [*range(0x202A, 0x202F), *range(0x2066, 0x206A)]),
    "title\x1b]0;FORGED\x07",
    "clear\x1b[2JFORGED",
    "[red]no markup[/red]",
]
"""Names with characters that control a terminal, end a line, or reverse the order of the text behind them."""


@pytest.mark.parametrize("terminal", [pytest.param(True, marks=pytest.mark.rest), False])
def test_names_do_not_control_a_terminal(terminal: bool, tmp_path: Path) -> None:
    """Of each command, with every name among leaf paths, keys of plain values, and values."""
    roots = make_roots(tmp_path / "r", HOSTILE)
    result = tmp_path / "work" / "result.json"
    command = [sys.executable, "-m", "tests.cli.all_calls", "ordinary", "commands", str(roots), str(result)]
    env = environment({"TERM": "dumb", "COLUMNS": "200"})  # no styles: every escape sequence is one of a name
    if terminal:
        ours, theirs = os.openpty()
        started = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, env=env, cwd=tmp_path
        )
        os.close(theirs)
        printed = b""
        with contextlib.suppress(OSError):  # EIO: nobody has the other end any more
            while part := os.read(ours, 1 << 16):
                printed += part
        os.close(ours)
        started.wait(60)
    else:
        done = subprocess.run(command, capture_output=True, env=env, cwd=tmp_path, timeout=240, check=False)
        printed = done.stdout + done.stderr
    text = printed.decode().replace("\r\n", "\n")
    results = json.loads(result.read_text())
    assert {name: code for name, (expected, code, _) in results.items() if code != expected} == {}
    assert "\\u001b]0;FORGED" in text, "names are shown"
    assert "[red]no markup[/red]" in text
    raw = {character for character in text if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")}
    assert raw <= {"\n", "\t"}, raw
    assert not [line for line in text.split("\n") if line.lstrip().startswith("FORGED")]
    assert not terminal or "\t" not in text
    page = (tmp_path / "work" / "view.html").read_text()
    assert not [c for c in page if c != "\n" and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")]


def test_names_in_errors_and_logs_are_escaped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in HOSTILE[:-1]:
        error = xla_ckpt.CheckpointError(
            f"no {name}",
            leaf=name,
            file=name,
            path=name,
            expected=name,
            found=name,
            hint=name,
            details=f"{name}\n{name}",
        )
        assert error.leaf == name
        lines = str(error).split("\n")
        assert all(line.isprintable() for line in lines)
        get_logger("xla_ckpt.test").warning("%s: %s: %s", name, error, ValueError(name))
        assert caplog.messages[-1].replace("\n", "").isprintable()
    target = {"model": {"a\x1b[2J": torch.ones(3)}}
    xla_ckpt.save(tmp_path, "t", {"model": {"a\x1b[2J": torch.ones(2), "b\n\x9b": torch.ones(1)}})
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError) as refused:
        xla_ckpt.load_checkpoint(tmp_path, model=target["model"])
    assert all(line.isprintable() for line in str(refused.value).split("\n"))
    assert "a\\u001b[2J" in str(refused.value)
