"""Defects of neuronx-distributed that these calls must not have, by the numbers of docs/measured/nxd.md.

Others of them are in test_nxd_checkpoint.py and in tests/formats.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_xla
from torch_xla.distributed.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from torch_xla.utils.serialization import TensorReference

import neuron_compat
import neuron_compat.nxd as nxd
import xla_ckpt
from neuron_compat.nxd.optimizer import NeuronZero1Optimizer
from neuron_compat.nxd.parallel_layers import parallel_state as ps
from tests.formats.test_nxd_layouts import rank_file
from tests.jobs import run_on_ranks
from tests.nursery import Call, bear
from tests.runs import names_in
from tests.same import same
from xla_ckpt.storage.local import LocalStore

pytestmark = pytest.mark.xla

LAYOUTS = ("pt", "xser")

Groups = tuple[torch.nn.Module, Any]


def build(value: float) -> Groups:
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 4)).to(torch.bfloat16).to("xla")
    for p in model.parameters():
        torch.nn.init.constant_(p, value)
    groups = [{"params": list(model[0].parameters()), "weight_decay": 0.1}, {"params": list(model[1].parameters())}]
    options = {"save_master_weights": True, "pin_layout": False, "lr": 1e-2}
    return model, NeuronZero1Optimizer(groups, torch.optim.AdamW, **options)


def step(model: torch.nn.Module, optimizer: Any) -> None:
    rank = torch.distributed.get_rank()
    model(torch.full((2, 4), 1.0 + rank, device="xla", dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    torch_xla.sync()


def frozen(model: torch.nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    states = optimizer.state_dict()
    found = {f"model.{n}": p.detach().cpu().clone() for n, p in model.named_parameters()}
    found |= {f"master.{i}": v.cpu().clone() for i, v in states["sharded_master_weights"].items()}
    for i, state in states["base_state"].items():
        found |= {f"{i}.{k}": v.cpu().clone() for k, v in state.items()}
    return found


def with_master_weights(rank: int, root: str) -> list[Any]:
    """Save and load with and without experts; whether there was an optimizer of its own, and what is refused."""
    neuron_compat.emulate()
    told: list[Any] = []
    model = torch.nn.Module()
    for ep in (1, 2):
        ps.destroy_model_parallel()
        ps.initialize_model_parallel(expert_model_parallel_size=ep)
        model, optimizer = build(0.5)
        step(model, optimizer)
        want = frozen(model, optimizer)
        assert sum(k.startswith("master") for k in want) == 4
        assert want["master.0"].dtype == torch.float32
        nxd.save_checkpoint(root, f"ep_{ep}", model, optimizer, use_xser=True, use_zero1_dcp=True)
        fresh = build(0.25)
        nxd.load_checkpoint(root, f"ep_{ep}", *fresh, use_zero1_dcp=True)
        assert same(frozen(*fresh), want)
        step(model, optimizer), step(*fresh)
        assert same(frozen(*fresh), frozen(model, optimizer))
        told.append(os.path.exists(f"{root}/ep_{ep}/optim"))
    for p in model.get_submodule("0").parameters():
        p.expert_model_parallel = True
    with pytest.raises(xla_ckpt.UsageError) as caught:
        NeuronZero1Optimizer(model.parameters(), torch.optim.AdamW, save_master_weights=True, lr=0.1)
    with pytest.raises(xla_ckpt.UsageError, match=r'model\.to\("xla"\)'):
        NeuronZero1Optimizer(torch.nn.Linear(2, 2).parameters(), torch.optim.AdamW, lr=0.1)
    experts = ZeroRedundancyOptimizer(  # what the error says works
        model.get_submodule("0").parameters(), torch.optim.AdamW, lr=0.1, pin_layout=False,
        save_master_weights=True, sharding_groups=ps.get_expert_data_parallel_replica_groups(),
    )  # fmt: skip
    step(model, experts)
    want = frozen(model, experts)
    nxd.save_checkpoint(root, "experts", model, extras={"experts": xla_ckpt.PerRank(experts)})
    experts.step()
    torch_xla.sync()
    nxd.load_checkpoint(root, "experts", model, extras={"experts": xla_ckpt.PerRank(experts)})
    assert same(frozen(model, experts), want)
    return [*told, str(caught.value)]


@pytest.fixture(scope="module")
def zero1(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """What the ranks of a job with ZeRO-1 and master weights told."""
    return run_on_ranks(with_master_weights, 2, str(tmp_path_factory.mktemp("zero1") / "run"), xla=True)


def test_n5_master_weights_beside_expert_parallelism(zero1: list[list[Any]]) -> None:
    """Saved in NxD's files, under a key that NxD ignores, or refused; never left out in silence."""
    for _, beside_experts, refused in zero1:
        assert beside_experts is True
        assert "does not shard experts" in refused


def test_n13_use_zero1_dcp_with_two_param_groups(zero1: list[list[Any]]) -> None:
    assert [told[0] for told in zero1] == [True] * 2


def saves_and_makes_no_other_call(root: Path, layout: str) -> None:
    model = {"w": torch.full((1000,), 7.0), "b": torch.arange(5)}
    nxd.save_checkpoint(root, "step_1", model, user_content={"step": 1}, use_xser=layout == "xser", async_save=True)
    model["w"].fill_(8.0)
    threading.Event().wait()  # and no end of the program


def test_n7_an_asynchronous_save_needs_no_other_call_to_be_complete(tmp_path: Path) -> None:
    running = {
        layout: bear(Call.of(saves_and_makes_no_other_call, tmp_path / layout, layout), xla=True) for layout in LAYOUTS
    }
    end = time.monotonic() + 120
    for layout, process in running.items():
        while not (tmp_path / layout / "step_1/done").exists() and not process.has_ended() and time.monotonic() < end:
            time.sleep(0.001)
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    for layout in LAYOUTS:
        assert nxd.has_checkpoint(tmp_path / layout)
        assert xla_ckpt.verify(tmp_path / layout, "step_1").ok
        model = {"w": torch.zeros(1000), "b": torch.zeros(5, dtype=torch.int64)}
        assert nxd.load_checkpoint(tmp_path / layout, model=model) == {"step": 1}
        assert (model["w"] == 7).all()


def save_best(root: Path, layout: str, value: float, names: str) -> None:
    model = {name: torch.full((50,), value) for name in names}
    nxd.save_checkpoint(root, "best", model, user_content=value, use_xser=layout == "xser")


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def saves_again_and_is_killed(root: Path, layout: str, instant: str) -> None:
    from tests.helper import InThread
    from xla_ckpt.tags import orbax_commit

    orbax_commit.HelperProcess = InThread  # type: ignore[misc]  # it is killed with this process
    save_best(root, layout, 1.0, "abc")
    fsync, rename, done = os.fsync, os.rename, list[Any]()

    def rename_and_die(old: str, new: str, **options: Any) -> None:
        rename(old, new, **options)
        if os.path.basename(new) == ".old-best":
            die()

    if instant == "writing":
        os.fsync = lambda fd: die() if len(done) > 1 else done.append(fsync(fd))
    elif instant == "handing over":
        orbax_commit.OrbaxCommitter.commit = die  # type: ignore[assignment]
    else:  # the old version is out of the way, the new one not in its place
        LocalStore.exchange = lambda *_: False  # type: ignore[method-assign]  # as on a file system that cannot
        os.rename = rename_and_die  # type: ignore[assignment]
    save_best(root, layout, 2.0, "a")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("instant", ["writing", "handing over", "replacing"])
def test_n10_a_tag_that_is_saved_again_stays_whole(tmp_path: Path, layout: str, instant: str) -> None:
    root = tmp_path / "run"
    process = bear(Call.of(saves_again_and_is_killed, root, layout, instant), xla=True)
    process.communicate(120)
    assert process.returncode == -signal.SIGKILL
    assert len(list(root.iterdir())) >= 2, "it was not killed in the middle"
    assert xla_ckpt.list_tags(root) == ["best"]
    model = {name: torch.zeros(50) for name in "abc"}
    assert nxd.load_checkpoint(root, "best", model=model) == 1.0
    assert all((v == 1).all() for v in model.values())
    assert xla_ckpt.verify(root, "best").ok

    nxd.save_checkpoint(root, "best", {"a": torch.full((50,), 3.0)}, use_xser=layout == "xser")
    nxd.finalize_checkpoint()  # the old version goes in the background
    assert names_in(root) == ["best"]
    assert sorted(str(p.relative_to(root / "best")) for p in root.rglob("*.pt")) == [  # no user content, no b, no c
        "model/dp_rank_00_tp_rank_00_pp_rank_00.pt",
        *(["model/dp_rank_00_tp_rank_00_pp_rank_00.pt.info.pt",
           "model/dp_rank_00_tp_rank_00_pp_rank_00.pt.tensors/tensor_0.pt"] if layout == "xser" else []),
    ]  # fmt: skip
    assert nxd.load_checkpoint(root, "best", model={"a": model["a"]}) is None
    assert (model["a"] == 3).all()


def test_n15_a_hundred_experts_in_a_directory_with_a_name_like_a_file(tmp_path: Path) -> None:
    """xser: what is no expert's lies with ep_rank_00 alone, so the reader turns one name into another."""
    root, ranks = tmp_path / "dp_rank_00_ep_rank_01_run", 101
    tag = "a_ep_rank_01_b"

    def reference(tid: int) -> TensorReference:
        return TensorReference(tid)

    for ep in range(ranks):
        rank_file(root / tag / "model", {"expert": reference(0), "norm": reference(1)}, ep=ep)
        name = f"dp_rank_00_ep_rank_{ep:02d}_tp_rank_00_pp_rank_00.pt"
        info = {
            0: {"dtype": torch.float32, "shape": torch.Size([1, 2]), "expert_model_parallel": True},
            1: {"dtype": torch.float32, "shape": torch.Size([3]), "expert_model_parallel": False},
        }
        torch.save(info, root / tag / "model" / f"{name}.info.pt")
        tensors = root / tag / "model" / f"{name}.tensors"
        tensors.mkdir()
        torch.save(torch.full((1, 2), float(ep)), tensors / "tensor_0.pt")
        if ep == 0:
            torch.save(torch.arange(3.0), tensors / "tensor_1.pt")
    (root / tag / "done").write_text("1")
    model = {"expert": torch.zeros(ranks, 2), "norm": torch.zeros(3)}
    nxd.load_checkpoint(root, tag, model=model)
    assert model["expert"][:, 1].tolist() == list(range(ranks))
    assert model["norm"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("zero1", [True, False])
def test_n15_an_optimizer_given_as_a_dict(tmp_path: Path, dp: int, zero1: bool) -> None:
    """Whether it is a ZeRO-1 one is in the file, and not in how many of them there are."""
    full = torch.arange(4.0)
    rank_file(tmp_path / "a/model", {"w": full})
    for rank in range(dp if zero1 else 1):
        part = full.chunk(dp)[rank].clone() if zero1 else full
        state = {0: {"step": torch.tensor(9.0), "exp_avg": part, "exp_avg_sq": part}}
        content: dict[str, Any] = {"state": state, "param_groups": [{"lr": 0.5, "params": [0]}]}
        if zero1:
            content = {**content, "state": {}, "base_state": state, "shape_info": {0: [4]}}
        rank_file(tmp_path / "a/optim", content, dp=rank)
    (tmp_path / "a/done").write_text("1")
    optimizer: dict[str, Any] = {}
    nxd.load_checkpoint(tmp_path, "a", model={"w": torch.zeros(4)}, optimizer=optimizer)
    assert optimizer["param_groups"][0]["lr"] == 0.5
    state = next(iter(optimizer["state"].values()))
    assert state["exp_avg"].tolist() == [0, 1, 2, 3]
    assert state["step"] == 9


class Tied(torch.nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(6, 4), torch.nn.Linear(4, 6, bias=False)
        torch.nn.init.constant_(self.embed.weight, value)
        self.head.weight = self.embed.weight


def stepped(model: torch.nn.Module) -> torch.optim.AdamW:
    optimizer = torch.optim.AdamW(model.parameters())
    for number, parameter in enumerate(model.parameters(), 1):
        parameter.grad = torch.full_like(parameter, float(number))
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("device", ["cpu", "xla"])
@pytest.mark.parametrize("layout", ["native", "pt", "xser"])
def test_n16_tied_weights_of_sibling_modules(tmp_path: Path, layout: str, device: str) -> None:
    model = Tied(1.0).to(device)
    model.head.weight = model.embed.weight  # to("xla") has untied them, as torch does: see below
    optimizer = stepped(model)
    nxd.save_checkpoint(tmp_path, "a", model, optimizer, layout=layout)
    assert xla_ckpt.verify(tmp_path, "a").ok
    stored = sum(f.stat().st_size for f in (tmp_path / "a/model").rglob("*"))
    fresh = Tied(2.0).to(device)
    fresh.head.weight = fresh.embed.weight
    again = stepped(fresh)
    nxd.load_checkpoint(tmp_path, "a", fresh, again)
    assert fresh.head.weight is fresh.embed.weight
    assert torch.equal(fresh.head.weight.cpu(), model.head.weight.cpu())
    assert len(again.state) == 1
    assert torch.equal(
        again.state[fresh.embed.weight]["exp_avg"].cpu(), optimizer.state[model.embed.weight]["exp_avg"].cpu()
    )
    # into a model that has two weights: both get it
    apart = Tied(3.0)
    apart.head.weight = torch.nn.Parameter(torch.zeros(6, 4))
    nxd.load_checkpoint(tmp_path, "a", apart)
    assert torch.equal(apart.head.weight, apart.embed.weight)
    assert torch.equal(apart.head.weight.detach(), model.head.weight.detach().cpu())
    nxd.save_checkpoint(tmp_path, "b", apart, layout=layout)  # two weights
    both = sum(f.stat().st_size for f in (tmp_path / "b/model").rglob("*"))
    assert both > stored if layout == "native" else both == stored  # NxD's files have each name's, and so have these


def test_n16_weights_that_to_xla_has_untied_are_two(tmp_path: Path) -> None:
    model = Tied(1.0).to("xla")
    assert model.head.weight is not model.embed.weight  # torch, not this library: tie them again after it
    optimizer = stepped(model)
    assert not torch.equal(model.head.weight.cpu(), model.embed.weight.cpu()) or len(optimizer.state) == 2
    with torch.no_grad():
        model.head.weight.fill_(5.0)
    nxd.save_checkpoint(tmp_path, "a", model, optimizer, use_xser=True)
    fresh = Tied(2.0).to("xla")
    again = stepped(fresh)
    nxd.load_checkpoint(tmp_path, "a", fresh, again)
    assert (fresh.head.weight == 5).all()
    assert torch.equal(fresh.embed.weight.cpu(), model.embed.weight.cpu())
    for a, b in zip(fresh.parameters(), model.parameters(), strict=True):
        assert torch.equal(again.state[a]["exp_avg"].cpu(), optimizer.state[b]["exp_avg"].cpu())
