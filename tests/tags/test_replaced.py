"""Replacing a tag whose old versions are still being read."""

from __future__ import annotations

from pathlib import Path

import xla_ckpt
from xla_ckpt.storage.local import LocalStore
from xla_ckpt.tags.directory import open_directory


def test_a_tag_is_replaced_as_often_as_one_likes_while_all_of_its_versions_are_read(tmp_path: Path) -> None:
    readers = []
    for value in range(4):
        xla_ckpt.save(tmp_path, "best", {"value": value})
        assert xla_ckpt.restore(tmp_path, "best").tree == {"value": value}
        readers.append(open_directory(LocalStore(str(tmp_path)), "best"))
    manifests = []
    for reader in readers:
        source = reader.open("manifest.json")
        content = bytearray(source.size)
        source.read_into(memoryview(content), 0)
        source.close()
        manifests.append(bytes(content))
    assert len(set(manifests)) == 4
    assert xla_ckpt.list_tags(tmp_path) == ["best"]
    for reader in readers:
        reader.close()
    xla_ckpt.save(tmp_path, "best", {"value": 4})
    xla_ckpt.finalize_checkpoint()  # cleaning goes on after the commit
    assert [path.name for path in tmp_path.iterdir()] == ["best"]
