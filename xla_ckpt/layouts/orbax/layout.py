"""orbax as layouts: its checkpoints are found, opened and read, and written; or a model in a form of jax's is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from xla_ckpt.engine.tag_reader import TagReader
from xla_ckpt.layouts.base import Layout, ModelNames, Rewriting, StoredState, Topology
from xla_ckpt.layouts.orbax.tags import TREE_METADATA, find_orbax_tag, orbax_tags
from xla_ckpt.manifest.records import Manifest
from xla_ckpt.plan.hints import Hints
from xla_ckpt.storage.base import Store
from xla_ckpt.tags.entry import TagEntry
from xla_ckpt.tree import path as paths
from xla_ckpt.tree import schema

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


class OrbaxModel(Layout):
    """A model alone, in orbax's files, under the names and in the form that a program of jax has it.

    The rules of `register_names` say which. Read by this library, it has that form: the rules are for what orbax wrote.
    """

    name = "orbax-model"
    holds = schema.MODEL
    model_names = ModelNames.RULES

    def source(self, reader: TagReader, part: str) -> tuple[TagReader, str]:
        from xla_ckpt.layouts.orbax.assembled import assembled_model

        return assembled_model(reader), paths.ROOT

    def rewriting(self, stored: StoredState, to: Topology) -> Rewriting:
        from xla_ckpt.layouts.orbax.writing import rewriting_of

        return rewriting_of(stored, as_stored=True)
