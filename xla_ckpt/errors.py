"""The errors of this library: one closed tree, each also the builtin that a caller would expect.

An error is an address, a comparison and a way out: where (path, tag, leaf, rank, file), what was expected and what was
found, and what to do. The same facts are attributes, and an error survives a trip through JSON unchanged, so that
every rank of a job can raise the one that a single rank met.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar

from xla_ckpt.display import PrintableLines, make_lines_printable, make_printable


class CheckpointError(Exception):
    """Base of everything that this library raises on purpose.

    Attributes:
        problem: What went wrong, in one sentence without the address.
        path: Checkpoint root directory, where known.
        tag: Tag inside `path`.
        leaf: Leaf path inside the tag, such as ``model/layers.0.weight``.
        file: File inside the tag, relative to it.
        rank: Rank that met the error.
        expected: What should have been there.
        found: What was there.
        hint: What to do about it.
        details: Further findings, one a line.

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
        """This error with the facts that it did not know yet; what it knew stays. Returns itself."""
        for name, value in facts.items():
            if name not in self.FACTS:
                raise TypeError(f"{name!r} is not a fact of a CheckpointError")
            if getattr(self, name) is None:
                setattr(self, name, value)
        return self

    def to_json(self) -> dict[str, Any]:
        """The error as plain JSON, for the way to other ranks."""
        facts = {name: getattr(self, name) for name in self.FACTS}
        plain = {k: v if isinstance(v, int | str) else str(v) for k, v in facts.items() if v is not None}
        return {"kind": type(self).__name__, "problem": self.problem, **plain}


class NoCheckpointError(CheckpointError, FileNotFoundError, RuntimeError):
    """There is no such tag, or no tag at all. A `RuntimeError` too, because neuronx-distributed raises that."""

    __str__ = CheckpointError.__str__


class CorruptCheckpointError(CheckpointError):
    """Stored bytes are not the bytes that were saved: wrong digest, size or structure."""


class FormatError(CorruptCheckpointError, ValueError):
    """A manifest or payload header that no version of this library writes."""


class IncompatibleCheckpointError(CheckpointError, ValueError):
    """The checkpoint is sound, but the target wants other names, shapes or dtypes."""


class UnsupportedVersionError(IncompatibleCheckpointError):
    """The checkpoint was written by a newer version of the format."""


class InvalidTagError(CheckpointError, ValueError):
    """A tag that is not a safe file name."""


class UnsupportedStateError(CheckpointError, TypeError):
    """State that cannot be described: an unknown dtype, a cycle, a sparse tensor."""


class NotAFileError(CorruptCheckpointError, OSError):
    """Something else lies where a file of a checkpoint should be: a pipe, a device, a directory, a link."""

    __str__ = CheckpointError.__str__


class UntrustedObjectError(CheckpointError, PermissionError):
    """A pickled object that would be loaded only with ``trust_pickle=True``."""

    __str__ = CheckpointError.__str__


class StorageError(CheckpointError, OSError):
    """The operating system refused: no space, no permission, an I/O error. `errno` is kept."""

    __str__ = CheckpointError.__str__

    @classmethod
    def of(cls, error: OSError, operation: str, **facts: Any) -> StorageError:
        """`error` as a `StorageError` that says what was being done."""
        storage_error = cls(f"{operation} failed: {error.strerror or error}", **facts)
        storage_error.errno = error.errno
        storage_error.strerror = error.strerror
        return storage_error

    def to_json(self) -> dict[str, Any]:
        return super().to_json() | {k: v for k, v in (("errno", self.errno), ("strerror", self.strerror)) if v}


class ChangedTagError(StorageError):
    """The tag was replaced or removed while it was being read."""


class SaveError(CheckpointError, RuntimeError):
    """A save did not commit; the tag is as it was before, unless the error is an `UnknownOutcomeError`."""


class NotDurableError(CheckpointError, RuntimeError):
    """What was written is in place and complete, but a loss of power may take it away: the storage refused to make its
    name durable, and refused to take it back, too.

    Attributes:
        committed: Always True: whoever looks finds the new tag, and not what was there before.
    """

    committed = True


class UnknownOutcomeError(SaveError):
    """The storage did not answer whether it has committed, pinned or deleted the tag: it has, or all is as before."""


class RootInUseError(SaveError):
    """Another process saves to the same root directory, or has taken it over from this one. `found` names it."""


class DivergentReplicasError(SaveError):
    """Ranks that should hold equal copies hold different values. `leaf` names one of them."""


class ChangedStateError(SaveError):
    """The program wrote to a tensor while it was being saved with ``snapshot="overlap"``. `leaf` names it."""


class RankFailedError(SaveError):
    """Another rank failed, died or did not answer in time. `rank` names it."""


class LoadError(CheckpointError, RuntimeError):
    """The stored state is sound and fits, but an object of the program did not take it. `leaf` names the object."""


class UnprovenLoadError(LoadError):
    """After a load with ``prove=True``, memory of the program has other bytes than the tag. `leaf` names the array."""


class UsageError(CheckpointError, ValueError):
    """An argument that makes no sense, or that ranks disagree about."""


class MissingPackageError(UsageError, ImportError):
    """What was asked for needs a package that is not installed, or a newer one. `hint` says how to install it."""


class RemoteError(CheckpointError, RuntimeError):
    """Another rank met an error of a kind that this process does not know."""


@contextlib.contextmanager
def annotate_errors(**facts: Any) -> Iterator[None]:
    """Add facts to the errors of this library that the block raises: the tag that they are about, for instance.

    What an error knows already stays as it is.
    """
    try:
        yield
    except CheckpointError as error:
        error.at(**facts)
        raise


@contextlib.contextmanager
def wrap_os_errors(operation: str, **facts: Any) -> Iterator[None]:
    """Raise the errors of the operating system as a `StorageError`, which says what was being done.

    Errors of this library pass unchanged, although some of them are OSErrors, too.
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
"""Every kind of error that can travel between ranks, by name."""


def register_error_types(*kinds: type[CheckpointError]) -> None:
    """Have further kinds of error, such as those of a facade, arrive on other ranks as what they are.

    A kind is made from its problem and facts, as `CheckpointError` is. All ranks add it before one of them raises it.
    """
    ERROR_TYPES.update({kind.__name__: kind for kind in kinds})


def from_json(facts: dict[str, Any]) -> CheckpointError:
    """The error that `CheckpointError.to_json` described on another rank."""
    kind = ERROR_TYPES.get(str(facts.get("kind")), RemoteError)
    known = {name: facts[name] for name in CheckpointError.FACTS if name in facts}
    error = kind(str(facts.get("problem", "unknown problem")), **known)
    if isinstance(error, StorageError):
        error.errno, error.strerror = facts.get("errno"), facts.get("strerror")
    return error
