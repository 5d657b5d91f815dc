"""The files of a tag, in pieces, for who sends them elsewhere: what is not as it was saved does not arrive."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from xla_ckpt.engine.tag_reader import TagReader
from xla_ckpt.errors import CheckpointError, CorruptCheckpointError
from xla_ckpt.manifest.digest import BlockDigester, JoinedDigest
from xla_ckpt.storage.base import Directory, Source

PIECE_BYTES = 8 * 1024 * 1024
"""Bytes of a file that are read at a time."""


def checked(reader: TagReader, number: int) -> Iterator[memoryview]:
    """A file of a tag, in pieces, which are compared with its digests before the last one is over.

    Raises:
        CorruptCheckpointError: It is not what was saved.
    """
    record, source = reader.manifest.files[number], reader.source(number)
    table = None if record.head == record.size else reader.digest_table(number)  # a file of pickles has no regions
    damaged = CorruptCheckpointError("the file is not what was saved", file=record.path, hint=reader.hint)
    regions = [] if table is None else list(zip(table.offset.tolist(), table.nbytes.tolist(), strict=True))
    rest, at = JoinedDigest(), 0
    for offset, nbytes in (*regions, (record.size, 0)):
        for piece in _pieces(source, at, offset - at, damaged):
            rest.add(rest.nbytes, piece)
            yield piece
        of_region = BlockDigester(nbytes)
        for piece in _pieces(source, offset, nbytes, damaged):
            of_region.update(piece)
            yield piece
        if table is not None and nbytes and tuple(of_region.digests) != table.of(offset, nbytes):
            raise damaged
        at = offset + nbytes
    if rest.value != record.digest:
        raise damaged


def _pieces(source: Source, offset: int, nbytes: int, short: CheckpointError) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(min(PIECE_BYTES, nbytes)))
    for at in range(offset, offset + nbytes, PIECE_BYTES):
        piece = buffer[: min(PIECE_BYTES, offset + nbytes - at)]
        if source.read_into(piece, at) < len(piece):
            raise short
        yield piece


def whole_file(directory: Directory, path: str) -> Iterator[memoryview]:
    """A file that is not in the manifest, such as the manifest itself, which has a digest of its own."""
    with contextlib.closing(directory.open(path)) as source:
        yield from _pieces(source, 0, source.size, CorruptCheckpointError("the file is cut off", file=path))
