"""What memory a conversion takes of one array of all layers, in one chunk.

`python -m tests.formats.scanned_memory FOLDER` prints the bytes of the chunk, and by how many bytes the process grew at
most while `convert` made a tag in the native layout of it. It may hold 32 MiB of arrays at a time (`max_memory`).
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import xla_ckpt

RULES = [("w", "layers.{layer}.w", "in layer out -> out in")]
SHAPE = (512, 16, 16384)
"""Of the array, of float32: larger than what tensorstore keeps of decoded chunks."""


def make(folder: Path) -> int:
    """Save the array with orbax; its bytes."""
    import numpy as np
    import orbax.checkpoint as ocp

    array = np.random.default_rng(1).standard_normal(SHAPE, np.float32)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save((folder / "run").resolve(), {"w": array})
    return array.nbytes


def grown(folder: Path) -> int:
    """Convert it; by how many bytes this process has grown."""
    import tensorstore  # noqa: F401  # what it takes to be imported is not the conversion's

    xla_ckpt.register_names(RULES)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew; that of the parent would count, too
    before = peak()
    options = xla_ckpt.ConvertOptions(max_memory=32 << 20)
    xla_ckpt.convert(folder / "run", folder / "native", to="native", as_tag="0", options=options)
    return peak() - before


def peak() -> int:
    """The most memory that this process has had (bytes)."""
    line = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert line is not None
    return int(line[1]) * 1024


def measured(folder: Path) -> tuple[int, int]:
    """(bytes of the chunk, growth of a new process that converts it)."""
    nbytes = make(folder)
    command = [sys.executable, "-W", "ignore", "-m", "tests.formats.scanned_memory", str(folder), "convert"]
    return nbytes, int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


if __name__ == "__main__":
    if sys.argv[2:] == ["convert"]:
        print(grown(Path(sys.argv[1])))
    else:
        print(*measured(Path(sys.argv[1])))
