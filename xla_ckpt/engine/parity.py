"""Making the parity of a tag: sums over the blocks of its files, when these are durable.

Memory: a few blocks for each thread, whatever the size of the files. Each file is read once for its parity block, and
once more for the stripes, if there are any. In a save of many ranks each makes a share of the sums (`ParityRound`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from xla_ckpt.engine.crew import Crew
from xla_ckpt.engine.joint_directory import open_joint
from xla_ckpt.errors import CheckpointError, StorageError
from xla_ckpt.job.round import Round
from xla_ckpt.job.verdict import as_checkpoint_error
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
from xla_ckpt.tags.root import Root

WORKERS = 8
"""Threads that read and add, if the machine has the cores."""

Files = Sequence[tuple[str, int]]
"""(path, bytes) of each file that the parity covers, in the order of the index."""

Share = tuple[Sequence[str], tuple[str, str]]
"""What one rank tells rank 0, as plain JSON: for each file that it read whole, the packed digests of its blocks; and
those of the parity blocks, and of the stripes, that it wrote."""


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
    with contextlib.closing(directory.open(path)) as source:
        return source.read_once(target, offset, scratch)


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
    return (
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


def write_index(directory: Directory, files: Files, parity: Parity, manifest: bytes, shares: Sequence[Share]) -> None:
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
    shares = [write_share(covered, parity, rank, world, crew, into) for rank in range(world)]
    write_index(into, covered.files, parity, manifest, shares)


def joined(files: Files, parity: Parity, manifest: bytes, shares: Sequence[Share]) -> ParityIndex:
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


@dataclass(frozen=True, slots=True)
class ParityRound:
    """One rank's part in the parity of a save of many ranks, when every file is durable."""

    exchange: Round
    parity: Parity
    """What the tag is to survive."""

    crew: Crew
    """Who reads and writes."""

    def lead(self, directory: Directory, manifest: Manifest, text: bytes) -> None:
        """Rank 0's part, which ends with the index. `text` is the manifest as it is stored.

        Raises:
            CheckpointError: What another rank met, or that it did not answer.
            OSError: The storage refused.
        """
        exchange, files = self.exchange, covered_files(manifest)
        if exchange.size > 1:
            exchange.say("parity", files)
        own_share = self._write(directory, files)
        with self.crew.phases.timed("meet"):
            other_shares = [*exchange.hear_each("parity", range(1, exchange.size))]
        write_index(directory, files, self.parity, text, [own_share, *other_shares])

    def give_up(self, problem: CheckpointError) -> None:
        """Tell the others, if they may wait for rank 0 to begin, that it does not."""
        if not self.exchange.has_said("parity"):
            self.exchange.say("parity", error=problem)

    def follow(self, root: Root, name: str) -> None:
        """Another rank's part, in the directory of this name. What it meets is told to rank 0, which tells all.

        Raises:
            CheckpointError: Rank 0 does not begin.
        """
        rank = self.exchange.rank
        with self.crew.phases.timed("meet"):
            files = [(path, size) for path, size in self.exchange.hear("parity", 0)]
        try:
            with contextlib.closing(open_joint(root, name)) as directory:
                own_share = self._write(directory, files)
                directory.sync()
        except Exception as error:
            # Raised on all ranks, this one included, as rank 0's verdict.
            self.exchange.say(f"parity/{rank}", error=as_checkpoint_error(error, "saving", rank))
        else:
            self.exchange.say(f"parity/{rank}", own_share)

    def _write(self, directory: Directory, files: Files) -> Share:
        rank, world = self.exchange.rank, self.exchange.size
        return write_share(Covered(directory, files), self.parity, rank, world, self.crew, directory)
