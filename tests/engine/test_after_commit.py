"""What fails after a commit is logged, and makes no error of the save; what can fail before it leaves all as it was."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from tests.jobs import run_on_ranks
from tests.runs import names_in
from xla_ckpt import LatestN, Retention, SaveOptions
from xla_ckpt.tags.retention import TagInfo
from xla_ckpt.tags.root import Transaction

TREE = {"w": torch.ones(3)}


class Mine(Retention):
    """A policy of the program's."""

    __slots__ = ("act",)

    def __init__(self, act: Callable[[Sequence[TagInfo]], Any]) -> None:
        self.act = act

    def keeps(self, facts: Sequence[TagInfo]) -> Collection[TagInfo]:
        kept: Collection[TagInfo] = self.act(facts)
        return kept

    def __repr__(self) -> str:
        return "Mine()"


def raises(error: BaseException) -> Any:
    raise error


FAILURES: dict[str, Callable[[Sequence[TagInfo]], Any]] = {
    "KeyError": lambda facts: raises(KeyError("mine")),
    "FileNotFoundError": lambda facts: raises(OSError(2, "no table of the best")),
    "TypeError": lambda facts: None,
    "AttributeError": lambda facts: ["a"],
}
"""What a policy that fails does, by the error that it leads to."""


def fails(root: object, act: Callable[[Sequence[TagInfo]], Any], **keywords: Any) -> xla_ckpt.UsageError:
    """The error of a save whose policy fails; all tags are as they were."""
    tags = xla_ckpt.list_tags(root)  # type: ignore[arg-type]
    with pytest.raises(xla_ckpt.UsageError, match="the retention policy Mine failed") as caught:
        xla_ckpt.save(root, "b", TREE, options=SaveOptions(retention=Mine(act), stale="ignore"), **keywords).result()  # type: ignore[arg-type]
    assert xla_ckpt.list_tags(root) == tags  # type: ignore[arg-type]
    return caught.value


@pytest.mark.parametrize("place", ["directory", "memory"])
@pytest.mark.parametrize("async_save", [False, True])
def test_a_policy_that_fails_fails_the_save_before_anything_is_changed(
    tmp_path: Path, place: str, async_save: bool
) -> None:
    root = str(tmp_path / "root") if place == "directory" else f"memory:/{tmp_path}"
    xla_ckpt.save(root, "a", TREE)
    for name, act in FAILURES.items():
        error = fails(root, act, async_save=async_save)
        assert f"failed: {name}: " in str(error)
        assert (error.tag, error.path) == ("b", root)
    xla_ckpt.save(root, "b", TREE, options=SaveOptions(retention=Mine(lambda facts: facts[:1]), stale="ignore"))
    xla_ckpt.save(root, "c", TREE, options=SaveOptions(retention=Mine(lambda facts: facts[:1]), stale="ignore"))
    assert xla_ckpt.list_tags(root) == ["a", "c"], "a policy that works"
    xla_ckpt.finalize_checkpoint()
    assert place == "memory" or names_in(Path(root)) == ["a", "c"]


def test_a_policy_that_fails_keeps_a_tag_from_the_disk_before_it_goes_up(tmp_path: Path) -> None:
    root, local = f"memory://{tmp_path}", tmp_path / "disk"
    options = SaveOptions(local=local, retention=Mine(FAILURES["KeyError"]))
    with pytest.raises(xla_ckpt.UsageError, match="the retention policy Mine failed"):
        xla_ckpt.save(root, "a", TREE, options=options)
    assert xla_ckpt.list_tags(root, local=local) == []


def test_a_policy_that_cannot_read_a_tag_keeps_all(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mine = Mine(lambda facts: [fact for fact in facts if fact.metric("loss") == 1])
    for n, tag in enumerate("abc"):
        xla_ckpt.save(tmp_path, tag, {"loss": n})
    manifest = tmp_path / "a" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"skeleton"', b'"skeletom"'))
    xla_ckpt.save(tmp_path, "d", {"loss": 3}, options=SaveOptions(retention=mine))
    assert xla_ckpt.list_tags(tmp_path) == ["a", "b", "c", "d"]
    assert "no older tag is deleted" in caplog.text


def test_a_tag_that_is_pinned_during_the_commit_stays(tmp_path: Path) -> None:
    def keeps(facts: Sequence[TagInfo]) -> Collection[TagInfo]:
        xla_ckpt.Checkpoints(tmp_path).pin("a")
        return facts[-1:]

    for tag in "ab":
        xla_ckpt.save(tmp_path, tag, TREE)
    xla_ckpt.save(tmp_path, "c", TREE, options=SaveOptions(retention=Mine(keeps), stale="ignore"))
    assert xla_ckpt.list_tags(tmp_path) == ["a", "c"]


@pytest.mark.parametrize("error", [KeyError("mine"), SystemExit(3), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("async_save", [False, True])
def test_a_function_that_hears_of_saves_may_raise_anything(
    tmp_path: Path, error: BaseException, async_save: bool, caplog: pytest.LogCaptureFixture
) -> None:
    heard = []
    for remove in [xla_ckpt.on_report(lambda report: raises(error)), xla_ckpt.on_report(heard.append)]:
        caplog.set_level(logging.ERROR)
        if not heard:
            assert xla_ckpt.save(tmp_path, "a", TREE, async_save=async_save).result().tag == "a"
            assert [report.tag for report in heard] == ["a"]
            assert "a function that on_report was given failed for the tag a" in caplog.text
        remove()


def loses_the_store(rank: int, root: Path) -> list[str]:
    """The store of the job is gone as soon as rank 0 has committed."""
    from xla_ckpt.distributed import job, torch_store

    job.EXIT_GRACE_SECONDS = 0.1  # at its end rank 0 waits for the other one, which has closed nothing
    communicator: Any = torch_store.get_torch_communicator()
    options = SaveOptions(timeout=1, stale="ignore")
    xla_ckpt.save(root, "a", TREE, options=options)
    commit = Transaction.commit

    def commits(self: Transaction, **keywords: Any) -> float:
        seconds = commit(self, **keywords)
        communicator.put = lambda key, value, timeout: raises(ConnectionError("the store is gone"))
        return seconds

    if rank == 0:
        Transaction.commit = commits  # type: ignore[method-assign]
    try:
        told = [xla_ckpt.save(root, "b", TREE, options=options).result().tag]
    except xla_ckpt.CheckpointError as error:
        told = [type(error).__name__]
    if rank == 0:
        del communicator.put  # which its process holds: it is to end well
    return [*told, *xla_ckpt.list_tags(root)]


def test_a_store_that_is_lost_after_the_commit_is_no_error_where_the_tag_was_committed(tmp_path: Path) -> None:
    first, second = run_on_ranks(loses_the_store, 2, tmp_path)
    assert first == ["b", "a", "b"]
    assert second == ["RankFailedError", "a", "b"], "it cannot know"


def follows_commits(rank: int, root: Path) -> list[str]:
    """Whatever follows a commit fails, on all ranks: the saves do not."""
    from xla_ckpt.saving import run as saving_run
    from xla_ckpt.tags import directory_root

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("afterwards")

    lines = list[str]()
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("xla_ckpt").addHandler(handler)
    for where, name in (
        (saving_run, "cache_manifest"),
        (saving_run, "record_saved_buffers"),
        (saving_run, "publish_report"),
        (directory_root.LEASES, "record_commit"),
        (directory_root, "_trash_or_warn"),
    ):
        kept = getattr(where, name)
        setattr(where, name, fail)
        try:
            options = SaveOptions(timeout=30, stale="ignore")
            handle = xla_ckpt.save(root, "t", TREE, async_save=True, options=options)
            assert handle.result().tag == "t", name
            handle.tidied()
        finally:
            setattr(where, name, kept)
    assert all("tag t is committed; what was to be done afterwards failed" in line for line in lines)
    return lines


def test_nothing_that_follows_a_commit_makes_an_error_of_it(tmp_path: Path) -> None:
    lead, follower = run_on_ranks(follows_commits, 2, tmp_path)
    assert len(lead) == 5
    assert len(follower) == 2, "note_saved and the report are each rank's own"
    assert xla_ckpt.verify(tmp_path, "t").ok


def policy_fails(rank: int, root: Path) -> list[str]:
    told = []
    xla_ckpt.save(root, "a", TREE, options=SaveOptions(timeout=30))
    for async_save in (False, True):
        error = fails(root, FAILURES["KeyError"], async_save=async_save)
        told.append(str(error))
    xla_ckpt.save(root, "b", TREE, options=SaveOptions(timeout=30, stale="ignore", retention=LatestN(1)))
    return [*told, *xla_ckpt.list_tags(root)]


def test_all_ranks_hear_of_a_policy_that_fails(tmp_path: Path) -> None:
    first, second = run_on_ranks(policy_fails, 2, tmp_path)
    assert first == second
    assert first[2:] == ["b"]
