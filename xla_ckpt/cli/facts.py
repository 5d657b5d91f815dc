"""What the commands report, as plain JSON. Needs neither torch nor orbax."""

from __future__ import annotations

import fnmatch
import os
import re
from typing import Any

from xla_ckpt.api.explain import explain
from xla_ckpt.api.tags import verify
from xla_ckpt.engine.tag_reader import TagReader
from xla_ckpt.errors import CheckpointError
from xla_ckpt.format.manifest import Manifest
from xla_ckpt.tags.directory import TagEntry, entries, no_such_tag, open_tag
from xla_ckpt.tree import path as paths
from xla_ckpt.tree.weave import children


def locate(path: str, tag: str | None) -> tuple[str, str | None]:
    """Root directory and tag from what a person types: a root, or the directory of a tag itself."""
    root = os.path.abspath(path)
    if tag is None and os.path.exists(os.path.join(root, "manifest.json")):
        return os.path.dirname(root), os.path.basename(root)
    return root, tag


def newest(root: str, tag: str | None) -> str:
    """`tag`, or the newest there is.

    Raises:
        NoCheckpointError: There is none.
    """
    if tag is not None:
        return tag
    there = entries(root)
    if not there:
        raise no_such_tag(root, None)
    return there[-1].tag


def list_facts(root: str) -> dict[str, Any]:
    """All tags of a root directory, oldest first."""
    if not os.path.isdir(root):
        raise no_such_tag(root, None)
    return {"path": root, "tags": [_tag_facts(root, entry) for entry in entries(root)]}


def _tag_facts(root: str, entry: TagEntry) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "tag": entry.tag, "sequence": entry.sequence, "created": entry.created, "pinned": entry.pinned,
        "arrays": None, "nbytes": None, "files": None, "ranks": None, "problem": None,
    }  # fmt: skip
    try:
        with TagReader(open_tag(root, entry.tag), root, entry.tag) as reader:
            manifest = reader.manifest
    except CheckpointError as error:
        return {**facts, "problem": str(error)}
    return {
        **facts, "arrays": len(manifest.arrays), "nbytes": manifest.nbytes, "files": len(manifest.files),
        "ranks": manifest.world,
    }  # fmt: skip


def show_facts(root: str, tag: str, pattern: str | None) -> dict[str, Any]:
    """Everything that the manifest of a tag says. `pattern` selects leaves, as in a shell."""
    with TagReader(open_tag(root, tag), root, tag) as reader:
        manifest = reader.manifest
    head = manifest.head
    chosen = {leaf: r for leaf, r in manifest.arrays.items() if _matches(leaf, pattern)}
    arrays = [
        {"leaf": leaf, "dtype": r.dtype.name, "shape": list(r.shape), "nbytes": r.nbytes,
         "shards": sum(g.grid.cells for g in r.grids)}
        for leaf, r in chosen.items()
    ]  # fmt: skip
    return {
        "path": root, "tag": tag, "sequence": head.sequence, "created": head.created, "pinned": head.pinned,
        "version": head.version, "mesh": manifest.mesh, "ranks": manifest.world, "nbytes": manifest.nbytes,
        "arrays": arrays,
        "aliases": {a: t for a, t in manifest.aliases.items() if _matches(a, pattern)},
        "values": {leaf: v for leaf, v in plain_values(manifest).items() if _matches(leaf, pattern)},
        "files": [{"path": f.path, "size": f.size} for f in manifest.files],
    }  # fmt: skip


def _matches(leaf: str, pattern: str | None) -> bool:
    return pattern is None or fnmatch.fnmatchcase(leaf, pattern) or paths.is_under(leaf, pattern)


def plain_values(manifest: Manifest) -> dict[str, Any]:
    """Leaf path -> typed JSON of every value of the state that is no array."""
    found: dict[str, Any] = {}

    def visit(skeleton: Any, path: str) -> None:
        below = children(skeleton)
        if below:
            for part, child in below.items():
                visit(child, paths.join(path, part))
        elif not (isinstance(skeleton, dict) and "$array" in skeleton):
            found[path] = skeleton

    visit(manifest.skeleton, paths.ROOT)
    return found


def verify_facts(root: str, tag: str) -> dict[str, Any]:
    """What reading all bytes of a tag found."""
    report = verify(root, tag)
    return {
        "path": root, "tag": tag, "ok": report.ok, "arrays": report.arrays, "files": report.files,
        "nbytes": report.nbytes, "seconds": round(report.seconds, 3), "strangers": report.strangers,
        "problems": [{"message": str(p), **p.to_json()} for p in report.problems],
    }  # fmt: skip


def spec(text: str) -> tuple[Any, ...]:
    """A sharding as a person types it.

    >>> spec("tp,_"), spec("dp+tp")
    (('tp', None), (('dp', 'tp'),))
    """
    words = [w.strip() for w in text.split(",")]
    return tuple(None if w.lower() in ("_", "-", "none", "") else tuple(w.split("+")) if "+" in w else w for w in words)


def explain_facts(root: str, tag: str, mesh: str, rules: list[tuple[str, Any]]) -> dict[str, Any]:
    """What a restore over a mesh would do."""
    found = explain(root, tag, like_mesh=mesh, shardings=rules)
    return {
        "path": root, "tag": tag, "saved_mesh": found.saved_mesh, "saved_ranks": found.saved_ranks,
        "mesh": str(found.mesh), "ok": found.ok, "problems": list(found.problems), "notes": list(found.notes),
        "split": {leaf: list(how) for leaf, how in found.split.items()},
        "ranks": [
            {"rank": r.rank, "needed_bytes": r.needed_bytes, "read_bytes": r.read_bytes, "files": dict(r.files)}
            for r in found.readings
        ],
    }  # fmt: skip


def nbytes(text: str) -> int:
    """A number of bytes as a person types it.

    >>> nbytes("5GB"), nbytes("1.5 mb"), nbytes("4096")
    (5000000000, 1500000, 4096)
    """
    found = re.fullmatch(r"([0-9.]+)\s*([kmgt]?)b?", text.strip().lower())
    if found is None:
        raise ValueError(f"{text!r} is no size; write 5GB or 500MB")
    return int(float(found.group(1)) * 1000 ** " kmgt".index(found.group(2) or " "))
