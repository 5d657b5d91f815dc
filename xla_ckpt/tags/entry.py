"""Tag names, reserved file names in a root, and `TagEntry`, one item of a listing. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from xla_ckpt.errors import CheckpointError, InvalidTagError

ORBAX_TMP_SUFFIX = ".orbax-checkpoint-tmp"
"""What orbax appends to a directory that it is still writing. Such a directory is orbax's: it is no tag, and stays."""

DRAFT_PREFIX = ".new-"
"""A tag that is just being written. It is filled under this name; orbax makes a tag of it."""

REPLACED_PREFIX = ".old-"
"""A tag that is just being replaced: complete, and good until its successor is in place."""

LEASE_NAME = ".lease"
"""Who saves to the root directory."""

DISK_ID_NAME = ".disk"
"""What tells the disk under a root directory from those that other hosts have under its name."""

LEDGER_NAME = ".ledger"
"""The record in an object store that says which tags there are."""

TRASH_NAME = ".trash"
"""Where tags go to be deleted."""

MAX_TAG_BYTES = 200
"""Longest tag: a file name may have 255 bytes, and suffixes need room."""


def check_tag_is_string(tag: object, path: str | None = None) -> str:
    """`tag`, if it is a string. Refuse what is no string: a model, if the tag was forgotten, which no error may print.

    Raises:
        InvalidTagError: It is none.
    """
    if not isinstance(tag, str):
        raise InvalidTagError(
            "a tag is a string",
            path=path,
            expected="a str, such as 'step_10'",
            found=f"the number {tag}" if type(tag) is int else type(tag).__name__,
            hint=f"Write {str(tag)!r}."
            if type(tag) is int
            else "The tag is the argument after the path. A load of the newest has none: name the arguments behind it.",
        )
    return tag


def check_tag(tag: object, path: str | None = None) -> str:
    """`tag`, if it is a safe file name.

    Raises:
        InvalidTagError: It is not, and why.

    >>> check_tag("step_10")
    'step_10'
    >>> is_tag_name("../best")
    False
    """
    tag = check_tag_is_string(tag, path)
    hint = "A tag names a directory: use letters, digits and characters such as '_', '-' or '.'."
    if not tag:
        reason = "it is empty"
    elif forbidden := next((c for c in tag if c in "/\\\0"), None):
        reason = f"it contains {forbidden!r}"
        if last := tag.rstrip("/").rpartition("/")[2]:
            hint = f"A tag is a name in its root, such as {last!r}: a path goes into another argument."
    elif not tag.isprintable():
        reason = "it contains a control character"
    elif tag.startswith("."):
        reason = "it starts with a dot"
    elif tag != tag.strip():
        reason = "it starts or ends with white space"
    elif ORBAX_TMP_SUFFIX in tag:
        reason = f"it contains {ORBAX_TMP_SUFFIX!r}, which marks what orbax is still writing"
    elif len(tag.encode("utf-8", "surrogatepass")) > MAX_TAG_BYTES:
        reason = f"it is longer than {MAX_TAG_BYTES} bytes"
    else:
        return tag
    raise InvalidTagError(f"{tag!r} cannot be a tag: {reason}", path=path, hint=hint)


def is_tag_name(name: str) -> bool:
    """Whether a directory of this name may be a tag."""
    try:
        check_tag(name)
    except InvalidTagError:
        return False
    return True


MANIFEST_FILE = "manifest.json"
"""Name of the manifest inside of a tag directory."""

REPORT_FILE = "report.json"
"""What the commit of a tag keeps for people, where it is a file of its own."""

UPLOAD_FILE = "upload.json"
"""What a tag keeps of its upload, where tags go to an object store afterwards (`tags/upload_rules.py`)."""

ORBAX_COMMITTED_FILE = "commit_success.txt"
"""orbax's mark of a committed directory."""

ORBAX_TREE_METADATA_FILE = "_METADATA"
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
