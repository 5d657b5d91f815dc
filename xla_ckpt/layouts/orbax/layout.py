"""orbax as a layout: its checkpoints are found, opened and read; what is made of them has digests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from xla_ckpt.engine.tag_reader import TagReader
from xla_ckpt.layouts.base import Layout, Rewriting, StoredState, Topology
from xla_ckpt.layouts.orbax.tags import TREE_METADATA, find_orbax_tag, orbax_tags
from xla_ckpt.manifest.records import Manifest
from xla_ckpt.plan.hints import Hints
from xla_ckpt.storage.base import Store
from xla_ckpt.tags.entry import TagEntry

if TYPE_CHECKING:
    from xla_ckpt.layouts.orbax.writing import OrbaxWriting
    from xla_ckpt.state.describe import Description


class Orbax(Layout):
    """Checkpoints of orbax's, v0 and v1: with OCDBT or a directory for each array, zarr version 2 or 3.

    They have no digests, so that a load finds what cannot be decoded, and no other damage.
    """

    name = "orbax"
    origin = "orbax"
    saves = True

    def wrote(self, manifest: Manifest) -> bool:
        return any(file.path == TREE_METADATA for file in manifest.files)

    def writing(self, description: Description) -> OrbaxWriting:
        from xla_ckpt.layouts.orbax.writing import OrbaxWriting

        return OrbaxWriting(description).checked()

    def rewriting(self, stored: StoredState, to: Topology) -> Rewriting:
        from xla_ckpt.layouts.orbax.writing import rewriting_of

        return rewriting_of(stored)

    def tags(self, store: Store, names: Sequence[str]) -> list[TagEntry]:
        return orbax_tags(store, names)

    def find(self, store: Store, tag: str) -> TagEntry | None:
        return find_orbax_tag(store, tag)

    def open(self, store: Store, entry: TagEntry, hints: Hints) -> TagReader:
        from xla_ckpt.layouts.orbax.scan import open_orbax

        return open_orbax(store, entry)
