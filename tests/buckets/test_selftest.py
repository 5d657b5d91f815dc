"""``xla-ckpt selftest`` in a bucket: what it sees, what it is refused, and that nothing stays there."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import Any

import pytest

from tests.buckets.content import names_below
from tests.buckets.s3_server import Fault, S3Server
from tests.cli.test_cli import call
from tests.runs import environment
from xla_ckpt.cli.selftest import command, storage_checks

Capture = pytest.CaptureFixture[str]
ALWAYS = 10**9
QUICK = ["selftest", "--json", "--seconds", "4"]


def verdicts(out: str) -> dict[str, str]:
    return {answer["check"]: answer["verdict"] for answer in json.loads(out)["checks"]}


def test_what_it_sees(root: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_checks, "MEASURED_BYTES", 1 << 21)
    code, out, err = call(capsys, *QUICK, root)
    seen = verdicts(out)
    assert (code, err) == (int("was not looked at" in seen.values()), "")
    assert json.loads(out)["storage"] == "s3:// at 127.0.0.1"
    assert (seen["names"], seen["conditional writes"]) == ("holds", "holds")
    assert "does not hold" not in seen.values()
    assert names_below(root) == []


@pytest.mark.parametrize("kind", ["refuse403", "wrong_secret", "page"])
def test_where_it_may_not_write_it_does_not_begin(s3: S3Server, root: str, capsys: Capture, kind: str) -> None:
    s3.faults += [Fault(method, "", kind, ALWAYS) for method in ("PUT", "POST", "DELETE")]
    code, out, err = call(capsys, *QUICK, root)
    assert (code, out) == (1, "")
    assert "making a folder for the selftest failed: " in err
    assert f"[in {root}]. Name a place in which this user may make files." in err
    s3.forget()
    assert names_below(root) == []


def test_a_bucket_that_is_not_there(capsys: Capture, root: str) -> None:
    code, out, err = call(capsys, *QUICK, "s3://no-such-bucket-here/run")
    assert (code, out) == (1, "")
    assert "making a folder for the selftest failed: there is no such bucket" in err


def test_credentials_that_expire_meanwhile_break_no_promise(
    s3: S3Server, root: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove: Any = command._remove_scratch_folder
    monkeypatch.setattr(command, "_remove_scratch_folder", lambda store, name: remove(store, name, patience=0.0))
    s3.faults.append(Fault("", "", "expired", ALWAYS, number=6))
    code, out, err = call(capsys, *QUICK, root)
    assert (code, set(verdicts(out).values()) - {"was not looked at"}) == (1, {"could not be seen"})
    assert "names" in verdicts(out)
    assert "have expired" in out
    assert "removing the selftest's folder failed: the credentials have expired" in err


@pytest.mark.crash
def test_ctrl_c_leaves_nothing(root: str) -> None:
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "xla_ckpt", "selftest", root],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
    )  # fmt: skip
    signal.signal(signal.SIGINT, handler)
    assert process.stdout is not None
    while " clock: " not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert (process.returncode, err) == (130, "xla-ckpt: interrupted\n")
    assert names_below(root) == []
