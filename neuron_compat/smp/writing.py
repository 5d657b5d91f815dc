"""How one process writes its file of a checkpoint: completely or not at all, with a note beside it."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from neuron_compat.smp.parts import Place
from neuron_compat.torch_files import make_directory, on_host, save_whole, write_whole_bytes
from xla_ckpt import CorruptCheckpointError
from xla_ckpt.layouts.smp import sidecar

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What is noted beside a part."""

    path: str
    save: str | None
    """See `save_of`. If it is None, nothing is noted: nobody knows of which save the file is."""

    place: Place
    by: int
    """The rank that writes it."""

    def write(self, partly: str) -> None:
        """Note what the file `partly` is, beside the one whose place it takes: whichever is there then, is noted."""
        beside = sidecar.note_name(self.path)
        if self.save is None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(beside)
            return
        present = None
        known = _noted(beside)
        if known and (is_now := _zip_of(self.path)) is not None:
            present = sidecar.matching(known, *is_now)
        will_be = _zip_of(partly)
        assert will_be is not None, "torch.save writes zips"
        fresh = sidecar.SaveNote(
            size=will_be[0],
            directory=will_be[1],
            save=self.save,
            rank=dict(zip(sidecar.RANK_AXES, self.place.own, strict=True)),
            sizes=dict(zip(sidecar.RANK_AXES, self.place.sizes, strict=True)),
        )
        data = sidecar.dump_notes(sidecar.renewed(known, present, fresh))
        write_whole_bytes(data, beside, partly=partly_written(beside, self.by))


def _noted(beside: str) -> tuple[sidecar.SaveNote, ...]:
    """What is noted in a file; nothing if it is not there, or not readable: it is about to be written anew."""
    try:
        with open(beside, "rb") as file:
            return sidecar.parse_notes(file.read(sidecar.MAX_NOTE))
    except (FileNotFoundError, CorruptCheckpointError):
        return ()


def _zip_of(path: str) -> tuple[int, str] | None:
    """(size, digest of the directory) of a zip; None if there is none."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size

            def take(offset: int, nbytes: int) -> bytes:
                if offset < 0:
                    raise ValueError("it points to before its beginning")
                file.seek(offset)
                return file.read(nbytes)

            return size, sidecar.directory_digest(take, size)
    except (FileNotFoundError, ValueError):
        return None


def write_file(obj: Any, path: str, *, by: int, note: Note | None = None, options: Mapping[str, Any]) -> None:
    """torch.save of an object, as the work of rank `by`. Its directory is made.

    Raises:
        xla_ckpt.StorageError: The operating system refused. What was there is there still.
        xla_ckpt.UnsupportedStateError: Something in it cannot be pickled.
    """
    folder = path.rpartition("/")[0]
    if folder:
        make_directory(folder)
    with _with_crc32():
        save_whole(
            on_host(obj),
            path,
            partly=partly_written(path, by),
            beside=None if note is None else note.write,
            **options,
        )


def partly_written(path: str, by: int) -> str:
    """The file that is written by a rank, until it is whole.

    It is hidden, so that SMP's own search for the parts, ``{f}_*``, does not find it. Without tensor parallelism
    several ranks may write one file at once; and what a rank that was killed leaves is written over by the next one.

    >>> partly_written("a/b.pt_0", 3)
    'a/.b.pt_0.3.new'
    """
    folder, slash, name = path.rpartition("/")
    return f"{folder}{slash}.{name}.{by}.new"


@contextlib.contextmanager
def _with_crc32() -> Iterator[None]:
    """Have torch.save write CRC-32s, whatever the program has set: without them nobody finds a damaged byte."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


_job_ids: list[tuple[Any, str]] = []
"""The current process group, if there is one, and what names its job. A later group is another job."""

_counters: dict[tuple[str, str, bool], Iterator[int]] = {}
"""(job, checkpoint, v3) -> the numbers of its saves. All ranks that save it count alike."""


def save_of(f: str, v3: bool) -> str | None:
    """What names this save: the same on all ranks. None if the ranks of the job cannot agree on that any more."""
    job = job_id()
    if job is None:
        return None
    key = job, os.path.abspath(f), v3
    return f"{job}-{next(_counters.setdefault(key, itertools.count()))}"


def job_id() -> str | None:
    """What names this job: the rank that comes first says it, and nobody waits.

    `smp.init` asks for it, too: later on the process that holds the job's store may have ended. None then, if it was
    not asked for before.
    """
    distributed: Any = torch.distributed
    joined = distributed.is_available() and distributed.is_initialized()
    group = distributed.group.WORLD if joined else None
    if not _job_ids or _job_ids[0][0] is not group:
        made = uuid.uuid4().hex[:16]
        if joined:
            store = distributed.distributed_c10d._get_default_store()
            try:
                made = store.compare_set("neuron_compat.smp/job", "", made).decode()
            except RuntimeError as error:  # torch has no other one for a store that is gone
                logger.warning("the store of the job is gone: a file is saved without a note of its save: %s", error)
                return None
        _job_ids[:] = [(group, made)]
    return _job_ids[0][1]
