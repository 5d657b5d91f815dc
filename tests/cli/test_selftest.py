"""``xla-ckpt selftest``: each check sees that its promise holds, and that it does not where the storage breaks it."""

from __future__ import annotations

import errno
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xla_ckpt
from tests.cli import selftests
from tests.cli.test_cli import call
from tests.runs import environment, names_in
from xla_ckpt.cli.selftest import command, storage_checks
from xla_ckpt.cli.selftest.checks import Check, CheckContext, CheckResult, failed, passed, run_catching_errors
from xla_ckpt.cli.selftest.device_checks import DEVICE_CHECKS
from xla_ckpt.errors import CorruptCheckpointError, StorageError
from xla_ckpt.storage.local import LocalDirectory, LocalStore
from xla_ckpt.storage.local_file import LocalFileReader, LocalFileWriter
from xla_ckpt.storage.remote_client import ObjectStoreClient

Capture = pytest.CaptureFixture[str]
CHECKS = {
    check.name: check
    for objects in (False, True)
    for check in storage_checks.list_storage_checks(is_object_store=objects)
}
DEVICES = {check.name: check for check in DEVICE_CHECKS}


def seen(check: Check, path: object, seconds: float = 100) -> CheckResult:
    return check(CheckContext(str(path), time.monotonic() + seconds))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_checks, "MEASURED_BYTES", 1 << 21)
    monkeypatch.setattr(storage_checks, "MAX_SLOWDOWN", 1e6)  # of so few bytes the ratio says nothing


@pytest.mark.parametrize("name", ["names", "rename", "bytes", "room", "clock", "speed"])
def test_a_promise_that_holds(tmp_path: Path, name: str) -> None:
    assert seen(CHECKS[name], tmp_path).verdict == "holds"


@pytest.mark.parametrize("name", ["names", "conditional writes", "bytes", "clock", "speed"])
def test_a_promise_that_holds_in_a_bucket(s3: Any, name: str) -> None:
    assert seen(CHECKS[name], f"s3://{s3.new_bucket()}/run").verdict == "holds"


def test_that_a_disk_keeps_what_was_synced_cannot_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_checks, "MIN_FSYNC_SECONDS", 0.0)
    assert seen(CHECKS["fsync"], tmp_path).verdict == "could not be seen"


def replaces(store: LocalStore, old: str, new: str) -> None:
    shutil.rmtree(f"{store.path}/{new}")
    os.rename(f"{store.path}/{old}", f"{store.path}/{new}")


LOOKED = threading.Event()
HAS, MAKE = LocalStore.has, LocalStore.make_directory


def has(store: LocalStore, path: str) -> bool:
    there = HAS(store, path)
    LOOKED.set()
    return there


def exchanges_in_steps(store: LocalStore, one: str, other: str) -> bool:
    os.rename(f"{store.path}/{one}", f"{store.path}/third")
    if threading.current_thread() is not threading.main_thread():  # which looks meanwhile
        LOOKED.clear()
        assert LOOKED.wait(60)
    os.rename(f"{store.path}/{other}", f"{store.path}/{one}")
    os.rename(f"{store.path}/third", f"{store.path}/{other}")
    return True


def reads_another_byte(source: LocalFileReader, buffer: memoryview, offset: int, scratch: memoryview) -> int:
    done = source.read_into(buffer, offset)
    buffer[7] ^= 1
    return done


def refuses(*_: object, **__: object) -> None:
    raise OSError(5, "Input/output error")


BREAKS: list[tuple[str, type, str, Callable[..., Any], str]] = [
    ("names", LocalStore, "make_directory", lambda store, name: MAKE(store, name.lower()), "exist"),
    ("rename", LocalStore, "rename", replaces, "taken the place of one that was not empty"),
    ("rename", LocalStore, "exchange", exchanges_in_steps, "found one of them gone"),
    ("fsync", LocalFileWriter, "commit", LocalFileWriter.abort, "reaches no disk"),
    ("bytes", LocalFileReader, "read_once", reads_another_byte, "Other bytes"),
    ("room", LocalDirectory, "get_free_bytes", lambda _: 1000, "1.0 kB may be written"),
    ("clock", LocalStore, "get_modified_time", lambda store, path: time.time_ns() - 10**12, "1000.0 s"),
]


@pytest.mark.parametrize(
    ("name", "kind", "method", "how", "says"), BREAKS, ids=lambda v: v if isinstance(v, str) else ""
)
def test_a_promise_that_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: type, method: str, how: Any, says: str
) -> None:
    monkeypatch.setattr(storage_checks, "MIN_FSYNC_SECONDS", 1.0)
    monkeypatch.setattr(LocalStore, "has", has)
    (tmp_path / "root").mkdir()
    monkeypatch.setattr(kind, method, how)
    sighting = seen(CHECKS[name], tmp_path / "root")
    assert sighting.verdict == "does not hold"
    assert says in sighting.sentence


@pytest.mark.parametrize("name", ["room", "names", "rename", "fsync", "bytes", "clock", "speed"])
@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS], ids=errno.errorcode.get)
def test_storage_that_refuses_has_broken_no_promise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(LocalFileWriter, "commit", refuse)
    sighting = seen(CHECKS[name], tmp_path)
    assert (sighting.verdict, os.strerror(number) in sighting.sentence) == ("could not be seen", True), sighting


def test_a_rename_that_is_refused_for_another_reason_says_nothing_of_what_it_replaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalStore, "rename", refuses)
    assert seen(CHECKS["rename"], tmp_path).verdict == "could not be seen"


def test_a_save_that_is_much_slower_than_a_plain_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_checks, "MAX_SLOWDOWN", 0.0)
    sighting = seen(CHECKS["speed"], tmp_path)
    assert (sighting.verdict, "nothing else uses this storage" in sighting.sentence) == ("could not be seen", True)


def test_names_that_cannot_be_exchanged_and_what_a_storage_does_not_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalStore, "exchange", lambda *_: False)
    sighting = seen(CHECKS["rename"], tmp_path)
    assert (sighting.verdict, "in one step: while" in sighting.sentence) == ("holds", True)
    monkeypatch.setattr(LocalDirectory, "get_free_bytes", lambda _: None)
    monkeypatch.setattr(LocalStore, "get_modified_time", lambda *_: None)
    for name in ("room", "clock"):
        assert seen(CHECKS[name], tmp_path).verdict == "could not be seen"


def test_a_server_that_ignores_conditions(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ObjectStoreClient, "_try_write", lambda *_: True)
    sighting = seen(CHECKS["conditional writes"], f"s3://{s3.new_bucket()}/run")
    assert (sighting.verdict, "ignores the conditions" in sighting.sentence) == ("does not hold", True)


def test_a_lease_excludes_and_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert seen(CHECKS["lease"], tmp_path).verdict == "holds"
    monkeypatch.setattr(storage_checks, "EXIT_TIMEOUT_SECONDS", 0.5)  # the first process goes on saving
    monkeypatch.setenv("XLA_CKPT_LEASE", "off")
    again = seen(CHECKS["lease"], tmp_path)
    assert (again.verdict, "not refused" in again.sentence) == ("does not hold", True)


def test_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_checks, "KILL_FRACTIONS", (0.5,))
    sighting = seen(CHECKS["kill"], tmp_path)
    assert (sighting.verdict, "killed in mid-save, 1 time" in sighting.sentence) == ("holds", True)


def test_kills_see_a_tag_that_is_torn_or_gone(tmp_path: Path) -> None:
    assert storage_checks.find_tag_problem(str(tmp_path), 1) == "step_1, which was committed, is gone"
    for number, value in ((1, 1), (2, 2), (3, 2)):
        xla_ckpt.save(tmp_path, f"step_{number}", {"w": np.full(9, value)})
    assert storage_checks.find_tag_problem(str(tmp_path), 3) == "step_3 is a mixture of two saves"
    (payload,) = (tmp_path / "step_1").rglob("*.safetensors")
    with open(payload, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    assert "step_1 is damaged" in (storage_checks.find_tag_problem(str(tmp_path), 3) or "")


def test_an_impatient_person(tmp_path: Path) -> None:
    assert seen(CHECKS["names"], tmp_path, 0).verdict == "was not looked at"
    for check in (CHECKS["lease"], CHECKS["kill"], DEVICES["torch"]):  # the process is killed when the time is over
        sighting = seen(check, tmp_path, 0.01)
        assert (sighting.verdict, "no time left" in sighting.sentence) == ("was not looked at", True), sighting


@pytest.mark.parametrize("name", ["torch", pytest.param("torch_xla", marks=pytest.mark.xla), "jax"])
def test_devices(tmp_path: Path, name: str) -> None:
    sighting = seen(DEVICES[name], tmp_path)
    assert (sighting.verdict, "cpu" in sighting.sentence.lower()) == ("holds", True), sighting


def test_a_full_disk_breaks_no_promise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(LocalFileWriter, "write", full)
    for name in ("bytes", "speed"):
        (tmp_path / name).mkdir()
        sighting = seen(CHECKS[name], tmp_path / name)
        assert (sighting.verdict, "There was no room" in sighting.sentence) == ("could not be seen", True), sighting


@pytest.mark.parametrize("name", ["lease", "kill"])
def test_a_process_that_ends_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("XLA_CKPT_LEASE", "perhaps")
    sighting = seen(CHECKS[name], tmp_path)
    assert (sighting.verdict, "exit code 1: " in sighting.sentence) == ("could not be seen", True)
    assert "perhaps" in sighting.sentence


def test_where_nothing_commits_the_selftest_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setitem(sys.modules, "orbax", None)
    code, _, err = call(capsys, "selftest", tmp_path)
    assert (code, "pip install 'xla-ckpt[orbax]'" in err) == (2, True)
    assert names_in(tmp_path) == []


def test_a_framework_that_ends_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "jax.py").write_text("raise SystemExit(7)")
    monkeypatch.syspath_prepend(str(tmp_path))
    sighting = seen(DEVICES["jax"], tmp_path)
    assert (sighting.verdict, "exit code 7" in sighting.sentence) == ("could not be seen", True)


def test_what_a_framework_prints_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "jax.py").write_text("import os\nprint('compiling')\nos.system('echo a compiler was here')\nexit(7)")
    monkeypatch.syspath_prepend(str(tmp_path))
    sighting = seen(DEVICES["jax"], tmp_path)
    assert (sighting.verdict, "exit code 7: a compiler" in sighting.sentence) == ("could not be seen", True), sighting


def test_a_tag_that_comes_back_damaged_on_a_device(tmp_path: Path) -> None:
    def damaged() -> CheckResult:
        raise CorruptCheckpointError("other bytes")

    assert run_catching_errors(damaged).verdict == "does not hold"


def few(monkeypatch: pytest.MonkeyPatch, *checks: Check) -> None:
    monkeypatch.setattr(storage_checks, "list_storage_checks", lambda is_object_store: [CHECKS["names"], *checks])
    monkeypatch.setattr("xla_ckpt.cli.selftest.device_checks.DEVICE_CHECKS", [])


def test_the_command(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").write_text("stays")
    few(monkeypatch, Check("last", "something is", lambda _: passed("It is.")))
    code, out, _ = call(capsys, "selftest", tmp_path)
    facts, seen_of_it = out.splitlines()[:4], out.splitlines()[4:]
    assert (code, [line.split()[0] for line in facts]) == (0, ["date", "machine", "storage", "versions"])
    assert ["last: something is. It is." in line for line in seen_of_it] == [False, True]
    few(monkeypatch, Check("last", "something is", lambda _: failed("It is not.")))
    code, out, _ = call(capsys, "selftest", tmp_path, "--json")
    report = json.loads(out)
    assert (code, [c["verdict"] for c in report["checks"]]) == (1, ["holds", "does not hold"])
    assert f"Python {platform.python_version()}" in report["versions"]
    assert names_in(tmp_path) == ["mine"]


def test_what_there_was_no_time_for_is_no_success(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    few(monkeypatch)
    code, out, _ = call(capsys, "selftest", tmp_path, "--seconds", "0.000001")
    assert (
        code,
        "was not looked at  names: " in out,
        "--seconds gives more, and its default, 120, is enough" in out,
    ) == (1, True, True)


def test_a_folder_that_cannot_be_removed(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    few(monkeypatch)
    monkeypatch.setattr(LocalStore, "remove", refuses)
    remove = command._remove_scratch_folder
    monkeypatch.setattr(command, "_remove_scratch_folder", lambda store, name: remove(store, name, timeout=0.0))
    code, out, err = call(capsys, "selftest", tmp_path, "--json")
    assert (code, [c["verdict"] for c in json.loads(out)["checks"]]) == (1, ["holds"])
    (name,) = names_in(tmp_path)
    assert f"{tmp_path}/{name}]. Remove it by hand" in err


def test_where_no_folder_can_be_made_nothing_stays(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = LocalStore.prepare

    def made_and_not_durable(store: LocalStore) -> None:
        prepare(store)
        raise OSError(errno.EIO, "the first error")

    monkeypatch.setattr(LocalStore, "prepare", made_and_not_durable)
    code, out, err = call(capsys, "selftest", tmp_path)
    assert (code, out, "making a folder for the selftest failed: the first error" in err) == (1, "", True)
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("words", [("memory://run",), (".", "--seconds", "inf"), (".", "--seconds", "soon")])
def test_wrong_usage(words: tuple[str, ...], capsys: Capture) -> None:
    try:
        code, _, err = call(capsys, "selftest", *words)
    except SystemExit as ended:
        code, err = ended.code, capsys.readouterr().err
    assert code
    assert "no number of seconds" in err or "memory of one process" in err


@pytest.mark.parametrize(
    "words", ["selftest . --seconds 0.001 --json", "selftest . --seconds 0.001", "completion bash"]
)
def test_an_answer_that_finds_no_room(tmp_path: Path, words: str) -> None:
    command = [sys.executable, "-m", "xla_ckpt", *words.split()]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment(), cwd=tmp_path, check=False
        )
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert "writing the answer to the standard output failed: No space left on device" in done.stderr
    assert names_in(tmp_path) == []


def test_a_directory_that_is_not_there(tmp_path: Path, capsys: Capture) -> None:
    code, _, err = call(capsys, "selftest", tmp_path / "typo")
    assert (code, "no such directory" in err) == (1, True)
    assert names_in(tmp_path) == []


def test_what_was_just_killed_may_be_at_work_for_an_instant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    remove, refused = LocalStore.remove, []

    def at_first_refused(store: LocalStore, name: str) -> None:
        if store.path == str(tmp_path):  # threads of tests before this one still clean up their roots
            refused.append(name)
        (refuses if store.path == str(tmp_path) and len(refused) < 3 else remove)(store, name)

    monkeypatch.setattr(LocalStore, "remove", at_first_refused)
    command._remove_scratch_folder(LocalStore(str(tmp_path)), "folder")
    assert (len(refused), names_in(tmp_path)) == (3, [])
    (tmp_path / "folder").mkdir()
    monkeypatch.setattr(LocalStore, "remove", refuses)
    with pytest.raises(StorageError, match="Input/output.*Remove it by hand"):
        command._remove_scratch_folder(LocalStore(str(tmp_path)), "folder", timeout=0.0)


@pytest.mark.crash
@pytest.mark.parametrize("after", ["rename", "room", "clock"])
def test_ctrl_c_leaves_nothing(tmp_path: Path, after: str) -> None:
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "xla_ckpt", "selftest", str(tmp_path)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
    )  # fmt: skip
    signal.signal(signal.SIGINT, handler)
    assert process.stdout is not None
    while f" {after}: " not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    told, errors = process.communicate()
    assert process.returncode == 130, told + errors  # Python says there what it has ignored
    assert names_in(tmp_path) == []


def test_pages_are_made_of_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = tmp_path / "unverified.md"
    document.write_text(f"before\n{selftests.BEGIN}old\n{selftests.END}after\n")
    monkeypatch.setattr(selftests, "PAGES", tmp_path / "selftest")
    monkeypatch.setattr(selftests, "SHOWN_IN", document)
    facts = dict.fromkeys(selftests.FACTS, "a|b")
    answer = {"check": "names", "promise": "p", "verdict": "holds", "sentence": "Seen."}
    selftests.write(selftests.SHOWN, {"path": "/runs", **facts, "checks": [answer]})
    page = (tmp_path / "selftest/directory.md").read_text()
    assert "| date | a\\|b |\n" in page
    assert "| holds | `names` | Seen. |\n" in page
    before, shown, after = document.read_text().partition(page.partition("\n\n|")[2])
    assert (bool(shown), before.startswith("before\n"), after.endswith("after\n")) == (True, True, True)
    assert "old" not in before + after


def test_the_page_that_docs_show_is_the_one_that_was_made() -> None:
    page = (selftests.PAGES / f"{selftests.SHOWN}.md").read_text()
    assert page.partition("\n\n|")[2] in selftests.SHOWN_IN.read_text()
