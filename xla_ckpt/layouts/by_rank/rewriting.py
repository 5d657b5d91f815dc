"""A conversion to files that hold the state of one rank each."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from xla_ckpt.errors import UsageError
from xla_ckpt.layouts.base import Rewriting, StoredState, Topology
from xla_ckpt.layouts.by_rank.new_job import NewJob
from xla_ckpt.layouts.by_rank.plan import PARTS, check_common
from xla_ckpt.layouts.native import native_files
from xla_ckpt.layouts.torch_save.pickle_writer import LeafAt
from xla_ckpt.plan.file_plan import FilePlan
from xla_ckpt.plan.save_plan import SavePlan
from xla_ckpt.tree import schema

logger = logging.getLogger(__name__)


def members_of_ranks(stored: StoredState, layout: str, whose: str) -> dict[str, Any]:
    """The members of a stored state that such layouts have a place for, with a `LeafAt` for each array.

    Raises:
        UsageError: There are none.
        UnsupportedStateError: One of them has state that every rank has its own of.
    """
    skeleton = stored.manifest.skeleton if isinstance(stored.manifest.skeleton, dict) else {}
    parts = [part for part in PARTS if part in skeleton]
    if not parts:
        raise UsageError(f"the tag holds nothing that {layout} has a place for", expected=", ".join(PARTS))
    check_common(skeleton, whose)
    return {part: stored.tree(part, lambda path, _: LeafAt(path)) for part in parts}


def rewritten(
    job: NewJob,
    to: Topology,
    stored_files: Callable[[int], Sequence[FilePlan]],
    *,
    doubts: Sequence[str] = (),
    marks: Mapping[str, bytes] | None = None,
) -> Rewriting:
    """The files of a conversion: those of the layout, and native ones for what it has no place for.

    Args:
        job: The members that the layout has a place for, as the new job has them.
        stored_files: The layout's files of a rank.
        doubts: What is said in the log beside the doubts of `job`.
    """
    manifest = job.manifest
    for message in (*job.doubts(), *doubts):
        logger.warning("%s", message)
    native, specs = native_files(manifest, [p for p in manifest.arrays if schema.member_of(p) not in job.trees], to)
    files = []
    for rank in range(to.mesh.size):
        plan = SavePlan(tuple(stored_files(rank)))
        files.append((*native[rank], *plan.minus(job.of_earlier_stages(rank)).files))
    specs |= {path: job.spec(path) for path in manifest.arrays if path not in specs}
    return Rewriting(files, specs, marks or {})
