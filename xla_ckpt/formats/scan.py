"""Scan the files of another library: open a directory, build a manifest, check CRC-32s, and defer untrusted pickles.

A layout opens the directory with `open_for_scan`, collects file records in `ScannedFiles`, and builds the manifest with
`build_scanned_manifest`. torch.save writes a CRC-32 of each storage, which torch.load ignores: `CrcCheckedDirectory`
reads the complete storage at the first access and compares it. Objects whose pickles reference classes of the program
become an `UntrustedObject`, which is only unpickled if the caller trusts it. No framework is imported at import time.
"""

from __future__ import annotations

import io
import threading
import time
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from xla_ckpt.core.checksum import check_crc32
from xla_ckpt.core.manifest.arrays import ArrayRecord, ArrayTable
from xla_ckpt.core.manifest.manifest import FileRecord, Manifest, ManifestHeader, UnreadableArray
from xla_ckpt.core.tree import schema
from xla_ckpt.core.tree.flatten import FlatTree, flatten
from xla_ckpt.core.tree.values import ValueCodec
from xla_ckpt.errors import (
    CorruptCheckpointError,
    UnsupportedStateError,
    UntrustedObjectError,
    annotate_errors,
    wrap_os_errors,
)
from xla_ckpt.loading.tag_reader import DAMAGED_FILE_HINT
from xla_ckpt.loading.verify import VerifyReport, collect_problem
from xla_ckpt.storage.base import FileReader, ReadDirectory, Store
from xla_ckpt.storage.threads import get_worker_count, run_tasks

if TYPE_CHECKING:
    from xla_ckpt.formats.torch_save.zip_reader import StorageLocation


TRUST_HINT = "Pass trust_pickle=True (--trust-pickle) if you trust whoever wrote this file."


class UntrustedObject:  # not a dataclass: a state that contains one is flattened, which would flatten a dataclass, too
    """Placeholder for an untrusted pickled object in a scanned state.

    Args:
        problem: Reason why it is not read without trust.
        file: File that contains it.
        read: Function that loads the object. It may run arbitrary code.
        path: Keys and indices of the object in the content of the file; empty for the full content.
        kind: Name of its class, if known.
        hint: Hint for the error message.
    """

    def __init__(
        self,
        problem: str,
        file: str,
        read: Callable[[], Any],
        path: tuple[Any, ...] = (),
        kind: str = "object",
        hint: str = TRUST_HINT,
    ) -> None:
        self.problem = problem
        self.file = file
        self.path = path
        self.kind = kind
        self.hint = hint
        self._read = read

    def __eq__(self, other: object) -> bool:
        """Return True if both may be the same object on two ranks. Their content is not compared."""
        if not isinstance(other, UntrustedObject):
            return NotImplemented
        return (self.problem, self.path) == (other.problem, other.path)

    def __hash__(self) -> int:
        return hash((self.problem, self.path))

    def load(self, leaf: str, *, trust: bool) -> Any:
        """Load the object.

        Raises:
            UntrustedObjectError: `trust` is False. No code of the pickle was run.
        """
        if not trust:
            raise UntrustedObjectError(self.problem, leaf=leaf, file=self.file, hint=self.hint)
        return self._read()


def wrap_untrusted_file(file: str, problem: str, read_bytes: Callable[[], bytes]) -> UntrustedObject:
    """Return a placeholder for the content of a torch.save file, or of a zip in one, whose bytes `read_bytes` reads."""

    def read() -> Any:
        import torch

        return torch.load(io.BytesIO(read_bytes()), map_location="cpu", weights_only=False)

    return UntrustedObject(problem, file, read)


TORCH_SAVE_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")
"""Common file name extensions of torch.save files."""


def get_tensors_folder(file: str) -> str:
    """Return the directory in which torch_xla's ``serialization.save`` stores the tensors of a file."""
    return f"{file}.tensors"


def get_tensor_file(file: str, tid: int) -> str:
    """Return the file of the tensor with this number.

    >>> get_tensor_file("epoch_3.pt", 7)
    'epoch_3.pt.tensors/tensor_7.pt'
    """
    return f"{get_tensors_folder(file)}/tensor_{tid}.pt"


class CrcCheckedDirectory:
    """Read-only view of a directory that is restricted to the given files, and checks CRC-32s of storages."""

    def __init__(
        self, directory: ReadDirectory, files: Collection[str], storages: dict[str, list[StorageLocation]] | None = None
    ) -> None:
        self._directory = directory
        self.costs = directory.costs
        self._files = frozenset(files)
        self.name = next(iter(files)) if len(self._files) == 1 else directory.name
        self.storages: dict[str, list[StorageLocation]] = {} if storages is None else storages
        """Storages to check, by file."""

    def open(self, path: str, size: int | None = None) -> FileReader:
        if path not in self._files:
            raise FileNotFoundError(path)
        source, storages = self._directory.open(path, size), self.storages.get(path)
        return source if not storages else _CrcCheckedSource(source, path, storages)

    def list_files(self) -> list[str]:
        return sorted(self._files)

    def is_at(self, name: str) -> bool:
        return self._directory.is_at(self._directory.name if name == self.name else name)

    def close(self) -> None:
        self._directory.close()


class _CrcCheckedSource:
    """File whose storages are checked against their CRC-32s."""

    def __init__(self, source: FileReader, file: str, storages: Iterable[StorageLocation]) -> None:
        self._source = source
        self._file = file
        self.size = source.size
        compared = {storage for storage in storages if storage.crc and storage.nbytes}
        if (claimed := sum(storage.nbytes for storage in compared)) > source.size:
            source.close()  # each storage is read completely, so a small malicious file could cause hours of reads
            raise CorruptCheckpointError(
                "the storages of a file lie over each other", file=file, expected=f"{source.size} bytes", found=claimed
            )
        self._storages = sorted(compared, key=lambda storage: storage.offset)
        self._starts = [storage.offset for storage in self._storages]
        self._locks = [threading.Lock() for _ in self._storages]
        self._verified = [False for _ in self._storages]

    def read_into(self, buffer: memoryview, offset: int) -> int:
        self._verify_storages(offset, offset + len(buffer))
        return self._source.read_into(buffer, offset)

    def read_once(self, buffer: memoryview, offset: int, scratch: memoryview) -> int:
        if self._verify_storages(offset, offset + len(buffer)):
            return self._source.read_into(buffer, offset)  # the bytes are in the page cache now
        return self._source.read_once(buffer, offset, scratch)

    def _verify_storages(self, start: int, stop: int) -> bool:
        """Verify the CRC of each storage that overlaps a range, unless it was verified. Return True if any overlaps."""
        first = max(bisect_right(self._starts, start) - 1, 0)
        touched = False
        for number in range(first, bisect_left(self._starts, stop)):
            storage = self._storages[number]
            if storage.offset + storage.nbytes <= start:
                continue
            touched = True
            with self._locks[number]:  # other readers of this storage wait for the result
                if not self._verified[number]:
                    read_into, record = self._source.read_into, f"the record data/{storage.key}"
                    with annotate_errors(hint=DAMAGED_FILE_HINT):
                        check_crc32(read_into, self._file, record, storage.offset, storage.nbytes, storage.crc)
                    self._verified[number] = True
        return touched

    def close(self) -> None:
        self._source.close()


R = TypeVar("R", bound=ReadDirectory)


class ScannedFiles:
    """Files of a scan, in the order of its manifest."""

    def __init__(self) -> None:
        self.records: list[FileRecord] = []
        self.file_numbers: dict[str, int] = {}
        """Path of each file -> its index in the records."""
        self.storages: defaultdict[str, list[StorageLocation]] = defaultdict(list)
        """Storages that contain the tensors, by torch.save file."""

    def add(self, record: FileRecord) -> int:
        """Add a file, and return its number."""
        self.file_numbers[record.path] = len(self.records)
        self.records.append(record)
        return self.file_numbers[record.path]

    def wrap_with_crc_checks(self, directory: ReadDirectory, files: Collection[str]) -> ReadDirectory:
        """Return the directory for the reader of this scan, which checks storages against their CRC-32s.

        `files` are all files in the directory. Listing them takes time, so the caller provides them.
        """
        return CrcCheckedDirectory(directory, files, self.storages) if any(self.storages.values()) else directory


@contextmanager
def open_for_scan(store: Store, tag: str, open_directory: Callable[[], R]) -> Iterator[R]:
    """Open a directory that stays open for its reader. Errors name the tag, and close the directory.

    Raises:
        StorageError: The directory cannot be opened, or a file in it cannot be read.
    """
    with wrap_os_errors("opening a checkpoint", path=store.path, tag=tag):
        directory = open_directory()
    try:
        with annotate_errors(path=store.path, tag=tag), wrap_os_errors("reading a checkpoint"):
            yield directory
    except BaseException:
        directory.close()  # otherwise it would count as being read until the process ends
        raise


MAX_JSON_BYTES = 1 << 26
"""Maximum size (bytes) of a JSON file of another library, which is read completely. Real ones are much smaller."""


def make_foreign_head(tag: str, created: str = "") -> ManifestHeader:
    """Return the header of a manifest of another library's files, which have no commit number and are not pinned."""
    return ManifestHeader(tag=tag, sequence=0, pinned=False, created=created)


def is_scanned_array(value: Any) -> bool:
    """Return True if a value of a scanned state represents an array."""
    return isinstance(value, ArrayRecord | UnreadableArray)


def _get_kind(value: Any) -> str | None:
    return "torch" if is_scanned_array(value) else None


def flatten_model(members: Mapping[str, Any]) -> FlatTree:
    """Flatten a scanned model that consists of arrays and JSON values. Imports no framework."""
    return flatten({schema.MODEL: members}, _get_kind, ValueCodec())


def flatten_state(state: Any) -> FlatTree:
    """Flatten a scanned state."""
    from xla_ckpt.state.values import CODEC  # imports torch, which listings do not need

    return flatten(state, _get_kind, CODEC)


def build_scanned_manifest(
    tag: str,
    flat: FlatTree,
    files: Sequence[FileRecord],
    *,
    created: str = "",
    mesh: str | None = None,
    world: int = 1,
    left_out: tuple[str, ...] = (),
) -> tuple[Manifest, list[UntrustedObject]]:
    """Build the manifest of a scanned state. Return it, and the objects that its skeleton references by number.

    Leaf paths that share one record object are names of one array.

    Raises:
        UnsupportedStateError: A value is neither an array nor a plain value nor an `UntrustedObject`.
    """
    objects: list[UntrustedObject] = []
    for leaf, value in flat.objects:
        if not isinstance(value, UntrustedObject):
            raise UnsupportedStateError(f"a {type(value).__name__} is neither array nor plain value", leaf=leaf)
        objects.append(value)
    arrays = {leaf: record for leaf, record in flat.arrays.items() if isinstance(record, ArrayRecord)}
    first: dict[int, str] = {}
    aliases = {leaf: same for leaf, record in arrays.items() if (same := first.setdefault(id(record), leaf)) != leaf}
    manifest = Manifest(
        header=make_foreign_head(tag, created),
        skeleton=flat.skeleton,
        arrays=ArrayTable.from_records({leaf: record for leaf, record in arrays.items() if leaf not in aliases}),
        aliases=aliases,
        files=tuple(files),
        mesh=mesh,
        world_size=world,
        unreadable={leaf: array for leaf, array in flat.arrays.items() if isinstance(array, UnreadableArray)},
        unwritten=left_out,
        module_metadata=flat.module_metadata,
    )
    return manifest, objects


@contextmanager
def start_verify_report(store: Store, tag: str) -> Iterator[VerifyReport]:
    """Create the report of a tag without digests. On exit, add the tag to its problems, and set its duration."""
    began = time.monotonic()
    report = VerifyReport(path=store.path, tag=tag, digests=False)
    yield report
    for problem in report.problems:
        problem.at(path=store.path, tag=tag)
    report.seconds = time.monotonic() - began


def check_files(report: VerifyReport, names: Sequence[str], check: Callable[[str], int], workers: int) -> None:
    """Check files in parallel, and add their problems to the report.

    Args:
        report: Report that also gets the number of files and the bytes read.
        check: Function that reads a file, and returns the number of bytes read.
    """
    sizes: list[int] = []

    def check_file(name: str, _: memoryview) -> None:
        collect_problem(report, lambda: sizes.append(check(name)))

    run_tasks(names, check_file, workers=get_worker_count(workers, 2), buffer_bytes=0, name="xla_ckpt-verify")
    report.files, report.nbytes = len(names), sum(sizes)
