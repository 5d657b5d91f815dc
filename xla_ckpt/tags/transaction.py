"""The life of a tag, and of whatever else this library writes: begun, filled, sealed, and committed in one step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from xla_ckpt.storage.base import Directory
from xla_ckpt.storage.small_files import write_small
from xla_ckpt.storage.undisturbed import undisturbed
from xla_ckpt.tags.entry import TagEntry
from xla_ckpt.tags.retention import Retention
from xla_ckpt.tags.root import Draft, Kind, Root

WITHIN = 1800.0
"""Seconds that a commit may take, by default."""


class Transaction:
    """Something that is being written: it appears whole, under its name, or not at all.

    A context that begins it, and throws it away unless it is committed. What a signal handler of the program raises
    comes when the draft is there, or is gone: nobody else would remove it.

    Raises (on entry, and from `begin`):
        OSError: The storage refused.
    """

    def __init__(self, root: Root, name: str, kind: Kind = Kind.TAG) -> None:
        self._root, self._name, self._kind = root, name, kind
        self._draft: Draft | None = None

    def begin(self) -> Self:
        """Begin it outside of a `with` block: then somebody has to call `abandon` in the end."""
        with undisturbed():
            self._draft = self._root.begin(self._name, self._kind)
        return self

    @property
    def _begun(self) -> Draft:
        assert self._draft is not None, "a transaction is begun before it is used"
        return self._draft

    @property
    def directory(self) -> Directory:
        return self._begun.directory

    @property
    def sequence(self) -> int:
        return self._begun.sequence

    @property
    def newest(self) -> TagEntry | None:
        return self._begun.newest

    def seal(self, last: Mapping[str, bytes]) -> None:
        """Make durable what is written, and then write the small files by which readers know that it is complete.

        Raises:
            OSError: The storage refused.
        """
        self.directory.sync()
        for path, data in last.items():
            write_small(self.directory, path, data)
        if last:
            self.directory.sync()

    def commit(self, *, retention: Retention | None = None, report: Any = None, within: float = WITHIN) -> float:
        """Have it appear under its name, in one step, and retire tags that are not to be kept any more.

        What had the name stays readable until the new one is in place. That older tags could not be deleted is logged,
        and no error: the new one is there.

        Args:
            retention: Which tags stay; None keeps all.
            report: Plain JSON about the save, which the tag keeps for people.
            within: Seconds to wait at most for a process that commits.

        Returns:
            Seconds that choosing and retiring older tags took.

        Raises:
            SaveError: It was not committed; what has the name is as it was before.
            OSError: Likewise.
            NotDurableError: It was committed, and a loss of power may undo that.
        """
        with undisturbed():  # a commit would go on without a caller that has been interrupted
            return self._begun.commit(retention=retention, report=report, within=within)

    def abandon(self) -> None:
        """Let go of it; what was not committed is removed. Does nothing a second time."""
        with undisturbed():
            if self._draft is not None:
                self._draft.abandon()

    def __enter__(self) -> Self:
        try:
            return self.begin()
        except BaseException:
            self.abandon()
            raise

    def __exit__(self, *_: object) -> None:
        self.abandon()
