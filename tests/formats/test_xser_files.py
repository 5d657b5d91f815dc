"""Files of torch_xla's ``serialization.save``: under the names that programs use, alone and as older tags."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from tests.jobs import run_alone

Parts = dict[str, Any]

FORMS: dict[str, Callable[[Parts], Parts]] = {
    "model": lambda its: {"model": its["model"], "optimizer": its["optim"], "scheduler": its["sched"], "epoch": 3},
    "model_state_dict": lambda its: {
        "epoch": 3,
        "model_state_dict": its["model"],
        "optimizer_state_dict": its["optim"],
        "lr_scheduler_state_dict": its["sched"],
    },
    "optim": lambda its: {"epoch": 3, "model": its["model"], "optim": its["optim"], "sched": its["sched"]},
    "state_dict": lambda its: {
        "state_dict": its["model"],
        "optimizer": its["optim"],
        "lr_scheduler": its["sched"],
        "epoch": 3,
    },
    "net": lambda its: {
        "net": its["model"],
        "optim_state_dict": its["optim"],
        "scheduler_state_dict": its["sched"],
        "epoch": 3,
    },
}


def trainer(seed: int, device: Any = "cpu") -> tuple[Any, Any, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def saves(folder: Path) -> None:
    import torch_xla
    import torch_xla.core.xla_model as xm
    from torch_xla.utils import serialization

    model, optimizer, scheduler = trainer(0, torch_xla.device())
    for _ in range(3):
        model(torch.arange(6.0, device=torch_xla.device()).reshape(2, 3)).pow(2).sum().backward()
        optimizer.step()
        scheduler.step()
        torch_xla.sync()
    parts = {"model": model.state_dict(), "optim": optimizer.state_dict(), "sched": scheduler.state_dict()}
    for name, form in FORMS.items():
        xm.save(form(parts), f"{folder}/{name}.xm.pt")
        serialization.save(form(parts), f"{folder}/{name}.pt")
        rank = folder / f"{name}.old/epoch/tp_rank_00_pp_rank_00"
        rank.mkdir(parents=True)
        shutil.copy(folder / f"{name}.pt", rank / "checkpoint.pt")
        shutil.copytree(folder / f"{name}.pt.tensors", rank / "checkpoint.pt.tensors")
    serialization.save(model.state_dict(), f"{folder}/bare.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("xser")
    run_alone(saves, folder, xla=True)
    return folder


def loaded(path: Path) -> list[Any]:
    """All that a load gives to a program."""
    model, optimizer, scheduler = trainer(5)
    report = xla_ckpt.load_checkpoint(path, model=model, optimizer=optimizer, scheduler=scheduler)
    states = [value for of_one in optimizer.state.values() for value in of_one.values()]
    # xm.save makes lists of tuples.
    options = [
        {k: list(v) if k == "betas" else v for k, v in g.items() if k != "params"} for g in optimizer.param_groups
    ]
    return [report.user_content, options, scheduler.state_dict(), [*model.state_dict().values(), *states]]


@pytest.mark.parametrize("lies", [".pt", ".old"], ids=["a file", "an older tag"])
@pytest.mark.parametrize("form", FORMS)
def test_the_usual_names_are_found_as_in_files_of_xm_save(folder: Path, form: str, lies: str) -> None:
    *others, tensors = loaded(folder / f"{form}{lies}")
    *wanted, wanted_tensors = loaded(folder / f"{form}.xm.pt")
    assert others == wanted
    assert others[0] == {"epoch": 3}
    assert len(tensors) == len(wanted_tensors) == 19
    assert all(map(torch.equal, tensors, wanted_tensors))


def test_a_file_is_verified_converted_and_refused_without_its_tensors(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "bare.pt"
    shutil.copy(folder / "bare.pt", file)
    with pytest.raises(xla_ckpt.CorruptCheckpointError, match=r"put that directory beside"):
        xla_ckpt.restore(file)
    tensors = shutil.copytree(folder / "bare.pt.tensors", f"{file}.tensors")
    assert xla_ckpt.has_checkpoint(file)
    assert xla_ckpt.verify(file).ok
    xla_ckpt.convert(file, tmp_path / "out")
    model = trainer(5)[0]
    xla_ckpt.load_checkpoint(tmp_path / "out", model=model)
    assert model[1].num_batches_tracked == 3
    one = Path(tensors) / "tensor_1.pt"
    data = bytearray(one.read_bytes())
    place = data.index(model.state_dict()["0.bias"].numpy().tobytes())
    data[place] ^= 1
    one.write_bytes(data)
    assert not xla_ckpt.verify(file).ok
    with pytest.raises(xla_ckpt.CorruptCheckpointError, match="tensor_1.pt"):
        xla_ckpt.restore(file)
    one.unlink()
    with pytest.raises(xla_ckpt.CorruptCheckpointError, match="the file of a tensor is missing"):
        xla_ckpt.restore(file)
