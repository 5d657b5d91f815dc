"""One file of `torch.save` as a value: what ``torch.save({"model": ..., "optimizer": ...}, "out.pt")`` leaves."""

from __future__ import annotations

from xla_ckpt.engine.tag_reader import TagReader
from xla_ckpt.engine.verify import VerifyReport
from xla_ckpt.errors import CheckpointError, UsageError, storage_errors
from xla_ckpt.layouts.base import Layout, Rewriting, StoredState, Topology
from xla_ckpt.layouts.nxd.tags import OF_EXPERTS, OF_RANK
from xla_ckpt.layouts.saved_files import SUFFIXES, tensors_folder
from xla_ckpt.layouts.smp.tags import user_content_beside
from xla_ckpt.plan.hints import Hints
from xla_ckpt.storage.base import Store
from xla_ckpt.storage.pool import READERS
from xla_ckpt.tags.entry import TagEntry
from xla_ckpt.tags.names import is_tag_name

PART_OF_DCP = ".distcp"
"""The ending of a file of torch.distributed.checkpoint's. It consists of zips of torch.save, and begins like one."""

STATE_FILE = "state.pt"
"""What a plan calls the file; whoever writes it knows its name."""


class OneFile(Layout):
    """A state, or a part of it, in one file that torch alone reads. It is no tag: it has no manifest.

    A file that a path names is opened, and no root lists it among its tags. A full checkpoint of SageMaker model
    parallel's has its user content in a second file, beside the first one. A file of torch_xla's
    ``serialization.save`` has its tensors in a directory beside it.
    """

    name = "torch"
    tagged = False
    one_file = True
    asks = True

    def find(self, store: Store, tag: str) -> TagEntry | None:
        if not is_tag_name(tag) or tag.endswith(PART_OF_DCP) or not store.has(tag) or store.is_directory(tag):
            return None
        if any(name.at(tag) is not None for name in (OF_RANK, OF_EXPERTS)):
            return None  # a model of its names would get the parts that the rank had for whole arrays
        try:
            is_zip = tag.endswith(SUFFIXES) or store.start_of(tag, 4) == b"PK\3\4"
        except OSError:
            return None
        if not is_zip:
            return None
        folder = tensors_folder(tag)
        beside = [f"{folder}/{name}" for name in store.names(folder)]
        if (user_content := user_content_beside(store, tag)) is not None:
            beside.append(user_content)
        return TagEntry(tag=tag, directory=tag, files=(tag, *beside) if beside else ())

    def tag_of(self, entry: TagEntry) -> str:
        stem, dot, suffix = entry.tag.rpartition(".")
        return stem if dot and f".{suffix}" in SUFFIXES else entry.tag

    def open(self, store: Store, entry: TagEntry, hints: Hints) -> TagReader:
        from xla_ckpt.layouts.one_file.scan import open_one_file

        return open_one_file(store, entry, hints)

    def verify(self, store: Store, entry: TagEntry, workers: int = READERS) -> VerifyReport:
        from xla_ckpt.layouts.torch_save.zip_reader import check_zip
        from xla_ckpt.layouts.verifying import foreign_report

        with foreign_report(store, entry.tag) as report:
            report.files = len(entry.files) or 1
            try:
                with self.open(store, entry, Hints(optimizer=False)) as reader, storage_errors("reading a file"):
                    report.arrays = len(reader.manifest.arrays)
                    report.nbytes = sum(check_zip(reader.directory, file.path) for file in reader.manifest.files)
            except CheckpointError as error:
                report.problems.append(error.at(file=entry.tag))
        return report

    def rewriting(self, stored: StoredState, to: Topology) -> Rewriting:
        from xla_ckpt.layouts.one_file.writing import plan_file

        if to.mesh.size > 1:
            raise UsageError("one file holds whole arrays, and is for any mesh", expected="no mesh", found=str(to.mesh))
        return Rewriting([(plan_file(stored, STATE_FILE),)])
