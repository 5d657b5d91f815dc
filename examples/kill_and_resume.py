"""Train, kill -9 in mid-save, resume, and compare with a run that was never broken.

    python examples/kill_and_resume.py          # or: make demo

Two runs of examples/train_lm.py on the same text with the same seed. The first is left alone. The second is killed
while a save is being written (its unfinished directory is there), and started again. Every loss after the resume must
be the same to the last bit; the exit code says whether it was.
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


def command(root: Path, log: Path, steps: int, every: int) -> list[str]:
    return [
        sys.executable, str(HERE / "train_lm.py"), "--root", str(root), "--log", str(log),
        "--steps", str(steps), "--save-every", str(every),
    ]  # fmt: skip


def train(*args: Any) -> None:
    """Run the training to its end."""
    subprocess.run(command(*args), check=True)


def train_and_kill(after: int, root: Path, *args: Any) -> str:
    """Run the training, and kill it while it writes a save after `after` committed ones; the unfinished tag."""
    process = subprocess.Popen(command(root, *args))
    while process.poll() is None:
        if len(xla_ckpt.list_tags(root)) < after:
            time.sleep(0.05)
            continue
        writing = [d for d in root.glob(UNFINISHED) if any(d.glob("*/*.safetensors"))]
        if writing:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            left = [d for d in writing if d.is_dir()]
            if left:
                return left[0].name.removeprefix(UNFINISHED[:-1])
            return train_and_kill(after, root, *args)  # it committed in that very moment: go on, and try again
    raise SystemExit("the training ended before it could be killed in mid-save")


def read(log: Path) -> dict[int, dict[str, Any]]:
    """Step -> what was logged last for it."""
    return {line["step"]: line for line in map(json.loads, log.read_text().splitlines())}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--root", type=Path, default=Path("demo_run"))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=5)
    args = parser.parse_args()
    if args.root.exists():
        shutil.rmtree(args.root)
    args.root.mkdir(parents=True)
    logs = {name: args.root / f"{name}.jsonl" for name in ("unbroken", "broken")}

    print("--- a run that nobody disturbs", flush=True)
    train(args.root / "unbroken", logs["unbroken"], args.steps, args.save_every)
    print("\n--- the same run, killed with kill -9 while it saves", flush=True)
    broken = args.root / "broken"
    tag = train_and_kill(2, broken, logs["broken"], args.steps, args.save_every)
    killed_at = max(read(logs["broken"]), default=0)
    print(f"killed after step {killed_at}, with {tag} half written; committed: {', '.join(xla_ckpt.list_tags(broken))}")
    assert tag not in xla_ckpt.list_tags(broken), "a half-written tag is listed"
    print("\n--- and resumed", flush=True)
    train(broken, logs["broken"], args.steps, args.save_every)

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
