"""Jobs of SageMaker model parallel's in half precision: master weights by group, and what scales the loss."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from tests.formats.smp_job import Job, part, trained
from xla_ckpt.errors import IncompatibleCheckpointError


class DynamicLossScaler:
    """As SMP's own: an object of plain numbers."""

    def __init__(self) -> None:
        self.cur_scale, self.cur_iter, self.model = 65536.0, 7, None


@pytest.fixture
def smp_scaler(monkeypatch: pytest.MonkeyPatch) -> type:
    """The class under the name that it has in SMP, which is not installed here."""
    name = "smdistributed.modelparallel.torch.fp16.loss_scaler"
    module = types.ModuleType(name)
    kind = type("DynamicLossScaler", (DynamicLossScaler,), {"__module__": name})
    module.DynamicLossScaler = kind  # type: ignore[attr-defined]
    for n in range(1, name.count(".") + 1):
        above = ".".join(name.split(".")[:n])
        monkeypatch.setitem(sys.modules, above, types.ModuleType(above))
    monkeypatch.setitem(sys.modules, name, module)
    return kind


def masters(job: Job, pp: int, tp: int) -> list[list[torch.Tensor]]:
    """fp32 copies of the parameters that a rank has, by group."""
    order, mine = job.order(tp), job.mine(pp, tp)
    wide = [n for n in order if job.weights[n].dim() > 1]
    return [
        [part(n, master(job.weights[n]), job.tp, tp) for n in names if n in mine]
        for names in (wide, [n for n in order if n not in wide])
    ]


def master(value: torch.Tensor) -> torch.Tensor:
    return value.float() + 1e-5


def half_state(job: Job, pp: int, tp: int, scaler: Any) -> dict[str, Any]:
    return {
        "loss_scaler": scaler, "dynamic_loss_scale": True, "overflow": False, "first_closure_call_this_step": True,
        "fp32_from_fp16": masters(job, pp, tp),
    }  # fmt: skip


def check_masters(job: Job, path: Path) -> None:
    """A model in fp32 gets the master weights, one in half precision its own."""
    job.check(path, optimizer=False)
    net, optimizer = trained(1, seed=1)
    xla_ckpt.load_checkpoint(path, model=net, optimizer=optimizer)
    assert all(torch.equal(master(job.weights[n]), value) for n, value in net.state_dict().items())


def test_master_weights(tmp_path: Path, smp_scaler: type) -> None:
    job = Job(dtype=torch.float16)

    def content(job: Job, pp: int, tp: int) -> Any:
        wrapped = {**half_state(job, pp, tp, smp_scaler()), "optimizer_state_dict": job.optimizer_state(pp, tp)}
        return {"model_state_dict": job.model(pp, tp), "optimizer_state_dict": wrapped}

    job.write(tmp_path / "c", content)
    check_masters(job, tmp_path / "c")
    states = xla_ckpt.restore(tmp_path / "c", like={"extras": None}).tree["extras"]["fp16_states"]
    assert states == {
        "loss_scaler": {"class": "DynamicLossScaler", "cur_scale": 65536.0, "cur_iter": 7, "model": None},
        "dynamic_loss_scale": True, "overflow": False, "first_closure_call_this_step": True,
    }  # fmt: skip


def test_master_weights_in_a_directory(tmp_path: Path, smp_scaler: type) -> None:
    job = Job(dtype=torch.float16)
    folder = tmp_path / "a_partial"
    folder.mkdir()
    for pp in range(2):
        for tp in range(2):
            torch.save(job.model(pp, tp), folder / f"model_{pp}_{tp}.pt")
            torch.save(job.optimizer_state(pp, tp), folder / f"optimizer_states_{pp}_{tp}.pt")
            torch.save(half_state(job, pp, tp, smp_scaler()), folder / f"fp16_states_{pp}_{tp}.pt")
    torch.save({"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2}, folder / "smp_config.pt")
    check_masters(job, folder)
    assert xla_ckpt.verify(folder).ok


def test_master_weights_that_nobody_can_name(tmp_path: Path) -> None:
    """The states say which parameters a rank has. With fewer of them the lists say nothing; all else is read."""
    job = Job(dtype=torch.float16)

    def content(job: Job, pp: int, tp: int) -> Any:
        optimizer = job.optimizer_state(pp, tp)
        del optimizer["state"][job.order(tp).index("qkv.bias" if pp else "norm.bias")]
        wrapped = {**half_state(job, pp, tp, None), "optimizer_state_dict": optimizer}
        return {"model": job.model(pp, tp), "optimizer": wrapped}

    job.write(tmp_path / "c", content)
    job.check(tmp_path / "c", optimizer=False)
    net, optimizer = trained(1, seed=1)
    net = net.half()
    xla_ckpt.load_checkpoint(tmp_path / "c", model=net, optimizer=optimizer)
    with pytest.raises(IncompatibleCheckpointError, match="the master weights are lists in the order"):
        xla_ckpt.restore(tmp_path / "c", like={"extras": None})
