"""What mkdocs does to the documents of this repository beyond building pages of docs/.

README.md becomes the first page, CONTRIBUTING.md and CHANGELOG.md are pages, too, and each program of examples/ is one.
A link from a document to such a file leads to its page. The other files of the repository are on no page, and no public
address of it is known, so a link to one of them becomes its path. mkdocs checks every other link.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
EXAMPLES = {path.relative_to(ROOT).as_posix(): f"examples/{path.stem}.md" for path in (ROOT / "examples").glob("*.py")}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#:\s]*)(#[^)\s]*)?\)")
NAMED_BLOCK = re.compile(r"^```(python|bash) [\w.]+$", re.MULTILINE)
FENCE = re.compile(r"^(```.*?^```)", re.MULTILINE | re.DOTALL)


def page_of(file: str) -> str | None:
    """The page, below docs/, of a file of the repository; None if it is on none."""
    if page := PAGES.get(file) or EXAMPLES.get(file):
        return page
    if file.rstrip("/") == "examples":
        return "examples/index.md"
    return posixpath.relpath(file, "docs") if file.startswith("docs/") else None


def with_links_to_pages(text: str, file: str, page: str) -> str:
    """The text of a file of the repository, with links that hold on its page.

    Args:
        text: Markdown.
        file: Its path from the root of the repository, from which its links lead.
        page: The path of its page below docs/.
    """

    def link(found: re.Match[str]) -> str:
        image, words, target, section = found[1], found[2], found[3], found[4] or ""
        if not target:
            return found[0]
        aim = posixpath.normpath(posixpath.join(posixpath.dirname(file), target))
        other = page_of(aim)
        if other is None:
            if not (ROOT / aim).exists():
                return found[0]  # mkdocs says that it is not there
            return f"{words} (`{aim}`)" if aim not in words else words
        return f"{image}[{words}]({posixpath.relpath(other, posixpath.dirname(page) or '.')}{section})"

    parts = FENCE.split(text)
    return "".join(part if part.startswith("```") else LINK.sub(link, part) for part in parts)


def example_page(source: str, name: str) -> str:
    """The page of a program: its own words about itself, which are its docstring, are part of what it shows."""
    return f"# {name}\n\n```python\n{source}```\n"


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    """Add the pages whose text lies outside of docs/."""
    listed = ["# Examples\n\nWhole programs. The tests run them, too (`tests/test_examples.py`).\n"]
    for file, page in sorted(EXAMPLES.items()):
        source = (ROOT / file).read_text()
        files.append(File.generated(config, page, content=example_page(source, Path(file).name)))
        says = source.split('"""')[1].strip().split("\n\n")[0].replace("\n", " ")
        listed.append(f"* [{Path(file).name}]({posixpath.basename(page)}): {says}")
    files.append(File.generated(config, "examples/index.md", content="\n".join(listed) + "\n"))
    for file, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / file).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Have the links of a page lead to pages, and the names of files behind ```python be no option of the fence."""
    uri = page.file.src_uri
    file = next((file for file, made in (PAGES | EXAMPLES).items() if made == uri), f"docs/{uri}")
    if uri.startswith("examples/"):
        return markdown
    return NAMED_BLOCK.sub(lambda found: f"```{found[1]}", with_links_to_pages(markdown, file, uri))
