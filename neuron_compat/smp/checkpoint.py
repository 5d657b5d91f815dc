"""``smp.save_checkpoint`` and ``smp.resume_from_checkpoint``: directories with tags, and the file `newest`.

    path/{tag}_partial/     model_{pp}_{tp}.pt, optimizer_states_{pp}_{tp}[_{rdp}].pt, fp16_states_..., user_content.pt,
                            smp_config.pt, as in SMP 1.12, and this library's manifest with checksums
    path/newest             the directories, oldest first
    path/{tag}              partial=False: the whole model in one file
    path/user_content_{tag} its user content

A directory is committed by one rename when all files in it are durable, and `newest` is written after that. If a job
ends between the two, the next save or resume updates `newest` from the directories.
"""

from __future__ import annotations

import functools
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

import xla_ckpt
from neuron_compat.smp import comm, files, job
from neuron_compat.smp.errors import MissingCheckpointFilesError, SMPCheckpointError, SMPValidationError
from neuron_compat.smp.files import check_path, describe_other_checkpoints, get_rank_place
from neuron_compat.smp.model_state import ModelStateMixin
from neuron_compat.smp.optimizer_state import OptimizerStateMixin, collect_fp16_state, move_to_cpu
from neuron_compat.smp.rank_sync import run_on_all_ranks
from neuron_compat.smp.stored import CheckpointSource
from xla_ckpt.display import join_lines, make_lines_printable
from xla_ckpt.facade import (
    FP16_SET,
    IS_PARTIAL,
    JOB_CONFIG,
    MODEL_SET,
    NEWEST,
    OPTIMIZER_SETS,
    PARTIAL,
    SMP_VERSION,
    USER_CONTENT_FILE,
    ModelView,
    NamesOnly,
    find_excess_directories,
    get_user_content_name,
    read_partial_root,
    read_whole_file,
    remove_directories,
    replace_file,
    wrap_os_errors,
    write_whole_file,
)
from xla_ckpt.keywords import check_argument_names
from xla_ckpt.logs import get_logger

logger = get_logger(__name__)

PathLike = str | os.PathLike[str]


@check_argument_names()
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
    """Save a checkpoint. Call it on all ranks of the job, without a rank condition.

    Args:
        path: Root directory; created if it does not exist.
        tag: Name of the checkpoint, the same on all ranks.
        partial: True: each rank saves the state it owns; False: rank 0 saves the whole model in one file.
        model: The result of `smp.DistributedModel`.
        optimizer: The result of `smp.DistributedOptimizer`. SMP's full checkpoints contain no optimizer, and a warning
            is logged; ``smp.save(optimizer.state_dict(), ..., partial=False)`` saves it.
        user_content: Any Python value; the value of rank 0 is stored.
        translate_if_full: False marks a full checkpoint as one with the names of this model, which loads then never
            translate.
        num_kept_partial_checkpoints: Keep this many of the newest partial checkpoints, including those that SMP itself
            wrote to this directory.
        async_save: Return as soon as the snapshot is complete: training continues, and a partial checkpoint is
            committed and listed in the background. A full one is always saved synchronously.
        options: Options of a partial save, such as ``xla_ckpt.SaveOptions(snapshot="overlap")``;
            `xla_ckpt.default_options` by default.

    Returns:
        The save handle, if it runs in the background.

    Raises:
        SMPValidationError: The model or the optimizer was not created by smp.
        SMPCheckpointError: The tag is not a string, or differs between ranks.
        xla_ckpt.CheckpointError: The save failed on some rank; the same error on all ranks.
    """
    if model is None and optimizer is None:
        logger.warning("Both model and optimizer are None, skipping saving checkpoint...")
        return None
    kept = num_kept_partial_checkpoints
    if kept is not None and kept <= 0:
        logger.warning("Invalid num_kept_partial_checkpoints number %s, ignoring...", kept)
        kept = None
    root = _resolve_root(path)
    _check_arguments(root, tag, model, optimizer, partial=partial)
    job.state.apply_pending_loads()
    logger.info("Saving %s checkpoint with tag %s to %s", "partial" if partial else "full", tag, path)
    if partial:
        wait_for_updates()
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
        _add_to_newest(handle, root, kept, blocking=not async_save)
        return handle if async_save else None
    if optimizer is not None:
        logger.warning("Saving optimizer for full checkpoint is not supported, skipping...")
    _save_full(root, tag, model, user_content, mark_untranslated=not translate_if_full)
    return None


def _resolve_root(path: PathLike) -> str:
    """Return the absolute path of a root directory."""
    check_path(os.fspath(path))
    return os.path.abspath(os.fspath(path))


def _check_arguments(root: str, tag: Any, model: Any, optimizer: Any, *, partial: bool) -> None:
    """Raise an error for objects that are not SMP's, or for a tag that is invalid or differs between ranks."""

    def prepare() -> str:
        if not isinstance(tag, str):
            raise SMPCheckpointError(f"checkpoint tag can only be str, getting {type(tag)}")
        if not partial and (tag in ("", ".", "..", NEWEST) or "/" in tag):
            # The file would be outside of the root, or replace the list of partial checkpoints.
            raise SMPCheckpointError("the tag of a full checkpoint is the name of its file", found=repr(tag))
        if not partial and job.rank() == 0 and os.path.isdir(f"{root}/{tag}"):
            whose = describe_other_checkpoints(f"{root}/{tag}")
            raise SMPCheckpointError(
                "the tag of a full checkpoint is the name of its file, and a directory has this name",
                path=root,
                tag=tag,
                hint=f"{f'{whose} ' if whose else ''}Give the checkpoint another tag, or first move {root}/{tag} away.",
            )
        if model is not None and not isinstance(model, ModelStateMixin):
            raise SMPValidationError("smp.save_checkpoint can only take smp.DistributedModel as input model")
        if optimizer is not None and not is_distributed_optimizer(optimizer):
            raise SMPValidationError("smp.save_checkpoint can only take smp.DistributeOptimizer as input optimizer")
        return tag

    tags = _run_on_all_ranks("smp.save_checkpoint", prepare)
    if any(each != tags[0] for each in tags):
        raise SMPCheckpointError(f"checkpoint tag should be same across ranks, getting {tags}")


def _run_on_all_ranks(call_name: str, prepare: Callable[[], Any]) -> list[Any]:
    """Return the results of `prepare` on each rank, or raise one rank's error on all ranks, with SMP's own text."""
    try:
        return run_on_all_ranks("world", call_name, prepare, hint="All ranks make this call, without a guard.")
    except SMPValidationError as error:
        error.rank = None
        raise


# -- partial


def _save_partial(save: Callable[..., xla_ckpt.SaveHandle], model: Any, optimizer: Any) -> xla_ckpt.SaveHandle:
    """Call `xla_ckpt.save_checkpoint`, given with its location, for the state that this rank owns."""
    distributed = job.state.model if model is None else model
    local = build_local_model(distributed)
    scale = {} if optimizer is None else get_loss_scale_extras(optimizer)
    return save(
        model=local if model is not None else NamesOnly(local),
        optimizer=None if optimizer is None else build_local_optimizer_state(optimizer),
        layout="smp",
        extras={JOB_CONFIG.removesuffix(".pt"): job.state.cfg.get_config_dict(), **scale},
        mesh=job.get_rank_info().mesh,
        shardings=distributed._rules,
    )


def _add_to_newest(handle: xla_ckpt.SaveHandle, root: str, kept: int | None, *, blocking: bool) -> None:
    """Add the directory to `newest` when it is committed, now or in the background."""
    if blocking:
        handle.tidied()  # SMP programs read the directory after the call, and expect only the kept checkpoints
        _run_on_all_ranks("smp.save_checkpoint", lambda: update_newest_file(root, kept) if job.rank() == 0 else None)
    elif job.rank() == 0:
        update_newest_when_done(handle, root, kept)


# -- full


def _save_full(root: str, tag: str, model: Any, user_content: Any, *, mark_untranslated: bool) -> None:
    """Write the whole model to the file named by the tag, and the user content next to it, on rank 0."""
    state: Any = None
    if model is not None and get_rank_place().rdp == 0:
        state = model.state_dict(gather_to_rank0=True)

    def prepare() -> None:
        if job.rank() != 0:
            return
        if model is not None:
            write_whole_file({**state, IS_PARTIAL: False} if mark_untranslated else state, f"{root}/{tag}")
        if user_content is not None:
            write_whole_file(user_content, f"{root}/{get_user_content_name(tag)}")

    _run_on_all_ranks("smp.save_checkpoint", prepare)


# -- resume


@check_argument_names()
def resume_from_checkpoint(
    path: PathLike,
    tag: str | None = None,
    partial: bool = True,
    strict: bool = True,
    load_optimizer: bool = True,
    load_sharded_optimizer_state: bool = True,  # noqa: ARG001  # for sharded data parallelism, which is unsupported
    translate_function: Callable[[dict[str, Any]], Any] | None = None,
    *,
    strict_partitions: bool = False,
    trust_pickle: bool = False,
) -> Any:
    """Resume from a checkpoint of any topology. Call it on all ranks of the job.

    It may be called before `smp.init`, or before the model and the optimizer are created: they are then loaded when
    they are created.

    Args:
        path: Root directory.
        tag: Name of the checkpoint; None resumes from the newest partial one.
        partial: True for a partial checkpoint.
        strict: False loads the entries that fit.
        load_optimizer: True loads the optimizer's state, too. (Full checkpoints contain none.)
        load_sharded_optimizer_state: Accepted.
        translate_function: For a full checkpoint of another model: converts its names to those of this model.
        strict_partitions: Raise an error for a checkpoint with other degrees, as SMP does if it loads the optimizer.
        trust_pickle: Load pickled objects in the user content, which can run any code.

    Returns:
        The user content of the save; None if there was none.

    Raises:
        SMPValidationError: The checkpoint does not exist, or its configuration does not match.
        xla_ckpt.CheckpointError: It does not fit the model or the optimizer, or is damaged. Nothing was changed.
    """
    wait_for_updates()
    job.size()  # initializes from the parallel state or the environment, if possible
    root = _resolve_root(path)
    content: list[Any] = []

    def prepare() -> str:
        name = resolve_checkpoint_name(root, tag, partial=partial)
        _check_config(root, name, partial=partial, load_optimizer=load_optimizer, strict=strict_partitions)
        content.append(read_user_content(root, name, partial=partial, trust_pickle=trust_pickle))
        return name

    if job.is_initialized():
        names = _run_on_all_ranks("smp.resume_from_checkpoint", prepare)
        if any(name != names[0] for name in names):
            raise SMPValidationError("the ranks resume from different checkpoints", found=", ".join(sorted({*names})))
    else:
        names = [prepare()]
    logger.info("Resuming from checkpoint %s/%s", root, names[0])
    if load_optimizer and not partial:
        logger.warning("Skipping loading optimizer for full checkpoint loading...")
    resumed = PendingResume(
        root=root,
        name=names[0],
        partial=partial,
        strict=strict,
        load_optimizer=load_optimizer and partial,
        translate=translate_function,
        trust_pickle=trust_pickle,
    )
    state = job.state
    if state.model is not None and (state.optimizer is not None or not resumed.load_optimizer):
        resumed.apply(state.model, state.optimizer)
    else:
        state.pending_loads.append(resumed.apply)
    return content[0]


def _check_config(root: str, name: str, *, partial: bool, load_optimizer: bool, strict: bool) -> None:
    """Compare the configuration of a partial checkpoint with this job's, if it is known."""
    if not partial:
        return
    if not job.is_initialized():
        logger.warning("smp.resume_from_checkpoint is called before smp.init, skipping smp config validation...")
        return
    if os.environ.get("SMP_VERIFY_CHECKPOINT_CONFIG", "1") not in ("0", "false", "False", ""):
        compare_config(root, name, job.state.cfg.get_config_dict(), refuse=strict and load_optimizer)


def build_local_model(model: Any) -> ModelView:
    """Return a view of the part of a `DistributedModel` that this rank owns, as `xla_ckpt` saves modules."""
    entries = {entry.name: entry.value for entry in model.local_entries()}
    return ModelView(
        entries,
        parameters=[(name, value) for name, value in entries.items() if isinstance(value, torch.nn.Parameter)],
        wrapped_modules=[model.module],
        load_entries=lambda state_dict: None,
    )


def build_local_optimizer_state(optimizer: Any) -> dict[str, Any]:
    """Return the state of a `DistributedOptimizer` by parameter name: all groups, and the states that this rank owns.

    With ``shard_optimizer_state``, the ranks that hold the same parameters exchange their shares of the states: all of
    them make the call. Master weights are under ``master``, by name.
    """
    runtime = optimizer._smp
    names, entries = runtime.names(optimizer), runtime.entries(optimizer)
    here = job.pp_rank()
    owned = [number for number, entry in enumerate(entries) if here in entry.owners]
    of_parameters = dict(_collect_states(optimizer, owned))
    shared = {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
    groups = []
    for group, numbers in zip(optimizer.param_groups, runtime.numbers(optimizer), strict=True):
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        groups.append({**options, "params": [names[number] for number in numbers]})
    state = {names[number]: of_one for number, of_one in of_parameters.items() if of_one}
    packed: dict[str, Any] = {"state": {**state, **shared}, "param_groups": groups}
    if runtime.masters is not None:
        masters = runtime.masters_by_number(optimizer)
        packed["master"] = {names[n]: masters[n].detach() for n in owned if n in masters}
    return packed


def _collect_states(optimizer: Any, owned: list[int]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the states of parameters by index."""
    runtime = optimizer._smp
    parameters, shares = runtime.parameters(optimizer), runtime.shares(optimizer)
    for number in owned:
        own = dict(optimizer.state.get(parameters[number], {}))
        if shares is None or job.rdp_size() == 1:
            yield number, own
        elif shares[number] == job.rdp_rank():
            yield number, comm.broadcast(move_to_cpu(own), comm.RDP_GROUP)
        else:
            yield number, comm.recv_from(shares[number], comm.RankType.RDP_RANK)


def get_loss_scale_extras(optimizer: Any) -> dict[str, Any]:
    """Return the loss scale of an optimizer as a member of `extras`; an empty dict without one."""
    return (
        {FP16_SET: collect_fp16_state(optimizer)} if job.state.cfg.fp16 and optimizer._smp.masters is not None else {}
    )


def is_distributed_optimizer(optimizer: Any) -> bool:
    """Return True if `smp.DistributedOptimizer` returned the optimizer."""
    return isinstance(optimizer, OptimizerStateMixin)


_update_threads: list[threading.Thread] = []
"""Threads that wait for a background save, to list it."""


def update_newest_file(root: str, kept: int | None = None) -> None:
    """Update `newest` from the directories, and delete SMP's own directories beyond `kept`. Called on rank 0.

    Raises:
        xla_ckpt.StorageError: A file system operation failed.
    """
    listing = read_partial_root(root)
    gone = [] if kept is None else find_excess_directories(listing.order, listing.theirs, kept)
    lines = [name for name in listing.order if name not in gone]
    # First the list, then the directories, so that the list never contains a partially deleted one.
    if list(listing.lines or ()) != lines:
        replace_file("".join(f"{name}\n" for name in lines).encode(), f"{root}/{NEWEST}")
    if gone:
        with wrap_os_errors("deleting old checkpoints", path=root):
            remove_directories(root, gone)


def update_newest_when_done(handle: xla_ckpt.SaveHandle, root: str, kept: int | None) -> None:
    """List a background save in `newest` as soon as it is committed. The exit of the program waits for it."""

    def work() -> None:
        try:
            handle.tidied()
        except xla_ckpt.CheckpointError:
            return  # the next save of this path raises it
        try:
            update_newest_file(root, kept)
        except (xla_ckpt.CheckpointError, OSError) as error:
            # The directories are authoritative: the next save or resume finds unlisted ones, and tries again.
            logger.error("%s is not up to date: %s", NEWEST, error)  # noqa: TRY400

    thread = threading.Thread(target=work, name="neuron_compat.smp-newest", daemon=False)
    _update_threads.append(thread)
    thread.start()


def wait_for_updates() -> None:
    """Wait until all background saves are listed, or have failed."""
    while _update_threads:
        _update_threads.pop(0).join()


FIXED_CONFIG_ENTRIES = (
    "pipeline_parallel_degree",
    "sharded_data_parallel_degree",
    "shard_optimizer_state",
    "tensor_parallel_degree",
)
"""Entries that SMP requires to be unchanged if it loads an optimizer."""


def resolve_checkpoint_name(root: str, tag: str | None, *, partial: bool) -> str:
    """Return the name of a checkpoint's directory or file in its root.

    Raises:
        SMPValidationError: It does not exist.
    """
    if tag is not None:
        name = f"{tag}{PARTIAL}" if partial else tag
    elif partial:
        name = _find_newest(root)
    else:
        raise SMPValidationError("tag is required to load a full checkpoint!")
    if not (os.path.isdir if partial else os.path.isfile)(f"{root}/{name}"):
        details = _describe_alternatives(root, name) or describe_other_checkpoints(root)
        raise SMPValidationError(f"Checkpoint {root}/{name} does not exist!", details=details)
    return name


def _describe_alternatives(root: str, name: str) -> str | None:
    """Return a hint about other checkpoints in the root if one does not exist; None if there are none."""
    bare = name.removesuffix(PARTIAL)
    if name.endswith(2 * PARTIAL):
        return f"A tag is the name of the directory without {PARTIAL}: pass {bare.removesuffix(PARTIAL)}."
    if name != bare and os.path.isfile(f"{root}/{bare}"):
        return "There is a full checkpoint of this tag: pass partial=False."
    if name == bare and os.path.isdir(f"{root}/{bare}{PARTIAL}"):
        return "There is a partial checkpoint of this tag: pass partial=True."
    tags = [there.removesuffix(PARTIAL) for there in read_partial_root(root).order]
    return f"Tags of partial checkpoints there, oldest first: {', '.join(tags[-10:])}." if tags else None


def _describe_full_checkpoints(root: str) -> str | None:
    """Return a hint about full checkpoints in a root, identified by their user content; None if there are none."""
    there = [file for file in os.listdir(root) if os.path.isfile(f"{root}/{file}")] if os.path.isdir(root) else []
    full = [file for file in there if get_user_content_name(file) in there]
    if not full:
        return None
    full.sort(key=lambda file: os.path.getmtime(f"{root}/{file}"))
    listed = ", ".join(full[-10:])
    return f"There are full checkpoints of these tags, oldest first: {listed}. Pass partial=False, and a tag."


def _find_newest(root: str) -> str:
    """Return the name of the newest checkpoint in a root; empty if there is none."""
    listing = read_partial_root(root)
    if listing.lines is None and listing.theirs == listing.order:  # saves of this library are found without the file
        raise SMPValidationError(
            f"Unable to find newest file at {root}/{NEWEST}, if trying to load newest checkpoint please ensure this "
            "file exists or pass an explicit checkpoint tag when loading a checkpoint.",
            details=_describe_full_checkpoints(root) or describe_other_checkpoints(root),
        )
    last = listing.lines[-1] if listing.lines else ""
    if last and PARTIAL.removeprefix("_") not in last:
        raise SMPValidationError(
            "The newest checkpoint file is not saved with `partial` postfix, this might be a checkpoint saved with smp "
            "<= 1.10, please load with the back compatible APIs."
        )
    # The directories are authoritative: a job may have ended after a save, before it was listed.
    return listing.order[-1] if listing.order else last


# -- the configuration


def compare_config(root: str, name: str, current: Mapping[str, Any], *, refuse: bool) -> None:
    """Compare the configuration of a checkpoint with the job's, and report the differences.

    Differences are warnings, unless `refuse` is True: checkpoints that SMP cannot load are loaded here.

    Raises:
        SMPValidationError: The checkpoint was written by SMP before 1.10; or `refuse` is True, and SMP rejects the
            difference.
        xla_ckpt.CorruptCheckpointError: The configuration file is damaged.
    """
    try:
        saved = read_whole_file(f"{root}/{name}/{JOB_CONFIG}")
    except xla_ckpt.NoCheckpointError:
        logger.warning("%s has no %s: its configuration is unknown", name, JOB_CONFIG)
        return
    if not isinstance(saved, Mapping):
        raise xla_ckpt.CorruptCheckpointError("the configuration is no dict", file=f"{name}/{JOB_CONFIG}")
    version = str(saved.get("smp_version", SMP_VERSION))
    if _parse_version(version) < (1, 10):
        raise SMPValidationError(
            f"Checkpoint was saved with smp version {version} < 1.10.0, which is not supported with this checkpointing "
            "API."
        )
    if version != SMP_VERSION:
        logger.warning(
            "WARNING: Checkpoint was saved with a different version of smp, this might potentially cause issues. "
            "Checkpoint version: %s, Current smp version: %s.",
            version,
            SMP_VERSION,
        )
    differing = {
        key: f"feature {key}, loaded {value}, current {current[key]}\n"
        for key, value in saved.items()
        if key in current and value != current[key]
    }
    refused = [text for key, text in sorted(differing.items()) if key in FIXED_CONFIG_ENTRIES]
    if refuse and refused:
        raise SMPValidationError(
            make_lines_printable(
                f"The following features changes are not allowed for loading partial: \n{''.join(refused)}"
            )
        )
    if differing:
        logger.warning(
            "Warning: Found mismatched features between save and load: \n%s\nThe checkpoint is loaded all the same.",
            join_lines(text.rstrip("\n") for text in differing.values()),
        )


def _parse_version(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version."""
    return tuple(int(n) for n in re.findall(r"\d+", version)[:2])


# -- stored contents


def read_user_content(root: str, name: str, *, partial: bool, trust_pickle: bool) -> Any:
    """Return the user content of a checkpoint; None if it has none.

    Raises:
        xla_ckpt.CorruptCheckpointError: Its file is damaged.
        xla_ckpt.UntrustedObjectError: It contains pickled objects, and `trust_pickle` is False.
    """
    file = f"{root}/{name}/{USER_CONTENT_FILE}" if partial else f"{root}/{get_user_content_name(name)}"
    return files.FileReader(trust_pickle=trust_pickle).read(file) if os.path.isfile(file) else None


@dataclass(slots=True, kw_only=True)
class PendingResume:
    """Checkpoint that is loaded as soon as the model and the optimizer exist."""

    root: str
    name: str
    """Name of its directory or file in the root."""

    partial: bool
    """True if it is a directory."""

    strict: bool
    load_optimizer: bool
    translate: Callable[[dict[str, Any]], Any] | None
    """Converts the names of a full checkpoint to those of this model."""

    trust_pickle: bool
    _has_model: bool = False

    def apply(self, model: Any, optimizer: Any) -> None:
        """Load it into a model, and an optimizer if there is one. A second call loads only the objects not yet loaded.

        Raises:
            MissingCheckpointFilesError: The checkpoint contains no model, or no optimizer.
            xla_ckpt.CheckpointError: It does not fit, or is damaged. Nothing was changed.
        """
        if not self.partial:
            self._apply_full(model)
            return
        optimizer = optimizer if self.load_optimizer else None
        self._check_files(None if self._has_model else MODEL_SET)
        self._check_files(None if optimizer is None else OPTIMIZER_SETS[1])
        wanted = None if self._has_model else model
        if wanted is not None or optimizer is not None:
            source = CheckpointSource(path=self.root, tag=self.name, trust_pickle=self.trust_pickle)
            source.load(model=wanted, optimizer=optimizer, strict=self.strict)
        self._has_model = True

    def _check_files(self, kind: str | None) -> None:
        """Raise an error for a checkpoint without files of a kind."""
        folder = f"{self.root}/{self.name}"
        if kind is not None and not any(name.startswith(f"{kind}_") for name in os.listdir(folder)):
            raise MissingCheckpointFilesError.of(f"{folder}/{kind}")

    def _apply_full(self, model: Any) -> None:
        """Load the file of a full checkpoint into a model, unless it is already loaded."""
        if self._has_model:
            return
        state = files.load(f"{self.root}/{self.name}", partial=False, trust_pickle=self.trust_pickle)
        model.load_state_dict(state, strict=self.strict, translate_function=self.translate)
        self._has_model = True
