"""Open an orbax checkpoint: scan it into a `Manifest`. No array elements are read, except scalars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from xla_ckpt.arrays.pytree import PRNG_KEY
from xla_ckpt.core.json_data import parse_json_object
from xla_ckpt.core.manifest.arrays import ArrayRecord, create_array_record
from xla_ckpt.core.tree import schema
from xla_ckpt.core.tree.flatten import flatten
from xla_ckpt.core.tree.nested import build_nested
from xla_ckpt.core.tree.path import format_leaves
from xla_ckpt.core.tree.values import Composite, ValueCodec
from xla_ckpt.errors import CorruptCheckpointError, IncompatibleCheckpointError, UsageError, annotate_errors
from xla_ckpt.formats.orbax import metadata
from xla_ckpt.formats.orbax.layout import OCDBT_MANIFEST, list_array_items, list_json_items
from xla_ckpt.formats.orbax.maxtext import get_rules_for_config, is_maxtext_tree
from xla_ckpt.formats.orbax.metadata import OrbaxItemMetadata, OrbaxLeaf
from xla_ckpt.formats.orbax.name_rules import ModelArrayCollector, find_renaming, get_registered_rules
from xla_ckpt.formats.orbax.tensorstore_arrays import (
    DecodedArray,
    DecodedDirectory,
    make_bucket_kvstore,
    make_file_kvstore,
)
from xla_ckpt.formats.scan import MAX_JSON_BYTES, build_scanned_manifest, open_for_scan
from xla_ckpt.loading.tag_reader import TagReader
from xla_ckpt.logs import get_logger
from xla_ckpt.storage.base import ReadDirectory, Store, open_without_links, read_file
from xla_ckpt.tags.entry import ORBAX_TREE_METADATA_FILE, TagEntry

logger = get_logger(__name__)

_CODEC = ValueCodec(split_value=lambda value: value if isinstance(value, Composite) else None)


def open_orbax(store: Store, entry: TagEntry, config: Mapping[str, Any]) -> TagReader:
    """Return a reader of an orbax checkpoint, for the restore engine.

    Args:
        config: Content of the configuration of the transformers model that is loaded; may be empty.

    Raises:
        CorruptCheckpointError: Files are missing, corrupt, or inconsistent.
        UnsupportedStateError: The dtype of an array is unknown.
        UsageError: tensorstore does not support the storage; or it is a MaxText checkpoint, and `config` is of another
            kind of model.
    """
    if entry.damage is not None:
        raise entry.damage
    with open_for_scan(store, entry.tag, lambda: _open_decoded(store, entry.directory)) as files:
        for path in files.directory.list_files() if store.file_system is not None else ():
            files.directory.open(path).close()  # tensorstore would block on a pipe, and follow a link to any target
        state, left = _read_state(files, config)
        # The state is not searched for a model: optimizer states in JAX have the names of the parameters, too, so that
        # a model cannot be recognized by its names, as in DCP directories.
        flat = flatten(state, _get_kind, _CODEC)
        flat = replace(flat, arrays={leaf: array.record for leaf, array in flat.arrays.items()})
        manifest, _ = build_scanned_manifest(entry.tag, flat, files.make_file_records(), created=entry.created)
        reader = TagReader(files, store.path, entry.tag, manifest, ())
        if left is not None and get_registered_rules():
            reader.mismatch_hint = (
                "Its arrays for which there are rules of register_names are those of `model`, and no longer where they "
                "were in the tree: xla_ckpt.register_names([]) takes the rules back."
            )
            reader.unmatched_rules = (
                f"No rule is for these arrays of the tag: {format_leaves(left)}."
                if left
                else "All of its arrays have rules."
            )
        return reader


class _StoredArray(NamedTuple):
    """Array in the tree, and the kind of array to restore."""

    record: ArrayRecord
    kind: str


def _open_decoded(store: Store, name: str) -> DecodedDirectory:
    """Open a directory of a store whose arrays tensorstore reads in place.

    Raises:
        UsageError: tensorstore does not support the storage.
    """
    if (files := store.file_system) is not None:
        directory = files.open(name, lock=False)
        return DecodedDirectory(directory, make_file_kvstore(directory))
    assert store.object_store is not None, "a store is one or the other"
    bucket = store.object_store.locate_in_bucket(name)
    if (place := make_bucket_kvstore(bucket)) is None:
        raise UsageError(
            f"orbax's checkpoints are not read from {bucket.scheme}://, to which tensorstore has no access",
            path=store.path,
            tag=name,
            hint="Copy it to a disk of this machine.",
        )
    return DecodedDirectory(open_without_links(store, name, lock=False), place)


def _get_kind(value: Any) -> str | None:
    return value.kind if isinstance(value, _StoredArray) else None


def _read_state(files: DecodedDirectory, config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str] | None]:
    """Read the state of a checkpoint, with a `_StoredArray` for each array. Return it, and the paths of arrays that
    match no rule; None if the rules found no model.

    A single item is the state itself.

    Raises:
        CheckpointError: The checkpoint is corrupt, or contains unsupported data.
    """
    directory, names = files.directory, files.directory.list_files()
    items = list_array_items(names)
    model = ModelArrayCollector(get_registered_rules(), multiple_items=len(items) > 1)
    trees = {item: _read_tree(files, item, names, model, config) for item in items}
    if not trees:
        raise CorruptCheckpointError("a file is missing", file=ORBAX_TREE_METADATA_FILE)
    for item in list_json_items(names):
        path = f"{item}/metadata"
        with annotate_errors(file=path):
            data = read_file(directory, path, limit=MAX_JSON_BYTES, what="an item that is JSON")
            trees.setdefault(item, parse_json_object(data, "an item that is JSON"))
    tree = next(iter(trees.values())) if len(trees) == 1 else trees
    tree = tree if isinstance(tree, dict) else {next(iter(trees)) or "value": tree}
    with_model = _add_model(tree, model)
    return with_model, None if with_model is tree else model.unmatched_paths


def _match_model_rule(model: ModelArrayCollector, item: str, leaf: OrbaxLeaf, array: DecodedArray, file: int) -> bool:
    """Add an array of an item to the model if it matches a rule. Return True if it does."""
    paths = [f"{item}/{leaf.path}", leaf.path] if model.multiple_items else [leaf.path]
    renamed = (find_renaming(model.rules, path, array.shape, array.chunk_shape, leaf.name) for path in paths)
    array.renaming = next((one for one in renamed if one is not None), None)
    if array.renaming is None:
        model.unmatched_paths.append(paths[0])
        return False
    model.add_array(array.renaming, item, array.dtype, array.chunks, file)
    return True


def _add_model(tree: dict[str, Any], model: ModelArrayCollector) -> dict[str, Any]:
    """Add the model to the tree, under the key of models."""
    if not (records := model.build_records()):
        if model.rules and model.unmatched_paths:  # a path is misspelt
            logger.warning(
                "no rule of register_names is for an array of this checkpoint: %s. Its arrays: %s",
                format_leaves([rule.path for rule in model.rules]),
                format_leaves(model.unmatched_paths),
            )
        return tree
    if tree.get(schema.MODEL):
        hint = "Call register_names([]): the model has its names already."
        raise IncompatibleCheckpointError("rules of names find a second model", leaf=schema.MODEL, hint=hint)
    stored = {
        id(record): _StoredArray(record, "torch") for record in records.values()
    }  # names of one array share a record
    return {**tree, schema.MODEL: {name: stored[id(record)] for name, record in records.items()}}


def _read_tree(
    files: DecodedDirectory, item: str, names: Sequence[str], model: ModelArrayCollector, config: Mapping[str, Any]
) -> Any:
    """Read the tree of an item, without arrays that belong to the model."""
    below = f"{item}/" if item else ""
    together = below + OCDBT_MANIFEST in names
    with annotate_errors(file=below + ORBAX_TREE_METADATA_FILE):
        said = _read_item_metadata(files.directory, below, names)
        keys = files.list_keys(item, names)
        leaves = said.leaves
        if leaves is None:
            leaves = [OrbaxLeaf((name,), metadata.ARRAY) for name in metadata.list_array_names(keys)]
    if not model.rules and is_maxtext_tree(leaf.path for leaf in leaves):
        model.rules = get_rules_for_config(config)
    stored = [leaf.name for leaf in leaves if leaf.value_type in (metadata.ARRAY, metadata.NUMPY, metadata.SCALAR)]
    arrays = files.open_arrays(item, metadata.count_chunks(keys, stored), zarr3=said.zarr3, ocdbt=together)
    number = {path: i for i, path in enumerate(files.arrays)}
    values: dict[OrbaxLeaf, Any] = {}
    for leaf in leaves:
        if leaf.value_type in metadata.EMPTY_TYPES:
            values[leaf] = metadata.EMPTY_TYPES[leaf.value_type]
        elif leaf.value_type == metadata.STRING:
            if leaf.name not in said.strings:
                raise CorruptCheckpointError("a text is missing", leaf=leaf.name, file=below + metadata.STRINGS_FILE)
            values[leaf] = said.strings[leaf.name]
        else:
            path, array = arrays[leaf.name]
            if leaf.value_type == metadata.SCALAR:
                values[leaf] = array.read_scalar()
                continue
            if _match_model_rule(model, item, leaf, array, number[path]):
                continue
            with annotate_errors(leaf=leaf.name, file=path):
                record = create_array_record(array.dtype, array.shape, array.list_shards(number[path]))
            values[leaf] = stored_array = _StoredArray(record, "numpy" if leaf.value_type == metadata.NUMPY else "jax")
            if (implementation := said.random_keys.get(leaf.name)) is not None:
                values[leaf] = Composite(PRNG_KEY, {"data": stored_array}, {"impl": implementation})
    return build_nested((("tree", *leaf.keys), value) for leaf, value in values.items()).get("tree", {})


def _read_item_metadata(directory: ReadDirectory, prefix: str, names: Sequence[str]) -> OrbaxItemMetadata:
    """Read the metadata of an item; `prefix` is the prefix of its paths."""

    def read(path: str) -> bytes:
        return read_file(directory, path, limit=MAX_JSON_BYTES, what="a file of orbax's metadata")

    if prefix + ORBAX_TREE_METADATA_FILE not in names:
        logger.warning(
            "%s/%s has no %s: an old version of orbax's wrote it, or the file was removed. orbax restores it no more. "
            "Its tree is not known, and its arrays have names with dots",
            directory.name,
            prefix,
            ORBAX_TREE_METADATA_FILE,
        )
        return OrbaxItemMetadata()
    leaves, zarr3, together = metadata.parse_tree_metadata(read(prefix + ORBAX_TREE_METADATA_FILE))
    if together and prefix + OCDBT_MANIFEST not in names:
        hint = "The save has not ended, or the file was removed: take another tag, or restore the file from a copy."
        raise CorruptCheckpointError("a file is missing", file=prefix + OCDBT_MANIFEST, hint=hint)
    texts = (
        metadata.parse_strings(read(prefix + metadata.STRINGS_FILE)) if prefix + metadata.STRINGS_FILE in names else {}
    )
    random_keys: dict[str, str] = {}
    for path in names:
        if path.startswith(prefix + "array_metadatas/"):
            random_keys |= metadata.parse_random_keys(read(path))
    return OrbaxItemMetadata(leaves, zarr3, texts, random_keys)
