"""Where the elements of an array lie in memory, whoever has the memory."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from xla_ckpt.lightweight import lightweight
from xla_ckpt.sharding.box import Box
from xla_ckpt.sharding.ranges import strides

HOST_MEMORY = "host"
"""The memory of the process: a torch tensor may have that of a numpy array."""


@lightweight()
class Strided:
    """The elements of an array in a program's memory."""

    space: Hashable
    """Which memory: addresses of two of them have nothing to do with each other."""

    start: int
    """Address of the first element (bytes)."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Bytes from one element to the next, along each dim."""

    itemsize: int

    @property
    def span(self) -> tuple[int, int]:
        """Address of the lowest byte, and of the one behind the highest.

        >>> Strided("host", 100, (2, 3), (-16, 4), 4).span
        (84, 112)
        """
        reach = [(n - 1) * step for n, step in zip(self.shape, self.strides, strict=True)]
        return self.start + sum(r for r in reach if r < 0), self.start + sum(r for r in reach if r > 0) + self.itemsize

    def cut(self, box: Box) -> Strided:
        """A region of it."""
        if box.shape == self.shape:
            return self
        first = sum(low * step for low, step in zip(box.start, self.strides, strict=True))
        return Strided(self.space, self.start + first, box.shape, self.strides, self.itemsize)

    @property
    def is_apart(self) -> bool:
        """Whether each element has memory of its own, as far as the strides tell.

        >>> Strided("host", 0, (4, 3), (0, 4), 4).is_apart, Strided("host", 0, (4, 3), (4, 16), 4).is_apart
        (False, True)
        """
        if 0 in self.shape:
            return True
        reach = self.itemsize
        for step, n in sorted((abs(step), n) for step, n in zip(self.strides, self.shape, strict=True) if n > 1):
            if step < reach:
                return False
            reach += (n - 1) * step
        return True


def packed(space: Hashable, start: int, shape: Sequence[int], itemsize: int) -> Strided:
    """An array in C order.

    >>> packed("host", 64, (2, 3), 4).strides
    (12, 4)
    """
    return Strided(space, start, tuple(shape), strides(shape, itemsize), itemsize)
