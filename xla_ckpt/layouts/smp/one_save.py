"""Which files of a set belong together: what the notes beside them say of the saves that wrote them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from math import prod

from xla_ckpt.errors import CorruptCheckpointError, storage_errors
from xla_ckpt.layouts.smp.parts import saves_beside, two_saves
from xla_ckpt.layouts.smp.sidecar import RANK_AXES, SaveNote, directory_digest, matching
from xla_ckpt.layouts.smp.tags import ALL_PARTS, FileSet, Numbers, SmpTag, find_smp_tag
from xla_ckpt.layouts.torch_save.zip_reader import Ahead
from xla_ckpt.storage.base import Directory
from xla_ckpt.storage.door import above

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SetPart:
    """One file of a set."""

    file: str
    saved: SaveNote | None
    """What is noted of the file as it is; None if nothing is."""

    noted: bool
    """Whether there is a note, of this file or of an earlier one of its name."""

    @property
    def save(self) -> str | None:
        """What names its save; None if nobody knows it."""
        return self.saved.save if self.saved is not None else "another program" if self.noted else None


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
            parts = with_notes(directory, tag.sets[""])
    folder = "".join(prefix.rpartition("/")[:2])
    return {n: SetPart(file=f"{folder}{p.file}", saved=p.saved, noted=p.noted) for n, p in of_one_save(parts).items()}


def less_others(directory: Directory, tag: SmpTag) -> SmpTag:
    """A set without the files of other saves that lie under its name (see `of_one_save`); a directory as it is.

    Raises:
        CorruptCheckpointError: It is of two saves.
    """
    files = tag.sets.get("")
    if files is None or len(files.forms) != 1:
        return tag
    ((form, _),) = files.forms.items()
    kept = {numbers: part.file for numbers, part in of_one_save(with_notes(directory, files)).items()}
    return replace(tag, sets={"": FileSet(files.name, {form: kept})})


def with_notes(directory: Directory, files: FileSet) -> dict[Numbers, SetPart]:
    """The files of a set, and what is noted of them."""
    return {numbers: noted_part(directory, file) for numbers, file in files.parts().items()}


def noted_part(directory: Directory, file: str) -> SetPart:
    """A file of a set, and what is noted of it."""
    saves = saves_beside(directory, file)
    if not saves:
        return SetPart(file=file, saved=None, noted=False)
    with closing(directory.open(file)) as source:
        try:
            saved = matching(saves, source.size, directory_digest(Ahead(source, file, 0).take, source.size))
        except (ValueError, CorruptCheckpointError):
            saved = None  # no whole zip: who reads it says so
    return SetPart(file=file, saved=saved, noted=True)


def of_one_save(parts: Mapping[Numbers, SetPart]) -> dict[Numbers, SetPart]:
    """The parts that were saved together.

    If they are of several saves, and one of these is whole, the others are left out: a job of fewer ranks has saved
    over a part of what a larger one had left.

    Raises:
        CorruptCheckpointError: They are of several saves, of which none is whole, or more than one.
    """
    saves: dict[str, dict[Numbers, SetPart]] = {}
    for numbers, part in parts.items():
        if part.save is not None:
            saves.setdefault(part.save, {})[numbers] = part
    if len(saves) < 2:
        return dict(parts)
    whole = [name for name, of_save in saves.items() if is_whole(of_save)]
    if len(whole) != 1:
        firsts = {name: min(of_save) for name, of_save in saves.items()}
        raise two_saves("; ".join(f"{parts[first].file} of {name}" for name, first in firsts.items()))
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
