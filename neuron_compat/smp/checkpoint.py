"""``smp.save_checkpoint`` and ``smp.resume_from_checkpoint``: directories with tags, and the file `newest`.

    path/{tag}_partial/     model_{pp}_{tp}.pt, optimizer_states_{pp}_{tp}[_{rdp}].pt, fp16_states_..., user_content.pt,
                            smp_config.pt, as SMP 1.12 has them, and this library's manifest with digests
    path/newest             the directories, oldest first
    path/{tag}              partial=False: the whole model in one file
    path/user_content_{tag} its user content

A directory appears by one rename when all in it is durable, and `newest` is written after that. If a job ends between
the two, the next save or resume has `newest` agree with the directories.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import xla_ckpt
from neuron_compat.smp import job
from neuron_compat.smp.elsewhere import read_otherwise
from neuron_compat.smp.errors import SMPCheckpointError, SMPValidationError
from neuron_compat.smp.files import check_path, current_place
from neuron_compat.smp.listing import list_newest, list_when_done, wait_listed
from neuron_compat.smp.meeting import together
from neuron_compat.smp.model_calls import ModelCalls
from neuron_compat.smp.resuming import Resumed, chosen, config_differences, user_content_of
from neuron_compat.smp.views import is_distributed_optimizer, local_model, local_optimizer, scale_of
from xla_ckpt.facade import (
    IS_PARTIAL,
    JOB_CONFIG,
    NEWEST,
    PARTIAL,
    NamesOnly,
    user_content_name,
    write_whole_file,
)
from xla_ckpt.keywords import known_names
from xla_ckpt.logs import get_logger

logger = get_logger(__name__)

PathLike = str | os.PathLike[str]


@known_names()
def save_checkpoint(
    path: PathLike,
    tag: str,
    partial: bool = True,
    model: Any = None,
    optimizer: Any = None,
    user_content: Any = None,
    translate_if_full: bool = True,
    num_kept_partial_checkpoints: int | None = None,
    *,
    async_save: bool = False,
    options: xla_ckpt.SaveOptions | None = None,
) -> xla_ckpt.SaveHandle | None:
    """Save a checkpoint. All ranks of the job make the same call, without a guard.

    Args:
        path: Root directory; made if absent.
        tag: Name of the checkpoint, the same on all ranks.
        partial: Each rank saves what it owns; else rank 0 saves the whole model in one file.
        model: What `smp.DistributedModel` returned.
        optimizer: What `smp.DistributedOptimizer` returned. SMP has no place for it in a full checkpoint, and a warning
            says so; ``smp.save(optimizer.state_dict(), ..., partial=False)`` saves it.
        user_content: Any Python value; rank 0's is stored.
        translate_if_full: False marks a full checkpoint as one with the names of this model, which a load then never
            translates.
        num_kept_partial_checkpoints: Keep this many of the newest partial checkpoints, SMP's own in this directory
            included.
        async_save: Return as soon as the state is frozen: training goes on, and a partial checkpoint is committed and
            listed in the background. A full one is saved at once in any case.
        options: How a partial save goes about its work, such as ``xla_ckpt.SaveOptions(snapshot="overlap")``; by
            default those of `xla_ckpt.default_options`.

    Returns:
        The save, if it runs in the background.

    Raises:
        SMPValidationError: The model or the optimizer is none of smp's.
        SMPCheckpointError: The tag is no string, or not the same on all ranks.
        xla_ckpt.CheckpointError: The save failed, on some rank; the same error on all ranks.
    """
    if model is None and optimizer is None:
        logger.warning("Both model and optimizer are None, skipping saving checkpoint...")
        return None
    kept = num_kept_partial_checkpoints
    if kept is not None and kept <= 0:
        logger.warning("Invalid num_kept_partial_checkpoints number %s, ignoring...", kept)
        kept = None
    root = _root(path)
    _check_arguments(root, tag, model, optimizer, partial=partial)
    job.state.apply_pending()
    logger.info("Saving %s checkpoint with tag %s to %s", "partial" if partial else "full", tag, path)
    if partial:
        wait_listed()
        handle = _save_partial(
            functools.partial(
                xla_ckpt.save_checkpoint,
                root,
                f"{tag}{PARTIAL}",
                user_content=user_content,
                num_kept_ckpts=kept,
                async_save=async_save,
                options=options,
            ),
            model,
            optimizer,
        )
        _have_listed(handle, root, kept, waits=not async_save)
        return handle if async_save else None
    if optimizer is not None:
        logger.warning("Saving optimizer for full checkpoint is not supported, skipping...")
    _save_full(root, tag, model, user_content, marked=not translate_if_full)
    return None


def _root(path: PathLike) -> str:
    """The absolute path of a root directory."""
    check_path(os.fspath(path))
    return os.path.abspath(os.fspath(path))


def _check_arguments(root: str, tag: Any, model: Any, optimizer: Any, *, partial: bool) -> None:
    """Refuse objects that are not SMP's, and a tag that is none, that a directory has, or that ranks do not share."""

    def prepare() -> str:
        if not isinstance(tag, str):
            raise SMPCheckpointError(f"checkpoint tag can only be str, getting {type(tag)}")
        if not partial and (tag in ("", ".", "..", NEWEST) or "/" in tag):
            # The file would lie outside of the root, or take the place of the list of partial checkpoints.
            raise SMPCheckpointError("the tag of a full checkpoint is the name of its file", found=repr(tag))
        if not partial and job.rank() == 0 and os.path.isdir(f"{root}/{tag}"):
            whose = read_otherwise(f"{root}/{tag}")
            raise SMPCheckpointError(
                "the tag of a full checkpoint is the name of its file, and a directory has this name",
                path=root,
                tag=tag,
                hint=f"{f'{whose} ' if whose else ''}Give the checkpoint another tag, or first move {root}/{tag} away.",
            )
        if model is not None and not isinstance(model, ModelCalls):
            raise SMPValidationError("smp.save_checkpoint can only take smp.DistributedModel as input model")
        if optimizer is not None and not is_distributed_optimizer(optimizer):
            raise SMPValidationError("smp.save_checkpoint can only take smp.DistributeOptimizer as input optimizer")
        return tag

    tags = _on_all("smp.save_checkpoint", prepare)
    if any(each != tags[0] for each in tags):
        raise SMPCheckpointError(f"checkpoint tag should be same across ranks, getting {tags}")


def _on_all(call: str, prepare: Callable[[], Any]) -> list[Any]:
    """What `prepare` returns on each rank; what it raises on one, all ranks raise, with SMP's own text."""
    try:
        return together("world", call, prepare, guard="All ranks make this call, without a guard.")
    except SMPValidationError as error:
        error.rank = None
        raise


# -- partial


def _save_partial(save: Callable[..., xla_ckpt.SaveHandle], model: Any, optimizer: Any) -> xla_ckpt.SaveHandle:
    """Call `xla_ckpt.save_checkpoint`, which knows the place, with what this rank owns."""
    distributed = job.state.model if model is None else model
    local = local_model(distributed)
    scale = {} if optimizer is None else scale_of(optimizer)
    return save(
        model=local if model is not None else NamesOnly(local),
        optimizer=None if optimizer is None else local_optimizer(optimizer),
        layout="smp",
        extras={JOB_CONFIG.removesuffix(".pt"): job.state.cfg.get_config_dict(), **scale},
        mesh=job.ranks().mesh,
        shardings=distributed._rules,
    )


def _have_listed(handle: xla_ckpt.SaveHandle, root: str, kept: int | None, *, waits: bool) -> None:
    """Have `newest` name the directory when it is there: now, or in the background."""
    if waits:
        handle.tidied()  # SMP's users look into the directory after the call, and expect what is kept
        _on_all("smp.save_checkpoint", lambda: list_newest(root, kept) if job.rank() == 0 else None)
    elif job.rank() == 0:
        list_when_done(handle, root, kept)


# -- full


def _save_full(root: str, tag: str, model: Any, user_content: Any, *, marked: bool) -> None:
    """Have rank 0 write the whole model to the file that the tag names, and the user content beside it."""
    state: Any = None
    if model is not None and current_place().rdp == 0:
        state = model.state_dict(gather_to_rank0=True)

    def prepare() -> None:
        if job.rank() != 0:
            return
        if model is not None:
            write_whole_file({**state, IS_PARTIAL: False} if marked else state, f"{root}/{tag}")
        if user_content is not None:
            write_whole_file(user_content, f"{root}/{user_content_name(tag)}")

    _on_all("smp.save_checkpoint", prepare)


# -- resume


@known_names()
def resume_from_checkpoint(
    path: PathLike,
    tag: str | None = None,
    partial: bool = True,
    strict: bool = True,
    load_optimizer: bool = True,
    load_sharded_optimizer_state: bool = True,  # noqa: ARG001  # for sharded data parallelism, which is not there
    translate_function: Callable[[dict[str, Any]], Any] | None = None,
    *,
    strict_partitions: bool = False,
    trust_pickle: bool = False,
) -> Any:
    """Resume from a checkpoint, of any topology. All ranks of the job make the same call.

    It may come before `smp.init`, or before the model and the optimizer are made: then it is loaded into them when they
    are.

    Args:
        path: Root directory.
        tag: Which checkpoint; None takes the newest partial one.
        partial: Whether it is a partial checkpoint.
        strict: False loads what fits.
        load_optimizer: Whether the optimizer's state is loaded, too. (Full checkpoints have none.)
        load_sharded_optimizer_state: Accepted.
        translate_function: For a full checkpoint of another model: makes names of this model of its names.
        strict_partitions: Refuse a checkpoint of other degrees, as SMP does where it would load the optimizer.
        trust_pickle: Load pickled objects in the user content, which can run any code.

    Returns:
        The user content of the save; None if there was none.

    Raises:
        SMPValidationError: There is no such checkpoint, or its configuration does not fit.
        xla_ckpt.CheckpointError: It does not fit the model or the optimizer, or is damaged. Nothing was changed.
    """
    wait_listed()
    job.size()  # initialises, if what is there says how
    root = _root(path)
    content: list[Any] = []

    def prepare() -> str:
        name = chosen(root, tag, partial=partial)
        _verify_config(root, name, partial=partial, load_optimizer=load_optimizer, strict=strict_partitions)
        content.append(user_content_of(root, name, partial=partial, trust=trust_pickle))
        return name

    if job.is_initialized():
        names = _on_all("smp.resume_from_checkpoint", prepare)
        if any(name != names[0] for name in names):
            raise SMPValidationError("the ranks resume from different checkpoints", found=", ".join(sorted({*names})))
    else:
        names = [prepare()]
    logger.info("Resuming from checkpoint %s/%s", root, names[0])
    if load_optimizer and not partial:
        logger.warning("Skipping loading optimizer for full checkpoint loading...")
    resumed = Resumed(
        root=root,
        name=names[0],
        partial=partial,
        strict=strict,
        optimizer=load_optimizer and partial,
        translate=translate_function,
        trust=trust_pickle,
    )
    state = job.state
    if state.model is not None and (state.optimizer is not None or not resumed.optimizer):
        resumed.apply(state.model, state.optimizer)
    else:
        state.pending.append(resumed.apply)
    return content[0]


def _verify_config(root: str, name: str, *, partial: bool, load_optimizer: bool, strict: bool) -> None:
    """Compare the configuration of a partial checkpoint with that of this job, if that is known."""
    if not partial:
        return
    if not job.is_initialized():
        logger.warning("smp.resume_from_checkpoint is called before smp.init, skipping smp config validation...")
        return
    if os.environ.get("SMP_VERIFY_CHECKPOINT_CONFIG", "1") not in ("0", "false", "False", ""):
        config_differences(root, name, job.state.cfg.get_config_dict(), refuse=strict and load_optimizer)
