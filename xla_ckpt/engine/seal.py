"""The end of every tag: the manifest behind all files, parity behind the manifest, and marks when all is durable."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from xla_ckpt.engine.garbage_collection import collector_paused
from xla_ckpt.engine.tag_reader import TagReader, reader_within
from xla_ckpt.engine.write import write_records
from xla_ckpt.manifest import manifest_json
from xla_ckpt.manifest.records import Manifest
from xla_ckpt.storage.base import Directory
from xla_ckpt.storage.small_files import write_small
from xla_ckpt.tags.entry import MANIFEST
from xla_ckpt.tags.transaction import Transaction

Index = Callable[[TagReader], Mapping[str, bytes]]
"""Name -> bytes of small files that are made from a manifest when all others are written, and that it then lists.

Such are the indexes of other libraries, which name all files of a tag.
"""


def no_index(reader: TagReader) -> Mapping[str, bytes]:  # noqa: ARG001  # every `Index` gets one
    """For layouts that have no such files."""
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What a tag has besides payload and manifest."""

    index: Index
    """What is made from the manifest for other libraries' readers."""

    marks: Mapping[str, bytes] = field(default_factory=dict)
    """Small files by which readers of another library know a finished tag: they come when all else is durable."""

    parity: Callable[[Manifest, bytes], None] | None = None
    """Writes the parity, given the manifest and its bytes; None if the tag has none."""


def seal(transaction: Transaction, path: str, manifest: Manifest, ending: Ending) -> Manifest:
    """Complete a tag whose payload is written: after this it needs nothing but its name.

    Args:
        transaction: The tag.
        path: Its root directory.
        manifest: What the payload holds.
        ending: What the tag has besides.

    Returns:
        The manifest as it was written: the files of the index are among its files.

    Raises:
        OSError: The storage refused.
    """
    manifest = _indexed(transaction.directory, path, manifest, ending.index)
    with collector_paused():
        text = manifest_json.dump(manifest)
    write_small(transaction.directory, MANIFEST, text)
    if ending.parity is not None:
        ending.parity(manifest, text)
    transaction.seal(ending.marks)
    return manifest


def _indexed(directory: Directory, root: str, manifest: Manifest, index: Index) -> Manifest:
    """The manifest, with the files that a layout makes from it, once they are written."""
    with reader_within(directory, root, manifest.head.tag, manifest) as reader:
        files = index(reader)
    return replace(manifest, files=(*manifest.files, *write_records(directory, [*files.items()])))
