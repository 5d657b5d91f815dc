"""Load a checkpoint: the public functions `load_checkpoint` and `restore`, and the steps of a load.

`_load` waits for the saves of this process, finds the job, and runs a `LoadTask`. All ranks run each of its steps
together, and an error on one rank is raised on all of them. If the newest tag is damaged, the newest valid one is
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
from xla_ckpt.saving.background import SAVES, install_exit_hook
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
    """Result of `load_checkpoint`; the objects that it was given have been loaded."""

    user_content: Any
    """The `user_content` of the save. If none was saved, a dict of the stored plain values that belong to no object,
    such as the step in another library's checkpoint; None if there are no such values."""

    report: LoadReport
    """Report of the load: its tag, skipped state, and timing."""

    @property
    def tag(self) -> str:
        """Name of the loaded tag."""
        return self.report.tag

    def _repr_html_(self) -> str:
        return _render_html("user_content", self.user_content, self.report)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """Result of `restore`."""

    tree: Any
    """The restored tree."""

    report: LoadReport
    """Report of the load: its tag and timing."""

    @property
    def tag(self) -> str:
        """Name of the restored tag."""
        return self.report.tag

    def _repr_html_(self) -> str:
        return _render_html("tree", self.tree, self.report)


def _render_html(name: str, value: Any, report: LoadReport) -> str:
    """Render a load as HTML for a notebook: the outline of a value, which may be large, and the report."""
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
    """Load a tag into the given objects.

    All objects are optional. Without any, only the user content is loaded, as in neuronx-distributed, and a warning is
    logged if there is none (use `restore` to load everything as a new tree).

    Everything is checked before anything is changed: names, shapes and dtypes first, then the digests of all bytes
    that would be overwritten in place.

    Args:
        path: Root directory, also one written by neuronx-distributed, optimum-neuron, torch.distributed.checkpoint or
            SageMaker model parallel (docs/from-nxd.md, docs/from-dcp.md). Without a tag it may be the path of a tag
            itself (DCP's `checkpoint_id`); of a torch.save file (docs/torch-files.md); or a path that was passed to
            ``smp.save``, which names all parts: ``checkpoint.pt`` for ``checkpoint.pt_0_0`` and its peers
            (``checkpoint.pt_*`` if there is a full file of that name, too).
        tag: Name of the checkpoint; None loads the newest. If the newest is damaged, an error is logged, and the newest
            valid one is loaded instead. If another job replaces or removes the tag during the load, the newest is
            searched for again.
        model: A module, or a dict: its arrays are overwritten; an empty dict receives all arrays.
        optimizer: An optimizer (state is matched by parameter name), or a dict of optimizers of this model, or a dict.
        scheduler: A learning rate scheduler, or a dict.
        num_workers: Maximum number of reader threads.
        strict: False loads the state that fits, and logs the rest. It is an error if no array fits on any rank. User
            content with a class that this program does not have is an error if True, and None if False.
        cast: Round floating-point values to the dtypes of the given objects if they differ from the stored dtypes, as
            torch does. Such an array needs host memory for its stored values, too, until the load is done. Optimizer
            state that the optimizer does not have yet keeps its stored dtype.
        extras: Named objects with ``load_state_dict``, as given to `save_checkpoint`.
        mesh: Arrangement of the ranks of this job, which may differ from the save; detected by default.
        shardings: Rules for arrays that do not declare their own current sharding (see `save_checkpoint`).
        trust_pickle: Load pickled objects, which can run any code. Plain values never need it.
        options: Settings of the load; by default those of `default_options`.

    Returns:
        The `user_content` of the save, and a report of the loaded tag and the timing. If no user content was saved, it
        is a dict of the plain values that belong to none of the objects in `extras=`, such as the step in a DCP
        directory or in a torch.save file; None if there are none. Values with arrays are not included.

    Raises:
        NoCheckpointError: The tag does not exist, or there are no tags.
        IncompatibleCheckpointError: Something does not fit (and `strict`). Nothing was changed.
        CorruptCheckpointError: The tag is damaged. Nothing was changed.
        ChangedTagError: Another job replaced or removed the tag during the load. Nothing was changed.
        LoadError: The `load_state_dict` of an object raised an exception, on some rank. Nothing was changed, except a
            module that is loaded through code of its own, and the objects that `details` names.
        UntrustedObjectError: The tag contains pickled objects, and `trust_pickle` is False. Nothing was changed.
        UsageError: An argument is invalid, or is on the meta device. Nothing was changed.
    """
    content = TrainingObjects(model=model, optimizer=optimizer, scheduler=scheduler, extras=extras or {})
    clear_saved_buffers()  # otherwise replaced buffers would be kept in addition to the new ones
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
    """Restore a tag, or a part of it, as a new tree. No existing object is changed.

    Args:
        path: Root directory; or, as for `load_checkpoint`, the path of a tag itself, of a torch.save file, or of a set
            of SageMaker model parallel files.
        tag: Name of the checkpoint; None restores the newest valid one.
        like: A tree whose arrays (or `ArraySpec`, `jax.ShapeDtypeStruct`) define the restored arrays: same type, device
            and layout. It may contain only a part of the stored tree: ``{"model": {"w": spec}}`` reads only ``w``. Its
            other leaves are placeholders, which are replaced by the stored values. None restores everything, torch
            arrays as CPU tensors, numpy and jax arrays as such.
        cast: Round floating-point values to the dtypes of `like` (see `load_checkpoint`).
        num_workers: Maximum number of reader threads.
        mesh: Arrangement of the ranks of this job, which may differ from the save; detected by default.
        shardings: Rules for arrays that do not declare their own current sharding (see `save_checkpoint`).
        trust_pickle: Load pickled objects, which can run any code.
        options: Settings of the load; by default those of `default_options`.

    Returns:
        The restored tree, and a report of the restored tag and the timing.

    Raises:
        NoCheckpointError: The tag does not exist, or there are no tags.
        IncompatibleCheckpointError: `like` contains a leaf that is not stored, or has another shape or dtype.
        CorruptCheckpointError: The tag is damaged.
        ChangedTagError: Another job replaced or removed the tag during the load.
        UntrustedObjectError: The tag contains pickled objects, and `trust_pickle` is False.
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
    """Read a part of a tag in this process only, with the result of `restore` (see `Checkpoints.read`)."""
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
    """Load the given tag, or the newest valid one, and return its value and the report.

    Wait for the saves of this process on the same path, find the ranks that take part, begin the load with all of them,
    and run the steps of a `LoadTask`.
    """
    options, file = request.options, resolve_trace_file(request.options.trace)
    phases = PhaseRecorder(LOAD_PHASES, keep_intervals=file is not None)
    SAVES.drain(normalize_path(path))  # a save of this process must be a tag before any rank lists the tags
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
                store = store.snapshot_view()  # tags that others saved meanwhile were not visible yet
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
        # The error is raised to the caller; listeners are notified here.
        _finish_load(LoadReport(path=store.path, tag=tag or "", error=error), phases, trace)
        raise
    if job.exchange.rank == 0:
        start_commit_helper(near.store if near is not None else store)
        if value is None and not content.object_names:
            logger.warning(
                "tag %s: nothing was loaded: the tag has no user content, and no object was given. Give those that "
                "get its state (model=, optimizer=, scheduler=, extras=); xla_ckpt.restore makes all of it anew",
                report.tag,
            )
    return value, _finish_load(report, phases, trace)


def _begin_load(job: Job, call: CallSignature, path: str, uploader: Uploader | None) -> bool:
    """Begin the load with all ranks, after their saves have finished, and return True if the hosts have separate disks.

    With separate disks, each disk's leader uploads the files that no other host can read yet.
    """

    def word() -> Any:
        for place in (path,) if uploader is None else (path, uploader.root.path):
            SAVES.wait(place)  # a load must not overtake them
        WRITE_BARRIER.wait()  # a save to another directory may not have copied memory yet that is overwritten now
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
    """Return the report of a finished load, and publish it to the log, the trace and the program's callbacks."""
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
"""(tag, True if the copy in the directory of ``local=`` is meant)."""

MAX_SEARCHES = 8
"""Maximum number of searches for the newest tag, if each found tag is replaced or removed meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTask:
    """One load on one rank."""

    store: Store
    local: LocalFirstRoot | None
    """Root in the directory of ``local=``, if set."""

    is_multi_disk: bool
    """True if hosts have separate local disks. Then all tags are in the object store, and each disk contains parts."""

    job: Job
    content: TrainingObjects | Template
    request: LoadRequest
    phases: PhaseRecorder

    def load_latest(self) -> tuple[Any, LoadReport]:
        """Load the newest valid tag. Other jobs may replace and remove tags meanwhile."""
        return self._load_first_valid(None)

    def load_named(self, tag: str) -> tuple[Any, LoadReport]:
        """Load a tag by its name, if possible from the local directory, unless it is damaged there."""
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
                if todo:  # otherwise the error itself is raised
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
            left = [problem for part in loadings.parts for problem in part.left_by_program]
            for problem in left:
                logger.warning("tag %s: not loaded: %s", reader.tag, problem)
            self._log_warnings(reader, loadings)  # only now, because a damaged tag is skipped
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
        """Return the reader for cooperative reads, if they are enabled."""
        if self.request.options.replica_read != "share" or exchange.size == 1:
            return None
        check_cooperative_reads()
        from xla_ckpt.distributed.cooperative_reads import TorchCooperativeReader  # imports torch

        return TorchCooperativeReader()

    def _verify_loaded(self, reader: TagReader, loadings: LoadPlan, exchange: Exchange) -> LoadVerification:
        """Compare the installed arrays with the tag."""
        crew = IoContext(workers=self.request.workers, phases=self.phases)
        naming_tag = wrap_os_errors("reading a tag", path=reader.root, tag=reader.tag)
        with raise_on_all_ranks(exchange, "proving"), naming_tag, pause_gc():
            proof = verify_load(reader, loadings, crew)
        for array in proof.unverified:
            logger.warning("tag %s: not proven: %s", reader.tag, array)
        return proof

    def _list_candidates(self, key: str, name: str | None) -> list[Candidate]:
        """Return all tags, newest first, or those of one name, as rank 0 lists them; other ranks may list later."""
        return [
            (tag, is_near)
            for tag, is_near in broadcast_from_leader(self.job.exchange, key, lambda: self._find_candidates(name))
        ]

    def _find_candidates(self, name: str | None) -> list[Candidate]:
        near = [] if self.local is None else self.local.list_complete_entries()
        far = list_tags_newest_last(self.store)
        # With separate disks: first the parts on the disks, then everything from the object store, if a disk is
        # damaged.
        parts = [(entry, is_near) for entry in reversed(far) for is_near in (True, False)]
        both = parts if self.is_multi_disk else order_newest_first(near, far)
        return [(entry.tag, is_near) for entry, is_near in both if name in (None, entry.tag)]

    def _open_tag(self, store: Store, tag: str, exchange: Exchange) -> tuple[TagReader, LoadHints | None]:
        """Open the tag. If its layout is not self-describing, the targets supply the missing information as hints."""
        # Ranks that look at different times may find different tags, and would wait for different messages.
        hints: LoadHints | None = None
        if broadcast_from_leader(exchange, "asks", lambda: _needs_hints(store, tag)):
            hints = self._merge_stage_hints(self._collect_hints(exchange), exchange)
        with contextlib.ExitStack() as unless_all_have:
            with raise_on_all_ranks(exchange, "opening"):
                reader = unless_all_have.enter_context(open_tag(store, tag, hints))
            unless_all_have.pop_all()
        # If another rank could not open the tag, close it, because retention keeps a tag that is open.
        return reader, hints

    def _collect_hints(self, exchange: Exchange) -> LoadHints:
        """Return the hints of the targets of this rank."""
        with raise_on_all_ranks(exchange, "describing"):
            return self.content.get_hints(StateShardings(self.job.placement, self.request.sharding_rules))

    def _with_masters(self, reader: TagReader, hints: LoadHints | None, exchange: Exchange) -> TagReader:
        """Return the tag with master weights instead of weights, if the targets have the master weights' dtype."""
        if not has_master_weights(reader.manifest):
            return reader
        return reader.with_manifest(use_master_weights(reader.manifest, hints or self._collect_hints(exchange)))

    def _check_version(self, reader: TagReader, exchange: Exchange) -> None:
        """Raise an error if this rank and rank 0 have opened different versions, of which parts would be mixed.

        Raises:
            ChangedTagError: The versions differ.
        """
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
        """Merge the optimizer groups of all pipeline stages, because foreign optimizers number their parameters."""
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
        """Return stored keys that are not wanted; with pipeline stages, only those that no stage wants."""
        own = {p.leaf: p for part in loadings.parts for p in part.unexpected}
        if self.job.placement.mesh.pp == 1:
            return list(own.values())

        def by_nobody(of_ranks: list[list[str]]) -> list[list[str]]:
            everywhere = set(own).intersection(*of_ranks)
            return [[p.leaf, p.text] for leaf, p in own.items() if leaf in everywhere]

        common = gather_and_combine(exchange, "unwanted", list(own), by_nobody, range(exchange.size))
        return [LoadProblem(leaf, text) for leaf, text in common]

    def _check_any_fits(self, loadings: LoadPlan, exchange: Exchange) -> bool:
        """Return True if an array of some rank fits."""
        fits = bool(loadings.targets)
        return (
            fits if self.request.strict else bool(gather_and_combine(exchange, "fits", fits, any, range(exchange.size)))
        )

    def _compare_base(self, loadings: LoadPlan, exchange: Exchange) -> list[LoadProblem]:
        """Return the problems if the base weights of the ranks differ from the base that the tag records, if any."""
        if loadings.base is None:
            return []
        here = gather_and_combine(exchange, "base", loadings.base.local_digests, merge_digests, range(exchange.size))
        return loadings.base.find_problems(here)

    def _log_warnings(self, reader: TagReader, loadings: LoadPlan) -> None:
        """Log a warning about arrays that were stored from diverged replicas, once per pipeline stage.

        Also log a warning, once per job, about a stored scheduler or optimizer that is not loaded.
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
        """Return descriptions of the state that does not fit and is not loaded.

        Raises:
            IncompatibleCheckpointError: The state does not fit, and `strict` is True or no array fits.
        """
        problems = [*(p for part in loadings.parts for p in part.problems), *unexpected]
        refused = [problem for problem in problems if not problem.is_ignorable]
        if refused and (self.request.strict or (not fits and reader.manifest.arrays)):
            objects = self.content if isinstance(self.content, TrainingObjects) else None
            ranks = self.job.placement.world_size
            # The optimizer of another library's tag is read only if an optimizer is loaded.
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
    """Return True if the files of a tag are not self-describing."""
    foreign = find_foreign_tag(store, tag)
    return foreign is not None and foreign[0].asks


def _make_all_damaged_error(damaged: Mapping[Candidate, CorruptCheckpointError]) -> CorruptCheckpointError:
    """Return the error for a root without a valid tag: the error of the newest tag, with the others in its details."""
    (_, newest), *others = damaged.items()
    if others:
        lines = [f"  tag {tag}: {error.problem}" for (tag, _), error in others]
        beside = join_lines(["All other tags are damaged, too:", *lines])
        newest.details = "\n".join(filter(None, (newest.details, beside)))
    return newest


def _make_lost_rank_error(lost: RankFailedError, reader: TagReader) -> RankFailedError:
    """Return the error for a rank that was lost after this rank had verified and loaded everything it needs."""
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
    """Rewrite the hints of errors that the block raises for a call that has no `model` argument.

    Args:
        replacement: Argument of the call, or another call, that describes the expected arrays.
    """
    try:
        yield
    except CheckpointError as error:
        if error.hint is not None:
            # Parameter names for numbered state come only from a model and an optimizer, not from a tree of arrays.
            both = error.hint.replace(
                _MODEL_AND_OPTIMIZER_HINT, "xla_ckpt.load_checkpoint(model=..., optimizer=...) (--like)"
            )
            error.hint = both.replace(_MODEL_HINT, replacement)
        raise
