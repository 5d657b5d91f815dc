"""Giving a tag with parity back the bytes that it has lost.

All is decided before anything is changed. Every file is made anew in a draft beside the tag, compared with its digests,
made durable, and only then put in the place of the damaged one, in one step. A repair that is killed leaves some files
repaired, the others as they were, and a draft that the next save or repair removes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from xla_ckpt.display import join_lines
from xla_ckpt.engine.crew import Crew
from xla_ckpt.engine.parity import WORKERS, Covered, covered_files, write_alone
from xla_ckpt.engine.parity_check import all_places, copy_is_sound, damaged_sums, has_parity, read_index, reads_as
from xla_ckpt.engine.rebuild import Rebuilder
from xla_ckpt.engine.tag_reader import reader_within
from xla_ckpt.engine.verify import verify_payload
from xla_ckpt.errors import CheckpointError, CorruptCheckpointError, StorageError, UsageError
from xla_ckpt.logs import get_logger
from xla_ckpt.manifest import manifest_json
from xla_ckpt.manifest.parity_json import ParityIndex, parse
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
    solve,
)
from xla_ckpt.storage.base import Directory, ReadDirectory, Source
from xla_ckpt.storage.pool import threads, work_off
from xla_ckpt.storage.small_files import read_whole, size_of, write_small
from xla_ckpt.tags.entry import MANIFEST
from xla_ckpt.tags.root import Kind, Root
from xla_ckpt.tags.transaction import Transaction

logger = get_logger(__name__)

MAX_NAMED = 20
"""More files are counted, and not named, in an error about what cannot be repaired."""


class _Mended:
    """The files of a tag, some of which are made anew in a draft."""

    def __init__(self, tag: Directory, draft: Directory, replaced: frozenset[str]) -> None:
        self._tag, self._draft, self._replaced = tag, draft, replaced
        self.name, self.costs = tag.name, tag.costs

    def open(self, path: str, size: int | None = None) -> Source:
        return (self._draft if path in self._replaced else self._tag).open(path, size)

    def files(self) -> list[str]:
        return sorted({*self._tag.files(), *self._replaced})

    def is_at(self, name: str) -> bool:
        return self._tag.is_at(name)

    def close(self) -> None:
        """Both directories are somebody else's to close."""


@dataclass(slots=True, kw_only=True)
class Damage:
    """What is wrong with a tag whose index is sound."""

    manifest: bool
    """Whether the manifest has to be replaced by its copy."""

    files: Mapping[int, set[BlockAt]]
    """Number of each file that is not as it was saved -> its bad blocks; none, if only its length is wrong."""

    sums: Mapping[Sum, SumPlace]
    """Sums that are not as they were saved."""

    copy: bool
    """Whether the copy of the manifest is damaged."""

    steps: Mapping[BlockAt, Sum] = field(default_factory=dict)
    """What gives each bad block back."""


def repair_tag(root: Root, tag: str, directory: Directory, *, workers: int = WORKERS) -> list[str]:
    """Repair a tag that is open.

    Returns:
        The paths of the files that were replaced; none if nothing was damaged.

    Raises:
        UsageError: The tag was saved without parity.
        CorruptCheckpointError: More is lost than the parity gives back; nothing was changed.
        NotDurableError: It is repaired, and a loss of power may undo that.
        OSError: The storage refused.
    """
    if not has_parity(directory) and not _had_parity(directory):
        raise UsageError(
            "the tag has no parity, so it cannot be repaired",
            hint="Load another tag, or restore its files from a copy. SaveOptions(parity='file') has a save write it.",
        )
    manifest, text, whole = _manifest(directory)
    repair = _Repair(root=root, tag=tag, directory=directory, workers=workers)
    try:
        index = read_index(directory, manifest)
    except CorruptCheckpointError as error:
        return repair.renew_whole_parity(manifest, text, error)
    damage = _damage(directory, index, manifest_lost=not whole, workers=workers)
    return repair.mend(index, damage, manifest, text)


def _had_parity(directory: Directory) -> bool:
    """Whether the manifest says that the tag was saved with parity."""
    try:
        return manifest_json.parse(read_whole(directory, MANIFEST)).parity is not None
    except (CheckpointError, OSError):
        return False  # then nothing says it, and nothing could be done


def _manifest(directory: Directory) -> tuple[Manifest, bytes, bool]:
    """The manifest, its bytes, and whether they are in their own place and not only in the copy.

    Raises:
        CorruptCheckpointError: Both are damaged, or the manifest and the parity belong to different saves.
    """
    problem: CheckpointError | None = None
    for path in (MANIFEST, COPY):
        try:
            text = read_whole(directory, path)
            manifest = manifest_json.parse(text)
        except FileNotFoundError:
            problem = problem or CorruptCheckpointError("the tag has no manifest", file=path)
        except OSError as error:
            problem = problem or StorageError.of(error, "reading the manifest", file=path)
        except CorruptCheckpointError as error:
            problem = problem or error.at(file=path)
        else:
            _check_same_save(directory, text)
            return manifest, text, path == MANIFEST
    assert problem is not None
    problem.hint = "Its copy in the parity is damaged, too: nothing was changed. Load another tag."
    raise problem


def _check_same_save(directory: Directory, manifest: bytes) -> None:
    try:
        index = parse(read_whole(directory, PARITY_INDEX))
    except (CorruptCheckpointError, OSError):
        return  # found again, and dealt with, by `read_index`
    if index.manifest not in manifest_json.digests_of(manifest):
        raise CorruptCheckpointError(
            "the parity is not that of this manifest: nothing was changed", file=PARITY_INDEX,
            hint="Files of two saves were mixed. Restore the tag from a copy.",
        )  # fmt: skip


def _damage(directory: Directory, index: ParityIndex, *, manifest_lost: bool, workers: int) -> Damage:
    """What is wrong, and how it can be mended."""
    blocks = Blocks(tuple(file.size for file in index.files))
    files: dict[int, set[BlockAt]] = {}

    def look(number: int, buffer: memoryview) -> None:
        file, bad = index.files[number], set()
        for block, wanted in enumerate(file.digests):
            data = buffer[: blocks.length(number, block)]
            if not reads_as(directory, file.path, block * PARITY_BLOCK, data, buffer[PARITY_BLOCK:], wanted):
                bad.add((number, block))
        if bad or _size(directory, file.path) != file.size:
            files[number] = bad

    work_off(
        range(len(index.files)),
        look,
        workers=threads(workers, 2),
        buffer_bytes=2 * PARITY_BLOCK,
        name="xla_ckpt-repair",
    )
    sums = damaged_sums(directory, index, workers=workers)
    sound = set(blocks.sums(index.survives)) - set(sums)
    steps, left = solve({at for bad in files.values() for at in bad}, sound)
    if left:
        raise _too_much(index, left, sums)
    copy = not copy_is_sound(directory, index)
    return Damage(manifest=manifest_lost, files=dict(sorted(files.items())), sums=sums, copy=copy, steps=steps)


def _size(directory: Directory, path: str) -> int | None:
    try:
        return size_of(directory, path)
    except OSError:
        return None  # missing, or unreadable: it is made anew


def _too_much(index: ParityIndex, left: set[BlockAt], sums: Mapping[Sum, SumPlace]) -> CorruptCheckpointError:
    """The error about blocks that nothing gives back."""
    by_file: dict[int, list[int]] = {}
    for file, block in sorted(left):
        by_file.setdefault(file, []).append(block)
    lines = [
        f"  {index.files[file].path}: {len(bad)} of {len(index.files[file].digests)} blocks of 1 MiB, the first at "
        f"byte {bad[0] * PARITY_BLOCK}"
        for file, bad in by_file.items()
    ]
    more = [f"  and {len(lines) - MAX_NAMED} more files"] if len(lines) > MAX_NAMED else []
    damaged = [f"  damaged parity: {name}" for name in sorted({place.file for place in sums.values()})]
    survives = "one damaged block in each file" + (", or one lost file" if index.survives == "file" else "")
    return CorruptCheckpointError(
        "more is damaged than the parity gives back: nothing was changed",
        expected=f"at most {survives}",
        found=f"{len(left)} blocks of {len(by_file)} files that nothing gives back",
        hint="Load another tag, or restore these files from a copy.",
        details=join_lines([*lines[:MAX_NAMED], *more, *damaged[:MAX_NAMED]]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Repair:
    """A tag that is being repaired."""

    root: Root
    tag: str
    directory: Directory
    workers: int

    def mend(self, index: ParityIndex, damage: Damage, manifest: Manifest, text: bytes) -> list[str]:
        """Replace what is damaged; the paths of it.

        Raises:
            CorruptCheckpointError: The parity was made of bytes that were damaged already; nothing was changed.
        """
        replaced = [index.files[number].path for number in damage.files] + ([MANIFEST] if damage.manifest else [])
        rebuilder = Rebuilder(self.directory, index, damage.steps)
        if replaced or damage.sums or damage.copy:
            with Transaction(self.root, self.tag, Kind.REPAIR) as transaction:

                def rebuild(number: int, buffer: memoryview) -> None:
                    rebuilder.write(transaction.directory, number, buffer)

                work_off(damage.files, rebuild, workers=1, buffer_bytes=3 * PARITY_BLOCK, name="xla_ckpt-repair")
                if damage.manifest:
                    write_small(transaction.directory, MANIFEST, text)
                mended = _Mended(self.directory, transaction.directory, frozenset(replaced))
                self._check_is_whole(mended, manifest)
                if damage.sums or damage.copy:
                    files = [(file.path, file.size) for file in index.files]
                    covered, crew = Covered(mended, files), Crew(workers=self.workers)
                    write_alone(covered, index.survives, text, index.writers, crew, transaction.directory)
                    replaced += sorted({place.file for place in damage.sums.values()})
                    replaced += [COPY] if damage.copy else []
                transaction.commit()
            logger.warning("%s/%s: repaired %s", self.root.path, self.tag, ", ".join(replaced))
        else:
            self._check_is_whole(self.directory, manifest)
        return replaced

    def _check_is_whole(self, directory: ReadDirectory, manifest: Manifest) -> None:
        """Raise an error if files still differ from the manifest's digests after the parity has restored them.

        Raises:
            CorruptCheckpointError: They differ.
        """
        if problems := self._problems(directory, manifest):
            raise CorruptCheckpointError(
                "the parity was made of bytes that were damaged already, and gives them back as they are: nothing was "
                "changed",
                found=f"{len(problems)} problems",
                hint="Load another tag, or restore these files from a copy.",
                details=join_lines(f"  {line}" for line in problems[:MAX_NAMED]),
            )

    def _problems(self, directory: ReadDirectory, manifest: Manifest) -> list[CheckpointError]:
        """Compare all bytes in a directory with the digests of the manifest, and return the differences."""
        with reader_within(directory, self.root.path, self.tag, manifest) as reader:
            return verify_payload(reader, workers=self.workers).problems

    def renew_whole_parity(self, manifest: Manifest, text: bytes, problem: CorruptCheckpointError) -> list[str]:
        """Make the parity anew, if all else is as the manifest says: without its index it gives nothing back.

        Raises:
            CorruptCheckpointError: Something else is damaged, too.
        """
        problems = self._problems(self.directory, manifest)
        if problems or read_whole(self.directory, MANIFEST) != text:
            problem.hint = "Without it nothing can be repaired, and nothing was changed. Load another tag."
            problem.details = join_lines(f"  {line}" for line in problems[:MAX_NAMED])
            raise problem
        names = [name for name in self.directory.files() if name.startswith(FOLDER)]
        has_stripes = any(name.startswith(f"{FOLDER}stripes-") for name in names)
        parity: Parity = "file" if has_stripes or manifest.parity == "file" else "block"
        worlds = {int(end) for name in names if (end := name.rpartition("-of-")[2]).isdigit()}
        files, crew = covered_files(manifest), Crew(workers=self.workers)
        with Transaction(self.root, self.tag, Kind.REPAIR) as transaction:
            draft = transaction.directory
            write_alone(Covered(self.directory, files), parity, text, max(worlds, default=1), crew, draft)
            blocks, index = Blocks(tuple(size for _, size in files)), parse(read_whole(draft, PARITY_INDEX))
            transaction.commit()
        return [*file_sizes(blocks, all_places(index)), COPY, PARITY_INDEX]
