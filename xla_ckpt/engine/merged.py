"""What rank 0 makes of the records of all ranks: the manifest of the tag, once it is known that they fit together."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import replace

from xla_ckpt.display import join_lines
from xla_ckpt.engine.disks import Disks
from xla_ckpt.engine.garbage_collection import collector_paused
from xla_ckpt.engine.joint_directory import check_written
from xla_ckpt.engine.order import Order
from xla_ckpt.engine.seal import Ending, seal
from xla_ckpt.engine.stale import stale_since
from xla_ckpt.engine.tag_reader import TagReader, reader_within
from xla_ckpt.errors import DivergentReplicasError, SaveError
from xla_ckpt.logs import get_logger
from xla_ckpt.manifest.records import Head, Manifest
from xla_ckpt.plan.merge import Duplicate, merge
from xla_ckpt.plan.record import Record
from xla_ckpt.plan.replicas import DRIFTED, Replicas, first_stored
from xla_ckpt.plan.same_arrays import check_same_arrays
from xla_ckpt.sharding.mesh import Mesh
from xla_ckpt.storage.base import Directory
from xla_ckpt.tags.kept import policy_json
from xla_ckpt.tags.root import Root
from xla_ckpt.tags.transaction import Transaction

logger = get_logger(__name__)


def sealed_manifest(
    order: Order,
    transaction: Transaction,
    records: Sequence[Record],
    odd: Sequence[int],
    mesh: Mesh,
    disks: Disks,
    ending: Ending,
) -> Manifest:
    """The manifest of what all ranks have written; with it, the tag needs nothing but its name.

    Args:
        order: The save.
        transaction: The tag.
        records: What each rank has written.
        odd: The ranks that have other arrays than the first of their pipeline stage.
        mesh: How the ranks are arranged.
        disks: Which disks they see.
        ending: What the tag has besides.

    Raises:
        CheckpointError: The records do not fit together, or the tag repeats the one before it and must not.
        OSError: The storage refused.
    """
    directory = transaction.directory
    if directory.streaming is None:  # else all hosts have one store
        for record in (record for record in records if disks.leader(record.rank) == 0):
            check_written(directory, record.rank, record.files)
    check_same_arrays([record.arrays for record in records], odd, mesh)
    head = new_head(order.root, order.tag, transaction.sequence, pinned=order.pinned)
    manifest = merged_manifest(head, records, mesh, order.options.replicas, directory, order.root.path)
    if order.options.stale != "ignore":
        stale = repeats_the_tag_before(order.root, transaction, manifest)
        if stale is not None and order.options.stale == "raise":
            raise stale
        if stale is not None:
            logger.warning("tag %s: %s", order.tag, stale)
    manifest = replace(manifest, retention=policy_json(order.retention), parity=order.options.parity)
    return seal(transaction, order.root.path, manifest, ending)


def new_head(root: Root, tag: str, sequence: int, *, pinned: bool | None = None) -> Head:
    """The head of a tag that is committed now. If nobody says whether it is pinned, it is as the one that it replaces.

    Raises:
        CheckpointError: The storage refused to say how that is.
    """
    if pinned is None:
        replaced = root.entry(tag)
        pinned = replaced is not None and replaced.pinned
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    return Head(tag=tag, sequence=sequence, pinned=pinned, created=now)


def merged_manifest(
    head: Head, records: Sequence[Record], mesh: Mesh, replicas: Replicas, directory: Directory, path: str
) -> Manifest:
    """The manifest of what all ranks have written into a directory of the root at `path`.

    Raises:
        CheckpointError: The records do not fit together.
        DivergentReplicasError: Two ranks wrote different copies of a region, and replicas have to be equal.
    """
    with collector_paused():
        merged = merge(records, mesh, replicas)
    for warning in merged.warnings:
        logger.warning("tag %s: %s", head.tag, warning)
    with collector_paused():
        manifest = merged.manifest(head, mesh)
    if not merged.duplicates:
        return manifest
    with reader_within(directory, path, head.tag, manifest) as reader:
        different = _different_copies(reader, merged.duplicates)
    if different and replicas == "equal":
        raise _differ(different[0])
    return _with_first(manifest, different) if different else manifest


def _different_copies(reader: TagReader, duplicates: Sequence[Duplicate]) -> list[Duplicate]:
    """Those regions of which ranks that did not know of each other wrote different bytes."""
    return [
        twice
        for twice in duplicates
        if len({reader.digests(f, at, twice.nbytes) for f, at in zip(twice.files, twice.offsets, strict=True)}) > 1
    ]


def _with_first(manifest: Manifest, different: Sequence[Duplicate]) -> Manifest:
    """The manifest, in which arrays are marked of which two ranks wrote different copies. It has the first one."""
    ranks = {twice.leaf: twice.ranks for twice in reversed(different)}
    lines = [f"  {leaf}: rank {a} against rank {b}" for leaf, (a, b) in ranks.items()]
    logger.warning("tag %s: %s", manifest.head.tag, join_lines([first_stored(len(lines)), *lines]))
    return replace(manifest, arrays=manifest.arrays.with_divergent(ranks))


def _differ(twice: Duplicate) -> DivergentReplicasError:
    return DivergentReplicasError(
        f"two ranks hold different values of the region {twice.box}",
        leaf=twice.leaf,
        expected=f"the bytes of rank {twice.ranks[0]}",
        found=f"others on rank {twice.ranks[1]}",
        hint=f"Check mesh and shardings: one of them is likely not what the rank really holds. {DRIFTED}",
    )


def repeats_the_tag_before(root: Root, transaction: Transaction, manifest: Manifest) -> SaveError | None:
    """The error for a tag whose model is that of the tag before it, although training went on; None for any other."""
    with reader_within(transaction.directory, root.path, manifest.head.tag, manifest) as reader:
        evidence = stale_since(root, transaction.newest, reader)
    if evidence is None:
        return None
    before, why = evidence
    return SaveError(
        f"the model has the same bytes as in tag {before}, although training seems to have gone on: {why}",
        hint="Is this the model that is trained, and does its optimizer have its parameters? If all is as it "
        "should be, say options=SaveOptions(stale='ignore').",
    )
