"""Hints name the arguments that load_checkpoint and most calls have. The calls without a model have others instead."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from xla_ckpt.errors import CheckpointError

_MODEL = "model= (--like)"
_BOTH = "model= and optimizer= (--like)"


@contextlib.contextmanager
def without_a_model(instead: str = "xla_ckpt.restore(like=...) (--like)") -> Iterator[None]:
    """For a call that takes no model, have the hints of its errors name what it takes instead.

    Args:
        instead: What says how the arrays were: an argument of the call, or another call that has one.
    """
    try:
        yield
    except CheckpointError as error:
        if error.hint is not None:
            # Numbers get names from a program's model and optimizer alone, and no tree of arrays has those.
            both = error.hint.replace(_BOTH, "xla_ckpt.load_checkpoint(model=..., optimizer=...) (--like)")
            error.hint = both.replace(_MODEL, instead)
        raise
