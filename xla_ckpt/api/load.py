"""Loading: from a tag to a program's objects, or to a new tree."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from xla_ckpt.api.load_run import LoadReport, LoadRun, check_mode
from xla_ckpt.api.paths import PathLike, directory_at
from xla_ckpt.arrays.base import Target
from xla_ckpt.arrays.registry import array_kind, is_spec, target_of_spec
from xla_ckpt.job.current import TIMEOUT, current_job
from xla_ckpt.layouts import tags_of_all as foreign
from xla_ckpt.sharding.mesh import Mesh
from xla_ckpt.sharding.rules import Rules, parse_rules
from xla_ckpt.state import module, per_rank, stateful
from xla_ckpt.state import optimizer as optimizers
from xla_ckpt.state.loading import Loading, Stored, absent, plan_arrays
from xla_ckpt.state.values import CODEC
from xla_ckpt.tree import path as paths
from xla_ckpt.tree.skeleton import Make, Weave


def load_checkpoint(
    path: PathLike,
    tag: str | None = None,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    num_workers: int = 8,
    strict: bool = True,
    *,
    extras: Mapping[str, Any] | None = None,
    mesh: Mesh | str | None = None,
    shardings: Rules | None = None,
    trust_pickle: bool = False,
    progress: bool | None = None,
    report: LoadReport | None = None,
    replica_read: str = "each",
    timeout: float = TIMEOUT,
) -> Any:
    """Load a tag into the given objects, each of them optional.

    Everything is checked before anything is changed: names, shapes and dtypes first, then the digests of all bytes
    that would be overwritten in place.

    Args:
        path: Root directory; one that neuronx-distributed wrote to will do, too (see docs/from-nxd.md).
        tag: Which checkpoint; None takes the newest. A newest one that turns out to be damaged is reported in the log,
            and the newest good one is taken instead.
        model: A module, or a dict: its arrays are overwritten; an empty dict receives everything.
        optimizer: An optimizer (state is matched by parameter name), or a dict.
        scheduler: A learning rate scheduler, or a dict.
        num_workers: Threads that read, at most.
        strict: False loads what fits, and logs what does not.
        extras: Named objects with ``load_state_dict``, as given to `save_checkpoint`.
        mesh: How the ranks of this job are arranged now, which need not be how they were; by default found out.
        shardings: Rules for arrays that do not say themselves how they are split now (see `save_checkpoint`).
        trust_pickle: Load pickled objects, which can run any code. Plain values never need it.
        progress: Show a progress bar: True, False, or None for only if it takes long, on a terminal.
        report: Filled with what was done.
        replica_read: ``"each"``: every rank reads what it needs. ``"share"``: ranks that need the same bytes, or
            columns of the same rows, read a part each and send it to the others, so that the storage is read once.
        timeout: Seconds that a rank waits for another one.

    Returns:
        The `user_content` of the save; None if there was none.

    Raises:
        NoCheckpointError: There is no such tag, or none at all.
        IncompatibleCheckpointError: Something does not fit (and `strict`). Nothing was changed.
        CorruptCheckpointError: The tag is damaged. Nothing was changed.
        UntrustedObjectError: It holds pickled objects, and `trust_pickle` is False. Nothing was changed.
    """
    report = LoadReport() if report is None else report
    root = directory_at(path)
    rules, share = parse_rules(shardings), check_mode(replica_read)
    job = current_job(root, mesh, doing="load", timeout=timeout)

    def prepare(stored: Stored) -> tuple[list[Loading], Make]:
        parts: list[Loading] = []
        members: list[tuple[str, Any, Callable[[Stored, Any], Loading]]] = []
        if model is not None:
            members.append(("model", model, module.load))
        if optimizer is not None:
            names = module.parameter_names(model)
            members.append(("optimizer", optimizer, lambda s, o: optimizers.load(s, o, names, model)))
        if scheduler is not None:
            members.append(("scheduler", scheduler, stateful.load))
        where = job.placement
        members += [
            (f"extras/{paths.escape(name)}", member, lambda s, m: per_rank.load(s, m, where.rank, where.world))
            for name, member in (extras or {}).items()
        ]
        for path_of, member, load in members:
            part = stored.at(path_of)
            parts.append(absent(stored, path_of) if part is None else load(part, member))
        content = stored.at("user_content")
        if content is None:
            return parts, lambda arrays: None
        fresh = Loading()
        plan_arrays(content, fresh, {})
        content.build()  # an object that may not be loaded is found out before anything is changed
        parts.append(fresh)
        return parts, lambda arrays: content.build(lambda leaf, _: arrays[leaf])

    return LoadRun(
        root, job, prepare, rules, strict=strict, workers=max(1, num_workers), trust=trust_pickle,
        progress=job.shows(progress), report=report, share=share,
        wanted=functools.partial(foreign.wanted_by, model, optimizer),
    ).load(tag)  # fmt: skip


def restore(
    path: PathLike,
    tag: str | None = None,
    like: Any = None,
    *,
    num_workers: int = 8,
    mesh: Mesh | str | None = None,
    shardings: Rules | None = None,
    trust_pickle: bool = False,
    progress: bool | None = None,
    report: LoadReport | None = None,
    replica_read: str = "each",
    timeout: float = TIMEOUT,
) -> Any:
    """Restore a tag, or a part of it, as a new tree. Nothing that exists is changed.

    Args:
        path: Root directory.
        tag: Which checkpoint; None takes the newest good one.
        like: A tree whose arrays (or `ArraySpec`, `jax.ShapeDtypeStruct`) say what the arrays become: same kind,
            device and layout. It may name a part of what is stored: ``{"model": {"w": spec}}`` reads only ``w``. Its
            other leaves are placeholders, for which the stored value comes back. None restores everything, torch
            arrays as CPU tensors, numpy and jax arrays as such.
        num_workers: Threads that read, at most.
        mesh: How the ranks of this job are arranged now, which need not be how they were; by default found out.
        shardings: Rules for arrays that do not say themselves how they are split now (see `save_checkpoint`).
        trust_pickle: Load pickled objects, which can run any code.
        progress: Show a progress bar: True, False, or None for only if it takes long, on a terminal.
        report: Filled with what was done.
        replica_read: ``"each"``: every rank reads what it needs. ``"share"``: ranks that need the same bytes, or
            columns of the same rows, read a part each and send it to the others, so that the storage is read once.
        timeout: Seconds that a rank waits for another one.

    Returns:
        The restored tree.

    Raises:
        NoCheckpointError: There is no such tag, or none at all.
        IncompatibleCheckpointError: `like` names something that is not stored, or has another shape or dtype.
        CorruptCheckpointError: The tag is damaged.
        UntrustedObjectError: It holds pickled objects, and `trust_pickle` is False.
    """
    report = LoadReport() if report is None else report
    root = directory_at(path)
    rules, share = parse_rules(shardings), check_mode(replica_read)
    job = current_job(root, mesh, doing="load", timeout=timeout)

    def prepare(stored: Stored) -> tuple[list[Loading], Make]:
        loading = Loading()
        if like is None:
            plan_arrays(stored, loading, {})
            stored.build()
            return [loading], lambda arrays: stored.build(lambda leaf, _: arrays[leaf])

        def whole(skeleton: Any, leaf: str) -> Make:
            part = stored.part(skeleton, leaf)
            plan_arrays(part, loading, {})
            part.build()
            return lambda arrays: part.build(lambda path, _: arrays[path])

        def target(leaf: str, wanted: Any) -> Target:
            return target_of_spec(wanted, job.placement) if is_spec(wanted) else stored.like(leaf, wanted)

        weave = Weave(lambda v: array_kind(v) is not None or is_spec(v), CODEC, whole)
        make = weave.visit(like, stored.skeleton)
        for leaf, wanted in weave.wanted.items():
            loading.want(leaf, target(leaf, wanted), stored.record(leaf))
        return [loading], make

    return LoadRun(
        root, job, prepare, rules, strict=True, workers=max(1, num_workers), trust=trust_pickle,
        progress=job.shows(progress), report=report, share=share,
        wanted=functools.partial(foreign.wanted_by_tree, like),
    ).load(tag)  # fmt: skip
