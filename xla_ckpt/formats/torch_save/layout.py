"""The layout of a single torch.save file, as written by ``torch.save({"model": ..., "optimizer": ...}, "out.pt")``."""

from __future__ import annotations

from xla_ckpt.core.plan.hints import LoadHints
from xla_ckpt.errors import CheckpointError, UsageError, wrap_os_errors
from xla_ckpt.formats.base import ConversionPlan, Layout, StoredState, TargetTopology
from xla_ckpt.formats.nxd.layout import EXPERT_RANK_FILE_NAME, RANK_FILE_NAME
from xla_ckpt.formats.scan import TORCH_SAVE_SUFFIXES, get_tensors_folder, start_verify_report
from xla_ckpt.formats.smp.tags import find_user_content
from xla_ckpt.loading.tag_reader import TagReader
from xla_ckpt.loading.verify import VerifyReport
from xla_ckpt.storage.base import Store
from xla_ckpt.storage.threads import READ_THREADS
from xla_ckpt.tags.entry import TagEntry, is_tag_name

DCP_FILE_SUFFIX = ".distcp"
"""Suffix of a torch.distributed.checkpoint file. It consists of torch.save zips, and begins like one."""

STATE_FILE = "state.pt"
"""File name in a plan; the writer replaces it."""


class TorchSaveLayout(Layout):
    """State, or a part of it, in one file that plain torch reads. It is not a tag, because it has no manifest.

    A file is opened by its path, and is not listed among the tags of a root. A full checkpoint of SageMaker model
    parallel has its user content in a second file next to the first. A file of torch_xla's ``serialization.save`` has
    its tensors in a directory next to it.
    """

    name = "torch"
    tagged = False
    one_file = True
    asks = True

    def find(self, store: Store, tag: str) -> TagEntry | None:
        if not is_tag_name(tag) or tag.endswith(DCP_FILE_SUFFIX) or not store.has(tag) or store.is_directory(tag):
            return None
        if any(name.parse(tag) is not None for name in (RANK_FILE_NAME, EXPERT_RANK_FILE_NAME)):
            return None  # otherwise a model with its names would load the shards of the rank as full arrays
        try:
            is_zip = tag.endswith(TORCH_SAVE_SUFFIXES) or store.read_start(tag, 4) == b"PK\3\4"
        except OSError:
            return None
        if not is_zip:
            return None
        folder = get_tensors_folder(tag)
        beside = [f"{folder}/{name}" for name in store.list_names(folder)]
        if (user_content := find_user_content(store, tag)) is not None:
            beside.append(user_content)
        return TagEntry(tag=tag, directory=tag, files=(tag, *beside) if beside else ())

    def tag_of(self, entry: TagEntry) -> str:
        stem, dot, suffix = entry.tag.rpartition(".")
        return stem if dot and f".{suffix}" in TORCH_SAVE_SUFFIXES else entry.tag

    def open(self, store: Store, entry: TagEntry, hints: LoadHints) -> TagReader:
        from xla_ckpt.formats.torch_save.state_file import open_torch_file

        return open_torch_file(store, entry, hints)

    def verify(self, store: Store, entry: TagEntry, workers: int = READ_THREADS) -> VerifyReport:
        from xla_ckpt.formats.torch_save.zip_reader import check_zip_file

        with start_verify_report(store, entry.tag) as report:
            report.files = len(entry.files) or 1
            try:
                with (
                    self.open(store, entry, LoadHints(wants_optimizer=False)) as reader,
                    wrap_os_errors("reading a file"),
                ):
                    report.arrays = len(reader.manifest.arrays)
                    report.nbytes = sum(check_zip_file(reader.directory, file.path) for file in reader.manifest.files)
            except CheckpointError as error:
                report.problems.append(error.at(file=entry.tag))
        return report

    def rewriting(self, stored: StoredState, to: TargetTopology) -> ConversionPlan:
        from xla_ckpt.formats.torch_save.state_file import plan_state_file

        if to.mesh.size > 1:
            raise UsageError("one file holds whole arrays, and is for any mesh", expected="no mesh", found=str(to.mesh))
        return ConversionPlan([(plan_state_file(stored, STATE_FILE),)])
