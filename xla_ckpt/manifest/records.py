"""The manifest: what a tag holds and where its bytes are.

Values of these classes are proven: a `Manifest` that exists is consistent in itself (`manifest_json.parse` is the door
from untrusted bytes, and the `scan` functions of foreign layouts are the other). Whether the payload agrees with it is
found out by `engine.verify`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from xla_ckpt.dtypes import DType
from xla_ckpt.errors import CheckpointError, FormatError, IncompatibleCheckpointError
from xla_ckpt.manifest.arrays import ArrayRecord, Arrays
from xla_ckpt.manifest.digest import NO_DIGEST, BlockTable, block_count
from xla_ckpt.sharding.box import Box
from xla_ckpt.tree import path as paths
from xla_ckpt.tree import schema

FORMAT_VERSION = 2
"""The format version that this library writes; it reads this and all older ones."""

OWN_NAME = "{own name}"
"""Stands in the hint of an `UnknownArray` for a regular expression that finds the array."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
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

    head: int = 0
    """Number of bytes that no region holds. In the native format, and in files of pickles, they are the first ones."""

    digest: int = NO_DIGEST
    """XXH3-64 of those bytes."""

    regions: tuple[tuple[int, int], ...] = ()
    """(offset, bytes) of each region, ascending, in files that do not hold the digests of their regions themselves."""

    digests: tuple[int, ...] = ()
    """Digests of the blocks of all `regions`."""

    def __post_init__(self) -> None:
        parts = self.path.split("/")
        if not self.path or any(p in ("", ".", "..") or "\\" in p or "\0" in p for p in parts):
            raise FormatError("a file of the manifest lies outside of its tag", file=self.path)
        try:
            self.path.encode(errors="surrogateescape")  # as python gives names that are no UTF-8 to the system
        except UnicodeEncodeError as error:
            raise FormatError("a file of the manifest has an impossible name", file=repr(self.path)[:80]) from error
        if not 0 <= self.head <= self.size:
            raise FormatError("impossible file size", file=self.path, found=f"size {self.size}, head {self.head}")
        if not self.regions:
            return
        at = 0
        for offset, nbytes in self.regions:
            if offset < at or nbytes < 1:
                raise FormatError("regions of a file overlap", file=self.path, found=f"{nbytes} bytes at {offset}")
            at = offset + nbytes
        if at > self.size or self.head + sum(nbytes for _, nbytes in self.regions) != self.size:
            raise FormatError("the regions of a file do not add up to it", file=self.path, expected=self.size)
        if len(self.digests) != sum(block_count(nbytes) for _, nbytes in self.regions):
            raise FormatError("a file has not a digest for each block", file=self.path, found=len(self.digests))

    def block_table(self) -> BlockTable:
        """The digests of `regions`."""
        offset, nbytes = np.array(self.regions, np.int64).reshape(-1, 2).T
        return BlockTable.of_regions(offset, nbytes, np.array(self.digests, np.uint64))

    @property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """(offset, bytes) of what `digest` covers."""
        if not self.regions:
            return ((0, self.head),)
        ends = [0, *(offset + nbytes for offset, nbytes in self.regions)]
        starts = [*(offset for offset, _ in self.regions), self.size]
        return tuple((a, b - a) for a, b in zip(ends, starts, strict=True) if b > a)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownArray:
    """An array of a foreign layout that is stored, but of which nothing says how it was split."""

    problem: str
    """Why, as an error says it."""

    hint: str | None = None
    """What to do about it. `OWN_NAME` in it stands for an expression that finds this array (see `advice`)."""

    expected: str | None = None
    found: str | None = None

    dtype: DType | None = None
    """Element type of what the ranks have stored; None if it is no tensor on each of them."""

    shape: tuple[int, ...] | None = None
    """Shape of what each rank has stored."""

    tensors: int = 0
    """How many such tensors are stored, copies included. 0: it is not one array, but a whole part of the state."""

    @property
    def nbytes(self) -> int:
        """Bytes of all these tensors."""
        return 0 if self.dtype is None else self.tensors * Box.whole(self.shape or ()).size * self.dtype.itemsize

    @classmethod
    def because(cls, error: CheckpointError, dtype: DType, shape: tuple[int, ...], tensors: int = 1) -> UnknownArray:
        """An array that cannot be read, as an error says: only who wants it hears of that."""
        expected, actual = (None if fact is None else str(fact) for fact in (error.expected, error.found))
        return cls(
            problem=error.problem,
            hint=error.hint,
            expected=expected,
            found=actual,
            dtype=dtype,
            shape=shape,
            tensors=tensors,
        )

    def error(self, leaf: str) -> IncompatibleCheckpointError:
        """A new error each time: an error collects facts and frames on its way up, so it must not be raised twice."""
        stored = None if self.shape is None else f"{list(self.shape)} on each rank"
        return IncompatibleCheckpointError(
            self.problem, leaf=leaf, expected=self.expected, found=self.found or stored, hint=self.advice(leaf)
        )

    def advice(self, leaf: str) -> str | None:
        """The hint, with a regular expression in it that finds the array, and its optimizer's states."""
        name = (schema.parameter_of(leaf) or leaf).rpartition("/")[2]
        return self.hint and self.hint.replace(OWN_NAME, re.escape(".".join(name.split(".")[-2:])))

    @staticmethod
    def by_reason(unknown: Mapping[str, UnknownArray]) -> list[dict[str, UnknownArray]]:
        """Some unknown arrays by leaf path, in groups that have problem and hint in common."""
        groups: dict[tuple[str, str | None], dict[str, UnknownArray]] = {}
        for leaf, array in unknown.items():
            groups.setdefault((array.problem, array.hint), {})[leaf] = array
        return list(groups.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The index of one tag."""

    head: Head
    skeleton: Any
    """The state tree without its arrays, as typed JSON (see `xla_ckpt.tree`)."""

    arrays: Arrays
    """Array leaves by leaf path."""

    files: tuple[FileRecord, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Leaf path of a tied array -> leaf path under which it is stored."""

    objects: tuple[int, ...] = ()
    """The file of each pickled object, by its index in the skeleton."""

    mesh: str | None = None
    """The mesh that it was saved from, as `Mesh.parse` reads it, or None. It is for people; nothing depends on it."""

    world: int = 1
    """Number of processes that saved it. It is for people, too."""

    unknown: Mapping[str, UnknownArray] = field(default_factory=dict)
    """In foreign layouts: arrays that are stored, but of which nothing says how they were split, by leaf path."""

    left_out: tuple[str, ...] = ()
    """In foreign layouts: leaf paths of arrays that the tag names, and whose bytes were never written."""

    retention: Any = None
    """The policy of retention under which it was committed, as `xla_ckpt.tags.kept` says it; None if none is known."""

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
        for number in self.objects:
            if not 0 <= number < len(self.files):
                raise FormatError("a pickled object lies in no file", found=number)
        self.arrays.check_places([f.size for f in self.files])

    def array(self, leaf: str) -> ArrayRecord | None:
        """The record of a leaf, tied ones included; None if there is no such leaf.

        Raises:
            IncompatibleCheckpointError: It is stored, but nothing says how it was split.
        """
        if leaf in self.unknown:
            raise self.unknown[leaf].error(leaf)
        return self.arrays.get(self.aliases.get(leaf, leaf))

    def required(self, leaf: str) -> ArrayRecord:
        """The record of a leaf, tied ones included.

        Raises:
            IncompatibleCheckpointError: There is no such leaf, or nothing says how it was split.
        """
        record = self.array(leaf)
        if record is None:
            raise IncompatibleCheckpointError("the checkpoint has no such array", leaf=leaf)
        return record

    @property
    def divergent(self) -> tuple[str, ...]:
        """Leaf paths of the arrays whose replicas differed (see `ArrayRecord.divergent`)."""
        arrays = self.arrays
        differing = [number for number, form in enumerate(arrays.forms) if form.divergent]
        return tuple(arrays.names[row] for number in differing for row in arrays.by_form[number].tolist())

    def divergence(self, leaves: Iterable[str] | None = None) -> str | None:
        """Which arrays have the bytes of a first replica, as a sentence; None if there are none.

        `leaves` are the leaf paths that are asked about, None all of them.
        """
        if not (differing := self.divergent):
            return None
        asked = None if leaves is None else {self.aliases.get(leaf, leaf) for leaf in leaves}
        differing = tuple(leaf for leaf in differing if asked is None or leaf in asked)
        if not differing:
            return None
        arrays = f"{len(differing)} array{'s' if len(differing) > 1 else ''}"
        return f"the replicas of {arrays} differed, and the bytes of the first are stored: {paths.listed(differing)}"

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, tied ones once."""
        return self.arrays.nbytes
