"""Steps for orbax's own managers of checkpoints: what they find, restore and retire, and how they go on."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as v0
import pytest
from orbax.checkpoint import v1

import xla_ckpt
from tests.formats import orbax_restores
from tests.formats.test_orbax import assert_equal
from tests.formats.writing import as_job
from xla_ckpt import Mesh
from xla_ckpt.cli.main import main

ITEMS = {"orbax-manager": "default", "orbax-v1": "state"}


def state_at(step: int) -> dict[str, Any]:
    """What a run has at a step."""
    return {"params": {"w": np.arange(12, dtype=np.float32).reshape(3, 4) + step}, "none": None, "step": step}


def saved(root: Path, *steps: int, layout: str, prefix: str = "") -> Path:
    """The root directory with our saves."""
    for step in steps:
        xla_ckpt.save(root, f"{prefix}{step}", state_at(step), layout=layout)
    return root


def test_a_manager_goes_on(tmp_path: Path) -> None:
    root = saved(tmp_path / "run", 9, 10, layout="orbax-manager")
    options = v0.CheckpointManagerOptions(max_to_keep=2)
    with v0.CheckpointManager(root) as manager:
        assert_equal(manager.restore(9, args=v0.args.PyTreeRestore()), state_at(9))
    with v0.CheckpointManager(root, options=options) as manager:
        assert (manager.all_steps(), manager.latest_step()) == ([9, 10], 10)
        assert_equal(manager.restore(10), state_at(10))
        assert_equal(manager.restore(9, args=v0.args.StandardRestore(state_at(0))), state_at(9))
        assert manager.save(11, args=v0.args.StandardSave(state_at(11)))
        manager.wait_until_finished()
        assert manager.all_steps() == [10, 11]
        assert_equal(manager.restore(11), state_at(11))
    assert not (root / "9").exists()
    assert xla_ckpt.list_tags(root) == ["11", "10"]  # ours are behind those of others
    assert_equal(xla_ckpt.restore(root, "11").tree, state_at(11))
    saved(root, 12, layout="orbax-manager")
    with v0.CheckpointManager(root, options=options) as manager:
        assert (manager.all_steps(), manager.latest_step()) == ([10, 11, 12], 12)
        assert_equal(manager.restore(12), state_at(12))


class Meanwhile(v0.CheckpointHandler):  # type: ignore[misc]
    """An item of a step that is a call in the middle of orbax's save, in whose directory it leaves a file."""

    def save(self, directory: Path, args: Calls) -> None:
        args.meanwhile()
        (directory / "called").write_text("yes")

    def restore(self, directory: Path, args: Any = None) -> Any:
        raise NotImplementedError


@v0.args.register_with_handler(Meanwhile, for_save=True, for_restore=True)
@dataclass
class Calls(v0.args.CheckpointArgs):  # type: ignore[misc]
    """What such an item is given."""

    meanwhile: Callable[[], None]


def test_nothing_is_removed_of_what_orbax_is_writing(tmp_path: Path) -> None:
    """`clean` and each save of ours took it for the rest of a killed save."""
    root = saved(tmp_path, 1, layout="native")
    (root / ".new-2").mkdir()
    during: list[list[str]] = []

    def saves_and_cleans() -> None:
        saved(root, 3, layout="native")
        xla_ckpt.finalize_checkpoint()
        assert main(["clean", str(root)]) == 0
        assert not (root / ".new-2").exists()
        during.append([name.name for name in root.iterdir() if "orbax-checkpoint-tmp" in name.name])
        assert xla_ckpt.list_tags(root) == ["1", "3"]

    items = v0.args.Composite(state=v0.args.StandardSave(state_at(2)), calls=Calls(saves_and_cleans))
    with v0.CheckpointManager(root) as manager:
        manager.save(2, args=items)
    assert (root / "2" / "calls" / "called").exists()
    assert during == [["2.orbax-checkpoint-tmp"]]
    assert_equal(xla_ckpt.restore(root, "2").tree, state_at(2))


def _restored(root: Path) -> str | None:
    return xla_ckpt.restore(root).report.tag


def _loaded(root: Path) -> str | None:
    return xla_ckpt.load_checkpoint(root).report.tag


def _converted(root: Path) -> str | None:
    return xla_ckpt.convert(root, root.with_name("to")).tag


def _shown(root: Path) -> str | None:
    return xla_ckpt.Checkpoints(root).show().tag


def _verified(root: Path) -> str | None:
    return xla_ckpt.verify(root).tag


def _compared(root: Path) -> str | None:
    return "7" if xla_ckpt.diff(root, root, tag_b="7").same else None


def _latest(root: Path) -> str | None:
    return xla_ckpt.Checkpoints(root).latest()


@pytest.mark.parametrize(
    "call", [_restored, _loaded, _converted, _shown, _verified, _compared, _latest, xla_ckpt.latest_tag]
)
def test_whoever_takes_the_newest_says_that_a_manager_went_on(
    tmp_path: Path, call: Callable[[Path], str | None], caplog: pytest.LogCaptureFixture
) -> None:
    root = saved(tmp_path / "run", 7, layout="orbax-manager")
    with v0.CheckpointManager(root) as manager:
        assert manager.save(8, args=v0.args.StandardSave(state_at(8)))
    caplog.clear()
    assert call(root) == "7"
    told = [record.getMessage() for record in caplog.records if record.name.startswith("xla_ckpt")]
    told = [text for text in told if "nothing was loaded" not in text]  # a load into no object says so
    assert [text for text in told if "tag 8, in the form of orbax, has a newer time stamp than 7" in text] == told, told
    assert len(told) == 1


def test_a_tag_that_is_not_there_names_those_of_all_libraries(tmp_path: Path) -> None:
    root = saved(tmp_path / "run", 7, layout="orbax-manager")
    with v0.CheckpointManager(root) as manager:
        assert manager.save(8, args=v0.args.StandardSave(state_at(8)))
    with pytest.raises(xla_ckpt.NoCheckpointError, match=r"oldest first: 7\..* orbax wrote others there: 8\."):
        xla_ckpt.restore(root, "9")


def test_a_checkpointer_of_v1_goes_on(tmp_path: Path) -> None:
    root = saved(tmp_path / "run", 9, 10, layout="orbax-v1")
    policy = v1.training.preservation_policies.LatestN(2)
    with v1.training.Checkpointer(root, preservation_policy=policy) as checkpointer:
        assert checkpointer.latest is not None
        assert checkpointer.latest.step == 10
        assert_equal(checkpointer.load(), state_at(10))
        assert_equal(checkpointer.load_checkpointables(9), {"state": state_at(9)})
        checkpointer.save(11, state_at(11))
        assert [checkpoint.step for checkpoint in checkpointer.checkpoints] == [10, 11]
    assert not (root / "9").exists()
    assert_equal(v1.load(root / "10"), state_at(10))


def test_names_with_a_prefix(tmp_path: Path) -> None:
    for tag in ("step_009", "step_010"):
        xla_ckpt.save(tmp_path / "run", tag, state_at(int(tag[-3:])), layout="orbax-manager")
    options = v0.CheckpointManagerOptions(step_prefix="step", step_format_fixed_length=3)
    with v0.CheckpointManager(tmp_path / "run", options=options) as manager:
        assert manager.all_steps() == [9, 10]
        assert_equal(manager.restore(9), state_at(9))


@pytest.mark.parametrize("layout", ITEMS)
def test_onto_eight_devices_from_many_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    mesh, whole = Mesh(dp=2, tp=2), np.arange(48, dtype=np.float32).reshape(12, 4)

    def save(rank: int) -> None:
        at = mesh.coordinates(rank)["tp"] * 6
        state = {"w": whole[at : at + 6].copy(), "step": 7}
        xla_ckpt.save(tmp_path / "run", "7", state, mesh=mesh, shardings=[("w", ("tp",))], layout=layout).result()

    as_job(monkeypatch, mesh, "save", save)
    assert xla_ckpt.verify(tmp_path / "run").ok
    trees = orbax_restores.restored(tmp_path / "run" / "7", tmp_path / "result", ITEMS[layout])
    for tree in trees.values():
        assert_equal(tree, {"w": whole, "step": 7})


@pytest.mark.parametrize("layout", ITEMS)
def test_a_conversion_makes_a_step(tmp_path: Path, layout: str, capsys: pytest.CaptureFixture[str]) -> None:
    xla_ckpt.save(tmp_path / "native", "step_10", state_at(10))
    assert main(["convert", str(tmp_path / "native"), str(tmp_path / "run"), "--to", layout, "--as", "10"]) == 0
    assert_equal(v1.load(tmp_path / "run" / "10"), state_at(10))
    assert_equal(xla_ckpt.restore(tmp_path / "run").tree, state_at(10))
    handlers = json.loads((tmp_path / "run" / "10" / "_CHECKPOINT_METADATA").read_text())["item_handlers"]
    assert list(handlers) == [ITEMS[layout]]
    assert main(["ls", str(tmp_path / "run"), "--json"]) == 0
    assert layout in capsys.readouterr().out


def refused(call: Callable[[], object]) -> xla_ckpt.CheckpointError:
    with pytest.raises(xla_ckpt.CheckpointError) as error:
        call()
    return error.value


@pytest.mark.parametrize("tag", ["best", "step10", "step_", "_1", "1.0", "10_a"])
def test_names_that_are_no_step(tmp_path: Path, tag: str) -> None:
    error = refused(lambda: xla_ckpt.save(tmp_path / "run", tag, state_at(1), layout=["orbax-manager", "native"]))
    assert isinstance(error, xla_ckpt.InvalidTagError)
    assert error.tag == tag
    xla_ckpt.save(tmp_path / "native", tag, state_at(1))
    assert str(tag) in str(refused(lambda: xla_ckpt.convert(tmp_path / "native", tmp_path / "run", to="orbax-v1")))
    assert not (tmp_path / "run").exists()


def test_no_manager_would_look_into_this_librarys_object_stores() -> None:
    error = refused(lambda: xla_ckpt.save("memory://orbax-steps", "1", state_at(1), layout="orbax-manager"))
    assert isinstance(error, xla_ckpt.UsageError)
    assert "is for directories" in str(error)
