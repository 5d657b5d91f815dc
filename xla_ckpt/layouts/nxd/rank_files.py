"""The rank files of a tag of neuronx-distributed: which there are, which are missing, and what they hold."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from xla_ckpt import dtypes
from xla_ckpt.dtypes import DType
from xla_ckpt.errors import CorruptCheckpointError, UnsupportedStateError
from xla_ckpt.layouts.nxd.tags import LEGACY
from xla_ckpt.layouts.torch_save.zip_reader import TensorAt, read
from xla_ckpt.manifest.records import FileRecord
from xla_ckpt.sharding.box import Box
from xla_ckpt.storage.base import Directory

_NAME = re.compile(r"(?:dp_rank_(\d{2,})|full)(?:_ep_rank_(\d{2,}))?_tp_rank_(\d{2,})_pp_rank_(\d{2,})\.pt")
"""``full`` is what neuronx-distributed's converter calls the states of all dp ranks together."""

MAX_NAMED = 6

_CHUNK = 1 << 20
"""Bytes that are compared at a time."""


@dataclass(frozen=True, slots=True, order=True)
class At:
    """Where a rank file stands."""

    pp: int = 0
    dp: int = 0
    ep: int = 0
    tp: int = 0


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a rank file."""

    dtype: DType
    shape: tuple[int, ...]
    expert: bool | None
    """Whether it differs between expert-parallel ranks; None if the file does not say."""

    file: str
    """Where it lies."""

    at: TensorAt | None = None
    """The exact place, where it is known already."""


@dataclass(frozen=True, slots=True)
class RankFiles:
    """The files of one kind (``model``, ``optim``), by where they stand: a full grid."""

    paths: Mapping[At, str]
    sizes: At
    """Number of files along each axis."""


class Scan:
    """A tag directory: its files by name, and by number for a manifest."""

    def __init__(self, directory: Directory) -> None:
        self.directory = directory
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
            self.files.append(FileRecord(file, size, 0, 0))
        return self._numbers[file]

    def place(self, held: StoredTensor) -> TensorAt:
        """Where exactly a tensor lies.

        Raises:
            CorruptCheckpointError: Its file is missing, or holds another tensor.
        """
        if held.at is not None:
            return held.at
        if held.file not in self._places:
            self._places[held.file] = read(self.directory, held.file)
        found = self._places[held.file]
        if not isinstance(found, TensorAt) or (found.dtype, found.shape) != (held.dtype, held.shape):
            raise CorruptCheckpointError(
                "the file of a tensor does not hold it",
                file=held.file,
                expected=f"{held.dtype.name} {held.shape}",
                found=f"{found.dtype.name} {found.shape}" if isinstance(found, TensorAt) else type(found).__name__,
            )
        return found

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

    def _same_bytes(self, a: TensorAt, b: TensorAt) -> bool:
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
        """Those of `rank_files` that are there, whether some are missing or not."""
        found: dict[str, dict[At, str]] = {"model": {}, "optim": {}}
        for name in self.names:
            kind, _, base = name.partition("/")
            match = _NAME.fullmatch(base)
            if kind in found and match is not None:
                dp, ep, tp, pp = (int(g or 0) for g in match.groups())
                found[kind][At(pp, dp, ep, tp)] = name
        kinds = {kind: paths for kind, paths in found.items() if paths}
        sizes = {kind: _sizes(paths) for kind, paths in kinds.items()}
        tp, pp = (max((getattr(s, axis) for s in sizes.values()), default=1) for axis in ("tp", "pp"))
        ep = max((s.ep for s in sizes.values()), default=1)
        for kind, paths in kinds.items():
            size = replace(sizes[kind], tp=tp, pp=pp)
            if kind == "optim" and size.dp == 1 and any("_ep_rank_" in p for p in paths.values()):
                size = replace(size, ep=ep)
            sizes[kind] = size
        return {kind: RankFiles(paths, sizes[kind]) for kind, paths in kinds.items()}

    def check_optimizer(self) -> None:
        """The optimizer is one that can be read.

        Raises:
            UnsupportedStateError: It lies in torch's distributed format.
        """
        if "optim/.metadata" in self.names:
            raise UnsupportedStateError(
                "the optimizer was saved with use_zero1_dcp, which neuronx-distributed itself cannot load",
                file="optim/.metadata",
                hint="Load the model without it.",
            )

    def legacy_files(self) -> RankFiles:
        """The files of the older layout.

        Raises:
            CorruptCheckpointError: Some are missing.
        """
        paths: dict[At, str] = {}
        for name in self.names:
            base = name.removesuffix("/checkpoint.pt")
            match = LEGACY.fullmatch(base)
            if match is not None:
                tp, pp, dp = (int(g or 0) for g in match.groups())
                paths[At(pp, dp, 0, tp)] = name
        grid = RankFiles(paths, _sizes(paths))
        check_grid("tag", grid)
        return grid

    def tree(self, path: str, at: At) -> Any:
        """What a rank file holds, with a `StoredTensor` for each tensor.

        Raises:
            CorruptCheckpointError: It is missing or damaged.
        """
        info = read(self.directory, f"{path}.info.pt") if f"{path}.info.pt" in self.names else {}
        held: dict[int, StoredTensor] = {}

        def reference(tid: int) -> StoredTensor:
            if tid not in held:
                held[tid] = self._referenced(path, at, tid, info.get(tid) if isinstance(info, Mapping) else None)
            return held[tid]

        return _with_held(read(self.directory, path, reference))

    def _referenced(self, path: str, at: At, tid: int, info: Any) -> StoredTensor:
        own = f"{path}.tensors/tensor_{tid}.pt"
        shared = own.replace(f"_ep_rank_{at.ep:02d}_", "_ep_rank_00_", 1) if at.ep else own
        if info is None:
            file = own if own in self.names else shared
            found = read(self.directory, file)
            if not isinstance(found, TensorAt):
                raise CorruptCheckpointError("the file of a tensor does not hold one", file=file)
            return StoredTensor(found.dtype, found.shape, None, file, found)
        try:
            expert = bool(info["expert_model_parallel"])
            dtype = dtypes.dtype(str(info["dtype"]).removeprefix("torch."))
            return StoredTensor(dtype, tuple(map(int, info["shape"])), expert, own if expert else shared)
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptCheckpointError(
                "the description of a tensor is damaged", file=f"{path}.info.pt", found=f"tensor {tid}: {info}"[:200]
            ) from error


def _with_held(value: Any) -> Any:
    if isinstance(value, TensorAt):
        return StoredTensor(value.dtype, value.shape, None, value.file, value)
    if isinstance(value, Mapping):
        return {k: _with_held(v) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with_held(v) for v in value)
    return value


def _sizes(paths: Mapping[At, str]) -> At:
    return At(*(max(getattr(at, axis) for at in paths) + 1 for axis in ("pp", "dp", "ep", "tp")))


def check_grid(kind: str, grid: RankFiles) -> None:
    """Every rank has its file.

    Raises:
        CorruptCheckpointError: Some are missing.
    """
    paths, sizes = grid.paths, grid.sizes
    ranges = (range(n) for n in (sizes.pp, sizes.dp, sizes.ep, sizes.tp))
    count = sizes.pp * sizes.dp * sizes.ep * sizes.tp
    if len(paths) == count:
        return
    if count > 100 * len(paths) + 1000:
        raise CorruptCheckpointError("the numbers of the rank files make no grid", file=kind, found=f"{len(paths)}")
    missing = [at for at in (At(*c) for c in product(*ranges)) if at not in paths]
    raise CorruptCheckpointError(
        f"{len(missing)} of {count} rank files are missing in {kind}",
        file=kind,
        expected=f"all of pp {sizes.pp}, dp {sizes.dp}, ep {sizes.ep}, tp {sizes.tp}",
        found="none for " + listed([f"(dp {m.dp}, ep {m.ep}, tp {m.tp}, pp {m.pp})" for m in missing]),
        hint="They were lost, or never written: neuronx-distributed leaves out the optimizer of expert-parallel ranks "
        "from 1 on unless use_xser is set."
        if sizes.ep > 1
        else "They were lost, or never written: take another tag.",
    )


def listed(names: Sequence[str]) -> str:
    """The first of some names, and how many more there are."""
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more
