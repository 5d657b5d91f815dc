"""`save`, `load` and `async_save` with DCP's signatures, on this library's engine.

The orchestration is stock DCP's, with the program's planners, so that what they do stays as it was. Storage and staging
are this library's, and what fails on one rank is raised on all of them, as one of its errors.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager
from typing import Any, TypeVar

from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager as StockStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.checkpoint.storage import StorageReader as StockReader
from torch.distributed.checkpoint.storage import StorageWriter as StockWriter
from torch.distributed.checkpoint.utils import _api_bc_check

from xla_ckpt.dcp.failures import one_error
from xla_ckpt.dcp.groups import CallRanks
from xla_ckpt.dcp.in_flight import DcpSave, in_background, wait_for
from xla_ckpt.dcp.named import CheckpointId, Named, path_of_storage, required_id, storage_for
from xla_ckpt.dcp.reader import StorageReader
from xla_ckpt.dcp.stager import AsyncStager
from xla_ckpt.dcp.states import FailingLoad, FailingSave, fresh_optimizers, install, reads_once, saved_states, states_of
from xla_ckpt.dcp.states import LoadPlanner as OurLoadPlanner
from xla_ckpt.dcp.writer import StorageWriter
from xla_ckpt.engine.garbage_collection import collector_paused
from xla_ckpt.errors import CheckpointError, LoadError, SaveError, UsageError, from_json, naming
from xla_ckpt.job.call import Call
from xla_ckpt.job.peers import check_can_meet
from xla_ckpt.job.round import LEAD
from xla_ckpt.job.verdict import as_checkpoint_error
from xla_ckpt.keywords import known_options, taking_values
from xla_ckpt.logs import get_logger
from xla_ckpt.options import SaveOptions
from xla_ckpt.storage.undisturbed import Undisturbed
from xla_ckpt.tree.path import listed

logger = get_logger(__name__)

_Call = TypeVar("_Call", bound=Callable[..., Any])


def _takes_storage_second(call: _Call) -> _Call:
    """Take a writer or reader as the second argument, too, with a warning: stock does, for programs of torch 2.2."""
    wrapped: _Call = _api_bc_check(call)  # type: ignore[no-untyped-call]
    return wrapped


@_takes_storage_second
@taking_values(options=SaveOptions)
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
    """Save a state dict as a directory of DCP's; arguments and result are those of DCP's `save`.

    The directory appears complete or not at all, with the digests of all its bytes, and replaces an older one in one
    step. A `storage_writer` of another class decides itself what it does.

    Args:
        state_dict: As for DCP: tensors, DTensors, ShardedTensors, `Stateful` objects, plain values, nested or not.
        checkpoint_id: The directory.
        storage_writer: Writes in the place of this library's `StorageWriter`.
        planner: DCP's, by default `DefaultSavePlanner`.
        process_group: The ranks that save; by default all.
        no_dist: Whether this process saves alone.
        use_collectives: False is not supported.
        options: As for `StorageWriter`, which has them where a `storage_writer` is given.

    Raises:
        CheckpointError: The save failed, and there is what was there before; the same error on all ranks. It is also
            DCP's `CheckpointException`, whose `failures` are the errors of all ranks.
        SaveError: For instance, another job has saved the same checkpoint since this save began. That one stays.
    """
    writer = _writer(storage_writer, checkpoint_id, options)
    path = path_of_storage(writer)
    _check(state_dict, path, no_dist)
    wait_for(path)
    with one_error("saving", SaveError, path):
        ranks = CallRanks.of(process_group, "call", no_dist=no_dist)
        ranks.check_same(_saving(path, writer))
    states, problem = saved_states(state_dict, ranks.rank)
    planner = planner if problem is None else FailingSave(problem)
    work = functools.partial(_save, states, writer, planner, ranks, use_collectives)
    return DcpSave(path=path, writer=writer, rank=ranks.rank, world=ranks.world, save=work).run()[0]


@taking_values(options=SaveOptions)
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
    """Save a state dict in the background; arguments and result are those of DCP's `async_save`.

    When it returns, the state is frozen (`AsyncStager`), and training may go on. Saves in the background are done one
    after the other. An earlier one into the same directory is waited for.

    Args:
        async_checkpointer_type: ``THREAD``; ``PROCESS`` is not supported.
        async_stager: Freezes the state in the place of this library's `AsyncStager`.

    The other arguments are those of `save`.

    Returns:
        A future of what `save` returns; its errors are those of `save`. As in DCP, an `AsyncSaveResponse` if the stager
        returns a future.

    Raises:
        UsageError: An argument makes no sense.
        CheckpointError: The state cannot be frozen, in a job of one process. In others the future of all ranks has the
            error.
    """
    began = time.perf_counter()
    if async_checkpointer_type != AsyncCheckpointerType.THREAD:
        raise UsageError(
            "saves are done by a thread, not by a process",
            found=str(async_checkpointer_type),
            hint="Leave async_checkpointer_type out: the thread does nearly all of its work without the GIL.",
        )
    writer = _writer(storage_writer, checkpoint_id, options)
    path = path_of_storage(writer)
    _check(state_dict, path, no_dist)
    wait_for(path)
    with one_error("saving", SaveError, path):
        ranks = CallRanks.of(process_group, "background", no_dist=no_dist)
    states, problem = saved_states(state_dict, ranks.rank)
    staged: Any = {}
    if problem is None:
        try:
            stager = AsyncStager() if async_stager is None else async_stager
            staged = stager.stage(states)
            # A stager of the program's may go on copying after that: until it says so, its memory has anything in it.
            if getattr(stager, "should_synchronize_after_execute", False):
                stager.synchronize_staging()
        except Exception as error:
            # The other ranks have begun the save: it takes place, and all of them hear of the error.
            problem = as_checkpoint_error(error, "staging", ranks.rank, path=path)
    if problem is not None and ranks.world == 1:
        raise problem

    def work() -> Metadata:
        ready = staged.result() if isinstance(staged, Future) else staged
        with one_error("saving", SaveError, path):
            ranks.check_same(_saving(path, writer))
        return _save(ready, writer, planner if problem is None else FailingSave(problem), ranks, use_collectives)

    stall = time.perf_counter() - began
    done = in_background(DcpSave(path=path, writer=writer, rank=ranks.rank, world=ranks.world, save=work, stall=stall))
    if not isinstance(staged, Future):
        return done
    staging: Future[None] = Future()
    staged.add_done_callback(functools.partial(_pass_on, staging))
    return AsyncSaveResponse(staging_completion=staging, upload_completion=done)  # type: ignore[arg-type]


@_takes_storage_second
@known_options
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
    """Load a directory of DCP's into a state dict, in place; arguments and semantics are those of DCP's `load`.

    Tensors are overwritten, also those of another element type, which DCP converts without a word; other values are
    replaced; `Stateful` objects get their state by `load_state_dict`. No tensor is changed anywhere before all ranks
    have verified the bytes that they need.

    Args:
        state_dict: What is to be loaded. Keys that are not in it are not loaded.
        checkpoint_id: The directory: one of `save`, of stock DCP, or a tag of this library in the layout ``dcp``.
        storage_reader: Reads in the place of this library's `StorageReader`.
        planner: DCP's, by default `DefaultLoadPlanner`.
        process_group: The ranks that load; by default all.
        no_dist: Whether this process loads alone.
        trust_pickle: Whether values that are no tensors may be of any class. Loading them may run code.

    Raises:
        NoCheckpointError: There is none.
        CorruptCheckpointError: It is damaged. Nothing was changed.
        IncompatibleCheckpointError: A key is missing in it, or a shape differs. Nothing was changed.
        UntrustedObjectError: A value is of a class that is not loaded without `trust_pickle`. Nothing was changed.
        LoadError: An object did not take its state.
    """
    if storage_reader is None:
        reader: StockReader = StorageReader(required_id(checkpoint_id), trust_pickle=trust_pickle)
    else:
        reader = storage_for(storage_reader, checkpoint_id)
        if trust_pickle:
            raise UsageError(
                "trust_pickle= has no effect beside storage_reader=",
                hint="Give it to the reader: StorageReader(path, trust_pickle=True).",
            )
    path = path_of_storage(reader)
    _check(state_dict, path, no_dist)
    wait_for(path)
    with one_error("loading", LoadError, path):
        ranks = CallRanks.of(process_group, "call", no_dist=no_dist)
        ranks.check_same(Call.of("dcp.load", path or "", trust_pickle=trust_pickle))
    states, problem = states_of(dict(sorted(state_dict.items())), ranks.rank, LoadError)
    if isinstance(reader, StorageReader) and reader.read_once is None:
        reader.read_once = reads_once(states)
    # From the first tensor that is overwritten to the last value, no signal handler of the program comes between.
    stored = reader.keys if isinstance(reader, StorageReader) else tuple
    with one_error("loading", LoadError, path, stored), Undisturbed() as calm, _planning(reader):
        if isinstance(reader, StorageReader):
            reader.overwriting = calm.begin
        try:
            state_dict_loader.load(
                states,
                storage_reader=reader,
                planner=(planner or OurLoadPlanner()) if problem is None else FailingLoad(problem),
                process_group=ranks.group,
                no_dist=no_dist,
            )
        finally:
            if isinstance(reader, StorageReader):
                reader.close()
        own_problem = install(state_dict, states, ranks.rank)
        problems = ranks.gathered(None if own_problem is None else own_problem.to_json())
        if own_problem is not None and ranks.world == 1:
            raise own_problem
        if (first := next((p for p in problems if p is not None), None)) is not None:
            raise from_json(first) from own_problem
    if ranks.rank == 0 and (fresh := [*fresh_optimizers(states, stored())]):
        logger.warning(
            "what is stored of the state of %s was not loaded: an optimizer has none before its first step, and so its "
            "state dict asked for none. xla_ckpt.load_checkpoint(path, model=..., optimizer=...) loads it",
            listed(fresh),
        )


def _saving(path: str | None, writer: StockWriter) -> Call:
    """A save as far as all ranks have to ask for the same."""
    if not isinstance(writer, StorageWriter):
        return Call.of("dcp.save", path or "")
    return Call.of("dcp.save", path or "", replicas=writer.replicas, overwrite=writer.overwrite)


def _save(
    states: dict[str, Any], writer: StockWriter, planner: SavePlanner | None, ranks: CallRanks, use_collectives: bool
) -> Metadata:
    try:
        with one_error("saving", SaveError, path_of_storage(writer)), _planning(writer):
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
            raise  # DCP has told all ranks
        writer.ended(error, ranks.seconds * (1 - LEAD))
        with closing(StorageReader(writer.checkpoint_id)) as reader:
            return reader.read_metadata()
    finally:
        if isinstance(writer, StorageWriter):
            writer.abandon()  # nothing, if it was committed


@contextmanager
def _planning(storage: StockReader | StockWriter) -> Iterator[None]:
    """Pause the collector until this library's reader or writer has planned: stock makes a dozen objects a tensor."""
    with ExitStack() as pause:
        if isinstance(storage, Named):
            pause.enter_context(collector_paused())
            storage.planned = pause.close
        yield


def _writer(writer: StockWriter | None, checkpoint_id: CheckpointId, options: SaveOptions | None) -> StockWriter:
    if writer is None:
        return StorageWriter(required_id(checkpoint_id), options=options)
    if options is not None:
        raise UsageError(
            "options= has no effect beside storage_writer=",
            hint="Give it to the writer: StorageWriter(path, options=...).",
        )
    return storage_for(writer, checkpoint_id)


def _check(state_dict: Any, path: str | None, no_dist: bool) -> None:
    """Refuse what is no state dict, and calls of ranks that cannot meet.

    Each such rank would take itself for the whole job, and the last one would win.
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
        with naming(path=path):
            check_can_meet()


def _pass_on(to: Future[None], staged: Future[Any]) -> None:
    error = staged.exception()
    if error is None:
        to.set_result(None)
    else:
        to.set_exception(error)
