"""``.metadata``, and the file of all values that are no tensors: what DCP needs beside the files of tensors.

Both are made from the manifest when all ranks have written theirs, and the manifest lists them with their digests.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from xla_ckpt.engine.tag_reader import TagReader
from xla_ckpt.layouts.dcp.chunks import around, object_zip, value_zip
from xla_ckpt.layouts.dcp.keys import Item, items
from xla_ckpt.layouts.dcp.metadata import METADATA, Contents, DcpChunk, DcpTensor, Span
from xla_ckpt.layouts.dcp.stock import pickled, stock_metadata
from xla_ckpt.manifest.arrays import ArrayRecord
from xla_ckpt.manifest.records import Manifest
from xla_ckpt.sharding.box import Box
from xla_ckpt.tree.skeleton import is_array, is_object

OBJECTS = "objects.distcp"
"""The file of the values that are no tensors: a zip of torch.save for each, one after the other."""


def index_files(reader: TagReader, *, trust: bool, flat: bool) -> dict[str, bytes]:
    """Name -> bytes of the files that make a written directory one of DCP's. `flat`: under torchtitan's keys.

    Raises:
        UntrustedObjectError: A value needs a class of a module that is not imported, and `trust` is False.
        UnsupportedStateError: A value cannot be pickled, or torch has no such element type.
    """
    manifest = reader.manifest
    tensors: dict[str, DcpTensor] = {}
    objects: dict[str, Span] = {}
    text = bytearray()
    values = items(manifest.skeleton, flat=flat)
    for item in values:
        if is_array(item.part):
            record = manifest.array(item.leaf)
            assert record is not None, item.leaf  # what was merged has been compared with the skeleton
            tensors[item.key] = _tensor(record, manifest)
        else:
            zipped = _zip_of(item, reader, trust=trust)
            objects[item.key] = Span(OBJECTS, len(text), len(zipped))
            text += zipped
    contents = Contents(tensors, objects, {item.key: item.path for item in values})
    return {**({OBJECTS: bytes(text)} if objects else {}), METADATA: pickled(stock_metadata(contents))}


def _tensor(record: ArrayRecord, manifest: Manifest) -> DcpTensor:
    chunks = []
    for shard in record:
        offset, nbytes = around(record.dtype, shard.box.shape, shard.offset)
        chunks.append(DcpChunk(shard.box, Span(manifest.files[shard.file].path, offset, nbytes)))
    # A tensor without elements is stored nowhere, and has a chunk all the same, as stock DCP writes it.
    return DcpTensor(record.dtype, record.shape, tuple(chunks or [DcpChunk(Box.whole(record.shape), None)]))


def _zip_of(item: Item, reader: TagReader, *, trust: bool) -> bytes:
    if is_object(item.part):
        return object_zip(reader.pickled(item.part["$object"]))  # already a pickle: nothing of it is run
    from xla_ckpt.state.values import CODEC, resolver
    from xla_ckpt.tree.flatten import Unflattener

    build = Unflattener(
        array=_no_array, codec=CODEC, object=partial(reader.object, trust=trust), resolve=resolver(trust)
    ).build
    return value_zip(build(item.part, item.leaf), item.leaf)


def _no_array(path: str, kind: str) -> Any:  # noqa: ARG001  # what an `Unflattener` calls
    raise AssertionError(f"{path}: an array inside of a value that was taken to have none")
