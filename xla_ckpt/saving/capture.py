"""Capture a training state: describe it, select a layout, and take the snapshot.

The program may continue to train when `prepare_save` returns, because the snapshot is either copied or guarded.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from xla_ckpt.core.sharding.mesh import RankInfo
from xla_ckpt.core.tree import schema
from xla_ckpt.errors import UnsupportedStateError, UsageError
from xla_ckpt.extras import wrap_missing_packages
from xla_ckpt.features.reuse.buffer_cache import FrozenParameter
from xla_ckpt.formats.base import Layout
from xla_ckpt.logs import get_logger
from xla_ckpt.options import SaveOptions
from xla_ckpt.reports import PhaseRecorder
from xla_ckpt.saving.context import PreparedSave
from xla_ckpt.saving.finalize import WritePlanner
from xla_ckpt.saving.request import SaveRequest
from xla_ckpt.snapshot.snapshot import (
    LazyShard,
    ReplicaSampling,
    Snapshot,
    SnapshotPolicy,
    is_stable,
    take_snapshot,
)
from xla_ckpt.state.base_model import get_stored_parameters
from xla_ckpt.state.describe import StateDescription, collect_local_shards, describe_state, extract_replicated_pieces
from xla_ckpt.state.guard import WRITE_BARRIER, select_optimizer_written
from xla_ckpt.state.objects import CapturedState

logger = get_logger(__name__)

BLOCKING_BUDGET_BYTES = 128 * 1024 * 1024
"""Maximum number of bytes of host memory for copies from a device in a blocking save: copying far ahead of the writers
gains nothing, and allocating memory costs more than the copy."""


def prepare_save(
    state: CapturedState, placement: RankInfo, phases: PhaseRecorder, request: SaveRequest
) -> PreparedSave:
    """Describe the state and take its snapshot; the caller of an asynchronous save waits for this.

    Raises:
        UsageError: `SaveOptions.share` is set, and a layout does not support it.
        UnsupportedStateError: None of the layouts supports the state.
    """
    for layout in request.layouts:
        if request.options.share and not layout.shares:
            raise UsageError(
                "SaveOptions.share is for the native layout alone",
                expected='layout="native"',
                found=layout.name,
                hint="Save without share, or convert a tag of the native layout when it is needed in another one.",
            )
    with phases.measure("describe"):
        structure = any(layout.pickles for layout in request.layouts)
        description = describe_state(
            state,
            placement,
            request.sharding_rules,
            with_structure=structure,
            split_objects=all(layout.takes_apart for layout in request.layouts),
            replicas=request.options.replicas,
        )
        layout, writing = _select_layout(request.layouts, description)
    with phases.measure("snapshot"):
        snapshot = _take_snapshot(description, writing, request.options, phases, blocking=request.blocking)
    return PreparedSave(
        leaves=description.leaves,
        layout=layout.name,
        planner=writing,
        snapshot=snapshot,
        skeleton=description.skeleton,
        module_metadata=description.module_metadata,
        aliases=description.aliases,
        objects=description.pickled_objects,
        is_reporting_rank=placement.is_stage_leader,
        rank_local_prefixes=state.rank_local_prefixes,
        structure_fingerprints=description.part_fingerprints,
        untrained_parameters=_find_untrained_parameters(description) if request.options.share else {},
    )


def _find_untrained_parameters(description: StateDescription) -> dict[str, FrozenParameter]:
    """Return the parameters with `requires_grad=False`; the snapshot ensures that their values are computed."""
    parameters = get_stored_parameters(description.state.model).items()
    names = {schema.get_weight_path(name) for name, parameter in parameters if not parameter.requires_grad}
    if not names:
        return {}
    from xla_ckpt.arrays.torch_tensor import WholeTensorAdapter  # needs torch, loaded if there are parameters

    arrays = description.arrays
    return {
        leaf: FrozenParameter(
            array=weakref.ref(value),
            buffer=adapter.get_buffer_key(value) if isinstance(adapter, WholeTensorAdapter) else None,
            local=local,
        )
        for leaf, value, local, adapter in zip(
            arrays.paths, arrays.values, arrays.local_arrays, arrays.adapters, strict=True
        )
        if leaf in names
    }


def _select_layout(layouts: Sequence[Layout], description: StateDescription) -> tuple[Layout, WritePlanner]:
    """Return the first layout that supports the state, and its planner.

    Raises:
        UnsupportedStateError: None of the layouts supports the state; the error of the first one.
    """
    problem: UnsupportedStateError | None = None
    for layout in layouts:
        try:
            with wrap_missing_packages(f"a save in the layout {layout.name}"):
                writing = layout.writing(description)
        except UnsupportedStateError as error:
            problem = problem or error
            continue
        if problem is not None:
            logger.warning("the %s layout is written in place of %s: %s", layout.name, layouts[0].name, problem)
        return layout, writing
    assert problem is not None
    raise problem


def _take_snapshot(
    description: StateDescription, planner: WritePlanner, options: SaveOptions, phases: PhaseRecorder, *, blocking: bool
) -> Snapshot:
    """Take the snapshot of a state. Later writes to memory that is not copied yet wait for the copy.

    Args:
        description: The described state.
        planner: Planner of the layout in which the state is written.
        options: Snapshot mode and memory budget.
        phases: Recorder of the time spent.
        blocking: True if the caller waits until everything is written.
    """
    state, shards = description.state, collect_local_shards(description.arrays, planner.unsplit_leaves)
    many = description.placement.world_size > 1
    written = None
    if many and not all(is_stable(shard, blocking=blocking) for shard in shards.other_shards.values()):
        # Shards that another rank writes are not copied here, so the assignment must be known now.
        with phases.measure("plan"):
            written = planner.plan.shard_ranges
    guarded = {}
    if options.snapshot == "overlap" and not blocking:
        values = zip(description.arrays.paths, description.arrays.values, strict=True)
        guarded = select_optimizer_written(dict(values), state.optimizer)
    budget = min(options.snapshot_budget, BLOCKING_BUDGET_BYTES) if blocking else options.snapshot_budget
    how = SnapshotPolicy(blocking=blocking, mode=options.snapshot, optimizer_written=guarded, budget=budget)
    sampling = ReplicaSampling(unchecked_replicas=state.buffers)
    if many:
        apart = extract_replicated_pieces(description, planner.unsplit_leaves, shards)
        sampling = ReplicaSampling(leaves=description.leaves, unchecked_replicas=state.buffers, per_holder_shards=apart)
    snapshot = take_snapshot(shards, how, sampling, written)
    later = {leaf for (leaf, _), data in snapshot.memory.items() if isinstance(data, LazyShard)}
    with snapshot.release_on_failure():
        WRITE_BARRIER.watch(
            snapshot.progress,
            [value for leaf, value in guarded.items() if leaf in later],
            model=state.model,
            with_optimizer=state.optimizer is not None,
        )
    return snapshot
