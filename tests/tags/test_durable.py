"""The new tag is durable before anything older goes; and if it cannot be made durable, it never was."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import xla_ckpt
from tests.runs import names_in
from xla_ckpt.storage.local import LocalStore


def put(root: Path, tag: str, value: int, **options: int) -> None:
    xla_ckpt.save(root, tag, {"value": value}, **options)


def held(root: Path) -> dict[str, int]:
    return {tag: xla_ckpt.restore(root, tag).tree["value"] for tag in xla_ckpt.list_tags(root)}


def test_a_name_that_cannot_be_made_durable_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "a", 1), put(tmp_path, "b", 2)

    def refuse(store: LocalStore) -> None:
        raise OSError(5, "Input/output error", store.path)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "sync", refuse)
        for tag in ("a", "c"):
            with pytest.raises(xla_ckpt.StorageError, match="Input/output error"):
                put(tmp_path, tag, 3, num_kept_ckpts=1)
            assert held(tmp_path) == {"a": 1, "b": 2}
        xla_ckpt.finalize_checkpoint()
    assert names_in(tmp_path) == ["a", "b"]
    put(tmp_path, "c", 4, num_kept_ckpts=1)
    assert held(tmp_path) == {"c": 4}


def test_older_tags_go_when_the_new_one_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "a", 1), put(tmp_path, "b", 2)
    seen, sync = [], LocalStore.sync

    def watched(store: LocalStore) -> None:
        sync(store)
        seen.append(xla_ckpt.list_tags(store.path))

    monkeypatch.setattr(LocalStore, "sync", watched)
    put(tmp_path, "c", 3, num_kept_ckpts=1)
    xla_ckpt.finalize_checkpoint()
    # Then once more, before files of older tags are deleted: a loss of power must not bring their names back.
    assert seen == [["a", "b", "c"], ["c"]]
    assert held(tmp_path) == {"c": 3}


@pytest.mark.parametrize("tag", ["a", "b"])
def test_a_name_that_is_not_taken_back_either_is_said_to_be_there(
    tag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, "a", 1)
    rename, refused = LocalStore.rename, []

    def refuse(store: LocalStore) -> None:
        refused.append(tag)
        raise OSError(5, "Input/output error", store.path)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "sync", refuse)
        patch.setattr(LocalStore, "rename", lambda store, *names: refuse(store) if refused else rename(store, *names))
        with pytest.raises(xla_ckpt.NotDurableError, match=f"{tag} is in place and complete") as caught:
            put(tmp_path, tag, 2)
        assert caught.value.committed
        assert caught.value.found == "Input/output error"
        xla_ckpt.finalize_checkpoint()
    assert held(tmp_path) == {"a": 1, tag: 2}
    put(tmp_path, "c", 3)
    xla_ckpt.finalize_checkpoint()
    assert held(tmp_path) == {"a": 1, tag: 2, "c": 3}
    assert set(names_in(tmp_path)) == {"a", tag, "c"}


def test_what_orbax_writes_for_itself_may_fail_while_the_tag_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One thread of orbax gives up, and another one goes on to the rename: what is said waits for both."""
    put(tmp_path, "a", 1)
    from orbax.checkpoint import CheckpointManager

    from xla_ckpt.tags import orbax_dir

    sync, told = orbax_dir._sync, threading.Event()

    def waits_for_the_error(path: str) -> None:
        assert told.wait(60)
        sync(path)

    def finalize(manager: object, *_: object) -> None:
        raise OSError(28, "No space left on device")

    def wait_until_finished(manager: CheckpointManager) -> None:
        try:
            wait(manager)
        finally:
            told.set()

    wait = CheckpointManager.wait_until_finished
    monkeypatch.setattr(orbax_dir, "_sync", waits_for_the_error)
    monkeypatch.setattr(CheckpointManager, "_finalize", finalize)
    monkeypatch.setattr(CheckpointManager, "wait_until_finished", wait_until_finished)
    put(tmp_path, "b", 2)
    assert held(tmp_path) == {"a": 1, "b": 2}
    assert "tag b is committed, but deleting older tags failed" in caplog.text
    xla_ckpt.finalize_checkpoint()
