"""Legacy checkpoint functions of ZeRO-1: one file ``<output_dir>/optim.dp_rank_00.tp_rank_00`` for each rank."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from neuron_compat.nxd.parallel_layers.checkpointing import (
    check_local_path,
    get_mesh_and_coordinates,
    read_rank_file,
    sync_ranks,
    write_in_turn,
    write_rank_file,
)
from xla_ckpt import IncompatibleCheckpointError, UsageError
from xla_ckpt.facade import collect_xla_tensors, compute

PathLike = str | os.PathLike[str]


class ShardFilesMixin:
    """Mixin with these functions, also for subclasses of torch_xla's `ZeroRedundancyOptimizer`."""

    state_dict: Any
    load_state_dict: Any
    param_groups: Any
    base_optimizer: Any
    get_shape_info: Any

    def save_sharded_state_dict(self, output_dir: PathLike, num_workers_per_step: int = 8) -> None:
        """Write this rank's state to ``<output_dir>/optim.dp_rank_00.tp_rank_00``. Call it on all ranks.

        New programs should use ``nxd.save_checkpoint``, whose tags also contain the model and load on any number of
        ranks.

        Args:
            output_dir: A directory; created if it does not exist. A file of the same name is replaced when the new one
                is durable.
            num_workers_per_step: Number of ranks on a host that write at a time.

        Raises:
            xla_ckpt.UsageError: File names do not distinguish all ranks; `num_workers_per_step` is below 1; or
                `output_dir` is a bucket address.
            xla_ckpt.StorageError: A file system operation failed. An existing file is unchanged.
            xla_ckpt.RankFailedError: Another rank failed.
        """
        turn, error, write = 0, None, None
        try:
            path = _get_shard_path(output_dir)
            check_local_path(path)
            if num_workers_per_step < 1:
                raise UsageError("no rank could write", found=f"num_workers_per_step={num_workers_per_step}")
            state = {**self.state_dict(), **_get_file_ranks()}
            compute(collect_xla_tensors(state))
            turn = int(os.environ.get("LOCAL_RANK", "0")) // num_workers_per_step

            def write() -> None:
                write_rank_file(state, path)

        except Exception as problem:  # sent to all ranks, which wait for this one
            error = problem
        write_in_turn(write, turn, error)

    def load_sharded_state_dict(self, output_dir: PathLike, num_workers_per_step: int = 8) -> None:
        """Load the file that `save_sharded_state_dict`, or neuronx-distributed, wrote for this rank.

        Load the model before: an optimizer whose file contains no master weights copies the current weights. The
        numbers of ranks must be those of the save.

        Args:
            output_dir: The directory of the save.
            num_workers_per_step: Accepted; all ranks read at once.

        Raises:
            xla_ckpt.UsageError: File names do not distinguish all ranks.
            xla_ckpt.NoCheckpointError: There is no file for this rank.
            xla_ckpt.CorruptCheckpointError: It is damaged.
            xla_ckpt.IncompatibleCheckpointError: It belongs to another optimizer, or to another number of ranks.
            xla_ckpt.RankFailedError: Another rank failed.
        """
        error: Exception | None = None
        state: Any = None
        try:
            path = _get_shard_path(output_dir)
            state = read_rank_file(path, trust_pickle=False, not_found_hint=_SAME_SETUP_HINT)
            self._check_compatible(state, path)
        except Exception as problem:
            error = problem
        sync_ranks(error, "loading")
        self.load_state_dict({k: v for k, v in state.items() if k not in _get_file_ranks()})

    def _check_compatible(self, saved: Any, path: str) -> None:
        """Raise an error for the state of another optimizer before anything is changed."""

        def refused(problem: str, expected: object, was: object) -> IncompatibleCheckpointError:
            return IncompatibleCheckpointError(problem, file=path, expected=expected, found=was, hint=_SAME_SETUP_HINT)

        keys = {"state", "param_groups", "base_state", "shape_info"}
        if not isinstance(saved, Mapping) or not keys <= saved.keys():
            there = ", ".join(map(str, saved)) if isinstance(saved, Mapping) else type(saved).__name__
            raise refused("this is no state of a ZeRO-1 optimizer", ", ".join(sorted(keys)), there[:200])
        own = {name: (saved.get(name, rank), rank) for name, rank in _get_file_ranks().items()}
        for name, (stored, rank) in own.items():
            if stored != rank:
                raise refused(f"this is the state of another {name}", rank, stored)
        counts = [[len(group["params"]) for group in groups] for groups in (self.param_groups, saved["param_groups"])]
        if counts[0] != counts[1]:
            raise refused("the groups have other numbers of parameters", *counts)
        shapes = {i: tuple(shape) for i, shape in self.get_shape_info().items()}
        stored_shapes = {i: tuple(shape) for i, shape in saved["shape_info"].items()}
        if shapes != stored_shapes:
            wrong = next(i for i in {**shapes, **stored_shapes} if shapes.get(i) != stored_shapes.get(i))
            raise refused(f"parameter {wrong} has another shape", shapes.get(wrong), stored_shapes.get(wrong))
        shards = [p for group in self.base_optimizer.param_groups for p in group["params"]]
        states = {i: list(state.values()) for i, state in saved["base_state"].items()}
        for i, master in saved.get("sharded_master_weights", {}).items():
            states.setdefault(i, []).append(master)
        for i, tensors in states.items():
            for tensor in tensors:
                if isinstance(tensor, torch.Tensor) and tensor.dim() and tensor.shape != shards[i].shape:
                    raise refused(
                        f"the states of parameter {i} are those of another number of data-parallel ranks",
                        list(shards[i].shape),
                        list(tensor.shape),
                    )


_SAME_SETUP_HINT = (
    "These files load from the directory of the save, into the same optimizer and on as many ranks. Tags of "
    "nxd.save_checkpoint load on any."
)


def _get_file_ranks() -> dict[str, int]:
    """Return this rank's indices along the axes in the file names, as stored in the files."""
    _, at = get_mesh_and_coordinates()
    return {f"{axis}_rank": at[axis] for axis in ("dp", "tp")}


def _get_shard_path(output_dir: PathLike) -> str:
    """Return the path of this rank's file."""
    mesh, _ = get_mesh_and_coordinates()
    if mesh.pp > 1 or mesh.cp > 1:
        raise UsageError(
            "the names of these files tell only data- and tensor-parallel ranks apart",
            found=f"{mesh.pp} pipeline-parallel x {mesh.cp} context-parallel ranks",
            hint="Use nxd.save_checkpoint.",
        )
    name = ".".join(f"{axis}_{rank:02d}" for axis, rank in _get_file_ranks().items())
    return os.path.join(os.fspath(output_dir), f"optim.{name}")
