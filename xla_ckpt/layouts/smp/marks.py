"""Keys by which SageMaker model parallel (SMP) marks the state dicts that it makes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

IS_PARTIAL = "_smp_is_partial"
"""Whether a state dict is a part of the whole."""

LOAD_INFO = "_smp_load_info"
"""How the job is described that a part of a model is of."""

ZERO_2D = "_smp_zero2d"
"""Whether sharded data parallelism wrote it."""

PP, TP = "pipeline_parallel_degree", "tensor_parallel_degree"
"""Keys of such a description, and of SMP's configuration: how many ranks the job had."""

_NESTED = 3
"""How deep in a dict such marks are looked for."""

STATE_DICT_MARKS = frozenset({IS_PARTIAL, LOAD_INFO, ZERO_2D})


def job_of_part(tree: Any, depth: int = 0) -> tuple[int, int] | None:
    """(pipeline-parallel, tensor-parallel) ranks of the job of which a file holds the part of one; None if it does not.

    >>> job_of_part({"model": {IS_PARTIAL: True, LOAD_INFO: {PP: 2, TP: 1}}}), job_of_part({IS_PARTIAL: False})
    ((2, 1), None)
    """
    if not isinstance(tree, Mapping):
        return None
    info = tree.get(LOAD_INFO)
    if tree.get(IS_PARTIAL) is True and isinstance(info, Mapping):
        pp, tp = info.get(PP, 1), info.get(TP, 1)
        return (pp, tp) if type(pp) is int and type(tp) is int and pp * tp > 1 else None
    below = tree.values() if depth < _NESTED else ()
    return next((job for value in below if (job := job_of_part(value, depth + 1)) is not None), None)
