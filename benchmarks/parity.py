"""What parity costs a save, in bytes and time, and how long a repair takes.

    PJRT_DEVICE=CPU python benchmarks/parity.py [--gb 1] [--files 4] [--rounds 3] [--scratch DIRECTORY]

One process saves a model of some tensors in the layout xser, which has a file for each, without parity and with it.
Then the tag loses its largest file, and is repaired. The least of the rounds counts; memory is what the repair adds to
the peak.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import get_args

import numpy as np
import torch

import xla_ckpt
from xla_ckpt.core.files.parity import ParityLevel


def seconds(action: Callable[[], object]) -> float:
    """How long something takes."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def peak() -> int:
    """The largest memory that this process has had (bytes)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def stored(tag: Path) -> int:
    """Bytes of all files of a tag."""
    return sum(path.stat().st_size for path in tag.rglob("*") if path.is_file())


def main() -> None:
    """Print the rows as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scratch", type=Path, default=None, help="directory for the tags")
    args = parser.parse_args()
    random = np.random.default_rng(0)
    count = round(args.gb * 1e9 / 4 / args.files)
    model = {f"w{n}": torch.from_numpy(random.random(count, np.float32)) for n in range(args.files)}
    nbytes = 4 * count * args.files
    print(f"| {nbytes / 1e9:.1f} GB in {args.files} files | save | bytes more | repair of a lost file | memory of it |")
    print("|---|--:|--:|--:|--:|")
    with tempfile.TemporaryDirectory(dir=args.scratch) as folder:
        plain, root = 0, Path(folder, "root")
        for parity in (None, *get_args(ParityLevel)):
            save = partial(
                xla_ckpt.save_checkpoint, root, "t", model, layout="xser", options=xla_ckpt.SaveOptions(parity=parity)
            )
            took = []
            for _ in range(args.rounds):
                shutil.rmtree(root, ignore_errors=True)
                took.append(seconds(save))
            plain = plain or stored(root / "t")
            more = stored(root / "t") - plain
            repair = memory = "-"
            if parity == "file":
                before = peak()
                max((root / "t").rglob("*.pt"), key=lambda path: path.stat().st_size).unlink()
                repair = f"{seconds(partial(xla_ckpt.repair, root)):.2f} s"
                memory = f"{(peak() - before) / 2**20:.0f} MiB"
            print(f"| `parity={parity!r}` | {min(took):.2f} s | {more / plain:.1%} | {repair} | {memory} |")


if __name__ == "__main__":
    main()
