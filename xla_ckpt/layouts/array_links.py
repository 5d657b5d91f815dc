"""Which elements of the arrays of a job and of Hugging Face's are the same: jobs fuse arrays, and order heads. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from xla_ckpt.errors import IncompatibleCheckpointError
from xla_ckpt.manifest.arrays import ArrayRecord
from xla_ckpt.manifest.records import Manifest
from xla_ckpt.plan.rearrange import Excerpt, Rearranged, rearranged
from xla_ckpt.sharding.box import Box
from xla_ckpt.tree import schema


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayLink:
    """Elements that an array of Hugging Face's and one of a job's have in common: neighbours along one dim."""

    theirs: str
    """The job's name."""

    hf: str
    """Hugging Face's name."""

    dim: int = 0
    """The tensor dim along which the arrays are cut; all others are whole in both."""

    there: int = 0
    """First element along that dim in the job's array."""

    here: int = 0
    """First element along that dim in Hugging Face's array."""

    size: int | None = None
    """Elements along that dim; None for all."""


def query_runs(heads: int, kv_heads: int, copies: int, head_size: int) -> list[tuple[int, int, int]]:
    """(first row there, first row in Hugging Face's order, rows) of the queries that stay together in a job.

    Keys and values lie on its ranks as a whole, once for each copy. The queries of each of their heads are dealt out to
    the copies: they are a multiple of these.

    >>> query_runs(8, 2, 2, 1)
    [(0, 0, 2), (2, 4, 2), (4, 2, 2), (6, 6, 2)]
    """
    if copies == 1 or kv_heads == 1:
        return [(0, 0, heads * head_size)]
    rows = heads // kv_heads // copies * head_size
    firsts = [(head * copies + copy) * rows for copy in range(copies) for head in range(kv_heads)]
    return [(i * rows, first, rows) for i, first in enumerate(firsts)]


def arrays_of_links(
    links: Iterable[ArrayLink], leaves: Mapping[str, str], manifest: Manifest, *, to_hf: bool
) -> dict[str, ArrayRecord]:
    """The records of the new arrays that consist of these elements, by their names.

    Args:
        links: All elements of each new array.
        leaves: Leaf path of each stored array, by its name.
        to_hf: Whether the new names are Hugging Face's, and the stored ones the job's.

    Raises:
        IncompatibleCheckpointError: A part of an array is not stored, or nothing says how it was split.
    """
    parts: dict[str, list[ArrayLink]] = {}
    for link in links:
        parts.setdefault(link.hf if to_hf else link.theirs, []).append(link)
    return {
        name: rearranged(schema.weight(name), _whole(name, of_name, leaves, manifest, to_hf=to_hf), manifest)
        for name, of_name in parts.items()
    }


def _whole(
    name: str, links: list[ArrayLink], leaves: Mapping[str, str], manifest: Manifest, *, to_hf: bool
) -> Rearranged:
    """What a new array consists of. Along the other dims it is as large as those that are stored."""
    olds = [link.theirs if to_hf else link.hf for link in links]
    missing = next((old for old in olds if old not in leaves), None)
    if missing is not None:
        raise IncompatibleCheckpointError("the checkpoint lacks a part of an array", leaf=name, expected=missing)
    wholes = [Box.whole(stored_record(leaves[old], manifest).shape) for old in olds]
    firsts = [(link.here, link.there) if to_hf else (link.there, link.here) for link in links]
    whole = wholes[0]
    if links[0].size is not None:
        stop = max(new + (link.size or 0) for link, (new, _) in zip(links, firsts, strict=True))
        whole = whole.along(links[0].dim, 0, stop)
    pieces = []
    for link, old, stored, (new, at) in zip(links, olds, wholes, firsts, strict=True):
        box, source = whole, stored
        if link.size is not None:
            box, source = whole.along(link.dim, new, new + link.size), stored.along(link.dim, at, at + link.size)
        pieces.append(Excerpt(box, leaves[old], source))
    return Rearranged(shape=whole.shape, parts=tuple(pieces))


def stored_record(leaf: str, manifest: Manifest) -> ArrayRecord:
    """The record of an array that is stored, under whichever of its leaf paths."""
    record = manifest.array(leaf)
    assert record is not None, leaf
    return record
