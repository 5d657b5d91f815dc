"""Exceptions of this library: one closed hierarchy, each also a subclass of the matching builtin exception.

An error contains its location (path, tag, leaf, rank, file), the expected and found values, and a hint. The same facts
are attributes, and an error is serialized to JSON and back without loss, so that every rank of a job can raise the
error of a single rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar

from xla_ckpt.display import PrintableLines, make_lines_printable, make_printable


class CheckpointError(Exception):
    """Base class of all errors that this library raises deliberately.

    Attributes:
        problem: Description of the problem, in one sentence without the location.
        path: Checkpoint root directory, if known.
        tag: Tag inside `path`.
        leaf: Leaf path inside the tag, such as ``model/layers.0.weight``.
        file: File inside the tag, relative to it.
        rank: Rank on which the error occurred.
        expected: Expected value.
        found: Actual value.
        hint: Suggested fix.
        details: Further findings, one per line.

    The attributes contain names (leaf paths, tags, files) unchanged. In the text of the error, the characters of names
    that control a terminal are escaped (`xla_ckpt.display.make_printable`).
    """

    FACTS: ClassVar[tuple[str, ...]] = ("path", "tag", "leaf", "file", "rank", "expected", "found", "hint", "details")

    def __init__(
        self,
        problem: str,
        *,
        path: str | None = None,
        tag: str | None = None,
        leaf: str | None = None,
        file: str | None = None,
        rank: int | None = None,
        expected: object = None,
        found: object = None,
        hint: str | None = None,
        details: str | None = None,
    ) -> None:
        self.problem = problem
        self.path = path
        self.tag = tag
        self.leaf = leaf
        self.file = file
        self.rank = rank
        self.expected = expected
        self.found = found
        self.hint = hint
        self.details = details
        super().__init__(problem)

    def __str__(self) -> str:
        names = {"tag": "tag", "leaf": "leaf", "file": "file", "rank": "rank", "path": "in"}
        where = ", ".join(
            f"{word} {getattr(self, fact)}" for fact, word in names.items() if getattr(self, fact) not in (None, "")
        )
        text = f"{self.problem} [{where}]" if where else self.problem
        compared = [
            f"{word} {fact}" for word, fact in (("expected", self.expected), ("found", self.found)) if fact is not None
        ]
        text += f": {', '.join(compared)}" if compared else ""
        end = "" if text.endswith("!") else "."
        escape = make_lines_printable if isinstance(self.problem, PrintableLines) else make_printable
        text = escape(f"{text}{end} {self.hint}" if self.hint else text)
        return f"{text}\n{make_lines_printable(self.details)}" if self.details else text

    def at(self, **facts: Any) -> CheckpointError:
        """Set the facts that are not set yet, and return this error.

        Raises:
            TypeError: A fact has an unknown name.
        """
        for name, value in facts.items():
            if name not in self.FACTS:
                raise TypeError(f"{name!r} is not a fact of a CheckpointError")
            if getattr(self, name) is None:
                setattr(self, name, value)
        return self

    def to_json(self) -> dict[str, Any]:
        """Return the error as plain JSON, to be sent to other ranks."""
        facts = {name: getattr(self, name) for name in self.FACTS}
        plain = {k: v if isinstance(v, int | str) else str(v) for k, v in facts.items() if v is not None}
        return {"kind": type(self).__name__, "problem": self.problem, **plain}


class NoCheckpointError(CheckpointError, FileNotFoundError, RuntimeError):
    """The tag does not exist, or there are no tags. Also a `RuntimeError`, because neuronx-distributed raises that."""

    __str__ = CheckpointError.__str__


class CorruptCheckpointError(CheckpointError):
    """Stored bytes differ from the bytes that were saved: wrong digest, size or structure."""


class FormatError(CorruptCheckpointError, ValueError):
    """A manifest or payload header is invalid in every version of the format."""


class IncompatibleCheckpointError(CheckpointError, ValueError):
    """The checkpoint is valid, but the target has other names, shapes or dtypes."""


class UnsupportedVersionError(IncompatibleCheckpointError):
    """The checkpoint was written by a newer version of the format."""


class InvalidTagError(CheckpointError, ValueError):
    """A tag is not a safe file name."""


class UnsupportedStateError(CheckpointError, TypeError):
    """The state cannot be described: an unknown dtype, a cycle, a sparse tensor."""


class NotAFileError(CorruptCheckpointError, OSError):
    """A path that should be a file of a checkpoint is something else: a pipe, a device, a directory, a link."""

    __str__ = CheckpointError.__str__


class UntrustedObjectError(CheckpointError, PermissionError):
    """A pickled object is loaded only with ``trust_pickle=True``."""

    __str__ = CheckpointError.__str__


class StorageError(CheckpointError, OSError):
    """The operating system reported an error: no space, no permission, an I/O error. `errno` is kept."""

    __str__ = CheckpointError.__str__

    @classmethod
    def of(cls, error: OSError, operation: str, **facts: Any) -> StorageError:
        """Return `error` as a `StorageError` that names the operation."""
        storage_error = cls(f"{operation} failed: {error.strerror or error}", **facts)
        storage_error.errno = error.errno
        storage_error.strerror = error.strerror
        return storage_error

    def to_json(self) -> dict[str, Any]:
        return super().to_json() | {k: v for k, v in (("errno", self.errno), ("strerror", self.strerror)) if v}


class ChangedTagError(StorageError):
    """The tag was replaced or removed while it was being read."""


class SaveError(CheckpointError, RuntimeError):
    """A save did not commit; the tag is unchanged, unless the error is an `UnknownOutcomeError`."""


class NotDurableError(CheckpointError, RuntimeError):
    """The files are complete, but a power failure may remove them: the storage did not make their name durable.

    It also failed to remove the name again.

    Attributes:
        committed: Always True: readers find the new tag, and not the one that it replaced.
    """

    committed = True


class UnknownOutcomeError(SaveError):
    """The storage did not answer if the tag was committed, pinned or deleted: either it was, or nothing has changed."""


class RootInUseError(SaveError):
    """Another process saves to the same root directory, or has taken over its lease. `found` names the process."""


class DivergentReplicasError(SaveError):
    """Ranks that should have equal copies have different values. `leaf` names one of the arrays."""


class ChangedStateError(SaveError):
    """The program wrote to a tensor while it was being saved with ``snapshot="overlap"``. `leaf` names it."""


class RankFailedError(SaveError):
    """Another rank failed, died or did not answer in time. `rank` names it."""


class LoadError(CheckpointError, RuntimeError):
    """The stored state is valid and fits, but an object of the program rejected it. `leaf` names the object."""


class UnprovenLoadError(LoadError):
    """After a load with ``prove=True``, memory of the program differs from the tag. `leaf` names the array."""


class UsageError(CheckpointError, ValueError):
    """An argument is invalid, or differs between ranks."""


class MissingPackageError(UsageError, ImportError):
    """A required package is not installed, or is too old. `hint` contains the install command."""


class RemoteError(CheckpointError, RuntimeError):
    """Another rank raised an error of a type that is unknown to this process."""


@contextlib.contextmanager
def annotate_errors(**facts: Any) -> Iterator[None]:
    """Add facts, such as the tag, to errors of this library that the block raises.

    Facts that are already set are kept.
    """
    try:
        yield
    except CheckpointError as error:
        error.at(**facts)
        raise


@contextlib.contextmanager
def wrap_os_errors(operation: str, **facts: Any) -> Iterator[None]:
    """Raise errors of the operating system as a `StorageError` that names the operation.

    Errors of this library pass unchanged, although some of them are OSErrors, too.

    Raises:
        StorageError: The block raised an `OSError`.
    """
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise StorageError.of(error, operation, **facts) from error


ERROR_TYPES: dict[str, type[CheckpointError]] = {
    name: kind for name, kind in [*globals().items()] if isinstance(kind, type) and issubclass(kind, CheckpointError)
}
"""Types of errors that can be sent between ranks, by name."""


def register_error_types(*kinds: type[CheckpointError]) -> None:
    """Register further error types, such as those of a facade, so that other ranks raise the same type.

    A type is constructed from its problem and facts, as `CheckpointError` is. All ranks register it before one raises
    it.
    """
    ERROR_TYPES.update({kind.__name__: kind for kind in kinds})


def from_json(facts: dict[str, Any]) -> CheckpointError:
    """Return the error that `CheckpointError.to_json` serialized on another rank."""
    kind = ERROR_TYPES.get(str(facts.get("kind")), RemoteError)
    known = {name: facts[name] for name in CheckpointError.FACTS if name in facts}
    error = kind(str(facts.get("problem", "unknown problem")), **known)
    if isinstance(error, StorageError):
        error.errno, error.strerror = facts.get("errno"), facts.get("strerror")
    return error
