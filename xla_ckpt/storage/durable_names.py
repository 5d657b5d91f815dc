"""Names of a file system that outlast a loss of power, or are taken back."""

from __future__ import annotations

from collections.abc import Callable

from xla_ckpt.errors import NotDurableError
from xla_ckpt.storage.base import FileSystem, Store


def rename_durably(store: FileSystem, old: str, new: str) -> None:
    """Give a directory, or a file, another name that outlasts a loss of power; if not, it keeps the old one.

    Raises:
        OSError: The storage refused; it has the old name.
        NotDurableError: It has the new name; the storage refused to make that durable, and to undo it.
    """
    store.rename(old, new)
    sync_or_undo(store, new, lambda: store.rename(new, old))


def sync_or_undo(store: FileSystem, name: str, undo: Callable[[], object]) -> None:
    """Make a name that was just given outlast a loss of power; if that is refused, take it back.

    Raises:
        OSError: The storage refused; it is undone.
        NotDurableError: The storage refused to undo it, too.
    """
    try:
        store.sync()
    except OSError as refused:
        try:
            undo()
        except OSError as error:
            raise not_durable(store, name, refused) from error
        raise


def not_durable(store: Store, name: str, refused: OSError) -> NotDurableError:
    """The error for a name that the storage neither makes durable nor takes back."""
    return NotDurableError(
        f"{name} is in place and complete, but the storage refused to make its name durable",
        path=store.path,
        found=refused.strerror or str(refused),
        hint="A loss of power may bring back what was there before. Save again where the storage works.",
    )
