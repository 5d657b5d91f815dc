"""A conversion to files that hold the state of one rank each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from xla_ckpt.errors import UsageError
from xla_ckpt.layouts.base import Rewriting, StoredState, Topology
from xla_ckpt.layouts.by_rank.layout import RankLayout
from xla_ckpt.layouts.by_rank.new_job import NewJob
from xla_ckpt.layouts.by_rank.plan import PARTS, Laying, check_common, name_in_job
from xla_ckpt.layouts.native import native_files
from xla_ckpt.layouts.torch_save.pickle_writer import LeafAt
from xla_ckpt.logs import get_logger
from xla_ckpt.plan.file_plan import FilePlan
from xla_ckpt.plan.save_plan import SavePlan
from xla_ckpt.tree import path as paths
from xla_ckpt.tree import schema

logger = get_logger(__name__)


def new_job(layout: RankLayout, stored: StoredState, to: Topology) -> NewJob:
    """The job that the files are for, and what it has of the members that such layouts have a place for.

    Raises:
        UsageError: There are none, or the cuts of the pipeline do not fit.
        UnsupportedStateError: The layout has no place for such a job, or for state that every rank has its own of.
    """
    skeleton = stored.manifest.skeleton if isinstance(stored.manifest.skeleton, dict) else {}
    parts = [part for part in PARTS if part in skeleton]
    if not parts:
        raise UsageError(
            f"the tag holds nothing that the layout {layout.name} has a place for",
            expected=", ".join(PARTS),
            found=paths.listed([*map(str, skeleton)]) or "no dict",
            hint='Convert it to another layout: to="dcp" (--to dcp), for instance.',
        )
    check_common(skeleton, layout.name)
    zero1 = bool(to.zero1)
    name_in_job(layout.names, to.mesh, dealt=zero1)
    trees = {part: stored.tree(part, lambda path, _: LeafAt(path)) for part in parts}
    return NewJob(
        manifest=stored.manifest, trees=trees, mesh=to.mesh, rules=to.rules, cuts=to.pipeline_cuts, zero1=zero1
    )


def rewritten(
    layout: RankLayout,
    job: NewJob,
    to: Topology,
    files_of: Callable[[Laying], Sequence[FilePlan]] | None = None,
) -> Rewriting:
    """The files of a conversion: those of the layout, and native ones for what it has no place for.

    Args:
        files_of: The layout's files of a rank, where `RankLayout.files_of` does not say them.
    """
    manifest, files_of = job.manifest, files_of or layout.files_of
    for message in job.doubts():
        logger.warning("%s", message)
    native, specs = native_files(manifest, [p for p in manifest.arrays if schema.member_of(p) not in job.trees], to)
    files = []
    for rank in range(to.mesh.size):
        plan = SavePlan(tuple(files_of(Laying(to.mesh, rank, job.state(rank)))))
        files.append((*native[rank], *plan.minus(job.of_earlier_stages(rank)).files))
    specs |= {path: job.spec(path) for path in manifest.arrays if path not in specs}
    return Rewriting(files, specs, layout.marks)
