"""Whether the ranks of a pipeline stage hold the same arrays, of the same element types, shapes and shardings; and
which arrays several stages hold. Pure.

The first rank of a stage reports all of its arrays, and the others a fingerprint. Only those whose fingerprint is
another one report all of theirs, too: records stay small.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from xla_ckpt.errors import SaveError
from xla_ckpt.fingerprint import text_fingerprint
from xla_ckpt.plan.agreement import Disagreement
from xla_ckpt.sharding.mesh import Mesh

ArrayFact = tuple[str, tuple[int, ...], Any, bool | None]
"""(dtype, global shape, spec, weak type) of an array."""

Types = Mapping[str, ArrayFact]
"""By leaf path."""

NOT_THERE = "nothing"


def arrays_fingerprint(types: Types) -> str:
    """The same text for the same arrays."""
    return text_fingerprint(json.dumps(sorted(types.items())))


def odd_ones(fingerprints: Sequence[str], mesh: Mesh) -> list[int]:
    """Ranks that have other arrays than the first rank of their pipeline stage.

    >>> odd_ones(["a", "b", "a", "c"], Mesh(dp=4))
    [1, 3]
    """
    return [rank for rank, own in enumerate(fingerprints) if own != fingerprints[mesh.first_of_stage(rank)]]


def first_stages(stages: Sequence[Sequence[str]]) -> dict[str, int]:
    """The first pipeline stage of each leaf that several hold: that one stores it.

    Args:
        stages: The leaf paths that each of them holds.

    >>> first_stages([["model/wte", "model/0"], ["model/1"], ["model/wte", "model/2"]])
    {'model/wte': 0}
    """
    first: dict[str, int] = {}
    for stage, leaves in enumerate(stages):
        for leaf in leaves:
            first.setdefault(leaf, stage)
    return {leaf: first[leaf] for stage, leaves in enumerate(stages) for leaf in leaves if first[leaf] < stage}


def check_same_arrays(types: Sequence[Types], odd: Sequence[int], mesh: Mesh) -> None:
    """Compare the arrays of ranks that differ with those of the others in their stages.

    Args:
        types: What each rank has reported. What the odd ones and the first of each stage have reported is all.
        odd: The ranks that differ.
        mesh: How the ranks are arranged.

    Raises:
        SaveError: An array is something else on some ranks.
    """
    for stage in sorted({mesh.first_of_stage(rank) for rank in odd}):
        members = [rank for rank in range(len(types)) if mesh.first_of_stage(rank) == stage]
        by_rank = {rank: types[rank if rank in odd else stage] for rank in members}
        for leaf in sorted({leaf for rank in (stage, *odd) if rank in by_rank for leaf in types[rank]}):
            disagreement = Disagreement.among({rank: _text(of.get(leaf)) for rank, of in by_rank.items()})
            if disagreement is not None:
                raise SaveError(
                    "the ranks hold different things under one name, and one array cannot stand for them",
                    leaf=leaf,
                    rank=disagreement.rank,
                    expected=disagreement.expected,
                    found=disagreement.found,
                    hint="Give all ranks the same model, in the same element types, and the same optimizer.",
                )


def _text(fact: ArrayFact | None) -> str:
    if fact is None:
        return NOT_THERE
    dtype, shape, spec, weak_type = fact
    split = f" split as {json.dumps(spec)}" if spec and any(spec) else ""
    return f"{'weak ' if weak_type else ''}{dtype} {list(shape)}{split}"
