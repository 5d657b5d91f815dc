"""Consistency between ranks: arrays that must be equal in a pipeline stage, and descriptions of mismatches.

The first rank of a stage reports all of its arrays, and the others a fingerprint. Only ranks with another fingerprint
report all of their arrays, which keeps records small.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xla_ckpt.core.fingerprint import compute_text_fingerprint
from xla_ckpt.core.sharding.mesh import Mesh
from xla_ckpt.errors import SaveError

MAX_LISTED_RANKS = 8
"""Maximum number of leaves or ranks that a message lists."""


@dataclass(frozen=True, slots=True)
class RankMismatch:
    """A difference between the values of ranks."""

    expected: str
    """Value of most ranks, and the list of these ranks."""

    found: str
    """Values of the other ranks, and the lists of these ranks."""

    rank: int
    """First of the other ranks."""

    @classmethod
    def find(cls, text_by_rank: Mapping[int, str]) -> RankMismatch | None:
        """Return the mismatch between the values of ranks, or None if all are equal.

        >>> RankMismatch.find({0: "a", 1: "b", 2: "a"})
        RankMismatch(expected='a on ranks 0, 2', found='b on rank 1', rank=1)
        """
        by_text: dict[str, list[int]] = {}
        for rank, text in text_by_rank.items():
            by_text.setdefault(text, []).append(rank)
        if len(by_text) < 2:
            return None
        usual, *others = sorted(by_text.items(), key=lambda item: (-len(item[1]), item[1]))
        texts = [f"{text} on {format_ranks(ranks)}" for text, ranks in (usual, *others)]
        more = f"; and {len(texts) - 1 - MAX_LISTED_RANKS} more" if len(texts) - 1 > MAX_LISTED_RANKS else ""
        return cls(
            texts[0],
            "; ".join(texts[1 : 1 + MAX_LISTED_RANKS]) + more,
            min(rank for _, ranks in others for rank in ranks),
        )


def format_ranks(ranks: Sequence[int]) -> str:
    """Format ranks for a message.

    >>> format_ranks([3]), format_ranks([0, 2])
    ('rank 3', 'ranks 0, 2')
    """
    named = ", ".join(map(str, ranks[:MAX_LISTED_RANKS]))
    more = f" and {len(ranks) - MAX_LISTED_RANKS} more" if len(ranks) > MAX_LISTED_RANKS else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {named}{more}"


ArrayInfo = tuple[str, tuple[int, ...], Any, bool | None]
"""(dtype, global shape, spec, weak type) of an array."""

ArrayInfoByLeaf = Mapping[str, ArrayInfo]
"""Array infos by leaf path."""

MISSING = "nothing"


def compute_arrays_fingerprint(arrays: ArrayInfoByLeaf) -> str:
    """Return a fingerprint that is equal for equal arrays."""
    return compute_text_fingerprint(json.dumps(sorted(arrays.items())))


def find_mismatched_ranks(fingerprints: Sequence[str], mesh: Mesh) -> list[int]:
    """Return the ranks whose fingerprint differs from the first rank of their pipeline stage.

    >>> find_mismatched_ranks(["a", "b", "a", "c"], Mesh(dp=4))
    [1, 3]
    """
    return [rank for rank, own in enumerate(fingerprints) if own != fingerprints[mesh.first_of_stage(rank)]]


def find_first_stages(leaves_by_stage: Sequence[Sequence[str]]) -> dict[str, int]:
    """Return the first pipeline stage of each leaf that several stages hold. That stage stores it.

    Args:
        leaves_by_stage: Leaf paths on each stage.

    >>> find_first_stages([["model/wte", "model/0"], ["model/1"], ["model/wte", "model/2"]])
    {'model/wte': 0}
    """
    first: dict[str, int] = {}
    for stage, leaves in enumerate(leaves_by_stage):
        for leaf in leaves:
            first.setdefault(leaf, stage)
    return {leaf: first[leaf] for stage, leaves in enumerate(leaves_by_stage) for leaf in leaves if first[leaf] < stage}


def check_same_arrays(arrays_by_rank: Sequence[ArrayInfoByLeaf], mismatched_ranks: Sequence[int], mesh: Mesh) -> None:
    """Check that mismatched ranks have the same arrays as the other ranks of their stages.

    Args:
        arrays_by_rank: Arrays that each rank reported. Only needed for mismatched ranks and the first rank of each
            stage.
        mismatched_ranks: Ranks whose fingerprint differs.
        mesh: Mesh of the job.

    Raises:
        SaveError: An array differs between ranks.
    """
    for stage in sorted({mesh.first_of_stage(rank) for rank in mismatched_ranks}):
        members = [rank for rank in range(len(arrays_by_rank)) if mesh.first_of_stage(rank) == stage]
        by_rank = {rank: arrays_by_rank[rank if rank in mismatched_ranks else stage] for rank in members}
        for leaf in sorted(
            {leaf for rank in (stage, *mismatched_ranks) if rank in by_rank for leaf in arrays_by_rank[rank]}
        ):
            disagreement = RankMismatch.find({rank: _format_array_info(of.get(leaf)) for rank, of in by_rank.items()})
            if disagreement is not None:
                raise SaveError(
                    "the ranks hold different things under one name, and one array cannot stand for them",
                    leaf=leaf,
                    rank=disagreement.rank,
                    expected=disagreement.expected,
                    found=disagreement.found,
                    hint="Give all ranks the same model, in the same element types, and the same optimizer.",
                )


def _format_array_info(fact: ArrayInfo | None) -> str:
    if fact is None:
        return MISSING
    dtype, shape, spec, weak_type = fact
    split = f" split as {json.dumps(spec)}" if spec and any(spec) else ""
    return f"{'weak ' if weak_type else ''}{dtype} {list(shape)}{split}"
