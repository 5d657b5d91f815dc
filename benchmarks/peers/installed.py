"""The peers that `make bench` installs: where they are, and the objects of theirs that a program keeps."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

PEERS = Path(__file__).parents[2] / ".peers"
"""Packages of peers that the project itself does not need."""
PACKAGES = (
    "torch-checkpointing",
    "tensorizer",
    "fastsafetensors",
    "runai-model-streamer",
    "moonclip",
    "s3torchconnector",
    "s3fs",
)
"""Those of them that have rows; the others are what these import."""
Contender = TypeVar("Contender", bound=Callable[..., object])


def needs(module: str) -> Callable[[Contender], Contender]:
    """Say which module of `PEERS` a contender uses: it is imported before the clock starts."""

    def told(contender: Contender) -> Contender:
        contender.needs = module  # type: ignore[attr-defined]
        return contender

    return told


def ready(contender: Contender) -> Contender:
    """A contender that has what it needs. Raises ImportError if that is not installed."""
    if module := getattr(contender, "needs", None):
        sys.path.append(str(PEERS))
        importlib.import_module(module)
    return contender


def moonclip_manager(directory: Path, **options: Any) -> Any:
    """moonclip's manager, without loss."""
    from moonclip.pytorch import CheckpointManager

    return CheckpointManager(str(directory / "m"), compression_level=1, world_size=1, rank=0, **options)


@functools.cache
def torch_checkpointing_manager(kind: str) -> Any:
    """The manager that a program keeps.

    ``sync``; ``stored``, the same on our storage; ``copied``, which has copied when a save returns; or ``async``.

    Its defaults open files with O_DIRECT, which its writes, that are not aligned, cannot use on ext4.
    """
    from torch_checkpointing import checkpoint_manager, config
    from torch_checkpointing.staging import CheckpointStagerConfig
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    from xla_ckpt.integrations.torch_checkpointing import StorageConfig

    staging = CheckpointStagerConfig(
        use_pinned_memory=False, use_non_blocking_copy=False, use_async_staging=kind == "async"
    )
    is_sync = kind in ("sync", "stored")
    save = config.SyncCheckpointSaverConfig() if is_sync else config.AsyncCheckpointSaverConfig(staging_config=staging)
    storage = StorageConfig() if kind == "stored" else LocalFileSystemStorageConfig(use_direct_io=False)
    manager = checkpoint_manager.CheckpointManager
    return manager(manager.Config(save=save, storage_config=storage))
