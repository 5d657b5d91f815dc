"""How one rank writes its state in a layout: what a layout answers, and what the engine asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from xla_ckpt.engine.seal import Index, no_index
from xla_ckpt.plan.save_plan import SavePlan


class Writing(Protocol):
    """How one rank writes its state in a layout (`xla_ckpt.layouts.base.Layout.writing` makes it).

    A class that is derived from it says what its `plan` is, and what else it has. Where the files of a rank depend on
    what other ranks have, all of them tell that before any of them writes.
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

    @property
    def told(self) -> Any:
        """What the files of other ranks depend on, as plain JSON; None if that is nothing."""
        return None

    def unite(self, words: Sequence[Any]) -> Any:
        """What rank 0 makes of what all ranks have told, in their order, as plain JSON. All ranks get it."""
        return None

    def plan_among(self, united: Any) -> SavePlan:
        """What this rank writes, now that all have told: from the sources that `plan` has."""
        return self.plan
