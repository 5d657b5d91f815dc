"""From a state to bytes that stay as they are while the program goes on: described, planned, frozen."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from xla_ckpt.api.wish import Wish
from xla_ckpt.engine.frozen import Frozen
from xla_ckpt.engine.phases import Phases
from xla_ckpt.engine.unchanged import Fixed
from xla_ckpt.engine.writing import Writing
from xla_ckpt.errors import UnsupportedStateError, UsageError
from xla_ckpt.extras import naming_extras
from xla_ckpt.layouts.base import Layout
from xla_ckpt.logs import get_logger
from xla_ckpt.options import SaveOptions
from xla_ckpt.sharding.placement import Placement
from xla_ckpt.snapshot.freezing import Deferred
from xla_ckpt.snapshot.take import Freeze, Sampling, Snapshot, lasts, take
from xla_ckpt.state.describe import Description, describe, local_shards, shards_apart
from xla_ckpt.state.frozen_base import stored_parameters
from xla_ckpt.state.guard import GUARD, stepped
from xla_ckpt.state.members import State
from xla_ckpt.tree import schema

logger = get_logger(__name__)

IN_TURN_BYTES = 128 * 1024 * 1024
"""Host memory at most for what comes from a device while the caller waits for its last byte: nothing is gained by
copying far ahead of the writers, and fresh memory costs more than the copy."""


def freeze(state: State, placement: Placement, phases: Phases, wish: Wish) -> Frozen:
    """What the caller of an asynchronous save waits for: the state described, and its bytes frozen."""
    for layout in wish.layouts:
        if wish.options.share and not layout.shares:
            raise UsageError(
                "SaveOptions.share is for the native layout alone",
                expected='layout="native"',
                found=layout.name,
                hint="Save without share, or convert a tag of the native layout when it is needed in another one.",
            )
    with phases.timed("describe"):
        structure = any(layout.pickles for layout in wish.layouts)
        description = describe(
            state,
            placement,
            wish.shardings,
            structure=structure,
            takes_apart=all(layout.takes_apart for layout in wish.layouts),
            replicas=wish.options.replicas,
        )
        layout, writing = _first_that_can(wish.layouts, description)
    with phases.timed("snapshot"):
        snapshot = _snapshot_of(description, writing, wish.options, phases, waits=wish.waits)
    return Frozen(
        leaves=description.leaves,
        layout=layout.name,
        writing=writing,
        snapshot=snapshot,
        skeleton=description.skeleton,
        module_metadata=description.module_metadata,
        aliases=description.aliases,
        objects=description.objects,
        speaks=placement.speaks,
        alone=state.alone,
        parts=description.parts,
        fixed=_fixed(description) if wish.options.share else {},
    )


def _fixed(description: Description) -> dict[str, Fixed]:
    """What the program says that it does not train. Its values have been computed: a snapshot was taken of them."""
    parameters = stored_parameters(description.state.model).items()
    names = {schema.weight(name) for name, parameter in parameters if not parameter.requires_grad}
    if not names:
        return {}
    from xla_ckpt.arrays.torch_host import WholeTensors  # torch, which is loaded where there are parameters

    arrays = description.arrays
    return {
        leaf: Fixed(
            array=weakref.ref(value),
            buffer=adapter.buffer(value) if isinstance(adapter, WholeTensors) else None,
            local=local,
        )
        for leaf, value, local, adapter in zip(arrays.paths, arrays.values, arrays.locals, arrays.adapters, strict=True)
        if leaf in names
    }


def _first_that_can(layouts: Sequence[Layout], description: Description) -> tuple[Layout, Writing]:
    """The first of the layouts that can hold the state, and how it writes it."""
    problem: UnsupportedStateError | None = None
    for layout in layouts:
        try:
            with naming_extras(f"a save in the layout {layout.name}"):
                writing = layout.writing(description)
        except UnsupportedStateError as error:
            problem = problem or error
            continue
        if problem is not None:
            logger.warning("the %s layout is written in place of %s: %s", layout.name, layouts[0].name, problem)
        return layout, writing
    assert problem is not None
    raise problem


def _snapshot_of(
    description: Description, writing: Writing, options: SaveOptions, phases: Phases, *, waits: bool
) -> Snapshot:
    """Take the snapshot of a state. Whoever writes to what is copied later waits for that from now on.

    Args:
        description: The state, described.
        writing: How it will be written.
        options: How memory is frozen, and how much may be taken for that.
        phases: Where the time goes.
        waits: Whether the caller waits until all is written.
    """
    state, shards = description.state, local_shards(description.arrays, writing.whole)
    many = description.placement.world > 1
    written = None
    if many and not all(lasts(shard, waits=waits) for shard in shards.others.values()):
        # What another rank writes is not copied here, so it has to be known now who writes what.
        with phases.timed("plan"):
            written = writing.plan.extents
    guarded = {}
    if options.snapshot == "overlap" and not waits:
        values = zip(description.arrays.paths, description.arrays.values, strict=True)
        guarded = stepped(dict(values), state.optimizer)
    budget = min(options.snapshot_budget, IN_TURN_BYTES) if waits else options.snapshot_budget
    how = Freeze(waits=waits, mode=options.snapshot, stepped=guarded, budget=budget)
    sampling = Sampling(loose=state.buffers)
    if many:
        apart = shards_apart(description, writing.whole, shards)
        sampling = Sampling(leaves=description.leaves, loose=state.buffers, apart=apart)
    snapshot = take(shards, how, sampling, written)
    later = {leaf for (leaf, _), data in snapshot.memory.items() if isinstance(data, Deferred)}
    with snapshot.released_on_failure():
        GUARD.watch(
            snapshot.freezing,
            [value for leaf, value in guarded.items() if leaf in later],
            model=state.model,
            with_optimizer=state.optimizer is not None,
        )
    return snapshot
