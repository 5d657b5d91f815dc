"""The parts of a partial checkpoint: their names, and what SMP 1.12 says of parts that do not fit. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from neuron_compat.smp.errors import (
    IncompatibleCheckpointFoundError,
    IncompatibleCheckpointRankFoundError,
    SMPCheckpointError,
    SMPInvalidArgumentError,
)

NAMINGS = ("auto", "1.12")

Numbers = tuple[int, ...]
"""The numbers in the name of a part: ``(mp,)``, ``(pp, tp)`` or ``(pp, tp, rdp)``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a process stands in its job, and how large that is along each axis."""

    pp: int = 0
    tp: int = 0
    rdp: int = 0
    pp_size: int = 1
    tp_size: int = 1
    rdp_size: int = 1

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Pipeline, tensor and reduced-data parallel degree."""
        return self.pp_size, self.tp_size, self.rdp_size

    @property
    def own(self) -> tuple[int, int, int]:
        """The ranks along the same axes."""
        return self.pp, self.tp, self.rdp


def name_of(f: str, place: Place, *, v3: bool = False, naming: str = "auto") -> str:
    """The path of the part that a process saves.

    ``"auto"`` are the names of SMP's documents, ``"1.12"`` those of its last version. With `v3` each data-parallel rank
    has a part of its own, which only the last version knows.

    Raises:
        SMPInvalidArgumentError: There is no such naming.

    >>> name_of("a.pt", Place(pp=1, pp_size=2)), name_of("a.pt", Place(pp=1, tp=1, pp_size=2, tp_size=2))
    ('a.pt_1', 'a.pt_1_1')
    >>> name_of("a", Place(), naming="1.12"), name_of("a", Place(rdp=3, rdp_size=4), v3=True)
    ('a_0_0.pt', 'a_0_0_3.pt')
    """
    if naming not in NAMINGS:
        raise SMPInvalidArgumentError("there is no such naming", expected=" or ".join(NAMINGS), found=repr(naming))
    if v3:
        return f"{f}_{place.pp}_{place.tp}_{place.rdp}.pt"
    if naming == "1.12":
        return f"{f}_{place.pp}_{place.tp}.pt"
    return f"{f}_{place.pp}_{place.tp}" if place.tp_size > 1 else f"{f}_{place.pp}"


def own_part(numbers: int, place: Place) -> Numbers:
    """The numbers of the part that belongs to a process, in a set whose names have so many."""
    return place.own[:numbers]


def sizes_of(parts: Collection[Numbers]) -> tuple[int, int, int]:
    """The (pp, tp, rdp) of the job that left a set of parts, if none is missing.

    >>> sizes_of([(0, 0), (0, 1)]), sizes_of([(0,), (1,)]), sizes_of([(0, 0, 0), (0, 0, 1)])
    ((1, 2, 1), (2, 1, 1), (1, 1, 2))
    """
    axes = [1 + max(axis) for axis in zip(*parts, strict=True)]
    pp, tp, rdp = (*axes, 1, 1)[:3]
    return pp, tp, rdp


def fits(parts: Collection[Numbers], place: Place) -> bool:
    """Whether a set is of a job of the same degrees. Data parallelism counts where each such rank has a part."""
    count = len(next(iter(parts)))
    return sizes_of(parts)[:count] == place.sizes[:count] and (count > 1 or place.tp_size == 1)


LISTED = 8
"""Missing parts that an error names, at most."""


def absent(parts: Collection[Numbers], sizes: Sequence[int]) -> list[Numbers]:
    """The first parts that are missing of a set of a job of these degrees, along each axis that the names have.

    >>> absent([(0, 0), (0, 1), (1, 1)], (2, 2)), absent([(1,)], (2,)), len(absent([(0, 999_999_999)], (1, 10**9)))
    ([(1, 0)], [(0,)], 9)
    """
    return list(itertools.islice((numbers for numbers in _grid(sizes) if numbers not in parts), LISTED + 1))


def _grid(sizes: Sequence[int]) -> Iterator[Numbers]:
    """All numbers of a job, one by one: a stray file may have a date where others have a rank."""
    if not sizes:
        yield ()
        return
    for first in range(sizes[0]):
        for rest in _grid(sizes[1:]):
            yield first, *rest


def refusal(parts: Mapping[Numbers, str], place: Place, prefix: str) -> SMPCheckpointError | None:
    """What SMP 1.12 raises for these parts in a job of these degrees; None where it loads them.

    It counts files, and compares the number in each name with what the count leaves room for.
    """
    count, (pp_size, tp_size, rdp_size) = len(parts), place.sizes
    kinds: Sequence[str] = ("pp_rank", "tp_rank", "rdp_rank")
    numbers = len(next(iter(parts)))
    if numbers == 1:
        room: Sequence[int] = (count,)
        kinds = ("rank",)
    elif numbers == 2:
        room = (count // tp_size, count // pp_size)
    else:
        room = (count // (tp_size * rdp_size), count // (pp_size * rdp_size), count // (tp_size * pp_size))
    for part in sorted(parts):
        for kind, number, there in zip(kinds, part, room, strict=False):
            if number >= there:
                return IncompatibleCheckpointRankFoundError.of(kind, number, there, prefix)
    wanted = place.sizes[: max(numbers, 2)]
    product = pp_size * tp_size * (rdp_size if numbers == 3 else 1)
    if (*room, 1)[: max(numbers, 2)] != wanted or count != product:
        return IncompatibleCheckpointFoundError.of(count, place.sizes, sorted(parts.values()))
    return None


def incomplete(parts: Mapping[Numbers, str], place: Place, prefix: str, sizes: Sequence[int]) -> SMPCheckpointError:
    """The error for a set of which parts are missing: SMP's own, where it has one, and which parts these are.

    Args:
        prefix: What their names begin with.
        sizes: The degrees of the job that saved them, along each axis that their names have.
    """
    error = refusal(parts, place, prefix) or IncompatibleCheckpointFoundError.of(
        len(parts), place.sizes, sorted(parts.values())
    )
    gone = absent(parts, sizes)
    named = ", ".join("_".join(map(str, numbers)) for numbers in gone[:LISTED])
    more = ", ..." if len(gone) > LISTED else ""
    details = f"Parts are missing: {named}{more}. A part is called by the numbers at the end of its file's name."
    stages = {numbers[0] for numbers in parts}
    if len(sizes) > 1 and sizes[1] > 1 and len(stages) == sizes[0] and all(numbers[1] == 0 for numbers in parts):
        details = (
            f"{details} If they were there once, restore them from a copy. Else ranks with tp_rank > 0 never saved "
            "theirs: with tensor parallelism the data-parallel group contains them. "
            "Call smp.save under `if smp.rdp_rank() == 0`, not `if smp.dp_rank() == 0`."
        )
    error.details = details
    return error
