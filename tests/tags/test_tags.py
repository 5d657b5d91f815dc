"""Tags: names, order, replacement, retention, pins, and what a killed save leaves behind."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import xla_ckpt
from tests.runs import names_in
from xla_ckpt.loading.verify import COMMIT_FILES
from xla_ckpt.storage.local import LocalStore
from xla_ckpt.tags.entry import is_tag_name
from xla_ckpt.tags.resolve import open_root
from xla_ckpt.tags.retention import TagInfo, find_tags_to_delete, resolve_policy


def put(root: Path, tag: str, value: Any = 0, **options: Any) -> None:
    xla_ckpt.save(root, tag, {"value": value, "w": torch.full((100,), float(len(str(tag))))}, **options)


def value(root: Path, tag: str | None = None) -> Any:
    return xla_ckpt.restore(root, tag, {"value": None}).tree["value"]


def names(root: Path) -> list[str]:
    return names_in(root)


GOOD = ["step_10", "best", "epoch-3", "1", "a.b", "ü", "日本", "with space", "x" * 200, "-", "a=b,c", "#1", "_x"]
BAD = ["", ".", "..", "a/b", "/a", "a\\b", ".hidden", "a\0b", "a\nb", " a", "a ", "x" * 201, "é" * 101, "a\x7f",
       "b.orbax-checkpoint-tmp", 5, None, b"x", "a\u2028b"]  # fmt: skip


@pytest.mark.parametrize("tag", GOOD)
def test_any_safe_name_is_a_tag(tmp_path: Path, tag: str) -> None:
    put(tmp_path, tag, tag)
    assert xla_ckpt.list_tags(tmp_path) == [tag]
    assert value(tmp_path, tag) == value(tmp_path) == tag


@pytest.mark.parametrize("tag", BAD)
def test_everything_else_is_refused_with_a_reason(tmp_path: Path, tag: Any) -> None:
    with pytest.raises(xla_ckpt.InvalidTagError, match="cannot be a tag: it|a tag is a string"):
        put(tmp_path / "root", tag)
    if isinstance(tag, str):
        with pytest.raises(xla_ckpt.InvalidTagError):
            xla_ckpt.restore(tmp_path, tag)
    assert not (tmp_path / "root").exists()


def test_a_path_in_the_place_of_a_tag_is_told_its_name(tmp_path: Path) -> None:
    put(tmp_path, "a", 1)
    for call in (lambda: xla_ckpt.restore(tmp_path, f"{tmp_path}/a/"), lambda: put(Path("a"), f"{tmp_path}/a")):
        with pytest.raises(xla_ckpt.InvalidTagError, match="A tag is a name in its root, such as 'a'"):
            call()


@given(st.text(max_size=30))
def test_tag_names_never_leave_their_directory(tag: str) -> None:
    if is_tag_name(tag):
        assert os.path.basename(os.path.normpath("/root/" + tag)) == tag
        assert os.path.dirname(os.path.normpath("/root/" + tag)) == "/root"


def test_order_is_that_of_commits_not_of_names_or_times(tmp_path: Path) -> None:
    for tag in ("step_10", "best", "step_9", "a"):
        put(tmp_path, tag, tag)
    for i, tag in enumerate(("a", "step_9", "best", "step_10")):
        for name in (tmp_path / tag, tmp_path / tag / "manifest.json"):
            os.utime(name, (i * 1000, i * 1000))
    assert xla_ckpt.list_tags(tmp_path) == ["step_10", "best", "step_9", "a"]
    assert xla_ckpt.latest_tag(tmp_path) == "a"
    put(tmp_path, "best", "again")
    assert xla_ckpt.list_tags(tmp_path) == ["step_10", "step_9", "a", "best"]
    assert value(tmp_path) == "again"


def test_a_directory_without_tags(tmp_path: Path) -> None:
    assert xla_ckpt.list_tags(tmp_path / "nowhere") == []
    assert xla_ckpt.latest_tag(tmp_path) is None
    assert not xla_ckpt.has_checkpoint(tmp_path)
    with pytest.raises(xla_ckpt.NoCheckpointError, match="No tag of this library is there"):
        xla_ckpt.load_checkpoint(tmp_path)
    with pytest.raises(FileNotFoundError, match="Nothing lies there"):
        xla_ckpt.load_checkpoint(tmp_path / "nowhere")
    put(tmp_path, "a"), put(tmp_path, "b")
    with pytest.raises(RuntimeError, match="Tags there, oldest first: a, b"):
        xla_ckpt.load_checkpoint(tmp_path, "c")
    assert xla_ckpt.has_checkpoint(tmp_path)


def test_strangers_in_the_directory_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "half").mkdir()
    put(tmp_path, "a", num_kept_ckpts=1)
    put(tmp_path, "b", num_kept_ckpts=1)
    xla_ckpt.finalize_checkpoint()
    assert names(tmp_path) == ["b", "half", "logs", "notes.txt"]


def test_retention_keeps_the_newest_and_the_pinned(tmp_path: Path) -> None:
    put(tmp_path, "first", pinned=True)
    for i in range(4):
        put(tmp_path, f"s{i}", i, num_kept_ckpts=2)
    assert xla_ckpt.list_tags(tmp_path) == ["first", "s2", "s3"]
    put(tmp_path, "s2", "again", num_kept_ckpts=2)
    assert xla_ckpt.list_tags(tmp_path) == ["first", "s3", "s2"]
    put(tmp_path, "best", pinned=True, num_kept_ckpts=1)
    assert xla_ckpt.list_tags(tmp_path) == ["first", "s2", "best"]
    put(tmp_path, "first", "still pinned", num_kept_ckpts=1)
    put(tmp_path, "best", "again", pinned=True, num_kept_ckpts=1)
    assert xla_ckpt.list_tags(tmp_path) == ["s2", "first", "best"]
    put(tmp_path, "first", "no longer pinned", pinned=False, num_kept_ckpts=1)
    assert xla_ckpt.list_tags(tmp_path) == ["best", "first"]
    assert value(tmp_path, "first") == "no longer pinned"
    xla_ckpt.finalize_checkpoint()
    assert names(tmp_path) == ["best", "first"]


@pytest.mark.parametrize("kept", [0, -2, 1.5, True, "2"])
def test_retention_of_nothing_is_refused_and_what_keeps_all_is_told(tmp_path: Path, kept: Any) -> None:
    put(tmp_path, "a")
    with pytest.raises(xla_ckpt.UsageError, match=r"num_kept_ckpts=.* at least 1; or None or -1, which keep all"):
        put(tmp_path, "b", num_kept_ckpts=kept)
    assert xla_ckpt.list_tags(tmp_path) == ["a"]
    put(tmp_path, "b", num_kept_ckpts=-1)
    assert xla_ckpt.list_tags(tmp_path) == ["a", "b"]


facts = st.lists(
    st.builds(TagInfo, st.text("abc", min_size=1, max_size=3), st.integers(1, 50), st.booleans()),
    unique_by=(lambda f: f.tag, lambda f: f.sequence), max_size=8,
)  # fmt: skip


@given(facts, st.one_of(st.none(), st.integers(1, 5)))
def test_retention_laws(some: list[TagInfo], kept: int | None) -> None:
    gone = find_tags_to_delete(some, resolve_policy(kept, None))
    by_name = {f.tag: f for f in some}
    assert not any(by_name[t].pinned for t in gone)
    newest = max(some, key=lambda f: f.sequence, default=None)
    assert newest is None or newest.tag not in gone
    left = [f for f in some if not f.pinned and f.tag not in gone]
    assert kept is None or len(left) <= max(kept, 0) or len(left) == 1
    assert all(f.sequence > by_name[t].sequence for t in gone for f in left)
    assert kept is not None or gone == []


def test_a_tag_that_is_read_is_not_deleted_under_its_reader(tmp_path: Path) -> None:
    put(tmp_path, "a", "old a"), put(tmp_path, "b", "old b")
    reading_a, reading_b = (
        open_root(LocalStore(str(tmp_path))).open("a"),
        open_root(LocalStore(str(tmp_path))).open("b"),
    )
    put(tmp_path, "c", num_kept_ckpts=1)
    put(tmp_path, "b", "new b", num_kept_ckpts=1)
    xla_ckpt.finalize_checkpoint()
    assert "manifest.json" in reading_a.list_files()
    assert "manifest.json" in reading_b.list_files()
    assert set(xla_ckpt.list_tags(tmp_path)) == {"a", "b"}
    assert value(tmp_path, "b") == "new b"
    reading_a.close(), reading_b.close()
    put(tmp_path, "d", num_kept_ckpts=1)
    xla_ckpt.finalize_checkpoint()
    assert names(tmp_path) == ["d"]


def test_an_interrupted_replacement_is_seen_and_undone(tmp_path: Path) -> None:
    """Killed between the two renames of a replacement: the old version has a side name, the new one is unfinished."""
    put(tmp_path, "best", 1), put(tmp_path, "other", 2)
    xla_ckpt.finalize_checkpoint()  # cleaning goes on after the commit
    (tmp_path / "best").rename(tmp_path / ".old-best")
    shutil.copytree(tmp_path / "other", tmp_path / ".new-best")
    assert xla_ckpt.list_tags(tmp_path) == ["best", "other"]
    assert value(tmp_path, "best") == 1
    assert xla_ckpt.verify(tmp_path, "best").ok
    put(tmp_path, "third", 3)
    xla_ckpt.finalize_checkpoint()
    assert names(tmp_path) == ["best", "other", "third"]
    assert value(tmp_path, "best") == 1


def test_leftovers_of_killed_saves_are_ignored_and_cleaned(tmp_path: Path) -> None:
    put(tmp_path, "a", 1)
    xla_ckpt.finalize_checkpoint()  # cleaning goes on after the commit
    shutil.copytree(tmp_path / "a", tmp_path / ".new-b")
    shutil.copytree(tmp_path / "a", tmp_path / ".new-b-1")
    shutil.copytree(tmp_path / "a", tmp_path / ".old-a")
    shutil.copytree(tmp_path / "a", tmp_path / ".trash/a")
    assert xla_ckpt.list_tags(tmp_path) == ["a"]
    put(tmp_path, "b", 2)
    xla_ckpt.finalize_checkpoint()
    assert names(tmp_path) == ["a", "b"]
    assert (value(tmp_path, "a"), value(tmp_path, "b")) == (1, 2)


def test_copied_and_renamed_tags_answer_to_their_new_name(tmp_path: Path) -> None:
    put(tmp_path, "a", 1)
    shutil.copytree(tmp_path / "a", tmp_path / "backup")
    assert xla_ckpt.list_tags(tmp_path) == ["a", "backup"]
    assert value(tmp_path, "backup") == 1
    assert xla_ckpt.verify(tmp_path, "backup").ok


def test_a_damaged_manifest_keeps_its_place_in_the_order(tmp_path: Path) -> None:
    put(tmp_path, "a", 1), put(tmp_path, "b", 2), put(tmp_path, "c", 3)
    (tmp_path / "b/manifest.json").write_bytes(b"{}")
    assert xla_ckpt.list_tags(tmp_path) == ["a", "b", "c"]
    assert [e.tag for e in open_root(LocalStore(str(tmp_path))).list_entries() if e.damage] == ["b"]
    report = xla_ckpt.verify(tmp_path, "b")
    assert not report.ok
    assert report.problems[0].file == "manifest.json"
    with pytest.raises(xla_ckpt.CorruptCheckpointError, match="tag b, file manifest.json"):
        value(tmp_path, "b")
    put(tmp_path, "d", 4)
    assert xla_ckpt.list_tags(tmp_path) == ["a", "b", "c", "d"]


@pytest.mark.parametrize("damage", ["payload", "manifest", "missing", "cut"])
def test_the_newest_good_tag_is_used_and_the_damage_reported(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    for i in range(3):
        xla_ckpt.save_checkpoint(tmp_path, f"s{i}", model={"w": torch.full((5000,), float(i))}, user_content=i)
    for tag in ("s1", "s2"):
        payload = tmp_path / tag / "model/00001-of-00001.safetensors"
        if damage == "payload":
            data = bytearray(payload.read_bytes())
            data[10000] ^= 16
            payload.write_bytes(data)
        elif damage == "manifest":
            (tmp_path / tag / "manifest.json").write_bytes(b"nothing of ours\n" * 9)
        elif damage == "missing":
            payload.unlink()
        else:
            os.truncate(payload, 8000)
    for target in (torch.full((5000,), 9.0), torch.full((5000, 2), 9.0)[:, 0]):  # live memory, and a copy
        loaded = xla_ckpt.load_checkpoint(tmp_path, model={"w": target})
        assert loaded.user_content == 0
        assert (target == 0).all()
        assert loaded.report.corrupt_tags == ("s2", "s1")
        assert loaded.report.tag == "s0"
    assert "tag s2 is damaged and passed over" in caplog.text
    target = torch.full((5000,), 9.0)
    with pytest.raises(xla_ckpt.CorruptCheckpointError, match="tag s2") as caught:
        xla_ckpt.load_checkpoint(tmp_path, "s2", model={"w": target})
    assert caught.value.tag == "s2"
    assert (target == 9).all(), "a damaged tag changed the model"
    shutil.rmtree(tmp_path / "s0")
    with pytest.raises(
        xla_ckpt.CorruptCheckpointError, match=r"tag s2[^$]*\nAll other tags are damaged, too:\n  tag s1: "
    ):
        xla_ckpt.load_checkpoint(tmp_path, model={"w": target})
    assert (target == 9).all()


def test_the_old_version_of_a_tag_lives_until_the_new_one_is_committed(tmp_path: Path) -> None:
    """A reader polls while a tag is replaced again and again: it never sees nothing, and never a mixture."""
    put(tmp_path, "best", 0)
    stop, seen, problems = threading.Event(), [], []

    def read() -> None:
        while not stop.is_set():
            try:
                seen.append(value(tmp_path, "best"))
            except Exception as error:
                problems.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for i in range(1, 15):
        put(tmp_path, "best", i)
    stop.set()
    reader.join()
    assert problems == []
    assert seen == sorted(seen)
    assert seen[-1] <= 14


def test_orbax_opens_what_it_manages(tmp_path: Path) -> None:
    """The tag directories are orbax's: its own metadata is there, and its finalization rule holds."""
    import orbax.checkpoint as ocp

    put(tmp_path, "a", 1)
    assert ocp.path.step.is_path_finalized(tmp_path / "a")
    metadata = json.loads((tmp_path / "a/_CHECKPOINT_METADATA").read_text())
    custom = metadata["custom_metadata"]
    assert (custom["tag"], custom["sequence"], custom["report"]["ranks"]) == ("a", 1, 1)
    assert metadata["item_handlers"] == "xla_ckpt.payload"
    assert names_in(tmp_path / "a") == [
        "_CHECKPOINT_METADATA", "commit_success.txt", "manifest.json", "tree",
    ]  # fmt: skip


def test_a_tag_that_lost_its_manifest_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for i in (1, 2):
        xla_ckpt.save(tmp_path, f"s{i}", {"w": torch.full((3,), float(i))})
    (tmp_path / "s2" / "manifest.json").unlink()
    assert xla_ckpt.list_tags(tmp_path) == ["s1", "s2"]
    assert xla_ckpt.restore(tmp_path).tree["w"][0] == 1
    assert "tag s2 is damaged and passed over: the tag has no manifest" in caplog.text
    with pytest.raises(xla_ckpt.CorruptCheckpointError, match=r"the tag has no manifest.*Load another tag, or restore"):
        xla_ckpt.restore(tmp_path, "s2")
    assert not xla_ckpt.verify(tmp_path, "s2").ok
    xla_ckpt.save(tmp_path, "s2", {"w": torch.full((3,), 3.0)})  # and can be replaced
    assert xla_ckpt.restore(tmp_path).tree["w"][0] == 3


@pytest.mark.usefixtures("commits_here")
@pytest.mark.parametrize("layout", ["native", "pt", "xser"])
def test_everything_is_durable_before_a_tag_appears(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    durable: dict[int, float] = {}
    appeared: list[list[str]] = []
    fsync, rename = os.fsync, os.rename

    def note_sync(fd: int) -> None:
        fsync(fd)
        durable[os.fstat(fd).st_ino] = os.fstat(fd).st_mtime_ns

    def note_rename(source: str, target: str, **how: Any) -> None:
        if Path(target) == tmp_path / "a":
            found = [*Path(source).rglob("*")]
            late = [str(p) for p in found if durable.get(p.stat().st_ino) != p.stat().st_mtime_ns]
            appeared.append([str(len(found)), *late])
        rename(source, target, **how)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "fdatasync", note_sync)
    monkeypatch.setattr(os, "rename", note_rename)
    monkeypatch.setattr(Path, "rename", lambda self, target: note_rename(str(self), str(target)))
    model = torch.nn.Linear(300, 200)
    xla_ckpt.save_checkpoint(tmp_path, "a", model, user_content={"x": 1, "o": {1, 2}}, layout=layout)
    ((count, *late),) = appeared
    assert int(count) >= 5  # orbax's own among them
    assert late == []


def test_what_a_power_failure_may_leave_of_orbax_own_files_does_no_harm(tmp_path: Path) -> None:
    put(tmp_path, "a", 1)
    of_commits = [path for path in (tmp_path / "a").iterdir() if path.name in COMMIT_FILES]
    assert len(of_commits) == 2
    for path in of_commits:
        path.write_bytes(b"")
    put(tmp_path, "b", 2, num_kept_ckpts=2)
    (tmp_path / "a/_CHECKPOINT_METADATA").unlink()
    put(tmp_path, "c", 3)
    assert xla_ckpt.list_tags(tmp_path) == ["a", "b", "c"]
    assert [value(tmp_path, tag) for tag in "abc"] == [1, 2, 3]
    assert xla_ckpt.verify(tmp_path, "a").ok
