"""Files as torch.save writes them: a zip of a pickle and of storages, uncompressed. Only their layout: pure.

The bytes of a storage begin at a multiple of 64, as in torch >= 2.6, and a storage may consist of several regions,
each with digests of its own: of a tensor of one rank they are the parts that are neighbours in the global array.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from xla_ckpt.files.codec import Glue
from xla_ckpt.files.crc32 import crc32, joined
from xla_ckpt.manifest import digest as digests_
from xla_ckpt.manifest.records import FileRecord

STORAGE_ALIGNMENT = 64
_LARGE = 0xFFFFFFFF
_UTF8 = 0x0800
_DATE = 0x0021
"""1 January 1980: a checkpoint has no other date than its commit."""

_LOCAL = struct.Struct("<4s5H3L2H")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_END = struct.Struct("<4s4H2LH")


@dataclass(frozen=True, slots=True)
class _Record:
    """A member of the zip."""

    name: bytes
    small: bytes | None
    """Its bytes; None for a storage."""
    nbytes: int
    header: int
    """Offset of its local header."""
    start: int
    """Offset of its first byte."""


@dataclass(frozen=True, slots=True)
class TorchFile:
    """The layout of one file."""

    stem: str
    """Name of the folder inside of the zip: torch.save takes the file's own, without its ending."""

    pickled: bytes
    """The pickle, which names storage ``0``, ``1``..."""

    storages: tuple[tuple[int, ...], ...] = ()
    """Bytes of each region of each storage."""

    _records: tuple[_Record, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_records", tuple(self._laid_out()))

    def _laid_out(self) -> Iterator[_Record]:
        members: list[tuple[str, bytes | None, int]] = [
            ("data.pkl", self.pickled, len(self.pickled)),
            (".format_version", b"1", 1),
            (".storage_alignment", b"64", 2),
            ("byteorder", b"little", 6),
            *((f"data/{i}", None, sum(parts)) for i, parts in enumerate(self.storages)),
            ("version", b"3\n", 2),
        ]
        at = 0
        for name, small, nbytes in members:
            called = f"{self.stem}/{name}".encode()
            head = at + _LOCAL.size + len(called) + len(_sizes64(nbytes)) + 4
            start = -(-head // STORAGE_ALIGNMENT) * STORAGE_ALIGNMENT
            yield _Record(called, small, nbytes, at, start)
            at = start + nbytes

    @property
    def size(self) -> int:
        last = self._records[-1]
        directory = sum(_CENTRAL.size + len(r.name) + len(_directory64(r)) for r in self._records)
        return last.start + last.nbytes + directory + _END64.size + _LOCATOR.size + _END.size

    @property
    def places(self) -> list[tuple[int, int]]:
        found = []
        for record, parts in zip((r for r in self._records if r.small is None), self.storages, strict=True):
            at = record.start
            for nbytes in parts:
                found.append((at, nbytes))
                at += nbytes
        return found

    @property
    def wants_crc32(self) -> bool:
        return True

    def without(self, regions: frozenset[int]) -> None:
        """It needs all of its regions: they are the storages that the pickle names."""

    def glue(self, digests: Sequence[int], crcs: Sequence[int]) -> Glue:
        sums = iter(self._sums(crcs))
        checks = [crc32(r.small) if r.small is not None else next(sums) for r in self._records]
        made: list[tuple[int, bytes]] = []
        begun, text = 0, bytearray()
        for record, check in zip(self._records, checks, strict=True):
            text += _local_header(record, check)
            if record.small is not None:
                text += record.small
            elif record.nbytes:
                made.append((begun, bytes(text)))
                begun, text = record.start + record.nbytes, bytearray()
        made.append((begun, bytes(text) + self._directory(checks)))
        return made

    def _sums(self, crcs: Sequence[int]) -> Iterator[int]:
        at = 0
        for parts in self.storages:
            yield joined(zip(crcs[at : at + len(parts)], parts, strict=True))
            at += len(parts)

    def _directory(self, checks: Sequence[int]) -> bytes:
        text = bytearray()
        for record, check in zip(self._records, checks, strict=True):
            small, extra = min(record.nbytes, _LARGE), _directory64(record)
            text += _CENTRAL.pack(
                b"PK\1\2",
                45 if extra else 20,
                45 if extra else 20,
                _UTF8,
                0,
                0,
                _DATE,
                check,
                small,
                small,
                len(record.name),
                len(extra),
                0,
                0,
                0,
                0,
                min(record.header, _LARGE),
            )
            text += record.name + extra
        last, count, size = self._records[-1], len(self._records), len(text)
        start = last.start + last.nbytes
        text += _END64.pack(b"PK\6\6", _END64.size - 12, 45, 45, 0, 0, count, count, size, start)
        text += _LOCATOR.pack(b"PK\6\7", 0, start + size, 1)
        few = min(count, 0xFFFF)
        return bytes(text + _END.pack(b"PK\5\6", 0, 0, few, few, min(size, _LARGE), min(start, _LARGE), 0))

    def record(self, path: str, glue: Glue, digests: Sequence[int]) -> FileRecord:
        rest = b"".join(text for _, text in glue)
        regions = tuple((at, nbytes) for at, nbytes in self.places if nbytes)
        return FileRecord(path, self.size, len(rest), digests_.digest(rest), regions, tuple(digests))


def _sizes64(nbytes: int) -> bytes:
    """The extra field for sizes that 32 bits do not hold."""
    return struct.pack("<2H2Q", 1, 16, nbytes, nbytes) if nbytes >= _LARGE else b""


def _directory64(record: _Record) -> bytes:
    values = [record.nbytes] * 2 if record.nbytes >= _LARGE else []
    values += [record.header] if record.header >= _LARGE else []
    return struct.pack(f"<2H{len(values)}Q", 1, 8 * len(values), *values) if values else b""


def _local_header(record: _Record, check: int) -> bytes:
    sizes = _sizes64(record.nbytes)
    fill = record.start - record.header - _LOCAL.size - len(record.name) - len(sizes) - 4
    extra = sizes + struct.pack("<2s1H", b"FB", fill) + b"Z" * fill  # torch's own name for padding
    small = min(record.nbytes, _LARGE)
    head = _LOCAL.pack(
        b"PK\3\4", 45 if sizes else 20, _UTF8, 0, 0, _DATE, check, small, small, len(record.name), len(extra)
    )
    return head + record.name + extra
