"""Files of torch.save that appear completely or not at all, and that are read without running what is in them."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from xla_ckpt import (
    CheckpointError,
    CorruptCheckpointError,
    NoCheckpointError,
    StorageError,
    UnsupportedStateError,
    UntrustedObjectError,
)

_GLOBAL = re.compile(r"GLOBAL (\S+)")


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


def on_host(tree: Any) -> Any:
    """The same containers with all XLA tensors on the CPU, transferred in one batch. The others stay as they are."""
    tensors = xla_tensors(tree)
    if not tensors:
        return tree
    from xla_ckpt.arrays.xla import to_host

    held = {id(t): h for t, h in zip(tensors, to_host(tensors), strict=True)}
    return mapped(tree, lambda value: held.get(id(value), value))


def save_whole(
    value: Any, path: str, *, partly: str, beside: Callable[[str], None] | None = None, **options: Any
) -> None:
    """torch.save to a file that appears completely or not at all. Its directory is there.

    Args:
        value: What is saved. Its tensors are on the CPU.
        path: The file.
        partly: The file that is written, until it is durable and gets the name `path`. In the same directory.
        beside: Called with the path of the file when it is durable, before it gets its name.
        options: For torch.save.

    Raises:
        xla_ckpt.StorageError: The operating system refused. What was there is there still.
        xla_ckpt.UnsupportedStateError: Something in it cannot be pickled.
    """
    try:
        with open(partly, "wb") as file:
            torch.save(value, file, **options)
            file.flush()
            os.fsync(file.fileno())
        if beside is not None:
            beside(partly)
        os.rename(partly, path)
        sync_directory(os.path.dirname(path))
    except Exception as error:
        with contextlib.suppress(OSError):
            os.unlink(partly)
        if isinstance(error, CheckpointError):
            raise  # of `beside`
        if isinstance(error, OSError):
            raise StorageError.of(error, "saving", file=path) from error
        if isinstance(error, RuntimeError):  # torch's own, where the disk is full
            raise StorageError(f"saving failed: {error}", file=path) from error
        raise UnsupportedStateError(f"something in it cannot be pickled: {error}", file=path) from error


def write_whole_bytes(data: bytes, path: str, *, partly: str) -> None:
    """Write a small file that appears completely or not at all. Its directory is there.

    Raises:
        xla_ckpt.StorageError: The operating system refused. What was there is there still.
    """
    try:
        with open(partly, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.rename(partly, path)
        sync_directory(os.path.dirname(path))
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(partly)
        raise StorageError.of(error, "saving", file=path) from error


def make_directory(folder: str) -> None:
    """Make a directory and its parents, unless they are there; the names of all that are made are durable.

    Raises:
        xla_ckpt.StorageError: The operating system refused.
    """
    made, above = [], folder
    while above and not os.path.isdir(above):
        above = os.path.dirname(above.rstrip("/"))
        made.append(above)
    try:
        os.makedirs(folder, exist_ok=True)
        for parent in made or [os.path.dirname(folder)]:
            sync_directory(parent)
    except OSError as error:
        raise StorageError.of(error, "making a directory", file=folder) from error


def sync_directory(folder: str) -> None:
    """Make the names in a directory durable; an empty path is the current one."""
    directory = os.open(folder or ".", os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def load_whole(
    path: str,
    *,
    trust_pickle: bool,
    classes: Sequence[Any] = (),
    missing: str | None = None,
    map_location: Any = "cpu",
    **options: Any,
) -> Any:
    """torch.load of a file. Unless it is trusted, no code in it runs.

    Args:
        path: The file.
        trust_pickle: Load pickled objects, which can run any code.
        classes: Classes and functions that it may name, beside tensors and plain values.
        missing: What to do if there is no such file.
        map_location: As torch.load takes it.
        options: For torch.load.

    Raises:
        xla_ckpt.NoCheckpointError: There is no such file.
        xla_ckpt.CorruptCheckpointError: It is damaged.
        xla_ckpt.UntrustedObjectError: It holds a pickled object, and `trust_pickle` is False.
        xla_ckpt.StorageError: The operating system refused.
    """
    try:
        with torch.serialization.safe_globals(list(classes)):
            return torch.load(path, map_location=map_location, weights_only=not trust_pickle, **options)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise NoCheckpointError("there is no such file for this rank", file=path, hint=missing) from error
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
