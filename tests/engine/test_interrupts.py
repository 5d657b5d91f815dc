"""Ctrl-C, or an exception of a signal handler, in a save; and the program goes on.

`make interrupts` does it at many instants of every call (tests/crash/interrupts.py).
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from tests.jobs import run_on_ranks
from tests.runs import names_in
from xla_ckpt.progress import IoContext
from xla_ckpt.saving import run as saving_run
from xla_ckpt.tags.root import Transaction

MEGABYTES = 40


class Preempted(Exception):
    """What a program's own signal handler raises."""


@contextmanager
def raising(kind: type[BaseException]) -> Iterator[None]:
    """A block in which SIGINT raises this in the main thread."""

    def handler(*_: Any) -> None:
        raise kind

    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def interrupted_at(segment: int, patch: pytest.MonkeyPatch) -> None:
    """Have the thread that writes get SIGINT when so many segments are written, and write no more until it is given up.

    The main thread, which waits for the save, is not woken up by it: the system may hand any signal to any thread.
    """
    write, counted = saving_run.write_files, iter(range(10_000))

    def writing(directory: Any, plan: Any, memory: Any, crew: IoContext, **options: Any) -> Any:
        def dealt(nbytes: int) -> None:
            if next(counted) == segment:
                signal.pthread_kill(threading.get_ident(), signal.SIGINT)
                given_up = time.monotonic() + 60
                while time.monotonic() < given_up:
                    crew.progress(0)  # which raises
            crew.progress(nbytes)

        return write(directory, plan, memory, replace(crew, progress=dealt), **options)

    patch.setattr(saving_run, "write_files", writing)


def interrupted_in_the_commit(patch: pytest.MonkeyPatch) -> None:
    """Have the process get SIGINT when rank 0 is about to commit."""
    commit = Transaction.commit

    def committing(*args: Any, **options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return commit(*args, **options)

    patch.setattr(Transaction, "commit", committing)


def model_of(value: float) -> dict[str, torch.Tensor]:
    return {f"w{i}": torch.full((MEGABYTES * 2**20 // 16,), value + i) for i in range(4)}


def check(root: Path, tag: str, value: float) -> None:
    """The tag holds just what the model held at the call."""
    model = model_of(-1.0)
    xla_ckpt.load_checkpoint(root, tag, model)
    assert all(torch.equal(model[name], array) for name, array in model_of(value).items())
    assert xla_ckpt.verify(root, tag).ok


@pytest.mark.parametrize(("kind", "segment"), [(KeyboardInterrupt, 0), (KeyboardInterrupt, 3), (Preempted, 1)])
def test_an_interrupted_save_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException], segment: int
) -> None:
    xla_ckpt.save_checkpoint(tmp_path, "good", model_of(1.0))
    model = model_of(2.0)
    with raising(kind), monkeypatch.context() as patch:
        interrupted_at(segment, patch)
        with pytest.raises(kind):
            xla_ckpt.save_checkpoint(tmp_path, "next", model, num_kept_ckpts=1)
    for array in model.values():
        array.fill_(-5.0)  # the program goes on, as in a notebook
    xla_ckpt.finalize_checkpoint()
    assert names_in(tmp_path) == ["good"]
    check(tmp_path, "good", 1.0)
    xla_ckpt.save_checkpoint(tmp_path, "next", model_of(3.0), num_kept_ckpts=1).tidied()
    assert names_in(tmp_path) == ["next"]
    check(tmp_path, "next", 3.0)


def test_an_interruption_that_comes_too_late_waits_for_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(2.0)
    with raising(KeyboardInterrupt), monkeypatch.context() as patch:
        interrupted_in_the_commit(patch)
        with pytest.raises(KeyboardInterrupt):
            xla_ckpt.save_checkpoint(tmp_path, "a", model)
    assert xla_ckpt.list_tags(tmp_path) == ["a"]
    for array in model.values():
        array.fill_(-5.0)
    xla_ckpt.finalize_checkpoint()
    check(tmp_path, "a", 2.0)


@pytest.mark.parametrize("async_save", [False, True])
def test_an_interruption_while_the_save_is_begun_leaves_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, async_save: bool
) -> None:
    start, started = threading.Thread.start, []

    def starting(thread: threading.Thread) -> None:
        start(thread)
        if thread.name.startswith("xla_ckpt-save"):
            started.append(thread)
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)  # a person presses Ctrl-C twice

    monkeypatch.setattr(threading.Thread, "start", starting)
    with raising(KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        xla_ckpt.save_checkpoint(tmp_path, "a", model_of(1.0), async_save=async_save)
    monkeypatch.undo()
    assert len(started) == 1
    xla_ckpt.finalize_checkpoint()
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("xla_ckpt-save")] == []
    assert names_in(tmp_path) == []
    xla_ckpt.save_checkpoint(tmp_path, "b", model_of(2.0))
    check(tmp_path, "b", 2.0)


def is_interrupted_on_one_rank(rank: int, root: Path, which: int, when: str) -> list[str]:
    xla_ckpt.save_checkpoint(root, "good", model_of(1.0))
    patch = pytest.MonkeyPatch()
    if rank == which and when == "commit":
        interrupted_in_the_commit(patch)
    elif rank == which:
        interrupted_at(0, patch)
    outcome = "returned"
    model = model_of(2.0)
    try:
        with raising(KeyboardInterrupt):  # a job that a shell has started in the background ignores SIGINT
            xla_ckpt.save_checkpoint(root, "next", model, num_kept_ckpts=1, options=xla_ckpt.SaveOptions(timeout=60))
    except KeyboardInterrupt:
        outcome = "KeyboardInterrupt"
    except xla_ckpt.SaveError as error:
        outcome = f"rank {error.rank}: {error}"
    patch.undo()
    for array in model.values():
        array.fill_(-5.0)
    xla_ckpt.save_checkpoint(root, "last", model_of(3.0))
    return [outcome, *xla_ckpt.list_tags(root)]


@pytest.mark.parametrize("which", [0, 1])
def test_the_others_hear_of_a_rank_that_was_interrupted(tmp_path: Path, which: int) -> None:
    told = run_on_ranks(is_interrupted_on_one_rank, 2, tmp_path, which, "write")
    assert told[which] == ["KeyboardInterrupt", "good", "last"]
    outcome, *there = told[1 - which]
    assert outcome.startswith(f"rank {which}: ")
    assert "the save was given up: its caller was interrupted by KeyboardInterrupt" in outcome
    assert there == ["good", "last"]
    check(tmp_path, "good", 1.0)
    check(tmp_path, "last", 3.0)


def test_of_an_interruption_that_comes_too_late_the_others_hear_nothing(tmp_path: Path) -> None:
    told = run_on_ranks(is_interrupted_on_one_rank, 2, tmp_path, 0, "commit")
    assert told == [["KeyboardInterrupt", "next", "last"], ["returned", "next", "last"]]
    check(tmp_path, "next", 2.0)
