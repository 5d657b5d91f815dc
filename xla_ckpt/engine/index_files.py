"""Files that a layout makes from a manifest: indexes of other libraries, which name all files of a tag."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from xla_ckpt.engine.tag_reader import TagReader
from xla_ckpt.engine.write import write_record
from xla_ckpt.manifest.records import Manifest
from xla_ckpt.storage.base import Directory

Index = Callable[[TagReader], Mapping[str, bytes]]
"""Name -> bytes of small files that are made from a manifest when all others are written, and that it then lists."""


def no_index(reader: TagReader) -> Mapping[str, bytes]:  # noqa: ARG001  # every `Index` gets one
    """For layouts that have no such files."""
    return {}


def indexed(directory: Directory, root: str, manifest: Manifest, index: Index) -> Manifest:
    """The manifest, with the files that a layout makes from it, once they are written.

    Raises:
        CheckpointError: The layout has no place for something.
        OSError: The storage refused.
    """
    reader = TagReader(directory, root, manifest.head.tag, manifest)
    try:
        files = index(reader)
    finally:
        reader.close_files()
    return replace(manifest, files=(*manifest.files, *(write_record(directory, *file) for file in files.items())))
