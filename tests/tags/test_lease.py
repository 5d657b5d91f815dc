"""Two jobs on one root directory: the second is told before it changes anything; what a killed one left is taken over.

The jobs are processes of their own, neither of which has started the other.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import select
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import xla_ckpt
from tests.helper import children_of
from tests.jobs import run_alone, run_on_ranks, run_program
from tests.nursery import Born, Call, bear
from tests.runs import environment, names_in
from xla_ckpt.storage import system_info
from xla_ckpt.storage.local import LocalStore
from xla_ckpt.tags import lease
from xla_ckpt.tags.lease_rules import LeaseObservation, LeaseOwner, decide_lease, parse_owner

OWNER = LeaseOwner(
    token="t", host="h", node="n", pid=1, started=2, user="u", program="p", since="2026-01-01", locked=True, saved="s"
)


# --- the decision --------------------------------------------------------------------------------------------------

SIGHTS = st.builds(
    LeaseObservation,
    owner=st.none() | st.builds(replace, st.just(OWNER), locked=st.booleans()),
    is_locked=st.none() | st.booleans(),
    is_own=st.booleans(),
    is_local=st.booleans(),
    has_changed=st.booleans(),
    observed_seconds=st.floats(0, 200),
)


@given(st.none() | SIGHTS, st.booleans())
def test_who_sees_that_another_owner_runs_never_saves(sight: LeaseObservation | None, lost: bool) -> None:
    verdict = decide_lease(sight, expiry_seconds=60, was_lost=lost)
    if sight is None or sight.is_own:
        assert verdict == ("share" if sight else "refuse" if lost else "take")
    elif lost or (sight.has_changed and not (sight.is_local and sight.is_locked is False)):
        assert verdict == "refuse"
    elif sight.is_local and sight.is_locked and sight.owner and sight.owner.locked:
        assert verdict in ("wait", "refuse")


@given(SIGHTS)
def test_a_wait_ends(sight: LeaseObservation) -> None:
    assert decide_lease(replace(sight, observed_seconds=60.0), expiry_seconds=60) != "wait"


@given(st.none() | SIGHTS, st.booleans())
def test_who_is_told_to_take_it_has_it(sight: LeaseObservation | None, lost: bool) -> None:
    assert decide_lease(sight, expiry_seconds=60, was_lost=lost, forced=True) in ("take", "take over", "share")


def vars_of(owner: LeaseOwner) -> dict[str, Any]:
    return dict(json.loads(owner.to_json()))


LEASES = st.builds(
    lambda key, value: json.dumps({**vars_of(OWNER), key: value}).encode(),
    st.sampled_from(list(LeaseOwner.__dataclass_fields__)),
    st.none() | st.integers() | st.text(max_size=5) | st.lists(st.integers()),
)


@given(st.binary(max_size=60) | LEASES)
def test_a_damaged_lease_names_nobody_or_is_whole(data: bytes) -> None:
    found = parse_owner(data)
    assert found is None or parse_owner(found.to_json()) == found
    assert str(found).isprintable()


# --- processes ------------------------------------------------------------------------------------------------------


def model_of(number: int) -> torch.nn.Module:
    made = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(made.weight, number)
    torch.nn.init.constant_(made.bias, number)
    return made


def save(root: Path, tag: str, timeout: float = 1800.0, **options: Any) -> None:
    how = xla_ckpt.SaveOptions(stale="ignore", timeout=timeout)
    xla_ckpt.save_checkpoint(root, tag, model_of(7), options=how, **options)
    xla_ckpt.finalize_checkpoint()


def refused(root: Path, tag: str, also: frozenset[str] = frozenset()) -> str:
    """What a save says that is refused; nothing else is in the root directory afterwards, but for what `also` says."""
    before = names_in(root)
    with pytest.raises(xla_ckpt.RootInUseError) as caught:
        save(root, tag)
    after = names_in(root)
    assert after == sorted({*before, *also}), after  # in a process of its own, where pytest shows no values
    return str(caught.value)


def set_up(beat: float = 0.05, silence: float = 60, elsewhere: bool = False, locks: bool = True) -> None:
    """Change, in a process that ends soon, how the lease works there, or on which machine it runs."""
    lease.HEARTBEAT_SECONDS = beat
    lease.DIRECTORY_EXPIRY_SECONDS = lease.RECORD_EXPIRY_SECONDS = silence
    if elsewhere:
        system_info._get_host = lambda: f"machine {os.getpid()}"
    if not locks:

        def refuse(fd: int, how: int) -> None:
            raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

        fcntl.flock = refuse


def saves_and_stays(root: Path, folder: Path, how: dict[str, Any]) -> str:
    """A job that saves, tells so, and saves again when it is told to; what that second save says, or nothing."""
    set_up(**how)
    save(root, "first")
    (folder / "saved").open("w").close()
    (folder / "go on").open().close()
    try:
        save(root, "second")
    except xla_ckpt.CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Job:
    """Such a job, which has saved once."""

    def __init__(self, root: Path, folder: Path, **how: Any) -> None:
        self.folder = folder
        folder.mkdir()
        for name in ("saved", "go on"):
            os.mkfifo(folder / name)
        self.process: Born = bear(Call.of(saves_and_stays, root, folder, how), env=environment())
        (folder / "saved").open().close()

    def go_on(self) -> str:
        (self.folder / "go on").open("w").close()
        self.process.communicate(60)
        return str(self.process.value())

    def end(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.communicate(60)


def saves_after(root: Path, how: dict[str, Any], options: dict[str, Any]) -> tuple[str, list[str]]:
    """Another job, which saves once: what that says, and what is logged."""
    set_up(**how)
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(f"{record.levelname} {record.getMessage()}")  # type: ignore[method-assign]
    logging.getLogger("xla_ckpt.tags.lease").addHandler(handler)
    logging.getLogger("xla_ckpt.tags.lease").setLevel(logging.INFO)
    before = names_in(root)
    try:
        save(root, "other", **options)
    except xla_ckpt.CheckpointError as error:
        assert names_in(root) == before, "something was changed"
        return f"{type(error).__name__}: {error}", told
    return "", told


def another(root: Path, env: dict[str, str] | None = None, **how: Any) -> tuple[str, list[str]]:
    options = how.pop("options", {})
    return run_alone(saves_after, root, how, options, env=env)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "ckpt"


@pytest.mark.parametrize(
    "how", [{}, {"locks": False}, {"elsewhere": True}], ids=["on this machine", "without locks", "on another machine"]
)
def test_a_second_job_is_told_and_the_first_goes_on(how: dict[str, Any], root: Path, tmp_path: Path) -> None:
    first = Job(root, tmp_path / "job", **how)
    said, told = another(root, **how)
    assert said.startswith("RootInUseError: another process saves to this root [tag other, rank 0")
    assert f"process {first.process.pid} of " in said
    assert re.search(r"; it was watched for \d+\.\d s, and has said in that time that it runs\. Save to", said)
    assert [line.split(":")[0] for line in told] == [f"WARNING {root}"], "it waited, and said so"
    assert "still runs, for at most 60 s: process " in told[0]
    assert "With XLA_CKPT_LEASE=take in the environment a job does not wait" in told[0]
    assert first.go_on() == ""
    assert xla_ckpt.list_tags(root) == ["first", "second"]


def test_what_a_killed_job_left_is_taken_over_at_once(root: Path, tmp_path: Path) -> None:
    first = Job(root, tmp_path / "job")
    first.end()
    assert ".lease" in os.listdir(root)
    said, told = another(root)
    assert said == ""
    assert len(told) == 1, "it did not wait"
    assert told[0].startswith("INFO")
    assert "which has ended" in told[0]
    assert xla_ckpt.list_tags(root) == ["first", "other"]


@pytest.mark.parametrize("how", [{"locks": False}, {"elsewhere": True}], ids=["without locks", "on another machine"])
def test_a_job_that_cannot_be_seen_is_taken_over_when_it_is_silent(
    how: dict[str, Any], root: Path, tmp_path: Path
) -> None:
    first = Job(root, tmp_path / "job", **how)
    first.end()
    said, told = another(root, silence=0.5, **how)
    assert said == ""
    assert [line.split()[0] for line in told] == ["WARNING", "WARNING"]
    assert "waiting to see" in told[0]
    assert f"process {first.process.pid} of " in told[1]
    assert "not heard of for" in told[1]


def test_a_job_that_is_stopped_here_keeps_its_lease(root: Path, tmp_path: Path) -> None:
    first = Job(root, tmp_path / "job")
    first.end(signal.SIGSTOP)
    said, _ = another(root, silence=0.5)
    assert said.startswith("RootInUseError")
    first.end(signal.SIGCONT)
    assert first.go_on() == ""


def test_a_job_that_was_stopped_elsewhere_saves_no_more_when_it_was_replaced(root: Path, tmp_path: Path) -> None:
    first = Job(root, tmp_path / "job", elsewhere=True)
    first.end(signal.SIGSTOP)
    assert another(root, silence=0.5, elsewhere=True)[0] == ""
    first.end(signal.SIGCONT)
    assert first.go_on().startswith("RootInUseError: another process has taken over the lease of this root")
    assert xla_ckpt.list_tags(root) == ["first", "other"]


def is_replaced_before_its_commit(root: Path) -> tuple[str, str]:
    """A save that is replaced after it has begun; what it says, and what the next one says when the other is gone."""
    set_up(elsewhere=True)  # else the other job would see that it is a child of this one
    save(root, "first")
    check = lease.LEASES.check

    def late(path: str, sequence: int) -> None:
        said, _ = run_alone(saves_after, root, {}, {}, env={"XLA_CKPT_LEASE": "take"})
        assert said == ""
        check(path, sequence)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lease.LEASES, "check", late)
        said = refused(root, "second", also=frozenset({"other"}))
    return said, refused(root, "third")


def test_a_save_that_is_under_way_does_not_commit_when_it_was_replaced(root: Path) -> None:
    said, next_said = run_alone(is_replaced_before_its_commit, root)
    assert said.startswith("another process has taken over the lease")
    assert next_said.startswith("another process has taken over the lease"), "also when nobody has it any more"
    assert xla_ckpt.list_tags(root) == ["first", "other"]
    assert sorted(os.listdir(root)) == ["first", "other"], "litter"


def test_the_user_may_take_it_and_may_share_the_directory(root: Path, tmp_path: Path) -> None:
    first = Job(root, tmp_path / "job")
    assert another(root, env={"XLA_CKPT_LEASE": "off"})[0] == ""
    assert another(root, env={"XLA_CKPT_LEASE": "take"})[0] == ""
    assert first.go_on().startswith("RootInUseError: another process has taken over")
    said, _ = another(root, env={"XLA_CKPT_LEASE": "yes"})
    assert said.startswith("UsageError: no such value of XLA_CKPT_LEASE")


def save_many(root: Path) -> list[str]:
    for number in range(3):
        save(root, f"tag {number}")
    return names_in(root)


def test_processes_that_start_each_other_are_one_job(root: Path) -> None:
    save(root, "parent")
    assert run_alone(save_many, root) == ["parent", "tag 0", "tag 1", "tag 2"]
    save(root, "parent again")


def forks_and_is_killed(root: Path, folder: Path) -> None:
    save(root, "first")
    if os.fork() == 0:
        save(root, "of the child")
        (folder / "saved").open("w").close()
        signal.pause()
    signal.pause()


def test_a_forked_child_shares_the_lease_and_does_not_keep_it(root: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "saved")
    parent = bear(Call.of(forks_and_is_killed, root, tmp_path), env=environment())
    (tmp_path / "saved").open().close()
    child = children_of(parent.pid)[0]
    try:
        os.kill(parent.pid, signal.SIGKILL)
        parent.communicate(60)
        assert another(root)[0] == "", "its child still has the lock open"
    finally:
        os.kill(child, signal.SIGKILL)
    assert xla_ckpt.list_tags(root) == ["first", "of the child", "other"]


def is_refused(rank: int, root: Path) -> tuple[str, str]:
    try:
        xla_ckpt.save_checkpoint(root, "ranks", model_of(rank), options=xla_ckpt.SaveOptions(timeout=30))
    except xla_ckpt.CheckpointError as error:
        return type(error).__name__, str(error)
    return "", ""


def test_all_ranks_are_told_the_same(root: Path, tmp_path: Path) -> None:
    first = Job(root, tmp_path / "job")
    said = run_on_ranks(is_refused, 3, root)
    assert said == [said[0]] * 3
    assert said[0][0] == "RootInUseError"
    assert first.go_on() == ""


def test_a_wait_is_no_longer_than_the_timeout_of_the_save(root: Path, tmp_path: Path) -> None:
    Job(root, tmp_path / "job", elsewhere=True).end()
    said, _ = another(root, elsewhere=True, options={"timeout": 1})
    assert said.startswith("RootInUseError")


def saves_at_once(root: Path, folder: Path) -> bool:
    set_up()
    (folder / "go").open().close()
    try:
        save(root, f"tag {os.getpid()}")
    except xla_ckpt.RootInUseError:
        return False
    (folder / "told").open().read()  # the lease is kept until all others have been told
    return True


def test_of_several_jobs_at_once_one_saves(root: Path, tmp_path: Path) -> None:
    for name in ("go", "told"):
        os.mkfifo(tmp_path / name)
    Job(root, tmp_path / "job").end()  # a dead lease lies there, and all of them want it
    jobs = [bear(Call.of(saves_at_once, root, tmp_path), env=environment()) for _ in range(4)]
    with (tmp_path / "go").open("w"), (tmp_path / "told").open("w"):
        while len([job for job in jobs if job.has_ended()]) < 3:
            assert select.select([job for job in jobs if not job.has_ended()], [], [], 60)[0], "more than one saves"
    for job in jobs:
        job.communicate(60)
    assert sorted(job.value() for job in jobs) == [False] * 3 + [True]
    assert len(xla_ckpt.list_tags(root)) == 2


def test_a_lease_that_was_taken_over_meanwhile_is_not_removed(root: Path) -> None:
    store = LocalStore(str(root))
    store.prepare()
    directory = store.make_directory(".lease")
    directory.write_atomic("owner.json", replace(OWNER, token="a third").to_json())
    place = lease.DirectoryLease(store)
    place.remove("the one that was looked at")
    assert store.list_names() == [".lease"]
    place.remove("a third")
    assert store.list_names() == []


@pytest.mark.parametrize("kind", ["rubbish", "large", "a pipe", "empty", "control characters"])
def test_a_damaged_lease_is_watched_and_taken_over(kind: str, root: Path) -> None:
    root.mkdir()
    where = root / ".lease"
    where.mkdir()
    if kind == "a pipe":
        os.mkfifo(where / "owner.json")
    elif kind in ("rubbish", "large", "control characters"):
        bad = replace(OWNER, program="\x1b[2J" * 1000, node="\r\n", locked=False).to_json()
        (where / "owner.json").write_bytes({"rubbish": b"\xff{", "large": b"[" * 10**6}.get(kind, bad))
    said, told = another(root, silence=0.5)
    assert said == ""
    assert len(told) == 2
    assert all(line.isprintable() for line in told)
    assert names_in(root) == ["other"]


def test_a_root_directory_that_was_removed_is_no_hindrance(root: Path) -> None:
    save(root, "a")
    shutil.rmtree(root)
    save(root, "b")
    assert sorted(os.listdir(root)) == [".lease", "b"]


def test_the_end_of_a_program_gives_the_lease_back(root: Path) -> None:
    run_program(
        """
        import sys, torch, xla_ckpt
        xla_ckpt.save_checkpoint(sys.argv[1], "a", torch.nn.Linear(2, 2), async_save=True)
        """,
        root,
        end="as python",
    )
    assert os.listdir(root) == ["a"]


def test_readers_and_calls_on_single_tags_need_no_lease(root: Path, tmp_path: Path) -> None:
    first = Job(root, tmp_path / "job")
    xla_ckpt.load_checkpoint(root, model=model_of(0))
    assert xla_ckpt.verify(root, "first").ok
    xla_ckpt.Checkpoints(root).pin("first")
    xla_ckpt.convert(root, tmp_path / "out.pt", tag="first", to="torch")
    assert first.go_on() == ""


def saves_to_many(root: Path) -> tuple[int, list[bool]]:
    """How many more descriptors are open after saves to many directories, and which of these have a lease."""
    save(root / "0", "a")
    before = len(os.listdir("/proc/self/fd"))
    for number in range(1, 40):
        xla_ckpt.save(root / str(number), "a", {"x": number})
        save(root / "0", "a")
    xla_ckpt.finalize_checkpoint()
    return len(os.listdir("/proc/self/fd")) - before, [(root / str(n) / ".lease").exists() for n in range(40)]


def test_a_program_that_saves_to_many_directories_keeps_the_last_leases(root: Path) -> None:
    more, leases = run_alone(saves_to_many, root)
    assert more < 20
    assert leases == [True] + [False] * 24 + [True] * 15
