"""Who loads what whom saved: DCP directories of three programs, of every kind of job, into every other kind.

    python benchmarks/dcp_pairs.py [--latest .venv-latest/bin/python] [--kinds fsdp2x2,xla_tp] [--all] [--write]

Each kind of job saves the same known training state (model, AdamW with two groups) with stock `dcp.save`, with
`xla_ckpt.save_checkpoint(layout="dcp")`, and with `xla_ckpt.dcp.save`. Each kind of job loads all of these directories
with stock `dcp.load`, `xla_ckpt.load_checkpoint` and `xla_ckpt.dcp.load`, and compares what it has with the known
state, bit for bit. Every job is a real one, under torchrun. ``--latest`` is the python of an environment with another
torch: jobs of both environments load what jobs of both saved. ``--write`` makes docs/measured/dcp-pairs.md.

Without ``--all``, one of the three programs loads each directory in each kind of job. They take turns, so that each
program loads what each program saved, in each kind of job, and of each kind of job.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
HAS_CALLS = importlib.util.find_spec("xla_ckpt.dcp") is not None


@dataclass(frozen=True)
class Kind:
    """A kind of job."""

    title: str
    ranks: int
    """0: a process without torchrun and without a process group."""

    recipe: str
    """Of `tests.topology.kinds.build`."""

    xla: bool = False
    spmd: tuple[Any, ...] = ()
    """How tensors of two dims are spread over the mesh of (a: 4, b: 2) devices, in turn."""

    @property
    def wrapped(self) -> bool:
        """FSDP1, of which this library takes the state dicts, and not the module."""
        return self.recipe == "fsdp1"

    @property
    def numbered(self) -> bool:
        """ZeRO-1, whose states torch's `get_state_dict` leaves out: programs give DCP its own state dict."""
        return "zero1" in self.recipe

    @property
    def plain_shards(self) -> bool:
        """Whether a plain tensor is a part of a larger one: stock DCP then needs `xla_ckpt.dcp.sharded`."""
        return self.xla and not self.spmd


KINDS = {
    "one": Kind("one process", 0, "dp=1 cpu"),
    "ddp": Kind("DDP 2", 2, "ddp"),
    "fsdp1": Kind("FSDP1 2", 2, "fsdp1"),
    "fsdp2x2": Kind("FSDP2 2", 2, "fsdp2"),
    "fsdp2x3": Kind("FSDP2 3", 3, "fsdp2"),
    "fsdp2x4": Kind("FSDP2 4", 4, "fsdp2"),
    "hsdp": Kind("HSDP 2 x 2", 4, "hsdp"),
    "tp": Kind("TP 2", 2, "torch_tp"),
    "tp_fsdp": Kind("TP 2 x FSDP2 2", 4, "tp_fsdp"),
    "xla_tp": Kind("XLA NxD TP 2", 2, "tp=2", xla=True),
    "xla_zero1": Kind("XLA ZeRO-1 2", 2, "dp=2 zero1", xla=True),
    "xla_spmd": Kind("XLA SPMD 8", 1, "dp=1", xla=True, spmd=((("a", "b"), None), ("a", "b"))),
    "xla_spmd_r": Kind("XLA SPMD 4 x 2", 1, "dp=1", xla=True, spmd=(("a", None), ("a", "b"), (None, "b"))),
}


ACROSS = ("one", "fsdp1", "fsdp2x4", "tp_fsdp", "xla_tp")
"""Kinds of jobs whose directories are loaded with another torch, too."""


def possible(names: Sequence[str], xla: bool) -> list[str]:
    """Those of some kinds that there are with torch_xla, or without it."""
    return [name for name in names if xla or not KINDS[name].xla]


# --- in the jobs ------------------------------------------------------------------------------------------------------


def held_by(kind: Kind, blank: bool) -> Any:
    """The state on this rank: the known one; or blank, with other numbers in its groups, too."""
    from tests.topology.kinds import build

    held = build(kind.recipe, blank=blank)
    if blank and kind.xla:
        prime(held)
    if kind.spmd:
        mark(held, kind.spmd)
    if blank:
        for group in held.optimizer.param_groups:
            group["lr"], group["weight_decay"] = 0.5, 0.25
    return held


def prime(held: Any) -> None:
    """Give an optimizer the states that a load by DCP's calls fills, on the device."""
    import torch

    optimizer = getattr(held.optimizer, "base_optimizer", held.optimizer)
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        moments = {name: torch.zeros(p.shape).to(p.device) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[p] = {"step": torch.tensor(0.0), **moments}


def mark(held: Any, ways: Sequence[Any]) -> None:
    """Spread parameters and their states over eight devices."""
    import numpy as np
    import torch_xla
    import torch_xla.distributed.spmd as xs

    torch_xla.sync()  # what is pending would be made without its annotation
    mesh = xs.Mesh(np.arange(8), (4, 2), ("a", "b"))
    for i, p in enumerate(p for p in held.model.parameters() if p.dim() == 2):
        for tensor in (p, *(v for v in held.optimizer.state[p].values() if v.dim() == 2)):
            xs.mark_sharding(tensor, mesh, ways[i % len(ways)])


def differences(held: Any) -> list[str]:
    """What of a loaded state is not the known one."""
    from tests.topology.state import GROUPS

    try:
        bad: list[str] = held.differences()
    except KeyError as error:
        return [f"no {error} in the state of a parameter"]
    bad += [] if [float(b) for n, b in held.model.named_buffers() if n.endswith("seen")] == [5.0] else ["buffer"]
    for group, saved in zip(held.optimizer.param_groups, GROUPS, strict=True):
        bad += [f"group's {key}" for key, value in saved.items() if group[key] != value]
    return bad


def state_dict(held: Any, numbered: bool = False) -> dict[str, Any]:
    """As programs give it to DCP."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    if numbered:
        return {"model": held.model.state_dict(), "optimizer": held.optimizer.state_dict()}
    model, optimizer = get_state_dict(held.model, held.optimizer)
    return {"model": model, "optimizer": optimizer}


def take(held: Any, state: Mapping[str, Any], numbered: bool = False) -> None:
    from torch.distributed.checkpoint.state_dict import set_state_dict

    if numbered:
        held.model.load_state_dict(state["model"])
        held.optimizer.load_state_dict(state["optimizer"])
        return
    set_state_dict(held.model, held.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def sharded(held: Any, state: dict[str, Any]) -> dict[str, Any]:
    """The same, in which plain tensors say of what they are parts."""
    from xla_ckpt import dcp

    return dcp.sharded(state, held.model, held.options.get("mesh"), optimizer=held.optimizer)


def stock_save(kind: Kind, held: Any, path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save(state_dict(held), checkpoint_id=path, planner=planner(kind, "SPMDSavePlanner"))


def stock_save_sharded(kind: Kind, held: Any, path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save(sharded(held, state_dict(held, kind.numbered)), checkpoint_id=path)


def manager_save(kind: Kind, held: Any, path: Path) -> None:
    from torch_xla.experimental.distributed_checkpoint import CheckpointManager

    manager = CheckpointManager(f"{path}-manager", save_interval=1, chkpt_on_preemption=False)
    manager.save(0, state_dict(held), force=True)
    os.rename(f"{path}-manager/0", path)


def our_save(kind: Kind, held: Any, path: Path) -> None:
    import xla_ckpt

    state = state_dict(held) if kind.wrapped else {"model": held.model, "optimizer": held.optimizer}
    xla_ckpt.save_checkpoint(
        path.parent, path.name, **state, layout="dcp", options=xla_ckpt.SaveOptions(timeout=60), **held.options
    )


def calls_save(kind: Kind, held: Any, path: Path) -> None:
    from xla_ckpt import dcp

    state = state_dict(held, kind.numbered)
    dcp.save(sharded(held, state) if kind.plain_shards else state, checkpoint_id=path)


def stock_load(kind: Kind, held: Any, path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    load_with(dcp.load, kind, held, path, planner(kind, "SPMDLoadPlanner"))


def our_load(kind: Kind, held: Any, path: Path) -> None:
    import xla_ckpt

    state = state_dict(held) if kind.wrapped else {"model": held.model, "optimizer": held.optimizer}
    xla_ckpt.load_checkpoint(path.parent, path.name, **state, options=xla_ckpt.LoadOptions(timeout=60), **held.options)
    if kind.wrapped:
        take(held, state)


def calls_load(kind: Kind, held: Any, path: Path) -> None:
    from xla_ckpt import dcp

    load_with(dcp.load, kind, held, path, None)


def load_with(load: Callable[..., None], kind: Kind, held: Any, path: Path, planner: Any) -> None:
    """Call `dcp.load`, stock's or ours, and give the objects what it loaded."""
    state = state_dict(held, kind.numbered)
    into = sharded(held, state) if kind.plain_shards else dict(state)
    # torch_xla's planners store the groups of an optimizer as one value, and look for them as one; DCP's own do not.
    apart = (b"optimizer.param_groups.0" in (path / ".metadata").read_bytes()) == (planner is not None)
    if apart:
        into["optimizer"] = {"state": into["optimizer"]["state"]}
        groups = state["optimizer"]["param_groups"]
        key = "optimizer.param_groups"
        values = {f"{key}.{i}.{k}": v for i, g in enumerate(groups) for k, v in g.items()} if planner else {key: groups}
        into |= values
    load(into, checkpoint_id=path, planner=planner)
    if apart:
        new = [{k: into[f"{key}.{i}.{k}"] for k in g} for i, g in enumerate(groups)] if planner else into[key]
    else:
        new = into["optimizer"]["param_groups"]
    take(held, {**state, "optimizer": {**state["optimizer"], "param_groups": new}}, kind.numbered)


def planner(kind: Kind, name: str) -> Any:
    """torch_xla's planner for SPMD; else stock's default."""
    if not kind.spmd:
        return None
    from torch_xla.experimental import distributed_checkpoint

    return getattr(distributed_checkpoint, name)()


SAVE: dict[str, Callable[[Kind, Any, Path], None]] = {
    "stock `dcp.save`": stock_save,
    "stock `dcp.save` of `xla_ckpt.dcp.sharded`": stock_save_sharded,
    "torch_xla's `CheckpointManager`": manager_save,
    '`save_checkpoint(layout="dcp")`': our_save,
    "`xla_ckpt.dcp.save`": calls_save,
}
LOAD: dict[str, Callable[[Kind, Any, Path], None]] = {
    "stock `dcp.load`": stock_load,
    "`load_checkpoint`": our_load,
    "`xla_ckpt.dcp.load`": calls_load,
}
NEED_CALLS = (stock_save_sharded, calls_save, calls_load)


def savers(kind: Kind) -> list[str]:
    """The programs that save jobs of a kind."""
    only = {stock_save_sharded: kind.plain_shards, manager_save: kind.spmd}
    return [n for n, call in SAVE.items() if only.get(call, True) and (HAS_CALLS or call not in NEED_CALLS)]


def loaders(kind: Kind, saved: Saved) -> list[str]:
    """The programs that load a directory into jobs of a kind.

    States that DCP's own calls saved by numbers, only such calls of the same kind of job find again.
    """
    needs = (*NEED_CALLS, *((stock_load,) if kind.plain_shards else ()))
    by_number = KINDS[saved.kind].numbered and SAVE[saved.saver] in (stock_save_sharded, calls_save)
    able = our_load if by_number != kind.numbered else None
    return [n for n, call in LOAD.items() if (HAS_CALLS or call not in needs) and able in (None, call)]


@dataclass(frozen=True)
class Saved:
    """A directory: who saved it, in which job, with which torch."""

    saver: str
    kind: str
    torch: str

    def path(self, root: Path) -> Path:
        return root / self.torch / f"saver{list(SAVE).index(self.saver)}" / self.kind


def save_all(kind: str, torch_version: str, root: Path) -> dict[str, str]:
    """Save with each program; by its name what went wrong on this rank, or nothing."""
    outcome = {}
    for name in savers(KINDS[kind]):
        path = Saved(name, kind, torch_version).path(root)
        path.parent.mkdir(parents=True, exist_ok=True)
        held = held_by(KINDS[kind], blank=False)
        outcome[name] = attempt(lambda n=name, h=held, p=path: SAVE[n](KINDS[kind], h, p))
    return outcome


def turn(kind: str, one: Saved) -> list[str]:
    """The one program whose turn it is to load a directory."""
    able = loaders(KINDS[kind], one)
    kinds, programs = list(KINDS), list(SAVE)
    return [able[(kinds.index(kind) + kinds.index(one.kind) + programs.index(one.saver)) % len(able)]] if able else []


def load_all(kind: str, saved: Sequence[Saved], root: Path, *, every: bool = True) -> list[dict[str, str]]:
    """Load each directory with each program. By directory and program: what went wrong on this rank, or nothing."""
    outcomes: list[dict[str, str]] = []
    for one in saved:
        outcomes.append({})
        for name in loaders(KINDS[kind], one) if every else turn(kind, one):
            held = held_by(KINDS[kind], blank=True)
            told = attempt(lambda n=name, h=held, s=one: LOAD[n](KINDS[kind], h, s.path(root)))
            outcomes[-1][name] = told or ("other values: " + ", ".join(bad) if (bad := differences(held)) else "")
    return outcomes


def attempt(call: Callable[[], object]) -> str:
    """What a call raised; nothing if it did not."""
    from torch.distributed.checkpoint import CheckpointException

    try:
        call()
    except (Exception, CheckpointException) as error:  # whatever it is goes into the document
        inner = [e for e, _ in getattr(error, "failures", {}).values()]
        return f"{type(inner[0] if inner else error).__name__}: {inner[0] if inner else error}".split("\n")[0][:300]
    return ""


def act(order: Path) -> None:
    """Do this rank's part of a job that `run_job` has ordered."""
    asked = json.loads(order.read_text())
    kind = KINDS[asked["kind"]]
    warnings.simplefilter("ignore")
    with contextlib.ExitStack() as stack:
        rank = int(os.environ.get("RANK", "0"))
        if kind.ranks:
            import torch.distributed as dist

            dist.init_process_group("gloo")
            stack.callback(dist.destroy_process_group)
            if kind.spmd:
                import torch_xla.runtime as xr

                xr.use_spmd()
            elif kind.xla:
                import neuron_compat

                stack.enter_context(neuron_compat.emulate())
        root = Path(asked["root"])
        if "saved" in asked:
            told: Any = load_all(asked["kind"], [Saved(**s) for s in asked["saved"]], root, every=asked["every"])
        else:
            told = save_all(asked["kind"], asked["torch"], root)
        order.with_suffix(f".{rank}").write_text(json.dumps(told))
        if kind.ranks:
            dist.barrier()


# --- in the process that starts them ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Environment:
    """A python with its torch."""

    python: str
    torch: str
    xla: bool

    @classmethod
    def of(cls, python: str) -> Environment:
        code = (
            "from importlib import metadata, util; print(metadata.version('torch'), bool(util.find_spec('torch_xla')))"
        )
        told = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.split()
        return cls(python, told[0].split("+")[0], told[1] == "True")


class JobError(Exception):
    """A job did not come to its end."""


def run_job(environment: Environment, kind: str, folder: Path, **order: Any) -> list[Any]:
    """Run a job under torchrun; what each rank told."""
    file = folder / f"{kind}-{environment.torch}-{'load' if 'saved' in order else 'save'}.json"
    file.write_text(json.dumps({"kind": kind, "torch": environment.torch, **order}))
    ranks = KINDS[kind].ranks
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "CPU_NUM_DEVICES")}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PJRT_DEVICE": "CPU", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    if KINDS[kind].spmd:
        env["CPU_NUM_DEVICES"] = "8"
    done = subprocess.run(
        [environment.python, *launch, __file__, "--order", str(file)],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        log = file.with_suffix(".log")
        log.write_text(done.stdout + done.stderr)
        raise JobError(f"the job ended with exit code {done.returncode}: {log}")
    return [json.loads(file.with_suffix(f".{rank}").read_text()) for rank in range(max(1, ranks))]


def first(told: Iterator[str]) -> str:
    """What the ranks told of one attempt: the first that went wrong."""
    return next(filter(None, told), "")


@dataclass(frozen=True)
class Pair:
    """One attempt to load one directory."""

    saved: Saved
    loader: str
    kind: str
    torch: str
    wrong: str


def run(
    environments: Sequence[Environment], kinds: Sequence[str], folder: Path, *, every: bool
) -> tuple[dict[Saved, str], list[Pair]]:
    """Save everything, and load everything; what went wrong in each save, and all pairs."""
    saves: dict[Saved, str] = {}
    for environment in environments:
        for kind in possible(kinds, environment.xla):
            programs = [Saved(name, kind, environment.torch) for name in savers(KINDS[kind])]
            try:
                told = run_job(environment, kind, folder, root=str(folder))
                saves |= {one: first(rank[one.saver] for rank in told) for one in programs}
            except JobError as error:
                saves |= dict.fromkeys(programs, str(error))
            print(f"torch {environment.torch}: {KINDS[kind].title} saved", flush=True)
    pairs = []
    for environment in environments:
        saved = [s for s, wrong in saves.items() if not wrong and (s.torch == environment.torch or s.kind in ACROSS)]
        for kind in possible(kinds, environment.xla):
            mine = []
            asked = [dataclasses.asdict(s) for s in saved]
            try:
                found = run_job(environment, kind, folder, root=str(folder), saved=asked, every=every)
                for i, one in enumerate(saved):
                    for name in found[0][i]:
                        wrong = first(rank[i][name] for rank in found).replace(f"{folder}/", "")
                        mine.append(Pair(one, name, kind, environment.torch, wrong))
            except JobError as error:
                mine = [
                    Pair(s, n, kind, environment.torch, str(error))
                    for s in saved
                    for n in (loaders(KINDS[kind], s) if every else turn(kind, s))
                ]
            pairs += mine
            good = sum(not p.wrong for p in mine)
            print(f"torch {environment.torch}: {KINDS[kind].title} loaded {good} of {len(mine)}", flush=True)
    return saves, pairs


def document(saves: Mapping[Saved, str], pairs: Sequence[Pair]) -> str:
    """The tables, as Markdown."""
    lines: list[str] = []
    into = [k for k in KINDS if any(p.kind == k for p in pairs)]
    for saver in SAVE:
        mine = [p for p in pairs if p.saved.saver == saver]
        if not mine:
            continue
        lines += [
            f"### Saved by {saver}",
            "",
            "| saved by a job of | " + " | ".join(KINDS[k].title for k in into) + " |",
        ]
        lines += ["|---" * (len(into) + 1) + "|"]
        for name, kind in KINDS.items():
            row = [p for p in mine if p.saved.kind == name]
            if row:
                cells = [[p for p in row if p.kind == k] for k in into]
                lines.append(f"| {kind.title} | " + " | ".join(map(cell, cells)) + " |")
        lines += [""]
        lines += [f"* {text}" for text in failures([p for p in mine if p.wrong])]
        lines += [f"* {KINDS[s.kind].title} (torch {s.torch}) did not save it: `{w}`"
                  for s, w in saves.items() if s.saver == saver and w]  # fmt: skip
        lines += [""] if lines[-1] else []
    return "\n".join(lines)


TURNS = """ Three
programs took turns in it."""
INTRODUCTION = """# Who loads what whom saved

Made by `python benchmarks/dcp_pairs.py --write`, with {versions}. Each kind of job, under the real torchrun on CPUs,
saved one known training state: a model of uneven shapes, and AdamW with two groups. Each kind of job loaded all of
these directories, and compared model, buffer, both moments, steps and groups with the known state, bit for bit.{turns}

A cell says which programs loaded it exactly: S is stock `dcp.load`, L is `load_checkpoint`, C is `xla_ckpt.dcp.load`.
~~S~~ is one that failed, with some version of torch; below each table is why. Each version of torch loaded what the
same version saved, and some of what the other one saved.

Programs give stock's and our `dcp` calls what `get_state_dict` returns. There are two exceptions. Plain tensors of
tensor-parallel ranks go through `xla_ckpt.dcp.sharded` wherever something is loaded. torch's `get_state_dict` leaves
the states of a ZeRO-1 optimizer out; so what `dcp` calls save and load of it is its own `state_dict()`, in which
states have numbers: only ZeRO-1 jobs and `load_checkpoint` take these. torch_xla's planners store an optimizer's groups
as one value, and programs ask for it as one.

Where a row fails whoever loads it, what was saved is not there: stock `dcp.save` loses the shards of plain
tensor-parallel tensors and the states that `get_state_dict` leaves out, and torch_xla's planners lose what SPMD
replicates over a part of the mesh. Programs with FSDP1 ask stock for the groups of an optimizer as one value
(`optimizer.param_groups`), which other jobs do not save.

"""


LETTERS = dict(zip(LOAD, "SLC", strict=True))


def cell(pairs: Sequence[Pair]) -> str:
    marks = []
    for name, letter in LETTERS.items():
        mine = [p for p in pairs if p.loader == name]
        marks += [f"~~{letter}~~" if any(p.wrong for p in mine) else letter] if mine else []
    return " ".join(marks)


def failures(pairs: Sequence[Pair]) -> list[str]:
    """What went wrong, with those that say the same in one line."""
    groups: dict[tuple[str, ...], list[Pair]] = collections.defaultdict(list)
    for p in pairs:
        groups[p.loader, p.saved.torch, p.torch, p.saved.kind].append(p)
    merged: dict[tuple[Any, ...], list[str]] = collections.defaultdict(list)
    for (loader, from_torch, to_torch, kind), members in groups.items():
        kinds = tuple(dict.fromkeys(KINDS[m.kind].title for m in members))
        said = members[0].wrong
        merged[loader, from_torch, to_torch, kinds, said.split(":")[0]].append(f"{KINDS[kind].title}\0{said}")
    texts = []
    for (loader, from_torch, to_torch, kinds, _), sources in merged.items():
        of = ", ".join(s.split("\0")[0] for s in sources)
        said = sources[0].split("\0")[1]
        texts.append(
            f"{loader} of torch {to_torch}, from torch {from_torch}'s {of}, into {', '.join(kinds)}: `{said[:160]}`"
        )
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--latest", default=str(ROOT / ".venv-latest/bin/python"), help="python with another torch")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--all", action="store_true", help="each program loads each directory")
    parser.add_argument("--scratch", type=Path, default=ROOT / "pairs_run")
    parser.add_argument("--write", action="store_true", help="write docs/measured/dcp-pairs.md")
    parser.add_argument("--order", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.order:
        act(asked.order)
        return
    pythons = [sys.executable, *([asked.latest] if Path(asked.latest).exists() else [])]
    environments = [Environment.of(python) for python in pythons]
    shutil.rmtree(asked.scratch, ignore_errors=True)
    asked.scratch.mkdir(parents=True)
    saves, pairs = run(environments, asked.kinds.split(","), asked.scratch, every=asked.all)
    text = document(saves, pairs)
    print(text)
    versions = " and ".join(f"torch {e.torch}" + (" (with torch_xla)" if e.xla else "") for e in environments)
    if asked.write:
        (ROOT / "docs/measured/dcp-pairs.md").write_text(
            INTRODUCTION.format(versions=versions, turns="" if asked.all else TURNS) + text
        )


if __name__ == "__main__":
    main()
