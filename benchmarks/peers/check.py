"""Whether a run still reaches what the committed one did. Nothing here measures.

Only ratios are compared: they change little from one machine to another, and seconds and bytes do. One round is a
sample, and so a ratio that looks worse than the committed one by half of what is allowed is `doubtful`: its groups are
measured again, and the medians of all rounds count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.peers.contenders import COPY_FIRST
from benchmarks.peers.figures import Ratio, Reading
from benchmarks.peers.on_cpus import MAPPED, MEMCPY
from benchmarks.peers.results import Results
from benchmarks.peers.targets import TARGETS

FALL = 0.25
"""How far our speed may fall, beside that of the others."""
_OVERLAP = 'xla_ckpt, `snapshot="overlap"`'


@dataclass(frozen=True)
class Guard:
    """A ratio that is not to become worse."""

    what: str
    source: Ratio


# Stalls of a few milliseconds are compared by the caller's processor time: other programs add more than that to them.
GUARDS: tuple[Guard, ...] = (
    *(Guard(f"{t.topic}: {t.what}", t.source) for t in TARGETS if isinstance(t.source, Ratio)),
    Guard("Loads: onto XLA, cold, against `torch.load(mmap=True)`", Ratio("cold", MAPPED)),
    Guard("Loads: onto XLA, cold, against safetensors", Ratio("cold", "safetensors")),
    Guard("Saves: `use_xser=True` against `xser.save`", Ratio("save", "`xser.save`", "xla_ckpt, `use_xser=True`")),
    Guard("Stalls: CPU tensors, against one memcpy", Ratio("cpu-stall", MEMCPY, figure="processor")),
    Guard("Stalls: the same with the step guard", Ratio("cpu-stall", MEMCPY, _OVERLAP, "processor")),
    Guard("Stalls: a simulated accelerator, against a copy", Ratio("accelerator", COPY_FIRST, _OVERLAP, "processor")),
)  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """A ratio in the committed run, and in this one."""

    guard: Guard
    expected: Reading
    found: Reading

    @property
    def speed(self) -> float:
        """Our speed beside the others', as a part of what it was in the committed run."""
        over = self.found.value / self.expected.value
        return over if self.guard.source.rate else 1 / over

    @property
    def has_fallen(self) -> bool:
        return self.speed < 1 - FALL

    @property
    def is_doubtful(self) -> bool:
        """Whether it has fallen, or may have if this run was a little kinder to us than to the others."""
        return self.speed < 1 - FALL / 2

    def __str__(self) -> str:
        word = "FALLEN" if self.has_fallen else "held"
        return (
            f"{word:6} {self.guard.what}: {self.found.value:.3g} x{_range(self.found.rounds)}; committed "
            f"{self.expected.value:.3g} x{_range(self.expected.rounds)}: {self.speed:.0%} of that speed"
        )


def _range(rounds: Sequence[float]) -> str:
    if len(rounds) < 2:
        return ", of one round"
    return f", {min(rounds):.3g} to {max(rounds):.3g} in {len(rounds)} rounds"


def compare(committed: Results, measured: Results) -> list[Comparison]:
    """The ratios that both runs have. What has a best peer has the best of those that this run measured."""
    alike, compared = committed.among(measured), []
    for guard in GUARDS:
        expected, found = guard.source.read(alike), guard.source.read(measured)
        if expected and found:
            compared.append(Comparison(guard, expected, found))
    return compared


def missing(committed: Results, measured: Results) -> list[str]:
    """The ratios that are committed and were not found although their groups were measured: a row failed."""
    return _without(measured, committed, measured)


def uncommitted(committed: Results, measured: Results) -> list[str]:
    """The ratios that were found, and are compared with nothing, since the committed run is older than they are."""
    return _without(committed, measured, measured)


def _without(absent: Results, present: Results, measured: Results) -> list[str]:
    return [
        guard.what for guard in GUARDS
        if guard.source.group in measured.rows and guard.source.read(present) and not guard.source.read(absent)
    ]  # fmt: skip
