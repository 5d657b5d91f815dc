"""Each save and load as scalars of TensorBoard.

    pip install tensorboard
    python examples/report_tensorboard.py --root /tmp/run --steps 4
    tensorboard --logdir /tmp/run/board

The function that `on_report` is given has all of it; the rest is a program that saves.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import torch
from torch.utils.tensorboard import SummaryWriter

import xla_ckpt


def write_scalars(board: SummaryWriter, report: xla_ckpt.SaveReport | xla_ckpt.LoadReport) -> None:
    saved = isinstance(report, xla_ckpt.SaveReport)
    kind, nbytes = ("save", report.nbytes) if saved else ("load", report.needed_bytes)
    step = int((re.findall(r"\d+", report.tag) or ["0"])[-1])  # step_10 -> 10
    board.add_scalar(f"{kind}/failed", float(report.error is not None), step)
    board.add_scalar(f"{kind}/seconds", report.seconds, step)
    board.add_scalar(f"{kind}/GB per second", nbytes / 1e9 / max(report.seconds, 1e-9), step)
    if saved:
        board.add_scalar("save/stall in seconds", report.stall, step)
    for name, phase in report.phases.items():
        board.add_scalar(f"{kind} phases/{name} in seconds", phase.seconds, step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="where tags and scalars go")
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    model = torch.nn.Linear(512, 512)
    with SummaryWriter(str(args.root / "board")) as board:
        xla_ckpt.on_report(lambda report: write_scalars(board, report))
        for step in range(1, args.steps + 1):
            xla_ckpt.save_checkpoint(args.root, f"step_{step}", model, async_save=True, num_kept_ckpts=2)
        xla_ckpt.load_checkpoint(args.root, model=model)
    print(f"{args.steps} saves and a load are on the board in {args.root / 'board'}")


if __name__ == "__main__":
    main()
