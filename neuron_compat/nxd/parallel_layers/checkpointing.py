"""Legacy neuronx-distributed checkpoint functions: one file for each rank, in a directory that you choose.

    <output_dir>/tp_rank_00_pp_rank_00/checkpoint.pt                  save_xser=False: torch.save of the dict
    <output_dir>/tp_rank_00_pp_rank_00, ....tensors/tensor_0.pt       save_xser=True: one file for each XLA tensor

with ``_dp_rank_00`` after the name for ``master_dp_only=False``. A checkpoint loads on the number of ranks that saved
it; `xla_ckpt.load_checkpoint` loads it on any other. New programs should use ``nxd.save_checkpoint``, which has tags,
checksums, retention and asynchronous saves, and commits all ranks' files atomically; here only each single file is
atomic.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from typing import Any

import torch

from neuron_compat.nxd.exports import attach_exports
from xla_ckpt import (
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    Mesh,
    NoCheckpointError,
    RankFailedError,
    UsageError,
)
from xla_ckpt.facade import (
    collect_xla_tensors,
    compute,
    get_current_mesh,
    get_declared_sharding,
    load_whole_file,
    map_tensors,
    slice_rank_part,
    wrap_os_errors,
    write_whole_file,
)
from xla_ckpt.keywords import check_argument_names

__getattr__, __dir__ = attach_exports(__name__)

PathLike = str | os.PathLike[str]


@check_argument_names()
def save(
    checkpoint: Mapping[str, Any],
    output_dir: PathLike,
    save_serially: bool = True,
    save_xser: bool = False,
    down_cast_bf16: bool = False,
    master_dp_only: bool = True,
) -> None:
    """Save a dict of this rank's state. Call it on all ranks. When it returns, all files are on disk.

    Each file replaces an older one of the same name when it is durable. The files of different ranks are replaced one
    by one, so use a new directory for every save.

    Args:
        checkpoint: Tensors, containers and plain values, such as ``{"model": model.state_dict(), "step": 3}``.
            Other objects are pickled, and `load` then needs ``trust_pickle=True``.
        output_dir: Directory of the checkpoint; created if it does not exist.
        save_serially: Ranks on a host write one after the other, to save host memory. No effect with `save_xser`,
            which has one tensor in host memory at a time.
        save_xser: Write each XLA tensor to a separate file.
        down_cast_bf16: Store float32 tensors as bfloat16, except 0-d tensors, so that step counts stay exact.
        master_dp_only: Data-parallel rank 0 writes for all. Use False if the ranks differ, as with ZeRO-1.

    Raises:
        xla_ckpt.UsageError: File names would not distinguish all ranks (expert or context parallelism); or `output_dir`
            is a bucket address, where a file cannot be replaced atomically.
        xla_ckpt.StorageError: A file system operation failed. Existing files are unchanged.
        xla_ckpt.UnsupportedStateError: A value cannot be pickled.
        xla_ckpt.RankFailedError: Another rank failed.
    """
    write: Callable[[], None] | None = None
    turn, error = 0, None
    try:
        mesh, at = get_mesh_and_coordinates()
        path = _get_rank_path(output_dir, master_dp_only)
        check_local_path(path)
        _check_file_names(mesh, master_dp_only)
        compute(collect_xla_tensors(checkpoint))  # on every rank, because pending operations may contain collectives
        if not master_dp_only or (at["dp"] == 0 and at["cp"] == 0):
            write = functools.partial(
                write_xser_files if save_xser else write_rank_file,
                checkpoint,
                path if save_xser else f"{path}/checkpoint.pt",
                down_cast_bf16=down_cast_bf16,
            )
            turn = int(os.environ.get("LOCAL_RANK", "0")) if save_serially and not save_xser else 0
    except Exception as problem:  # sent to all ranks, which wait for this one
        error = problem
    write_in_turn(write, turn, error)


def write_in_turn(write: Callable[[], None] | None, turn: int, error: Exception | None) -> None:
    """Write on all ranks, ordered by `turn`. All ranks make the call, with None if they have nothing to write.

    Raises:
        xla_ckpt.RankFailedError: Another rank failed. (This rank's own error, `error` or one raised by `write`, is
            raised unchanged.)
    """
    for now in range(1 + max(sync_ranks(error, "saving", turn))):
        if now == turn and write is not None:
            try:
                write()
            except Exception as problem:
                error = problem
        sync_ranks(error, "saving")


@check_argument_names()
def load(
    chkpt_path: PathLike,
    model: Any = None,
    model_or_optimizer: Any = None,
    model_key: str | None = "model",
    load_xser: bool = False,
    sharded: bool = True,
    strict: bool = True,
    master_dp_only: bool = True,
    weights_only: bool = False,  # noqa: ARG001  # neuronx-distributed's signature
    *,
    trust_pickle: bool = False,
) -> Any:
    """Load the checkpoint that `save`, or neuronx-distributed, saved for this rank. Call it on all ranks.

    A ZeRO-1 optimizer whose state contains no master weights copies the current weights of the model: load the model
    before it.

    Args:
        chkpt_path: The directory of the save; with ``sharded=False``, a file.
        model: Older name of `model_or_optimizer`.
        model_or_optimizer: Object with ``load_state_dict``, into which the entry `model_key` is loaded.
        model_key: Name of the entry; None if the checkpoint is the state itself.
        load_xser: True if it was saved with ``save_xser=True``.
        sharded: False: the file contains full parameters, and this rank loads its shards, given by their
            attributes.
        strict: For modules: missing or unexpected names raise an error.
        master_dp_only: As in the save.
        weights_only: Accepted; `trust_pickle` decides.
        trust_pickle: Load pickled objects, which can run any code.

    Returns:
        The dict, without the entry loaded into `model_or_optimizer`. Tensors that were XLA tensors in an xser save are
        on the XLA device, all others on the CPU.

    Raises:
        xla_ckpt.NoCheckpointError: There is no file for this rank.
        xla_ckpt.CorruptCheckpointError: A file is damaged.
        xla_ckpt.UntrustedObjectError: A file contains pickled objects, and `trust_pickle` is False.
        xla_ckpt.IncompatibleCheckpointError: It has no such entry, or a full parameter is not divisible.
        xla_ckpt.RankFailedError: Another rank failed.
        RuntimeError: From `torch.nn.Module.load_state_dict`, if names or shapes do not match.
    """
    target = model_or_optimizer if model is None else model
    checkpoint, error = None, None
    try:
        if not sharded and not isinstance(target, torch.nn.Module):
            raise UsageError(
                "sharded=False needs the module that says how its parameters are split",
                hint="Pass model_or_optimizer=.",
            )
        path = _get_rank_path(chkpt_path, master_dp_only) if sharded else os.fspath(chkpt_path)
        file = path if load_xser or not sharded else f"{path}/checkpoint.pt"
        checkpoint = read_rank_file(
            file, trust_pickle=trust_pickle, not_found_hint=_SAME_RANKS_HINT if sharded else _UNSHARDED_HINT
        )
    except Exception as problem:
        error = problem
    sync_ranks(error, "loading")
    try:
        if target is not None:
            checkpoint = _load_into(target, checkpoint, model_key, sharded=sharded, strict=strict)
    except Exception as problem:
        error = problem
    sync_ranks(error, "loading")
    return checkpoint


_SAME_RANKS_HINT = (
    "chkpt_path, load_xser and master_dp_only have to be as in the save, and so have the numbers of ranks: on others, "
    "xla_ckpt.load_checkpoint loads it."
)
_UNSHARDED_HINT = (
    "With sharded=False chkpt_path is a single file of whole parameters; a directory of save() needs sharded=True."
)


# -- synchronization of ranks


def get_mesh_and_coordinates() -> tuple[Mesh, dict[str, int]]:
    """Return the mesh of the job, and the coordinates of this rank: axis -> index along it.

    Raises:
        AssertionError: Nothing is initialized. (neuronx-distributed raises it, and its users catch it.)
    """
    distributed: Any = torch.distributed
    joined = distributed.is_available() and distributed.is_initialized()
    mesh = get_current_mesh(_get_rank(), distributed.get_world_size() if joined else 1)
    if mesh is None:
        raise AssertionError("parallel_state is not initialised: call initialize_model_parallel() first")
    return mesh, mesh.coordinates(_get_rank())


def _get_rank() -> int:
    """Return the rank of this process in the job; 0 without torch.distributed."""
    distributed: Any = torch.distributed
    return int(distributed.get_rank()) if distributed.is_available() and distributed.is_initialized() else 0


def _get_rank_path(output_dir: PathLike, master_dp_only: bool) -> str:
    """Return the file, or the directory, of this rank's part of a checkpoint."""
    _, at = get_mesh_and_coordinates()
    dp = "" if master_dp_only else f"_dp_rank_{at['dp']:02d}"
    return os.path.join(os.fspath(output_dir), f"tp_rank_{at['tp']:02d}_pp_rank_{at['pp']:02d}{dp}")


def _check_file_names(mesh: Mesh, master_dp_only: bool) -> None:
    """Raise an error if file names would lose the state of some ranks, which neuronx-distributed silently does."""
    if master_dp_only and mesh.ep > 1:
        raise UsageError(
            "with master_dp_only=True the experts of expert-parallel ranks other than the first are written nowhere",
            hint="Pass master_dp_only=False, or use nxd.save_checkpoint.",
        )
    if not master_dp_only and mesh.cp > 1:
        raise UsageError(
            "the names of these files do not tell context-parallel ranks apart", hint="Use nxd.save_checkpoint."
        )


@dataclass(frozen=True, slots=True)
class _RankStatus:
    """Status of a rank at a synchronization point, published to the other ranks as a list of its fields."""

    problem: str | None
    """Text of the rank's error."""
    turn: int


def sync_ranks(error: Exception | None, operation: str, turn: int = 0) -> list[int]:
    """Wait for all ranks, and return the turn of each.

    Raises:
        xla_ckpt.RankFailedError: Another rank failed. (This rank's own error is raised unchanged.)
    """
    words = [_RankStatus(None if error is None else f"{type(error).__name__}: {error}", turn)]
    if os.environ.get("NXD_SKIP_RENDEZVOUS") != "1" or operation != "loading":
        try:
            words = _exchange_statuses(words[0])
        except RuntimeError as lost:  # the connection broke
            if error is None:
                raise RankFailedError(f"{operation} failed: another rank does not answer: {lost}") from lost
    if error is not None:
        raise error
    for rank, word in enumerate(words):
        if word.problem is not None:
            raise RankFailedError(f"{operation} failed on another rank: {word.problem}", rank=rank)
    return [word.turn for word in words]


def _exchange_statuses(status: _RankStatus) -> list[_RankStatus]:
    """Return the statuses of all ranks, in rank order."""
    distributed: Any = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return [status]
    if "gloo" in str(distributed.get_backend()):
        answers: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(answers, astuple(status))
    else:
        import torch_xla.core.xla_model as xm

        payload = json.dumps(astuple(status)).encode()
        answers = [json.loads(answer) for answer in xm.rendezvous("neuron_compat.nxd.parallel_layers", payload)]
    return [_RankStatus(*answer) for answer in answers]


# -- loading into a module or an optimizer


def _load_into(target: Any, checkpoint: Any, key: str | None, *, sharded: bool, strict: bool) -> Any:
    """Load the entry `key` of a checkpoint, or all of it, and return the rest."""
    if key is not None and (not isinstance(checkpoint, dict) or key not in checkpoint):
        raise IncompatibleCheckpointError(
            "the checkpoint has no such entry",
            expected=key,
            found=_list_entries(checkpoint),
            hint="Name the entry by model_key=; None if the checkpoint is the state itself.",
        )
    state = checkpoint if key is None else checkpoint[key]
    if isinstance(target, torch.optim.Optimizer) and not (isinstance(state, Mapping) and "param_groups" in state):
        raise IncompatibleCheckpointError(
            "this is no state of an optimizer",
            expected="state, param_groups",
            found=_list_entries(state),
            hint=f"Name the entry of the optimizer by model_key=, which is {key!r}.",
        )
    if isinstance(target, torch.nn.Module):
        target.load_state_dict(state if sharded else _shard_state(target, dict(state)), strict=strict)
    else:
        target.load_state_dict(state)
    return None if key is None else {k: v for k, v in checkpoint.items() if k != key}


def _list_entries(value: Any) -> str:
    return (", ".join(map(str, value)) if isinstance(value, Mapping) else type(value).__name__)[:200]


def _shard_state(module: torch.nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Return this rank's shard of a state of full parameters."""
    _run_preshard_hooks(module, state, "")
    mesh, _ = get_mesh_and_coordinates()
    for name, parameter in module.state_dict(keep_vars=True).items():
        full = state.get(name)
        sharding = None if full is None else get_declared_sharding(parameter, name, mesh)
        if full is None or sharding is None:
            continue
        lies = sharding.map_local_shape(tuple(parameter.shape), mesh, _get_rank())
        if lies.shape != tuple(full.shape):
            raise IncompatibleCheckpointError(
                "a whole parameter has another shape", leaf=name, expected=list(lies.shape), found=list(full.shape)
            )
        state[name] = slice_rank_part(full, lies, parameter.shape)
    return state


def _run_preshard_hooks(module: torch.nn.Module, state: dict[str, Any], prefix: str) -> None:
    """Run the ``preshard_hook`` of modules on the state before it is sharded, as neuronx-distributed does."""
    hook = getattr(module, "preshard_hook", None)
    if hook is not None:
        hook(state, f"{prefix}weight")
        return
    for name, child in module.named_children():
        _run_preshard_hooks(child, state, f"{prefix}{name}.")


def check_local_path(path: str) -> None:
    """Raise an error for a URL, where a file cannot replace an older one atomically.

    Raises:
        UsageError: It is a URL, such as ``s3://bucket/run``.
    """
    if "://" in path:
        raise UsageError(
            "files of this call take the place of older ones, one by one, which only a file system does",
            expected="the path of a directory",
            found=path,
            hint="Save to buckets with nxd.save_checkpoint, whose tags appear whole.",
        )


def write_rank_file(tree: Any, path: str, *, down_cast_bf16: bool = False) -> None:
    """Write a tree with torch.save, with its tensors on the CPU.

    Raises:
        xla_ckpt.StorageError: The storage failed. An existing file is unchanged.
        xla_ckpt.UnsupportedStateError: A value cannot be pickled.
    """
    write_whole_file(_cast_to_bfloat16(tree) if down_cast_bf16 else tree, path)


def write_xser_files(tree: Any, path: str, *, down_cast_bf16: bool) -> None:
    """Write a tree with each XLA tensor in a separate file. The file that references them is written last.

    Raises:
        xla_ckpt.StorageError: The storage failed. An existing checkpoint is unchanged.
        xla_ckpt.UnsupportedStateError: A value cannot be pickled.
    """
    from torch_xla.utils.serialization import TensorReference

    narrow = _cast_to_bfloat16 if down_cast_bf16 else lambda value: value
    tensors, folder = collect_xla_tensors(tree), f"{path}.tensors"
    with wrap_os_errors("saving", file=path):
        os.makedirs(folder, exist_ok=True)
        before = {int(m[1]): name for name in os.listdir(folder) if (m := _TENSOR_FILE_PATTERN.fullmatch(name))}
    # Do not overwrite files that the existing checkpoint references: it stays valid until the new one replaces it.
    first = 0 if all(tid >= len(tensors) for tid in before) else max(before) + 1
    references = {id(tensor): TensorReference(first + i) for i, tensor in enumerate(tensors)}
    for i, tensor in enumerate(tensors):
        write_whole_file(narrow(tensor.detach()), f"{folder}/tensor_{first + i}.pt")
    write_whole_file(map_tensors(tree, lambda value: references.get(id(value), narrow(value))), path)
    with wrap_os_errors("removing older files", file=path):
        for name in before.values():
            os.unlink(f"{folder}/{name}")


_TENSOR_FILE_PATTERN = re.compile(r"tensor_(\d+)\.pt")


def _cast_to_bfloat16(tree: Any) -> Any:
    """Cast float32 tensors in a tree to bfloat16, except 0-d tensors. A tensor that occurs twice stays shared."""
    known: dict[int, torch.Tensor] = {}

    def one(value: torch.Tensor) -> torch.Tensor:
        if value.dtype != torch.float32 or not value.dim():
            return value
        return known.setdefault(id(value), value.detach().to(torch.bfloat16))

    return map_tensors(tree, one)


def read_rank_file(path: str, *, trust_pickle: bool, not_found_hint: str) -> Any:
    """Read a file of either format. `not_found_hint` is the hint of the error if no file exists.

    Raises:
        xla_ckpt.NoCheckpointError: The file does not exist.
        xla_ckpt.CorruptCheckpointError: The file, or the file of a tensor, is damaged or missing.
        xla_ckpt.UntrustedObjectError: It contains a pickled object, and `trust_pickle` is False.
        xla_ckpt.StorageError: The storage failed.
    """
    loaded: dict[int, torch.Tensor] = {}

    def tensor(tid: int) -> torch.Tensor:
        if tid not in loaded:
            loaded[tid] = _read_tensor_file(f"{path}.tensors/tensor_{tid}.pt", trust_pickle)
        return loaded[tid]

    try:
        return load_whole_file(path, trust_pickle=trust_pickle, reference=tensor)
    except NoCheckpointError as error:
        error.hint = not_found_hint
        raise


_DAMAGED_HINT = "Load another checkpoint, or restore this file from a copy."


def _read_tensor_file(path: str, trust_pickle: bool) -> torch.Tensor:
    """Read a tensor from its own file onto the XLA device."""
    import torch_xla

    try:
        tensor = load_whole_file(path, trust_pickle=trust_pickle)
    except NoCheckpointError as error:
        raise CorruptCheckpointError("the file of a tensor is missing", file=path, hint=_DAMAGED_HINT) from error
    if not isinstance(tensor, torch.Tensor):
        kind = type(tensor).__name__
        raise CorruptCheckpointError("the file of a tensor holds none", file=path, found=kind, hint=_DAMAGED_HINT)
    return tensor.to(torch_xla.device())
