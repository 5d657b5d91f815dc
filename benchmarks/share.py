"""What `SaveOptions(share=True)` saves of a run that trains little of its state, and costs one that trains all of it.

    python benchmarks/share.py [--mb 1000] [--arrays 100] [--rounds 5] [--dir DIR] [--device xla]

Two runs take turns, one that shares and one that does not, and save a state of which a part changes before each save:
1 %, as with adapters over weights that the program says it does not train, and all of it. The medians of
the time and of the processor time of a save, from the third save of each run on, and what the runs have written. The
processor time hardly depends on what else the machine does.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch

import xla_ckpt

TRAINED = 0.01
"""The part of a state that adapters are."""


class State(torch.nn.Module):
    """A model of so many MB: the adapters, and the rest, which is not trained."""

    def __init__(self, mb: int, arrays: int) -> None:
        super().__init__()
        each = int(mb * 1e6 * (1 - TRAINED) / arrays / 4)
        self.frozen = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(each), False) for _ in range(arrays))
        small = int(each * TRAINED)
        self.adapters = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(small)) for _ in range(arrays))


class Run:
    """A run that saves, and keeps its newest tag."""

    def __init__(self, root: Path, *, share: bool) -> None:
        self.root, self.options = root, xla_ckpt.SaveOptions(share=share, stale="ignore")
        self.reports: list[xla_ckpt.SaveReport] = []
        self.seconds: list[float] = []
        self.processor: list[float] = []

    def save(self, state: State) -> None:
        """The next save, measured."""
        began, used = time.perf_counter(), time.process_time()
        tag = f"step_{len(self.reports)}"
        handle = xla_ckpt.save_checkpoint(self.root, tag, state, num_kept_ckpts=1, options=self.options)
        self.seconds.append(time.perf_counter() - began)
        self.processor.append(time.process_time() - used)
        self.reports.append(handle.result())

    def medians(self) -> tuple[float, float]:
        """Seconds, and seconds of processors, of a save once the run knows what stays."""
        return statistics.median(self.seconds[2:]), statistics.median(self.processor[2:])


def compare(name: str, state: State, changing: list[torch.Tensor], rounds: int, folder: str | None) -> None:
    """Both runs save in turns; print what they took."""
    where = Path(tempfile.mkdtemp(dir=folder))
    runs = {share: Run(where / str(share), share=share) for share in (False, True)}
    try:
        for number in range(2 + rounds):
            with torch.no_grad():
                for changes in changing:
                    changes.add_(1)
            for share in (False, True) if number % 2 else (True, False):
                runs[share].save(state)
    finally:
        xla_ckpt.finalize_checkpoint()
        shutil.rmtree(where, ignore_errors=True)
    (plain, its_processor), (shared, processor) = (runs[share].medians() for share in (False, True))
    total, written = (runs[share].reports[-1].nbytes for share in (False, True))
    print(
        f"{name}: written {written / total:.2%}; {plain:.3f} s and {shared:.3f} s with share, {shared / plain:.2f}; "
        f"processor time {its_processor:.3f} s and {processor:.3f} s, {processor / its_processor:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=1000, help="MB of the state (default: %(default)s)")
    parser.add_argument("--arrays", type=int, default=100, help="large arrays (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="saves that count (default: %(default)s)")
    parser.add_argument("--dir", help="where the runs save; by default in a temporary directory")
    parser.add_argument("--device", default="cpu", help="where the state lies: cpu, or xla (default: %(default)s)")
    args = parser.parse_args()
    if args.device == "xla":
        import torch_xla

        torch_xla.manual_seed(0)
    state = State(args.mb, args.arrays).to(args.device)
    compare("1 % changes", state, list(state.adapters), args.rounds, args.dir)
    compare("all changes", state, list(state.parameters()), args.rounds, args.dir)


if __name__ == "__main__":
    main()
