"""The new tag is durable before anything older goes; and if it cannot be made durable, it never was."""

from __future__ import annotations

from pathlib import Path

import pytest

import xla_ckpt
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
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
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
    assert seen == [["a", "b", "c"]]
    assert held(tmp_path) == {"c": 3}
