"""Merge the records of all ranks into the manifest of a checkpoint.

Rank 0 checks that the records are consistent: the files exist, the arrays agree, replicas are equal. Then it compares
the model with the previous tag, and finalizes the draft.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import replace

from xla_ckpt.core.manifest.manifest import Manifest, ManifestHeader
from xla_ckpt.core.plan.merge import DIVERGED_HINT, DuplicateRegion, ReplicaPolicy, describe_divergence, merge_records
from xla_ckpt.core.plan.rank_consistency import check_same_arrays
from xla_ckpt.core.plan.rank_record import RankRecord
from xla_ckpt.core.sharding.mesh import Mesh
from xla_ckpt.display import join_lines
from xla_ckpt.errors import DivergentReplicasError, SaveError
from xla_ckpt.features.local_first.upload import HostDisks
from xla_ckpt.features.stale import find_stale_evidence
from xla_ckpt.garbage_collection import pause_gc
from xla_ckpt.loading.tag_reader import TagReader, borrow_reader
from xla_ckpt.logs import get_logger
from xla_ckpt.saving.context import SaveContext
from xla_ckpt.saving.finalize import FinalFiles, finalize
from xla_ckpt.saving.write import check_written_files
from xla_ckpt.storage.base import Directory
from xla_ckpt.tags.retention import encode_policy
from xla_ckpt.tags.root import Root, Transaction

logger = get_logger(__name__)


def finalize_manifest(
    context: SaveContext,
    transaction: Transaction,
    records: Sequence[RankRecord],
    mismatched_ranks: Sequence[int],
    mesh: Mesh,
    disks: HostDisks,
    final_files: FinalFiles,
) -> Manifest:
    """Build and write the manifest of the files of all ranks; after this, only the rename of the tag is left.

    Args:
        context: Context of the save.
        transaction: Transaction of the tag.
        records: Records of all ranks, in rank order.
        mismatched_ranks: Ranks whose arrays differ from the first rank of their pipeline stage.
        mesh: Arrangement of the ranks.
        disks: Disks of the hosts.
        final_files: Files to write in addition.

    Raises:
        CheckpointError: The records are inconsistent, or the tag repeats the previous one and `SaveOptions.stale` is
            ``"raise"``.
        OSError: The storage failed.
    """
    directory = transaction.directory
    if directory.streaming is None:  # otherwise all hosts use one store
        for record in (record for record in records if disks.get_leader(record.rank) == 0):
            check_written_files(directory, record.rank, record.files)
    check_same_arrays([record.arrays for record in records], mismatched_ranks, mesh)
    head = build_head(context.root, context.tag, transaction.sequence, pinned=context.pinned)
    manifest = build_manifest(head, records, mesh, context.options.replicas, directory, context.root.path)
    if context.options.stale != "ignore":
        stale = detect_stale_model(context.root, transaction, manifest)
        if stale is not None and context.options.stale == "raise":
            raise stale
        if stale is not None:
            logger.warning("tag %s: %s", context.tag, stale)
    manifest = replace(manifest, retention=encode_policy(context.retention), parity=context.options.parity)
    return finalize(transaction, context.root.path, manifest, final_files)


def build_head(root: Root, tag: str, sequence: int, *, pinned: bool | None = None) -> ManifestHeader:
    """Build the manifest header of a new tag. `pinned=None` inherits the value of the tag that it replaces.

    Raises:
        CheckpointError: The storage failed to read the existing tag.
    """
    if pinned is None:
        replaced = root.get_entry(tag)
        pinned = replaced is not None and replaced.pinned
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    return ManifestHeader(tag=tag, sequence=sequence, pinned=pinned, created=now)


def build_manifest(
    head: ManifestHeader,
    records: Sequence[RankRecord],
    mesh: Mesh,
    replicas: ReplicaPolicy,
    directory: Directory,
    path: str,
) -> Manifest:
    """Build the manifest of the files that all ranks have written to `directory`, in the root at `path`.

    Raises:
        CheckpointError: The records are inconsistent.
        DivergentReplicasError: Two ranks wrote different copies of a region, and replicas must be equal.
    """
    with pause_gc():
        merged = merge_records(records, mesh, replicas)
    for warning in merged.warnings:
        logger.warning("tag %s: %s", head.tag, warning)
    with pause_gc():
        manifest = merged.build_manifest(head, mesh)
    if not merged.duplicates:
        return manifest
    with borrow_reader(directory, path, head.tag, manifest) as reader:
        different = _find_different_copies(reader, merged.duplicates)
    if different and replicas == "equal":
        raise _make_divergence_error(different[0])
    return _mark_divergent(manifest, different) if different else manifest


def _find_different_copies(reader: TagReader, duplicates: Sequence[DuplicateRegion]) -> list[DuplicateRegion]:
    """Return the regions of which ranks without knowledge of each other wrote different bytes."""
    return [
        twice
        for twice in duplicates
        if len({reader.get_digests(f, at, twice.nbytes) for f, at in zip(twice.files, twice.offsets, strict=True)}) > 1
    ]


def _mark_divergent(manifest: Manifest, different: Sequence[DuplicateRegion]) -> Manifest:
    """Return the manifest with divergent arrays marked; it refers to the first of their two copies."""
    ranks = {twice.leaf: twice.ranks for twice in reversed(different)}
    lines = [f"  {leaf}: rank {a} against rank {b}" for leaf, (a, b) in ranks.items()]
    logger.warning("tag %s: %s", manifest.header.tag, join_lines([describe_divergence(len(lines)), *lines]))
    return replace(manifest, arrays=manifest.arrays.mark_divergent(ranks))


def _make_divergence_error(twice: DuplicateRegion) -> DivergentReplicasError:
    return DivergentReplicasError(
        f"two ranks hold different values of the region {twice.box}",
        leaf=twice.leaf,
        expected=f"the bytes of rank {twice.ranks[0]}",
        found=f"others on rank {twice.ranks[1]}",
        hint=f"Check mesh and shardings: one of them is likely not what the rank really holds. {DIVERGED_HINT}",
    )


def detect_stale_model(root: Root, transaction: Transaction, manifest: Manifest) -> SaveError | None:
    """Return an error if the model is unchanged since the previous tag although training continued; otherwise None."""
    with borrow_reader(transaction.directory, root.path, manifest.header.tag, manifest) as reader:
        evidence = find_stale_evidence(root, transaction.newest, reader)
    if evidence is None:
        return None
    before, why = evidence
    return SaveError(
        f"the model has the same bytes as in tag {before}, although training seems to have gone on: {why}",
        hint="Is this the model that is trained, and does its optimizer have its parameters? If all is as it "
        "should be, say options=SaveOptions(stale='ignore').",
    )
