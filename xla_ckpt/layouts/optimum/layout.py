"""optimum-neuron's checkpoints as a layout that is read.

Its trainer writes ``<root>/checkpoint-<step>/shards``, in which neuronx-distributed's rank files lie, and beside them a
scheduler and its own state. A job that trains adapters writes ``checkpoint-<step>/adapter_<name>/adapter_shards``
instead. With the metadata that lie in ``shards`` and ``adapter_shards`` no model is needed to read them.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from xla_ckpt.engine.tag_reader import TagReader
from xla_ckpt.engine.verify import VerifyReport
from xla_ckpt.errors import UsageError
from xla_ckpt.layouts.base import HuggingFaceModel, Layout
from xla_ckpt.layouts.foreign_tags import looked_up_again, merged_by_time
from xla_ckpt.layouts.nxd import tags
from xla_ckpt.layouts.nxd.tags import NxdTag
from xla_ckpt.layouts.optimum.metadata import METADATA_FILE
from xla_ckpt.plan.hints import Hints
from xla_ckpt.storage.base import Store
from xla_ckpt.storage.pool import READERS
from xla_ckpt.tags.entry import TagEntry
from xla_ckpt.tags.listing import names_in
from xla_ckpt.tags.roots import may_be_foreign

if TYPE_CHECKING:
    from xla_ckpt.layouts.optimum.around import Beside

_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_ADAPTER = re.compile(r"adapter_.+")
_SHARDS = "shards"
_ADAPTER_SHARDS = "adapter_shards"


class OptimumNeuron(Layout):
    """optimum-neuron's layout: read, verified and converted from, and never written."""

    name = "optimum-neuron"
    origin = "optimum-neuron"
    asks = True
    converts = False

    def tags(self, store: Store) -> list[TagEntry]:
        complete = [t for name in names_in(store) if (t := _found(store, name)) is not None and t.complete]
        # A checkpoint's number says when it was made. Time stamps do not: a copy of the directory may change them.
        numbered = sorted((t for t in complete if _CHECKPOINT.fullmatch(t.tag)), key=lambda t: _step(t.tag))
        others = sorted((t for t in complete if not _CHECKPOINT.fullmatch(t.tag)), key=lambda t: (t.time, t.tag))
        return [_entry(store, t) for t in merged_by_time(numbered, others, lambda t: t.time)]

    def find(self, store: Store, tag: str) -> TagEntry | None:
        checkpoint = _found(store, tag)
        return None if checkpoint is None else _entry(store, checkpoint)

    def open(self, store: Store, entry: TagEntry, hints: Hints) -> TagReader:
        from xla_ckpt.layouts.nxd.scan import open_nxd

        tag = _existing(store, entry.tag)
        return open_nxd(store, tag, hints, _beside(tag))

    def as_hugging_face(self, store: Store, entry: TagEntry, reader: TagReader) -> HuggingFaceModel | None:
        from xla_ckpt.layouts.optimum.around import hugging_face_model

        return hugging_face_model(reader, _existing(store, entry.tag).below)

    def verify(self, store: Store, entry: TagEntry, workers: int = READERS) -> VerifyReport:
        from xla_ckpt.layouts.nxd.verify import verify_nxd

        tag = _existing(store, entry.tag)
        return verify_nxd(store, tag, workers, _beside(tag))


def _entry(store: Store, checkpoint: NxdTag) -> TagEntry:
    """What a listing shows of a tag, and which adapters lie in it."""
    folders = [adapter.below.split("/")[0] for adapter in _adapters(store, checkpoint.tag)]
    return replace(checkpoint.entry(), note=f"with {', '.join(folders)}" if folders else "")


def _beside(checkpoint: NxdTag) -> Beside:
    from xla_ckpt.layouts.optimum.around import Beside

    return Beside(adapter=checkpoint.tag == _ADAPTER_SHARDS or checkpoint.below.endswith(f"{_ADAPTER_SHARDS}/"))


def _found(store: Store, tag: str) -> NxdTag | None:
    """The tag of this name: a checkpoint, or the rank files of one with metadata beside them; None if it is none."""
    if not may_be_foreign(store, tag):
        return None
    if _CHECKPOINT.fullmatch(tag):
        return _checkpoint(store, tag)
    if any(METADATA_FILE.fullmatch(name) for name in store.names(tag)):
        return tags.marked_tag(store, tag)
    return None


def _checkpoint(store: Store, tag: str) -> NxdTag | None:
    """A checkpoint of the trainer: its rank files, or those of its only adapter."""
    if (shards := tags.marked_tag(store, tag, f"{_SHARDS}/")) is not None:
        return shards
    adapters = _adapters(store, tag)
    return adapters[0] if adapters else None


def _adapters(store: Store, tag: str) -> list[NxdTag]:
    """The adapters of a checkpoint, by name."""
    adapters = (
        tags.marked_tag(store, tag, f"{name}/{_ADAPTER_SHARDS}/")
        for name in store.names(tag)
        if _ADAPTER.fullmatch(name)
    )
    return [adapter for adapter in adapters if adapter is not None]


def _existing(store: Store, tag: str) -> NxdTag:
    """The tag of this name, which was there a moment ago.

    Raises:
        NoCheckpointError: It is gone.
        UsageError: It has several adapters and no model, so that nobody can tell what is meant.
    """
    checkpoint = looked_up_again(_found, store, tag)
    if checkpoint.below.endswith(f"{_ADAPTER_SHARDS}/"):
        folders = [adapter.below.split("/")[0] for adapter in _adapters(store, tag)]
        if len(folders) > 1:
            raise UsageError(
                "this checkpoint holds several adapters",
                path=store.path,
                tag=tag,
                expected="one of them",
                found=", ".join(folders),
                hint=f"Name one by its own directory: path {store.path}/{tag}/{folders[0]}, tag {_ADAPTER_SHARDS}.",
            )
    return checkpoint


def _step(tag: str) -> int:
    return int(tag.rpartition("-")[2])
