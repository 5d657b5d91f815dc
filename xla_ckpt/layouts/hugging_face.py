"""Hugging Face's layout: the model alone, as safetensors files and an index, for other programs to load."""

from __future__ import annotations

from xla_ckpt.layouts.base import Layout, Rewriting, StoredState, Topology
from xla_ckpt.plan.export_plan import INDEX, index, plan_export
from xla_ckpt.tree import schema

MAX_FILE_BYTES = 5_000_000_000
"""Largest file, unless a single array is larger: Hugging Face's own default."""


class HuggingFace(Layout):
    """The model as Hugging Face safetensors. It is no tag: it has no manifest, and no optimizer."""

    name = "safetensors"
    tagged = False

    def rewriting(self, stored: StoredState, to: Topology) -> Rewriting:
        return model_files(stored, part=schema.MODEL, max_file_bytes=MAX_FILE_BYTES)


def model_files(stored: StoredState, *, part: str, max_file_bytes: int) -> Rewriting:
    """The files of a part of a state, and their index where there are several.

    Raises:
        UsageError: There is nothing to export, or the size makes no sense.
        UnsupportedStateError: An array has an element type that safetensors has no name for.
    """
    files = plan_export(stored.manifest, part, max_file_bytes)
    return Rewriting([tuple(files)], marks={INDEX: index(files)} if len(files) > 1 else {})
