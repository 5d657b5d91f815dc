"""Reading a whole tag of neuronx-distributed's to see whether it is complete, and what its zips say it is.

There are no digests, but each record of a zip has a CRC-32, which neither torch nor neuronx-distributed looks at.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from xla_ckpt.engine.read import READERS
from xla_ckpt.engine.verify import VerifyReport, noted
from xla_ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    UnsupportedStateError,
    UntrustedObjectError,
    storage_errors,
)
from xla_ckpt.layouts.nxd.rank_files import RankFiles, Scan, StoredTensor, check_grid
from xla_ckpt.layouts.nxd.scan import AS_NXD, Around, scan
from xla_ckpt.layouts.nxd.tags import LEGACY_OPTIMIZER, NxdTag
from xla_ckpt.layouts.torch_save.zip_reader import check_zip, read
from xla_ckpt.plan.hints import Hints
from xla_ckpt.storage.base import Directory, Store
from xla_ckpt.storage.pool import threads, work_off
from xla_ckpt.tree.codec import ValueCodec
from xla_ckpt.tree.nested import leaves


def verify_nxd(
    store: Store, found: NxdTag, codec: ValueCodec, workers: int = READERS, around: Around = AS_NXD
) -> VerifyReport:
    """Read every file of a tag.

    The files of all ranks and all tensors have to be there, the zips have to agree with their CRCs, and the parts of
    the ranks have to add up to whole arrays, as far as the tag alone tells.

    Raises:
        StorageError: The tag cannot be opened.
    """
    began = time.monotonic()
    report = VerifyReport(path=store.path, tag=found.tag, digests=False)
    if not found.complete:
        report.problems.append(CorruptCheckpointError("there is no done marker: the save may not have ended"))
    with storage_errors("opening a tag", path=store.path, tag=found.tag):
        directory = store.open(found.tag)
    try:
        files = Scan(directory, found.below)
        noted(report, files.check_optimizer)
        noted(report, lambda: _check_trees(files, found, report))
        zips = sorted(name for name in files.names if name.endswith(".pt") or (found.legacy and _is_legacy(name)))
        check_zips(report, directory, zips, workers)
        if not report.problems:
            noted(report, partial(_check_sums, files, found, codec, around))
    finally:
        directory.close()
    for problem in report.problems:
        problem.at(path=store.path, tag=found.tag)
    report.seconds = time.monotonic() - began
    return report


def check_zips(report: VerifyReport, directory: Directory, names: Sequence[str], workers: int) -> None:
    """Read zips whole, and compare each record with its CRC-32; what is wrong is added to the report."""
    sizes: list[int] = []

    def read_zip(name: str, _: memoryview) -> None:
        noted(report, lambda: sizes.append(check_zip(directory, name)))

    work_off(names, read_zip, workers=threads(workers, 2), buffer_bytes=0, name="xla_ckpt-verify")
    report.files, report.nbytes = len(names), sum(sizes)


def _check_trees(files: Scan, found: NxdTag, report: VerifyReport) -> None:
    """Check that every rank has its files, and that every tensor that they name is there."""
    grids = _legacy_grids(files, report) if found.legacy else files.present()
    for kind, grid in grids.items():
        noted(report, partial(check_grid, kind, grid))
        for tree in _trees(files, grid, report):
            for held in leaves(tree):
                if not isinstance(held, StoredTensor):
                    continue
                report.arrays += 1
                # A folder without any tensor is what avoid_saving_lower_precision_weights leaves.
                if held.at is None and held.file.rpartition("/")[0] in files.folders:
                    noted(report, partial(files.place, held))
    for name in ("scheduler.pt", "user_content.pt"):
        for path in {name, f"{files.below}{name}"} & files.names:
            noted(report, partial(_check_pickle, files, path))


def _is_legacy(name: str) -> bool:
    """Whether a file of the older layout is a rank's, or that of a ZeRO-1 optimizer beside it."""
    return "." not in name or LEGACY_OPTIMIZER.fullmatch(name) is not None


def _legacy_grids(files: Scan, report: VerifyReport) -> dict[str, RankFiles]:
    grids = {"tag": files.legacy_files()}

    def add_optimizer() -> None:
        if (optimizer := files.legacy_optimizer()) is not None:
            grids["optim"] = optimizer

    noted(report, add_optimizer)
    return grids


def _check_sums(files: Scan, found: NxdTag, codec: ValueCodec, around: Around) -> None:
    try:
        scan(files, found, Hints(), codec, around)
    except (IncompatibleCheckpointError, UnsupportedStateError):
        return  # the tag alone does not say how its arrays were split, which is no damage


def _check_pickle(files: Scan, name: str) -> None:
    try:
        read(files.directory, name)
    except UntrustedObjectError:
        return  # objects of the program's own classes are no damage


def _trees(files: Scan, grid: RankFiles, report: VerifyReport) -> Iterator[Any]:
    for at, path in sorted(grid.paths.items()):
        try:
            yield files.tree(path, at)
        except CheckpointError as error:
            report.problems.append(error)
