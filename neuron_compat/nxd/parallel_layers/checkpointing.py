"""neuronx-distributed's older checkpoint calls: a file for each rank, in a directory of the caller's choice.

    <output_dir>/tp_rank_00_pp_rank_00/checkpoint.pt                  save_xser=False: torch.save of the dict
    <output_dir>/tp_rank_00_pp_rank_00, ....tensors/tensor_0.pt       save_xser=True: XLA tensors in files of their own

with ``_dp_rank_00`` after the name for ``master_dp_only=False``. A checkpoint loads on as many ranks as saved it;
`xla_ckpt.load_checkpoint` loads it on any others. New programs take ``nxd.save_checkpoint``, which has tags, digests,
retention and asynchronous saves, and commits all ranks' files in one step; here each file is complete or absent.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from typing import Any

import torch

from neuron_compat.nxd.homes import names_of
from neuron_compat.nxd.parallel_layers.rank_file import check_place, read, write_whole, write_xser
from xla_ckpt import IncompatibleCheckpointError, Mesh, RankFailedError, UsageError
from xla_ckpt.facade import compute, current_mesh, declared_sharding, part_of_whole, xla_tensors
from xla_ckpt.keywords import known_names

__getattr__, __dir__ = names_of(__name__)

PathLike = str | os.PathLike[str]


@known_names()
def save(
    checkpoint: Mapping[str, Any],
    output_dir: PathLike,
    save_serially: bool = True,
    save_xser: bool = False,
    down_cast_bf16: bool = False,
    master_dp_only: bool = True,
) -> None:
    """Save a dict of this rank's state. All ranks make the same call; when it returns, all files are on disk.

    A file takes the place of an older one of its name when it is durable. The files of different ranks do so one by
    one: give every save a directory of its own.

    Args:
        checkpoint: Tensors, containers and plain values, such as ``{"model": model.state_dict(), "step": 3}``.
            Anything else is pickled, and `load` needs ``trust_pickle=True`` then.
        output_dir: Directory of the checkpoint; made if absent.
        save_serially: The ranks of a host write one after the other, to save its memory. Without effect for xser,
            which has one tensor in host memory at a time.
        save_xser: Write each XLA tensor to a file of its own.
        down_cast_bf16: Store float32 tensors as bfloat16, other than numbers (0-d): counts of steps stay exact.
        master_dp_only: Data-parallel rank 0 writes for all. False, if the ranks differ, as those of ZeRO-1 do.

    Raises:
        xla_ckpt.UsageError: Files so named would lack the state of some ranks (expert or context parallelism); or it is
            the address of a bucket, where nothing takes the place of an older file.
        xla_ckpt.StorageError: The operating system refused. Files that were there are there still.
        xla_ckpt.UnsupportedStateError: Something cannot be pickled.
        xla_ckpt.RankFailedError: Another rank failed.
    """
    write: Callable[[], None] | None = None
    turn, error = 0, None
    try:
        mesh, at = place()
        path = _rank_path(output_dir, master_dp_only)
        check_place(path)
        _check_names(mesh, master_dp_only)
        compute(xla_tensors(checkpoint))  # on every rank: what is pending may hold collectives
        if not master_dp_only or (at["dp"] == 0 and at["cp"] == 0):
            write = functools.partial(
                write_xser if save_xser else write_whole,
                checkpoint,
                path if save_xser else f"{path}/checkpoint.pt",
                down_cast_bf16=down_cast_bf16,
            )
            turn = int(os.environ.get("LOCAL_RANK", "0")) if save_serially and not save_xser else 0
    except Exception as problem:  # told to all ranks, which wait for this one
        error = problem
    write_in_turn(write, turn, error)


def write_in_turn(write: Callable[[], None] | None, turn: int, error: Exception | None) -> None:
    """Have all ranks write, one `turn` after the other. All come here, with None if they have nothing to write.

    Raises:
        xla_ckpt.RankFailedError: Another rank failed. (This rank's own error, `error` or one of `write`, is raised as
            it is.)
    """
    for now in range(1 + max(meet(error, "saving", turn))):
        if now == turn and write is not None:
            try:
                write()
            except Exception as problem:
                error = problem
        meet(error, "saving")


@known_names()
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
    """Load what `save`, or neuronx-distributed, saved for this rank. All ranks make the same call.

    Without master weights in its state, a ZeRO-1 optimizer takes the weights that the model has then: load the model
    before it.

    Args:
        chkpt_path: The directory that was saved to; with ``sharded=False`` a file.
        model: An older name of `model_or_optimizer`.
        model_or_optimizer: Something with ``load_state_dict``, to load the entry `model_key` into.
        model_key: Name of the entry; None if the checkpoint is the state itself.
        load_xser: Whether it was saved with ``save_xser=True``.
        sharded: False: the file holds whole parameters, of which this rank takes its part, by their attributes.
        strict: For modules: no name may be missing or left over.
        master_dp_only: As in the save.
        weights_only: Accepted; `trust_pickle` decides.
        trust_pickle: Load pickled objects, which can run any code.

    Returns:
        The dict, less what was loaded into `model_or_optimizer`. Tensors that were XLA tensors in an xser save are
        on the XLA device again, all others on the CPU.

    Raises:
        xla_ckpt.NoCheckpointError: There is no file for this rank.
        xla_ckpt.CorruptCheckpointError: A file is damaged.
        xla_ckpt.UntrustedObjectError: A file holds pickled objects, and `trust_pickle` is False.
        xla_ckpt.IncompatibleCheckpointError: It has no such entry, or a whole parameter does not divide.
        xla_ckpt.RankFailedError: Another rank failed.
        RuntimeError: From `torch.nn.Module.load_state_dict`, of names and shapes that do not fit.
    """
    target = model_or_optimizer if model is None else model
    checkpoint, error = None, None
    try:
        if not sharded and not isinstance(target, torch.nn.Module):
            raise UsageError(
                "sharded=False needs the module that says how its parameters are split",
                hint="Pass model_or_optimizer=.",
            )
        path = _rank_path(chkpt_path, master_dp_only) if sharded else os.fspath(chkpt_path)
        file = path if load_xser or not sharded else f"{path}/checkpoint.pt"
        checkpoint = read(file, trust_pickle=trust_pickle, absent=_OF_THIS_RANK if sharded else _WHOLE)
    except Exception as problem:
        error = problem
    meet(error, "loading")
    try:
        if target is not None:
            checkpoint = _load_into(target, checkpoint, model_key, sharded=sharded, strict=strict)
    except Exception as problem:
        error = problem
    meet(error, "loading")
    return checkpoint


_OF_THIS_RANK = (
    "chkpt_path, load_xser and master_dp_only have to be as in the save, and so have the numbers of ranks: on others, "
    "xla_ckpt.load_checkpoint loads it."
)
_WHOLE = "With sharded=False chkpt_path is a single file of whole parameters; a directory of save() needs sharded=True."


# -- ranks


def place() -> tuple[Mesh, dict[str, int]]:
    """How the ranks of the job are arranged, and where this one stands: axis -> its number along it.

    Raises:
        AssertionError: Nothing is set up. (neuronx-distributed raises it, and its users catch it.)
    """
    distributed: Any = torch.distributed
    joined = distributed.is_available() and distributed.is_initialized()
    mesh = current_mesh(_rank(), distributed.get_world_size() if joined else 1)
    if mesh is None:
        raise AssertionError("parallel_state is not initialised: call initialize_model_parallel() first")
    return mesh, mesh.coordinates(_rank())


def _rank() -> int:
    """This process' rank in the job; 0 without torch.distributed."""
    distributed: Any = torch.distributed
    return int(distributed.get_rank()) if distributed.is_available() and distributed.is_initialized() else 0


def _rank_path(output_dir: PathLike, master_dp_only: bool) -> str:
    """The file, or the directory, of this rank's part of a checkpoint."""
    _, at = place()
    dp = "" if master_dp_only else f"_dp_rank_{at['dp']:02d}"
    return os.path.join(os.fspath(output_dir), f"tp_rank_{at['tp']:02d}_pp_rank_{at['pp']:02d}{dp}")


def _check_names(mesh: Mesh, master_dp_only: bool) -> None:
    """Refuse what neuronx-distributed loses without a word: ranks that would share a file, and differ."""
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
class _Word:
    """What a rank tells the others where they meet. It travels as a list of both."""

    problem: str | None
    """Its error, as text."""
    note: int


def meet(error: Exception | None, doing: str, note: int = 0) -> list[int]:
    """Wait for all ranks; the note of each.

    Raises:
        xla_ckpt.RankFailedError: Another rank failed. (This rank's own error is raised as it is.)
    """
    words = [_Word(None if error is None else f"{type(error).__name__}: {error}", note)]
    if os.environ.get("NXD_SKIP_RENDEZVOUS") != "1" or doing != "loading":
        try:
            words = _exchanged(words[0])
        except RuntimeError as lost:  # the connection broke
            if error is None:
                raise RankFailedError(f"{doing} failed: another rank does not answer: {lost}") from lost
    if error is not None:
        raise error
    for rank, word in enumerate(words):
        if word.problem is not None:
            raise RankFailedError(f"{doing} failed on another rank: {word.problem}", rank=rank)
    return [word.note for word in words]


def _exchanged(word: _Word) -> list[_Word]:
    """The words of all ranks, in their order."""
    distributed: Any = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return [word]
    if "gloo" in str(distributed.get_backend()):
        answers: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(answers, astuple(word))
    else:
        import torch_xla.core.xla_model as xm

        payload = json.dumps(astuple(word)).encode()
        answers = [json.loads(answer) for answer in xm.rendezvous("neuron_compat.nxd.parallel_layers", payload)]
    return [_Word(*answer) for answer in answers]


# -- into a module or an optimizer


def _load_into(target: Any, checkpoint: Any, key: str | None, *, sharded: bool, strict: bool) -> Any:
    """Load the entry `key` of a checkpoint, or all of it; the rest."""
    if key is not None and (not isinstance(checkpoint, dict) or key not in checkpoint):
        raise IncompatibleCheckpointError(
            "the checkpoint has no such entry",
            expected=key,
            found=_entries_of(checkpoint),
            hint="Name the entry by model_key=; None if the checkpoint is the state itself.",
        )
    state = checkpoint if key is None else checkpoint[key]
    if isinstance(target, torch.optim.Optimizer) and not (isinstance(state, Mapping) and "param_groups" in state):
        raise IncompatibleCheckpointError(
            "this is no state of an optimizer",
            expected="state, param_groups",
            found=_entries_of(state),
            hint=f"Name the entry of the optimizer by model_key=, which is {key!r}.",
        )
    if isinstance(target, torch.nn.Module):
        target.load_state_dict(state if sharded else _part(target, dict(state)), strict=strict)
    else:
        target.load_state_dict(state)
    return None if key is None else {k: v for k, v in checkpoint.items() if k != key}


def _entries_of(value: Any) -> str:
    return (", ".join(map(str, value)) if isinstance(value, Mapping) else type(value).__name__)[:200]


def _part(module: torch.nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """This rank's part of a state of whole parameters."""
    _reshape(module, state, "")
    mesh, _ = place()
    for name, parameter in module.state_dict(keep_vars=True).items():
        full = state.get(name)
        sharding = None if full is None else declared_sharding(parameter, name, mesh)
        if full is None or sharding is None:
            continue
        lies = sharding.place(tuple(parameter.shape), mesh, _rank())
        if lies.shape != tuple(full.shape):
            raise IncompatibleCheckpointError(
                "a whole parameter has another shape", leaf=name, expected=list(lies.shape), found=list(full.shape)
            )
        state[name] = part_of_whole(full, lies, parameter.shape)
    return state


def _reshape(module: torch.nn.Module, state: dict[str, Any], prefix: str) -> None:
    """Let modules with a ``preshard_hook`` change the state before it is cut, as neuronx-distributed does."""
    hook = getattr(module, "preshard_hook", None)
    if hook is not None:
        hook(state, f"{prefix}weight")
        return
    for name, child in module.named_children():
        _reshape(child, state, f"{prefix}{name}.")
