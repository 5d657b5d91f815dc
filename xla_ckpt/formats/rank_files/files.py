"""`RankFiles`: the rank files of one checkpoint. Read them, locate tensors in them, and compare tensors. Formats derive
from it.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from xla_ckpt.core.manifest.arrays import ArrayRecord
from xla_ckpt.core.manifest.manifest import FileRecord, UnreadableArray
from xla_ckpt.core.plan.hints import ArrayHint, LoadHints
from xla_ckpt.core.sharding.box import Box
from xla_ckpt.core.sharding.local_array import Piece
from xla_ckpt.core.sharding.memory_layout import compute_runs
from xla_ckpt.core.sharding.mesh import Mesh
from xla_ckpt.core.tree.nested import KeyPath, map_leaves
from xla_ckpt.formats.rank_files.file_names import RankCoords, RankGrid
from xla_ckpt.formats.rank_files.layout import StoredTensor
from xla_ckpt.formats.scan import ScannedFiles
from xla_ckpt.formats.torch_save.stored_tensors import is_same_tensor, read_tensor_bytes
from xla_ckpt.formats.torch_save.zip_reader import TensorLocation, read_torch_file
from xla_ckpt.storage.base import ReadDirectory, get_file_size

if TYPE_CHECKING:
    from xla_ckpt.formats.rank_files.arrays import StoredArray, TensorCopies
    from xla_ckpt.formats.rank_files.reading import TagContent


_SAMPLE_BYTES = 4096
"""Bytes of a part of a tensor that are compared."""


class RankFiles(ScannedFiles):
    """A tag directory: its files by name, and by number for a manifest. Layouts derive a class from it.

    Args:
        below: Where in it the files of the ranks lie (see `RankTag.subfolder`).
    """

    def __init__(self, directory: ReadDirectory, subfolder: str = "") -> None:
        super().__init__()
        self.directory = directory
        self.subfolder = subfolder
        self.file_names = frozenset(directory.list_files())

    def get_file_number(self, file: str) -> int:
        """The number of a file in the manifest."""
        if file not in self.file_numbers:
            self.add(FileRecord(path=file, size=get_file_size(self.directory, file)))
        return self.file_numbers[file]

    def read(self, file: str, reference: Callable[[Any], Any] | None = None) -> Any:
        """What a file of torch.save holds (see `zip_reader.read`). Its storages are compared when they are loaded.

        Raises:
            CheckpointError: It is missing or damaged, or is of a kind that is not read.
        """
        return read_torch_file(self.directory, file, reference, self.storages)

    def prefetch_tensors(self, tensors: Iterable[StoredTensor]) -> None:  # for derived classes
        """Read where many tensors lie, before `locate` is asked for each."""

    def locate(self, tensor: StoredTensor) -> TensorLocation:  # for derived classes
        """Where exactly a tensor lies.

        Raises:
            CorruptCheckpointError: Its file is missing, or holds another tensor.
        """
        assert tensor.location is not None
        return tensor.location

    def has(self, tensor: StoredTensor) -> bool:  # for derived classes
        """Whether the file of a tensor is there."""
        return True

    def is_left_out(self, tensor: StoredTensor) -> bool:  # for derived classes
        """Whether a tensor that is not there was left out on purpose, because its master weights stand for it."""
        return False

    def is_same(self, one: StoredTensor, other: StoredTensor) -> bool:
        """Whether two tensors have the same shape and type, and hold the same bytes (see `is_same_tensor`).

        Raises:
            CorruptCheckpointError: A file is missing, or holds another tensor.
        """
        alike = (one.shape, one.dtype) == (other.shape, other.dtype)
        return alike and is_same_tensor(self.directory, self.locate(one), self.locate(other))

    def is_zero(self, tensor: StoredTensor) -> bool:
        """Whether a tensor has nothing but zeros, as its CRC-32 says.

        Raises:
            CorruptCheckpointError: The file is missing, or holds another tensor.
        """
        return self.locate(tensor).crc == zlib.crc32(bytes(tensor.dtype.itemsize * math.prod(tensor.shape)))

    def is_same_part(self, one: StoredTensor, piece: Piece, other: StoredTensor, piece_of_other: Piece) -> bool:
        """Whether parts of two tensors are the same: of whole tensors see `is_same`, of others some bytes are compared.

        Both pieces have the same box. Copies that have drifted apart differ nearly everywhere.

        Raises:
            CorruptCheckpointError: A file is missing, or holds another tensor.
        """
        if (one.dtype, one.shape) == (other.dtype, other.shape) and piece.local_box == Box.from_shape(one.shape) == (
            piece_of_other.local_box
        ):
            return self.is_same(one, other)
        samples = []
        for tensor, of in ((one, piece), (other, piece_of_other)):
            at = self.locate(tensor)
            where = compute_runs(of.local_box, Box.from_shape(tensor.shape), tensor.dtype.itemsize)
            count = min(where.run_bytes, _SAMPLE_BYTES)
            samples.append(read_tensor_bytes(self.directory, at, where.offset + (where.run_bytes - count) // 2, count))
        return samples[0] == samples[1]

    # What a layout says of its files.

    incomplete_message = ""
    """What is wrong with a tag that is not complete, with ``{tag}`` for its name; empty if that shows otherwise."""

    missing_rows_hint = (
        "If files of more dp ranks were there once, restore them from a copy. Else load without the optimizer."
    )
    """Why rows of an optimizer may be missing, and what to do."""

    def explain_missing(self, sizes: RankCoords) -> str:  # for derived classes
        """Why files of ranks may be missing, of which there should be so many along each axis, and what to do."""
        return "They were lost, or never written: take another tag."

    def find_grids(self) -> dict[str, RankGrid]:
        """The rank files that are there, by their kind: as large as they would be if none was missing."""
        return {}

    def list_rank_files(self) -> Mapping[str, RankCoords]:
        """All rank files, and whose each is."""
        return {file: at for grid in self.find_grids().values() for at, file in sorted(grid.paths.items())}

    def list_checks(self) -> list[Callable[[], object]]:
        """What is looked at before the files are: each raises a `CheckpointError` if something is wrong."""
        return [partial(grid.check, kind, self.explain_missing(grid.sizes)) for kind, grid in self.find_grids().items()]

    def read_content(self, hints: LoadHints) -> TagContent:
        """What the tag holds. `hints` say what the files do not.

        Raises:
            CheckpointError: It is damaged, or the hints contradict it.
        """
        raise NotImplementedError

    def find_mismatch(self, name: str, copies: TensorCopies, mesh: Mesh, hint: ArrayHint) -> UnreadableArray | None:
        """Why a parameter of the model cannot be read, whose split is known; None if it can.

        Args:
            copies: The tensors of all ranks.
            mesh: How these ranks were arranged.
            hint: What the program says of it.

        Raises:
            CorruptCheckpointError: A file is missing, or holds another tensor.
        """
        return None

    def join_parts(self, array: StoredArray) -> ArrayRecord | None:
        """An array whose parts have different sizes, which no split describes; None if there are no such arrays."""
        return None

    def list_zip_files(self) -> list[str]:
        """All files of torch.save that belong to the tag."""
        return sorted(name for name in self.file_names if name.endswith(".pt"))

    def read_tree(self, path: str, at: RankCoords) -> Any:  # for derived classes
        """What a rank file holds, with a `StoredTensor` for each tensor.

        Raises:
            CorruptCheckpointError: It is missing or damaged.
        """
        return map_leaves(self.read(path), to_stored_tensor)


def to_stored_tensor(_: KeyPath, leaf: Any) -> Any:
    """A value of a rank file, with a `StoredTensor` for a tensor."""
    return StoredTensor.from_location(leaf) if isinstance(leaf, TensorLocation) else leaf
