"""Which root of tags a store is."""

from __future__ import annotations

from xla_ckpt.storage.base import Store
from xla_ckpt.tags.directories import DirectoryRoot
from xla_ckpt.tags.ledger import LedgerRoot
from xla_ckpt.tags.root import Root


def root_of(store: Store) -> Root:
    """The tags in a store."""
    if store.object_store is not None:
        return LedgerRoot(store.object_store)
    assert store.file_system is not None, "a store is one of the two"
    return DirectoryRoot(store.file_system)
