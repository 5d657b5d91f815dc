"""A root directory of tags, as readers see it. Neither orbax nor any framework is needed here.

A directory is a committed tag of ours if it has a manifest and no temporary name. Order is the commit sequence that
the manifest's first line gives, never a time stamp. While a tag is replaced, its old version stands under another name
for an instant; readers find it there. (Tags that other libraries wrote have no manifest: `xla_ckpt.layouts` finds
them.)
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from xla_ckpt.errors import CheckpointError, CorruptCheckpointError, NoCheckpointError, StorageError
from xla_ckpt.manifest import manifest_json
from xla_ckpt.storage.base import Directory, Store
from xla_ckpt.tags.names import NEW_PREFIX, OLD_PREFIX, TMP_SUFFIX, check_tag, is_tag_name

MANIFEST = "manifest.json"
"""Name of the manifest inside of a tag directory."""

COMMITTED = "commit_success.txt"
"""orbax's mark of a committed directory."""

ORBAX_METADATA = "_CHECKPOINT_METADATA"
"""orbax's own file in a tag. Nothing depends on it, but a damaged tag keeps its place in the order by it."""

LOOKS = 4
"""How often a tag is looked for under both of its names, and the root directory for those that came meanwhile."""

MAX_ORBAX_METADATA = 1 << 20
"""A larger one is not read (bytes): orbax writes a few hundred."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TagEntry:
    """A tag, as a listing shows it."""

    tag: str
    sequence: int = 0
    """Commit number; 0 for tags that other libraries wrote, which have none."""

    pinned: bool = False
    created: str = ""
    """Time of the commit: UTC, ISO 8601; empty if unknown. In other libraries' tags a time stamp of its files."""

    directory: str
    """Its name in the root directory: the tag, or its name while it is being replaced."""

    files: tuple[str, ...] = ()
    """Its files in the root directory itself, where it has no directory of its own."""

    complete: bool = True
    """Whether its save ended. Tags of ours exist only complete."""

    note: str = ""
    """What a listing says of it besides."""

    damage: CheckpointError | None = None
    """Why its manifest could not be read; the sequence then comes from orbax's metadata, or is 0."""


def entries(store: Store) -> list[TagEntry]:
    """All committed tags of ours, oldest first. An absent root has none.

    Raises:
        StorageError: The directory cannot be read.
    """
    found: dict[str, TagEntry] = {}
    listed = _listed(store)
    for _ in range(LOOKS):
        for tag in listed - found.keys():
            if (entry := _found(store, tag)) is not None:
                found[tag] = entry
        missing = listed - found.keys()
        if not missing:
            break
        listed = _listed(store)
        if missing <= listed:
            break  # they are no tags of ours, and have not gone
        # Retention has removed a tag since it was listed, so a newer one has come. Without it the newest of those that
        # were found may be older than the newest that there was all the time.
    return sorted(found.values(), key=lambda e: (e.sequence, e.tag))


def _listed(store: Store) -> set[str]:
    """What may be a tag, of all that lies in a root directory."""
    # POSIX lets a listing miss a name that is changed meanwhile: a tag that is being replaced is in the next one.
    names = {name.removeprefix(OLD_PREFIX) for name in (*names_in(store), *names_in(store))}
    return {name for name in names if is_tag_name(name)}


def entry_of(store: Store, tag: str) -> TagEntry | None:
    """A committed tag of ours, as `entries` lists it; None if there is none of this name.

    Raises:
        InvalidTagError: `tag` cannot be one.
    """
    check_tag(tag, store.path)
    return _found(store, tag)


def _found(store: Store, tag: str) -> TagEntry | None:
    """A tag, wherever it is now."""
    looks = (_entry(store, name, tag) for name in _places(store, tag))
    return next((entry for entry in looks if entry is not None), None)


def _places(store: Store, tag: str) -> Iterator[str]:
    """The names under which a tag is looked for, one after the other.

    While it is replaced it moves from its name to the other one, and a new version comes to its name. Who looks between
    two steps of that finds it under neither, and again if it is replaced once more before the next look.
    """
    for _ in range(LOOKS):
        yield tag
        yield OLD_PREFIX + tag
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
        return not is_ours(store, name) and directory.is_at(name)
    finally:
        directory.close()


def names_in(store: Store) -> list[str]:
    """What lies in a root directory; nothing if it is absent.

    Raises:
        StorageError: It cannot be read.
    """
    try:
        return store.names()
    except NotADirectoryError as error:
        made = StorageError.of(error, "listing the checkpoint directory", path=store.path)
        made.hint = "It is a file, and none that torch.save wrote: pass the root directory of the checkpoints."
        raise made from error
    except OSError as error:
        raise StorageError.of(error, "listing the checkpoint directory", path=store.path) from error


def _entry(store: Store, name: str, tag: str) -> TagEntry | None:
    damage: CheckpointError
    try:
        head = manifest_json.parse_head(store.start_of(f"{name}/{MANIFEST}", manifest_json.HEAD_BYTES, links=False))
    except (FileNotFoundError, NotADirectoryError):
        if not _was_committed(store, name) or store.has(f"{name}/{MANIFEST}"):
            return None  # no tag of ours; or it has moved away, and a new version has come to its name just now
        damage = CorruptCheckpointError("the tag has no manifest")
    except CheckpointError as error:
        damage = error
    except OSError as error:
        damage = StorageError.of(error, "reading a manifest")
    else:
        return TagEntry(tag=tag, sequence=head.sequence, pinned=head.pinned, created=head.created, directory=name)
    damage.at(path=store.path, tag=tag, file=MANIFEST)
    return TagEntry(tag=tag, sequence=_orbax_sequence(store, name), directory=name, damage=damage)


def is_ours(store: Store, name: str) -> bool:
    """Whether a directory is a tag of ours, damaged or not."""
    return store.has(f"{name}/{MANIFEST}") or _was_committed(store, name)


def may_be_foreign(store: Store, name: str) -> bool:
    """Whether what has this name may be a tag that another library wrote."""
    return is_tag_name(name) and not is_ours(store, name)


def _was_committed(store: Store, name: str) -> bool:
    """Whether orbax's own marks say that this directory without a manifest was a tag of ours."""
    return store.has(f"{name}/{COMMITTED}") and _orbax_sequence(store, name) > 0


def _orbax_sequence(store: Store, name: str) -> int:
    """The commit sequence from orbax's copy of it: enough to keep a damaged tag in its place in the order."""
    sequence = custom_metadata(store, name).get("sequence")
    return sequence if type(sequence) is int and sequence > 0 else 0  # unknown: such a tag counts as the oldest


def custom_metadata(store: Store, name: str) -> dict[str, Any]:
    """What a commit had orbax keep in the directory of a tag; empty if it cannot be read, or is not there."""
    try:
        text = store.start_of(f"{name}/{ORBAX_METADATA}", MAX_ORBAX_METADATA, links=False)
        found = json.loads(text)["custom_metadata"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def open_directory(store: Store, tag: str) -> Directory:
    """The directory of a committed tag, marked as being read so that no retention deletes it under the reader.

    Raises:
        NoCheckpointError: There is no such tag; the message lists those that there are.
        InvalidTagError: `tag` cannot be one.
    """
    check_tag(tag, store.path)
    for name in _places(store, tag):
        if not is_ours(store, name):
            continue
        try:
            return store.open(name)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise StorageError.of(error, "opening a tag", path=store.path, tag=tag) from error
    raise no_such_tag(store, tag)


def no_such_tag(store: Store, tag: str | None) -> NoCheckpointError:
    """The error for a tag that is not there, or for a root without any (`tag` None)."""
    return NoCheckpointError(
        "there is no such checkpoint" if tag else "there is no checkpoint",
        path=store.path,
        tag=tag,
        hint=what_is_there(store),
    )


MAX_LOOKED_INTO = 100
"""Directories that are looked into for the sake of a hint, at most."""


def what_is_there(store: Store) -> str:
    """What a root directory holds in place of the tag that was looked for."""
    try:
        there = [e.tag for e in entries(store)]
        unfinished = [n for n in store.names() if n.endswith(TMP_SUFFIX) or n.startswith(NEW_PREFIX)]
    except (OSError, CheckpointError):
        there, unfinished = [], []
    if not store.is_directory(""):
        return "It is a file." if store.has("") else "The directory does not exist."
    if there:
        return f"Tags there, oldest first: {', '.join(there[-10:])}. A load without a tag takes the newest."
    if below := roots_below(store):
        return f"There are checkpoints below it, in {', '.join(below)}: pass one of these directories."
    return "No tag was ever committed there" + (f"; {len(unfinished)} unfinished." if unfinished else ".")


def roots_below(store: Store) -> list[str]:
    """The directories in a root directory that hold tags of ours, a few of them: somebody left out a part of a path."""
    try:
        names = [name for name in store.names()[:MAX_LOOKED_INTO] if is_tag_name(name)]
        return [name for name in names if any(is_ours(store, f"{name}/{tag}") for tag in store.names(name)[:3])][:3]
    except OSError:
        return []  # it is only for a hint
