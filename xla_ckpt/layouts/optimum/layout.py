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
from xla_ckpt.errors import UsageError
from xla_ckpt.layouts.base import HuggingFaceModel
from xla_ckpt.layouts.by_rank.layout import RankLayout
from xla_ckpt.layouts.by_rank.tags import RankTag
from xla_ckpt.layouts.nxd.tags import marked_tag
from xla_ckpt.layouts.optimum.metadata import METADATA_FILE
from xla_ckpt.storage.base import Directory, Store
from xla_ckpt.tags.entry import TagEntry

if TYPE_CHECKING:
    from xla_ckpt.layouts.by_rank.files import RankFiles

_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_ADAPTER = re.compile(r"adapter_.+")
_SHARDS = "shards"
_ADAPTER_SHARDS = "adapter_shards"


class OptimumNeuron(RankLayout):
    """optimum-neuron's layout: read, verified and converted from, and never written."""

    name = "optimum-neuron"
    origin = "optimum-neuron"
    converts = False

    def tag_at(self, store: Store, name: str) -> RankTag | None:
        """A checkpoint, or the rank files of one with metadata beside them."""
        if _CHECKPOINT.fullmatch(name):
            return _checkpoint(store, name)
        if any(METADATA_FILE.fullmatch(file) for file in store.names(name)):
            return marked_tag(store, name)
        return None

    def opened_tag(self, store: Store, name: str) -> RankTag:
        """See `RankLayout.opened_tag`.

        Raises:
            UsageError: It has several adapters and no model, so that nobody can tell what is meant.
        """
        tag = super().opened_tag(store, name)
        folders = _folders(_adapters(store, name)) if tag.below.endswith(f"{_ADAPTER_SHARDS}/") else []
        if len(folders) > 1:
            raise UsageError(
                "this checkpoint holds several adapters",
                path=store.path,
                tag=name,
                expected="one of them",
                found=", ".join(folders),
                hint=f"Name one by its own directory: path {store.path}/{name}/{folders[0]}, tag {_ADAPTER_SHARDS}.",
            )
        return tag

    def files(self, store: Store, tag: RankTag, directory: Directory) -> RankFiles:
        from xla_ckpt.layouts.optimum.around import OptimumFiles

        adapter = tag.tag == _ADAPTER_SHARDS or tag.below.endswith(f"{_ADAPTER_SHARDS}/")
        return OptimumFiles(directory, tag.below, adapter=adapter)

    def as_hugging_face(self, store: Store, entry: TagEntry, reader: TagReader) -> HuggingFaceModel | None:
        from xla_ckpt.layouts.optimum.around import hugging_face_model

        return hugging_face_model(reader, self.opened_tag(store, entry.tag).below)


def _checkpoint(store: Store, tag: str) -> RankTag | None:
    """A checkpoint of the trainer: its rank files, or those of its only adapter."""
    adapters = _adapters(store, tag)
    of_ranks = marked_tag(store, tag, f"{_SHARDS}/") or next(iter(adapters), None)
    return replace(of_ranks, note=f"with {', '.join(_folders(adapters))}") if of_ranks and adapters else of_ranks


def _adapters(store: Store, tag: str) -> list[RankTag]:
    """The adapters of a checkpoint, by name."""
    adapters = (
        marked_tag(store, tag, f"{name}/{_ADAPTER_SHARDS}/") for name in store.names(tag) if _ADAPTER.fullmatch(name)
    )
    return [adapter for adapter in adapters if adapter is not None]


def _folders(adapters: list[RankTag]) -> list[str]:
    """What the folders of some adapters are called."""
    return [adapter.below.split("/")[0] for adapter in adapters]
