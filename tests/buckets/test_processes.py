"""Signals while a store is slow, and processes that are forked from one that uses a store."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import xla_ckpt
from tests.buckets.s3_server import S3Server
from tests.buckets.uploads import SOON, Gate
from xla_ckpt.storage.resolve import open_store
from xla_ckpt.tags.entry import LEASE_NAME
from xla_ckpt.tags.lease import RECORD_EXPIRY_SECONDS

PROGRAM = """
import sys, torch, xla_ckpt
root, call = sys.argv[1:]
try:
    if call == "save":
        xla_ckpt.save(root, "b", {"w": torch.ones(3)})
    elif call == "load":
        xla_ckpt.restore(root)
    else:
        xla_ckpt.list_tags(root)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize(
    ("call", "method", "part"),
    [
        ("load", "GET", ".ledger"), ("load", "GET", "manifest"), ("load", "GET", "safetensors"),
        ("list", "GET", "list-type"), ("save", "PUT", ".ledger"), ("save", "PUT", "safetensors"),
    ],
)  # fmt: skip
def test_ctrl_c_while_the_store_is_slow(
    root: str, call: str, method: str, part: str, gate: Callable[..., Gate]
) -> None:
    """The store answers when the program has said that it was interrupted: only a save that sends a file ends that
    first, and takes it back."""
    xla_ckpt.save(root, "a", {"w": torch.ones(3)})
    xla_ckpt.finalize_checkpoint()
    slow = gate(part, method=method)
    with subprocess.Popen([sys.executable, "-c", PROGRAM, root, call], stdout=subprocess.PIPE, text=True) as process:
        assert slow.reached.wait(SOON)
        while not sleeps(process.pid):  # it is interrupted while it waits, and not a little before
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        if part == "safetensors" and call == "save":
            slow.go.set()
        assert process.stdout is not None
        assert process.stdout.readline() == "interrupted\n"
        slow.go.set()
        assert process.wait(SOON) == 0, "it does not crash at its end, when another thread still asks"
    assert xla_ckpt.list_tags(root) == ["a"]
    assert xla_ckpt.verify(root).ok


def sleeps(pid: int) -> bool:
    """Whether the main thread of a process waits for something."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def test_ctrl_c_while_the_lease_of_a_killed_job_is_watched(root: str) -> None:
    store = open_store(root).object_store
    assert store is not None
    store.write_record(LEASE_NAME, b'{"token": 3}', None)
    words = [sys.executable, "-c", PROGRAM, root, "save"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while "waiting to see whether its last owner still runs" not in (line := process.stderr.readline()):
            assert line, "the program has ended"
        begun = time.monotonic()
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate()
    assert out == "interrupted\n"
    assert time.monotonic() - begun < RECORD_EXPIRY_SECONDS / 3
    assert xla_ckpt.list_tags(root) == []


@pytest.mark.parametrize("same", [True, False], ids=["the same bucket", "another bucket"])
def test_a_forked_child_is_told_that_it_cannot(root: str, s3: S3Server, same: bool) -> None:
    """It would wait for threads for ever that only its parent has."""
    other = root if same else f"s3://{s3.new_bucket()}/run"
    program = (
        "import os, sys, torch, xla_ckpt\n"
        "root, other = sys.argv[1:]\n"
        "save = lambda root: xla_ckpt.save(root, 'a', {'w': torch.ones(3)})\n"
        "save(root)\n"
        "xla_ckpt.finalize_checkpoint()\n"
        "if not (child := os.fork()):\n"
        "    for call in (xla_ckpt.list_tags, xla_ckpt.restore, save):\n"
        "        try: call(other)\n"
        "        except xla_ckpt.UsageError as error: print(error, flush=True)\n"
        "    os._exit(0)\n"
        "os.waitpid(child, 0)\n"
        "print(xla_ckpt.list_tags(root), flush=True)\n"
    )
    command = [sys.executable, "-c", program, root, other]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
    *told, last = done.stdout.splitlines()
    assert len(told) == 3
    for line in told:
        assert "was forked from one that had used an object store" in line
        assert 'get_context("spawn")' in line
    assert last == "['a']", "the parent goes on"
