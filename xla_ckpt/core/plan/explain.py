"""Explain a restore on another mesh from the manifest: the bytes that each rank would read, and all problems."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from xla_ckpt.core.manifest.manifest import Manifest
from xla_ckpt.core.plan.restore_plan import ReadRequest, plan_restore
from xla_ckpt.core.plan.stored_sharding import (
    compute_local_array,
    find_copy_mismatch,
    find_foreign_axes,
    find_leaf_rule,
    resolve_sharding,
)
from xla_ckpt.core.sharding.mesh import Mesh
from xla_ckpt.core.sharding.sharding import ParsedRules, Sharding, find_unused_rules
from xla_ckpt.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReading:
    """Bytes that one rank would read."""

    rank: int
    needed_bytes: int
    """Number of bytes of the arrays that the rank would hold."""

    read_bytes: int
    """Number of bytes read from storage for them."""

    files: Mapping[str, int]
    """Payload file -> number of bytes read from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Outcome of a hypothetical restore."""

    path: str
    tag: str
    saved_mesh: str | None
    saved_ranks: int
    mesh: Mesh
    readings: tuple[RankReading, ...]
    """One entry per rank of the first pipeline stage. Stages divide these reads as they divide the layers."""

    problems: tuple[str, ...]
    """Reasons why the restore would fail."""

    notes: tuple[str, ...] = ()
    """Assumptions that were made."""

    split: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """Leaf path -> spec, for arrays that would be split."""

    @property
    def ok(self) -> bool:
        """True if there are no problems."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """Return the explanation as plain JSON."""
        return {
            "path": self.path,
            "tag": self.tag,
            "saved_mesh": self.saved_mesh,
            "saved_ranks": self.saved_ranks,
            "mesh": str(self.mesh),
            "ok": self.ok,
            "problems": list(self.problems),
            "notes": list(self.notes),
            "split": {leaf: list(how) for leaf, how in self.split.items()},
            "ranks": [
                {"rank": r.rank, "needed_bytes": r.needed_bytes, "read_bytes": r.read_bytes, "files": dict(r.files)}
                for r in self.readings
            ],
        }

    def _repr_html_(self) -> str:
        from xla_ckpt.rendering import html, reports

        return html.render_html(reports.render_explanation(self.to_json()))


def explain_manifest(manifest: Manifest, path: str, tag: str, mesh: Mesh, rules: ParsedRules = ()) -> Explanation:
    """Plan the restore of every array of a checkpoint on `mesh`.

    An array is sharded by the first matching rule, otherwise over the mesh axes that split it when it was saved: the
    rows of ZeRO-1 states over dp, tensor-parallel dims over tp.
    """
    problems: list[str] = []
    foreign: set[str] = set()
    shardings: dict[str, Sharding] = {}
    for leaf, record in manifest.arrays.items():
        if find_leaf_rule(leaf, rules) is None:
            foreign |= find_foreign_axes(record.spec)
        try:
            shardings[leaf] = resolve_sharding(leaf, manifest, rules)
        except ValueError as error:
            problems.append(f"{leaf}: {error}")
    notes = []
    if foreign:
        notes.append(
            f"some arrays were split over {', '.join(sorted(foreign))}, which is no axis of this mesh: those dims are "
            "taken as whole; say otherwise with rules"
        )
    notes += find_unused_rules(rules, manifest.arrays)
    notes += _build_head_notes(shardings, mesh)
    if mesh.pp > 1:
        notes.append(f"over {mesh.pp} pipeline stages each rank reads its own layers' part of these bytes only")
    readings = []
    for rank in range(mesh.size // mesh.pp):
        wants: list[ReadRequest] = []
        for leaf, sharding in list(shardings.items()):
            try:
                local = compute_local_array(leaf, sharding, manifest.arrays[leaf].shape, mesh, rank)
            except ValueError as error:
                problems.append(f"{leaf}: {error}")
                del shardings[leaf]
                continue
            wants += [ReadRequest(leaf, piece.global_box, 0) for piece in local.pieces if piece.global_box.size]
        try:
            readings.append(_plan_rank(manifest, wants, rank))
        except CheckpointError as error:
            problems.append(str(error))
            readings.append(RankReading(rank=rank, needed_bytes=0, read_bytes=0, files={}))
    sizes = mesh.sizes
    split = {leaf: s.spec for leaf, s in shardings.items() if any(sizes[axis] > 1 for axis in s.axes)}
    return Explanation(
        path=path,
        tag=tag,
        saved_mesh=manifest.mesh,
        saved_ranks=manifest.world_size,
        mesh=mesh,
        readings=tuple(readings),
        problems=tuple(dict.fromkeys(problems)),
        notes=tuple(notes),
        split=split,
    )


def _build_head_notes(shardings: Mapping[str, Sharding], mesh: Mesh) -> list[str]:
    """Return a note if the mesh holds another number of key-head copies than the job that saved them."""
    for leaf, sharding in shardings.items():
        try:
            copies = find_copy_mismatch(sharding, mesh)
        except ValueError:
            continue  # reported as a problem of the array
        if copies is not None:
            old, new = copies
            text = f"was saved with kv_size_multiplier={old}, and over this mesh it would have {new}"
            return [f"{leaf} {text}: the heads of the queries stay in the order of the job that saved them"]
    return []


def _plan_rank(manifest: Manifest, requests: Sequence[ReadRequest], rank: int) -> RankReading:
    plan = plan_restore(manifest, requests)
    files = {manifest.files[number].path: nbytes for number, nbytes in plan.bytes_by_file.items()}
    return RankReading(rank=rank, needed_bytes=plan.needed_bytes, read_bytes=plan.read_bytes, files=files)
