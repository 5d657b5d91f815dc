"""Rank files of the layout ``xser``, whose tensors lie in files of their own: read, and written.

``<rank file>.tensors/tensor_3.pt`` is the tensor that the rank file calls 3, and ``<rank file>.info.pt`` has its type
and shape.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import torch

from xla_ckpt import dtypes
from xla_ckpt.errors import CheckpointError, CorruptCheckpointError
from xla_ckpt.files.torch_file import TorchFile
from xla_ckpt.layouts.by_rank.files import RankFiles, stored_leaf
from xla_ckpt.layouts.by_rank.form import StoredTensor
from xla_ckpt.layouts.by_rank.grid import RankAt, RankName
from xla_ckpt.layouts.by_rank.plan import Laying, RankTensor, stem
from xla_ckpt.layouts.saved_files import tensor_file, tensors_folder
from xla_ckpt.layouts.torch_save.pickle_writer import InFile, dumps, dumps_referring
from xla_ckpt.layouts.torch_save.stand_ins import Reference
from xla_ckpt.layouts.torch_save.zip_reader import TensorAt
from xla_ckpt.plan.file_plan import FilePlan
from xla_ckpt.sharding.sharding import position
from xla_ckpt.storage.pool import READERS, work_off
from xla_ckpt.tree.nested import replaced_leaves

_EXPERT = "expert_model_parallel"
"""Key of whether a tensor differs between expert-parallel ranks."""


def _description(path: str) -> str:
    """The file that says of the tensors of a rank file what they are."""
    return f"{path}.info.pt"


class TensorFiles(RankFiles):
    """The files of a tag of neuronx-distributed's, in which a rank file may have references to its tensors."""

    unfinished = "{tag} has no done marker: its save may not have ended"
    lost_rows = (
        "If files of more dp ranks were there once, restore them from a copy. Else the job had context parallelism: "
        "neuronx-distributed shards over dp and cp, and names the files by dp only: context-parallel ranks wrote over "
        "each other, and the data is lost. The model itself is whole: load it without the optimizer."
    )

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.folders = frozenset(name.rpartition("/")[0] for name in self.names)
        self._places: dict[str, Any] = {}

    def place(self, tensor: StoredTensor) -> TensorAt:
        if tensor.at is not None:
            return tensor.at
        if tensor.file not in self._places:
            self._places[tensor.file] = self.read(tensor.file)
        at = self._places[tensor.file]
        if not isinstance(at, TensorAt) or (at.dtype, at.shape) != (tensor.dtype, tensor.shape):
            raise CorruptCheckpointError(
                "the file of a tensor does not hold it",
                file=tensor.file,
                expected=f"{tensor.dtype.name} {tensor.shape}",
                found=f"{at.dtype.name} {at.shape}" if isinstance(at, TensorAt) else type(at).__name__,
            )
        return at

    def has(self, tensor: StoredTensor) -> bool:
        return tensor.at is not None or tensor.file in self.names

    def left_out(self, tensor: StoredTensor) -> bool:
        # With avoid_saving_lower_precision_weights not even the folder of its tensors is there.
        return tensor.at is None and tensor.file.rpartition("/")[0] not in self.folders

    def are_apart(self, path: str) -> bool:
        """Whether the tensors of a rank file lie in files of their own."""
        return _description(path) in self.names or tensors_folder(path) in self.folders

    def tree(self, path: str, at: RankAt) -> Any:
        info = self.read(_description(path)) if _description(path) in self.names else {}
        described = info if isinstance(info, Mapping) else {}
        tensors: dict[int, StoredTensor] = {}

        def reference(tid: int) -> StoredTensor:
            if tid not in tensors:
                tensors[tid] = self._referenced(path, at, tid, described.get(tid))
            return tensors[tid]

        return replaced_leaves(self.read(path, reference), stored_leaf)

    def look_up(self, tensors: Iterable[StoredTensor]) -> None:
        # Several files at a time: `place` waits for each look at a slow storage.
        def look(file: str, _: memoryview) -> None:
            with contextlib.suppress(CheckpointError):  # `place` meets it again, and whoever asks names the array
                self._places[file] = self.read(file)

        files = {tensor.file for tensor in tensors if tensor.at is None and tensor.file in self.names}
        todo = sorted(files - self._places.keys())
        work_off(todo, look, workers=min(READERS, len(todo)), buffer_bytes=0, name="xla_ckpt-look")

    def _referenced(self, path: str, at: RankAt, tid: int, info: Any) -> StoredTensor:
        """The tensor of a number in a rank file; `info` is what the file beside it says."""
        own = tensor_file(path, tid)
        # A tensor that all expert-parallel ranks have alike lies with the first of them.
        shared = own.replace(f"_ep_rank_{at.ep:02d}_", "_ep_rank_00_", 1) if at.ep else own
        if info is None:
            file = own if own in self.names else shared
            content = self.read(file)
            if not isinstance(content, TensorAt):
                raise CorruptCheckpointError("the file of a tensor does not hold one", file=file)
            return StoredTensor.lying_at(content)
        try:
            expert = bool(info[_EXPERT])
            dtype = dtypes.dtype(str(info["dtype"]).removeprefix("torch."))
            return StoredTensor(
                dtype=dtype, shape=tuple(map(int, info["shape"])), expert=expert, file=own if expert else shared
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptCheckpointError(
                "the description of a tensor is damaged",
                file=_description(path),
                found=f"tensor {tid}: {info}"[:200],
            ) from error


def lay_apart(
    laying: Laying, names: Sequence[RankName], tree: Any, part: str, *, dealt: bool = False
) -> list[FilePlan]:
    """What this rank writes of a file whose tensors lie in files of their own, and of these (see `Laying.place`).

    The ranks that have all of them in common share the writing.
    """
    path, sharing = laying.place(names, dealt=dealt)
    writer_number = position(sharing, laying.mesh, laying.rank)
    tensors: list[tuple[str, RankTensor]] = []

    def reference(leaf: str) -> Reference:
        stand_in = Reference()
        stand_in.tid = len(tensors)
        tensors.append((leaf, laying.state.tensors[leaf]))
        return stand_in

    pickled = dumps_referring(tree, part, reference)
    files = []
    ranks = 1 if laying.first else prod(laying.mesh.sizes[axis] for axis in sharing)
    for tid, writer in enumerate(_dealt([t.nbytes for _, t in tensors], ranks)):
        leaf, tensor = tensors[tid]
        # What is no expert's lies with the expert-parallel rank 0 alone: that is where readers look for it.
        if writer == writer_number and (laying.at["ep"] == 0 or tensor.expert or dealt):
            lengths, sources, entries = laying.regions([(leaf, tensor)], sharing)
            own = dumps(InFile(0, tensor.dtype, tensor.shape), leaf)
            codec = TorchFile(stem=f"tensor_{tid}", pickled=own, storages=lengths)
            file = tensor_file(path, tid)
            files.append(FilePlan(path=file, codec=codec, sources=sources, entries=entries))
    if writer_number == 0:
        info = dumps({tid: _info(tensor) for tid, (_, tensor) in enumerate(tensors)}, part)
        # neuronx-distributed has this directory of every rank file, without tensors, too: programs look for it.
        main = TorchFile(stem=stem(path), pickled=pickled)
        files.append(FilePlan(path=path, codec=main, folder=tensors_folder(path)))
        files.append(FilePlan(path=_description(path), codec=TorchFile(stem=stem(_description(path)), pickled=info)))
    return files


def _dealt(sizes: Sequence[int], ranks: int) -> list[int]:
    """Who writes each of these files: the large ones are dealt out first, each to the rank with the least so far."""
    load = [0] * ranks
    writer = [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        writer[i] = load.index(min(load))
        load[writer[i]] += max(sizes[i], 1)  # an empty tensor is a file to write, too
    return writer


def _info(tensor: RankTensor) -> dict[str, Any]:
    """What is said of a tensor before its file is opened."""
    return {
        "dtype": getattr(torch, tensor.dtype.name),
        "shape": torch.Size(tensor.shape),
        _EXPERT: tensor.expert,
    }
