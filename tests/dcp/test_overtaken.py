"""A save that waits before it commits, and goes on when another job has saved the same checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import xla_ckpt
from tests.nursery import Call, bear
from tests.runs import environment
from xla_ckpt import dcp
from xla_ckpt.storage.local import LocalStore
from xla_ckpt.tags.root import Transaction

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

LOOK, MOVE = "before it looks at what is there", "before it takes the name"


def save(path: Path, number: float) -> None:
    dcp.save({"w": torch.full((3,), number)}, checkpoint_id=path)


def waits(folder: Path, instant: str, exchanges: bool) -> str:
    """Save, and wait at an instant of the commit until another process has done its part."""
    commit, exchange, rename = Transaction.commit, LocalStore.exchange, LocalStore.rename
    todo = [instant]

    def stop(at: str) -> None:
        if at in todo:
            todo.clear()
            (folder / "waits").write_text("now")
            (folder / "go").read_text()

    def commits(self: Transaction) -> float:
        stop(LOOK)
        return commit(self)

    def exchanges_names(self: LocalStore, one: str, other: str) -> bool:
        if not exchanges:
            return False
        stop(MOVE)
        return exchange(self, one, other)

    def renames(self: LocalStore, old: str, new: str) -> None:
        stop(MOVE)
        rename(self, old, new)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Transaction, "commit", commits)
        patch.setattr(LocalStore, "exchange", exchanges_names)
        patch.setattr(LocalStore, "rename", renames)
        try:
            save(folder / "root/a", 2)
        except xla_ckpt.CheckpointError as error:
            return f"{type(error).__name__}: {error.problem}"
    assert not todo
    return "saved"


OVERTAKEN = "SaveError: another job has saved this checkpoint meanwhile"


@pytest.mark.crash
@pytest.mark.parametrize("exchanges", [True, False], ids=["exchanged", "renamed twice"])
@pytest.mark.parametrize("instant", [LOOK, MOVE])
@pytest.mark.parametrize(("before", "meanwhile"), [(True, True), (False, True), (True, False), (False, False)])
def test_what_another_job_has_saved_meanwhile_stays(
    before: bool, meanwhile: bool, instant: str, exchanges: bool, tmp_path: Path
) -> None:
    path = tmp_path / "root/a"
    path.parent.mkdir()
    if before:
        save(path, 1)
    for name in ("waits", "go"):
        os.mkfifo(tmp_path / name)
    late = bear(Call.of(waits, tmp_path, instant, exchanges), env=environment(None))
    (tmp_path / "waits").read_text()
    if meanwhile:
        save(path, 3)
    (tmp_path / "go").write_text("on")
    late.communicate(60)
    assert late.value() == (OVERTAKEN if meanwhile else "saved")
    target = {"w": torch.zeros(3)}
    dcp.load(target, checkpoint_id=path)
    assert target["w"].tolist() == [3 if meanwhile else 2] * 3
    assert os.listdir(path.parent) == ["a"]
