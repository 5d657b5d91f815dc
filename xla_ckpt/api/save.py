"""Saving: from a program's objects to a save in flight."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from xla_ckpt.api.taking import Taking
from xla_ckpt.engine.background import MISTAKES, SAVES, OnError, SaveHandle, install_exit_hook
from xla_ckpt.engine.cancellation import Cancellation
from xla_ckpt.engine.collector import collector_paused
from xla_ckpt.engine.ending import end
from xla_ckpt.engine.phases import STALL, WAIT, Phases
from xla_ckpt.engine.report import SaveReport
from xla_ckpt.engine.save import Part, Save, Stale, Writing
from xla_ckpt.engine.trace import Trace
from xla_ckpt.errors import CheckpointError, StorageError, UnsupportedStateError, UsageError
from xla_ckpt.job.call import Job
from xla_ckpt.job.current import TIMEOUT, current_job
from xla_ckpt.job.opening import Call
from xla_ckpt.job.verdict import as_checkpoint_error
from xla_ckpt.layouts.base import Layout
from xla_ckpt.layouts.registry import named, saved
from xla_ckpt.options import check_choice, known_options
from xla_ckpt.plan.merge import Replicas
from xla_ckpt.plan.parity import Parity
from xla_ckpt.sharding.mesh import Mesh
from xla_ckpt.sharding.placement import Placement
from xla_ckpt.sharding.rules import Rules
from xla_ckpt.snapshot.arena import BUDGET_BYTES, POOL
from xla_ckpt.snapshot.take import Mode
from xla_ckpt.state.describe import Description, describe
from xla_ckpt.state.guard import GUARD
from xla_ckpt.state.members import Objects, State, Tree
from xla_ckpt.storage.base import Store
from xla_ckpt.storage.door import PathLike, store_at
from xla_ckpt.storage.trace_file import trace_file
from xla_ckpt.tags.names import check_tag
from xla_ckpt.tags.orbax_import import ORBAX
from xla_ckpt.tags.retention import check_keep

logger = logging.getLogger(__name__)


@known_options
def save_checkpoint(
    path: PathLike,
    tag: str,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    user_content: Any = None,
    num_workers: int = 8,
    use_xser: bool = False,
    num_kept_ckpts: int | None = None,
    async_save: bool = False,
    zero1_optimizer: bool = False,  # noqa: ARG001  # neuronx-distributed's signature; it is found out here
    *,
    extras: Mapping[str, Any] | None = None,
    mesh: Mesh | str | None = None,
    shardings: Rules | None = None,
    pinned: bool = False,
    layout: str | Sequence[str] | None = None,
    replicas: Replicas = "equal",
    on_error: OnError = "raise",
    stale: Stale = "warn",
    parity: Parity | None = None,
    snapshot: Mode = "host",
    snapshot_budget: int = BUDGET_BYTES,
    progress: bool | None = None,
    trace: PathLike | None = None,
    timeout: float = TIMEOUT,
) -> SaveHandle:
    """Save a training state as one tag, completely or not at all.

    All ranks of a job call it with the same arguments. An existing tag of the same name is replaced; the old one stays
    until the new one is committed.

    Args:
        path: Root directory; made if absent.
        tag: Name of the checkpoint: any string that is a safe file name, such as ``step_10``.
        model: A module, or a dict of arrays.
        optimizer: An optimizer, a dict of optimizers of this model, or a dict of arrays and plain values. Its state is
            stored by parameter *name*, taken from `model`; the names of several optimizers are not stored.
        scheduler: A learning rate scheduler, or a dict.
        user_content: Any Python value; rank 0's is stored. Plain values are stored as typed JSON, arrays as arrays;
            other objects are pickled, with a warning, and need ``trust_pickle=True`` to load.
        num_workers: Threads that write, at most.
        use_xser: Write neuronx-distributed's xser layout, with a manifest beside it: short for ``layout="xser"``.
        num_kept_ckpts: Keep this many of the newest tags that are not pinned, and delete older ones after the commit;
            None keeps all.
        async_save: Return as soon as the state is frozen, and write in the background.
        zero1_optimizer: Accepted for compatibility with neuronx-distributed; a ZeRO-1 optimizer is recognised.
        extras: Named objects with ``state_dict`` and ``load_state_dict`` (data loaders, `RNGState`), or dicts. One
            that differs from rank to rank is wrapped in `PerRank`.
        mesh: How the ranks are arranged; by default taken from an initialised ``parallel_state``, else pure data
            parallelism.
        shardings: Rules ``(regular expression, spec)`` for arrays that do not say themselves how they are split:
            ``(r"up_proj", ("tp", None))`` splits dim 0 over the mesh axis ``tp``. The first expression that is found
            in a leaf path or parameter name counts; optimizer state follows its parameter.
        pinned: Exempt this tag from retention, now and later.
        layout: ``"native"``; ``"xser"`` or ``"pt"``, which neuronx-distributed reads, too; ``"smp"``, which SageMaker
            model parallel reads; ``"dcp"``, which torch.distributed.checkpoint reads, or ``"torchtitan"``, the same
            under torchtitan's keys; or several of them, of which the first that can hold the state is written.
        replicas: ``"equal"``: what several ranks hold alike is compared, by samples, and a difference is an error.
            ``"first"``, for a job whose replicas have drifted apart: the first replica of each array is stored, whole,
            and the rank that has it writes all of it. What differed is logged, and recorded in the tag. Parts of an
            array that nobody declared as such look like drifted replicas, and all but the first would be lost.
        on_error: What happens if the save fails: ``"raise"``; ``"warn"``, which logs a warning, so that a run goes on
            that can wait for its next save; or a function, which is called with the error, for an asynchronous save
            on a thread of this library. With the last two nothing is raised but by ``handle.result()``, and
            ``handle.error`` has the error. Mistakes of the program (`UsageError`, `UnsupportedStateError`,
            `InvalidTagError`) are raised in any case. All ranks say the same.
        stale: What happens if all arrays of the model have the bytes of the newest tag, although something else in the
            state, or the number in the tag's name, says that training went on: ``"warn"``, ``"raise"`` (a
            `SaveError`; nothing is committed) or ``"ignore"``.
        parity: What the tag is to survive (docs/repair.md): ``"block"``, a damaged block of 1 MiB in each of its files,
            or ``"file"``, that and the loss of one file. `repair` gives the bytes back. The files are read once more
            for ``"block"``, and twice more for ``"file"``, which takes as much room as the largest file.
        snapshot: How an asynchronous save freezes memory that the program writes to (docs/snapshots.md): ``"host"``
            copies it to host memory before the call returns; ``"device"`` clones what is on an accelerator there, and
            transfers the clones in the background; ``"overlap"`` copies parameters and optimizer state in the
            background, and has the next optimizer step wait for that. XLA's and jax's arrays are never copied.
        snapshot_budget: Host memory for what is copied in the background (bytes); the state may be larger.
        progress: Show a progress bar: True, False, or None for only if it takes long, on a terminal.
        trace: Where a trace of the save goes that Perfetto shows: a file, or a directory that is there, in which each
            rank makes a file of its own. By default the directory that ``XLA_CKPT_TRACE`` names in the environment, if
            it does (docs/reports.md).
        timeout: Seconds that a rank which is done waits for the others before all that are left give up.

    Returns:
        The save; finished already unless `async_save`.

    Raises:
        UsageError: There is nothing to save, or an argument is not what its place is for. Nothing was written.
        DivergentReplicasError: Replicas differ, and `replicas` is ``"equal"``. The tag is as it was before.
        ChangedStateError: The program wrote to a tensor that ``"overlap"`` had not copied yet, and nothing had it wait.
            The tag is as it was before.
        NotDurableError: The tag is committed, and a loss of power may undo that: the storage refused to make its name
            durable, and to take it back.
        CheckpointError: The save failed (the same error on all ranks), or an asynchronous save before it on the same
            path did. The tag is as it was before.
    """
    return _save(
        path,
        tag,
        Objects(model=model, optimizer=optimizer, scheduler=scheduler, user_content=user_content, extras=extras or {}),
        _Options(
            layouts=_layouts(layout, use_xser=use_xser),
            workers=num_workers,
            num_kept=num_kept_ckpts,
            taking=Taking(mode=snapshot, waits=not async_save, budget=snapshot_budget),
            mesh=mesh,
            shardings=shardings,
            pinned=pinned,
            replicas=replicas,
            on_error=on_error,
            stale=stale,
            parity=parity,
            progress=progress,
            trace=trace,
            timeout=timeout,
        ),
    )


@known_options
def save(
    path: PathLike,
    tag: str,
    tree: Any,
    *,
    num_workers: int = 8,
    use_xser: bool = False,
    num_kept_ckpts: int | None = None,
    async_save: bool = False,
    mesh: Mesh | str | None = None,
    shardings: Rules | None = None,
    pinned: bool = False,
    layout: str | Sequence[str] | None = None,
    replicas: Replicas = "equal",
    on_error: OnError = "raise",
    stale: Stale = "warn",
    parity: Parity | None = None,
    snapshot: Mode = "host",
    snapshot_budget: int = BUDGET_BYTES,
    progress: bool | None = None,
    trace: PathLike | None = None,
    timeout: float = TIMEOUT,
) -> SaveHandle:
    """Save any tree of containers, arrays (torch, XLA, numpy, jax) and plain values as one tag.

    The arguments, the result and the errors are those of `save_checkpoint`, which makes such a tree of its arguments.
    In a job of several ranks the plain values are the same on all of them.

    Raises:
        UnsupportedStateError: Something in the tree cannot be stored; nothing was written.
        UsageError: The tree is None or an empty container; nothing was written.
    """
    return _save(
        path,
        tag,
        Tree(tree),
        _Options(
            layouts=_layouts(layout, use_xser=use_xser),
            workers=num_workers,
            num_kept=num_kept_ckpts,
            taking=Taking(mode=snapshot, waits=not async_save, budget=snapshot_budget),
            mesh=mesh,
            shardings=shardings,
            pinned=pinned,
            replicas=replicas,
            on_error=on_error,
            stale=stale,
            parity=parity,
            progress=progress,
            trace=trace,
            timeout=timeout,
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """What a caller may say of a save, checked.

    Raises (on construction):
        UsageError: There is no such choice.
    """

    layouts: Sequence[Layout]
    workers: int
    num_kept: int | None
    taking: Taking
    mesh: Mesh | str | None
    shardings: Rules | None
    pinned: bool
    replicas: Replicas
    on_error: OnError
    stale: Stale
    parity: Parity | None
    progress: bool | None
    trace: PathLike | None
    timeout: float

    def __post_init__(self) -> None:
        for name, choice, choices in (
            ("replicas", self.replicas, get_args(Replicas)),
            ("stale", self.stale, get_args(Stale)),
            ("parity", self.parity, (None, *get_args(Parity))),
        ):
            check_choice(name, choice, choices)
        if not callable(self.on_error):
            check_choice("on_error", self.on_error, ("raise", "warn"), " or a function")
        self.taking.check()

    def shown(self, job: Job) -> bool | None:
        """Whether this rank shows a progress bar; None decides by itself."""
        return False if not self.taking.waits and self.progress is None else job.shows(self.progress)

    def call(self, store: Store, tag: str, content: Objects | Tree, mesh: Mesh) -> Call:
        """The save as far as all ranks have to ask for the same."""
        return Call.of(
            "save_checkpoint" if isinstance(content, Objects) else "save",
            path=store.path,
            tag=tag,
            mesh=str(mesh),
            objects=content.given,
            layout=", ".join(layout.name for layout in self.layouts),
            num_kept_ckpts=self.num_kept,
            pinned=self.pinned,
            async_save=not self.taking.waits,
            replicas=self.replicas,
            parity=self.parity,
            stale=self.stale,
            on_error="a function" if callable(self.on_error) else self.on_error,
        )


def _save(path: PathLike, tag: str, content: Objects | Tree, options: _Options) -> SaveHandle:
    """A save, from the call to the thread that writes: freeze the state, then start.

    Whatever is raised from here, by this library or by a signal handler, the save has ended or is given up, and reads
    none of the program's memory.
    """
    began = time.perf_counter()
    store, file = store_at(path), trace_file(options.trace)
    phases = Phases(keep=file is not None)
    install_exit_hook()
    cancellation = Cancellation()
    handle = SaveHandle(store.path, tag, cancellation)
    part: Part | CheckpointError | None = None
    refused: BaseException | None = None
    try:
        with SAVES.turn(store.path), ORBAX.resting():
            untold = SAVES.before(store.path)
            phases.keep(WAIT, began, time.perf_counter(), about="for the save before")
            job = current_job(store.path, options.mesh, doing="save", timeout=options.timeout)
            rank, world = job.exchange.rank, job.exchange.size
            traced = None if file is None else Trace(file=file, doing="save", rank=rank, world=world)
            try:
                if untold is not None:
                    raise untold
                part = _part(store, tag, content, job.placement, phases, options)
            except BaseException as error:
                # The other ranks wait for this one: they hear of it through the save's verdict, and so does the caller.
                part = as_checkpoint_error(error, "preparing", rank, path=store.path, tag=tag)
                if not isinstance(error, Exception) or (
                    world == 1 and (options.on_error == "raise" or isinstance(part, MISTAKES))
                ):
                    refused = error
            stall = _stalled(phases, began)
            if refused is None or world > 1:
                SAVES.start(
                    handle,
                    Save(
                        store=store,
                        tag=tag,
                        job=job,
                        part=part,
                        call=options.call(store, tag, content, job.placement.mesh),
                        pinned=options.pinned,
                        num_kept=options.num_kept,
                        replicas=options.replicas,
                        stale=options.stale,
                        parity=options.parity,
                        workers=max(1, options.workers),
                        shown=options.shown(job),
                        phases=phases,
                        stall=stall,
                        trace=traced,
                        cancellation=cancellation,
                    ),
                    options.on_error,
                )
        if refused is not None:
            if world == 1:
                # Only now: a function of the program that hears of it may save on the same path.
                end(_refused(store, tag, stall, phases, refused), phases, traced)
            raise refused
        if options.taking.waits:
            handle.finish()
        return handle
    except BaseException as error:
        handle.give_up(error)
        raise
    finally:
        del part, refused  # or this frame and the error's traceback would keep each other, and the state, in memory


def _stalled(phases: Phases, began: float) -> float:
    """Seconds that the caller has waited by now."""
    now = time.perf_counter()
    phases.keep(STALL, began, now)
    return now - began


def _refused(store: Store, tag: str, stall: float, phases: Phases, error: BaseException) -> SaveReport:
    """The report of a save that was not even begun."""
    return SaveReport(
        path=store.path,
        tag=tag,
        sequence=0,
        nbytes=0,
        files=0,
        seconds=0.0,
        stall=stall,
        phases=phases.report(),
        error=error,
    )


def _prepare(store: Store) -> None:
    """Fail early where a save could not even begin."""
    try:
        store.prepare()
    except (FileExistsError, NotADirectoryError) as error:
        made = StorageError.of(error, "making the root directory", path=store.path)
        made.hint = "A file has this name, or lies on the way to it: pass the path of a directory."
        raise made from error
    except OSError as error:
        made = StorageError.of(error, "making the root directory", path=store.path)
        made.hint = "Nothing was written. Pass a directory in which this user may make files."
        raise made from error


def _part(
    store: Store, tag: str, content: Objects | Tree, placement: Placement, phases: Phases, options: _Options
) -> Part:
    """What this rank saves. Mistakes of the program are found before the root directory is made."""
    check_tag(tag, store.path)
    check_keep(options.num_kept)
    with phases.timed("describe"), collector_paused():
        state = content.state(placement)
    if placement.rank == 0:
        _prepare(store)
    with collector_paused():
        return _freeze(state, placement, phases, options)


def _freeze(state: State, placement: Placement, phases: Phases, options: _Options) -> Part:
    """What the caller of an asynchronous save waits for: the state described, and its bytes frozen."""
    with phases.timed("describe"):
        structure = any(layout.pickles for layout in options.layouts)
        description = describe(
            state,
            placement,
            options.shardings,
            structure=structure,
            takes_apart=all(layout.takes_apart for layout in options.layouts),
            replicas=options.replicas,
        )
        writing = _first_that_can(options.layouts, description)
    with phases.timed("snapshot"):
        snapshot = options.taking.take(description, writing, phases)
    return Part(
        leaves=description.leaves,
        writing=writing,
        snapshot=snapshot,
        skeleton=description.skeleton,
        aliases=description.aliases,
        objects=description.objects,
        speaks=description.speaks,
        alone=state.alone,
        parts=description.parts,
    )


def _layouts(layout: str | Sequence[str] | None, *, use_xser: bool) -> tuple[Layout, ...]:
    """The layouts that a caller wants, in order of preference.

    Raises:
        UsageError: There is no such layout, or `use_xser` contradicts it.
    """
    wanted = ("xser" if use_xser else "native",) if layout is None else layout
    names = (wanted,) if isinstance(wanted, str) else tuple(wanted)
    if not names:
        raise UsageError("there is no such layout", expected=f"one of {', '.join(saved())}", found=str(layout))
    if use_xser and names[0] != "xser":
        raise UsageError("use_xser=True asks for another layout than layout=", expected="xser", found=str(layout))
    return tuple(named(name, among=saved()) for name in names)


def _first_that_can(layouts: Sequence[Layout], description: Description) -> Writing:
    """How the first of the layouts that can hold the state writes it.

    Raises:
        UnsupportedStateError: None of them can.
    """
    problem: UnsupportedStateError | None = None
    for layout in layouts:
        try:
            writing = layout.writing(description)
        except UnsupportedStateError as error:
            problem = problem or error
            continue
        if problem is not None:
            logger.warning("the %s layout is written in place of %s: %s", layout.name, layouts[0].name, problem)
        return writing
    assert problem is not None
    raise problem


def finalize_checkpoint() -> None:
    """Wait for all saves in flight, those of `xla_ckpt.dcp` too, and free the memory that was kept for snapshots.

    Raises:
        CheckpointError: One of them failed, and nobody has been told yet. (Futures tell of those of `xla_ckpt.dcp`.)
    """
    try:
        SAVES.wait()
    finally:
        POOL.free()
        GUARD.close()
