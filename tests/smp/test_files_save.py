"""smp.save: names, whole files or none, the note beside each, and parts of different saves."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import neuron_compat.smp as smp
import xla_ckpt
from neuron_compat.smp.stored import StoredState
from tests.jobs import run_alone, run_on_ranks
from tests.runs import names_in
from tests.smp.made import write_parts
from tests.smp.test_files_load import alone, begin, caught, plain  # noqa: F401  # a fixture
from xla_ckpt.formats.smp import save_notes
from xla_ckpt.formats.smp.save_notes import find_set_parts
from xla_ckpt.formats.torch_save.serialization import check_whole_file


def names(folder: Path) -> list[str]:
    return names_in(folder)


def saves_everywhere(rank: int, root: str, pp: int, tp: int) -> None:
    begin(pp, tp)
    state = {"w": torch.full((2,), float(rank)), "rank": rank}
    if smp.rdp_rank() == 0:
        smp.save(state, f"{root}/deep/er/a.pt")
        smp.save(state, f"{root}/new.pt", naming="1.12")
    smp.save(state, f"{root}/v3", v3=True)
    smp.save(state, f"{root}/full.pt", partial=False)


@pytest.mark.parametrize(
    ("pp", "tp", "deep", "new", "v3"),
    [
        (2, 1, ["a.pt_0", "a.pt_1"], ["new.pt_0_0.pt", "new.pt_1_0.pt"],
         ["v3_0_0_0.pt", "v3_0_0_1.pt", "v3_1_0_0.pt", "v3_1_0_1.pt"]),
        (1, 2, ["a.pt_0_0", "a.pt_0_1"], ["new.pt_0_0.pt", "new.pt_0_1.pt"],
         ["v3_0_0_0.pt", "v3_0_0_1.pt", "v3_0_1_0.pt", "v3_0_1_1.pt"]),
    ],
)  # fmt: skip
def test_what_is_on_disk(tmp_path: Path, pp: int, tp: int, deep: list[str], new: list[str], v3: list[str]) -> None:
    run_on_ranks(saves_everywhere, 4, str(tmp_path), pp, tp)
    assert names(tmp_path / "deep/er") == sorted([*deep, *map(save_notes.get_note_name, deep)])
    beside = [save_notes.get_note_name(name) for name in (*new, *v3)]
    assert names(tmp_path) == sorted(["deep", "full.pt", *new, *v3, *beside])
    assert torch.load(tmp_path / "full.pt")["rank"] == 0  # only rank 0 wrote it
    for prefix in ("deep/er/a.pt", "new.pt", "v3"):
        parts = find_set_parts(f"{tmp_path}/{prefix}")
        assert len({part.saved.save for part in parts.values() if part.saved}) == 1
        for numbers, part in parts.items():
            assert part.saved is not None
            assert tuple(part.saved.rank.values())[: len(numbers)] == numbers[:2] + numbers[2:]
            assert dict(part.saved.sizes) == {"pp": pp, "tp": tp, "rdp": 2}
            check_whole_file(part.file)


def test_what_is_saved_is_what_torch_save_saves(tmp_path: Path, alone: Any) -> None:  # noqa: F811
    tied = torch.ones(2)
    value = {"a": tied, "b": tied, "n": 1}
    alone.save(value, f"{tmp_path}/c.pt", pickle_module=pickle, pickle_protocol=4)
    for found in (torch.load(tmp_path / "c.pt_0", weights_only=False), alone.load(f"{tmp_path}/c.pt")):
        assert plain(found) == plain(value)
        assert found["a"].data_ptr() == found["b"].data_ptr()
    alone.save(value, f"{tmp_path}/full", partial=False)
    assert plain(torch.load(tmp_path / "full")) == plain(value)


def test_what_was_loaded_can_be_saved_again(tmp_path: Path, alone: Any) -> None:  # noqa: F811
    alone.save({"m": {"w": torch.ones(2)}}, f"{tmp_path}/c.pt")
    found = alone.load(f"{tmp_path}/c.pt")
    assert isinstance(found["m"], StoredState)
    alone.save(found, f"{tmp_path}/d.pt")
    assert plain(torch.load(tmp_path / "d.pt_0")) == {"m": {"w": [1, 1]}}


def test_a_file_has_crc32s_whatever_the_program_has_set(tmp_path: Path, alone: Any) -> None:  # noqa: F811
    torch.serialization.set_crc32_options(False)
    try:
        alone.save({"w": torch.arange(1000.0)}, f"{tmp_path}/c.pt")
        assert not torch.serialization.get_crc32_options()
    finally:
        torch.serialization.set_crc32_options(True)
    file = tmp_path / "c.pt_0"
    data = bytearray(file.read_bytes())
    data[data.index(torch.tensor([500.0]).numpy().tobytes())] ^= 1
    file.write_bytes(data)
    with pytest.raises(xla_ckpt.CorruptCheckpointError, match="CRC-32"):
        alone.load(f"{tmp_path}/c.pt")


def test_what_cannot_be_saved_leaves_the_file_that_was_there(tmp_path: Path, alone: Any) -> None:  # noqa: F811
    alone.save({"n": 1}, f"{tmp_path}/c.pt")
    with pytest.raises(xla_ckpt.UnsupportedStateError, match="cannot be pickled"):
        alone.save({"n": lambda: 2}, f"{tmp_path}/c.pt")
    with pytest.raises(smp.SMPInvalidArgumentError, match="no such naming"):
        alone.save({"n": 2}, f"{tmp_path}/c.pt", naming="2")
    with pytest.raises(smp.SMPInvalidArgumentError, match="a string"):
        alone.save({"n": 2}, tmp_path / "c.pt")
    with pytest.raises(smp.SMPInvalidArgumentError, match="Mount the bucket"):
        alone.save({"n": 2}, "s3://bucket/c.pt")
    with pytest.raises(smp.SMPInvalidArgumentError, match="CRC-32"):
        alone.save({"n": 2}, f"{tmp_path}/c.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(xla_ckpt.StorageError):
        alone.save({"n": 2}, f"{tmp_path}/file/c.pt")
    assert alone.load(f"{tmp_path}/c.pt")["n"] == 1
    assert names(tmp_path) == [".c.pt_0.xla_ckpt.json", "c.pt_0", "file"]


@pytest.mark.xla
def test_xla_tensors_are_stored_as_cpu_tensors(tmp_path: Path, alone: Any) -> None:  # noqa: F811
    import torch_xla

    tied = torch.arange(4.0, device=torch_xla.device()) * 2
    alone.save({"a": [tied], "b": tied, "c": torch.ones(1)}, f"{tmp_path}/c.pt")
    found = torch.load(tmp_path / "c.pt_0")
    assert found["a"][0].device.type == "cpu"
    assert plain(found["b"]) == [0, 2, 4, 6]
    assert found["a"][0].data_ptr() == found["b"].data_ptr()


def saves_without_a_store(rank: int, root: str) -> bool:
    import torch.distributed.distributed_c10d as c10d

    from neuron_compat.smp import files

    begin(2, 1)
    smp.save({"n": 1}, f"{root}/c.pt")

    class Gone:
        def compare_set(self, *_: Any) -> bytes:
            raise RuntimeError("connection reset by peer")

    files._job_ids.clear()
    c10d._get_default_store = Gone  # type: ignore[assignment]
    smp.save({"n": 2}, f"{root}/c.pt")
    return bool(save_notes.parse_notes(Path(f"{root}/.c.pt_{rank}.xla_ckpt.json").read_bytes()))


def test_a_rank_saves_when_the_store_of_the_job_is_gone(tmp_path: Path, alone: Any) -> None:  # noqa: F811
    """Without a launcher the store is in the process of rank 0, which may have ended. Nothing is noted then."""
    assert run_on_ranks(saves_without_a_store, 2, str(tmp_path)) == [False, False]
    assert alone.load(f"{tmp_path}/c.pt")["n"] == 2


# -- killed at any moment


def dies_at(moment: int, f: str) -> None:
    """Save, and be killed at the n-th system call that changes the directory, or makes something durable."""
    begin(1, 1)
    left = iter(range(moment))

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if next(left, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        return call

    for name in ("fsync", "rename"):
        setattr(os, name, counted(getattr(os, name)))
    smp.save({"w": torch.full((100,), 2.0)}, f)


def test_a_kill_leaves_the_old_file_or_the_new_one(tmp_path: Path, alone: Any) -> None:  # noqa: F811
    seen = []
    for moment in range(20):
        f = f"{tmp_path}/{moment}/c.pt"
        alone.save({"w": torch.full((100,), 1.0)}, f)
        try:
            run_alone(dies_at, moment, f)
            died = False
        except Exception:
            died = True
        part = find_set_parts(f)[(0,)]
        check_whole_file(part.file)
        assert part.saved is not None, f"the note is not that of the file after {moment} calls"
        assert len(save_notes.parse_notes(Path(save_notes.get_note_name(part.file)).read_bytes())) <= 2
        seen.append(alone.load(f)["w"][0].item())
        alone.save({"w": torch.full((100,), 3.0)}, f)  # what was left over does not stand in the way
        assert alone.load(f)["w"][0].item() == 3
        if not died:
            break
    assert len(seen) > 6
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (1, 2)


# -- parts of different saves


def saves_in_turn(rank: int, root: str, value: float) -> None:
    begin(2, 1)
    for n in range(2):
        smp.save({"w": torch.full((3,), value + n)}, f"{root}/{n}/c.pt")


def test_parts_of_two_saves_are_an_error(tmp_path: Path, alone: Any) -> None:  # noqa: F811
    run_on_ranks(saves_in_turn, 2, str(tmp_path / "one"), 1.0)
    run_on_ranks(saves_in_turn, 2, str(tmp_path / "other"), 5.0)
    mixed = tmp_path / "one/0"
    for name in ("c.pt_1", ".c.pt_1.xla_ckpt.json"):
        shutil.copy(tmp_path / "other/0" / name, mixed / name)
    with pytest.raises(xla_ckpt.CorruptCheckpointError, match="the parts are of two saves") as error:
        alone.load(f"{mixed}/c.pt")
    assert "c.pt_0 of " in str(error.value)
    assert "c.pt_1 of " in str(error.value)
    alone.load(f"{tmp_path}/other/0/c.pt")


def saves_a_pipeline(rank: int, root: str, guarded: bool) -> tuple[str, str]:
    begin(2, 1)
    if rank == 0 or not guarded:
        smp.save({"w": torch.full((3,), float(rank)), "saved": "small"}, f"{root}/c.pt")
    torch.distributed.barrier()
    return caught(lambda: smp.load(f"{root}/c.pt"))


def saves_a_longer_pipeline(rank: int, root: str) -> None:
    begin(4, 1)
    smp.save({"w": torch.full((3,), float(rank)), "saved": "large"}, f"{root}/c.pt")


def test_what_a_larger_job_left_is_left_out(tmp_path: Path, alone: Any) -> None:  # noqa: F811
    """SMP refuses these files, or takes those of two saves for one."""
    run_on_ranks(saves_a_longer_pipeline, 4, str(tmp_path))
    assert run_on_ranks(saves_a_pipeline, 2, str(tmp_path), False) == [("nothing", "")] * 2
    assert alone.load(f"{tmp_path}/c.pt")["saved"] == "small"
    assert xla_ckpt.verify(f"{tmp_path}/c.pt").ok
    assert "small" in str(xla_ckpt.restore(f"{tmp_path}/c.pt").tree)


def test_a_save_that_one_rank_missed_is_an_error_on_all(tmp_path: Path) -> None:
    write_parts(tmp_path, "1.6", 2, 1)
    run_on_ranks(saves_a_longer_pipeline, 4, str(tmp_path))
    found = run_on_ranks(saves_a_pipeline, 2, str(tmp_path), True)
    assert found[0] == found[1]
    assert found[0][0] == "CorruptCheckpointError"
    assert "the parts are of two saves" in found[0][1]


def saves_under_the_wrong_guard(rank: int, root: str) -> tuple[str, str]:
    begin(1, 2)
    if smp.dp_rank() == 0:  # with tensor parallelism: the first tensor-parallel rank only
        smp.save({"w": torch.full((3,), float(rank))}, f"{root}/c.pt")
    torch.distributed.barrier()
    return caught(lambda: smp.load(f"{root}/c.pt"))


def test_the_wrong_guard_is_named_on_all_ranks(tmp_path: Path, alone: Any) -> None:  # noqa: F811
    found = run_on_ranks(saves_under_the_wrong_guard, 4, str(tmp_path))
    assert all(each == found[0] for each in found)
    assert "Parts are missing: 0_1." in found[0][1]
    assert "Call smp.save under `if smp.rdp_rank() == 0`, not `if smp.dp_rank() == 0`." in found[0][1]
    with pytest.raises(smp.SMPCheckpointError, match="rdp_rank"):
        alone.load(f"{tmp_path}/c.pt")
