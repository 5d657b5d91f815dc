"""List and open committed tags in a directory, as readers do, without orbax or a framework.

A directory is a committed tag if it contains a manifest and has no temporary name. Tags are ordered by the commit
sequence in the manifest's first line, not by time stamps. While a tag is replaced, readers also find its old version.
Tags of other libraries have no manifest: see `xla_ckpt.formats`.
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
"""Metadata file of orbax in a tag. Not required, but it preserves the order of a tag with a corrupt manifest."""

LOOKUP_ATTEMPTS = 4
"""Number of attempts to find a tag under both of its names, and to list the root again for new tags."""

MAX_ORBAX_METADATA_BYTES = 1 << 20
"""Maximum size (bytes) of the orbax metadata that is read; orbax writes a few hundred bytes."""


def list_entries(store: Store) -> list[TagEntry]:
    """Return all committed native tags, oldest first. Empty if the root does not exist.

    Raises:
        UsageError: The path is a file.
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
            break  # they still exist and are not native tags
        # Retention has deleted a tag since it was listed, so there is a newer one. Without it, the newest tag found may
        # be older than one that existed all the time.
    return sorted(committed.values(), key=lambda e: (e.sequence, e.tag))


def _list_candidates(store: Store) -> set[str]:
    """Return the names in a root directory that may be tags."""
    # POSIX allows a listing to miss a name that changes meanwhile: a tag being replaced is in the second listing.
    names = {name.removeprefix(REPLACED_PREFIX) for name in (*list_names(store), *list_names(store))}
    return {name for name in names if is_tag_name(name)}


def get_entry(store: Store, tag: str) -> TagEntry | None:
    """Return a committed native tag as in `list_entries`, or None if it does not exist.

    Raises:
        InvalidTagError: `tag` is not a valid tag name.
    """
    check_tag(tag, store.path)
    return _find_entry(store, tag)


def _find_entry(store: Store, tag: str) -> TagEntry | None:
    """Return a tag from its current location, or None."""
    looks = (read_entry(store, name, tag) for name in _iterate_locations(store, tag))
    return next((entry for entry in looks if entry is not None), None)


def _iterate_locations(store: Store, tag: str) -> Iterator[str]:
    """Yield the names under which a tag may be found.

    While it is replaced, the old version moves from the first name to the second, and the new version to the first. A
    reader that checks between two steps finds neither, and again if it is replaced once more before the next check.
    """
    for _ in range(LOOKUP_ATTEMPTS):
        yield tag
        yield REPLACED_PREFIX + tag
        if _is_foreign(store, tag):
            return


def _is_foreign(store: Store, name: str) -> bool:
    """Return True if the name exists and is not a native tag, nor one that has just moved away."""
    try:
        directory = store.open(name, lock=False)
    except FileNotFoundError:
        return False
    except OSError:
        return True  # a file, or inaccessible to this user: reading a tag in it would have failed as well
    try:
        return not is_native_tag(store, name) and directory.is_at(name)
    finally:
        directory.close()


def list_names(store: Store) -> list[str]:
    """Return the names in a root directory; empty if it does not exist.

    Raises:
        UsageError: The path is a file.
        StorageError: The directory cannot be read.
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
    """Return the entry of a tag stored under `name`, which may be a temporary name, or None if it is not a native
    tag.
    """
    damage: CheckpointError
    try:
        head = manifest_json.parse_header(
            store.read_start(f"{name}/{MANIFEST_FILE}", manifest_json.MAX_HEADER_BYTES, links=False)
        )
    except (FileNotFoundError, NotADirectoryError):
        if not _has_orbax_commit(store, name) or store.has(f"{name}/{MANIFEST_FILE}"):
            return None  # not a native tag; or it has moved away, and a new version has just got its name
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
    """Return the entry with its `damage` set if the manifest cannot be parsed. A listing only reads the first line."""
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
    """Return True if a directory is a native tag, even a corrupt one."""
    return store.has(f"{name}/{MANIFEST_FILE}") or _has_orbax_commit(store, name)


def _has_orbax_commit(store: Store, name: str) -> bool:
    """Return True if orbax's files show that this directory without a manifest was a native tag."""
    return store.has(f"{name}/{ORBAX_COMMITTED_FILE}") and _read_orbax_sequence(store, name) > 0


def _read_orbax_sequence(store: Store, name: str) -> int:
    """Return the copy of the commit sequence in orbax's metadata, which preserves the order of a corrupt tag, or 0."""
    sequence = read_custom_metadata(store, name).get("sequence")
    return sequence if type(sequence) is int and sequence > 0 else 0  # unknown: such a tag counts as the oldest


def read_custom_metadata(store: Store, name: str) -> dict[str, Any]:
    """Return the custom metadata that a commit stored with orbax in a tag; empty if missing or unreadable."""
    return read_orbax_member(store, name, "custom_metadata")


def read_orbax_member(store: Store, name: str, member: str) -> dict[str, Any]:
    """Return a member of the orbax metadata that is a JSON object; empty if missing or unreadable."""
    try:
        text = store.read_start(f"{name}/{ORBAX_METADATA_FILE}", MAX_ORBAX_METADATA_BYTES, links=False)
        value = json.loads(text)[member]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def open_tag_directory(store: FileSystem, tag: str) -> FileSystemDirectory | None:
    """Open the directory of a committed tag, locked so that retention does not delete it, or return None if not found.

    Raises:
        InvalidTagError: `tag` is not a valid tag name.
        StorageError: The directory cannot be opened.
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
