"""Tags in a list of tags. Of tags of ours this needs neither torch nor orbax."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from xla_ckpt.api.tags import both_places, located
from xla_ckpt.errors import CheckpointError
from xla_ckpt.layouts.base import Layout
from xla_ckpt.layouts.listing import all_tags, beside_tags, find_foreign, roots_below
from xla_ckpt.layouts.opening import open_tag
from xla_ckpt.layouts.registry import layout_of
from xla_ckpt.manifest.records import Manifest
from xla_ckpt.storage.base import FileSystem, ObjectStore, Store
from xla_ckpt.storage.door import PathLike, store_at
from xla_ckpt.tags.entry import TagEntry
from xla_ckpt.tags.facts import facts_of
from xla_ckpt.tags.kept import parsed_policy, why_kept
from xla_ckpt.tree import schema

MAX_DEPTH = 3
"""Levels below a directory at which roots are looked for."""

MAX_LOOKED_AT = 1000
"""Directories that are looked at for that, and names beside the tags of a root."""


Tags = Sequence[tuple[Layout | None, TagEntry]]
"""The tags of a root directory, as `xla_ckpt.layouts.listing.all_tags` has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TagSummary:
    """A tag in a list of tags."""

    tag: str
    sequence: int
    """Number of its commit; 0 if another library wrote it."""

    created: str | None
    """When it was committed, as ISO 8601 has it."""

    pinned: bool
    """Whether retention leaves it alone."""

    arrays: int | None = None
    """Number of arrays; None where no index says it."""

    nbytes: int | None = None
    """Bytes of the arrays, each counted once; of a tag without an index, of its files."""

    files: int | None = None
    ranks: int | None = None
    """How many ranks saved it; None where no index says it."""

    problem: str | None = None
    """Why nothing of this is known: the manifest is damaged."""

    layout: str | None = None
    """Name of the layout, or of the library that wrote it."""

    note: str = ""
    """What else is to be known about it."""

    where: str = ""
    """Of a directory and the bucket where its tags go, where it is: ``local``, ``uploading 40 %``, ``remote`` or
    ``both``. Empty if nobody has asked for both."""

    kept: tuple[str, ...] = ()
    """Why the policy keeps it under which the newest tag was saved; empty if that is not known, or does not keep it."""


_OF_OTHERS = "another library's"
"""Why a tag is kept that this library has not written: it deletes none of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file of a tag."""

    path: str
    """Relative to the tag."""

    size: int
    """Bytes."""


def fields_of(value: Any) -> dict[str, Any]:
    """The fields of a value that has plain ones only, as plain JSON."""
    return {name: getattr(value, name) for name in type(value).__slots__}


def listing_of(
    path: str,
    tags: Sequence[TagSummary],
    roots: Sequence[Mapping[str, Any]] = (),
    beside: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """The tags of a root directory, oldest first, as plain JSON; the newest of them; the roots below it; and what lies
    beside them.
    """
    return {
        "path": path,
        "tags": [fields_of(summary) for summary in tags],
        "newest": tags[-1].tag if tags else None,
        "roots": list(roots),
        "beside": list(beside),
    }


def summaries(store: Store, tags: Tags | None = None) -> tuple[TagSummary, ...]:
    """All tags of a root directory, oldest commit first; `tags` are those of `all_tags`, where somebody has them."""
    tags = all_tags(store) if tags is None else tags
    own = [entry for layout, entry in tags if layout is None]
    others = {entry.tag: (_OF_OTHERS,) for layout, entry in tags if layout is not None}
    looks = {entry.tag: _look(store, layout, entry) for layout, entry in tags}
    # What the next save is to keep is, as far as anybody knows, what the last one was told to.
    policy = parsed_policy(looks[own[-1].tag][1]) if own else None
    reasons = {} if policy is None else {**others, **why_kept(facts_of(store, own), policy)}
    return tuple(replace(summary, kept=reasons.get(tag, ())) for tag, (summary, _) in looks.items())


def summaries_at(path: PathLike) -> tuple[TagSummary, ...]:
    """The tags that a path names: all of a root directory, or the one that the path is itself."""
    store, tag = located(path, None)
    if tag is None:
        return summaries(store)
    if (unlisted := unlisted_summary(store, tag)) is not None:
        return (unlisted,)
    return tuple(summary for summary in summaries(store) if summary.tag == tag)


def unlisted_summary(store: Store, tag: str) -> TagSummary | None:
    """What is no tag, and no root lists, such as a single file; None for a tag."""
    foreign = find_foreign(store, tag)
    return None if foreign is None or foreign[0].tagged else summary_of(store, *foreign)


def beside(store: Store, tags: Tags) -> list[dict[str, Any]]:
    """What else lies in a root directory, as `xla_ckpt.layouts.listing.beside_tags` has it; nothing of a bucket."""
    if store.file_system is None:
        return []
    return [
        {"name": name, "layout": layout.origin or layout.name, "complete": entry.complete}
        for name, layout, entry in beside_tags(store, (entry for _, entry in tags), MAX_LOOKED_AT)
    ]


def summaries_below(path: str, tags: Set[str] = frozenset()) -> list[dict[str, Any]]:
    """The root directories of tags below a directory, by path, with their newest tags. Its own tags are no roots.

    Those `MAX_DEPTH` levels below are found, and `MAX_LOOKED_AT` directories are looked at. An object store with tags
    has what they consist of beside them, under names of its own: there nothing is looked at.
    """
    if tags and store_at(path).file_system is None:
        return []
    roots = roots_below(path, levels=MAX_DEPTH, most=MAX_LOOKED_AT, passed=tags)
    return [{"path": below, "tags": len(its), "newest": its[-1]} for below, its in roots]


def summaries_of_both(near: FileSystem, far: ObjectStore) -> tuple[TagSummary, ...]:
    """All tags of a directory and of the object store where they go, each once, oldest commit first."""
    layouts = {entry.tag: layout for layout, entry in all_tags(far)}
    return tuple(
        replace(summary_of(near if is_near else far, None if is_near else layouts.get(entry.tag), entry), where=where)
        for entry, is_near, where in both_places(near, far)
    )


def summary_of(store: Store, layout: Layout | None, entry: TagEntry) -> TagSummary:
    """A tag of a root directory; `layout` is that of a tag of another library, or None. Does not raise for damage."""
    return _look(store, layout, entry)[0]


def _look(store: Store, layout: Layout | None, entry: TagEntry) -> tuple[TagSummary, Any]:
    """The same, and the policy of retention that the tag says."""
    summary = TagSummary(
        tag=entry.tag, sequence=entry.sequence, created=entry.created, pinned=entry.pinned, note=entry.note
    )
    try:
        if layout is not None:  # it has no index: its directory says what there is
            files = stored_files(store, entry)
            nbytes = sum(file.size for file in files)
            return replace(summary, nbytes=nbytes, files=len(files), layout=layout.origin or layout.name), None
        with open_tag(store, entry.tag) as reader:
            manifest = reader.manifest
    except CheckpointError as error:
        return replace(summary, problem=str(error)), None
    known = replace(
        summary,
        arrays=len(manifest.arrays),
        nbytes=manifest.nbytes,
        files=len(manifest.files),
        ranks=manifest.world,
        layout=layout_of(manifest).name,
        note=", ".join(filter(None, (entry.note, note_of(manifest)))),
    )
    return known, manifest.retention


def note_of(manifest: Manifest) -> str:
    """What is to be known of a tag, as its manifest says it."""
    return "without its base model" if schema.is_without_base(manifest.skeleton) else ""


def stored_files(store: Store, entry: TagEntry) -> tuple[StoredFile, ...]:
    """The files of a tag; those that lie in the root itself are named in it."""
    apart = entry.files or (() if store.is_directory(entry.directory) else (entry.directory,))
    # Files that a path names may be links.
    directory = store.open("", lock=False, links=True) if apart else store.open(entry.directory)
    with closing(directory):
        files = []
        for path in apart or directory.files():
            with closing(directory.open(path)) as source:
                files.append(StoredFile(path=path, size=source.size))
        return tuple(files)
