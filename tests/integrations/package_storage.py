"""A plugin of pytest: torch_checkpointing's own tests with our `StorageConfig` in the place of its own.

    PYTHONPATH=.:.peers:TESTS .venv-latest/bin/python -m pytest -p tests.integrations.package_storage TESTS/tests

TESTS is an unpacked source distribution of the package. What asks for direct input and output gets none.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from dataclasses import dataclass
from typing import Any

import torch_checkpointing
from torch_checkpointing.storage import filesystem

from xla_ckpt.integrations.torch_checkpointing import DurableStorage, StorageConfig


@dataclass
class Ours(StorageConfig):
    """Our configuration, with the argument of the package's own."""

    use_direct_io: bool = False


def _replaced() -> None:
    instead: dict[Any, Any] = {
        filesystem.LocalFileSystemStorageConfig: Ours, filesystem.LocalFileSystemStorage: DurableStorage
    }  # fmt: skip
    for about in pkgutil.walk_packages(torch_checkpointing.__path__, "torch_checkpointing."):
        importlib.import_module(about.name)
    for module in [module for name, module in sys.modules.items() if name.startswith("torch_checkpointing.")]:
        for name, value in list(vars(module).items()):
            if isinstance(value, type) and value in instead:
                setattr(module, name, instead[value])
    assert filesystem.LocalFileSystemStorage is DurableStorage


_replaced()
