"""The new tag is durable before anything older goes; and if it cannot be made durable, it never was."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

import xla_ckpt
from tests.runs import names_in
from xla_ckpt.storage.local import LocalStore

pytestmark = pytest.mark.usefixtures("commits_here")


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
    rename, exchange, refused = LocalStore.rename, LocalStore.exchange, []

    def refuse(store: LocalStore) -> None:
        refused.append(tag)
        raise OSError(5, "Input/output error", store.path)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "sync", refuse)
        for name, change in (("rename", rename), ("exchange", exchange)):
            changes = functools.partialmethod(
                lambda store, change, *n: refuse(store) if refused else change(store, *n), change
            )
            patch.setattr(LocalStore, name, changes)
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


def test_what_orbax_cannot_write_for_itself_keeps_the_tag_from_appearing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, "a", 1)
    xla_ckpt.finalize_checkpoint()
    write = Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        if path.name == "commit_success.txt":
            raise OSError(28, "No space left on device", str(path))
        return write(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        for tag in ("a", "b"):
            with pytest.raises(xla_ckpt.StorageError, match="No space left on device") as caught:
                put(tmp_path, tag, 2)
            assert caught.value.errno == 28
    assert held(tmp_path) == {"a": 1}
    assert names_in(tmp_path) == ["a"]
    put(tmp_path, "b", 2)
    assert held(tmp_path) == {"a": 1, "b": 2}


def test_what_comes_after_the_commit_may_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Retiring older tags is no part of the save."""
    put(tmp_path, "a", 1)
    xla_ckpt.finalize_checkpoint()

    def refuse(*args: object) -> None:
        raise OSError(5, "Input/output error")

    from xla_ckpt.tags import directory_operations

    with monkeypatch.context() as patch:
        patch.setattr(directory_operations, "move_to_trash", refuse)
        put(tmp_path, "b", 2, num_kept_ckpts=1)
        xla_ckpt.finalize_checkpoint()
    assert held(tmp_path) == {"a": 1, "b": 2}
    assert f"could not remove a in {tmp_path}: [Errno 5]" in caplog.text
