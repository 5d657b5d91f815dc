"""What all checks of other libraries' files have in common."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from xla_ckpt.engine.verify import VerifyReport, noted
from xla_ckpt.storage.base import Store
from xla_ckpt.storage.pool import threads, work_off


@contextmanager
def foreign_report(store: Store, tag: str) -> Iterator[VerifyReport]:
    """A report of a tag that has no digests. At the end its problems name the tag, and it says how long it took."""
    began = time.monotonic()
    report = VerifyReport(path=store.path, tag=tag, digests=False)
    yield report
    for problem in report.problems:
        problem.at(path=store.path, tag=tag)
    report.seconds = time.monotonic() - began


def check_files(report: VerifyReport, names: Sequence[str], check: Callable[[str], int], workers: int) -> None:
    """Check files, several at a time; what is wrong with them is added to the report.

    Args:
        report: Gets the number of the files, too, and the bytes that were read.
        check: Reads one of them, and returns how many bytes it has read.
    """
    sizes: list[int] = []

    def check_file(name: str, _: memoryview) -> None:
        noted(report, lambda: sizes.append(check(name)))

    work_off(names, check_file, workers=threads(workers, 2), buffer_bytes=0, name="xla_ckpt-verify")
    report.files, report.nbytes = len(names), sum(sizes)
