"""Deleting and pinning tags by hand: what stays, what is refused, and what saves and readers notice."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import xla_ckpt
from tests.formats.stock_dcp import stock
from tests.jobs import run_alone
from tests.runs import names_in
from xla_ckpt.formats.tags import open_tag
from xla_ckpt.storage.resolve import open_store
from xla_ckpt.tags.resolve import open_root
from xla_ckpt.tags.root import Transaction


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step in range(3):
        xla_ckpt.save(tmp_path, f"step_{step}", {"w": torch.full((1000,), float(step))}).tidied()
    return tmp_path


def test_a_deleted_tag_is_gone_and_leaves_nothing(root: Path) -> None:
    xla_ckpt.Checkpoints(root).delete("step_1")
    assert xla_ckpt.list_tags(root) == ["step_0", "step_2"]
    left = set(names_in(root)) | {p.name for p in (root / ".trash").glob("*")}
    assert left - {".trash"} == {"step_0", "step_2"}  # the next save removes an empty `.trash`
    with pytest.raises(xla_ckpt.NoCheckpointError, match="oldest first: step_0, step_2"):
        xla_ckpt.Checkpoints(root).delete("step_1")


def test_an_old_version_that_a_killed_replacement_left_does_not_come_back(root: Path) -> None:
    (root / "step_0").rename(root / ".old-step_1")
    xla_ckpt.Checkpoints(root).delete("step_1")
    xla_ckpt.save(root, "step_3", {"w": torch.ones(1)})
    assert xla_ckpt.list_tags(root) == ["step_2", "step_3"]


def test_a_pinned_tag_and_the_last_one_are_deleted_by_force_alone(root: Path) -> None:
    xla_ckpt.Checkpoints(root).pin("step_1")
    with pytest.raises(xla_ckpt.UsageError, match=r"pinned.*--force"):
        xla_ckpt.Checkpoints(root).delete("step_1")
    xla_ckpt.Checkpoints(root).delete("step_0")
    xla_ckpt.Checkpoints(root).delete("step_1", force=True)
    with pytest.raises(xla_ckpt.UsageError, match=r"last tag.*Save another one"):
        xla_ckpt.Checkpoints(root).delete("step_2")
    xla_ckpt.Checkpoints(root).delete("step_2", force=True)
    assert xla_ckpt.list_tags(root) == []


def test_who_reads_a_tag_reads_on(root: Path) -> None:
    store = open_store(root)
    with open_tag(store, "step_1") as reader:
        with pytest.raises(xla_ckpt.UsageError, match="somebody reads this tag"):
            xla_ckpt.Checkpoints(root).delete("step_1")
        xla_ckpt.Checkpoints(root).delete("step_1", force=True)
        assert xla_ckpt.list_tags(root) == ["step_0", "step_2"]
        assert reader.open_file(0).size == reader.manifest.files[0].size
    xla_ckpt.Checkpoints(root).delete("step_0")
    xla_ckpt.save(root, "step_3", {"w": torch.ones(1)})
    assert names_in(root) == ["step_2", "step_3"]


def test_a_tag_that_is_being_saved_is_left_alone(root: Path) -> None:
    with Transaction(open_root(open_store(root)), "step_1") as transaction:
        checkpoints = xla_ckpt.Checkpoints(root)
        for call in (checkpoints.delete, checkpoints.pin):
            with pytest.raises(xla_ckpt.UsageError, match="a save of this tag is running"):
                call("step_1")
        xla_ckpt.Checkpoints(root).delete("step_0")  # beside the save of another one
        assert xla_ckpt.Checkpoints(root).pin("step_2")
        assert (root / transaction.directory.name).is_dir()
    assert xla_ckpt.verify(root, "step_1").ok


def test_a_pin_changes_one_word_and_retention_heeds_it(root: Path) -> None:
    before = (root / "step_0/manifest.json").read_bytes()
    assert [xla_ckpt.Checkpoints(root).pin("step_0"), xla_ckpt.Checkpoints(root).pin("step_0")] == [True, False]
    assert [e.pinned for e in open_root(open_store(root)).list_entries()] == [True, False, False]
    report = xla_ckpt.verify(root, "step_0")
    assert (report.ok, report.strangers) == (True, [])
    xla_ckpt.save(root, "step_3", {"w": torch.ones(1)}, num_kept_ckpts=1)
    assert xla_ckpt.list_tags(root) == ["step_0", "step_3"]
    assert [xla_ckpt.Checkpoints(root).unpin("step_0"), xla_ckpt.Checkpoints(root).unpin("step_0")] == [True, False]
    assert (root / "step_0/manifest.json").read_bytes() == before
    xla_ckpt.save(root, "step_4", {"w": torch.ones(1)}, num_kept_ckpts=1)
    assert xla_ckpt.list_tags(root) == ["step_4"]


def test_a_damaged_manifest_is_not_written_anew(root: Path) -> None:
    manifest = root / "step_0/manifest.json"
    data = bytearray(manifest.read_bytes())
    data[-100] ^= 1
    manifest.write_bytes(data)
    with pytest.raises(xla_ckpt.CorruptCheckpointError, match="damaged"):
        xla_ckpt.Checkpoints(root).pin("step_0")
    assert manifest.read_bytes() == data
    assert names_in(root) == ["step_0", "step_1", "step_2"]


@pytest.mark.parametrize("layout", ["xser", "pt"])
def test_tags_in_other_layouts(tmp_path: Path, layout: str) -> None:
    model = torch.nn.Linear(2, 2)
    for tag in ("a", "b"):
        xla_ckpt.save_checkpoint(tmp_path, tag, model, layout=layout)
    assert xla_ckpt.Checkpoints(tmp_path).pin("a")
    assert xla_ckpt.verify(tmp_path, "a").ok
    xla_ckpt.Checkpoints(tmp_path).delete("b")
    assert xla_ckpt.list_tags(tmp_path) == ["a"]


def test_tags_of_other_libraries_are_refused() -> None:
    of = stock("titan", "step-100")
    checkpoints = xla_ckpt.Checkpoints(of.root)
    for call in (checkpoints.delete, checkpoints.pin, checkpoints.unpin):
        with pytest.raises(xla_ckpt.UsageError, match=r"torch\.distributed\.checkpoint wrote this tag"):
            call(of.tag)


def test_in_memory() -> None:
    for tag in "ab":
        xla_ckpt.save("memory://keeping", tag, {"w": torch.ones(1)})
    assert xla_ckpt.Checkpoints("memory://keeping").pin("a")
    xla_ckpt.Checkpoints("memory://keeping").delete("b")
    assert xla_ckpt.list_tags("memory://keeping") == ["a"]
    assert xla_ckpt.verify("memory://keeping", "a").ok


def retires(path: Path) -> None:
    for step in range(8):
        xla_ckpt.save(path, f"new_{step}", {"w": torch.ones(10)}, num_kept_ckpts=2)


def test_beside_a_job_that_saves(root: Path) -> None:
    """Whatever comes first, retention or a person, no save fails, and what stays is sound."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(run_alone, retires, root)
        while not job.done():
            for tag in xla_ckpt.list_tags(root)[:-1]:
                try:
                    xla_ckpt.Checkpoints(root).pin(tag)
                    xla_ckpt.Checkpoints(root).delete(tag, force=True)
                except (xla_ckpt.NoCheckpointError, xla_ckpt.UsageError):
                    continue
        job.result()
    assert xla_ckpt.latest_tag(root) == "new_7"
    assert all(xla_ckpt.verify(root, tag).ok for tag in xla_ckpt.list_tags(root))
