"""The file of a rank, as neuronx-distributed's older calls have it: whole, or with a file for each XLA tensor."""

from __future__ import annotations

import os
import re
from typing import Any

import torch

from xla_ckpt import CorruptCheckpointError, NoCheckpointError, UsageError
from xla_ckpt.facade import changed_tensors, load_whole_file, storage_errors, write_whole_file, xla_tensors


def check_place(path: str) -> None:
    """Refuse to write to an address: a file there cannot take the place of an older one.

    Raises:
        UsageError: It is one, such as ``s3://bucket/run``.
    """
    if "://" in path:
        raise UsageError(
            "files of this call take the place of older ones, one by one, which only a file system does",
            expected="the path of a directory",
            found=path,
            hint="Save to buckets with nxd.save_checkpoint, whose tags appear whole.",
        )


def write_whole(tree: Any, path: str, *, down_cast_bf16: bool = False) -> None:
    """torch.save of a tree, its tensors on the CPU.

    Raises:
        xla_ckpt.StorageError: The storage refused. What was there is there still.
        xla_ckpt.UnsupportedStateError: Something in it cannot be pickled.
    """
    write_whole_file(_narrow(tree) if down_cast_bf16 else tree, path)


def write_xser(tree: Any, path: str, *, down_cast_bf16: bool) -> None:
    """The same with each XLA tensor in a file of its own. The file that names them comes last.

    Raises:
        xla_ckpt.StorageError: The storage refused. What was there is there still.
        xla_ckpt.UnsupportedStateError: Something in it cannot be pickled.
    """
    from torch_xla.utils.serialization import TensorReference

    narrow = _narrow if down_cast_bf16 else lambda value: value
    tensors, folder = xla_tensors(tree), f"{path}.tensors"
    with storage_errors("saving", file=path):
        os.makedirs(folder, exist_ok=True)
        before = {int(m[1]): name for name in os.listdir(folder) if (m := _TENSOR_FILE.fullmatch(name))}
    # Not over files that the checkpoint there names: it stays whole until the new one takes its place.
    first = 0 if all(tid >= len(tensors) for tid in before) else max(before) + 1
    references = {id(tensor): TensorReference(first + i) for i, tensor in enumerate(tensors)}
    for i, tensor in enumerate(tensors):
        write_whole_file(narrow(tensor.detach()), f"{folder}/tensor_{first + i}.pt")
    write_whole_file(changed_tensors(tree, lambda value: references.get(id(value), narrow(value))), path)
    with storage_errors("removing older files", file=path):
        for name in before.values():
            os.unlink(f"{folder}/{name}")


_TENSOR_FILE = re.compile(r"tensor_(\d+)\.pt")


def _narrow(tree: Any) -> Any:
    """The same with bfloat16 for float32, other than in numbers (0-d). A tensor that stands in two places stays one."""
    known: dict[int, torch.Tensor] = {}

    def one(value: torch.Tensor) -> torch.Tensor:
        if value.dtype != torch.float32 or not value.dim():
            return value
        return known.setdefault(id(value), value.detach().to(torch.bfloat16))

    return changed_tensors(tree, one)


def read(path: str, *, trust_pickle: bool, absent: str) -> Any:
    """What was written to a path, in either way. `absent` says what to do where no file is.

    Raises:
        xla_ckpt.NoCheckpointError: There is no such file.
        xla_ckpt.CorruptCheckpointError: It, or the file of a tensor, is damaged or missing.
        xla_ckpt.UntrustedObjectError: It holds a pickled object, and `trust_pickle` is False.
        xla_ckpt.StorageError: The storage refused.
    """
    loaded: dict[int, torch.Tensor] = {}

    def tensor(tid: int) -> torch.Tensor:
        if tid not in loaded:
            loaded[tid] = _tensor(f"{path}.tensors/tensor_{tid}.pt", trust_pickle)
        return loaded[tid]

    try:
        return load_whole_file(path, trust_pickle=trust_pickle, reference=tensor)
    except NoCheckpointError as error:
        error.hint = absent
        raise


_DAMAGED = "Load another checkpoint, or restore this file from a copy."


def _tensor(path: str, trust_pickle: bool) -> torch.Tensor:
    """A tensor that has a file of its own, on the XLA device."""
    import torch_xla

    try:
        tensor = load_whole_file(path, trust_pickle=trust_pickle)
    except NoCheckpointError as error:
        raise CorruptCheckpointError("the file of a tensor is missing", file=path, hint=_DAMAGED) from error
    if not isinstance(tensor, torch.Tensor):
        kind = type(tensor).__name__
        raise CorruptCheckpointError("the file of a tensor holds none", file=path, found=kind, hint=_DAMAGED)
    return tensor.to(torch_xla.device())
