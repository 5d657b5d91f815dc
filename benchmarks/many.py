"""Many small arrays, many parameters, many tags, imports and commands: what each costs.

    python benchmarks/many.py [--only arrays,stall,dcp,floor,parameters,tags,imports,commands] [--arrays N] [--rounds N]

Each group runs in a process of its own, on CPU PJRT. A row has the least of some rounds: seconds on the clock, and of
processor time (all threads of the process), which other programs on the machine disturb less. Files go to a temporary
directory, which is removed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def row(name: str, work: Callable[[], Any], rounds: int, after: Callable[[Any], Any] = lambda _: None) -> None:
    """Measure something some times, and print the least. `after` is done with each result, and not measured."""
    clocks, cpus = [], []
    for _ in range(rounds):
        clock, cpu = time.perf_counter(), time.process_time()
        made = work()
        clocks.append(time.perf_counter() - clock)
        cpus.append(time.process_time() - cpu)
        after(made)
    print(f"{name:58} {min(clocks):8.4f} {min(cpus):8.4f}", flush=True)


def xla_module(shapes: list[tuple[int, ...]]) -> Any:
    """A module on the XLA device, with everything computed."""
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm

    moved = xm.send_cpu_data_to_device([torch.rand(shape) for shape in shapes], torch_xla.device())
    module = torch.nn.ParameterList(torch.nn.Parameter(value, requires_grad=False) for value in moved)
    torch_xla.sync(wait=True)
    return module


def changed(module: Any) -> Callable[[Any], None]:
    """A function that changes the first array of a module: a state that is saved again has gone on."""
    import torch
    import torch_xla

    def change(_: Any) -> None:
        with torch.no_grad():
            module[0].add_(1)
        torch_xla.sync(wait=True)

    return change


def arrays(args: argparse.Namespace, root: str) -> None:
    """Arrays of 1 KiB on the XLA device, loaded there and on the CPU."""
    import torch
    from safetensors.torch import load_file, save_file

    import xla_ckpt

    module, n = xla_module([(256,)] * args.arrays), args.arrays
    row(f"first save of {n} x 1 KiB", lambda: xla_ckpt.save_checkpoint(root, "a", module), 1)
    row(f"save of {n} x 1 KiB", lambda: xla_ckpt.save_checkpoint(root, "a", module), args.rounds, changed(module))
    one = xla_module([(256,)])
    row("save of 1 x 1 KiB", lambda: xla_ckpt.save_checkpoint(root, "b", one), args.rounds, changed(one))
    row(f"first load of {n} x 1 KiB", lambda: xla_ckpt.load_checkpoint(root, "a", module), 1)
    row(f"load of {n} x 1 KiB", lambda: xla_ckpt.load_checkpoint(root, "a", module), args.rounds)
    on_cpu = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(256)) for _ in range(n))
    row(f"load of {n} x 1 KiB on the CPU, in place", lambda: xla_ckpt.load_checkpoint(root, "a", on_cpu), args.rounds)
    row(f"restore of {n} x 1 KiB into new CPU memory", lambda: xla_ckpt.restore(root, "a"), args.rounds)
    file = f"{root}.safetensors"
    save_file(on_cpu.state_dict(), file)
    row(
        "the same by safetensors, with a copy",
        lambda: {key: value.clone() for key, value in load_file(file).items()},
        args.rounds,
    )


def stall(args: argparse.Namespace, root: str) -> None:
    """How long the caller of an asynchronous save waits."""
    import xla_ckpt

    for count, shape in ((1, (256,)), (60, (8_333_333,)), (800, (625_000,)), (args.arrays, (256,))):
        module = xla_module([shape] * count)

        def begin(module: Any = module, path: str = f"{root}/{count}") -> Any:
            return xla_ckpt.save_checkpoint(path, "a", module, async_save=True)

        begin().result()
        row(f"stall, {count} tensors of {4 * shape[0]} bytes", begin, args.rounds, lambda handle: handle.result())


def dcp(args: argparse.Namespace, root: str) -> None:
    """The calls of torch.distributed.checkpoint, and what its own planners and its pickle take without any storage."""
    import pickle
    import warnings

    import torch
    from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader

    import xla_ckpt.dcp as calls

    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    Path(root).mkdir()
    path, n, rounds = f"{root}/a", args.arrays, args.rounds
    on_xla = dict(xla_module([(256,)] * n).named_parameters())

    def plans_of_a_save() -> None:
        planner: Any = DefaultSavePlanner()
        planner.set_up_planner(on_xla, is_coordinator=True)
        plans, metadata = planner.create_global_plan([planner.create_local_plan()])
        for item in planner.finish_plan(plans[0]).items:
            planner.resolve_data(item)
        pickle.dumps(metadata)

    def plans_of_a_load() -> None:
        planner: Any = DefaultLoadPlanner()
        planner.set_up_planner(dict(on_xla), FileSystemReader(path).read_metadata(), is_coordinator=True)
        planner.finish_plan(planner.create_global_plan([planner.create_local_plan()])[0])

    for place, state in (("XLA", on_xla), ("CPU", {key: torch.rand(256) for key in on_xla})):
        about = f"{n} x 1 KiB on {place}"
        row(f"dcp.save, {about}", lambda state=state: calls.save(state, checkpoint_id=path), rounds)
        begin = partial(calls.async_save, state, checkpoint_id=path)
        row(f"stall of dcp.async_save, {about}", begin, rounds, lambda done: done.result())
        row(f"dcp.load, {about}", lambda state=state: calls.load(dict(state), checkpoint_id=path), rounds)
    row(f"stock's plans and pickle of a save, {n}", plans_of_a_save, rounds)
    row(f"stock's plans and pickle of a load, {n}", plans_of_a_load, rounds)


def floor(args: argparse.Namespace, root: str) -> None:
    """What torch, torch_xla and json alone take for as many arrays, without a line of this library."""
    import gc
    import json

    import torch
    import torch_xla
    import xxhash

    import xla_ckpt
    from xla_ckpt.arrays.dlpack_buffer import DLPackBuffer
    from xla_ckpt.snapshot.memory import SlabAllocator

    lib: Any = torch_xla._XLAC
    module, n, rounds = xla_module([(256,)] * args.arrays), args.arrays, args.rounds
    values = list(module.parameters())
    xla_ckpt.save_checkpoint(root, "a", module)
    text = Path(root, "a", "manifest.json").read_text()
    arrays = json.loads(text)["arrays"]
    host = [torch._C._from_dlpack(lib._to_dlpack(value)) for value in values]
    buffers = [value.numpy().data.cast("B") for value in host]

    def ready() -> list[DLPackBuffer]:
        return [DLPackBuffer(torch.float32, (256,), SlabAllocator()) for _ in range(n)]

    def adopt(capsules: list[Any]) -> None:
        for value, capsule in zip(values, capsules, strict=True):
            value.data = lib._from_dlpack(capsule)

    gc.disable()
    row("the names and tensors of a module", lambda: module.state_dict(keep_vars=True), rounds)
    row("asking whether all are computed", lambda: lib._xla_sync_multi(values, [], True, False), rounds)
    row("the number of each tensor", lambda: [lib._xla_get_tensor_id(v) for v in values], rounds)
    row("holding all buffers (DLPack)", lambda: [torch._C._from_dlpack(lib._to_dlpack(v)) for v in values], rounds)
    row("new CPU tensors", lambda: [torch.empty(256) for _ in range(n)], rounds)
    rows = torch.zeros(n, 256)
    row("new CPU tensors that are views of one", lambda: torch.empty(n, 256).unbind(), rounds)
    row("new CPU tensors, copies of one's rows", lambda: torch.unbind_copy(rows), rounds)
    into, source = [torch.empty(256) for _ in range(n)], [torch.empty(256) for _ in range(n)]
    row("copying into CPU tensors, in one call", lambda: torch._foreach_copy_(into, source), rounds)
    row("the memory of each CPU tensor", lambda: [v.numpy().data.cast("B") for v in into], rounds)
    row("a digest of each", lambda: [xxhash.xxh3_64_intdigest(buffer) for buffer in buffers], rounds)
    row("copying each into one buffer", lambda: b"".join(buffers), rounds)
    row("writing the manifest's arrays as JSON", lambda: json.dumps(arrays), rounds)
    row("reading them", lambda: json.loads(text), rounds)
    made: list[Any] = []
    for _ in range(rounds):
        held = ready()
        made.append([one.create_capsule() for one in held])
        for one in held:
            one.release_ownership()
    row("new XLA buffers from capsules, in the parameters", lambda: adopt(made.pop()), rounds)


def parameters(args: argparse.Namespace, root: str) -> None:
    """A module of 50,000 parameters, and Adam after a step, on the CPU."""
    import torch

    import xla_ckpt

    module = torch.nn.ParameterList(torch.zeros(4) for _ in range(50_000))
    optimizer = torch.optim.Adam(module.parameters(), foreach=True)
    for parameter in module.parameters():
        parameter.grad = torch.ones(4)
    optimizer.step()

    def save() -> Any:
        return xla_ckpt.save_checkpoint(root, "a", module, optimizer)

    def begin() -> Any:
        return xla_ckpt.save_checkpoint(root, "a", module, optimizer, async_save=True)

    save()
    row("save of 50,000 parameters with Adam (200,000 arrays)", save, 2)
    row("stall of the same", begin, 2, lambda handle: handle.result())
    row("load of the same", lambda: xla_ckpt.load_checkpoint(root, "a", module, optimizer), 2)


def tags(args: argparse.Namespace, root: str) -> None:
    """Roots of many tags, each a copy of one with a head of its own."""
    import torch

    import xla_ckpt
    from benchmarks.peers.starts import fill_root

    tree, made = {"w": torch.ones(4)}, 0
    for many in (1_000, 10_000):
        fill_root(root, range(made + 1, many + 1))
        made = many
        row(f"list_tags, {many} tags", lambda: xla_ckpt.list_tags(root), args.rounds)
        row(f"latest_tag, {many} tags", lambda: xla_ckpt.latest_tag(root), args.rounds)
        row(f"restore of the newest, {many} tags", lambda: xla_ckpt.restore(root), args.rounds)
        row(f"save beside {many} tags", lambda: xla_ckpt.save(root, "new", tree), 2)
        row(
            f"save that retires one of {many} tags",
            partial(xla_ckpt.save, root, "x", tree, num_kept_ckpts=many),
            1,
        )
        command(f"xla-ckpt ls, {many} tags", ["ls", root], 1)
    row(f"save that retires all but 10 of {made} tags", partial(xla_ckpt.save, root, "y", tree, num_kept_ckpts=10), 1)


def imports(args: argparse.Namespace, root: str) -> None:
    """What a first save or load needs, behind `import torch`."""
    code = (
        "import sys, time, torch; clock, cpu = time.perf_counter(), time.process_time(); "
        "import xla_ckpt; xla_ckpt.load_checkpoint; xla_ckpt.save_checkpoint; "
        "print(time.perf_counter() - clock, time.process_time() - cpu)"
    )
    for name, env in (("", {}), (" without bytecode caches", {"PYTHONPYCACHEPREFIX": f"{root}/none"})):
        writes = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        if env:
            writes["PYTHONDONTWRITEBYTECODE"] = "1"
        outputs = [
            subprocess.run([sys.executable, "-c", code], env=writes | env, check=True, capture_output=True, text=True)
            for _ in range(args.rounds + 1)
        ]
        found = [tuple(map(float, o.stdout.split())) for o in outputs[1:]]  # the first one fills the caches
        least = [min(column) for column in zip(*found, strict=True)]
        print(f"{'import beyond torch' + name:58} {least[0]:8.4f} {least[1]:8.4f}", flush=True)


def command(name: str, words: list[str], rounds: int) -> None:
    """Measure a command line: a process of its own."""
    clocks, cpus = [], []
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    for _ in range(rounds + 1):  # the first one fills the bytecode caches
        clock, before = time.perf_counter(), os.times()
        subprocess.run([sys.executable, "-m", "xla_ckpt", *words], env=env, check=True, stdout=subprocess.DEVNULL)
        after = os.times()
        clocks.append(time.perf_counter() - clock)
        cpus.append(sum(after[2:4]) - sum(before[2:4]))
    print(f"{name:58} {min(clocks[1:]):8.4f} {min(cpus[1:]):8.4f}", flush=True)


def commands(args: argparse.Namespace, root: str) -> None:
    """The command line, on a small tag and on one of many arrays."""
    import torch

    import xla_ckpt

    command("xla-ckpt --help", ["--help"], args.rounds)
    command("xla-ckpt --version", ["--version"], args.rounds)
    for name, count in (("small", 20), ("large", args.arrays)):
        where = f"{root}/{name}"
        xla_ckpt.save(where, "a", {f"w{i}": torch.ones(256) for i in range(count)})
        for word in ("ls", "show", "verify"):
            command(f"xla-ckpt {word}, a tag of {count} arrays", [word, where], args.rounds)


GROUPS = {f.__name__: f for f in (arrays, stall, dcp, floor, parameters, tags, imports, commands)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(GROUPS), help="groups, with commas between them")
    parser.add_argument("--arrays", type=int, default=20_000, help="how many small arrays (default: 20000)")
    parser.add_argument("--rounds", type=int, default=5, help="of which the least counts (default: 5)")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        with tempfile.TemporaryDirectory() as root:
            GROUPS[args.inside](args, f"{root}/checkpoints")
        return
    print(f"{'':58} {'clock s':>8} {'cpu s':>8}", flush=True)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PJRT_DEVICE": "CPU"}
    for group in args.only.split(","):
        numbers = [f"--arrays={args.arrays}", f"--rounds={args.rounds}"]
        subprocess.run([sys.executable, __file__, f"--inside={group}", *numbers], env=env, check=True)


if __name__ == "__main__":
    main()
