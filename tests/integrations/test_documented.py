"""docs/trainers.md: its blocks run, section by section, where the section's trainer is; so does the example."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations.environment import TRAINERS, needs
from tests.nursery import Program, bear
from tests.runs import ROOT, environment
from tests.test_documents import BLOCK

SECTIONS = re.split(r"^## ", (ROOT / "docs/trainers.md").read_text(), flags=re.MULTILINE)[1:]
BLOCKS = {section.split("\n")[0]: "\n".join(found) for section in SECTIONS if (found := BLOCK.findall(section))}
NEEDS = {"transformers": needs("accelerate"), "Lightning": needs("lightning"), "accelerate": needs("accelerate")}
FIND = f"import sys; sys.path.append({str(TRAINERS)!r})\n"
PATHS = environment({"PYTHONPATH": os.pathsep.join(sys.path)})  # of which TRAINERS is the last


def test_each_section_with_code_is_run() -> None:
    assert set(BLOCKS) == set(NEEDS)


@pytest.mark.parametrize("section", [pytest.param(name, marks=mark) for name, mark in NEEDS.items()])
def test_blocks_run(section: str, tmp_path: Path) -> None:
    born = bear(Program(FIND + BLOCKS[section], name=f"{section}.py"), cwd=tmp_path, env=PATHS)
    _, errors = born.communicate(240)
    assert born.returncode == 0, errors


@pytest.mark.parametrize("trainer", [pytest.param(name.lower(), marks=mark) for name, mark in NEEDS.items()])
def test_the_example_kills_and_resumes(trainer: str, tmp_path: Path) -> None:
    """By processes of its own, which end by signals."""
    command = [sys.executable, str(ROOT / "examples/trainers_resume.py"), trainer, "--root", str(tmp_path / "run")]
    done = subprocess.run(command, env=PATHS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all 12 losses equal: yes" in done.stdout
