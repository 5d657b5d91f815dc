"""Load a checkpoint: the public functions `load_checkpoint` and `restore`, and the steps of a load.

`_load` waits for the saves of this process, finds the job, and runs a `LoadTask`. All ranks take each step of it
together, and an error of one rank is raised on all of them. If the newest tag is damaged, the newest valid one is
loaded instead.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from xla_ckpt.arrays.torch_objects import disable_inference_mode
from xla_ckpt.core.plan.hints import LoadHints, merge_groups
from xla_ckpt.core.plan.manifest_views import has_master_weights, use_master_weights
from xla_ckpt.core.sharding.mesh import Mesh
from xla_ckpt.core.sharding.sharding import ShardingRules, parse_rules
from xla_ckpt.core.tree import path as paths
from xla_ckpt.display import join_lines
from xla_ckpt.distributed.consensus import (
    LatePeerLoss,
    broadcast_from_leader,
    gather_and_combine,
    raise_on_all_ranks,
)
from xla_ckpt.distributed.current_job import check_cooperative_reads, create_single_rank_job, get_current_job
from xla_ckpt.distributed.exchange import Exchange
from xla_ckpt.distributed.handshake import CallSignature
from xla_ckpt.distributed.job import Job
from xla_ckpt.errors import (
    ChangedTagError,
    CheckpointError,
    CorruptCheckpointError,
    NoCheckpointError,
    RankFailedError,
    annotate_errors,
    wrap_os_errors,
)
from xla_ckpt.features.local_first.root import LocalFirstRoot
from xla_ckpt.features.local_first.upload import UPLOADS, DiskInfo, HostDisks, Uploader, combine_disk_infos
from xla_ckpt.features.local_first.upload_rules import order_newest_first
from xla_ckpt.features.proof import LoadVerification, verify_load
from xla_ckpt.features.reuse.buffer_cache import clear_saved_buffers
from xla_ckpt.formats.tags import find_foreign_tag, list_tags_newest_last, make_not_found_error, open_tag
from xla_ckpt.garbage_collection import pause_gc
from xla_ckpt.inspection.tags import locate_checkpoint, resolve_local_and_remote, start_commit_helper
from xla_ckpt.keywords import check_arguments_and_fields
from xla_ckpt.loading.restore import CooperativeReader, RestoreContext, restore_targets
from xla_ckpt.loading.tag_reader import TagReader
from xla_ckpt.logs import get_logger
from xla_ckpt.options import LoadOptions, resolve_options
from xla_ckpt.progress import IoContext
from xla_ckpt.reports import (
    LOAD,
    LOAD_PHASES,
    LoadReport,
    PhaseRecorder,
    Trace,
    create_trace,
    format_phases,
    format_rate,
    publish_report,
)
from xla_ckpt.saving.registry import SAVES, install_exit_hook
from xla_ckpt.saving.request import LoadRequest
from xla_ckpt.state.base_model import merge_digests
from xla_ckpt.state.guard import WRITE_BARRIER
from xla_ckpt.state.load_plan import LoadPlan
from xla_ckpt.state.objects import Template, TrainingObjects
from xla_ckpt.state.part_load import StoredPart
from xla_ckpt.state.problems import LoadProblem, create_incompatible_error
from xla_ckpt.state.shardings import StateShardings
from xla_ckpt.state.values import create_class_resolver
from xla_ckpt.storage.base import Store
from xla_ckpt.storage.resolve import PathLike, normalize_path
from xla_ckpt.storage.threads import READ_THREADS
from xla_ckpt.storage.trace_file import resolve_trace_file

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
        return _render_html("user_content", self.user_content, self.report)


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
        return _render_html("tree", self.tree, self.report)


def _render_html(name: str, value: Any, report: LoadReport) -> str:
    """What a notebook shows of a load: the outline of a value that may be large, and the report."""
    from xla_ckpt.rendering import html, reports

    return f"{html.render_html(reports.render_outline(name, value))}\n{report._repr_html_()}"


@check_arguments_and_fields(options=LoadOptions)
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
    shardings: ShardingRules | None = None,
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
    content = TrainingObjects(model=model, optimizer=optimizer, scheduler=scheduler, extras=extras or {})
    clear_saved_buffers()  # or buffers that are replaced now would be held beside the new ones
    value, report = _load(
        path,
        tag,
        content,
        LoadRequest(
            mesh=mesh,
            sharding_rules=parse_rules(shardings),
            strict=strict,
            cast=cast,
            workers=max(1, num_workers),
            trust_pickle=trust_pickle,
            options=resolve_options(LoadOptions, options),
        ),
    )
    return Loaded(user_content=value, report=report)


@check_arguments_and_fields(options=LoadOptions)
def restore(
    path: PathLike,
    tag: str | None = None,
    like: Any = None,
    *,
    cast: bool = False,
    num_workers: int = 8,
    mesh: Mesh | str | None = None,
    shardings: ShardingRules | None = None,
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
    wish = LoadRequest(
        mesh=mesh,
        sharding_rules=parse_rules(shardings),
        strict=True,
        cast=cast,
        workers=max(1, num_workers),
        trust_pickle=trust_pickle,
        options=resolve_options(LoadOptions, options),
    )
    with replace_model_hints("like= (ArraySpec)"):
        value, report = _load(path, tag, Template(like), wish)
    return Restored(tree=value, report=report)


def read_part(path: PathLike, tag: str | None, leaf: str, *, shardings: ShardingRules | None, trust: bool) -> Any:
    """Read a part of a tag, as `restore` would read all of it, by this process alone (see `Checkpoints.read`)."""
    wish = LoadRequest(
        mesh=None,
        sharding_rules=parse_rules(shardings),
        strict=True,
        cast=False,
        workers=READ_THREADS,
        trust_pickle=trust,
        options=replace(resolve_options(LoadOptions, None), replica_read="each"),
        single_process=True,
    )
    with replace_model_hints():
        return _load(path, tag, Template(None, path=leaf), wish)[0]


def _load(
    path: PathLike, tag: str | None, content: TrainingObjects | Template, request: LoadRequest
) -> tuple[Any, LoadReport]:
    """A load of the tag that is named, or of the newest one that is not damaged: its value, and what it did.

    It waits for the saves of this process on the same path, learns which ranks make it together, begins with all of
    them, and takes the steps of a `LoadTask`.
    """
    options, file = request.options, resolve_trace_file(request.options.trace)
    phases = PhaseRecorder(LOAD_PHASES, keep_intervals=file is not None)
    SAVES.drain(normalize_path(path))  # what this process saves there is a tag before anybody looks
    store, tag = locate_checkpoint(path, tag)
    uploader = None if options.local is None else UPLOADS.get_uploader(*resolve_local_and_remote(path, options.local))
    near = None if uploader is None else uploader.root
    install_exit_hook()
    if request.single_process:
        job = create_single_rank_job(options.timeout)
    else:
        job = get_current_job(store.path, request.mesh, operation="load", timeout=options.timeout)
    trace = create_trace(file, "load", job.exchange)
    if trace is not None:
        job.exchange.on_wait = phases.record_wait
    try:
        call = request.build_call_signature(store.path, tag, content, job)
        job.skip_if_behind(call)
        with annotate_errors(path=store.path), job.participate(), disable_inference_mode():
            several = _begin_load(job, call, store.path, uploader)
            if job.exchange.size > 1 or store.path != normalize_path(path):
                store = store.snapshot_view()  # what others saved meanwhile was not there yet
            load = LoadTask(
                store=store,
                local=near,
                is_multi_disk=several,
                job=job,
                content=content,
                request=request,
                phases=phases,
            )
            value, report = load.load_latest() if tag is None else load.load_named(tag)
    except Exception as error:
        # Raised to the caller; those who watch loads hear of it here.
        _finish_load(LoadReport(path=store.path, tag=tag or "", error=error), phases, trace)
        raise
    if job.exchange.rank == 0:
        start_commit_helper(near.store if near is not None else store)
        if value is None and not content.description:
            logger.warning(
                "tag %s: nothing was loaded: the tag has no user content, and no object was given. Give those that "
                "get its state (model=, optimizer=, scheduler=, extras=); xla_ckpt.restore makes all of it anew",
                report.tag,
            )
    return value, _finish_load(report, phases, trace)


def _begin_load(job: Job, call: CallSignature, path: str, uploader: Uploader | None) -> bool:
    """Begin together with all ranks, when what they save is there; whether their hosts have disks of their own.

    Then each uploads what no other host can read yet.
    """

    def word() -> Any:
        for place in (path,) if uploader is None else (path, uploader.root.path):
            SAVES.wait(place)  # a load may not overtake them
        WRITE_BARRIER.wait()  # a save to another directory may not have copied yet what is overwritten now
        alone = uploader is None or job.exchange.size == 1
        return (DiskInfo("") if alone or uploader is None else uploader.get_disk_info(saves=False)).to_json()

    def united(words: Sequence[Any]) -> Any:
        return combine_disk_infos([DiskInfo.from_json(one) for one in words]).to_json()

    disks = HostDisks.from_json(job.begin_call(call, word, united))
    if uploader is None or not disks.is_multi_disk:
        return False
    with raise_on_all_ranks(job.exchange, "uploading"):
        uploader.set_disks(disks)
        uploader.finish_all(is_leader=disks.is_leader(job.exchange.rank))
    return True


def _finish_load(report: LoadReport, phases: PhaseRecorder, trace: Trace | None) -> LoadReport:
    """The report of a load that is done now; the log, the trace and the program's functions have it, too."""
    ended = time.perf_counter()
    phases.record_interval(LOAD, phases.origin, ended, report.needed_bytes, about=report.tag)
    report = replace(report, seconds=ended - phases.origin, phases=phases.report())
    if report.error is None:
        logger.info(
            "loaded tag %s in %.2f s (%s): %s",
            report.tag,
            report.seconds,
            format_rate(report.needed_bytes, report.seconds),
            format_phases(dict(report.phases)),
        )
    publish_report(report, phases, trace)
    return report


Answer = TypeVar("Answer")

Candidate = tuple[str, bool]
"""A tag that may be read, and whether that is the one in the directory of ``local=``."""

MAX_SEARCHES = 8
"""How often the newest tag is looked for, if the one that was found is always replaced or removed meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTask:
    """One load on one rank, and what it needs."""

    store: Store
    local: LocalFirstRoot | None
    """The directory of ``local=``, if there is one."""

    is_multi_disk: bool
    """Whether hosts have disks of their own there. Then all tags are in the object store, and a disk has parts."""

    job: Job
    content: TrainingObjects | Template
    request: LoadRequest
    phases: PhaseRecorder

    def load_latest(self) -> tuple[Any, LoadReport]:
        """Load the newest tag that is not damaged. Other jobs may replace and remove tags meanwhile."""
        return self._load_first_valid(None)

    def load_named(self, tag: str) -> tuple[Any, LoadReport]:
        """Load a tag by its name: if it is in both places, from the nearer one, unless it is damaged there."""
        return (
            self._load_first_valid(tag)
            if self.local
            else self._load_tag(False, tag, self.job.exchange.create_nested("tag"))
        )

    def _load_first_valid(self, name: str | None) -> tuple[Any, LoadReport]:
        damaged: dict[Candidate, CorruptCheckpointError] = {}
        changed: list[CheckpointError] = []
        load, todo = self, self._list_candidates("tags", name)
        while todo:
            tag, is_near = todo.pop(0)
            try:
                value, report = load._load_tag(
                    is_near, tag, self.job.exchange.create_nested(f"{len(changed)}/{tag}/{is_near}")
                )
            except CorruptCheckpointError as error:
                if todo:  # else the error itself is raised
                    passed = "read from the other place" if todo[0][0] == tag else "passed over"
                    logger.error("tag %s is damaged and %s: %s", tag, passed, error)  # noqa: TRY400
                damaged[tag, is_near] = error
            except (ChangedTagError, NoCheckpointError) as error:
                changed.append(error)
                if len(changed) == MAX_SEARCHES:
                    raise
                logger.warning("tag %s was replaced or removed meanwhile; the newest is looked for again", tag)
                load = replace(self, store=self.store.snapshot_view())
                todo = [one for one in load._list_candidates(f"tags/{len(changed)}", name) if one not in damaged]
            else:
                return value, replace(report, corrupt_tags=tuple(other for other, _ in damaged if other != tag))
        if damaged:
            raise _make_all_damaged_error(damaged)
        raise make_not_found_error(self.store, name)

    def _load_tag(self, is_local: bool, tag: str, exchange: Exchange) -> tuple[Any, LoadReport]:
        """Load one tag: open it, check it against the targets, plan, read and verify, install."""
        near = self.local if is_local and not self.is_multi_disk else None
        store = self.store if near is None else near.store
        with self.phases.measure("open"):
            if near is not None:
                with raise_on_all_ranks(exchange, "reading the journal of the upload"):
                    near.check_journal(tag)
            reader, hints = self._open_tag(store, tag, exchange)
            if is_local and self.local is not None and self.is_multi_disk:
                reader.directory = self.local.prefer_local(reader.directory, tag, reader.manifest.header)
        with reader:
            self._check_version(reader, exchange)
            reader = self._with_masters(reader, hints, exchange)
            with self.phases.measure("check"):
                with (
                    raise_on_all_ranks(exchange, "checking"),
                    annotate_errors(path=reader.root, tag=reader.tag),
                    pause_gc(),
                ):
                    loadings = self.content.plan_load(self._describe_stored(reader))
                unwanted = self._find_unexpected_keys(loadings, exchange)
                fits = self._check_any_fits(loadings, exchange)
                other_base = self._compare_base(loadings, exchange)
                with raise_on_all_ranks(exchange, "comparing"):
                    skipped = self._check_compatibility(reader, loadings, [*unwanted, *other_base], fits=fits)
            late_loss = LatePeerLoss(exchange)
            with annotate_errors(path=reader.root, tag=reader.tag), loadings.load_state_dicts(exchange) as hand_over:
                how = RestoreContext(
                    exchange=exchange,
                    phases=self.phases,
                    on_verified=hand_over,
                    unshared_leaves=loadings.state_dict_paths,
                    cooperative_reader=self._get_cooperative_reader(exchange),
                    late_loss=late_loss,
                    workers=self.request.workers,
                    show_progress=self.job.resolve_progress(self.request.options.progress),
                )
                needed, read = restore_targets(reader, loadings.targets, how)
                with self.phases.measure("install"), late_loss.raise_on_all_ranks("installing"), pause_gc():
                    value = loadings.install()
            if late_loss.error is not None:
                raise _make_lost_rank_error(late_loss.error, reader)
            left = [problem for part in loadings.parts for problem in part.not_loaded]
            for problem in left:
                logger.warning("tag %s: not loaded: %s", reader.tag, problem)
            self._log_warnings(reader, loadings)  # only now: a tag that turns out to be damaged is passed over
            proof = (
                self._verify_loaded(reader, loadings, exchange) if self.request.options.prove else LoadVerification()
            )
        report = LoadReport(
            path=store.path,
            tag=tag,
            skipped=(*skipped, *map(str, left)),
            arrays=len(loadings.targets),
            needed_bytes=needed,
            read_bytes=read,
            proven_bytes=proof.nbytes,
            unproven=proof.unverified,
        )
        return value, report

    def _get_cooperative_reader(self, exchange: Exchange) -> CooperativeReader | None:
        """How ranks read together, if they do."""
        if self.request.options.replica_read != "share" or exchange.size == 1:
            return None
        check_cooperative_reads()
        from xla_ckpt.distributed.cooperative_reads import TorchCooperativeReader  # this loads torch

        return TorchCooperativeReader()

    def _verify_loaded(self, reader: TagReader, loadings: LoadPlan, exchange: Exchange) -> LoadVerification:
        """Compare what is installed with the tag."""
        crew = IoContext(workers=self.request.workers, phases=self.phases)
        naming_tag = wrap_os_errors("reading a tag", path=reader.root, tag=reader.tag)
        with raise_on_all_ranks(exchange, "proving"), naming_tag, pause_gc():
            proof = verify_load(reader, loadings, crew)
        for array in proof.unverified:
            logger.warning("tag %s: not proven: %s", reader.tag, array)
        return proof

    def _list_candidates(self, key: str, name: str | None) -> list[Candidate]:
        """All tags, newest first, or those of one name, as rank 0 sees them: another rank may look a moment later."""
        return [
            (tag, is_near)
            for tag, is_near in broadcast_from_leader(self.job.exchange, key, lambda: self._find_candidates(name))
        ]

    def _find_candidates(self, name: str | None) -> list[Candidate]:
        near = [] if self.local is None else self.local.list_complete_entries()
        far = list_tags_newest_last(self.store)
        # Where each disk has a part: first what the disks have, then all from the object store, if that is damaged.
        parts = [(entry, is_near) for entry in reversed(far) for is_near in (True, False)]
        both = parts if self.is_multi_disk else order_newest_first(near, far)
        return [(entry.tag, is_near) for entry, is_near in both if name in (None, entry.tag)]

    def _open_tag(self, store: Store, tag: str, exchange: Exchange) -> tuple[TagReader, LoadHints | None]:
        """A reader of the tag. Files of some layouts do not say everything: the targets say the rest, in hints."""
        # Ranks that look at different moments may see different tags, and would wait for different messages.
        hints: LoadHints | None = None
        if broadcast_from_leader(exchange, "asks", lambda: _needs_hints(store, tag)):
            hints = self._merge_stage_hints(self._collect_hints(exchange), exchange)
        with contextlib.ExitStack() as unless_all_have:
            with raise_on_all_ranks(exchange, "opening"):
                reader = unless_all_have.enter_context(open_tag(store, tag, hints))
            unless_all_have.pop_all()
        # Where another rank could not open it, it is closed: retention leaves a tag alone that is open.
        return reader, hints

    def _collect_hints(self, exchange: Exchange) -> LoadHints:
        """What the targets of this rank say."""
        with raise_on_all_ranks(exchange, "describing"):
            return self.content.get_hints(StateShardings(self.job.placement, self.request.sharding_rules))

    def _with_masters(self, reader: TagReader, hints: LoadHints | None, exchange: Exchange) -> TagReader:
        """The same tag with master weights in the place of weights, where the targets are of their type."""
        if not has_master_weights(reader.manifest):
            return reader
        return reader.with_manifest(use_master_weights(reader.manifest, hints or self._collect_hints(exchange)))

    def _check_version(self, reader: TagReader, exchange: Exchange) -> None:
        """Refuse a tag of which this rank and rank 0 have opened two versions: parts of both would be loaded."""
        if exchange.size == 1:
            return
        if exchange.rank == 0:
            exchange.publish("version", reader.version)
        with raise_on_all_ranks(exchange, "opening the same version"):
            if exchange.receive("version", 0) != reader.version:
                raise ChangedTagError(
                    "the tag was replaced while the ranks opened it, and they have found different versions",
                    path=reader.root,
                    tag=reader.tag,
                    hint="Load it again.",
                )

    def _merge_stage_hints(self, hints: LoadHints, exchange: Exchange) -> LoadHints:
        """The same, with the optimizer's groups of all pipeline stages: foreign optimizers number their parameters."""
        mesh = self.job.placement.mesh
        if mesh.pp == 1:
            return hints
        first = [mesh.rank({"pp": stage}) for stage in range(mesh.pp)]
        groups = None if hints.parameter_groups is None else [list(g) for g in hints.parameter_groups]
        return replace(hints, parameter_groups=gather_and_combine(exchange, "groups", groups, merge_groups, first))

    def _describe_stored(self, reader: TagReader) -> StoredPart:
        return StoredPart(
            manifest=reader.manifest,
            prefix=paths.ROOT,
            skeleton=reader.manifest.skeleton,
            read_object=partial(reader.load_object, trust=self.request.trust_pickle),
            resolve=create_class_resolver(self.request.trust_pickle),
            shardings=StateShardings(self.job.placement, self.request.sharding_rules),
            cast=self.request.cast,
            strict=self.request.strict,
        )

    def _find_unexpected_keys(self, loadings: LoadPlan, exchange: Exchange) -> list[LoadProblem]:
        """What is stored and not wanted here; over pipeline stages, what none of them wants."""
        own = {p.leaf: p for part in loadings.parts for p in part.unexpected}
        if self.job.placement.mesh.pp == 1:
            return list(own.values())

        def by_nobody(of_ranks: list[list[str]]) -> list[list[str]]:
            everywhere = set(own).intersection(*of_ranks)
            return [[p.leaf, p.text] for leaf, p in own.items() if leaf in everywhere]

        common = gather_and_combine(exchange, "unwanted", list(own), by_nobody, range(exchange.size))
        return [LoadProblem(leaf, text) for leaf, text in common]

    def _check_any_fits(self, loadings: LoadPlan, exchange: Exchange) -> bool:
        """Whether an array of some rank fits."""
        fits = bool(loadings.targets)
        return (
            fits if self.request.strict else bool(gather_and_combine(exchange, "fits", fits, any, range(exchange.size)))
        )

    def _compare_base(self, loadings: LoadPlan, exchange: Exchange) -> list[LoadProblem]:
        """That the ranks have another base than the tag names, if it names one."""
        if loadings.base is None:
            return []
        here = gather_and_combine(exchange, "base", loadings.base.local_digests, merge_digests, range(exchange.size))
        return loadings.base.find_problems(here)

    def _log_warnings(self, reader: TagReader, loadings: LoadPlan) -> None:
        """Say once for each pipeline stage which of its arrays were stored from replicas that differed.

        And once for the job that it leaves a scheduler or an optimizer behind.
        """
        divergence = reader.describe_divergence(loadings.targets)
        if divergence is not None and self.job.placement.is_stage_leader:
            logger.warning("tag %s: %s", reader.tag, divergence)
        left = (
            self.content.get_unused_state_warning(reader.manifest.skeleton)
            if isinstance(self.content, TrainingObjects)
            else None
        )
        if left is not None and self.job.exchange.rank == 0:
            logger.warning("tag %s: %s", reader.tag, left)

    def _check_compatibility(
        self, reader: TagReader, loadings: LoadPlan, unexpected: Sequence[LoadProblem], *, fits: bool
    ) -> tuple[str, ...]:
        """What does not fit, and is left alone."""
        problems = [*(p for part in loadings.parts for p in part.problems), *unexpected]
        refused = [problem for problem in problems if not problem.is_ignorable]
        if refused and (self.request.strict or (not fits and reader.manifest.arrays)):
            objects = self.content if isinstance(self.content, TrainingObjects) else None
            ranks = self.job.placement.world_size
            # Of another library's tag the optimizer is looked at only if it is asked for.
            may_store = reader.foreign_objects is not None or has_master_weights(reader.manifest)
            masters = objects is not None and objects.optimizer is None and may_store
            error = create_incompatible_error(
                refused,
                any_fits=fits,
                can_load_partially=objects is not None,
                ranks=ranks,
                misfit_hint=reader.mismatch_hint,
                missing_rule_hint=reader.unmatched_rules,
                has_master_weights=masters,
            )
            raise error.at(path=reader.root, tag=reader.tag)
        if refused:
            fitting = len(loadings.targets)
            logger.warning("tag %s: arrays that fit and are loaded: %d. Others stay as they are:", reader.tag, fitting)
        for problem in problems:
            logger.warning("tag %s: not loaded: %s", reader.tag, problem)
        return tuple(map(str, problems))


def _needs_hints(store: Store, tag: str) -> bool:
    """Whether the files of a tag do not say everything."""
    foreign = find_foreign_tag(store, tag)
    return foreign is not None and foreign[0].asks


def _make_all_damaged_error(damaged: Mapping[Candidate, CorruptCheckpointError]) -> CorruptCheckpointError:
    """The error for a root in which no tag is good: that of the newest one, which names the others."""
    (_, newest), *others = damaged.items()
    if others:
        lines = [f"  tag {tag}: {error.problem}" for (tag, _), error in others]
        beside = join_lines(["All other tags are damaged, too:", *lines])
        newest.details = "\n".join(filter(None, (newest.details, beside)))
    return newest


def _make_lost_rank_error(lost: RankFailedError, reader: TagReader) -> RankFailedError:
    """The error for a rank that was lost when this one had all that it needs: its objects are not left in between."""
    return RankFailedError(
        f"{lost.problem}; this rank's objects have the values of tag {reader.tag}, all of them verified",
        path=reader.root,
        tag=reader.tag,
        rank=lost.rank,
        hint=lost.hint,
    )


_MODEL_HINT = "model= (--like)"
_MODEL_AND_OPTIMIZER_HINT = "model= and optimizer= (--like)"


@contextlib.contextmanager
def replace_model_hints(replacement: str = "xla_ckpt.restore(like=...) (--like)") -> Iterator[None]:
    """For a call that takes no model, have the hints of its errors name what it takes instead.

    Args:
        replacement: What says how the arrays were: an argument of the call, or another call that has one.
    """
    try:
        yield
    except CheckpointError as error:
        if error.hint is not None:
            # Numbers get names from a program's model and optimizer alone, and no tree of arrays has those.
            both = error.hint.replace(
                _MODEL_AND_OPTIMIZER_HINT, "xla_ckpt.load_checkpoint(model=..., optimizer=...) (--like)"
            )
            error.hint = both.replace(_MODEL_HINT, replacement)
        raise
