"""What one rank of a job has, for layouts whose files hold the state of one rank each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from xla_ckpt.engine.writing import Writing
from xla_ckpt.errors import UnsupportedStateError
from xla_ckpt.layouts.by_rank.layout import RankLayout
from xla_ckpt.layouts.by_rank.plan import (
    ANY_STATE,
    PARTS,
    Laying,
    RankState,
    RankTensor,
    check_common,
    name_in_job,
    with_experts,
)
from xla_ckpt.layouts.native import NativeWriting
from xla_ckpt.layouts.torch_save.pickle_writer import LeafAt
from xla_ckpt.lightweight import cached_property
from xla_ckpt.plan.leaf import Leaf
from xla_ckpt.plan.rank_numbers import axes_of_numbers
from xla_ckpt.plan.save_plan import SavePlan
from xla_ckpt.sharding.box import Box
from xla_ckpt.sharding.mesh import AXES, Mesh
from xla_ckpt.state.describe import Description, HeldArray
from xla_ckpt.tree import schema


@dataclass(frozen=True, kw_only=True)
class RankWriting(Writing):
    """What one rank writes: files of a layout for what it has a place for, native ones for the rest."""

    layout: RankLayout
    description: Description
    rank_state: RankState
    """This rank's state, without its trees."""

    native: NativeWriting

    @property
    def whole(self) -> frozenset[str]:
        return frozenset(self.rank_state.tensors)

    @property
    def marks(self) -> Mapping[str, bytes]:
        return self.layout.marks

    @cached_property
    def plan(self) -> SavePlan:
        return SavePlan((*self.native.plan.files, *self.layout.files_of(self.laying)))

    @cached_property
    def laying(self) -> Laying:
        """This rank's state, to be laid out."""
        about = self.description
        members = about.structure or {}
        trees = {part: about.tree(part, lambda path, _: LeafAt(path)) for part in PARTS if part in members}
        state, placement = replace(self.rank_state, parts=trees), about.placement
        return Laying(placement.mesh, placement.rank, state, about.replicas == "first")

    @classmethod
    def of(cls, layout: RankLayout, description: Description, **more: Any) -> Self:
        """How a rank writes its state in a layout. `more` are further fields of a derived class.

        Raises:
            UnsupportedStateError: The layout has no place for something in it.
        """
        mesh, state, name = description.placement.mesh, description.state, layout.name
        members = description.structure if isinstance(description.structure, dict) else {}
        has_nothing = description.structure == {}  # of user content alone only rank 0 has anything
        if not has_nothing and not any(part in members for part in PARTS):
            raise UnsupportedStateError(
                f"the layout {name} holds {', '.join(PARTS)}, and nothing of it is here",
                hint=ANY_STATE,
            )
        check_common(members, name)
        arrays_of_parts = {
            leaf.path: _tensor(leaf, array, description, name)
            for leaf, array in zip(description.leaves, description.arrays, strict=True)
            if schema.member_of(leaf.path) in PARTS
        }
        tensors = with_experts(arrays_of_parts, mesh)
        of_ranks = {
            path: replace(tensor, expert=True, elsewhere=True)
            for path, tensor in tensors.items()
            if _is_of_ranks(tensor, mesh)
        }
        tensors |= of_ranks
        arrays = tensors | {alias: tensors[path] for alias, path in description.aliases.items() if path in tensors}
        shapes: dict[Any, tuple[int, ...]] = {p.name: tuple(p.value.shape) for p in state.parameters.values()}
        native_leaves = tuple(leaf for leaf in description.leaves if leaf.path not in tensors or leaf.path in of_ranks)
        rank_state = RankState(
            parts={},
            tensors=arrays,
            zero1=state.zero1 is not None,
            by_name=state.by_name,
            shapes=shapes,
            experts=state.experts,
        )
        _check_rows(state.zero1, mesh, name)
        name_in_job(layout.names, mesh, dealt=rank_state.zero1)
        native = NativeWriting(description, native_leaves)
        return cls(layout=layout, description=description, rank_state=rank_state, native=native, **more)


def _check_rows(axes: Sequence[str] | None, mesh: Mesh, layout: str) -> None:
    """Refuse a ZeRO-1 optimizer whose rows are dealt out over axes that files do not number: it would be lost."""
    over = [axis for axis in axes or () if mesh.sizes[axis] > 1]
    if axes is None or ((over or mesh.dp == 1) and {"dp", "edp"} >= set(over)):
        return
    dealt = f"are dealt out over {' and '.join(over)}" if over else "are not dealt out over dp"
    raise UnsupportedStateError(
        f"the layout {layout} cannot hold this optimizer: files are named by dp, and these ZeRO-1 shards {dealt}",
        leaf=schema.OPTIMIZER,
        found=str(mesh),
        hint=ANY_STATE,
    )


def _is_of_ranks(tensor: RankTensor, mesh: Mesh) -> bool:
    """Whether it says something of each rank. Ranks that share a file have others, so all are stored beside it, too."""
    if schema.member_of(tensor.leaf) != schema.MODEL or tensor.full is None:
        return False
    return bool(axes_of_numbers(tensor.dtype, tensor.full, tensor.spec, mesh))


def _tensor(leaf: Leaf, array: HeldArray, description: Description, layout: str) -> RankTensor:
    path, local, placement = leaf.path, array.local, description.placement
    # A file is shared by ranks that hold the same, so it has to be known along which axes they do.
    alike: tuple[str, ...] | None = None
    if isinstance(local.group, tuple) and local.group[0] == "mesh":
        alike = local.group[1]
    complete = [p.box for p in local.pieces] == [Box.whole(local.shape)] or not Box.whole(local.shape).size
    held_by_one = placement.world == 1 or path.startswith(description.state.alone)
    if alike is None and complete and held_by_one:
        alike = AXES
    if alike is None:
        raise UnsupportedStateError(
            f"the layout {layout} holds what each rank has as one tensor, and this array is spread by its own rules "
            "(DTensor, SPMD, jax)",
            leaf=path,
            hint="Save it by xla_ckpt.save_checkpoint in the layout native, and convert it: "
            f"xla-ckpt convert SRC DST --to {layout} --mesh ...",
        )
    return RankTensor(
        leaf=path,
        dtype=leaf.dtype,
        shape=array.shape,
        pieces=local.pieces,
        alike=alike,
        full=local.shape,
        spec=local.spec,
    )
