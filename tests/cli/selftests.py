"""The pages of docs/measured/selftest, made of what ``xla-ckpt selftest`` saw: ``make selftests``.

    python -m tests.cli.selftests                      run it here: in a directory, and in a bucket of moto's
    python -m tests.cli.selftests h100.json ...        what ``xla-ckpt selftest ROOT --json`` has printed elsewhere

A page has the name of its file. That of the directory stands in docs/unverified.md, too.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.buckets.s3_server import S3Server
from tests.runs import ROOT, environment

PAGES = ROOT / "docs/measured/selftest"
SHOWN, SHOWN_IN = "directory", ROOT / "docs/unverified.md"
BEGIN, END = "<!-- made by make selftests -->\n", "<!-- end -->\n"
FACTS = ("date", "machine", "storage", "versions")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown."""
    cells = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(row)} |\n" for row in cells)


def shown(report: Mapping[str, Any]) -> str:
    """A report, as ``--json`` prints it, as two tables: where it was made, and what was seen."""
    seen = [(answer["verdict"], f"`{answer['check']}`", answer["sentence"]) for answer in report["checks"]]
    where = table(
        ("", ""), [(fact, report.get(fact, "an older version made this report, and does not say")) for fact in FACTS]
    )
    return f"{where}\n{table(('verdict', 'check', 'what was seen'), seen)}"


def write(name: str, report: Mapping[str, Any]) -> None:
    """Write the page of a report, and put that of the directory into docs/unverified.md."""
    PAGES.mkdir(exist_ok=True)
    head = f"# A selftest: {name}\n\n[What each check is about](../../unverified.md#the-selftest).\n"
    (PAGES / f"{name}.md").write_text(f"{head}\n{shown(report)}")
    if name == SHOWN:
        head, _, rest = SHOWN_IN.read_text().partition(BEGIN)
        SHOWN_IN.write_text(f"{head}{BEGIN}\n{shown(report)}\n{END}{rest.partition(END)[2]}")


def seen_here(root: object, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What a selftest on this machine reports."""
    command = [sys.executable, "-m", "xla_ckpt", "selftest", str(root), "--json"]
    report: dict[str, Any] = json.loads(
        subprocess.run(command, env=environment(env), check=False, stdout=subprocess.PIPE).stdout
    )
    return report


def main() -> None:
    """Write the pages of the files that are given, or of selftests here."""
    for file in map(Path, sys.argv[1:]):
        write(file.stem, json.loads(file.read_text()))
    if sys.argv[1:]:
        return
    (ROOT / "build").mkdir(exist_ok=True)  # on the disk of the checkout, as /tmp may be memory
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as root:
        write(SHOWN, seen_here(root))
    server = S3Server()
    write("bucket-of-moto", seen_here(f"s3://{server.new_bucket()}/run", server.environment))
    server.close()


if __name__ == "__main__":
    main()
