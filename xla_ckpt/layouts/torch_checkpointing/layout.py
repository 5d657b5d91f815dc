"""torch_checkpointing as a layout: its directories are found, opened, and read onto any topology; and written."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from xla_ckpt.engine.tag_reader import TagReader
from xla_ckpt.engine.verify import VerifyReport
from xla_ckpt.errors import CheckpointError, storage_errors
from xla_ckpt.layouts.base import Layout, Rewriting, StoredState, Topology
from xla_ckpt.layouts.digests import DIGESTS
from xla_ckpt.layouts.torch_checkpointing.tags import ITEMS_METADATA, find_tag
from xla_ckpt.manifest.records import Manifest
from xla_ckpt.plan.hints import Hints
from xla_ckpt.storage.base import Store
from xla_ckpt.storage.pool import READERS
from xla_ckpt.tags.entry import TagEntry

if TYPE_CHECKING:
    from xla_ckpt.layouts.torch_checkpointing.writing import ItemsWriting
    from xla_ckpt.state.describe import Description


class TorchCheckpointing(Layout):
    """Directories of Meta's torch_checkpointing.

    They have no digests, unless the package wrote them through our storage. The CRC-32s of their zips are compared
    with what a load reads, which the package itself does not do; items of safetensors, of JSON and of bytes have none.
    """

    name = "torch_checkpointing"
    origin = "torch_checkpointing"
    saves = True
    pickles = True
    asks = True
    may_hold_tags = True

    def wrote(self, manifest: Manifest) -> bool:
        return any(file.path == ITEMS_METADATA for file in manifest.files)

    def writing(self, description: Description) -> ItemsWriting:
        from xla_ckpt.layouts.torch_checkpointing.writing import ItemsWriting

        writing = ItemsWriting(description)
        _ = writing.plan  # raises for what the package has no place for
        return writing

    def rewriting(self, stored: StoredState, to: Topology) -> Rewriting:
        from xla_ckpt.layouts.torch_checkpointing.writing import rewritten_items

        return rewritten_items(stored, to)

    def find(self, store: Store, tag: str) -> TagEntry | None:
        return find_tag(store, tag)

    def open(self, store: Store, entry: TagEntry, hints: Hints) -> TagReader:
        from xla_ckpt.layouts.torch_checkpointing.scan import open_items

        return open_items(store, entry, hints)

    def verify(self, store: Store, entry: TagEntry, workers: int = READERS) -> VerifyReport:
        from xla_ckpt.engine.verified import check_whole
        from xla_ckpt.layouts.torch_save.zip_reader import check_zip
        from xla_ckpt.layouts.verifying import check_files, foreign_report

        with foreign_report(store, entry.tag) as report:
            try:
                report.digests = DIGESTS in store.names(entry.directory)
                with self.open(store, entry, Hints(optimizer=False)) as reader, storage_errors("reading a checkpoint"):
                    report.arrays = len(reader.manifest.arrays)
                    files = [file.path for file in reader.manifest.files]
                    zips = [path for path in files if path.endswith(".pt")]
                    compared, check = (files, check_whole) if report.digests else (zips, check_zip)
                    check_files(report, compared, partial(check, reader.directory), workers)
                    report.files = len(files)
            except CheckpointError as error:
                report.problems.append(error)
        return report
