"""Reading a whole directory of DCP's to see whether it is complete, and what its zips say it is.

DCP has no digests. Each record of a zip has a CRC-32, unless torch was told to leave it out, and torch does not look at
it. Where this library's digests lie beside `.metadata`, all bytes are compared with them.
"""

from __future__ import annotations

import time
from contextlib import closing

from xla_ckpt.engine.read import READERS
from xla_ckpt.engine.verify import VerifyReport, noted, verify_tag
from xla_ckpt.errors import CorruptCheckpointError, naming, storage_errors
from xla_ckpt.layouts.dcp.digests import DIGESTS
from xla_ckpt.layouts.dcp.metadata import METADATA
from xla_ckpt.layouts.dcp.scan import Files, Item, items_by_file, open_scanned
from xla_ckpt.layouts.dcp.tags import MANAGERS, safetensors_shards
from xla_ckpt.layouts.torch_save.zip_reader import Ahead, Zip
from xla_ckpt.plan.hints import Hints
from xla_ckpt.storage.base import Directory, Store
from xla_ckpt.storage.pool import threads, work_off
from xla_ckpt.tags.directory import TagEntry
from xla_ckpt.tree.codec import ValueCodec


def verify_dcp(store: Store, found: TagEntry, codec: ValueCodec, workers: int = READERS) -> VerifyReport:
    """Read every file of a directory.

    All chunks have to be there, hold what `.metadata` says, and add up to whole tensors.

    Raises:
        StorageError: The directory cannot be opened.
    """
    began = time.monotonic()
    report = VerifyReport(path=store.path, tag=found.tag, digests=False)
    with storage_errors("opening a directory", path=store.path, tag=found.tag):
        directory = store.open(found.directory)
    with closing(directory):
        digested = DIGESTS in directory.files()
        sharded = bool(safetensors_shards(directory.files())) and METADATA not in directory.files()
        if not digested and not sharded:
            _check_zips(directory, report, workers)
    if not report.problems:
        try:
            with open_scanned(store, found, Hints(), codec) as reader:
                if digested or sharded:
                    report = verify_tag(reader, workers=workers)
                    report.digests = digested
                known = {DIGESTS, MANAGERS, *(record.path for record in reader.manifest.files)}
                report.strangers = [name for name in reader.directory.files() if name not in known]
                report.arrays = len(reader.manifest.arrays)
        except CorruptCheckpointError as error:
            report.problems.append(error)
    for problem in report.problems:
        problem.at(path=store.path, tag=found.tag)
    report.seconds = time.monotonic() - began
    return report


def _check_zips(directory: Directory, report: VerifyReport, workers: int) -> None:
    """Compare all zips with their CRC-32s, and note what is wrong with each."""
    files = Files(directory)
    held: dict[str, list[Item]] = {}
    noted(report, lambda: held.update(items_by_file(files.contents())))
    sizes: list[int] = []

    def check(item: Item, ahead: Ahead) -> None:
        with naming(leaf=item.key):
            Zip(ahead, item.span.offset, item.span.nbytes).check()
        sizes.append(item.span.nbytes)

    def read_file(name: str, _: memoryview) -> None:
        def read_zips() -> None:
            with closing(files.open(name)) as source:
                ahead = Ahead(source, name)
                for item in held[name]:
                    noted(report, lambda item=item: check(item, ahead))  # type: ignore[misc]

        noted(report, read_zips)

    work_off(sorted(held), read_file, workers=threads(workers, 2), buffer_bytes=0, name="xla_ckpt-verify")
    report.files, report.nbytes = len(held), sum(sizes)
