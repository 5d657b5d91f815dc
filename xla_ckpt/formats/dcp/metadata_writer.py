"""Write ``.metadata``, and the file of all values that are not tensors.

Both are built from the manifest after all ranks have written their files, and the manifest lists them with their
digests.
"""

from __future__ import annotations

import copyreg
import dataclasses
import io
import pickle
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as stock
from torch.distributed.checkpoint.filesystem import _StorageInfo

from xla_ckpt.core.manifest.arrays import ArrayRecord
from xla_ckpt.core.manifest.manifest import Manifest
from xla_ckpt.core.sharding.box import Box
from xla_ckpt.core.tree.skeleton import is_array, is_object
from xla_ckpt.formats.dcp.metadata import METADATA_FILE, DcpContents, DcpTensor, StorageSpan, TensorChunk
from xla_ckpt.formats.dcp.writing import DcpItem, list_items, locate_zip, make_object_zip, make_value_zip
from xla_ckpt.loading.tag_reader import TagReader

OBJECTS_FILE = "objects.distcp"
"""File of values that are not tensors: one torch.save zip per value, concatenated."""


def build_index_files(reader: TagReader, *, trust: bool, flat: bool) -> dict[str, bytes]:
    """Build the files that complete a DCP directory, as name -> bytes. `flat` selects the torchtitan keys.

    Raises:
        UntrustedObjectError: A value needs a class of a module that is not imported, and `trust` is False.
        UnsupportedStateError: A value cannot be pickled, or torch does not support a dtype.
    """
    manifest = reader.manifest
    tensors: dict[str, DcpTensor] = {}
    objects: dict[str, StorageSpan] = {}
    text = bytearray()
    values = list_items(manifest.skeleton, flat=flat)
    for item in values:
        if is_array(item.part):
            record = manifest.find_array(item.leaf)
            assert record is not None, item.leaf  # merged records have been checked against the skeleton
            tensors[item.key] = _make_tensor(record, manifest)
        else:
            zipped = _make_zip(item, reader, trust=trust)
            objects[item.key] = StorageSpan(OBJECTS_FILE, len(text), len(zipped))
            text += zipped
    contents = DcpContents(tensors, objects, {item.key: item.path for item in values})
    return {
        **({OBJECTS_FILE: bytes(text)} if objects else {}),
        METADATA_FILE: dump_metadata(build_stock_metadata(contents)),
    }


def _make_tensor(record: ArrayRecord, manifest: Manifest) -> DcpTensor:
    chunks = []
    for shard in record:
        offset, nbytes = locate_zip(record.dtype, shard.box.shape, shard.offset)
        chunks.append(TensorChunk(shard.box, StorageSpan(manifest.files[shard.file].path, offset, nbytes)))
    # A tensor without elements is not stored, but still has a chunk, as in stock DCP.
    return DcpTensor(record.dtype, record.shape, tuple(chunks or [TensorChunk(Box.from_shape(record.shape), None)]))


def _make_zip(item: DcpItem, reader: TagReader, *, trust: bool) -> bytes:
    if is_object(item.part):
        return make_object_zip(reader.read_pickle(item.part["$object"]))  # already a pickle: it is not loaded
    from xla_ckpt.core.tree.flatten import Unflattener
    from xla_ckpt.state.values import CODEC, create_class_resolver

    build = Unflattener(
        get_array=_reject_array,
        codec=CODEC,
        get_object=partial(reader.load_object, trust=trust),
        resolve_class=create_class_resolver(trust),
    ).build
    return make_value_zip(build(item.part, item.leaf), item.leaf)


def _reject_array(path: str, kind: str) -> Any:  # noqa: ARG001  # signature of an `Unflattener` callback
    raise AssertionError(f"{path}: an array inside of a value that was taken to have none")


# DCP classes, and their pickle, which stock DCP of torch 2.3 and later reads.


def build_stock_metadata(contents: DcpContents) -> stock.Metadata:
    """Return the contents of a directory as DCP metadata."""
    described: dict[str, Any] = {}
    stored: dict[stock.MetadataIndex, Any] = {}
    for key, tensor in contents.tensors.items():
        described[key] = _describe_tensor(tensor)
        for number, chunk in enumerate(tensor.chunks):
            if chunk.span is not None:
                stored[stock.MetadataIndex(key, torch.Size(chunk.box.start), number)] = _make_storage_info(chunk.span)
    for key, span in contents.objects.items():
        described[key] = stock.BytesStorageMetadata()
        stored[stock.MetadataIndex(key)] = _make_storage_info(span)
    for key in contents.unsupported:
        described[key] = stock.BytesStorageMetadata()  # a planner that reads it gets the reason why it is unsupported
    return stock.Metadata(state_dict_metadata=described, planner_data=dict(contents.paths), storage_data=stored)


def _describe_tensor(tensor: DcpTensor) -> stock.TensorStorageMetadata:
    return stock.TensorStorageMetadata(
        properties=stock.TensorProperties(dtype=getattr(torch, tensor.dtype.name)),
        size=torch.Size(tensor.shape),
        chunks=[
            stock.ChunkStorageMetadata(torch.Size(chunk.box.start), torch.Size(chunk.box.shape))
            for chunk in tensor.chunks
        ],
    )


def _make_storage_info(span: StorageSpan) -> Any:
    return _StorageInfo(span.file, span.offset, span.nbytes, span.transforms or None)


def dump_metadata(metadata: Any) -> bytes:
    """Pickle a stock DCP `Metadata`.

    torch 2.15 pickles the strides as a sixth member of `TensorProperties`, and older versions fail on it. No version of
    torch needs it.
    """

    def properties(value: stock.TensorProperties) -> Any:
        return copyreg.__newobj__, (stock.TensorProperties,), value.__getstate__()[:5]  # type: ignore[no-untyped-call, attr-defined]

    text = io.BytesIO()
    pickler = pickle.Pickler(text)
    pickler.dispatch_table = {**copyreg.dispatch_table, stock.TensorProperties: properties}
    pickler.dump(_share_equal_objects(metadata))
    return text.getvalue()


def _share_equal_objects(metadata: Any) -> Any:
    """Return the metadata with equal sizes, chunks and properties of tensors as one object each.

    A pickle stores each object once: for 20,000 small tensors it has 1.2 million opcodes instead of 2.1 million.
    """
    known: dict[Any, Any] = {}

    def once(value: Any, *facts: Any) -> Any:
        return known.setdefault((type(value), *facts), value)

    def tensor(entry: Any) -> Any:
        if type(entry) is not stock.TensorStorageMetadata:
            return entry
        chunks = [
            once(stock.ChunkStorageMetadata(once(c.offsets, c.offsets), once(c.sizes, c.sizes)), c.offsets, c.sizes)
            for c in entry.chunks
        ]
        properties = once(entry.properties, *vars(entry.properties).values())
        return stock.TensorStorageMetadata(properties=properties, size=once(entry.size, entry.size), chunks=chunks)

    described = {key: tensor(entry) for key, entry in metadata.state_dict_metadata.items()}
    return dataclasses.replace(metadata, state_dict_metadata=described)
