"""Whether what was loaded is what was saved: one comparison for all tests, key by key and bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def differences(a: Any, b: Any, path: str = "", *, order: bool = True) -> list[str]:
    """Where two values differ: in types, keys, their order, or a bit. 0.0 and -0.0 are told apart, NaNs are equal.

    On which device a tensor lies does not count. Without `order` the classes of dicts and tensors do not count either.
    """
    if order and type(a) is not type(b):
        return [f"{path}: {type(a)} against {type(b)}"]
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b)):
            return []
        return [f"{path}: {a.dtype} {tuple(a.shape)} against {b.dtype} {tuple(b.shape)}"]
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        alike = a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        return [] if alike else [f"{path}: {a.dtype} {a.shape} against {b.dtype} {b.shape}"]
    if isinstance(a, dict) and isinstance(b, dict):
        keys_differ = (list(a) != list(b)) if order else (a.keys() != b.keys())
        told = [f"{path}: keys {list(a)[:6]} against {list(b)[:6]}"] if keys_differ else []
        common = [key for key in a if key in b]
        return told + [text for key in common for text in differences(a[key], b[key], f"{path}/{key}", order=order)]
    if type(a) is type(b) and isinstance(a, list | tuple) and len(a) == len(b):
        pairs = enumerate(zip(a, b, strict=True))
        return [text for i, (x, y) in pairs for text in differences(x, y, f"{path}/{i}", order=order)]
    return [] if type(a) is type(b) and a == b else [f"{path}: {a!r} against {b!r}"[:200]]


def same(a: Any, b: Any, *, order: bool = True) -> bool:
    """Whether there are none."""
    return not differences(a, b, order=order)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
