"""Opening one file of torch.save: scanned into a `Manifest`. No tensor is read, and no code of the file's is run."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import closing
from typing import Any

from xla_ckpt.engine.tag_reader import TagReader
from xla_ckpt.errors import UnsupportedStateError, naming, storage_errors
from xla_ckpt.layouts.dcp import strided
from xla_ckpt.layouts.one_file.file import SavedFiles
from xla_ckpt.layouts.one_file.members import members_of
from xla_ckpt.layouts.one_file.objects import Objects, StoredObject, Walk
from xla_ckpt.layouts.smp.marks import job_of_part
from xla_ckpt.layouts.torch_save.zip_reader import Ahead, TensorAt, Zip
from xla_ckpt.manifest.records import ArrayRecord, FileRecord, Head, Manifest, Shard, UnknownArray, array_record
from xla_ckpt.plan.hints import Hints
from xla_ckpt.sharding.box import Box
from xla_ckpt.storage.base import Store
from xla_ckpt.tags.directory import TagEntry
from xla_ckpt.tree.codec import ValueCodec
from xla_ckpt.tree.flatten import flatten

logger = logging.getLogger(__name__)

_AHEAD = 4096
"""Bytes that are read at once: beside the header of a large storage there is nothing else to see."""


def open_scanned(store: Store, found: TagEntry, hints: Hints, codec: ValueCodec) -> TagReader:
    """A reader of a file, for the restore engine.

    Raises:
        CorruptCheckpointError: It is cut off or damaged, or torch.save did not write it.
        UnsupportedStateError: It is of another byte order, or compressed.
    """
    with storage_errors("opening a file", path=store.path, file=found.tag):
        # Caches of other programs have links in place of files.
        directory = SavedFiles(store.open("", lock=False, links=True), [found.tag])
    try:
        with naming(path=store.path, tag=found.tag, file=found.tag), storage_errors("reading a file"):
            manifest, objects = _scan(directory, found.tag, hints, codec)
            return TagReader(directory, store.path, found.tag, manifest, objects)
    except BaseException:
        directory.close()  # nobody else will
        raise


def _scan(directory: SavedFiles, file: str, hints: Hints, codec: ValueCodec) -> tuple[Manifest, list[StoredObject]]:
    with closing(directory.open(file)) as source:
        size = source.size
        archive = Zip(Ahead(source, file, _AHEAD), 0, size)
        directory.storages[file] = archive.storages()
        walk = Walk(Objects(directory, file, archive.pickled), codec, _Records().of)
        tree = walk.visit(archive.value(strided=True, tolerant=True), ())
    if (job := job_of_part(tree)) is not None:
        logger.warning(
            "%s is the part of one rank of a job of SageMaker model parallel, of pp %d and tp %d: the name without the "
            "numbers at its end is that of all parts together",
            file,
            *job,
        )
    members = members_of(tree, hints, _is_array, _shape_of_numbers)
    if members.guessed:
        logger.warning(
            "%s: the stored optimizer numbers its parameters. They are taken to be those of the stored model in its "
            "order, which is the only one that fits their shapes; the model and the optimizer would say for certain "
            "(model=, optimizer=; --like)",
            file,
        )
    flat = flatten(members.tree, lambda value: "torch" if _is_array(value) else None, codec)
    known = {leaf: value for leaf, value in flat.arrays.items() if isinstance(value, ArrayRecord)}
    aliases = _aliases(known)
    manifest = Manifest(
        head=Head(tag=file, sequence=0, pinned=False, created=""),
        skeleton=flat.skeleton,
        arrays={leaf: record for leaf, record in known.items() if leaf not in aliases},
        aliases=aliases,
        files=(FileRecord(path=file, size=size, head=0, digest=0),),
        unknown={leaf: value for leaf, value in flat.arrays.items() if isinstance(value, UnknownArray)},
    )
    stray = next(((leaf, value) for leaf, value in flat.objects if not isinstance(value, StoredObject)), None)
    if stray is not None:
        raise UnsupportedStateError(f"a {type(stray[1]).__name__} is neither array nor plain value", leaf=stray[0])
    return manifest, [value for _, value in flat.objects]


def _is_array(value: Any) -> bool:
    return isinstance(value, ArrayRecord | UnknownArray)


def _shape_of_numbers(value: Any) -> tuple[int, ...] | None:
    """The shape of an array that may be a parameter, or a state of one."""
    if isinstance(value, ArrayRecord | UnknownArray) and value.dtype is not None:
        numbers = value.dtype.floating or value.dtype.name.startswith("complex")
        return value.shape if numbers else None
    return None


def _aliases(known: Mapping[str, ArrayRecord]) -> dict[str, str]:
    """Leaf paths of arrays that are those of one before them, with that one."""
    first: dict[int, str] = {}
    return {leaf: same for leaf, record in known.items() if (same := first.setdefault(id(record), leaf)) != leaf}


class _Records:
    """Records of tensors: one for all tensors that are the same elements."""

    def __init__(self) -> None:
        self._records: dict[tuple[Any, ...], ArrayRecord | UnknownArray] = {}

    def of(self, at: TensorAt) -> ArrayRecord | UnknownArray:
        """The record of a tensor: one for all tensors that are the same elements."""
        elements = Box.whole(at.shape)
        key = (at.offset, at.dtype, at.shape, at.strides) if elements.size else (at, len(self._records))
        if key not in self._records:
            self._records[key] = _record(at)
        return self._records[key]


def _record(at: TensorAt) -> ArrayRecord | UnknownArray:
    if at.strides is None:
        return array_record(at.dtype, at.shape, [Shard(Box.whole(at.shape), 0, at.offset)])
    try:
        parts = list(strided.boxes(at.shape, at.strides, (0,) * len(at.shape)))
    except UnsupportedStateError as error:
        # The rest of the file is good: only who wants this array hears of it.
        return UnknownArray(
            problem=error.problem,
            expected=str(error.expected),
            found=str(error.found),
            hint="Load it with torch, make it contiguous, and save it anew.",
            dtype=at.dtype,
            shape=at.shape,
            tensors=1,
        )
    shards = [Shard(box, 0, at.offset + first * at.dtype.itemsize) for box, first in parts]
    return array_record(at.dtype, at.shape, shards)
