"""Opening a checkpoint of orbax's: scanned into a `Manifest`. Of its arrays no element is read, but numbers are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from xla_ckpt.arrays.pytree import KEY
from xla_ckpt.engine.tag_reader import TagReader
from xla_ckpt.errors import CorruptCheckpointError, IncompatibleCheckpointError, UsageError, naming
from xla_ckpt.layouts.orbax import metadata
from xla_ckpt.layouts.orbax.chunks import ChunkedArray, DecodedFiles, in_bucket, on_disk
from xla_ckpt.layouts.orbax.maxtext import is_tree_of_maxtext, rules_for
from xla_ckpt.layouts.orbax.metadata import OrbaxItem, OrbaxLeaf
from xla_ckpt.layouts.orbax.model_parts import ModelParts
from xla_ckpt.layouts.orbax.name_rules import registered_names
from xla_ckpt.layouts.orbax.names import renaming
from xla_ckpt.layouts.orbax.tags import OCDBT, items_of, json_items_of
from xla_ckpt.layouts.scanned import MAX_JSON, directory_to_scan, scanned_manifest
from xla_ckpt.logs import get_logger
from xla_ckpt.manifest.arrays import ArrayRecord, array_record
from xla_ckpt.storage.base import ReadDirectory, Store, open_without_links
from xla_ckpt.storage.small_files import read_whole
from xla_ckpt.tags.entry import TREE_METADATA, TagEntry
from xla_ckpt.tree import schema
from xla_ckpt.tree.codec import Composite, ValueCodec
from xla_ckpt.tree.flatten import flatten
from xla_ckpt.tree.json_object import json_object
from xla_ckpt.tree.nested import nested
from xla_ckpt.tree.path import listed

logger = get_logger(__name__)

_CODEC = ValueCodec(apart=lambda value: value if isinstance(value, Composite) else None)


def open_orbax(store: Store, entry: TagEntry, config: Mapping[str, Any]) -> TagReader:
    """A reader of a checkpoint of orbax's, for the restore engine.

    Args:
        config: What the configuration of a model of transformers says that is to be filled from it; or nothing.

    Raises:
        CorruptCheckpointError: Files are missing, damaged, or do not add up.
        UnsupportedStateError: An array is of a type that is not known.
        UsageError: It lies where tensorstore does not read it; or it is MaxText's, and its model is no such model.
    """
    if entry.damage is not None:
        raise entry.damage
    with directory_to_scan(store, entry.tag, lambda: _decoded(store, entry.directory)) as files:
        for path in files.directory.files() if store.file_system is not None else ():
            files.directory.open(path).close()  # tensorstore would wait for a pipe, and follow a link to anywhere
        state, left = _state_of(files, config)
        # As it is: states of optimizers in jax have the names of the parameters, too, so that a model is not known
        # by its names, as in DCP's directories.
        flat = flatten(state, _kind, _CODEC)
        flat = replace(flat, arrays={leaf: array.record for leaf, array in flat.arrays.items()})
        manifest, _ = scanned_manifest(entry.tag, flat, files.records(), created=entry.created)
        reader = TagReader(files, store.path, entry.tag, manifest, ())
        if left is not None and registered_names():
            reader.misfit = (
                "Its arrays for which there are rules of register_names are those of `model`, and no longer where they "
                "were in the tree: xla_ckpt.register_names([]) takes the rules back."
            )
            reader.without_rule = (
                f"No rule is for these arrays of the tag: {listed(left)}." if left else "All of its arrays have rules."
            )
        return reader


class _Stored(NamedTuple):
    """An array in the tree, and whose it was."""

    record: ArrayRecord
    kind: str


def _decoded(store: Store, name: str) -> DecodedFiles:
    """A directory of a store, whose arrays tensorstore reads where they lie."""
    if (files := store.file_system) is not None:
        directory = files.open(name, lock=False)
        return DecodedFiles(directory, on_disk(directory))
    assert store.object_store is not None, "a store is one or the other"
    bucket = store.object_store.in_bucket(name)
    if (place := in_bucket(bucket)) is None:
        raise UsageError(
            f"orbax's checkpoints are not read from {bucket.scheme}://, to which tensorstore has no access",
            path=store.path,
            tag=name,
            hint="Copy it to a disk of this machine.",
        )
    return DecodedFiles(open_without_links(store, name, lock=False), place)


def _kind(value: Any) -> str | None:
    return value.kind if isinstance(value, _Stored) else None


def _state_of(files: DecodedFiles, config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str] | None]:
    """The state of a checkpoint, with a `_Stored` for each array; and the arrays that no rule is for, where rules have
    made a model of others.

    A single item is the state itself.

    Raises:
        CheckpointError: It is damaged, or holds what cannot be described.
    """
    directory, names = files.directory, files.directory.files()
    items = items_of(names)
    model = ModelParts(registered_names(), several=len(items) > 1)
    trees = {item: _tree_of(files, item, names, model, config) for item in items}
    if not trees:
        raise CorruptCheckpointError("a file is missing", file=TREE_METADATA)
    for item in json_items_of(names):
        path = f"{item}/metadata"
        with naming(file=path):
            data = read_whole(directory, path, limit=MAX_JSON, what="an item that is JSON")
            trees.setdefault(item, json_object(data, "an item that is JSON"))
    tree = next(iter(trees.values())) if len(trees) == 1 else trees
    tree = tree if isinstance(tree, dict) else {next(iter(trees)) or "value": tree}
    with_model = _with_model(tree, model)
    return with_model, None if with_model is tree else model.others


def _takes(model: ModelParts, item: str, leaf: OrbaxLeaf, array: ChunkedArray, file: int) -> bool:
    """Whether an array of an item is of the model, by its rules: then it is taken."""
    paths = [f"{item}/{leaf.path}", leaf.path] if model.several else [leaf.path]
    renamed = (renaming(model.rules, path, array.shape, array.grid, leaf.name) for path in paths)
    array.renaming = next((one for one in renamed if one is not None), None)
    if array.renaming is None:
        model.others.append(paths[0])
        return False
    model.add(array.renaming, item, array.dtype, array.chunks, file)
    return True


def _with_model(tree: dict[str, Any], model: ModelParts) -> dict[str, Any]:
    """The tree with the model beside it, under the name that models have."""
    if not (records := model.records()):
        if model.rules and model.others:  # a path is misspelt
            logger.warning(
                "no rule of register_names is for an array of this checkpoint: %s. Its arrays: %s",
                listed([rule.path for rule in model.rules]),
                listed(model.others),
            )
        return tree
    if tree.get(schema.MODEL):
        hint = "Call register_names([]): the model has its names already."
        raise IncompatibleCheckpointError("rules of names find a second model", leaf=schema.MODEL, hint=hint)
    stored = {id(record): _Stored(record, "torch") for record in records.values()}  # names of one array have the same
    return {**tree, schema.MODEL: {name: stored[id(record)] for name, record in records.items()}}


def _tree_of(files: DecodedFiles, item: str, names: Sequence[str], model: ModelParts, config: Mapping[str, Any]) -> Any:
    """The tree of an item, without what is of the model."""
    below = f"{item}/" if item else ""
    together = below + OCDBT in names
    with naming(file=below + TREE_METADATA):
        said = _item_of(files.directory, below, names)
        keys = files.keys(item, names)
        leaves = said.leaves
        if leaves is None:
            leaves = [OrbaxLeaf((name,), metadata.ARRAY) for name in metadata.names_of(keys)]
    if not model.rules and is_tree_of_maxtext(leaf.path for leaf in leaves):
        model.rules = rules_for(config)
    stored = [leaf.name for leaf in leaves if leaf.kind in (metadata.ARRAY, metadata.NUMPY, metadata.SCALAR)]
    arrays = files.add(item, metadata.chunks_of(keys, stored), zarr3=said.zarr3, together=together)
    number = {path: i for i, path in enumerate(files.arrays)}
    values: dict[OrbaxLeaf, Any] = {}
    for leaf in leaves:
        if leaf.kind in metadata.EMPTY:
            values[leaf] = metadata.EMPTY[leaf.kind]
        elif leaf.kind == metadata.STRING:
            if leaf.name not in said.texts:
                raise CorruptCheckpointError("a text is missing", leaf=leaf.name, file=below + metadata.TEXTS)
            values[leaf] = said.texts[leaf.name]
        else:
            path, array = arrays[leaf.name]
            if leaf.kind == metadata.SCALAR:
                values[leaf] = array.number()
                continue
            if _takes(model, item, leaf, array, number[path]):
                continue
            with naming(leaf=leaf.name, file=path):
                record = array_record(array.dtype, array.shape, array.shards(number[path]))
            values[leaf] = stored_array = _Stored(record, "numpy" if leaf.kind == metadata.NUMPY else "jax")
            if (implementation := said.random_keys.get(leaf.name)) is not None:
                values[leaf] = Composite(KEY, {"data": stored_array}, {"impl": implementation})
    return nested((("tree", *leaf.keys), value) for leaf, value in values.items()).get("tree", {})


def _item_of(directory: ReadDirectory, below: str, names: Sequence[str]) -> OrbaxItem:
    """What the JSON of an item says; `below` is what its paths begin with."""

    def read(path: str) -> bytes:
        return read_whole(directory, path, limit=MAX_JSON, what="a file of orbax's metadata")

    if below + TREE_METADATA not in names:
        logger.warning(
            "%s/%s has no %s: an old version of orbax's wrote it, or the file was removed. orbax restores it no more. "
            "Its tree is not known, and its arrays have names with dots",
            directory.name,
            below,
            TREE_METADATA,
        )
        return OrbaxItem()
    leaves, zarr3, together = metadata.leaves_of(read(below + TREE_METADATA))
    if together and below + OCDBT not in names:
        hint = "The save has not ended, or the file was removed: take another tag, or restore the file from a copy."
        raise CorruptCheckpointError("a file is missing", file=below + OCDBT, hint=hint)
    texts = metadata.texts_of(read(below + metadata.TEXTS)) if below + metadata.TEXTS in names else {}
    random_keys: dict[str, str] = {}
    for path in names:
        if path.startswith(below + "array_metadatas/"):
            random_keys |= metadata.random_keys_of(read(path))
    return OrbaxItem(leaves, zarr3, texts, random_keys)
