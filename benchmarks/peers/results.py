"""What was measured, and what follows from it. Nothing here measures."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Figures = dict[str, float]


@dataclass
class Outcome:
    """The rounds of one row."""

    runs: list[Figures] = field(default_factory=list)
    error: str = ""
    """How its last failure ended; empty if none."""

    def median(self, figure: str = "seconds") -> float | None:
        """The median of a figure; None if it was never measured."""
        values = [run[figure] for run in self.runs if figure in run]
        return statistics.median(values) if values else None

    def spread(self) -> float | None:
        """The slowest round over the fastest; None if there is nothing to compare."""
        values = [run["seconds"] for run in self.runs]
        return max(values) / min(values) if len(values) > 1 and min(values) > 0 else None


@dataclass
class Results:
    """All that one run of the benchmark found."""

    about: dict[str, Any]
    """How it was made: the command, the machine, its load, and how often it did not become quiet."""
    rows: dict[str, dict[str, Outcome]] = field(default_factory=dict)
    """By group and name."""

    def outcome(self, group: str, name: str) -> Outcome:
        """The outcome of a row, made if it is new."""
        return self.rows.setdefault(group, {}).setdefault(name, Outcome())

    def runs(self, group: str, name: str) -> list[Figures]:
        """The rounds of a row; none if it was not measured."""
        row = self.rows.get(group, {}).get(name)
        return row.runs if row else []

    def among(self, other: Results) -> Results:
        """Without the rows that another run has not measured."""
        kept = {
            group: {name: row for name, row in rows.items() if other.runs(group, name)}
            for group, rows in self.rows.items()
        }
        return Results(self.about, kept)

    def spread(self) -> float | None:
        """The median over all rows of the slowest round over the fastest; None of one round."""
        found = [spread for row in self.rows.values() for o in row.values() if (spread := o.spread()) is not None]
        return statistics.median(found) if found else None

    def to_json(self) -> dict[str, Any]:
        rows = {
            group: {name: {"runs": o.runs, "error": o.error} for name, o in rows.items()}
            for group, rows in self.rows.items()
        }
        return {"about": self.about, "rows": rows}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Results:
        rows = {
            group: {name: Outcome(row["runs"], row["error"]) for name, row in rows.items()}
            for group, rows in value["rows"].items()
        }
        return cls(dict(value["about"]), rows)
