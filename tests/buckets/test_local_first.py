"""Saves that commit in a directory, and go to a bucket in the background: what arrives there, whatever happens."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import xla_ckpt
from tests.buckets.s3_server import S3Server
from tests.buckets.uploads import SOON, Away, Gate, bytes_of, damage, is_number, listed, puts, save, tree
from tests.jobs import run_on_ranks
from tests.no_threads import start_as_the_last
from tests.nursery import Program, bear
from xla_ckpt import LoadOptions, SaveOptions
from xla_ckpt.cli.main import main
from xla_ckpt.errors import ChangedTagError, CorruptCheckpointError, StorageError, UsageError
from xla_ckpt.features.local_first.upload import UPLOADS
from xla_ckpt.tags import orbax_commit  # noqa: F401  # its process is started before the server is slow

pytestmark = pytest.mark.usefixtures("own_uploads")


def test_what_is_saved_comes_back_from_either(root: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2):
        handle = save(root, tmp_path, f"step_{step}", step, async_save=True)
        assert handle.uploaded(SOON).sequence == step
    for place in (root, tmp_path):
        assert xla_ckpt.list_tags(place) == ["step_1", "step_2"]
        assert is_number(place, 2)
        assert is_number(place, 1, "step_1")
        report = xla_ckpt.verify(place)
        assert report.ok
        assert not report.strangers
        assert main(["show", str(place), "--report"]) == 0
    assert bytes_of(root, "step_2") == bytes_of(tmp_path, "step_2")
    assert listed(root, tmp_path, capsys) == {"step_1": "both", "step_2": "both"}


def saves_without_further_threads(root: str, near: str) -> None:
    threading.Thread.start = start_as_the_last(threading.Thread.start)  # type: ignore[method-assign]
    save(root, Path(near), "step_1", 1, async_save=True)


def test_the_end_of_a_program_uploads_where_no_thread_is_to_be_had(root: str, tmp_path: Path) -> None:
    program = (
        "import sys; from tests.buckets import test_local_first; "
        "test_local_first.saves_without_further_threads(*sys.argv[1:])"
    )
    process = bear(Program(program, (root, str(tmp_path))), end="as python")
    _, said = process.communicate(SOON)
    assert (process.returncode, "error" in said.lower()) == (0, False), said
    assert is_number(root, 1, "step_1")


def test_a_training_state_in_another_layout_goes_up(root: str, tmp_path: Path) -> None:
    model = torch.nn.Linear(30, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    options = SaveOptions(local=tmp_path, parity="file")
    xla_ckpt.save_checkpoint(root, "a", model, optimizer, use_xser=True, options=options).uploaded(SOON)
    assert xla_ckpt.verify(root).ok
    assert bytes_of(root, "a") == bytes_of(tmp_path, "a")
    before = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.zero_()
    xla_ckpt.load_checkpoint(root, model=model, optimizer=optimizer)
    assert torch.equal(model.weight, before)


def test_a_load_reads_the_directory_where_it_can(root: str, tmp_path: Path, s3: S3Server) -> None:
    save(root, tmp_path, "a", 1).uploaded(SOON)
    options = LoadOptions(local=tmp_path)
    for tag in (None, "a"):
        s3.requests.clear()
        assert is_number(root, 1, tag, options=options)
        assert not [r for r in s3.requests if "/run/a/." in r.path]
    save(root, tmp_path / "other", "b", 2).uploaded(SOON)
    assert xla_ckpt.list_tags(root, local=tmp_path) == ["a", "b"]
    assert xla_ckpt.latest_tag(root, local=tmp_path) == "b"
    assert is_number(root, 2, options=options)
    assert is_number(root, 2, "b", options=options)
    with pytest.raises(xla_ckpt.NoCheckpointError):
        xla_ckpt.restore(root, "c", options=options)


@pytest.mark.parametrize("tag", [None, "a"])
def test_what_is_damaged_in_the_directory_is_read_from_the_bucket(
    tag: str | None, root: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(root, tmp_path, "a", 1).uploaded(SOON)
    damage(tmp_path, "a")
    loaded = xla_ckpt.restore(root, tag, options=LoadOptions(local=tmp_path))
    assert torch.equal(loaded.tree["w"], tree(1)["w"])
    assert (loaded.report.path, loaded.report.corrupt_tags) == (root, ())
    assert "tag a is damaged and read from the other place" in caplog.text
    xla_ckpt.Checkpoints(root).delete("a", force=True)
    with pytest.raises(CorruptCheckpointError):
        xla_ckpt.restore(root, tag, options=LoadOptions(local=tmp_path))


def test_what_is_damaged_does_not_go_up(root: str, tmp_path: Path, gate: Callable[[str], Gate], s3: S3Server) -> None:
    slow = gate("_CHECKPOINT_METADATA")
    first = save(root, tmp_path, "a", 1)
    assert slow.reached.wait(SOON)
    damage(tmp_path, "a")
    slow.go.set()
    with pytest.raises(CorruptCheckpointError, match="not what was saved"):
        first.uploaded(SOON)
    save(root, tmp_path, "b", 2).uploaded(SOON)
    assert xla_ckpt.list_tags(root) == ["b"]
    assert not [path for path in puts(s3) if "/a/" in path and "manifest" in path]


def test_the_loop_is_not_held_up(
    root: str, tmp_path: Path, gate: Callable[..., Gate], capsys: pytest.CaptureFixture[str]
) -> None:
    save(root, tmp_path, "a", 1).uploaded(SOON)
    slow = gate("safetensors", count=10**6)
    for number in (2, 3, 4):
        save(root, tmp_path, f"t{number}", number)
    assert slow.reached.wait(SOON)
    assert xla_ckpt.list_tags(tmp_path) == ["a", "t2", "t3", "t4"]
    assert xla_ckpt.list_tags(root) == ["a"]
    assert is_number(root, 4, options=LoadOptions(local=tmp_path))
    places = listed(root, tmp_path, capsys)
    assert places.pop("t2").startswith("uploading ")
    assert places == {"a": "both", "t3": "local", "t4": "local"}
    slow.go.set()
    xla_ckpt.finalize_checkpoint()
    assert xla_ckpt.list_tags(root) == ["a", "t2", "t3", "t4"]


def test_a_store_that_is_away_during_three_saves(root: str, tmp_path: Path, s3: S3Server) -> None:
    save(root, tmp_path, "a").uploaded(SOON)
    away = Away(s3)
    handles = [save(root, tmp_path, tag, number) for number, tag in enumerate("zyx")]
    with pytest.raises(StorageError, match="503"):
        handles[-1].uploaded(SOON)
    with pytest.raises(StorageError):
        xla_ckpt.finalize_checkpoint()
    away.is_back()
    s3.requests.clear()
    xla_ckpt.finalize_checkpoint()
    handles[0].uploaded(SOON)
    assert xla_ckpt.list_tags(root) == ["a", "z", "y", "x"]
    manifests = [r.path.split("/")[-3] for r in s3.requests if r.method == "PUT" and "manifest.json" in r.path]
    assert manifests == ["z", "y", "x"]


def test_a_process_that_begins_while_the_store_is_away(
    root: str, tmp_path: Path, s3: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    save(root, tmp_path, "a").uploaded(SOON)
    UPLOADS.__init__()  # type: ignore[misc]  # as in a new process
    away = Away(s3)
    with pytest.raises(StorageError):  # nothing says which numbers there are
        save(root, tmp_path / "fresh", "b")
    with caplog.at_level(logging.WARNING):
        handle = save(root, tmp_path, "b")
    assert "new tags are numbered after those in" in caplog.text
    away.is_back()
    xla_ckpt.finalize_checkpoint()
    assert handle.result().sequence == 2
    assert xla_ckpt.list_tags(root) == ["a", "b"]


def test_retention_keeps_what_is_not_uploaded(root: str, tmp_path: Path, s3: S3Server) -> None:
    for tag in "ab":
        save(root, tmp_path, tag, num_kept_ckpts=1).uploaded(SOON)
    assert xla_ckpt.list_tags(tmp_path) == ["b"]
    away = Away(s3)
    for tag in "cde":
        save(root, tmp_path, tag, num_kept_ckpts=1)
    assert xla_ckpt.list_tags(tmp_path) == ["b", "c", "d", "e"]
    empty = root.replace("/run", "/empty")
    assert xla_ckpt.has_checkpoint(empty, local=tmp_path)
    assert not xla_ckpt.has_checkpoint(empty, local=tmp_path / "empty")
    away.is_back()
    xla_ckpt.finalize_checkpoint()
    for tag in "cde":  # each of them came, although the bucket has retired it since
        assert [path for path in puts(s3) if f"/{tag}/." in path and "manifest.json" in path]
    assert xla_ckpt.list_tags(tmp_path) == xla_ckpt.list_tags(root) == ["e"]
    assert not list((tmp_path / ".trash").glob("*"))


def test_a_machine_that_comes_back_does_not_win(root: str, tmp_path: Path, s3: S3Server) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    save(root, old, "a").uploaded(SOON)
    away = Away(s3)
    unsent, replaced = save(root, old, "unsent", 1), save(root, old, "same", 2)
    with pytest.raises(StorageError):
        replaced.uploaded(SOON)
    away.is_back()
    sequences = [save(root, new, tag, 3).uploaded(SOON).sequence for tag in ("b", "c", "same")]
    assert sequences == [2, 3, 4]
    xla_ckpt.finalize_checkpoint()
    unsent.uploaded(SOON)
    with pytest.raises(ChangedTagError, match="newer tag of this name"):
        replaced.uploaded(SOON)
    assert xla_ckpt.list_tags(root)[-1] == "same"
    assert is_number(root, 1, "unsent")
    for place in (old, new):
        assert is_number(root, 3, options=LoadOptions(local=place))
    assert is_number(old, 2, "same")
    assert save(root, old, "next", 4).uploaded(SOON).sequence == 5


def test_a_tag_is_saved_anew_while_it_goes_up(root: str, tmp_path: Path, gate: Callable[[str], Gate]) -> None:
    slow = gate("safetensors")
    first = save(root, tmp_path, "same", 1)
    assert slow.reached.wait(SOON)
    second = save(root, tmp_path, "same", 2)
    slow.go.set()
    first.uploaded(SOON)
    second.uploaded(SOON)
    assert xla_ckpt.list_tags(root) == ["same"]
    assert is_number(root, 2)
    assert bytes_of(root, "same") == bytes_of(tmp_path, "same")


def test_ctrl_c_while_uploads_are_waited_for(root: str, tmp_path: Path, gate: Callable[[str], Gate]) -> None:
    slow = gate("safetensors")
    save(root, tmp_path, "a", 1)
    assert slow.reached.wait(SOON)
    with pytest.raises(TimeoutError):
        save(root, tmp_path, "b", 2).uploaded(0.0)
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    timer = threading.Timer(0.1, signal.pthread_kill, (main_thread, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        xla_ckpt.finalize_checkpoint()
    timer.join()
    slow.go.set()
    xla_ckpt.finalize_checkpoint()
    assert xla_ckpt.list_tags(root) == ["a", "b"]


def saves_a_part(rank: int, root: str, local: Path, environ: dict[str, str]) -> int:
    import os

    os.environ.update(environ)
    handle = xla_ckpt.save(
        root, "a", {"w": torch.full((3,), float(rank))}, mesh=xla_ckpt.Mesh(tp=2), shardings=[("w", ("tp",))],
        options=SaveOptions(local=local),
    )  # fmt: skip
    handle.uploaded()
    xla_ckpt.finalize_checkpoint()
    loaded = xla_ckpt.restore(root, mesh=xla_ckpt.Mesh(dp=2), options=LoadOptions(local=local))
    return int(loaded.tree["w"].sum())


def test_a_job_of_two_ranks(root: str, tmp_path: Path, s3: S3Server) -> None:
    assert run_on_ranks(saves_a_part, 2, root, tmp_path, s3.environment) == [3, 3]
    assert xla_ckpt.restore(root).tree["w"].tolist() == [0.0] * 3 + [1.0] * 3


def test_a_directory_and_a_bucket_are_needed(root: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"tags go from a directory \(local\) to an object store"):
        save(str(tmp_path), tmp_path, "a")
    with pytest.raises(UsageError, match=r"tags go from a directory \(local\) to an object store"):
        xla_ckpt.restore(root, options=LoadOptions(local=root))


def test_the_directory_of_another_root_is_refused(root: str, tmp_path: Path) -> None:
    options = xla_ckpt.SaveOptions(local=tmp_path)
    xla_ckpt.save(root, "a", {"w": torch.ones(3)}, options=options)
    xla_ckpt.finalize_checkpoint()
    with pytest.raises(xla_ckpt.UsageError, match="has tags of another root"):
        xla_ckpt.save(f"{root}2", "b", {"w": torch.ones(3)}, options=options)
    assert xla_ckpt.list_tags(tmp_path) == xla_ckpt.list_tags(root) == ["a"]
    assert xla_ckpt.list_tags(f"{root}2") == []


@pytest.mark.parametrize(
    "damage_journal",
    [
        lambda file: file.write_bytes(b""),
        lambda file: file.write_bytes(bytes(200)),
        lambda file: (file.unlink(), file.symlink_to("elsewhere")),
    ],
    ids=["empty", "zeros", "link"],
)
def test_a_damaged_journal_says_nothing_of_where_the_files_are(
    damage_journal: Callable[[Path], object], root: str, tmp_path: Path, s3: S3Server,
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    options = LoadOptions(local=tmp_path)
    save(root, tmp_path, "sent", 1).uploaded(SOON)
    away = Away(s3)
    handle = save(root, tmp_path, "here", 2)
    with pytest.raises(StorageError):
        handle.uploaded(SOON)
    for tag in ("sent", "here"):
        damage_journal(tmp_path / tag / "upload.json")
    away.is_back()
    assert listed(root, tmp_path, capsys) == {"sent": "both", "here": "local"}
    assert is_number(root, 1, options=options), "the newest whose files are known"
    assert "passed over" in caplog.text
    with pytest.raises(CorruptCheckpointError, match=r"upload\.json"):
        xla_ckpt.restore(root, "here", options=options)
    after = save(root, tmp_path, "after", 3)
    after.uploaded(SOON)
    with pytest.raises(CorruptCheckpointError, match="journal"):
        handle.uploaded(SOON)
    assert xla_ckpt.list_tags(root) == ["sent", "after"]
    assert xla_ckpt.list_tags(tmp_path) == ["sent", "here", "after"]
    # What the error advises.
    assert xla_ckpt.verify(tmp_path, "here").ok
    (tmp_path / "here" / "upload.json").unlink()
    assert is_number(root, 2, "here", options=options)
