"""smp.resume_from_checkpoint: which checkpoint it takes, what it refuses, and directories that SMP itself wrote."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import neuron_compat.smp as smp
import xla_ckpt
from neuron_compat.emulated.smp.model import DistributedModel
from neuron_compat.smp.config import complete_config
from tests.jobs import run_on_ranks
from tests.runs import names_in
from tests.smp.test_files_load import Kept, begin, caught

UNABLE = (
    "Unable to find newest file at {root}/newest, if trying to load newest checkpoint please ensure this file exists "
    "or pass an explicit checkpoint tag when loading a checkpoint."
)
WEIGHT = torch.arange(8.0).reshape(2, 4)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """smp in this process, which works alone, as if it had just begun."""
    smp.shutdown()
    yield
    smp.shutdown()


def theirs(root: Path, tag: str, value: float, pp: int = 1, tp: int = 1, **config: Any) -> None:
    """A partial checkpoint as SMP 1.12 leaves it, of a model with one weight, which is not split."""
    folder = root / f"{tag}_partial"
    folder.mkdir(parents=True)
    for p in range(pp):
        for t in range(tp):
            info = {
                "tensor_parallel_degree": tp, "pipeline_parallel_degree": pp,
                "partition_info": {"main/module/module": 0},
            }  # fmt: skip
            weights = {"weight": WEIGHT + value} if p == 0 else {}
            torch.save({**weights, "_smp_is_partial": True, "_smp_load_info": info}, folder / f"model_{p}_{t}.pt")
    torch.save({"tag": tag}, folder / "user_content.pt")
    whole = complete_config({"pipeline_parallel_degree": pp, "tensor_parallel_degree": tp, "ddp": True})
    torch.save({**whole, "smp_version": "1.12.1", **config}, folder / "smp_config.pt")
    with open(root / "newest", "a") as newest:
        newest.write(f"{tag}_partial\n")


def model(value: float = 0.0) -> Any:
    made = torch.nn.Linear(4, 2, bias=False)
    torch.nn.init.constant_(made.weight, value)
    return DistributedModel(made)


def resumed(*args: Any, **options: Any) -> Any:
    return smp.resume_from_checkpoint(*args, load_optimizer=False, **options)


# -- what SMP wrote


def test_the_newest_of_smps_own_checkpoints(tmp_path: Path) -> None:
    for tag, value in (("b", 1.0), ("a", 2.0)):
        theirs(tmp_path, tag, value)
    begin(1, 1)
    held = model()
    assert resumed(tmp_path) == {"tag": "a"}
    assert torch.equal(held.weight, WEIGHT + 2)
    assert resumed(str(tmp_path), tag="b") == {"tag": "b"}
    assert torch.equal(held.weight, WEIGHT + 1)


def test_of_another_topology(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """SMP refuses to load the optimizer then; here it is a warning."""
    theirs(tmp_path, "a", 2.0, pp=2, tp=2)
    begin(1, 1)
    held = model()
    with caplog.at_level(logging.WARNING):
        resumed(tmp_path)
    assert torch.equal(held.weight, WEIGHT + 2)
    assert (
        "Found mismatched features between save and load: \nfeature pipeline_parallel_degree, loaded 2, current 1\n"
        in (caplog.text)
    )
    with pytest.raises(smp.SMPValidationError) as error:
        smp.resume_from_checkpoint(tmp_path, strict_partitions=True)
    assert str(error.value) == (
        "The following features changes are not allowed for loading partial: \n"
        "feature pipeline_parallel_degree, loaded 2, current 1\nfeature tensor_parallel_degree, loaded 2, current 1\n"
    )


def test_before_anything_is_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    theirs(tmp_path, "a", 2.0)
    with caplog.at_level(logging.WARNING):
        assert resumed(tmp_path) == {"tag": "a"}
    assert "called before smp.init, skipping smp config validation" in caplog.text
    begin(1, 1)
    held = model(5.0)
    assert torch.equal(held.local_state_dict()["weight"], WEIGHT + 2)


def test_before_the_model_is_there_a_full_one(tmp_path: Path) -> None:
    torch.save({"weight": WEIGHT, "_smp_is_partial": False}, tmp_path / "full.pt")
    torch.save({"step": 3}, tmp_path / "user_content_full.pt")
    begin(1, 1)
    assert smp.resume_from_checkpoint(tmp_path, "full.pt", partial=False) == {"step": 3}
    held = model(5.0)
    assert torch.equal(held(torch.eye(4)).t(), WEIGHT)


def test_a_full_one_is_translated(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.save({"theirs.weight": WEIGHT}, tmp_path / "full.pt")
    begin(1, 1)
    held = model()
    with caplog.at_level(logging.WARNING):
        assert smp.resume_from_checkpoint(
            tmp_path, "full.pt", partial=False,
            translate_function=lambda state: {name.removeprefix("theirs."): value for name, value in state.items()},
        ) is None  # fmt: skip
    assert torch.equal(held.weight, WEIGHT)
    assert "Skipping loading optimizer for full checkpoint loading..." in caplog.text


def plain_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, value: float) -> float:
    optimizer.zero_grad()
    loss = (model(torch.full((4, 4), value)) - 1).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def two_layers(seed: int) -> tuple[torch.nn.Sequential, torch.optim.AdamW]:
    torch.manual_seed(seed)
    made = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
    return made, torch.optim.AdamW(made.parameters(), lr=0.05)


def write_by_hand(root: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """What a job of pp 2 x tp 2 leaves of a model whose second layer is split over tp, by torch.save alone."""
    folder = root / "a_partial"
    folder.mkdir()
    states, groups = optimizer.state_dict()["state"], optimizer.state_dict()["param_groups"]
    weights = model.state_dict()
    dims = {"2.weight": 1}
    numbers = {name: number for number, name in enumerate(weights)}

    def part(value: torch.Tensor, name: str, tp: int) -> torch.Tensor:
        if name not in dims or value.dim() < 2:
            return value
        return value.split([2, 1], dims[name])[tp].clone()  # SMP cuts 3 columns so

    for pp, mine in enumerate((["0.weight", "0.bias"], ["2.weight", "2.bias"])):
        for tp in range(2):
            info = {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2, "partition_info": {"main": 0}}
            held = {name: part(weights[name], name, tp) for name in mine}
            torch.save({**held, "_smp_is_partial": True, "_smp_load_info": info}, folder / f"model_{pp}_{tp}.pt")
            state = {
                numbers[name]: {k: part(v, name, tp) for k, v in states[numbers[name]].items()}
                if tp == 0 or name in dims else {}
                for name in mine
            }  # fmt: skip
            whole = {"state": state, "param_groups": groups, "_smp_is_partial": True}
            torch.save(whole, folder / f"optimizer_states_{pp}_{tp}.pt")
    (root / "newest").write_text("a_partial\n")


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_model_and_its_optimizer_that_smp_wrote(tmp_path: Path, when: str) -> None:
    """It trained in pp 2 x tp 2, and goes on in one process as if it had always been there."""
    bare, its = two_layers(1)
    plain_step(bare, its, 0.5)
    write_by_hand(tmp_path, bare, its)
    begin(1, 1)
    if when == "before":
        smp.resume_from_checkpoint(tmp_path)
    made, optimizer = two_layers(2)
    rules = [(r"^2\.weight$", (None, "tp"))]
    held = DistributedModel(made, shardings=rules)
    optimizer = smp.DistributedOptimizer(optimizer)
    if when == "after":
        smp.resume_from_checkpoint(tmp_path)
    assert [plain_step(held, optimizer, v) for v in (0.1, 0.2)] == [plain_step(bare, its, v) for v in (0.1, 0.2)]


# -- errors


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"partial": False}, "tag is required to load a full checkpoint!"),
        ({}, UNABLE),
        ({"tag": "x"}, "Checkpoint {root}/x_partial does not exist!"),
        ({"tag": "x", "partial": False}, "Checkpoint {root}/x does not exist!"),
    ],
)  # fmt: skip
def test_a_checkpoint_that_is_not_there(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    begin(1, 1)
    with pytest.raises(smp.SMPValidationError) as error:
        smp.resume_from_checkpoint(tmp_path, **options)
    assert str(error.value) == text.format(root=tmp_path)


def test_what_is_there_in_place_of_a_checkpoint_is_said(tmp_path: Path) -> None:
    theirs(tmp_path, "a", 1.0)
    (tmp_path / "whole").touch()
    begin(1, 1)
    for options, told in (
        ({"tag": "a", "partial": False}, "There is a partial checkpoint of this tag: pass partial=True."),
        ({"tag": "whole"}, "There is a full checkpoint of this tag: pass partial=False."),
        ({"tag": "a_partial"}, "A tag is the name of the directory without _partial: pass a."),
        ({"tag": "b"}, "Tags of partial checkpoints there, oldest first: a."),
    ):
        with pytest.raises(smp.SMPValidationError) as error:
            smp.resume_from_checkpoint(tmp_path, **options)  # type: ignore[arg-type]
        assert str(error.value).endswith(f" does not exist!\n{told}")


def test_full_checkpoints_alone_are_named(tmp_path: Path) -> None:
    """They are in no list: a job that forgets partial=False hears of a missing file, and of them."""
    begin(1, 1)
    whole = model()
    for step in (1, 2):
        smp.save_checkpoint(tmp_path, f"step_{step}", partial=False, model=whole, user_content={"step": step})
        os.utime(tmp_path / f"step_{step}", (step, step))
    (tmp_path / "user_content_of_others").touch()
    with pytest.raises(smp.SMPValidationError) as error:
        smp.resume_from_checkpoint(tmp_path)
    told = "There are full checkpoints of these tags, oldest first: step_1, step_2. Pass partial=False, and a tag."
    assert str(error.value) == f"{UNABLE.format(root=tmp_path)}\n{told}"
    assert smp.resume_from_checkpoint(tmp_path, tag="step_2", partial=False) == {"step": 2}


def test_a_root_that_is_misspelt(tmp_path: Path) -> None:
    theirs(tmp_path / "tags", "a", 1.0)
    begin(1, 1)
    for options in ({}, {"tag": "a"}, {"tag": "a", "partial": False}):
        with pytest.raises(smp.SMPValidationError) as error:
            smp.resume_from_checkpoint(tmp_path / "tgas", **options)  # type: ignore[arg-type]
        assert str(error.value).endswith(f"\nNothing lies there: did you mean {tmp_path}/tags?")


def test_a_list_of_older_versions(tmp_path: Path) -> None:
    (tmp_path / "newest").write_text("step_10\n")
    begin(1, 1)
    with pytest.raises(smp.SMPValidationError) as error:
        smp.resume_from_checkpoint(tmp_path)
    assert str(error.value) == (
        "The newest checkpoint file is not saved with `partial` postfix, this might be a checkpoint saved with smp <= "
        "1.10, please load with the back compatible APIs."
    )


def test_a_version_that_had_no_such_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs(tmp_path, "a", 2.0, smp_version="1.9.2")
    begin(1, 1)
    model()
    with pytest.raises(smp.SMPValidationError) as error:
        resumed(tmp_path)
    assert str(error.value) == (
        "Checkpoint was saved with smp version 1.9.2 < 1.10.0, which is not supported with this checkpointing API."
    )
    monkeypatch.setenv("SMP_VERIFY_CHECKPOINT_CONFIG", "0")
    assert resumed(tmp_path) == {"tag": "a"}


def test_another_version_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    theirs(tmp_path, "a", 2.0, smp_version="1.11.0", fast_mode=True)
    begin(1, 1)
    model()
    with caplog.at_level(logging.WARNING):
        resumed(tmp_path, strict_partitions=True)
    assert "Checkpoint version: 1.11.0, Current smp version: 1.12.1." in caplog.text
    assert "feature fast_mode, loaded True, current False" in caplog.text


def test_user_content_is_not_run(tmp_path: Path) -> None:
    theirs(tmp_path, "a", 2.0)
    torch.save(Kept(), tmp_path / "a_partial/user_content.pt")
    begin(1, 1)
    held = model()
    with pytest.raises(xla_ckpt.UntrustedObjectError, match="trust_pickle=True"):
        resumed(tmp_path)
    assert held.weight.eq(0).all()
    assert isinstance(resumed(tmp_path, trust_pickle=True), Kept)


def test_a_model_that_was_not_saved(tmp_path: Path) -> None:
    theirs(tmp_path, "a", 2.0)
    (tmp_path / "a_partial/model_0_0.pt").rename(tmp_path / "a_partial/optimizer_states_0_0.pt")
    begin(1, 1)
    model()
    with pytest.raises(smp.MissingCheckpointFilesError) as error:
        resumed(tmp_path)
    assert str(error.value) == f"Could not find partial checkpoint files with prefix {tmp_path}/a_partial/model"


# -- `newest` and the directories


def test_a_directory_that_was_saved_and_not_listed(tmp_path: Path) -> None:
    """The job ended after the commit, before `newest` was written."""
    theirs(tmp_path, "a", 1.0)
    begin(1, 1)
    held = model(7.0)
    smp.save_checkpoint(tmp_path, "b", model=held)
    assert (tmp_path / "newest").read_text() == "a_partial\nb_partial\n"
    (tmp_path / "newest").write_text("a_partial\n")
    torch.nn.init.constant_(held.weight, 0)
    resumed(tmp_path)
    assert held.weight.eq(7).all()
    (tmp_path / "newest").unlink()
    resumed(tmp_path)
    smp.save_checkpoint(tmp_path, "c", model=held)
    assert (tmp_path / "newest").read_text() == "a_partial\nb_partial\nc_partial\n"


def test_a_tag_that_is_saved_again_stands_once_and_is_the_newest(tmp_path: Path) -> None:
    """SMP lists it twice: its retention then deletes the directory that it has just written."""
    begin(1, 1)
    held = model(1.0)
    for tag in ("a", "b", "a", "a"):
        smp.save_checkpoint(tmp_path, tag, model=held, num_kept_partial_checkpoints=2)
    assert (tmp_path / "newest").read_text() == "b_partial\na_partial\n"
    assert names_in(tmp_path) == ["a_partial", "b_partial", "newest"]


def test_retention_counts_smps_own(tmp_path: Path) -> None:
    for tag in ("a", "b", "c"):
        theirs(tmp_path, tag, 1.0)
    begin(1, 1)
    held = model(1.0)
    for tag, kept in (("d", ["b", "c", "d"]), ("e", ["c", "d", "e"]), ("f", ["d", "e", "f"]), ("g", ["e", "f", "g"])):
        smp.save_checkpoint(tmp_path, tag, model=held, num_kept_partial_checkpoints=3)
        assert (tmp_path / "newest").read_text() == "".join(f"{name}_partial\n" for name in kept)
        assert names_in(tmp_path) == [*(f"{name}_partial" for name in kept), "newest"]


def test_a_directory_that_somebody_deleted(tmp_path: Path) -> None:
    for tag in ("a", "b"):
        theirs(tmp_path, tag, 1.0)
    for file in (tmp_path / "b_partial").iterdir():
        file.unlink()
    (tmp_path / "b_partial").rmdir()
    begin(1, 1)
    model()
    assert resumed(tmp_path) == {"tag": "a"}


# -- jobs


def resumes(rank: int, root: str) -> list[Any]:
    begin(1, 2)
    found = [caught(lambda: resumed(root, tag="x")), caught(lambda: resumed(root, partial=False))]
    held = model(9.0)
    found.append(resumed(root))
    found.append(held.weight.tolist())
    (Path(root) / f"a_partial/model_0_{rank}.pt").write_bytes(b"")
    torch.distributed.barrier()
    found.append(caught(lambda: resumed(root)))
    found.append(held.weight.tolist())
    found.append(caught(lambda: resumed(root, tag="a" if rank else "b")))
    return found


def test_all_ranks_raise_the_same_errors(tmp_path: Path) -> None:
    theirs(tmp_path, "b", 1.0)
    theirs(tmp_path, "a", 2.0)
    one, other = run_on_ranks(resumes, 2, str(tmp_path))
    assert one == other
    assert one[0][0] == "SMPValidationError"
    assert one[0][1].startswith(f"Checkpoint {tmp_path}/x_partial does not exist!\nTags of partial checkpoints there")
    assert one[1] == ("SMPValidationError", "tag is required to load a full checkpoint!")
    assert one[2] == {"tag": "a"}
    assert one[3] == one[5] == (WEIGHT + 2).tolist()
    assert one[4][0] == "CorruptCheckpointError"
    assert "resume from different checkpoints" in one[6][1]
