"""neuron_compat.nxd in place of neuronx-distributed: a job of TP 2 x DP 2 with ZeRO-1 trains, saves and resumes.

N1 to N12 are defects of neuronx-distributed's own checkpoints, which these calls must not have.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

import neuron_compat
import neuron_compat.nxd as nxd
import xla_ckpt
from tests.jobs import job, torchrun

SETUP = """
import argparse, copy, torch_xla
import neuron_compat
import neuron_compat.nxd as nxd
from neuron_compat.nxd.optimizer import NeuronZero1Optimizer
from neuron_compat.nxd.parallel_layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from neuron_compat.nxd.parallel_layers import mappings, parallel_state as ps
neuron_compat.emulate()
root = sys.argv[1]
ps.initialize_model_parallel(tensor_model_parallel_size=2)


class Split(torch.nn.Module):
    def __init__(self, seed, hidden=8, inner=16):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = ParallelEmbedding(13, hidden, pad=True)
        self.up = ColumnParallelLinear(hidden, inner, gather_output=False)
        self.down = RowParallelLinear(inner, hidden, input_is_parallel=True)
        self.norm = torch.nn.LayerNorm(hidden)
        self.register_buffer("inv_freq", torch.full((3,), float(seed)))

    def forward(self, words):
        x = self.embed(words)
        return self.norm(x + self.down(torch.tanh(self.up(x))))


class Whole(Split):
    def __init__(self, seed):
        torch.nn.Module.__init__(self)
        torch.manual_seed(seed)
        self.embed, self.up, self.down = torch.nn.Embedding(13, 8), torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)
        self.norm = torch.nn.LayerNorm(8)


def groups(model):
    named = list(model.named_parameters())
    return [{"params": [p for n, p in named if p.dim() < 2], "weight_decay": 0.0},
            {"params": [p for n, p in named if p.dim() >= 2], "weight_decay": 0.1}]


def build(seed, **options):
    sizes = {k: options.pop(k) for k in ("hidden", "inner") if k in options}
    model = Split(seed, **sizes).to("xla")
    options = {"max_norm": 0.5, "pin_layout": False, "lr": 1e-2, **options}
    optimizer = NeuronZero1Optimizer(groups(model), torch.optim.AdamW, **options)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (n + 1))


def batch(step):
    return torch.randint(0, 13, (4, 5), generator=torch.Generator().manual_seed(step))


def train(model, optimizer, scheduler, step, words=None, device="xla"):
    words = (batch(step).chunk(2)[ps.get_data_parallel_rank()] if words is None else words).to(device)
    loss = (model(words) - torch.linspace(0, 1, 8, device=device)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    if device == "cpu":
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    else:
        optimizer.step()
        torch_xla.sync()
        norm = optimizer.grad_norm
    scheduler.step()
    return float(norm)


def frozen(model, optimizer=None, scheduler=None):
    '''All of a state as of now, in host memory of its own.'''
    found = {f"model.{n}": v.detach().cpu().clone() for n, v in model.state_dict().items()}
    if optimizer is not None:
        for i, state in optimizer.state_dict()["base_state"].items():
            found |= {f"state.{i}.{k}": v.detach().cpu().clone() for k, v in state.items()}
        found |= {f"group.{i}": {k: v for k, v in g.items() if k != "params"}
                  for i, g in enumerate(optimizer.param_groups)}
    if scheduler is not None:
        found |= {f"scheduler.{k}": v for k, v in scheduler.state_dict().items()}
    return copy.deepcopy(found)


def unequal(a, b):
    def differ(x, y):
        if isinstance(x, torch.Tensor):
            return not (x.dtype == y.dtype and torch.equal(x, y))
        return x != y
    return [*sorted(a.keys() ^ b.keys()), *(k for k in a.keys() & b.keys() if differ(a[k], b[k]))]


def true(weights, name="model.embed.weight"):
    '''A state without the padding of the embedding, which nobody promises to restore.'''
    rows = 7 if ps.get_tensor_model_parallel_rank() == 0 else 6
    cut = {k: v[:rows] if k == name else v for k, v in weights.items()}
    assert cut[name].shape[0] == rows
    return cut
"""

TRAIN = (
    SETUP
    + """
model, optimizer, scheduler = build(0)
whole = Whole(0)
plain = torch.optim.AdamW(groups(whole), lr=1e-2)
plain_scheduler = torch.optim.lr_scheduler.LambdaLR(plain, lambda n: 1 / (n + 1))
truth = {}
content = {"step": 0, "list": [torch.arange(3.0), (torch.ones(2), "x")]}
for step in range(6):
    norm = train(model, optimizer, scheduler, step)
    # the whole model on the whole batch, without any parallelism
    assert abs(train(whole, plain, plain_scheduler, step, batch(step), "cpu") - norm) < 1e-4
    if step % 2:
        tag = f"step_{step + 1}"
        model.inv_freq.fill_(step)
        torch_xla.sync()
        content["step"] = step + 1
        truth[tag] = frozen(model, optimizer, scheduler)
        assert nxd.save_checkpoint(root, tag=tag, model=model, optimizer=optimizer, scheduler=scheduler,
                                   user_content=content, async_save=True, num_kept_ckpts=2,
                                   use_xser=step == 3) is None
        content["step"] = -1  # N6: neither this nor the next step reaches the save
nxd.finalize_checkpoint()
local = mappings._own(whole.up.weight.detach(), 0)
assert torch.allclose(model.up.weight.detach().cpu(), local, atol=1e-5)
assert xla_ckpt.list_tags(root) == ["step_4", "step_6"], xla_ckpt.list_tags(root)
assert nxd.has_checkpoint(root)

for seed, tag, options in ((1, "step_4", {}), (2, None, {}), (3, None, {"save_master_weights": True})):
    fresh = build(seed, **options)
    found = nxd.load_checkpoint(root, tag=tag, model=fresh[0], optimizer=fresh[1], scheduler=fresh[2])
    want = truth[tag or "step_6"]
    # N2: the buffer is among them; N6: Adam's step is that of the call
    assert not unequal(true(frozen(*fresh)), true(want)), unequal(true(frozen(*fresh)), true(want))
    # N8: tensors in lists
    assert found["step"] == int((tag or "step_6")[5:]), found
    assert torch.equal(found["list"][0], torch.arange(3.0)) and torch.equal(found["list"][1][0], torch.ones(2))
    assert type(found["list"][1]) is tuple and found["list"][1][1] == "x"
    # N1: a step with lr 0 and without decay after a load in one call moves no weight
    before = frozen(fresh[0])
    rates = [(g["lr"], g["weight_decay"]) for g in fresh[1].param_groups]
    if tag is None:
        for group in fresh[1].param_groups:
            group["lr"], group["weight_decay"] = 0.0, 0.0
        train(*fresh, 50)
        assert not unequal(true(frozen(fresh[0])), true(before)), unequal(frozen(fresh[0]), before)
say("resumed")

# the loss of a resumed run goes on as if nothing had happened
again = build(4)
nxd.load_checkpoint(root, "step_4", *again)
for step in (4, 5):
    train(*again, step)
again[0].inv_freq.fill_(5)
torch_xla.sync()
assert not unequal(true(frozen(*again)), true(truth["step_6"]))
say("went on")

# N11: order is the order of commits, whatever the time stamps; and keeping none is an error
if rank == 0:
    for folder, _, files in os.walk(f"{root}/step_4"):
        for name in [folder, *(os.path.join(folder, f) for f in files)]:
            os.utime(name, (4e9, 4e9))
dist.barrier()
assert nxd.load_checkpoint(root)["step"] == 6
try:
    nxd.save_checkpoint(root, "step_8", model, num_kept_ckpts=0)
except xla_ckpt.UsageError as error:
    say("num_kept_ckpts=0" in str(error))
assert xla_ckpt.list_tags(root) == ["step_4", "step_6"]

# N12: a state that does not fit is an error on all ranks, and changes nothing
for other in ({"inner": 20}, {"hidden": 10}):
    wrong = build(6, **other)
    before = frozen(*wrong)
    try:
        nxd.load_checkpoint(root, None, *wrong)
    except xla_ckpt.IncompatibleCheckpointError as error:
        say(isinstance(error, ValueError))
    assert not unequal(frozen(*wrong), before)

# another topology, by the same call
def gathered(model):
    parts = [mappings._gathered(p.detach(), p.partition_dim).cpu() if hasattr(p, "partition_dim") else p.detach().cpu()
             for p in model.parameters()]
    return [parts[0][:13], *parts[1:]]


saved = build(7)
nxd.load_checkpoint(root, None, *saved)
expected = gathered(saved[0])
for tp in (1, 4):
    ps.destroy_model_parallel()
    ps.initialize_model_parallel(tensor_model_parallel_size=tp)
    moved = build(8)
    nxd.load_checkpoint(root, None, *moved)
    assert all(map(torch.equal, gathered(moved[0]), expected))
    nxd.save_checkpoint(root, f"tp_{tp}", *moved)
say("moved")
"""
)


def test_train_save_and_resume(tmp_path: Path) -> None:
    said = job(TRAIN, 4, tmp_path, tmp_path / "run")
    assert said == ["resumed", "went on", "True", "True", "True", "moved"] * 4
    for tag in ("step_4", "step_6", "tp_1", "tp_4"):
        assert xla_ckpt.verify(tmp_path / "run", tag).ok
    whole: dict[str, Any] = {}
    nxd.load_checkpoint(tmp_path / "run", "tp_4", model=whole)
    assert whole["embed.weight"].shape == (13, 8)
    assert whole["up.weight"].shape == (16, 8)


# As in neuronx-distributed's "Developer guide for save/load checkpoint".
SAMPLES = """
nxd.save_checkpoint(
    args.checkpoint_dir,  # checkpoint path
    tag=f"step_{total_steps}",  # tag, sub-directory under checkpoint path
    model=model,
    optimizer=optimizer,
    scheduler=lr_scheduler,
    user_content={"total_steps": total_steps, "batch_idx": batch_idx, "cli_args": args.__dict__},
    use_xser=True,
    async_save=True,
)
"""
LOAD_SAMPLE = """
user_content = nxd.load_checkpoint(
    args.checkpoint_dir,  # checkpoint path
    tag=f"step_{args.loading_step}",  # tag
    model=model,
    optimizer=optimizer,
    scheduler=lr_scheduler,
)
"""

GUIDE = (
    SETUP
    + """
save, load = sys.argv[2:4]
args = argparse.Namespace(checkpoint_dir=root, loading_step=7, lr=0.1, name="run")
total_steps, batch_idx = 7, 3
model, optimizer, lr_scheduler = build(0)
train(model, optimizer, lr_scheduler, 0)
exec(save)
want = frozen(model, optimizer, lr_scheduler)
model, optimizer, lr_scheduler = build(1)
exec(load)
nxd.finalize_checkpoint()
assert not unequal(true(frozen(model, optimizer, lr_scheduler)), true(want))
assert user_content == {"total_steps": 7, "batch_idx": 3, "cli_args": vars(args)}, user_content
say("done")

# low precision with master weights: N2 (buffers), and the masters themselves
def low(seed):
    model = Split(seed).to(torch.bfloat16).to("xla")
    model.inv_freq = torch.full((3,), float(seed), device="xla")
    made = NeuronZero1Optimizer(groups(model), torch.optim.AdamW, save_master_weights=True, pin_layout=False, lr=1e-2)
    return model, made, torch.optim.lr_scheduler.LambdaLR(made, lambda n: 1 / (n + 1))


def masters(optimizer):
    return [v.detach().cpu().clone() for v in optimizer.state_dict()["sharded_master_weights"].values()]


first = low(3)
train(*first, 0)
want, want_masters = frozen(*first), masters(first[1])
nxd.save_checkpoint(root, "low", *first, num_kept_ckpts=None, use_zero1_dcp=True,
                    avoid_saving_lower_precision_weights=True)
second = low(4)
nxd.load_checkpoint(root, "low", *second, use_zero1_dcp=True)
assert not unequal(true(frozen(*second)), true(want)), unequal(true(frozen(*second)), true(want))
assert second[0].inv_freq.tolist() == [3.0] * 3
embed = next(i for i, v in enumerate(want_masters) if v.shape[0] == 4 and v.dim() == 2)
for i, (a, b) in enumerate(zip(masters(second[1]), want_masters)):
    last = i == embed and rank == 3  # its last row is padding
    assert torch.equal(a[:-1] if last else a, b[:-1] if last else b) and a.dtype == torch.float32, i
say("masters")
"""
)


def test_samples_of_the_developer_guide(tmp_path: Path) -> None:
    assert job(GUIDE, 4, tmp_path, tmp_path / "run", SAMPLES, LOAD_SAMPLE, launch=torchrun) == ["done", "masters"] * 4


def test_signatures_are_those_of_neuronx_distributed() -> None:
    save = inspect.signature(nxd.save_checkpoint).parameters
    own = {n for n, p in save.items() if p.kind is p.KEYWORD_ONLY}
    assert own == {"layout"}
    assert [(n, p.default) for n, p in save.items() if n not in own][2:] == [
        ("model", None), ("optimizer", None), ("scheduler", None), ("user_content", None), ("num_workers", 8),
        ("use_xser", False), ("num_kept_ckpts", None), ("async_save", False), ("zero1_optimizer", False),
        ("use_zero1_dcp", False), ("avoid_saving_lower_precision_weights", False),
    ]  # fmt: skip
    assert list(save)[:2] == ["checkpoint_dir_str", "tag"]
    load = inspect.signature(nxd.load_checkpoint).parameters.values()
    assert [(p.name, p.default) for p in load if p.kind is p.POSITIONAL_OR_KEYWORD][1:] == [
        ("tag", None), ("model", None), ("optimizer", None), ("scheduler", None), ("num_workers", 8), ("strict", True),
        ("use_zero1_dcp", False),
    ]  # fmt: skip


def test_one_process_without_a_job(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no "):  # NoCheckpointError, which scripts for NxD catch as this
        nxd.load_checkpoint(tmp_path)
    # N8: tensors inside of lists, of dicts given as model and optimizer
    optimizer = {
        "state": {0: {"moments": [torch.ones(2), torch.zeros(3)]}},
        "param_groups": [{"lr": torch.tensor(0.5)}],
    }
    neuron_compat.save_checkpoint(
        checkpoint_dir_str=tmp_path, tag="a", model={"w": torch.arange(4.0)}, optimizer=optimizer, use_zero1_dcp=True,
        zero1_optimizer=True, avoid_saving_lower_precision_weights=True,
    )  # fmt: skip
    model: dict[str, Any] = {}
    found: dict[str, Any] = {}
    assert neuron_compat.load_checkpoint(tmp_path, model=model, optimizer=found) is None
    assert torch.equal(model["w"], torch.arange(4.0))
    assert torch.equal(found["state"][0]["moments"][1], torch.zeros(3))
    assert found["param_groups"][0]["lr"].item() == 0.5
    with pytest.raises(xla_ckpt.InvalidTagError, match="empty"):
        nxd.save_checkpoint(tmp_path)
    nxd.save_checkpoint(tmp_path, 10, {"w": torch.zeros(1)})  # type: ignore[arg-type]
    assert xla_ckpt.list_tags(tmp_path) == ["a", "10"]
    nxd.finalize_checkpoint()


ZERO1 = (
    SETUP
    + """
import torch.nn as nn
ps.destroy_model_parallel()
try:
    build(0)
except AssertionError as error:
    say("layers need it")
try:
    NeuronZero1Optimizer(nn.Linear(2, 2).to("xla").parameters(), torch.optim.SGD, lr=0.1)
except RuntimeError as error:
    say("initialize_model_parallel" in str(error))
ps.initialize_model_parallel(context_parallel_size=2)
optimizer = NeuronZero1Optimizer(nn.Linear(8, 8).to("xla").parameters(), torch.optim.AdamW, pin_layout=False, lr=0.1)
# ranks of one context hold the same weights, and a part of the states each; N3: none is lost
assert optimizer.sharding_groups == [[0, 1, 2, 3]]
assert optimizer.base_optimizer.param_groups[0]["params"][0].shape[0] == 2
model = nn.Linear(8, 8).to("xla")
optimizer = NeuronZero1Optimizer(model.parameters(), torch.optim.AdamW, pin_layout=False, lr=0.1)
model(torch.ones(1, 8, device="xla")).sum().backward()
optimizer.step()
for p in model.parameters():
    dist.broadcast(held := p.detach().cpu(), 0)
    p.data.copy_(held)
optimizer.init_zero()
model(torch.ones(1, 8, device="xla")).sum().backward()
optimizer.step()
state = optimizer.base_optimizer.state[optimizer.base_optimizer.param_groups[0]["params"][0]]
state["exp_avg"].fill_(float(rank))
torch_xla.sync()
nxd.save_checkpoint(root, "cp", model, optimizer)
state["exp_avg"].fill_(-1.0)
nxd.load_checkpoint(root, "cp", model, optimizer)
state = optimizer.base_optimizer.state[optimizer.base_optimizer.param_groups[0]["params"][0]]
assert (state["exp_avg"] == rank).all(), state
ps.destroy_model_parallel()
ps.initialize_model_parallel(expert_model_parallel_size=2)
model.weight.expert_model_parallel = True
try:
    NeuronZero1Optimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
except xla_ckpt.UsageError as error:
    say("experts" in str(error))
"""
)


def test_groups_of_the_zero1_optimizer(tmp_path: Path) -> None:
    assert job(ZERO1, 4, tmp_path, tmp_path / "run") == ["layers need it", "True", "True"] * 4
