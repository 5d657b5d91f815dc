"""A stored state as one file of torch.save, which torch alone reads."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch

from xla_ckpt.errors import IncompatibleCheckpointError, UnsupportedStateError
from xla_ckpt.files.distcp import STEM
from xla_ckpt.files.torch_file import TorchFile
from xla_ckpt.layouts.base import StoredState
from xla_ckpt.layouts.torch_save.pickle_writer import InFile, LeafAt, dumps
from xla_ckpt.logs import get_logger
from xla_ckpt.plan.file_plan import Entry, FilePlan
from xla_ckpt.sharding.box import Box
from xla_ckpt.tree import path as paths
from xla_ckpt.tree import schema

logger = get_logger(__name__)


def plan_file(stored: StoredState, path: str) -> FilePlan:
    """The file of a stored state, or of the part of it that is wanted: its tree, with whole tensors in it.

    Several names of one array are tensors over one storage, as they were.

    Raises:
        UntrustedObjectError: It holds pickled objects, and they are not trusted.
        UnsupportedStateError: Something in it cannot be pickled, or torch has no such element type.
        IncompatibleCheckpointError: It is not known how an array was split, or its bytes are not stored.
    """
    storages = _Storages(stored)
    tree = stored.tree(stored.part, lambda leaf, _: LeafAt(leaf))
    if stored.part == schema.OPTIMIZER:
        tree = _with_torch_numbers(tree)
    elif stored.part == paths.ROOT and isinstance(tree, dict) and schema.OPTIMIZER in tree:
        tree = {**tree, schema.OPTIMIZER: _with_torch_numbers(tree[schema.OPTIMIZER])}
    pickled = dumps(tree, stored.part or "(root)", storages.tensor)
    _tell_unsafe(pickled)
    return FilePlan(
        path=path,
        codec=TorchFile(stem=STEM, pickled=pickled, storages=tuple(storages.lengths)),
        entries=tuple(storages.entries),
    )


class _Storages:
    """The storages of the file, one for each array, in the order in which the tree names them first."""

    def __init__(self, stored: StoredState) -> None:
        self.manifest = stored.manifest
        self.lengths: list[tuple[int, ...]] = []
        """Bytes of the regions of each storage."""
        self.entries: list[Entry] = []
        self._numbers: dict[str, int] = {}

    def tensor(self, leaf: str) -> InFile:
        """What stands for an array in the pickle."""
        record = self.manifest.array(leaf)
        if record is None:
            raise IncompatibleCheckpointError("the checkpoint names this array, and does not hold it", leaf=leaf)
        if not isinstance(getattr(torch, record.dtype.name, None), torch.dtype):
            raise UnsupportedStateError(
                f"torch has no element type {record.dtype.name}",
                leaf=leaf,
                hint="Convert to the native layout, which holds it, or convert another part.",
            )
        first = self.manifest.aliases.get(leaf, leaf)
        if first not in self._numbers:
            self._numbers[first] = len(self.lengths)
            # A storage without bytes has no region: a manifest, too, lists only those that have some.
            self.lengths.append((record.nbytes,) if record.nbytes else ())
            if record.nbytes:
                self.entries.append(Entry(leaf=first, box=Box.whole(record.shape), region=len(self.entries)))
        # A new one for each name: tensors of two names share their bytes and are two objects, as torch.save keeps them.
        return InFile(self._numbers[first], record.dtype, record.shape)


def _with_torch_numbers(optimizer: Any) -> Any:
    """An optimizer's state as torch's `Optimizer.state_dict` gives it, if its parameters have no names.

    Without a model they are called by their places (``#0.3``), which mean nothing to torch.
    """
    groups = schema.groups_of(optimizer)
    if groups is None or not isinstance(optimizer.get(schema.STATE), Mapping):
        return optimizer
    names = list(dict.fromkeys(name for group in groups for name in group[schema.PARAMS]))
    if not names or not all(isinstance(name, str) and name.startswith("#") for name in names):
        return optimizer
    return schema.renamed_parameters(optimizer, {name: i for i, name in enumerate(names)})


def _tell_unsafe(pickled: bytes) -> None:
    """Log which classes of a file torch.load does not make with weights_only=True."""
    codec = TorchFile(stem=STEM, pickled=pickled)
    ((_, content),) = codec.glue((), ())
    unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(content))
    if unsafe:
        logger.warning(
            "the file holds values of %s: torch.load needs weights_only=False for it, or those classes in "
            "torch.serialization.add_safe_globals. With part='model' (--part model) it has the weights alone",
            ", ".join(sorted(unsafe)),
        )
