"""A directory in memory, which is in no root."""

from __future__ import annotations

from xla_ckpt.storage.memory import MemoryFiles
from xla_ckpt.storage.remote import RemoteDirectory


class _Counted(MemoryFiles):
    def __init__(self) -> None:
        super().__init__()
        self.read_counts: list[int] = []
        """Bytes of each read."""

    def read(self, key: str, offset: int, nbytes: int, version: str | None) -> tuple[memoryview, int, str | None]:
        answer = super().read(key, offset, nbytes, version)
        self.read_counts.append(len(answer[0]))
        return answer


class MemoryDirectory(RemoteDirectory):
    def __init__(self) -> None:
        self.objects = _Counted()
        self.read_counts = self.objects.read_counts
        super().__init__(self.objects, "", "")
