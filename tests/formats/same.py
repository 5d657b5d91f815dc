"""What files of torch hold, and which files of a tag are neuronx-distributed's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from tests.formats.references import whole
from tests.xla import HAS_XLA


def content(path: Path) -> Any:
    """What a file holds, references included: as torch_xla loads it, where it is installed."""
    if not Path(f"{path}.info.pt").exists():
        return torch.load(path, weights_only=False)
    if not HAS_XLA:
        return whole(path)
    import torch_xla.utils.serialization as xser

    return xser.load(str(path))


OURS = ("manifest.json", "_CHECKPOINT_METADATA", "commit_success.txt")


def as_theirs(tag: Path) -> Path:
    """Make of a tag of ours in their layouts what neuronx-distributed itself would have left."""
    for name in OURS:
        (tag / name).unlink()
    return tag


def names(tag: Path) -> set[str]:
    """Relative paths of all files of a tag that are neuronx-distributed's."""
    found = {os.path.relpath(os.path.join(above, f), tag) for above, _, files in os.walk(tag) for f in files}
    return found - {*OURS}


def rank_files(tag: Path) -> list[str]:
    """Those that a reader opens by name; the tensors' own files follow from them."""
    return sorted(n for n in names(tag) if n.endswith(".pt") and ".tensors/" not in n)
