"""Memory layout of regions: strides, contiguous byte runs, and strided memory of a program.

`compute_runs` converts a box in a C-ordered buffer to runs of bytes. `split_by_span` splits a region into parts of
bounded span. `StridedMemory` describes an array at an address, to detect aliases.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from xla_ckpt.core.lightweight import slots_dataclass
from xla_ckpt.core.sharding.box import Box


@dataclass(frozen=True, slots=True)
class ByteRuns:
    """A region of a C-ordered buffer as equally long runs of contiguous bytes.

    ``counts[i]`` runs are ``strides[i]`` bytes apart along each outer dim. The first run of `run_bytes` starts at
    `offset`. Instances are created several times per read and per written region, so the class is not `kw_only`.
    """

    offset: int
    """Byte offset of the first run in the buffer."""

    run_bytes: int
    """Bytes of one run."""

    counts: tuple[int, ...]
    """Number of runs along each outer dim, outermost first. Empty for a single run."""

    strides: tuple[int, ...]
    """Bytes from one run to the next along each outer dim."""

    @property
    def is_contiguous(self) -> bool:
        """True if the region is one run."""
        return not self.counts

    @property
    def span(self) -> int:
        """Number of bytes from the first byte of the region to one past its last."""
        return self.run_bytes + sum((c - 1) * s for c, s in zip(self.counts, self.strides, strict=True))

    @property
    def total_bytes(self) -> int:
        """Number of bytes in the region."""
        return self.run_bytes * prod(self.counts)


def compute_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Return the strides of a C-ordered buffer: the bytes from one element to the next, along each dim.

    >>> compute_strides((2, 3, 4), 2)
    (24, 8, 2)
    """
    steps = []
    step = itemsize
    for size in reversed(shape):
        steps.append(step)
        step *= size
    steps.reverse()
    return tuple(steps)


def compute_runs(region: Box, buffer: Box, itemsize: int) -> ByteRuns:
    """Return the byte runs of `region` in a C-ordered buffer that contains the elements of `buffer`.

    >>> compute_runs(Box((1, 0), (3, 4)), Box.from_shape((4, 4)), 2)
    ByteRuns(offset=8, run_bytes=16, counts=(), strides=())
    >>> compute_runs(Box((0, 1), (2, 3)), Box.from_shape((4, 4)), 2)
    ByteRuns(offset=2, run_bytes=4, counts=(2,), strides=(8,))
    """
    if region is buffer or region == buffer:  # the whole buffer, as for nearly every array
        return _create_single_run(region.size * itemsize)
    first = region.relative_to(buffer).start
    shape, extent = region.shape, buffer.shape
    steps = compute_strides(extent, itemsize)
    offset = sum(i * step for i, step in zip(first, steps, strict=True))
    # From the innermost dim outwards: a dim extends the run as long as the region spans the buffer in all inner dims.
    # The first dim that it does not span still belongs to the run, because its own elements are adjacent.
    nbytes, outer = itemsize, len(shape)
    while outer > 0:
        outer -= 1
        nbytes *= shape[outer]
        if shape[outer] != extent[outer]:
            break
    # A dim of one element repeats nothing. If it were counted, a contiguous region would look scattered.
    repeated = [dim for dim in range(outer) if shape[dim] != 1]
    return ByteRuns(offset, nbytes, tuple(shape[dim] for dim in repeated), tuple(steps[dim] for dim in repeated))


@functools.lru_cache(maxsize=4096)
def _create_single_run(nbytes: int) -> ByteRuns:
    """Return the run of a whole buffer of `nbytes` bytes."""
    return ByteRuns(0, nbytes, (), ())


def split_by_span(region: Box, buffer: Box, itemsize: int, max_span: int) -> Iterator[Box]:
    """Split `region` so that each part spans at most `max_span` bytes of the buffer (single elements may span more).

    Parts are yielded in the order of their first byte, and together they are `region`.
    """
    if region.size == 0:
        return
    dim = next((d for d, n in enumerate(region.shape) if n > 1), None)
    if dim is None or compute_runs(region, buffer, itemsize).span <= max_span:
        yield region
        return
    # The outermost dim that can be split is split into groups of rows. Each further row adds the same number of bytes
    # to the span. If a single row spans too much, every row is split again, along its next dim.
    first, last = region.start[dim], region.stop[dim]
    one_row = compute_runs(region.slice_dim(dim, first, first + 1), buffer, itemsize).span
    further_row = compute_runs(region.slice_dim(dim, first, first + 2), buffer, itemsize).span - one_row
    rows = 1 if one_row > max_span else 1 + (max_span - one_row) // further_row
    for low in range(first, last, rows):
        yield from split_by_span(region.slice_dim(dim, low, min(low + rows, last)), buffer, itemsize, max_span)


HOST_MEMORY = "host"
"""Memory space of the process. A torch tensor may share it with a numpy array."""


@slots_dataclass()
class StridedMemory:
    """Elements of an array in the memory of the program."""

    memory_space: Hashable
    """Identifier of the memory. Addresses in different memory spaces are unrelated."""

    address: int
    """Address of the first element (bytes)."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Bytes from one element to the next, along each dim."""

    itemsize: int

    @property
    def span(self) -> tuple[int, int]:
        """Address of the lowest byte, and one past the highest.

        >>> StridedMemory("host", 100, (2, 3), (-16, 4), 4).span
        (84, 112)
        """
        reach = [(n - 1) * step for n, step in zip(self.shape, self.strides, strict=True)]
        return self.address + sum(r for r in reach if r < 0), self.address + sum(
            r for r in reach if r > 0
        ) + self.itemsize

    def slice_box(self, box: Box) -> StridedMemory:
        """Return the memory of a region of the array."""
        if box.shape == self.shape:
            return self
        first = sum(low * step for low, step in zip(box.start, self.strides, strict=True))
        return StridedMemory(self.memory_space, self.address + first, box.shape, self.strides, self.itemsize)

    @property
    def has_distinct_elements(self) -> bool:
        """True if the strides show that no two elements share memory.

        >>> StridedMemory("host", 0, (4, 3), (0, 4), 4).has_distinct_elements
        False
        >>> StridedMemory("host", 0, (4, 3), (4, 16), 4).has_distinct_elements
        True
        """
        if 0 in self.shape:
            return True
        reach = self.itemsize
        for step, n in sorted((abs(step), n) for step, n in zip(self.strides, self.shape, strict=True) if n > 1):
            if step < reach:
                return False
            reach += (n - 1) * step
        return True


def create_contiguous(memory_space: Hashable, address: int, shape: Sequence[int], itemsize: int) -> StridedMemory:
    """Return the memory of an array in C order.

    >>> create_contiguous("host", 64, (2, 3), 4).strides
    (12, 4)
    """
    return StridedMemory(memory_space, address, tuple(shape), compute_strides(shape, itemsize), itemsize)
