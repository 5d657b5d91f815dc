"""The storages of neuronx-distributed: each name is an error that says what to use instead."""

from __future__ import annotations

from neuron_compat.lazy import lazily
from neuron_compat.nxd.instead import MOUNT, PATH, TAGS

__getattr__, __dir__ = lazily(
    __name__,
    {},
    missing={
        "BaseCheckpointStorage": PATH,
        "FilesysCheckpointStorage": PATH,
        "S3CheckpointStorage": MOUNT,
        "create_checkpoint_storage": TAGS,
    },
)
