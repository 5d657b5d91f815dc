"""The rounds: every measurement in a fresh process, the contenders in turn, none without a time limit."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers import machine, measures
from benchmarks.peers.results import Figures, Outcome, Results
from benchmarks.peers.rows import Group, Row, Saved
from tests.jobs import start_on_ranks
from tests.nursery import Born, Call, ProcessError, bear, bear_elsewhere
from tests.runs import environment

ENV = {"JAX_PLATFORMS": "cpu"}
RANKS = 4


@dataclass
class Runner:
    """Measures rows, and remembers what it has prepared for loads."""

    scratch: Path
    limit: float
    """Seconds that one measurement may take."""
    patience: float
    """Seconds to wait before each for the machine to become quiet."""
    measured: int = 0
    unquiet: int = 0
    """How often it did not."""
    _prepared: dict[Saved, tuple[Path, str]] = field(default_factory=dict)

    def measure(self, row: Row) -> Figures:
        """One measurement of a row. Raises what the contender raised, or TimeoutExpired."""
        prepared = self._prepare(row.saved) if row.saved else None
        folder = self.scratch / "files"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if prepared and row.cold:
            machine.evict(prepared[0])
        self.measured += 1
        self.unquiet += not machine.settle(self.patience)
        try:
            return self._run(row, folder, prepared)
        finally:
            shutil.rmtree(folder)

    def _run(self, row: Row, folder: Path, prepared: tuple[Path, str] | None) -> Figures:
        if row.kind == "ranks":
            return self._on_ranks(row, folder)
        if row.kind == "start":
            return row.function(*row.args, folder, self.limit)  # type: ignore[return-value]
        if prepared:
            return self._alone(row, *row.args, prepared[1], not row.cold, str(prepared[0]))
        return self._alone(row, *row.args, str(folder))

    def _alone(self, row: Row, *args: object) -> Any:
        return _value(_born(Call.of(row.function, *args), row.env, row.xla, row.python), self.limit)

    def _prepare(self, saved: Saved) -> tuple[Path, str]:
        if saved not in self._prepared:
            folder = self.scratch / f"saved-{len(self._prepared)}"
            folder.mkdir(parents=True)
            call = Call.of(measures.prepare, saved.saver, saved.device, saved.gb, saved.count, str(folder))
            born = _born(call, {}, saved.device == "xla", saved.python)
            self._prepared[saved] = folder, _value(born, self.limit)
        return self._prepared[saved]

    def _on_ranks(self, row: Row, folder: Path) -> Figures:
        ranks = start_on_ranks(row.function, RANKS, *row.args, str(folder), env=ENV, xla=True)
        over = time.monotonic() + self.limit
        try:
            all_ = [_value(rank, over - time.monotonic()) for rank in ranks]
        finally:
            for rank in ranks:
                if rank.returncode is None:
                    rank.kill()
                    rank.communicate()
        return {"seconds": max(r["seconds"] for r in all_), "nbytes": float(machine.stored_bytes(folder))}


def _born(call: Call, env: Mapping[str, str], xla: bool, python: str) -> Born:
    """A process that measures, of this environment or of another one whose interpreter is `python`."""
    whole = environment({**ENV, **env})
    return bear_elsewhere(python, call, whole) if python else bear(call, env=whole, xla=xla)


def _value(born: Born, limit: float) -> Any:
    """What a process returned; it is killed if it takes longer."""
    try:
        born.communicate(max(limit, 0.1))
    except subprocess.TimeoutExpired:
        born.kill()
        born.communicate()
        raise TimeoutError(f"it took longer than {limit:.0f} s") from None
    return born.value()


def run(
    groups: Sequence[Group], rounds: int, runner: Runner, results: Results, said: Callable[[str], None],
    seconds: float = float("inf"),
) -> int:  # fmt: skip
    """Measure all rows, round by round, into `results`. A row that fails says so, and is not tried again.

    Returns how many rounds there were: no round begins that would not end within `seconds` if each of its rows took as
    long as it did in the round before. (The first round prepares, so that the second is said to be longer than it is.)
    Where there is not time enough for all rows, the round has those that targets are about.
    """
    over = time.monotonic() + seconds
    took: dict[tuple[str, str], float] = {}

    def fits(turns: Sequence[tuple[Group, Row]]) -> bool:
        return time.monotonic() + sum(took.get((group.key, row.name), 0.0) for group, row in turns) <= over

    for number in range(rounds):
        turns = [
            (group, row)
            for group in groups
            for row in _in_turn(group.rows, len(results.runs(group.key, group.rows[0].name)))
            if number < row.rounds and not results.outcome(group.key, row.name).error
        ]
        if not fits(turns):
            turns = [(group, row) for group, row in turns if row.short]
            if not fits(turns):
                return number
        for group, row in turns:
            began = time.monotonic()
            told = _measure(runner, row, results.outcome(group.key, row.name))
            took[group.key, row.name] = wall = time.monotonic() - began
            said(f"round {number + 1}: {group.key:10} {row.name:58} {told}   ({wall:.1f} s in all)")
    return rounds


def _in_turn(rows: Sequence[Row], number: int) -> list[Row]:
    """The rows, each round with another one first."""
    first = number % len(rows)
    return [*rows[first:], *rows[:first]]


def _measure(runner: Runner, row: Row, outcome: Outcome) -> str:
    """One measurement, noted in the outcome of its row; what there is to say."""
    try:
        outcome.runs.append(runner.measure(row))
    except Exception as error:  # of a peer: it has a row that says so, and the others go on
        outcome.error = last_line(error)
        return outcome.error
    return f"{outcome.runs[-1]['seconds']:.4f}"


def last_line(error: Exception) -> str:
    """How an error ends, in one line that fits into a table.

    A process that raised nothing that can travel has printed what it ended with.
    """
    text = error.__notes__[-1] if isinstance(error, ProcessError) and hasattr(error, "__notes__") else str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    end = lines[-1] if isinstance(error, ProcessError) else f"{type(error).__name__}: {lines[-1]}"
    return end[:160].replace("|", "/")
