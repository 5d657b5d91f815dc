"""What SageMaker model parallel's files hold: keys of the program's own, numbers of parameters, states in half."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from tests.layouts.smp_files import load_info
from xla_ckpt.errors import CorruptCheckpointError, IncompatibleCheckpointError, UnsupportedStateError

CUT = {"embed.weight": 0, "qkv.weight": 0, "qkv.bias": 0, "out.weight": 1}
"""Parameters that are split over tp, and along which dim. SMP puts their parts behind each other."""

ONE_RANK = "out.bias"
"""A parameter that SMP keeps on tp rank 0 alone: it is added to what all ranks have summed up."""

STAGE = {"embed.weight": 0, "norm.weight": 0, "norm.bias": 0, "qkv.weight": 1, "qkv.bias": 1, "out.weight": 1,
         "out.bias": 1}  # fmt: skip


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(10, 6)
        self.norm = torch.nn.LayerNorm(6)
        self.qkv = torch.nn.Linear(6, 12)
        self.out = torch.nn.Linear(12, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.out(self.qkv(self.norm(self.embed(x))))
        return made


def trained(steps: int = 3, seed: int = 0) -> tuple[Net, torch.optim.AdamW]:
    torch.manual_seed(seed)
    net = Net()
    decayed = [p for p in net.parameters() if p.dim() > 1]
    others = [p for p in net.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=0.25)
    for _ in range(steps):
        net(torch.arange(10)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, optimizer


WIDE = [n for n, p in Net().named_parameters() if p.dim() > 1]
ORDER = [*WIDE, *(n for n, _ in Net().named_parameters() if n not in WIDE)]


def part(name: str, value: torch.Tensor, tp: int, i: int) -> torch.Tensor:
    dim = CUT.get(name)
    return value.clone() if dim is None or not value.dim() else value.tensor_split(tp, dim)[i].clone()


class Job:
    """A job of pp stages and tp ranks that saves its parts."""

    def __init__(self, pp: int = 2, tp: int = 2, steps: int = 3, dtype: torch.dtype = torch.float32) -> None:
        self.pp, self.tp = pp, tp
        self.net, self.optimizer = trained(steps)
        self.weights = {n: v.to(dtype) for n, v in self.net.state_dict().items()}  # SMP keeps states in fp32
        self.states = self.optimizer.state_dict()

    def mine(self, pp: int, tp: int) -> list[str]:
        """The parameters of a rank, in the order of the model."""
        stage = {n: s * (self.pp - 1) for n, s in STAGE.items()}
        return [n for n in self.weights if stage[n] == pp and (n != ONE_RANK or not tp)]

    def model(self, pp: int, tp: int) -> dict[str, Any]:
        held = {n: part(n, self.weights[n], self.tp, tp) for n in self.mine(pp, tp)}
        return {**held, "_smp_is_partial": True, "_smp_load_info": load_info(self.pp, self.tp)}

    def order(self, tp: int) -> list[str]:
        """The parameters of a tp rank, all stages together, in the order of the optimizer's groups."""
        return [n for n in ORDER if n != ONE_RANK or not tp]

    def optimizer_state(self, pp: int, tp: int) -> dict[str, Any]:
        names, mine = self.order(tp), self.mine(pp, tp)
        state: dict[int, Any] = {}
        for number, name in enumerate(names):
            if name in mine:
                whole = self.states["state"][ORDER.index(name)]
                emptied = tp and name not in CUT
                state[number] = {} if emptied else {k: part(name, v, self.tp, tp) for k, v in whole.items()}
        sizes = [sum(len(self.weights[n].shape) > 1 for n in names), len(names)]
        numbers = (list(range(sizes[0])), list(range(sizes[0], sizes[1])))
        groups = [{**g, "params": n} for g, n in zip(self.states["param_groups"], numbers, strict=True)]
        return {"state": state, "param_groups": groups, "_smp_is_partial": True}

    def write(self, prefix: Path, content: Callable[[Job, int, int], Any] | None = None) -> Path:
        for pp in range(self.pp):
            for tp in range(self.tp):
                held = {"model": self.model(pp, tp), "optimizer": self.optimizer_state(pp, tp)}
                torch.save(held if content is None else content(self, pp, tp), f"{prefix}_{pp}_{tp}.pt")
        return prefix

    def check(self, path: Path, *, optimizer: bool = True, **options: Any) -> xla_ckpt.Loaded:
        """Load into another model and optimizer, and compare bit for bit."""
        net, other = trained(1, seed=1)
        net = net.to(next(iter(self.weights.values())).dtype)
        given = {"optimizer": other} if optimizer else {}
        found = xla_ckpt.load_checkpoint(path, model=net, **given, **options)
        assert all(torch.equal(value, net.state_dict()[name]) for name, value in self.weights.items())
        for number, members in self.states["state"].items() if optimizer else ():
            mine = other.state_dict()["state"][number]
            assert all(torch.equal(value, mine[key]) for key, value in members.items()), ORDER[number]
        return found


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
    """A state dict has a shared parameter under each of its names, the optimizer has it once."""

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


# Half precision.


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
