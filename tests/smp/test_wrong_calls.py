"""Calls with an argument that does not exist, and calls that are given another library's checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint

import neuron_compat.nxd as nxd
import neuron_compat.smp as smp
import xla_ckpt
from neuron_compat.emulated.smp.model import DistributedModel
from neuron_compat.nxd.parallel_layers import checkpointing

pytestmark = pytest.mark.usefixtures("clean")


@pytest.mark.parametrize(
    ("call", "wrong", "meant"),
    [
        (smp.save_checkpoint, "optimiser", "optimizer"),
        (smp.resume_from_checkpoint, "load_optimiser", "load_optimizer"),
        (smp.save, "partal", "partial"),
        (smp.load, "maplocation", "map_location"),
        (DistributedModel.load_state_dict, "translate_fn", "translate_function"),
        (nxd.save_checkpoint, "use_xserr", "use_xser"),
        (nxd.save_checkpoint, "optoins", "options"),  # xla_ckpt.save_checkpoint has it
        (nxd.load_checkpoint, "trust_pickel", "trust_pickle"),
        (checkpointing.save, "save_serialy", "save_serially"),
        (checkpointing.load, "model_kee", "model_key"),
    ],
)
def test_an_argument_that_does_not_exist(tmp_path: Path, call: Callable[..., Any], wrong: str, meant: str) -> None:
    with pytest.raises(TypeError, match=rf"{call.__name__}\(\) has no argument '{wrong}': did you mean '{meant}'"):
        call(str(tmp_path / "run"), **{wrong: None})
    assert [*tmp_path.iterdir()] == []


def test_what_is_handed_on_is_known_by_who_gets_it(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"no argument 'replicas': say options=SaveOptions\(replicas=...\)"):
        nxd.save_checkpoint(tmp_path / "run", "a", replicas="first")
    smp.init({})
    smp.save({"step": 1}, str(tmp_path / "full.pt"), partial=False, pickle_protocol=2)
    assert smp.load(str(tmp_path / "full.pt"), partial=False, encoding="utf-8") == {"step": 1}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated")
def test_a_checkpoint_of_another_library(tmp_path: Path) -> None:
    smp.init({})
    model = DistributedModel(torch.nn.Linear(2, 2))
    dcp: Any = torch.distributed.checkpoint
    dcp.save({"model": model.module.state_dict()}, checkpoint_id=tmp_path / "dcp/step_1", no_dist=True)
    xla_ckpt.save_checkpoint(tmp_path / "own", "step_2", model.module)
    smp.save_checkpoint(tmp_path / "smp", "step_3", model=model)
    wrong = [
        (
            lambda: smp.load(f"{tmp_path}/dcp/step_1"),
            "A checkpoint of torch.distributed.checkpoint lies there: xla_ckpt.l",
        ),
        (
            lambda: smp.load(f"{tmp_path}/dcp/step_1", partial=False),
            "A checkpoint of torch.distributed.checkpoint lies",
        ),
        (
            lambda: smp.load(f"{tmp_path}/own"),
            r"Checkpoints of xla_ckpt lie there, oldest first: step_2\. xla_ckpt.load",
        ),
        (
            lambda: smp.load(f"{tmp_path}/smp/step_3_partial"),
            r"resume_from_checkpoint\('/.*/smp', tag='step_3'\) reads it",
        ),
        (lambda: smp.resume_from_checkpoint(tmp_path / "smp/step_3_partial"), "/smp', tag='step_3'\\) reads it"),
        (lambda: smp.load(f"{tmp_path}/smp"), "smp.resume_from_checkpoint reads them"),
        (lambda: smp.resume_from_checkpoint(tmp_path / "dcp"), "Checkpoints of torch.distributed.checkpoint lie there"),
        (lambda: smp.resume_from_checkpoint(tmp_path / "dcp", "step_1"), "lie there, oldest first: step_1"),
        (lambda: smp.resume_from_checkpoint(tmp_path / "dcp", "step_1", False), "lie there, oldest first: step_1"),
    ]
    for call, says in wrong:
        with pytest.raises((smp.SMPValidationError, xla_ckpt.NoCheckpointError), match=says):
            call()
    with pytest.raises(smp.MissingCheckpointFilesError) as error:
        smp.load(f"{tmp_path}/nothing")
    assert error.value.details is None
    expected = model.module.weight.detach().clone()
    torch.nn.init.zeros_(model.module.weight)
    xla_ckpt.load_checkpoint(tmp_path / "dcp", model=model)  # as the error says
    assert torch.equal(model.module.weight, expected)
