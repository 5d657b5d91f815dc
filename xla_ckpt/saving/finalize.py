"""Finalize a checkpoint directory: index files, manifest, parity and marker files, in this order.

A layout takes part through a `WritePlanner`, which says which files a rank writes, and through an `IndexBuilder`,
which makes files of other libraries from the manifest. Marker files are written when everything else is durable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from xla_ckpt.core.manifest import manifest_json
from xla_ckpt.core.manifest.manifest import Manifest
from xla_ckpt.core.plan.save_plan import SavePlan
from xla_ckpt.garbage_collection import pause_gc
from xla_ckpt.loading.tag_reader import TagReader, borrow_reader
from xla_ckpt.saving.write import write_records
from xla_ckpt.storage.base import Directory, write_file
from xla_ckpt.tags.entry import MANIFEST_FILE
from xla_ckpt.tags.root import Transaction

IndexBuilder = Callable[[TagReader], Mapping[str, bytes]]
"""Name -> bytes of small files that are made from a manifest when all others are written, and that it then lists.

Such are the indexes of other libraries, which name all files of a tag.
"""


def build_no_index(reader: TagReader) -> Mapping[str, bytes]:  # noqa: ARG001  # every `IndexBuilder` gets one
    """For layouts that have no such files."""
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalFiles:
    """What a tag has besides payload and manifest."""

    index: IndexBuilder
    """What is made from the manifest for other libraries' readers."""

    marks: Mapping[str, bytes] = field(default_factory=dict)
    """Small files by which readers of another library know a finished tag: they come when all else is durable."""

    write_parity: Callable[[Manifest, bytes], None] | None = None
    """Writes the parity, given the manifest and its bytes; None if the tag has none."""


def finalize(transaction: Transaction, path: str, manifest: Manifest, final_files: FinalFiles) -> Manifest:
    """Complete a tag whose payload is written: after this it needs nothing but its name.

    Args:
        transaction: The tag.
        path: Its root directory.
        manifest: What the payload holds.
        final_files: What the tag has besides.

    Returns:
        The manifest as it was written: the files of the index are among its files.

    Raises:
        OSError: The storage refused.
    """
    manifest = _write_index(transaction.directory, path, manifest, final_files.index)
    with pause_gc():
        text = manifest_json.dump_manifest(manifest)
    write_file(transaction.directory, MANIFEST_FILE, text)
    if final_files.write_parity is not None:
        final_files.write_parity(manifest, text)
    transaction.seal(final_files.marks)
    return manifest


def _write_index(directory: Directory, root: str, manifest: Manifest, index: IndexBuilder) -> Manifest:
    """The manifest, with the files that a layout makes from it, once they are written."""
    with borrow_reader(directory, root, manifest.header.tag, manifest) as reader:
        files = index(reader)
    return replace(manifest, files=(*manifest.files, *write_records(directory, [*files.items()])))


class WritePlanner(Protocol):
    """How one rank writes its state in a layout (`xla_ckpt.formats.base.Layout.writing` makes it).

    A class that is derived from it says what its `plan` is, and what else it has. Where the files of a rank depend on
    what other ranks have, all of them tell that before any of them writes.
    """

    @property
    def unsplit_leaves(self) -> frozenset[str]:
        """Leaves that are stored as the whole tensor that a rank has in memory, padding included."""
        return frozenset()

    @property
    def plan(self) -> SavePlan:
        """What this rank writes, if no other pipeline stage stores it. Decided once, when it is first asked for."""

    @property
    def marks(self) -> Mapping[str, bytes]:
        """Small files that rank 0 writes when all else is durable."""
        return {}

    @property
    def index(self) -> IndexBuilder:
        """What rank 0 makes from the manifest."""
        return build_no_index

    @property
    def shared_info(self) -> Any:
        """What the files of other ranks depend on, as plain JSON; None if that is nothing."""
        return None

    def combine_infos(self, infos: Sequence[Any]) -> Any:
        """What rank 0 makes of what all ranks have told, in their order, as plain JSON. All ranks get it."""
        return None

    def plan_with(self, combined: Any) -> SavePlan:
        """What this rank writes, now that all have told: from the sources that `plan` has."""
        return self.plan
