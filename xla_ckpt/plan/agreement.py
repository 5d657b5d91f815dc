"""What ranks say of one thing, and how their disagreement is told. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MAX_NAMED_RANKS = 8
"""Leaves or ranks that a message names before it only counts."""


@dataclass(frozen=True, slots=True)
class Disagreement:
    """Ranks that say different things."""

    expected: str
    """What most of them say, and which they are."""

    found: str
    """What the others say, and which these are."""

    rank: int
    """The first of the others."""

    @classmethod
    def among(cls, said: Mapping[int, str]) -> Disagreement | None:
        """The disagreement of ranks of which each says a text; None if all say the same.

        >>> Disagreement.among({0: "a", 1: "b", 2: "a"})
        Disagreement(expected='a on ranks 0, 2', found='b on rank 1', rank=1)
        """
        by_text: dict[str, list[int]] = {}
        for rank, text in said.items():
            by_text.setdefault(text, []).append(rank)
        if len(by_text) < 2:
            return None
        usual, *others = sorted(by_text.items(), key=lambda item: (-len(item[1]), item[1]))
        texts = [f"{text} on {named_ranks(ranks)}" for text, ranks in (usual, *others)]
        more = f"; and {len(texts) - 1 - MAX_NAMED_RANKS} more" if len(texts) - 1 > MAX_NAMED_RANKS else ""
        return cls(
            texts[0],
            "; ".join(texts[1 : 1 + MAX_NAMED_RANKS]) + more,
            min(rank for _, ranks in others for rank in ranks),
        )


def named_ranks(ranks: Sequence[int]) -> str:
    """Ranks as a message names them.

    >>> named_ranks([3]), named_ranks([0, 2])
    ('rank 3', 'ranks 0, 2')
    """
    named = ", ".join(map(str, ranks[:MAX_NAMED_RANKS]))
    more = f" and {len(ranks) - MAX_NAMED_RANKS} more" if len(ranks) > MAX_NAMED_RANKS else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {named}{more}"
