"""What users are told when a store refuses, does not answer, or is none: by saves, loads and lists, in bounded time."""

from __future__ import annotations

import datetime
import logging
import socket
import sys
import time
import traceback
from collections.abc import Callable
from itertools import product

import pytest
import torch

import xla_ckpt
from tests.buckets.s3_server import Fault, S3Server
from tests.covering import some_of
from xla_ckpt.errors import StorageError, UsageError
from xla_ckpt.storage import remote_client
from xla_ckpt.storage.remote_client import PROBE_FILE, get_client

TREE = {"w": torch.ones(3)}
ALWAYS = 1_000_000


def save(root: str, tag: str = "new") -> None:
    xla_ckpt.save(root, tag, TREE)
    xla_ckpt.finalize_checkpoint()


CALLS: dict[str, Callable[[str], object]] = {
    "save": save,
    "load": lambda root: xla_ckpt.restore(root, "old"),
    "newest": xla_ckpt.restore,
    "list": xla_ckpt.list_tags,
    "verify": lambda root: xla_ckpt.verify(root, "old"),
}
NAMES = list(CALLS)


@pytest.fixture
def old(root: str, s3: S3Server) -> str:
    """The address of a root with one tag, by a process that has not used it yet."""
    save(root, "old")
    get_client.cache_clear()
    s3.forget()
    return root


def refused(call: str, root: str, words: str) -> StorageError:
    with pytest.raises(StorageError, match=words) as caught:
        CALLS[call](root)
    assert "Errno" not in str(caught.value)
    assert "Debug source" not in "".join(traceback.format_exception(caught.value))
    return caught.value


ANSWERS = {
    "expired": "have expired: get new ones",
    "skewed": "the clock of this machine differs",
    "unknown_key": "access key is not known there",
    "wrong_secret": "secret key does not fit",
    "redirect": "another region: set AWS_REGION",
    "region": "another region: set AWS_REGION",
    "no_store": "is no object store: look at the endpoint",
    "page": "is no object store: look at the endpoint",
}


# What is told is decided where a store answers, whatever was asked; what becomes of it is a matter of each call.
@pytest.mark.parametrize(("kind", "call"), some_of([*product(ANSWERS, NAMES)], lambda case: case))
def test_a_refusal_says_what_to_do(
    old: str, s3: S3Server, kind: str, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    s3.faults.append(Fault("", "", kind, ALWAYS))
    refused(call, old, ANSWERS[kind])
    xla_ckpt.finalize_checkpoint()
    assert ANSWERS[kind] not in caplog.text, "nothing is told twice"
    s3.faults.clear()
    save(old)
    assert xla_ckpt.list_tags(old) == ["old", "new"]


@pytest.mark.parametrize("call", NAMES)
def test_a_missing_bucket_is_no_empty_root(s3: S3Server, call: str) -> None:
    error = refused(call, "s3://nobody-has-made-it/run", "no such bucket: make it first")
    assert not isinstance(error, FileNotFoundError)


@pytest.mark.parametrize("call", NAMES)
def test_who_may_not_read(old: str, s3: S3Server, call: str) -> None:
    s3.faults.append(Fault("GET", old[5:], "refuse403", ALWAYS))
    s3.faults.append(Fault("GET", "list-type", "refuse403", ALWAYS))
    s3.faults.append(Fault("GET", ".", "refuse403", ALWAYS))
    assert refused(call, old, "no permission to read there .on S3: s3:GetObject").errno == 13


def test_who_may_not_write(old: str, s3: S3Server) -> None:
    s3.faults.append(Fault("PUT", "", "refuse403", ALWAYS))
    refused("save", old, "no permission to write there .on S3: s3:PutObject")
    assert xla_ckpt.list_tags(old) == ["old"]
    assert torch.equal(xla_ckpt.restore(old).tree["w"], TREE["w"])


@pytest.mark.parametrize("call", ["newest", "list"])
def test_who_may_not_list(old: str, s3: S3Server, call: str) -> None:
    s3.faults.append(Fault("GET", "list-type", "refuse403", ALWAYS))
    refused(call, old, "no permission to list what lies there .on S3: s3:ListBucket")


@pytest.mark.parametrize("kind", ["refuse403", "keep"])
def test_who_may_not_delete_saves_all_the_same(
    old: str, s3: S3Server, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    s3.faults.append(Fault("POST", "delete", kind, ALWAYS))
    with caplog.at_level(logging.WARNING):
        for tag in "abcde":
            xla_ckpt.save(old, tag, TREE, num_kept_ckpts=1)
            xla_ckpt.finalize_checkpoint()
    assert xla_ckpt.list_tags(old) == ["e"]
    assert xla_ckpt.verify(old).ok
    assert "no permission to delete there (on S3: s3:DeleteObject)" in caplog.text
    s3.faults.clear()
    xla_ckpt.save(old, "f", TREE, num_kept_ckpts=1)
    xla_ckpt.save(old, "g", TREE, num_kept_ckpts=1)
    xla_ckpt.finalize_checkpoint()
    assert not [tag for tag in "abcd" if get_client("s3", old.split("/")[2]).is_any_below(f"run/{tag}/")]


@pytest.mark.parametrize("answers", [False, True], ids=["refuses", "is silent"])
@pytest.mark.parametrize("call", ["load", "save"])
def test_nobody_answers(monkeypatch: pytest.MonkeyPatch, s3: S3Server, call: str, answers: bool) -> None:
    """The times are a tenth of those that users have: 50 seconds for a load, twice that for a save."""
    monkeypatch.setattr(remote_client, "RETRY_TIMEOUT", datetime.timedelta(seconds=3))
    monkeypatch.setattr(remote_client, "READ_TIMEOUT", "1500ms")
    monkeypatch.setattr(remote_client, "BACKOFF", {"max_backoff": datetime.timedelta(seconds=0.5)})
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        if answers:
            door.listen(100)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{door.getsockname()[1]}")
        get_client.cache_clear()
        begun = time.monotonic()
        refused(call, "s3://bucket/run", f"http://127.0.0.1:{door.getsockname()[1]} does not answer, tried for . s")
        xla_ckpt.finalize_checkpoint()
        assert time.monotonic() - begun < (5.5 if call == "load" else 11.5)


def test_the_times_that_users_have() -> None:
    def seconds(text: str) -> float:
        return float(text.removesuffix("s"))

    last_try = max(seconds(remote_client.CONNECT_TIMEOUT), seconds(remote_client.READ_TIMEOUT))
    a_request = (remote_client.RETRY_TIMEOUT + remote_client.BACKOFF["max_backoff"]).total_seconds() + last_try
    assert a_request <= 50


def test_what_fails_in_passing_is_repeated(old: str, s3: S3Server) -> None:
    for method in ("GET", "PUT"):
        s3.faults.append(Fault(method, "", "before503", 3))
        s3.faults.append(Fault(method, "", "drop", 1))
    save(old)
    assert xla_ckpt.list_tags(old) == ["old", "new"]


def test_conditions_are_tried_once_and_leave_one_file(old: str, s3: S3Server) -> None:
    for tag in "ab":
        get_client.cache_clear()  # as another process
        save(old, tag)
        save(old, f"{tag}{tag}")
    tried = [request for request in s3.requests if PROBE_FILE in request.path]
    assert [request.status for request in tried] == 2 * ["412", "200", "200", "412", tried[4].status]
    client = get_client("s3", old.split("/")[2])
    assert [key for key in client.list_keys("run/") if PROBE_FILE in key] == [f"run/{PROBE_FILE}"]


@pytest.mark.parametrize("kind", ["before503", "after503", "after500", "drop"])
def test_lost_answers_do_not_make_a_store_careless(old: str, s3: S3Server, kind: str) -> None:
    for number in range(1, 6):
        get_client.cache_clear()
        s3.forget()
        s3.faults.append(Fault("", PROBE_FILE, kind, number=number))
        save(old, f"new_{number}")
    assert len(xla_ckpt.list_tags(old)) == 6


@pytest.mark.parametrize("call", NAMES)
def test_obstore_is_not_installed(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    without(monkeypatch, "obstore")
    with pytest.raises(UsageError, match=r"needs the package obstore.*pip install 'xla-ckpt\[objects\]'"):
        CALLS[call]("s3://bucket/run")


@pytest.mark.parametrize("call", NAMES)
def test_an_endpoint_without_a_scheme(monkeypatch: pytest.MonkeyPatch, s3: S3Server, call: str) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "localhost:9000")
    with pytest.raises(UsageError, match="endpoint in the environment is no address: expected http://localhost:9000"):
        CALLS[call]("s3://bucket/run")


def without(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Have a package not be installed, as Python marks it."""
    for name in (package, f"obstore.auth.{package}"):
        monkeypatch.setitem(sys.modules, name, None)
    get_client.cache_clear()


def test_answers_that_break_off_are_asked_for_again(root: str, s3: S3Server) -> None:
    """Of files, of lists, and that there is no such file."""
    xla_ckpt.save(root, "a", {"w": torch.arange(3)})
    s3.forget()
    s3.faults += [Fault("GET", "", "cut", 1, number=number) for number in range(1, 60, 3)]
    xla_ckpt.save(root, "b", {"w": torch.arange(4)}, num_kept_ckpts=1)
    assert xla_ckpt.list_tags(root) == ["b"]
    assert torch.equal(xla_ckpt.restore(root).tree["w"], torch.arange(4))
    xla_ckpt.save(f"{root}-2", "a", {"w": torch.arange(3)})
    assert sum("cut" in request.status for request in s3.requests) >= 5
    assert any("404 cut" in request.status for request in s3.requests)
    assert any("list-type" in request.path and "cut" in request.status for request in s3.requests)
