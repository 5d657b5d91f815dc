"""Directories of DCP's in a root directory. Looks at names and time stamps only, and needs no framework.

``<root>/<tag>/.metadata`` is written last, and makes a directory complete. torchtitan calls them ``step-100``, the
CheckpointManager of torch_xla ``100``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from xla_ckpt.layouts.dcp.metadata import METADATA
from xla_ckpt.layouts.foreign_tags import time_text
from xla_ckpt.storage.base import Store
from xla_ckpt.tags.entry import TagEntry

DISTCP_SUFFIX = ".distcp"
"""What names of DCP's files of tensors end with."""

MANAGERS = ".manager_metadata"
"""What the CheckpointManager of torch_xla adds to a directory: the step and the time of the save. It is not read."""

_OF_RANK = re.compile(r"__(\d+)\.metadata")
"""The metadata of one rank, where the ranks saved without telling each other what (``use_collectives=False``)."""

SHARD = re.compile(r"shard-(\d{5,})-model-(\d{5,})-of-(\d{5,})\.safetensors")
"""A file of safetensors that one rank wrote: its number from 1, and which of how many files of the model it is."""


def find_dcp_tag(store: Store, tag: str) -> TagEntry | None:
    """The directory of DCP's that has this name, complete or not; None if it is none. It is as old as its metadata."""
    try:
        time = store.modified(f"{tag}/{METADATA}") or store.modified(f"{tag}/__0{METADATA}")
        if time is None:
            names = store.names(tag)
            if shards := safetensors_shards(names):
                # Nothing marks such a directory as complete. Its scan finds out which shards are missing.
                time = store.modified(f"{tag}/{shards[0]}")
            elif not any(name.endswith(DISTCP_SUFFIX) for name in names):
                return None
    except OSError:
        return None
    return TagEntry(tag=tag, created=time_text(time or 0), directory=tag, complete=time is not None)


def ranks_metadata(names: Iterable[str]) -> list[str]:
    """The names of the metadata of single ranks, by rank.

    >>> ranks_metadata(["__10.metadata", "__2.metadata", "__2_0.distcp"])
    ['__2.metadata', '__10.metadata']
    """
    numbered = ((int(match[1]), name) for name in names if (match := _OF_RANK.fullmatch(name)))
    return [name for _, name in sorted(numbered)]


def safetensors_shards(names: Iterable[str]) -> list[str]:
    """The files that DCP's HuggingFaceStorageWriter makes with ``save_distributed=True``, of those names."""
    return sorted(name for name in names if SHARD.fullmatch(name))
