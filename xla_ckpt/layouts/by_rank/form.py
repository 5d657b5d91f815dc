"""What a layout of rank files says of them, as values. It needs no framework."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from xla_ckpt.dtypes import DType
from xla_ckpt.errors import CorruptCheckpointError
from xla_ckpt.layouts.by_rank.grid import RankAt, RankName
from xla_ckpt.tree import schema

if TYPE_CHECKING:
    from xla_ckpt.layouts.by_rank.plan import RankState  # these load torch
    from xla_ckpt.layouts.torch_save.zip_reader import TensorAt


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor of a rank file."""

    dtype: DType
    shape: tuple[int, ...]
    expert: bool | None
    """Whether it differs between expert-parallel ranks; None if the file does not say."""

    file: str
    """Where it lies."""

    at: TensorAt | None = None
    """The exact place; None where `RankFiles.place` finds it."""

    @classmethod
    def lying_at(cls, at: TensorAt) -> StoredTensor:
        """The tensor that lies there, of which nobody says whether it is an expert's."""
        return cls(dtype=at.dtype, shape=at.shape, expert=None, file=at.file, at=at)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOptimizer:
    """What one rank stored of an optimizer, whose parameters are numbers that run through its groups."""

    groups: Sequence[Mapping[str, Any]]
    """Hyper-parameters, and under ``params`` the numbers."""

    states: Mapping[Any, Any]
    """By number. What has another key is state that belongs to no parameter."""

    masters: Mapping[Any, Any] = field(default_factory=dict)
    """Master weights by number."""

    shapes: Mapping[Any, Sequence[int]] | None = None
    """Local shape of each parameter by number, if the rows of states and master weights are dealt out over dp (ZeRO-1);
    else None."""

    experts: int = 0
    """How many groups, the last ones, are of experts only; 0 if no groups are kept apart for these."""


def numbered_optimizer(tree: Mapping[Any, Any]) -> RankOptimizer:
    """An optimizer that lies in a file as torch's own `state_dict` has it.

    Raises:
        CorruptCheckpointError: It has no groups.
    """
    groups = schema.groups_of(tree)
    if groups is None:
        raise CorruptCheckpointError("the optimizer of a rank file has no param_groups", leaf=schema.OPTIMIZER)
    return RankOptimizer(groups=groups, states=tree.get(schema.STATE, {}))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContent:
    """What one rank file holds, with a `StoredTensor` for each tensor."""

    model: Mapping[Any, Any] | None = None
    """By name: this rank's part of each parameter and buffer, and plain values."""

    optimizer: Mapping[Any, Any] | None = None
    """The state of an optimizer, as it lies in the file."""

    parts: Mapping[str, Any] = field(default_factory=dict)
    """Other members of the state (``scheduler``, ``user_content``, ``extras``). Those of the first rank count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankForm:
    """A form of tags in which each rank has one file, with all that it stored."""

    names: Sequence[RankName]
    """What the file of a rank is called, in each of the ways that the program has. Of a file that is written the first
    one counts that tells the ranks of the job apart."""

    content: Callable[[Mapping[Any, Any], RankAt], RankContent]
    """Makes of the dict in a file, and of the place of its rank, what it means. Names are those in the whole model: if
    the stages of a program number their layers from 0, they are numbered anew here. It raises a `CheckpointError` if
    the dict is no state of the program's."""

    optimizer: Callable[[Mapping[Any, Any]], RankOptimizer] = numbered_optimizer
    """Makes of the state of an optimizer what it means. It is not asked where nobody wants it."""

    tree: Callable[[RankState, RankAt], Mapping[str, Any]] | None = None
    """Makes of what a rank has, and of its place, the dict in its file, with a `LeafAt` for each array. None where none
    is written."""
