"""What documents say of the code and of each other is there: modules, functions in pictures, sections, commands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import xla_ckpt
from tests.nursery import Program, bear
from tests.runs import ROOT
from tests.test_documents import BLOCK
from xla_ckpt.cli.main import COMMANDS
from xla_ckpt.formats.base import Layout
from xla_ckpt.formats.rank_files.layout import RankLayout
from xla_ckpt.formats.registry import list_layouts
from xla_ckpt.reports import LOAD_PHASES, SAVE_PHASES
from xla_ckpt.storage.schemes import SCHEMES

DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "tests/README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
BOX = re.compile(r'^ *\w+\["([\w.]+)<br/>([\w/.]+)"\]$', re.MULTILINE)
ARROW = re.compile(r'^ *(\w+) -->(?:\|"[^"]*"\|)? (\w+)$', re.MULTILINE)
PICTURE = re.compile(r"^```mermaid\n(.*?)^```", re.MULTILINE | re.DOTALL)
MODULE = re.compile(r"`((?:[a-z_0-9]+/)+[a-z_0-9]+\.py)(?:::(\w+))?`")
SECTION = re.compile(r"\]\(([^)#:]*)#([^)]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)

ARCHITECTURE = (ROOT / "docs/architecture.md").read_text()
PICTURES = PICTURE.findall(ARCHITECTURE)


def test_each_box_of_a_picture_is_a_function_or_class_of_its_file() -> None:
    boxes = [box for picture in PICTURES for box in BOX.findall(picture)]
    assert len(boxes) == sum(picture.count("<br/>") for picture in PICTURES) > 20
    for name, file in boxes:
        source = (ROOT / "xla_ckpt" / file).read_text()
        for part in name.split("."):
            assert re.search(rf"^\s*(def|class) {part}\b", source, re.MULTILINE), f"{name} in {file}"


@pytest.mark.parametrize("picture", PICTURES, ids=["save", "load"])
def test_arrows_of_a_picture_point_one_way(picture: str) -> None:
    arrows = ARROW.findall(picture)
    assert len(arrows) == picture.count("-->")
    above: dict[str, set[str]] = {}
    for start, end in arrows:
        above.setdefault(end, set()).add(start)
        above.setdefault(start, set())
    while free := [box for box, before in above.items() if not before]:
        above = {box: before - set(free) for box, before in above.items() if box not in free}
    assert not above, "these go round in a circle"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: d.name)
def test_modules_that_documents_name_are_there(document: Path) -> None:
    for file, test in MODULE.findall(document.read_text()):
        places = [ROOT / file, ROOT / "xla_ckpt" / file, ROOT / "tests" / file]
        found = next((place for place in places if place.exists()), None)
        assert found is not None, file
        assert not test or f"def {test}(" in found.read_text(), f"{file}::{test}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: d.name)
def test_sections_that_documents_link_to_are_there(document: Path) -> None:
    for target, section in SECTION.findall(document.read_text()):
        text = ((document.parent / target) if target else document).read_text()
        anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in HEADING.findall(text)}
        assert section in anchors, f"{target}#{section}"


def test_the_commands_of_the_how_to_run_after_its_python_blocks(tmp_path: Path) -> None:
    text = (ROOT / "docs/how-to.md").read_text()
    commands = [shlex.split(line, comments=True) for line in text.splitlines() if line.startswith("xla-ckpt ")]
    assert len(commands) >= 6
    run = "from xla_ckpt.cli.main import main\n" + "".join(f"assert main({c[1:]}) == 0, {c}\n" for c in commands)
    program = "\n\n".join([*BLOCK.findall(text), run])
    born = bear(Program(program, name="how_to.py"), cwd=tmp_path)
    _, errors = born.communicate(240)
    assert born.returncode == 0, errors


def named_in_rows(document: str, header: str) -> list[str]:
    """The code words in the first column of a table."""
    table = (ROOT / "docs" / document).read_text().partition(f"| {header} |")[2].partition("\n\n")[0]
    return [word for row in table.splitlines()[2:] for word in re.findall(r"`([^`]+)`", row.split("|")[1])]


def test_the_page_of_reports_names_all_phases_in_their_order() -> None:
    assert tuple(named_in_rows("reports.md", "of a save")) == SAVE_PHASES
    assert tuple(named_in_rows("reports.md", "of a load")) == LOAD_PHASES


def test_the_page_of_the_command_line_names_all_commands() -> None:
    assert {usage.split()[0] for usage in named_in_rows("command-line.md", "command")} == {*COMMANDS}


def test_the_page_for_a_new_layout_names_all_that_a_layout_may_say() -> None:
    page = (ROOT / "docs/adding-a-layout.md").read_text()
    members = [name for name in vars(Layout) if not name.startswith("_")]
    assert [name for name in members if not re.search(rf"`{name}\b", page)] == []


def test_documents_name_all_object_stores() -> None:
    page = (ROOT / "docs/object-stores.md").read_text()
    rows = re.findall(r"^\| `(\w+://[^`]+)` \| ([^|]+) \|", page, re.MULTILINE)
    assert [row for row in rows if not row[0].startswith("file:")] == [
        (s.example, s.description) for s in SCHEMES.values()
    ]
    assert re.findall(r"^\| `(\w+)://` \| \|$", page, re.MULTILINE) == [*SCHEMES], "a table of credentials for each"
    for scheme in SCHEMES.values():
        for variable in re.findall(r"[A-Z]+_[A-Z_]+", f"{scheme.credentials_hint} {scheme.allow_http_variable}"):
            assert variable in page
        assert f"`xla-ckpt selftest {scheme.example}`" in (ROOT / "docs/unverified.md").read_text()
        assert f"`{scheme.name}://`" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("layout", list_layouts(), ids=lambda layout: layout.name)
def test_what_a_layout_says_of_itself_is_so(layout: Layout) -> None:
    kind = type(layout)
    if isinstance(layout, RankLayout):  # it writes what it has files for
        form = getattr(layout, "file_format", None)
        own_files = kind.plan_files is not RankLayout.plan_files or kind.writing is not RankLayout.writing
        writes = converts = own_files or (form is not None and form.tree is not None)
    else:
        writes, converts = kind.writing is not Layout.writing, kind.rewriting is not Layout.rewriting
    assert (layout.saves, layout.converts) == (writes, converts)
    if layout.saves and layout.name != "native":
        assert kind.wrote is not Layout.wrote
    for call, offered in ((xla_ckpt.save_checkpoint, layout.saves), (xla_ckpt.convert, layout.converts)):
        assert (f'``"{layout.name}"``' in (call.__doc__ or "")) == offered, call
