"""Finalize a checkpoint directory: index files, manifest, parity and marker files, in this order.

A layout takes part through a `WritePlanner`, which plans the files of a rank, and through an `IndexBuilder`, which
builds index files of other libraries from the manifest. Marker files are written when everything else is durable.
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
"""Function that builds small files, name -> bytes, from a manifest when all other files are written.

The manifest then lists them. They are the index files of other libraries, which name all files of a tag.
"""


def build_no_index(reader: TagReader) -> Mapping[str, bytes]:  # noqa: ARG001  # every `IndexBuilder` gets one
    """Return no index files, for layouts that need none."""
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalFiles:
    """Files of a tag other than payload and manifest."""

    index: IndexBuilder
    """Builder of the index files for readers of other libraries."""

    marks: Mapping[str, bytes] = field(default_factory=dict)
    """Marker files by which other libraries recognise a finished tag: written when everything else is durable."""

    write_parity: Callable[[Manifest, bytes], None] | None = None
    """Function that writes the parity, given the manifest and its bytes; None if the tag has no parity."""


def finalize(transaction: Transaction, path: str, manifest: Manifest, final_files: FinalFiles) -> Manifest:
    """Complete a tag whose payload is written, so that only its rename to the final name is left.

    Args:
        transaction: Transaction of the tag.
        path: Root directory of the tag.
        manifest: Manifest of the payload.
        final_files: Files to write in addition.

    Returns:
        The manifest as written, which lists the index files, too.

    Raises:
        OSError: The storage failed.
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
    """Write the index files of a layout, and return the manifest with them."""
    with borrow_reader(directory, root, manifest.header.tag, manifest) as reader:
        files = index(reader)
    return replace(manifest, files=(*manifest.files, *write_records(directory, [*files.items()])))


class WritePlanner(Protocol):
    """Planner of the files that one rank writes in a layout (created by `xla_ckpt.formats.base.Layout.writing`).

    Subclasses define `plan`, and override other members as needed. If the files of a rank depend on the state of other
    ranks, all ranks publish `shared_info` before any of them writes.
    """

    @property
    def unsplit_leaves(self) -> frozenset[str]:
        """Leaves that are stored as the whole tensor in the rank's memory, including padding."""
        return frozenset()

    @property
    def plan(self) -> SavePlan:
        """Files that this rank writes, if no other pipeline stage stores them. Computed once, on first access."""

    @property
    def marks(self) -> Mapping[str, bytes]:
        """Marker files that rank 0 writes when everything else is durable."""
        return {}

    @property
    def index(self) -> IndexBuilder:
        """Builder of the index files, which rank 0 runs."""
        return build_no_index

    @property
    def shared_info(self) -> Any:
        """Information on which the files of other ranks depend, as plain JSON; None if there is no such information."""
        return None

    def combine_infos(self, infos: Sequence[Any]) -> Any:
        """Combine the `shared_info` of all ranks, in rank order, on rank 0; the plain JSON result is sent to all."""
        return None

    def plan_with(self, combined: Any) -> SavePlan:
        """Return the plan of this rank given the combined information, with the same sources as `plan`."""
        return self.plan
