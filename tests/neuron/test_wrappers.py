"""neuronx-distributed's own objects in a job: what is saved of them is what is saved of the objects that they wrap.

The wrappers are those of tests/neuron/standins.py.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import neuron_compat
import neuron_compat.nxd as nxd
import xla_ckpt
from neuron_compat.nxd.parallel_layers import parallel_state as ps
from tests.formats.references import opened
from tests.jobs import run_on_ranks
from tests.neuron.standins import (
    LoraConfig,
    LoraModel,
    NxDModel,
    NxDOptimizer,
    NxDPPModel,
    experts_zero1,
)
from tests.same import differences, same

LAYOUTS = ("native", "xser", "pt")

Plain = dict[str, Any]


class Rotary(torch.nn.Module):
    """A layer with a buffer that is saved, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)
        self.register_buffer("inv_freq", torch.rand(3))
        self.register_buffer("mask", torch.ones(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def build(seed: int) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), Rotary(), torch.nn.Linear(4, 4))


def trained(model: torch.nn.Module, parameters: Any = None) -> Any:
    """An optimizer with state, of two groups that are not in the order of the model."""
    found = [p for p in (parameters or model.parameters()) if p.requires_grad]
    matrices = {"params": [p for p in found if p.dim() > 1], "weight_decay": 0.1}
    optimizer = torch.optim.AdamW([{"params": [p for p in found if p.dim() < 2]}, matrices], lr=0.01)
    for p in found:
        p.grad = torch.full_like(p, 0.5)
    optimizer.step()
    return optimizer


def falling(optimizer: Any) -> torch.optim.lr_scheduler.LambdaLR:
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (n + 1))
    optimizer.step()
    scheduler.step()
    return scheduler


def arrays(path: Path, tag: str) -> Plain:
    """All arrays of a tag by leaf path, and the rest of it."""
    found: Plain = {}

    def collect(value: Any, name: str) -> None:
        if isinstance(value, dict):
            for key, member in value.items():
                collect(member, f"{name}/{key}")
        else:
            found[name] = value

    collect(xla_ckpt.restore(path, tag).tree, "")
    return found


def states(optimizer: Any) -> Plain:
    packed = optimizer.state_dict()
    found = {f"{i}.{k}": v.clone() for i, state in packed["state"].items() for k, v in state.items()}
    return {**found, "groups": packed["param_groups"]}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_wrapped_objects_are_stored_and_loaded_as_those_in_them(tmp_path: Path, layout: str) -> None:
    model = build(0)
    optimizer = trained(model)
    scheduler = falling(NxDOptimizer(optimizer))
    xla_ckpt.save_checkpoint(tmp_path, "bare", model, optimizer, scheduler, layout=layout)
    wrapped = NxDModel(NxDModel(model)), NxDOptimizer(NxDOptimizer(optimizer)), scheduler
    xla_ckpt.save_checkpoint(tmp_path, "wrapped", *wrapped, layout=layout)
    stored = arrays(tmp_path, "wrapped")
    assert "/optimizer/state/1.inner.weight/exp_avg" in stored
    assert same(stored, arrays(tmp_path, "bare"))
    other = build(1)
    mine = trained(other)
    theirs = falling(NxDOptimizer(mine))
    xla_ckpt.load_checkpoint(tmp_path, "bare", NxDModel(other), NxDOptimizer(mine), theirs)
    assert same(other.state_dict(), model.state_dict())
    assert same(states(mine), states(optimizer))
    assert theirs.get_last_lr() == scheduler.get_last_lr()


@pytest.mark.parametrize("pipeline", [False, True])
def test_a_wrapped_model_is_loaded_into_its_own_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pipeline: bool
) -> None:
    """And not through the `load_state_dict` of a wrapper, which would take the memory of a second model."""

    def wrapped(seed: int) -> tuple[Any, Any]:
        inner = build(seed)
        inner[1].inner = checkpoint_wrapper(inner[1].inner)  # as activation checkpoints of NxD's recipes
        if pipeline:
            return inner, NxDModel(NxDPPModel(inner, [0, 1, 2]), stages=2)
        return inner, NxDModel(inner)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the model was loaded through load_state_dict")

    inner, model = wrapped(0)
    xla_ckpt.save_checkpoint(tmp_path, "a", model)
    assert "/model/1.inner.weight" in arrays(tmp_path, "a")
    fresh, other = wrapped(1)
    for kind in (NxDModel, NxDPPModel, torch.nn.Module):
        monkeypatch.setattr(kind, "_load_from_state_dict", refuse)
    xla_ckpt.load_checkpoint(tmp_path, "a", other)
    assert same(fresh.state_dict(), inner.state_dict())


def test_a_wrapper_that_adds_state_is_stored_as_it_is(tmp_path: Path) -> None:
    class Scaled(NxDOptimizer):
        scale = 8.0

        def state_dict(self) -> Any:
            return {**self.optimizer.state_dict(), "scale": self.scale}

        def load_state_dict(self, state_dict: Any) -> None:
            self.scale = state_dict["scale"]
            self.optimizer.load_state_dict({k: v for k, v in state_dict.items() if k != "scale"})

    class Counted(NxDModel):
        count = 0

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return {**self.module.state_dict(*args, **kwargs), "count": torch.tensor(self.count)}

        def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
            self.count = int(state_dict["count"])
            return self.module.load_state_dict({k: v for k, v in state_dict.items() if k != "count"}, *args, **kwargs)

    model = build(0)
    optimizer = Scaled(trained(model))
    optimizer.scale = 16.0
    counted = Counted(model)
    counted.count = 3
    xla_ckpt.save_checkpoint(tmp_path, "a", counted, optimizer)
    assert arrays(tmp_path, "a")["/optimizer/scale"] == 16.0
    assert arrays(tmp_path, "a")["/model/count"] == 3
    fresh = build(1)
    mine = Scaled(trained(fresh))
    other = Counted(fresh)
    xla_ckpt.load_checkpoint(tmp_path, "a", optimizer=mine, model=other)
    assert other.count == 3
    assert mine.scale == 16.0
    assert same(states(mine.optimizer), states(optimizer.optimizer))


def test_a_wrapper_with_a_state_of_its_own_is_no_mere_wrapper(tmp_path: Path) -> None:
    """As Lookahead is written: its slow weights are in its own `state`, which torch's `state_dict` saves."""

    class Lookahead(torch.optim.Optimizer):
        def __init__(self, inner: Any) -> None:
            super().__init__(inner.param_groups, {})
            self.optimizer, self.param_groups = inner, inner.param_groups

        def slow(self, value: float) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p]["slow"] = torch.full_like(p, value)

    model = build(0)
    optimizer = Lookahead(trained(model))
    optimizer.slow(3.0)
    xla_ckpt.save_checkpoint(tmp_path, "a", model, optimizer)
    fresh = build(1)
    mine = Lookahead(trained(fresh))
    xla_ckpt.load_checkpoint(tmp_path, "a", fresh, mine)
    assert [float(s["slow"].mean()) for s in mine.state.values()] == [3.0] * len(mine.state)
    assert len(mine.state) > 0


def test_a_wrapper_with_a_load_of_its_own_is_asked(tmp_path: Path) -> None:
    class Refusing(torch.nn.Module):
        def __init__(self, module: Any) -> None:
            super().__init__()
            self.module = module

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return self.module.state_dict(*args, **kwargs)

        def load_state_dict(self, state_dict: Any, *_: Any, **__: Any) -> Any:
            raise ValueError("not mine")

    model = build(0)
    xla_ckpt.save_checkpoint(tmp_path, "a", model)
    fresh = build(1)
    before = {n: p.clone() for n, p in fresh.state_dict().items()}
    with pytest.raises(xla_ckpt.LoadError, match="not mine"):
        xla_ckpt.load_checkpoint(tmp_path, "a", Refusing(fresh))
    assert same(fresh.state_dict(), before, order=False)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_stage_of_a_pipeline_has_the_names_of_the_whole_model(tmp_path: Path, layout: str) -> None:
    whole = build(0)
    stage = NxDModel(NxDPPModel(whole, [0, 1]), stages=2)
    mine = [p for i in (0, 1) for p in whole[i].parameters()]
    optimizer = trained(whole, mine)
    xla_ckpt.save_checkpoint(tmp_path, "wrapped", stage, NxDOptimizer(optimizer), layout=layout)
    bare = torch.nn.Sequential(whole[0], whole[1])
    xla_ckpt.save_checkpoint(tmp_path, "bare", bare, optimizer, layout=layout)
    assert same(arrays(tmp_path, "wrapped"), arrays(tmp_path, "bare"))
    fresh = build(1)
    before = fresh[2].weight.clone()
    other = trained(fresh, [p for i in (0, 1) for p in fresh[i].parameters()])
    xla_ckpt.load_checkpoint(tmp_path, "wrapped", NxDPPModel(fresh, [0, 1]), NxDOptimizer(other))
    assert same(fresh[0].state_dict(), whole[0].state_dict())
    assert same(fresh[1].state_dict(), whole[1].state_dict())
    assert same(states(other), states(optimizer))
    assert torch.equal(fresh[2].weight, before)


def test_a_stage_whose_modules_load_in_their_own_way_is_loaded_through_its_wrapper(tmp_path: Path) -> None:
    whole = build(0)
    xla_ckpt.save_checkpoint(tmp_path, "a", NxDModel(NxDPPModel(whole, [1, 2]), stages=2))
    fresh = build(1)
    seen: list[str] = []
    fresh[1].register_load_state_dict_pre_hook(lambda *args: seen.append(args[2]))
    xla_ckpt.load_checkpoint(tmp_path, "a", NxDModel(NxDPPModel(fresh, [1, 2]), stages=2))
    assert seen == ["submod_1."]
    assert same(fresh[1].state_dict(), whole[1].state_dict())
    assert same(fresh[2].state_dict(), whole[2].state_dict())


def lora(seed: int, **options: Any) -> Any:
    return LoraModel(build(seed), LoraConfig(**options))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_adapters_alone_are_saved_with_their_configuration(tmp_path: Path, layout: str) -> None:
    model = lora(0)
    model.module[0].lora_A.weight.tensor_model_parallel = False
    optimizer = trained(model)
    xla_ckpt.save_checkpoint(tmp_path, "a", NxDModel(model), NxDOptimizer(optimizer), layout=layout)
    stored = arrays(tmp_path, "a")
    assert [n for n in stored if n.startswith("/model/") and "lora_" not in n] == []
    assert stored["/model/lora_config/lora_rank"] == 2
    assert "/optimizer/state/0.lora_A.weight/exp_avg" in stored
    fresh = lora(1)
    base = fresh.module[0].base_layer.weight.clone()
    mine = trained(fresh)
    xla_ckpt.load_checkpoint(tmp_path, "a", NxDModel(fresh), NxDOptimizer(mine))
    assert same(fresh.state_dict(), model.state_dict())
    assert same(states(mine), states(optimizer))
    assert torch.equal(fresh.module[0].base_layer.weight, base)


def test_the_configuration_is_stored_with_adapters_although_it_is_not_asked_for(tmp_path: Path) -> None:
    xla_ckpt.save_checkpoint(tmp_path, "a", NxDModel(lora(0, config=False)))
    stored = arrays(tmp_path, "a")
    assert stored["/model/lora_config/lora_alpha"] == 4
    assert stored["/model/lora_config/target_modules"] == ["0", "1", "2"]
    xla_ckpt.save_checkpoint(tmp_path, "merged", NxDModel(lora(0, config=False, base=True, merge=True)))
    assert "/model/lora_config/lora_alpha" not in arrays(tmp_path, "merged")  # a model like any other


def test_adapters_with_their_base_model(tmp_path: Path) -> None:
    model = lora(0, base=True)
    xla_ckpt.save_checkpoint(tmp_path, "a", model)
    fresh = lora(1)
    xla_ckpt.load_checkpoint(tmp_path, "a", fresh)
    assert same(fresh.module.state_dict(), model.module.state_dict())


@pytest.mark.parametrize("merged", [True, False])
def test_a_base_model_loads_below_adapters(tmp_path: Path, merged: bool) -> None:
    model: Any = lora(0, base=True, merge=True) if merged else build(0)
    unmerged = build(0)[0].weight
    xla_ckpt.save_checkpoint(tmp_path, "a", model)
    saved = arrays(tmp_path, "a")["/model/0.weight"]
    assert torch.equal(saved, unmerged) is not merged
    fresh = lora(1)
    adapters = fresh.module[0].lora_A.weight.clone()
    xla_ckpt.load_checkpoint(tmp_path, "a", fresh)
    assert torch.equal(fresh.module[0].base_layer.weight, saved)
    assert torch.equal(fresh.module[0].lora_A.weight, adapters)


def test_another_configuration_of_adapters_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = lora(0)
    xla_ckpt.save_checkpoint(tmp_path, "a", model)
    other = lora(1)
    other.lora_config.fields["lora_alpha"] = 8
    other.lora_config.target_modules.reverse()  # as in a process with another seed of hashes
    with caplog.at_level(logging.WARNING):
        xla_ckpt.load_checkpoint(tmp_path, "a", other)
    assert "the adapters were saved with another configuration: lora_alpha\n" in caplog.text


def test_a_tag_without_the_trained_weights_does_not_fit_a_model_with_adapters(tmp_path: Path) -> None:
    xla_ckpt.save_checkpoint(tmp_path, "a", {"0.lora_A.weight": torch.zeros(2, 4)})
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError) as caught:
        xla_ckpt.load_checkpoint(tmp_path, "a", lora(0))
    assert "model/0.lora_B.weight: wanted, but not stored" in str(caught.value)
    xla_ckpt.save_checkpoint(tmp_path, "b", {"unknown": torch.zeros(2, 4)})
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError) as caught:
        xla_ckpt.load_checkpoint(tmp_path, "b", lora(0))
    assert "model/0.base_layer.weight: wanted, but not stored" in str(caught.value)


FUSED = torch.arange(16.0).repeat_interleave(3).reshape(16, 3)
"""8 rows of queries, 4 of keys, 4 of values."""


class Attention(torch.nn.Module):
    """As GQAQKVColumnParallelLinear with `fuse_qkv`: the module knows how its weight is split, the weight does not."""

    q_output_size_per_partition, kv_output_size_per_partition, kv_size_multiplier = 4, 2, 1

    def __init__(self) -> None:
        super().__init__()
        self.weight_qkv = torch.nn.Parameter(torch.zeros(8, 3))


def saves_what_layers_know(rank: int, root: Path) -> bool:
    """TP 2: a stage with such a layer, and a model without adapters in neuronx-distributed's layout."""
    whole = torch.nn.Sequential(Attention(), Attention())
    mine = torch.cat([part.chunk(2)[rank] for part in FUSED.split((8, 4, 4))])
    with torch.no_grad():
        whole[1].weight_qkv.copy_(mine)
    stage = NxDModel(NxDPPModel(whole, [1]), stages=2)
    xla_ckpt.save_checkpoint(root, "stage", stage, mesh="tp=2", layout="xser")
    torch.nn.init.zeros_(whole[1].weight_qkv)
    xla_ckpt.load_checkpoint(root, "stage", stage, mesh="tp=2")
    base = build(0)
    base[0].weight = torch.nn.Parameter(base[0].weight.detach().chunk(2)[rank].clone())
    base[0].weight.tensor_model_parallel, base[0].weight.partition_dim = True, 0
    xla_ckpt.save_checkpoint(root, "base", NxDModel(base), mesh="tp=2", layout="pt")
    return torch.equal(whole[1].weight_qkv, mine)


def test_layers_in_wrappers_are_asked_and_base_models_of_adapters_are_known(tmp_path: Path) -> None:
    assert run_on_ranks(saves_what_layers_know, 2, tmp_path) == [True] * 2
    assert torch.equal(xla_ckpt.restore(tmp_path, "stage").tree["model"]["1.weight_qkv"], FUSED)
    for name in ("manifest.json", "_CHECKPOINT_METADATA", "commit_success.txt"):  # neuronx-distributed leaves none
        (tmp_path / "base" / name).unlink()
    fresh = lora(1)
    xla_ckpt.load_checkpoint(tmp_path, "base", NxDModel(fresh))
    assert torch.equal(fresh.module[0].base_layer.weight, build(0)[0].weight)


# ZeRO-1, in jobs of several ranks.


def saves_wrapped_zero1(rank: int, root: Path) -> dict[str, Any]:
    """TP 2 x DP 2: what a tag holds of wrapped objects, against one of the objects in them, in each layout."""
    from tests.neuron import training

    training.begin()
    model, optimizer, scheduler = training.build(0, save_master_weights=True)
    for step in (1, 2):
        training.train(model, NxDOptimizer(optimizer), scheduler, step)
    want = training.frozen(model, optimizer, scheduler)
    loaded = {}
    for layout in LAYOUTS:
        xla_ckpt.save_checkpoint(root, f"bare_{layout}", model, optimizer, scheduler, layout=layout)
        wrapped = NxDModel(model), NxDOptimizer(optimizer), scheduler
        if layout == "native":
            xla_ckpt.save_checkpoint(root, "wrapped_native", *wrapped)
        else:
            nxd.save_checkpoint(root, f"wrapped_{layout}", *wrapped, use_xser=layout == "xser")
        mine, other, theirs = training.build(3, save_master_weights=True)
        nxd.load_checkpoint(root, f"wrapped_{layout}", NxDModel(mine), NxDOptimizer(other), theirs)
        loaded[layout] = differences(
            training.true(training.frozen(mine, other, theirs)), training.true(dict(want)), order=False
        )
    return loaded


@pytest.mark.xla
def test_zero1_in_an_optimizer_of_neuronx_distributed(tmp_path: Path) -> None:
    from tests.neuron import training

    for loaded in run_on_ranks(saves_wrapped_zero1, 4, tmp_path, xla=True):
        assert loaded == {layout: [] for layout in LAYOUTS}
    for layout in LAYOUTS:
        stored = arrays(tmp_path, f"wrapped_{layout}")
        assert "/optimizer/state/up.weight/exp_avg" in stored
        assert "/optimizer/master/up.weight" in stored
        assert same(stored, arrays(tmp_path, f"bare_{layout}"))
    # By name: so it resumes without ZeRO-1, and without any parallelism.
    whole = training.Whole(1)
    whole.register_buffer("inv_freq", torch.zeros(3))
    optimizer = torch.optim.AdamW(training.groups(whole), lr=1e-2)
    xla_ckpt.load_checkpoint(tmp_path, "wrapped_xser", whole, NxDOptimizer(optimizer))
    stored = arrays(tmp_path, "wrapped_xser")
    assert torch.equal(whole.up.weight, stored["/model/up.weight"])
    assert torch.equal(optimizer.state[whole.up.weight]["exp_avg"], stored["/optimizer/state/up.weight/exp_avg"])


class Experts(torch.nn.Module):
    """Two experts on each rank of EP 2, and a layer that all ranks have."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        mine = torch.randn(4, 3).chunk(2)[ps.get_expert_model_parallel_rank()]
        self.experts = torch.nn.Parameter(mine.clone())
        self.gate = torch.nn.Parameter(torch.randn(5, 3))


def build_experts(seed: int) -> tuple[Any, Any]:
    model = Experts(seed).to("xla")
    model.experts.expert_model_parallel = True
    groups = [{"params": [model.gate, model.experts], "weight_decay": 0.1}]
    return model, NxDOptimizer(experts_zero1(groups, [[0, 1, 2, 3]], [[0, 2], [1, 3]]))


def train_experts(model: Any, optimizer: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()


def shards(optimizer: Any) -> Plain:
    found: Plain = {}
    for n, part in enumerate(optimizer.optimizer._parts()):
        packed = part.base_optimizer.state_dict()
        found[f"groups.{n}"] = [{k: v for k, v in g.items() if k != "params"} for g in packed["param_groups"]]
        for i, state in packed["state"].items():
            found |= {f"{n}.{i}.{k}": v.detach().cpu().clone() for k, v in state.items()}
        for g in part.base_optimizer.param_groups:
            found |= {f"{n}.master.{i}": p.detach().cpu().clone() for i, p in enumerate(g["params"])}
    return found


def moments(optimizer: Any) -> Plain:
    return {name: value for name, value in shards(optimizer).items() if ".exp_avg" in name or ".step" in name}


def saves_experts(rank: int, root: Path) -> list[Any]:
    """DP 4 with EP 2, so that two ranks hold the same experts."""
    neuron_compat.emulate()
    ps.initialize_model_parallel(expert_model_parallel_size=2)
    model, optimizer = build_experts(0)
    train_experts(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.005
    train_experts(model, optimizer)
    nxd.save_checkpoint(root, "a", NxDModel(model), optimizer)
    want = shards(optimizer) | {n: p.detach().cpu() for n, p in model.named_parameters()}
    fresh, mine = build_experts(7)
    nxd.load_checkpoint(root, "a", NxDModel(fresh), mine)
    got = shards(mine) | {n: p.detach().cpu() for n, p in fresh.named_parameters()}
    told = differences(got, want, order=False)
    # Its own optimizer takes what lies in its file; master weights have no place there.
    rebuilt = build_experts(7)[1]
    rebuilt.load_state_dict(torch.load(root / f"a/optim/dp_rank_{rank:02d}_tp_rank_00_pp_rank_00.pt"))
    told += differences(moments(rebuilt), moments(optimizer), order=False)
    told += [f"lr {g['lr']}" for p in rebuilt.optimizer._parts() for g in p.param_groups if g["lr"] != 0.005]
    # The next step is the same, too.
    train_experts(model, optimizer), train_experts(fresh, mine)
    told += differences(shards(mine), shards(optimizer), order=False)
    return [told, mine.param_groups[0]["lr"], want["1.0.exp_avg"].shape, want["0.0.exp_avg"].shape]


@pytest.mark.xla
def test_zero1_with_experts(tmp_path: Path) -> None:
    for told, lr, of_experts, of_rest in run_on_ranks(saves_experts, 4, tmp_path, xla=True):
        assert told == []
        assert lr == 0.005
        assert (tuple(of_experts), tuple(of_rest)) == ((1, 3), (2, 3))  # 2 experts over 2 ranks; 5 rows over 4 ranks
    stored = arrays(tmp_path, "a")
    held = [opened(path) for path in sorted((tmp_path / "a/optim").iterdir())]
    assert [h["shape_info"] for h in held] == [{0: [5, 3], 1: [2, 3]}] * 4
    assert [[g["params"] for g in h["param_groups"]] for h in held] == [[[0], [0]]] * 4
    assert stored["/optimizer/state/experts/exp_avg"].shape == (4, 3)
    whole = torch.nn.Module()
    whole.experts, whole.gate = torch.nn.Parameter(torch.zeros(4, 3)), torch.nn.Parameter(torch.zeros(5, 3))
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1.0)
    xla_ckpt.load_checkpoint(tmp_path, "a", whole, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.005
    for name, parameter in whole.named_parameters():
        assert torch.equal(parameter, stored[f"/model/{name}"])
        assert torch.equal(optimizer.state[parameter]["exp_avg"], stored[f"/optimizer/state/{name}/exp_avg"])


def saves_a_pipeline(rank: int, root: Path) -> list[str]:
    """PP 2 x DP 2 with ZeRO-1 around each stage."""
    from neuron_compat.nxd.optimizer import NeuronZero1Optimizer
    from tests.neuron import training

    neuron_compat.emulate()
    ps.initialize_model_parallel(pipeline_model_parallel_size=2)
    mine = [[0, 1], [2]][ps.get_pipeline_model_parallel_rank()]

    def stage(seed: int) -> tuple[Any, Any]:
        whole = build(seed).to("xla")
        parameters = [p for i in mine for p in whole[i].parameters()]
        options = {"lr": 1e-2, "pin_layout": False}
        optimizer = NeuronZero1Optimizer(parameters, torch.optim.AdamW, **options)
        for p in parameters:
            p.grad = torch.full_like(p, 0.5)
        optimizer.step()
        return NxDModel(NxDPPModel(whole, mine), stages=2), NxDOptimizer(optimizer)

    model, optimizer = stage(0)
    nxd.save_checkpoint(root, "xser", model, optimizer, use_xser=True)
    xla_ckpt.save_checkpoint(root, "native", model, optimizer)
    want = training.frozen(model, optimizer)
    told: list[str] = []
    for tag in ("xser", "native"):
        fresh = stage(1)
        nxd.load_checkpoint(root, tag, *fresh)
        told += differences(training.frozen(*fresh), want, order=False)
    return told


@pytest.mark.xla
def test_a_pipeline_with_zero1(tmp_path: Path) -> None:
    assert run_on_ranks(saves_a_pipeline, 4, tmp_path, xla=True) == [[]] * 4
    whole = build(2)
    optimizer = torch.optim.AdamW(whole.parameters())
    xla_ckpt.load_checkpoint(tmp_path, "native", whole, optimizer)
    assert same(arrays(tmp_path, "native"), arrays(tmp_path, "xser"))
    assert len(optimizer.state) == 6
