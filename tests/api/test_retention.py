"""Saves with a policy of retention: in directories, in memory, and in jobs."""

from __future__ import annotations

import datetime
import logging
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from tests.jobs import run_on_ranks
from xla_ckpt import BestN, EveryNSteps, LatestDuration, LatestN, Retention, SaveOptions, UsageError
from xla_ckpt.tags import retention_inputs

LOSSES = [0.9, 0.2, 0.5, 0.7, 0.4]
BEST = LatestN(1) | BestN("eval.loss", 2)


@pytest.fixture(params=["directory", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "run") if request.param == "directory" else f"memory://{tmp_path}"


def save(root: object, step: int, retention: Retention | None, content: Any = None, **more: Any) -> None:
    options = SaveOptions(retention=retention, stale="ignore")
    xla_ckpt.save_checkpoint(
        root,
        f"step_{step}",
        {"w": torch.ones(3)},
        user_content=content,
        options=options,
        **more,  # type: ignore[arg-type]
    )


def test_the_best_tags_stay(root: str) -> None:
    for step, loss in enumerate(LOSSES):
        save(root, step, BEST, {"eval": {"loss": loss}})
    assert xla_ckpt.list_tags(root) == ["step_1", "step_4"]
    save(root, 5, BEST, {"eval": {"loss": float("nan")}})
    assert xla_ckpt.list_tags(root) == ["step_1", "step_4", "step_5"]
    save(root, 1, BEST, {"eval": {"loss": 1.0}})  # saved anew, it is the newest, and none of the best
    assert xla_ckpt.list_tags(root) == ["step_4", "step_1"]


@pytest.mark.parametrize("content", [{"los": 0.5}, {"loss": torch.tensor(0.5)}], ids=["misspelt", "a tensor"])
def test_a_number_that_no_tag_has_is_told_once(root: str, content: Any, caplog: pytest.LogCaptureFixture) -> None:
    for step in range(3):
        save(root, step, LatestN(1) | BestN("loss"), content)
    assert xla_ckpt.list_tags(root) == ["step_0", "step_1", "step_2"]
    (warning,) = [message for message in caplog.messages if "keeps all tags" in message]
    assert root.rpartition("/")[2] in warning
    assert "BestN('loss')" in warning


@pytest.mark.parametrize("contents", [[{"loss": 0.5}, {}, {}], [{}, {}, {"loss": 0.5}]], ids=["first", "last"])
def test_a_number_that_some_tags_have_is_no_mistake(
    root: str, contents: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    for step, content in enumerate(contents):
        save(root, step, LatestN(1) | BestN("loss") if step == 2 else None, content)
    assert xla_ckpt.list_tags(root) == sorted({"step_2", f"step_{contents.index({'loss': 0.5})}"})
    assert "keeps all tags" not in caplog.text


def test_a_list_says_why_each_tag_is_kept(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    save(root, 0, None, {"loss": 0.1}, pinned=True)
    assert [summary.kept for summary in xla_ckpt.Checkpoints(root).summaries()] == [()], "no policy is known"
    for step, loss in enumerate(LOSSES, 1):
        save(root, step, None if step < len(LOSSES) else BestN("loss", 2) | LatestN(1), {"loss": loss})
    assert {summary.tag: summary.kept for summary in xla_ckpt.Checkpoints(root).summaries()} == {
        "step_0": ("pinned",),
        "step_2": ("of the 2 with the smallest loss",),
        "step_5": ("the newest", "of the 2 with the smallest loss", "of the newest 1"),
    }
    xla_ckpt.save(root, "last", {"w": torch.zeros(1)}, num_kept_ckpts=2)
    numbers = list[str]()
    monkeypatch.setattr(retention_inputs, "_load_user_content", lambda store, entry: numbers.append(entry.tag))
    assert {summary.tag: summary.kept for summary in xla_ckpt.Checkpoints(root).summaries()} == {
        "step_0": ("pinned",),
        "step_5": ("of the newest 2",),
        "last": ("the newest", "of the newest 2"),
    }
    assert numbers == [], "the list has read all that there is to know"


class Alphabetical(Retention):
    """A policy that no other program knows."""

    def keeps(self, facts: Any) -> Any:
        return sorted(facts, key=lambda fact: fact.tag)[:1]


def test_a_list_does_not_know_a_policy_of_a_programs_own(root: str) -> None:
    save(root, 1, LatestN(1))
    save(root, 2, Alphabetical() | LatestN(1))
    assert [(summary.tag, summary.kept) for summary in xla_ckpt.Checkpoints(root).summaries()] == [
        ("step_1", ()), ("step_2", ()),
    ]  # fmt: skip


def test_every_nth_step_and_pinned_tags_stay(root: str) -> None:
    for step in range(1, 8):
        save(root, step, EveryNSteps(3) | LatestN(1), pinned=step == 2)
    assert xla_ckpt.list_tags(root) == ["step_2", "step_3", "step_6", "step_7"]


def test_a_policy_that_comes_later_reads_what_is_there(root: str) -> None:
    for step, loss in enumerate(LOSSES):
        save(root, step, None, {"loss": loss})
    save(root, 5, BestN("loss"), {"loss": 0.3})
    assert xla_ckpt.list_tags(root) == ["step_1", "step_5"]


def test_a_tree_of_save_has_its_numbers_at_its_root(root: str) -> None:
    for step, loss in enumerate(LOSSES):
        tree = {"w": torch.ones(3), "loss": loss}
        xla_ckpt.save(root, f"step_{step}", tree, options=SaveOptions(retention=BestN("loss"), stale="ignore"))
    assert xla_ckpt.list_tags(root) == ["step_1", "step_4"]


def test_each_manifest_is_read_once(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read, content = list[str](), retention_inputs._load_user_content
    monkeypatch.setattr(
        retention_inputs, "_load_user_content", lambda store, entry: read.append(entry.tag) or content(store, entry)
    )
    for step, loss in enumerate(LOSSES):
        save(root, step, LatestN(1), {"loss": loss})
    assert read == [], "heads are enough"
    for step in range(5, 9):
        save(root, step, BestN("loss", 9), {"loss": 1})
    assert read == [f"step_{step}" for step in range(4, 9)]


def test_a_damaged_manifest_is_told_of_and_its_tag_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step, loss in enumerate(LOSSES):
        save(tmp_path, step, None, {"loss": loss})
    manifest = tmp_path / "step_2" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"skeleton"', b'"skeletom"'))  # the first line is as it was
    with caplog.at_level(logging.WARNING):
        save(tmp_path, 5, BestN("loss"), {"loss": 0.3})
    assert "the tag is kept, as loss is not known of it" in caplog.text
    assert xla_ckpt.list_tags(tmp_path) == ["step_1", "step_2", "step_5"]


def test_a_tag_that_is_read_goes_later(tmp_path: Path) -> None:
    from xla_ckpt.storage.resolve import open_store
    from xla_ckpt.tags.resolve import open_root

    save(tmp_path, 1, None)
    with closing(open_root(open_store(tmp_path)).open("step_1")):
        save(tmp_path, 2, LatestN(1))
        assert xla_ckpt.list_tags(tmp_path) == ["step_1", "step_2"]
    save(tmp_path, 3, LatestN(1))
    assert xla_ckpt.list_tags(tmp_path) == ["step_3"]


def test_two_ways_to_say_it_are_one_too_many(root: str) -> None:
    with pytest.raises(UsageError, match="num_kept_ckpts= and retention="):
        save(root, 1, LatestN(3), num_kept_ckpts=3)
    with xla_ckpt.default_options(SaveOptions(retention=LatestN(1), stale="ignore")):
        for step in range(3):
            xla_ckpt.save(root, f"step_{step}", {"w": torch.ones(3)})
    assert xla_ckpt.list_tags(root) == ["step_2"]


def test_why_each_tag_is_kept(root: str) -> None:
    for step, loss in enumerate(LOSSES):
        save(root, step, None, {"loss": loss}, pinned=step == 0)
    runs = xla_ckpt.Checkpoints(root)
    policy = BestN("loss") | LatestDuration(datetime.timedelta(microseconds=1))
    why = runs.why_kept(policy)
    assert [*why] == runs.tags()
    assert why["step_0"] == ("pinned",)
    assert why["step_1"] == ("of the 1 with the smallest loss",)
    assert why["step_2"] == ()
    assert "the newest" in why["step_4"]
    save(root, 5, policy, {"loss": 1})
    assert runs.tags() == ["step_0", "step_1", "step_5"]
    with pytest.raises(UsageError, match=r"retention is no policy"):
        runs.why_kept(3)  # type: ignore[arg-type]


def saves_with_policies(rank: int, root: Path) -> tuple[list[str], list[str]]:
    tree, told, left = {"w": torch.ones(2)}, [], []
    for retention in (LatestN(1) | BestN("step"), LatestN(1 + rank)):
        for step in (1, 2, 3):
            state = {**tree, "step": step}
            options = SaveOptions(retention=retention, stale="ignore")
            try:
                xla_ckpt.save(root, f"step_{step}", state, options=options)
            except UsageError as error:
                told.append(str(error))
            left += xla_ckpt.list_tags(root)
    return told, left[-2:]


def test_ranks_say_the_same_policy(tmp_path: Path) -> None:
    results = run_on_ranks(saves_with_policies, 2, tmp_path)
    for told, left in results:
        assert len(told) == 3
        assert "expected retention=LatestN(n=1) on rank 0, found retention=LatestN(n=2) on rank 1" in told[0]
        assert left == ["step_1", "step_3"]


def test_the_step_of_the_user_content_counts_where_the_name_has_none(
    root: str, caplog: pytest.LogCaptureFixture
) -> None:
    policy = SaveOptions(retention=EveryNSteps(200) | LatestN(1), stale="ignore")
    for number, name in enumerate(["a", "b", "c", "d", "e", "best"], 1):
        content = {"step": 100 * number} if name != "best" else {"loss": 0.5}
        xla_ckpt.save_checkpoint(root, name, {"w": torch.ones(3)}, user_content=content, options=policy)
    for name in ("step_700", "step_801"):
        xla_ckpt.save_checkpoint(root, name, {"w": torch.ones(3)}, options=policy)
    assert xla_ckpt.list_tags(root) == ["b", "d", "best", "step_801"]
    (warning,) = [message for message in caplog.messages if "EveryNSteps keeps" in message]
    assert "such as best" in warning
    kept = {summary.tag: summary.kept for summary in xla_ckpt.Checkpoints(root).summaries()}
    assert kept["best"] == ("its step is not known",)
