"""The torch_checkpointing layout, and its directories in a root. Reads names and first bytes only, and needs no
framework.

The item ``model`` of rank 3 is ``<tag>/model_3.pt``, unless the program gave the item another path. If an item may be
loaded over another mesh, the file ``metadata.pkl`` says where its files are. A directory is complete when it has its
name: until then that begins with ``tmp_``.
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
"""The file that says how items are cut."""

UNFINISHED_PREFIX = "tmp_"
"""What the names of directories begin with whose save has not ended."""

STREAMED_NAME = b"archive/data.pkl"
"""The first name in a zip of torch.save that was written into a stream, as this library does. One that was written into
a file begins with the name of the file."""

_NAME_OFFSET = 30
"""Where this name stands in a zip."""

_RANK_FILE_NAME = re.compile(r"(.+)_(0|[1-9]\d{0,8})(\.\w+)?")

_ITEM_NAME = re.compile(r"[A-Za-z0-9_-]+")
"""What an item may be called."""


def find_tag(store: Store, tag: str) -> TagEntry | None:
    """The directory of this name, if this library wrote it; else None."""
    if tag.startswith(UNFINISHED_PREFIX):
        return None
    try:
        mark = _find_marker(store, tag, store.list_names(tag))
        time = None if mark is None else store.get_modified_time(f"{tag}/{mark}")
    except OSError:
        return None
    return None if mark is None else TagEntry(tag=tag, created=format_timestamp(time or 0), directory=tag)


def _find_marker(store: Store, tag: str, names: Iterable[str]) -> str | None:
    """A file that shows whose the directory is; None if it is not theirs.

    Without metadata it is theirs if rank 0 has a file of an item, and the first file of each item was written into a
    stream: others call files like this, too, but give torch.save a path.
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
    """Item -> rank -> file, as the names of the files say.

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
    """The file of an item, unless the program says otherwise."""
    return f"{item}_{rank}.pt"


def parse_rank(path: str) -> int | None:
    """The rank whose file this is, unless the program called it otherwise; None if it is none of a rank."""
    named = _RANK_FILE_NAME.fullmatch(path)
    return None if named is None else int(named[2])


def infer_world_size(items: Mapping[str, Mapping[int, str]]) -> int:
    """How many ranks saved, as far as the files show it."""
    return 1 + max((rank for files in items.values() for rank in files), default=0)


class TorchCheckpointingLayout(Layout):
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
        return any(file.path == ITEMS_METADATA_FILE for file in manifest.files)

    def writing(self, description: StateDescription) -> ItemsWritePlanner:
        from xla_ckpt.formats.torch_checkpointing.writing import ItemsWritePlanner

        writing = ItemsWritePlanner(description)
        _ = writing.plan  # raises for what the package has no place for
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
