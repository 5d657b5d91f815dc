"""One part of a set of SMP's files, and the note beside it that says of which save the part is."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from typing import Any

from xla_ckpt.layouts.smp.one_save import noted_part
from xla_ckpt.layouts.smp.parts import saves_beside
from xla_ckpt.layouts.smp.sidecar import RANK_AXES, SaveNote, directory_digest, dump_notes, note_name, renewed
from xla_ckpt.layouts.torch_save.whole_writing import renew_file, write_whole_file
from xla_ckpt.layouts.torch_save.zip_reader import Ahead
from xla_ckpt.storage.base import Source
from xla_ckpt.storage.door import above

PerAxis = tuple[int, int, int]
"""A number for each of `sidecar.RANK_AXES`."""


def write_part(
    value: Any, path: str, save: str | None, *, rank: PerAxis, sizes: PerAxis, options: Mapping[str, Any]
) -> None:
    """`write_whole_file`, with a note beside the file, which is true of whichever file is there.

    Args:
        value: What is saved.
        path: The file.
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
