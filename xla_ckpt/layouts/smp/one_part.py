"""The files of a set as they are, for who loads one of them itself and not the whole set by a manifest."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass

from xla_ckpt.errors import CorruptCheckpointError, storage_errors
from xla_ckpt.layouts.smp import sidecar
from xla_ckpt.layouts.smp.tags import ALL_PARTS, Numbers, find_tag
from xla_ckpt.layouts.torch_save.zip_end import Take
from xla_ckpt.storage.base import Directory, Source, read_whole
from xla_ckpt.storage.door import above

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One file of a set."""

    path: str
    """In full."""

    saved: sidecar.Save | None
    """What is noted beside it; None if it is not one of ours, or was written over."""


def parts_at(prefix: str) -> dict[Numbers, Part]:
    """The parts of a set, by the numbers in their names; none if there are none.

    Where the notes beside them say that they are of several saves, only those of one save are returned if only that
    one is whole: a job of fewer ranks has saved over a part of the set of a larger one.

    Raises:
        CorruptCheckpointError: Parts are of two saves, or of several forms of names.
        StorageError: They cannot be read.
    """
    store, name = above(prefix)
    with storage_errors("reading the files of a set", path=prefix):
        found = find_tag(store, f"{name}{ALL_PARTS}")
        if found is None:
            return {}
        folder = "".join(prefix.rpartition("/")[:2])
        with closing(store.open("", lock=False, links=True)) as directory:
            parts = {
                numbers: Part(path=f"{folder}{file}", saved=note_of(directory, file))
                for numbers, file in found.sets[""].parts().items()
            }
    return of_one_save(parts, prefix)


def note_of(directory: Directory, file: str) -> sidecar.Save | None:
    """What is noted beside a file; None if nothing is, or not of the file as it is.

    Raises:
        CorruptCheckpointError: The note is damaged.
    """
    try:
        data = read_whole(directory, sidecar.name_of(file))
    except FileNotFoundError:
        return None
    entries = sidecar.parse(data[: sidecar.MAX_BYTES])
    with closing(directory.open(file)) as source:
        try:
            return sidecar.matching(entries, source.size, sidecar.directory_digest(_taking(source), source.size))
        except ValueError:
            return None  # no zip: who reads it says so


def _taking(source: Source) -> Take:
    def take(offset: int, nbytes: int) -> bytes:
        if offset < 0 or nbytes < 0 or offset + nbytes > source.size:
            raise ValueError("it points to behind its end")
        held = bytearray(nbytes)
        return bytes(held[: source.read_into(memoryview(held), offset)])

    return take


def of_one_save(parts: Mapping[Numbers, Part], prefix: str) -> dict[Numbers, Part]:
    """The parts that were saved together. Parts without a note are taken for one save.

    Raises:
        CorruptCheckpointError: They are of several saves, of which none is whole, or more than one.
    """
    saves: dict[str | None, dict[Numbers, Part]] = {}
    for numbers, part in parts.items():
        saves.setdefault(None if part.saved is None else part.saved.save, {})[numbers] = part
    if len(saves) < 2:
        return dict(parts)
    whole = [name for name, held in saves.items() if name is not None and not lacking(held)]
    if len(whole) != 1:
        found = [f"{', '.join(sorted(_names(held))[:4])} of {save or 'no save'}" for save, held in saves.items()]
        raise CorruptCheckpointError(
            "the files are parts of two saves",
            file=prefix,
            expected="files that one save wrote",
            found="; ".join(found),
            hint="A save was cut off, or files were copied from several checkpoints. Take the files of one save.",
        )
    left = sorted(name for save, held in saves.items() if save != whole[0] for name in _names(held))
    logger.warning("%s: %s are of another save, and left out", prefix, ", ".join(left))
    return saves[whole[0]]


def lacking(parts: Mapping[Numbers, Part]) -> set[Numbers]:
    """The parts that are missing, by the sizes that are noted beside the others."""
    saved = next(part.saved for part in parts.values() if part.saved is not None)
    numbers = len(next(iter(parts)))
    sizes = [saved.sizes[axis] for axis in sidecar.AXES[:numbers]]
    found: list[Numbers] = [()]
    for size in sizes:
        found = [(*before, n) for before in found for n in range(size)]
    return set(found) - set(parts)


def _names(parts: Mapping[Numbers, Part]) -> list[str]:
    return [part.path.rpartition("/")[2] for part in parts.values()]
