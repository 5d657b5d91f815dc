"""``smp.save`` and ``smp.load``: a file for each model-parallel rank, or one for the whole model.

    checkpoint.pt_{mp_rank}                          without tensor parallelism, as the documents of 1.6 and 1.7 say
    checkpoint.pt_{pp_rank}_{tp_rank}                with it, as later documents say
    checkpoint.pt_{pp_rank}_{tp_rank}.pt             ``naming="1.12"``: what SMP 1.12 writes
    checkpoint.pt_{pp_rank}_{tp_rank}_{rdp_rank}.pt  ``v3=True``
    checkpoint.pt                                    ``partial=False``

All of these are read. A file takes the place of an older one when it is durable. Beside a partial file lies a hidden
note, by which parts of different saves are told apart.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from neuron_compat.smp import job
from neuron_compat.smp.elsewhere import read_otherwise
from neuron_compat.smp.errors import (
    IncompatibleCheckpointFoundError,
    MissingCheckpointFilesError,
    SMPCheckpointError,
    SMPInvalidArgumentError,
)
from neuron_compat.smp.meeting import together
from neuron_compat.smp.parts import Numbers, Place, absent, fits, incomplete, name_of, own_part, refusal, sizes_of
from neuron_compat.smp.saves import save_of
from neuron_compat.smp.sources import Stored
from neuron_compat.smp.stored import StoredState
from xla_ckpt import NoCheckpointError
from xla_ckpt.facade import (
    ALL_PARTS,
    IS_PARTIAL,
    LOAD_INFO,
    PP,
    RANK_AXES,
    SCALERS,
    TP,
    SetPart,
    changed_tensors,
    is_whole,
    load_whole_file,
    parts_at,
    write_part,
    write_whole_file,
)
from xla_ckpt.keywords import known_names


@known_names(torch.save)
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
    place = current_place()
    path = name_of(f, place, v3=v3, naming=naming)
    write_part(obj, path, save_of(f, v3), rank=place.own, sizes=place.sizes, options=options)


@known_names(torch.load)
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
    reading = Reading(
        map_location=map_location, pickle_module=pickle_module, trust=trust_pickle, options=pickle_load_args
    )
    if not partial:
        return _full(f, reading)
    loaded: list[Any] = []

    def prepare() -> None:
        with torch.inference_mode(False):  # inference tensors count no writes, by which `StoredState` sees a change
            loaded.append(_partial(f, reading, current_place(), strict=strict_partitions))

    try:
        together("mp", f"smp.load({f!r})", prepare, guard="All ranks that hold a model together load it.")
    except SMPCheckpointError as error:
        error.rank = None  # it is what all ranks find, and has SMP's own text
        raise
    return loaded[0]


def current_place() -> Place:
    """Where this process stands.

    Raises:
        NotInitializedError: `smp.init` was not called.
    """
    ranks = job.ranks()
    return Place(
        pp=ranks.of("pp"),
        tp=ranks.of("tp"),
        rdp=ranks.of("rdp"),
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
class Reading:
    """How a file is read."""

    map_location: Any = None
    pickle_module: Any = None
    trust: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def value(self, path: str) -> Any:
        """What a file holds, after all of it was compared with its CRC-32s."""
        options = {"map_location": self.map_location or "cpu", **self.options}
        if self.pickle_module is not None:
            options["pickle_module"] = self.pickle_module
        return load_whole_file(path, trust_pickle=self.trust, put=self.put, more=SCALERS, options=options)

    def put(self, storage: torch.Tensor) -> torch.Tensor:
        """A storage where `map_location` wants it."""
        where = self.map_location
        if callable(where):
            moved = where(storage.untyped_storage(), "cpu")
            return storage if moved is None else torch.empty(0, dtype=torch.uint8, device=moved.device).set_(moved)
        if isinstance(where, Mapping):
            where = where.get("cpu")
        return storage if where is None else storage.to(where)


def _full(f: str, reading: Reading) -> Any:
    """A whole checkpoint, which each rank reads for itself."""
    if not os.path.isfile(f):
        parts = parts_at(f)
        hint = f"Partial files of this name: {len(parts)}. Pass partial=True." if parts else read_otherwise(f)
        raise NoCheckpointError("there is no such file", file=f, hint=hint)
    value = reading.value(f)
    for pp, tp in _degrees_in(value):
        place = current_place()
        if (pp, tp) != (place.pp_size, place.tp_size):
            raise SMPCheckpointError(
                f"the file is the part of one rank of a job of pp {pp} and tp {tp}",
                file=f,
                hint="Load the name without the numbers at its end, and with partial=True: all parts fit any job.",
            )
    return as_stored(value, None, fits=True)


def _partial(f: str, reading: Reading, place: Place, *, strict: bool) -> Any:
    """This process' part of a checkpoint; or, of one of another job, what all parts have in common."""
    parts = parts_at(f)
    if not parts:
        error = MissingCheckpointFilesError.of(f)
        full = "There is a full checkpoint of this name: pass partial=False."
        error.details = full if os.path.isfile(f) else read_otherwise(f)
        raise error
    files = {numbers: part.file for numbers, part in parts.items()}
    _check_whole(parts, files, place, f)
    if strict and (refused := refusal(files, place, f)) is not None:
        raise refused
    fits_job = fits(parts, place)
    numbers = own_part(len(next(iter(parts))), place) if fits_job else min(parts)
    value = reading.value(files[numbers])
    _check_degrees(value, files, place, f)
    source = Stored(path=f"{f}{ALL_PARTS}" if os.path.exists(f) else f, trust_pickle=reading.trust)
    return as_stored(value, source, fits=fits_job)


def _check_whole(parts: Mapping[Numbers, SetPart], files: Mapping[Numbers, str], place: Place, f: str) -> None:
    """Refuse a set of which parts are missing: as far as the numbers tell, or what is noted beside the files."""
    noted = next((part.saved for part in parts.values() if part.saved is not None), None)
    sizes = sizes_of(parts)[: len(next(iter(parts)))]
    if noted is not None and not is_whole(parts):
        sizes = tuple(noted.sizes[axis] for axis in RANK_AXES[: len(sizes)])
    if absent(parts, sizes):
        raise incomplete(files, place, f, sizes)


def _check_degrees(value: Any, files: Mapping[Numbers, str], place: Place, f: str) -> None:
    """Refuse a set that lacks parts by what its own files say of the job that saved them."""
    pp, tp, rdp = sizes_of(files)
    for said in _degrees_in(value):
        if said != (pp, tp):
            sizes = (*said, rdp)[: len(next(iter(files)))]
            if absent(files, sizes):
                raise incomplete(files, place, f, sizes)
            raise IncompatibleCheckpointFoundError.of(len(files), place.sizes, sorted(files.values())).at(
                details=f"The files say of themselves that they are of pp={said[0]}, tp={said[1]}."
            )


def _degrees_in(value: Any) -> Iterator[tuple[int, int]]:
    """(pp, tp) of the job, as far as the partial states of models in an object say them."""
    if isinstance(value, Mapping):
        info = value.get(LOAD_INFO)
        if isinstance(info, Mapping) and value.get(IS_PARTIAL) is True:
            pp, tp = (n if type(n := info.get(name)) is int and n > 0 else None for name in (PP, TP))
            if pp is not None and tp is not None:
                yield pp, tp
        for member in value.values():
            if isinstance(member, dict):
                yield from _degrees_in(member)


def as_stored(value: Any, source: Any, *, fits: bool, depth: int = 0) -> Any:
    """The same object, whose dicts know that they are of a checkpoint: it, its members, and every partial state.

    Of a job of other degrees (`fits` is False) partial states lose their tensors: what one rank had of another
    job's parameters is of no use, and must not be taken for the parameters of this one.
    """
    if type(value) not in (dict, OrderedDict):
        return value
    partial = value.get(IS_PARTIAL) is True
    if partial and not fits:
        value = changed_tensors(value, lambda tensor: tensor.to("meta"))  # no elements in memory
    members = {key: as_stored(member, source, fits=fits, depth=depth + 1) for key, member in value.items()}
    if depth > 1 and not partial:
        return members
    stored = StoredState(members, source, fits=fits)
    if (versions := getattr(value, "_metadata", None)) is not None:  # those of the modules, which torch writes
        stored._metadata = versions  # type: ignore[attr-defined]
    return stored
