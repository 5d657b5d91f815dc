"""What a directory holds in DCP's own classes, and their pickle, which stock DCP of any torch from 2.3 on reads."""

from __future__ import annotations

import copyreg
import dataclasses
import io
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as stock
from torch.distributed.checkpoint.filesystem import _StorageInfo

from xla_ckpt.layouts.dcp.metadata import Contents, DcpTensor, Span


def stock_metadata(contents: Contents) -> stock.Metadata:
    """What a directory holds, as DCP describes it."""
    described: dict[str, Any] = {}
    stored: dict[stock.MetadataIndex, Any] = {}
    for key, tensor in contents.tensors.items():
        described[key] = _tensor(tensor)
        for number, chunk in enumerate(tensor.chunks):
            if chunk.at is not None:
                stored[stock.MetadataIndex(key, torch.Size(chunk.box.start), number)] = _place(chunk.at)
    for key, span in contents.objects.items():
        described[key] = stock.BytesStorageMetadata()
        stored[stock.MetadataIndex(key)] = _place(span)
    for key in contents.undescribed:
        described[key] = stock.BytesStorageMetadata()  # a planner that wants it hears why it is not read, when it is
    return stock.Metadata(state_dict_metadata=described, planner_data=dict(contents.paths), storage_data=stored)


def _tensor(tensor: DcpTensor) -> stock.TensorStorageMetadata:
    return stock.TensorStorageMetadata(
        properties=stock.TensorProperties(dtype=getattr(torch, tensor.dtype.name)),
        size=torch.Size(tensor.shape),
        chunks=[
            stock.ChunkStorageMetadata(torch.Size(chunk.box.start), torch.Size(chunk.box.shape))
            for chunk in tensor.chunks
        ],
    )


def _place(span: Span) -> Any:
    return _StorageInfo(span.file, span.offset, span.nbytes, span.transforms or None)


def pickled(metadata: Any) -> bytes:
    """The bytes of stock DCP's `Metadata`.

    Torch 2.15 pickles a sixth member of `TensorProperties`, the strides, and older ones fail on it. No torch needs it.
    """

    def properties(value: stock.TensorProperties) -> Any:
        return copyreg.__newobj__, (stock.TensorProperties,), value.__getstate__()[:5]  # type: ignore[no-untyped-call, attr-defined]

    text = io.BytesIO()
    pickler = pickle.Pickler(text)
    pickler.dispatch_table = {**copyreg.dispatch_table, stock.TensorProperties: properties}
    pickler.dump(_shared(metadata))
    return text.getvalue()


def _shared(metadata: Any) -> Any:
    """The same metadata, in which equal sizes, chunks and properties of tensors are one object each.

    A pickle says each object once: that of 20,000 small tensors has 1.2 million opcodes in place of 2.1 million.
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
