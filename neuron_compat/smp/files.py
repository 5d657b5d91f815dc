"""``smp.save`` and ``smp.load``: one file for each model-parallel rank, or one for the whole model.

    checkpoint.pt_{mp_rank}                          without tensor parallelism, as in the documentation of 1.6 and 1.7
    checkpoint.pt_{pp_rank}_{tp_rank}                with tensor parallelism, as in later documentation
    checkpoint.pt_{pp_rank}_{tp_rank}.pt             ``naming="1.12"``: as written by SMP 1.12
    checkpoint.pt_{pp_rank}_{tp_rank}_{rdp_rank}.pt  ``v3=True``
    checkpoint.pt                                    ``partial=False``

All of these can be read. A file replaces an older one when it is durable. A hidden file next to each partial file
contains the id of its save, so that parts of different saves are not mixed.
"""

from __future__ import annotations

import itertools
import os
import uuid
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from neuron_compat.smp import job
from neuron_compat.smp.errors import (
    IncompatibleCheckpointFoundError,
    IncompatibleCheckpointRankFoundError,
    MissingCheckpointFilesError,
    SMPCheckpointError,
    SMPInvalidArgumentError,
)
from neuron_compat.smp.rank_sync import run_on_all_ranks
from neuron_compat.smp.stored import CheckpointSource, StoredState
from xla_ckpt import NoCheckpointError
from xla_ckpt.facade import (
    ALL_PARTS,
    IS_PARTIAL,
    LOAD_INFO,
    PARTIAL,
    PP,
    RANK_AXES,
    SCALERS,
    TP,
    SetPart,
    find_set_parts,
    find_writers,
    is_whole,
    load_whole_file,
    map_tensors,
    suggest_path,
    write_part,
    write_whole_file,
)
from xla_ckpt.keywords import check_argument_names
from xla_ckpt.logs import get_logger


@check_argument_names(torch.save)
def save(obj: Any, f: str, partial: bool = True, v3: bool = False, *, naming: str = "auto", **options: Any) -> None:
    """Save an object with torch.save to this process's file of a checkpoint, without waiting for other ranks.

    The ranks with ``rdp_rank() == 0`` save a partial checkpoint; for a full one (``partial=False``), only rank 0
    writes its file. The file is durable when the call returns; if the process is killed before, an existing file is
    unchanged.

    Args:
        obj: The object. XLA tensors are stored as CPU tensors.
        f: Path of the checkpoint; its directory is created if it does not exist. The rank is appended, see above.
        partial: True writes a file for each model-parallel rank.
        v3: True writes a file for each data-parallel rank, too.
        naming: ``"1.12"`` uses the names that SMP 1.12 writes, and reads without ``back_compat=True``.
        options: Arguments of torch.save: ``pickle_module``, ``pickle_protocol``.

    Raises:
        SMPInvalidArgumentError: The path is not a string, or the naming is unknown.
        NotInitializedError: `smp.init` was not called.
        xla_ckpt.StorageError: A file system operation failed.
        xla_ckpt.UnsupportedStateError: A value cannot be pickled.
    """
    check_path(f)
    if options.get("_use_new_zipfile_serialization") is False:
        raise SMPInvalidArgumentError(
            "files of torch before 1.6 have no CRC-32, and are not written",
            found="_use_new_zipfile_serialization=False",
        )
    if not partial:
        if job.rank() == 0:
            write_whole_file(obj, f, **options)
        return
    place = get_rank_place()
    path = format_part_path(f, place, v3=v3, naming=naming)
    write_part(obj, path, get_save_id(f, v3), rank=place.ranks, sizes=place.sizes, options=options)


@check_argument_names(torch.load)
def load(
    f: str,
    partial: bool = True,
    back_compat: bool = False,  # noqa: ARG001  # SMP's signature
    map_location: Any = None,
    pickle_module: Any = None,
    *,
    v3: bool = False,  # noqa: ARG001
    trust_pickle: bool = False,
    strict_partitions: bool = False,
    **pickle_load_args: Any,
) -> Any:
    """Load an object that `save`, or SMP, saved.

    From a partial checkpoint of a job with the same degrees, load the part of the same rank; all ranks of a model make
    the same call. In a job with other degrees, load the file of the first rank, without the tensors of states:
    ``model.load_state_dict`` and ``optimizer.load_state_dict`` read the data that they need from all files.

    Every byte is verified against the file's CRC-32s before it is used.

    Args:
        f: The path that `save` was given. Files of every version of SMP are found.
        partial: True for a partial checkpoint.
        back_compat: Accepted, and not needed.
        map_location: As in torch.load; the CPU by default.
        pickle_module: Used if `trust_pickle` is True; otherwise no code of a file runs, and none is needed.
        v3: Accepted, and not needed.
        trust_pickle: Load pickled objects, which can run any code.
        strict_partitions: Raise an error for a checkpoint of a job with other degrees, as SMP does.
        pickle_load_args: Arguments of torch.load, such as ``encoding``; used if `trust_pickle` is True.

    Returns:
        The object. Dicts in it reference their checkpoint (`StoredState`).

    Raises:
        SMPCheckpointError: With ``partial=False``, the file is the part of one rank of a job with other degrees.
        MissingCheckpointFilesError: There are no files with this name.
        IncompatibleCheckpointRankFoundError: A part is missing. `IncompatibleCheckpointFoundError`, too.
        IncompatibleCheckpointFoundError: The job has other degrees, and `strict_partitions` is True.
        xla_ckpt.NoCheckpointError: There is no full checkpoint with this name.
        xla_ckpt.CorruptCheckpointError: A file is damaged, or files are parts of two saves.
        xla_ckpt.UntrustedObjectError: A file contains pickled objects, and `trust_pickle` is False.
        SMPInvalidArgumentError: The path is not a string.
    """
    check_path(f)
    reading = FileReader(
        map_location=map_location, pickle_module=pickle_module, trust_pickle=trust_pickle, options=pickle_load_args
    )
    if not partial:
        return _load_full(f, reading)
    loaded: list[Any] = []

    def prepare() -> None:
        with torch.inference_mode(False):  # inference tensors have no version counter for `StoredState`
            loaded.append(_load_partial(f, reading, get_rank_place(), strict=strict_partitions))

    try:
        run_on_all_ranks("mp", f"smp.load({f!r})", prepare, hint="All ranks that hold a model together load it.")
    except SMPCheckpointError as error:
        error.rank = None  # all ranks find it, and it has SMP's own text
        raise
    return loaded[0]


def get_rank_place() -> RankPlace:
    """Return the ranks and degrees of this process.

    Raises:
        NotInitializedError: `smp.init` was not called.
    """
    ranks = job.get_rank_info()
    return RankPlace(
        pp=ranks.get_rank("pp"),
        tp=ranks.get_rank("tp"),
        rdp=ranks.get_rank("rdp"),
        pp_size=len(ranks.groups["pp"]),
        tp_size=len(ranks.groups["tp"]),
        rdp_size=len(ranks.groups["rdp"]),
    )


def check_path(f: Any) -> None:
    """Raise an error for an invalid file path.

    Raises:
        SMPInvalidArgumentError: It is not a string, or is a URL outside of the file system.
    """
    if not isinstance(f, str):
        raise SMPInvalidArgumentError("the path of a checkpoint is a string", found=type(f).__name__)
    if "://" in f:
        raise SMPInvalidArgumentError(
            "checkpoints of smp are files", expected="the path of a file system", found=f, hint="Mount the bucket."
        )


# -- reading


@dataclass(frozen=True, slots=True, kw_only=True)
class FileReader:
    """Options for reading a file."""

    map_location: Any = None
    pickle_module: Any = None
    trust_pickle: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def read(self, path: str) -> Any:
        """Read the object in a file, after verifying all of it against its CRC-32s."""
        options = {"map_location": self.map_location or "cpu", **self.options}
        if self.pickle_module is not None:
            options["pickle_module"] = self.pickle_module
        return load_whole_file(
            path, trust_pickle=self.trust_pickle, put=self.move_storage, more=SCALERS, options=options
        )

    def move_storage(self, storage: torch.Tensor) -> torch.Tensor:
        """Move a storage to the device given by `map_location`."""
        where = self.map_location
        if callable(where):
            moved = where(storage.untyped_storage(), "cpu")
            return storage if moved is None else torch.empty(0, dtype=torch.uint8, device=moved.device).set_(moved)
        if isinstance(where, Mapping):
            where = where.get("cpu")
        return storage if where is None else storage.to(where)


def _load_full(f: str, reader: FileReader) -> Any:
    """Load a full checkpoint, independently on each rank."""
    if not os.path.isfile(f):
        parts = find_set_parts(f)
        hint = (
            f"Partial files of this name: {len(parts)}. Pass partial=True." if parts else describe_other_checkpoints(f)
        )
        raise NoCheckpointError("there is no such file", file=f, hint=hint)
    value = reader.read(f)
    for pp, tp in _find_degrees(value):
        place = get_rank_place()
        if (pp, tp) != (place.pp_size, place.tp_size):
            raise SMPCheckpointError(
                f"the file is the part of one rank of a job of pp {pp} and tp {tp}",
                file=f,
                hint="Load the name without the numbers at its end, and with partial=True: all parts fit any job.",
            )
    return wrap_stored_states(value, None, fits=True)


def _load_partial(f: str, reader: FileReader, place: RankPlace, *, strict: bool) -> Any:
    """Load this process's part of a checkpoint; or, from another job's, the values common to all parts."""
    parts = find_set_parts(f)
    if not parts:
        error = MissingCheckpointFilesError.of(f)
        full = "There is a full checkpoint of this name: pass partial=False."
        error.details = full if os.path.isfile(f) else describe_other_checkpoints(f)
        raise error
    files = {numbers: part.file for numbers, part in parts.items()}
    _check_complete(parts, files, place, f)
    if strict and (refused := find_smp_error(files, place, f)) is not None:
        raise refused
    fits_job = has_same_sizes(parts, place)
    numbers = get_own_part(len(next(iter(parts))), place) if fits_job else min(parts)
    value = reader.read(files[numbers])
    _check_degrees(value, files, place, f)
    source = CheckpointSource(path=f"{f}{ALL_PARTS}" if os.path.exists(f) else f, trust_pickle=reader.trust_pickle)
    return wrap_stored_states(value, source, fits=fits_job)


def _check_complete(
    parts: Mapping[PartNumbers, SetPart], files: Mapping[PartNumbers, str], place: RankPlace, f: str
) -> None:
    """Raise an error for missing parts, as far as the file names or the hidden files show them."""
    noted = next((part.saved for part in parts.values() if part.saved is not None), None)
    sizes = infer_sizes(parts)[: len(next(iter(parts)))]
    if noted is not None and not is_whole(parts):
        sizes = tuple(noted.sizes[axis] for axis in RANK_AXES[: len(sizes)])
    if find_missing_parts(parts, sizes):
        raise build_incomplete_error(files, place, f, sizes)


def _check_degrees(value: Any, files: Mapping[PartNumbers, str], place: RankPlace, f: str) -> None:
    """Raise an error for a set without all parts of the job described in its own files."""
    pp, tp, rdp = infer_sizes(files)
    for said in _find_degrees(value):
        if said != (pp, tp):
            sizes = (*said, rdp)[: len(next(iter(files)))]
            if find_missing_parts(files, sizes):
                raise build_incomplete_error(files, place, f, sizes)
            raise IncompatibleCheckpointFoundError.of(len(files), place.sizes, sorted(files.values())).at(
                details=f"The files say of themselves that they are of pp={said[0]}, tp={said[1]}."
            )


def _find_degrees(value: Any) -> Iterator[tuple[int, int]]:
    """Yield the (pp, tp) degrees of the job stored in the partial model states of an object."""
    if isinstance(value, Mapping):
        info = value.get(LOAD_INFO)
        if isinstance(info, Mapping) and value.get(IS_PARTIAL) is True:
            pp, tp = (n if type(n := info.get(name)) is int and n > 0 else None for name in (PP, TP))
            if pp is not None and tp is not None:
                yield pp, tp
        for member in value.values():
            if isinstance(member, dict):
                yield from _find_degrees(member)


def wrap_stored_states(value: Any, source: Any, *, fits: bool, depth: int = 0) -> Any:
    """Return the object with `StoredState` dicts: the object itself, its members, and every partial state.

    For a job with other degrees (`fits` is False), partial states lose their tensors: one rank's shards of another
    job's parameters are useless, and must not be mistaken for the parameters of this one.
    """
    if type(value) not in (dict, OrderedDict):
        return value
    partial = value.get(IS_PARTIAL) is True
    if partial and not fits:
        value = map_tensors(value, lambda tensor: tensor.to("meta"))  # without memory for elements
    members = {key: wrap_stored_states(member, source, fits=fits, depth=depth + 1) for key, member in value.items()}
    if depth > 1 and not partial:
        return members
    stored = StoredState(members, source, fits=fits)
    if (versions := getattr(value, "_metadata", None)) is not None:  # versions of the modules, written by torch
        stored._metadata = versions  # type: ignore[attr-defined]
    return stored


NAMINGS = ("auto", "1.12")

PartNumbers = tuple[int, ...]
"""Ranks in the name of a part: ``(mp,)``, ``(pp, tp)`` or ``(pp, tp, rdp)``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Ranks of a process in its job, and the sizes along each axis."""

    pp: int = 0
    tp: int = 0
    rdp: int = 0
    pp_size: int = 1
    tp_size: int = 1
    rdp_size: int = 1

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Pipeline, tensor and reduced-data parallel degrees."""
        return self.pp_size, self.tp_size, self.rdp_size

    @property
    def ranks(self) -> tuple[int, int, int]:
        """Ranks along the same axes."""
        return self.pp, self.tp, self.rdp


def format_part_path(f: str, place: RankPlace, *, v3: bool = False, naming: str = "auto") -> str:
    """Return the path of the part that a process saves.

    ``"auto"`` uses the names in SMP's documentation, ``"1.12"`` those of its last version. With `v3`, each
    data-parallel rank has its own part, which only the last version supports.

    Raises:
        SMPInvalidArgumentError: The naming is unknown.

    >>> format_part_path("a.pt", RankPlace(pp=1, pp_size=2))
    'a.pt_1'
    >>> format_part_path("a.pt", RankPlace(pp=1, tp=1, pp_size=2, tp_size=2))
    'a.pt_1_1'
    >>> format_part_path("a", RankPlace(), naming="1.12")
    'a_0_0.pt'
    >>> format_part_path("a", RankPlace(rdp=3, rdp_size=4), v3=True)
    'a_0_0_3.pt'
    """
    if naming not in NAMINGS:
        raise SMPInvalidArgumentError("there is no such naming", expected=" or ".join(NAMINGS), found=repr(naming))
    if v3:
        return f"{f}_{place.pp}_{place.tp}_{place.rdp}.pt"
    if naming == "1.12":
        return f"{f}_{place.pp}_{place.tp}.pt"
    return f"{f}_{place.pp}_{place.tp}" if place.tp_size > 1 else f"{f}_{place.pp}"


def get_own_part(numbers: int, place: RankPlace) -> PartNumbers:
    """Return the ranks of a process in a set whose names contain this many."""
    return place.ranks[:numbers]


def infer_sizes(parts: Collection[PartNumbers]) -> tuple[int, int, int]:
    """Return the (pp, tp, rdp) sizes of the job that saved a complete set of parts.

    >>> infer_sizes([(0, 0), (0, 1)]), infer_sizes([(0,), (1,)]), infer_sizes([(0, 0, 0), (0, 0, 1)])
    ((1, 2, 1), (2, 1, 1), (1, 1, 2))
    """
    axes = [1 + max(axis) for axis in zip(*parts, strict=True)]
    pp, tp, rdp = (*axes, 1, 1)[:3]
    return pp, tp, rdp


def has_same_sizes(parts: Collection[PartNumbers], place: RankPlace) -> bool:
    """Return True if a set is from a job with the same degrees, including data parallelism if names contain it."""
    count = len(next(iter(parts)))
    return infer_sizes(parts)[:count] == place.sizes[:count] and (count > 1 or place.tp_size == 1)


MAX_LISTED_PARTS = 8
"""Maximum number of missing parts in an error."""


def find_missing_parts(parts: Collection[PartNumbers], sizes: Sequence[int]) -> list[PartNumbers]:
    """Return the first missing parts of a set from a job with these degrees, for the axes in the names.

    >>> find_missing_parts([(0, 0), (0, 1), (1, 1)], (2, 2)), find_missing_parts([(1,)], (2,))
    ([(1, 0)], [(0,)])
    >>> len(find_missing_parts([(0, 999_999_999)], (1, 10**9)))
    9
    """
    return list(
        itertools.islice((numbers for numbers in _enumerate_parts(sizes) if numbers not in parts), MAX_LISTED_PARTS + 1)
    )


def _enumerate_parts(sizes: Sequence[int]) -> Iterator[PartNumbers]:
    """Yield all parts of a job lazily, because the name of an unrelated file may contain a date in place of a rank."""
    if not sizes:
        yield ()
        return
    for first in range(sizes[0]):
        for rest in _enumerate_parts(sizes[1:]):
            yield first, *rest


def find_smp_error(parts: Mapping[PartNumbers, str], place: RankPlace, prefix: str) -> SMPCheckpointError | None:
    """Return the error that SMP 1.12 raises for these parts in a job with these degrees; None if it loads them.

    It counts files, and checks that the ranks in each name are within the count.
    """
    count, (pp_size, tp_size, rdp_size) = len(parts), place.sizes
    kinds: Sequence[str] = ("pp_rank", "tp_rank", "rdp_rank")
    numbers = len(next(iter(parts)))
    if numbers == 1:
        room: Sequence[int] = (count,)
        kinds = ("rank",)
    elif numbers == 2:
        room = (count // tp_size, count // pp_size)
    else:
        room = (count // (tp_size * rdp_size), count // (pp_size * rdp_size), count // (tp_size * pp_size))
    for part in sorted(parts):
        for kind, number, there in zip(kinds, part, room, strict=False):
            if number >= there:
                return IncompatibleCheckpointRankFoundError.of(kind, number, there, prefix)
    wanted = place.sizes[: max(numbers, 2)]
    product = pp_size * tp_size * (rdp_size if numbers == 3 else 1)
    if (*room, 1)[: max(numbers, 2)] != wanted or count != product:
        return IncompatibleCheckpointFoundError.of(count, place.sizes, sorted(parts.values()))
    return None


def build_incomplete_error(
    parts: Mapping[PartNumbers, str], place: RankPlace, prefix: str, sizes: Sequence[int]
) -> SMPCheckpointError:
    """Return the error for missing parts: SMP's own if it has one, with a list of these parts.

    Args:
        prefix: Prefix of their names.
        sizes: Degrees of the job that saved them, for the axes in their names.
    """
    error = find_smp_error(parts, place, prefix) or IncompatibleCheckpointFoundError.of(
        len(parts), place.sizes, sorted(parts.values())
    )
    gone = find_missing_parts(parts, sizes)
    named = ", ".join("_".join(map(str, numbers)) for numbers in gone[:MAX_LISTED_PARTS])
    more = ", ..." if len(gone) > MAX_LISTED_PARTS else ""
    details = f"Parts are missing: {named}{more}. A part is called by the numbers at the end of its file's name."
    stages = {numbers[0] for numbers in parts}
    if len(sizes) > 1 and sizes[1] > 1 and len(stages) == sizes[0] and all(numbers[1] == 0 for numbers in parts):
        details = (
            f"{details} If they were there once, restore them from a copy. Else ranks with tp_rank > 0 never saved "
            "theirs: with tensor parallelism the data-parallel group contains them. "
            "Call smp.save under `if smp.rdp_rank() == 0`, not `if smp.dp_rank() == 0`."
        )
    error.details = details
    return error


logger = get_logger(__name__)


_job_ids: list[tuple[Any, str]] = []
"""Current process group, if there is one, with the id of its job. A later group is another job."""

_save_counters: dict[tuple[str, str, bool], Iterator[int]] = {}
"""(job, checkpoint, v3) -> counter of its saves, which is equal on all ranks that save it."""


def get_save_id(f: str, v3: bool) -> str | None:
    """Return the id of this save, the same on all ranks; None if the ranks of the job can no longer agree on one."""
    job = get_job_id()
    if job is None:
        return None
    key = job, os.path.abspath(f), v3
    return f"{job}-{next(_save_counters.setdefault(key, itertools.count()))}"


def get_job_id() -> str | None:
    """Return the id of this job, which the first rank to ask publishes without waiting for others.

    `smp.init` also calls it, because the process with the job's store may have ended later. In that case the id is
    None, unless it was read before.
    """
    distributed: Any = torch.distributed
    joined = distributed.is_available() and distributed.is_initialized()
    group = distributed.group.WORLD if joined else None
    if not _job_ids or _job_ids[0][0] is not group:
        name = uuid.uuid4().hex[:16]
        if joined:
            store = distributed.distributed_c10d._get_default_store()
            try:
                name = store.compare_set("neuron_compat.smp/job", "", name).decode()
            except RuntimeError as error:  # torch's only error for a store that is gone
                logger.warning("the store of the job is gone: a file is saved without a note of its save: %s", error)
                return None
        _job_ids[:] = [(group, name)]
    return _job_ids[0][1]


MAX_LISTED_TAGS = 10
"""Maximum number of tags in an error: the newest."""


def describe_other_checkpoints(path: str) -> str | None:
    """Return a hint about other checkpoints at a path, or about a similar path; None if there are none.

    It names the call that reads them.
    """
    there = find_writers(path)
    if there is None:
        near = suggest_path(path)
        return f"Nothing lies there{near}" if near else None
    writer, tags = there
    root, name = os.path.split(path.rstrip("/"))
    partial = any(each.endswith(PARTIAL) for each in tags or (name,))
    call = "smp.resume_from_checkpoint" if partial else "xla_ckpt.load_checkpoint(..., model=model)"
    if not tags:
        call = f"{call}({root or '.'!r}, tag={name.removesuffix(PARTIAL)!r})" if partial else call
        return f"A checkpoint of {writer} lies there: {call} reads it."
    return f"Checkpoints of {writer} lie there, oldest first: {', '.join(tags[-MAX_LISTED_TAGS:])}. {call} reads them."
