"""What is read off the results of a run: a figure of one row, or a ratio of two rows. All pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.peers.results import Results

OURS = "xla_ckpt"
"""With it the names of our rows begin."""


@dataclass(frozen=True)
class Reading:
    """What a run says."""

    value: float
    ours: str
    """Our figure, as it is shown."""
    beside: str = ""
    """The figure that it is compared with, and whose it is."""
    rounds: Sequence[float] = ()
    """The value in each round alone, by which one sees how noisy it is."""


@dataclass(frozen=True)
class Ratio:
    """Our seconds over those of another row of the group, or our bytes per second over its.

    The rows of a group take turns, so that a slow minute hits both: it is the median of the ratios of single rounds.
    """

    group: str
    beside: str = ""
    """The other row; empty for the best peer, which is the row without our name that has the least median."""
    ours: str = OURS
    figure: str = "seconds"
    rate: bool = False
    """Whether it is of bytes per second, and so at least what is promised, and not at most."""
    unit: str = "x"

    def read(self, results: Results) -> Reading | None:
        """The ratio in a run; None if a row was not measured."""
        name = self.beside or self._best_peer(results)
        ours, theirs = self._costs(results, self.ours), self._costs(results, name)
        if not ours or not theirs:
            return None
        rounds = [b / a if self.rate else a / b for a, b in zip(ours, theirs, strict=False)]
        mine, other = self._shown(statistics.median(ours)), self._shown(statistics.median(theirs))
        return Reading(statistics.median(rounds), mine, other if self.beside else f"{other} ({name})", rounds)

    def _costs(self, results: Results, name: str) -> list[float]:
        """The figure of each round: seconds, or seconds per byte."""
        return [
            run[self.figure] / (run["nbytes"] if self.rate else 1) for run in results.runs(self.group, name)
            if self.figure in run
        ]  # fmt: skip

    def _best_peer(self, results: Results) -> str:
        medians = {name: self._costs(results, name) for name in results.rows.get(self.group, {}) if OURS not in name}
        return min((n for n in medians if medians[n]), key=lambda n: statistics.median(medians[n]), default="")

    def _shown(self, cost: float) -> str:
        return f"{1e-9 / cost:.2f} GB/s" if self.rate else seconds(cost)


@dataclass(frozen=True)
class Figure:
    """A figure of one of our rows."""

    group: str
    name: str = OURS
    unit: str = "s"
    """``s``, ``ms``, ``%``, or ``x`` for a quotient."""
    figure: str = "seconds"
    over: str = ""
    """Another figure of the same rounds by which it is divided."""
    rate: bool = False

    def read(self, results: Results) -> Reading | None:
        """The figure in a run, in its unit; None if it was not measured."""
        scale = {"s": 1.0, "ms": 1e3, "%": 100.0, "x": 1.0}[self.unit]
        rounds = [
            scale * run[self.figure] / run.get(self.over, 1.0)
            for run in results.runs(self.group, self.name) if self.figure in run
        ]  # fmt: skip
        if not rounds:
            return None
        value = statistics.median(rounds)
        return Reading(value, f"{number(value)} {self.unit}", rounds=rounds)


def number(value: float) -> str:
    """Three digits of it."""
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def seconds(value: float) -> str:
    """Seconds as they are read best."""
    return f"{value:.2f} s" if value >= 0.1 else f"{1e3 * value:.1f} ms"
