"""What a save with each kind of snapshot stores while the program goes on, and who waits for it (CPU tensors)."""

from __future__ import annotations

import copy
import os
import pickle
import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch.optim import optimizer as torch_optimizer

import xla_ckpt
from tests.jobs import run_on_ranks
from tests.runs import names_in
from tests.snapshot.trials import different, small_pieces, trials
from xla_ckpt.saving.write import Prefetcher
from xla_ckpt.snapshot.arena import HOST_MEMORY_POOL, MAX_BLOCK_BYTES
from xla_ckpt.snapshot.shards import HostShard
from xla_ckpt.state.guard import WRITE_BARRIER

ROWS = 6000
"""Of a parameter: enough that it is not copied at once as small ones are."""


@pytest.fixture(autouse=True)
def nothing_in_flight() -> Iterator[None]:
    yield
    xla_ckpt.finalize_checkpoint()
    assert not torch_optimizer._global_optimizer_pre_hooks


class Gate:
    """Holds copies back in the background until `open` is called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        self.reached = threading.Event()
        begin_copy = HostShard.begin_copy

        def waits(shard: HostShard, offset: int, target: Any) -> None:
            self.reached.set()
            assert self.opened.wait(60)
            begin_copy(shard, offset, target)

        monkeypatch.setattr(HostShard, "begin_copy", waits)

    def open(self) -> None:
        self.opened.set()

    def open_when_awaited(self, handle: xla_ckpt.SaveHandle) -> None:
        """Open it as soon as somebody waits for a save."""
        end = time.monotonic() + 60
        while not handle._snapshot_progress._wait_starts:
            assert time.monotonic() < end, "nobody waits for the save"
            time.sleep(0.001)
        self.open()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.open()


def model_of(value: float = 1.0) -> torch.nn.Module:
    model = torch.nn.Linear(4, ROWS)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
            parameter.grad = torch.ones_like(parameter)
    return model


def overlapped(root: Path, model: Any, optimizer: Any = None, **more: Any) -> xla_ckpt.SaveHandle:
    return xla_ckpt.save_checkpoint(
        root, "a", model, optimizer, async_save=True, options=xla_ckpt.SaveOptions(snapshot="overlap"), **more
    )


def weight(root: Path, tag: str = "a") -> float:
    """The one value that all elements of the saved weight have."""
    (value,) = xla_ckpt.restore(root, tag).tree["model"]["weight"].unique().tolist()
    return value


class Waiter(threading.Thread):
    """Calls a function that is to wait for the save; `waits` returns when it does."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function, self.error = function, None
        self.start()

    def run(self) -> None:
        try:
            self.function()
        except BaseException as error:
            self.error = error

    def waits(self, handle: xla_ckpt.SaveHandle) -> bool:
        while not handle._snapshot_progress._wait_starts and self.is_alive():
            time.sleep(0.001)
        return self.is_alive()

    def ends(self) -> None:
        self.join(60)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("mode", ["host", "overlap"])
def test_what_a_tag_has_is_what_was_there_at_the_call_in_many_runs(mode: str) -> None:
    torch.set_num_threads(1)
    assert trials(settings().max_examples, mode) == []


@pytest.mark.parametrize("foreach", [False, True])
def test_a_step_waits_until_its_parameters_are_copied(tmp_path: Path, gate: Gate, foreach: bool) -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, foreach=foreach)
    handle = overlapped(tmp_path, model, optimizer)
    assert not handle.frozen(timeout=0)
    step = Waiter(optimizer.step)
    assert step.waits(handle)
    assert model.weight[0, 0] == 1.0
    gate.open()
    step.ends()
    assert handle.result().stall >= handle._snapshot_progress.stall_seconds > 0
    assert (model.weight[0, 0], weight(tmp_path)) == (0.0, 1.0)


@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("fused", [False, True])
def test_without_the_guard_a_step_is_found_out_or_tears_the_tag(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch, guarded: bool, fused: bool
) -> None:
    """Fused optimizers move no `_version`: against them there is nothing but the guard."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=fused)
    if not guarded:
        monkeypatch.setattr(WRITE_BARRIER, "watch", lambda *_, **__: None)
    handle = overlapped(tmp_path, model, optimizer)
    step = Waiter(optimizer.step)
    assert step.waits(handle) == guarded
    gate.open()
    step.ends()
    if guarded:
        handle.result()
        assert weight(tmp_path) == 1.0
    elif fused:
        handle.result()
        assert weight(tmp_path) == 0.0, "docs/snapshots.md says what no _version shows"
    else:
        with pytest.raises(xla_ckpt.ChangedStateError) as raised:
            handle.result()
        assert raised.value.leaf in ("model/weight", "model/bias")
        assert not xla_ckpt.list_tags(tmp_path)


def test_a_write_that_nobody_announced_fails_the_save_by_name(tmp_path: Path, gate: Gate) -> None:
    model = model_of()
    handle = overlapped(tmp_path, model)
    assert gate.reached.wait(60)
    with torch.no_grad():
        model.weight.mul_(2)
    gate.open()
    with pytest.raises(xla_ckpt.ChangedStateError, match=r"before it was saved .*model/weight.*frozen\(\)"):
        handle.result()
    assert not xla_ckpt.list_tags(tmp_path)
    handle = overlapped(tmp_path, model)
    assert handle.frozen()
    with torch.no_grad():
        model.weight.mul_(2)
    handle.result()
    assert weight(tmp_path) == 2.0


def test_an_optimizer_of_something_else_does_not_wait(tmp_path: Path, gate: Gate) -> None:
    model, other = model_of(), model_of()
    mine, another = (torch.optim.SGD(m.parameters(), lr=1.0, momentum=0.9) for m in (model, other))
    mine.step()
    handle = overlapped(tmp_path, model, mine)
    another.step()
    assert other.weight[0, 0] == 0.0
    assert not handle.frozen(timeout=0)
    gate.open()
    assert handle.result().stall < 60


def test_if_no_optimizer_is_saved_every_one_waits(tmp_path: Path, gate: Gate) -> None:
    """It may keep copies of other precision, and put those into the parameters."""
    model = model_of()
    masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=1.0)
    handle = overlapped(tmp_path, model)
    step = Waiter(optimizer.step)
    assert step.waits(handle)
    gate.open()
    step.ends()


def test_what_forward_writes_to_and_small_things_are_copied_before_the_call_returns(tmp_path: Path, gate: Gate) -> None:
    model = torch.nn.BatchNorm1d(ROWS)
    extra = torch.nn.Linear(4, ROWS)
    with torch.inference_mode():
        inference = {"t": torch.ones(ROWS)}
    handle = xla_ckpt.save_checkpoint(
        tmp_path,
        "a",
        model,
        extras={"extra": extra, "inference": inference},
        user_content={"x": torch.ones(ROWS)},
        async_save=True,
        options=xla_ckpt.SaveOptions(snapshot="overlap"),
    )
    before = copy.deepcopy(extra.state_dict())
    model(torch.randn(8, ROWS))
    with torch.no_grad():
        extra.weight.zero_()
    with torch.inference_mode():
        inference["t"].zero_()
    gate.open()
    handle.result()
    tree = xla_ckpt.restore(tmp_path, "a").tree
    assert not tree["model"]["running_mean"].any()
    assert different(tree["extras"]["extra"], before) == []
    assert tree["extras"]["inference"]["t"].all()


def test_a_parameter_may_be_given_other_memory_and_the_model_may_go(tmp_path: Path, gate: Gate) -> None:
    model = model_of()
    handle = overlapped(tmp_path, model)
    model.weight.data = torch.zeros(ROWS, 4)
    del model
    torch.full((ROWS, 4), 7.0)  # would get the memory, if it had been freed
    gate.open()
    handle.result()
    assert weight(tmp_path) == 1.0


def test_a_storage_that_is_resized_fails_the_save(tmp_path: Path, gate: Gate) -> None:
    model = model_of()
    handle = overlapped(tmp_path, model)
    assert gate.reached.wait(60)  # with the bias, which stands first in the file
    model.weight.untyped_storage().resize_(0)
    gate.open()
    with pytest.raises(xla_ckpt.ChangedStateError, match="model/weight"):
        handle.result()


def test_load_state_dict_waits_and_leaves_no_hook_behind(tmp_path: Path, gate: Gate) -> None:
    model = torch.nn.Sequential(model_of(), torch.nn.ReLU())
    handle = overlapped(tmp_path, model)
    pickle.dumps(model)
    load = Waiter(lambda: model[0].load_state_dict(model_of(5.0).state_dict()))
    assert load.waits(handle)
    gate.open()
    load.ends()
    handle.result()
    xla_ckpt.save_checkpoint(
        tmp_path, "b", model, async_save=True, options=xla_ckpt.SaveOptions(snapshot="host")
    ).result()
    assert xla_ckpt.restore(tmp_path, "a").tree["model"]["0.weight"].unique().tolist() == [1.0]
    assert xla_ckpt.restore(tmp_path, "b").tree["model"]["0.weight"].unique().tolist() == [5.0]
    xla_ckpt.finalize_checkpoint()
    assert not any(part._load_state_dict_pre_hooks for part in model.modules())


def test_a_load_from_elsewhere_waits_for_the_save(tmp_path: Path, gate: Gate) -> None:
    model = model_of()
    gate.open()
    xla_ckpt.save_checkpoint(tmp_path / "old", "a", model_of(5.0))
    gate.opened.clear()
    handle = overlapped(tmp_path / "new", model)
    load = Waiter(lambda: xla_ckpt.load_checkpoint(tmp_path / "old", model=model))
    assert load.waits(handle)
    gate.open()
    load.ends()
    handle.result()
    assert (weight(tmp_path / "new"), model.weight[0, 0]) == (1.0, 5.0)


def test_a_save_that_fails_lets_the_optimizer_go_on(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def broken(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Prefetcher, "fetch", broken)
    handle = overlapped(tmp_path, model, optimizer)
    step = Waiter(optimizer.step)
    assert step.waits(handle)
    gate.open()
    step.ends()
    with pytest.raises(xla_ckpt.StorageError, match="No space left"):
        handle.result()
    assert model.weight[0, 0] == 0.0


def test_an_error_of_a_copy_names_the_leaf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(HostShard, "begin_copy", broken)
    handle = overlapped(tmp_path, model_of())
    with pytest.raises(xla_ckpt.SaveError, match=r"the device is gone .*leaf model/(weight|bias)"):
        handle.result()
    assert handle.frozen(timeout=0)


def test_saves_to_several_places_at_once(tmp_path: Path, gate: Gate) -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=True)
    handles = [overlapped(tmp_path / str(i), model, optimizer) for i in range(3)]
    step = Waiter(optimizer.step)
    assert step.waits(handles[0])
    gate.open()
    step.ends()
    assert [(h.result().tag, weight(tmp_path / str(i))) for i, h in enumerate(handles)] == [("a", 1.0)] * 3


def test_the_second_save_to_a_place_waits_for_the_first(tmp_path: Path) -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=True)
    for number in range(4):
        xla_ckpt.save_checkpoint(
            tmp_path, f"t{number}", model, optimizer, async_save=True, options=xla_ckpt.SaveOptions(snapshot="overlap")
        )
        optimizer.step()
    xla_ckpt.finalize_checkpoint()
    assert [weight(tmp_path, f"t{number}") for number in range(4)] == [1.0, 0.0, -1.0, -2.0]


def test_memory_is_reused_within_the_budget_and_freed_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Linear(3 * MAX_BLOCK_BYTES // 4, 1, bias=False)
    lent: list[int] = []
    borrow = HOST_MEMORY_POOL.borrow
    monkeypatch.setattr(HOST_MEMORY_POOL, "borrow", lambda link: lent.append(MAX_BLOCK_BYTES) or borrow(link))
    for number in range(2):
        xla_ckpt.save(
            tmp_path,
            f"t{number}",
            {"w": model.weight},
            async_save=True,
            options=xla_ckpt.SaveOptions(snapshot="overlap", snapshot_budget=MAX_BLOCK_BYTES),
        ).result()
        assert len(lent) == number + 1
        assert len(HOST_MEMORY_POOL._free_slabs["host"]) == 1
        assert torch.equal(xla_ckpt.restore(tmp_path, f"t{number}").tree["w"], model.weight)
    xla_ckpt.finalize_checkpoint()
    assert not HOST_MEMORY_POOL._free_slabs


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("compiled_before", [True, False])
def test_a_compiled_step_waits(tmp_path: Path, gate: Gate, backend: str, compiled_before: bool) -> None:
    torch._dynamo.reset()
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(1.0))
    step = torch.compile(optimizer.step, backend=backend)
    if compiled_before:
        step()
    handle = overlapped(tmp_path, model, optimizer)
    # The main thread takes the step. A process whose first compilation is in another thread breaks with torch 2.9 and
    # Python 3.11 (segmentation faults, without this library, too). Dynamo is not safe there: pytorch issue 118260.
    opener = Waiter(lambda: gate.open_when_awaited(handle))
    step()
    opener.ends()
    handle.result()
    assert weight(tmp_path) == (0.0 if compiled_before else 1.0)


def test_a_scaler_waits_and_accumulated_gradients_do_not(tmp_path: Path, gate: Gate) -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    handle = overlapped(tmp_path, model, optimizer)
    for _ in range(2):
        scaler.scale(model(torch.ones(1, 4)).sum()).backward()
    step = Waiter(lambda: scaler.step(optimizer))
    assert step.waits(handle)
    gate.open()
    step.ends()
    handle.result()
    assert weight(tmp_path) == 1.0


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(xla_ckpt.UsageError, match="choice for snapshot.*'host' or 'device' or 'overlap'.*'copy'"):
        xla_ckpt.save(tmp_path, "a", {"w": torch.ones(2)}, options=xla_ckpt.SaveOptions(snapshot="copy"))
    with pytest.raises(xla_ckpt.UsageError, match="snapshot_budget is no number of bytes.*'1 GB'"):
        xla_ckpt.save(tmp_path, "a", {"w": torch.ones(2)}, options=xla_ckpt.SaveOptions(snapshot_budget="1 GB"))
    assert names_in(tmp_path) == []


class StepsUnseen:
    """An optimizer whose steps torch does not announce."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.param_groups = [{"params": list(model.parameters())}]
        self.state: dict[Any, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"state": {}, "param_groups": [{"params": list(range(len(self.param_groups[0]["params"])))}]}

    def load_state_dict(self, state: Any) -> None:
        pass

    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter.data.sub_(1.0)


def test_the_parameters_of_a_strange_optimizer_are_copied_at_once(tmp_path: Path, gate: Gate) -> None:
    model = model_of()
    optimizer = StepsUnseen(model)
    handle = overlapped(tmp_path, model, optimizer)
    optimizer.step()
    gate.open()
    handle.result()
    assert weight(tmp_path) == 1.0


def replicas_are_saved_while_they_change(rank: int, root: Path) -> list[Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, ROWS), torch.nn.Linear(ROWS, 4))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    found: list[Any] = []
    for number in range(4):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        wanted = copy.deepcopy(model.state_dict())
        handle = xla_ckpt.save_checkpoint(
            root, f"t{number}", model, optimizer, async_save=True, options=xla_ckpt.SaveOptions(snapshot="overlap")
        )
        optimizer.step()
        report = handle.result()
        found.append((different(xla_ckpt.restore(root, f"t{number}").tree["model"], wanted), report.nbytes > 0))
    if rank == 1:  # one rank alone writes to its memory
        with pytest.MonkeyPatch.context() as patch:
            made = Gate(patch)
            handle = overlapped(root, model, optimizer)
            assert made.reached.wait(60)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1.0)
            made.open()
            found.append(error_of(handle))
    else:
        found.append(error_of(overlapped(root, model, optimizer)))
    return found


def error_of(handle: xla_ckpt.SaveHandle) -> str:
    with pytest.raises(xla_ckpt.CheckpointError) as raised:
        handle.result()
    return f"{type(raised.value).__name__} {raised.value.rank}"


def test_ranks_share_the_work_and_the_error(tmp_path: Path) -> None:
    found = run_on_ranks(replicas_are_saved_while_they_change, 2, tmp_path)
    assert found == [[([], True)] * 4 + ["ChangedStateError 1"]] * 2


def shards_are_saved_while_they_change(rank: int, root: Path) -> list[tuple[bool, list[str]]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 2000), torch.nn.Linear(2000, 64))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    found = []
    for number in range(3):
        model(torch.randn(2, 64)).sum().backward()
        wanted = {name: value.full_tensor().clone() for name, value in model.state_dict().items()}
        handle = xla_ckpt.save_checkpoint(
            root, f"t{number}", model, optimizer, async_save=True, options=xla_ckpt.SaveOptions(snapshot="overlap")
        )
        guarded = bool(WRITE_BARRIER._watches)
        optimizer.step()
        handle.result()
        found.append((guarded, different(xla_ckpt.restore(root, f"t{number}").tree["model"], wanted)))
    return found


def test_shards_of_fsdp2_are_guarded(tmp_path: Path) -> None:
    assert run_on_ranks(shards_are_saved_while_they_change, 2, tmp_path) == [[(True, [])] * 3] * 2


def test_a_layout_of_many_files_opens_few_at_a_time(tmp_path: Path) -> None:
    model = torch.nn.ParameterList(torch.full((5_000,), float(n)) for n in range(300))  # three segments each
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 150, before[1]))
    try:
        with small_pieces():
            overlapped(tmp_path, model, optimizer, layout="xser").result()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    saved = xla_ckpt.restore(tmp_path, "a").tree["model"]
    assert all((saved[str(n)] == n).all() for n in range(300))
