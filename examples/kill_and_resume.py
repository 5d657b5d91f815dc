"""Train, kill -9 in mid-save, resume, and compare with a run that was never broken.

    python examples/kill_and_resume.py                             # or: make demo
    python examples/kill_and_resume.py --root s3://bucket/demo     # or, with a server of its own: make demo-objects
    python examples/kill_and_resume.py --program jax_train.py      # in jax, without torch

Two runs of examples/train_lm.py, or of another program, on the same text with the same seed. The first is left alone.
The second is killed while a save is being written (some of its files are there), and started again. Every loss after
the resume must be the same to the last bit; the exit code says whether it was.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import xla_ckpt

HERE = Path(__file__).parent
UNFINISHED = ".new-*"


def command(program: str, root: str, log: Path, steps: int, every: int) -> list[str]:
    return [
        sys.executable, str(HERE / program), "--root", root, "--log", str(log),
        "--steps", str(steps), "--save-every", str(every),
    ]  # fmt: skip


def train(*args: Any) -> None:
    """Run the training to its end."""
    subprocess.run(command(*args), check=True)


def begun(root: str) -> set[str]:
    """Tags of which payload files are there, but for those that are committed in a directory."""
    if "://" not in root:
        drafts = Path(root).glob(UNFINISHED)
        return {draft.name.removeprefix(UNFINISHED[:-1]) for draft in drafts if any(draft.glob("*/*.safetensors"))}
    from obstore.store import S3Store

    bucket, _, prefix = root.removeprefix("s3://").partition("/")
    store = S3Store(bucket, client_options={"allow_http": True})  # obstore finds the rest in the environment
    keys = [meta["path"] for some in store.list(prefix) for meta in some]
    return {key.removeprefix(f"{prefix}/").partition("/")[0] for key in keys if key.endswith(".safetensors")}


def train_and_kill(after: int, program: str, root: str, *args: Any) -> str:
    """Run the training, and kill it while it writes a save after `after` committed ones; the unfinished tag."""
    process = subprocess.Popen(command(program, root, *args))
    committed: set[str] = set()  # in a bucket, the files of a tag stay for a while when it is none any more
    while process.poll() is None:
        committed |= set(xla_ckpt.list_tags(root))
        if len(committed) < after:
            time.sleep(0.05)
            continue
        if begun(root) - committed - set(xla_ckpt.list_tags(root)):
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            if left := begun(root) - committed - set(xla_ckpt.list_tags(root)):
                return left.pop()
            return train_and_kill(after, program, root, *args)  # it committed in that very moment: go on, and try again
    raise SystemExit("the training ended before it could be killed in mid-save")


def read(log: Path) -> dict[int, dict[str, Any]]:
    """Step -> what was logged last for it."""
    return {line["step"]: line for line in map(json.loads, log.read_text().splitlines())}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--root", default="demo_run", help="a directory, which is emptied, or s3://bucket/path")
    parser.add_argument("--logs", type=Path, default=Path("demo_run"), help="where the losses go, if not to the root")
    parser.add_argument("--program", default="train_lm.py", help="what is run: a program in this directory")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=5)
    args = parser.parse_args()
    place = args.logs if "://" in args.root else Path(args.root)
    if place.exists():
        shutil.rmtree(place)
    place.mkdir(parents=True)
    logs = {name: place / f"{name}.jsonl" for name in ("unbroken", "broken")}

    print("--- a run that nobody disturbs", flush=True)
    train(args.program, f"{args.root}/unbroken", logs["unbroken"], args.steps, args.save_every)
    print("\n--- the same run, killed with kill -9 while it saves", flush=True)
    broken = f"{args.root}/broken"
    tag = train_and_kill(2, args.program, broken, logs["broken"], args.steps, args.save_every)
    killed_at = max(read(logs["broken"]), default=0)
    print(f"killed after step {killed_at}, with {tag} half written; committed: {', '.join(xla_ckpt.list_tags(broken))}")
    assert tag not in xla_ckpt.list_tags(broken), "a half-written tag is listed"
    print("\n--- and resumed", flush=True)
    train(args.program, broken, logs["broken"], args.steps, args.save_every)

    unbroken, resumed = read(logs["unbroken"]), read(logs["broken"])
    print(f"\n{'step':>5}  {'unbroken':>10}  {'resumed':>10}  equal  stall per save")
    different = [step for step, line in unbroken.items() if line["loss"] != resumed[step]["loss"]]
    for step, line in unbroken.items():
        if step % args.save_every == 0 or step in different:
            a, b = float.fromhex(line["loss"]), float.fromhex(resumed[step]["loss"])
            stall = f"{resumed[step]['stall_ms']:.1f} ms" if "stall_ms" in resumed[step] else ""
            print(f"{step:5d}  {a:10.6f}  {b:10.6f}  {'NO' if step in different else 'yes':5}  {stall}")
    equal = not different
    sound = all(xla_ckpt.verify(broken, t).ok for t in xla_ckpt.list_tags(broken))
    say = {True: "yes", False: "NO"}
    print(f"\nall {len(unbroken)} losses bit-identical: {say[equal]}; every tag sound: {say[sound]}")
    return 0 if equal and sound else 1


if __name__ == "__main__":
    sys.exit(main())
