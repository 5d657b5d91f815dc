"""Every public call does the same whatever the program has set for all of torch: devices, types, modes, compilers."""

from __future__ import annotations

import contextlib
import functools
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock

import xla_ckpt
import xla_ckpt.dcp as dcp
from tests.jobs import run_alone, run_on_ranks
from tests.same import differences
from tests.xla import HAS_XLA

LAYOUTS = ("native", "dcp", "torchtitan", "xser", "pt", "smp", "torch_checkpointing")
MESH = xla_ckpt.Mesh(dp=2)

# -- what programs set


@contextlib.contextmanager
def default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def none_of_them() -> Iterator[None]:
    """Make states as in a program that has set nothing."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.device("cpu"))
        stack.enter_context(default_dtype(torch.float32))
        stack.enter_context(torch.autocast("cpu", enabled=False))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        yield


SURROUNDINGS: dict[str, Callable[[], Any]] = {
    "plain": contextlib.nullcontext,
    "default device xla": lambda: default_device("xla"),
    "default device meta": lambda: default_device("meta"),
    "context of device meta": lambda: torch.device("meta"),
    "default dtype float64": lambda: default_dtype(torch.float64),
    "default dtype bfloat16": lambda: default_dtype(torch.bfloat16),
    "inference mode": torch.inference_mode,
    "no grad": torch.no_grad,
    "deterministic algorithms": deterministic,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "detect anomaly": torch.autograd.detect_anomaly,
}

COVERED = ("plain", "default device xla", "default device meta", "inference mode", "autocast")
"""Those in which something has failed. The others run with --rest."""

# -- a training run, on the CPU


class Run:
    """A model that has trained for a step, with values of all kinds beside it; `fresh` ones have none of that."""

    def __init__(self, *, fresh: bool = False) -> None:
        with none_of_them():
            torch.manual_seed(1 if fresh else 0)
            self.model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
            self.model.narrow = torch.nn.Parameter(torch.randn(5, dtype=torch.bfloat16))
            self.model.register_buffer("none", torch.empty(0, 3))
            self.optimizer = torch.optim.AdamW(self.model.parameters())
            self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
            if not fresh:
                loss = self.model(torch.randn(3, 6)).sum() + self.model.narrow.float().sum()
                loss.backward()
                self.optimizer.step()
                self.scheduler.step()

    def state(self) -> dict[str, Any]:
        return {
            "model": dict(self.model.state_dict()),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
        }

    def check(self, other: Run) -> None:
        """Raise an error unless the other one has the same state, all of it in host memory, and can go on."""
        assert not differences(other.state(), self.state())
        assert devices_of(other.state()) == {"cpu"}


def values() -> dict[str, Any]:
    """Tensors of all kinds that a program may have beside its objects."""
    with none_of_them():
        matrix = torch.arange(6.0).reshape(2, 3)
        return {
            "matrix": matrix, "strided": matrix.t(), "number": torch.tensor(3), "none": torch.empty(0, 2),
            "complex": torch.tensor([1 + 2j]), "half": torch.ones(3, dtype=torch.bfloat16), "step": 7, "rate": 0.1,
            "bits": torch.tensor([True, False]), "double": torch.tensor([0.1], dtype=torch.float64),
        }  # fmt: skip


def composites() -> dict[str, Any]:
    """Tensors that are made of several plain ones, and a generator."""
    with none_of_them():
        matrix = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
        return {
            "coo": matrix.to_sparse(), "csr": matrix.to_sparse_csr(), "csc": matrix.to_sparse_csc(),
            "bsr": matrix.to_sparse_bsr((1, 1)), "bsc": matrix.to_sparse_bsc((1, 1)),
            "quantized": torch.quantize_per_tensor(matrix, 0.5, 1, torch.qint8),
            "channels": torch.quantize_per_channel(
                matrix, torch.tensor([0.5, 0.25]), torch.tensor([0, 1]), 0, torch.qint8
            ),
            "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
            "jagged": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
            "narrow": torch.ones(2, dtype=torch.complex32), "generator": torch.Generator().manual_seed(3),
        }  # fmt: skip


def devices_of(value: Any) -> set[str]:
    if isinstance(value, torch.Tensor):
        return {str(value.device)}
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return set().union(*map(devices_of, inner))


def checked(found: Any, expected: Any) -> None:
    """Raise an error unless two trees are the same, and all tensors of the first one in host memory."""
    assert not differences(found, expected, order=False)
    assert devices_of(found) == {"cpu"}


def zeros_like(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        with torch.inference_mode(False):
            return torch.zeros_like(value)
    return {k: zeros_like(v) for k, v in value.items()} if isinstance(value, dict) else value


# -- the calls

Calls = Callable[["Place"], None]
CALLS: dict[str, Calls] = {}
NEEDS_ALL_RANKS = set[str]()


class Place:
    """Where a call works: a directory of its own that all ranks share, and one that a run without surroundings made."""

    def __init__(self, root: Path, before: Path, rank: int) -> None:
        self.root, self.before, self.rank = root, before, rank


def call(name: str) -> Callable[[Calls], Calls]:
    def register(function: Calls) -> Calls:
        CALLS[name] = function
        return function

    return register


def save_all(root: Path, layout: str, **more: Any) -> xla_ckpt.SaveHandle:
    run = Run()
    return xla_ckpt.save_checkpoint(
        root / layout, "t", run.model, run.optimizer, run.scheduler, user_content=values(),
        extras={"rng": xla_ckpt.RNGState()}, layout=layout, mesh=MESH, **more,
    )  # fmt: skip


def load_all(root: Path, layout: str) -> None:
    run, extras = Run(fresh=True), {"rng": xla_ckpt.RNGState()}
    loaded = xla_ckpt.load_checkpoint(
        root / layout, "t", run.model, run.optimizer, run.scheduler, extras=extras, mesh=MESH
    )
    run.check(Run())
    checked(loaded.user_content, values())


for _layout in LAYOUTS:

    @call(f"save_checkpoint {_layout}")
    def _(place: Place, layout: str = _layout) -> None:
        save_all(place.root, layout)
        load_all(place.root, layout)

    @call(f"load_checkpoint {_layout}")
    def _(place: Place, layout: str = _layout) -> None:
        load_all(place.before, layout)

    @call(f"restore {_layout}")
    def _(place: Place, layout: str = _layout) -> None:
        found = xla_ckpt.restore(place.before / layout, "t", mesh=MESH).tree
        checked(dict(found["model"]), dict(Run().model.state_dict()))


@call("save_checkpoint async")
def _(place: Place) -> None:
    save_all(place.root, "native", async_save=True).result()
    load_all(place.root, "native")


@call("save and restore")
def _(place: Place) -> None:
    tree = {"values": values(), "composites": composites()}
    xla_ckpt.save(place.root, "t", tree, mesh=MESH)
    found = xla_ckpt.restore(place.root, "t", mesh=MESH).tree
    checked(found["values"], values())
    assert devices_of(found) == {"cpu"}
    for name, expected in composites().items():
        assert_same_composite(found["composites"][name], expected)


def assert_same_composite(found: Any, expected: Any) -> None:
    if isinstance(expected, torch.Generator):
        assert torch.equal(found.get_state(), expected.get_state())
        return
    assert (found.layout, found.dtype) == (expected.layout, expected.dtype)
    if expected.is_nested:
        for a, b in zip(found.unbind(), expected.unbind(), strict=True):
            assert torch.equal(a, b)
    elif expected.is_quantized:
        assert torch.equal(found.int_repr(), expected.int_repr())
    elif expected.dtype is torch.complex32:
        assert torch.equal(torch.view_as_real(found), torch.view_as_real(expected))
    else:
        assert torch.equal(found.to_dense(), expected.to_dense())


@call("restore into")
def _(place: Place) -> None:
    xla_ckpt.save(place.root, "t", values(), mesh=MESH)
    into = zeros_like(values())
    checked(xla_ckpt.restore(place.root, "t", into, mesh=MESH).tree, values())
    described = {"matrix": xla_ckpt.ArraySpec((2, 3), torch.float32), "number": xla_ckpt.ArraySpec((), torch.int64)}
    found = xla_ckpt.restore(place.root, "t", described, mesh=MESH).tree
    checked(found, {name: values()[name] for name in described})


@call("restore with cast")
def _(place: Place) -> None:
    xla_ckpt.save(place.root, "t", {"w": values()["matrix"]}, mesh=MESH)
    into = {"w": zeros_like(values()["matrix"].double())}
    checked(xla_ckpt.restore(place.root, "t", into, cast=True, mesh=MESH).tree, {"w": values()["matrix"].double()})


@call("split arrays")
def _(place: Place) -> None:
    mesh, rules = xla_ckpt.Mesh(tp=2), [("w", ("tp",))]
    part = values()["matrix"][place.rank : place.rank + 1].clone()
    xla_ckpt.save(place.root, "t", {"w": part}, mesh=mesh, shardings=rules)
    checked(xla_ckpt.restore(place.root, "t", mesh=MESH).tree, {"w": values()["matrix"]})
    into = {"w": zeros_like(part)}
    checked(xla_ckpt.restore(place.root, "t", into, mesh=mesh, shardings=rules).tree, {"w": part})


@call("DTensor")
def _(place: Place) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    with none_of_them():
        mesh = init_device_mesh("cpu", (2,))
        local = values()["matrix"][place.rank : place.rank + 1].clone()
        tensor = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        fresh = DTensor.from_local(torch.zeros(1, 3), mesh, [Shard(0)], run_check=False)
    xla_ckpt.save(place.root, "t", {"w": tensor})
    checked(xla_ckpt.restore(place.root, "t", {"w": fresh}).tree["w"].to_local(), local)
    checked(xla_ckpt.restore(place.root, "t").tree["w"], values()["matrix"])


for _layout in LAYOUTS:

    @call(f"convert to {_layout}")
    def _(place: Place, layout: str = _layout) -> None:
        if place.rank == 0:
            xla_ckpt.convert(place.before / "native", place.root, "t", to=layout)
            assert xla_ckpt.verify(place.root, "t").ok

    @call(f"look into {_layout}")
    def _(place: Place, layout: str = _layout) -> None:
        if place.rank == 0:
            root = xla_ckpt.Checkpoints(place.before / layout)
            checked(root.read("model/0.weight", "t"), Run().model[0].weight.detach())
            assert root.sample("model/0.weight", "t").shape == (4, 6)
            assert root.show("t").arrays
            assert not root.diff("t", "t").moved


def first_alone(place: Place, function: Callable[[], object]) -> None:
    """Have rank 0 call a function, and raise an error on all ranks if that did."""
    error: list[Any] = [None]
    if place.rank == 0:
        try:
            function()
        except Exception:
            error = [traceback.format_exc()]
    with torch.device("cpu"):
        dist.broadcast_object_list(error, src=0)
    assert error[0] is None, error[0]


@call("one file for all")
def _(place: Place) -> None:
    path = place.root / "model.pt"
    first_alone(place, lambda: xla_ckpt.convert(place.before / "native", path, "t", to="torch", part="model"))
    checked(dict(xla_ckpt.restore(path, mesh=MESH).tree["model"]), dict(Run().model.state_dict()))
    run = Run(fresh=True)
    xla_ckpt.load_checkpoint(path, model=run.model, mesh=MESH)
    checked(dict(run.model.state_dict()), dict(Run().model.state_dict()))


@call("a file of torch.save")
def _(place: Place) -> None:
    path = place.before / "file.pt"
    checked(xla_ckpt.restore(path, mesh=MESH).tree["values"], values())
    into = {"values": zeros_like(values())}
    checked(xla_ckpt.restore(path, like=into, mesh=MESH).tree["values"], values())


@call("export_hf")
def _(place: Place) -> None:
    if place.rank == 0:
        xla_ckpt.export_hf(place.before / "native", place.root / "hf", "t")
        from safetensors.torch import load_file

        with torch.device("cpu"):
            found = load_file(place.root / "hf/model.safetensors")
        checked(found["0.weight"], Run().model[0].weight.detach())


@call("repair")
def _(place: Place) -> None:
    xla_ckpt.save(place.root, "t", values(), mesh=MESH, options=xla_ckpt.SaveOptions(parity="block"))
    if place.rank == 0:
        assert xla_ckpt.repair(place.root, "t") == ()


@call("share")
def _(place: Place) -> None:
    for tag in ("a", "b"):
        xla_ckpt.save(place.root, tag, values(), mesh=MESH, options=xla_ckpt.SaveOptions(share=True))
    checked(xla_ckpt.restore(place.root, "b", mesh=MESH).tree, values())


@call("dcp.save, dcp.load")
def _(place: Place) -> None:
    dcp.save({"model": Run().state()["model"], "values": values()}, checkpoint_id=place.root)
    into = {"model": Run(fresh=True).state()["model"], "values": zeros_like(values())}
    dcp.load(into, checkpoint_id=place.root)
    checked(into, {"model": Run().state()["model"], "values": values()})


@call("dcp.async_save")
def _(place: Place) -> None:
    dcp.async_save({"values": values()}, checkpoint_id=place.root).result()
    into = {"values": zeros_like(values())}
    dcp.load(into, checkpoint_id=place.root)
    checked(into, {"values": values()})


@call("stock calls with our storage")
def _(place: Place) -> None:
    stock.save({"values": values()}, storage_writer=dcp.StorageWriter(place.root))
    into = {"values": zeros_like(values())}
    stock.load(into, storage_reader=dcp.StorageReader(place.root))
    checked(into, {"values": values()})


@call("stock async_save with our stager")
def _(place: Place) -> None:
    stock.async_save(
        {"values": values()}, storage_writer=dcp.StorageWriter(place.root), async_stager=dcp.AsyncStager()
    ).result()
    into = {"values": zeros_like(values())}
    dcp.load(into, checkpoint_id=place.root)
    checked(into, {"values": values()})


@call("dcp.sharded")
def _(place: Place) -> None:
    part = values()["matrix"][place.rank : place.rank + 1].clone()
    kept = {"mesh": xla_ckpt.Mesh(tp=2), "shardings": [("w", ("tp",))]}
    dcp.save(dcp.sharded({"w": part}, **kept), checkpoint_id=place.root)
    into = {"w": zeros_like(part)}
    dcp.load(dcp.sharded(into, **kept), checkpoint_id=place.root)
    checked(into["w"], part)


@call("objects on the default device")
def _(place: Place) -> None:
    if torch.get_default_device().type == "meta":
        return  # there is nothing to save
    model, fresh = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    xla_ckpt.save_checkpoint(place.root, "t", model, user_content={"x": torch.ones(2)}, mesh=xla_ckpt.Mesh(tp=2))
    loaded = xla_ckpt.load_checkpoint(place.root, "t", fresh, mesh=xla_ckpt.Mesh(tp=2))
    assert fresh.weight.device == model.weight.device
    assert torch.equal(fresh.weight.cpu(), model.weight.cpu())
    assert devices_of(loaded.user_content) == {"cpu"}


@call("RNGState")
def _(place: Place) -> None:
    state = xla_ckpt.RNGState()
    with torch.device("cpu"):
        xla_ckpt.save_checkpoint(place.root, "t", extras={"rng": state}, mesh=MESH)
        first = torch.rand(3)
    xla_ckpt.load_checkpoint(place.root, "t", extras={"rng": xla_ckpt.RNGState()}, mesh=MESH)
    with torch.device("cpu"):
        assert torch.equal(torch.rand(3), first)


@call("neuron_compat.smp")
def _(place: Place) -> None:
    import neuron_compat.smp as smp
    from tests.smp.training import begin, trained, wrapped

    with none_of_them():
        begin(1, 2)
        model, optimizer = wrapped()
        trained(model, optimizer, 0, 1)
    expected = [p.detach().clone() for p in model.parameters()]
    smp.save_checkpoint(place.root / "partial", "t", partial=True, model=model, optimizer=optimizer)
    smp.save_checkpoint(place.root / "full", "t", partial=False, model=model)
    smp.save({"values": values()}, str(place.root / "file.pt"), partial=True)
    dist.barrier()
    checked(smp.load(str(place.root / "file.pt"), partial=True)["values"], values())
    smp.reset()
    for folder, partial in (("partial", True), ("full", False)):
        with none_of_them():
            begin(1, 2)
            fresh, _ = wrapped(seed=5)
        smp.resume_from_checkpoint(place.root / folder, "t", partial=partial)
        checked([p.detach() for p in fresh.parameters()], expected)
        smp.reset()
    smp.shutdown()


if HAS_XLA:

    @call("XLA tensors")
    def _(place: Place) -> None:
        import torch_xla

        tree = {name: v.to("xla") if isinstance(v, torch.Tensor) else v for name, v in values().items()}
        torch_xla.sync()
        xla_ckpt.save(place.root, "t", tree, mesh=MESH)
        checked(xla_ckpt.restore(place.root, "t", mesh=MESH).tree, values())
        into = {name: torch.zeros_like(v) if isinstance(v, torch.Tensor) else v for name, v in tree.items()}
        found = xla_ckpt.restore(place.root, "t", into, mesh=MESH).tree
        assert devices_of(found) == {"xla:0"}
        assert not differences(found, values(), order=False)

    @call("neuron_compat.nxd")
    def _(place: Place) -> None:
        import neuron_compat.nxd as nxd
        from neuron_compat.nxd.parallel_layers import ColumnParallelLinear, load, parallel_state, save

        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
        try:
            with none_of_them():
                model, fresh, third = (ColumnParallelLinear(4, 6, device=torch.device("cpu")) for _ in range(3))
            nxd.save_checkpoint(place.root, "t", model, user_content=values())
            content = nxd.load_checkpoint(place.root, "t", fresh)
            checked(content, values())
            checked(dict(fresh.state_dict()), dict(model.state_dict()))
            save({"model": model.state_dict()}, place.root / "older")
            load(str(place.root / "older"), model=third)
            checked(dict(third.state_dict()), dict(model.state_dict()))
        finally:
            parallel_state.destroy_model_parallel()


# -- the matrix


def make_earlier(before: Path) -> None:
    """What calls find that load."""
    for layout in LAYOUTS:
        save_all(before, layout)
    if dist.get_rank() == 0:
        torch.save({"values": values()}, before / "file.pt")
    dist.barrier()


def make_all_calls(rank: int, surroundings: str, root: Path) -> dict[str, str]:
    """Make each call of the matrix; what those raised that failed."""
    warnings.simplefilter("ignore")
    failed: dict[str, str] = {}
    before = root / "before"
    make_earlier(before)
    for number, (name, function) in enumerate(CALLS.items()):
        print(name, flush=True)  # the last one is where a process ended that says nothing itself
        place = Place(root / str(number), before, rank)
        place.root.mkdir(exist_ok=True)
        try:
            with SURROUNDINGS[surroundings]():
                function(place)
        except Exception:
            failed[name] = traceback.format_exc()[-3000:]
        dist.barrier()
    return failed


@functools.cache
def failures(surroundings: str) -> list[dict[str, str]]:
    with tempfile.TemporaryDirectory() as root:
        return run_on_ranks(make_all_calls, 2, surroundings, Path(root), xla=HAS_XLA)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    "surroundings",
    [
        pytest.param(s, marks=[pytest.mark.xla] * ("xla" in s) + [pytest.mark.rest] * (s not in COVERED))
        for s in SURROUNDINGS
    ],
)
def test_each_call_in_each_surroundings(surroundings: str, name: str) -> None:
    for rank, failed in enumerate(failures(surroundings)):
        assert name not in failed, f"rank {rank}: {failed.get(name)}"


# -- calls in a function that is compiled


def calls_in_compiled_functions(root: Path) -> None:
    """Make calls of all kinds in functions that torch.compile has compiled, with a graph before and after each."""
    import neuron_compat.nxd as nxd

    run, fresh, extras = Run(), Run(fresh=True), {"rng": xla_ckpt.RNGState()}
    model, optimizer, scheduler = fresh.model, fresh.optimizer, fresh.scheduler
    state, into = {"values": values()}, {"values": zeros_like(values())}
    calls: dict[str, Callable[[], Any]] = {
        "save_checkpoint": lambda: xla_ckpt.save_checkpoint(
            root, "t", run.model, run.optimizer, run.scheduler, user_content=values(), extras=extras
        ),
        "async": lambda: xla_ckpt.save_checkpoint(root, "u", run.model, async_save=True).result(),
        "finalize_checkpoint": xla_ckpt.finalize_checkpoint,
        "load_checkpoint": lambda: xla_ckpt.load_checkpoint(root, "t", model, optimizer, scheduler, extras=extras),
        "save": lambda: xla_ckpt.save(root, "v", state),
        "restore": lambda: xla_ckpt.restore(root, "v"),
        "verify": lambda: xla_ckpt.verify(root, "t"),
        "read": lambda: xla_ckpt.Checkpoints(root).read("model/0.weight", "t"),
        "convert": lambda: xla_ckpt.convert(root, root / "dcp", "t", to="dcp"),
        "dcp.save": lambda: dcp.save(state, checkpoint_id=root / "x"),
        "dcp.load": lambda: dcp.load(into, checkpoint_id=root / "x"),
        "nxd.save_checkpoint": lambda: nxd.save_checkpoint(root / "nxd", "t", run.model),
        "nxd.load_checkpoint": lambda: nxd.load_checkpoint(root / "nxd", "t", Run(fresh=True).model),
    }
    given, found = torch.ones(2), {}
    for name, made in calls.items():

        @torch.compile(backend="eager")
        def step(x: torch.Tensor, made: Callable[[], Any] = made) -> tuple[torch.Tensor, Any]:
            y = x * 2
            answer = made()
            return y + 1, answer

        result, found[name] = step(given)
        assert result.tolist() == [3, 3]
    fresh.check(run)
    checked(found["load_checkpoint"].user_content, values())
    checked(found["restore"].tree, state)
    checked(into, state)
    assert found["verify"].ok


def test_calls_in_a_compiled_function(tmp_path: Path) -> None:
    run_alone(calls_in_compiled_functions, tmp_path)
