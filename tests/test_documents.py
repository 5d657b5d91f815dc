"""Every python block of every document runs, in the order of the document, in an empty directory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.nursery import Program, bear
from tests.runs import ROOT

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
    born = bear(Program(program.read_text(), name=str(program)), cwd=tmp_path, xla="torch_xla" in program.read_text())
    _, errors = born.communicate(240)
    assert born.returncode == 0, errors


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: d.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target, _ in LINK.findall(document.read_text()):
        assert (document.parent / target).exists(), target
