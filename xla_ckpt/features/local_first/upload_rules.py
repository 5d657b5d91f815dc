"""Rules of local-first uploads: which tags to upload, the location of each tag, and the upload journal. Pure.

Commit numbers are comparable between both locations: a save uses a number above all that it has seen, and an upload
keeps it. If each host has its own disk, every disk contains the manifest and a part of the files; all are uploaded into
one attempt, which the first disk completes.
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
"""Action for a tag: upload it; nothing, because it is present; or skip it, because there is a newer tag with its
name.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadJournal:
    """State of the upload of a tag, stored with the tag."""

    address: str
    """Address of the object store."""

    nbytes: int = 0
    """Total size of all files (bytes); 0 before the upload."""

    attempt: str = ""
    """Directory of the attempt in the object store."""

    sent: Mapping[str, int] = field(default_factory=dict)
    """Uploaded files -> their sizes (bytes), for display. Later runs list the object store instead."""

    is_remote: bool = False
    """True if the tag was committed in the object store."""

    disks: tuple[str, ...] = ()
    """Ids of the disks with its files, the disk of rank 0 first; empty in tags of a version that supported one disk
    only.
    """

    def is_complete_on(self, disk: str) -> bool:
        """Return True if one disk contains all files.

        >>> UploadJournal(address="s3://b/r", disks=("a", "b")).is_complete_on("a")
        False
        """
        return set(self.disks) <= {disk}

    def to_json(self) -> bytes:
        """Return the contents of the journal file."""
        return json.dumps(asdict(self)).encode()

    @property
    def percent(self) -> int:
        """Uploaded fraction in percent.

        >>> UploadJournal(address="s3://b/r", nbytes=400, sent={"a": 100}).percent
        25
        """
        return 100 * sum(self.sent.values()) // max(self.nbytes, 1)


def parse_journal(data: bytes | None, address: str) -> UploadJournal:
    """Return the journal in a file. Without a file (None), no upload has started.

    A journal of an upload to another address only provides the disks. Members added by later versions are ignored.

    Raises:
        CorruptCheckpointError: The journal is corrupt. It is the only record of the disks with the files.
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
    """Return the upload address in a journal, or None if it is missing."""
    if data is None:
        return None
    try:
        address = json.loads(data)["address"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return address if isinstance(address, str) else None


def is_same_version(one: TagEntry, other: TagEntry | None) -> bool:
    """Return True if two entries are the same version of a tag."""
    return other is not None and (one.tag, one.sequence, one.created) == (other.tag, other.sequence, other.created)


def is_another_run(local: Sequence[TagEntry], remote: Sequence[TagEntry], addressed_tags: Iterable[str]) -> bool:
    """Return True if a directory and an object store contain tags of different runs, which an upload would mix.

    Args:
        local: Tags in the directory.
        remote: Tags in the object store.
        addressed_tags: Tags in the directory that were saved to be uploaded to this object store.
    """
    there = {entry.tag: entry for entry in remote}
    return bool(local and remote) and not (
        any(addressed_tags) or any(is_same_version(e, there.get(e.tag)) for e in local)
    )


def describe_upload_state(entry: TagEntry, there: TagEntry | None) -> str:
    """Return the state of a tag that was uploaded before, given the entry with its name in the object store.

    A tag that was deleted there, for example by retention, is not uploaded again.
    """
    if is_same_version(entry, there):
        return "was there already"
    return f"was uploaded before, and has been {'deleted' if there is None else 'replaced'} there since"


def make_upload_token(entry: TagEntry) -> str:
    """Return the token of a version of a tag, with which the name of its attempt in the object store begins."""
    return compute_text_fingerprint(f"{entry.sequence} {entry.created}")


def decide_upload(entry: TagEntry, remote: Iterable[TagEntry]) -> UploadAction:
    """Return the action for a tag that is not known to be in the object store, which contains the tags `remote`."""
    there = next((other for other in remote if other.tag == entry.tag), None)
    if there is None or there.sequence < entry.sequence:
        return "send"
    return "nothing" if is_same_version(entry, there) else "drop"


def order_newest_first(local: Sequence[TagEntry], remote: Sequence[TagEntry]) -> list[tuple[TagEntry, bool]]:
    """Return all tags that a load may read, newest first, with True if the tag is in the directory.

    A local version precedes an equal remote one.

    Args:
        local: Tags in the directory, oldest first.
        remote: Tags in the object store, oldest first.
    """
    both = [*((entry, False) for entry in reversed(remote)), *((entry, True) for entry in reversed(local))]
    return sorted(both, key=_get_sort_key, reverse=True)


def _get_sort_key(candidate: tuple[TagEntry, bool]) -> tuple[int, str, bool]:
    entry, is_local = candidate
    # Two machines may have assigned the same number. Tags of other libraries have no number, and keep their order.
    return entry.sequence, entry.created if entry.sequence else "", is_local


def list_locations(
    local: Sequence[TagEntry], remote: Sequence[TagEntry], journals: Mapping[str, UploadJournal]
) -> list[tuple[TagEntry, bool, str]]:
    """Return the newest version of each tag, oldest first, with True if it is in the directory, and its location as
    text.
    """
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
