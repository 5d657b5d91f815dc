"""Keys by which SageMaker model parallel (SMP) marks the state dicts that it makes."""

from __future__ import annotations

IS_PARTIAL = "_smp_is_partial"
"""Whether a state dict is a part of the whole."""

LOAD_INFO = "_smp_load_info"
"""How the job is described that a part of a model is of."""

ZERO_2D = "_smp_zero2d"
"""Whether sharded data parallelism wrote it."""

MARKS = frozenset({IS_PARTIAL, LOAD_INFO, ZERO_2D})
