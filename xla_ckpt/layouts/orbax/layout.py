"""orbax as layouts: its checkpoints are found, opened and read; what is made of them has digests.

Saves and conversions write an item by itself, or a step of orbax's managers of checkpoints, in which items lie.
Conversions write a model in a form of jax's, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from xla_ckpt.engine.tag_reader import TagReader
from xla_ckpt.engine.verify import VerifyReport
from xla_ckpt.errors import CorruptCheckpointError, InvalidTagError, UsageError, storage_errors
from xla_ckpt.layouts.base import Layout, ModelNames, Rewriting, StoredState, Topology
from xla_ckpt.layouts.orbax.maxtext import rules_for
from xla_ckpt.layouts.orbax.tags import find_orbax_tag, is_step, missing_metadata, orbax_tags
from xla_ckpt.manifest.records import Manifest
from xla_ckpt.plan.hints import Hints
from xla_ckpt.storage.base import Store
from xla_ckpt.storage.pool import READERS
from xla_ckpt.tags.entry import TREE_METADATA, TagEntry
from xla_ckpt.tree import path as paths
from xla_ckpt.tree import schema

if TYPE_CHECKING:
    from xla_ckpt.layouts.orbax.writing import OrbaxWriting
    from xla_ckpt.state.describe import Description


class Orbax(Layout):
    """Checkpoints of orbax's, v0 and v1: with OCDBT or a directory for each array, zarr version 2 or 3.

    They have no digests, so that a load finds what cannot be decoded, and no other damage.

    Args:
        name: What callers call it.
        item: The item of a step in which the tree lies; empty if the tag itself is an item. The object with an empty
            one answers for all that orbax wrote, so that no tag is listed twice.
    """

    saves = True
    asks = True  # a program knows what a model in jax is to it

    def __init__(self, name: str, *, item: str = "") -> None:
        self.name, self._below = name, f"{item}/" if item else ""
        self.origin = "" if item else "orbax"

    def check_findable(self, store: Store, tag: str) -> None:
        if not self._below:
            return
        if not is_step(tag):
            raise InvalidTagError(
                "a manager of orbax's would not find a tag of this name",
                path=store.path,
                tag=tag,
                expected="the number of a step, as in '100' or 'step_100'",
                hint='Give it such a name, in a conversion by as_tag="5" (--as 5); or take layout="orbax" '
                "(--to orbax), which has tags of any name.",
            )
        if store.object_store is not None:
            raise UsageError(
                f"the layout {self.name} is for directories: in an object store the files of a tag lie below another "
                "name, which a manager of orbax's would not find",
                path=store.path,
                tag=tag,
                hint="Save to a disk.",
            )

    def wrote(self, manifest: Manifest) -> bool:
        return any(file.path == self._below + TREE_METADATA for file in manifest.files)

    def writing(self, description: Description) -> OrbaxWriting:
        from xla_ckpt.layouts.orbax.writing import OrbaxWriting

        return OrbaxWriting(description, self._below).checked()

    def rewriting(self, stored: StoredState, to: Topology) -> Rewriting:
        from xla_ckpt.layouts.orbax.writing import rewriting_of

        return rewriting_of(stored, self._below)

    def tags(self, store: Store, names: Sequence[str]) -> list[TagEntry]:
        return [] if self._below else orbax_tags(store, names)

    def find(self, store: Store, tag: str) -> TagEntry | None:
        return None if self._below else find_orbax_tag(store, tag)

    def open(self, store: Store, entry: TagEntry, hints: Hints) -> TagReader:
        from xla_ckpt.layouts.orbax.scan import open_orbax

        return open_orbax(store, entry, hints.config)

    def verify(self, store: Store, entry: TagEntry, workers: int = READERS) -> VerifyReport:
        report = super().verify(store, entry, workers)
        if entry.damage is not None:
            return report  # it says already what is missing
        with (
            storage_errors("opening a checkpoint", path=store.path, tag=entry.tag),
            closing(store.open(entry.directory, lock=False)) as directory,
        ):
            files = directory.files()
        report.files = len(files)  # a list counts these; to a reader each array is a file
        for file in missing_metadata(files):  # a load does without it; orbax does not
            problem = CorruptCheckpointError(
                "a file is missing, without which orbax restores this checkpoint no more",
                path=store.path,
                tag=entry.tag,
                file=file,
                hint="Restore it from a copy; or convert the checkpoint, whose arrays are read still, under names with "
                "dots. An old version of orbax's wrote none.",
            )
            report.problems.append(problem)
        return report


class OrbaxModel(Layout):
    """A model alone, in orbax's files, under the names and in the form that a program of jax has it.

    The rules of `register_names` say which, or those of MaxText's for the configuration of the model. They stay in the
    tag: by them this library finds the model in it again.
    """

    name = "orbax-model"
    holds = schema.MODEL
    model_names = ModelNames.RULES

    def source(self, reader: TagReader, part: str, to: Topology) -> tuple[TagReader, str]:
        from xla_ckpt.layouts.orbax.assembled import assembled_model

        return assembled_model(reader, rules_for(to.config)), paths.ROOT

    def rewriting(self, stored: StoredState, to: Topology) -> Rewriting:
        from xla_ckpt.layouts.orbax.stored_names import names_file
        from xla_ckpt.layouts.orbax.writing import rewriting_of

        files, names = rewriting_of(stored, as_stored=True), names_file(rules_for(to.config))
        return replace(files, index=lambda reader: {**files.index(reader), **names})

    def wrote(self, manifest: Manifest) -> bool:
        from xla_ckpt.layouts.orbax.stored_names import is_renamed

        return is_renamed(manifest)

    def as_saved(self, reader: TagReader) -> TagReader:
        from xla_ckpt.layouts.orbax.stored_names import original_model

        return original_model(reader)
