"""Files of SageMaker model parallel's that are no whole state: one clear error on all ranks, and nothing is changed."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

import xla_ckpt
from tests.formats.smp_files import GENERATIONS, flip, load_info, toy_content, toy_optimizer, write_set, write_tag
from tests.formats.test_smp_names import MESHES
from tests.formats.writing import as_job, toy
from tests.topology.state import differences
from xla_ckpt import Mesh
from xla_ckpt.cli.main import main
from xla_ckpt.errors import CheckpointError, CorruptCheckpointError
from xla_ckpt.formats.smp.save_notes import (
    SaveNote,
    compute_directory_digest,
    dump_notes,
    get_note_name,
    parse_notes,
    update_notes,
)

PP2TP2 = Mesh(pp=2, tp=2)


def refused(monkeypatch: pytest.MonkeyPatch, path: Path, kind: type[Exception], match: str) -> CheckpointError:
    """A load on two ranks raises this on both, and changes nothing."""
    states = [toy(Mesh(tp=2), rank, blank=True) for rank in range(2)]
    with pytest.raises(kind, match=match) as raised:
        as_job(monkeypatch, Mesh(tp=2), "load", lambda rank: xla_ckpt.load_checkpoint(path, None, *states[rank]))
    for model, optimizer in states:
        assert all(bool((p == -7.0).all()) for p in model.parameters())
        assert model.seen == 0
        assert not optimizer.state
    assert isinstance(raised.value, CheckpointError)
    return raised.value


def loads(path: Path) -> None:
    model, optimizer = toy(Mesh(), 0, blank=True)
    xla_ckpt.load_checkpoint(path, None, model, optimizer)
    assert differences(optimizer, model.by_name, Mesh(), 0) == []


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("number", [0, 1, -1])
def test_a_missing_part(generation: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = write_set(tmp_path / "c.pt", MESHES.get(generation, PP2TP2), generation)[number]
    lost.unlink()
    error = refused(monkeypatch, tmp_path / "c.pt", CorruptCheckpointError, r"parts are missing: 1 of \d")
    assert error.file == lost.name
    report = xla_ckpt.verify(tmp_path / "c.pt")
    assert [problem.file for problem in report.problems] == [lost.name]
    assert xla_ckpt.has_checkpoint(tmp_path / "c.pt")  # a job must not begin anew over what is left


@pytest.mark.parametrize("generation", ["1.12", "documents", "v3"])
def test_the_guard_that_saves_tp_rank_0_alone(generation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`if smp.dp_rank() == 0` is true on tp rank 0 only."""
    for file in write_set(tmp_path / "c.pt", PP2TP2, generation):
        if file.name.removeprefix("c.pt_").split("_")[1].startswith("1"):
            file.unlink()
    error = refused(monkeypatch, tmp_path / "c.pt", CorruptCheckpointError, "parts of all ranks tp > 0 are missing")
    assert error.hint is not None
    assert error.hint.startswith("If they were there once, restore them from a copy.")
    assert "which is true on tp rank 0 only" in error.hint
    assert "4 parts: pp 2, tp 2" in str(error.expected)


def test_the_guard_in_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in write_tag(tmp_path, "t", PP2TP2).glob("*_*_1.pt"):
        file.unlink()
    refused(monkeypatch, tmp_path / "t_partial", CorruptCheckpointError, "parts of all ranks tp > 0 are missing")


def test_a_last_stage_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names alone are a whole grid, the files say that there was more."""
    for file in write_set(tmp_path / "c.pt", Mesh(pp=3, tp=2), "1.12"):
        if "_2_" in file.name:
            file.unlink()
    error = refused(monkeypatch, tmp_path / "c.pt", CorruptCheckpointError, "parts are missing: 2 of 6")
    assert "c.pt_2_0.pt, c.pt_2_1.pt" in str(error.found)


def test_holes_that_pass_as_the_right_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SMP counts the files: two of a job of two ranks, and takes them."""
    write_set(tmp_path / "a.pt", PP2TP2, "1.12", lambda pp, tp: {**toy_content(Mesh(pp=2), pp, 0)})
    for name in ("a.pt_0_1.pt", "a.pt_1_0.pt"):
        (tmp_path / name).unlink()
    refused(monkeypatch, tmp_path / "a.pt", CorruptCheckpointError, "more tp ranks than the job had")
    (tmp_path / "a.pt_1_1.pt").rename(tmp_path / "a.pt_2_0.pt")
    refused(monkeypatch, tmp_path / "a.pt", CorruptCheckpointError, "more pp ranks than the job had")
    (tmp_path / "a.pt_2_0.pt").rename(tmp_path / "a.pt_1_0.pt")
    loads(tmp_path / "a.pt")


def test_a_number_in_the_millions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_set(tmp_path / "c.pt", Mesh(), "1.12", lambda pp, tp: {"model": {"w": torch.ones(2)}})
    os.link(tmp_path / "c.pt_0_0.pt", tmp_path / "c.pt_99999999_9999999.pt")
    refused(monkeypatch, tmp_path / "c.pt", CorruptCheckpointError, "the numbers of the parts make no grid")


# Parts of two saves.


def other_content(pp: int, tp: int, **changed: Any) -> dict[str, Any]:
    return {**toy_content(PP2TP2, pp, tp), **changed}


@pytest.mark.parametrize("epochs", [(3, 4), (3, 5)])
def test_counters_that_differ(epochs: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_set(tmp_path / "c.pt", PP2TP2, "1.12", lambda pp, tp: other_content(pp, tp, epoch=epochs[pp]))
    error = refused(monkeypatch, tmp_path / "c.pt", CorruptCheckpointError, "the parts are of two saves")
    assert error.found == f"epoch is {epochs[0]} and {epochs[1]}"


def test_step_counts_that_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a number of the program's own the optimizer tells. So it does for a model alone."""

    def content(pp: int, tp: int) -> Mapping[str, Any]:
        optimizer = toy_optimizer(PP2TP2, pp, tp)
        for members in optimizer["state"].values():
            if members and (pp, tp) == (1, 1):
                members["step"] = torch.tensor(8.0)
        return other_content(pp, tp, optimizer_state_dict=optimizer)

    write_set(tmp_path / "c.pt", PP2TP2, "1.12", content)
    error = refused(monkeypatch, tmp_path / "c.pt", CorruptCheckpointError, "the parts are of two saves")
    assert error.found == "the step counts of the optimizer at pp 0, tp 0 and at pp 1, tp 1 differ"
    model, _ = toy(Mesh(), 0, blank=True)
    with pytest.raises(CorruptCheckpointError, match="the parts are of two saves"):
        xla_ckpt.load_checkpoint(tmp_path / "c.pt", model=model)
    assert [problem.problem for problem in xla_ckpt.verify(tmp_path / "c.pt").problems] == [error.problem]


def test_step_counts_of_parameters_that_a_step_left_out(tmp_path: Path) -> None:
    def content(pp: int, tp: int) -> Mapping[str, Any]:
        optimizer = toy_optimizer(PP2TP2, pp, tp)
        if pp == 1:
            next(members for members in optimizer["state"].values() if members)["step"] = torch.tensor(6.0)
        return other_content(pp, tp, optimizer_state_dict=optimizer)

    write_set(tmp_path / "c.pt", PP2TP2, "1.12", content)
    model, optimizer = toy(Mesh(), 0, blank=True)
    xla_ckpt.load_checkpoint(tmp_path / "c.pt", None, model, optimizer)


def test_options_that_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def content(pp: int, tp: int) -> Mapping[str, Any]:
        optimizer = toy_optimizer(PP2TP2, pp, tp)
        optimizer["param_groups"][1]["lr"] += 0.5 * tp
        return other_content(pp, tp, optimizer_state_dict=optimizer)

    write_set(tmp_path / "c.pt", PP2TP2, "1.12", content)
    error = refused(monkeypatch, tmp_path / "c.pt", CorruptCheckpointError, "the parts are of two saves")
    assert error.found == "lr of group 1 is 0.03 at pp 0, tp 0, and 0.53 at pp 0, tp 1"


def test_jobs_that_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def content(pp: int, tp: int) -> Mapping[str, Any]:
        held = other_content(pp, tp)
        held["model_state_dict"]["_smp_load_info"] = load_info(2, 2 if pp else 4)
        return held

    write_set(tmp_path / "c.pt", PP2TP2, "1.12", content)
    error = refused(monkeypatch, tmp_path / "c.pt", CorruptCheckpointError, "the parts are of two saves")
    assert error.found == "a job of pp 2, tp 2; a job of pp 2, tp 4"


def test_an_optimizer_of_fewer_ranks_than_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a description of the job the names of one set tell of another."""
    folder = write_tag(tmp_path, "t", PP2TP2)
    (folder / "smp_config.pt").unlink()
    for file in folder.glob("model_*"):
        held = torch.load(file, weights_only=False)
        del held["_smp_load_info"]
        torch.save(held, file)
    for file in folder.glob("optimizer_states_*_1.pt"):
        file.unlink()
    error = refused(monkeypatch, folder, CorruptCheckpointError, "parts of all ranks tp > 0 are missing")
    assert error.file == "optimizer_states_0_1.pt"


def test_a_directory_of_something_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "t_partial"
    folder.mkdir()
    torch.save({"overflow": False}, folder / "fp16_states_0_0.pt")
    refused(monkeypatch, folder, CorruptCheckpointError, "there is neither a model nor an optimizer")


@pytest.mark.parametrize("degrees", [(0, 1), (None, 2), ({}, 2), ("2", 2), (2, -1), (10**12, 10**12)])
def test_a_job_that_there_cannot_be(degrees: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def content(pp: int, tp: int) -> Mapping[str, Any]:
        held = other_content(pp, tp)
        held["model_state_dict"]["_smp_load_info"] = load_info(*degrees)
        return held

    write_set(tmp_path / "c.pt", PP2TP2, "1.12", content)
    refused(monkeypatch, tmp_path / "c.pt", CorruptCheckpointError, "a job that there cannot be|make no grid")


def test_another_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_tag(tmp_path, "t", PP2TP2)
    torch.save({"tensor_parallel_degree": 4, "pipeline_parallel_degree": 1}, folder / "smp_config.pt")
    error = refused(monkeypatch, folder, CorruptCheckpointError, "the parts are of two saves")
    assert error.found == "a job of pp 1, tp 4; a job of pp 2, tp 2"


# Notes beside the files, written by hand as the format says.


def note(file: Path, save: str, *before: dict[str, Any]) -> dict[str, Any]:
    """What lies beside a file that this library has written."""
    data = file.read_bytes()
    end = data.rindex(b"PK\5\6")
    size, offset = (int.from_bytes(data[end + n : end + n + 4], "little") for n in (12, 16))
    if (zip64 := data.rfind(b"PK\6\6")) >= 0:  # torch always writes it
        size, offset = (int.from_bytes(data[zip64 + n : zip64 + n + 8], "little") for n in (40, 48))
    ranks = {"rank": {"pp": 0, "tp": 0, "rdp": 0}, "sizes": {"pp": 2, "tp": 2, "rdp": 1}}
    digest = f"{xxhash.xxh3_64_intdigest(data[offset : offset + size]):016x}"
    entry = {"size": len(data), "directory": digest, "save": save, **ranks}
    text = json.dumps({"format": 1, "saves": [*before, entry]})
    file.with_name(f".{file.name}.xla_ckpt.json").write_text(text)
    return entry


def test_notes_of_one_save(tmp_path: Path) -> None:
    for file in write_set(tmp_path / "c.pt", PP2TP2, "documents"):
        note(file, "job-1")
    loads(tmp_path / "c.pt")
    assert xla_ckpt.verify(tmp_path / "c.pt").ok
    assert xla_ckpt.list_tags(tmp_path) == ["c.pt"]


@pytest.mark.parametrize("in_directory", [False, True])
def test_notes_of_two_saves(in_directory: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All else is equal: only the notes tell."""
    path = write_tag(tmp_path, "t", PP2TP2) if in_directory else tmp_path / "c.pt"
    files = sorted(path.glob("*_*_*.pt")) if in_directory else write_set(path, PP2TP2, "1.12")
    for file in files:
        note(file, "job-1")
    note(files[-1], "job-2")
    error = refused(monkeypatch, path, CorruptCheckpointError, "the parts are of two saves")
    assert f"{files[0].name} of job-1; {files[-1].name} of job-2" in str(error.found)
    assert [problem.problem for problem in xla_ckpt.verify(path).problems] == [error.problem]


def test_a_part_that_is_cut_off_is_not_of_another_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No note is true of it, so that it was said to be of a program that has written over it."""
    files = write_set(tmp_path / "c.pt", PP2TP2, "documents")
    for file in files:
        note(file, "job-1")
    os.truncate(files[-1], files[-1].stat().st_size // 2)
    error = refused(monkeypatch, tmp_path / "c.pt", CorruptCheckpointError, "the part is cut off or damaged")
    assert error.file == files[-1].name
    assert {problem.file for problem in xla_ckpt.verify(tmp_path / "c.pt").problems} == {files[-1].name}


def test_a_save_that_was_cut_off_before_a_file_had_its_name(tmp_path: Path) -> None:
    """The note names the new save already, and the old one still matches."""
    for file in write_set(tmp_path / "c.pt", PP2TP2, "documents"):
        old = note(file, "job-1")
        newer = {**old, "size": 5, "directory": "0" * 16, "save": "job-2"}
        file.with_name(f".{file.name}.xla_ckpt.json").write_text(json.dumps({"format": 1, "saves": [old, newer]}))
    loads(tmp_path / "c.pt")


def test_files_that_another_program_has_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = write_set(tmp_path / "c.pt", PP2TP2, "documents")
    for file in files:
        note(file, "job-1")
        torch.save({**torch.load(file, weights_only=False), "more": 1}, file)
    loads(tmp_path / "c.pt")  # all of them: then they are as good as any others
    note(files[0], "job-1")
    refused(monkeypatch, tmp_path / "c.pt", CorruptCheckpointError, "the parts are of two saves")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 2}', '{"format": 1, "saves": [{}]}', "x" * (2 << 20)])
def test_a_note_that_cannot_be_read(text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for file in write_set(tmp_path / "c.pt", PP2TP2, "documents"):
        file.with_name(f".{file.name}.xla_ckpt.json").write_text(text)
    loads(tmp_path / "c.pt")
    assert "the note beside a file" in caplog.text


def test_the_format_of_notes(tmp_path: Path) -> None:
    (file,) = write_set(tmp_path / "c.pt", Mesh(), "1.12")
    written = note(file, "job-1")
    data = file.read_bytes()
    one = SaveNote(
        size=len(data),
        directory=compute_directory_digest(lambda offset, nbytes: data[offset : offset + nbytes], len(data)),
        save="job-1",
        rank=written["rank"],
        sizes=written["sizes"],
    )
    assert (get_note_name(str(file)), parse_notes(dump_notes([one]))) == (
        str(tmp_path / ".c.pt_0_0.pt.xla_ckpt.json"),
        (one,),
    )
    assert json.loads(dump_notes([one])) == {"format": 1, "saves": [written]}
    two, three = (SaveNote(**{**written, "save": f"job-{n}", "size": n}) for n in (2, 3))
    assert update_notes((), None, one) == (one,)
    assert update_notes((one,), one, two) == (one, two)
    assert update_notes((one, two), one, three) == (one, three)  # the second never got its name
    assert update_notes((one, two), two, three) == (two, three)
    for cut in (0, 10, len(data) - 1):
        with pytest.raises(ValueError, match="zip|end"):
            compute_directory_digest(lambda offset, nbytes: data[:cut][max(offset, 0) : offset + nbytes], cut)  # noqa: B023


# Damage.


def test_a_flipped_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """torch does not look at the CRC-32s that it writes."""
    files = write_set(tmp_path / "c.pt", PP2TP2, "1.12")
    weight = torch.load(files[1], weights_only=False)["model_state_dict"]["layers.0.out.weight"]
    flip(files[1], weight.numpy().tobytes()[:16])
    torch.load(files[1], weights_only=False)
    error = refused(monkeypatch, tmp_path / "c.pt", CorruptCheckpointError, "is not what its CRC-32 says")
    assert error.file == files[1].name
    report = xla_ckpt.verify(tmp_path / "c.pt")
    assert [problem.file for problem in report.problems] == [files[1].name]
    assert main(["verify", str(tmp_path / "c.pt")]) == 1
    assert files[1].name in capsys.readouterr().out
    # What lies in other parts is read: the damage is where it is.
    files[2].rename(tmp_path / "lost")
    assert {problem.file for problem in xla_ckpt.verify(tmp_path / "c.pt").problems} == {files[1].name, files[2].name}


@pytest.mark.parametrize("size", [0, 3, 100, -1])
def test_a_part_that_is_cut_off(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = write_set(tmp_path / "c.pt", PP2TP2, "1.12")
    files[3].write_bytes(files[3].read_bytes()[:size])
    assert refused(monkeypatch, tmp_path / "c.pt", CorruptCheckpointError, "zip|cut off").file == files[3].name
    assert not xla_ckpt.verify(tmp_path / "c.pt").ok


def test_bytes_that_change_anywhere(tmp_path: Path) -> None:
    """A load gives what was saved, or raises an error of this library's."""
    model = {"w": torch.arange(6.0).reshape(2, 3), "_smp_is_partial": True, "_smp_load_info": load_info(1, 2)}
    for tp in range(2):
        torch.save({"model": model, "epoch": 3}, tmp_path / f"c.pt_0_{tp}")
    file, sound = tmp_path / "c.pt_0_1", (tmp_path / "c.pt_0_1").read_bytes()
    chance = random.Random(0)
    outcomes = {"refused": 0, "loaded": 0}
    for _ in range(300):
        data = bytearray(sound)
        for _ in range(chance.choice((1, 1, 4))):
            data[chance.randrange(len(data))] = chance.randrange(256)
        file.write_bytes(data if chance.random() < 0.9 else data[: chance.randrange(len(data))])
        net = {"w": torch.zeros(2, 3)}
        try:
            found = xla_ckpt.load_checkpoint(tmp_path / "c.pt", model=net, shardings=[("w", None)])
        except CheckpointError:
            outcomes["refused"] += 1
            assert not net["w"].any()
        else:
            outcomes["loaded"] += 1
            assert torch.equal(net["w"], model["w"])
            assert found.user_content == {"epoch": 3}
    assert min(outcomes.values()) > 20, outcomes


def test_a_part_of_the_old_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in write_set(tmp_path / "c.pt", Mesh(pp=2), "1.6"):
        torch.save(torch.load(file, weights_only=False), file, _use_new_zipfile_serialization=False)
    refused(
        monkeypatch,
        tmp_path / "c.pt",
        xla_ckpt.UnsupportedStateError,
        "the file was written without torch's zip format",
    )


def test_a_part_that_is_something_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = write_set(tmp_path / "c.pt", PP2TP2, "1.12")
    torch.save([1, 2], files[2])
    assert refused(monkeypatch, tmp_path / "c.pt", CorruptCheckpointError, "a part holds no dict").file == files[2].name
    torch.save({"something": 1}, files[2])
    error = refused(monkeypatch, tmp_path / "c.pt", CorruptCheckpointError, "the parts hold different things")
    assert error.file == files[2].name


def test_names_that_lead_out_of_the_directory(tmp_path: Path) -> None:
    write_set(tmp_path / "c.pt", PP2TP2, "1.12")
    with pytest.raises(xla_ckpt.InvalidTagError):
        xla_ckpt.load_checkpoint(tmp_path, f"../{tmp_path.name}/c.pt", model={})


def test_crcs_that_torch_left_out(tmp_path: Path) -> None:
    """Then nothing is compared, and all else is as before."""
    torch.serialization.set_crc32_options(False)
    try:
        write_set(tmp_path / "c.pt", PP2TP2, "1.12")
    finally:
        torch.serialization.set_crc32_options(True)
    loads(tmp_path / "c.pt")
    assert xla_ckpt.verify(tmp_path / "c.pt").ok


def test_a_tag_that_is_not_there(tmp_path: Path) -> None:
    write_set(tmp_path / "c.pt", PP2TP2, "1.12")
    with pytest.raises(xla_ckpt.NoCheckpointError, match="SageMaker model parallel wrote the tags there: c.pt"):
        xla_ckpt.load_checkpoint(tmp_path, "d.pt", model={})


def test_a_save_into_it_is_refused(tmp_path: Path) -> None:
    """Nothing of this library's writes over a set."""
    model, _ = toy(Mesh(), 0)
    write_set(tmp_path / "c.pt", PP2TP2, "1.12")
    xla_ckpt.save_checkpoint(tmp_path, "mine", model).result()
    assert xla_ckpt.list_tags(tmp_path) == ["c.pt", "mine"]
    assert sorted(p.name for p in tmp_path.glob("c.pt*")) == [f"c.pt_{pp}_{tp}.pt" for pp in (0, 1) for tp in (0, 1)]
