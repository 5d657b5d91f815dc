"""Directories of DCP's HuggingFaceStorageWriter: safetensors, a file or several for each rank, and no `.metadata`.

Each file says where its parts begin in the global arrays. No file says how large these are, or how many ranks there
were: an array is taken to end where its last part does, unless the program says that it goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count

from xla_ckpt.dtypes import DType
from xla_ckpt.errors import CorruptCheckpointError, FormatError, naming
from xla_ckpt.files.safetensors import told_offsets
from xla_ckpt.layouts.dcp.files import DcpFiles
from xla_ckpt.layouts.dcp.metadata import KeyPath
from xla_ckpt.layouts.dcp.tags import SHARD, safetensors_shards
from xla_ckpt.layouts.hugging_face import of_unknown_type, quantized, scanned_file
from xla_ckpt.logs import get_logger
from xla_ckpt.manifest.arrays import ArrayRecord, array_record
from xla_ckpt.manifest.records import UnknownArray
from xla_ckpt.manifest.shards import Shard
from xla_ckpt.plan.hints import Hints
from xla_ckpt.sharding.box import Box
from xla_ckpt.tree.parameter_names import program_names

logger = get_logger(__name__)

_LOST = "A file of the directory is missing, or was overwritten."


def sharded_arrays(files: DcpFiles, hints: Hints) -> list[tuple[KeyPath, ArrayRecord | UnknownArray]]:
    """(path, record) of each array of such a directory.

    Raises:
        CorruptCheckpointError: A file is missing or damaged, or parts overlap or are missing.
    """
    names = safetensors_shards(files.names)
    _check_names(names)
    parts: dict[str, tuple[DType, list[Shard]]] = {}
    foreign: dict[str, UnknownArray] = {}
    for name in names:
        with naming(file=name):
            record, head, tensors = scanned_file(files.directory, name)
            starts, number = told_offsets(head), files.add(record)
            for tensor in tensors:
                if tensor.dtype is None:
                    foreign[tensor.name] = of_unknown_type(tensor)
                    continue
                start = starts.get(tensor.name, (0,) * len(tensor.shape))
                dtype, shards = parts.setdefault(tensor.name, (tensor.dtype, []))
                if len(start) != len(tensor.shape) or dtype != tensor.dtype:
                    raise FormatError("a part of an array does not fit to the others", leaf=tensor.name)
                stop = tuple(a + n for a, n in zip(start, tensor.shape, strict=True))
                shards.append(Shard(Box(start, stop), number, tensor.offset))
    arrays: dict[str, ArrayRecord] = {}
    for key, (dtype, shards) in parts.items():
        if len({len(shard.box.stop) for shard in shards}) > 1:
            raise FormatError("the parts of an array have not the same number of dims", leaf=key)
        shape = tuple(map(max, zip(*(shard.box.stop for shard in shards), strict=True)))
        try:
            with naming(leaf=key):
                arrays[key] = array_record(dtype, shape, shards)
        except FormatError as error:
            error.hint = _LOST
            raise
    short = _short(arrays, hints)
    if not hints.arrays:
        logger.warning(
            "no file says how large the arrays are: %d files are there, and each array is taken to end where its last "
            "part in them does",
            len(names),
        )
    unknown = quantized(arrays) | short
    return [((key,), record) for key, record in (arrays | unknown | foreign).items()]


def _check_names(names: list[str]) -> None:
    """Check that no file is missing between others."""
    parts = [tuple(map(int, match.groups())) for name in names if (match := SHARD.fullmatch(name))]
    ranks, models, counts = (set(column) for column in zip(*parts, strict=True))
    if len(counts) > 1:
        raise CorruptCheckpointError(
            "files of two saves lie here", file=names[-1], found=", ".join(f"of {n}" for n in sorted(counts))
        )
    for word, numbers, last in (("shard", ranks, max(ranks)), ("model", models, max(counts))):
        first = next(n for n in count(1) if n not in numbers)
        if first <= last:
            raise CorruptCheckpointError(
                "a file is missing", file=f"{word}-{first:05}", found=f"{len(names)} files", hint=_LOST
            )


def _short(arrays: Mapping[str, ArrayRecord], hints: Hints) -> dict[str, UnknownArray]:
    """The arrays of which the program says that they go on behind what is stored of them."""
    called = program_names(arrays, hints.arrays)
    unknown: dict[str, UnknownArray] = {}
    for key, name in called.items():
        shape, wanted = arrays[key].shape, hints.arrays[name].shape
        if wanted is None or len(wanted) != len(shape) or shape == wanted:
            continue
        if all(a <= b for a, b in zip(shape, wanted, strict=True)):
            unknown[key] = UnknownArray(
                problem="the parts of this array that are stored end before the array does",
                expected=str(list(wanted)),
                found=str(list(shape)),
                hint=_LOST,
            )
    return unknown
