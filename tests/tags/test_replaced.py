"""Replacing a tag whose old versions are still being read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import xla_ckpt
from tests.runs import names_in
from xla_ckpt.formats.tags import find_foreign_tag
from xla_ckpt.storage.local import LocalStore
from xla_ckpt.tags.resolve import open_root


def test_a_tag_is_replaced_as_often_as_one_likes_while_all_of_its_versions_are_read(tmp_path: Path) -> None:
    readers = []
    for value in range(4):
        xla_ckpt.save(tmp_path, "best", {"value": value})
        assert xla_ckpt.restore(tmp_path, "best").tree == {"value": value}
        readers.append(open_root(LocalStore(str(tmp_path))).open("best"))
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
    assert names_in(tmp_path) == ["best"]


class Replaced(LocalStore):
    """A store in which somebody replaces the tag `select_best` while it is looked for: a step before each of some
    reads."""

    def __init__(self, path: str, steps: list[tuple[str, str]]) -> None:
        super().__init__(path)
        self.steps = steps

    def read_start(self, path: str, nbytes: int, *, links: bool = True) -> bytes:
        """Rename, then read."""
        if "best" in path and self.steps:
            self.rename(*self.steps.pop(0))
        return super().read_start(path, nbytes, links=links)


ASIDE, BACK = ("best", ".old-best"), (".old-best", "best")


@pytest.mark.parametrize("steps", [[ASIDE], [ASIDE, BACK], [ASIDE, BACK, ASIDE], [ASIDE, BACK] * 3])
def test_a_tag_is_listed_while_it_is_replaced(tmp_path: Path, steps: list[tuple[str, str]]) -> None:
    """Without it the newest tag seems to be the one before (found by `make soak`)."""
    for tag in ("step_1", "best"):
        xla_ckpt.save(tmp_path, tag, {"value": 1})
    xla_ckpt.finalize_checkpoint()
    store = Replaced(str(tmp_path), list(steps))
    assert [entry.tag for entry in open_root(store).list_entries()] == ["step_1", "best"]
    assert store.steps == []
    if steps[-1] == ASIDE:
        LocalStore(str(tmp_path)).rename(*BACK)
    found = open_root(Replaced(str(tmp_path), list(steps))).get_entry("best")
    assert found is not None
    assert found.tag == "best"


class Retired(LocalStore):
    """A store in which others save tags, and retire the one before, as soon as the root directory has been listed."""

    todo = 0

    def read_start(self, path: str, nbytes: int, *, links: bool = True) -> bytes:
        """What others do, then the bytes."""
        if self.todo and path.startswith("step_") and self.has(path):
            self.todo -= 1
            number = int(path.split("/")[0].removeprefix("step_"))
            xla_ckpt.save(self.path, f"step_{number + 1}", {"value": number + 1})
            xla_ckpt.Checkpoints(self.path).delete(f"step_{number}")
        return super().read_start(path, nbytes, links=links)


@pytest.mark.parametrize("times", [1, 3])
def test_a_tag_that_came_while_others_were_retired_is_listed(tmp_path: Path, times: int) -> None:
    """Without it the newest tag is one that was never the newest in that time (found by `make soak`)."""
    for tag in ("best", "step_1"):
        xla_ckpt.save(tmp_path, tag, {"value": 1})
    (tmp_path / "logs").mkdir()
    store = Retired(str(tmp_path))
    store.todo = times
    assert [entry.tag for entry in open_root(store).list_entries()] == ["best", f"step_{1 + times}"]
    assert store.todo == 0


def test_a_new_version_that_comes_between_two_looks_is_not_damaged(tmp_path: Path) -> None:
    """Its manifest was looked for when it was not there yet, and the mark of its commit when it was."""
    xla_ckpt.save(tmp_path, "best", {"value": 1})
    xla_ckpt.finalize_checkpoint()
    store = BackBetween(str(tmp_path))
    store.rename(*ASIDE)
    assert [(entry.tag, entry.damage) for entry in open_root(store).list_entries()] == [("best", None)]
    assert names_in(tmp_path) == ["best"]


class BackBetween(LocalStore):
    """A store in which the tag `select_best` comes to its name when the mark of its commit is looked for."""

    def has(self, path: str) -> bool:
        """Whether it is there at this moment."""
        if path == "best/commit_success.txt" and not super().has("best"):
            self.rename(*BACK)
        return super().has(path)


class InPlaceAgain(LocalStore):
    """A store in which the tag `select_best` is set aside when its manifest is looked for, and replaced when its files
    are."""

    over = False

    def has(self, path: str) -> bool:
        """Whether it is there at this moment."""
        if path == "best/manifest.json" and not self.over and super().has("best"):
            self.rename(*ASIDE)
        return super().has(path)

    def is_directory(self, path: str) -> bool:
        """Whether it is a directory at this moment."""
        if path == "best/model" and not super().has("best"):
            self.rename(*BACK)
            self.over = True
        return super().is_directory(path)


def test_a_tag_that_is_replaced_is_not_taken_for_one_of_another_library(tmp_path: Path) -> None:
    """Without the manifest, which has the digests, its bytes would be loaded as they are."""
    xla_ckpt.save_checkpoint(tmp_path, "best", {"w": torch.ones(3)}, layout="xser")
    xla_ckpt.finalize_checkpoint()
    (tmp_path / "best/manifest.json").rename(tmp_path / "manifest.json")
    (tmp_path / "best/commit_success.txt").unlink()
    assert find_foreign_tag(LocalStore(str(tmp_path)), "best") is not None, "neuronx-distributed's own looks like it"
    (tmp_path / "manifest.json").rename(tmp_path / "best/manifest.json")
    store = InPlaceAgain(str(tmp_path))
    assert find_foreign_tag(store, "best") is None
    assert store.over
