"""Every python block of every document runs, in the order of the document, in an empty directory."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import ROOT, environment

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#:]+)(#[^)]*)?\)")


def test_there_are_documents() -> None:
    assert sum(len(BLOCK.findall(d.read_text())) for d in DOCUMENTS) >= 5


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if BLOCK.search(d.read_text())], ids=lambda d: d.name)
def test_python_blocks_run(document: Path, tmp_path: Path) -> None:
    blocks = BLOCK.findall(document.read_text())
    program = tmp_path / f"{document.stem}.py"
    program.write_text("\n\n".join(blocks))
    done = subprocess.run(
        [sys.executable, str(program)], cwd=tmp_path, capture_output=True, text=True, env=environment(), check=False,
        timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: d.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target, _ in LINK.findall(document.read_text()):
        assert (document.parent / target).exists(), target
