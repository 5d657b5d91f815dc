"""Comparing what files of torch hold, key by key and bit for bit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests.layouts.references import whole
from tests.xla import HAS_XLA


def differences(a: Any, b: Any, path: str = "", *, order: bool = True) -> Iterator[str]:
    """Where two values differ: in types, keys, their order, or a bit. 0.0 and -0.0 are told apart, NaNs are equal."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        alike = a.dtype == b.dtype and a.shape == b.shape
        if not alike or a.contiguous().flatten().view(torch.uint8).tolist() != b.flatten().view(torch.uint8).tolist():
            yield f"{path}: {a.dtype} {tuple(a.shape)} against {b.dtype} {tuple(b.shape)}"
    elif isinstance(a, dict) and isinstance(b, dict):
        if (list(a) != list(b)) if order else (a.keys() != b.keys()):
            yield f"{path}: keys {list(a)[:6]} against {list(b)[:6]}"
        for key in a.keys() & b.keys():
            yield from differences(a[key], b[key], f"{path}/{key}", order=order)
    elif type(a) is type(b) and isinstance(a, list | tuple) and len(a) == len(b):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from differences(x, y, f"{path}/{i}", order=order)
    elif type(a) is not type(b) or a != b:
        yield f"{path}: {a!r} against {b!r}"[:200]


def content(path: Path) -> Any:
    """What a file holds, references included: as torch_xla loads it, where it is installed."""
    if not Path(f"{path}.info.pt").exists():
        return torch.load(path, weights_only=False)
    if not HAS_XLA:
        return whole(path)
    import torch_xla.utils.serialization as xser

    return xser.load(str(path))


def unequal(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """The names of what differs, in a bit or in its type."""

    def differ(x: Any, y: Any) -> bool:
        if isinstance(x, torch.Tensor):
            return not (x.dtype == y.dtype and torch.equal(x, y))
        return bool(x != y)

    return [*sorted(a.keys() ^ b.keys()), *(k for k in a.keys() & b.keys() if differ(a[k], b[k]))]


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
