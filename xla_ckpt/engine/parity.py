"""Parity of a tag: sums over the blocks of its files, made when they are durable, and compared when it is verified.

Memory: a few blocks for each thread, whatever the size of the files. Each file is read once for its parity block, and
once more for the stripes, if there are any.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from xla_ckpt.engine.crew import Crew
from xla_ckpt.errors import CheckpointError, CorruptCheckpointError, FormatError, StorageError
from xla_ckpt.manifest import manifest_json
from xla_ckpt.manifest.digest import digest, pack_digests, unpack_digests
from xla_ckpt.manifest.parity_json import ParityFile, ParityIndex, parse
from xla_ckpt.manifest.records import Manifest
from xla_ckpt.plan.parity import (
    COPY,
    FOLDER,
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
from xla_ckpt.storage.base import Directory, ReadDirectory, Sink, Source, read_whole, write_small
from xla_ckpt.storage.pool import threads, work_off
from xla_ckpt.tags.entry import MANIFEST

REPAIR = "The tag has parity: `xla-ckpt verify PATH --tag TAG --repair`, or xla_ckpt.repair, may mend it."
"""What to do about damage in a tag with parity."""

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
        total, data, scratch = _thirds(buffer)
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


def _thirds(buffer: memoryview) -> tuple[memoryview, memoryview, memoryview]:
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


def has_parity(directory: ReadDirectory) -> bool:
    """Whether a tag was saved with parity, as far as its files show."""
    for path in (PARITY_INDEX, COPY):
        try:
            directory.open(path).close()
        except OSError:
            continue  # missing, or unreadable: the other one may be there
        return True
    return False


def parity_of(directory: ReadDirectory) -> str | None:
    """What a tag survives, in a word; None if it has no parity."""
    if not has_parity(directory):
        return None
    try:
        return parse(read_whole(directory, PARITY_INDEX)).survives
    except (CheckpointError, OSError):
        return "damaged"


def read_index(directory: ReadDirectory, manifest: Manifest) -> ParityIndex:
    """The index of a tag's parity, compared with its manifest.

    Raises:
        CorruptCheckpointError: It is damaged, missing, or not that of this tag.
        UnsupportedVersionError: A newer version wrote it.
    """
    try:
        index = parse(read_whole(directory, PARITY_INDEX))
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
    sums = Blocks(tuple(size for _, size in listed)).sums(index.survives)
    if listed != covered_files(manifest) or index.block != PARITY_BLOCK or len(index.sums) != len(sums):
        raise FormatError("the parity is not that of this tag", file=PARITY_INDEX)
    return index


def all_places(index: ParityIndex) -> dict[Sum, SumPlace]:
    """Where all sums of a tag are stored."""
    blocks = Blocks(tuple(file.size for file in index.files))
    sum_places: dict[Sum, SumPlace] = {}
    for rank in range(index.writers):
        sum_places |= places(blocks, index.survives, rank, index.writers)
    return sum_places


def damaged_sums(directory: ReadDirectory, index: ParityIndex, *, workers: int = WORKERS) -> dict[Sum, SumPlace]:
    """The sums that cannot be read, or are not what was saved, and where they should be."""
    blocks = Blocks(tuple(file.size for file in index.files))
    placed = all_places(index)
    digests = dict(zip(blocks.sums(index.survives), index.sums, strict=True))
    bad: dict[Sum, SumPlace] = {}

    def check(sum_: Sum, buffer: memoryview) -> None:
        _, data, scratch = _thirds(buffer)
        length = blocks.sum_length(sum_) if blocks.members(sum_) else 0
        place = placed[sum_]
        if length and not reads_as(directory, place.file, place.offset, data[:length], scratch, digests[sum_]):
            bad[sum_] = place

    work_off(placed, check, workers=threads(workers, 2), buffer_bytes=3 * PARITY_BLOCK, name="xla_ckpt-parity")
    return {sum_: place for sum_, place in placed.items() if sum_ in bad}


def reads_as(
    directory: ReadDirectory, path: str, offset: int, target: memoryview, scratch: memoryview, wanted: int
) -> bool:
    """Whether the bytes of a block are those that were saved; they are in `target` then."""
    try:
        got = read_block(directory, path, offset, target, scratch)
    except OSError:
        return False  # a file that is missing, or a disk that cannot read it: lost as well
    return got == len(target) and digest(target) == wanted


def verify_parity(
    directory: ReadDirectory, manifest: Manifest, files: Iterable[str]
) -> tuple[list[CheckpointError], frozenset[str]]:
    """What is wrong with the parity of a tag, and the names of its files. Nothing and none where there is no parity.

    `files` are all files of the tag.

    Raises:
        OSError: The storage refused.
    """
    of_parity = frozenset(name for name in files if name.startswith(FOLDER))
    if not of_parity & {PARITY_INDEX, COPY}:
        return [], frozenset()
    try:
        index = read_index(directory, manifest)
    except CheckpointError as error:
        error.at(hint=REPAIR)
        return [error], of_parity
    problems: list[CheckpointError] = [
        CorruptCheckpointError("the parity is damaged", file=place.file, found=f"{kind} {number}", hint=REPAIR)
        for (kind, number), place in damaged_sums(directory, index).items()
    ]
    if not copy_is_sound(directory, index):
        problems.append(CorruptCheckpointError("the copy of the manifest is damaged", file=COPY, hint=REPAIR))
    if index.manifest not in manifest_json.digests_of(read_whole(directory, MANIFEST)):
        problems.append(CorruptCheckpointError("the parity is not that of this manifest", file=PARITY_INDEX))
    blocks = Blocks(tuple(file.size for file in index.files))
    return problems, frozenset({PARITY_INDEX, COPY, *file_sizes(blocks, all_places(index))})


def copy_is_sound(directory: ReadDirectory, index: ParityIndex) -> bool:
    """Whether the copy of the manifest is what was saved."""
    try:
        return index.manifest in manifest_json.digests_of(read_whole(directory, COPY))
    except (CheckpointError, OSError):
        return False
