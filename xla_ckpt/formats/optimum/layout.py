"""The optimum-neuron layout, which is read-only.

Its trainer writes NxD rank files to ``<root>/checkpoint-<step>/shards``, and a scheduler and its own state to
``checkpoint-<step>``. A job that trains adapters writes to ``checkpoint-<step>/adapter_<name>/adapter_shards`` instead.
With the metadata in ``shards`` and ``adapter_shards`` no model is needed to read them.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from xla_ckpt.errors import UsageError
from xla_ckpt.formats.base import HuggingFaceModel
from xla_ckpt.formats.nxd.layout import find_marked_tag
from xla_ckpt.formats.optimum.metadata import METADATA_FILE_NAME
from xla_ckpt.formats.rank_files.layout import RankLayout, RankTag
from xla_ckpt.loading.tag_reader import TagReader
from xla_ckpt.storage.base import Directory, Store
from xla_ckpt.tags.entry import TagEntry

if TYPE_CHECKING:
    from xla_ckpt.formats.rank_files.files import RankFiles


_CHECKPOINT_NAME = re.compile(r"checkpoint-(\d+)")
_ADAPTER_FOLDER = re.compile(r"adapter_.+")
_SHARDS = "shards"
_ADAPTER_SHARDS = "adapter_shards"


class OptimumNeuronLayout(RankLayout):
    """The optimum-neuron layout, which can be read, verified and converted from, but not written."""

    name = "optimum-neuron"
    origin = "optimum-neuron"
    converts = False

    def find_rank_tag(self, store: Store, name: str) -> RankTag | None:
        """Return a checkpoint, or the rank files of one if their folder contains metadata."""
        if _CHECKPOINT_NAME.fullmatch(name):
            return _find_checkpoint(store, name)
        if any(METADATA_FILE_NAME.fullmatch(file) for file in store.list_names(name)):
            return find_marked_tag(store, name)
        return None

    def require_tag(self, store: Store, name: str) -> RankTag:
        """Return the checkpoint (see `RankLayout.require_tag`).

        Raises:
            UsageError: It has several adapters and no model, so the choice is ambiguous.
            NoCheckpointError: It no longer exists.
        """
        tag = super().require_tag(store, name)
        folders = (
            _get_folder_names(_find_adapters(store, name)) if tag.subfolder.endswith(f"{_ADAPTER_SHARDS}/") else []
        )
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

    def create_files(self, store: Store, tag: RankTag, directory: Directory) -> RankFiles:
        from xla_ckpt.formats.optimum.reader import OptimumFiles

        adapter = tag.tag == _ADAPTER_SHARDS or tag.subfolder.endswith(f"{_ADAPTER_SHARDS}/")
        return OptimumFiles(directory, tag.subfolder, adapter=adapter)

    def as_hugging_face(self, store: Store, entry: TagEntry, reader: TagReader) -> HuggingFaceModel | None:
        from xla_ckpt.formats.optimum.reader import build_hugging_face_model

        return build_hugging_face_model(reader, self.require_tag(store, entry.tag).subfolder)


def _find_checkpoint(store: Store, tag: str) -> RankTag | None:
    """Return a checkpoint of the trainer: its rank files, or the rank files of its first adapter."""
    adapters = _find_adapters(store, tag)
    of_ranks = find_marked_tag(store, tag, f"{_SHARDS}/") or next(iter(adapters), None)
    return (
        replace(of_ranks, note=f"with {', '.join(_get_folder_names(adapters))}") if of_ranks and adapters else of_ranks
    )


def _find_adapters(store: Store, tag: str) -> list[RankTag]:
    """Return the adapters of a checkpoint."""
    adapters = (
        find_marked_tag(store, tag, f"{name}/{_ADAPTER_SHARDS}/")
        for name in store.list_names(tag)
        if _ADAPTER_FOLDER.fullmatch(name)
    )
    return [adapter for adapter in adapters if adapter is not None]


def _get_folder_names(adapters: list[RankTag]) -> list[str]:
    """Return the folder names of adapters."""
    return [adapter.subfolder.split("/")[0] for adapter in adapters]
