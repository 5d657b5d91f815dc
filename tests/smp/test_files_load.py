"""smp.load: files of every version of SMP, in jobs of the same degrees and of others, and files that do not fit."""

from __future__ import annotations

import argparse
import atexit
import datetime
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import neuron_compat.smp as smp
import xla_ckpt
from neuron_compat.smp import rank_sync
from neuron_compat.smp.stored import StoredState
from tests.jobs import run_alone, run_on_ranks, run_program
from tests.smp.made import GENERATIONS, part, write_parts


def begin(pp: int, tp: int) -> None:
    smp.init({"pipeline_parallel_degree": pp, "tensor_parallel_degree": tp, "ddp": True})


def plain(found: Any) -> Any:
    """What a rank found, as something that can be compared and sent."""
    if isinstance(found, torch.Tensor):
        return f"{found.device.type} {list(found.shape)}" if found.is_meta else found.tolist()
    return {k: plain(v) for k, v in found.items()} if isinstance(found, dict) else found


def caught(call: Any) -> tuple[str, str]:
    """Class and text of the error of a call."""
    try:
        call()
    except xla_ckpt.CheckpointError as error:
        return type(error).__name__, str(error)
    return "nothing", ""


# -- jobs of the same degrees


def loads_its_own(rank: int, folders: list[str], pp: int, tp: int) -> list[Any]:
    begin(pp, tp)
    return [plain(smp.load(f"{folder}/c.pt")) for folder in folders]


@pytest.mark.parametrize(("pp", "tp", "rdp"), [(2, 2, 1), (1, 2, 2)])
def test_each_rank_gets_what_it_saved_whatever_version_it_was(tmp_path: Path, pp: int, tp: int, rdp: int) -> None:
    chosen = [g for g in GENERATIONS if g != "1.6"]
    folders = [str(tmp_path / f"run+1 [{g}] (a)") for g in chosen]  # as regular expressions, these match other paths
    for folder, generation in zip(folders, chosen, strict=True):
        write_parts(Path(folder), generation, pp, tp, rdp if generation == "v3" else 1)
    found = run_on_ranks(loads_its_own, 4, folders, pp, tp)
    for rank, values in enumerate(found):
        p, t, r = rank // (4 // pp), rank % tp, rank // tp % rdp
        for generation, value in zip(chosen, values, strict=True):
            assert value == plain(part(p, t, (pp, tp), r if generation == "v3" else 0)), (rank, generation)


def loads_while_rank_0_ends(rank: int, folder: str) -> set[str]:
    """Two groups, {0, 1} and {2, 3}: the second one begins when the program of rank 0 has come to its end."""
    begin(1, 2)
    store = dist.distributed_c10d._get_default_store()
    if rank in (2, 3):
        store.wait(["rank 0 ends"])
    told = {caught(lambda: smp.load(f"{folder}/c.pt"))[1] for _ in range(20)}
    if rank == 0:
        atexit.register(store.set, "rank 0 ends", "")  # the newest handler is called first
    return told


def test_the_store_stays_until_all_groups_have_loaded(tmp_path: Path) -> None:
    write_parts(tmp_path, "v3", 1, 2, 2)
    assert run_on_ranks(loads_while_rank_0_ends, 4, str(tmp_path)) == [{""}] * 4


def loads_pipeline(rank: int, folder: str) -> list[Any]:
    begin(2, 1)
    back_compat = smp.load(f"{folder}/c.pt", back_compat=True, v3=False)
    return [plain(smp.load(f"{folder}/c.pt")), plain(back_compat)]


def test_files_without_tensor_parallelism(tmp_path: Path) -> None:
    write_parts(tmp_path, "1.6", 2, 1)
    for rank, found in enumerate(run_on_ranks(loads_pipeline, 2, str(tmp_path))):
        assert found == [plain(part(rank, 0, (2, 1)))] * 2


# -- in one process


@pytest.fixture
def alone() -> Any:
    """smp in this process, which works alone."""
    begin(1, 1)
    yield smp
    smp.shutdown()


def test_a_part_of_another_job_has_its_plain_entries_and_no_parameters(tmp_path: Path, alone: Any) -> None:
    write_parts(tmp_path, "documents")
    found = alone.load(f"{tmp_path}/c.pt")
    assert isinstance(found, StoredState)
    assert (found["epoch"], found["loss"].item(), found.fits) == (7, 0.25, False)
    model = found["model_state_dict"]
    assert isinstance(model, StoredState)
    assert model["stage0.weight"].is_meta
    assert model["_smp_load_info"]["tensor_parallel_degree"] == 2
    assert model.source is not None


def test_a_job_of_other_degrees_is_refused_where_that_is_asked_for(tmp_path: Path, alone: Any) -> None:
    names = write_parts(tmp_path, "documents")
    with pytest.raises(smp.IncompatibleCheckpointFoundError) as error:
        alone.load(f"{tmp_path}/c.pt", strict_partitions=True)
    assert str(error.value) == (
        "Can not load a 4 parts checkpoint to a model with 1 (pipeline) partitions, 1 (tensor parallel) partitions, "
        "and 1 reduced-data-parallel ranks. Please save the full model and load that instead when changing the number "
        f"of partitions across runs. Matching files: {[f'{tmp_path}/{name}' for name in names]}"
    )


def test_what_stray_files_there_are_does_not_matter(tmp_path: Path, alone: Any) -> None:
    write_parts(tmp_path, "1.12", 1, 1)
    for name in ("c.pt_0_0.pt.tmp", "c.pt_0_1.pt.sagemaker-uploading", "c.pt_notes", ".c.pt_0_1.pt.3.new", "c.pt_x_0"):
        (tmp_path / name).write_bytes(b"PK")
    found = alone.load(f"{tmp_path}/c.pt", strict_partitions=True)
    assert found["saved_by"] == [0, 0, 0]


def test_a_missing_checkpoint(tmp_path: Path, alone: Any) -> None:
    with pytest.raises(smp.MissingCheckpointFilesError) as error:
        alone.load(f"{tmp_path}/c.pt")
    assert str(error.value) == f"Could not find partial checkpoint files with prefix {tmp_path}/c.pt"
    torch.save({}, tmp_path / "c.pt")
    with pytest.raises(smp.SMPCheckpointError, match="pass partial=False"):
        alone.load(f"{tmp_path}/c.pt")
    write_parts(tmp_path, "documents", name="d.pt")
    with pytest.raises(FileNotFoundError, match="Partial files of this name: 4. Pass partial=True"):
        alone.load(f"{tmp_path}/d.pt", partial=False)


def test_the_part_of_one_rank_of_another_job_is_no_full_checkpoint(tmp_path: Path, alone: Any) -> None:
    """Its model was refused, and its optimizer had the states of some parameters without a word."""
    write_parts(tmp_path, "documents")
    with pytest.raises(smp.SMPCheckpointError, match=r"part of one rank of a job of pp 2 and tp 2 .*partial=True"):
        alone.load(f"{tmp_path}/c.pt_1_1", partial=False)
    for misspelt, meant in ((f"{tmp_path}/d.pt", f"{tmp_path}/c.pt"), (f"{tmp_path}x/c.pt", f"{tmp_path}/c.pt")):
        with pytest.raises(smp.MissingCheckpointFilesError) as error:
            alone.load(misspelt)
        assert str(error.value).endswith(f"\nNothing lies there: did you mean {meant}?")


@pytest.mark.parametrize("gone", ["c.pt_1_1", "c.pt_0_0", "c.pt_1_0"])
def test_a_missing_part_is_named(tmp_path: Path, alone: Any, gone: str) -> None:
    write_parts(tmp_path, "documents")
    (tmp_path / gone).unlink()
    with pytest.raises(smp.SMPCheckpointError, match=f"Parts are missing: {gone.removeprefix('c.pt_')}"):
        alone.load(f"{tmp_path}/c.pt")


def test_a_file_with_a_date_in_the_place_of_a_rank(tmp_path: Path, alone: Any) -> None:
    names = write_parts(tmp_path, "documents", 1, 1)
    (tmp_path / names[0]).rename(tmp_path / "c.pt_0_20261122")
    with pytest.raises(smp.IncompatibleCheckpointRankFoundError, match=r"Parts are missing: 0_0, .*, \.\.\."):
        alone.load(f"{tmp_path}/c.pt")


def test_a_missing_stage_is_known_by_what_the_others_say(tmp_path: Path, alone: Any) -> None:
    write_parts(tmp_path, "documents")
    for name in ("c.pt_1_0", "c.pt_1_1"):
        (tmp_path / name).unlink()
    with pytest.raises(smp.SMPCheckpointError, match=r"Parts are missing: 1_0, 1_1"):
        alone.load(f"{tmp_path}/c.pt")


def test_a_full_checkpoint(tmp_path: Path, alone: Any) -> None:
    torch.save({"model_state_dict": {"w": torch.ones(2)}, "step": 3}, tmp_path / "c.pt")
    found = alone.load(f"{tmp_path}/c.pt", partial=False)
    assert plain(found) == {"model_state_dict": {"w": [1, 1]}, "step": 3}


def test_one_flipped_bit_is_found(tmp_path: Path, alone: Any) -> None:
    value = {"w": torch.arange(1000.0)}
    for file in ("c.pt", "c.pt_0"):
        torch.save(value, tmp_path / file)
        data = bytearray((tmp_path / file).read_bytes())
        data[data.index(torch.tensor([500.0]).numpy().tobytes())] ^= 1
        (tmp_path / file).write_bytes(data)
    for partial in (True, False):
        with pytest.raises(xla_ckpt.CorruptCheckpointError, match="CRC-32"):
            alone.load(f"{tmp_path}/c.pt", partial=partial)


def test_plain_values_of_many_kinds_need_no_trust(tmp_path: Path, alone: Any) -> None:
    value = {
        "args": argparse.Namespace(lr=0.1, sizes=[1, 2]), "when": datetime.datetime(2026, 1, 2), "path": Path("/a"),
        "scalar": np.float64(0.5), "array": np.arange(3), "none": None, "set": {1, 2},
    }  # fmt: skip
    torch.save(value, tmp_path / "c.pt_0_0.pt")
    found = alone.load(f"{tmp_path}/c.pt")
    assert found["array"].tolist() == [0, 1, 2]
    assert {k: v for k, v in found.items() if k != "array"} == {k: v for k, v in value.items() if k != "array"}


class Harmful:
    """Something that writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.write_text, (self.path, "harm")


def test_nothing_in_a_file_is_run(tmp_path: Path, alone: Any) -> None:
    for file in ("c.pt", "c.pt_0_0.pt"):
        torch.save({"w": torch.ones(1), "x": Harmful(tmp_path / "harm")}, tmp_path / file)
    for partial in (True, False):
        with pytest.raises(xla_ckpt.UntrustedObjectError, match="trust_pickle=True"):
            alone.load(f"{tmp_path}/c.pt", partial=partial)
    assert not (tmp_path / "harm").exists()


class Kept:
    """An object that a program saves."""

    value = 5


def test_objects_are_loaded_on_trust(tmp_path: Path, alone: Any) -> None:
    torch.save({"x": Kept()}, tmp_path / "c.pt_0")
    found = alone.load(f"{tmp_path}/c.pt", pickle_module=pickle, trust_pickle=True)
    assert isinstance(found["x"], Kept)


def test_where_tensors_go(tmp_path: Path, alone: Any) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "c.pt_0")
    assert alone.load(f"{tmp_path}/c.pt", map_location="meta")["w"].is_meta
    assert alone.load(f"{tmp_path}/c.pt", map_location=lambda storage, _: storage)["w"].tolist() == [1, 1]


def test_a_path_is_a_string(tmp_path: Path, alone: Any) -> None:
    with pytest.raises(smp.SMPInvalidArgumentError, match="a string"):
        alone.load(tmp_path / "c.pt")


def loads_before_init(f: str) -> list[tuple[str, str]]:
    return [caught(lambda: smp.load(f)), caught(lambda: smp.load(f, partial=False))]


def test_before_init(tmp_path: Path) -> None:
    """The ranks are not known then; a full checkpoint needs none."""
    torch.save({}, tmp_path / "c.pt")
    assert run_alone(loads_before_init, f"{tmp_path}/c.pt") == [
        ("NotInitializedError", "smp is not initialized! Call smp.init(config) first."),
        ("nothing", ""),
    ]


# -- errors in jobs


def meets_errors(rank: int, root: str) -> dict[str, tuple[str, str]]:
    begin(2, 2)
    cases = ("missing", "untrusted", "damaged", "guard", "larger")
    return {case: caught(lambda case=case: smp.load(f"{root}/{case}/c.pt", strict_partitions=case == "larger"))
            for case in cases}  # fmt: skip


def test_all_ranks_raise_the_same_error(tmp_path: Path) -> None:
    for case in ("missing", "untrusted", "damaged", "guard"):
        write_parts(tmp_path / case, "documents")
    write_parts(tmp_path / "larger", "documents", 4, 2)
    (tmp_path / "missing/c.pt_1_1").unlink()
    torch.save({"x": Kept()}, tmp_path / "untrusted/c.pt_1_0")
    cut = tmp_path / "damaged/c.pt_0_1"
    cut.write_bytes(cut.read_bytes()[:-100])
    for name in ("c.pt_0_1", "c.pt_1_1"):
        (tmp_path / "guard" / name).unlink()
    found = run_on_ranks(meets_errors, 4, str(tmp_path))
    assert all(each == found[0] for each in found)
    errors = found[0]
    kind, text = errors["missing"]
    assert kind == "IncompatibleCheckpointRankFoundError"
    assert text == (
        "The tp_rank of a checkpoint file (1) exceeds the total number of unique tp_rank checkpoint files (1) matching "
        f"given prefix ({tmp_path}/missing/c.pt). Please ensure all checkpoint parts are available for loading at the "
        "given location.\nParts are missing: 1_1. A part is called by the numbers at the end of its file's name."
    )
    assert errors["untrusted"][0] == "UntrustedObjectError"
    assert "c.pt_1_0" in errors["untrusted"][1]
    assert errors["damaged"][0] == "CorruptCheckpointError"
    assert "c.pt_0_1" in errors["damaged"][1]
    assert "Call smp.save under `if smp.rdp_rank() == 0`, not `if smp.dp_rank() == 0`." in errors["guard"][1]
    assert errors["larger"][0] == "IncompatibleCheckpointFoundError"


def loads_on_too_few(rank: int, folder: str) -> tuple[str, str]:
    rank_sync.EXIT_GRACE_SECONDS = 1.0  # who never comes to a call is waited for at the end, too
    begin(2, 1)
    return ("", "") if rank else caught(lambda: smp.load(f"{folder}/c.pt"))


def test_a_load_on_too_few_ranks_is_an_error_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMP_MEETING_TIMEOUT", "2")
    write_parts(tmp_path, "1.6", 2, 1)
    (kind, text), _ = run_on_ranks(loads_on_too_few, 2, str(tmp_path))
    assert kind == "TooFewRanksError"
    assert "rank 1 did not" in text


SCALER = """
import sys, types
import torch

package = "smdistributed.modelparallel.torch.fp16.loss_scaler"
for depth in range(1, 6):
    name = ".".join(package.split(".")[:depth])
    sys.modules[name] = types.ModuleType(name)
scaler = type("DynamicLossScaler", (), {"__module__": package})
sys.modules[package].DynamicLossScaler = scaler
made = scaler()
made.cur_scale, made.scale_window = 1024.0, 10
torch.save({"optimizer_state_dict": {"loss_scaler": made}}, sys.argv[1])
"""


def test_the_loss_scaler_that_smp_stores_is_read_without_its_class(tmp_path: Path, alone: Any) -> None:
    run_program(SCALER, f"{tmp_path}/c.pt_0_0.pt")
    found = alone.load(f"{tmp_path}/c.pt")
    assert found["optimizer_state_dict"]["loss_scaler"] == {
        "class": "DynamicLossScaler", "cur_scale": 1024.0, "scale_window": 10,
    }  # fmt: skip
