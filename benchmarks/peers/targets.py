"""What was promised, as numbers of one run; and whether a later run still reaches what the committed one did."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.peers.contenders import COPY_FIRST
from benchmarks.peers.results import Results, quotient

MB = 1e6
FALL = 0.25
"""How far a ratio may fall below the committed one."""


@dataclass(frozen=True)
class Target:
    """A figure, and the bound that it is to keep."""

    what: str
    value: Callable[[Results], float | None]
    bound: float
    at_least: bool
    unit: str
    """``x`` for ratios of two rows of a run; ``ms``, ``MB``, ``%`` or ``s`` for the others."""
    groups: tuple[str, ...]

    def is_met(self, value: float) -> bool:
        return value >= self.bound if self.at_least else value <= self.bound


def _ratio(what: str, above: tuple[str, str], below: tuple[str, str], bound: float, *, at_least: bool = True) -> Target:
    def value(results: Results) -> float | None:
        return quotient(results.median(*above), results.median(*below))

    return Target(what, value, bound, at_least, "x", tuple(dict.fromkeys((above[0], below[0]))))


def _figure(what: str, group: str, name: str, bound: float, unit: str) -> Target:
    scale = {"ms": 1e3, "%": 100.0, "s": 1.0}[unit]

    def value(results: Results) -> float | None:
        found = results.median(group, name)
        return None if found is None else found * scale

    return Target(what, value, bound, False, unit, (group,))


def _rate(results: Results, name: str) -> float | None:
    return quotient(results.median("parallel", name, "nbytes"), results.median("parallel", name))


def _aggregate(what: str, name: str) -> Target:
    def value(results: Results) -> float | None:
        return quotient(_rate(results, name), _rate(results, "one process"))

    return Target(what, value, 0.9, True, "x", ("parallel",))


def _memory(what: str, group: str, name: str, bound: float, *, new_state: bool = False) -> Target:
    """`new_state`: the load's new buffers become the state, and are no extra."""

    def value(results: Results) -> float | None:
        rise, nbytes = results.median(group, name, "rss"), results.median(group, name, "nbytes")
        if rise is None or nbytes is None:
            return None
        return max(0.0, rise - nbytes if new_state else rise) / MB

    return Target(what, value, bound, False, "MB", (group,))


OURS = "xla_ckpt"
TARGETS: tuple[Target, ...] = (
    _ratio("cold load against `torch.load(mmap=True)`", ("cold", "`torch.load(mmap=True)`"), ("cold", OURS), 1.5),
    _ratio("cold load against safetensors", ("cold", "safetensors"), ("cold", OURS), 1.5),
    _ratio("cold load against `xser.load`", ("cold", "`xser.load`"), ("cold", OURS), 4),
    _ratio("warm load against `torch.load(mmap=True)`", ("warm", "`torch.load(mmap=True)`"), ("warm", OURS), 2.5),
    _ratio("warm load against `dcp.load`", ("warm", "`dcp.load`"), ("warm", OURS), 3),
    _ratio("durable save, digests included, against the raw limit", ("save", "raw limit"), ("save", OURS), 0.9),
    _figure("stall, 60 tensors", "stall", "xla_ckpt, 60 tensors", 4, "ms"),
    _figure("stall, 800 tensors", "stall", "xla_ckpt, 800 tensors", 10, "ms"),
    _figure("stall, 20,000 tensors", "stall", "xla_ckpt, 20,000 tensors", 60, "ms"),
    _figure("slowdown of a loop while a save runs, one core free", "loop-1", OURS, 3, "%"),
    Target("what a loop on both cores loses by a save, against the processor time of the save alone",
           lambda results: quotient(results.median("loop-2", OURS, "lost"), results.median("loop-2", OURS, "cpu")),
           1.2, False, "x", ("loop-2",)),
    _memory("extra memory of a save of XLA tensors", "save", OURS, 64),
    _memory("extra memory of a load of XLA tensors, beyond the new state", "cold", OURS, 256, new_state=True),
    _memory("extra memory of a load of CPU tensors", "memory", "xla_ckpt, CPU tensors in place", 256),
    _figure("save of 20,000 x 1 KiB", "small-save", OURS, 0.4, "s"),
    _figure("load of 20,000 x 1 KiB", "small-load", OURS, 0.4, "s"),
    _ratio("`use_xser=True` against `xser.save`", ("save", "`xser.save`"), ("save", "xla_ckpt, `use_xser=True`"), 6),
    _ratio("CPU tensors: stall against one memcpy into warm memory", ("cpu-stall", OURS),
           ("cpu-stall", "one memcpy of the state into warm memory"), 1.25, at_least=False),
    _ratio("the same with the step guard", ("cpu-stall", 'xla_ckpt, `snapshot="overlap"`'),
           ("cpu-stall", "one memcpy of the state into warm memory"), 0.1, at_least=False),
    _ratio("accelerator, simulated: stall against copying everything first",
           ("accelerator", 'xla_ckpt, `snapshot="overlap"`'), ("accelerator", COPY_FIRST), 0.1, at_least=False),
    _aggregate("4 ranks, together, against one process", "4 ranks, data parallel with ZeRO-1"),
    _aggregate("8 SPMD devices, together, against one process", "8 SPMD devices of one process"),
    _figure("import of xla_ckpt and its functions beyond torch", "import", "import xla_ckpt, after torch", 60, "ms"),
    _figure("the same without bytecode", "import", "the same without bytecode", 120, "ms"),
    _figure("`xla-ckpt ls` of 1,000 tags", "ls", "`xla-ckpt ls`", 400, "ms"),
    _figure("`xla-ckpt show` of 20,000 arrays", "show", "`xla-ckpt show`", 600, "ms"),
)  # fmt: skip


@dataclass(frozen=True)
class Fall:
    """A ratio that is worse than the committed one."""

    target: Target
    expected: float
    found: float

    def __str__(self) -> str:
        allowed = _allowed(self.target, self.expected)
        word = "at least" if self.target.at_least else "at most"
        return (
            f"{self.target.what}: expected {word} {allowed:.2f} x ({self.expected:.2f} x is committed, and a fall of "
            f"{FALL:.0%} is allowed), found {self.found:.2f} x"
        )


def falls(committed: Results, measured: Results) -> list[Fall]:
    """The ratios of both runs that fell further than is allowed; seconds and bytes of two machines are not compared."""
    found = []
    for target in TARGETS:
        expected, value = target.value(committed), target.value(measured)
        if target.unit != "x" or expected is None or value is None:
            continue
        allowed = _allowed(target, expected)
        if value < allowed if target.at_least else value > allowed:
            found.append(Fall(target, expected, value))
    return found


def missing(committed: Results, measured: Results) -> list[str]:
    """The ratios that are committed and were not found although their groups were measured: a row failed."""
    return [
        target.what
        for target in TARGETS
        if target.unit == "x" and set(target.groups) <= set(measured.rows)
        if target.value(committed) is not None and target.value(measured) is None
    ]


def _allowed(target: Target, expected: float) -> float:
    return expected * (1 - FALL) if target.at_least else expected / (1 - FALL)
