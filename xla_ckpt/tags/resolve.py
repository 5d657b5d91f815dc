"""Open the root of tags in a store: a directory root or a ledger root."""

from __future__ import annotations

from xla_ckpt.storage.base import Store
from xla_ckpt.tags.directory_root import DirectoryRoot
from xla_ckpt.tags.ledger_root import LedgerRoot
from xla_ckpt.tags.root import Root


def open_root(store: Store) -> Root:
    """Return the root of tags in a store."""
    if store.object_store is not None:
        return LedgerRoot(store.object_store)
    assert store.file_system is not None, "a store is one of the two"
    return DirectoryRoot(store.file_system)
