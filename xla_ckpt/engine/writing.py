"""How one rank writes its state in a layout: what a layout answers, and what the engine asks for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from xla_ckpt.engine.seal import Index, no_index
from xla_ckpt.plan.save_plan import SavePlan


class Writing(Protocol):
    """How one rank writes its state in a layout (`xla_ckpt.layouts.base.Layout.writing` makes it).

    A class that is derived from it says what its `plan` is, and what else it has.
    """

    @property
    def whole(self) -> frozenset[str]:
        """Leaves that are stored as the whole tensor that a rank has in memory, padding included."""
        return frozenset()

    @property
    def plan(self) -> SavePlan:
        """What this rank writes, if no other pipeline stage stores it. Decided once, when it is first asked for."""

    @property
    def marks(self) -> Mapping[str, bytes]:
        """Small files that rank 0 writes when all else is durable."""
        return {}

    @property
    def index(self) -> Index:
        """What rank 0 makes from the manifest."""
        return no_index


class Staged(ABC):
    """A `Writing` whose files say what other pipeline stages hold: its plan is made anew when all of them have told."""

    @property
    @abstractmethod
    def told(self) -> Any:
        """What the other stages have to know of this one, as plain JSON. All ranks of a stage would tell the same."""

    @abstractmethod
    def among(self, stages: Sequence[Any]) -> SavePlan:
        """What this rank writes, once all stages have told, this one included: from the sources that `plan` has."""


class Agreeing(ABC):
    """A `Writing` that depends on what all ranks of the job have: each tells, before any of them writes."""

    @property
    @abstractmethod
    def told(self) -> Any:
        """What the other ranks have to know of this one, as plain JSON."""

    @abstractmethod
    def unite(self, words: Sequence[Any]) -> Any:
        """What rank 0 makes of what all ranks have told, as plain JSON: short, since all ranks get it."""

    @abstractmethod
    def agreed(self, united: Any) -> Writing:
        """How this rank writes, given that: from the sources that its plan had before."""
