"""Checkpoint IDs of DCP readers and writers: the directory passed as ``checkpoint_id``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch.distributed.checkpoint.storage import StorageReader as StockReader
from torch.distributed.checkpoint.storage import StorageWriter as StockWriter

from xla_ckpt.errors import UsageError
from xla_ckpt.storage.resolve import PathLike, normalize_path, open_parent

CheckpointId = PathLike | None

_Storage = TypeVar("_Storage", StockReader, StockWriter)


class CheckpointIdMixin:
    """A mixin with the path of a directory, which `reset` changes."""

    _path: str | None = None

    planned: Callable[[], object] = staticmethod(lambda: None)
    """Called after planning, before this rank reads or writes."""

    @property
    def checkpoint_id(self) -> str | None:
        """The directory of the checkpoint."""
        return self._path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: PathLike) -> bool:
        """Return True if this library can store a checkpoint there. Called by DCP."""
        try:
            open_parent(checkpoint_id)
        except UsageError:
            return False
        return True

    def _set_path(self, checkpoint_id: PathLike | None) -> None:
        """Set the directory; None keeps the current one."""
        if checkpoint_id is not None:
            self._path = normalize_path(checkpoint_id)


def configure_storage(storage: _Storage, checkpoint_id: CheckpointId) -> _Storage:
    """Set the directory of a custom writer or reader.

    Raises:
        UsageError: If the argument is not a writer or reader.
    """
    if isinstance(storage, str) or hasattr(storage, "__fspath__"):
        hint = "Pass it by its name: checkpoint_id=."
        raise UsageError("a path stands in the place of a writer or reader", found=str(storage), hint=hint)
    if checkpoint_id is not None:
        storage.reset(checkpoint_id)
    return storage


def require_checkpoint_id(checkpoint_id: CheckpointId) -> PathLike:
    """Return the directory, which is required without a reader or writer.

    Raises:
        UsageError: If it is None.
    """
    if not checkpoint_id:
        raise UsageError(
            "nobody has said where the checkpoint is",
            expected="checkpoint_id, the path of a directory",
            found=repr(checkpoint_id),
        )
    return checkpoint_id


def get_storage_path(storage: Any) -> str | None:
    """Return the directory of a reader or writer; None if it does not use a file system."""
    checkpoint_id = getattr(storage, "checkpoint_id", None)
    try:
        return None if checkpoint_id is None else normalize_path(checkpoint_id)
    except (UsageError, TypeError):
        return None
