"""Where tags are that go to an object store, and which of them still have to."""

from __future__ import annotations

import json

import pytest

from xla_ckpt.errors import CorruptCheckpointError
from xla_ckpt.features.local_first.upload_rules import (
    UploadJournal,
    decide_upload,
    list_locations,
    order_newest_first,
    parse_journal,
)
from xla_ckpt.tags.entry import TagEntry

HERE = "s3://bucket/run"


def entry(tag: str, sequence: int, created: str = "2026-01-01") -> TagEntry:
    return TagEntry(tag=tag, sequence=sequence, created=created, directory=tag)


def test_a_journal_survives_its_file() -> None:
    journal = UploadJournal(address=HERE, nbytes=7, attempt="a/.5eed", sent={"f": 3}, is_remote=True)
    assert parse_journal(journal.to_json(), HERE) == journal


def test_without_a_journal_nothing_is_there() -> None:
    assert parse_journal(None, HERE) == UploadJournal(address=HERE)


@pytest.mark.parametrize(
    "data", [b"", b"\0" * 300, b"{", b"[]", b"null", b'{"sent": 1}', b'{"sent": {"a": "b"}, "address": "s3://bucket/run"}',
             b'{"sent": {}}', UploadJournal(address=HERE, disks=("a", "b")).to_json()[:-1]],
)  # fmt: skip
def test_a_damaged_journal_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptCheckpointError, match="journal of the upload is damaged"):
        parse_journal(data, HERE)


def test_the_disks_of_a_tag_are_read_from_each_journal_that_has_them() -> None:
    elsewhere = UploadJournal(address="s3://other", nbytes=1, sent={"f": 1}, is_remote=True, disks=("a", "b"))
    later = {**json.loads(UploadJournal(address=HERE, disks=("a", "b")).to_json()), "later": 1}
    for data in (elsewhere.to_json(), json.dumps(later).encode()):
        assert parse_journal(data, HERE) == UploadJournal(address=HERE, disks=("a", "b"))


@pytest.mark.parametrize(
    ("remote", "step"),
    [
        ([], "send"),
        ([entry("other", 9)], "send"),
        ([entry("a", 4)], "send"),
        ([entry("a", 5)], "nothing"),
        ([entry("a", 5, "2026-01-02")], "drop"),  # another machine gave the same number
        ([entry("a", 6)], "drop"),
    ],
)
def test_what_is_done_with_a_tag(remote: list[TagEntry], step: str) -> None:
    assert decide_upload(entry("a", 5), remote) == step


def test_the_newest_comes_first_and_of_the_same_the_nearer() -> None:
    local, remote = [entry("a", 1), entry("b", 2)], [entry("x", 0), entry("y", 0), entry("b", 2), entry("c", 3)]
    found = [(one.tag, is_local) for one, is_local in order_newest_first(local, remote)]
    assert found == [("c", False), ("b", True), ("b", False), ("a", True), ("y", False), ("x", False)]
    later = entry("z", 2, "2026-01-02")
    assert order_newest_first([entry("b", 2)], [later])[0] == (later, False)


def test_places_in_words() -> None:
    local = [entry("both", 1), entry("here", 2), entry("half", 3), entry("old", 4)]
    remote = [entry("both", 1), entry("there", 2, "2026-01-02"), entry("old", 5)]
    journals = {"half": UploadJournal(address=HERE, nbytes=10, sent={"f": 4}), "here": UploadJournal(address=HERE)}
    assert [
        (one.tag, one.sequence, is_local, where) for one, is_local, where in list_locations(local, remote, journals)
    ] == [
        ("both", 1, True, "both"),
        ("here", 2, True, "local"),
        ("there", 2, False, "remote"),
        ("half", 3, True, "uploading 40 %"),
        ("old", 5, False, "remote"),
    ]
