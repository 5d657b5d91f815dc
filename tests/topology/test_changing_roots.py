"""Loads of a tag that another process retires, replaces or deletes at a certain instant of the load.

The ranks stop at the instant until the other process has done its part: a pipe tells it when, and another one tells
them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import xla_ckpt
from tests.jobs import run_on_ranks
from tests.nursery import Call, bear
from tests.runs import environment
from xla_ckpt.formats.tags import make_not_found_error
from xla_ckpt.loading import load
from xla_ckpt.storage import local
from xla_ckpt.storage.local import LocalStore
from xla_ckpt.tags.directory_operations import clean_root

LISTED = "the newest tag is known"
HALF = "rank 0 has opened it"
OPENED = "all have opened it"

Outcome = tuple[str, list[float]]
"""The tag that was loaded and the numbers in it, or the class of the error and the numbers that the target has."""

OLD: Outcome = ("old", [1.0])
NEW: Outcome = ("new", [2.0])
REPLACED: Outcome = ("new", [3.0])
NEWER: Outcome = ("newer", [3.0])
ABSENT: Outcome = ("NoCheckpointError", [0.0])
CHANGED: Outcome = ("ChangedTagError", [0.0])


def retires(root: Path) -> None:
    """Save a newer tag, and give up all older ones."""
    put(root, "newer", 3, num_kept_ckpts=1)
    clean_root(LocalStore(str(root)))


def replaces(root: Path) -> None:
    """Save the tag anew."""
    put(root, "new", 3)
    clean_root(LocalStore(str(root)))


def deletes(root: Path) -> None:
    """Delete the tag, although it is being read."""
    xla_ckpt.Checkpoints(root).delete("new", force=True)
    clean_root(LocalStore(str(root)))


@dataclass(frozen=True)
class Case:
    """What happens to the newest tag, and what the load comes to."""

    instant: str
    change: Callable[[Path], None]
    loaded: Outcome
    """If no tag is named."""

    named: Outcome
    """If the tag is named."""

    def __str__(self) -> str:
        return f"another process {self.change.__name__} the tag when {self.instant}"


EACH = [
    Case(LISTED, retires, NEWER, ABSENT),
    Case(LISTED, replaces, REPLACED, REPLACED),
    Case(LISTED, deletes, OLD, ABSENT),
    *(Case(OPENED, change, NEW, NEW) for change in (retires, replaces, deletes)),
]
OF_RANKS = [
    *EACH,
    Case(HALF, retires, NEW, NEW),
    Case(HALF, replaces, REPLACED, CHANGED),
    Case(HALF, deletes, OLD, ABSENT),
]
WITHOUT_LOCKS = [
    Case(OPENED, retires, NEWER, CHANGED),
    Case(OPENED, replaces, REPLACED, CHANGED),
    Case(OPENED, deletes, OLD, CHANGED),
]
"""Nobody sees there that the tag is being read: after an hour its files go."""


def put(root: Path, tag: str, number: float, **options: Any) -> None:
    xla_ckpt.save_checkpoint(
        root, tag, {"w": torch.full((8,), float(number))}, options=xla_ckpt.SaveOptions(stale="ignore"), **options
    )
    xla_ckpt.finalize_checkpoint()


def reads(rank: int, folder: Path, cases: Sequence[Case], locks: bool) -> list[Outcome]:
    """What a rank does: each case without a tag, and with its name."""
    with _storage(locks):
        return [
            _load(folder / f"{number}-{tag}", case, tag) for number, case in enumerate(cases) for tag in (None, "new")
        ]


def _load(root: Path, case: Case, tag: str | None) -> Outcome:
    from xla_ckpt.loading import load

    todo = [case.instant]

    def stop(instant: str) -> None:
        if instant in todo:
            todo.clear()
            if dist.get_rank() == 0:
                (root / "go").write_text("now")
                (root / "done").read_text()
            dist.barrier()

    def opens(*args: Any) -> Any:
        stop(LISTED)
        if dist.get_rank() != 0:
            stop(HALF)
        reader = open_tag(*args)
        stop(HALF)
        return reader

    def fills(*args: Any, **options: Any) -> Any:
        stop(OPENED)
        return fill(*args, **options)

    open_tag, fill = load.open_tag, load.restore_targets
    target = {"w": torch.zeros(8)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "open_tag", opens)
        patch.setattr(load, "restore_targets", fills)
        try:
            told = xla_ckpt.load_checkpoint(
                root / "tags", tag, model=target, options=xla_ckpt.LoadOptions(timeout=20)
            ).report.tag
        except xla_ckpt.CheckpointError as error:
            told = type(error).__name__
    assert todo == [], told
    return told, target["w"].unique().tolist()


def changes(folder: Path, cases: Sequence[Case], locks: bool) -> None:
    """What the other process does."""
    with _storage(locks):
        for number, case in enumerate(cases):
            for tag in (None, "new"):
                root = folder / f"{number}-{tag}"
                (root / "go").read_text()
                case.change(root / "tags")
                (root / "done").write_text("done")


@contextlib.contextmanager
def _storage(locks: bool) -> Iterator[None]:
    """A file system with locks, or without them."""

    def refuse(fd: int, how: int) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    with pytest.MonkeyPatch.context() as patch:
        if not locks:
            patch.setattr(fcntl, "flock", refuse)
        yield


def prepared(folder: Path, cases: Sequence[Case]) -> None:
    """A root for each load, whose tags nobody has touched for long."""
    first = folder / "first"
    put(first, "old", 1)
    put(first, "new", 2)
    then = time.time() - local.UNLOCKED_IDLE_SECONDS - 60
    for number in range(len(cases)):
        for tag in (None, "new"):
            root = folder / f"{number}-{tag}"
            root.mkdir()
            shutil.copytree(first, root / "tags")
            for place in (root / "tags").rglob("*"):
                os.utime(place, (then, then))
            for name in ("go", "done"):
                os.mkfifo(root / name)


def outcomes(folder: Path, world: int, cases: Sequence[Case], *, locks: bool = True) -> dict[str, list[Outcome]]:
    prepared(folder, cases)
    other = bear(Call.of(changes, folder, cases, locks), env=environment(None))
    told = run_on_ranks(reads, world, folder, cases, locks, timeout=120)
    other.communicate(60)
    other.value()
    return {
        f"{case} ({tag})": [of_rank[2 * n + i] for of_rank in told]
        for n, case in enumerate(cases)
        for i, tag in enumerate(("no name", "named"))
    }


@pytest.mark.parametrize(
    ("world", "cases", "locks"),
    [(1, EACH, True), (4, OF_RANKS, True), (4, WITHOUT_LOCKS, False)],
    ids=["one rank", "four ranks", "four ranks, no locks"],
)
def test_all_ranks_have_the_same_whole_tag_or_the_same_error(
    world: int, cases: list[Case], locks: bool, tmp_path: Path
) -> None:
    found = outcomes(tmp_path, world, cases, locks=locks)
    wanted = {
        f"{case} ({what})": [outcome] * world
        for case in cases
        for what, outcome in (("no name", case.loaded), ("named", case.named))
    }
    assert found == wanted


def misses_a_tag(rank: int, root: Path) -> tuple[str, list[str]]:
    """Rank 1 does not see the tag yet, as over a network; what the load raised, and the tags after the next save."""
    put(root, "old", 1)
    patch = pytest.MonkeyPatch()
    if rank == 1:
        patch.setattr(load, "open_tag", lambda store, tag, *_: (_ for _ in ()).throw(make_not_found_error(store, tag)))
    try:
        xla_ckpt.restore(root, "old", options=xla_ckpt.LoadOptions(timeout=60))
    except xla_ckpt.CheckpointError as error:
        raised = type(error).__name__
    else:
        raised = "nothing"
    patch.undo()
    put(root, "new", 2, num_kept_ckpts=1)
    dist.barrier()
    return raised, xla_ckpt.list_tags(root)


def test_a_tag_that_another_rank_did_not_find_is_not_held(tmp_path: Path) -> None:
    """Retention leaves a tag alone that is read: it would be left as long as the job runs."""
    assert run_on_ranks(misses_a_tag, 2, tmp_path) == [("NoCheckpointError", ["new"])] * 2
