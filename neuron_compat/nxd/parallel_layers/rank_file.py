"""What one rank writes in neuronx-distributed's older layout, and reads back: torch.save of a dict, or xser.

A file takes the place of an older one when it is durable. In xser, whose tensors lie in files of their own, the file
that names them does.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from xla_ckpt import (
    CorruptCheckpointError,
    NoCheckpointError,
    StorageError,
    UnsupportedStateError,
    UntrustedObjectError,
)

_GLOBAL = re.compile(r"GLOBAL (\S+)")
_TENSOR_FILE = re.compile(r"tensor_(\d+)\.pt")


def mapped(value: Any, one: Callable[[torch.Tensor], Any]) -> Any:
    """The same containers with `one` of each tensor in them."""
    if isinstance(value, torch.Tensor):
        return one(value)
    if isinstance(value, dict):
        kind: Any = OrderedDict if isinstance(value, OrderedDict) else dict
        return kind((k, mapped(v, one)) for k, v in value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(v, one) for v in value))
    if type(value) in (list, tuple):
        return type(value)(mapped(v, one) for v in value)
    return value


def xla_tensors(tree: Any) -> list[torch.Tensor]:
    """The XLA tensors of a tree, each once, in the order in which they are found."""
    found: dict[int, torch.Tensor] = {}

    def note(value: torch.Tensor) -> None:
        if value.device.type == "xla":
            found.setdefault(id(value), value)

    mapped(tree, note)
    return list(found.values())


def _host(value: torch.Tensor, down_cast_bf16: bool) -> torch.Tensor:
    held = value.detach().cpu()
    return held.to(torch.bfloat16) if down_cast_bf16 and held.dtype == torch.float32 and held.dim() else held


def write_whole(tree: Any, path: str, *, down_cast_bf16: bool) -> None:
    """torch.save of a tree, its tensors on the CPU.

    Raises:
        xla_ckpt.StorageError: The operating system refused. What was there is there still.
        xla_ckpt.UnsupportedStateError: Something in it cannot be pickled.
    """
    held: dict[int, torch.Tensor] = {}  # a tensor that stands in two places is stored once

    def to_host(value: torch.Tensor) -> torch.Tensor:
        if id(value) not in held:
            held[id(value)] = _host(value, down_cast_bf16)
        return held[id(value)]

    _make(os.path.dirname(path))
    _write(mapped(tree, to_host), path)


def write_xser(tree: Any, path: str, *, down_cast_bf16: bool) -> None:
    """The same with each XLA tensor in a file of its own.

    Raises:
        xla_ckpt.StorageError: The operating system refused. What was there is there still.
        xla_ckpt.UnsupportedStateError: Something in it cannot be pickled.
    """
    from torch_xla.utils.serialization import TensorReference

    tensors, folder = xla_tensors(tree), f"{path}.tensors"
    _make(folder)
    before = {int(m[1]): name for name in os.listdir(folder) if (m := _TENSOR_FILE.fullmatch(name))}
    # Not over files that the checkpoint there names: it stays whole until the new one takes its place.
    first = 0 if all(tid >= len(tensors) for tid in before) else max(before) + 1
    references = {id(tensor): TensorReference(first + i) for i, tensor in enumerate(tensors)}
    for i, tensor in enumerate(tensors):
        _write(_host(tensor, down_cast_bf16), f"{folder}/tensor_{first + i}.pt")
    _write(mapped(tree, lambda value: references.get(id(value)) or _host(value, down_cast_bf16)), path)
    for name in before.values():
        os.unlink(f"{folder}/{name}")


def _write(value: Any, path: str) -> None:
    """torch.save to a file that appears completely or not at all."""
    folder, partly = os.path.dirname(path), f"{path}.tmp"
    try:
        with open(partly, "wb") as file:
            torch.save(value, file)
            file.flush()
            os.fsync(file.fileno())
        os.rename(partly, path)
        _sync(folder)
    except Exception as error:
        with contextlib.suppress(OSError):
            os.unlink(partly)
        if isinstance(error, OSError):
            raise StorageError.of(error, "saving", file=path) from error
        if isinstance(error, RuntimeError):  # torch's own, where the disk is full
            raise StorageError(f"saving failed: {error}", file=path) from error
        raise UnsupportedStateError(f"something in it cannot be pickled: {error}", file=path) from error


def _make(folder: str) -> None:
    try:
        os.makedirs(folder, exist_ok=True)
        _sync(os.path.dirname(folder))
    except OSError as error:
        raise StorageError.of(error, "making a directory", file=folder) from error


def _sync(folder: str) -> None:
    directory = os.open(folder or ".", os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def read(path: str, *, trust_pickle: bool) -> Any:
    """What was written to a path, in either way.

    Raises:
        xla_ckpt.NoCheckpointError: There is no such file.
        xla_ckpt.CorruptCheckpointError: It is damaged.
        xla_ckpt.UntrustedObjectError: It holds a pickled object, and `trust_pickle` is False.
        xla_ckpt.StorageError: The operating system refused.
    """
    from torch_xla.utils.serialization import TensorReference

    loaded: dict[int, torch.Tensor] = {}

    def resolved(value: Any) -> Any:
        if isinstance(value, TensorReference):
            tid = getattr(value, "tid", None)
            if type(tid) is not int or tid < 0:
                raise CorruptCheckpointError("a reference to a tensor has no number", file=path, found=repr(tid))
            if tid not in loaded:
                loaded[tid] = _tensor(f"{path}.tensors/tensor_{tid}.pt", trust_pickle)
            return loaded[tid]
        if isinstance(value, dict):
            for k, v in value.items():
                value[k] = resolved(v)
            return value
        if type(value) in (list, tuple):
            return type(value)(map(resolved, value))
        return value

    return resolved(_torch_load(path, trust_pickle))


def _tensor(path: str, trust_pickle: bool) -> torch.Tensor:
    import torch_xla

    try:
        found = _torch_load(path, trust_pickle)
    except NoCheckpointError as error:
        raise CorruptCheckpointError("the file of a tensor is missing", file=path) from error
    if not isinstance(found, torch.Tensor):
        raise CorruptCheckpointError("the file of a tensor holds none", file=path, found=type(found).__name__)
    return found.to(torch_xla.device())


def _torch_load(path: str, trust_pickle: bool) -> Any:
    from torch_xla.utils.serialization import TensorReference

    try:
        with torch.serialization.safe_globals([TensorReference]):
            return torch.load(path, map_location="cpu", weights_only=not trust_pickle)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise NoCheckpointError(
            "there is no such file for this rank",
            file=path,
            hint="load_xser and master_dp_only have to be as in the save, and so have the numbers of ranks: on others, "
            "xla_ckpt.load_checkpoint loads it.",
        ) from error
    except OSError as error:
        raise StorageError.of(error, "loading", file=path) from error
    except pickle.UnpicklingError as error:
        named = _GLOBAL.search(str(error))
        if named is None:
            raise CorruptCheckpointError("the file is damaged", file=path, found=str(error)[:200]) from error
        raise UntrustedObjectError(
            "the file holds a pickled object",
            file=path,
            found=named[1],
            hint="Pass trust_pickle=True if you trust whoever wrote this file.",
        ) from error
    except Exception as error:  # of a damaged zip, torch raises whatever comes
        raise CorruptCheckpointError("the file is damaged", file=path, found=str(error)[:200]) from error
