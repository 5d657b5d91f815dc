"""The manifest: which arrays, files and values a checkpoint contains, and where their bytes are.

Instances are consistent: constructors check them. Untrusted bytes become a `Manifest` through
`manifest_json.parse_manifest`, and foreign formats through their `scan` functions. Reading and verifying finds out
whether the payload agrees.
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
"""The format version that this library writes; it reads this and all older ones."""

NAME_PLACEHOLDER = "{own name}"
"""Stands in the hint of an `UnreadableArray` for a regular expression that finds the array."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestHeader:
    """The first line of a manifest: what a listing of tags needs, covered by a digest of its own."""

    tag: str
    """Name under which it was saved (a renamed directory answers to its new name)."""

    sequence: int
    """Commit number in its root directory, from 1; the newest tag has the greatest."""

    pinned: bool
    """Whether retention leaves it alone."""

    created: str
    """Time of the commit: UTC, ISO 8601."""

    version: int = FORMAT_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """One file of the tag. Of another library's, whose digests nobody knows, path and size are all that is said."""

    path: str
    """Relative to the tag directory, with ``/``."""

    size: int
    """Bytes."""

    framing_bytes: int = 0
    """Number of bytes that no region holds. In the native format, and in files of pickles, they are the first ones."""

    framing_digest: int = EMPTY_DIGEST
    """XXH3-64 of those bytes."""

    regions: tuple[tuple[int, int], ...] = ()
    """(offset, bytes) of each region, ascending, in files that do not hold the digests of their regions themselves."""

    block_digests: tuple[int, ...] = ()
    """Digests of the blocks of all `regions`."""

    def __post_init__(self) -> None:
        parts = self.path.split("/")
        if not self.path or any(p in ("", ".", "..") or "\\" in p or "\0" in p for p in parts):
            raise FormatError("a file of the manifest lies outside of its tag", file=self.path)
        try:
            self.path.encode(errors="surrogateescape")  # as python gives names that are no UTF-8 to the system
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
        """The digests of `regions`."""
        offset, nbytes = np.array(self.regions, np.int64).reshape(-1, 2).T
        return BlockTable.from_regions(offset, nbytes, np.array(self.block_digests, np.uint64))

    @property
    def framing_ranges(self) -> tuple[tuple[int, int], ...]:
        """(offset, bytes) of what `framing_digest` covers."""
        if not self.regions:
            return ((0, self.framing_bytes),)
        ends = [0, *(offset + nbytes for offset, nbytes in self.regions)]
        starts = [*(offset for offset, _ in self.regions), self.size]
        return tuple((a, b - a) for a, b in zip(ends, starts, strict=True) if b > a)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadableArray:
    """An array of a foreign layout that is stored, but of which nothing says how it was split."""

    problem: str
    """Why, as an error says it."""

    hint: str | None = None
    """What to do about it.

    `NAME_PLACEHOLDER` in it stands for an expression that finds this array (see `format_hint`).
    """

    expected: str | None = None
    found: str | None = None

    dtype: DType | None = None
    """Element type of what the ranks have stored; None if it is no tensor on each of them."""

    shape: tuple[int, ...] | None = None
    """Shape of what each rank has stored."""

    tensor_count: int = 0
    """How many such tensors are stored, copies included. 0: it is not one array, but a whole part of the state."""

    @property
    def nbytes(self) -> int:
        """Bytes of all these tensors."""
        return (
            0 if self.dtype is None else self.tensor_count * Box.from_shape(self.shape or ()).size * self.dtype.itemsize
        )

    @classmethod
    def from_error(
        cls, error: CheckpointError, dtype: DType, shape: tuple[int, ...], tensor_count: int = 1
    ) -> UnreadableArray:
        """An array that cannot be read, as an error says: only who wants it hears of that."""
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
        """A new error each time: an error collects facts and frames on its way up, so it must not be raised twice."""
        stored = None if self.shape is None else f"{list(self.shape)} on each rank"
        return IncompatibleCheckpointError(
            self.problem, leaf=leaf, expected=self.expected, found=self.found or stored, hint=self.format_hint(leaf)
        )

    def format_hint(self, leaf: str) -> str | None:
        """The hint, with a regular expression in it that finds the array, and its optimizer's states."""
        name = (schema.get_parameter_path(leaf) or leaf).rpartition("/")[2]
        return self.hint and self.hint.replace(NAME_PLACEHOLDER, re.escape(".".join(name.split(".")[-2:])))

    @staticmethod
    def group_by_reason(arrays: Mapping[str, UnreadableArray]) -> list[dict[str, UnreadableArray]]:
        """Some unknown arrays by leaf path, in groups that have problem and hint in common."""
        groups: dict[tuple[str, str | None], dict[str, UnreadableArray]] = {}
        for leaf, array in arrays.items():
            groups.setdefault((array.problem, array.hint), {})[leaf] = array
        return list(groups.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The index of one tag."""

    header: ManifestHeader
    skeleton: Any
    """The state tree without its arrays, as typed JSON (see `xla_ckpt.core.tree`)."""

    arrays: ArrayTable
    """Array leaves by leaf path."""

    files: tuple[FileRecord, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Leaf path of a tied array -> leaf path under which it is stored."""

    object_files: tuple[int, ...] = ()
    """The file of each pickled object, by its index in the skeleton."""

    mesh: str | None = None
    """The mesh that it was saved from, as `Mesh.parse` reads it, or None. It is for people; nothing depends on it."""

    world_size: int = 1
    """Number of processes that saved it. It is for people, too."""

    unreadable: Mapping[str, UnreadableArray] = field(default_factory=dict)
    """In foreign layouts: arrays that are stored, but of which nothing says how they were split, by leaf path."""

    unwritten: tuple[str, ...] = ()
    """In foreign layouts: leaf paths of arrays that the tag names, and whose bytes were never written."""

    retention: Any = None
    """The policy of retention under which it was committed, as `xla_ckpt.tags.retention` says it; None if none is
    known."""

    module_metadata: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Leaf path of each module's state dict -> module -> its metadata as typed JSON: its version, above all. Empty
    if nothing is known of them: then they are of the versions that the program has."""

    parity: str | None = None
    """What it was to survive when it was saved, by files of a folder that the manifest does not list (docs/repair.md);
    None for nothing, and where an older version saved it."""

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
        """The record of a leaf, tied ones included; None if there is no such leaf.

        Raises:
            IncompatibleCheckpointError: It is stored, but nothing says how it was split.
        """
        if leaf in self.unreadable:
            raise self.unreadable[leaf].create_error(leaf)
        return self.arrays.get(self.aliases.get(leaf, leaf))

    def get_array(self, leaf: str) -> ArrayRecord:
        """The record of a leaf, tied ones included.

        Raises:
            IncompatibleCheckpointError: There is no such leaf, or nothing says how it was split.
        """
        record = self.find_array(leaf)
        if record is None:
            raise IncompatibleCheckpointError("the checkpoint has no such array", leaf=leaf)
        return record

    @property
    def divergent_leaves(self) -> tuple[str, ...]:
        """Leaf paths of the arrays whose replicas differed (see `ArrayRecord.divergent_leaves`)."""
        arrays = self.arrays
        differing = [number for number, form in enumerate(arrays.metadata) if form.is_divergent]
        return tuple(arrays.names[row] for number in differing for row in arrays.rows_by_metadata[number].tolist())

    def describe_divergence(self, leaves: Iterable[str] | None = None) -> str | None:
        """Which arrays have the bytes of a first replica, as a sentence; None if there are none.

        `leaves` are the leaf paths that are asked about, None all of them.
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
        """Bytes of all arrays, tied ones once."""
        return self.arrays.nbytes
