"""Leftovers of another user, and roots that this process may only read."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from tests.jobs import run_alone
from tests.runs import names_in
from xla_ckpt.cli.main import main
from xla_ckpt.storage.system_info import get_process_identity
from xla_ckpt.tags.lease_rules import LeaseOwner

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")

SOMEBODY = 12_345


class Told(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def as_somebody(root: str, tags: list[str]) -> dict[str, Any]:
    """Save some tags as a user who owns nothing here; what is listed then, what was said, and what was raised."""
    told = Told()
    logging.getLogger("xla_ckpt").addHandler(told)
    with tempfile.TemporaryDirectory() as own:
        for tag in tags:  # all modules are imported by now, which that user may not be able to read
            xla_ckpt.save(own, tag, {"w": torch.ones(3)}, num_kept_ckpts=1)
            xla_ckpt.restore(own, tag)
            ok(own, tag)
    told.lines.clear()
    os.setgid(SOMEBODY)
    os.setuid(SOMEBODY)
    errors: list[str] = []
    for number, tag in enumerate(tags):
        try:
            xla_ckpt.save(root, tag, {"w": torch.full((3,), float(number))}, num_kept_ckpts=5)
        except xla_ckpt.CheckpointError as error:
            errors.append(f"{type(error).__name__}: {error}")
    found = {tag: xla_ckpt.restore(root, tag).tree["w"].tolist() for tag in xla_ckpt.list_tags(root)}
    return {"tags": found, "told": told.lines, "errors": errors, "bad": [t for t in found if not ok(root, t)]}


def save_theirs(root: str) -> None:
    """Save a tag as root. In a process of its own: what it tidies up later must not be what a test puts there."""
    xla_ckpt.save(root, "theirs", {"w": torch.ones(3)})


def ok(root: str, tag: str) -> bool:
    return bool(xla_ckpt.verify(root, tag).ok)


def leftover(path: Path, mode: int) -> None:
    path.mkdir(parents=True)
    (path / "file").write_bytes(b"left")
    path.chmod(mode)


@pytest.fixture
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which everybody may make files, and nobody may touch those of others."""
    path = tmp_path_factory.mktemp("shared")
    for parent in path.parents:
        if parent.stat().st_uid == os.getuid() and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o055)
    path.chmod(0o1777)
    return path


def test_leftovers_of_another_user_are_told_once_and_stay(root: Path) -> None:
    run_alone(save_theirs, str(root))
    leftover(root / ".new-killed", 0o755)
    leftover(root / ".old-theirs", 0o755)
    leftover(root / ".trash" / "doomed", 0o755)
    (root / ".trash").chmod(0o700)
    (root / ".lease").mkdir()  # of a process that has ended
    me = dataclasses.asdict(get_process_identity()) | {"token": "another", "pid": 1, "started": 0}
    (root / ".lease" / "owner.json").write_bytes(LeaseOwner(**me, since="", locked=True).to_json())
    seen = run_alone(as_somebody, str(root), ["first", "second", "first"])
    assert seen["errors"] == []
    assert seen["tags"] == {"theirs": [1.0] * 3, "second": [1.0] * 3, "first": [2.0] * 3}
    assert seen["bad"] == []
    assert (root / ".new-killed" / "file").exists()
    for name in (".new-killed", ".old-theirs", ".trash"):
        assert len([line for line in seen["told"] if f"could not remove {name} " in line]) == 1, seen["told"]
    assert len([line for line in seen["told"] if "saving without a lease" in line]) == 1, seen["told"]


def test_a_root_that_may_only_be_read(root: Path) -> None:
    run_alone(save_theirs, str(root))
    root.chmod(0o755)
    before = names_in(root)
    seen = run_alone(as_somebody, str(root), ["mine"])
    assert len(seen["errors"]) == 1
    assert "StorageError" in seen["errors"][0]
    assert "no permission to write there" in seen["errors"][0]
    assert seen["tags"] == {"theirs": [1.0] * 3}, "everything that reads works"
    assert seen["bad"] == []
    assert names_in(root) == before


def verify_all_as_somebody(root: str) -> tuple[int, str]:
    """What ``xla-ckpt verify --all`` says to that user, once all modules are imported."""
    with contextlib.redirect_stdout(io.StringIO()):
        main(["verify", root, "--all"])
    os.setgroups([])
    os.setgid(SOMEBODY)
    os.setuid(SOMEBODY)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main(["verify", root, "--all"])
    return code, out.getvalue()


def test_a_tag_that_may_not_be_read_is_not_called_damaged_and_the_others_are_verified(root: Path) -> None:
    for tag in ("a", "b"):
        xla_ckpt.save(root, tag, {"w": torch.ones(3)})
    (payload,) = (root / "a").glob("*/*.safetensors")
    payload.chmod(0)
    code, out = run_alone(verify_all_as_somebody, str(root))
    assert (code, "COULD NOT BE READ" in out, "DAMAGED" in out, "sound  b in" in out) == (1, True, False, True), out


def retire_as_somebody(root: str) -> dict[str, Any]:
    """Save and retain as a user to whom some of the tags do not belong."""
    names = [f"mine_{number}" for number in range(6)]
    saved = as_somebody_keeping(root, names[:4], 2)
    kept = xla_ckpt.list_tags(root)
    with contextlib.redirect_stdout(io.StringIO()):
        code = main(["retain", root, "--newest", "1", "--yes"])
    return {"told": saved, "kept": kept, "code": code, "retained": xla_ckpt.list_tags(root)}


def as_somebody_keeping(root: str, tags: list[str], count: int) -> list[str]:
    told = Told()
    logging.getLogger("xla_ckpt").addHandler(told)
    with tempfile.TemporaryDirectory() as own, contextlib.redirect_stdout(io.StringIO()):
        for tag in ("a", "b"):
            xla_ckpt.save(own, tag, {"w": torch.ones(3)}, num_kept_ckpts=1)
        main(["retain", own, "--newest", "1", "--yes"])
    told.lines.clear()
    os.setgroups([])
    os.setgid(SOMEBODY)
    os.setuid(SOMEBODY)
    for tag in tags:
        xla_ckpt.save(root, tag, {"w": torch.ones(3)}, num_kept_ckpts=count)
    xla_ckpt.finalize_checkpoint()
    return told.lines


def test_a_tag_of_another_user_does_not_keep_retention_from_the_others(root: Path) -> None:
    run_alone(save_theirs, str(root))
    seen = run_alone(retire_as_somebody, str(root))
    assert seen["kept"] == ["theirs", "mine_2", "mine_3"]
    assert len([line for line in seen["told"] if "could not remove theirs " in line]) == 1, seen["told"]
    assert seen["code"] != 0, "what stays that was to go is an error of the command"
    assert seen["retained"] == ["theirs", "mine_3"]
    assert ok(str(root), "theirs")
