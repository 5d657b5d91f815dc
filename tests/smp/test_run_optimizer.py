"""neuron_compat.smp's DistributedOptimizer: steps, local and full states, sharded ones, master weights."""

from __future__ import annotations

import copy
import functools
import warnings
from typing import Any

import pytest
import torch

import neuron_compat.smp as smp
import xla_ckpt
from neuron_compat.emulated.layers import cut_own_part
from neuron_compat.emulated.smp.mixed_precision import DynamicLossScaler, dump_scaler, load_scaler
from neuron_compat.nxd.parallel_layers import parallel_state
from neuron_compat.smp.stored import StoredState
from tests.jobs import finish, run_on_ranks, start_on_ranks
from tests.same import same
from tests.smp.models import Plain, Split, batches, losses_of, make, plain_losses
from tests.smp.test_run_model import JOBS, PP_RDP, PP_TP, TP_RDP, Files

SHARDED = pytest.mark.parametrize(
    ("config", "kind"),
    [({**TP_RDP, "shard_optimizer_state": True}, Split), ({**PP_RDP, "shard_optimizer_state": True}, Plain)],
    ids=["tp2-rdp2", "pp2-rdp2"],
)


def groups(model: Any) -> list[dict[str, Any]]:
    """Two groups, in another order than the model's; what is frozen is in none."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for n, p in named if not n.endswith("weight")], "weight_decay": 0.0},
        {"params": [p for n, p in named if n.endswith("weight")], "weight_decay": 0.1},
    ]


def mine(data: list[Any]) -> list[Any]:
    part = slice(smp.rdp_rank(), None, smp.rdp_size())
    return [(ids[part], labels[part]) for ids, labels in data]


def set_up(config: dict[str, Any], kind: type[torch.nn.Module], **options: Any) -> tuple[Any, Any]:
    smp.init(config)
    model = smp.DistributedModel(make(kind, seed=3 if smp.rdp_rank() == 0 else 99))
    inner = torch.optim.AdamW(groups(model), lr=0.05)
    optimizer = smp.DistributedOptimizer(inner, **options)
    assert optimizer is inner
    assert isinstance(optimizer, torch.optim.AdamW)
    return model, optimizer


def reference(kind: type[torch.nn.Module], steps: int) -> tuple[list[float], dict[str, Any]]:
    """Losses, and the optimizer's state, of one process without anything of SMP."""
    smp.shutdown()
    parallel_state.initialize_model_parallel()
    model = make(kind)
    optimizer = torch.optim.AdamW(groups(model), lr=0.05)
    losses = plain_losses(model, optimizer, batches(steps, 16), 2)
    smp.shutdown()
    return losses, optimizer.state_dict()


# -- jobs


def trains_and_resumes(rank: int, config: dict[str, Any], kind: type[torch.nn.Module]) -> dict[str, Any]:
    """Train, take all forms of state, train on; go back with each form, and train on alike."""
    model, optimizer = set_up(config, kind)
    first = losses_of(model, optimizer, mine(batches(5, 16)[:3]))
    weights = copy.deepcopy(model.state_dict(gather_to_rank0=False))
    full, local = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(optimizer.local_state_dict())
    own = copy.deepcopy(optimizer.local_optimizer_state_dict())
    assert (optimizer.state_dict(gather_to_rank0=True) != {}) is (rank == 0)
    # the full state is that of which each rank holds a part
    names = [name for group in full["param_groups"] for name in group["param_names"]]
    live = dict(model.named_parameters())
    for number, name in enumerate(names):
        for key, value in full["state"][number].items():
            parameter, held = live[name], optimizer.state[live[name]][key]
            if getattr(parameter, "tensor_model_parallel", False) and value.dim():
                dim = parameter.partition_dim
                missing = parameter.shape[dim] * 2 - value.shape[dim]
                value = cut_own_part(value, dim, parameter.partition_stride, missing)
            assert torch.equal(held, value), (name, key)
    then = losses_of(model, optimizer, mine(batches(5, 16)[3:]))
    for state in (full, local, own):
        kept = copy.deepcopy(state)
        for held in optimizer.state.values():
            for value in held.values():
                value.zero_()
        for group in optimizer.param_groups:
            group["lr"] = 99.0
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        assert losses_of(model, optimizer, mine(batches(5, 16)[3:])) == then
        assert same(state, kept), "the argument stays as it is"
    optimizer.load_local_optimizer_state_dict(own)
    assert optimizer.param_groups[0]["lr"] == 0.05
    with pytest.raises(smp.SMPCheckpointError, match="does not support loading non-partial optimizer states"):
        optimizer.load_local_optimizer_state_dict(full)
    smp.barrier()
    return {"losses": first + then, "full": full, "local": local, "own": own, "at": (smp.pp_rank(), smp.tp_rank())}


@functools.cache
def trained(name: str) -> list[dict[str, Any]]:
    """What the ranks of one of the jobs found; it runs once for all tests."""
    return run_on_ranks(trains_and_resumes, 4, *JOBS[name])


@pytest.mark.parametrize("name", JOBS)
def test_four_ranks_step_as_one_process_does(name: str) -> None:
    found, (_, kind) = trained(name), JOBS[name]
    losses, _ = reference(kind, 5)
    _, state = reference(kind, 3)
    means = [sum(step) / len(step) for step in zip(*(f["losses"] for f in found), strict=True)]
    assert means == pytest.approx(losses, rel=1e-5)
    for held in found:
        assert same(held["full"], found[0]["full"])
        for number, of_one in state["state"].items():
            for key, value in of_one.items():
                torch.testing.assert_close(held["full"]["state"][number][key], value, rtol=2e-3, atol=1e-5)
        for group, expected in zip(held["full"]["param_groups"], state["param_groups"], strict=True):
            assert {k: v for k, v in group.items() if k != "param_names"} == expected


def test_what_a_rank_keeps_of_a_pipeline_with_tensor_parallelism() -> None:
    found = trained("pp2-tp2")
    names = [n for group in found[0]["full"]["param_groups"] for n in group["param_names"]]
    for held in found:
        (pp, tp), local = held["at"], held["local"]
        assert local["_smp_is_partial"] is True
        assert [g["params"] for g in local["param_groups"]] == [[*range(len(names))][:4], [*range(len(names))][4:]]
        stages = {0: ("embed.", "up."), 1: ("down.", "norm.", "head.")}
        assert {names[n] for n in local["state"]} == {n for n in names if n.startswith(stages[pp])}
        whole = {"down.bias", "norm.weight", "norm.bias", "head.bias"}  # not split
        for number, of_one in local["state"].items():
            assert (of_one == {}) is (tp == 1 and names[number] in whole), names[number]
        assert all(of_one for of_one in held["own"]["state"].values())


def shards(rank: int, config: dict[str, Any], kind: type[torch.nn.Module]) -> dict[str, Any]:
    model, optimizer = set_up(config, kind)
    losses = losses_of(model, optimizer, mine(batches(5, 16)[:3]))
    held = {n for n, p in model.named_parameters() if p in optimizer.state}
    weights = copy.deepcopy(model.state_dict(gather_to_rank0=False))
    local, full = copy.deepcopy(optimizer.local_state_dict()), copy.deepcopy(optimizer.state_dict())
    alone = copy.deepcopy(optimizer.local_state_dict(gather_if_shard=False))
    then = losses_of(model, optimizer, mine(batches(5, 16)[3:]))
    given = smp.recv_from(0, smp.RankType.RDP_RANK) if smp.rdp_rank() else smp.broadcast(local, smp.RDP_GROUP)
    for state in (given, full, alone):
        optimizer.state.clear()
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        assert {n for n, p in model.named_parameters() if p in optimizer.state} == held
        assert losses_of(model, optimizer, mine(batches(5, 16)[3:])) == then
    # another number of ranks, in SMP's words; or from all files, if they are known
    fewer = {**given, "state": given["state"][:1], "param_groups": given["param_groups"][:1]}
    with pytest.raises(AssertionError, match=r"same rdp size! The training rdp size 1, the loading rdp size 2"):
        optimizer.load_state_dict(fewer)
    calls: list[Any] = []

    class Source:
        def load(self, model: Any = None, optimizer: Any = None, strict: bool = True) -> None:
            calls.append(optimizer)

    optimizer.load_state_dict(StoredState(fewer, Source()))
    assert calls == [optimizer]
    with pytest.raises(smp.RdpSizeError):
        optimizer.load_state_dict(StoredState(fewer, Source()), strict_partitions=True)
    smp.barrier()
    return {"losses": losses + then, "held": held, "local": local, "full": full, "rdp": smp.rdp_rank()}


@SHARDED
def test_sharded_states(config: dict[str, Any], kind: type[torch.nn.Module]) -> None:
    found = run_on_ranks(shards, 4, config, kind)
    losses, _ = reference(kind, 5)
    means = [sum(step) / len(step) for step in zip(*(f["losses"] for f in found), strict=True)]
    assert means == pytest.approx(losses, rel=1e-5)
    shares = [f["held"] for f in found if f["rdp"] == 0][0], [f["held"] for f in found if f["rdp"] == 1][0]
    assert shares[0]
    assert shares[1]
    assert not shares[0] & shares[1]
    for held in found:
        assert isinstance(held["local"]["state"], list) is (held["rdp"] == 0)
        assert same(held["full"], found[0]["full"])
        assert len(held["full"]["state"]) == len(shares[0] | shares[1])
    assert len(found[0]["local"]["state"]) == len(found[0]["local"]["param_groups"]) == 2


def too_few(rank: int, which: str) -> str | None:
    config = {**TP_RDP, "shard_optimizer_state": which == "sharded"}
    model, optimizer = set_up(config, Split)
    losses_of(model, optimizer, mine(batches(1, 16)))
    calls = {"full": optimizer.state_dict, "sharded": optimizer.local_state_dict}
    guard = smp.dp_rank() == 0 if which == "full" else smp.rdp_rank() == 0
    text = None
    if guard:
        with pytest.raises(smp.TooFewRanksError) as caught:
            calls[which]()
        text = str(caught.value)
    smp.barrier()
    return text


@pytest.mark.parametrize("which", ["full", "sharded"])
def test_a_call_on_too_few_ranks_is_an_error_in_time(which: str) -> None:
    ranks = start_on_ranks(too_few, 4, which, env={"SMP_MEETING_TIMEOUT": "2"})
    finish(ranks)
    found = [rank.value() for rank in ranks]
    assert found[0] is not None
    assert "was not called on all ranks of its group" in found[0]
    assert "smp.rdp_rank() == 0" in found[0]
    assert found[2] is None


def narrow(rank: int, kind: str, config: dict[str, Any]) -> dict[str, Any]:
    """Training in 16 bits: resumed exactly from partial and full states, master weights included."""
    model, optimizer = set_up({**config, kind: True}, Split, static_loss_scale=128.0 if kind == "fp16" else 1.0)
    type_ = torch.float16 if kind == "fp16" else torch.bfloat16
    assert {p.dtype for p in model.parameters()} == {type_}
    losses = losses_of(model, optimizer, mine(batches(5, 16)[:3]))
    for group in optimizer.fp32_from_fp16_groups:
        assert {master.dtype for master in group} == {torch.float32}
    scale = 128.0 if kind == "fp16" else 1.0
    assert optimizer.loss_scale == scale
    for group in optimizer._smp.masters.pairs:
        for parameter, master in group:
            torch.testing.assert_close(master.grad, parameter.grad.float() / scale)
    norm = optimizer.clip_master_grads(1e9)
    weights = copy.deepcopy(model.state_dict(gather_to_rank0=False))
    full, local = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(optimizer.local_state_dict())
    own, halves = optimizer.local_optimizer_state_dict(), optimizer.local_fp16_state_dict()
    own, halves = copy.deepcopy(own), copy.deepcopy(halves)
    then = losses_of(model, optimizer, mine(batches(5, 16)[3:]))

    def spoil() -> None:
        with torch.no_grad():
            for group in optimizer.fp32_from_fp16_groups:
                for master in group:
                    master.zero_()

    bare = optimizer.local_state_dict(fp32_states_only=True)
    assert set(bare) == {"state", "param_groups", "_smp_is_partial"}
    assert set(optimizer.state_dict(fp32_states_only=True)) == {"state", "param_groups"}

    unnamed = {k: v for k, v in local.items() if k != "fp32_from_fp16_names"}  # as SMP itself stores it
    states = [full, local, unnamed]
    for state in states:
        spoil()
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        assert losses_of(model, optimizer, mine(batches(5, 16)[3:])) == then
    spoil()
    model.load_state_dict(weights)
    optimizer.load_local_optimizer_state_dict(own)
    optimizer.load_local_fp16_state_dict(halves)
    assert losses_of(model, optimizer, mine(batches(5, 16)[3:])) == then
    model.load_state_dict(weights)  # of the model alone: its optimizer goes on from there
    for group in optimizer._smp.masters.pairs:
        assert all(torch.equal(master, parameter.float()) for parameter, master in group)
    smp.barrier()
    return {"losses": losses + then, "norm": norm, "local": local, "full": full, "halves": halves}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("fp16", "pp2-tp2"),
        ("bf16", "tp2-rdp2"),
        pytest.param("fp16", "tp2-rdp2", marks=pytest.mark.rest),
        pytest.param("bf16", "pp2-tp2", marks=pytest.mark.rest),
    ],
)
def test_training_in_16_bits(kind: str, name: str) -> None:
    found = run_on_ranks(narrow, 4, kind, JOBS[name][0])
    losses, _ = reference(Split, 5)
    means = [sum(step) / len(step) for step in zip(*(f["losses"] for f in found), strict=True)]
    assert means == pytest.approx(losses, rel=3e-2)
    assert len({f["norm"] for f in found}) == 1
    for held in found:
        if kind == "fp16":
            assert {"optimizer_state_dict", "loss_scaler", "dynamic_loss_scale", "overflow"} <= set(held["local"])
            assert held["local"]["first_closure_call_this_step"] is True
            assert held["local"]["optimizer_state_dict"]["_smp_is_partial"] is True
            assert held["local"]["loss_scaler"] == {"kind": "LossScaler", "cur_scale": 128.0}
        else:
            assert {"state", "param_groups", "_smp_is_partial", "fp32_from_fp16"} <= set(held["local"])
        names = held["full"]["param_name_groups"]
        assert [len(g) for g in held["full"]["fp32_from_fp16"]] == [len(g) for g in names]
        assert sum(map(len, held["halves"]["fp32_from_fp16"])) == sum(map(len, held["local"]["fp32_from_fp16"]))


def scales(rank: int) -> list[Any]:
    """An overflow on one rank: no rank steps, and the scale falls on all of them."""
    model, optimizer = set_up(
        {**TP_RDP, "fp16": True}, Split, dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 2.0**14}
    )
    data = mine(batches(2, 16))
    losses_of(model, optimizer, data[:1])
    assert not optimizer.overflow
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.zero_grad()
    optimizer.loss_scale = 2.0**40
    smp.barrier()
    losses_of(model, optimizer, data[1:])
    same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    smp.barrier()
    return [optimizer.overflow, optimizer.loss_scale, same, optimizer.clip_master_grads(1.0)]


def test_an_overflow_is_one_on_all_ranks() -> None:
    assert run_on_ranks(scales, 4) == [[True, 2.0**39, True, None]] * 4


def resumes_through_xla_ckpt(rank: int, root: str, config: dict[str, Any], kind: type[torch.nn.Module]) -> None:
    model, optimizer = set_up(config, kind)
    losses_of(model, optimizer, mine(batches(5, 16)[:2]))
    handle = xla_ckpt.save_checkpoint(root, "a", model, optimizer)
    assert handle.report is not None
    then = losses_of(model, optimizer, mine(batches(5, 16)[2:]))
    xla_ckpt.load_checkpoint(root, "a", model, optimizer)
    assert losses_of(model, optimizer, mine(batches(5, 16)[2:])) == then
    smp.barrier()


@pytest.mark.parametrize("name", JOBS)
def test_xla_ckpt_saves_and_loads_what_is_wrapped(tmp_path: Any, name: str) -> None:
    run_on_ranks(resumes_through_xla_ckpt, 4, str(tmp_path), *JOBS[name])


def takes_files(rank: int) -> None:
    model, optimizer = set_up(PP_TP, Split)
    losses_of(model, optimizer, mine(batches(1, 16)))
    local = copy.deepcopy(optimizer.local_state_dict())
    calls: list[Any] = []

    class Source(Files):
        def load(self, model: Any = None, optimizer: Any = None, strict: bool = True) -> None:
            calls.append(optimizer)

    optimizer.load_state_dict(StoredState(local, Source()))
    assert not calls
    optimizer.load_state_dict(StoredState(local, Source(), fits=False))
    assert calls == [optimizer]
    with pytest.raises(smp.SMPCheckpointError, match="of other ranks or other partitions"):
        optimizer.load_state_dict(StoredState(local, fits=False))
    # One rank's part is of another model: all ranks of its model hear of it.
    wrong = copy.deepcopy(local)
    if rank == 3:
        number = next(n for n, held in wrong["state"].items() if held and held["exp_avg"].dim() == 2)
        wrong["state"][number]["exp_avg"] = torch.zeros(3, 3)
    with pytest.raises(smp.SMPCheckpointError, match="the state exp_avg has another shape than its parameter"):
        optimizer.load_state_dict(wrong)
    smp.barrier()


def test_parts_that_do_not_fit() -> None:
    run_on_ranks(takes_files, 4)


# -- one process


def test_refusals(clean: None) -> None:
    smp.init({})
    layer = torch.nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match=r"smp\.DistributedModel call must take place before smp"):
        smp.DistributedOptimizer(torch.optim.SGD(layer.parameters(), lr=1))
    model = smp.DistributedModel(layer)
    with pytest.raises(RuntimeError, match=r"Found parameter in optimizer that is not part of smp"):
        smp.DistributedOptimizer(torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=1))
    with pytest.raises(smp.SMPInvalidArgumentError, match="wraps a torch"):
        smp.DistributedOptimizer(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of the same
        twice = torch.optim.SGD([layer.weight, layer.weight, layer.bias], lr=1)
    with pytest.raises(smp.SMPValidationError, match=r"a parameter is in the optimizer twice.*\[leaf weight\]"):
        smp.DistributedOptimizer(twice)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1))
    with pytest.raises(smp.SMPValidationError, match="is a DistributedOptimizer already"):
        smp.DistributedOptimizer(optimizer)
    for call in (optimizer.local_fp16_state_dict, lambda: optimizer.load_local_fp16_state_dict({})):
        with pytest.raises(smp.SMPValidationError, match="can only be called when fp16 is enabled"):
            call()
    with pytest.raises(smp.SMPValidationError, match="with fp16 only"):
        optimizer.loss_scale = 2.0
    with pytest.raises(smp.SMPInvalidArgumentError, match="a state dict is a dict"):
        optimizer.load_state_dict([])
    with pytest.raises(smp.SMPCheckpointError, match="no state dict of an optimizer"):
        optimizer.load_state_dict({"model": 1})
    good = optimizer.state_dict()
    fewer = copy.deepcopy(good)
    fewer["param_groups"][0]["params"] = [0]
    with pytest.raises(smp.SMPCheckpointError, match="of another number of parameters: expected 2, found 1"):
        optimizer.load_state_dict(fewer)
    unknown = copy.deepcopy(good)
    unknown["param_groups"][0]["param_names"] = ["weight", "other"]
    with pytest.raises(smp.SMPCheckpointError, match=r"not in the optimizer \[leaf other\]"):
        optimizer.load_state_dict(unknown)
    with pytest.raises(smp.SMPCheckpointError, match="states of a parameter that no group has"):
        optimizer.load_state_dict({**good, "state": {7: {"step": 1}}})
    with pytest.raises(smp.SMPCheckpointError, match="has another shape than its parameter"):
        optimizer.load_state_dict({**good, "state": {0: {"momentum_buffer": torch.zeros(5, 5)}}})
    smp.state.cfg._config["fp16"] = True
    with pytest.raises(smp.SMPInvalidArgumentError, match="dynamic_loss_args has an unknown entry"):
        smp.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1), dynamic_loss_scale=True, dynamic_loss_args={"scale": 1}
        )


def test_states_follow_the_names_of_parameters(clean: None) -> None:
    smp.init({})
    model = smp.DistributedModel(make(Plain))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(groups(model), lr=0.05))
    losses_of(model, optimizer, batches(2))
    state = copy.deepcopy(optimizer.state_dict())
    expected = {n: copy.deepcopy(optimizer.state[p]) for n, p in model.named_parameters() if p in optimizer.state}
    other = smp.DistributedOptimizer(
        torch.optim.AdamW([{"params": [p]} for p in reversed([p for p in model.parameters() if p.requires_grad])])
    )
    other.load_state_dict(state)
    assert same({n: other.state[p] for n, p in model.named_parameters() if p in other.state}, expected)
    assert {g["weight_decay"] for g in other.param_groups} == {0.0, 0.1}


def test_schedulers_hooks_and_closures(clean: None) -> None:
    smp.init({})
    model = smp.DistributedModel(torch.nn.Linear(2, 1))
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    before = torch.optim.lr_scheduler.ExponentialLR(inner, 0.5)
    optimizer = smp.DistributedOptimizer(inner)
    after = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    called: list[str] = []
    optimizer.register_step_post_hook(lambda *_: called.append("post"))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).sum()
        loss.backward()
        return loss

    assert isinstance(optimizer.step(closure), torch.Tensor)
    before.step()
    after.step()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step(closure)
    assert called == ["post", "post"], "torch's hooks run once a step"
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_a_load_that_waits_for_the_optimizer(clean: None) -> None:
    called: list[Any] = []
    smp.state.pending_loads.append(lambda model, optimizer: called.append((model, optimizer)))
    smp.init({})
    model = smp.DistributedModel(torch.nn.Linear(2, 2))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1))
    model.state_dict()
    assert called == [(model, optimizer)]
    assert not smp.state.pending_loads


def test_a_loss_scale_through_a_file() -> None:
    scaler = DynamicLossScaler(cur_scale=4.0, delayed_shift=2, cur_hysteresis=2)
    for overflow in (True, True, False):
        scaler.update_scale(overflow)
    assert scaler.cur_scale == 2.0
    assert load_scaler(dump_scaler(scaler)) == scaler

    class Theirs:
        def __init__(self) -> None:
            self.cur_scale, self.scale_window, self.model = 8.0, 10, None

    assert load_scaler(Theirs()) == DynamicLossScaler(cur_scale=8.0, scale_window=10)
    with pytest.raises(smp.SMPCheckpointError, match="a loss scaler has no scale"):
        load_scaler({"kind": "LossScaler"})


def test_optimizers_and_layers_that_need_apex() -> None:
    for module, name in [("optimizers", "FusedNovoGrad"), ("optimizers", "FusedLamb"), ("nn", "FusedLayerNorm")]:
        with pytest.raises(xla_ckpt.UsageError, match=rf"smp\.{module}\.{name} is not there\. Use torch|Use an opt"):
            getattr(getattr(smp, module), name)
    with pytest.raises(xla_ckpt.UsageError, match="Modules are not replaced here"):
        _ = smp.tp_register


def scaled(rank: int) -> list[Any]:
    """torch's scaler, where one rank's gradients overflow."""
    smp.init({"ddp": True})
    model = smp.DistributedModel(torch.nn.Linear(2, 1))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    scaler = smp.amp.GradScaler(init_scale=4.0)

    @smp.step
    def train(model: Any, inputs: torch.Tensor) -> torch.Tensor:
        loss = model(inputs).sum()
        model.backward(scaler.scale(loss))
        return loss

    scales = []
    for number in range(2):
        optimizer.zero_grad()
        train(model, torch.ones(2, 2))
        if number == 1 and rank == 1:
            model.weight.grad.fill_(float("inf"))
        before = model.weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        scales.append((scaler.get_scale(), torch.equal(before, model.weight)))
    smp.barrier()
    return scales


def test_grad_scaler() -> None:
    assert run_on_ranks(scaled, 2) == [[(4.0, False), (2.0, True)]] * 2
    with pytest.raises(smp.SMPAMPError, match="for CPU and CUDA devices"):
        smp.amp.GradScaler(device="xla")
