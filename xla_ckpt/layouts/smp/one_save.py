"""Which files of a set belong together: the notes beside them say of which save each is."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from xla_ckpt.engine.tag_reader import DAMAGED
from xla_ckpt.errors import CorruptCheckpointError, FormatError, UnsupportedVersionError, storage_errors
from xla_ckpt.layouts.smp.sidecar import (
    MAX_NOTE,
    RANK_AXES,
    SaveNote,
    directory_digest,
    dump_notes,
    note_name,
    parse_notes,
    renewed,
)
from xla_ckpt.layouts.smp.tags import ALL_PARTS, FileSet, Numbers, SmpTag, find_smp_tag
from xla_ckpt.layouts.torch_save.ahead import Ahead
from xla_ckpt.layouts.torch_save.whole_writing import renew_file, write_whole_file
from xla_ckpt.logs import get_logger
from xla_ckpt.storage.base import Directory, Source
from xla_ckpt.storage.door import above
from xla_ckpt.storage.small_files import read_whole

logger = get_logger(__name__)

PerAxis = tuple[int, int, int]
"""A number for each of `sidecar.RANK_AXES`."""

_OTHER = "another program, which has written over it since"
"""Names the save of a file that was written over since its note was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetPart:
    """One file of a set."""

    file: str
    digest: str
    """Digest of its zip's directory, which stands for all that is in it; empty if nobody asked, or it is no zip."""

    saves: tuple[SaveNote, ...]
    """What is noted of it, and of earlier files of its name."""

    saved: SaveNote | None
    """What is noted of the file as it is; None if nothing is."""

    @property
    def save(self) -> str | None:
        """What names its save; None if nobody knows it."""
        return self.saved.save if self.saved is not None else _OTHER if self.saves else None


def parts_at(prefix: str) -> dict[Numbers, SetPart]:
    """The parts of a set, by the numbers in their names, with their full paths; none if there are none.

    Raises:
        CorruptCheckpointError: Parts are of two saves, or of several forms of names.
        StorageError: They cannot be read.
    """
    store, name = above(prefix)
    with storage_errors("reading the files of a set", path=prefix):
        tag = find_smp_tag(store, f"{name}{ALL_PARTS}")
        if tag is None:
            return {}
        with closing(store.open("", lock=False, links=True)) as directory:
            parts = {n: noted_part(directory, file) for n, file in tag.sets[""].parts().items()}
    folder = "".join(prefix.rpartition("/")[:2])
    return {n: replace(part, file=f"{folder}{part.file}") for n, part in of_one_save(parts).items()}


def less_others(directory: Directory, tag: SmpTag) -> SmpTag:
    """A set without the files of other saves that lie under its name (see `of_one_save`); a directory as it is.

    Raises:
        CorruptCheckpointError: It is of two saves.
    """
    files = tag.sets.get("")
    if files is None or len(files.forms) != 1:
        return tag
    ((form, by_numbers),) = files.forms.items()
    parts = of_one_save({n: noted_part(directory, file) for n, file in by_numbers.items()})
    return replace(tag, sets={"": FileSet(files.name, {form: {n: part.file for n, part in parts.items()}})})


def noted_part(directory: Directory, file: str) -> SetPart:
    """A file of a set, and what is noted of it. Where nothing is, the file itself is not looked at."""
    if not (saves := saves_beside(directory, file)):
        return SetPart(file=file, digest="", saves=(), saved=None)
    with closing(directory.open(file)) as source:
        return identified(Ahead(source, file, 0), saves)


def identified(ahead: Ahead, saves: tuple[SaveNote, ...]) -> SetPart:
    """A file that is open, and which of the saves that are noted wrote it."""
    try:
        digest = directory_digest(ahead.take, ahead.size)
    except (ValueError, CorruptCheckpointError):
        digest = ""  # no whole zip: who reads it says so
    saved = next((one for one in saves if (one.size, one.directory) == (ahead.size, digest)), None)
    return SetPart(file=ahead.file, digest=digest, saves=saves, saved=saved)


def saves_beside(directory: Directory, file: str) -> tuple[SaveNote, ...]:
    """What the note beside a file says of the saves that wrote it; nothing where there is none, or a damaged one."""
    name = note_name(file)
    try:
        return parse_notes(read_whole(directory, name, limit=MAX_NOTE, what="the note beside a file"))
    except FileNotFoundError:
        return ()
    except (FormatError, UnsupportedVersionError) as error:
        # The file itself is whole: its own CRC-32s are compared. Only which save it is of is unknown.
        logger.warning("%s", error.at(file=name))
        return ()


def of_one_save(parts: Mapping[Numbers, SetPart]) -> dict[Numbers, SetPart]:
    """The parts that were saved together.

    If they are of several saves, and one of these is whole, the others are left out: a job of fewer ranks has saved
    over a part of what a larger one had left.

    Raises:
        CorruptCheckpointError: They are of several saves, of which none is whole, or more than one; or one is no whole
            file.
    """
    saves: dict[str, dict[Numbers, SetPart]] = {}
    for numbers, part in parts.items():
        if part.save is not None:
            saves.setdefault(part.save, {})[numbers] = part
    if len(saves) < 2:
        return dict(parts)
    whole = [name for name, of_save in saves.items() if is_whole(of_save)]
    if len(whole) != 1:
        if (torn := next((part.file for part in parts.values() if part.saves and not part.digest), None)) is not None:
            # No note is true of such a file, so that it would seem to be of a save of its own.
            raise CorruptCheckpointError(
                "the part is cut off or damaged: it is no whole zip of torch.save",
                file=torn,
                hint=DAMAGED,
            )
        raise two_saves("; ".join(f"{of_save[min(of_save)].file} of {name}" for name, of_save in saves.items()))
    left = sorted(part.file for numbers, part in parts.items() if numbers not in saves[whole[0]])
    logger.warning("%s: of another save, and left out", ", ".join(left))
    return saves[whole[0]]


def is_whole(parts: Mapping[Numbers, SetPart]) -> bool:
    """Whether no part of a save is missing, by the sizes that are noted; of parts without a note nobody knows it."""
    saved = next((part.saved for part in parts.values() if part.saved is not None), None)
    if saved is None:
        return False
    sizes = [saved.sizes[axis] for axis in RANK_AXES[: len(next(iter(parts)))]]
    inside = all(number < size for numbers in parts for number, size in zip(numbers, sizes, strict=True))
    return inside and len(parts) == prod(sizes)


def two_saves(signs: str, file: str | None = None) -> CorruptCheckpointError:
    """The error for parts that were not written together."""
    return CorruptCheckpointError(
        "the parts are of two saves: together they are no state that the job ever had",
        file=file,
        expected="all parts of one save",
        found=signs,
        hint="A save was cut off while it wrote over an older one, or files were copied from two runs. Take another "
        "checkpoint, or restore the parts of one save from a copy.",
    )


def write_part(
    value: Any, path: str, save: str | None, *, rank: PerAxis, sizes: PerAxis, options: Mapping[str, Any]
) -> None:
    """`write_whole_file`, with a note beside the file, which is true of whichever file is there.

    Args:
        save: Names the save, the same on all ranks. None: nobody knows it, and nothing is noted.
        rank: Which rank writes it.
        sizes: Number of ranks.
        options: For torch.save.

    Raises:
        CheckpointError: As `write_whole_file`.
    """
    store, name = above(path)

    def note(file: Source) -> None:
        with closing(store.open("", lock=False)) as directory:
            known = saves_beside(directory, name)
            present = noted_part(directory, name).saved if known and store.has(name) else None
        if save is None:
            if known:
                renew_file(dump_notes(()), note_name(path))
            return
        fresh = SaveNote(
            size=file.size,
            directory=directory_digest(Ahead(file, path, 0).take, file.size),
            save=save,
            rank=dict(zip(RANK_AXES, rank, strict=True)),
            sizes=dict(zip(RANK_AXES, sizes, strict=True)),
        )
        renew_file(dump_notes(renewed(known, present, fresh)), note_name(path))

    write_whole_file(value, path, sealed=note, **options)
