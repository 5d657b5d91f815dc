"""The chunk grid of an array that many ranks write, and the files of its chunks. Pure.

zarr cuts an array into chunks of one shape, and a file contains one chunk. Each rank writes whole chunks only, so the
chunks must divide what each rank writes: along each dim a chunk is as long as the greatest common divisor of all
positions at which some rank's part begins or ends. The ends of the array itself do not count, since the last chunk is
padded.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from xla_ckpt.core.files.file_layout import ZarrChunk
from xla_ckpt.core.plan.save_plan import FileEntry, FilePlan, RegionSource
from xla_ckpt.core.sharding.box import Box
from xla_ckpt.core.sharding.memory_layout import compute_runs
from xla_ckpt.errors import UnsupportedStateError

MAX_CHUNK_BYTES = 1 << 26
"""Bytes of a chunk, at most, where no rank cuts the rows, unless a single row has more."""

MAX_RUNS = 1 << 16
"""So many runs of bytes a rank writes of one array. Only parts that fit no reasonable grid have more."""

Steps = tuple[int, ...]
"""For each dim a number that divides all positions at which an array is cut along it; 0 where it is not cut."""


def compute_steps(boxes: Iterable[Box], shape: Sequence[int]) -> Steps:
    """The largest steps for some parts of an array.

    >>> compute_steps([Box((0, 0), (8, 3)), Box((24, 0), (30, 3))], (30, 3))
    (8, 0)
    """
    steps = [0] * len(shape)
    for box in boxes:
        for dim, n in enumerate(shape):
            steps[dim] = math.gcd(steps[dim], box.start[dim], box.stop[dim] % n if n else 0)
    return tuple(steps)


RankParts = Mapping[str, Any]
"""What a rank tells of what it writes, as JSON: leaf path -> the shape of the array, and (start, stop) of each part."""


@dataclass(frozen=True, slots=True)
class JobChunkGrid:
    """How the ranks of a job cut the arrays, and which parts several of them write."""

    steps: Mapping[str, Steps] = field(default_factory=dict)
    """Of each array that is cut."""

    first_writers: Mapping[tuple[str, Box], int] = field(default_factory=dict)
    """(leaf path, part) -> the first rank that writes it, where ranks write the same that do not know of each other."""

    @classmethod
    def from_rank_parts(cls, rank_parts: Sequence[RankParts]) -> JobChunkGrid:
        """That of ranks which have told this, in their order.

        Raises:
            UnsupportedStateError: Parts of two ranks overlap and are not the same: both would write some chunks.

        >>> parts = [{"w": [[8], [[[low], [low + 4]]]]} for low in (0, 4, 4)]
        >>> grid = JobChunkGrid.from_rank_parts(parts)
        >>> grid.steps, [(str(box), rank) for (_, box), rank in grid.first_writers.items()]
        ({'w': (4,)}, [('[4:8]', 1)])
        """
        shapes: dict[str, Sequence[int]] = {}
        ranks: dict[str, dict[Box, list[int]]] = {}
        for rank, of_rank in enumerate(rank_parts):
            for leaf, (shape, parts) in of_rank.items():
                if shapes.setdefault(leaf, shape) == shape:  # else the merge of the records says so, with all details
                    for start, stop in parts:
                        ranks.setdefault(leaf, {}).setdefault(Box(tuple(start), tuple(stop)), []).append(rank)
        steps = {leaf: compute_steps(boxes, shapes[leaf]) for leaf, boxes in ranks.items()}
        for leaf, boxes in ranks.items():
            if len(boxes) > 1:
                _check_disjoint(
                    leaf, boxes, [step or max(n, 1) for step, n in zip(steps[leaf], shapes[leaf], strict=True)]
                )
        return cls(
            steps={leaf: of_leaf for leaf, of_leaf in steps.items() if any(of_leaf)},
            first_writers={
                (leaf, box): by[0] for leaf, boxes in ranks.items() for box, by in boxes.items() if len(by) > 1
            },
        )

    def to_json(self) -> list[Any]:
        """It as plain JSON."""
        return [self.steps, [[leaf, box.start, box.stop, rank] for (leaf, box), rank in self.first_writers.items()]]

    @classmethod
    def from_json(cls, content: Any) -> JobChunkGrid:
        """What `to_json` has given."""
        steps, first = content
        return cls(
            steps={leaf: tuple(of_leaf) for leaf, of_leaf in steps.items()},
            first_writers={(leaf, Box(tuple(start), tuple(stop))): rank for leaf, start, stop, rank in first},
        )


def _check_disjoint(leaf: str, boxes: Mapping[Box, Sequence[int]], cell: Sequence[int]) -> None:
    """Refuse parts (-> the ranks that have them) of which two overlap. All of them consist of cells of this shape."""
    seen: dict[tuple[int, ...], Box] = {}
    for box in boxes:
        spans = [range(a // n, -(-b // n)) for a, b, n in zip(box.start, box.stop, cell, strict=True)]
        if math.prod(map(len, spans)) > MAX_RUNS:
            continue  # the rank that has it refuses to write it, by `plan_chunk_files`
        for at in itertools.product(*spans):
            if (other := seen.setdefault(at, box)) is not box:
                parts = " and ".join(f"{part} on rank {boxes[part][0]}" for part in (other, box))
                raise UnsupportedStateError(
                    "parts of this array overlap and are not the same: two ranks would write some of its chunks",
                    leaf=leaf,
                    expected="parts that are the same, or have no element in common",
                    found=parts,
                    hint="Split it over one mesh on all ranks; or let one of the groups save it under another name.",
                )


def compute_chunk_shape(shape: Sequence[int], itemsize: int, steps: Steps) -> tuple[int, ...]:
    """The shape of the chunks of an array.

    >>> compute_chunk_shape((30, 4), 4, (8, 0)), compute_chunk_shape((1 << 25, 4), 4, (0, 2))
    ((8, 4), (8388608, 2))
    """
    chunk = [step or n for step, n in zip(steps, shape, strict=True)]
    if chunk and not steps[0]:
        count = -(-math.prod(chunk) * itemsize // MAX_CHUNK_BYTES) or 1
        chunk[0] = max(-(-chunk[0] // count), 1)
    return tuple(chunk)


def plan_chunk_files(
    name: str,
    leaf: str,
    box: Box,
    itemsize: int,
    *,
    chunk: Sequence[int],
    source: RegionSource | None,
    copy: bool = False,
    suffix: str = "",
) -> Iterator[FilePlan]:
    """The files of the chunks that a part of an array consists of.

    Args:
        name: What orbax calls the array.
        box: The part. It ends where chunks do, or the array.
        itemsize: Bytes of an element.
        source: Where the bytes of the part are, in C order; None if they are read from a tag.
        copy: Whether the manifest finds the elements in other files.
        suffix: Ends the names of the files, if they are none of orbax's.

    Raises:
        UnsupportedStateError: The part would be scattered over too many runs of bytes.
    """
    spans = [range(a // c, -(-b // c)) for a, b, c in zip(box.start, box.stop, chunk, strict=True)]
    count = 0
    for cell in itertools.product(*spans):
        low = tuple(i * n for i, n in zip(cell, chunk, strict=True))
        frame = Box(low, tuple(a + n for a, n in zip(low, chunk, strict=True)))
        part = Box(low, tuple(map(min, frame.stop, box.stop)))
        places: list[tuple[int, int]] = []
        sources, entries = [], []
        for region, row in enumerate(_iterate_runs(part, frame, *(() if source is None else (box,)))):
            places.append((compute_runs(row, frame, itemsize).offset, row.size * itemsize))
            entries.append(FileEntry(leaf=leaf, box=row, region=region, is_copy=copy))
            if source is not None:
                offset = source.offset + compute_runs(row, box, itemsize).offset
                sources.append(
                    RegionSource(leaf=source.leaf, shard_index=source.shard_index, offset=offset, nbytes=places[-1][1])
                )
            count += 1
            if count > MAX_RUNS:
                raise UnsupportedStateError(
                    "the ranks' parts of this array fit no grid of chunks that all are of one shape",
                    leaf=leaf,
                    expected="parts that a chunk of a reasonable size divides",
                    found=f"chunks of {list(chunk)}",
                    hint='Save with layout="native", and convert the tag.',
                )
        yield FilePlan(
            path=f"{name}/{'.'.join(map(str, cell)) or '0'}{suffix}",
            layout=ZarrChunk(tuple(places), frame.size * itemsize),
            sources=tuple(sources),
            entries=tuple(entries),
        )


def _iterate_runs(part: Box, *buffers: Box) -> Iterator[Box]:
    """The parts of a box of which each is one run of elements in all of some buffers that hold the box, in order."""
    outer = max((d for d, n in enumerate(part.shape) if any(n != buffer.shape[d] for buffer in buffers)), default=0)
    for at in itertools.product(*(range(a, b) for a, b in zip(part.start[:outer], part.stop[:outer], strict=True))):
        yield Box((*at, *part.start[outer:]), (*(i + 1 for i in at), *part.stop[outer:]))
