"""Making the parity of a tag: sums over the blocks of its files, when these are durable.

Memory: a few blocks for each thread, whatever the size of the files. Each file is read once for its parity block, and
once more for the stripes, if there are any.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from xla_ckpt.engine.crew import Crew
from xla_ckpt.errors import StorageError
from xla_ckpt.manifest.digest import digest, pack_digests, unpack_digests
from xla_ckpt.manifest.parity_json import ParityFile, ParityIndex
from xla_ckpt.manifest.records import Manifest
from xla_ckpt.plan.parity import (
    COPY,
    PARITY_BLOCK,
    PARITY_INDEX,
    BlockAt,
    Blocks,
    Parity,
    Sum,
    SumPlace,
    file_sizes,
    places,
    share,
)
from xla_ckpt.storage.base import Directory, Sink, Source
from xla_ckpt.storage.pool import threads, work_off
from xla_ckpt.storage.small_files import write_small

WORKERS = 8
"""Threads that read and add, if the machine has the cores."""

Files = Sequence[tuple[str, int]]
"""(path, bytes) of each file that the parity covers, in the order of the index."""


Told = tuple[Sequence[str], tuple[str, str]]
"""A `Share` on its way to rank 0."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank has found out, as plain JSON for the way to rank 0."""

    files: list[str]
    """For each file that it read whole: the packed digests of its blocks."""

    sums: tuple[str, str]
    """Packed digests of the parity blocks, and of the stripes, that it wrote."""

    def to_json(self) -> Told:
        """The share as plain JSON."""
        return self.files, self.sums


class Readable(Protocol):
    """Where files can be read, whatever directory each of them is in."""

    def open(self, path: str) -> Source:
        """One of them."""


@dataclass(frozen=True, slots=True)
class Covered:
    """The files of which a parity is made."""

    directory: Readable
    """Where they are."""

    files: Files
    """Path and size (bytes) of each."""


def covered_files(manifest: Manifest) -> list[tuple[str, int]]:
    """The files of a tag that its parity covers: all that the manifest lists."""
    return [(file.path, file.size) for file in manifest.files]


def read_block(directory: Readable, path: str, offset: int, target: memoryview, scratch: memoryview) -> int:
    """Fill `target` from a file, as far as it reaches; how many bytes that was.

    Raises:
        OSError: There is no such file, or the storage refused.
    """
    # Not kept open: a tag may have more files than a process may have open.
    source = directory.open(path)
    try:
        return source.read_once(target, offset, scratch)
    finally:
        source.close()


def add(total: memoryview, data: memoryview) -> None:
    """Add bytes to a sum at least as long."""
    into = np.frombuffer(total, np.uint8)[: len(data)]
    np.bitwise_xor(into, np.frombuffer(data, np.uint8), out=into)


def clear(total: memoryview) -> None:
    """Make a sum that of nothing."""
    np.frombuffer(total, np.uint8)[:] = 0


def write_share(covered: Covered, parity: Parity, rank: int, world: int, crew: Crew, into: Directory) -> Share:
    """Make and write the sums that are this rank's, durably (their names are not yet: `Directory.sync`).

    Args:
        covered: The files.
        parity: What the tag is to survive.
        rank: This rank.
        world: Number of ranks.
        crew: Who does it.
        into: Where the sums go.

    Raises:
        StorageError: A file is not as long as it was written.
        OSError: The storage refused.
    """
    directory, files = covered.directory, covered.files
    blocks = Blocks(tuple(size for _, size in files))
    placed = places(blocks, parity, rank, world)
    sinks: dict[str, Sink] = {}
    block_digests: dict[BlockAt, int] = {}
    sum_digests: dict[Sum, int] = {}

    def make(sum_: Sum, buffer: memoryview) -> None:
        total, data, scratch = thirds(buffer)
        clear(total)
        for file, block in blocks.members(sum_):
            path, length = files[file][0], blocks.length(file, block)
            got = read_block(directory, path, block * PARITY_BLOCK, data[:length], scratch)
            if got != length:
                raise StorageError("a file that was just written is too short", file=path, expected=length, found=got)
            add(total, data[:length])
            if sum_[0] == "file":
                block_digests[file, block] = digest(data[:length])
        length = blocks.sum_length(sum_) if blocks.members(sum_) else 0
        sum_digests[sum_] = digest(total[:length])
        if length:
            sinks[placed[sum_].file].write(total, length, placed[sum_].offset)

    with contextlib.ExitStack() as opened:
        for path, size in file_sizes(blocks, placed).items():
            sinks[path] = into.create(path, size)
            opened.callback(sinks[path].abandon)  # a full disk may refuse the next one
        _work(placed, make, sinks, crew)
    own_files = share(len(files), rank, world)
    stripes = [sum_digests[sum_] for sum_ in placed if sum_[0] == "stripe"]
    return Share(
        [pack_digests([block_digests[file, block] for block in range(blocks.count(file))]) for file in own_files],
        (pack_digests([sum_digests["file", file] for file in own_files]), pack_digests(stripes)),
    )


def _work(
    placed: Mapping[Sum, SumPlace],
    make: Callable[[Sum, memoryview], None],
    sinks: Mapping[str, Sink],
    crew: Crew,
) -> None:
    with crew.phases.timed("parity", files=len(sinks)):
        work_off(
            placed,
            make,
            workers=min(threads(min(crew.workers, WORKERS), 2), len(placed)) or 1,
            buffer_bytes=3 * PARITY_BLOCK,
            name="xla_ckpt-parity",
        )
        for sink in sinks.values():
            sink.commit()


def thirds(buffer: memoryview) -> tuple[memoryview, memoryview, memoryview]:
    """The three blocks of a buffer: for a sum, for what is added, and for the storage's own use."""
    return buffer[:PARITY_BLOCK], buffer[PARITY_BLOCK : 2 * PARITY_BLOCK], buffer[2 * PARITY_BLOCK : 3 * PARITY_BLOCK]


def write_index(directory: Directory, files: Files, parity: Parity, manifest: bytes, shares: Sequence[Told]) -> None:
    """Write what all ranks have found out, and a copy of the manifest, durably.

    Raises:
        FormatError: A share has other digests than its rank was to make.
        OSError: The storage refused.
    """
    write_small(directory, COPY, manifest)
    write_small(directory, PARITY_INDEX, joined(files, parity, manifest, shares).dump())


def write_alone(covered: Covered, parity: Parity, manifest: bytes, world: int, crew: Crew, into: Directory) -> None:
    """Make all of the parity in one process, durably, as `world` ranks would deal it out.

    Args:
        covered: The files.
        parity: What the tag is to survive.
        manifest: The manifest as it is stored.
        world: Number of ranks.
        crew: Who does it.
        into: Where the parity goes.

    Raises:
        OSError: The storage refused.
    """
    shares = [write_share(covered, parity, rank, world, crew, into).to_json() for rank in range(world)]
    write_index(into, covered.files, parity, manifest, shares)


def joined(files: Files, parity: Parity, manifest: bytes, shares: Sequence[Told]) -> ParityIndex:
    """The index that the shares of all ranks make together.

    Raises:
        FormatError: A share has other digests than its rank was to make.
    """
    blocks, world = Blocks(tuple(size for _, size in files)), len(shares)
    listed: list[ParityFile] = []
    of_files: list[int] = []
    of_stripes: list[int] = []
    for rank, (digests, (for_files, for_stripes)) in enumerate(shares):
        its_files = share(len(files), rank, world)
        for file, packed in zip(its_files, digests, strict=True):
            path, size = files[file]
            listed.append(ParityFile(path=path, size=size, digests=unpack_digests(packed, blocks.count(file))))
        of_files += unpack_digests(for_files, len(its_files))
        stripes = share(blocks.stripes, rank, world) if parity == "file" else range(0)
        of_stripes += unpack_digests(for_stripes, len(stripes))
    return ParityIndex(
        survives=parity,
        block=PARITY_BLOCK,
        writers=world,
        manifest=digest(manifest),
        files=tuple(listed),
        sums=(*of_files, *of_stripes),
    )
