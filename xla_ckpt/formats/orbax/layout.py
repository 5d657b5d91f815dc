"""The orbax layouts, and orbax directories in a root directory. Imports no framework.

A step of a `CheckpointManager` is ``<root>/<step>/<item>/``, with one or more items; a `Checkpointer` writes a single
item. An item of arrays contains the file ``_METADATA``. A step is complete when it has its final name: until then the
name contains ``.orbax-checkpoint-tmp``. A MaxText run stores its steps in ``<run>/checkpoints/``, so they are also
tags of the run. Saves and conversions write a single item, or a step of the orbax managers; conversions also write a
model in JAX form.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from xla_ckpt.core.manifest.manifest import Manifest
from xla_ckpt.core.plan.hints import LoadHints
from xla_ckpt.core.tree import path as paths
from xla_ckpt.core.tree import schema
from xla_ckpt.errors import CorruptCheckpointError, InvalidTagError, UsageError, wrap_os_errors
from xla_ckpt.formats.base import (
    ConversionPlan,
    Layout,
    ModelNames,
    StoredState,
    TargetTopology,
    format_timestamp,
    sort_by_numbers,
)
from xla_ckpt.formats.orbax.maxtext import get_rules_for_config
from xla_ckpt.loading.tag_reader import TagReader
from xla_ckpt.loading.verify import VerifyReport
from xla_ckpt.storage.base import Store
from xla_ckpt.storage.threads import READ_THREADS
from xla_ckpt.tags.entry import ORBAX_TMP_SUFFIX, ORBAX_TREE_METADATA_FILE, TagEntry, is_tag_name
from xla_ckpt.tags.listing import ORBAX_METADATA_FILE, read_orbax_member

if TYPE_CHECKING:
    from xla_ckpt.formats.orbax.writing import OrbaxWritePlanner
    from xla_ckpt.state.describe import StateDescription


OCDBT_MANIFEST = "manifest.ocdbt"
"""Index of an item whose arrays are stored in one database. Older versions of orbax wrote no other metadata."""

_PROCESS_PREFIX = "ocdbt.process_"
"""Name prefix of the output of one process in an item, which is also a database, with a part of the arrays."""


_MAX_LISTED_ITEMS = 5
"""Maximum number of items that an error lists."""

_STEPS_FOLDER = "checkpoints"
"""Directory in which a MaxText run stores its steps (`checkpoint_dir` in its `configs/types.py`)."""


def find_orbax_tag(store: Store, tag: str) -> TagEntry | None:
    """Return the orbax checkpoint with this name, complete or not; None if it does not exist."""
    if not _may_be_named(tag):
        return None
    places = (tag, f"{_STEPS_FOLDER}/{tag}") if is_step_name(tag) else (tag,)
    return next((entry for place in places if (entry := _find_entry(store, tag, place)) is not None), None)


def _find_entry(store: Store, tag: str, directory: str) -> TagEntry | None:
    damage = None
    try:
        if not _is_item(store, directory):  # list the names only if needed: an object store counts requests
            inside = (f"{directory}/{name}" for name in store.list_names(directory) if _may_be_named(name))
            has_items = any(store.is_directory(name) and _is_item_of_step(store, name) for name in inside)
            damage = _find_missing_items(store, tag, directory)
            if damage is None and not has_items:
                return None
        time = store.get_modified_time(f"{directory}/{ORBAX_METADATA_FILE}") or store.get_modified_time(directory)
    except OSError:
        return None
    created = format_timestamp(time or 0)
    return TagEntry(tag=tag, created=created, directory=directory, complete=damage is None, damage=damage)


def _find_missing_items(store: Store, tag: str, directory: str) -> CorruptCheckpointError | None:
    """Return the error for a step that lacks items of arrays listed in its own record; None if no item is missing.

    The orbax managers accept such a step, for example after an interrupted copy.
    """
    handlers = read_orbax_member(store, directory, "item_handlers")
    items = sorted(item for item, handler in handlers.items() if is_tag_name(item) and _is_array_handler(handler))
    lost = [item for item in items if not _is_item(store, f"{directory}/{item}")]
    if not lost:
        return None
    none = "none of the" if lost == items else "not all"
    return CorruptCheckpointError(
        f"a step of orbax's has {none} items of arrays that it was saved with",
        path=store.path,
        tag=tag,
        file=f"{lost[0]}/{ORBAX_TREE_METADATA_FILE}",
        expected=f"the items {', '.join(items[:_MAX_LISTED_ITEMS])}" if items[1:] else f"the item {items[0]}",
        hint="A copy was cut off, or somebody has removed them. Copy the step anew, or take another one.",
    )


def _is_array_handler(handler: object) -> bool:
    """Return True if an orbax handler, given its class name, handles trees of arrays.

    >>> _is_array_handler("orbax.checkpoint._src.handlers.standard_checkpoint_handler.StandardCheckpointHandler")
    True
    >>> _is_array_handler("orbax.checkpoint._src.handlers.json_checkpoint_handler.JsonCheckpointHandler")
    False
    """
    return isinstance(handler, str) and handler.rpartition(".")[2].startswith(("Standard", "PyTree"))


def is_step_name(tag: str) -> bool:
    """Return True if an orbax manager, depending on its options, may parse this as the name of a step.

    These options are ``step_prefix``, which is followed by an underscore, and ``step_format_fixed_length``, which pads
    the number with zeros. (orbax/checkpoint/_src/path/step.py, 0.12)

    >>> is_step_name("100"), is_step_name("step_0100"), is_step_name("best"), is_step_name("step100")
    (True, True, False, False)
    """
    prefix, _, number = tag.rpartition("_")
    return number.isdecimal() and number.isascii() and (bool(prefix) or tag == number)


def _may_be_named(name: str) -> bool:
    """Return True if a finished checkpoint or an item can have this name."""
    return ORBAX_TMP_SUFFIX not in name and not name.startswith(_PROCESS_PREFIX)


def _is_item(store: Store, directory: str) -> bool:
    return store.has(f"{directory}/{ORBAX_TREE_METADATA_FILE}") or store.has(f"{directory}/{OCDBT_MANIFEST}")


def _is_item_of_step(store: Store, directory: str) -> bool:
    """Return True if a directory is an item of its parent checkpoint. Otherwise it may be a checkpoint of its own."""
    return _is_item(store, directory) and not store.has(f"{directory}/{ORBAX_METADATA_FILE}")


def list_orbax_tags(store: Store, names: Iterable[str]) -> list[TagEntry]:
    """Return the complete checkpoints among the names, oldest first. Steps are ordered by their numbers."""
    names = {*names}
    if _STEPS_FOLDER in names:
        with contextlib.suppress(OSError):  # it is a file, or belongs to another program
            names |= {name for name in store.list_names(_STEPS_FOLDER) if is_step_name(name)}
    entries = (find_orbax_tag(store, name) for name in names)
    return sort_by_numbers(entry for entry in entries if entry is not None and entry.complete)


def list_array_items(files: Sequence[str]) -> list[str]:
    """Return the items of arrays in a checkpoint with these files; ``""`` is the checkpoint itself.

    >>> list_array_items(["state/_METADATA", "state/d/0a", "meta/metadata"])
    ['state']
    """
    heads = {
        path.rpartition("/")[0]
        for path in files
        if path.rpartition("/")[2] in (ORBAX_TREE_METADATA_FILE, OCDBT_MANIFEST)
    }
    return [""] if "" in heads else sorted(head for head in heads if "/" not in head and _may_be_named(head))


def find_missing_metadata(files: Sequence[str]) -> list[str]:
    """Return the missing ``_METADATA`` files of items in a checkpoint with these files.

    >>> find_missing_metadata(["state/manifest.ocdbt", "state/d/0a", "other/_METADATA"])
    ['state/_METADATA']
    """
    wanted = [f"{item}/{ORBAX_TREE_METADATA_FILE}".lstrip("/") for item in list_array_items(files)]
    return [file for file in wanted if file not in files]


def list_json_items(files: Sequence[str]) -> list[str]:
    """Return the JSON items in a checkpoint with these files, as written by `JsonSave`.

    >>> list_json_items(["state/_METADATA", "state/d/0a", "meta/metadata"])
    ['meta']
    """
    heads = {head for path in files for head, _, name in [path.rpartition("/")] if name == "metadata"}
    return sorted(head for head in heads if head and "/" not in head)


class OrbaxLayout(Layout):
    """orbax checkpoints, v0 and v1: with OCDBT or a directory for each array, zarr version 2 or 3.

    They contain no digests, so that a load only detects chunks that cannot be decoded.

    Args:
        name: Name of the layout.
        item: Item of a step that contains the tree; empty if the tag itself is an item. The instance with an empty item
            detects all orbax checkpoints, so that tags are not listed twice.
    """

    saves = True
    asks = True  # a program has the names of the arrays of a JAX model

    def __init__(self, name: str, *, item: str = "") -> None:
        self.name, self._prefix = name, f"{item}/" if item else ""
        self.origin = "" if item else "orbax"

    def check_findable(self, store: Store, tag: str) -> None:
        if not self._prefix:
            return
        if not is_step_name(tag):
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
        return any(file.path == self._prefix + ORBAX_TREE_METADATA_FILE for file in manifest.files)

    def writing(self, description: StateDescription) -> OrbaxWritePlanner:
        from xla_ckpt.formats.orbax.writing import OrbaxWritePlanner

        return OrbaxWritePlanner(description, self._prefix).validate()

    def rewriting(self, stored: StoredState, to: TargetTopology) -> ConversionPlan:
        from xla_ckpt.formats.orbax.writing import plan_orbax_conversion

        return plan_orbax_conversion(stored, self._prefix)

    def tags(self, store: Store, names: Sequence[str]) -> list[TagEntry]:
        return [] if self._prefix else list_orbax_tags(store, names)

    def find(self, store: Store, tag: str) -> TagEntry | None:
        return None if self._prefix else find_orbax_tag(store, tag)

    def open(self, store: Store, entry: TagEntry, hints: LoadHints) -> TagReader:
        from xla_ckpt.formats.orbax.scan import open_orbax

        return open_orbax(store, entry, hints.model_config)

    def verify(self, store: Store, entry: TagEntry, workers: int = READ_THREADS) -> VerifyReport:
        report = super().verify(store, entry, workers)
        if entry.damage is not None:
            return report  # the report already contains the missing items
        with (
            wrap_os_errors("opening a checkpoint", path=store.path, tag=entry.tag),
            closing(store.open(entry.directory, lock=False)) as directory,
        ):
            files = directory.list_files()
        report.files = len(files)  # as in a listing; in the reader each array is a file
        for file in find_missing_metadata(files):  # a load does not need it, but orbax does
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


class OrbaxModelLayout(Layout):
    """Model without other state in orbax files, under the names and in the form of a JAX program.

    The mapping is given by the rules of `register_names`, or by the MaxText rules for the configuration of the model.
    The rules are stored in the tag: with them this library restores the original model.
    """

    name = "orbax-model"
    holds = schema.MODEL
    model_names = ModelNames.RULES

    def source(self, reader: TagReader, part: str, to: TargetTopology) -> tuple[TagReader, str]:
        from xla_ckpt.formats.orbax.renamed_model import assemble_model

        return assemble_model(reader, get_rules_for_config(to.config)), paths.ROOT

    def rewriting(self, stored: StoredState, to: TargetTopology) -> ConversionPlan:
        from xla_ckpt.formats.orbax.renamed_model import dump_name_rules
        from xla_ckpt.formats.orbax.writing import plan_orbax_conversion

        files, names = plan_orbax_conversion(stored, keep_chunks=True), dump_name_rules(get_rules_for_config(to.config))
        return replace(files, index=lambda reader: {**files.index(reader), **names})

    def wrote(self, manifest: Manifest) -> bool:
        from xla_ckpt.formats.orbax.renamed_model import has_name_rules

        return has_name_rules(manifest)

    def as_saved(self, reader: TagReader) -> TagReader:
        from xla_ckpt.formats.orbax.renamed_model import restore_original_model

        return restore_original_model(reader)
