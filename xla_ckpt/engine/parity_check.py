"""Comparing the parity of a tag with what was saved.

Memory: a few blocks for each thread, whatever the size of the files.
"""

from __future__ import annotations

from collections.abc import Iterable

from xla_ckpt.engine.parity import WORKERS, covered_files, read_block, thirds
from xla_ckpt.errors import CheckpointError, CorruptCheckpointError, FormatError
from xla_ckpt.manifest import manifest_json
from xla_ckpt.manifest.digest import digest
from xla_ckpt.manifest.parity_json import ParityIndex, parse
from xla_ckpt.manifest.records import Manifest
from xla_ckpt.plan.parity import COPY, FOLDER, PARITY_BLOCK, PARITY_INDEX, Blocks, Sum, SumPlace, file_sizes, places
from xla_ckpt.storage.base import ReadDirectory
from xla_ckpt.storage.pool import threads, work_off
from xla_ckpt.storage.small_files import read_whole
from xla_ckpt.tags.entry import MANIFEST

REPAIR = "The tag has parity: `xla-ckpt verify --repair`, or xla_ckpt.repair, may mend it."
"""What to do about damage in a tag with parity."""


def has_parity(directory: ReadDirectory) -> bool:
    """Whether a tag was saved with parity, as far as its files show."""
    for path in (PARITY_INDEX, COPY):
        try:
            directory.open(path).close()
        except OSError:
            continue  # missing, or unreadable: the other one may be there
        return True
    return False


def parity_of(directory: ReadDirectory, manifest: Manifest) -> str | None:
    """What a tag survives, in a word; None if it has no parity, and was saved without."""
    if not has_parity(directory):
        return None if manifest.parity is None else "lost"
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
        _, data, scratch = thirds(buffer)
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
    """What is wrong with the parity of a tag, and the names of its files. Nothing and none where it was saved without.

    `files` are all files of the tag.

    Raises:
        OSError: The storage refused.
    """
    of_parity = frozenset(name for name in files if name.startswith(FOLDER))
    if not of_parity & {PARITY_INDEX, COPY}:
        return ([] if manifest.parity is None else [_lost(manifest.parity)]), frozenset()
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


def _lost(parity: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        "the tag was saved with parity, and that is gone",
        file=PARITY_INDEX,
        expected=f"parity={parity!r}",
        hint="If all else is sound, `xla-ckpt verify --repair`, or xla_ckpt.repair, makes it anew.",
    )


def copy_is_sound(directory: ReadDirectory, index: ParityIndex) -> bool:
    """Whether the copy of the manifest is what was saved."""
    try:
        return index.manifest in manifest_json.digests_of(read_whole(directory, COPY))
    except (CheckpointError, OSError):
        return False
