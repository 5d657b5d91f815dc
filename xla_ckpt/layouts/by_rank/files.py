"""The rank files of a tag: what they hold, and where each tensor lies. A layout derives a class from `RankFiles`."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from xla_ckpt import dtypes
from xla_ckpt.dtypes import DType
from xla_ckpt.errors import CorruptCheckpointError
from xla_ckpt.layouts.by_rank.grid import RankAt, RankGrid
from xla_ckpt.layouts.scanned import ScannedFiles
from xla_ckpt.layouts.torch_save.compared import bytes_inside, same_tensor
from xla_ckpt.layouts.torch_save.zip_reader import TensorAt, read
from xla_ckpt.manifest.records import FileRecord
from xla_ckpt.plan.hints import Hints
from xla_ckpt.sharding.box import Box
from xla_ckpt.sharding.local_array import Piece
from xla_ckpt.sharding.ranges import runs
from xla_ckpt.storage.base import ReadDirectory
from xla_ckpt.storage.small_files import size_of
from xla_ckpt.tree.nested import Keys, replaced_leaves

if TYPE_CHECKING:
    from xla_ckpt.layouts.by_rank.content import Content

_SAMPLE = 4096
"""Bytes of a part of a tensor that are compared."""


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


class RankFiles(ScannedFiles):
    """A tag directory: its files by name, and by number for a manifest. Layouts derive a class from it.

    Args:
        below: Where in it the files of the ranks lie (see `RankTag.below`).
    """

    def __init__(self, directory: ReadDirectory, below: str = "") -> None:
        super().__init__()
        self.directory = directory
        self.below = below
        self.names = frozenset(directory.files())
        self.folders = frozenset(name.rpartition("/")[0] for name in self.names)
        self._places: dict[str, Any] = {}

    def number(self, file: str) -> int:
        """The number of a file in the manifest."""
        if file not in self.numbers:
            self.add(FileRecord(path=file, size=size_of(self.directory, file)))
        return self.numbers[file]

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
        """Whether two tensors have the same shape and type, and hold the same bytes (see `same_tensor`).

        Raises:
            CorruptCheckpointError: A file is missing, or holds another tensor.
        """
        alike = (one.shape, one.dtype) == (other.shape, other.dtype)
        return alike and same_tensor(self.directory, self.place(one), self.place(other))

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
            count = min(where.nbytes, _SAMPLE)
            samples.append(bytes_inside(self.directory, at, where.offset + (where.nbytes - count) // 2, count))
        return samples[0] == samples[1]

    # What a layout says of its files.

    unfinished = "{tag} has no done marker: its save may not have ended"
    """What is wrong with a tag that is not complete; empty if that shows otherwise."""

    def grids(self) -> dict[str, RankGrid]:
        """The rank files that are there, by their kind: as large as they would be if none was missing."""
        return {}

    def rank_files(self) -> Mapping[str, RankAt]:
        """All rank files, and whose each is."""
        return {file: at for grid in self.grids().values() for at, file in sorted(grid.paths.items())}

    def checks(self) -> list[Callable[[], object]]:
        """What is looked at before the files are: each raises a `CheckpointError` if something is wrong."""
        return [partial(grid.check, kind) for kind, grid in self.grids().items()]

    def content(self, hints: Hints) -> Content:
        """What the tag holds. `hints` say what the files do not.

        Raises:
            CheckpointError: It is damaged, or the hints contradict it.
        """
        raise NotImplementedError

    def zips(self) -> list[str]:
        """All files of torch.save that belong to the tag."""
        return sorted(name for name in self.names if name.endswith(".pt"))

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

        def stored(_: Keys, leaf: Any) -> Any:
            return StoredTensor.lying_at(leaf) if isinstance(leaf, TensorAt) else leaf

        return replaced_leaves(read(self.directory, path, reference), stored)

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
