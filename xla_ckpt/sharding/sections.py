"""Sections: parts of one tensor dim, each of them divided over the ranks on its own.

The rows of a fused projection of grouped-query attention are queries, keys and values. A rank has its part of each, one
behind the other, and where there are more ranks than key-value heads several ranks have the same keys and values:
neuronx-distributed's `kv_size_multiplier`. The global array has all of them once. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

_TEXT = re.compile(r"(\d*)\s*(?:x\s*(\d+)(?:/(\d+))?(?:\s+(adjacent))?)?")


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a tensor dim."""

    size: int | None = None
    """Elements in the global array. None: as many as each of the other sections, or all if there is no other."""

    copies: int = 1
    """How many ranks hold each element. With `n` ranks the section is cut into ``n // copies`` parts, and rank `r` has
    part ``r % (n // copies)``: the parts are repeated as a whole, as neuronx-distributed repeats them on trn1. A single
    rank holds the section once, whatever this says."""

    adjacent: bool = False
    """Whether neighbouring ranks hold the same: rank `r` has part ``r // copies``, as on trn2."""

    parts: int | None = None
    """Into how many parts the section may be cut at most: there are no more heads. A stored array says so, for ranks
    other than those that saved it: they hold as many copies as they have to, and `copies` is what the ranks held that
    saved it."""

    def __post_init__(self) -> None:
        if self.size is not None and self.size < 1:
            raise ValueError(f"a section of {self.size} elements")
        if self.copies < 1:
            raise ValueError(f"a section that {self.copies} ranks hold")
        if self.adjacent and self.copies == 1:
            raise ValueError("a section that one rank holds has no adjacent copies")
        if self.parts is not None and self.parts < 1:
            raise ValueError(f"a section of {self.parts} parts")

    @property
    def spec(self) -> int | str:
        """As JSON can hold it, and a person can read it: what `parse_section` reads."""
        size = "" if self.size is None else str(self.size)
        if self.copies == 1:
            return size if self.size is None else self.size
        parts = "" if self.parts is None else f"/{self.parts}"
        return f"{size}x{self.copies}{parts}{' adjacent' if self.adjacent else ''}"

    def held(self, ranks: int) -> int:
        """How many of `ranks` ranks hold each element.

        Raises:
            ValueError: They cannot hold equally many copies.
        """
        if ranks == 1:
            return 1
        copies = self.copies
        # The same number of copies keeps the heads of the queries in their order; but no part may be cut any further.
        if self.parts is not None and (ranks % copies or ranks // copies > self.parts):
            copies = max(1, ranks // self.parts)
        if ranks % copies:
            raise ValueError(f"{copies} copies of a section do not divide {ranks} ranks")
        return copies

    def stored(self, ranks: int) -> Section:
        """The same section as `ranks` ranks that hold it say it to other ranks."""
        if self.copies == 1 or self.parts is not None or ranks == 1:
            return self
        return replace(self, parts=ranks // self.copies)


def parse_section(entry: Any) -> Section:
    """A section as a person writes it: a size, a size and its copies, or copies alone; ``/8`` are its parts.

    Raises:
        ValueError: `entry` has another form.

    >>> parse_section(4096).size, parse_section("1024x4").copies, parse_section("x4 adjacent").adjacent
    (4096, 4, True)
    """
    if type(entry) is int:
        return Section(entry)
    match = _TEXT.fullmatch(entry.strip()) if isinstance(entry, str) else None
    if match is None:
        raise ValueError(f"a section is written like 4096, '1024x4' or '1024x4 adjacent', not {entry!r}")
    size, copies, parts, adjacent = match.groups()
    return Section(
        int(size) if size else None, int(copies or 1), adjacent is not None, None if parts is None else int(parts)
    )


def has_sections(entry: object) -> bool:
    """Whether an entry of a spec ends with a list of sections.

    >>> has_sections(("tp", (8, "4x2"))), has_sections(("tp", 3)), has_sections("tp"), has_sections(None)
    (True, False, False, False)
    """
    return isinstance(entry, list | tuple) and bool(entry) and isinstance(entry[-1], list | tuple)


@dataclass(frozen=True, slots=True)
class Block:
    """Neighbouring elements of one tensor dim that a rank holds."""

    start: int
    """First element in the local tensor."""

    stop: int
    """One past the last element in the local tensor."""

    first: int
    """First element in the global array."""

    copy: int = 0
    """Which of the equal copies this is."""

    copies: int = 1
    adjacent: bool = False


def global_size(n: int, ranks: int, sections: Sequence[Section]) -> int:
    """Elements of a dim in the global array, of which each rank has `n`.

    Raises:
        ValueError: The ranks' parts cannot come from such sections.
    """
    if n < 0:
        raise ValueError(f"a tensor dim of size {n}")
    copies_held = [s.held(ranks) for s in sections]
    sizes = [s.size for s in sections if s.size is not None]
    if sizes:
        expected = sum(size * copies for size, copies in zip(sizes, copies_held, strict=True))
        if expected != n * ranks:
            one = f"; {sizes[0]} strided blocks are ('tp', {sizes[0]}), or tp*{sizes[0]} at the command line"
            raise ValueError(
                f"sections of {_named(sections)} elements are {expected} with all copies, and {ranks} times {n} are "
                f"{n * ranks}; their sizes are those of the whole array{one if len(sizes) == 1 else ''}"
            )
        return sum(sizes)
    if len(sections) > 1 and n % sum(copies_held):
        raise ValueError(
            f"a dim of {n} elements on each rank does not consist of {len(sections)} strided blocks; sections of other "
            "sizes are ('tp', [Q, K, V]), or tp:Q+K+V at the command line"
        )
    if n * ranks * len(sections) % sum(copies_held):
        raise ValueError(f"{ranks} times {n} elements are not {copies_held[0]} copies of anything")
    return n * ranks * len(sections) // sum(copies_held)


def local_size(total: int, ranks: int, sections: Sequence[Section]) -> int:
    """Elements that each rank has of a dim of `total`.

    Raises:
        ValueError: The sections do not add up to it, or do not divide.
    """
    sizes = zip(_sizes(total, sections), sections, strict=True)
    return sum(_part(size, ranks // section.held(ranks)) for size, section in sizes)


def blocks_of(n: int, ranks: int, index: int, sections: Sequence[Section], total: int) -> list[Block]:
    """The blocks that one rank holds of a tensor dim.

    Args:
        n: Elements of the dim in the local tensor.
        ranks: How many ranks the dim is split over.
        index: Which of them this one is.
        sections: What the dim consists of.
        total: Elements of the dim in the global array. They may be fewer than those of all ranks if the last ones are
            padding.

    Raises:
        ValueError: The sections do not fit.
    """
    if total < 0:
        raise ValueError(f"a tensor dim of size {total}")
    if total != global_size(n, ranks, sections):
        # Padding lies behind the last element of the array. In sections nobody could tell where that is.
        if tuple(sections) != (Section(),) or total > n * ranks:
            raise ValueError(
                f"a dim of {total} elements cannot be {ranks} times {n} of which the last ones are padding"
            )
        low = min(index * n, total)
        return [Block(0, min(low + n, total) - low, low)]
    if ranks == 1:
        return [Block(0, n, 0)]  # the sections of a single rank are neighbours
    blocks, at, first = [], 0, 0
    for section, size in zip(sections, _sizes(total, sections), strict=True):
        copies = section.held(ranks)
        parts = ranks // copies
        part, copy = divmod(index, copies) if section.adjacent else (index % parts, index // parts)
        width = _part(size, parts)
        blocks.append(Block(at, at + width, first + part * width, copy, copies, section.adjacent))
        at, first = at + width, first + size
    return blocks


def _sizes(total: int, sections: Sequence[Section]) -> list[int]:
    """The sizes of the sections of a dim."""
    sizes = [_part(total, len(sections)) if s.size is None else s.size for s in sections]
    if sum(sizes) != total:
        raise ValueError(f"sections of {_named(sections)} elements are {sum(sizes)}, and the dim has {total}")
    return sizes


def _part(size: int, parts: int) -> int:
    if size % parts:
        raise ValueError(f"{size} elements of a section do not divide by {parts}")
    return size // parts


def _named(sections: Sequence[Section]) -> str:
    return " + ".join(str(s.spec) for s in sections)
