"""What SageMaker model parallel's files hold: keys of the program's own, numbers of parameters, what is not read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from tests.formats.smp_files import load_info
from tests.formats.smp_job import ONE_RANK, ORDER, WIDE, Job, trained
from xla_ckpt.errors import CorruptCheckpointError, IncompatibleCheckpointError, UnsupportedStateError


@pytest.mark.parametrize(("pp", "tp"), [(1, 1), (1, 3), (2, 1), (2, 2), (2, 4), (1, 4)])
def test_parameters_that_one_rank_has_and_uneven_parts(pp: int, tp: int, tmp_path: Path) -> None:
    """tp ranks above 0 have fewer numbers, and ten rows over four ranks are 3, 3, 2 and 2."""
    job = Job(pp, tp)
    job.check(job.write(tmp_path / "c"))
    assert xla_ckpt.verify(tmp_path / "c").problems == []


@pytest.mark.parametrize(
    "keys",
    [
        ("model_state_dict", "optimizer_state_dict"),
        ("model", "optimizer"),
        ("net", "opt"),
        ("a", "b"),
        ("state", "opt"),
    ],
)
def test_the_programs_own_keys(keys: tuple[str, str], tmp_path: Path) -> None:
    job = Job()

    def content(job: Job, pp: int, tp: int) -> Any:
        return {
            keys[0]: job.model(pp, tp), "epoch": 4, keys[1]: job.optimizer_state(pp, tp), "args": {"lr": 0.25},
            "lr_scheduler": {"last_epoch": 3, "_last_lr": [0.25]},
        }  # fmt: skip

    scheduler: dict[str, Any] = {}
    found = job.check(job.write(tmp_path / "c", content), scheduler=scheduler)
    assert found.user_content == {"epoch": 4, "args": {"lr": 0.25}}
    assert scheduler == {"last_epoch": 3, "_last_lr": [0.25]}


def test_nested_and_bare(tmp_path: Path) -> None:
    job = Job()
    job.check(
        job.write(
            tmp_path / "n",
            lambda job, pp, tp: {"states": {"m": job.model(pp, tp), "o": job.optimizer_state(pp, tp), "x": 1}},
        )
    )
    assert job.check(tmp_path / "n", optimizer=False).user_content == {"states": {"x": 1}}
    job.check(job.write(tmp_path / "m", lambda job, pp, tp: job.model(pp, tp)), optimizer=False)
    job.write(tmp_path / "o", lambda job, pp, tp: job.optimizer_state(pp, tp))
    _, other = trained(1, seed=1)
    with pytest.raises(IncompatibleCheckpointError, match="numbers other parameters than tp rank 0"):
        xla_ckpt.load_checkpoint(tmp_path / "o", optimizer=other)
    job = Job(2, 1)
    xla_ckpt.load_checkpoint(
        job.write(tmp_path / "p", lambda job, pp, tp: job.optimizer_state(pp, tp)), optimizer=other
    )
    assert torch.equal(other.state_dict()["state"][1]["exp_avg"], job.states["state"][1]["exp_avg"])


def test_files_of_1_6_have_no_marks(tmp_path: Path) -> None:
    """They know no tp, and say nothing of the job."""
    job = Job(2, 1)
    for pp in range(2):
        model = {n: v for n, v in job.model(pp, 0).items() if not n.startswith("_smp")}
        optimizer = {k: v for k, v in job.optimizer_state(pp, 0).items() if not k.startswith("_smp")}
        torch.save({"model_state_dict": model, "optimizer_state_dict": optimizer}, tmp_path / f"c.pt_{pp}")
    job.check(tmp_path / "c.pt")


def test_without_marks_names_tell_the_model(tmp_path: Path) -> None:
    """Other dicts of tensors lie beside it: states of random number generators, averages."""
    job = Job(2, 1)
    for pp in range(2):
        model = {n: v for n, v in job.model(pp, 0).items() if not n.startswith("_smp")}
        held = {"weights": model, "rng": {"cpu": torch.ones(3)}, "loss": torch.tensor(0.5)}
        torch.save(held, tmp_path / f"c.pt_{pp}")
    found = job.check(tmp_path / "c.pt", optimizer=False)
    assert list(found.user_content) == ["rng", "loss"]
    assert found.user_content["rng"]["cpu"].tolist() == [1.0, 1.0, 1.0]


def test_values_that_each_rank_has_its_own_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They are not in the way of the model, and are not lost."""
    job = Job()

    def content(job: Job, pp: int, tp: int) -> Any:
        rng = torch.tensor([pp, tp])
        return {"model": job.model(pp, tp), "loss": 0.5 + tp, "rng": {"cpu": rng}, "rank": 2 * pp + tp, "lr": 0.25}

    found = job.check(job.write(tmp_path / "c", content), optimizer=False)
    assert found.user_content == {"lr": 0.25}
    assert "the ranks stored different values of loss, rank, rng" in caplog.text
    extras = xla_ckpt.restore(tmp_path / "c", like={"extras": None}).tree["extras"]
    assert extras["rank"] == {"per_rank": 4, "ranks": {"0": 0, "1": 1, "2": 2, "3": 3}}
    assert [r["cpu"].tolist() for r in extras["rng"]["ranks"].values()] == [[0, 0], [0, 1], [1, 0], [1, 1]]


def test_a_wrapped_model(tmp_path: Path) -> None:
    job = Job()

    def content(job: Job, pp: int, tp: int) -> Any:
        held = job.model(pp, tp)
        return {f"module.{n}" if not n.startswith("_") else n: v for n, v in held.items()}

    job.check(job.write(tmp_path / "c", content), optimizer=False)


def test_without_a_model_what_is_certain_is_read(tmp_path: Path) -> None:
    """States that are empty on tp ranks above 0 show which parameters are not split; order and shapes name them."""
    job = Job(2, 2)
    job.write(tmp_path / "c")
    tree = xla_ckpt.restore(tmp_path / "c", like={"model": {"norm.weight": None, "out.bias": None}}).tree
    assert torch.equal(tree["model"]["norm.weight"], job.weights["norm.weight"])
    assert torch.equal(tree["model"]["out.bias"], job.weights["out.bias"])
    with pytest.raises(IncompatibleCheckpointError, match="it is ambiguous how this array was split"):
        xla_ckpt.restore(tmp_path / "c", like={"model": {"qkv.weight": None}})
    rules = [("embed|qkv", ("tp",)), (r"out\.weight", (None, "tp"))]
    tree = xla_ckpt.restore(tmp_path / "c", shardings=rules).tree
    assert all(torch.equal(tree["model"][name], value) for name, value in job.weights.items())
    assert torch.equal(tree["optimizer"]["state"]["qkv.weight"]["exp_avg"], job.states["state"][1]["exp_avg"])


def test_without_tp_no_model_is_needed(tmp_path: Path) -> None:
    job = Job(2, 1)
    job.write(tmp_path / "c")
    xla_ckpt.convert(tmp_path / "c", tmp_path / "native")
    job.check(tmp_path / "native")


def test_tied_parameters(tmp_path: Path) -> None:
    """A state dict has a tied parameter under each of its names, the optimizer has it once."""

    def tied() -> tuple[torch.nn.Module, torch.optim.AdamW]:
        net = torch.nn.Module()
        net.embed, net.norm, net.head = torch.nn.Embedding(4, 3), torch.nn.LayerNorm(3), torch.nn.Linear(3, 4, False)
        net.head.weight = net.embed.weight
        return net, torch.optim.AdamW(net.parameters(), lr=0.25)

    net, optimizer = tied()
    net.head(net.norm(net.embed(torch.arange(4)))).square().sum().backward()
    optimizer.step()
    for tp in range(2):
        model: dict[str, Any] = {n: v.chunk(2)[tp] if v.dim() > 1 else v for n, v in net.state_dict().items()}
        model |= {"_smp_is_partial": True, "_smp_load_info": load_info(1, 2)}
        state: dict[int, Any] = {
            n: {k: v.chunk(2)[tp].clone() if v.dim() > 1 else v for k, v in members.items()}
            for n, members in optimizer.state_dict()["state"].items()
        }
        state |= {1: {}, 2: {}} if tp else {}
        groups = optimizer.state_dict()["param_groups"]
        torch.save({"model": model, "optimizer": {"state": state, "param_groups": groups}}, tmp_path / f"c_0_{tp}.pt")
    other, its = tied()
    xla_ckpt.load_checkpoint(tmp_path / "c", model=other, optimizer=its)
    assert all(torch.equal(v, other.state_dict()[n]) for n, v in net.state_dict().items())
    for number, members in optimizer.state_dict()["state"].items():
        assert all(torch.equal(v, its.state_dict()["state"][number][k]) for k, v in members.items()), number


# What is not read.


def test_flat_buffers_are_refused_and_the_model_is_not(tmp_path: Path) -> None:
    """With shard_optimizer_state SMP cuts its flat buffers, wherever a parameter begins."""
    job = Job()

    def content(job: Job, pp: int, tp: int) -> Any:
        states = []
        for rdp in range(2):
            held = {n: {"step": 3, "exp_avg": torch.randn(7 + n)} for n in range(3)}
            states.append({"state": held, "param_groups": [{"lr": 0.25, "params": [0, 1, 2]}], "rdp": rdp})
        optimizer = {key: [s[key] for s in states] for key in ("state", "param_groups")}
        return {"model": job.model(pp, tp), "optimizer": {**optimizer, "_smp_is_partial": True}}

    job.write(tmp_path / "c", content)
    job.check(tmp_path / "c", optimizer=False)
    net, optimizer = trained(1, seed=1)
    before = {n: v.clone() for n, v in net.state_dict().items()}
    with pytest.raises(IncompatibleCheckpointError, match="pieces of SMP's flat buffers"):
        xla_ckpt.load_checkpoint(tmp_path / "c", model=net, optimizer=optimizer)
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in before.items())


def test_sharded_data_parallelism_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "a_partial"
    folder.mkdir()
    for rank in range(2):
        torch.save({"module": {}, "shard_size": 2, "_smp_zero2d": True}, folder / f"model_{rank}.pt")
        torch.save({"_smp_zero2d": True}, folder / f"optimizer_{rank}.pt")
    with pytest.raises(UnsupportedStateError, match="sharded data parallelism") as refused:
        xla_ckpt.load_checkpoint(folder, model={})
    assert refused.value.file == "model_0.pt"


class Strange:
    """A class of a program's own."""


def test_a_class_of_the_programs_own_is_refused_where_it_is_wanted(tmp_path: Path) -> None:
    """The rest of the file is read; nothing of the class is imported."""
    job = Job()
    job.write(tmp_path / "c", lambda job, pp, tp: {"model": job.model(pp, tp), "args": Strange(), "epoch": 2})
    weights: dict[str, Any] = xla_ckpt.restore(tmp_path / "c", like={"model": {ONE_RANK: None}}).tree["model"]
    assert torch.equal(weights[ONE_RANK], job.weights[ONE_RANK])
    net, _ = trained(1, seed=1)
    with pytest.raises(xla_ckpt.UntrustedObjectError, match="test_smp_contents.Strange") as refused:
        xla_ckpt.load_checkpoint(tmp_path / "c", model=net)
    assert refused.value.leaf == "user_content/args"
    found = job.check(tmp_path / "c", optimizer=False, trust_pickle=True)
    assert type(found.user_content["args"]) is Strange
    assert found.user_content["epoch"] == 2


def test_several_models(tmp_path: Path) -> None:
    """Names say which one is meant; without them an error does."""
    job = Job()
    job.write(tmp_path / "c", lambda job, pp, tp: {"one": job.model(pp, tp), "two": job.model(pp, tp)})
    with pytest.raises(IncompatibleCheckpointError, match="several models are stored"):
        xla_ckpt.load_checkpoint(tmp_path / "c", model={})

    def content(job: Job, pp: int, tp: int) -> Any:
        other = {f"critic.{n}" if not n.startswith("_") else n: v for n, v in job.model(pp, tp).items()}
        return {"critic": other, "actor": job.model(pp, tp)}

    job.check(job.write(tmp_path / "d", content), optimizer=False)


def test_other_groups_and_another_order(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """States belong to names: what the program's order does not tell, the stored model's order and its shapes do."""
    job = Job()
    job.write(tmp_path / "c")
    net, _ = trained(1, seed=1)
    one = torch.optim.AdamW(net.parameters())
    with pytest.raises(IncompatibleCheckpointError, match="unites stored groups"):
        xla_ckpt.load_checkpoint(tmp_path / "c", model=net, optimizer=one)
    by_name = dict(net.named_parameters())
    back = torch.optim.AdamW(
        [{"params": [by_name[n] for n in reversed(WIDE)]}, {"params": [by_name[n] for n in ORDER if n not in WIDE]}]
    )
    xla_ckpt.load_checkpoint(tmp_path / "c", model=net, optimizer=back)
    for number, name in enumerate(ORDER):
        wanted = job.states["state"][number]["exp_avg"]
        assert torch.equal(back.state[by_name[name]]["exp_avg"], wanted), name
    assert "the program's counts" not in caplog.text


def test_an_order_that_fits_twice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Then the program is taken at its word, and the log says so."""
    weights = {"a": torch.ones(3), "b": torch.ones(3)}
    state = {n: {"step": torch.tensor(1.0), "exp_avg": torch.full((3,), float(n))} for n in (0, 1)}
    group = {"lr": 0.25, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False, "params": [0, 1]}
    marked = {**weights, "_smp_is_partial": True, "_smp_load_info": load_info(1, 1)}
    for members in state.values():
        members["exp_avg_sq"] = torch.ones(3)
    torch.save({"model": marked, "optimizer": {"state": state, "param_groups": [group]}}, tmp_path / "c_0_0.pt")
    net = torch.nn.Module()
    net.a, net.b = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
    optimizer = torch.optim.AdamW([net.b, net.a])
    xla_ckpt.load_checkpoint(tmp_path / "c", model=net, optimizer=optimizer)
    assert "number 0 of the stored optimizer is b by the order of this program's optimizer, and a by" in caplog.text
    assert optimizer.state[net.b]["exp_avg"].tolist() == [0.0, 0.0, 0.0]


def test_an_optimizer_of_other_parameters_is_refused(tmp_path: Path) -> None:
    job = Job(1, 2)

    def content(job: Job, pp: int, tp: int) -> Any:
        """A parameter that has never had a gradient has no state, so that nothing but the program names the numbers."""
        optimizer = job.optimizer_state(pp, tp)
        optimizer["state"].pop(1)
        return {"model": job.model(pp, tp), "optimizer": optimizer}

    job.write(tmp_path / "c", content)
    net, optimizer = trained(1, seed=1)
    xla_ckpt.load_checkpoint(tmp_path / "c", model=net, optimizer=optimizer)
    other = torch.optim.AdamW(net.parameters())
    with pytest.raises(IncompatibleCheckpointError, match="its groups are not those of this optimizer"):
        xla_ckpt.load_checkpoint(tmp_path / "c", model=net, optimizer=other)
    net.extra = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(IncompatibleCheckpointError, match="the stored model has. It has no extra"):
        xla_ckpt.load_checkpoint(tmp_path / "c", model=net, optimizer=torch.optim.AdamW(net.parameters()))


def test_a_tensor_that_is_not_contiguous(tmp_path: Path) -> None:
    """Only who wants it hears of it."""
    job = Job(1, 1)

    def content(job: Job, pp: int, tp: int) -> Mapping[str, Any]:
        return {**job.model(pp, tp), "qkv.weight": job.weights["qkv.weight"].t().contiguous().t()}

    job.write(tmp_path / "c", content)
    assert xla_ckpt.restore(tmp_path / "c", like={"model": {"norm.bias": None}})
    with pytest.raises(IncompatibleCheckpointError, match="a tensor is not contiguous"):
        job.check(tmp_path / "c", optimizer=False)


def test_names_that_only_a_later_tp_rank_has(tmp_path: Path) -> None:
    job = Job()
    job.write(tmp_path / "c", lambda job, pp, tp: {**job.model(pp, tp), **({"more": torch.ones(2)} if tp else {})})
    with pytest.raises(CorruptCheckpointError, match="a tp rank holds a name") as refused:
        xla_ckpt.load_checkpoint(tmp_path / "c", model={})
    assert refused.value.leaf == "model/more"
