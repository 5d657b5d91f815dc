"""The rank files of a tag of neuronx-distributed: which there are, which are missing, and what they hold."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from xla_ckpt import dtypes
from xla_ckpt.dtypes import DType
from xla_ckpt.errors import CorruptCheckpointError, UnsupportedStateError
from xla_ckpt.layouts.nxd.tags import LEGACY, LEGACY_OPTIMIZER
from xla_ckpt.layouts.torch_save.zip_reader import TensorAt, read
from xla_ckpt.manifest.records import FileRecord
from xla_ckpt.sharding.box import Box
from xla_ckpt.sharding.local_array import Piece
from xla_ckpt.sharding.ranges import runs
from xla_ckpt.storage.base import Directory
from xla_ckpt.tree.nested import Keys, replaced_leaves

_NAME = re.compile(r"(?:dp_rank_(\d{2,})|full)(?:_ep_rank_(\d{2,}))?_tp_rank_(\d{2,})_pp_rank_(\d{2,})\.pt")
"""``full`` is what neuronx-distributed's converter calls the states of all dp ranks together."""

LISTED = 6
"""How many names an error lists before it says how many more there are."""

_SAMPLE = 4096
"""Bytes of a part of a tensor that are compared."""

_CHUNK = 1 << 20
"""Bytes that are compared at a time."""


@dataclass(kw_only=True, frozen=True, slots=True, order=True)
class RankAt:
    """Where a rank file stands: the coordinates of the rank that wrote it."""

    pp: int = 0
    dp: int = 0
    ep: int = 0
    tp: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor of a rank file."""

    dtype: DType
    shape: tuple[int, ...]
    expert: bool | None
    """Whether it differs between expert-parallel ranks; None if the file does not say."""

    file: str
    """Where it lies."""

    at: TensorAt | None = None
    """The exact place, if it is known already."""

    @classmethod
    def lying_at(cls, at: TensorAt) -> StoredTensor:
        """The tensor that lies there, of which nobody says whether it is an expert's."""
        return cls(dtype=at.dtype, shape=at.shape, expert=None, file=at.file, at=at)


@dataclass(frozen=True, slots=True)
class RankFiles:
    """The files of one kind (``model``, ``optim``), by where they stand: a full grid."""

    paths: Mapping[RankAt, str]
    sizes: RankAt
    """Number of files along each axis."""


class Scan:
    """A tag directory: its files by name, and by number for a manifest.

    Args:
        directory: The directory.
        below: Where in it the files of the ranks lie (see `NxdTag.below`).
    """

    def __init__(self, directory: Directory, below: str = "") -> None:
        self.directory = directory
        self.below = below
        self.names = frozenset(directory.files())
        self.folders = frozenset(name.rpartition("/")[0] for name in self.names)
        self.files: list[FileRecord] = []
        self._numbers: dict[str, int] = {}
        self._places: dict[str, Any] = {}

    def number(self, file: str) -> int:
        """The number of a file in the manifest."""
        if file not in self._numbers:
            source = self.directory.open(file)
            size = source.size
            source.close()
            self._numbers[file] = len(self.files)
            self.files.append(FileRecord(path=file, size=size, head=0, digest=0))
        return self._numbers[file]

    def place(self, tensor: StoredTensor) -> TensorAt:
        """Where exactly a tensor lies.

        Raises:
            CorruptCheckpointError: Its file is missing, or holds another tensor.
        """
        if tensor.at is not None:
            return tensor.at
        if tensor.file not in self._places:
            self._places[tensor.file] = read(self.directory, tensor.file)
        at = self._places[tensor.file]
        if not isinstance(at, TensorAt) or (at.dtype, at.shape) != (tensor.dtype, tensor.shape):
            raise CorruptCheckpointError(
                "the file of a tensor does not hold it",
                file=tensor.file,
                expected=f"{tensor.dtype.name} {tensor.shape}",
                found=f"{at.dtype.name} {at.shape}" if isinstance(at, TensorAt) else type(at).__name__,
            )
        return at

    def same(self, one: StoredTensor, other: StoredTensor) -> bool:
        """Whether two tensors hold the same bytes: their CRC-32s say so, and data is read only where there are none.

        Raises:
            CorruptCheckpointError: A file is missing, or holds another tensor.
        """
        a, b = self.place(one), self.place(other)
        if (a.file, a.offset) == (b.file, b.offset):
            return True
        if a.crc is not None and b.crc is not None:
            return a.crc == b.crc
        return self._same_bytes(a, b)

    def equal(self, one: StoredTensor, other: StoredTensor) -> bool:
        """Whether two tensors have the same shape and type, and hold the same bytes.

        Raises:
            CorruptCheckpointError: A file is missing, or holds another tensor.
        """
        return (one.shape, one.dtype) == (other.shape, other.dtype) and self.same(one, other)

    def zero(self, tensor: StoredTensor) -> bool:
        """Whether a tensor has nothing but zeros, as its CRC-32 says.

        Raises:
            CorruptCheckpointError: The file is missing, or holds another tensor.
        """
        return self.place(tensor).crc == zlib.crc32(bytes(tensor.dtype.itemsize * math.prod(tensor.shape)))

    def same_part(self, one: StoredTensor, piece: Piece, other: StoredTensor, piece_of_other: Piece) -> bool:
        """Whether parts of two tensors are the same: of whole tensors see `same`, of others some bytes are compared.

        Both pieces have the same box. Copies that have drifted apart differ nearly everywhere.

        Raises:
            CorruptCheckpointError: A file is missing, or holds another tensor.
        """
        if (one.dtype, one.shape) == (other.dtype, other.shape) and piece.local == Box.whole(one.shape) == (
            piece_of_other.local
        ):
            return self.same(one, other)
        samples = []
        for tensor, of in ((one, piece), (other, piece_of_other)):
            at = self.place(tensor)
            where = runs(of.local, Box.whole(tensor.shape), tensor.dtype.itemsize)
            with closing(self.directory.open(at.file)) as source:
                data = bytearray(min(where.nbytes, _SAMPLE))
                middle = (where.nbytes - len(data)) // 2
                if source.read_into(memoryview(data), at.offset + where.offset + middle) < len(data):
                    raise CorruptCheckpointError("a file ends inside of a tensor", file=at.file)
            samples.append(data)
        return samples[0] == samples[1]

    def _same_bytes(self, a: TensorAt, b: TensorAt) -> bool:
        """Whether two tensors of one type and shape are equal, read piece by piece."""
        size = Box.whole(a.shape).size * a.dtype.itemsize
        with ExitStack() as opened:
            sources = [self.directory.open(at.file) for at in (a, b)]
            for source in sources:
                opened.callback(source.close)
            for start in range(0, size, _CHUNK):
                read_ = [bytearray(min(_CHUNK, size - start)) for _ in sources]
                for source, at, data in zip(sources, (a, b), read_, strict=True):
                    if source.read_into(memoryview(data), at.offset + start) < len(data):
                        raise CorruptCheckpointError("a file ends inside of a tensor", file=at.file)
                if read_[0] != read_[1]:
                    return False
        return True

    def rank_files(self) -> dict[str, RankFiles]:
        """The files under ``model`` and ``optim``.

        Raises:
            CorruptCheckpointError: Some are missing.
        """
        grids = self.present()
        for kind, grid in grids.items():
            check_grid(kind, grid)
        return grids

    def present(self) -> dict[str, RankFiles]:
        """Those of `rank_files` that are there. The sizes are those that they would have if none were missing.

        Model and optimizer were written by the same ranks, so what is missing in one of them shows in the other.
        """
        by_kind = self._by_kind()
        own = {kind: _sizes(paths) for kind, paths in by_kind.items()}
        tp = max((size.tp for size in own.values()), default=1)
        pp = max((size.pp for size in own.values()), default=1)
        ep = max((size.ep for size in own.values()), default=1)
        grids = {}
        for kind, paths in by_kind.items():
            sizes = replace(own[kind], tp=tp, pp=pp)
            # Only a ZeRO-1 optimizer has a file for each dp rank, so dp is not compared. Without ZeRO-1 the optimizer
            # of a job with experts has a file for each ep rank, and the model says how many there are.
            if kind == "optim" and sizes.dp == 1 and any("_ep_rank_" in path for path in paths.values()):
                sizes = replace(sizes, ep=ep)
            grids[kind] = RankFiles(paths, sizes)
        return grids

    def _by_kind(self) -> dict[str, dict[RankAt, str]]:
        """The rank files under ``model`` and ``optim``; a kind of which there are none is left out."""
        by_kind: dict[str, dict[RankAt, str]] = {"model": {}, "optim": {}}
        for name in self.names:
            if not name.startswith(self.below):
                continue
            kind, _, base = name.removeprefix(self.below).partition("/")
            match = _NAME.fullmatch(base)
            if kind in by_kind and match is not None:
                dp, ep, tp, pp = (int(number or 0) for number in match.groups())
                by_kind[kind][RankAt(pp=pp, dp=dp, ep=ep, tp=tp)] = name
        return {kind: paths for kind, paths in by_kind.items() if paths}

    def check_optimizer(self) -> None:
        """Refuse an optimizer that cannot be read.

        Raises:
            UnsupportedStateError: It was saved in torch's distributed format.
        """
        if (file := f"{self.below}optim/.metadata") in self.names:
            raise UnsupportedStateError(
                "the optimizer was saved with use_zero1_dcp, which neuronx-distributed itself cannot load",
                file=file,
                hint="Load the model without it.",
            )

    def legacy_files(self) -> RankFiles:
        """The files of the older layout.

        Raises:
            CorruptCheckpointError: Some are missing.
        """
        paths: dict[RankAt, str] = {}
        for name in self.names:
            base = name.removesuffix("/checkpoint.pt")
            match = LEGACY.fullmatch(base)
            if match is not None:
                tp, pp, dp = (int(g or 0) for g in match.groups())
                paths[RankAt(pp=pp, dp=dp, ep=0, tp=tp)] = name
        grid = RankFiles(paths, _sizes(paths))
        check_grid("tag", grid)
        return grid

    def legacy_optimizer(self) -> RankFiles | None:
        """The files that a ZeRO-1 optimizer wrote beside those of the older layout; None if there are none.

        Raises:
            CorruptCheckpointError: Some are missing, or pipeline stages wrote over each other's.
        """
        paths: dict[RankAt, str] = {}
        for name in self.names:
            if (match := LEGACY_OPTIMIZER.fullmatch(name)) is not None:
                dp, tp = map(int, match.groups())
                paths[RankAt(dp=dp, tp=tp)] = name
        if not paths:
            return None
        model = self.legacy_files().sizes
        if model.pp > 1:
            raise CorruptCheckpointError(
                "the names of these optimizer files do not say the pipeline stage, so that the stages wrote over each "
                "other's: the states of all stages but one are lost",
                file=min(paths.values()),
                found=f"{model.pp} pipeline stages",
                hint="Load the model without the optimizer. nxd.save_checkpoint saves all of it.",
            )
        grid = RankFiles(paths, replace(_sizes(paths), tp=max(model.tp, _sizes(paths).tp)))
        check_grid("optim.dp_rank_*", grid)
        return grid

    def tree(self, path: str, at: RankAt) -> Any:
        """What a rank file holds, with a `StoredTensor` for each tensor.

        Raises:
            CorruptCheckpointError: It is missing or damaged.
        """
        info = read(self.directory, f"{path}.info.pt") if f"{path}.info.pt" in self.names else {}
        described = info if isinstance(info, Mapping) else {}
        tensors: dict[int, StoredTensor] = {}

        def reference(tid: int) -> StoredTensor:
            if tid not in tensors:
                tensors[tid] = self._referenced(path, at, tid, described.get(tid))
            return tensors[tid]

        return replaced_leaves(read(self.directory, path, reference), _as_stored)

    def _referenced(self, path: str, at: RankAt, tid: int, info: Any) -> StoredTensor:
        """The tensor of a number in a rank file of the layout ``xser``; `info` is what the file beside it says."""
        own = f"{path}.tensors/tensor_{tid}.pt"
        # A tensor that all expert-parallel ranks have alike lies with the first of them.
        shared = own.replace(f"_ep_rank_{at.ep:02d}_", "_ep_rank_00_", 1) if at.ep else own
        if info is None:
            file = own if own in self.names else shared
            content = read(self.directory, file)
            if not isinstance(content, TensorAt):
                raise CorruptCheckpointError("the file of a tensor does not hold one", file=file)
            return StoredTensor.lying_at(content)
        try:
            expert = bool(info["expert_model_parallel"])
            dtype = dtypes.dtype(str(info["dtype"]).removeprefix("torch."))
            return StoredTensor(
                dtype=dtype, shape=tuple(map(int, info["shape"])), expert=expert, file=own if expert else shared
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptCheckpointError(
                "the description of a tensor is damaged", file=f"{path}.info.pt", found=f"tensor {tid}: {info}"[:200]
            ) from error


def _as_stored(_: Keys, value: Any) -> Any:
    """A tensor that lies in the rank file itself, as a `StoredTensor`; any other value as it is."""
    return StoredTensor.lying_at(value) if isinstance(value, TensorAt) else value


def _sizes(paths: Mapping[RankAt, str]) -> RankAt:
    """Number of files along each axis, as far as they are there."""
    return RankAt(
        pp=1 + max(at.pp for at in paths),
        dp=1 + max(at.dp for at in paths),
        ep=1 + max(at.ep for at in paths),
        tp=1 + max(at.tp for at in paths),
    )


def check_grid(kind: str, grid: RankFiles) -> None:
    """Check that every rank has its file.

    Raises:
        CorruptCheckpointError: Some are missing.
    """
    paths, sizes = grid.paths, grid.sizes
    count = sizes.pp * sizes.dp * sizes.ep * sizes.tp
    if len(paths) == count:
        return
    # A single file with a number in the millions must not make a list of all those before it.
    if count > 100 * len(paths) + 1000:
        raise CorruptCheckpointError("the numbers of the rank files make no grid", file=kind, found=f"{len(paths)}")
    places = (
        RankAt(pp=pp, dp=dp, ep=ep, tp=tp)
        for pp, dp, ep, tp in product(range(sizes.pp), range(sizes.dp), range(sizes.ep), range(sizes.tp))
    )
    missing = [at for at in places if at not in paths]
    raise CorruptCheckpointError(
        f"{len(missing)} of {count} rank files are missing in {kind}",
        file=kind,
        expected=f"all of pp {sizes.pp}, dp {sizes.dp}, ep {sizes.ep}, tp {sizes.tp}",
        found="none for " + listed_names([f"(dp {m.dp}, ep {m.ep}, tp {m.tp}, pp {m.pp})" for m in missing]),
        hint=_LOST_EXPERTS if sizes.ep > 1 else _LOST,
    )


_LOST = "They were lost, or never written: take another tag."
_LOST_EXPERTS = (
    "They were lost, or never written: neuronx-distributed leaves out the optimizer of expert-parallel ranks from 1 on "
    "unless use_xser is set."
)


def listed_names(names: Sequence[str]) -> str:
    """The first of some names, and how many more there are."""
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more
