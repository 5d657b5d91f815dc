"""Rules of the ledger of an object-store root: tags, open attempts, garbage, and pure state transitions.

A tag is a committed attempt: a directory ``<tag>/.<random>`` whose name is never reused. Each change is a function of
the previous ledger, so that a writer that loses a race can apply it again.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping, Set
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, TypeVar

from xla_ckpt.core.checksum import seal_json, unseal_json
from xla_ckpt.errors import CorruptCheckpointError, FormatError, UnsupportedVersionError
from xla_ckpt.tags.entry import TagEntry

LEDGER_VERSION = 1

RECENT_WRITES = 64
"""Number of recent writes listed in the ledger, in which a writer looks up a write whose response was lost."""

RETENTION_COMMITS = 2
"""Number of commits after the retirement of a tag before its files are deleted, so that readers can finish."""

_ATTEMPT_PATTERN = re.compile(r"[^/.][^/]*/\.[0-9a-f]+")
_FIELD_TYPES = {"sequence": int, "epoch": int, "owner": str, "recent": list, "tags": dict, "open": dict, "doomed": dict}

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LedgerTag:
    """A committed tag."""

    attempt: str
    """Directory that contains its files."""

    sequence: int
    pinned: bool
    created: str


@dataclass(frozen=True, slots=True)
class OpenAttempt:
    """An attempt that is being written."""

    epoch: int
    """Epoch of the ledger when it was created."""

    writer: str
    """Process that writes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """State of a root: its tags, open attempts and garbage."""

    sequence: int = 0
    """Number of the last commit."""

    epoch: int = 0
    """Number of times that a job has taken over the root from another one."""

    owner: str = ""
    """Token of the lease of the job that saves to the root; empty if no job has ever had a lease."""

    recent: tuple[str, ...] = ()
    """Unique names of the last writes of this ledger."""

    tags: Mapping[str, LedgerTag] = field(default_factory=dict)
    open: Mapping[str, OpenAttempt] = field(default_factory=dict)
    """Attempts that are being written."""

    doomed: Mapping[str, int] = field(default_factory=dict)
    """Unneeded attempts -> number of the commit from which on their files may be deleted."""


def encode_ledger(ledger: Ledger, write: str) -> bytes:
    """Return the serialized ledger, signed with the name of the write that stores it."""
    signed = replace(ledger, recent=(*ledger.recent, write)[-RECENT_WRITES:])
    text = json.dumps({"format": "xla_ckpt ledger", "version": LEDGER_VERSION, **asdict(signed)})
    return seal_json(text.removesuffix("}").encode())


@functools.lru_cache(maxsize=4)
def parse_ledger(data: bytes) -> Ledger:
    """Return the ledger in a record.

    Raises:
        FormatError: The record is corrupt.
        UnsupportedVersionError: A newer version of this library wrote it.
    """
    try:
        raw: Any = json.loads(unseal_json(data, "the record of the tags") + b"}")
        if raw["format"] == "xla_ckpt ledger" and raw["version"] > LEDGER_VERSION:
            raise UnsupportedVersionError("a newer version of this library saves there", found=raw["version"])
        fields = {name: raw[name] for name in _FIELD_TYPES}
        tags = {tag: LedgerTag(**entry) for tag, entry in fields["tags"].items()}
        begun = {attempt: OpenAttempt(**its) for attempt, its in fields["open"].items()}
        attempts = [*begun, *fields["doomed"], *(entry.attempt for entry in tags.values())]
        if any(type(fields[name]) is not kind for name, kind in _FIELD_TYPES.items()):
            raise TypeError("a field of another type")
        if not all(map(is_attempt, attempts)):
            raise ValueError("a directory that is no attempt")  # its files would be deleted
        return Ledger(**{**fields, "recent": tuple(fields["recent"]), "tags": tags, "open": begun})
    except UnsupportedVersionError:
        raise
    except (CorruptCheckpointError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        hint = "xla-ckpt adopt ROOT makes a new one from the manifests of the tags."
        raise FormatError("the record of the tags is damaged", found=error, hint=hint) from None


def is_attempt(name: str) -> bool:
    """Return True if a directory name has the form of an attempt.

    >>> is_attempt("step_10/.5eed"), is_attempt("step_10/model")
    (True, False)
    """
    return _ATTEMPT_PATTERN.fullmatch(name) is not None


def make_attempt_name(tag: str, token: str) -> str:
    """Return the directory of an attempt. Because of the dot, readers of the tag's directory do not list it as a tag.

    >>> make_attempt_name("step_10", "5eed")
    'step_10/.5eed'
    """
    return f"{tag}/.{token}"


def list_entries(ledger: Ledger) -> list[TagEntry]:
    """Return all tags, oldest first."""
    listed = [
        TagEntry(tag=tag, sequence=its.sequence, pinned=its.pinned, created=its.created, directory=its.attempt)
        for tag, its in ledger.tags.items()
    ]
    # Uploads keep their local sequence numbers, which may be equal on two machines.
    return sorted(listed, key=lambda entry: (entry.sequence, entry.created, entry.tag))


def is_managed(ledger: Ledger, name: str) -> bool:
    """Return True if a name is a tag, an open attempt, or an attempt whose files are not deleted yet."""
    attempts = (*ledger.open, *ledger.doomed)
    return name in ledger.tags or any(attempt.startswith(make_attempt_name(name, "")) for attempt in attempts)


def take_ownership(ledger: Ledger, job: str) -> Ledger:
    """Make a job the owner. Attempts of earlier owners can no longer be committed."""
    epoch = ledger.epoch + (ledger.owner not in ("", job))
    return replace(ledger, owner=job, epoch=epoch)


def begin_attempt(ledger: Ledger, attempt: str, writer: str) -> Ledger:
    """Add an attempt that is about to be written."""
    return replace(ledger, open={**ledger.open, attempt: OpenAttempt(ledger.epoch, writer)})


def commit_attempt(ledger: Ledger, tag: str, entry: LedgerTag) -> Ledger:
    """Commit an attempt as a tag, and retire the tag that it replaces."""
    after = retire_tags(ledger, [tag] if tag in ledger.tags else [], sequence=entry.sequence)
    tags = {**after.tags, tag: entry}
    sequence = max(ledger.sequence, entry.sequence)
    return replace(after, sequence=sequence, tags=tags, open=_drop_keys(ledger.open, [entry.attempt]))


def retire_tags(ledger: Ledger, tags: Iterable[str], *, sequence: int = 0) -> Ledger:
    """Retire tags, as of the last commit or of the commit with the number `sequence`."""
    until = max(ledger.sequence, sequence) + RETENTION_COMMITS
    doomed = {ledger.tags[tag].attempt: until for tag in tags}
    return replace(ledger, tags=_drop_keys(ledger.tags, tags), doomed={**ledger.doomed, **doomed})


def set_pinned(ledger: Ledger, tag: str, is_pinned: bool) -> Ledger:
    """Pin or unpin a tag, which retention does not delete while it is pinned."""
    return replace(ledger, tags={**ledger.tags, tag: replace(ledger.tags[tag], pinned=is_pinned)})


def give_up_attempts(ledger: Ledger, attempts: Iterable[str]) -> Ledger:
    """Give up attempts: they can no longer be committed, and their files may be deleted, since they have no readers."""
    ended = [attempt for attempt in attempts if attempt in ledger.open]
    return replace(ledger, open=_drop_keys(ledger.open, ended), doomed={**ledger.doomed, **dict.fromkeys(ended, 0)})


def give_up_dead(ledger: Ledger, writer: str, writing: Set[str]) -> Ledger:
    """Give up attempts of earlier jobs, and attempts of `writer` that are not in `writing`.

    Attempts of other writers are kept, because the job may have several processes.
    """
    ended = [
        attempt
        for attempt, its in ledger.open.items()
        if its.epoch < ledger.epoch or (its.writer == writer and attempt not in writing)
    ]
    return give_up_attempts(ledger, ended)


AttemptOutcome = Literal["committed", "given up", "unknown"]


def find_outcome(ledger: Ledger, attempt: str) -> AttemptOutcome:
    """Return the outcome of an attempt whose commit was not confirmed, and which was given up unless it was committed.

    "unknown" means that no trace is left: it was given up and deleted by a job that took the root over, or it was
    committed, replaced and deleted.
    """
    if ledger.doomed.get(attempt, 0) > 0 or any(its.attempt == attempt for its in ledger.tags.values()):
        return "committed"
    return "given up" if attempt in ledger.doomed or attempt in ledger.open else "unknown"


def collect_attempts(ledger: Ledger) -> set[str]:
    """Return all attempts in the ledger; no others are ever read."""
    return {*ledger.open, *ledger.doomed, *(its.attempt for its in ledger.tags.values())}


def adopt_attempts(ledger: Ledger, complete: Mapping[str, LedgerTag]) -> Ledger:
    """Add complete attempts that are missing from the ledger: the last one of each name without a tag becomes the tag.

    Older attempts of the same name have presumably been replaced, and are retired, as are those older than an existing
    tag.
    """
    tags, ended = dict(ledger.tags), list[str]()
    unknown = [its for attempt, its in complete.items() if attempt not in collect_attempts(ledger)]
    for its in sorted(unknown, key=lambda its: (-its.sequence, its.attempt)):
        tag = its.attempt.partition("/")[0]
        its_tag = tags.setdefault(tag, its)
        if its_tag is not its and (tag not in ledger.tags or its.sequence <= its_tag.sequence):
            ended.append(its.attempt)
    sequence = max([ledger.sequence, *(its.sequence for its in tags.values())])
    doomed = dict.fromkeys(ended, sequence + RETENTION_COMMITS)
    return replace(ledger, sequence=sequence, tags=tags, doomed={**ledger.doomed, **doomed})


def explain_rejected(ledger: Ledger, incomplete: Mapping[str, str]) -> dict[str, str]:
    """Return the reasons why incomplete attempts that are missing from the ledger are not tags, by tag name.

    Args:
        ledger: The ledger.
        incomplete: Attempt -> its missing parts.
    """
    unknown = {attempt: why for attempt, why in incomplete.items() if attempt not in collect_attempts(ledger)}
    reasons = {attempt.partition("/")[0]: why for attempt, why in unknown.items()}
    return {tag: why for tag, why in reasons.items() if tag not in ledger.tags}


def list_expired(ledger: Ledger) -> list[str]:
    """Return the attempts whose files may be deleted."""
    return [attempt for attempt, sequence in ledger.doomed.items() if sequence <= ledger.sequence]


def forget_attempts(ledger: Ledger, attempts: Iterable[str]) -> Ledger:
    """Remove attempts whose files were deleted."""
    return replace(ledger, doomed=_drop_keys(ledger.doomed, attempts))


def _drop_keys(entries: Mapping[str, T], names: Iterable[str]) -> dict[str, T]:
    gone = set(names)
    return {name: entry for name, entry in entries.items() if name not in gone}
