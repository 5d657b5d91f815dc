"""A save replaces a tag of its name, and nothing else that has the name."""

from __future__ import annotations

import pathlib

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import xla_ckpt


def _content(root: pathlib.Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def _a_root(place: pathlib.Path) -> None:
    xla_ckpt.save(place, "step_1", {"w": torch.ones(2)})


def _sources(place: pathlib.Path) -> None:
    (place / "pkg").mkdir(parents=True)
    (place / "pkg" / "a.py").write_text("x = 1")


def _a_file(place: pathlib.Path) -> None:
    place.write_text("notes")


@pytest.mark.parametrize(
    ("make", "found", "cure"),
    [
        (_a_root, "a root with step_1", "pass .*/lm as the path"),
        (_sources, "a directory with pkg", "Give the tag another name"),
        (_a_file, "a file", "Give the tag another name"),
    ],
)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_is_no_tag_is_not_replaced(
    tmp_path: pathlib.Path, make: object, found: str, cure: str, asynchronous: bool
) -> None:
    assert callable(make)
    make(tmp_path / "lm")
    before = _content(tmp_path)
    with pytest.raises(xla_ckpt.UsageError, match=f"is no tag, and would be lost.*{found}.*{cure}"):
        xla_ckpt.save_checkpoint(tmp_path, "lm", torch.nn.Linear(2, 2), async_save=asynchronous).result()
    assert _content(tmp_path) == before


def test_a_conversion_does_not_replace_it_either(tmp_path: pathlib.Path) -> None:
    _sources(tmp_path / "to" / "lm")
    xla_ckpt.save(tmp_path / "from", "step_1", {"w": torch.ones(2)})
    before = _content(tmp_path)
    with pytest.raises(xla_ckpt.UsageError, match="is no tag, and would be lost.*a directory with pkg"):
        xla_ckpt.convert(tmp_path / "from", tmp_path / "to", "step_1", to="xser", as_tag="lm")
    assert _content(tmp_path) == before


def test_an_empty_directory_and_a_tag_are_replaced(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a").mkdir()
    for number in (1.0, 2.0):
        xla_ckpt.save(tmp_path, "a", {"w": torch.full((2,), number)})
        assert xla_ckpt.restore(tmp_path).tree["w"][0] == number


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_tag_of_another_library_is_not_replaced(tmp_path: pathlib.Path, asynchronous: bool) -> None:
    """It was, and a line in the log said so: a run that resumed from an old tag lost what came after it."""
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "step-1", no_dist=True)
    before = _content(tmp_path)
    message = f"another library has the name of the new tag.*torch.distributed.checkpoint.*move {tmp_path}/step-1 away"
    with pytest.raises(xla_ckpt.UsageError, match=message):
        xla_ckpt.save_checkpoint(tmp_path, "step-1", torch.nn.Linear(2, 2), async_save=asynchronous).result()
    assert _content(tmp_path) == before
    (tmp_path / "step-1").rename(tmp_path / "old")  # as the message says
    xla_ckpt.save(tmp_path, "step-1", {"w": torch.zeros(2)})
    assert xla_ckpt.restore(tmp_path).tree["w"][0] == 0


def test_what_another_library_has_not_ended_is_replaced_and_told(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A job that was killed in a save comes to the same step again."""
    xla_ckpt.save_checkpoint(tmp_path, "step_1", {"w": torch.ones(2)}, layout="xser")
    for name in ("manifest.json", "commit_success.txt", "done"):
        (tmp_path / "step_1" / name).unlink()
    assert xla_ckpt.list_tags(tmp_path) == []
    xla_ckpt.save(tmp_path, "step_1", {"w": torch.zeros(2)})
    assert "began to save as tag step_1 will be replaced" in caplog.text
    assert xla_ckpt.restore(tmp_path).tree["w"][0] == 0


def test_a_path_and_a_tag_that_are_swapped_are_told(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    xla_ckpt.save("runs", "step_1", {"w": torch.ones(2)})
    with pytest.raises(xla_ckpt.UsageError, match="the path and the tag seem to be swapped.*runs is a directory with"):
        xla_ckpt.save_checkpoint("step_2", "runs", torch.nn.Linear(2, 2))
    assert [p.name for p in tmp_path.iterdir()] == ["runs"]


def _of_dcp(place: pathlib.Path) -> None:
    dcp.save({"model": {"w": torch.ones(2)}, "step": 1}, checkpoint_id=place)


def _of_torch_checkpointing(place: pathlib.Path) -> None:
    xla_ckpt.save_checkpoint(place.parent, place.name, {"w": torch.ones(2)}, layout="torch_checkpointing")
    (place / "manifest.json").unlink()
    (place / "_CHECKPOINT_METADATA").unlink()


def _of_hugging_face(place: pathlib.Path) -> None:
    place.mkdir(parents=True)
    save_file({"w": torch.ones(2)}, place / "model.safetensors")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [_of_dcp, _of_torch_checkpointing, _of_hugging_face])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_checkpoint_of_another_library_is_no_root(tmp_path: pathlib.Path, make: object, asynchronous: bool) -> None:
    """Tags in it would hide it: it was the tag before, and a root without it then."""
    assert callable(make)
    make(tmp_path / "runs" / "step_7")
    before = _content(tmp_path)
    message = f"is a checkpoint .*, and no root of tags.*Pass {tmp_path}/runs, and the name of the new tag"
    with pytest.raises(xla_ckpt.UsageError, match=message):
        xla_ckpt.save_checkpoint(tmp_path / "runs" / "step_7", "a", torch.nn.Linear(2, 2), async_save=asynchronous)
    with pytest.raises(xla_ckpt.UsageError, match=message):
        xla_ckpt.convert(tmp_path / "runs" / "step_7", tmp_path / "runs" / "step_7", to="native", as_tag="a")
    assert _content(tmp_path) == before


@pytest.mark.filterwarnings("ignore")
def test_a_root_stays_one_whatever_is_written_into_it(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    root = tmp_path / "lm"
    xla_ckpt.save_checkpoint(root, "step_1", torch.nn.Linear(2, 2))
    xla_ckpt.export_hf(root, tmp_path / "hf")
    (tmp_path / "hf" / "model.safetensors").rename(root / "model.safetensors")  # as a trainer's save_model does
    assert xla_ckpt.load_checkpoint(root, model=torch.nn.Linear(2, 2)).report.tag == "step_1"
    _of_dcp(root)
    caplog.clear()
    assert xla_ckpt.load_checkpoint(root, model=torch.nn.Linear(2, 2)).report.tag == "step_1"
    assert "is a checkpoint of torch.distributed.checkpoint, and a root of tags, too: its tags are taken" in caplog.text
    xla_ckpt.save_checkpoint(root, "step_2", torch.nn.Linear(2, 2))
    assert xla_ckpt.restore(tmp_path, "lm").tree["extras"] == {"step": 1}, "which the warning says how to load"
