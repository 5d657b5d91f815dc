"""What the commands report, as plain JSON. Of tags of ours they need neither torch nor orbax."""

from __future__ import annotations

import importlib
import os
import re
import sys
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from xla_ckpt.api.tags import chosen_tag, list_tags, repair, verify
from xla_ckpt.engine.measured import measured_of
from xla_ckpt.engine.parity import parity_of
from xla_ckpt.errors import CheckpointError, UsageError
from xla_ckpt.layouts.base import Layout
from xla_ckpt.layouts.registry import all_tags, find_foreign, layout_of, no_tag, open_tag, tag_directory
from xla_ckpt.manifest.records import ArrayRecord, UnknownArray
from xla_ckpt.sharding.rules import Rules, parse_rules
from xla_ckpt.storage.base import Store
from xla_ckpt.storage.door import full_path, store_at
from xla_ckpt.tags.directory import TagEntry, names_in, open_directory
from xla_ckpt.tree import path as paths
from xla_ckpt.tree import schema
from xla_ckpt.tree.skeleton import plain_values

MAX_DEPTH = 3
"""Levels below a directory at which roots are looked for."""

MAX_LOOKED_AT = 1000
"""Directories that are looked at for that."""

if TYPE_CHECKING:
    from xla_ckpt.api.llama import Config


def locate(path: str, tag: str | None) -> tuple[str, str | None]:
    """Root directory and tag from what a person types: a root, or the directory of a tag itself."""
    if tag is None and (found := tag_directory(full_path(path))) is not None:
        return found[0].path, found[1]
    return full_path(path), tag


def locate_beside(root: str, path: str, tag: str | None) -> tuple[str, str | None]:
    """The same of the second of two tags, which may be named as a tag in the root directory of the first."""
    if tag is None and "/" not in path and path in list_tags(root) and not store_at(full_path(path)).has(""):
        return root, path
    return locate(path, tag)


def newest(root: str, tag: str | None) -> str:
    """`tag`, or the newest there is.

    Raises:
        NoCheckpointError: There is none.
    """
    return chosen_tag(store_at(root), tag)


def list_facts(root: str) -> dict[str, Any]:
    """All tags of a root directory, oldest first."""
    store = store_at(root)
    if not store.is_directory(""):
        raise no_tag(store, None)
    tags = [_tag_facts(store, layout, entry) for layout, entry in all_tags(store)]
    return {"path": root, "tags": tags, "roots": [] if tags else roots_below(root)}


def roots_below(path: str) -> list[dict[str, Any]]:
    """The root directories of tags below a directory that has no tags itself, by path, with their newest tags.

    Those `MAX_DEPTH` levels below are found, and `MAX_LOOKED_AT` directories are looked at.
    """
    found: list[dict[str, Any]] = []
    level, left = [path], MAX_LOOKED_AT
    for _ in range(MAX_DEPTH):
        below: list[str] = []
        for directory in level:
            store = store_at(directory)
            names = [n for n in names_in(store) if not n.startswith(".") and store.is_directory(n)][:left]
            left -= len(names)
            for name in names:
                child = f"{directory.rstrip('/')}/{name}"
                if tags := list_tags(child):
                    found.append({"path": child, "tags": len(tags), "newest": tags[-1]})
                else:
                    below.append(child)
        level = below
    return sorted(found, key=lambda root: root["path"])


def tag_list_facts(root: str, tag: str) -> dict[str, Any]:
    """The same of one tag, or of what is none, and which no root lists: a single file, say."""
    store = store_at(root)
    found = find_foreign(store, tag)
    if found is not None and not found[0].tagged:
        return {"path": root, "tags": [_tag_facts(store, *found)], "roots": []}
    facts = list_facts(root)
    return {**facts, "tags": [t for t in facts["tags"] if t["tag"] == tag]}


def _tag_facts(store: Store, layout: Layout | None, entry: TagEntry) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "tag": entry.tag,
        "sequence": entry.sequence,
        "created": entry.created,
        "pinned": entry.pinned,
        "arrays": None,
        "nbytes": None,
        "files": None,
        "ranks": None,
        "problem": None,
        "layout": None,
        "note": entry.note,
    }
    try:
        if layout is not None:  # it has no index: its directory says what there is
            files = _files(store, entry)
            nbytes = sum(size for _, size in files)
            return {**facts, "nbytes": nbytes, "files": len(files), "layout": layout.origin or layout.name}
        with open_tag(store, entry.tag) as reader:
            manifest = reader.manifest
    except CheckpointError as error:
        return {**facts, "problem": str(error)}
    return {
        **facts,
        "arrays": len(manifest.arrays),
        "nbytes": manifest.nbytes,
        "files": len(manifest.files),
        "ranks": manifest.world,
        "layout": layout_of(manifest).name,
    }


def _files(store: Store, entry: TagEntry) -> list[tuple[str, int]]:
    """Path and bytes of each file of a tag; those that lie in the root itself are named in it."""
    apart = entry.files or (() if store.is_directory(entry.directory) else (entry.directory,))
    # Files that a path names may be links.
    directory = store.open("", lock=False, links=True) if apart else store.open(entry.directory)
    with closing(directory):
        found = []
        for path in apart or directory.files():
            with closing(directory.open(path)) as source:
                found.append((path, source.size))
        return found


def show_facts(
    root: str,
    tag: str,
    pattern: str | None,
    rules: Rules = (),
    model: Any = None,
    optimizer: Any = None,
    *,
    config: Config | None = None,
    kv_size_multiplier: int | None = None,
    hardware: str | None = None,
) -> dict[str, Any]:
    """Everything that the manifest of a tag says. `pattern` selects leaves, as in a shell."""
    from xla_ckpt.api.llama import known_model
    from xla_ckpt.api.opened import opened

    store = store_at(root)
    known = known_model(config, kv_size_multiplier, hardware)
    with opened(store, tag, parse_rules(rules), model, optimizer, known=known) as reader:
        manifest, survives = reader.manifest, parity_of(reader.directory)
    found = find_foreign(store, tag)
    leaves = [*manifest.arrays, *manifest.unknown, *manifest.aliases, *plain_values(manifest.skeleton)]
    if not any(paths.is_like(leaf, pattern) for leaf in leaves):
        tops = ", ".join(dict.fromkeys(leaf.partition("/")[0] for leaf in leaves))
        raise UsageError("no leaf is like this", path=root, tag=tag, found=pattern, hint=f"Leaves begin with: {tops}.")
    head = manifest.head
    chosen = {leaf: r for leaf, r in manifest.arrays.items() if paths.is_like(leaf, pattern)}
    unknown = {leaf: u for leaf, u in manifest.unknown.items() if paths.is_like(leaf, pattern)}
    files = [(f.path, f.size) for f in manifest.files] if found is None else _files(store, found[1])
    arrays = [
        {
            "leaf": leaf,
            "dtype": r.dtype.name,
            "shape": list(r.shape),
            "nbytes": r.nbytes,
            "shards": sum(g.grid.cells for g in r.grids),
        }
        for leaf, r in chosen.items()
    ]
    return {
        "path": root,
        "tag": tag,
        "sequence": head.sequence,
        "created": head.created,
        "pinned": head.pinned,
        "parity": survives,
        "version": head.version,
        "mesh": manifest.mesh,
        "ranks": manifest.world,
        # Of a tag without an index the bytes of all arrays are not known: its files say what is stored.
        "nbytes": manifest.nbytes if found is None else sum(size for _, size in files),
        "arrays": arrays,
        "parts": _parts([*chosen.items(), *unknown.items()]),
        "unknown": [_unknown_facts(group) for group in UnknownArray.by_reason(unknown)],
        "layout": layout_of(manifest).name if found is None else found[0].origin or found[0].name,
        "divergent": [leaf for leaf in chosen if chosen[leaf].divergent],
        "aliases": {a: t for a, t in manifest.aliases.items() if paths.is_like(a, pattern)},
        "values": {leaf: v for leaf, v in plain_values(manifest.skeleton).items() if paths.is_like(leaf, pattern)},
        "files": [{"path": path, "size": size} for path, size in files],
    }


def report_facts(root: str, tag: str) -> dict[str, Any]:
    """What the ranks measured of the save of a tag, until its commit; the slowest rank first."""
    store = store_at(root)
    if find_foreign(store, tag) is None:
        with closing(open_directory(store, tag)) as directory:
            ranks, measured = measured_of(store, tag, directory.name)
    else:
        ranks, measured = measured_of(store, tag, tag)  # says that it has none
    return {
        "path": root,
        "tag": tag,
        "ranks": ranks,
        "seconds": max((p.ended for m in measured for p in m.phases.values()), default=0.0),
        "measured": [
            {
                "rank": m.rank,
                "stall": m.stall,
                "done": m.done,
                "nbytes": m.nbytes,
                "files": m.files,
                "phases": {name: asdict(phase) for name, phase in m.phases.items()},
            }
            for m in measured
        ],
    }


def _parts(arrays: list[tuple[str, ArrayRecord | UnknownArray]]) -> list[dict[str, Any]]:
    """Number and bytes of the arrays of each part of the state: of known ones each byte once, of others as stored."""
    parts: dict[str, dict[str, Any]] = {}
    for leaf, array in sorted(arrays, key=lambda pair: _place(pair[0])):
        if isinstance(array, ArrayRecord) or array.tensors:
            part = parts.setdefault(leaf.split("/")[0], {"arrays": 0, "nbytes": 0})
            part["arrays"] += 1
            part["nbytes"] += array.nbytes
    return [{"part": name, **facts} for name, facts in parts.items()]


def _place(leaf: str) -> int:
    """Where the part of a leaf stands in a training state."""
    part = leaf.split("/", maxsplit=1)[0]
    return schema.MEMBERS.index(part) if part in schema.MEMBERS else len(schema.MEMBERS)


def _unknown_facts(group: dict[str, UnknownArray]) -> dict[str, Any]:
    """Arrays of which it is not known, for the same reason, how they were split."""
    first = next(iter(group.values()))
    arrays = [
        {
            "leaf": leaf,
            "dtype": None if array.dtype is None else array.dtype.name,
            "rank_shape": None if array.shape is None else list(array.shape),
            "tensors": array.tensors,
            "nbytes": array.nbytes,
            "expected": array.expected,
            "found": array.found,
        }
        for leaf, array in group.items()
    ]
    return {"problem": first.problem, "hint": first.hint, "arrays": arrays}


def verify_facts(root: str, tag: str, *, repairs: bool = False) -> dict[str, Any]:
    """What reading all bytes of a tag found, which is repaired first if that is wanted."""
    repaired = repair(root, tag) if repairs else ()
    report = verify(root, tag)
    return {
        "path": root,
        "tag": tag,
        "ok": report.ok,
        "arrays": report.arrays,
        "files": report.files,
        "nbytes": report.nbytes,
        "seconds": round(report.seconds, 3),
        "strangers": report.strangers,
        "repaired": list(repaired),
        "digests": report.digests,
        "problems": [{"message": str(p), **p.to_json()} for p in report.problems],
    }


def spec(text: str) -> tuple[Any, ...]:
    """A sharding as a person types it.

    >>> spec("tp,_"), spec("dp+tp"), spec("tp*3")
    (('tp', None), (('dp', 'tp'),), (('tp', 3),))

    Sections stand behind a colon (`xla_ckpt.sharding.sections`):

    >>> spec("tp:4096+1024x4+1024x4,_"), spec("tp:x2")
    ((('tp', [4096, '1024x4', '1024x4']), None), (('tp', ['x2']),))

    Where no dim is split, arrays of any number of dims are meant.

    >>> spec("_")
    ()
    """
    dims = tuple(_split(word.strip()) for word in text.split(","))
    return dims if any(d is not None for d in dims) else ()


def _split(word: str) -> Any:
    if word.lower() in ("_", "-", "none", ""):
        return None
    word, colon, sections = word.partition(":")
    names, _, stride = word.partition("*")
    axes: tuple[Any, ...] = tuple(names.split("+"))
    if colon:
        return (*axes, [int(s) if s.isdigit() else s for s in map(str.strip, sections.split("+"))])
    if stride.isdigit():
        return (*axes, int(stride))
    return axes if len(axes) > 1 else word


def explain_facts(
    root: str,
    tag: str,
    mesh: str,
    rules: Rules,
    model: Any = None,
    optimizer: Any = None,
    **known: Any,
) -> dict[str, Any]:
    """What a restore over a mesh would do; `known` is what `explain` takes about a Llama-like model."""
    from xla_ckpt.api.explain import explain

    found = explain(root, tag, mesh=mesh, shardings=rules, model=model, optimizer=optimizer, **known)
    return {
        "path": root,
        "tag": tag,
        "saved_mesh": found.saved_mesh,
        "saved_ranks": found.saved_ranks,
        "mesh": str(found.mesh),
        "ok": found.ok,
        "problems": list(found.problems),
        "notes": list(found.notes),
        "split": {leaf: list(how) for leaf, how in found.split.items()},
        "ranks": [
            {"rank": r.rank, "needed_bytes": r.needed_bytes, "read_bytes": r.read_bytes, "files": dict(r.files)}
            for r in found.readings
        ],
    }


def targets(name: str | None) -> tuple[Any, Any]:
    """(model, optimizer) from what a function of the user's own returns: both, or a model alone.

    Raises:
        UsageError: There is no such function, or it fails.
    """
    if name is None:
        return None, None
    module, _, function = name.partition(":")
    if not module or not function:
        raise UsageError("--like names a function", expected="MODULE:FUNCTION, such as my_job:build", found=name)
    sys.path.insert(0, os.getcwd())  # as python -m does
    try:
        made = getattr(importlib.import_module(module), function)()
    except Exception as error:
        # It is the user's code, and may raise anything.
        raise UsageError(
            f"the model could not be made: {type(error).__name__}: {error}", expected="MODULE:FUNCTION", found=name
        ) from error
    finally:
        sys.path.remove(os.getcwd())
    if made is None:
        raise UsageError("the function returns nothing", expected="the model, or (model, optimizer)", found=name)
    return (made[0], made[1]) if isinstance(made, tuple) else (made, None)


def nbytes(text: str) -> int:
    """A number of bytes as a person types it.

    >>> nbytes("5GB"), nbytes("1.5 mb"), nbytes("4096")
    (5000000000, 1500000, 4096)
    """
    found = re.fullmatch(r"([0-9.]+)\s*([kmgt]?)b?", text.strip().lower())
    if found is None:
        raise ValueError(f"{text!r} is no size; write 5GB or 500MB")
    return int(float(found.group(1)) * 1000 ** " kmgt".index(found.group(2) or " "))
