"""The groups of CPU tensors: saves, loads in place and into new memory, stalls; and beside what needs a newer torch."""

from __future__ import annotations

from benchmarks.peers.rows import LATEST, Group, Row, Saved, load, save, stall
from benchmarks.peers.states import MANY

TENSORS = 60
"""The tensors of a state that loads fill."""
MANY_GB = MANY * 1024 / 1e9
MAPPED = "`torch.load(mmap=True)`"
COPIED = "safetensors, with a copy"
MEMCPY = "one memcpy of the state into warm memory"


def on_cpus(gb: float) -> tuple[Group, ...]:
    """All groups of CPU tensors."""
    return (_saves(gb), _in_place(gb, warm=False), _in_place(gb, warm=True), _new(gb), _many(), _stalls(gb),
            *_latest(gb))  # fmt: skip


def _saves(gb: float) -> Group:
    rows = (
        save("xla_ckpt", "ours", gb, "cpu", rounds=2),
        save("`torch.save`", "torch_save", gb, "cpu", rounds=2),
        save("safetensors", "safetensors", gb, "cpu", rounds=2),
        save("`dcp.save`", "dcp", gb, "cpu", rounds=1),
        save("tensorizer", "tensorizer", gb, "cpu", rounds=1),
        save("fastsafetensors", "fastsafetensors", gb, "cpu", rounds=1),
        save("moonclip", "moonclip", gb, "cpu", rounds=1),
    )
    return Group("cpu-save", "Durable save of CPU tensors", rows, rate=True, plot=True)


def _in_place(gb: float, *, warm: bool) -> Group:
    def of(saver: str) -> Saved:
        return Saved(saver, "cpu", gb, TENSORS)

    rows = (
        load("xla_ckpt", "ours", of("ours"), warm=warm, short=True),
        load(MAPPED, "torch_load_mapped", of("torch_save"), warm=warm, short=True),
        load("safetensors", "safetensors", of("safetensors"), warm=warm, short=True),
        load("fastsafetensors", "fastsafetensors", of("safetensors"), warm=warm, rounds=1),
        load("runai-model-streamer", "runai", of("safetensors"), warm=warm, rounds=1),
        load("`dcp.load`", "dcp", of("dcp"), warm=warm, rounds=2),
        load("moonclip", "moonclip", of("moonclip"), warm=warm, rounds=1),
    )
    cache = "warm" if warm else "cold"
    title = f"Load of {TENSORS} CPU tensors in place, from a {cache} page cache"
    return Group(f"cpu-{cache}", title, rows, rate=True, plot=True)


def _new(gb: float) -> Group:
    def new(name: str, loader: str, saver: str, **options: object) -> Row:
        return load(name, loader, Saved(saver, "cpu", gb, TENSORS), warm=True, onto="new", **options)

    rows = (
        new("xla_ckpt, `restore`", "restored", "ours", short=True),
        new(COPIED, "safetensors", "safetensors", short=True),
        new("`torch.load`", "torch_load", "torch_save", rounds=2),
        new(f"{MAPPED}, with a copy", "torch_load_mapped", "torch_save", rounds=1),
        new("fastsafetensors", "fastsafetensors", "safetensors", rounds=2),
        new("runai-model-streamer", "runai", "safetensors", rounds=1),
        new("tensorizer, digests checked", "tensorizer", "tensorizer", rounds=1),
        new("`dcp.load`", "dcp", "dcp", rounds=1),
    )
    title = f"Load of {TENSORS} tensors into new CPU memory, from a warm page cache"
    return Group("cpu-new", title, rows, rate=True, plot=True)


def _many() -> Group:
    def many(name: str, loader: str, saver: str, onto: str = "new", **options: object) -> Row:
        saved = Saved(saver, "xla" if saver == "ours" else "cpu", MANY_GB, MANY)  # those of the loads onto XLA
        return load(name, loader, saved, warm=True, onto=onto, **options)

    rows = (
        many("xla_ckpt, `restore`", "restored", "ours", short=True),
        many("xla_ckpt, in place", "ours", "ours", "cpu", short=True),
        many(COPIED, "safetensors", "safetensors", short=True),
        many("`torch.load`", "torch_load", "torch_save", rounds=2),
        many(f"{MAPPED}, with a copy", "torch_load_mapped", "torch_save", rounds=2),
        many("`dcp.load`", "dcp", "dcp", rounds=1),
    )
    title = f"Load of {MANY:,} tensors of 1 KiB into CPU memory, new where nothing else is said, from a warm page cache"
    return Group("small-cpu-load", title, rows)


def _stalls(gb: float) -> Group:
    rows = (
        stall("xla_ckpt", "ours_async", gb, "cpu", times=5, short=True),
        stall('xla_ckpt, `snapshot="host"`', "ours_host", gb, "cpu", rounds=1),
        stall('xla_ckpt, `snapshot="overlap"`', "ours_overlap", gb, "cpu", times=5, short=True),
        stall(MEMCPY, "memcpy", gb, "cpu", times=5, short=True),
        stall("`dcp.async_save`, thread", "dcp_thread", gb, "cpu", rounds=1),
        stall("`dcp.async_save`, process", "dcp_process", gb, "cpu", rounds=1),
        stall("`dcp.async_save`, kept stager", "dcp_stager", gb, "cpu", rounds=2),
        stall("moonclip", "moonclip_async", gb, "cpu", rounds=1),
        stall("orbax v0 async, jax arrays", "orbax_async", gb, "jax", rounds=1),
        stall("orbax v1 async, jax arrays", "orbax_v1_async", gb, "jax", rounds=1),
    )
    return Group("cpu-stall", "Stall of the caller in an asynchronous save of CPU tensors", rows, "ms", plot=True)


def _latest(gb: float) -> tuple[Group, ...]:
    """Meta's package needs a torch that torch_xla cannot: both run in the other environment."""
    name = "torch_checkpointing"

    def saves(size: float, count: int) -> tuple[Row, ...]:
        def new(title: str, saver: str) -> Row:
            return save(title, saver, size, "cpu", count, python=LATEST, rounds=2)

        return (
            new("xla_ckpt", "ours"),
            new(f'xla_ckpt, `layout="{name}"`', f"ours_{name}_layout"),
            new(name, name),
            new(f"{name} on our storage", f"{name}_stored"),
        )

    def loads(size: float, count: int, *, warm: bool) -> tuple[Row, ...]:
        def new(title: str, loader: str, saver: str) -> Row:
            return load(title, loader, Saved(saver, "cpu", size, count, LATEST), warm=warm, rounds=2)

        return (
            new("xla_ckpt", "ours", "ours"),
            new(f'xla_ckpt, `layout="{name}"`', "ours", f"ours_{name}_layout"),
            new(name, name, name),
            new(f"{name} on our storage", f"{name}_stored", f"{name}_stored"),
        )

    stalls = (
        stall("xla_ckpt", "ours_async", gb, "cpu", python=LATEST, rounds=2),
        stall('xla_ckpt, `snapshot="overlap"`', "ours_overlap", gb, "cpu", python=LATEST, rounds=2),
        stall(f"{name}, copied before it returns", f"{name}_copied", gb, "cpu", python=LATEST, rounds=2),
        stall(name, f"{name}_async", gb, "cpu", python=LATEST, rounds=2),
    )
    where, small = "On the newest torch, CPU tensors:", f"{MANY:,} of 1 KiB"
    return (
        Group("latest-save", f"{where} durable save", saves(gb, TENSORS), rate=True),
        Group("latest-cold", f"{where} load in place, cold", loads(gb, TENSORS, warm=False), rate=True),
        Group("latest-warm", f"{where} load in place, warm", loads(gb, TENSORS, warm=True), rate=True),
        Group("latest-stall", f"{where} stall of the caller", stalls, "ms"),
        Group("latest-small-save", f"{where} durable save of {small}", saves(MANY_GB, MANY)),
        Group("latest-small-load", f"{where} load in place of {small}, warm", loads(MANY_GB, MANY, warm=True)),
    )
