"""``smp.save`` and ``smp.load``: one file for each model-parallel rank, or one for the whole model.

    checkpoint.pt_{mp_rank}                          without tensor parallelism, as in the documents of 1.6 and 1.7
    checkpoint.pt_{pp_rank}_{tp_rank}                with tensor parallelism, as in later documents
    checkpoint.pt_{pp_rank}_{tp_rank}.pt             ``naming="1.12"``: what SMP 1.12 writes
    checkpoint.pt_{pp_rank}_{tp_rank}_{rdp_rank}.pt  ``v3=True``
    checkpoint.pt                                    ``partial=False``

All of these can be read. A file replaces an older one when it is durable. A hidden note beside each partial file
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
    """Save an object, as torch.save does, to this process' file of a checkpoint. It waits for no other rank.

    A partial checkpoint is saved by the ranks with ``rdp_rank() == 0``; of a full one (``partial=False``) only rank 0
    writes its file. The file is there, durable, when the call returns; if the process is killed before, the file that
    was there is there still.

    Args:
        obj: What is saved. XLA tensors are stored as CPU tensors.
        f: Path of the checkpoint; its directory is made if it is absent. The rank is added to it, see above.
        partial: Whether each model-parallel rank has a file of its own.
        v3: Each data-parallel rank has one, too.
        naming: ``"1.12"`` for the names that SMP 1.12 writes, and reads without ``back_compat=True``.
        options: For torch.save: ``pickle_module``, ``pickle_protocol``.

    Raises:
        SMPInvalidArgumentError: The path is no string, or there is no such naming.
        NotInitializedError: `smp.init` was not called.
        xla_ckpt.StorageError: The operating system refused.
        xla_ckpt.UnsupportedStateError: Something cannot be pickled.
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

    Of a partial checkpoint this is what the same rank saved, if the job has the same degrees; all ranks that hold a
    model together make the same call. In a job of other degrees it is the file of the first rank, without the tensors
    of states: ``model.load_state_dict`` and ``optimizer.load_state_dict`` take what they need of all files.

    Every byte is compared with the file's CRC-32s before it is used.

    Args:
        f: The path that `save` was given. Files of every version of SMP are found.
        partial: Whether it is a partial checkpoint.
        back_compat: Accepted, and not needed.
        map_location: As torch.load takes it; the CPU by default.
        pickle_module: Used if `trust_pickle`; otherwise no code of a file runs, and none is needed.
        v3: Accepted, and not needed.
        trust_pickle: Load pickled objects, which can run any code.
        strict_partitions: Refuse a checkpoint of a job of other degrees, as SMP does.
        pickle_load_args: For torch.load, such as ``encoding``; used if `trust_pickle`.

    Returns:
        The object. Dicts in it know where they come from (`StoredState`).

    Raises:
        SMPCheckpointError: With ``partial=False``, the file is the part of one rank of a job of other degrees.
        MissingCheckpointFilesError: There are no files of this name.
        IncompatibleCheckpointRankFoundError: A part is missing. `IncompatibleCheckpointFoundError`, too.
        IncompatibleCheckpointFoundError: The job has other degrees, and `strict_partitions` is set.
        xla_ckpt.NoCheckpointError: There is no full checkpoint of this name.
        xla_ckpt.CorruptCheckpointError: A file is damaged, or files are parts of two saves.
        xla_ckpt.UntrustedObjectError: A file holds pickled objects, and `trust_pickle` is False.
        SMPInvalidArgumentError: The path is no string.
    """
    check_path(f)
    reading = FileReader(
        map_location=map_location, pickle_module=pickle_module, trust_pickle=trust_pickle, options=pickle_load_args
    )
    if not partial:
        return _load_full(f, reading)
    loaded: list[Any] = []

    def prepare() -> None:
        with torch.inference_mode(False):  # inference tensors count no writes, by which `StoredState` sees a change
            loaded.append(_load_partial(f, reading, get_rank_place(), strict=strict_partitions))

    try:
        run_on_all_ranks("mp", f"smp.load({f!r})", prepare, hint="All ranks that hold a model together load it.")
    except SMPCheckpointError as error:
        error.rank = None  # it is what all ranks find, and has SMP's own text
        raise
    return loaded[0]


def get_rank_place() -> RankPlace:
    """Where this process stands.

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
    """Refuse what is no path of a file.

    Raises:
        SMPInvalidArgumentError: It is no string, or the address of something that is no file system.
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
    """How a file is read."""

    map_location: Any = None
    pickle_module: Any = None
    trust_pickle: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def read(self, path: str) -> Any:
        """What a file holds, after all of it was compared with its CRC-32s."""
        options = {"map_location": self.map_location or "cpu", **self.options}
        if self.pickle_module is not None:
            options["pickle_module"] = self.pickle_module
        return load_whole_file(
            path, trust_pickle=self.trust_pickle, put=self.move_storage, more=SCALERS, options=options
        )

    def move_storage(self, storage: torch.Tensor) -> torch.Tensor:
        """A storage where `map_location` wants it."""
        where = self.map_location
        if callable(where):
            moved = where(storage.untyped_storage(), "cpu")
            return storage if moved is None else torch.empty(0, dtype=torch.uint8, device=moved.device).set_(moved)
        if isinstance(where, Mapping):
            where = where.get("cpu")
        return storage if where is None else storage.to(where)


def _load_full(f: str, reader: FileReader) -> Any:
    """A whole checkpoint, which each rank reads for itself."""
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
    """This process' part of a checkpoint; or, of one of another job, what all parts have in common."""
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
    """Refuse a set of which parts are missing: as far as the numbers tell, or what is noted beside the files."""
    noted = next((part.saved for part in parts.values() if part.saved is not None), None)
    sizes = infer_sizes(parts)[: len(next(iter(parts)))]
    if noted is not None and not is_whole(parts):
        sizes = tuple(noted.sizes[axis] for axis in RANK_AXES[: len(sizes)])
    if find_missing_parts(parts, sizes):
        raise build_incomplete_error(files, place, f, sizes)


def _check_degrees(value: Any, files: Mapping[PartNumbers, str], place: RankPlace, f: str) -> None:
    """Refuse a set that lacks parts by what its own files say of the job that saved them."""
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
    """(pp, tp) of the job, as far as the partial states of models in an object say them."""
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
    """The same object, whose dicts know that they are of a checkpoint: it, its members, and every partial state.

    Of a job of other degrees (`fits` is False) partial states lose their tensors: what one rank had of another
    job's parameters is of no use, and must not be taken for the parameters of this one.
    """
    if type(value) not in (dict, OrderedDict):
        return value
    partial = value.get(IS_PARTIAL) is True
    if partial and not fits:
        value = map_tensors(value, lambda tensor: tensor.to("meta"))  # no elements in memory
    members = {key: wrap_stored_states(member, source, fits=fits, depth=depth + 1) for key, member in value.items()}
    if depth > 1 and not partial:
        return members
    stored = StoredState(members, source, fits=fits)
    if (versions := getattr(value, "_metadata", None)) is not None:  # those of the modules, which torch writes
        stored._metadata = versions  # type: ignore[attr-defined]
    return stored


NAMINGS = ("auto", "1.12")

PartNumbers = tuple[int, ...]
"""The numbers in the name of a part: ``(mp,)``, ``(pp, tp)`` or ``(pp, tp, rdp)``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Where a process stands in its job, and how large that is along each axis."""

    pp: int = 0
    tp: int = 0
    rdp: int = 0
    pp_size: int = 1
    tp_size: int = 1
    rdp_size: int = 1

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Pipeline, tensor and reduced-data parallel degree."""
        return self.pp_size, self.tp_size, self.rdp_size

    @property
    def ranks(self) -> tuple[int, int, int]:
        """The ranks along the same axes."""
        return self.pp, self.tp, self.rdp


def format_part_path(f: str, place: RankPlace, *, v3: bool = False, naming: str = "auto") -> str:
    """The path of the part that a process saves.

    ``"auto"`` are the names of SMP's documents, ``"1.12"`` those of its last version. With `v3` each data-parallel rank
    has a part of its own, which only the last version knows.

    Raises:
        SMPInvalidArgumentError: There is no such naming.

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
    """The numbers of the part that belongs to a process, in a set whose names have so many."""
    return place.ranks[:numbers]


def infer_sizes(parts: Collection[PartNumbers]) -> tuple[int, int, int]:
    """The (pp, tp, rdp) of the job that left a set of parts, if none is missing.

    >>> infer_sizes([(0, 0), (0, 1)]), infer_sizes([(0,), (1,)]), infer_sizes([(0, 0, 0), (0, 0, 1)])
    ((1, 2, 1), (2, 1, 1), (1, 1, 2))
    """
    axes = [1 + max(axis) for axis in zip(*parts, strict=True)]
    pp, tp, rdp = (*axes, 1, 1)[:3]
    return pp, tp, rdp


def has_same_sizes(parts: Collection[PartNumbers], place: RankPlace) -> bool:
    """Whether a set is of a job of the same degrees. Data parallelism counts where each such rank has a part."""
    count = len(next(iter(parts)))
    return infer_sizes(parts)[:count] == place.sizes[:count] and (count > 1 or place.tp_size == 1)


MAX_LISTED_PARTS = 8
"""Missing parts that an error names, at most."""


def find_missing_parts(parts: Collection[PartNumbers], sizes: Sequence[int]) -> list[PartNumbers]:
    """The first parts that are missing of a set of a job of these degrees, along each axis that the names have.

    >>> find_missing_parts([(0, 0), (0, 1), (1, 1)], (2, 2)), find_missing_parts([(1,)], (2,))
    ([(1, 0)], [(0,)])
    >>> len(find_missing_parts([(0, 999_999_999)], (1, 10**9)))
    9
    """
    return list(
        itertools.islice((numbers for numbers in _enumerate_parts(sizes) if numbers not in parts), MAX_LISTED_PARTS + 1)
    )


def _enumerate_parts(sizes: Sequence[int]) -> Iterator[PartNumbers]:
    """All numbers of a job, one by one: a stray file may have a date where others have a rank."""
    if not sizes:
        yield ()
        return
    for first in range(sizes[0]):
        for rest in _enumerate_parts(sizes[1:]):
            yield first, *rest


def find_smp_error(parts: Mapping[PartNumbers, str], place: RankPlace, prefix: str) -> SMPCheckpointError | None:
    """What SMP 1.12 raises for these parts in a job of these degrees; None where it loads them.

    It counts files, and compares the number in each name with what the count leaves room for.
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
    """The error for a set of which parts are missing: SMP's own, where it has one, and which parts these are.

    Args:
        prefix: What their names begin with.
        sizes: The degrees of the job that saved them, along each axis that their names have.
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
"""The current process group, if there is one, and what names its job. A later group is another job."""

_save_counters: dict[tuple[str, str, bool], Iterator[int]] = {}
"""(job, checkpoint, v3) -> the numbers of its saves. All ranks that save it count alike."""


def get_save_id(f: str, v3: bool) -> str | None:
    """What names this save: the same on all ranks. None if the ranks of the job cannot agree on that any more."""
    job = get_job_id()
    if job is None:
        return None
    key = job, os.path.abspath(f), v3
    return f"{job}-{next(_save_counters.setdefault(key, itertools.count()))}"


def get_job_id() -> str | None:
    """What names this job: the rank that comes first says it, and nobody waits.

    `smp.init` asks for it, too: later on the process that holds the job's store may have ended. None then, if it was
    not asked for before.
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
            except RuntimeError as error:  # torch has no other one for a store that is gone
                logger.warning("the store of the job is gone: a file is saved without a note of its save: %s", error)
                return None
        _job_ids[:] = [(group, name)]
    return _job_ids[0][1]


MAX_LISTED_TAGS = 10
"""Tags that an error names, at most: the newest."""


def describe_other_checkpoints(path: str) -> str | None:
    """Whose checkpoints lie at a path, and which call reads them, or which path was probably meant, as a sentence; None
    if there is nothing to say.
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
