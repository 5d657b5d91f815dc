"""What the ranks of a save measured until its commit, as a tag keeps it for ``xla-ckpt show --report``.

Each rank sends it with its record. Rank 0 gives it to the commit. On file systems orbax stores it in the tag, as a part
of the custom metadata in ``_CHECKPOINT_METADATA``
(https://orbax.readthedocs.io/en/latest/api_reference/checkpoint.checkpoint_manager.html). In object stores it is a
file of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from xla_ckpt.engine.phases import NOT_OF_THE_RANK, Phase
from xla_ckpt.errors import FormatError, UsageError

MAX_KEPT = 64
"""Ranks of which a tag keeps what they measured, the slowest: of thousands of ranks it would be a megabyte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one rank measured of its part of a save."""

    rank: int
    stall: float
    """Seconds that the caller waited."""

    nbytes: int
    """Array bytes that it wrote."""

    files: int
    """Payload files that it wrote."""

    phases: Mapping[str, Phase]

    @property
    def done(self) -> float:
        """When it had done its own part (s after the call)."""
        return max((phase.ended for name, phase in self.phases.items() if name not in NOT_OF_THE_RANK), default=0.0)

    def to_json(self) -> list[Any]:
        """As plain JSON, and short: a tag may keep it of many ranks."""
        phases = [
            [name, *(round(s, 5) for s in (p.began, p.ended, p.seconds)), p.nbytes, p.files]
            for name, p in self.phases.items()
        ]
        return [self.rank, round(self.stall, 5), self.nbytes, self.files, phases]

    @classmethod
    def from_json(cls, json: Any) -> Measured:
        """What `to_json` gave.

        Raises:
            TypeError, ValueError: It is something else.
        """
        rank, stall, nbytes, files, phases = json
        by_name = {}
        for name, began, ended, seconds, moved, finished in phases:
            times = float(seconds), float(began), float(ended)
            if not all(map(math.isfinite, times)):
                raise ValueError(f"no times: {times}")
            by_name[str(name)] = Phase(times[0], int(moved), int(finished), *times[1:])
        return cls(rank=int(rank), stall=float(stall), nbytes=int(nbytes), files=int(files), phases=by_name)


def kept(measured: Sequence[Measured]) -> dict[str, Any]:
    """What a tag keeps of it, as plain JSON.

    >>> kept([Measured(rank=0, stall=0.5, nbytes=8, files=1, phases={"write": Phase(1.5, 8, 1, 0.25, 1.75)})])
    {'ranks': 1, 'measured': [[0, 0.5, 8, 1, [['write', 0.25, 1.75, 1.5, 8, 1]]]]}
    """
    slowest = sorted(measured, key=lambda m: (-m.done, m.rank))[:MAX_KEPT]
    return {"ranks": len(measured), "measured": [m.to_json() for m in slowest]}


def measured_of(report: Any, path: str, tag: str) -> tuple[int, list[Measured]]:
    """Number of ranks that saved a tag, and what the slowest of them measured, the slowest first.

    Args:
        report: What the commit was given to keep (`Root.report_of`).
        path: Root directory.
        tag: Which tag.

    Raises:
        UsageError: The tag keeps none of it.
        FormatError: What it keeps is damaged.
    """
    if report is None:
        raise UsageError(
            "this tag has no report of its save",
            path=path,
            tag=tag,
            hint="Tags have one that save and save_checkpoint wrote since there are reports. "
            "Conversions, xla_ckpt.dcp and other libraries leave none.",
        )
    try:
        measured = [Measured.from_json(json) for json in report["measured"]]
        return int(report["ranks"]), measured
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        raise FormatError("the report of the save is damaged", path=path, tag=tag, found=error) from error


def timings(report: Any, path: str, tag: str) -> dict[str, Any]:
    """The same as plain JSON that says what each number is.

    Raises:
        CheckpointError: As `measured_of`.
    """
    ranks, measured = measured_of(report, path, tag)
    return {
        "path": path,
        "tag": tag,
        "ranks": ranks,
        "seconds": max((p.ended for m in measured for p in m.phases.values()), default=0.0),
        "measured": [
            {
                "rank": m.rank,
                "stall": m.stall,
                "done": m.done,
                "nbytes": m.nbytes,
                "files": m.files,
                "phases": {name: asdict(phase) for name, phase in m.phases.items()},
            }
            for m in measured
        ],
    }
