"""Loading: from a tag to a program's objects, or to a new tree."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from xla_ckpt.api.call_words import without_a_model
from xla_ckpt.api.load_steps import Load
from xla_ckpt.api.tags import expect_commit, located, near_and_far
from xla_ckpt.api.wish import LoadWish
from xla_ckpt.arrays.torch_objects import outside_inference_mode
from xla_ckpt.engine.background import SAVES, install_exit_hook
from xla_ckpt.engine.disks import Disks, DiskWord, united_disks
from xla_ckpt.engine.ending import end
from xla_ckpt.engine.phases import LOAD, LOAD_PHASES, Phases, as_line, rate
from xla_ckpt.engine.report import LoadReport
from xla_ckpt.engine.trace import Trace, traced
from xla_ckpt.engine.unchanged import forget_saved
from xla_ckpt.engine.upload import UPLOADS, Uploader
from xla_ckpt.errors import naming
from xla_ckpt.job.call import Call
from xla_ckpt.job.current import current_job, job_alone
from xla_ckpt.job.job import Job
from xla_ckpt.job.verdict import agreed
from xla_ckpt.keywords import taking_values
from xla_ckpt.logs import get_logger
from xla_ckpt.options import LoadOptions, chosen
from xla_ckpt.sharding.mesh import Mesh
from xla_ckpt.sharding.rules import Rules, parse_rules
from xla_ckpt.state.guard import GUARD
from xla_ckpt.state.members import Like, Objects
from xla_ckpt.storage.door import PathLike, full_path
from xla_ckpt.storage.pool import READERS
from xla_ckpt.storage.trace_file import trace_file

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What `load_checkpoint` returns; the objects that it was given have their state by then."""

    user_content: Any
    """The `user_content` of the save. Where none was saved, a dict of the plain values beside the objects, such as the
    step in another library's checkpoint; None if there is neither."""

    report: LoadReport
    """Which tag it was, what was left out, and where the time went."""

    @property
    def tag(self) -> str:
        """Which tag it was: that of the report."""
        return self.report.tag

    def _repr_html_(self) -> str:
        return _html("user_content", self.user_content, self.report)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What `restore` returns."""

    tree: Any
    """The restored tree."""

    report: LoadReport
    """Which tag it was, and where the time went."""

    @property
    def tag(self) -> str:
        """Which tag it was: that of the report."""
        return self.report.tag

    def _repr_html_(self) -> str:
        return _html("tree", self.tree, self.report)


def _html(name: str, value: Any, report: LoadReport) -> str:
    """What a notebook shows of a load: the outline of a value that may be large, and the report."""
    from xla_ckpt.tables import html, render

    return f"{html.fragment(render.outline(name, value))}\n{report._repr_html_()}"


@taking_values(options=LoadOptions)
def load_checkpoint(
    path: PathLike,
    tag: str | None = None,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    num_workers: int = 8,
    strict: bool = True,
    *,
    cast: bool = False,
    extras: Mapping[str, Any] | None = None,
    mesh: Mesh | str | None = None,
    shardings: Rules | None = None,
    trust_pickle: bool = False,
    options: LoadOptions | None = None,
) -> Loaded:
    """Load a tag into the given objects, each of them optional: with none it gives the user content back, as
    neuronx-distributed's does, and logs a warning if there is none (`restore` makes all that is stored anew).

    Everything is checked before anything is changed: names, shapes and dtypes first, then the digests of all bytes
    that would be overwritten in place.

    Args:
        path: Root directory; one that neuronx-distributed, optimum-neuron, torch.distributed.checkpoint or SageMaker
            model parallel wrote to will do, too (docs/from-nxd.md, docs/from-dcp.md). Without a tag it may be the path
            of a tag itself (DCP's `checkpoint_id`); of a file that torch.save wrote (docs/torch-files.md); or what a
            program gave to ``smp.save``, which names all parts: ``checkpoint.pt`` for ``checkpoint.pt_0_0`` and its
            peers (``checkpoint.pt_*`` if there is a full file of that name, too).
        tag: Which checkpoint; None takes the newest. A newest one that turns out to be damaged is reported in the log,
            and the newest good one is taken instead. If another job replaces or removes it meanwhile, the newest is
            looked for again.
        model: A module, or a dict: its arrays are overwritten; an empty dict receives everything.
        optimizer: An optimizer (state is matched by parameter name), or a dict of optimizers of this model, or a dict.
        scheduler: A learning rate scheduler, or a dict.
        num_workers: Threads that read, at most.
        strict: False loads what fits, and logs what does not. It is an error if no array fits on any rank. A user
            content with a class that this program does not have is an error, or left out and None.
        cast: Round floating-point values to the element types of the given objects, where those differ from what is
            stored, as torch does. Such an array takes host memory for its stored values, too, until the load is done.
            Optimizer state that the optimizer does not have yet keeps its stored type.
        extras: Named objects with ``load_state_dict``, as given to `save_checkpoint`.
        mesh: How the ranks of this job are arranged now, which need not be how they were; by default found out.
        shardings: Rules for arrays that do not say themselves how they are split now (see `save_checkpoint`).
        trust_pickle: Load pickled objects, which can run any code. Plain values never need it.
        options: How the load goes about its work; by default those of `default_options`.

    Returns:
        The `user_content` of the save, and a report: which tag was loaded, and what that took. Where none was saved, it
        is a dict of the plain values in `extras` that `extras=` does not ask for, such as the step in a directory of
        DCP's or in a file of torch.save; None if there are none. What has arrays in it is not among them.

    Raises:
        NoCheckpointError: There is no such tag, or none at all.
        IncompatibleCheckpointError: Something does not fit (and `strict`). Nothing was changed.
        CorruptCheckpointError: The tag is damaged. Nothing was changed.
        ChangedTagError: Another job replaced or removed the tag meanwhile. Nothing was changed.
        LoadError: The `load_state_dict` of an object raised an exception, on some rank. Nothing was changed, but for a
            module that is loaded through code of its own, and what its `details` name.
        UntrustedObjectError: It holds pickled objects, and `trust_pickle` is False. Nothing was changed.
        UsageError: An argument is not what its place is for, or is on the meta device. Nothing was changed.
    """
    content = Objects(model=model, optimizer=optimizer, scheduler=scheduler, extras=extras or {})
    forget_saved()  # or buffers that are replaced now would be held beside the new ones
    value, report = _load(
        path,
        tag,
        content,
        LoadWish(
            mesh=mesh,
            rules=parse_rules(shardings),
            strict=strict,
            cast=cast,
            workers=max(1, num_workers),
            trust=trust_pickle,
            options=chosen(LoadOptions, options),
        ),
    )
    return Loaded(user_content=value, report=report)


@taking_values(options=LoadOptions)
def restore(
    path: PathLike,
    tag: str | None = None,
    like: Any = None,
    *,
    cast: bool = False,
    num_workers: int = 8,
    mesh: Mesh | str | None = None,
    shardings: Rules | None = None,
    trust_pickle: bool = False,
    options: LoadOptions | None = None,
) -> Restored:
    """Restore a tag, or a part of it, as a new tree. Nothing that exists is changed.

    Args:
        path: Root directory; or, as for `load_checkpoint`, the path of a tag itself, a file of torch.save, or the
            name of a set of SageMaker model parallel's files.
        tag: Which checkpoint; None takes the newest good one.
        like: A tree whose arrays (or `ArraySpec`, `jax.ShapeDtypeStruct`) say what the arrays become: same kind,
            device and layout. It may name a part of what is stored: ``{"model": {"w": spec}}`` reads only ``w``. Its
            other leaves are placeholders, for which the stored value comes back. None restores everything, torch
            arrays as CPU tensors, numpy and jax arrays as such.
        cast: Round floating-point values to the element types of `like` (see `load_checkpoint`).
        num_workers: Threads that read, at most.
        mesh: How the ranks of this job are arranged now, which need not be how they were; by default found out.
        shardings: Rules for arrays that do not say themselves how they are split now (see `save_checkpoint`).
        trust_pickle: Load pickled objects, which can run any code.
        options: How the load goes about its work; by default those of `default_options`.

    Returns:
        The restored tree, and a report: which tag was restored, and what that took.

    Raises:
        NoCheckpointError: There is no such tag, or none at all.
        IncompatibleCheckpointError: `like` names something that is not stored, or has another shape or dtype.
        CorruptCheckpointError: The tag is damaged.
        ChangedTagError: Another job replaced or removed the tag meanwhile.
        UntrustedObjectError: It holds pickled objects, and `trust_pickle` is False.
    """
    wish = LoadWish(
        mesh=mesh,
        rules=parse_rules(shardings),
        strict=True,
        cast=cast,
        workers=max(1, num_workers),
        trust=trust_pickle,
        options=chosen(LoadOptions, options),
    )
    with without_a_model("like= (ArraySpec)"):
        value, report = _load(path, tag, Like(like), wish)
    return Restored(tree=value, report=report)


def read_part(path: PathLike, tag: str | None, leaf: str, *, shardings: Rules | None, trust: bool) -> Any:
    """Read a part of a tag, as `restore` would read all of it, by this process alone (see `Checkpoints.read`)."""
    wish = LoadWish(
        mesh=None,
        rules=parse_rules(shardings),
        strict=True,
        cast=False,
        workers=READERS,
        trust=trust,
        options=replace(chosen(LoadOptions, None), replica_read="each"),
        alone=True,
    )
    with without_a_model():
        return _load(path, tag, Like(None, part=leaf), wish)[0]


def _load(path: PathLike, tag: str | None, content: Objects | Like, wish: LoadWish) -> tuple[Any, LoadReport]:
    """A load of the tag that is named, or of the newest one that is not damaged: its value, and what it did.

    It waits for the saves of this process on the same path, learns which ranks make it together, begins with all of
    them, and takes the steps of a `Load`.
    """
    options, file = wish.options, trace_file(wish.options.trace)
    phases = Phases(LOAD_PHASES, keep=file is not None)
    SAVES.settle(full_path(path))  # what this process saves there is a tag before anybody looks
    store, tag = located(path, tag)
    uploader = None if options.local is None else UPLOADS.of(*near_and_far(path, options.local))
    near = None if uploader is None else uploader.root
    install_exit_hook()
    if wish.alone:
        job = job_alone(options.timeout)
    else:
        job = current_job(store.path, wish.mesh, doing="load", timeout=options.timeout)
    trace = traced(file, "load", job.exchange)
    if trace is not None:
        job.exchange.waited = phases.waited
    try:
        call = wish.call(store.path, tag, content, job)
        job.leave_out_if_behind(call)
        with naming(path=store.path), job.taking_part(), outside_inference_mode():
            several = _begin(job, call, store.path, uploader)
            if job.exchange.size > 1 or store.path != full_path(path):
                store = store.look()  # what others saved meanwhile was not there yet
            load = Load(
                store=store,
                near=near,
                several=several,
                job=job,
                content=content,
                wish=wish,
                phases=phases,
            )
            value, report = load.newest() if tag is None else load.one(tag)
    except Exception as error:
        # Raised to the caller; those who watch loads hear of it here.
        _end(LoadReport(path=store.path, tag=tag or "", error=error), phases, trace)
        raise
    if job.exchange.rank == 0:
        expect_commit(near.store if near is not None else store)
        if value is None and not content.given:
            logger.warning(
                "tag %s: nothing was loaded: the tag has no user content, and no object was given. Give those that "
                "get its state (model=, optimizer=, scheduler=, extras=); xla_ckpt.restore makes all of it anew",
                report.tag,
            )
    return value, _end(report, phases, trace)


def _begin(job: Job, call: Call, path: str, uploader: Uploader | None) -> bool:
    """Begin together with all ranks, when what they save is there; whether their hosts have disks of their own.

    Then each uploads what no other host can read yet.
    """

    def word() -> Any:
        for place in (path,) if uploader is None else (path, uploader.root.path):
            SAVES.wait(place)  # a load may not overtake them
        GUARD.wait()  # a save to another directory may not have copied yet what is overwritten now
        alone = uploader is None or job.exchange.size == 1
        return (DiskWord("") if alone or uploader is None else uploader.word(saves=False)).to_json()

    def united(words: Sequence[Any]) -> Any:
        return united_disks([DiskWord.from_json(one) for one in words]).to_json()

    disks = Disks.from_json(job.begin(call, word, united))
    if uploader is None or not disks.several:
        return False
    with agreed(job.exchange, "uploading"):
        uploader.meet(disks)
        uploader.finish_all(leads=disks.led_by(job.exchange.rank))
    return True


def _end(report: LoadReport, phases: Phases, trace: Trace | None) -> LoadReport:
    """The report of a load that is done now; the log, the trace and the program's functions have it, too."""
    ended = time.perf_counter()
    phases.keep(LOAD, phases.origin, ended, report.needed_bytes, about=report.tag)
    report = replace(report, seconds=ended - phases.origin, phases=phases.report())
    if report.error is None:
        logger.info(
            "loaded tag %s in %.2f s (%s): %s",
            report.tag,
            report.seconds,
            rate(report.needed_bytes, report.seconds),
            as_line(dict(report.phases)),
        )
    end(report, phases, trace)
    return report
