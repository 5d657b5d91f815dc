"""The tags in a root directory: those of this library, and those that other libraries wrote, of any layout."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Set

from xla_ckpt.errors import UsageError, storage_errors
from xla_ckpt.layouts.base import Layout
from xla_ckpt.layouts.foreign_tags import by_numbers
from xla_ckpt.layouts.registry import all_layouts
from xla_ckpt.logs import get_logger
from xla_ckpt.storage import door
from xla_ckpt.storage.base import Store
from xla_ckpt.tags.entry import MANIFEST, TagEntry
from xla_ckpt.tags.listing import names_in
from xla_ckpt.tags.names import is_tag_name
from xla_ckpt.tags.root import Root
from xla_ckpt.tags.roots import root_of

logger = get_logger(__name__)

MAX_BESIDE = 100
"""Names in a root that are looked at to find out whether something newer than its tags is not complete."""


def all_tags(store: Store) -> list[tuple[Layout | None, TagEntry]]:
    """All complete tags, oldest first, with the layout that opens each: None for tags of ours, which have a manifest.

    Those without a commit number come first: ours continue them.

    Raises:
        StorageError: The directory cannot be read.
    """
    root = root_of(store)
    ours = root.entries()
    known = {e.tag for e in ours}
    names = [name for name in names_in(store) if name not in known and _may_be_foreign(root, name)]
    foreign: list[tuple[float, Layout, TagEntry]] = []
    for layout in all_layouts() if names else ():
        latest = 0.0
        for entry in layout.tags(store, names):
            # A tag of ours that was just being replaced, in this layout, has its manifest again.
            if entry.tag not in known and not root.is_ours(entry.tag):
                known.add(entry.tag)
                # Those of one layout keep its own order, which need not be that of the time stamps.
                latest = max(latest, _time(entry) if entry.created else 0.0)
                foreign.append((latest, layout, entry))
    foreign.sort(key=lambda of_tag: of_tag[0])
    return [*((layout, entry) for _, layout, entry in foreign), *((None, entry) for entry in ours)]


def tag_names(store: Store) -> list[str]:
    """Names of all complete tags, oldest first.

    Raises:
        StorageError: The directory cannot be read.
    """
    return [entry.tag for _, entry in all_tags(store)]


def beside_tags(store: Store, tags: Iterable[TagEntry], most: int) -> list[tuple[str, Layout, TagEntry]]:
    """What other libraries have in a root directory, and no list of its tags has: the name of each, its layout, itself.

    These are checkpoints that are opened by their own path alone, such as files of torch.save, and incomplete tags.

    Args:
        store: The root directory.
        tags: All of its tags.
        most: How many names are looked at.

    Raises:
        StorageError: The directory cannot be read.
    """
    listed = {name for entry in tags for name in (entry.tag, *entry.files)}
    names = [name for name in sorted(names_in(store)) if name not in listed and not name.startswith(".")]
    there = [(name, foreign) for name in names[:most] if (foreign := find_foreign(store, name)) is not None]
    parts = {file for name, (_, entry) in there for file in entry.files if file != name}
    return [(name, *foreign) for name, foreign in there if name not in parts]


def roots_below(path: str, *, levels: int, most: int, passed: Set[str] = frozenset()) -> list[tuple[str, list[str]]]:
    """The root directories below a directory: the path of each, and its tags, oldest first.

    Nothing is looked for in a root, nor in what begins with a dot. A checkpoint of another library's that is not
    complete is no root of the parts that it has left.

    Args:
        path: The directory, which may be a root itself.
        levels: How many levels below it are looked at.
        most: How many directories are looked at.
        passed: Names in it that are left out: its own tags.

    Raises:
        StorageError: A directory cannot be read.
    """
    roots: list[tuple[str, list[str]]] = []
    level = [path]
    for _ in range(levels):
        below: list[str] = []
        for directory in level:
            store = door.store_at(directory)
            names = [n for n in names_in(store) if not n.startswith(".") and not (directory == path and n in passed)]
            directories = [n for n in names if store.is_directory(n)][:most]
            most -= len(directories)
            for name in directories:
                child = f"{directory.rstrip('/')}/{name}"
                if not (tags := tag_names(door.store_at(child).look())):
                    below.append(child)
                elif (foreign := find_foreign(store.look(), name)) is None or foreign[1].complete:
                    roots.append((child, tags))
        level = below
    return sorted(roots)


def newest_last(store: Store) -> list[TagEntry]:
    """All complete tags, for a caller who takes the last one: which that is, is decided here alone.

    A warning says if a tag of another library has a newer time stamp than the newest one of ours, before which it is;
    and which newer ones of another library are not complete.

    Raises:
        StorageError: The directory cannot be read.
    """
    tags = all_tags(store)
    entries = [entry for _, entry in tags]
    foreign = [(layout.origin, entry) for layout, entry in tags if layout is not None and entry.created]
    if foreign and tags[-1][0] is None and entries[-1].created:
        origin, passed_over = max(foreign, key=lambda pair: _time(pair[1]))
        if _time(passed_over) > _time(entries[-1]):
            logger.warning(
                "%s: tag %s, in the form of %s, has a newer time stamp than %s, which is taken for the newest: name "
                "the tag if it is not",
                store.path,
                passed_over.tag,
                origin,
                entries[-1].tag,
            )
    if tags and tags[-1][0] is not None and store.file_system is not None:  # a bucket counts requests
        for name, layout, entry in beside_tags(store, entries, MAX_BESIDE):
            if not entry.complete and by_numbers([entries[-1], entry])[-1] is entry:
                logger.warning(
                    "%s: %s's %s is not complete, and passed over: tag %s is taken for the newest",
                    store.path,
                    layout.origin,
                    name,
                    entries[-1].tag,
                )
    return entries


def _time(entry: TagEntry) -> float:
    return datetime.datetime.fromisoformat(entry.created).timestamp()


def find_foreign(store: Store, tag: str) -> tuple[Layout, TagEntry] | None:
    """A tag that another library wrote, or that is its own, complete or not, and its layout; None if there is none."""
    root = root_of(store)
    if _may_be_foreign(root, tag):
        for layout in all_layouts():
            with storage_errors("looking for a tag", path=store.path, tag=tag):
                entry = layout.find(store, tag)
            if entry is not None:
                # A tag of ours that was just being replaced, in this layout, has its manifest again.
                return None if root.is_ours(tag) else (layout, entry)
    return None


def has_manifest(store: Store, entry: TagEntry) -> bool:
    """Whether what lies there as another library's tag has a manifest of ours: a conversion has put it into an object
    store in that library's place, or somebody has copied it there. It is opened by it, and is that library's all the
    same: no retention counts it.
    """
    return entry.complete and store.has(f"{entry.directory}/{MANIFEST}")


def _may_be_foreign(root: Root, name: str) -> bool:
    """Whether what has this name may be a tag that another library wrote."""
    return is_tag_name(name) and not root.knows(name)


def _holds_tags(root: Store, layout: Layout) -> bool:
    """Whether tags lie in what is a checkpoint of another library itself."""
    if layout.may_hold_tags:
        return bool(all_tags(root))
    # Where a root of ours in an object store is one, this is certain, and nobody asks here.
    return root.file_system is not None and root.is_directory("") and bool(root_of(root).entries())


def named_itself(root: Store) -> tuple[Store, str] | None:
    """(root directory, tag) if a root is a tag itself, or (directory above, name) of what a tag is made of.

    A directory in which there are tags is their root, whatever else lies in it: tags of ours in any case, those of
    another library if its layout may hold tags.
    """
    if root_of(root).is_certain():
        return None
    try:
        above, name = door.above(root.path)
    except UsageError:
        return None
    above = above.look()
    if root_of(above).is_ours(name):
        return above, name
    foreign = find_foreign(above, name)
    if foreign is None:
        return None
    layout = foreign[0]
    if not _holds_tags(root, layout):
        return above, name
    if layout.tagged:
        logger.warning(
            "%s is a checkpoint of %s, and a root of tags, too: its tags are taken. For the other one say %s, tag %s",
            root.path,
            layout.origin,
            above.path,
            name,
        )
    return None
