"""Which strings are tags, and which names in a root directory mean something else. Pure."""

from __future__ import annotations

from xla_ckpt.errors import InvalidTagError

TMP_SUFFIX = ".orbax-checkpoint-tmp"
"""What orbax appends to a directory that it is still writing. Such a directory is orbax's: it is no tag, and stays."""

NEW_PREFIX = ".new-"
"""A tag that is just being written. It is filled under this name; orbax makes a tag of it."""

OLD_PREFIX = ".old-"
"""A tag that is just being replaced: complete, and good until its successor is in place."""

LEASE = ".lease"
"""Who saves to the root directory."""

DISK_MARK = ".disk"
"""What tells the disk under a root directory from those that other hosts have under its name."""

LEDGER = ".ledger"
"""The record in an object store that says which tags there are."""

TRASH = ".trash"
"""Where tags go to be deleted."""

MAX_BYTES = 200
"""Longest tag: a file name may have 255 bytes, and suffixes need room."""


def check_is_text(tag: object, path: str | None = None) -> str:
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
    tag = check_is_text(tag, path)
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
    elif TMP_SUFFIX in tag:
        reason = f"it contains {TMP_SUFFIX!r}, which marks what orbax is still writing"
    elif len(tag.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        reason = f"it is longer than {MAX_BYTES} bytes"
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
