"""The rank files of a tag: what they hold, and where each tensor lies. A layout derives a class from `RankFiles`."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from xla_ckpt.layouts.by_rank.form import StoredTensor
from xla_ckpt.layouts.by_rank.grid import RankAt, RankGrid
from xla_ckpt.layouts.scanned import ScannedFiles
from xla_ckpt.layouts.torch_save.compared import bytes_inside, same_tensor
from xla_ckpt.layouts.torch_save.zip_reader import TensorAt, read
from xla_ckpt.manifest.arrays import ArrayRecord
from xla_ckpt.manifest.records import FileRecord, UnknownArray
from xla_ckpt.plan.hints import ArrayHint, Hints
from xla_ckpt.sharding.box import Box
from xla_ckpt.sharding.local_array import Piece
from xla_ckpt.sharding.mesh import Mesh
from xla_ckpt.sharding.ranges import runs
from xla_ckpt.storage.base import ReadDirectory
from xla_ckpt.storage.small_files import size_of
from xla_ckpt.tree.nested import Keys, replaced_leaves

if TYPE_CHECKING:
    from xla_ckpt.layouts.by_rank.arrays import Copies, RankArray
    from xla_ckpt.layouts.by_rank.content import Content

_SAMPLE = 4096
"""Bytes of a part of a tensor that are compared."""


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

    def number(self, file: str) -> int:
        """The number of a file in the manifest."""
        if file not in self.numbers:
            self.add(FileRecord(path=file, size=size_of(self.directory, file)))
        return self.numbers[file]

    def read(self, file: str, reference: Callable[[Any], Any] | None = None) -> Any:
        """What a file of torch.save holds (see `zip_reader.read`). Its storages are compared when they are loaded.

        Raises:
            CheckpointError: It is missing or damaged, or is of a kind that is not read.
        """
        return read(self.directory, file, reference, self.storages)

    def look_up(self, tensors: Iterable[StoredTensor]) -> None:  # for derived classes
        """Read where many tensors lie, before `place` is asked for each."""

    def place(self, tensor: StoredTensor) -> TensorAt:  # for derived classes
        """Where exactly a tensor lies.

        Raises:
            CorruptCheckpointError: Its file is missing, or holds another tensor.
        """
        assert tensor.at is not None
        return tensor.at

    def has(self, tensor: StoredTensor) -> bool:  # for derived classes
        """Whether the file of a tensor is there."""
        return True

    def left_out(self, tensor: StoredTensor) -> bool:  # for derived classes
        """Whether a tensor that is not there was left out on purpose, because its master weights stand for it."""
        return False

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

    unfinished = ""
    """What is wrong with a tag that is not complete, with ``{tag}`` for its name; empty if that shows otherwise."""

    lost_rows = "If files of more dp ranks were there once, restore them from a copy. Else load without the optimizer."
    """Why rows of an optimizer may be missing, and what to do."""

    def lost(self, sizes: RankAt) -> str:  # for derived classes
        """Why files of ranks may be missing, of which there should be so many along each axis, and what to do."""
        return "They were lost, or never written: take another tag."

    def grids(self) -> dict[str, RankGrid]:
        """The rank files that are there, by their kind: as large as they would be if none was missing."""
        return {}

    def rank_files(self) -> Mapping[str, RankAt]:
        """All rank files, and whose each is."""
        return {file: at for grid in self.grids().values() for at, file in sorted(grid.paths.items())}

    def checks(self) -> list[Callable[[], object]]:
        """What is looked at before the files are: each raises a `CheckpointError` if something is wrong."""
        return [partial(grid.check, kind, self.lost(grid.sizes)) for kind, grid in self.grids().items()]

    def content(self, hints: Hints) -> Content:
        """What the tag holds. `hints` say what the files do not.

        Raises:
            CheckpointError: It is damaged, or the hints contradict it.
        """
        raise NotImplementedError

    def misfit(self, name: str, copies: Copies, mesh: Mesh, hint: ArrayHint) -> UnknownArray | None:
        """Why a parameter of the model cannot be read, whose split is known; None if it can.

        Args:
            copies: The tensors of all ranks.
            mesh: How these ranks were arranged.
            hint: What the program says of it.

        Raises:
            CorruptCheckpointError: A file is missing, or holds another tensor.
        """
        return None

    def joined(self, array: RankArray) -> ArrayRecord | None:
        """An array whose parts have different sizes, which no split describes; None if there are no such arrays."""
        return None

    def zips(self) -> list[str]:
        """All files of torch.save that belong to the tag."""
        return sorted(name for name in self.names if name.endswith(".pt"))

    def tree(self, path: str, at: RankAt) -> Any:  # for derived classes
        """What a rank file holds, with a `StoredTensor` for each tensor.

        Raises:
            CorruptCheckpointError: It is missing or damaged.
        """
        return replaced_leaves(self.read(path), stored_leaf)


def stored_leaf(_: Keys, leaf: Any) -> Any:
    """A value of a rank file, with a `StoredTensor` for a tensor."""
    return StoredTensor.lying_at(leaf) if isinstance(leaf, TensorAt) else leaf
