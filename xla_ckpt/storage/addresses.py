"""What the files of a root are called in an object store, which knows files by their full names. Pure."""

from __future__ import annotations


class Addresses:
    """The names in one root.

    Args:
        path: The address of the root, as users call it.
        key: The full name of the root itself; empty if it is all of the store.
    """

    def __init__(self, path: str, key: str) -> None:
        self.path = path
        self._key = key

    def address(self, name: str) -> str:
        """What users call something in the root."""
        return f"{self.path}/{name}"

    def key(self, path: str) -> str:
        """The full name of a file, or of the root itself (path "").

        >>> Addresses("s3://bucket/run", "run").key("a/b"), Addresses("s3://bucket", "").key("a")
        ('run/a/b', 'a')
        """
        return "/".join(filter(None, (self._key, path)))

    def below(self, path: str) -> str:
        """How the full names begin of all that lies in a directory of the root.

        >>> Addresses("s3://bucket/run", "run").below(""), Addresses("s3://bucket", "").below("")
        ('run/', '')
        """
        key = self.key(path)
        return f"{key}/" if key else ""
