"""Tag names, reserved file names in a root, and `TagEntry`, one item of a listing. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from xla_ckpt.errors import CheckpointError, InvalidTagError

ORBAX_TMP_SUFFIX = ".orbax-checkpoint-tmp"
"""Suffix of a directory that orbax is still writing. It belongs to orbax: it is not a tag, and is not removed."""

DRAFT_PREFIX = ".new-"
"""Prefix of a tag that is being written."""

REPLACED_PREFIX = ".old-"
"""Prefix of the old version of a tag that is being replaced. It is complete, and valid until the new one is in
place.
"""

LEASE_NAME = ".lease"
"""Name of the lease of the root directory."""

DISK_ID_NAME = ".disk"
"""Name of the file that identifies the disk of a root directory, which may have the same path on other hosts."""

LEDGER_NAME = ".ledger"
"""Name of the record in an object store that lists the tags."""

TRASH_NAME = ".trash"
"""Name of the directory for tags to be deleted."""

MAX_TAG_BYTES = 200
"""Maximum length of a tag (bytes): a file name may have 255 bytes, and suffixes need room."""


def check_tag_is_string(tag: object, path: str | None = None) -> str:
    """Return `tag` if it is a string. The error does not print other objects, such as a model passed without a tag.

    Raises:
        InvalidTagError: `tag` is not a string.
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
    """Return `tag` if it is a valid tag name, which is a safe file name.

    Raises:
        InvalidTagError: `tag` is not valid; the message contains the reason.

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
    """Return True if a directory with this name may be a tag."""
    try:
        check_tag(name)
    except InvalidTagError:
        return False
    return True


MANIFEST_FILE = "manifest.json"
"""Name of the manifest in a tag directory."""

REPORT_FILE = "report.json"
"""Name of the report that a commit stores for users, if it is a separate file."""

UPLOAD_FILE = "upload.json"
"""Name of the upload record of a tag that is uploaded to an object store later
(`features/local_first/upload_rules.py`).
"""

ORBAX_COMMITTED_FILE = "commit_success.txt"
"""Name of orbax's marker of a committed directory."""

ORBAX_TREE_METADATA_FILE = "_METADATA"
"""Name of orbax's file that lists the arrays of an item."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TagEntry:
    """A tag in a listing."""

    tag: str
    sequence: int = 0
    """Commit number; 0 for tags of other libraries, which have none."""

    pinned: bool = False
    created: str = ""
    """Time of the commit: UTC, ISO 8601; empty if unknown. For tags of other libraries, a time stamp of its files."""

    directory: str
    """Current name of its directory in the root: the tag, or a temporary name during a replacement."""

    files: tuple[str, ...] = ()
    """Names of its files in the root, if it has no directory of its own."""

    complete: bool = True
    """True if its save has finished. Native tags are always complete."""

    note: str = ""
    """Additional note in a listing."""

    damage: CheckpointError | None = None
    """Error of reading the manifest; the sequence then comes from orbax's metadata, or is 0. For a tag of another
    library that was complete once: its missing parts.
    """
