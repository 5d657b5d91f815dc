"""Every python block of every document runs, in the order of the document, in an empty directory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import xla_ckpt
from tests.nursery import Program, bear
from tests.runs import ROOT
from xla_ckpt import errors

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
ELSEWHERE = {
    "leaving-xla.md": "its commands run, too: tests/test_leaving_xla.py",
    "tutorial.md": "its program and its commands run in tests/test_tutorial.py",
    "object-stores.md": "it needs a bucket: tests/buckets/test_documented.py",
    "trackers.md": "it needs trackers: tests/integrations/test_trackers.py",
    "trainers.md": "it needs trainers: tests/integrations/test_documented.py",
}
LINK = re.compile(r"\]\(([^)#:]+)(#[^)]*)?\)")


def test_there_are_documents() -> None:
    assert sum(len(BLOCK.findall(d.read_text())) for d in DOCUMENTS) >= 5


def program_of(document: Path) -> str:
    """All its python blocks."""
    return "\n\n".join(BLOCK.findall(document.read_text()))


def needs_xla(document: Path) -> bool:
    """Whether any of its blocks names torch_xla: the others of such a document go on with what those have made."""
    return "torch_xla" in program_of(document)


@pytest.mark.parametrize(
    "document",
    [
        pytest.param(d, id=d.name, marks=pytest.mark.xla if needs_xla(d) else ())
        for d in DOCUMENTS
        if BLOCK.search(d.read_text()) and d.name not in ELSEWHERE
    ],
)
def test_python_blocks_run(document: Path, tmp_path: Path) -> None:
    program = tmp_path / f"{document.stem}.py"
    program.write_text(program_of(document))
    born = bear(Program(program.read_text(), name=str(program)), cwd=tmp_path, xla=needs_xla(document))
    _, errors = born.communicate(240)
    assert born.returncode == 0, errors


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: d.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target, _ in LINK.findall(document.read_text()):
        assert (document.parent / target).exists(), target


def own_errors() -> set[str]:
    """The errors of this library, without those of facades, which another test may have imported."""
    return {name for name, kind in errors.ERROR_TYPES.items() if kind.__module__ == errors.__name__} | {"RemoteError"}


def test_the_first_example_is_read_without_scrolling() -> None:
    example = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)[0]
    assert [line for line in example.splitlines() if len(line) > 80] == []


def test_the_page_of_errors_has_every_public_error() -> None:
    rows = re.findall(r"^\| `(\w+Error)` \|", (ROOT / "docs/errors.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(own_errors())


def test_the_reference_has_every_public_name() -> None:
    named = re.findall(r"^::: xla_ckpt\.(\w+)$", (ROOT / "docs/reference.md").read_text(), re.MULTILINE)
    public = {name for name in xla_ckpt.__all__ if not name.startswith("__")}
    assert sorted(named) == sorted(public - own_errors())
