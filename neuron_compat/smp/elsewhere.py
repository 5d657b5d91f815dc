"""What is said where none of SMP's files lie, and checkpoints that other calls read do."""

from __future__ import annotations

from xla_ckpt.facade import PARTIAL, writers_at

MAX_LISTED = 10
"""Tags that an error names, at most: the newest."""


def read_otherwise(path: str) -> str | None:
    """Whose checkpoints lie at a path, and which call reads them, as a sentence; None if there are none."""
    there = writers_at(path)
    if there is None:
        return None
    writer, tags = there
    partial = any(name.endswith(PARTIAL) for name in tags or (path.rstrip("/"),))
    call = "smp.resume_from_checkpoint" if partial else "xla_ckpt.load_checkpoint(..., model=model)"
    if not tags:
        return f"A checkpoint of {writer} lies there: {call} reads it."
    return f"Checkpoints of {writer} lie there, oldest first: {', '.join(tags[-MAX_LISTED:])}. {call} reads them."
