"""`RankFiles`: read the rank files of one checkpoint, locate tensors in them, and compare tensors.

Formats derive a class from it.
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
"""Number of bytes that are compared of a part of a tensor."""


class RankFiles(ScannedFiles):
    """Files of a checkpoint directory, by name, and by number for a manifest. Formats derive a class from it.

    Args:
        directory: The open checkpoint directory.
        subfolder: Folder of the rank files in it (see `RankTag.subfolder`).
    """

    def __init__(self, directory: ReadDirectory, subfolder: str = "") -> None:
        super().__init__()
        self.directory = directory
        self.subfolder = subfolder
        self.file_names = frozenset(directory.list_files())

    def get_file_number(self, file: str) -> int:
        """Return the number of a file in the manifest, adding the file if necessary."""
        if file not in self.file_numbers:
            self.add(FileRecord(path=file, size=get_file_size(self.directory, file)))
        return self.file_numbers[file]

    def read(self, file: str, reference: Callable[[Any], Any] | None = None) -> Any:
        """Read a torch.save file (see `read_torch_file`). The checksums of its storages are checked when they are
        loaded.

        Raises:
            CheckpointError: It is missing or damaged, or of an unsupported kind.
        """
        return read_torch_file(self.directory, file, reference, self.storages)

    def prefetch_tensors(self, tensors: Iterable[StoredTensor]) -> None:  # for derived classes
        """Read the locations of many tensors before `locate` is called for each."""

    def locate(self, tensor: StoredTensor) -> TensorLocation:  # for derived classes
        """Return the location of a tensor's bytes.

        Raises:
            CorruptCheckpointError: Its file is missing, or contains another tensor.
        """
        assert tensor.location is not None
        return tensor.location

    def has_tensor_file(self, tensor: StoredTensor) -> bool:  # for derived classes
        """Return True if the file of a tensor exists."""
        return True

    def is_left_out(self, tensor: StoredTensor) -> bool:  # for derived classes
        """Return True if a missing tensor was omitted on purpose because its master weights replace it."""
        return False

    def is_same(self, one: StoredTensor, other: StoredTensor) -> bool:
        """Return True if two tensors have the same shape, dtype and bytes (see `is_same_tensor`).

        Raises:
            CorruptCheckpointError: A file is missing, or contains another tensor.
        """
        alike = (one.shape, one.dtype) == (other.shape, other.dtype)
        return alike and is_same_tensor(self.directory, self.locate(one), self.locate(other))

    def is_zero(self, tensor: StoredTensor) -> bool:
        """Return True if a tensor contains only zeros, according to its CRC-32.

        Raises:
            CorruptCheckpointError: The file is missing, or contains another tensor.
        """
        return self.locate(tensor).crc == zlib.crc32(bytes(tensor.dtype.itemsize * math.prod(tensor.shape)))

    def is_same_part(self, one: StoredTensor, piece: Piece, other: StoredTensor, piece_of_other: Piece) -> bool:
        """Return True if parts of two tensors are equal. Whole tensors are compared by `is_same`, other parts by a
        sample.

        Both pieces have the same box. A sample is sufficient because copies that have diverged differ nearly
        everywhere.

        Raises:
            CorruptCheckpointError: A file is missing, or contains another tensor.
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

    # Attributes and methods that formats override.

    incomplete_message = ""
    """Problem of an incomplete checkpoint, with ``{tag}`` for its name; empty if other checks report it."""

    missing_rows_hint = (
        "If files of more dp ranks were there once, restore them from a copy. Else load without the optimizer."
    )
    """Hint for missing optimizer rows: possible reason, and remedy."""

    def explain_missing(self, sizes: RankCoords) -> str:  # for derived classes
        """Return the hint for missing rank files: possible reason, and remedy. `sizes` is the expected number along
        each axis.
        """
        return "They were lost, or never written: take another tag."

    def find_grids(self) -> dict[str, RankGrid]:
        """Return the existing rank files by kind, each as a grid that includes missing files."""
        return {}

    def list_rank_files(self) -> Mapping[str, RankCoords]:
        """Return all rank files with the coordinates of their ranks."""
        return {file: at for grid in self.find_grids().values() for at, file in sorted(grid.paths.items())}

    def list_checks(self) -> list[Callable[[], object]]:
        """Return the checks that run before files are read. Each raises a `CheckpointError` if it fails."""
        return [partial(grid.check, kind, self.explain_missing(grid.sizes)) for kind, grid in self.find_grids().items()]

    def read_content(self, hints: LoadHints) -> TagContent:
        """Read the content of the checkpoint. `hints` provide information that the files do not record.

        Raises:
            CheckpointError: The checkpoint is damaged, or the hints contradict it.
        """
        raise NotImplementedError

    def find_mismatch(self, name: str, copies: TensorCopies, mesh: Mesh, hint: ArrayHint) -> UnreadableArray | None:
        """Return the reason why a model parameter with a known sharding cannot be read; None if it can.

        Args:
            copies: The tensors of all ranks.
            mesh: The mesh of these ranks.
            hint: Information from the program about the parameter.

        Raises:
            CorruptCheckpointError: A file is missing, or contains another tensor.
        """
        return None

    def join_parts(self, array: StoredArray) -> ArrayRecord | None:
        """Return an array whose parts have different sizes, which no sharding describes; None if this is not such an
        array.
        """
        return None

    def list_zip_files(self) -> list[str]:
        """Return all torch.save files of the checkpoint."""
        return sorted(name for name in self.file_names if name.endswith(".pt"))

    def read_tree(self, path: str, at: RankCoords) -> Any:  # for derived classes
        """Read a rank file, with a `StoredTensor` for each tensor.

        Raises:
            CorruptCheckpointError: It is missing or damaged.
        """
        return map_leaves(self.read(path), to_stored_tensor)


def to_stored_tensor(_: KeyPath, leaf: Any) -> Any:
    """Return a value of a rank file, with a `StoredTensor` for a tensor."""
    return StoredTensor.from_location(leaf) if isinstance(leaf, TensorLocation) else leaf
