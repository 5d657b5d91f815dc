"""From boxes to bytes: where a region lies in a C-ordered buffer, and how to take it in bounded pieces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from xla_ckpt.sharding.box import Box


@dataclass(frozen=True, slots=True)
class Runs:
    """A region of a C-ordered buffer as equally long runs of contiguous bytes.

    ``counts[i]`` runs lie ``strides[i]`` bytes apart along each outer dim; one run of `nbytes` starts at `offset`.
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


def runs(region: Box, buffer: Box, itemsize: int) -> Runs:
    """How `region` lies in a buffer that holds `buffer` in C order.

    >>> runs(Box((1, 0), (3, 4)), Box.whole((4, 4)), 2)
    Runs(offset=8, nbytes=16, counts=(), strides=())
    >>> runs(Box((0, 1), (2, 3)), Box.whole((4, 4)), 2)
    Runs(offset=2, nbytes=4, counts=(2,), strides=(8,))
    """
    inner = region.relative_to(buffer)
    shape = buffer.shape
    steps = [itemsize] * len(shape)
    for d in range(len(shape) - 2, -1, -1):
        steps[d] = steps[d + 1] * shape[d + 1]
    offset = sum(a * s for a, s in zip(inner.start, steps, strict=True))
    nbytes, d = itemsize, len(shape) - 1
    while d >= 0 and nbytes == steps[d]:  # dim d continues the run as long as all dims behind it are whole
        nbytes *= inner.shape[d]
        d -= 1
        if d >= 0 and inner.shape[d + 1] != shape[d + 1]:
            break
    outer = [(inner.shape[i], steps[i]) for i in range(d + 1) if inner.shape[i] != 1]
    return Runs(offset, nbytes, tuple(c for c, _ in outer), tuple(s for _, s in outer))


def pieces(region: Box, buffer: Box, itemsize: int, max_span: int) -> Iterator[Box]:
    """Cut `region` so that each part spans at most `max_span` bytes of the buffer (single elements may span more).

    Parts come in the order of their first byte, and together they are `region`.
    """
    if region.size == 0:
        return
    how = runs(region, buffer, itemsize)
    dim = next((d for d, n in enumerate(region.shape) if n > 1), None)
    if how.span <= max_span or dim is None:
        yield region
        return
    first, last = region.start[dim], region.stop[dim]
    one_row = runs(region.along(dim, first, first + 1), buffer, itemsize).span
    step = runs(region.along(dim, first, first + 2), buffer, itemsize).span - one_row
    rows = 1 if one_row > max_span else 1 + (max_span - one_row) // step
    for low in range(first, last, rows):
        yield from pieces(region.along(dim, low, min(low + rows, last)), buffer, itemsize, max_span)
