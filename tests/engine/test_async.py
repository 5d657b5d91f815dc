"""Saves in flight: errors surface, order holds, nothing is lost when the program ends."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from tests.nursery import Born, Call, Program, bear
from tests.runs import names_in
from xla_ckpt.saving import background
from xla_ckpt.saving import run as saving_run


def put(root: Path, tag: str, value: float = 0.0, **options: Any) -> xla_ckpt.SaveHandle:
    return xla_ckpt.save(root, tag, {"w": torch.full((1000,), value)}, **options)


def stored(root: Path, tag: str | None = None) -> float:
    return float(xla_ckpt.restore(root, tag).tree["w"][0])


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Holds back the writing of every save until it is set."""
    opened = threading.Event()
    write = saving_run.write_files

    def held(*args: Any, **kwargs: Any) -> Any:
        assert opened.wait(60)
        return write(*args, **kwargs)

    monkeypatch.setattr(saving_run, "write_files", held)
    return opened


def test_a_save_returns_before_it_writes(tmp_path: Path, gate: threading.Event) -> None:
    handle = put(tmp_path, "a", async_save=True)
    assert not handle.done()
    assert "in flight" in repr(handle)
    with pytest.raises(TimeoutError, match="still in flight"):
        handle.result(timeout=0.01)
    assert xla_ckpt.list_tags(tmp_path) == []
    gate.set()
    report = handle.result()
    assert handle.done()
    assert (report.tag, report.sequence, report.nbytes, report.files) == ("a", 1, 4000, 1)
    assert xla_ckpt.list_tags(tmp_path) == ["a"]


def test_the_next_save_waits_for_the_one_in_flight(tmp_path: Path, gate: threading.Event) -> None:
    first = put(tmp_path, "a", 1, async_save=True)
    threading.Timer(0.2, gate.set).start()
    put(tmp_path, "b", 2)
    assert first.done()
    assert xla_ckpt.list_tags(tmp_path) == ["a", "b"]


def test_a_call_does_not_wait_for_what_the_save_before_deletes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_end, ended = threading.Event(), list[bool]()
    tidy = saving_run.SaveTask.clean_up

    def held(save: saving_run.SaveTask, *, failed: bool) -> None:
        ended.append(may_end.wait(30))
        tidy(save, failed=failed)

    monkeypatch.setattr(saving_run.SaveTask, "clean_up", held)
    put(tmp_path, "a", 1.0, async_save=True).result()
    second = put(tmp_path, "a", 2.0, async_save=True)
    assert not second.done()
    assert ".new-a" not in names_in(tmp_path)  # what is deleted may be the room that it needs
    may_end.set()
    assert second.tidied().sequence == 2
    assert ended == [True, True]
    assert stored(tmp_path) == 2.0
    assert names_in(tmp_path) == ["a"]


def test_a_load_waits_for_the_save_in_flight(tmp_path: Path, gate: threading.Event) -> None:
    put(tmp_path, "a", 1, async_save=True)
    threading.Timer(0.2, gate.set).start()
    assert stored(tmp_path) == 1


def test_two_paths_save_at_once(tmp_path: Path, gate: threading.Event) -> None:
    slow = put(tmp_path / "slow", "a", 1, async_save=True)
    fast = put(tmp_path / "fast", "a", 2, async_save=True)
    assert not slow.done()
    assert not fast.done()
    gate.set()
    xla_ckpt.finalize_checkpoint()
    assert (stored(tmp_path / "slow"), stored(tmp_path / "fast")) == (1, 2)


def test_sync_and_async_and_paths_alternate(tmp_path: Path) -> None:
    for i in range(12):
        put(tmp_path / str(i % 3), f"s{i}", i, async_save=i % 2 == 0)
    xla_ckpt.finalize_checkpoint()
    for p in range(3):
        assert xla_ckpt.list_tags(tmp_path / str(p)) == [f"s{i}" for i in range(p, 12, 3)]
        assert [stored(tmp_path / str(p), f"s{i}") for i in range(p, 12, 3)] == list(range(p, 12, 3))


def test_threads_take_turns(tmp_path: Path) -> None:
    def work(name: str) -> None:
        for i in range(4):
            put(tmp_path, f"{name}{i}", i, async_save=i % 2 == 0)

    threads = [threading.Thread(target=work, args=(n,)) for n in "ab"]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    xla_ckpt.finalize_checkpoint()
    assert sorted(xla_ckpt.list_tags(tmp_path)) == sorted(f"{n}{i}" for n in "ab" for i in range(4))
    assert all(xla_ckpt.verify(tmp_path, t).ok for t in xla_ckpt.list_tags(tmp_path))


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fails every write."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saving_run, "write_files", fail)


@pytest.mark.usefixtures("broken")
def test_a_failed_save_raises_from_result_once_asked(tmp_path: Path) -> None:
    handle = put(tmp_path, "a", async_save=True)
    for _ in range(2):
        with pytest.raises(xla_ckpt.StorageError, match="No space left") as caught:
            handle.result()
    assert caught.value.errno == 28
    assert isinstance(caught.value, OSError)
    assert (caught.value.tag, caught.value.path) == ("a", str(tmp_path))
    xla_ckpt.finalize_checkpoint()  # it has been told
    assert xla_ckpt.list_tags(tmp_path) == []


@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize("how", ["save", "finalize", "load"])
def test_a_failed_save_nobody_asked_about_raises_from_the_next_call(tmp_path: Path, how: str) -> None:
    call = {
        "save": lambda: put(tmp_path, "b"),
        "finalize": xla_ckpt.finalize_checkpoint,
        "load": lambda: xla_ckpt.load_checkpoint(tmp_path).user_content,
    }[how]
    put(tmp_path, "a", async_save=True)
    with pytest.raises(xla_ckpt.StorageError, match="tag a") as caught:
        call()
    assert caught.value.tag == "a"
    xla_ckpt.finalize_checkpoint()


def test_the_save_after_a_failed_one_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "a", 1)
    with monkeypatch.context() as patch:
        patch.setattr(saving_run, "write_files", lambda *a, **k: (_ for _ in ()).throw(OSError(5, "I/O error")))
        with pytest.raises(xla_ckpt.StorageError, match="I/O error"):
            put(tmp_path, "a", 2)
    assert stored(tmp_path, "a") == 1
    put(tmp_path, "a", 3)
    xla_ckpt.finalize_checkpoint()
    assert stored(tmp_path, "a") == 3
    assert names_in(tmp_path) == ["a"]


def test_an_unusable_directory_is_an_error_of_the_call(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for root in (tmp_path / "file", tmp_path / "file/below"):
        with pytest.raises(
            xla_ckpt.StorageError, match="making the root directory failed.*pass the path of a directory"
        ):
            put(root, "a", async_save=True)
    assert (tmp_path / "file").read_text() == "in the way"


def test_staging_memory_is_given_back(tmp_path: Path) -> None:
    from xla_ckpt.snapshot.arena import HOST_MEMORY_POOL
    from xla_ckpt.snapshot.shards import HOST_COPY_ENGINE

    for i in range(3):
        put(tmp_path, str(i), i, async_save=True).result()
    xla_ckpt.finalize_checkpoint()
    staging = HOST_MEMORY_POOL.get_staging(HOST_COPY_ENGINE)
    assert len(staging.borrow(0)) == 0
    staging.give_back(staging._kept)
    assert background.SAVES._latest == {}


def saves(root: Path) -> None:
    """And returns before it is written."""
    model = {"w": torch.full((300_000,), 7.0)}
    xla_ckpt.save_checkpoint(root, "a", model=model, async_save=True)
    model["w"].zero_()


def ended(program: str, root: Path) -> Born:
    """A program that ends with a save in flight, as python ends it."""
    code = f"import sys, torch, xla_ckpt; from pathlib import Path; from tests.engine import test_async; {program}"
    process = bear(Program(code, (str(root),)), end="as python")
    process.communicate(120)
    return process


@pytest.mark.parametrize(
    ("ending", "code"),
    [("", 0), ("sys.exit(3)", 3), ("raise RuntimeError('training failed')", 1), ("del torch, xla_ckpt, test_async", 0)],
)
def test_the_save_in_flight_survives_the_end_of_the_program(tmp_path: Path, ending: str, code: int) -> None:
    process = ended(f"test_async.saves(Path(sys.argv[1])); {ending}", tmp_path)
    assert process.returncode == code, process.communicate()
    assert stored_model(tmp_path) == 7
    assert xla_ckpt.verify(tmp_path).ok


def stored_model(root: Path) -> float:
    return float(xla_ckpt.restore(root).tree["model"]["w"].mean())


def forks_while_a_save_is_in_flight(root: Path) -> int:
    """The exit code of the child, which has nothing to wait for."""
    xla_ckpt.save(root, "first", {"w": torch.ones(1)})  # loads orbax
    opened, write = threading.Event(), saving_run.write_files

    def waiting(*args: Any, **kwargs: Any) -> Any:
        opened.wait()
        return write(*args, **kwargs)

    saving_run.write_files = waiting
    xla_ckpt.save(root, "a", {"w": torch.ones(1)}, async_save=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # jax warns of the fork
        child = os.fork()
    if not child:
        sys.exit(3)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    opened.set()
    return code


def test_a_forked_child_does_not_wait_for_the_saves_of_its_parent(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from tests.engine import test_async; "
    code += "print(test_async.forks_while_a_save_is_in_flight(Path(sys.argv[1])))"
    process = bear(Program(code, (str(tmp_path),)), end="as python")
    out, err = process.communicate(120)
    assert out.split()[-1] == "3", err
    assert xla_ckpt.list_tags(tmp_path) == ["first", "a"]


def cannot_write(*args: Any, **kwargs: Any) -> None:
    raise OSError(28, "full")


def saves_what_cannot_be_written(root: Path) -> None:
    saving_run.write_files = cannot_write  # type: ignore[assignment]
    saves(root)


def test_a_failed_save_at_exit_is_logged(tmp_path: Path) -> None:
    process = ended("test_async.saves_what_cannot_be_written(Path(sys.argv[1]))", tmp_path)
    assert process.returncode == 0
    said = process.communicate()[1]
    assert "a save in flight at exit failed" in said
    assert "saving failed: full" in said


def saves_and_makes_no_other_call(root: Path) -> None:
    xla_ckpt.save(root, "first", {"w": torch.ones(1)})  # loads orbax
    xla_ckpt.save(root, "a", {"w": torch.ones(1_000_000)}, async_save=True)
    print("saved", flush=True)
    threading.Event().wait()


def test_it_commits_without_any_further_call(tmp_path: Path) -> None:
    """Killed two seconds after an asynchronous save: the tag is there."""
    process = bear(Call.of(saves_and_makes_no_other_call, tmp_path), live=True)
    assert process.stdout.readline() == "saved\n"
    end = time.monotonic() + 2.0
    while xla_ckpt.list_tags(tmp_path) != ["first", "a"] and time.monotonic() < end:
        time.sleep(0.01)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert xla_ckpt.list_tags(tmp_path) == ["first", "a"]
    assert stored(tmp_path) == 1


def test_waiting_for_results_has_a_limit(tmp_path: Path, gate: threading.Event) -> None:
    handle = put(tmp_path, "a", async_save=True)
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        handle.result(timeout=0.05)
    assert time.monotonic() - began < 5
    gate.set()
    handle.result()
