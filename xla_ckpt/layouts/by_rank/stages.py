"""The part of an optimizer that a pipeline stage has. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def in_stage(names: Sequence[str], called: Mapping[str, str], order: Mapping[str, int]) -> list[str]:
    """The parameters of a group that a pipeline stage has, in the order of the stage's own optimizer.

    Args:
        names: Names of the group's parameters.
        called: The name under which the stage has each of its parameters: a shared one may have another name there.
        order: Place of each name in the model.

    >>> in_stage(["embed", "b", "c"], {"embed": "head", "c": "c"}, {"embed": 0, "b": 1, "c": 2, "head": 3})
    ['c', 'embed']
    """
    of_stage = [name for name in names if called.get(name) == name]
    for name in names:
        other = called.get(name, name)
        if other == name:
            continue
        # The optimizer of the stage found this parameter at the place of its other name.
        place = order.get(other, len(order))
        at = next((i for i, n in enumerate(of_stage) if order.get(n, -1) > place), len(of_stage))
        of_stage.insert(at, name)
    return of_stage
