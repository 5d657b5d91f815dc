"""The older form of neuronx-distributed's tags, in which each rank has one file. It needs no framework."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from xla_ckpt.layouts.by_rank.form import RankContent, RankForm, StoredTensor
from xla_ckpt.layouts.by_rank.grid import RankAt, RankName
from xla_ckpt.layouts.nxd.optimizer import stored_optimizer
from xla_ckpt.layouts.places import MODEL_NAMES, OPTIMIZER_NAMES, SCHEDULER_NAMES
from xla_ckpt.tree import schema

_NAMES = tuple(
    RankName(f"{folder}{file}")
    for folder in ("tp_rank_{tp:02}_pp_rank_{pp:02}", "tp_rank_{tp:02}_pp_rank_{pp:02}_dp_rank_{dp:02}")
    for file in ("", "/checkpoint.pt")
)
"""Names of a rank's file in the older layout, in which some versions gave each rank a directory."""


def _content(tree: Mapping[Any, Any], _: RankAt) -> RankContent:
    if "model" not in tree and all(isinstance(value, StoredTensor) for value in tree.values()):
        return RankContent(model=tree)  # the program saved a bare state dict of its model
    others = dict(tree)
    model, optimizer, scheduler = (_taken(others, n) for n in (MODEL_NAMES, OPTIMIZER_NAMES, SCHEDULER_NAMES))
    parts = {} if scheduler is None else {schema.SCHEDULER: scheduler}
    return RankContent(
        model=model, optimizer=optimizer, parts={**parts, **({schema.USER_CONTENT: others} if others else {})}
    )


def _taken(tree: dict[Any, Any], names: Sequence[str]) -> Mapping[Any, Any] | None:
    """Remove the state dict with the first of these names from a tree, and return it; None if there is none."""
    name = next((name for name in names if isinstance(tree.get(name), Mapping)), None)
    return None if name is None else tree.pop(name)


OLDER_FORM = RankForm(names=_NAMES, content=_content, optimizer=stored_optimizer)
"""How such tags are read."""
