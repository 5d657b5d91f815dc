"""Changed files of every kind, at random: each is refused with a typed error, or loads what was saved. `make fuzz`.

python -m tests.fuzz.run [--inputs 100000] [--specimen NAME ...] [--seed 0] [--json FILE] [--write]
python -m tests.fuzz.run --only "native:123"    one input, which a line of a run names
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import select
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from tests.fuzz import report

if TYPE_CHECKING:
    from tests.fuzz.probes import Outcome

HANGS = 20.0
"""A call that takes longer hangs (s): the machine may be busy."""

BATCH = 300
"""Inputs of one worker; the next one begins as a fresh fork."""


def ready() -> None:
    """Import what the workers need. A process with threads must not fork."""
    from tests.nursed import import_all
    from tests.nursery import LIGHT

    import_all((*LIGHT, "xla_ckpt.dcp", "orbax.checkpoint", "xla_ckpt.rendering.reports", "rich.console",
                 "tests.fuzz.probes", "xla_ckpt.cli.results", "xla_ckpt.conversion.convert",
                 "xla_ckpt.tags.orbax_process"))  # fmt: skip
    from tests.helper import InFork
    from xla_ckpt.tags import orbax_commit

    orbax_commit.HelperProcess = InFork  # type: ignore[misc]
    gc.collect()
    gc.freeze()
    assert threading.active_count() == 1


def forked(work: Callable[[int], None]) -> tuple[int, int]:
    """A fork of this process that does something, with a descriptor to write to; (its id, the other end)."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(read)
            work(write)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(write)
    return pid, read


def make_all(names: Sequence[str], folder: Path) -> None:
    """Make the specimens, in a process of its own: saves leave threads behind."""
    from tests.fuzz.specimens import SPECIMENS

    def make(_: int) -> None:
        for name in names:
            (folder / name).mkdir(parents=True)
            SPECIMENS[name].make(folder / name)

    pid, read = forked(make)
    os.close(read)
    if os.waitpid(pid, 0)[1]:
        raise SystemExit("the specimens cannot be made")


def work_on(inputs: Sequence[tuple[str, int]], made: Path, work: Path) -> Callable[[int], None]:
    """What a worker does: all of these inputs, a line for each that begins, and for each that ends."""

    def do(write: int) -> None:
        from tests.fuzz.probes import Bench, lines
        from tests.fuzz.specimens import SPECIMENS
        from xla_ckpt.tags import lease

        lease.DIRECTORY_EXPIRY_SECONDS = 0.0  # else one that names nobody is watched for a minute
        bench = Bench([SPECIMENS[name] for name in dict(inputs)], made, work)

        def begun(outcome: Outcome) -> None:
            os.write(write, lines(outcome))

        for name, seed in inputs:
            done = bench.run(name, seed, begun)
            begun(done)
            begun(done)  # twice: it has ended
            if bench.spent:
                return

    return do


def one_batch(inputs: Sequence[tuple[str, int]], made: Path, folder: Path) -> list[Outcome]:
    """What became of some inputs. An input that hangs, or ends its worker, is told as that, and the rest goes on."""
    from tests.fuzz.probes import Outcome, read_lines

    done: list[Outcome] = []
    left = list(inputs)
    while left:
        work = Path(tempfile.mkdtemp(dir=folder))
        pid, read = forked(work_on(left, made, work))
        held, last, hangs = b"", None, False
        while True:
            if not select.select([read], [], [], HANGS)[0]:
                hangs = True
                os.kill(pid, 9)
                break
            data = os.read(read, 1 << 16)
            if not data:
                break
            *whole, held = (held + data).split(b"\n")
            for found in read_lines(b"\n".join(whole)):
                if found == last:
                    done.append(found)
                    left.pop(0)
                last = found
        os.close(read)
        status = os.waitpid(pid, 0)[1]
        shutil.rmtree(work, ignore_errors=True)
        if left and (hangs or status):
            if last is None:
                raise SystemExit("a worker has failed before its first input")
            name, seed = left.pop(0)
            text = "" if hangs else f"the process ends with {os.waitstatus_to_exitcode(status)}"
            done.append(Outcome(name, seed, last.kind, last.how, "hangs" if hangs else "untyped", last.call, text))
    return done


def run_all(names: Sequence[str], count: int, first: int, workers: int, folder: Path) -> list[Outcome]:
    """So many inputs, on several processes."""
    from tests.fuzz.probes import lines, read_lines

    made = folder / "made"
    make_all(names, made)
    shares = []
    for worker in range(workers):
        mine = [(names[i % len(names)], first + i // len(names)) for i in range(count)]
        mine.sort(key=lambda of_input: names.index(of_input[0]))

        def do(_: int, worker: int = worker, mine: list[tuple[str, int]] = mine) -> None:
            batches = [mine[i : i + BATCH] for i in range(0, len(mine), BATCH)]
            with open(folder / f"results.{worker}", "wb") as file:
                for batch in batches[worker::workers]:
                    file.writelines(lines(outcome) for outcome in one_batch(batch, made, folder))
                    file.flush()

        shares.append(forked(do))
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid, _ in shares]
    if any(codes):
        raise SystemExit(f"a worker has failed: {codes}")
    return [found for worker in range(workers) for found in read_lines((folder / f"results.{worker}").read_bytes())]


def main(arguments: Sequence[str]) -> int:
    """Run it; 1 if anything was neither refused nor what was saved."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--specimen", action="append", help="only these; by default all")
    parser.add_argument("--seed", type=int, default=0, help="the number of the first input of each specimen")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path, help="a file for the outcomes, one a line")
    parser.add_argument("--write", action="store_true", help="write docs/measured/reliability.md")
    parser.add_argument("--only", help="one input: SPECIMEN:NUMBER")
    given = parser.parse_args(arguments)
    began = time.monotonic()
    os.environ["OMP_NUM_THREADS"] = "1"
    ready()
    from tests.fuzz.specimens import SPECIMENS

    with tempfile.TemporaryDirectory(prefix="fuzz-") as text:
        folder = Path(text)
        if given.only:
            name, _, number = given.only.rpartition(":")
            make_all([name], folder / "made")
            results = one_batch([(name, int(number))], folder / "made", folder)
            print(json.dumps(asdict(results[0]), indent=1).replace("\\n", "\n"))
        else:
            names = given.specimen or list(SPECIMENS)
            results = run_all(names, given.inputs, given.seed, given.workers, folder)
    if given.json:
        given.json.write_text("\n".join(json.dumps(asdict(result)) for result in results))
    seconds = time.monotonic() - began
    problems = report.problems(results)
    print("\n".join([*problems[:60], *report.table(results), *report.rot_table(results)]))
    print(f"{len(results)} inputs, {len(problems)} problems, {seconds:.0f} s: {Counter(r.verdict for r in results)}")
    if given.write:
        report.write(results, seconds)
    return int(bool(problems))


if __name__ == "__main__":
    # The module of this name, and not this one, is what is imported elsewhere.
    import importlib

    sys.exit(importlib.import_module("tests.fuzz.run").main(sys.argv[1:]))
