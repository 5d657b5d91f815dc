"""The table of what is measured: every group, and every row of it.

The first row of a group is ours, with which the others are compared. A row of a peer that takes long has fewer rounds.
Sizes are multiples of one size, `--gb`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from benchmarks.peers import measures, starts
from benchmarks.peers.states import LINK, MANY

ALWAYS = 99
Unit = str
"""``s``, ``ms`` or ``%``: what the figure "seconds" of a group is shown in."""


@dataclass(frozen=True)
class Saved:
    """What a load reads: the save that prepares it, and of what."""

    saver: str
    device: str
    gb: float
    count: int = 0


@dataclass(frozen=True)
class Row:
    """One contender of a group."""

    name: str
    function: Callable[..., object]
    """At the top of its module; called with `args`, and with what `kind` adds."""
    args: tuple[object, ...]
    kind: str = "alone"
    """``alone``: in one process, with a fresh directory; ``load``: with the digest and directory of `saved`;
    ``ranks``: on four ranks; ``start``: in this process, which starts an interpreter: with a fresh directory and the
    time limit after `args`."""
    saved: Saved | None = None
    cold: bool = False
    """Whether the page cache has nothing of `saved`; else it has all of it."""
    xla: bool = True
    rounds: int = ALWAYS
    short: bool = False
    """Whether the short form has it, too: what a target is about."""
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Group:
    """Contenders that do the same."""

    key: str
    title: str
    rows: tuple[Row, ...]
    unit: Unit = "s"
    rate: bool = False
    """Whether GB/s say something."""
    plot: bool = False


def groups(gb: float) -> list[Group]:
    """All groups, for states whose size follows `gb` (10^9 bytes): saves have this one, and loads twice as much."""
    big, dcp = 2 * gb, gb / 2
    return [
        _saves(gb), _stalls(big), _loads(big, warm=False), _loads(big, warm=True), _rss(big), *_dcp(dcp),
        _cpu_saves(gb), _cpu_loads(gb, warm=False), _cpu_loads(gb, warm=True), _cpu_stalls(gb), *_simulated(gb / 4),
        *_small(), _parallel(gb), *_loops(gb), _starts(), *_commands(), _first(dcp),
    ]  # fmt: skip


def _save(name: str, saver: str, gb: float, device: str = "xla", count: int = 0, **options: object) -> Row:
    return Row(name, measures.save, (saver, device, gb, count), xla=device == "xla", **options)  # type: ignore[arg-type]


def _load(name: str, loader: str, saved: Saved, *, warm: bool, onto: str = "", **options: object) -> Row:
    device = onto or saved.device
    args = (loader, device, saved.gb, saved.count)
    return Row(name, measures.load, args, "load", saved, not warm, device == "xla", **options)  # type: ignore[arg-type]


def _stall(
    name: str, saver: str, gb: float, device: str = "xla", count: int = 0, times: int = 3, **options: object
) -> Row:
    args = (saver, device, gb, count, times)
    return Row(name, measures.stall, args, xla=device == "xla", **options)  # type: ignore[arg-type]


def _saves(gb: float) -> Group:
    rows = (
        _save("xla_ckpt", "ours", gb, short=True),
        _save("raw limit", "raw", gb, short=True),
        _save("xla_ckpt, `use_xser=True`", "ours_xser", gb, short=True),
        _save('xla_ckpt, `layout="dcp"`', "ours_dcp_layout", gb),
        _save("`xser.save`", "xser", gb, rounds=3, short=True),
        _save("`xm.save`", "torch_save", gb, rounds=2),
        _save("safetensors", "safetensors", gb, rounds=2),
        _save("`dcp.save`", "dcp", gb, rounds=2),
        _save("orbax v0, jax arrays", "orbax_v0", gb, "jax", rounds=2),
        _save("orbax v1, jax arrays", "orbax_v1", gb, "jax", rounds=2),
    )
    return Group("save", "Durable save of XLA tensors", rows, rate=True, plot=True)


def _stalls(gb: float) -> Group:
    rows = (
        _stall("xla_ckpt, 60 tensors", "ours_async", gb, count=60, short=True),
        _stall("xla_ckpt, 800 tensors", "ours_async", gb, count=800, short=True),
        _stall("xla_ckpt, 20,000 tensors", "ours_async", gb, count=MANY, short=True),
        _stall("transfer, then a thread, 60 tensors", "transfer_then_thread", gb, count=60, times=2, rounds=2),
        _stall("`dcp.async_save`, 60 tensors", "dcp_thread", gb, count=60, rounds=1),
    )
    return Group("stall", "Stall of the caller in an asynchronous save of XLA tensors", rows, "ms", plot=True)


def _loads(gb: float, *, warm: bool) -> Group:
    native, of_xser = Saved("ours", "xla", gb), Saved("xser", "xla", gb)
    # The same files as from the XLA device, in a fraction of the time.
    torch_file, of_dcp, of_safetensors = (Saved(saver, "cpu", gb) for saver in ("torch_save", "dcp", "safetensors"))
    rows = (
        _load("xla_ckpt", "ours", native, warm=warm, short=True),
        _load("`torch.load(mmap=True)`", "torch_load_mapped", torch_file, warm=warm, onto="xla", short=True),
        _load("safetensors", "safetensors", of_safetensors, warm=warm, onto="xla", short=not warm),
        _load("`torch.load`", "torch_load", torch_file, warm=warm, onto="xla", rounds=2),
        _load("`xser.load`", "xser", of_xser, warm=warm, rounds=2 if warm else 4, short=not warm),
        _load("`dcp.load`", "dcp", of_dcp, warm=warm, onto="xla", rounds=4 if warm else 2, short=warm),
        _load("orbax v0, jax arrays", "orbax_v0", Saved("orbax_v0", "jax", gb), warm=warm, rounds=1),
        _load("orbax v1, jax arrays", "orbax_v1", Saved("orbax_v1", "jax", gb), warm=warm, rounds=1),
    )
    cache = "warm" if warm else "cold"
    title = f"Load into a live module on the XLA device, from a {cache} page cache"
    return Group(cache, title, rows, rate=True, plot=True)


def _rss(gb: float) -> Group:
    """The figures of memory are those of the save and the loads above; a CPU load in place shows ours apart."""
    rows = (_load("xla_ckpt, CPU tensors in place", "ours", Saved("ours", "cpu", gb), warm=True, rounds=2, short=True),)
    return Group("memory", "Load of CPU tensors in place", rows, rate=True)


def _dcp(gb: float) -> tuple[Group, ...]:
    ours, stock = Saved("dcp_ours", "xla", gb), Saved("dcp", "xla", gb)
    saves_ = (
        _save("`xla_ckpt.dcp.save`", "dcp_ours", gb, rounds=2),
        _save("stock `dcp.save`, our `StorageWriter`", "dcp_our_writer", gb, rounds=2),
        _save('`save_checkpoint(layout="dcp")`', "ours_dcp_layout", gb, rounds=2),
        _save("stock `dcp.save`", "dcp", gb, rounds=2),
    )
    stalls = (
        _stall("`xla_ckpt.dcp.async_save`", "dcp_ours_async", gb, rounds=2),
        _stall("stock `dcp.async_save`, our `StorageWriter` and `AsyncStager`", "dcp_our_stager", gb, rounds=2),
        _stall('`save_checkpoint(layout="dcp", async_save=True)`', "ours_dcp_layout_async", gb, rounds=2),
    )

    def loads_(*, warm: bool) -> tuple[Row, ...]:
        tag = Saved("ours_dcp_layout", "xla", gb)
        return (
            _load("`xla_ckpt.dcp.load`", "dcp_ours", ours, warm=warm, rounds=2),
            _load("`xla_ckpt.dcp.load` of what stock saved", "dcp_ours", stock, warm=warm, rounds=2),
            _load("stock `dcp.load`, our `StorageReader`", "dcp_our_reader", ours, warm=warm, rounds=2),
            _load('`load_checkpoint` of `layout="dcp"`', "ours", tag, warm=warm, rounds=2),
            _load("stock `dcp.load`", "dcp", stock, warm=warm, rounds=2),
            _load("stock `dcp.load` of what we saved", "dcp", ours, warm=warm, rounds=2),
        )

    calls = "torch.distributed.checkpoint"
    return (
        Group("dcp-save", f"{calls}: durable save of XLA tensors", saves_, rate=True),
        Group("dcp-stall", f"{calls}: stall of the caller, XLA tensors", stalls, "ms"),
        Group("dcp-cold", f"{calls}: load in place, from a cold page cache", loads_(warm=False), rate=True),
        Group("dcp-warm", f"{calls}: the same from a warm page cache", loads_(warm=True), rate=True),
    )


def _cpu_saves(gb: float) -> Group:
    rows = (
        _save("xla_ckpt", "ours", gb, "cpu", rounds=2),
        _save("`torch.save`", "torch_save", gb, "cpu", rounds=2),
        _save("safetensors", "safetensors", gb, "cpu", rounds=2),
        _save("`dcp.save`", "dcp", gb, "cpu", rounds=2),
        _save("moonclip", "moonclip", gb, "cpu", rounds=2),
    )
    return Group("cpu-save", "Durable save of CPU tensors", rows, rate=True, plot=True)


def _cpu_loads(gb: float, *, warm: bool) -> Group:
    rows = (
        _load("xla_ckpt", "ours", Saved("ours", "cpu", gb), warm=warm, rounds=3),
        _load("`torch.load(mmap=True)`", "torch_load_mapped", Saved("torch_save", "cpu", gb), warm=warm, rounds=3),
        _load("safetensors", "safetensors", Saved("safetensors", "cpu", gb), warm=warm, rounds=3),
        _load("`dcp.load`", "dcp", Saved("dcp", "cpu", gb), warm=warm, rounds=2),
        _load("moonclip", "moonclip", Saved("moonclip", "cpu", gb), warm=warm, rounds=2),
    )
    cache = "warm" if warm else "cold"
    return Group(f"cpu-{cache}", f"Load into a live module on the CPU, from a {cache} page cache", rows, rate=True)


def _cpu_stalls(gb: float) -> Group:
    rows = (
        _stall("xla_ckpt", "ours_async", gb, "cpu", short=True),
        *(
            _stall(f'xla_ckpt, `snapshot="{mode}"`', f"ours_{mode}", gb, "cpu", short=mode == "overlap")
            for mode in ("host", "overlap")
        ),
        _stall("one memcpy of the state into warm memory", "memcpy", gb, "cpu", short=True),
        _stall("`dcp.async_save`, thread", "dcp_thread", gb, "cpu", rounds=2),
        _stall("`dcp.async_save`, process", "dcp_process", gb, "cpu", rounds=2),
        _stall("`dcp.async_save`, kept stager", "dcp_stager", gb, "cpu", rounds=2),
        _stall("moonclip", "moonclip_async", gb, "cpu", rounds=2),
        _stall("orbax v0 async, jax arrays", "orbax_async", gb, "jax", rounds=2),
        _stall("orbax v1 async, jax arrays", "orbax_v1_async", gb, "jax", rounds=2),
    )
    return Group("cpu-stall", "Stall of the caller in an asynchronous save of CPU tensors", rows, "ms", plot=True)


def _simulated(gb: float) -> tuple[Group, ...]:
    """The accelerator that the tests simulate, if they are here."""
    if importlib.util.find_spec("tests.device") is None:
        return ()
    rows = (
        _stall('xla_ckpt, `snapshot="overlap"`', "ours_overlap", gb, "sim", rounds=2, short=True),
        _stall('xla_ckpt, `snapshot="device"`', "ours_device", gb, "sim", rounds=2),
        _stall('xla_ckpt, `snapshot="host"`', "ours_host", gb, "sim", rounds=2),
        _stall(COPY_FIRST, "each_then_thread", gb, "sim", rounds=2, short=True),
    )
    return (
        Group("accelerator", "Stall of the caller in an asynchronous save from a simulated accelerator", rows, "ms"),
    )


COPY_FIRST = "copy everything first, then a thread"


def _small() -> tuple[Group, Group]:
    gb = MANY * 1024 / 1e9

    def load(name: str, loader: str, saver: str, **options: object) -> Row:
        device = "xla" if saver in ("ours", "xser") else "cpu"
        return _load(name, loader, Saved(saver, device, gb, MANY), warm=True, onto="xla", **options)

    saves_ = (
        _save("xla_ckpt", "ours", gb, count=MANY, short=True),
        _save("`xm.save`", "torch_save", gb, count=MANY, rounds=2),
        _save("safetensors", "safetensors", gb, count=MANY, rounds=2),
        _save("`dcp.save`", "dcp", gb, count=MANY, rounds=1),
        _save("`xser.save`", "xser", gb, count=MANY, rounds=1),
    )
    loads_ = (
        load("xla_ckpt", "ours", "ours", short=True),
        load("`torch.load(mmap=True)`", "torch_load_mapped", "torch_save", rounds=2),
        load("safetensors", "safetensors", "safetensors", rounds=2),
        load("`dcp.load`", "dcp", "dcp", rounds=1),
        load("`xser.load`", "xser", "xser", rounds=1),
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
    rows = (Row("xla_ckpt", starts.first_save, (gb,), "start", rounds=3),)
    return Group("first", "The first save of a process, of XLA tensors", rows)


NOTES: dict[str, str] = {
    "all": "A state is made of one random block, with another number added in each tensor; XLA tensors lie in memory "
    "that DLPack handed to the device, since making them there takes longer than saving them. All libraries are "
    "imported before the clock starts, orbax included; *The first save of a process* and *Import* are about that.",
    "xla_ckpt": "Digests of every byte, fsync of files and directories, the manifest, and the commit are in its times.",
    "raw limit": "The same bytes from zero-copy views through O_DIRECT by three threads, without names or digests.",
    "durable": "*Durable* is when every file and directory has been fsync'ed: the benchmark does that after each save, "
    "also of those who did it themselves. *Returned* is when the call came back: a crash of the machine could still "
    "lose the files of those who did not.",
    "`xm.save`": "`xm.save` transfers all tensors in one batch and calls `torch.save`, and so does the row.",
    "safetensors": "XLA tensors are transferred in one batch before `save_file`, and after `load_file`, which maps.",
    "dcp": "Stock has a thread for each core, and does not sync by itself (`sync_files=False`). On XLA tensors stock "
    "`dcp.async_save` without our stager fails; its row says how.",
    "orbax": "jax arrays on the CPU, its own kind, since it knows no torch tensors. v0 is `Checkpointer` with "
    "`StandardCheckpointHandler`, and `StandardCheckpointer` where asynchronous; v1 is "
    "`orbax.checkpoint.experimental.v1`.",
    "moonclip": "From the registry, without loss (no `save_dtype`), at compression level 1; each save is a full one, "
    "and waits for its `fsync`. It takes CPU tensors only.",
    "kept stager": "One `DefaultStager` for all saves of a process, so that its memory is warm from the second one on.",
    "transfer, then a thread": "What neuronx-distributed's asynchronous save does.",
    "stall": "The median of all saves of a process but the first; the first is beside it.",
    "load": "The clock stops when a byte of every page of the values on the device has been read, so that nobody is "
    "done by mapping a file. Then the digest of all values is compared with that of the saved state: a contender that "
    "loads something else has no time.",
    '`snapshot="overlap"`': "No step follows in these rows before the save is done; a step that comes earlier waits "
    "for what is not copied yet, which is stall, too.",
    "simulated accelerator": f"The device of tests/device, in the processor, with a link of {LINK:g} GB/s to the host: "
    "the seconds follow from that choice, and the ratios hardly.",
    "memory": "The rise of the process's peak of resident memory (`VmHWM`) over what it was before the call. An XLA "
    "load makes new buffers, which become the state: the old ones live until all is verified. Mapped files count.",
    "parallel": "ZeRO-1 is torch_xla's optimizer: each of four processes holds the whole model and a quarter of the "
    "moments. The time is that of the slowest rank; GB/s are of all bytes stored.",
    "loop": "The time of a step while a save runs, over that of a step in windows of the same length before and after. "
    "The processor time of a save is that of this process, without the kernel's own threads and interrupts.",
}
"""What makes the rows comparable, and what does not, said in one place."""
