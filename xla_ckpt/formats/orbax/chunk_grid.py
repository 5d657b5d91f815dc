"""The chunk grid of an array that several ranks write, and the files of its chunks. Pure.

zarr splits an array into chunks of one shape, and a file contains one chunk. Each rank writes complete chunks only, so
chunks must not cross the boundaries between ranks: along each dim the chunk size is the greatest common divisor of all
positions at which the part of a rank begins or ends. The ends of the array itself do not count, since the last chunk is
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
"""Maximum size (bytes) of a chunk if no rank splits the rows, unless a single row is larger."""

MAX_RUNS = 1 << 16
"""Maximum number of runs of bytes that a rank writes of one array. Only irregular parts exceed it."""

Steps = tuple[int, ...]
"""Number per dim that divides all positions at which an array is split along it; 0 where it is not split."""


def compute_steps(boxes: Iterable[Box], shape: Sequence[int]) -> Steps:
    """Return the largest steps for parts of an array.

    >>> compute_steps([Box((0, 0), (8, 3)), Box((24, 0), (30, 3))], (30, 3))
    (8, 0)
    """
    steps = [0] * len(shape)
    for box in boxes:
        for dim, n in enumerate(shape):
            steps[dim] = math.gcd(steps[dim], box.start[dim], box.stop[dim] % n if n else 0)
    return tuple(steps)


RankParts = Mapping[str, Any]
"""Parts that a rank publishes and writes, as JSON: leaf path -> shape of the array, (start, stop) of each part."""


@dataclass(frozen=True, slots=True)
class JobChunkGrid:
    """Chunk grid of the arrays in a job, and the parts that several ranks write."""

    steps: Mapping[str, Steps] = field(default_factory=dict)
    """Steps of each array that is split."""

    first_writers: Mapping[tuple[str, Box], int] = field(default_factory=dict)
    """(leaf path, part) -> the first rank that writes it, for parts that several ranks write independently."""

    @classmethod
    def from_rank_parts(cls, rank_parts: Sequence[RankParts]) -> JobChunkGrid:
        """Return the grid for the published parts of all ranks, in rank order.

        Raises:
            UnsupportedStateError: Parts of two ranks overlap without being equal: both would write some chunks.

        >>> parts = [{"w": [[8], [[[low], [low + 4]]]]} for low in (0, 4, 4)]
        >>> grid = JobChunkGrid.from_rank_parts(parts)
        >>> grid.steps, [(str(box), rank) for (_, box), rank in grid.first_writers.items()]
        ({'w': (4,)}, [('[4:8]', 1)])
        """
        shapes: dict[str, Sequence[int]] = {}
        ranks: dict[str, dict[Box, list[int]]] = {}
        for rank, of_rank in enumerate(rank_parts):
            for leaf, (shape, parts) in of_rank.items():
                if shapes.setdefault(leaf, shape) == shape:  # otherwise the merge of records raises an error
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
        """Return the grid as plain JSON."""
        return [self.steps, [[leaf, box.start, box.stop, rank] for (leaf, box), rank in self.first_writers.items()]]

    @classmethod
    def from_json(cls, content: Any) -> JobChunkGrid:
        """Parse the result of `to_json`."""
        steps, first = content
        return cls(
            steps={leaf: tuple(of_leaf) for leaf, of_leaf in steps.items()},
            first_writers={(leaf, Box(tuple(start), tuple(stop))): rank for leaf, start, stop, rank in first},
        )


def _check_disjoint(leaf: str, boxes: Mapping[Box, Sequence[int]], cell: Sequence[int]) -> None:
    """Check that parts (-> the ranks that hold them) do not overlap. All parts consist of cells of this shape.

    Raises:
        UnsupportedStateError: Two parts overlap.
    """
    seen: dict[tuple[int, ...], Box] = {}
    for box in boxes:
        spans = [range(a // n, -(-b // n)) for a, b, n in zip(box.start, box.stop, cell, strict=True)]
        if math.prod(map(len, spans)) > MAX_RUNS:
            continue  # `plan_chunk_files` raises the error on the rank that holds it
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
    """Return the shape of the chunks of an array.

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
    """Yield the files of the chunks in a part of an array.

    Args:
        name: Name of the array in orbax.
        leaf: Leaf path of the array.
        box: Part of the array. It ends at a chunk boundary, or at the end of the array.
        itemsize: Bytes of an element.
        chunk: Shape of the chunks.
        source: Location of the bytes of the part, in C order; None if they are read from a tag.
        copy: True if the manifest locates the elements in other files.
        suffix: Suffix of the file names, for files that orbax does not read.

    Raises:
        UnsupportedStateError: The part consists of too many runs of bytes.
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
    """Yield the parts of a box, in order, that are one run of elements in each of the buffers that contain the box."""
    outer = max((d for d, n in enumerate(part.shape) if any(n != buffer.shape[d] for buffer in buffers)), default=0)
    for at in itertools.product(*(range(a, b) for a, b in zip(part.start[:outer], part.stop[:outer], strict=True))):
        yield Box((*at, *part.start[outer:]), (*(i + 1 for i in at), *part.stop[outer:]))
