"""A model that was written under the names of a program of jax, as the model that it was: by the rules in its tag.

`xla_ckpt.layouts.orbax.assembled` writes such a tag, and this reads it. A chunk of a stored array is read and verified,
and its elements are put into the order of the model when somebody reads them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from xla_ckpt.dtypes import DType
from xla_ckpt.engine.crew import Crew
from xla_ckpt.engine.numpy_types import numpy_dtype
from xla_ckpt.engine.read import read_into
from xla_ckpt.engine.tag_reader import TagReader
from xla_ckpt.errors import CorruptCheckpointError, UsageError
from xla_ckpt.layouts.orbax.array_files import ArrayFiles, ChunkFile, costs_of_chunks
from xla_ckpt.layouts.orbax.model_parts import ModelParts
from xla_ckpt.layouts.orbax.name_rules import NameRule, parse_names
from xla_ckpt.layouts.orbax.names import Renaming, renaming
from xla_ckpt.layouts.scanned import flattened_model, scanned_manifest
from xla_ckpt.lightweight import cached_property
from xla_ckpt.manifest.digest import digest
from xla_ckpt.manifest.records import Manifest
from xla_ckpt.plan.costs import Costs
from xla_ckpt.plan.restore_plan import Want, plan_restore
from xla_ckpt.sharding.box import Box
from xla_ckpt.storage.base import Source
from xla_ckpt.storage.small_files import read_whole
from xla_ckpt.tree import path as paths

NAMES = "names.json"
"""The file of a tag that has the rules by which its model was written: a list of (path, name, pattern)."""

MAX_NAMES = 1 << 24
"""A larger one is not read (bytes): those of MaxText's models have some ten thousand."""


def names_file(rules: Sequence[NameRule]) -> dict[str, bytes]:
    """The file of these rules."""
    return {NAMES: json.dumps([(rule.path, rule.name, rule.pattern) for rule in rules]).encode()}


def is_renamed(manifest: Manifest) -> bool:
    """Whether a tag has the rules by which its model was written."""
    return any(file.path == NAMES for file in manifest.files)


def original_model(reader: TagReader) -> TagReader:
    """A reader of the model that such a tag was made of. It closes the other one.

    Raises:
        CorruptCheckpointError: The rules are not those that were written.
        IncompatibleCheckpointError: They do not fit the arrays.
    """
    rules, stored = _rules_in(reader), reader.manifest
    parts, files = ModelParts(rules), _OriginalFiles(reader)
    for leaf, record in stored.arrays.items():
        path = "/".join(paths.unescape(key) for key in paths.split(leaf))
        chunks = sorted((shard.box for shard in record), key=lambda box: box.start)
        of_model = renaming(rules, path, record.shape, chunks[0].shape, leaf)
        if of_model is None:
            raise CorruptCheckpointError("no rule of names in the tag is for an array", leaf=leaf, file=NAMES)
        array = _OriginalArray(reader, leaf, of_model, chunks, record.dtype)
        parts.add(of_model, "", record.dtype, chunks, len(stored.files) + len(files.arrays))
        files.arrays[f"{NAMES}/{len(files.arrays)}"] = array
    flat = flattened_model(parts.records())
    manifest, _ = scanned_manifest(reader.tag, flat, [*stored.files, *files.records()])
    manifest = replace(
        manifest, head=stored.head, mesh=stored.mesh, world=stored.world, module_metadata=stored.module_metadata
    )
    return TagReader(files, reader.root, reader.tag, manifest, ())


def _rules_in(reader: TagReader) -> tuple[NameRule, ...]:
    record = next(file for file in reader.manifest.files if file.path == NAMES)
    try:
        data = read_whole(reader.directory, NAMES, limit=MAX_NAMES, what="the file of names")
        if (len(data), digest(data)) != (record.size, record.digest):
            raise CorruptCheckpointError("the file of names is not what was saved", file=NAMES, hint=reader.hint)
        return parse_names([tuple(rule) for rule in json.loads(data)])
    except FileNotFoundError:
        raise CorruptCheckpointError("a file is missing", file=NAMES, hint=reader.hint) from None
    except (ValueError, TypeError, UsageError) as error:
        if isinstance(error, CorruptCheckpointError):
            raise
        raise CorruptCheckpointError("the file of names holds no rules of names", file=NAMES) from error


class _OriginalArray(ChunkFile):
    """A stored array, with the elements of each chunk in the order of the model."""

    def __init__(self, reader: TagReader, leaf: str, of_model: Renaming, chunks: Sequence[Box], dtype: DType) -> None:
        super().__init__(chunks, dtype)
        self._reader = reader
        self._leaf = leaf
        self.renaming = of_model

    def elements(self, chunk: Box) -> Any:
        memory = np.empty(chunk.size * self.dtype.itemsize, np.uint8)
        plan = plan_restore(self._reader.manifest, [Want(self._leaf, chunk, 0)])
        read_into(self._reader, plan, [memory.data], Crew(workers=1))
        stored = memory.view(numpy_dtype(self.dtype)).reshape(chunk.shape)
        return self.renaming.computed(self.renaming.ordered(stored, chunk))


class _OriginalFiles(ArrayFiles[Any]):
    """The arrays of a tag in the order of the model, beside its own files. A `ReadDirectory`."""

    def __init__(self, reader: TagReader) -> None:
        super().__init__(reader.directory)
        self._reader = reader

    @cached_property
    def costs(self) -> Costs:
        """Each batch asks for it."""
        return costs_of_chunks(array.largest for array in self.arrays.values())

    def open(self, path: str, size: int | None = None) -> Source:
        return self.arrays[path] if path in self.arrays else self.directory.open(path, size)

    def files(self) -> list[str]:
        return self.directory.files()

    def close(self) -> None:
        self._reader.close()
