"""torch_checkpointing's manager on our storage: real ranks, real kills, and the package's own loads as the judge."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from tests.fixtures.torch_checkpointing import package
from tests.integrations.environment import needs
from tests.jobs import run_on_ranks
from tests.runs import ROOT, environment
from tests.same import differences
from xla_ckpt.errors import CorruptCheckpointError, SaveError, UsageError

pytestmark = needs("torch_checkpointing")


def manager(**options: Any) -> Any:
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.config import SyncCheckpointSaverConfig

    from xla_ckpt.integrations.torch_checkpointing import StorageConfig

    options = {"save": SyncCheckpointSaverConfig(), "storage_config": StorageConfig(), **options}
    return CheckpointManager(CheckpointManager.Config(**options))


def state() -> dict[str, Any]:
    return {"model": dict(package.model().state_dict()), "step": 7}


def empty() -> dict[str, Any]:
    return {"model": {name: torch.zeros_like(value) for name, value in state()["model"].items()}, "step": 0}


def names(path: Path) -> list[str]:
    return sorted(file.relative_to(path).as_posix() for file in path.rglob("*"))


def flip(path: Path, what: bytes) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(what)] ^= 1
    path.write_bytes(data)


WEIGHT = package.model().state_dict()["0.weight"].numpy().tobytes()[:24]


def test_a_directory_has_digests_and_every_load_compares_them(tmp_path: Path) -> None:
    manager().save(str(tmp_path / "step_1"), state())
    assert names(tmp_path) == ["step_1", *(f"step_1/{n}" for n in ("model_0.pt", "step_0.pt", "xla_ckpt_digests.json"))]
    result = manager().load(str(tmp_path / "step_1"), into=empty(), strict=True)
    assert differences(result, state()) == []
    report = xla_ckpt.verify(tmp_path, "step_1")
    assert (report.problems, report.digests, report.files) == ([], True, 2)
    assert differences(xla_ckpt.restore(tmp_path).tree["model"], state()["model"], order=False) == []
    flip(tmp_path / "step_1/model_0.pt", WEIGHT)
    with pytest.raises(CorruptCheckpointError, match="damaged"):
        manager().load(str(tmp_path / "step_1"), into=empty())
    with pytest.raises(CorruptCheckpointError, match="damaged"):
        xla_ckpt.restore(tmp_path)
    (problem,) = xla_ckpt.verify(tmp_path, "step_1").problems
    assert problem.file == "model_0.pt"


def resharded(rank: int, path: str) -> list[str]:
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.metadata_manager import DefaultMetadataManager
    from torch_checkpointing.schema import ItemSpec

    def gathered(_: Any, data: Any, group: Any = None) -> dict[int, Any]:  # noqa: ARG001  # its own needs CUDA
        everyone: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everyone, data)
        return dict(enumerate(everyone))

    DefaultMetadataManager._all_gather_pickled_data = gathered
    items = {"model": ItemSpec(resharder=DefaultResharder())}
    trained = package.spread(package.model(), "items")
    manager(items=items).save(path, {"model": trained.state_dict()})
    torch.distributed.barrier()  # the other ranks do not wait for the rename
    into = {name: torch.zeros_like(value) for name, value in package.model().state_dict().items()}
    manager(items=items).load(path, into={"model": into}, strict=True)
    wrong = differences(into, dict(package.model().state_dict()))
    torch.distributed.barrier()
    if rank == 0:
        flip(Path(path) / "model_0.pt", WEIGHT)
    torch.distributed.barrier()
    try:
        manager(items=items).load(path, into={"model": into})
    except CorruptCheckpointError:
        return wrong
    return [*wrong, "the damage was loaded"]


def test_ranks_write_one_directory_and_resharded_loads_compare_it(tmp_path: Path) -> None:
    assert run_on_ranks(resharded, 2, str(tmp_path / "step_1")) == [[], []]
    assert [problem.file for problem in xla_ckpt.verify(tmp_path, "step_1").problems] == ["model_0.pt"]


class Unpicklable:
    """An object that fails a save when its turn comes."""

    def __reduce__(self) -> Any:
        raise OSError(28, "No space left on device")


def one_fails(rank: int, root: str) -> str:
    saver = manager()
    values = {"a": state(), "b": Unpicklable() if rank == 1 else 1}
    try:
        saver.save(f"{root}/step_1", values)
    except SaveError as error:
        return str(error)
    except OSError:
        # A barrier of the package counts the saves that came to it: rank 0 takes this save for the rest of the first.
        saver.save(f"{root}/step_2", {"a": state()})
    return ""


def test_a_save_of_which_a_rank_has_failed_is_never_committed(tmp_path: Path) -> None:
    verdict, _ = run_on_ranks(one_fails, 2, str(tmp_path))
    assert "not written a file to its end" in verdict
    assert "b_1.pt" in verdict
    assert xla_ckpt.list_tags(tmp_path) == []


class Deadly:
    """An object that kills the process which saves it."""

    def __reduce__(self) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)
        return int, ()


def killed(root: str) -> None:
    manager().save(f"{root}/step_1", {"old": state(), "model": state()["model"], "z": Deadly()})


def test_what_a_killed_save_has_left_is_in_no_later_one(tmp_path: Path) -> None:
    code = f"from tests.integrations.test_torch_checkpointing import killed\nkilled({str(tmp_path)!r})"
    paths = os.pathsep.join([str(ROOT), *sys.path])
    env = {**environment(), "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", code], env=env, check=False, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert {"tmp_step_1/old_0.pt", "tmp_step_1/z_0.pt"} <= {*names(tmp_path)}
    assert xla_ckpt.list_tags(tmp_path) == []
    manager().save(str(tmp_path / "step_1"), state())
    assert names(tmp_path / "step_1") == ["model_0.pt", "step_0.pt", "xla_ckpt_digests.json"]
    assert xla_ckpt.verify(tmp_path, "step_1").ok


def past_the_storage(args: Any) -> None:
    (Path(args.path) / "note.txt").write_text("ours")


def through_the_storage(args: Any) -> None:
    with args.storage.stream_write(Path(args.path) / "note.part") as stream:
        stream.write(b"ours")
    args.storage.rename(Path(args.path) / "note.part", Path(args.path) / "note.txt")
    args.storage.write(Path(args.path) / "draft.txt", b"away")
    args.storage.delete(Path(args.path) / "draft.txt")


def test_what_callbacks_write_is_digested_too_or_refused(tmp_path: Path) -> None:
    with pytest.raises(SaveError, match="past this storage"):
        manager(pre_finalize_callback=past_the_storage).save(str(tmp_path / "step_1"), state())
    assert xla_ckpt.list_tags(tmp_path) == []
    manager(pre_finalize_callback=through_the_storage).save(str(tmp_path / "step_2"), state())
    (tmp_path / "step_2/note.txt").write_bytes(b"ourS")
    assert [problem.file for problem in xla_ckpt.verify(tmp_path, "step_2").problems] == ["note.txt"]


def test_a_committed_directory_is_not_replaced(tmp_path: Path) -> None:
    manager().save(str(tmp_path / "step_1"), state())
    with pytest.raises(FileExistsError):
        manager().save(str(tmp_path / "step_1"), {"step": 8})
    assert xla_ckpt.restore(tmp_path).tree["extras"] == {"step": 7}
    assert xla_ckpt.verify(tmp_path, "step_1").ok


def test_a_file_that_cannot_be_made_durable_fails_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: int) -> None:
        raise OSError(5, "Input/output error")

    saver = manager()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refused)
        with pytest.raises(OSError, match="Input/output"):
            saver.save(str(tmp_path / "step_1"), state())
    (record,) = [json.loads(path.read_text()) for path in tmp_path.rglob("model_0.pt.json")]
    assert record["file"] is None
    assert xla_ckpt.list_tags(tmp_path) == []


def test_ranks_that_cannot_agree_on_a_run_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="init_process_group"):
        manager()


def test_an_asynchronous_save_writes_through_it_in_a_process_of_its_own(tmp_path: Path) -> None:
    from torch_checkpointing.config import AsyncCheckpointSaverConfig
    from torch_checkpointing.staging import CheckpointStagerConfig

    plain = CheckpointStagerConfig(use_pinned_memory=False, use_shared_memory=False, use_non_blocking_copy=False)
    saver = manager(save=AsyncCheckpointSaverConfig(staging_config=plain))
    saver.save(str(tmp_path / "step_1"), state()).result()
    saver.close()
    assert xla_ckpt.verify(tmp_path, "step_1").digests
    assert differences(manager().load(str(tmp_path / "step_1"), into=empty()), state()) == []
