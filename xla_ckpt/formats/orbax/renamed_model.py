"""A model stored under the names of a JAX program (``orbax-model``): assemble its arrays for writing, and restore the
original model on reading.

Writing applies name rules in reverse: a stored array is a file of chunks, and each chunk is assembled from the arrays
of the model when it is read, so that one chunk is in memory at a time. The rules are stored in the tag; reading applies
them to each chunk after it is verified.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from xla_ckpt.core.checksum import compute_digest
from xla_ckpt.core.dtypes import DType, to_numpy_dtype
from xla_ckpt.core.lightweight import cached_property
from xla_ckpt.core.manifest.arrays import ArrayRecord, Shard, create_array_record
from xla_ckpt.core.manifest.manifest import Manifest
from xla_ckpt.core.plan.read_costs import ReadCosts
from xla_ckpt.core.plan.restore_plan import ReadRequest, plan_restore
from xla_ckpt.core.sharding.box import Box
from xla_ckpt.core.tree import path as paths
from xla_ckpt.core.tree import schema
from xla_ckpt.core.tree.flatten import flatten
from xla_ckpt.core.tree.nested import build_nested
from xla_ckpt.core.tree.skeleton import find_arrays
from xla_ckpt.core.tree.values import ValueCodec
from xla_ckpt.errors import CorruptCheckpointError, IncompatibleCheckpointError, UsageError
from xla_ckpt.formats.orbax.chunk_grid import MAX_CHUNK_BYTES
from xla_ckpt.formats.orbax.name_rules import (
    InverseRenaming,
    ModelArrayCollector,
    NameRule,
    Renaming,
    find_renaming,
    parse_name_rules,
    plan_inverse_renamings,
)
from xla_ckpt.formats.orbax.virtual_files import ChunkedFile, VirtualDirectory, compute_chunk_costs
from xla_ckpt.formats.scan import build_scanned_manifest, flatten_model
from xla_ckpt.loading.read import read_into
from xla_ckpt.loading.tag_reader import TagReader
from xla_ckpt.progress import IoContext
from xla_ckpt.storage.base import FileReader, read_file


def assemble_model(reader: TagReader, rules: Sequence[NameRule]) -> TagReader:
    """Return a reader of the model in a tag, in the form in which a JAX program would store it by these rules.

    Raises:
        UsageError: There are no rules, or no model.
        IncompatibleCheckpointError: The rules do not match the model.
    """
    if not rules:
        hint = (
            "A program says it: xla_ckpt.register_names(...) before xla_ckpt.convert; for MaxText with "
            "xla_ckpt.maxtext_names(config=...)."
        )
        raise UsageError("nothing says what a program of jax calls the arrays of the model", hint=hint)
    model = _collect_model_arrays(reader.manifest)
    if not model:
        raise UsageError("the checkpoint has no model", leaf=schema.MODEL)
    sizes = {name: (record.shape, record.dtype.itemsize) for name, (_, record) in model.items()}
    files = AssembledDirectory(reader.directory)
    tree = []
    for number, (path, inverse) in enumerate(plan_inverse_renamings(rules, sizes, MAX_CHUNK_BYTES).items()):
        files.arrays[path] = array = AssembledArrayFile(reader, inverse, model)
        tree.append((tuple(path.split("/")), array.make_record(number)))
    flat = flatten(build_nested(tree), lambda value: "numpy" if isinstance(value, ArrayRecord) else None, ValueCodec())
    manifest, _ = build_scanned_manifest(reader.tag, flat, files.make_file_records())
    return TagReader(files, reader.root, reader.tag, manifest, ())


def _collect_model_arrays(manifest: Manifest) -> dict[str, tuple[str, ArrayRecord]]:
    """Return leaf path and record of each array by its name in the model. Tied arrays have their first name."""
    model: dict[str, tuple[str, ArrayRecord]] = {}
    for leaf in find_arrays(manifest.skeleton, paths.ROOT):
        if not paths.is_under(leaf, schema.MODEL) or leaf in manifest.aliases:
            continue
        if (record := manifest.find_array(leaf)) is None:
            raise IncompatibleCheckpointError("the checkpoint has no such array", leaf=leaf)
        model[".".join(map(paths.unescape, paths.split(leaf)[1:]))] = leaf, record
    return model


class AssembledArrayFile(ChunkedFile):
    """Stored array that is assembled from arrays of a model."""

    def __init__(
        self, reader: TagReader, inverse: InverseRenaming, model: Mapping[str, tuple[str, ArrayRecord]]
    ) -> None:
        self._reader = reader
        self._inverse = inverse
        self._model = model
        spans = [range(0, n, size) for n, size in zip(inverse.shape, inverse.chunk_shape, strict=True)]
        chunks = [
            Box(
                low, tuple(min(a + size, n) for a, size, n in zip(low, inverse.chunk_shape, inverse.shape, strict=True))
            )
            for low in itertools.product(*spans)
        ]
        first = next(inverse.renaming.iterate_parts(chunks[0]))[0]
        super().__init__(chunks, model[first][1].dtype)
        inverse.renaming.check_dtype(self.dtype, first)
        for chunk in chunks:
            for name, _ in inverse.renaming.iterate_parts(chunk):
                if (other := model[name][1].dtype) != self.dtype:
                    raise IncompatibleCheckpointError(
                        "arrays that are one in jax have different types",
                        leaf=name,
                        expected=self.dtype.name,
                        found=other.name,
                    )

    def make_record(self, file: int) -> ArrayRecord:
        """Return its manifest record, given the number of its file."""
        shards, offset = [], 0
        for chunk in self.chunks:
            shards.append(Shard(chunk, file, offset))
            offset += chunk.size * self.dtype.itemsize
        return create_array_record(self.dtype, self._inverse.shape, shards)

    def read_chunk(self, chunk: Box) -> Any:
        """Assemble the chunk from arrays of the model, which are verified."""
        renaming, itemsize = self._inverse.renaming, self.dtype.itemsize
        memory = np.empty(chunk.size * itemsize, np.uint8)
        wants, slots, at = [], [], 0
        for slot, (name, box) in enumerate(renaming.iterate_parts(chunk)):
            wants.append(ReadRequest(self._model[name][0], box, slot))
            slots.append(memory.data[at : at + box.size * itemsize])
            at += box.size * itemsize
        read_into(self._reader, plan_restore(self._reader.manifest, wants), slots, IoContext(workers=1))
        return renaming.to_stored(memory.view(to_numpy_dtype(self.dtype)), chunk)


class AssembledDirectory(VirtualDirectory[AssembledArrayFile]):
    """Arrays of a model in the form of a JAX program, one file per array. A `ReadDirectory`."""

    @cached_property
    def costs(self) -> ReadCosts:
        """Read costs, queried for each batch. A chunk is assembled by one thread at a time."""
        sizes = (array.largest for array in self.arrays.values())
        return replace(compute_chunk_costs(sizes), direct_bytes=0, concurrent_reads=1)

    def close(self) -> None:
        """Do nothing: the caller that opened the tag closes it."""


NAMES_FILE = "names.json"
"""File of the rules by which the model of a tag was written: a list of (path, name, pattern)."""

MAX_NAMES_BYTES = 1 << 24
"""Maximum size of the file of rules (bytes). MaxText models have about ten thousand bytes."""


def dump_name_rules(rules: Sequence[NameRule]) -> dict[str, bytes]:
    """Serialize the rules. Return file name -> bytes."""
    return {NAMES_FILE: json.dumps([(rule.path, rule.name, rule.pattern) for rule in rules]).encode()}


def has_name_rules(manifest: Manifest) -> bool:
    """Return True if a tag contains the rules by which its model was written."""
    return any(file.path == NAMES_FILE for file in manifest.files)


def restore_original_model(reader: TagReader) -> TagReader:
    """Return a reader of the original model of such a tag. It closes the given reader.

    Raises:
        CorruptCheckpointError: The stored rules are missing or corrupt.
        IncompatibleCheckpointError: The rules do not match the arrays.
    """
    rules, stored = _read_name_rules(reader), reader.manifest
    parts, files = ModelArrayCollector(rules), _OriginalDirectory(reader)
    for leaf, record in stored.arrays.items():
        path = "/".join(paths.unescape(key) for key in paths.split(leaf))
        chunks = sorted((shard.box for shard in record), key=lambda box: box.start)
        of_model = find_renaming(rules, path, record.shape, chunks[0].shape, leaf)
        if of_model is None:
            raise CorruptCheckpointError("no rule of names in the tag is for an array", leaf=leaf, file=NAMES_FILE)
        array = _OriginalArrayFile(reader, leaf, of_model, chunks, record.dtype)
        parts.add_array(of_model, "", record.dtype, chunks, len(stored.files) + len(files.arrays))
        files.arrays[f"{NAMES_FILE}/{len(files.arrays)}"] = array
    flat = flatten_model(parts.build_records())
    manifest, _ = build_scanned_manifest(reader.tag, flat, [*stored.files, *files.make_file_records()])
    manifest = replace(
        manifest,
        header=stored.header,
        mesh=stored.mesh,
        world_size=stored.world_size,
        module_metadata=stored.module_metadata,
    )
    return TagReader(files, reader.root, reader.tag, manifest, ())


def _read_name_rules(reader: TagReader) -> tuple[NameRule, ...]:
    record = next(file for file in reader.manifest.files if file.path == NAMES_FILE)
    try:
        data = read_file(reader.directory, NAMES_FILE, limit=MAX_NAMES_BYTES, what="the file of names")
        if (len(data), compute_digest(data)) != (record.size, record.framing_digest):
            raise CorruptCheckpointError("the file of names is not what was saved", file=NAMES_FILE, hint=reader.hint)
        return parse_name_rules([tuple(rule) for rule in json.loads(data)])
    except FileNotFoundError:
        raise CorruptCheckpointError("a file is missing", file=NAMES_FILE, hint=reader.hint) from None
    except (ValueError, TypeError, UsageError) as error:
        if isinstance(error, CorruptCheckpointError):
            raise
        raise CorruptCheckpointError("the file of names holds no rules of names", file=NAMES_FILE) from error


class _OriginalArrayFile(ChunkedFile):
    """Stored array with the elements of each chunk in the order of the model."""

    def __init__(self, reader: TagReader, leaf: str, of_model: Renaming, chunks: Sequence[Box], dtype: DType) -> None:
        super().__init__(chunks, dtype)
        self._reader = reader
        self._leaf = leaf
        self.renaming = of_model

    def read_chunk(self, chunk: Box) -> Any:
        memory = np.empty(chunk.size * self.dtype.itemsize, np.uint8)
        plan = plan_restore(self._reader.manifest, [ReadRequest(self._leaf, chunk, 0)])
        read_into(self._reader, plan, [memory.data], IoContext(workers=1))
        stored = memory.view(to_numpy_dtype(self.dtype)).reshape(chunk.shape)
        return self.renaming.to_model_values(self.renaming.to_model_order(stored, chunk))


class _OriginalDirectory(VirtualDirectory[Any]):
    """Arrays of a tag in the order of the model, in addition to its own files. A `ReadDirectory`."""

    def __init__(self, reader: TagReader) -> None:
        super().__init__(reader.directory)
        self._reader = reader

    @cached_property
    def costs(self) -> ReadCosts:
        """Read costs, queried for each batch."""
        return compute_chunk_costs(array.largest for array in self.arrays.values())

    def open(self, path: str, size: int | None = None) -> FileReader:
        return self.arrays[path] if path in self.arrays else self.directory.open(path, size)

    def list_files(self) -> list[str]:
        return self.directory.list_files()

    def close(self) -> None:
        self._reader.close()
