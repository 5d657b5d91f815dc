"""Arguments that are surely not what the caller meant: found out before anything is written or changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from xla_ckpt.errors import UsageError
from xla_ckpt.sharding.placement import Placement


def check_something(given: Iterable[Any], placement: Placement) -> None:
    """Refuse a save of nothing: it would commit an empty tag, and retention would delete the good ones for it.

    Rank 0 decides for the job: what it alone saves, such as the user content, the other ranks need not have.

    Raises:
        UsageError: All that is given is None or an empty container.
    """
    members = [m for m in given if m is not None]
    # A pipeline stage may hold nothing, and then its containers are empty. None says that an argument was left out.
    empty = placement.mesh.pp == 1 and all(isinstance(m, Mapping | list | tuple) and not m for m in members)
    if placement.rank == 0 and (empty or not members):
        raise UsageError(
            "there is nothing to save", expected="a model, an optimizer, or other state",
            found="empty containers" if members else "None",
            hint="A variable that should hold the state may be None or empty.",
        )  # fmt: skip
