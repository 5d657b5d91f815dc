"""A model under the names of a program of jax, as rules of names say: its arrays are made of those of a tag.

What the rules read (`xla_ckpt.layouts.orbax.chunks`) they write here: a stored array is a file of chunks, and each
chunk is put together from the arrays of the model when somebody reads it. So one chunk is in memory at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from xla_ckpt.engine.crew import Crew
from xla_ckpt.engine.numpy_types import numpy_dtype
from xla_ckpt.engine.read import read_into
from xla_ckpt.engine.tag_reader import TagReader
from xla_ckpt.errors import IncompatibleCheckpointError, UsageError
from xla_ckpt.layouts.orbax.array_files import ArrayFiles, ChunkFile, costs_of_chunks
from xla_ckpt.layouts.orbax.grid import CHUNK_BYTES
from xla_ckpt.layouts.orbax.name_rules import NameRule
from xla_ckpt.layouts.orbax.names import Inverse, inverses
from xla_ckpt.layouts.scanned import scanned_manifest
from xla_ckpt.lightweight import cached_property
from xla_ckpt.manifest.arrays import ArrayRecord, array_record
from xla_ckpt.manifest.records import Manifest
from xla_ckpt.manifest.shards import Shard
from xla_ckpt.plan.costs import Costs
from xla_ckpt.plan.restore_plan import Want, plan_restore
from xla_ckpt.sharding.box import Box
from xla_ckpt.tree import path as paths
from xla_ckpt.tree import schema
from xla_ckpt.tree.codec import ValueCodec
from xla_ckpt.tree.flatten import flatten
from xla_ckpt.tree.nested import nested
from xla_ckpt.tree.skeleton import array_paths


def assembled_model(reader: TagReader, rules: Sequence[NameRule]) -> TagReader:
    """A reader of the model in a tag, as a program of jax would have stored it: by these rules.

    Raises:
        UsageError: There are no rules, or no model.
        IncompatibleCheckpointError: The rules do not fit the model.
    """
    if not rules:
        hint = (
            "A program says it: xla_ckpt.register_names(...) before xla_ckpt.convert; for MaxText with "
            "xla_ckpt.maxtext_names(config=...)."
        )
        raise UsageError("nothing says what a program of jax calls the arrays of the model", hint=hint)
    model = _model_of(reader.manifest)
    if not model:
        raise UsageError("the checkpoint has no model", leaf=schema.MODEL)
    sizes = {name: (record.shape, record.dtype.itemsize) for name, (_, record) in model.items()}
    files = AssembledFiles(reader.directory)
    tree = []
    for number, (path, inverse) in enumerate(inverses(rules, sizes, CHUNK_BYTES).items()):
        files.arrays[path] = array = AssembledArray(reader, inverse, model)
        tree.append((tuple(path.split("/")), array.record(number)))
    flat = flatten(nested(tree), lambda value: "numpy" if isinstance(value, ArrayRecord) else None, ValueCodec())
    manifest, _ = scanned_manifest(reader.tag, flat, files.records())
    return TagReader(files, reader.root, reader.tag, manifest, ())


def _model_of(manifest: Manifest) -> dict[str, tuple[str, ArrayRecord]]:
    """Name in the model -> leaf path and record, of each array. Of one that has several names the first one counts."""
    model: dict[str, tuple[str, ArrayRecord]] = {}
    for leaf in array_paths(manifest.skeleton, paths.ROOT):
        if not paths.is_under(leaf, schema.MODEL) or leaf in manifest.aliases:
            continue
        if (record := manifest.array(leaf)) is None:
            raise IncompatibleCheckpointError("the checkpoint has no such array", leaf=leaf)
        model[".".join(map(paths.unescape, paths.split(leaf)[1:]))] = leaf, record
    return model


class AssembledArray(ChunkFile):
    """A stored array, made of arrays of a model."""

    def __init__(self, reader: TagReader, inverse: Inverse, model: Mapping[str, tuple[str, ArrayRecord]]) -> None:
        self._reader = reader
        self._inverse = inverse
        self._model = model
        spans = [range(0, n, size) for n, size in zip(inverse.shape, inverse.chunk, strict=True)]
        chunks = [
            Box(low, tuple(min(a + size, n) for a, size, n in zip(low, inverse.chunk, inverse.shape, strict=True)))
            for low in itertools.product(*spans)
        ]
        first = next(inverse.renaming.parts(chunks[0]))[0]
        super().__init__(chunks, model[first][1].dtype)
        inverse.renaming.check_type(self.dtype, first)
        for chunk in chunks:
            for name, _ in inverse.renaming.parts(chunk):
                if (other := model[name][1].dtype) != self.dtype:
                    raise IncompatibleCheckpointError(
                        "arrays that are one in jax have different types",
                        leaf=name,
                        expected=self.dtype.name,
                        found=other.name,
                    )

    def record(self, file: int) -> ArrayRecord:
        """What a manifest says of it, in which it is the file that has this number."""
        shards, offset = [], 0
        for chunk in self.chunks:
            shards.append(Shard(chunk, file, offset))
            offset += chunk.size * self.dtype.itemsize
        return array_record(self.dtype, self._inverse.shape, shards)

    def elements(self, chunk: Box) -> Any:
        """They are put together from those of the model, which are verified."""
        renaming, itemsize = self._inverse.renaming, self.dtype.itemsize
        memory = np.empty(chunk.size * itemsize, np.uint8)
        wants, slots, at = [], [], 0
        for slot, (name, box) in enumerate(renaming.parts(chunk)):
            wants.append(Want(self._model[name][0], box, slot))
            slots.append(memory.data[at : at + box.size * itemsize])
            at += box.size * itemsize
        read_into(self._reader, plan_restore(self._reader.manifest, wants), slots, Crew(workers=1))
        return renaming.stored(memory.view(numpy_dtype(self.dtype)), chunk)


class AssembledFiles(ArrayFiles[AssembledArray]):
    """The arrays of a model as a program of jax has them, a file for each. A `ReadDirectory`."""

    @cached_property
    def costs(self) -> Costs:
        """Each batch asks for it. A chunk is put together by one thread at a time."""
        sizes = (array.largest for array in self.arrays.values())
        return replace(costs_of_chunks(sizes), straight_bytes=0, in_flight=1)

    def close(self) -> None:
        """Whoever opened the tag closes it."""
