"""Memory layout of regions: strides, contiguous byte runs, and strided memory of a program.

`compute_runs` converts a box in a C-ordered buffer to runs of bytes; `split_by_span` cuts a region into parts of
bounded span. `StridedMemory` describes an array at an address, to find aliases.
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

    ``counts[i]`` runs lie ``strides[i]`` bytes apart along each outer dim; one run of `run_bytes` starts at `offset`.
    Made several times for each read and each region that is written, so it is not `kw_only`.
    """

    offset: int
    """Byte offset of the first run in the buffer."""

    run_bytes: int
    """Bytes of one run."""

    counts: tuple[int, ...]
    """Runs along each outer dim, outermost first; empty for a single run."""

    strides: tuple[int, ...]
    """Bytes from one run to the next along each outer dim."""

    @property
    def is_contiguous(self) -> bool:
        """Whether the region is one run."""
        return not self.counts

    @property
    def span(self) -> int:
        """Bytes from the first byte of the region to one past its last."""
        return self.run_bytes + sum((c - 1) * s for c, s in zip(self.counts, self.strides, strict=True))

    @property
    def total_bytes(self) -> int:
        """Bytes of the region."""
        return self.run_bytes * prod(self.counts)


def compute_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Bytes from one element of a C-ordered buffer to the next, along each dim.

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
    """How `region` lies in a buffer that holds `buffer` in C order.

    >>> compute_runs(Box((1, 0), (3, 4)), Box.from_shape((4, 4)), 2)
    ByteRuns(offset=8, run_bytes=16, counts=(), strides=())
    >>> compute_runs(Box((0, 1), (2, 3)), Box.from_shape((4, 4)), 2)
    ByteRuns(offset=2, run_bytes=4, counts=(2,), strides=(8,))
    """
    if region is buffer or region == buffer:  # the whole of the buffer: nearly every array of a checkpoint
        return _create_single_run(region.size * itemsize)
    first = region.relative_to(buffer).start
    shape, extent = region.shape, buffer.shape
    steps = compute_strides(extent, itemsize)
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
    return ByteRuns(offset, nbytes, tuple(shape[dim] for dim in repeated), tuple(steps[dim] for dim in repeated))


@functools.lru_cache(maxsize=4096)
def _create_single_run(nbytes: int) -> ByteRuns:
    """The whole of a buffer of so many bytes."""
    return ByteRuns(0, nbytes, (), ())


def split_by_span(region: Box, buffer: Box, itemsize: int, max_span: int) -> Iterator[Box]:
    """Cut `region` so that each part spans at most `max_span` bytes of the buffer (single elements may span more).

    Parts come in the order of their first byte, and together they are `region`.
    """
    if region.size == 0:
        return
    dim = next((d for d, n in enumerate(region.shape) if n > 1), None)
    if dim is None or compute_runs(region, buffer, itemsize).span <= max_span:
        yield region
        return
    # The outermost dim that can be cut is cut into groups of rows. A further row adds the same number of bytes to the
    # span each time. If a single row spans too much, every row is cut again, along its next dim.
    first, last = region.start[dim], region.stop[dim]
    one_row = compute_runs(region.slice_dim(dim, first, first + 1), buffer, itemsize).span
    further_row = compute_runs(region.slice_dim(dim, first, first + 2), buffer, itemsize).span - one_row
    rows = 1 if one_row > max_span else 1 + (max_span - one_row) // further_row
    for low in range(first, last, rows):
        yield from split_by_span(region.slice_dim(dim, low, min(low + rows, last)), buffer, itemsize, max_span)


HOST_MEMORY = "host"
"""The memory of the process: a torch tensor may have that of a numpy array."""


@slots_dataclass()
class StridedMemory:
    """The elements of an array in a program's memory."""

    memory_space: Hashable
    """Which memory: addresses of two of them have nothing to do with each other."""

    address: int
    """Address of the first element (bytes)."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Bytes from one element to the next, along each dim."""

    itemsize: int

    @property
    def span(self) -> tuple[int, int]:
        """Address of the lowest byte, and of the one behind the highest.

        >>> StridedMemory("host", 100, (2, 3), (-16, 4), 4).span
        (84, 112)
        """
        reach = [(n - 1) * step for n, step in zip(self.shape, self.strides, strict=True)]
        return self.address + sum(r for r in reach if r < 0), self.address + sum(
            r for r in reach if r > 0
        ) + self.itemsize

    def slice_box(self, box: Box) -> StridedMemory:
        """A region of it."""
        if box.shape == self.shape:
            return self
        first = sum(low * step for low, step in zip(box.start, self.strides, strict=True))
        return StridedMemory(self.memory_space, self.address + first, box.shape, self.strides, self.itemsize)

    @property
    def has_distinct_elements(self) -> bool:
        """Whether each element has memory of its own, as far as the strides tell.

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
    """An array in C order.

    >>> create_contiguous("host", 64, (2, 3), 4).strides
    (12, 4)
    """
    return StridedMemory(memory_space, address, tuple(shape), compute_strides(shape, itemsize), itemsize)
