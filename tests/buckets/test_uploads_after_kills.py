"""What a process has not uploaded when it ends, or is killed, goes up later: by the next one, or by the command."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import xla_ckpt
from tests.buckets.s3_server import S3Server
from tests.buckets.uploads import SOON, Away, Gate, attempt_of, bytes_of, damage, is_number, puts, save, tree
from tests.jobs import run_alone
from tests.nursery import Call, bear
from tests.runs import environment
from xla_ckpt.cli.main import main
from xla_ckpt.errors import UsageError
from xla_ckpt.features.local_first.upload import UPLOADS
from xla_ckpt.storage import remote_client
from xla_ckpt.tags import orbax_commit  # noqa: F401  # its process is started before the server is slow
from xla_ckpt.tags.lease import LEASES

pytestmark = pytest.mark.usefixtures("own_uploads")


def saves_and_waits(root: str, local: Path, tag: str, number: int) -> None:
    save(root, local, tag, number).uploaded()


@pytest.mark.parametrize("at", ["_CHECKPOINT_METADATA", "safetensors", "manifest.json", ".ledger"])
def test_a_kill_while_a_tag_goes_up(
    at: str, root: str, tmp_path: Path, s3: S3Server, gate: Callable[..., Gate]
) -> None:
    # Not in this process: the others, which descend from it, would save under its lease.
    env = environment({**s3.environment, "XLA_CKPT_LEASE": "take"})
    run_alone(saves_and_waits, root, tmp_path, "a", 0, env=env)
    s3.requests.clear()
    slow = gate(at)
    if at == ".ledger":  # the commit, after the manifest
        s3.faults.remove(slow)
        first = gate("manifest.json")
    killed = bear(Call.of(saves_and_waits, root, tmp_path, "b", 1), env=env)
    if at == ".ledger":
        assert first.reached.wait(SOON)
        s3.faults.append(slow)
        first.go.set()
    assert slow.reached.wait(SOON)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    slow.go.set()
    run_alone(saves_and_waits, root, tmp_path, "c", 2, env=env)
    assert xla_ckpt.list_tags(root) == ["a", "b", "c"]
    assert is_number(root, 1, "b")
    assert bytes_of(root, "b") == bytes_of(tmp_path, "b")
    of_b = {path: count for path, count in puts(s3).items() if "/b/" in path}
    assert len({attempt_of(path) for path in of_b}) == 1
    sent_again = [path for path, count in of_b.items() if count > 1]
    assert all(count <= 2 for count in of_b.values())
    assert all(at in path for path in sent_again), sent_again
    assert xla_ckpt.verify(root, "b").ok


def test_an_upload_that_another_job_has_given_up_begins_anew(
    root: str, tmp_path: Path, s3: S3Server, gate: Callable[..., Gate], monkeypatch: pytest.MonkeyPatch
) -> None:
    env = environment({**s3.environment, "XLA_CKPT_LEASE": "take"})
    slow = gate("manifest.json")
    killed = bear(Call.of(saves_and_waits, root, tmp_path, "b", 1), env=env)
    assert slow.reached.wait(SOON)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    slow.go.set()
    monkeypatch.setenv("XLA_CKPT_LEASE", "take")
    xla_ckpt.save(root, "z", tree(3))
    run_alone(saves_and_waits, root, tmp_path, "c", 2, env=env)
    assert xla_ckpt.list_tags(root) == ["b", "z", "c"]  # b and z have one number, and b was saved before
    assert is_number(root, 1, "b")
    assert len({attempt_of(path) for path in puts(s3) if "/b/" in path}) == 2


def test_the_end_of_a_process_waits_for_uploads(root: str, tmp_path: Path, s3: S3Server) -> None:
    ended = bear(Call.of(only_saves, root, tmp_path), env=environment(s3.environment))
    ended.communicate(SOON)
    assert ended.returncode == 0
    assert xla_ckpt.list_tags(root) == ["a", "b"]


def only_saves(root: str, local: Path) -> None:
    save(root, local, "a", 1)
    save(root, local, "b", 2, async_save=True)


def saves_and_is_killed(root: str, local: Path) -> None:
    import os

    remote_client.MAX_RETRIES = 0  # the store is away, which takes half a minute to find out otherwise
    save(root, local, "a", 1)
    save(root, local, "b", 2)
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_command_uploads_what_a_killed_job_has_left(
    root: str, tmp_path: Path, s3: S3Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_CKPT_LEASE", "take")
    save(root, tmp_path, "old").uploaded(SOON)
    LEASES.release_all()
    away = Away(s3)
    killed = bear(Call.of(saves_and_is_killed, root, tmp_path), env=environment(s3.environment))
    killed.communicate()
    away.is_back()
    damage(tmp_path, "a")
    UPLOADS.__init__()  # type: ignore[misc]  # as in a new process
    assert main(["upload", str(tmp_path), root, "--json"]) == 1
    told = capsys.readouterr()
    assert json.loads(told.out)["tags"] == [{"tag": "old", "done": "was there already"}]
    assert "not what was saved" in told.err
    assert xla_ckpt.list_tags(root) == ["old", "b"], "what is damaged does not keep back the others"
    assert is_number(root, 2, "b")
    xla_ckpt.Checkpoints(tmp_path).delete("a")
    assert main(["upload", str(tmp_path), root]) == 0
    assert capsys.readouterr().out == "old: was there already\nb: was there already\n"


def test_ctrl_c_ends_the_command_after_the_file_that_it_sends(
    root: str, tmp_path: Path, s3: S3Server, gate: Callable[..., Gate]
) -> None:
    for number, tag in enumerate("ab"):
        xla_ckpt.save(tmp_path, tag, tree(number))
    xla_ckpt.finalize_checkpoint()
    LEASES.release_all()
    slow = gate("safetensors")
    words = [sys.executable, "-m", "xla_ckpt", "upload", str(tmp_path), root]
    env = environment({**s3.environment, "XLA_CKPT_LEASE": "take"})
    with subprocess.Popen(words, env=env, stderr=subprocess.PIPE, text=True) as command:
        assert slow.reached.wait(SOON)
        command.send_signal(signal.SIGINT)
        assert command.stderr is not None
        assert command.stderr.readline() == "xla-ckpt: interrupted\n"
        slow.go.set()
        assert command.wait(SOON) == 130
    sent = puts(s3)
    assert len([path for path in sent if "safetensors" in path]) == 1
    assert not [path for path in sent if "manifest" in path]
    assert xla_ckpt.list_tags(root) == []
    assert main(["upload", str(tmp_path), root]) == 0
    assert xla_ckpt.list_tags(root) == ["a", "b"]
    assert set(puts(s3).values()) == {1}, "nothing is sent again"


def test_the_command_says_what_was_deleted_in_the_bucket(
    root: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, tag in enumerate("abc"):
        xla_ckpt.save(tmp_path, tag, tree(number))
    assert main(["upload", str(tmp_path), root]) == 0
    xla_ckpt.Checkpoints(root).delete("a")
    xla_ckpt.save(root, "b", tree(5))
    UPLOADS.__init__()  # type: ignore[misc]  # as in a new process
    capsys.readouterr()
    assert main(["upload", str(tmp_path), root]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "a: was uploaded before, and has been deleted there since",
        "b: was uploaded before, and has been replaced there since",
        "c: was there already",
    ]
    assert xla_ckpt.list_tags(root) == ["c", "b"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated")
def test_the_command_uploads_no_tags_of_other_libraries(
    root: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "a", no_dist=True)
    assert main(["upload", str(tmp_path), root]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "there is no tag of this library, which could be uploaded" in err
    assert "wrote the tags there: a" in err


def test_the_command_needs_a_directory_of_tags(root: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, code, told in (
        ([str(tmp_path / "none"), root], 1, "there is no checkpoint"),
        ([root, str(tmp_path)], 2, "tags go from a directory (local) to an object store (path)"),
    ):
        assert main(["upload", *words]) == code
        assert told in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
    xla_ckpt.save(tmp_path, "a", tree(1))
    assert main(["upload", str(tmp_path), root]) == 0
    assert capsys.readouterr().out == "a: uploaded\n"
    with pytest.raises(UsageError, match="has tags of another root"):
        save(f"{root}2", tmp_path, "b")
    assert main(["upload", str(tmp_path), f"{root}2"]) == 2
    assert "has tags of another root" in capsys.readouterr().err
