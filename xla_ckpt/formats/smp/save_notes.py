"""Notes that record which save each SMP file belongs to, and selection of the files of one save.

```
{"format": 1, "saves": [{"size": 4096, "directory": "<16 hex>", "save": "<job id>-<n>",
                         "rank": {"pp": 0, "tp": 1, "rdp": 0}, "sizes": {"pp": 1, "tp": 2, "rdp": 1}}]}
```

The name of a note is hidden, so that SMP's own search for ``{f}_*`` does not find it. `directory` is the digest of the
zip's central directory, which contains the CRC-32 of each record. Two files of one set that belong to different saves
have different `save`. An entry whose size or digest does not match the file belongs to an earlier save, or to one that
was interrupted before the file was renamed; if none matches, another program has overwritten the file since.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any

from xla_ckpt.core.checksum import compute_digest, to_hex
from xla_ckpt.core.json_data import parse_json
from xla_ckpt.errors import CorruptCheckpointError, FormatError, UnsupportedVersionError, wrap_os_errors
from xla_ckpt.formats.smp.tags import ALL_PARTS, FileSet, PartNumbers, SmpTag, find_smp_tag
from xla_ckpt.formats.torch_save.serialization import replace_file, write_whole_file
from xla_ckpt.formats.torch_save.zip_directory import ReadBytes, find_zip_directory
from xla_ckpt.formats.torch_save.zip_reader import ReadAheadFile
from xla_ckpt.loading.tag_reader import DAMAGED_FILE_HINT
from xla_ckpt.logs import get_logger
from xla_ckpt.storage.base import Directory, FileReader, read_file
from xla_ckpt.storage.resolve import open_parent

NOTE_FORMAT = 1

MAX_NOTE_BYTES = 1 << 20
"""Maximum size of a note in bytes; larger files are not read. Two entries need a few hundred bytes."""

RANK_AXES = ("pp", "tp", "rdp")
"""Keys of `rank` and `sizes`."""

_FIELD_TYPES = {"size": int, "directory": str, "save": str, "rank": dict, "sizes": dict}
"""Fields of an entry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveNote:
    """A save of a file.

    Raises (on construction):
        FormatError: A field has another type, or a coordinate is missing or invalid.
    """

    size: int
    """Size of the file in bytes."""

    directory: str
    """Digest of its zip's directory (see `compute_directory_digest`)."""

    save: str
    """ID of the save, equal for all files that ranks wrote in it."""

    rank: Mapping[str, int]
    """Coordinates of the rank that wrote it."""

    sizes: Mapping[str, int]
    """Number of ranks along each axis."""

    def __post_init__(self) -> None:
        sound = (
            all(type(getattr(self, field)) is kind for field, kind in _FIELD_TYPES.items())
            and set(self.rank) == set(self.sizes) == set(RANK_AXES)
            and all(type(n) is int for n in (*self.rank.values(), *self.sizes.values()))
            and all(0 <= self.rank[axis] < self.sizes[axis] for axis in RANK_AXES)
        )
        if not sound:
            raise FormatError("an entry of the note beside a file is damaged", found=str(self)[:200])


def get_note_name(file: str) -> str:
    """Return the name of a file's note.

    >>> get_note_name("best_partial/model_0_1.pt")
    'best_partial/.model_0_1.pt.xla_ckpt.json'
    """
    above, slash, base = file.rpartition("/")
    return f"{above}{slash}.{base}.xla_ckpt.json"


def compute_directory_digest(read_bytes: ReadBytes, nbytes: int) -> str:
    """Compute the digest of a zip's directory. If records have a CRC-32, it covers all of their bytes.

    Args:
        read_bytes: Function that reads bytes of the file at (offset, number of bytes).
        nbytes: Size of the file.

    Raises:
        ValueError: The file is not a complete zip.
    """
    try:
        where = find_zip_directory(read_bytes, nbytes)
    except struct.error as error:
        raise ValueError(f"it is no whole zip: {error}") from error
    if where.offset + where.nbytes > nbytes:
        raise ValueError("it is no whole zip: its directory reaches behind its end")
    return to_hex(compute_digest(read_bytes(where.offset, where.nbytes)))


def dump_notes(saves: Sequence[SaveNote]) -> bytes:
    """Serialize a note.

    >>> ranks = {"rank": {"pp": 0, "tp": 0, "rdp": 0}, "sizes": {"pp": 1, "tp": 1, "rdp": 1}}
    >>> one = SaveNote(size=4096, directory="0123456789abcdef", save="job-1", **ranks)
    >>> parse_notes(dump_notes([one])) == (one,)
    True
    """
    return json.dumps({"format": NOTE_FORMAT, "saves": [asdict(one) for one in saves]}).encode() + b"\n"


def parse_notes(data: bytes) -> tuple[SaveNote, ...]:
    """Parse a note, and return its entries, oldest first.

    Raises:
        UnsupportedVersionError: A newer version of this library wrote it.
        FormatError: It is damaged.
    """
    note = parse_json(data, "the note beside a file")
    version = note.get("format") if isinstance(note, dict) else None
    if type(version) is int and version > NOTE_FORMAT:
        raise UnsupportedVersionError(
            "a newer version of this library wrote the note beside a file", expected=NOTE_FORMAT, found=version
        )
    entries: Any = note.get("saves") if version == NOTE_FORMAT else None
    if not isinstance(entries, list) or not all(
        isinstance(one, dict) and _FIELD_TYPES.keys() <= one.keys() for one in entries
    ):
        raise FormatError("the note beside a file is damaged", found=str(note)[:200])
    return tuple(SaveNote(**{field: one[field] for field in _FIELD_TYPES}) for one in entries)


def update_notes(saves: Sequence[SaveNote], present: SaveNote | None, fresh: SaveNote) -> tuple[SaveNote, ...]:
    """Return the entries for a file that is about to be replaced.

    The entry of the current file is kept, because it still matches if the program ends before the new file is renamed.

    Args:
        saves: The existing entries.
        present: The entry of the current file; None if the file does not exist or match one.
        fresh: The entry of the new file.
    """
    kept = saves[-1:] if present is None else (present,)
    return (*(one for one in kept if one != fresh), fresh)


logger = get_logger(__name__)

PerAxis = tuple[int, int, int]
"""A number for each of `RANK_AXES`."""

_OVERWRITTEN = "another program, which has written over it since"
"""Save ID of a file that was overwritten after its note was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetPart:
    """A file of a set."""

    file: str
    digest: str
    """Digest of its zip's directory, which identifies the content; empty if it was not computed, or is not a zip."""

    saves: tuple[SaveNote, ...]
    """Entries of its note, including entries of earlier files of its name."""

    saved: SaveNote | None
    """Entry of the current file; None if there is none."""

    @property
    def save(self) -> str | None:
        """ID of its save; None if it is unknown."""
        return self.saved.save if self.saved is not None else _OVERWRITTEN if self.saves else None


def find_set_parts(prefix: str) -> dict[PartNumbers, SetPart]:
    """Find the parts of a set, by the numbers in their names, with their full paths. Empty if there are none.

    Raises:
        CorruptCheckpointError: Parts are from different saves, or have names of several forms.
        StorageError: They cannot be read.
    """
    store, name = open_parent(prefix)
    with wrap_os_errors("reading the files of a set", path=prefix):
        tag = find_smp_tag(store, f"{name}{ALL_PARTS}")
        if tag is None:
            return {}
        with closing(store.open("", lock=False, links=True)) as directory:
            parts = {n: read_set_part(directory, file) for n, file in tag.sets[""].get_parts().items()}
    folder = "".join(prefix.rpartition("/")[:2])
    return {n: replace(part, file=f"{folder}{part.file}") for n, part in select_one_save(parts).items()}


def exclude_other_saves(directory: Directory, tag: SmpTag) -> SmpTag:
    """Return the tag without the files of other saves (see `select_one_save`).

    Only a tag that is a set of files can contain such files. A tag that is a directory is returned unchanged.

    Raises:
        CorruptCheckpointError: The files are from several saves.
    """
    files = tag.sets.get("")
    if files is None or len(files.by_pattern) != 1:
        return tag
    ((form, by_numbers),) = files.by_pattern.items()
    parts = select_one_save({n: read_set_part(directory, file) for n, file in by_numbers.items()})
    return replace(tag, sets={"": FileSet(files.name, {form: {n: part.file for n, part in parts.items()}})})


def read_set_part(directory: Directory, file: str) -> SetPart:
    """Read the note of a file of a set. Without a note, the file itself is not opened."""
    if not (saves := read_save_notes(directory, file)):
        return SetPart(file=file, digest="", saves=(), saved=None)
    with closing(directory.open(file)) as source:
        return identify_part(ReadAheadFile(source, file, 0), saves)


def identify_part(ahead: ReadAheadFile, saves: tuple[SaveNote, ...]) -> SetPart:
    """Determine which of the recorded saves wrote an open file."""
    try:
        digest = compute_directory_digest(ahead.read_at, ahead.size)
    except (ValueError, CorruptCheckpointError):
        digest = ""  # not a complete zip; reading it raises an error
    saved = next((one for one in saves if (one.size, one.directory) == (ahead.size, digest)), None)
    return SetPart(file=ahead.file, digest=digest, saves=saves, saved=saved)


def read_save_notes(directory: Directory, file: str) -> tuple[SaveNote, ...]:
    """Read the entries of a file's note; empty if the note is missing or damaged."""
    name = get_note_name(file)
    try:
        return parse_notes(read_file(directory, name, limit=MAX_NOTE_BYTES, what="the note beside a file"))
    except FileNotFoundError:
        return ()
    except (FormatError, UnsupportedVersionError) as error:
        # The file itself may be intact: its own CRC-32 checksums are compared. Only its save is unknown.
        logger.warning("%s", error.at(file=name))
        return ()


def select_one_save(parts: Mapping[PartNumbers, SetPart]) -> dict[PartNumbers, SetPart]:
    """Select the parts that were saved together.

    If they are from several saves, and exactly one of these is complete, the others are excluded: a job with fewer
    ranks has overwritten some of the files of a larger job.

    Raises:
        CorruptCheckpointError: They are from several saves of which none or several are complete, or a file is
            truncated.
    """
    saves: dict[str, dict[PartNumbers, SetPart]] = {}
    for numbers, part in parts.items():
        if part.save is not None:
            saves.setdefault(part.save, {})[numbers] = part
    if len(saves) < 2:
        return dict(parts)
    whole = [name for name, of_save in saves.items() if is_whole(of_save)]
    if len(whole) != 1:
        if (torn := next((part.file for part in parts.values() if part.saves and not part.digest), None)) is not None:
            # Such a file matches no note, so it would appear to be from another save.
            raise CorruptCheckpointError(
                "the part is cut off or damaged: it is no whole zip of torch.save",
                file=torn,
                hint=DAMAGED_FILE_HINT,
            )
        raise make_two_saves_error(
            "; ".join(f"{of_save[min(of_save)].file} of {name}" for name, of_save in saves.items())
        )
    left = sorted(part.file for numbers, part in parts.items() if numbers not in saves[whole[0]])
    logger.warning("%s: of another save, and left out", ", ".join(left))
    return saves[whole[0]]


def is_whole(parts: Mapping[PartNumbers, SetPart]) -> bool:
    """Return True if no part of a save is missing, according to the recorded sizes; False without a note."""
    saved = next((part.saved for part in parts.values() if part.saved is not None), None)
    if saved is None:
        return False
    sizes = [saved.sizes[axis] for axis in RANK_AXES[: len(next(iter(parts)))]]
    inside = all(number < size for numbers in parts for number, size in zip(numbers, sizes, strict=True))
    return inside and len(parts) == prod(sizes)


def make_two_saves_error(found: str, file: str | None = None) -> CorruptCheckpointError:
    """Return the error for parts that were not written together."""
    return CorruptCheckpointError(
        "the parts are of two saves: together they are no state that the job ever had",
        file=file,
        expected="all parts of one save",
        found=found,
        hint="A save was cut off while it wrote over an older one, or files were copied from two runs. Take another "
        "checkpoint, or restore the parts of one save from a copy.",
    )


def write_part(
    value: Any, path: str, save: str | None, *, rank: PerAxis, sizes: PerAxis, options: Mapping[str, Any]
) -> None:
    """Write a file with `write_whole_file`, and its note. The note is valid for both the old and the new file.

    Args:
        value: The object to save.
        path: Path of the file.
        save: ID of the save, equal on all ranks. None: unknown, and no entry is written.
        rank: Coordinates of the rank that writes it.
        sizes: Number of ranks along each axis.
        options: Options of torch.save.

    Raises:
        CheckpointError: The same errors as in `write_whole_file`.
    """
    store, name = open_parent(path)

    def note(file: FileReader) -> None:
        with closing(store.open("", lock=False)) as directory:
            known = read_save_notes(directory, name)
            present = read_set_part(directory, name).saved if known and store.has(name) else None
        if save is None:
            if known:
                replace_file(dump_notes(()), get_note_name(path))
            return
        fresh = SaveNote(
            size=file.size,
            directory=compute_directory_digest(ReadAheadFile(file, path, 0).read_at, file.size),
            save=save,
            rank=dict(zip(RANK_AXES, rank, strict=True)),
            sizes=dict(zip(RANK_AXES, sizes, strict=True)),
        )
        replace_file(dump_notes(update_notes(known, present, fresh)), get_note_name(path))

    write_whole_file(value, path, sealed=note, **options)
