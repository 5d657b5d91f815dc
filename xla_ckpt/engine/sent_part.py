"""The part of a tag that one disk has, on its way to an object store. If all hosts see one disk, it is the whole tag.

All disks of a tag send their files into one attempt. The first disk begins it, and commits it when all files are there:
it has what is in no manifest, such as orbax's metadata, too. Files appear whole, so their names tell what is there.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace

from xla_ckpt.engine.tag_reader import TagReader
from xla_ckpt.errors import CheckpointError, CorruptCheckpointError, RankFailedError
from xla_ckpt.manifest.digest import BlockDigester, JoinedDigest
from xla_ckpt.storage.base import Directory, LocalFiles, Source
from xla_ckpt.storage.small_files import size_of
from xla_ckpt.tags.attempt import Attempt
from xla_ckpt.tags.entry import MANIFEST, REPORT, UPLOAD, TagEntry
from xla_ckpt.tags.local_first import LocalFirst, write_journal
from xla_ckpt.tags.retention import Retention
from xla_ckpt.tags.transaction import WITHIN
from xla_ckpt.tags.upload_rules import Journal, uploaded_as

PATIENCE_WITH_DISKS = 600.0
"""Seconds for which a tag is waited for whose other disks send no file."""

PIECE_BYTES = 8 * 1024 * 1024
"""Bytes of a file that are read at a time."""


@dataclass(frozen=True, slots=True)
class WaitingTag:
    """A tag whose part on this disk is sent, and those of others are not."""

    there: Set[str]
    """The files that were there at the last look."""

    since: float = field(default_factory=time.monotonic)
    """When the last of them was new."""


def absent_disks(journal: Journal, present: Set[str]) -> Set[str]:
    """The disks with a part of a tag that no process of this job sees; none where it is not known what they see."""
    return set(journal.disks) - present if present else set()


@dataclass(frozen=True, slots=True)
class DiskPart:
    """What one disk has of a tag."""

    root: LocalFirst
    entry: TagEntry
    directory: LocalFiles
    reader: TagReader
    """The same directory, by its manifest."""

    present: Set[str]
    """The disks of this job; empty where nobody knows them."""

    check: Callable[[], None]
    """Is called between two pieces, and raises to end this."""

    before: WaitingTag | None
    """What the last look has told, if this process has sent the part already."""

    def send(self, retention: Retention | None) -> WaitingTag | None:
        """Send what is not there yet. If this is the first disk, and all files are there: the manifest, and commit.

        Returns:
            What others still have to do; None if the tag is committed.

        Raises:
            RankFailedError: They do not do it.
            CheckpointError: Likewise, or a file is damaged.
            OSError: A storage refused. The attempt stays, and the next try goes on with it.
        """
        journal, own, remote = self.root.journal(self.entry), self.root.disk(anew=True), self.root.remote
        if gone := absent_disks(journal, self.present):
            raise self._not_whole(f"{len(gone)} of {len(journal.disks)} disks are not there")
        is_first = journal.disks[:1] in ((), (own,))
        named = {record.path: number for number, record in enumerate(self.reader.manifest.files)}
        sizes = self._sizes(named, all_files=is_first)
        if journal.is_whole_on(own) and (lost := named.keys() - sizes.keys()):
            raise self.reader.missing(named[min(lost)])
        draft = remote.upload(self.entry.tag, uploaded_as(self.entry), begins=is_first)
        if draft is None:
            # If this process has sent its part, nobody but its job may have ended that: it is swept as a retired tag.
            ends = ("committed",) if self.before is None else ("committed", "unknown")
            if journal.attempt and remote.fate(journal.attempt) in ends:
                return None
            return self._waiting(set())
        there = set(draft.directory.files())
        sent = self._sent(draft, sizes, there)
        journal = replace(journal, nbytes=sum(sizes.values()), attempt=draft.directory.name, sent=sent)
        write_journal(self.directory, journal)
        missing = named.keys() - there - sizes.keys()
        self._send_files(draft, journal, {p: n for p, n in sizes.items() if p != MANIFEST or not missing}, named)
        if missing or not is_first:
            return self._waiting(there)
        report = None if REPORT in there else self.root.report_of(self.entry.tag)
        draft.commit(retention=retention, report=report, within=WITHIN)
        return None

    def _sizes(self, named: Mapping[str, int], *, all_files: bool) -> dict[str, int]:
        """What this disk is to send, the manifest last, with the sizes."""
        files = [path for path in self.directory.files() if not path.startswith(UPLOAD) and path != MANIFEST]
        # Other disks have files of their own under the names of those that are in no manifest.
        paths = [*files, MANIFEST] if all_files else [path for path in files if path in named]
        return {path: size_of(self.directory, path) for path in paths}

    def _sent(self, draft: Attempt, sizes: Mapping[str, int], there: Set[str]) -> dict[str, int]:
        """Which of these files are there. They are whole: else they would not be there."""
        sent = {path: size for path, size in sizes.items() if path in there}
        for path in () if self.before is not None else (*sent,):
            if size_of(draft.directory, path) != sizes[path]:  # a pin has changed the manifest since
                self.root.remote.store.remove(f"{draft.directory.name}/{path}")
                del sent[path]
        return sent

    def _send_files(self, draft: Attempt, journal: Journal, sizes: Mapping[str, int], named: Mapping[str, int]) -> None:
        filled = draft.directory.streaming
        assert filled is not None, "files of an object store are streamed"
        try:
            for path, size in sizes.items():
                if path not in journal.sent:
                    known = path in named
                    pieces = _checked(self.reader, named[path]) if known else _whole_file(self.directory, path)
                    filled.stream(path, size, self._checking(pieces))
                    journal = replace(journal, sent={**journal.sent, path: size})
                    write_journal(self.directory, journal)
        except CorruptCheckpointError:
            draft.abandon()
            raise

    def _checking(self, pieces: Iterator[memoryview]) -> Iterator[memoryview]:
        for piece in pieces:
            self.check()
            yield piece

    def _waiting(self, there: Set[str]) -> WaitingTag:
        """What is to be waited for, as long as there is hope for it."""
        waiting = self.before if self.before is not None and self.before.there == there else WaitingTag(there)
        if not self.present or time.monotonic() - waiting.since > PATIENCE_WITH_DISKS:
            raise self._not_whole("files that are missing in the object store")
        return waiting

    def _not_whole(self, problem: str) -> RankFailedError:
        return RankFailedError(
            "a part of this tag is on the disks of other hosts, which do not send it",
            tag=self.entry.tag,
            found=problem,
            hint="It goes up when a job saves or loads that has all of these disks; or run xla-ckpt upload on their "
            "hosts, and then here once more. If a disk is lost, so is this tag: remove it with xla-ckpt rm.",
        )


def _checked(reader: TagReader, number: int) -> Iterator[memoryview]:
    """A file of a tag, in pieces, which are compared with its digests before the last one is over.

    Raises:
        CorruptCheckpointError: It is not what was saved.
    """
    record, source = reader.manifest.files[number], reader.source(number)
    table = None if record.head == record.size else reader.digest_table(number)  # a file of pickles has no regions
    damaged = CorruptCheckpointError("the file is not what was saved", file=record.path, hint=reader.hint)
    regions = [] if table is None else list(zip(table.offset.tolist(), table.nbytes.tolist(), strict=True))
    rest, at = JoinedDigest(), 0
    for offset, nbytes in (*regions, (record.size, 0)):
        for piece in _pieces(source, at, offset - at, damaged):
            rest.add(rest.nbytes, piece)
            yield piece
        of_region = BlockDigester(nbytes)
        for piece in _pieces(source, offset, nbytes, damaged):
            of_region.update(piece)
            yield piece
        if table is not None and nbytes and tuple(of_region.digests) != table.of(offset, nbytes):
            raise damaged
        at = offset + nbytes
    if rest.value != record.digest:
        raise damaged


def _pieces(source: Source, offset: int, nbytes: int, short: CheckpointError) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(min(PIECE_BYTES, nbytes)))
    for at in range(offset, offset + nbytes, PIECE_BYTES):
        piece = buffer[: min(PIECE_BYTES, offset + nbytes - at)]
        if source.read_into(piece, at) < len(piece):
            raise short
        yield piece


def _whole_file(directory: Directory, path: str) -> Iterator[memoryview]:
    """A file that is not in the manifest, such as the manifest itself, which has a digest of its own."""
    with contextlib.closing(directory.open(path)) as source:
        yield from _pieces(source, 0, source.size, CorruptCheckpointError("the file is cut off", file=path))
