"""A tag, as a listing shows it, and the names of the files by which one is known."""

from __future__ import annotations

from dataclasses import dataclass

from xla_ckpt.errors import CheckpointError

MANIFEST = "manifest.json"
"""Name of the manifest inside of a tag directory."""

REPORT = "report.json"
"""What the commit of a tag keeps for people, where it is a file of its own."""

UPLOAD = "upload.json"
"""What a tag keeps of its upload, where tags go to an object store afterwards (`tags/upload_rules.py`)."""

COMMITTED = "commit_success.txt"
"""orbax's mark of a committed directory."""

TREE_METADATA = "_METADATA"
"""orbax's file that says which arrays an item has."""


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
    """Why its manifest could not be read; the sequence then comes from orbax's metadata, or is 0. Of a tag of another
    library that was complete once: what it lacks."""
