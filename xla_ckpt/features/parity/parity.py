"""Write and verify the parity of a checkpoint: XOR sums over the blocks of its files.

Parity is written when the files are durable. Each thread uses the memory of a few blocks, regardless of the size of the
files. Each file is read once for its parity block, and once more for the stripes, if there are any. In a save of many
ranks each rank computes a share of the sums (`ParityExchange`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from xla_ckpt.core.checksum import compute_digest, pack_digests, unpack_digests
from xla_ckpt.core.files.parity import (
    MANIFEST_COPY,
    PARITY_BLOCK_BYTES,
    PARITY_FOLDER,
    PARITY_INDEX,
    BlockId,
    FileBlocks,
    ParityFile,
    ParityIndex,
    ParityLevel,
    ParitySum,
    SumLocation,
    assign_locations,
    compute_file_sizes,
    parse_parity_index,
    split_range,
)
from xla_ckpt.core.manifest import manifest_json
from xla_ckpt.core.manifest.manifest import Manifest
from xla_ckpt.distributed.consensus import as_checkpoint_error
from xla_ckpt.distributed.exchange import Exchange
from xla_ckpt.errors import CheckpointError, CorruptCheckpointError, FormatError, StorageError
from xla_ckpt.progress import IoContext
from xla_ckpt.saving.write import open_shared_draft
from xla_ckpt.storage.base import Directory, FileReader, FileWriter, ReadDirectory, read_file, write_file
from xla_ckpt.storage.threads import get_worker_count, run_tasks
from xla_ckpt.tags.entry import MANIFEST_FILE
from xla_ckpt.tags.root import Root

PARITY_THREADS = 8
"""Maximum number of threads that read and add blocks, if the machine has the cores."""

FileSizes = Sequence[tuple[str, int]]
"""(path, size in bytes) of each file covered by the parity, in the order of the index."""

ParityShare = tuple[Sequence[str], tuple[str, str]]
"""Message of a rank to rank 0, as JSON: the packed block digests of each file that it read, and the packed digests
of the parity blocks and of the stripes that it wrote.
"""


class ReadableFiles(Protocol):
    """A collection of readable files, which may be in different directories."""

    def open(self, path: str) -> FileReader:
        """Open one of the files."""


@dataclass(frozen=True, slots=True)
class ParityInput:
    """The files from which a parity is computed."""

    directory: ReadableFiles
    """Source of the files."""

    files: FileSizes
    """Path and size (bytes) of each file."""


def list_covered_files(manifest: Manifest) -> list[tuple[str, int]]:
    """Return (path, size in bytes) of the files covered by the parity of a tag: all files in the manifest."""
    return [(file.path, file.size) for file in manifest.files]


def read_block(directory: ReadableFiles, path: str, offset: int, target: memoryview, scratch: memoryview) -> int:
    """Read a block of a file into `target`; return the number of bytes read, which is smaller at the end of the file.

    Raises:
        OSError: The file does not exist, or the storage failed.
    """
    # Not kept open: a tag may have more files than a process can open.
    with contextlib.closing(directory.open(path)) as source:
        return source.read_once(target, offset, scratch)


def add_to_sum(total: memoryview, data: memoryview) -> None:
    """Add (XOR) bytes to a sum that is at least as long."""
    into = np.frombuffer(total, np.uint8)[: len(data)]
    np.bitwise_xor(into, np.frombuffer(data, np.uint8), out=into)


def clear_sum(total: memoryview) -> None:
    """Reset a sum to zero."""
    np.frombuffer(total, np.uint8)[:] = 0


def write_parity_share(
    source: ParityInput, parity: ParityLevel, rank: int, world: int, io: IoContext, into: Directory
) -> ParityShare:
    """Compute and write the sums of this rank durably; `Directory.sync` makes the names durable.

    Args:
        source: The files.
        parity: Parity level.
        rank: This rank.
        world: Number of ranks.
        io: Threads and metrics.
        into: Directory for the sums.

    Returns:
        The digests, to be sent to rank 0.

    Raises:
        StorageError: A file is shorter than written.
        OSError: The storage failed.
    """
    directory, files = source.directory, source.files
    blocks = FileBlocks(tuple(size for _, size in files))
    placed = assign_locations(blocks, parity, rank, world)
    sinks: dict[str, FileWriter] = {}
    block_digests: dict[BlockId, int] = {}
    sum_digests: dict[ParitySum, int] = {}

    def make(sum_: ParitySum, buffer: memoryview) -> None:
        total, data, scratch = split_buffer(buffer)
        clear_sum(total)
        for file, block in blocks.list_members(sum_):
            path, length = files[file][0], blocks.get_length(file, block)
            got = read_block(directory, path, block * PARITY_BLOCK_BYTES, data[:length], scratch)
            if got != length:
                raise StorageError("a file that was just written is too short", file=path, expected=length, found=got)
            add_to_sum(total, data[:length])
            if sum_[0] == "file":
                block_digests[file, block] = compute_digest(data[:length])
        length = blocks.get_sum_length(sum_) if blocks.list_members(sum_) else 0
        sum_digests[sum_] = compute_digest(total[:length])
        if length:
            sinks[placed[sum_].file].write(total, length, placed[sum_].offset)

    with contextlib.ExitStack() as opened:
        for path, size in compute_file_sizes(blocks, placed).items():
            sinks[path] = into.create(path, size)
            opened.callback(sinks[path].abort)  # a full disk may fail the next one
        _write_sums(placed, make, sinks, io)
    own_files = split_range(len(files), rank, world)
    stripes = [sum_digests[sum_] for sum_ in placed if sum_[0] == "stripe"]
    return (
        [
            pack_digests([block_digests[file, block] for block in range(blocks.count_blocks(file))])
            for file in own_files
        ],
        (pack_digests([sum_digests["file", file] for file in own_files]), pack_digests(stripes)),
    )


def _write_sums(
    placed: Mapping[ParitySum, SumLocation],
    make: Callable[[ParitySum, memoryview], None],
    sinks: Mapping[str, FileWriter],
    io: IoContext,
) -> None:
    with io.phases.measure("parity", files=len(sinks)):
        run_tasks(
            placed,
            make,
            workers=min(get_worker_count(min(io.workers, PARITY_THREADS), 2), len(placed)) or 1,
            buffer_bytes=3 * PARITY_BLOCK_BYTES,
            name="xla_ckpt-parity",
        )
        for sink in sinks.values():
            sink.commit()


def split_buffer(buffer: memoryview) -> tuple[memoryview, memoryview, memoryview]:
    """Split a buffer into three blocks: the sum, the data to add, and scratch memory for the storage."""
    return (
        buffer[:PARITY_BLOCK_BYTES],
        buffer[PARITY_BLOCK_BYTES : 2 * PARITY_BLOCK_BYTES],
        buffer[2 * PARITY_BLOCK_BYTES : 3 * PARITY_BLOCK_BYTES],
    )


def write_parity_index(
    directory: Directory, files: FileSizes, parity: ParityLevel, manifest: bytes, shares: Sequence[ParityShare]
) -> None:
    """Write the parity index from the shares of all ranks, and a copy of the manifest, durably.

    Raises:
        FormatError: A share has an unexpected number of digests.
        OSError: The storage failed.
    """
    write_file(directory, MANIFEST_COPY, manifest)
    write_file(directory, PARITY_INDEX, join_shares(files, parity, manifest, shares).dump())


def write_whole_parity(
    source: ParityInput, parity: ParityLevel, manifest: bytes, world: int, io: IoContext, into: Directory
) -> None:
    """Write the parity in one process durably, divided as for `world` ranks.

    Args:
        source: The files.
        parity: Parity level.
        manifest: The manifest as it is stored.
        world: Number of ranks.
        io: Threads and metrics.
        into: Directory for the parity.

    Raises:
        StorageError: A file is shorter than its recorded size.
        OSError: The storage failed.
    """
    shares = [write_parity_share(source, parity, rank, world, io, into) for rank in range(world)]
    write_parity_index(into, source.files, parity, manifest, shares)


def join_shares(files: FileSizes, parity: ParityLevel, manifest: bytes, shares: Sequence[ParityShare]) -> ParityIndex:
    """Combine the shares of all ranks into the parity index.

    Raises:
        FormatError: A share has an unexpected number of digests.
    """
    blocks, world = FileBlocks(tuple(size for _, size in files)), len(shares)
    listed: list[ParityFile] = []
    of_files: list[int] = []
    of_stripes: list[int] = []
    for rank, (digests, (for_files, for_stripes)) in enumerate(shares):
        its_files = split_range(len(files), rank, world)
        for file, packed in zip(its_files, digests, strict=True):
            path, size = files[file]
            listed.append(
                ParityFile(path=path, size=size, block_digests=unpack_digests(packed, blocks.count_blocks(file)))
            )
        of_files += unpack_digests(for_files, len(its_files))
        stripes = split_range(blocks.stripe_count, rank, world) if parity == "file" else range(0)
        of_stripes += unpack_digests(for_stripes, len(stripes))
    return ParityIndex(
        survives=parity,
        block_bytes=PARITY_BLOCK_BYTES,
        writer_count=world,
        manifest_digest=compute_digest(manifest),
        files=tuple(listed),
        sum_digests=(*of_files, *of_stripes),
    )


@dataclass(frozen=True, slots=True)
class ParityExchange:
    """Parity of a save with many ranks: the steps of one rank once every file is durable."""

    exchange: Exchange
    parity: ParityLevel
    """Parity level."""

    io: IoContext
    """Threads and metrics."""

    def run_leader(self, directory: Directory, manifest: Manifest, text: bytes) -> None:
        """Run the part of rank 0, which writes the index last. `text` is the manifest as it is stored.

        Raises:
            CheckpointError: Another rank failed or did not respond.
            OSError: The storage failed.
        """
        exchange, files = self.exchange, list_covered_files(manifest)
        if exchange.size > 1:
            exchange.publish("parity", files)
        own_share = self._write_share(directory, files)
        with self.io.phases.measure("meet"):
            other_shares = [*exchange.receive_each("parity", range(1, exchange.size))]
        write_parity_index(directory, files, self.parity, text, [own_share, *other_shares])

    def abort(self, problem: CheckpointError) -> None:
        """Send an error to ranks that may be waiting for rank 0 to start."""
        if not self.exchange.has_published("parity"):
            self.exchange.publish("parity", error=problem)

    def run_follower(self, root: Root, name: str) -> None:
        """Run the part of another rank, in the directory with this name. Errors are sent to rank 0, which raises them
        on all ranks.

        Raises:
            CheckpointError: Rank 0 failed or did not start.
        """
        rank = self.exchange.rank
        with self.io.phases.measure("meet"):
            files = [(path, size) for path, size in self.exchange.receive("parity", 0)]
        try:
            with contextlib.closing(open_shared_draft(root, name)) as directory:
                own_share = self._write_share(directory, files)
                directory.sync()
        except Exception as error:
            # Raised on all ranks, including this one, as the verdict of rank 0.
            self.exchange.publish(f"parity/{rank}", error=as_checkpoint_error(error, "saving", rank))
        else:
            self.exchange.publish(f"parity/{rank}", own_share)

    def _write_share(self, directory: Directory, files: FileSizes) -> ParityShare:
        rank, world = self.exchange.rank, self.exchange.size
        return write_parity_share(ParityInput(directory, files), self.parity, rank, world, self.io, directory)


REPAIR_HINT = "The tag has parity: `xla-ckpt verify --repair`, or xla_ckpt.repair, may mend it."
"""Hint for damage in a tag with parity."""


def has_parity(directory: ReadDirectory) -> bool:
    """Return True if the files of a tag show that it was saved with parity."""
    for path in (PARITY_INDEX, MANIFEST_COPY):
        try:
            directory.open(path).close()
        except OSError:
            continue  # missing or unreadable; the other file may exist
        return True
    return False


def get_parity_status(directory: ReadDirectory, manifest: Manifest) -> str | None:
    """Return the parity level of a tag, "lost" or "damaged"; None if it was saved without parity."""
    if not has_parity(directory):
        return None if manifest.parity is None else "lost"
    try:
        return parse_parity_index(read_file(directory, PARITY_INDEX)).survives
    except (CheckpointError, OSError):
        return "damaged"


def read_parity_index(directory: ReadDirectory, manifest: Manifest) -> ParityIndex:
    """Return the parity index of a tag, after checking that it matches the manifest.

    Raises:
        CorruptCheckpointError: The index is corrupt, missing, or belongs to another tag.
        UnsupportedVersionError: A newer version of this library wrote it.
    """
    try:
        index = parse_parity_index(read_file(directory, PARITY_INDEX))
    except FileNotFoundError:
        raise CorruptCheckpointError("the index of the parity is missing", file=PARITY_INDEX) from None
    except OSError as error:
        raise CorruptCheckpointError(
            "the index of the parity cannot be read", file=PARITY_INDEX, found=str(error)
        ) from error
    except CheckpointError as error:
        error.at(file=PARITY_INDEX)
        raise
    listed = [(file.path, file.size) for file in index.files]
    sums = FileBlocks(tuple(size for _, size in listed)).list_sums(index.survives)
    if (
        listed != list_covered_files(manifest)
        or index.block_bytes != PARITY_BLOCK_BYTES
        or len(index.sum_digests) != len(sums)
    ):
        raise FormatError("the parity is not that of this tag", file=PARITY_INDEX)
    return index


def locate_sums(index: ParityIndex) -> dict[ParitySum, SumLocation]:
    """Return the locations of all sums of a tag."""
    blocks = FileBlocks(tuple(file.size for file in index.files))
    sum_places: dict[ParitySum, SumLocation] = {}
    for rank in range(index.writer_count):
        sum_places |= assign_locations(blocks, index.survives, rank, index.writer_count)
    return sum_places


def find_damaged_sums(
    directory: ReadDirectory, index: ParityIndex, *, workers: int = PARITY_THREADS
) -> dict[ParitySum, SumLocation]:
    """Return the sums that cannot be read or do not match their digests, with their locations."""
    blocks = FileBlocks(tuple(file.size for file in index.files))
    placed = locate_sums(index)
    digests = dict(zip(blocks.list_sums(index.survives), index.sum_digests, strict=True))
    bad: dict[ParitySum, SumLocation] = {}

    def check(sum_: ParitySum, buffer: memoryview) -> None:
        _, data, scratch = split_buffer(buffer)
        length = blocks.get_sum_length(sum_) if blocks.list_members(sum_) else 0
        place = placed[sum_]
        if length and not read_and_verify(directory, place.file, place.offset, data[:length], scratch, digests[sum_]):
            bad[sum_] = place

    run_tasks(
        placed, check, workers=get_worker_count(workers, 2), buffer_bytes=3 * PARITY_BLOCK_BYTES, name="xla_ckpt-parity"
    )
    return {sum_: place for sum_, place in placed.items() if sum_ in bad}


def read_and_verify(
    directory: ReadDirectory, path: str, offset: int, target: memoryview, scratch: memoryview, expected: int
) -> bool:
    """Read a block into `target`. Return True if it matches the expected digest."""
    try:
        got = read_block(directory, path, offset, target, scratch)
    except OSError:
        return False  # a missing file, or a disk error: the block is lost too
    return got == len(target) and compute_digest(target) == expected


def verify_parity(
    directory: ReadDirectory, manifest: Manifest, files: Iterable[str]
) -> tuple[list[CheckpointError], frozenset[str]]:
    """Return the errors in the parity of a tag and the names of its files; both are empty if it was saved without
    parity.

    `files` are all files of the tag.

    Raises:
        OSError: The storage failed.
    """
    of_parity = frozenset(name for name in files if name.startswith(PARITY_FOLDER))
    if not of_parity & {PARITY_INDEX, MANIFEST_COPY}:
        return ([] if manifest.parity is None else [_make_lost_parity_error(manifest.parity)]), frozenset()
    try:
        index = read_parity_index(directory, manifest)
    except CheckpointError as error:
        error.at(hint=REPAIR_HINT)
        return [error], of_parity
    problems: list[CheckpointError] = [
        CorruptCheckpointError("the parity is damaged", file=place.file, found=f"{kind} {number}", hint=REPAIR_HINT)
        for (kind, number), place in find_damaged_sums(directory, index).items()
    ]
    if not is_manifest_copy_intact(directory, index):
        problems.append(
            CorruptCheckpointError("the copy of the manifest is damaged", file=MANIFEST_COPY, hint=REPAIR_HINT)
        )
    if index.manifest_digest not in manifest_json.compute_pin_digests(read_file(directory, MANIFEST_FILE)):
        problems.append(CorruptCheckpointError("the parity is not that of this manifest", file=PARITY_INDEX))
    blocks = FileBlocks(tuple(file.size for file in index.files))
    return problems, frozenset({PARITY_INDEX, MANIFEST_COPY, *compute_file_sizes(blocks, locate_sums(index))})


def _make_lost_parity_error(parity: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        "the tag was saved with parity, and that is gone",
        file=PARITY_INDEX,
        expected=f"parity={parity!r}",
        hint="If all else is sound, `xla-ckpt verify --repair`, or xla_ckpt.repair, makes it anew.",
    )


def is_manifest_copy_intact(directory: ReadDirectory, index: ParityIndex) -> bool:
    """Return True if the copy of the manifest matches the parity index."""
    try:
        return index.manifest_digest in manifest_json.compute_pin_digests(read_file(directory, MANIFEST_COPY))
    except (CheckpointError, OSError):
        return False
