"""Drop-in for torch.distributed.checkpoint (DCP) on this library's engine: ``import xla_ckpt.dcp as dcp``.

`save`, `load` and `async_save` have DCP's signatures, return values and in-place semantics. Stock DCP can read their
checkpoints, and they can read checkpoints of stock DCP. Use `StorageWriter`, `StorageReader` and `AsyncStager` with the
functions of stock DCP, and `sharded` to declare tensor-parallel state in plain tensors to any of them.

Other names of `torch.distributed.checkpoint` are re-exported from stock DCP if they work here; the rest raise an error
that names a replacement.
"""

from __future__ import annotations

from typing import Any

from xla_ckpt.extras import wrap_missing_packages

with wrap_missing_packages("xla_ckpt.dcp"):
    from torch.distributed import checkpoint as _stock

from torch.distributed.checkpoint import default_planner, metadata, planner, staging, state_dict, stateful, storage
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.checkpoint.stateful import Stateful

from xla_ckpt.dcp.calls import async_save, load, save
from xla_ckpt.dcp.reader import FileSystemReader, StorageReader
from xla_ckpt.dcp.sharded import sharded
from xla_ckpt.dcp.stager import AsyncStager
from xla_ckpt.dcp.tensor import GlobalTensor
from xla_ckpt.dcp.writer import FileSystemWriter, StorageWriter

__all__ = [
    "AsyncCheckpointerType",
    "AsyncSaveResponse",
    "AsyncStager",
    "BytesStorageMetadata",
    "CheckpointException",
    "ChunkStorageMetadata",
    "DefaultLoadPlanner",
    "DefaultSavePlanner",
    "FileSystemReader",
    "FileSystemWriter",
    "GlobalTensor",
    "HuggingFaceStorageReader",
    "LoadPlan",
    "LoadPlanner",
    "Metadata",
    "ReadItem",
    "SavePlan",
    "SavePlanner",
    "Stateful",
    "StorageReader",
    "StorageWriter",
    "TensorStorageMetadata",
    "WriteItem",
    "async_save",
    "default_planner",
    "load",
    "metadata",
    "planner",
    "save",
    "sharded",
    "staging",
    "state_dict",
    "stateful",
    "storage",
]

_REPLACEMENTS = {
    "HuggingFaceStorageWriter": "xla_ckpt.export_hf, or xla-ckpt export, which write Hugging Face's directories",
    "QuantizedHuggingFaceStorageReader": "torch.distributed.checkpoint.QuantizedHuggingFaceStorageReader",
    "format_utils": "xla-ckpt convert, which converts from and to DCP and torch.save",
    "load_sharded_optimizer_state_dict": "load, with dcp.state_dict.get_optimizer_state_dict",
    "load_state_dict": "load, which takes storage_reader=",
    "save_state_dict": "save, which takes storage_writer=",
    "logger": "python's logging: this library's loggers begin with xla_ckpt",
}
"""Unsupported names of torch.distributed.checkpoint, and their replacements."""


def __getattr__(name: str) -> Any:
    if name in _REPLACEMENTS or hasattr(_stock, name):
        instead = _REPLACEMENTS.get(name, f"torch.distributed.checkpoint.{name}")
        raise AttributeError(f"xla_ckpt.dcp has no {name}; use {instead}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
