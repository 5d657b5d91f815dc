"""From boxes to bytes: where a region lies in a C-ordered buffer, and how to take it in bounded pieces."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from xla_ckpt.sharding.box import Box


@dataclass(frozen=True, slots=True)
class Runs:
    """A region of a C-ordered buffer as equally long runs of contiguous bytes.

    ``counts[i]`` runs lie ``strides[i]`` bytes apart along each outer dim; one run of `nbytes` starts at `offset`.
    Made several times for each read and each region that is written, so it is not `kw_only`.
    """

    offset: int
    """Byte offset of the first run in the buffer."""

    nbytes: int
    """Bytes of one run."""

    counts: tuple[int, ...]
    """Runs along each outer dim, outermost first; empty for a single run."""

    strides: tuple[int, ...]
    """Bytes from one run to the next along each outer dim."""

    @property
    def contiguous(self) -> bool:
        """Whether the region is one run."""
        return not self.counts

    @property
    def span(self) -> int:
        """Bytes from the first byte of the region to one past its last."""
        return self.nbytes + sum((c - 1) * s for c, s in zip(self.counts, self.strides, strict=True))

    @property
    def total(self) -> int:
        """Bytes of the region."""
        return self.nbytes * prod(self.counts)


def strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Bytes from one element of a C-ordered buffer to the next, along each dim.

    >>> strides((2, 3, 4), 2)
    (24, 8, 2)
    """
    steps = []
    step = itemsize
    for size in reversed(shape):
        steps.append(step)
        step *= size
    steps.reverse()
    return tuple(steps)


def runs(region: Box, buffer: Box, itemsize: int) -> Runs:
    """How `region` lies in a buffer that holds `buffer` in C order.

    >>> runs(Box((1, 0), (3, 4)), Box.whole((4, 4)), 2)
    Runs(offset=8, nbytes=16, counts=(), strides=())
    >>> runs(Box((0, 1), (2, 3)), Box.whole((4, 4)), 2)
    Runs(offset=2, nbytes=4, counts=(2,), strides=(8,))
    """
    if region is buffer or region == buffer:  # the whole of the buffer: nearly every array of a checkpoint
        return _one_run(region.size * itemsize)
    first = region.relative_to(buffer).start
    shape, extent = region.shape, buffer.shape
    steps = strides(extent, itemsize)
    offset = sum(i * step for i, step in zip(first, steps, strict=True))
    # From the innermost dim outwards: a dim lengthens the run as long as the region is whole in all dims behind it.
    # The first dim in which it is not whole still belongs to the run, because its own elements are neighbours.
    nbytes, outer = itemsize, len(shape)
    while outer > 0:
        outer -= 1
        nbytes *= shape[outer]
        if shape[outer] != extent[outer]:
            break
    # A dim of one element repeats nothing. Counted, it would make a contiguous region look scattered.
    repeated = [dim for dim in range(outer) if shape[dim] != 1]
    return Runs(offset, nbytes, tuple(shape[dim] for dim in repeated), tuple(steps[dim] for dim in repeated))


@functools.lru_cache(maxsize=4096)
def _one_run(nbytes: int) -> Runs:
    """The whole of a buffer of so many bytes."""
    return Runs(0, nbytes, (), ())


def pieces(region: Box, buffer: Box, itemsize: int, max_span: int) -> Iterator[Box]:
    """Cut `region` so that each part spans at most `max_span` bytes of the buffer (single elements may span more).

    Parts come in the order of their first byte, and together they are `region`.
    """
    if region.size == 0:
        return
    dim = next((d for d, n in enumerate(region.shape) if n > 1), None)
    if dim is None or runs(region, buffer, itemsize).span <= max_span:
        yield region
        return
    # The outermost dim that can be cut is cut into groups of rows. A further row adds the same number of bytes to the
    # span each time. If a single row spans too much, every row is cut again, along its next dim.
    first, last = region.start[dim], region.stop[dim]
    one_row = runs(region.along(dim, first, first + 1), buffer, itemsize).span
    further_row = runs(region.along(dim, first, first + 2), buffer, itemsize).span - one_row
    rows = 1 if one_row > max_span else 1 + (max_span - one_row) // further_row
    for low in range(first, last, rows):
        yield from pieces(region.along(dim, low, min(low + rows, last)), buffer, itemsize, max_span)
