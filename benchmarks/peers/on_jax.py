"""The groups of jax arrays: ours beside orbax's two interfaces, on one device and from one mesh to another."""

from __future__ import annotations

from benchmarks.peers.rows import Group, Row, Saved, load, save
from benchmarks.peers.states import MANY

CONTENDERS = (("xla_ckpt, `save`, `restore`", "ours_jax"), ("orbax v0", "orbax_v0"), ("orbax v1", "orbax_v1"))
MANY_GB = MANY * 1024 / 1e9


def on_jax(gb: float) -> tuple[Group, ...]:
    """All groups of jax arrays. Each contender loads what it has saved."""

    def saves(size: float, count: int = 0, device: str = "jax") -> tuple[Row, ...]:
        return tuple(save(name, call, size, device, count, rounds=2) for name, call in CONTENDERS)

    def loads(size: float, count: int = 0, device: str = "jax", onto: str = "jax") -> tuple[Row, ...]:
        tags = [Saved(call, device, size, count) for _, call in CONTENDERS]
        return tuple(
            load(name, call, tag, warm=True, onto=onto, rounds=2)
            for (name, call), tag in zip(CONTENDERS, tags, strict=True)
        )

    small = f"{MANY:,} jax arrays of 1 KiB"
    return (
        Group("jax-save", "Durable save of jax arrays", saves(gb), rate=True),
        Group("jax-load", "Load of jax arrays, from a warm page cache", loads(gb), rate=True),
        Group("jax-small-save", f"Durable save of {small}", saves(MANY_GB, MANY)),
        Group("jax-small-load", f"Load of {small}, from a warm page cache", loads(MANY_GB, MANY)),
        Group("jax-mesh", "Load of jax arrays that 8 devices held by rows, by columns on them, warm",
              loads(gb, 0, "rows", "columns"), rate=True),
    )  # fmt: skip
