"""Small files, which are read and written whole."""

from __future__ import annotations

import contextlib

from xla_ckpt.errors import FormatError
from xla_ckpt.storage.base import Directory, ReadDirectory


def read_whole(directory: ReadDirectory, path: str, *, limit: int | None = None, what: str = "the file") -> bytes:
    """All bytes of a small file.

    Args:
        directory: Where it is.
        path: Its path there.
        limit: Bytes that it may have, if others have written it.
        what: What an error calls it.

    Raises:
        FileNotFoundError: There is none.
        FormatError: It is larger than the limit.
        OSError: The storage refused.
    """
    with contextlib.closing(directory.open(path)) as source:
        if limit is not None and source.size > limit:
            raise FormatError(f"{what} is too large", file=path, expected=f"at most {limit} bytes", found=source.size)
        data = bytearray(source.size)
        got = source.read_into(memoryview(data), 0)
        return bytes(memoryview(data)[:got])


def size_of(directory: ReadDirectory, path: str) -> int:
    """Bytes in a file.

    Raises:
        FileNotFoundError: There is none.
        OSError: The storage refused.
    """
    source = directory.open(path)
    source.close()
    return source.size


def write_small(directory: Directory, path: str, data: bytes | memoryview) -> None:
    """Write a whole file durably, at once. Large `data` begins at a page.

    Raises:
        OSError: The storage refused.
    """
    sink = directory.create(path, len(data))
    try:
        sink.write(memoryview(data), len(data), 0)
        sink.commit()
    except BaseException:
        sink.abandon()
        raise
