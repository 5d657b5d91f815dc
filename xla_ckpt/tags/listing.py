"""List and open committed tags in a directory: the reader's view, without orbax or a framework.

A directory is a committed tag if it contains a manifest and has no temporary name. The order is the commit sequence
in the manifest's first line, never a time stamp. While a tag is replaced, readers also find its old version. Tags
of other libraries have no manifest: see `xla_ckpt.formats`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from xla_ckpt.core.manifest import manifest_json
from xla_ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    StorageError,
    UsageError,
    annotate_errors,
    wrap_os_errors,
)
from xla_ckpt.storage.base import FileSystem, FileSystemDirectory, Store, open_unlocked, read_file
from xla_ckpt.tags.entry import MANIFEST_FILE, ORBAX_COMMITTED_FILE, REPLACED_PREFIX, TagEntry, check_tag, is_tag_name

ORBAX_METADATA_FILE = "_CHECKPOINT_METADATA"
"""orbax's own file in a tag. Nothing depends on it, but a damaged tag keeps its place in the order by it."""

LOOKUP_ATTEMPTS = 4
"""How often a tag is looked for under both of its names, and the root directory for those that came meanwhile."""

MAX_ORBAX_METADATA_BYTES = 1 << 20
"""A larger one is not read (bytes): orbax writes a few hundred."""


def list_entries(store: Store) -> list[TagEntry]:
    """All committed tags of ours, oldest first. An absent root has none.

    Raises:
        StorageError: The directory cannot be read.
    """
    committed: dict[str, TagEntry] = {}
    listed = _list_candidates(store)
    for _ in range(LOOKUP_ATTEMPTS):
        for tag in listed - committed.keys():
            if (entry := _find_entry(store, tag)) is not None:
                committed[tag] = entry
        missing = listed - committed.keys()
        if not missing:
            break
        listed = _list_candidates(store)
        if missing <= listed:
            break  # they are no tags of ours, and have not gone
        # Retention has removed a tag since it was listed, so a newer one has come. Without it the newest of those that
        # were found may be older than the newest that there was all the time.
    return sorted(committed.values(), key=lambda e: (e.sequence, e.tag))


def _list_candidates(store: Store) -> set[str]:
    """What may be a tag, of all that lies in a root directory."""
    # POSIX lets a listing miss a name that is changed meanwhile: a tag that is being replaced is in the next one.
    names = {name.removeprefix(REPLACED_PREFIX) for name in (*list_names(store), *list_names(store))}
    return {name for name in names if is_tag_name(name)}


def get_entry(store: Store, tag: str) -> TagEntry | None:
    """A committed tag of ours, as `list_entries` lists it; None if there is none of this name.

    Raises:
        InvalidTagError: `tag` cannot be one.
    """
    check_tag(tag, store.path)
    return _find_entry(store, tag)


def _find_entry(store: Store, tag: str) -> TagEntry | None:
    """A tag, wherever it is now."""
    looks = (read_entry(store, name, tag) for name in _iterate_locations(store, tag))
    return next((entry for entry in looks if entry is not None), None)


def _iterate_locations(store: Store, tag: str) -> Iterator[str]:
    """The names under which a tag is looked for, one after the other.

    While it is replaced it moves from its name to the other one, and a new version comes to its name. Who looks between
    two steps of that finds it under neither, and again if it is replaced once more before the next look.
    """
    for _ in range(LOOKUP_ATTEMPTS):
        yield tag
        yield REPLACED_PREFIX + tag
        if _is_foreign(store, tag):
            return


def _is_foreign(store: Store, name: str) -> bool:
    """Whether something lies there that is no tag of ours, and is none that has just moved away either."""
    try:
        directory = store.open(name, lock=False)
    except FileNotFoundError:
        return False
    except OSError:
        return True  # a file, or another user's: what was looked for in it would have been refused, too
    try:
        return not is_native_tag(store, name) and directory.is_at(name)
    finally:
        directory.close()


def list_names(store: Store) -> list[str]:
    """What lies in a root directory; nothing if it is absent.

    Raises:
        UsageError: It is a file.
        StorageError: It cannot be read.
    """
    try:
        return store.list_names()
    except NotADirectoryError as error:
        raise UsageError(
            "this is a file, and no checkpoint by itself",
            path=store.path,
            hint="Pass the root directory of the checkpoints, or the directory of the checkpoint to which it belongs.",
        ) from error
    except OSError as error:
        raise StorageError.of(error, "listing the tags", path=store.path) from error


def read_entry(store: Store, name: str, tag: str) -> TagEntry | None:
    """Return a tag as it lies in a directory, whose name may be another one; None if it is no tag of ours."""
    damage: CheckpointError
    try:
        head = manifest_json.parse_header(
            store.read_start(f"{name}/{MANIFEST_FILE}", manifest_json.MAX_HEADER_BYTES, links=False)
        )
    except (FileNotFoundError, NotADirectoryError):
        if not _has_orbax_commit(store, name) or store.has(f"{name}/{MANIFEST_FILE}"):
            return None  # no tag of ours; or it has moved away, and a new version has come to its name just now
        damage = CorruptCheckpointError("the tag has no manifest")
    except CheckpointError as error:
        damage = error
    except OSError as error:
        damage = StorageError.of(error, "reading a manifest")
    else:
        return TagEntry(tag=tag, sequence=head.sequence, pinned=head.pinned, created=head.created, directory=name)
    damage.at(path=store.path, tag=tag, file=MANIFEST_FILE)
    return TagEntry(tag=tag, sequence=_read_orbax_sequence(store, name), directory=name, damage=damage)


def check_entry(store: Store, entry: TagEntry) -> TagEntry:
    """The same tag, with its `damage` if any of its manifest cannot be read: a list reads the first line alone."""
    if entry.damage is not None:
        return entry
    try:
        with (
            annotate_errors(path=store.path, tag=entry.tag, file=MANIFEST_FILE),
            wrap_os_errors("reading a manifest"),
            contextlib.closing(open_unlocked(store, entry.directory)) as directory,
        ):
            manifest_json.parse_manifest(read_file(directory, MANIFEST_FILE))
    except CheckpointError as error:
        return replace(entry, damage=error)
    return entry


def is_native_tag(store: Store, name: str) -> bool:
    """Whether a directory is a tag of ours, damaged or not."""
    return store.has(f"{name}/{MANIFEST_FILE}") or _has_orbax_commit(store, name)


def _has_orbax_commit(store: Store, name: str) -> bool:
    """Whether orbax's own marks say that this directory without a manifest was a tag of ours."""
    return store.has(f"{name}/{ORBAX_COMMITTED_FILE}") and _read_orbax_sequence(store, name) > 0


def _read_orbax_sequence(store: Store, name: str) -> int:
    """The commit sequence from orbax's copy of it: enough to keep a damaged tag in its place in the order."""
    sequence = read_custom_metadata(store, name).get("sequence")
    return sequence if type(sequence) is int and sequence > 0 else 0  # unknown: such a tag counts as the oldest


def read_custom_metadata(store: Store, name: str) -> dict[str, Any]:
    """What a commit had orbax keep in the directory of a tag; empty if it cannot be read, or is not there."""
    return read_orbax_member(store, name, "custom_metadata")


def read_orbax_member(store: Store, name: str, member: str) -> dict[str, Any]:
    """A member of orbax's own record of a directory that is an object; empty if it cannot be read, or is not there."""
    try:
        text = store.read_start(f"{name}/{ORBAX_METADATA_FILE}", MAX_ORBAX_METADATA_BYTES, links=False)
        value = json.loads(text)[member]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def open_tag_directory(store: FileSystem, tag: str) -> FileSystemDirectory | None:
    """The directory of a committed tag, marked as being read so that no retention deletes it under the reader.

    Raises:
        InvalidTagError: `tag` cannot be one.
        StorageError: It cannot be opened.
    """
    check_tag(tag, store.path)
    for name in _iterate_locations(store, tag):
        if not is_native_tag(store, name):
            continue
        try:
            return store.open(name)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise StorageError.of(error, "opening a tag", path=store.path, tag=tag) from error
    return None
