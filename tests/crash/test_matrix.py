"""Faults at system calls, and losses of power: a sample of what `make crash` does (docs/measured/reliability.md)."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.crash import matrix, power, recorder, report
from tests.crash.operations import saving
from tests.runs import environment, names_in
from xla_ckpt.features.local_first.upload_rules import UploadJournal, parse_journal
from xla_ckpt.tags.entry import UPLOAD_FILE

pytestmark = [
    pytest.mark.crash,
    pytest.mark.skipif(recorder.why_not() is not None, reason=str(recorder.why_not())),
]

SAMPLE = ("save", "replace, retention", "dcp.save, replacing")


def test_a_sample_of_the_faults_loses_nothing_and_is_told_truly(tmp_path: Path) -> None:
    file = tmp_path / "results"
    chosen = [word for name in SAMPLE for word in ("--operation", name)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.crash.matrix", *chosen, "--share", "0.02", "--json", str(file)],
        env=environment({"TMPDIR": str(tmp_path)}), capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    results = [matrix.result_of(line) for line in file.read_text().splitlines()]
    cases, losses = report.parted(results)
    assert {case.operation for case in cases} == {loss.operation for loss in losses} == set(SAMPLE)
    assert sum(case.reached for case in cases) > 12
    assert all(loss.states for loss in losses)
    assert report.problems(results) == []


CHANGES = """
import os, sys
from tests.crash.recorder import Fault, Recorder
from xla_ckpt.storage.base import write_file
from xla_ckpt.storage.local import LocalStore
root, log = sys.argv[1:]
if log:
    from pathlib import Path
    Recorder().arm(Path(root), Path(log), 0, Fault())
store = LocalStore(root)
directory = store.make_directory("a")
write_file(directory, "x/file", b"bytes" * 1000)
directory.sync()
store.rename("a", "b")
store.make_directory("c").close()
store.exchange("b", "c")
store.sync()
store.remove("c"), store.remove("b")
"""

NAMES = {"openat": "create", "pwrite64": "write", "mkdirat": "mkdir", "renameat2": "exchange", "unlinkat": "unlink"}
"""What the shim calls the system calls of that program."""


def test_the_shim_sees_the_calls_that_strace_sees(tmp_path: Path) -> None:
    if shutil.which("strace") is None:
        pytest.skip("there is no strace")
    library, root, log, trace = recorder.compiled(tmp_path), tmp_path / "root", tmp_path / "log", tmp_path / "trace"
    root.mkdir()
    program = [sys.executable, "-c", CHANGES, str(root)]
    subprocess.run([*program, str(log)], env=environment({"LD_PRELOAD": str(library)}), check=True)
    calls = "openat,write,pwrite64,fsync,rename,renameat2,unlink,unlinkat,mkdir,mkdirat,rmdir,fallocate,ftruncate"
    traced = subprocess.run(
        ["strace", "-f", "-y", "-e", f"trace={calls}", "-o", str(trace), *program, ""],
        env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    if "ptrace" in traced.stderr.lower():
        pytest.skip("strace may not trace here")
    lines = [line.split(maxsplit=1)[1] for line in trace.read_text().splitlines() if str(root) in line]
    lines = [line for line in lines if "O_RDONLY" not in line]
    names = [line.split("(")[0] for line in lines]
    seen = [
        "rmdir" if "AT_REMOVEDIR" in text else NAMES.get(name, name) for name, text in zip(names, lines, strict=True)
    ]
    assert len(seen) > 15
    assert [record.call for record in recorder.read_log(log)] == seen


def record(number: int, call: str, path: str, other: str = "", data: bytes = b"") -> recorder.Record:
    return recorder.Record(0, number, call, 0, 0, len(data), 0, 0, path, other, data)


def test_a_loss_of_power_takes_what_was_not_synced(tmp_path: Path) -> None:
    start, root = tmp_path / "start", "/root"
    start.mkdir()
    (start / "old").write_bytes(b"1")
    calls = [
        record(0, "create", "/root/new"), record(1, "write", "/root/new", data=b"2"), record(2, "fsync", "/root/new"),
        record(3, "rename", "/root/new", "/root/old"), record(-1, "mark", "told"), record(4, "fsync", "/root"),
    ]  # fmt: skip
    played = power.replay(start, Path(root), calls)
    states = [{frozenset(tree.items()) for _, tree in played.states(point)} for point in range(7)]
    old, both = frozenset({("old", b"1")}), frozenset({("old", b"1"), ("new", b"2")})
    assert states[0] == {old}
    assert states[2] == {old, frozenset({("old", b"1"), ("new", b"")})}
    assert states[3] == {old, both}
    assert states[4] == {old, both, frozenset({("old", b"2")})}
    assert states[6] == {frozenset({("old", b"2")})}
    unsure = [(effect.name, effect.to is None) for effect in played.open_at(played.told)]
    assert unsure == [("new", False), ("new", True), ("old", False)]


JOURNAL = """
import sys
from pathlib import Path
from tests.crash.recorder import Fault, Recorder
from xla_ckpt.storage.local import LocalStore
from xla_ckpt.features.local_first.root import write_journal
from xla_ckpt.features.local_first.upload_rules import UploadJournal
root, log = sys.argv[1:]
directory = LocalStore(root).open("a")
Recorder().arm(Path(root), Path(log), 0, Fault())
for sent in ({"x": 1}, {"x": 1, "y": 2}):
    write_journal(directory, UploadJournal(address="s3://b/r", sent=sent, disks=("one", "other")))
"""


def test_a_loss_of_power_leaves_a_whole_journal_of_an_upload(tmp_path: Path) -> None:
    library, log = recorder.compiled(tmp_path), tmp_path / "log"
    for folder in ("start", "root"):
        (tmp_path / folder / "a").mkdir(parents=True)
        (tmp_path / folder / "a" / UPLOAD_FILE).write_bytes(
            UploadJournal(address="s3://b/r", disks=("one", "other")).to_json()
        )
    program = [sys.executable, "-c", JOURNAL, str(tmp_path / "root"), str(log)]
    subprocess.run(program, env=environment({"LD_PRELOAD": str(library)}), check=True)
    calls = recorder.read_log(log)
    played = power.replay(tmp_path / "start", tmp_path / "root", calls)
    trees = [tree for point in range(len(calls) + 1) for _, tree in played.states(point)]
    found = [parse_journal(tree[f"a/{UPLOAD_FILE}"], "s3://b/r") for tree in trees]
    assert {journal.disks for journal in found} == {("one", "other")}
    assert {len(journal.sent) for journal in found} == {0, 1, 2}


def test_a_rename_before_the_fsync_is_found_out(tmp_path: Path) -> None:
    """The check itself can fail: a save that syncs its files after the rename loses them."""
    operation = saving("save", {}, "a")
    start, root = tmp_path / "start", tmp_path / "root"
    start.mkdir(), root.mkdir()
    calls = [
        record(0, "mkdir", f"{root}/a"), record(1, "create", f"{root}/a/manifest.json"),
        record(2, "write", f"{root}/a/manifest.json", data=b"{"), record(3, "fsync", str(root)),
        record(-1, "mark", "told"), record(4, "fsync", f"{root}/a/manifest.json"),
    ]  # fmt: skip
    loss = power.lose_power(operation, start, root, calls, tmp_path / "states")
    assert any("the caller was told of it" in problem for problem in loss.problems)
    assert loss.late == ("a/manifest.json",)
    assert names_in(tmp_path / "states") == []
