"""In-memory object store for tests and simulations: ``memory://name``.

Contents are lost with the process, and other processes cannot see them.
"""

from __future__ import annotations

import bisect
import datetime
import errno
import itertools
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from xla_ckpt.core.plan.read_costs import LOCAL_DISK_COSTS
from xla_ckpt.storage.base import VersionConflict
from xla_ckpt.storage.process_state import fork_safe_rlock


@dataclass(frozen=True, slots=True)
class MemoryFile:
    """An immutable file. Overwriting it creates a new object, and readers of the old one keep it."""

    data: bytes
    meta: dict[str, Any]
    """Name, size and modification time, as obstore returns them."""

    version: dict[str, str]
    """Unique version."""


class MemoryFiles(MutableMapping[str, bytes]):
    """Files by full name, such as ``root/tag/file``, with the methods of `storage.remote_client.ObjectStoreClient`."""

    costs = LOCAL_DISK_COSTS

    def __init__(self) -> None:
        self._lock = fork_safe_rlock()
        self._files: dict[str, MemoryFile] = {}
        self._names: list[str] = []
        """All names, sorted, so that names with a common prefix are adjacent."""

        self._versions = itertools.count(1)

    def _get_file(self, key: str) -> MemoryFile:
        try:
            return self._files[key]
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, "there is no such file", key) from None

    def get_metadata(self, key: str) -> dict[str, Any]:
        return self._get_file(key).meta

    def read(self, key: str, offset: int, nbytes: int, version: str | None) -> tuple[memoryview, int, str | None]:
        data = self._get_file(key).data
        return memoryview(data)[offset : offset + nbytes], len(data), version

    def read_version(self, key: str) -> tuple[bytes, dict[str, str]]:
        file = self._get_file(key)
        return file.data, file.version

    def send(self, key: str, data: Any, part_bytes: int, parts_at_once: int) -> None:
        self[key] = data.read() if hasattr(data, "read") else b"".join([data] if isinstance(data, bytes) else data)

    def put_if_match(self, key: str, data: bytes, version: dict[str, str] | None) -> dict[str, str]:
        with self._lock:
            if version != (self._files[key].version if key in self._files else None):
                raise VersionConflict(key)
            self[key] = data
            return self._files[key].version

    def copy(self, source: str, target: str) -> None:
        self[target] = self._get_file(source).data

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.pop(key, None)

    def list_names(self, prefix: str) -> list[str]:
        return sorted({name[len(prefix) :].partition("/")[0] for name in self.list_keys(prefix)})

    def list_metadata(self, prefix: str) -> list[dict[str, Any]]:
        return [self._files[name].meta for name in self.list_keys(prefix)]

    def list_page(self, prefix: str, after: str) -> tuple[list[dict[str, Any]], bool]:
        names = self.list_keys(prefix)
        return [self._files[name].meta for name in names[bisect.bisect_right(names, after) :]], True

    def list_keys(self, prefix: str) -> list[str]:
        with self._lock:
            if not prefix:
                return list(self._names)
            start = bisect.bisect_left(self._names, prefix)
            return self._names[start : bisect.bisect_left(self._names, f"{prefix[:-1]}0", start)]  # "0" follows "/"

    def is_any_below(self, prefix: str) -> bool:
        return bool(self.list_keys(prefix))

    def check_conditional_writes(self, prefix: str) -> None:
        """Do nothing: conditional writes are enforced."""

    def __getitem__(self, name: str) -> bytes:
        return self._files[name].data

    def __setitem__(self, name: str, data: bytes) -> None:
        with self._lock:
            if name not in self._files:
                bisect.insort(self._names, name)
            meta = {"path": name, "size": len(data), "last_modified": datetime.datetime.now(datetime.UTC)}
            self._files[name] = MemoryFile(data, meta, {"version": str(next(self._versions))})

    def __delitem__(self, name: str) -> None:
        with self._lock:
            del self._files[name]
            del self._names[bisect.bisect_left(self._names, name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self.list_keys(""))

    def __len__(self) -> int:
        return len(self._files)


MEMORY_FILES = MemoryFiles()
"""Files stored at ``memory://`` in this process."""
