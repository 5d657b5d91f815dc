"""The table of what is measured: every group, and every row of it.

The first row of a group is ours, with which the others are compared. A row of a peer that takes long has fewer rounds.
Sizes are multiples of one size, `--gb`.
"""

from __future__ import annotations

import importlib.util

from benchmarks.peers import measures, starts
from benchmarks.peers.buckets import on_buckets
from benchmarks.peers.on_cpus import on_cpus
from benchmarks.peers.on_jax import on_jax
from benchmarks.peers.rows import Group, Row, Saved, load, save, stall
from benchmarks.peers.states import MANY


def groups(gb: float) -> list[Group]:
    """All groups, for states whose size follows `gb` (10^9 bytes): saves have this one, and loads twice as much."""
    big, dcp = 2 * gb, gb / 2
    return [
        *_saves(gb), _stalls(gb / 2), _loads(big, warm=False), _loads(big, warm=True), *_small(), *on_cpus(gb),
        *on_jax(big), *_dcp(dcp), *_simulated(gb / 4), _parallel(gb), *_loops(gb),
        *on_buckets(gb / 2), _starts(), *_commands(), _first(dcp),
    ]  # fmt: skip


def _saves(gb: float) -> tuple[Group, ...]:
    rows = (
        *_against_raw(gb),
        save("xla_ckpt, `use_xser=True`", "ours_xser", gb, short=True),
        save('xla_ckpt, `layout="dcp"`', "ours_dcp_layout", gb),
        save("`xser.save`", "xser", gb, rounds=2, short=True),
        save("`xm.save`", "torch_save", gb, rounds=1),
        save("safetensors", "safetensors", gb, rounds=2),
        save("`dcp.save`", "dcp", gb, rounds=2),
        save("orbax v0, jax arrays", "orbax_v0", gb, "jax", rounds=1),
        save("orbax v1, jax arrays", "orbax_v1", gb, "jax", rounds=1),
    )
    sizes = (("half", "half", gb / 2), ("double", "twice", 2 * gb))
    return (
        Group("save", "Durable save of XLA tensors", rows, rate=True, plot=True),
        *(
            Group(f"save-{key}", f"Durable save of XLA tensors, {times} as many bytes", _against_raw(size), rate=True)
            for key, times, size in sizes
        ),
    )


def _against_raw(gb: float) -> tuple[Row, ...]:
    return save("xla_ckpt", "ours", gb, short=True), save("raw limit", "raw", gb, short=True)


def _stalls(gb: float) -> Group:
    rows = (
        stall("xla_ckpt, 60 tensors", "ours_async", gb, count=60, short=True),
        stall("xla_ckpt, 800 tensors", "ours_async", gb, count=800, short=True),
        stall("xla_ckpt, 20,000 tensors", "ours_async", gb, count=MANY, short=True),
        stall("transfer, then a thread, 60 tensors", "transfer_then_thread", gb, count=60, times=2, rounds=2),
        stall("`dcp.async_save`, 60 tensors", "dcp_thread", gb, count=60, rounds=1),
    )
    return Group("stall", "Stall of the caller in an asynchronous save of XLA tensors", rows, "ms", plot=True)


def _loads(gb: float, *, warm: bool) -> Group:
    native, of_xser = Saved("ours", "xla", gb), Saved("xser", "xla", gb)
    # The same files as from the XLA device, in a fraction of the time.
    torch_file, of_dcp, of_safetensors = (Saved(saver, "cpu", gb) for saver in ("torch_save", "dcp", "safetensors"))
    rows = (
        load("xla_ckpt", "ours", native, warm=warm, short=True),
        load("`torch.load(mmap=True)`", "torch_load_mapped", torch_file, warm=warm, onto="xla", short=True),
        load("safetensors", "safetensors", of_safetensors, warm=warm, onto="xla", short=True),
        load("`torch.load`", "torch_load", torch_file, warm=warm, onto="xla", rounds=1),
        load("`xser.load`", "xser", of_xser, warm=warm, rounds=1 if warm else 2),
        load("`dcp.load`", "dcp", of_dcp, warm=warm, onto="xla", rounds=2),
        load("orbax v0, jax arrays", "orbax_v0", Saved("orbax_v0", "jax", gb), warm=warm, rounds=1),
        load("orbax v1, jax arrays", "orbax_v1", Saved("orbax_v1", "jax", gb), warm=warm, rounds=1),
    )
    cache = "warm" if warm else "cold"
    title = f"Load into a live module on the XLA device, from a {cache} page cache"
    return Group(cache, title, rows, rate=True, plot=True)


def _dcp(gb: float) -> tuple[Group, ...]:
    ours, stock = Saved("dcp_ours", "xla", gb), Saved("dcp", "xla", gb)
    saves_ = (
        save("`xla_ckpt.dcp.save`", "dcp_ours", gb, rounds=2),
        save("stock `dcp.save`, our `StorageWriter`", "dcp_our_writer", gb, rounds=1),
        save('`save_checkpoint(layout="dcp")`', "ours_dcp_layout", gb, rounds=1),
        save("stock `dcp.save`", "dcp", gb, rounds=2),
    )
    stalls = (
        stall("`xla_ckpt.dcp.async_save`", "dcp_ours_async", gb, rounds=2),
        stall("stock `dcp.async_save`, our `StorageWriter` and `AsyncStager`", "dcp_our_stager", gb, rounds=1),
        stall('`save_checkpoint(layout="dcp", async_save=True)`', "ours_dcp_layout_async", gb, rounds=1),
    )

    def loads_(*, warm: bool) -> tuple[Row, ...]:
        tag = Saved("ours_dcp_layout", "xla", gb)
        return (
            load("`xla_ckpt.dcp.load`", "dcp_ours", ours, warm=warm, rounds=2),
            load("`xla_ckpt.dcp.load` of what stock saved", "dcp_ours", stock, warm=warm, rounds=1),
            load("stock `dcp.load`, our `StorageReader`", "dcp_our_reader", ours, warm=warm, rounds=1),
            load('`load_checkpoint` of `layout="dcp"`', "ours", tag, warm=warm, rounds=1),
            load("stock `dcp.load`", "dcp", stock, warm=warm, rounds=2),
            load("stock `dcp.load` of what we saved", "dcp", ours, warm=warm, rounds=1),
        )

    calls = "torch.distributed.checkpoint"
    return (
        Group("dcp-save", f"{calls}: durable save of XLA tensors", saves_, rate=True),
        Group("dcp-stall", f"{calls}: stall of the caller, XLA tensors", stalls, "ms"),
        Group("dcp-cold", f"{calls}: load in place, from a cold page cache", loads_(warm=False), rate=True),
        Group("dcp-warm", f"{calls}: the same from a warm page cache", loads_(warm=True), rate=True),
    )


def _simulated(gb: float) -> tuple[Group, ...]:
    """The accelerator that the tests simulate, if they are here."""
    if importlib.util.find_spec("tests.device") is None:
        return ()
    rows = (
        stall('xla_ckpt, `snapshot="overlap"`', "ours_overlap", gb, "sim", rounds=2, short=True),
        stall('xla_ckpt, `snapshot="device"`', "ours_device", gb, "sim", rounds=1),
        stall('xla_ckpt, `snapshot="host"`', "ours_host", gb, "sim", rounds=1),
        stall(COPY_FIRST, "each_then_thread", gb, "sim", rounds=2, short=True),
    )
    return (
        Group("accelerator", "Stall of the caller in an asynchronous save from a simulated accelerator", rows, "ms"),
    )


COPY_FIRST = "copy everything first, then a thread"


def _small() -> tuple[Group, Group]:
    gb = MANY * 1024 / 1e9

    def onto_xla(name: str, loader: str, saver: str, **options: object) -> Row:
        device = "xla" if saver in ("ours", "xser") else "cpu"
        return load(name, loader, Saved(saver, device, gb, MANY), warm=True, onto="xla", **options)

    saves_ = (
        save("xla_ckpt", "ours", gb, count=MANY, short=True),
        save("`xm.save`", "torch_save", gb, count=MANY, rounds=2),
        save("safetensors", "safetensors", gb, count=MANY, short=True),
        save("`dcp.save`", "dcp", gb, count=MANY, rounds=1),
        save("`xser.save`", "xser", gb, count=MANY, rounds=1),
    )
    loads_ = (
        onto_xla("xla_ckpt", "ours", "ours", short=True),
        onto_xla("`torch.load(mmap=True)`", "torch_load_mapped", "torch_save", rounds=2),
        onto_xla("safetensors", "safetensors", "safetensors", short=True),
        onto_xla("`dcp.load`", "dcp", "dcp", rounds=1),
        onto_xla("`xser.load`", "xser", "xser", rounds=1),
    )
    return (
        Group("small-save", "Durable save of 20,000 XLA tensors of 1 KiB", saves_),
        Group("small-load", "Load of 20,000 XLA tensors of 1 KiB, from a warm page cache", loads_),
    )


def _parallel(gb: float) -> Group:
    rows = (
        Row("one process", measures.save, ("ours", "xla", gb, 0), short=True, rounds=3),
        Row("4 ranks, data parallel with ZeRO-1", measures.rank_saves, (4, gb), "ranks", short=True, rounds=3),
        Row("8 SPMD devices of one process", measures.spmd_saves, (gb,), short=True, rounds=3,
            env={"CPU_NUM_DEVICES": "8"}),
    )  # fmt: skip
    return Group("parallel", "Durable save by several ranks or devices, all of them together", rows, rate=True)


def _loops(gb: float) -> tuple[Group, Group]:
    def rows(threads: int) -> tuple[Row, ...]:
        return (
            Row("xla_ckpt", measures.loop, ("ours_async", threads, gb, 4), short=True, rounds=3),
            Row("raw limit", measures.loop, ("raw_later", threads, gb, 4), short=True, rounds=3),
            Row("transfer, then a thread", measures.loop, ("transfer_then_thread", threads, gb, 2), rounds=1),
        )

    title = "Slowdown of a training loop on the CPU while a save runs"
    return (
        Group("loop-1", f"{title}: the loop has one thread, and the other core is free", rows(1), "%"),
        Group("loop-2", f"{title}: the loop keeps two cores busy", rows(2), "%"),
    )


def _starts() -> Group:
    rows = (
        Row("import xla_ckpt, after torch", starts.imports, ("with",), "start", short=True),
        Row("the same without bytecode", starts.imports, ("without",), "start", short=True),
    )
    return Group("import", "Import, and the first use of save_checkpoint and load_checkpoint", rows, "ms")


def _commands() -> tuple[Group, Group]:
    ls = Row("`xla-ckpt ls`", starts.listing, (1_000,), "start", short=True)
    show = Row("`xla-ckpt show`", starts.showing, (MANY,), "start", short=True)
    return (
        Group("ls", "`xla-ckpt ls` of 1,000 tags, process and all", (ls,), "ms"),
        Group("show", "`xla-ckpt show` of a tag of 20,000 arrays, process and all", (show,), "ms"),
    )


def _first(gb: float) -> Group:
    rows = (Row("xla_ckpt", starts.first_save, (gb,), "start", short=True),)
    return Group("first", "The first save of a process, of XLA tensors", rows)
