"""`save`, `load` and `async_save` with DCP's signatures, on this library's engine.

Stock DCP orchestrates the calls with the program's planners, so planners behave as before. Storage and staging are this
library's. An error on one rank is raised on all ranks, as one error of this library that is also a
`CheckpointException`.

Background saves run sequentially, and report like all saves of the process. The ranks communicate in separate process
groups if the program's group cannot be used: background calls must not mix with training, and some backends cannot
exchange host memory.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import re
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager as StockStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.checkpoint.storage import StorageReader as StockReader
from torch.distributed.checkpoint.storage import StorageWriter as StockWriter
from torch.distributed.checkpoint.utils import _api_bc_check

from xla_ckpt.core.tree.path import format_leaves
from xla_ckpt.dcp.checkpoint_id import (
    CheckpointId,
    CheckpointIdMixin,
    configure_storage,
    get_storage_path,
    require_checkpoint_id,
)
from xla_ckpt.dcp.reader import StorageReader
from xla_ckpt.dcp.stager import AsyncStager
from xla_ckpt.dcp.state_dicts import ChunkLoadPlanner as OurLoadPlanner
from xla_ckpt.dcp.state_dicts import (
    FailingLoadPlanner,
    FailingSavePlanner,
    collect_saved_states,
    collect_states,
    find_empty_optimizers,
    install_states,
    should_read_once,
)
from xla_ckpt.dcp.writer import StorageWriter
from xla_ckpt.distributed.consensus import as_checkpoint_error
from xla_ckpt.distributed.current_job import check_peers_reachable
from xla_ckpt.distributed.exchange import LEADER_TIMEOUT_FRACTION
from xla_ckpt.distributed.handshake import CallSignature, find_call_mismatch
from xla_ckpt.errors import (
    CheckpointError,
    IncompatibleCheckpointError,
    LoadError,
    RankFailedError,
    SaveError,
    UsageError,
    annotate_errors,
    from_json,
)
from xla_ckpt.garbage_collection import pause_gc
from xla_ckpt.keywords import check_arguments, check_arguments_and_fields, suggest_leaf
from xla_ckpt.logs import get_logger
from xla_ckpt.options import SaveOptions
from xla_ckpt.reports import SAVE, PhaseRecorder, SaveReport, Trace, publish_report
from xla_ckpt.saving.background import SAVES, SaveHandle, install_exit_hook
from xla_ckpt.saving.context import Cancellation
from xla_ckpt.storage.process_state import fork_safe_lock, register_fork_reset
from xla_ckpt.storage.signals import DeferSignals
from xla_ckpt.storage.trace_file import resolve_trace_file

logger = get_logger(__name__)

_CallT = TypeVar("_CallT", bound=Callable[..., Any])


def _accept_positional_storage(call: _CallT) -> _CallT:
    """Accept a writer or reader as the second positional argument, with a warning, like stock DCP for torch 2.2
    programs.
    """
    wrapped: _CallT = _api_bc_check(call)  # type: ignore[no-untyped-call]
    return wrapped


@_accept_positional_storage
@check_arguments_and_fields(options=SaveOptions)
def save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: CheckpointId = None,
    storage_writer: StockWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: Any = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    options: SaveOptions | None = None,
) -> Metadata:
    """Save a state dict as a DCP directory; arguments and result are the same as for DCP's `save`.

    The directory is committed atomically, with checksums of all its bytes, and replaces an older one in one step. With
    another `storage_writer` class these guarantees depend on the writer.

    Args:
        state_dict: As for DCP: tensors, DTensors, ShardedTensors, `Stateful` objects, plain values, nested or not.
        checkpoint_id: The directory.
        storage_writer: Writer to use instead of this library's `StorageWriter`.
        planner: A DCP planner, by default `DefaultSavePlanner`.
        process_group: The ranks that save; by default all.
        no_dist: True if this process saves without other ranks.
        use_collectives: False is not supported.
        options: As for `StorageWriter`; if `storage_writer` is passed, set them there.

    Raises:
        CheckpointError: If the save fails, which leaves the previous content unchanged; the same error on all ranks. It
            is also a DCP `CheckpointException`, whose `failures` are the errors of all ranks.
        SaveError: For example, if another job has saved the same checkpoint since this save began. The other job's
            checkpoint is kept.
    """
    writer = _create_writer(storage_writer, checkpoint_id, options)
    path = get_storage_path(writer)
    _check_arguments(state_dict, path, no_dist)
    wait_for_path(path)
    with unify_rank_errors("saving", SaveError, path):
        ranks = CallRanks.from_group(process_group, "call", no_dist=no_dist)
        ranks.check_same_call(_create_call_signature(path, writer))
    states, problem = collect_saved_states(state_dict, ranks.rank)
    planner = planner if problem is None else FailingSavePlanner(problem)
    work = functools.partial(_run_save, states, writer, planner, ranks, use_collectives)
    return DcpSave(path=path, writer=writer, rank=ranks.rank, world=ranks.world, save=work).run()[0]


@check_arguments_and_fields(options=SaveOptions)
def async_save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: CheckpointId = None,
    storage_writer: StockWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: Any = None,
    async_checkpointer_type: AsyncCheckpointerType = AsyncCheckpointerType.THREAD,
    async_stager: StockStager | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    options: SaveOptions | None = None,
) -> Future[Metadata] | AsyncSaveResponse:
    """Save a state dict in the background; arguments and result are the same as for DCP's `async_save`.

    When the call returns, the state has been copied (`AsyncStager`), and training may continue. Background saves run
    sequentially. The call waits for an earlier one into the same directory.

    Args:
        async_checkpointer_type: ``THREAD``; ``PROCESS_STATE`` is not supported.
        async_stager: Stager to use instead of this library's `AsyncStager`.

    The other arguments are the same as for `save`.

    Returns:
        A future of the result of `save`, which raises the errors of `save`. As in DCP, an `AsyncSaveResponse` if the
        stager
        returns a future.

    Raises:
        UsageError: If an argument is invalid.
        CheckpointError: If the state cannot be copied, in a job of one process. In other jobs the future raises the
            error on all ranks.
    """
    began = time.perf_counter()
    if async_checkpointer_type != AsyncCheckpointerType.THREAD:
        raise UsageError(
            "saves are done by a thread, not by a process",
            found=str(async_checkpointer_type),
            hint="Leave async_checkpointer_type out: the thread does nearly all of its work without the GIL.",
        )
    writer = _create_writer(storage_writer, checkpoint_id, options)
    path = get_storage_path(writer)
    _check_arguments(state_dict, path, no_dist)
    wait_for_path(path)
    with unify_rank_errors("saving", SaveError, path):
        ranks = CallRanks.from_group(process_group, "background", no_dist=no_dist)
    states, problem = collect_saved_states(state_dict, ranks.rank)
    staged: Any = {}
    if problem is None:
        try:
            stager = AsyncStager() if async_stager is None else async_stager
            staged = stager.stage(states)
            # A custom stager may still be copying at this point: its memory is undefined until its future is done.
            if getattr(stager, "should_synchronize_after_execute", False):
                stager.synchronize_staging()
        except Exception as error:
            # The other ranks have begun the save: this rank joins it, so that all of them raise the error.
            problem = as_checkpoint_error(error, "staging", ranks.rank, path=path)
    if problem is not None and ranks.world == 1:
        raise problem

    def work() -> Metadata:
        ready = staged.result() if isinstance(staged, Future) else staged
        with unify_rank_errors("saving", SaveError, path):
            ranks.check_same_call(_create_call_signature(path, writer))
        return _run_save(
            ready, writer, planner if problem is None else FailingSavePlanner(problem), ranks, use_collectives
        )

    stall = time.perf_counter() - began
    done = start_in_background(
        DcpSave(path=path, writer=writer, rank=ranks.rank, world=ranks.world, save=work, stall_seconds=stall)
    )
    if not isinstance(staged, Future):
        return done
    staging: Future[None] = Future()
    staged.add_done_callback(functools.partial(_forward_completion, staging))
    return AsyncSaveResponse(staging_completion=staging, upload_completion=done)  # type: ignore[arg-type]


@_accept_positional_storage
@check_arguments
def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: CheckpointId = None,
    storage_reader: StockReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: Any = None,
    no_dist: bool = False,
    trust_pickle: bool = False,
) -> None:
    """Load a DCP directory into a state dict, in place; arguments and semantics are the same as for DCP's `load`.

    Tensors are overwritten, including those of another dtype, which DCP converts silently; other values are replaced;
    `Stateful` objects load their state with `load_state_dict`. No tensor is changed on any rank before all ranks have
    verified the bytes that they need.

    Args:
        state_dict: The state to load. Keys that are not in it are not loaded.
        checkpoint_id: The directory: one written by `save` or stock DCP, or a tag of this library in the layout
            ``dcp``.
        storage_reader: Reader to use instead of this library's `StorageReader`.
        planner: A DCP planner, by default `DefaultLoadPlanner`.
        process_group: The ranks that load; by default all.
        no_dist: True if this process loads without other ranks.
        trust_pickle: True to allow values other than tensors to be of any class. Loading them may run code.

    Raises:
        NoCheckpointError: If the checkpoint does not exist.
        CorruptCheckpointError: If it is damaged. Nothing was changed.
        IncompatibleCheckpointError: If a key is missing in it, or a shape differs. Nothing was changed.
        UntrustedObjectError: If a value is of a class that is not loaded without `trust_pickle`. Nothing was changed.
        LoadError: If an object rejects its state.
    """
    if storage_reader is None:
        reader: StockReader = StorageReader(require_checkpoint_id(checkpoint_id), trust_pickle=trust_pickle)
    else:
        reader = configure_storage(storage_reader, checkpoint_id)
        if trust_pickle:
            raise UsageError(
                "trust_pickle= has no effect beside storage_reader=",
                hint="Give it to the reader: StorageReader(path, trust_pickle=True).",
            )
    path = get_storage_path(reader)
    _check_arguments(state_dict, path, no_dist)
    wait_for_path(path)
    with unify_rank_errors("loading", LoadError, path):
        ranks = CallRanks.from_group(process_group, "call", no_dist=no_dist)
        ranks.check_same_call(CallSignature.create("dcp.load", path or "", trust_pickle=trust_pickle))
    states, problem = collect_states(dict(sorted(state_dict.items())), ranks.rank, LoadError)
    if isinstance(reader, StorageReader) and reader.read_once is None:
        reader.read_once = should_read_once(states)
    # Signal handlers of the program are deferred from the first overwritten tensor to the last value.
    stored = reader.keys if isinstance(reader, StorageReader) else tuple
    with (
        unify_rank_errors("loading", LoadError, path, stored),
        DeferSignals() as calm,
        _pause_gc_while_planning(reader),
    ):
        if isinstance(reader, StorageReader):
            reader.overwriting = calm.begin
        try:
            state_dict_loader.load(
                states,
                storage_reader=reader,
                planner=(planner or OurLoadPlanner()) if problem is None else FailingLoadPlanner(problem),
                process_group=ranks.group,
                no_dist=no_dist,
            )
        finally:
            if isinstance(reader, StorageReader):
                reader.close()
        own_problem = install_states(state_dict, states, ranks.rank)
        problems = ranks.gather(None if own_problem is None else own_problem.to_json())
        if own_problem is not None and ranks.world == 1:
            raise own_problem
        if (first := next((p for p in problems if p is not None), None)) is not None:
            raise from_json(first) from own_problem
    if ranks.rank == 0 and (fresh := [*find_empty_optimizers(states, stored())]):
        logger.warning(
            "what is stored of the state of %s was not loaded: an optimizer has none before its first step, and so its "
            "state dict asked for none. xla_ckpt.load_checkpoint(path, model=..., optimizer=...) loads it",
            format_leaves(fresh),
        )


def _create_call_signature(path: str | None, writer: StockWriter) -> CallSignature:
    """Create the signature of a save, which must be equal on all ranks."""
    if not isinstance(writer, StorageWriter):
        return CallSignature.create("dcp.save", path or "")
    return CallSignature.create("dcp.save", path or "", replicas=writer.replicas, overwrite=writer.overwrite)


def _run_save(
    states: dict[str, Any], writer: StockWriter, planner: SavePlanner | None, ranks: CallRanks, use_collectives: bool
) -> Metadata:
    try:
        with unify_rank_errors("saving", SaveError, get_storage_path(writer)), _pause_gc_while_planning(writer):
            metadata: Metadata = state_dict_saver.save(
                states,
                storage_writer=writer,
                planner=planner,
                process_group=ranks.group,
                no_dist=ranks.no_dist,
                use_collectives=use_collectives,
            )
            return metadata
    except CheckpointError as error:
        if isinstance(error, CheckpointException) or not isinstance(writer, StorageWriter):
            raise  # DCP has raised it on all ranks
        writer.ended(error, ranks.timeout_seconds * (1 - LEADER_TIMEOUT_FRACTION))
        with closing(StorageReader(writer.checkpoint_id)) as reader:
            return reader.read_metadata()
    finally:
        if isinstance(writer, StorageWriter):
            writer.abandon()  # no effect after a commit


@contextmanager
def _pause_gc_while_planning(storage: StockReader | StockWriter) -> Iterator[None]:
    """Pause the garbage collector until this library's reader or writer has planned: stock DCP creates a dozen objects
    per tensor.
    """
    with ExitStack() as pause:
        if isinstance(storage, CheckpointIdMixin):
            pause.enter_context(pause_gc())
            storage.planned = pause.close
        yield


def _create_writer(writer: StockWriter | None, checkpoint_id: CheckpointId, options: SaveOptions | None) -> StockWriter:
    if writer is None:
        return StorageWriter(require_checkpoint_id(checkpoint_id), options=options)
    if options is not None:
        raise UsageError(
            "options= has no effect beside storage_writer=",
            hint="Give it to the writer: StorageWriter(path, options=...).",
        )
    return configure_storage(writer, checkpoint_id)


def _check_arguments(state_dict: Any, path: str | None, no_dist: bool) -> None:
    """Check that the state dict is a dict, and that the ranks can communicate.

    Otherwise each rank would save as if it were the whole job, and the last one would overwrite the others.

    Raises:
        UsageError: If the state dict is not a dict, or the ranks cannot communicate.
    """
    if not hasattr(state_dict, "items"):
        raise UsageError(
            "this is no state dict",
            expected="a dict",
            found=type(state_dict).__name__,
            path=path,
            hint="The state dict comes first, and the path of the directory is checkpoint_id=.",
        )
    if not no_dist:
        with annotate_errors(path=path):
            check_peers_reachable()


def _forward_completion(target: Future[None], staged: Future[Any]) -> None:
    error = staged.exception()
    if error is None:
        target.set_result(None)
    else:
        target.set_exception(error)


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpSave:
    """One save through DCP's functions, on this rank."""

    path: str | None
    """The directory; None if a custom writer has none."""

    writer: StockWriter
    rank: int
    world: int
    save: Callable[[], Metadata]
    stall_seconds: float = 0.0
    """Seconds that the caller waited before this save began."""

    def run(self) -> tuple[Metadata, SaveReport]:
        """Save, and notify the program's listeners of the outcome.

        Raises:
            CheckpointError: If the save fails.
        """
        began, file = time.perf_counter(), resolve_trace_file(None)
        phases = PhaseRecorder(keep_intervals=file is not None)
        if isinstance(self.writer, StorageWriter):
            self.writer.phases = phases
        error: BaseException | None = None
        try:
            metadata = self.save()
        # including KeyboardInterrupt: a report without an error means that there is a checkpoint
        except BaseException as failure:
            error = failure
            raise
        finally:
            ended = time.perf_counter()
            nbytes, files = 0, 0
            if isinstance(self.writer, StorageWriter):
                nbytes, files = self.writer.nbytes, self.writer.files
            trace = None if file is None else Trace(file=file, doing="save", rank=self.rank, world=self.world)
            root, _, tag = (self.path or "").rpartition("/")
            phases.record_interval(SAVE, began, ended, nbytes, about=tag)
            report = SaveReport(
                path=root, tag=tag, sequence=0, nbytes=nbytes, files=files, seconds=ended - began,
                stall=self.stall_seconds, phases=phases.report(), error=error,
            )  # fmt: skip
            publish_report(report, phases, trace)
            del error  # otherwise this frame and the error's traceback would keep each other, and the state, in memory
        return metadata, report


@dataclass(frozen=True, slots=True, kw_only=True)
class _BackgroundDcpSave:
    """A DCP save that `SaveRegistry` runs in the background."""

    dcp_save: DcpSave
    previous: SaveHandle | None
    """The previous save. Collectives of both must run in the same order on all ranks."""

    done: Future[Metadata] = field(default_factory=Future)
    snapshot_progress: None = None

    def run(self) -> SaveReport:
        if self.previous is not None:
            self.previous.wait()
        try:
            metadata, report = self.dcp_save.run()
        except BaseException as error:
            logger.error("the save of %s in the background failed: %s", self.dcp_save.path, error)  # noqa: TRY400  # it says all
            self.done.set_exception(error)
            raise
        self.done.set_result(metadata)
        return report

    def release(self) -> None:
        """See `xla_ckpt.saving.background.BackgroundSave`."""

    def clean_up(self, *, failed: bool) -> None:
        """See `xla_ckpt.saving.background.BackgroundSave`."""


_latest_save_lock = fork_safe_lock()
_latest_save: list[SaveHandle] = register_fork_reset([], list.clear)
"""The most recently started save."""


def start_in_background(save: DcpSave) -> Future[Metadata]:
    """Run a save in the background, after all earlier ones. Return a future of its result or error."""
    install_exit_hook()
    path = save.path or ""
    handle = SaveHandle(path, path.rpartition("/")[2], Cancellation(), error_reported=True)  # by the future
    with _latest_save_lock:
        work = _BackgroundDcpSave(dcp_save=save, previous=_latest_save[0] if _latest_save else None)
        _latest_save[:] = [handle]
    SAVES.start(handle, work)
    return work.done


def wait_for_path(path: str | None) -> None:
    """Wait for a background save into the same directory. Its errors are only raised by its future."""
    if path is not None:
        SAVES.drain(path)


CallPurpose = Literal["call", "background"]

_call_groups: dict[tuple[int, CallPurpose], tuple[Any, Any]] = {}
"""(id of a group, purpose) -> the group, and the group created for its ranks."""


def is_distributed_call(no_dist: bool) -> bool:
    """Return True if several ranks make a call together, or a group of one rank."""
    return not no_dist and bool(dist.is_available() and dist.is_initialized())


@dataclass(frozen=True, slots=True)
class CallRanks:
    """The ranks of one DCP call."""

    group: Any
    """The group for communication; None for the default group, and without other ranks."""

    no_dist: bool
    rank: int
    world: int

    @classmethod
    def from_group(cls, process_group: Any, purpose: CallPurpose, *, no_dist: bool) -> CallRanks:
        """Return the ranks of `process_group` (None: all), or only this process if there are no others or `no_dist` is
        set.
        """
        if not is_distributed_call(no_dist):
            return cls(None, no_dist, 0, 1)
        group = _get_call_group(process_group, purpose)
        return cls(group, no_dist, dist.get_rank(group), dist.get_world_size(group))

    @property
    def timeout_seconds(self) -> float:
        """Timeout of waiting for other ranks, in seconds."""
        return _get_timeout(self.group).total_seconds() if is_distributed_call(self.no_dist) else 0.0

    def gather(self, value: Any) -> list[Any]:
        """Gather a value from all ranks."""
        if not is_distributed_call(self.no_dist):
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, self.group)
        return values

    def check_same_call(self, call: CallSignature) -> None:
        """Compare the calls of all ranks before anything is done, as `xla_ckpt.distributed.job.Job.begin_call` does.

        Raises:
            UsageError: If the calls differ; the same on all ranks.
        """
        if (different := find_call_mismatch(self.gather(call))) is not None:
            raise different


def _get_call_group(process_group: Any, purpose: CallPurpose) -> Any:
    """Return the group in which the ranks of `process_group` (None: all) communicate for a DCP call.

    A background call gets a separate group, because its messages must not mix with training, which may use the same
    group at the same time. A group that cannot exchange host memory, as with the backends ``xla`` and ``nccl``, is also
    replaced. The new group has the timeout of the original one. All ranks of the group must call this function in the
    same order.
    """
    group: Any = process_group if process_group is not None else dist.group.WORLD
    if purpose == "call" and torch.device("cpu") in group._device_types:
        return process_group
    key = id(group), purpose
    known = _call_groups.get(key)
    if known is None or known[0] is not group or known[1] not in distributed_c10d._world.pg_map:
        ranks = dist.get_process_group_ranks(group)
        # torch_xla replaces dist.new_group by a function without this argument.
        gloo_group = distributed_c10d.new_group(
            ranks, backend="gloo", timeout=_get_timeout(group), use_local_synchronization=True
        )
        known = _call_groups[key] = (group, gloo_group)
    return known[1]


def _get_timeout(process_group: Any) -> datetime.timedelta:
    """Return the timeout of a group (None: all ranks); torch's default if its backend does not provide it."""
    group: Any = process_group if process_group is not None else dist.group.WORLD
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    timeout: datetime.timedelta = getattr(options, "_timeout", distributed_c10d.default_pg_timeout)
    return timeout


_MISSING_KEY = re.compile(r"Missing key in checkpoint state_dict: (?P<key>.*?)\.?", re.DOTALL)
_SIZE_MISMATCH = re.compile(
    r"Size mismatch between saved (?:torch\.Size\()?(?P<stored>\[.*?\])\)? and current: (?:torch\.Size\()?"
    r"(?P<wanted>\[.*?\])\)? for (?P<key>.*)",
    re.DOTALL,
)
_KIND_MISMATCH = re.compile(
    r"Invalid checkpoint metadata for (?P<key>.*), expected BytesStorageMetadata but found ", re.DOTALL
)
PARTIAL_LOAD = "planner=DefaultLoadPlanner(allow_partial_load=True)"
"""The argument of `load` for state dicts with keys that are not stored."""

_NO_GROUP = "Default process group has not been initialized"
_SIZE_HINT = (
    "Make the model as it was at the save. If it is a part of a tensor-parallel rank, give the call "
    "xla_ckpt.dcp.sharded(state_dict, model, mesh)."
)
_NO_TENSOR_HINT = "Give a tensor of its shape to load into, as the state_dict() of the model has it."
_NO_MEMORY_HINT = "Give it some before the load: model.to_empty(device=...)."
_COLLECTIVE_ERROR = re.compile(r"gloo|ProcessGroup|[Cc]onnection (closed|reset|refused)|[Ss]ocket|Broken pipe")
"""Pattern in the messages of failed collectives, which are plain RuntimeErrors."""


@contextlib.contextmanager
def unify_rank_errors(
    operation: str,
    error_class: type[CheckpointError],
    path: str | None,
    list_stored_keys: Callable[[], Iterable[str]] = tuple,
) -> Iterator[None]:
    """Context manager around stock DCP calls: raises the same error on all ranks if any rank fails.

    Errors that DCP has gathered are raised as an error that is also a `CheckpointException`, with the same `failures`.
    DCP's exception, whose message contains the tracebacks of all ranks, is its cause.

    Args:
        operation: Name of the operation, for error messages.
        error_class: Class to which exceptions are converted, except errors of this library and OSErrors.
        path: The directory, for error messages.
        list_stored_keys: Lists the stored keys, for an error about a missing key.

    Raises:
        CheckpointError: If a rank fails.
        RankFailedError: If a rank is lost.
    """
    try:
        yield
    except CheckpointException as gathered:
        raise _to_dcp_error(
            _choose_error(gathered, operation, error_class, list_stored_keys()).at(path=path), gathered
        ) from gathered
    except CheckpointError as error:
        error.at(path=path)
        raise
    except Exception as error:
        if dist.is_available() and (isinstance(error, dist.DistError) or _COLLECTIVE_ERROR.search(str(error))):
            raise RankFailedError(
                f"{operation} failed, because a rank did not answer",
                path=path,
                hint="It died, hangs, or never made this call: all ranks must make the same calls.",
                details=str(error)[:2000],
            ) from error
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        raise as_checkpoint_error(error, operation, rank, error_class, path=path) from error


def _to_dcp_error(error: CheckpointError, gathered: CheckpointException) -> CheckpointError:
    """Convert an error to a class that is also DCP's, because programs written for stock DCP catch that one."""
    if not isinstance(error, CheckpointException):
        error.__class__ = _create_dcp_error_class(type(error))  # type: ignore[arg-type]  # classes have a hash
    error._failures = gathered.failures  # type: ignore[attr-defined]  # where `CheckpointException` has them
    return error


@functools.cache
def _create_dcp_error_class(error_class: type[CheckpointError]) -> type[CheckpointError]:
    """Return an error class that is also a `CheckpointException`, with the same name, under which it is sent to other
    ranks.
    """

    def reduce(self: CheckpointError) -> Any:
        return _rebuild_error, (error_class, self.problem), vars(self)

    body = {
        "__module__": error_class.__module__,
        "__doc__": error_class.__doc__,
        "__str__": error_class.__str__,
        "__reduce__": reduce,
    }
    return type(error_class.__name__, (error_class, CheckpointException), body)


def _rebuild_error(error_class: type[CheckpointError], problem: str) -> CheckpointError:
    return _create_dcp_error_class(error_class)(problem)  # type: ignore[arg-type]  # likewise


def _choose_error(
    gathered: CheckpointException, operation: str, error_class: type[CheckpointError], stored: Iterable[str]
) -> CheckpointError:
    """Return the error of the lowest rank with an error of this library, otherwise of the lowest rank with any
    error.
    """
    failures: dict[int, BaseException] = {rank: failure[0] for rank, failure in sorted(gathered.failures.items())}
    for error in failures.values():
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise error
    ours = [(rank, error) for rank, error in failures.items() if isinstance(error, CheckpointError)]
    if ours:
        rank, error = ours[0]
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        return error if len(failures) > 1 or not several else error.at(rank=rank)
    rank, first = next(iter(failures.items()))
    return _convert_planner_error(first, stored) or as_checkpoint_error(first, operation, rank, error_class)


def _convert_planner_error(error: BaseException, stored: Iterable[str]) -> CheckpointError | None:
    """Convert an error of stock planners about a state dict that does not fit; None for any other."""
    text = str(error)
    facts: dict[str, Any] = {}
    if (match := _MISSING_KEY.fullmatch(text)) is not None:
        keys = [*stored]
        facts = {
            "hint": f"{_describe_stored_neighbors(match['key'], keys)}{PARTIAL_LOAD} leaves out what is not stored."
        }
        text = f"Missing key in checkpoint state_dict: {match['key']}{suggest_leaf(match['key'], keys)}"
    elif (match := _SIZE_MISMATCH.fullmatch(text)) is not None:
        facts = {"expected": match["stored"], "found": match["wanted"], "hint": _SIZE_HINT}
    elif (match := _KIND_MISMATCH.match(text)) is not None:
        text, facts = "a tensor is stored under this key, and the state dict has none there", {"hint": _NO_TENSOR_HINT}
    elif text.startswith(_NO_GROUP):
        # Stock DCP replaces a tensor on the meta device by one on the device of the process group.
        return IncompatibleCheckpointError(
            "a tensor on the meta device has no memory to load into", hint=_NO_MEMORY_HINT
        )
    else:
        return None
    problem = IncompatibleCheckpointError(text, leaf=match["key"], **facts)
    problem.__cause__ = error
    return problem


def _describe_stored_neighbors(key: str, stored: Iterable[str]) -> str:
    """Describe the stored keys next to a missing key, as a sentence; empty if they are unknown.

    >>> _describe_stored_neighbors("optimizer.step", ["model.w", "optim.step"])
    'Stored there: model, optim. '
    >>> _describe_stored_neighbors("model.v", ["model.w"])
    'Stored below model: w. '
    """
    parts, names = key.split("."), [name.split(".") for name in stored]
    for depth in reversed(range(len(parts))):
        if beside := dict.fromkeys(name[depth] for name in names if name[:depth] == parts[:depth] and name[depth:]):
            where = f"below {'.'.join(parts[:depth])}" if depth else "there"
            return f"Stored {where}: {format_leaves(list(beside))}. "
    return ""
