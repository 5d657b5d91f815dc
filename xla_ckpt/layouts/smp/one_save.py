"""Which files of a set belong together: what the notes beside them say of the saves that wrote them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from math import prod

from xla_ckpt.errors import FormatError, UnsupportedVersionError, storage_errors
from xla_ckpt.layouts.smp.parts import two_saves
from xla_ckpt.layouts.smp.sidecar import AXES, MAX_BYTES, Save, directory_digest, matching, name_of, parse
from xla_ckpt.layouts.smp.tags import ALL_PARTS, FileSet, Numbers, SmpTag, find_tag
from xla_ckpt.layouts.torch_save.zip_end import Take
from xla_ckpt.storage.base import Directory, Source, read_whole
from xla_ckpt.storage.door import above

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One file of a set."""

    file: str
    saved: Save | None
    """What is noted of the file as it is; None if nothing is."""

    noted: bool
    """Whether there is a note, of this file or of an earlier one of its name."""

    @property
    def save(self) -> str | None:
        """What names its save; None if nobody knows it."""
        return self.saved.save if self.saved is not None else "another program" if self.noted else None


def parts_at(prefix: str) -> dict[Numbers, Part]:
    """The parts of a set, by the numbers in their names, with their full paths; none if there are none.

    Raises:
        CorruptCheckpointError: Parts are of two saves, or of several forms of names.
        StorageError: They cannot be read.
    """
    store, name = above(prefix)
    with storage_errors("reading the files of a set", path=prefix):
        found = find_tag(store, f"{name}{ALL_PARTS}")
        if found is None:
            return {}
        with closing(store.open("", lock=False, links=True)) as directory:
            parts = noted(directory, found.sets[""])
    folder = "".join(prefix.rpartition("/")[:2])
    return {n: Part(file=f"{folder}{p.file}", saved=p.saved, noted=p.noted) for n, p in of_one_save(parts).items()}


def less_others(directory: Directory, found: SmpTag) -> SmpTag:
    """A set without the files of other saves that lie under its name (see `of_one_save`); a directory as it is.

    Raises:
        CorruptCheckpointError: It is of two saves.
    """
    files = found.sets.get("")
    if files is None or len(files.forms) != 1:
        return found
    ((form, _),) = files.forms.items()
    kept = {numbers: part.file for numbers, part in of_one_save(noted(directory, files)).items()}
    return replace(found, sets={"": FileSet(files.name, {form: kept})})


def noted(directory: Directory, files: FileSet) -> dict[Numbers, Part]:
    """The files of a set, and what is noted of them."""
    return {numbers: _part(directory, file) for numbers, file in files.parts().items()}


def _part(directory: Directory, file: str) -> Part:
    try:
        data = read_whole(directory, name_of(file))
        entries = parse(data[:MAX_BYTES])
    except FileNotFoundError:
        return Part(file=file, saved=None, noted=False)
    except (FormatError, UnsupportedVersionError) as error:
        # The file itself is whole: its own CRC-32s are compared. Only which save it is of is unknown.
        logger.warning("%s", error.at(file=name_of(file)))
        return Part(file=file, saved=None, noted=False)
    with closing(directory.open(file)) as source:
        try:
            found = matching(entries, source.size, directory_digest(_taking(source), source.size))
        except ValueError:
            found = None  # no whole zip: who reads it says so
    return Part(file=file, saved=found, noted=bool(entries))


def _taking(source: Source) -> Take:
    def take(offset: int, nbytes: int) -> bytes:
        if offset < 0 or nbytes < 0 or offset + nbytes > source.size:
            raise ValueError("it points to behind its end")
        held = bytearray(nbytes)
        return bytes(held[: source.read_into(memoryview(held), offset)])

    return take


def of_one_save(parts: Mapping[Numbers, Part]) -> dict[Numbers, Part]:
    """The parts that were saved together.

    If they are of several saves, and one of these is whole, the others are left out: a job of fewer ranks has saved
    over a part of what a larger one had left.

    Raises:
        CorruptCheckpointError: They are of several saves, of which none is whole, or more than one.
    """
    saves: dict[str, dict[Numbers, Part]] = {}
    for numbers, part in parts.items():
        if part.save is not None:
            saves.setdefault(part.save, {})[numbers] = part
    if len(saves) < 2:
        return dict(parts)
    whole = [name for name, held in saves.items() if is_whole(held)]
    if len(whole) != 1:
        firsts = {name: min(held) for name, held in saves.items()}
        raise two_saves("; ".join(f"{parts[first].file} of {name}" for name, first in firsts.items()))
    left = sorted(part.file for numbers, part in parts.items() if numbers not in saves[whole[0]])
    logger.warning("%s: of another save, and left out", ", ".join(left))
    return saves[whole[0]]


def is_whole(parts: Mapping[Numbers, Part]) -> bool:
    """Whether no part of a save is missing, by the sizes that are noted; of parts without a note nobody knows it."""
    saved = next((part.saved for part in parts.values() if part.saved is not None), None)
    if saved is None:
        return False
    sizes = [saved.sizes[axis] for axis in AXES[: len(next(iter(parts)))]]
    inside = all(number < size for numbers in parts for number, size in zip(numbers, sizes, strict=True))
    return inside and len(parts) == prod(sizes)
