"""What one rank writes in neuronx-distributed's older layout, and reads back: torch.save of a dict, or xser.

A file takes the place of an older one when it is durable. In xser, whose tensors lie in files of their own, the file
that names them does.
"""

from __future__ import annotations

import os
import re
from typing import Any

import torch

from neuron_compat.torch_files import load_whole, make_directory, mapped, save_whole, xla_tensors
from xla_ckpt import CorruptCheckpointError, NoCheckpointError

_TENSOR_FILE = re.compile(r"tensor_(\d+)\.pt")


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

    make_directory(os.path.dirname(path))
    _write(mapped(tree, to_host), path)


def write_xser(tree: Any, path: str, *, down_cast_bf16: bool) -> None:
    """The same with each XLA tensor in a file of its own.

    Raises:
        xla_ckpt.StorageError: The operating system refused. What was there is there still.
        xla_ckpt.UnsupportedStateError: Something in it cannot be pickled.
    """
    from torch_xla.utils.serialization import TensorReference

    tensors, folder = xla_tensors(tree), f"{path}.tensors"
    make_directory(folder)
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
    save_whole(value, path, partly=f"{path}.tmp")


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

    return load_whole(
        path,
        trust_pickle=trust_pickle,
        classes=[TensorReference],
        missing="load_xser and master_dp_only have to be as in the save, and so have the numbers of ranks: on others, "
        "xla_ckpt.load_checkpoint loads it.",
    )
