"""The manifest: the arrays, files and values that a checkpoint contains, and the location of their bytes.

Constructors check that instances are consistent. `manifest_json.parse_manifest` creates a `Manifest` from untrusted
bytes, and the `scan` functions of foreign layouts create one from other formats. Only reading and verification compare
the payload with the manifest.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from xla_ckpt.core.checksum import EMPTY_DIGEST, BlockTable, count_blocks
from xla_ckpt.core.dtypes import DType
from xla_ckpt.core.manifest.arrays import ArrayRecord, ArrayTable
from xla_ckpt.core.sharding.box import Box
from xla_ckpt.core.tree import path as paths
from xla_ckpt.core.tree import schema
from xla_ckpt.errors import CheckpointError, FormatError, IncompatibleCheckpointError

FORMAT_VERSION = 2
"""Format version that is written. This and all older versions can be read."""

NAME_PLACEHOLDER = "{own name}"
"""Placeholder in the hint of an `UnreadableArray` for a regex that matches the array."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestHeader:
    """First line of a manifest: the data needed to list checkpoints, with a separate checksum."""

    tag: str
    """Name under which the checkpoint was saved (a renamed directory is found under its new name)."""

    sequence: int
    """Commit number in the root directory, from 1. The newest checkpoint has the greatest."""

    pinned: bool
    """True if retention must not delete the checkpoint."""

    created: str
    """Time of the commit: UTC, ISO 8601."""

    version: int = FORMAT_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """One file of the checkpoint. Files of other libraries have no checksums, so only path and size are set.

    Raises:
        FormatError: The path, size or regions are invalid. Raised on construction.
    """

    path: str
    """Path relative to the checkpoint directory, with ``/``."""

    size: int
    """Number of bytes."""

    framing_bytes: int = 0
    """Number of bytes outside of all regions. In native files and pickle files these are the first bytes."""

    framing_digest: int = EMPTY_DIGEST
    """XXH3-64 checksum of those bytes."""

    regions: tuple[tuple[int, int], ...] = ()
    """(offset, bytes) of each region, ascending, for files that do not contain the checksums of their regions."""

    block_digests: tuple[int, ...] = ()
    """Checksums of the blocks of all `regions`."""

    def __post_init__(self) -> None:
        parts = self.path.split("/")
        if not self.path or any(p in ("", ".", "..") or "\\" in p or "\0" in p for p in parts):
            raise FormatError("a file of the manifest lies outside of its tag", file=self.path)
        try:
            self.path.encode(errors="surrogateescape")  # Python passes non-UTF-8 names to the system this way
        except UnicodeEncodeError as error:
            raise FormatError("a file of the manifest has an impossible name", file=repr(self.path)[:80]) from error
        if not 0 <= self.framing_bytes <= self.size:
            raise FormatError(
                "impossible file size", file=self.path, found=f"size {self.size}, head {self.framing_bytes}"
            )
        if not self.regions:
            return
        at = 0
        for offset, nbytes in self.regions:
            if offset < at or nbytes < 1:
                raise FormatError("regions of a file overlap", file=self.path, found=f"{nbytes} bytes at {offset}")
            at = offset + nbytes
        if at > self.size or self.framing_bytes + sum(nbytes for _, nbytes in self.regions) != self.size:
            raise FormatError("the regions of a file do not add up to it", file=self.path, expected=self.size)
        if len(self.block_digests) != sum(count_blocks(nbytes) for _, nbytes in self.regions):
            raise FormatError("a file has not a digest for each block", file=self.path, found=len(self.block_digests))

    def build_block_table(self) -> BlockTable:
        """Return the block checksums of `regions`."""
        offset, nbytes = np.array(self.regions, np.int64).reshape(-1, 2).T
        return BlockTable.from_regions(offset, nbytes, np.array(self.block_digests, np.uint64))

    @property
    def framing_ranges(self) -> tuple[tuple[int, int], ...]:
        """(offset, bytes) of the ranges that `framing_digest` covers."""
        if not self.regions:
            return ((0, self.framing_bytes),)
        ends = [0, *(offset + nbytes for offset, nbytes in self.regions)]
        starts = [*(offset for offset, _ in self.regions), self.size]
        return tuple((a, b - a) for a, b in zip(ends, starts, strict=True) if b > a)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadableArray:
    """An array of a foreign layout that is stored, but whose sharding is unknown."""

    problem: str
    """Reason, as used in the error message."""

    hint: str | None = None
    """Suggested fix, as in the error message.

    `NAME_PLACEHOLDER` in it is replaced by a regex that matches this array (see `format_hint`).
    """

    expected: str | None = None
    found: str | None = None

    dtype: DType | None = None
    """Dtype of the stored tensors, or None if some rank did not store a tensor."""

    shape: tuple[int, ...] | None = None
    """Shape of the tensor that each rank stored."""

    tensor_count: int = 0
    """Number of stored tensors, including copies. 0 if the entry is a whole part of the state, not a single array."""

    @property
    def nbytes(self) -> int:
        """Number of bytes of all these tensors."""
        return (
            0 if self.dtype is None else self.tensor_count * Box.from_shape(self.shape or ()).size * self.dtype.itemsize
        )

    @classmethod
    def from_error(
        cls, error: CheckpointError, dtype: DType, shape: tuple[int, ...], tensor_count: int = 1
    ) -> UnreadableArray:
        """Create an entry from an error, which is then raised only if the array is requested."""
        expected, actual = (None if fact is None else str(fact) for fact in (error.expected, error.found))
        return cls(
            problem=error.problem,
            hint=error.hint,
            expected=expected,
            found=actual,
            dtype=dtype,
            shape=shape,
            tensor_count=tensor_count,
        )

    def create_error(self, leaf: str) -> IncompatibleCheckpointError:
        """Return a new error, because an error collects context on its way up and must not be raised twice."""
        stored = None if self.shape is None else f"{list(self.shape)} on each rank"
        return IncompatibleCheckpointError(
            self.problem, leaf=leaf, expected=self.expected, found=self.found or stored, hint=self.format_hint(leaf)
        )

    def format_hint(self, leaf: str) -> str | None:
        """Return the hint with a regex that matches the array and its optimizer states."""
        name = (schema.get_parameter_path(leaf) or leaf).rpartition("/")[2]
        return self.hint and self.hint.replace(NAME_PLACEHOLDER, re.escape(".".join(name.split(".")[-2:])))

    @staticmethod
    def group_by_reason(arrays: Mapping[str, UnreadableArray]) -> list[dict[str, UnreadableArray]]:
        """Group arrays (by leaf path) that have the same problem and hint."""
        groups: dict[tuple[str, str | None], dict[str, UnreadableArray]] = {}
        for leaf, array in arrays.items():
            groups.setdefault((array.problem, array.hint), {})[leaf] = array
        return list(groups.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The index of one checkpoint.

    Raises:
        FormatError: The arrays, files, aliases and objects are inconsistent. Raised on construction.
    """

    header: ManifestHeader
    skeleton: Any
    """State tree without its arrays, as typed JSON (see `xla_ckpt.core.tree`)."""

    arrays: ArrayTable
    """Array leaves by leaf path."""

    files: tuple[FileRecord, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Leaf path of a tied array -> leaf path under which it is stored."""

    object_files: tuple[int, ...] = ()
    """Index of the file of each pickled object, by the object's index in the skeleton."""

    mesh: str | None = None
    """Mesh of the job that saved the checkpoint, in the form of `Mesh.parse`, or None. Informational only."""

    world_size: int = 1
    """Number of processes that saved the checkpoint. Informational only."""

    unreadable: Mapping[str, UnreadableArray] = field(default_factory=dict)
    """Only in foreign layouts: stored arrays whose sharding is unknown, by leaf path."""

    unwritten: tuple[str, ...] = ()
    """Only in foreign layouts: leaf paths of arrays that the checkpoint names, but whose bytes were never written."""

    retention: Any = None
    """Retention policy at the time of the commit, as serialized by `xla_ckpt.tags.retention`, or None if unknown."""

    module_metadata: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Leaf path of each module's state dict -> module -> its metadata as typed JSON, such as its version. Empty if
    unknown: then the versions of the running program are assumed."""

    parity: str | None = None
    """Failures that the checkpoint survives by means of parity files, which the manifest does not list
    (docs/repair.md). None without parity, and in checkpoints of older versions."""

    def __post_init__(self) -> None:
        names = [f.path for f in self.files]
        if len(set(names)) != len(names):
            raise FormatError(
                "a file is listed twice", found=next(n for n, count in Counter(names).items() if count > 1)
            )
        for alias, target in self.aliases.items():
            if alias in self.arrays or target not in self.arrays:
                raise FormatError("a tied array points nowhere", leaf=alias, found=target)
        for number in self.object_files:
            if not 0 <= number < len(self.files):
                raise FormatError("a pickled object lies in no file", found=number)
        self.arrays.check_locations([f.size for f in self.files])

    def find_array(self, leaf: str) -> ArrayRecord | None:
        """Return the record of a leaf, including tied ones, or None if there is no such leaf.

        Raises:
            IncompatibleCheckpointError: The leaf is stored, but its sharding is unknown.
        """
        if leaf in self.unreadable:
            raise self.unreadable[leaf].create_error(leaf)
        return self.arrays.get(self.aliases.get(leaf, leaf))

    def get_array(self, leaf: str) -> ArrayRecord:
        """Return the record of a leaf, including tied ones.

        Raises:
            IncompatibleCheckpointError: There is no such leaf, or its sharding is unknown.
        """
        record = self.find_array(leaf)
        if record is None:
            raise IncompatibleCheckpointError("the checkpoint has no such array", leaf=leaf)
        return record

    @property
    def divergent_leaves(self) -> tuple[str, ...]:
        """Leaf paths of the arrays whose replicas differed (see `ArrayMetadata.is_divergent`)."""
        arrays = self.arrays
        differing = [number for number, form in enumerate(arrays.metadata) if form.is_divergent]
        return tuple(arrays.names[row] for number in differing for row in arrays.rows_by_metadata[number].tolist())

    def describe_divergence(self, leaves: Iterable[str] | None = None) -> str | None:
        """Return a sentence that lists the arrays whose replicas differed, or None if there are none.

        Args:
            leaves: Leaf paths to consider, or None for all.
        """
        if not (differing := self.divergent_leaves):
            return None
        asked = None if leaves is None else {self.aliases.get(leaf, leaf) for leaf in leaves}
        differing = tuple(leaf for leaf in differing if asked is None or leaf in asked)
        if not differing:
            return None
        arrays = f"{len(differing)} array{'s' if len(differing) > 1 else ''}"
        leaves_text = paths.format_leaves(differing)
        return f"the replicas of {arrays} differed, and the bytes of the first are stored: {leaves_text}"

    @property
    def nbytes(self) -> int:
        """Number of bytes of all arrays. Tied arrays count once."""
        return self.arrays.nbytes
