"""Reading a whole directory of DCP's to see whether it is complete, and what its zips say it is.

DCP has no digests. Each record of a zip has a CRC-32, unless torch was told to leave it out, and torch does not look at
it. Where this library's digests lie beside `.metadata`, all bytes are compared with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from functools import partial

from xla_ckpt.engine.verify import VerifyReport, noted, verify_tag
from xla_ckpt.errors import CorruptCheckpointError, naming, storage_errors
from xla_ckpt.layouts.dcp.files import DcpFiles
from xla_ckpt.layouts.dcp.metadata import METADATA
from xla_ckpt.layouts.dcp.scan import SpanOf, existing_contents, open_dcp, spans_by_file
from xla_ckpt.layouts.dcp.tags import MANAGERS, safetensors_shards
from xla_ckpt.layouts.digests import DIGESTS
from xla_ckpt.layouts.torch_save.ahead import Ahead
from xla_ckpt.layouts.torch_save.zip_reader import Zip
from xla_ckpt.layouts.verifying import check_files, foreign_report
from xla_ckpt.plan.hints import Hints
from xla_ckpt.storage.base import Directory, Store
from xla_ckpt.storage.pool import READERS
from xla_ckpt.tags.entry import TagEntry


def verify_dcp(store: Store, entry: TagEntry, workers: int = READERS) -> VerifyReport:
    """Read every file of a directory.

    All chunks have to be there, hold what `.metadata` says, and add up to whole tensors.

    Raises:
        StorageError: The directory cannot be opened.
    """
    with foreign_report(store, entry.tag) as report:
        with storage_errors("opening a directory", path=store.path, tag=entry.tag):
            directory = store.open(entry.directory)
        with closing(directory):
            digested = DIGESTS in directory.files()
            sharded = bool(safetensors_shards(directory.files())) and METADATA not in directory.files()
            if not digested and not sharded:
                _check_zips(directory, report, workers)
        if not report.problems:
            try:
                with open_dcp(store, entry, Hints()) as reader:
                    if digested or sharded:
                        whole = verify_tag(reader, workers=workers)
                        report.problems, report.files, report.nbytes = whole.problems, whole.files, whole.nbytes
                        report.digests = digested
                    known = {DIGESTS, MANAGERS, *(record.path for record in reader.manifest.files)}
                    report.strangers = [name for name in reader.directory.files() if name not in known]
                    report.arrays = len(reader.manifest.arrays)
            except CorruptCheckpointError as error:
                report.problems.append(error)
    return report


def _check_zips(directory: Directory, report: VerifyReport, workers: int) -> None:
    """Compare all zips with their CRC-32s, and note what is wrong with each."""
    files = DcpFiles(directory)
    spans: dict[str, list[SpanOf]] = {}
    noted(report, lambda: spans.update(spans_by_file(existing_contents(files))))

    def check_file(name: str) -> int:
        sizes: list[int] = []

        def check_zip(item: SpanOf) -> None:
            with naming(leaf=item.key):
                Zip(ahead, item.span.offset, item.span.nbytes).check()
            sizes.append(item.span.nbytes)

        with closing(files.open(name)) as source:
            ahead = Ahead(source, name)
            cut: list[SpanOf] = []
            for item in spans[name]:
                if item.span.offset + item.span.nbytes > source.size:
                    cut.append(item)
                else:
                    noted(report, partial(check_zip, item))
            if cut:
                report.problems.append(_cut_off(name, cut, source.size))
        return sum(sizes)

    check_files(report, sorted(spans), check_file, workers)


def _cut_off(file: str, lost: Sequence[SpanOf], nbytes: int) -> CorruptCheckpointError:
    """The one error for all that a file of so many bytes does not hold any more."""
    first, others = min(lost, key=lambda item: item.span.offset), len(lost) - 1
    return CorruptCheckpointError(
        "the file is cut off" + (f", and {others} more of its keys are not whole" if others else ""),
        leaf=first.key,
        file=file,
        expected=f"{max(item.span.offset + item.span.nbytes for item in lost)} bytes",
        found=nbytes,
    )
