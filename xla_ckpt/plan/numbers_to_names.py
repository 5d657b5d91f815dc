"""Which parameter a number of a stored optimizer means, as far as order and shapes tell. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def only_names(
    numbers: Sequence[Sequence[int]], shapes: Mapping[int, tuple[int, ...] | None], names: Mapping[str, tuple[int, ...]]
) -> dict[int, str] | None:
    """The names of the numbers of some groups, if the order and the shapes of the parameters leave only one choice.

    A group has its parameters in the order of the model, and each parameter is in one of them. So the model's order is
    that of the groups, mixed; a parameter fits to the next number of a group if their shapes are the same.

    Args:
        numbers: The numbers of each group.
        shapes: Local shape of each number, where known.
        names: Local shape of each parameter, in the order of the model.

    >>> only_names([[0, 2], [1]], {0: (4, 4), 1: (4,), 2: (4, 4)}, {"a": (4, 4), "a.bias": (4,), "b": (4, 4)})
    {2: 'b', 1: 'a.bias', 0: 'a'}
    """
    begin = (0,) * len(numbers)
    steps: list[dict[tuple[int, ...], tuple[tuple[int, ...], int]]] = []
    ways = {begin: 1}  # how many numbers of each group are taken -> in how many ways (2 stands for more)
    for shape in names.values():
        after: dict[tuple[int, ...], int] = {}
        step: dict[tuple[int, ...], tuple[tuple[int, ...], int]] = {}
        for taken, count in ways.items():
            for n, group in enumerate(numbers):
                if taken[n] < len(group) and shapes.get(group[taken[n]]) == shape:
                    now = (*taken[:n], taken[n] + 1, *taken[n + 1 :])
                    after[now] = min(2, after.get(now, 0) + count)
                    step[now] = (taken, n)
        if not after or len(after) > _MOST_WAYS:
            return None
        ways = after
        steps.append(step)
    at = tuple(len(group) for group in numbers)
    if ways.get(at) != 1:
        return None
    name_of = {}
    for name, step in zip(reversed(list(names)), reversed(steps), strict=True):
        at, n = step[at]
        name_of[numbers[n][at[n]]] = name
    return name_of


_MOST_WAYS = 10_000
"""Beyond so many possible beginnings nobody looks for the only end."""
