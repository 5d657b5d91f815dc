"""Some files as a directory. Of those of torch.save every byte is compared with a CRC-32 before anybody has it.

torch.save writes a CRC-32 of each storage, which torch.load does not look at. A storage is read whole when something in
it is wanted for the first time, compared, and read again for whoever wants it, the second time from the page cache.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from xla_ckpt.engine.tag_reader import DAMAGED
from xla_ckpt.errors import CorruptCheckpointError, naming
from xla_ckpt.files.crc32 import check_crc32
from xla_ckpt.storage.base import ReadDirectory, Source

if TYPE_CHECKING:
    from xla_ckpt.layouts.torch_save.zip_reader import StorageAt  # this loads torch, which files of others do without

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")
"""What programs give to torch.save as the ending of a name."""


def tensors_folder(file: str) -> str:
    """Return the directory in which torch_xla's ``serialization.save`` has the tensors of a file."""
    return f"{file}.tensors"


def tensor_file(file: str, tid: int) -> str:
    """Return the file in it of the tensor that has this number.

    >>> tensor_file("epoch_3.pt", 7)
    'epoch_3.pt.tensors/tensor_7.pt'
    """
    return f"{tensors_folder(file)}/tensor_{tid}.pt"


class SavedFiles:
    """A directory as if some files were all that is in it. They are only read."""

    def __init__(
        self, directory: ReadDirectory, files: Collection[str], storages: dict[str, list[StorageAt]] | None = None
    ) -> None:
        self._directory = directory
        self.costs = directory.costs
        self._files = frozenset(files)
        self.name = next(iter(files)) if len(self._files) == 1 else directory.name
        self.storages: dict[str, list[StorageAt]] = {} if storages is None else storages
        """The storages that are compared, by file."""

    def open(self, path: str, size: int | None = None) -> Source:
        if path not in self._files:
            raise FileNotFoundError(path)
        source, storages = self._directory.open(path, size), self.storages.get(path)
        return source if not storages else _Compared(source, path, storages)

    def files(self) -> list[str]:
        return sorted(self._files)

    def is_at(self, name: str) -> bool:
        return self._directory.is_at(self._directory.name if name == self.name else name)

    def close(self) -> None:
        self._directory.close()


class _Compared:
    """A file whose storages are compared with their CRC-32s."""

    def __init__(self, source: Source, file: str, storages: Iterable[StorageAt]) -> None:
        self._source = source
        self._file = file
        self.size = source.size
        compared = {storage for storage in storages if storage.crc and storage.nbytes}
        if (claimed := sum(storage.nbytes for storage in compared)) > source.size:
            source.close()  # each would be read whole, and a small file could ask for hours
            raise CorruptCheckpointError(
                "the storages of a file lie over each other", file=file, expected=f"{source.size} bytes", found=claimed
            )
        self._storages = sorted(compared, key=lambda storage: storage.offset)
        self._starts = [storage.offset for storage in self._storages]
        self._locks = [threading.Lock() for _ in self._storages]
        self._sound = [False for _ in self._storages]

    def read_into(self, buffer: memoryview, offset: int) -> int:
        self._compare(offset, offset + len(buffer))
        return self._source.read_into(buffer, offset)

    def read_once(self, buffer: memoryview, offset: int, scratch: memoryview) -> int:
        if self._compare(offset, offset + len(buffer)):
            return self._source.read_into(buffer, offset)  # it is in the page cache now
        return self._source.read_once(buffer, offset, scratch)

    def _compare(self, start: int, stop: int) -> bool:
        """Compare the storages of which a part lies in a range, once each; whether there are any."""
        first = max(bisect_right(self._starts, start) - 1, 0)
        touched = False
        for number in range(first, bisect_left(self._starts, stop)):
            storage = self._storages[number]
            if storage.offset + storage.nbytes <= start:
                continue
            touched = True
            with self._locks[number]:  # the others that want something of it wait for its verdict
                if not self._sound[number]:
                    read_into, record = self._source.read_into, f"the record data/{storage.key}"
                    with naming(hint=DAMAGED):
                        check_crc32(read_into, self._file, record, storage.offset, storage.nbytes, storage.crc)
                    self._sound[number] = True
        return touched

    def close(self) -> None:
        self._source.close()
