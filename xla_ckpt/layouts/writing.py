"""In which layout a save is written: the native one, or one of neuronx-distributed's with our manifest beside it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from xla_ckpt.arrays.base import Placement
from xla_ckpt.arrays.registry import local_lanes
from xla_ckpt.errors import UnsupportedStateError, UsageError
from xla_ckpt.layouts.registry import LAYOUTS
from xla_ckpt.plan.save_plan import SavePlan, plan_save
from xla_ckpt.sharding.box import Box
from xla_ckpt.sharding.local_array import whole
from xla_ckpt.sharding.mesh import AXES
from xla_ckpt.state import pickles
from xla_ckpt.state.collect import Prepared, State
from xla_ckpt.state.describe import Placed
from xla_ckpt.state.values import CODEC, resolver
from xla_ckpt.tags.names import NXD_MARKS
from xla_ckpt.tree.flatten import Unflattener

if TYPE_CHECKING:
    from xla_ckpt.layouts.nxd.plan import Tensor

logger = logging.getLogger(__name__)


def choices(layout: str | Sequence[str] | None, use_xser: bool) -> tuple[str, ...]:
    """The layouts that a caller wants, in order of preference.

    Raises:
        UsageError: There is no such layout, or `use_xser` contradicts it.
    """
    wanted = ("xser" if use_xser else "native",) if layout is None else layout
    found = (wanted,) if isinstance(wanted, str) else tuple(wanted)
    unknown = [name for name in found if name not in LAYOUTS]
    if unknown or not found:
        raise UsageError("there is no such layout", expected=f"one of {', '.join(LAYOUTS)}", found=str(layout))
    if use_xser and found[0] != "xser":
        raise UsageError("use_xser=True asks for another layout than layout=", expected="xser", found=str(layout))
    return found


@dataclass(frozen=True, slots=True)
class Writing:
    """How one rank writes its state."""

    placed: Mapping[str, Placed]
    """The arrays whose bytes the plan names, each with its place."""

    plan: Callable[[], SavePlan]
    """What this rank writes, including what an earlier pipeline stage stores (see `SavePlan.minus`)."""

    last: Mapping[str, bytes] = field(default_factory=dict)
    """Small files that are written when all else is durable."""


def writing(wanted: Sequence[str], prepared: Prepared, state: State, placement: Placement) -> Writing:
    """The first of the layouts that can hold the state.

    Raises:
        UnsupportedStateError: None of them can.
    """
    problem: UnsupportedStateError | None = None
    for name in wanted:
        if name == "native":
            if problem is not None:
                logger.warning("the native layout is written in place of %s: %s", wanted[0], problem)
            return _native(prepared, placement)
        try:
            return _nxd(prepared, state, placement, xser=name == "xser")
        except UnsupportedStateError as error:
            problem = problem or error
    assert problem is not None
    raise problem


def _native(prepared: Prepared, placement: Placement) -> Writing:
    def plan() -> SavePlan:
        return plan_save(prepared.described.leaves, placement.rank, placement.world, local_lanes())

    return Writing(prepared.described.placed, plan)


def _nxd(prepared: Prepared, state: State, placement: Placement, *, xser: bool) -> Writing:
    from xla_ckpt.layouts.nxd.plan import PARTS, RankPlan, RankState, check_fits, with_experts

    described, mesh = prepared.described, placement.mesh
    theirs = [leaf.path for leaf in described.leaves if leaf.path.split("/")[0] in PARTS]
    held = {path: _tensor(path, described.placed[path], state, placement) for path in theirs}
    tensors = with_experts(held, mesh)
    arrays = tensors | {alias: tensors[path] for alias, path in described.aliases.items() if path in tensors}
    here = prepared.here if isinstance(prepared.here, dict) else {}
    if not any(part in here for part in PARTS):
        raise UnsupportedStateError(f"neuronx-distributed's layout holds {', '.join(PARTS)}, and nothing of it is here")
    shapes = {p.name: tuple(p.value.shape) for p in state.parameters.values()}
    empty = RankState({}, arrays, state.zero1 is not None, state.by_name, shapes)
    check_fits(empty, mesh, state.zero1 or ())
    placed = {path: _whole(path, p) if path in tensors else p for path, p in described.placed.items()}
    rest = [leaf for leaf in described.leaves if leaf.path not in tensors]

    def unpickled(index: int, leaf: str) -> Any:
        return pickles.load(prepared.objects_here[index], leaf, trust=True)  # this process has just pickled it

    def plan() -> SavePlan:
        native = plan_save(rest, placement.rank, placement.world, local_lanes())
        parts = {part: marked(here[part], part, unpickled, trust=True) for part in PARTS if part in here}
        mine = RankPlan(mesh, placement.rank, xser).files(replace(empty, parts=parts))
        return SavePlan((*native.files, *mine))

    return Writing(placed, plan, NXD_MARKS)


def marked(skeleton: Any, part: str, unpickled: Callable[[int, str], Any], *, trust: bool) -> Any:
    """A part of a state as its skeleton has it, with a `LeafAt` in place of each array."""
    from xla_ckpt.layouts.torch_save.pickle_writer import LeafAt

    return Unflattener(lambda path, _: LeafAt(path), CODEC, unpickled, resolver(trust)).build(skeleton, part)


def _tensor(path: str, placed: Placed, state: State, placement: Placement) -> Tensor:
    from xla_ckpt.layouts.nxd.plan import Tensor

    local = placed.local
    alike: Any = local.group[1] if isinstance(local.group, tuple) and local.group[0] == "mesh" else None
    complete = [p.box for p in local.pieces] == [Box.whole(local.shape)] or not Box.whole(local.shape).size
    if alike is None and complete and (placement.world == 1 or path.startswith(state.alone)):
        alike = AXES
    if alike is None:
        raise UnsupportedStateError(
            "neuronx-distributed's layout holds what each rank has as one tensor, and this array is spread by its own "
            "rules (DTensor, SPMD, jax)", leaf=path,
            hint="Save in the native format, and convert it: xla-ckpt convert SRC DST --to xser --mesh ...",
        )  # fmt: skip
    adapter = placed.adapter
    return Tensor(path, adapter.dtype(placed.value, path), adapter.shape(placed.value), local.pieces, alike)


def _whole(path: str, placed: Placed) -> Placed:
    """The same array with the whole of its tensor as its bytes, padding included."""
    if placed.adapter.place(placed.value, path) is not None:
        return placed
    return replace(placed, local=whole(placed.adapter.shape(placed.value)))
