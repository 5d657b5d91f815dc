"""What was promised: one line for each target, by topic. Nothing here measures."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.peers.buckets import BARE
from benchmarks.peers.figures import Figure, Ratio
from benchmarks.peers.on_cpus import COPIED


@dataclass(frozen=True)
class Target:
    """A figure of a run, and the bound that it is to keep."""

    topic: str
    what: str
    source: Ratio | Figure
    bound: float

    def is_met(self, value: float) -> bool:
        """Whether a value keeps the bound: rates are at least that, and all else is at most that."""
        return value >= self.bound if self.source.rate else value <= self.bound


_MANY, _LOADS, _SAVES, _LOOP = "20,000 arrays of 1 KiB, and stalls", "Loads", "Saves", "The running loop"
_BUCKETS = "Object stores"
_STARTS = "Start of a process, and commands"
_RAW, _ALONE = "raw limit", "one process"
_RANKS, _SPMD = "4 ranks, data parallel with ZeRO-1", "8 SPMD devices of one process"
_IMPORTED, _COMPILED = "import xla_ckpt, after torch", "the same without bytecode"
TARGETS: tuple[Target, ...] = (
    Target(_MANY, "load into new CPU memory", Ratio("small-cpu-load", COPIED, "xla_ckpt, `restore`"), 0.5),
    Target(_MANY, "load of CPU tensors in place", Ratio("small-cpu-load", COPIED, "xla_ckpt, in place"), 0.5),
    Target(_MANY, "load onto XLA", Ratio("small-load", "safetensors"), 0.7),
    Target(_MANY, "save of XLA tensors", Ratio("small-save", "safetensors"), 0.6),
    Target(_MANY, "stall, 20,000 arrays", Figure("stall", "xla_ckpt, 20,000 tensors", "ms"), 60),
    Target(_MANY, "stall, 800 arrays", Figure("stall", "xla_ckpt, 800 tensors", "ms"), 6),
    Target(_MANY, "stall, 60 arrays", Figure("stall", "xla_ckpt, 60 tensors", "ms"), 1.5),
    Target(_LOADS, "CPU tensors in place, cold", Ratio("cpu-cold"), 0.9),
    Target(_LOADS, "CPU tensors in place, warm", Ratio("cpu-warm"), 0.9),
    Target(_LOADS, "into new CPU memory, warm", Ratio("cpu-new", COPIED, "xla_ckpt, `restore`"), 1.0),
    Target(_LOADS, "onto XLA, warm", Ratio("warm"), 0.7),
    Target(_SAVES, "half as many bytes (`--gb` / 2), against the raw limit", Ratio("save-half", _RAW, rate=True), 0.95),
    Target(_SAVES, "`--gb`, against the raw limit", Ratio("save", _RAW, rate=True), 0.95),
    Target(_SAVES, "twice as many bytes, against the raw limit", Ratio("save-double", _RAW, rate=True), 0.95),
    Target(_SAVES, "4 ranks together, against one process", Ratio("parallel", _ALONE, _RANKS, rate=True), 0.9),
    Target(_SAVES, "8 SPMD devices, against one process", Ratio("parallel", _ALONE, _SPMD, rate=True), 0.9),
    Target(_LOOP, "slower while a save runs, one core free", Figure("loop-1", unit="%"), 3),
    Target(_LOOP, "both cores busy: what it loses, over the processor time of a save alone",
           Figure("loop-2", unit="x", figure="lost", over="cpu"), 1.2),
    Target(_BUCKETS, "save, against the bare client", Ratio("bucket-save", BARE, rate=True), 0.9),
    Target(_BUCKETS, "load, against the bare client", Ratio("bucket-load", BARE, rate=True), 0.9),
    Target(_STARTS, "`import xla_ckpt`, with bytecode", Figure("import", _IMPORTED, "ms", "alone"), 60),
    Target(_STARTS, "`import xla_ckpt`, without bytecode", Figure("import", _COMPILED, "ms", "alone"), 120),
    Target(_STARTS, "first save of a process, after its bytes", Figure("first", figure="after"), 0.5),
    Target(_STARTS, "`xla-ckpt ls` of 1,000 tags", Figure("ls", "`xla-ckpt ls`"), 0.4),
    Target(_STARTS, "`xla-ckpt show` of 20,000 arrays", Figure("show", "`xla-ckpt show`"), 0.6),
)  # fmt: skip
