"""What is said where none of SMP's files lie: whose checkpoints do, and which path was meant where nothing lies."""

from __future__ import annotations

import os

from xla_ckpt.facade import PARTIAL, path_meant, writers_at

MAX_LISTED = 10
"""Tags that an error names, at most: the newest."""


def read_otherwise(path: str) -> str | None:
    """Whose checkpoints lie at a path, and which call reads them, or which path was probably meant, as a sentence; None
    if there is nothing to say.
    """
    there = writers_at(path)
    if there is None:
        near = path_meant(path)
        return f"Nothing lies there{near}" if near else None
    writer, tags = there
    root, name = os.path.split(path.rstrip("/"))
    partial = any(each.endswith(PARTIAL) for each in tags or (name,))
    call = "smp.resume_from_checkpoint" if partial else "xla_ckpt.load_checkpoint(..., model=model)"
    if not tags:
        call = f"{call}({root or '.'!r}, tag={name.removesuffix(PARTIAL)!r})" if partial else call
        return f"A checkpoint of {writer} lies there: {call} reads it."
    return f"Checkpoints of {writer} lie there, oldest first: {', '.join(tags[-MAX_LISTED:])}. {call} reads them."
