"""The command: `python -m benchmarks.peers`; `make bench`, `make bench-short` and `make bench-check` call it."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.peers import machine, render
from benchmarks.peers.check import compare, missing, uncommitted
from benchmarks.peers.contenders import groups
from benchmarks.peers.results import Results
from benchmarks.peers.rows import Group
from benchmarks.peers.running import Runner, run
from tests.nursery import end_all

ROOT = Path(__file__).parents[2]
MEASURED = ROOT / "docs/measured"
AGAIN = 4
"""How often a ratio that is in doubt is measured again, at most: one noisy round is no fall."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print, write or compare; returns the exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.write == MEASURED and (args.only or args.short) and not args.more:
        parser.error("performance.md there is of one whole run: name another directory to write a part of it to")
    if args.more and not args.write:
        parser.error("--more goes on with the run that --write has the results of")
    chosen = _chosen(groups(args.gb), args.only, short=args.short or args.check)
    results = _begun(args) if args.more else Results(_about(args))
    scratch = args.scratch / "peers"  # what else is in that directory stays
    shutil.rmtree(scratch, ignore_errors=True)
    runner = Runner(scratch, limit=args.limit, patience=args.patience)
    rounds = 1 if args.check else args.rounds
    try:
        rounds = run(chosen, rounds, runner, results, _say, 60 * args.minutes)
        code = _check(args, chosen, runner, results) if args.check else 0
    finally:
        end_all()
        shutil.rmtree(scratch, ignore_errors=True)
    for name, count in (("rounds", rounds), ("unquiet", runner.unquiet), ("measured", runner.measured)):
        results.about[name] = results.about.get(name, 0) + count
    if args.more:
        chosen = [group for group in groups(args.gb) if group.key in results.rows]
    print(render.document(results, chosen))
    if args.write:
        args.write.mkdir(parents=True, exist_ok=True)
        (args.write / "performance.json").write_text(json.dumps(results.to_json(), indent=1) + "\n")
        render.write(results, chosen, args.write)
    return code


def _begun(args: argparse.Namespace) -> Results:
    """The results of a run that is gone on with."""
    results = Results.from_json(json.loads((args.write / "performance.json").read_text()))
    now = {"gb": args.gb, "machine": machine.description()}
    if other := {name: was for name, value in now.items() if (was := results.about[name]) != value}:
        raise SystemExit(f"the run there is another one: {other}, and this one {now}")
    return results


def _check(args: argparse.Namespace, chosen: list[Group], runner: Runner, results: Results) -> int:
    """Compare with the committed run; what is in doubt is measured again."""
    committed = Results.from_json(json.loads(args.committed.read_text()))
    if committed.about["gb"] != args.gb:
        raise SystemExit(f"{args.committed} was made with --gb {committed.about['gb']}, and this run with {args.gb}")
    for _ in range(AGAIN):
        doubtful = {each.guard.source.group for each in compare(committed, results) if each.is_doubtful}
        run([group for group in chosen if group.key in doubtful], 1, runner, results, _say)
    compared, gone = compare(committed, results), missing(committed, results)
    lines = [str(each) for each in compared]
    lines += [f"not compared, since the committed run is older: {what}" for what in uncommitted(committed, results)]
    lines += [f"FALLEN {what}: the committed run has it, and a row of this one failed" for what in gone]
    print(*lines, sep="\n", file=sys.stderr)
    return 1 if gone or any(each.has_fallen for each in compared) else 0


def _chosen(all_: list[Group], only: str, *, short: bool) -> list[Group]:
    """The groups that were asked for, in the short form with the rows that targets are about."""
    names = only.split(",") if only else [group.key for group in all_]
    if unknown := set(names) - {group.key for group in all_}:
        raise SystemExit(f"no such group: {', '.join(sorted(unknown))}; there are {', '.join(g.key for g in all_)}")
    kept = [group for group in all_ if group.key in names]
    if short:
        kept = [replace(group, rows=tuple(row for row in group.rows if row.short)) for group in kept]
    return [group for group in kept if group.rows]


def _about(args: argparse.Namespace) -> dict[str, object]:
    words = ["--short"] if args.short else []
    words += [f"--only {args.only}"] if args.only else []
    words += [f"--gb {args.gb:g}"] if args.gb != 1.0 else []
    command = f"python -m benchmarks.peers {' '.join(words)}" if words else "make bench"
    return {
        "command": command, "gb": args.gb, "machine": machine.description(),
        "load_before": machine.load_average(), "speed": machine.speed(),
    }  # fmt: skip


def _say(line: str) -> None:
    print(line, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description="Measure our saves and loads.")
    parser.add_argument("--gb", type=float, default=1.0, help="size of a saved state; loads have twice as much")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=40, help="no round begins that would end later than this")
    parser.add_argument("--only", default="", help="groups, with commas between them; by default all")
    parser.add_argument("--short", action="store_true", help="only the rows that targets are about")
    parser.add_argument("--limit", type=float, default=120, help="seconds that one measurement may take")
    parser.add_argument("--patience", type=float, default=3, help="seconds to wait for a quiet machine before each")
    parser.add_argument("--scratch", type=Path, default=ROOT / "bench_run", help="a directory on the disk to measure")
    parser.add_argument("--committed", type=Path, default=MEASURED / "performance.json")
    parser.add_argument(
        "--write", type=Path, nargs="?", const=MEASURED, help="write performance.md, .json and pictures there"
    )
    parser.add_argument("--more", action="store_true", help="further rounds of the run whose results --write has")
    parser.add_argument("--check", action="store_true", help="the short form; fails if a ratio fell")
    return parser


if __name__ == "__main__":
    sys.exit(main())
