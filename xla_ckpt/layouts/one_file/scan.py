"""Opening one file of torch.save: scanned into a `Manifest`. No tensor is read, and no code of the file's is run."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from xla_ckpt.engine.tag_reader import DAMAGED, TagReader
from xla_ckpt.errors import CorruptCheckpointError, UnsupportedStateError, naming
from xla_ckpt.layouts.one_file.members import file_members, is_model_alone
from xla_ckpt.layouts.one_file.objects import stored_tree
from xla_ckpt.layouts.saved_files import SavedFiles, tensor_file, tensors_folder
from xla_ckpt.layouts.scanned import directory_to_scan, flattened, scanned_manifest
from xla_ckpt.layouts.smp.marks import job_of_part
from xla_ckpt.layouts.torch_save.ahead import FEW_AHEAD, Ahead
from xla_ckpt.layouts.torch_save.strided import composite_of, record_at
from xla_ckpt.layouts.torch_save.zip_reader import TensorAt, Zip
from xla_ckpt.layouts.untrusted import UntrustedObject
from xla_ckpt.logs import get_logger
from xla_ckpt.manifest.arrays import ArrayRecord
from xla_ckpt.manifest.records import FileRecord, Manifest, UnknownArray
from xla_ckpt.plan.hints import Hints
from xla_ckpt.sharding.box import Box
from xla_ckpt.storage.base import Store
from xla_ckpt.tags.entry import TagEntry
from xla_ckpt.tree import schema

logger = get_logger(__name__)


def open_one_file(store: Store, entry: TagEntry, hints: Hints) -> TagReader:
    """A reader of a file, for the restore engine.

    Raises:
        CorruptCheckpointError: It is cut off or damaged, or torch.save did not write it.
        UnsupportedStateError: It is of another byte order, or compressed.
    """
    file = entry.tag
    # Caches of other programs have links in place of files.
    with directory_to_scan(store, file, lambda: store.open("", lock=False, links=True)) as directory, naming(file=file):
        files = SavedFiles(directory, entry.files or (file,))
        records: list[FileRecord] = []
        tree = _tree(files, file, records)
        reader = TagReader(files, store.path, file, *_scan(files, file, tree, records, hints))
        if (job := job_of_part(tree)) is not None:
            reader.misfit = (
                "The file is the part of one rank of a job of SageMaker model parallel, of pp {} and tp {}: load the "
                "name without the numbers at its end, which is that of all parts together."
            ).format(*job)
            reader.is_part = True
            logger.warning("%s: %s", file, reader.misfit)
        return reader


def _scan(
    directory: SavedFiles, file: str, tree: Any, records: list[FileRecord], hints: Hints
) -> tuple[Manifest, list[UntrustedObject]]:
    tensors = f"{tensors_folder(file)}/"
    beside = next((other for other in directory.files() if other != file and not other.startswith(tensors)), None)
    is_full = beside is not None and is_model_alone(tree)
    members = file_members({schema.MODEL: tree} if is_full else tree, hints)
    state = members.tree
    if beside is not None and is_full:
        state = {**state, schema.USER_CONTENT: _tree(directory, beside, records)}
    elif beside is not None:
        logger.warning(
            "%s: %s lies beside it, and is left out. It has the name of the user content of SageMaker model parallel's "
            "full checkpoints, and %s holds more than a model",
            file,
            beside,
            file,
        )
    if members.guessed:
        logger.warning(
            "%s: the stored optimizer numbers its parameters. They are taken to be those of the stored model, in each "
            "group in its order, and their shapes fit so in one way only. One that was given parameters of equal "
            "shapes in another order has other ones: to be certain, give the model and its optimizer, as they were at "
            "the save: model= and optimizer= (--like)",
            file,
        )
    return scanned_manifest(file, flattened(state), records)


def _tree(directory: SavedFiles, file: str, records: list[FileRecord]) -> Any:
    """What a file holds, with a record for each tensor. The file gets its own record behind those of others."""
    of_files = _Records(records)
    tensors: dict[int, TensorAt] = {}

    def reference(tid: int) -> TensorAt:
        if tid not in tensors:
            tensors[tid] = _tensor_alone(directory, tensor_file(file, tid), of_files)
        return tensors[tid]

    with closing(directory.open(file)) as source, naming(file=file):
        of_files.add(file, source.size)
        is_apart = any(name.startswith(f"{tensors_folder(file)}/") for name in directory.files())
        ahead = Ahead(source, file, FEW_AHEAD)
        return stored_tree(directory, ahead, of_files.of, parts=composite_of, reference=reference if is_apart else None)


def _tensor_alone(directory: SavedFiles, file: str, of_files: _Records) -> TensorAt:
    """The tensor in a file of its own."""
    try:
        source = directory.open(file)
    except FileNotFoundError:
        raise CorruptCheckpointError("the file of a tensor is missing", file=file, hint=DAMAGED) from None
    with closing(source), naming(file=file):
        archive = Zip(Ahead(source, file, FEW_AHEAD), 0, source.size)
        at = archive.value(strided=True)
        if not isinstance(at, TensorAt):
            raise CorruptCheckpointError("the file of a tensor does not hold one", file=file, found=type(at).__name__)
        directory.storages[file] = archive.storages()
        of_files.add(file, source.size)
        return at


class _Records:
    """Records of the tensors of files: one for all tensors that are the same elements.

    Args:
        files: The records of the files, to which those of others are added.
    """

    def __init__(self, files: list[FileRecord]) -> None:
        self._files = files
        self._numbers: dict[str, int] = {}
        self._records: dict[tuple[Any, ...], ArrayRecord | UnknownArray] = {}

    def add(self, file: str, size: int) -> None:
        """Add the record of a file."""
        self._numbers[file] = len(self._files)
        self._files.append(FileRecord(path=file, size=size))

    def of(self, at: TensorAt) -> ArrayRecord | UnknownArray:
        """The record of a tensor: one for all tensors that are the same elements."""
        elements = Box.whole(at.shape)
        key = (at.file, at.offset, at.dtype, at.shape, at.strides) if elements.size else (at, len(self._records))
        if key not in self._records:
            self._records[key] = _record(at, self._numbers[at.file])
        return self._records[key]


def _record(at: TensorAt, file: int) -> ArrayRecord | UnknownArray:
    try:
        return record_at(at, file)
    except UnsupportedStateError as error:
        return UnknownArray.because(error, at.dtype, at.shape)  # the rest of the file is good
