"""Rules of local-first uploads: which tags to upload, where each tag is, and the upload journal. Pure.

Commit numbers are comparable in both places: a save takes one above all that it has seen, and an upload keeps it.
If each host has a disk of its own, every disk has the manifest and a part of the files; all are sent into one
attempt, which the first disk completes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from xla_ckpt.core.fingerprint import compute_text_fingerprint
from xla_ckpt.errors import CorruptCheckpointError
from xla_ckpt.tags.entry import UPLOAD_FILE, TagEntry

UploadAction = Literal["send", "nothing", "drop"]
"""What is to be done with a tag: it goes up; it is there; or there is a newer one of its name, and it stays here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadJournal:
    """What a tag keeps of its upload."""

    address: str
    """Where it goes."""

    nbytes: int = 0
    """Bytes of all its files; 0 before the upload has begun."""

    attempt: str = ""
    """The directory that is filled there."""

    sent: Mapping[str, int] = field(default_factory=dict)
    """Files that are there -> their sizes (bytes): for people. A later try looks itself."""

    is_remote: bool = False
    """Whether it was committed there."""

    disks: tuple[str, ...] = ()
    """The disks that have its files, that of rank 0 first; empty in tags of a version that knew of one disk only."""

    def is_complete_on(self, disk: str) -> bool:
        """Whether one disk has all of its files.

        >>> UploadJournal(address="s3://b/r", disks=("a", "b")).is_complete_on("a")
        False
        """
        return set(self.disks) <= {disk}

    def to_json(self) -> bytes:
        """The file in which it is kept."""
        return json.dumps(asdict(self)).encode()

    @property
    def percent(self) -> int:
        """How much of it is there.

        >>> UploadJournal(address="s3://b/r", nbytes=400, sent={"a": 100}).percent
        25
        """
        return 100 * sum(self.sent.values()) // max(self.nbytes, 1)


def parse_journal(data: bytes | None, address: str) -> UploadJournal:
    """Return the journal in a file. Without one (None), no upload was begun. One of an upload to another place says
    only which disks have the files; members that a later version has added are ignored.

    Raises:
        CorruptCheckpointError: It is damaged. Nothing else says on which disks the files are.
    """
    if data is None:
        return UploadJournal(address=address)
    try:
        raw: Any = json.loads(data)
        known = {field.name: raw[field.name] for field in fields(UploadJournal) if field.name in raw}
        sent = {str(path): int(size) for path, size in raw["sent"].items()}
        journal = UploadJournal(**{**known, "sent": sent, "disks": tuple(map(str, raw.get("disks", ())))})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CorruptCheckpointError(
            "the journal of the upload is damaged, so it is not known on which disks the files of this tag are",
            file=UPLOAD_FILE,
            expected="a JSON object with the members address, sent and disks",
            found=f"{len(data)} bytes: {data[:40]!r}",
            hint=f"Where xla-ckpt verify finds all files of the tag in this directory, remove its {UPLOAD_FILE}: the "
            "tag is uploaded again. If the object store has the tag, remove it here with xla-ckpt rm.",
        ) from error
    return journal if journal.address == address else UploadJournal(address=address, disks=journal.disks)


def parse_address(data: bytes | None) -> str | None:
    """Where the tag with this journal goes; None if it does not say so, or there is none."""
    if data is None:
        return None
    try:
        address = json.loads(data)["address"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return address if isinstance(address, str) else None


def is_same_version(one: TagEntry, other: TagEntry | None) -> bool:
    """Whether two entries are the same version of a tag."""
    return other is not None and (one.tag, one.sequence, one.created) == (other.tag, other.sequence, other.created)


def is_another_run(local: Sequence[TagEntry], remote: Sequence[TagEntry], addressed_tags: Iterable[str]) -> bool:
    """Whether the tags of a directory and those of an object store are of two runs, which an upload would mix.

    Args:
        local: The tags in the directory.
        remote: Those in the object store.
        addressed_tags: Tags in the directory that were saved to go there.
    """
    there = {entry.tag: entry for entry in remote}
    return bool(local and remote) and not (
        any(addressed_tags) or any(is_same_version(e, there.get(e.tag)) for e in local)
    )


def describe_upload_state(entry: TagEntry, there: TagEntry | None) -> str:
    """What has become of a tag that was uploaded before, where the object store has `there` under its name.

    A tag that was deleted there, by retention perhaps, is not uploaded again.
    """
    if is_same_version(entry, there):
        return "was there already"
    return f"was uploaded before, and has been {'deleted' if there is None else 'replaced'} there since"


def make_upload_token(entry: TagEntry) -> str:
    """What the attempt of this version of a tag is known by in the object store: its name begins so."""
    return compute_text_fingerprint(f"{entry.sequence} {entry.created}")


def decide_upload(entry: TagEntry, remote: Iterable[TagEntry]) -> UploadAction:
    """What is to be done with a tag that is not known to be in the object store, which has the tags `remote`."""
    there = next((other for other in remote if other.tag == entry.tag), None)
    if there is None or there.sequence < entry.sequence:
        return "send"
    return "nothing" if is_same_version(entry, there) else "drop"


def order_newest_first(local: Sequence[TagEntry], remote: Sequence[TagEntry]) -> list[tuple[TagEntry, bool]]:
    """All that a load may read, the best first, and whether it is in the directory: of two that are the same, that one.

    Args:
        local: The tags in the directory, oldest first.
        remote: Those in the object store, oldest first.
    """
    both = [*((entry, False) for entry in reversed(remote)), *((entry, True) for entry in reversed(local))]
    return sorted(both, key=_get_sort_key, reverse=True)


def _get_sort_key(candidate: tuple[TagEntry, bool]) -> tuple[int, str, bool]:
    entry, is_local = candidate
    # Two machines may have given one number. Tags of other libraries have none, and keep their order.
    return entry.sequence, entry.created if entry.sequence else "", is_local


def list_locations(
    local: Sequence[TagEntry], remote: Sequence[TagEntry], journals: Mapping[str, UploadJournal]
) -> list[tuple[TagEntry, bool, str]]:
    """The newest version of each tag, oldest first; whether it is in the directory; and where it is, in words."""
    there = {entry.tag: entry for entry in remote}
    here = {entry.tag: entry for entry in local}
    listed: dict[str, tuple[TagEntry, bool, str]] = {}
    for entry, is_local in order_newest_first(local, remote):
        if entry.tag in listed:
            continue
        journal = journals.get(entry.tag)
        if is_same_version(entry, there.get(entry.tag)) and is_same_version(entry, here.get(entry.tag)):
            where = "both"
        elif not is_local:
            where = "remote"
        else:
            where = "local" if journal is None or not journal.nbytes else f"uploading {journal.percent} %"
        listed[entry.tag] = (entry, is_local, where)
    return list(listed.values())[::-1]
