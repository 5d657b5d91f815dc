"""The torch_checkpointing layout, and its directories in a root. Reads only names and first bytes, and imports no
framework.

The item ``model`` of rank 3 is ``<tag>/model_3.pt``, unless the program set another path. If an item can be
loaded on another mesh, the file ``metadata.pkl`` lists its files. A directory is complete when it has its final
name: until then the name begins with ``tmp_``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from xla_ckpt.core.manifest.manifest import Manifest
from xla_ckpt.core.plan.hints import LoadHints
from xla_ckpt.errors import CheckpointError, wrap_os_errors
from xla_ckpt.formats.base import ConversionPlan, Layout, StoredState, TargetTopology, format_timestamp
from xla_ckpt.formats.digests import DIGESTS
from xla_ckpt.loading.tag_reader import TagReader
from xla_ckpt.loading.verify import VerifyReport
from xla_ckpt.storage.base import Store
from xla_ckpt.storage.threads import READ_THREADS
from xla_ckpt.tags.entry import TagEntry

if TYPE_CHECKING:
    from xla_ckpt.formats.torch_checkpointing.writing import ItemsWritePlanner
    from xla_ckpt.state.describe import StateDescription


ITEMS_METADATA_FILE = "metadata.pkl"
"""File that describes the sharding of items."""

UNFINISHED_PREFIX = "tmp_"
"""Name prefix of directories of unfinished saves."""

STREAMED_NAME = b"archive/data.pkl"
"""First name in a torch.save zip that was written to a stream, as torch_checkpointing does. In a zip that was written
to a path, it begins with the file name."""

_NAME_OFFSET = 30
"""Offset of this name in a zip."""

_RANK_FILE_NAME = re.compile(r"(.+)_(0|[1-9]\d{0,8})(\.\w+)?")

_ITEM_NAME = re.compile(r"[A-Za-z0-9_-]+")
"""Pattern of item names."""


def find_tag(store: Store, tag: str) -> TagEntry | None:
    """Return the directory with this name if torch_checkpointing wrote it; otherwise None."""
    if tag.startswith(UNFINISHED_PREFIX):
        return None
    try:
        mark = _find_marker(store, tag, store.list_names(tag))
        time = None if mark is None else store.get_modified_time(f"{tag}/{mark}")
    except OSError:
        return None
    return None if mark is None else TagEntry(tag=tag, created=format_timestamp(time or 0), directory=tag)


def _find_marker(store: Store, tag: str, names: Iterable[str]) -> str | None:
    """Return a file that identifies a torch_checkpointing directory; None if it is another directory.

    Without metadata, rank 0 must have a file of an item, and the first file of each item must have been written to a
    stream: other programs use such file names, too, but pass a path to torch.save.
    """
    if ITEMS_METADATA_FILE in names and store.read_start(f"{tag}/{ITEMS_METADATA_FILE}", 1) == b"\x80":
        return ITEMS_METADATA_FILE
    first: dict[str, int] = {}
    for name in names:
        named = _RANK_FILE_NAME.fullmatch(name)
        if named is not None and named[3] == ".pt" and _ITEM_NAME.fullmatch(named[1]):
            first[named[1]] = min(int(named[2]), first.get(named[1], int(named[2])))
    marks = sorted(get_file_name(item, rank) for item, rank in first.items())
    if 0 not in first.values() or not all(_is_streamed(store, f"{tag}/{mark}") for mark in marks):
        return None
    return marks[0]


def _is_streamed(store: Store, path: str) -> bool:
    start = store.read_start(path, _NAME_OFFSET + len(STREAMED_NAME))
    return start.startswith(b"PK\3\4") and start[_NAME_OFFSET:] == STREAMED_NAME


def group_files_by_item(names: Iterable[str]) -> dict[str, dict[int, str]]:
    """Return item -> rank -> file, given the names of the files.

    >>> group_files_by_item(["model_0.pt", "model_1.pt", "st/config.json"])
    {'model': {0: 'model_0.pt', 1: 'model_1.pt'}, 'st/config': {0: 'st/config.json'}}
    """
    items: dict[str, dict[int, str]] = {}
    for name in sorted(names):
        named = _RANK_FILE_NAME.fullmatch(name)
        folder, slash, last = name.rpartition("/")
        item, rank = (named[1], int(named[2])) if named else (folder + slash + last.partition(".")[0], 0)
        items.setdefault(item, {}).setdefault(rank, name)
    return items


def get_file_name(item: str, rank: int) -> str:
    """Return the default file name of an item."""
    return f"{item}_{rank}.pt"


def parse_rank(path: str) -> int | None:
    """Return the rank in a default file name; None for any other name."""
    named = _RANK_FILE_NAME.fullmatch(path)
    return None if named is None else int(named[2])


def infer_world_size(items: Mapping[str, Mapping[int, str]]) -> int:
    """Return the number of ranks that saved, as far as the files show it."""
    return 1 + max((rank for files in items.values() for rank in files), default=0)


class TorchCheckpointingLayout(Layout):
    """Directories of Meta's torch_checkpointing.

    They have no digests, unless the package wrote them through the storage of this library. Loads check the CRC-32s of
    their zips, which the package itself does not do; safetensors, JSON and bytes items have none.
    """

    name = "torch_checkpointing"
    origin = "torch_checkpointing"
    saves = True
    pickles = True
    asks = True
    may_hold_tags = True

    def wrote(self, manifest: Manifest) -> bool:
        return any(file.path == ITEMS_METADATA_FILE for file in manifest.files)

    def writing(self, description: StateDescription) -> ItemsWritePlanner:
        from xla_ckpt.formats.torch_checkpointing.writing import ItemsWritePlanner

        writing = ItemsWritePlanner(description)
        _ = writing.plan  # raises for state that the package cannot store
        return writing

    def rewriting(self, stored: StoredState, to: TargetTopology) -> ConversionPlan:
        from xla_ckpt.formats.torch_checkpointing.writing import plan_item_conversion

        return plan_item_conversion(stored, to)

    def find(self, store: Store, tag: str) -> TagEntry | None:
        return find_tag(store, tag)

    def open(self, store: Store, entry: TagEntry, hints: LoadHints) -> TagReader:
        from xla_ckpt.formats.torch_checkpointing.reading import open_torch_checkpointing

        return open_torch_checkpointing(store, entry, hints)

    def verify(self, store: Store, entry: TagEntry, workers: int = READ_THREADS) -> VerifyReport:
        from xla_ckpt.formats.scan import check_files, start_verify_report
        from xla_ckpt.formats.torch_checkpointing.verified_directory import verify_file
        from xla_ckpt.formats.torch_save.zip_reader import check_zip_file

        with start_verify_report(store, entry.tag) as report:
            try:
                report.digests = DIGESTS in store.list_names(entry.directory)
                with (
                    self.open(store, entry, LoadHints(wants_optimizer=False)) as reader,
                    wrap_os_errors("reading a checkpoint"),
                ):
                    report.arrays = len(reader.manifest.arrays)
                    files = [file.path for file in reader.manifest.files]
                    zips = [path for path in files if path.endswith(".pt")]
                    compared, check = (files, verify_file) if report.digests else (zips, check_zip_file)
                    check_files(report, compared, partial(check, reader.directory), workers)
                    report.files = len(files)
            except CheckpointError as error:
                report.problems.append(error)
        return report
