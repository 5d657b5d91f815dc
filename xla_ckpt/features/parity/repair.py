"""Repair a checkpoint with parity: rebuild damaged blocks and replace damaged files.

The entire repair is planned before anything is changed. Every file is rebuilt in a draft next to the tag, compared with
its digests, made durable, and only then moved over the damaged file atomically. A repair that is killed leaves some
files repaired, the others unchanged, and a draft that the next save or repair removes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from xla_ckpt.core.checksum import compute_digest
from xla_ckpt.core.files.parity import (
    MANIFEST_COPY,
    PARITY_BLOCK_BYTES,
    PARITY_FOLDER,
    PARITY_INDEX,
    BlockId,
    FileBlocks,
    ParityIndex,
    ParityLevel,
    ParitySum,
    SumLocation,
    compute_file_sizes,
    parse_parity_index,
    plan_recovery,
)
from xla_ckpt.core.manifest import manifest_json
from xla_ckpt.core.manifest.manifest import Manifest
from xla_ckpt.display import join_lines
from xla_ckpt.errors import CheckpointError, CorruptCheckpointError, StorageError, UsageError
from xla_ckpt.features.parity.parity import (
    PARITY_THREADS,
    ParityInput,
    add_to_sum,
    find_damaged_sums,
    has_parity,
    is_manifest_copy_intact,
    list_covered_files,
    locate_sums,
    read_and_verify,
    read_parity_index,
    write_whole_parity,
)
from xla_ckpt.loading.tag_reader import borrow_reader
from xla_ckpt.loading.verify import verify_payload
from xla_ckpt.logs import get_logger
from xla_ckpt.progress import IoContext
from xla_ckpt.storage.base import Directory, FileReader, ReadDirectory, get_file_size, read_file, write_file
from xla_ckpt.storage.threads import get_worker_count, run_tasks
from xla_ckpt.tags.entry import MANIFEST_FILE
from xla_ckpt.tags.root import Root, Transaction, TransactionKind

logger = get_logger(__name__)

MAX_LISTED_FILES = 20
"""Maximum number of files that an error about an impossible repair lists."""


class _RepairedDirectory:
    """The files of a tag, some of which are replaced by rebuilt files in a draft."""

    def __init__(self, tag: Directory, draft: Directory, replaced: frozenset[str]) -> None:
        self._tag, self._draft, self._replaced = tag, draft, replaced
        self.name, self.costs = tag.name, tag.costs

    def open(self, path: str, size: int | None = None) -> FileReader:
        return (self._draft if path in self._replaced else self._tag).open(path, size)

    def list_files(self) -> list[str]:
        return sorted({*self._tag.list_files(), *self._replaced})

    def is_at(self, name: str) -> bool:
        return self._tag.is_at(name)

    def close(self) -> None:
        """Do nothing: the caller closes both directories."""


@dataclass(slots=True, kw_only=True)
class Damage:
    """Damage of a tag with an intact parity index."""

    manifest: bool
    """True if the manifest must be replaced by its copy."""

    files: Mapping[int, set[BlockId]]
    """Index of each damaged file -> its damaged blocks; empty if only its length is wrong."""

    sums: Mapping[ParitySum, SumLocation]
    """Damaged sums."""

    copy: bool
    """True if the copy of the manifest is damaged."""

    steps: Mapping[BlockId, ParitySum] = field(default_factory=dict)
    """Damaged block -> the sum that recovers it."""


def repair_tag(root: Root, tag: str, directory: Directory, *, workers: int = PARITY_THREADS) -> list[str]:
    """Repair an open tag.

    Args:
        root: Root of the tag.
        tag: Name of the tag.
        directory: Directory of the tag.
        workers: Number of threads.

    Returns:
        The paths of the replaced files; empty if nothing was damaged.

    Raises:
        UsageError: The tag was saved without parity.
        CorruptCheckpointError: The parity cannot recover all damage; nothing was changed.
        NotDurableError: The tag is repaired, but a power loss may undo that.
        OSError: The storage failed.
    """
    if not has_parity(directory) and not _has_recorded_parity(directory):
        raise UsageError(
            "the tag has no parity, so it cannot be repaired",
            hint="Load another tag, or restore its files from a copy. SaveOptions(parity='file') has a save write it.",
        )
    manifest, text, whole = _read_manifest(directory)
    repair = _TagRepair(root=root, tag=tag, directory=directory, workers=workers)
    try:
        index = read_parity_index(directory, manifest)
    except CorruptCheckpointError as error:
        return repair.rebuild_parity(manifest, text, error)
    damage = _find_damage(directory, index, manifest_lost=not whole, workers=workers)
    return repair.repair_damage(index, damage, manifest, text)


def _has_recorded_parity(directory: Directory) -> bool:
    """Return True if the manifest records that the tag was saved with parity."""
    try:
        return manifest_json.parse_manifest(read_file(directory, MANIFEST_FILE)).parity is not None
    except (CheckpointError, OSError):
        return False  # the level is unknown, and no repair is possible


def _read_manifest(directory: Directory) -> tuple[Manifest, bytes, bool]:
    """Return the manifest, its bytes, and True if the manifest file is intact, or False if the copy was used.

    Raises:
        CorruptCheckpointError: Both are corrupt, or the manifest and the parity belong to different saves.
    """
    problem: CheckpointError | None = None
    for path in (MANIFEST_FILE, MANIFEST_COPY):
        try:
            text = read_file(directory, path)
            manifest = manifest_json.parse_manifest(text)
        except FileNotFoundError:
            problem = problem or CorruptCheckpointError("the tag has no manifest", file=path)
        except OSError as error:
            problem = problem or StorageError.of(error, "reading the manifest", file=path)
        except CorruptCheckpointError as error:
            problem = problem or error.at(file=path)
        else:
            _check_same_save(directory, text)
            return manifest, text, path == MANIFEST_FILE
    assert problem is not None
    problem.hint = "Its copy in the parity is damaged, too: nothing was changed. Load another tag."
    raise problem


def _check_same_save(directory: Directory, manifest: bytes) -> None:
    try:
        index = parse_parity_index(read_file(directory, PARITY_INDEX))
    except (CorruptCheckpointError, OSError):
        return  # `read_parity_index` finds and handles it again
    if index.manifest_digest not in manifest_json.compute_pin_digests(manifest):
        raise CorruptCheckpointError(
            "the parity is not that of this manifest: nothing was changed", file=PARITY_INDEX,
            hint="Files of two saves were mixed. Restore the tag from a copy.",
        )  # fmt: skip


def _find_damage(directory: Directory, index: ParityIndex, *, manifest_lost: bool, workers: int) -> Damage:
    """Find the damage of a tag and plan its repair.

    Raises:
        CorruptCheckpointError: The parity cannot recover all damage.
    """
    blocks = FileBlocks(tuple(file.size for file in index.files))
    files: dict[int, set[BlockId]] = {}

    def look(number: int, buffer: memoryview) -> None:
        file, bad = index.files[number], set()
        for block, wanted in enumerate(file.block_digests):
            data = buffer[: blocks.get_length(number, block)]
            if not read_and_verify(
                directory, file.path, block * PARITY_BLOCK_BYTES, data, buffer[PARITY_BLOCK_BYTES:], wanted
            ):
                bad.add((number, block))
        if bad or _get_file_size(directory, file.path) != file.size:
            files[number] = bad

    run_tasks(
        range(len(index.files)),
        look,
        workers=get_worker_count(workers, 2),
        buffer_bytes=2 * PARITY_BLOCK_BYTES,
        name="xla_ckpt-repair",
    )
    sums = find_damaged_sums(directory, index, workers=workers)
    sound = set(blocks.list_sums(index.survives)) - set(sums)
    steps, left = plan_recovery({at for bad in files.values() for at in bad}, sound)
    if left:
        raise _make_unrepairable_error(index, left, sums)
    copy = not is_manifest_copy_intact(directory, index)
    return Damage(manifest=manifest_lost, files=dict(sorted(files.items())), sums=sums, copy=copy, steps=steps)


def _get_file_size(directory: Directory, path: str) -> int | None:
    try:
        return get_file_size(directory, path)
    except OSError:
        return None  # missing or unreadable: it is rebuilt


def _make_unrepairable_error(
    index: ParityIndex, left: set[BlockId], sums: Mapping[ParitySum, SumLocation]
) -> CorruptCheckpointError:
    """Return the error for blocks that cannot be recovered."""
    by_file: dict[int, list[int]] = {}
    for file, block in sorted(left):
        by_file.setdefault(file, []).append(block)
    lines = [
        f"  {index.files[file].path}: {len(bad)} of {len(index.files[file].block_digests)} blocks of 1 MiB, the first "
        f"at byte {bad[0] * PARITY_BLOCK_BYTES}"
        for file, bad in by_file.items()
    ]
    more = [f"  and {len(lines) - MAX_LISTED_FILES} more files"] if len(lines) > MAX_LISTED_FILES else []
    damaged = [f"  damaged parity: {name}" for name in sorted({place.file for place in sums.values()})]
    survives = "one damaged block in each file" + (", or one lost file" if index.survives == "file" else "")
    return CorruptCheckpointError(
        "more is damaged than the parity gives back: nothing was changed",
        expected=f"at most {survives}",
        found=f"{len(left)} blocks of {len(by_file)} files that nothing gives back",
        hint="Load another tag, or restore these files from a copy.",
        details=join_lines([*lines[:MAX_LISTED_FILES], *more, *damaged[:MAX_LISTED_FILES]]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _TagRepair:
    """A tag that is being repaired."""

    root: Root
    tag: str
    directory: Directory
    workers: int

    def repair_damage(self, index: ParityIndex, damage: Damage, manifest: Manifest, text: bytes) -> list[str]:
        """Replace the damaged files, and return their paths.

        Raises:
            CorruptCheckpointError: The parity was computed from damaged bytes; nothing was changed.
        """
        replaced = [index.files[number].path for number in damage.files] + ([MANIFEST_FILE] if damage.manifest else [])
        rebuilder = Rebuilder(self.directory, index, damage.steps)
        if replaced or damage.sums or damage.copy:
            with Transaction(self.root, self.tag, TransactionKind.REPAIR) as transaction:

                def rebuild(number: int, buffer: memoryview) -> None:
                    rebuilder.write_file(transaction.directory, number, buffer)

                run_tasks(damage.files, rebuild, workers=1, buffer_bytes=3 * PARITY_BLOCK_BYTES, name="xla_ckpt-repair")
                if damage.manifest:
                    write_file(transaction.directory, MANIFEST_FILE, text)
                mended = _RepairedDirectory(self.directory, transaction.directory, frozenset(replaced))
                self._check_intact(mended, manifest)
                if damage.sums or damage.copy:
                    files = [(file.path, file.size) for file in index.files]
                    covered, crew = ParityInput(mended, files), IoContext(workers=self.workers)
                    write_whole_parity(covered, index.survives, text, index.writer_count, crew, transaction.directory)
                    replaced += sorted({place.file for place in damage.sums.values()})
                    replaced += [MANIFEST_COPY] if damage.copy else []
                transaction.commit()
            logger.warning("%s/%s: repaired %s", self.root.path, self.tag, ", ".join(replaced))
        else:
            self._check_intact(self.directory, manifest)
        return replaced

    def _check_intact(self, directory: ReadDirectory, manifest: Manifest) -> None:
        """Raise an error if files still differ from the manifest's digests after the parity has restored them.

        Raises:
            CorruptCheckpointError: They differ.
        """
        if problems := self._find_problems(directory, manifest):
            raise CorruptCheckpointError(
                "the parity was made of bytes that were damaged already, and gives them back as they are: nothing was "
                "changed",
                found=f"{len(problems)} problems",
                hint="Load another tag, or restore these files from a copy.",
                details=join_lines(f"  {line}" for line in problems[:MAX_LISTED_FILES]),
            )

    def _find_problems(self, directory: ReadDirectory, manifest: Manifest) -> list[CheckpointError]:
        """Compare all bytes in a directory with the digests of the manifest, and return the differences."""
        with borrow_reader(directory, self.root.path, self.tag, manifest) as reader:
            return verify_payload(reader, workers=self.workers).problems

    def rebuild_parity(self, manifest: Manifest, text: bytes, problem: CorruptCheckpointError) -> list[str]:
        """Write new parity if all other files match the manifest: without its index, the parity cannot recover
        anything.

        Raises:
            CorruptCheckpointError: Other files are damaged too.
        """
        problems = self._find_problems(self.directory, manifest)
        if problems or read_file(self.directory, MANIFEST_FILE) != text:
            problem.hint = "Without it nothing can be repaired, and nothing was changed. Load another tag."
            problem.details = join_lines(f"  {line}" for line in problems[:MAX_LISTED_FILES])
            raise problem
        names = [name for name in self.directory.list_files() if name.startswith(PARITY_FOLDER)]
        has_stripes = any(name.startswith(f"{PARITY_FOLDER}stripes-") for name in names)
        parity: ParityLevel = "file" if has_stripes or manifest.parity == "file" else "block"
        worlds = {int(end) for name in names if (end := name.rpartition("-of-")[2]).isdigit()}
        files, crew = list_covered_files(manifest), IoContext(workers=self.workers)
        with Transaction(self.root, self.tag, TransactionKind.REPAIR) as transaction:
            draft = transaction.directory
            write_whole_parity(ParityInput(self.directory, files), parity, text, max(worlds, default=1), crew, draft)
            blocks, index = (
                FileBlocks(tuple(size for _, size in files)),
                parse_parity_index(read_file(draft, PARITY_INDEX)),
            )
            transaction.commit()
        return [*compute_file_sizes(blocks, locate_sums(index)), MANIFEST_COPY, PARITY_INDEX]


MAX_CACHED_BLOCKS = 16
"""Maximum number of rebuilt blocks kept in memory, because other blocks may need them."""


class Rebuilder:
    """Rebuilder of damaged blocks from intact blocks and sums."""

    def __init__(self, directory: Directory, index: ParityIndex, steps: Mapping[BlockId, ParitySum]) -> None:
        self._directory, self._index, self._steps = directory, index, steps
        self._blocks = FileBlocks(tuple(file.size for file in index.files))
        self._places = locate_sums(index)
        self._sums = dict(zip(self._blocks.list_sums(index.survives), index.sum_digests, strict=True))
        self._cache: dict[BlockId, bytes] = {}

    def write_file(self, draft: Directory, number: int, buffer: memoryview) -> None:
        """Rebuild a file in the draft durably. The buffer must be page-aligned, with a length of three blocks.

        Raises:
            CorruptCheckpointError: The result does not match the digests, because a file has changed since the check.
            OSError: The storage failed.
        """
        file = self._index.files[number]
        data, other, scratch = (buffer[at * PARITY_BLOCK_BYTES : (at + 1) * PARITY_BLOCK_BYTES] for at in range(3))
        sink = draft.create(file.path, file.size)
        try:
            for block in range(len(file.block_digests)):
                length = self._blocks.get_length(number, block)
                self._fill_block((number, block), data[:length], other, scratch)
                sink.write(data, length, block * PARITY_BLOCK_BYTES)
            sink.commit()
        finally:
            sink.abort()
        for block, wanted in enumerate(file.block_digests):
            length = self._blocks.get_length(number, block)
            if not read_and_verify(draft, file.path, block * PARITY_BLOCK_BYTES, data[:length], scratch, wanted):
                raise _make_changed_file_error(file.path, block)

    def _fill_block(self, at: BlockId, target: memoryview, other: memoryview, scratch: memoryview) -> None:
        """Write the correct bytes of a block into `target`."""
        file, wanted = self._index.files[at[0]], self._index.files[at[0]].block_digests[at[1]]
        if at not in self._steps:
            if not read_and_verify(self._directory, file.path, at[1] * PARITY_BLOCK_BYTES, target, scratch, wanted):
                raise _make_changed_file_error(file.path, at[1])
            return
        target[:] = self._compute_block(at, other, scratch)
        if compute_digest(target) != wanted:
            raise _make_changed_file_error(file.path, at[1])

    def _compute_block(self, at: BlockId, other: memoryview, scratch: memoryview) -> bytes:
        if at in self._cache:
            return self._cache[at]
        sum_ = self._steps[at]
        place, length = self._places[sum_], self._blocks.get_sum_length(sum_)
        total = memoryview(bytearray(PARITY_BLOCK_BYTES))
        if not read_and_verify(self._directory, place.file, place.offset, other[:length], scratch, self._sums[sum_]):
            raise _make_changed_file_error(place.file, place.offset // PARITY_BLOCK_BYTES)
        add_to_sum(total, other[:length])
        for member in self._blocks.list_members(sum_):
            if member == at:
                continue
            part = other[: self._blocks.get_length(*member)]
            if member in self._steps:
                add_to_sum(total, memoryview(self._compute_block(member, other, scratch)))
            else:
                self._fill_block(member, part, other, scratch)
                add_to_sum(total, part)
        block = bytes(total[: self._blocks.get_length(*at)])
        while len(self._cache) >= MAX_CACHED_BLOCKS:
            del self._cache[next(iter(self._cache))]
        self._cache[at] = block
        return block


def _make_changed_file_error(path: str, block: int) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        "a file changes while it is repaired", file=path, found=f"other bytes in block {block}", hint="Try again."
    )
