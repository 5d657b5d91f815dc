"""Saves amid XLA training loops: the saved state is exact, and the loop goes on as if there had been no save.

Every loop runs in three ways: to its end without a save, which gives the losses; up to a step where it ends, which
gives the state that a save at that step has to hold; and with saves.

A save in the middle of a graph cuts it in two, and the compiler may round the two otherwise than the one: it does on an
AMD EPYC without AVX-512. Such a loop runs in a fourth way, cut at the same places without a save, and a loop with saves
has to have its bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as metrics
import torch_xla.distributed.parallel_loader as parallel_loader
from torch import nn

import xla_ckpt
from neuron_compat.nxd import parallel_layers
from tests.jobs import run_program
from xla_ckpt.arrays.dlpack_buffer import DLPackBuffer
from xla_ckpt.arrays.xla_tensor import materialize, move_to_device, to_host
from xla_ckpt.snapshot.memory import SlabAllocator

pytestmark = pytest.mark.xla

torch_xla.device()  # before the first backward pass: autograd counts the devices only once

STEPS = 9
SAVES = (4, 6)
"""Steps with a save. The second one must find everything compiled."""

BATCH = 4


class Training:
    """A model in training, on the batches from `first` on. `save` is called with the number of finished steps."""

    def __init__(self, steps: int, save: Callable[[Training, int], None], first: int = 0) -> None:
        torch.manual_seed(0)
        self.device = torch_xla.device()
        xm.set_rng_state(7, str(self.device))
        layers = nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.25), nn.Linear(8, 2)
        self.model = nn.Sequential(*layers).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.batches = [(torch.randn(BATCH, 8), torch.randn(BATCH, 2)) for _ in range(STEPS)][first:steps]
        self.losses: list[torch.Tensor] = []
        self._save = save
        torch_xla.sync()

    def loader(self, **options: Any) -> Any:
        """The batches, on the device; between two of them torch_xla ends the step."""
        return parallel_loader.MpDeviceLoader(self.batches, self.device, **options)

    def save(self, finished: int) -> None:
        """A place where a save may be."""
        self._save(self, finished)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = ((self.model(x.to(self.device)) - y.to(self.device)) ** 2).mean()
        self.losses.append(loss.detach())
        return loss

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """A whole step, all of it pending."""
        self.optimizer.zero_grad()
        self.forward(x, y).backward()
        self.optimizer.step()

    def numbers(self) -> list[float]:
        """The losses; other bits are other numbers."""
        return [loss.item() for loss in self.losses]

    def state(self) -> dict[str, torch.Tensor]:
        """All arrays of model and optimizer, on the host."""
        found = {f"model/{name}": p for name, p in self.model.named_parameters()}
        for name, p in self.model.named_parameters():
            found |= {f"optimizer/state/{name}/{k}": v for k, v in self.optimizer.state[p].items()}
        return {path: v.detach().cpu() for path, v in found.items()}


def mp_device_loader(t: Training) -> None:
    for number, (x, y) in enumerate(t.loader(), 1):
        t.step(x, y)
        t.save(number)


def mp_device_loader_before_the_step(t: Training) -> None:
    for number, (x, y) in enumerate(t.loader()):
        t.save(number)
        t.step(x, y)


def two_steps_in_a_graph(t: Training) -> None:
    """Both steps reduce gradients, and the collectives of a graph are ordered by a token that no tensor holds."""
    for number, (x, y) in enumerate(t.loader(batches_per_execution=2), 1):
        t.optimizer.zero_grad()
        t.forward(x, y).backward()
        xm.all_reduce(xm.REDUCE_SUM, [p.grad for p in t.model.parameters()], scale=1.0)
        t.optimizer.step()
        t.save(number)


def sync_before_the_save(t: Training) -> None:
    for number, (x, y) in enumerate(t.batches, 1):
        t.step(x, y)
        torch_xla.sync()
        t.save(number)


def sync_after_the_save(t: Training) -> None:
    for number, (x, y) in enumerate(t.batches, 1):
        t.step(x, y)
        t.save(number)
        torch_xla.sync()


def optimizer_step(t: Training) -> None:
    """The step of xm, with a barrier: the save comes after the end of the step."""
    for number, (x, y) in enumerate(t.batches, 1):
        t.optimizer.zero_grad()
        t.forward(x, y).backward()
        xm.optimizer_step(t.optimizer, barrier=True)
        t.save(number)


def optimizer_step_under_a_loader(t: Training) -> None:
    for number, (x, y) in enumerate(t.loader(), 1):
        t.optimizer.zero_grad()
        t.forward(x, y).backward()
        xm.optimizer_step(t.optimizer)
        t.save(number)


def step_closures(t: Training) -> None:
    """What a closure is given is pending at the save, and read at the end of the step."""
    told: list[float] = []
    for number, (x, y) in enumerate(t.loader(), 1):
        t.step(x, y)
        xm.add_step_closure(lambda loss: told.append(loss.item()), args=(t.losses[-1],))
        t.save(number)
    assert told == t.numbers()


def inside_torch_xla_step(t: Training) -> None:
    for number, (x, y) in enumerate(t.batches, 1):
        with torch_xla.step():
            t.step(x, y)
            t.save(number)


def after_torch_xla_step(t: Training) -> None:
    for number, (x, y) in enumerate(t.batches, 1):
        with torch_xla.step():
            t.step(x, y)
        t.save(number)


def torch_xla_compile(t: Training) -> None:
    step = torch_xla.compile(t.step, full_graph=True)
    for number, (x, y) in enumerate(t.batches, 1):
        step(x, y)
        t.save(number)


def accelerate(t: Training) -> None:
    """What accelerate runs: its loader is an MpDeviceLoader, and its optimizer reduces the gradients before a step."""
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(t.optimizer, STEPS)
    t.model.train()
    for number, (x, y) in enumerate(t.loader(), 1):
        t.forward(x, y).backward()
        gradients = [p.grad for group in t.optimizer.param_groups for p in group["params"]]
        xm.all_reduce(xm.REDUCE_SUM, gradients, scale=1.0)
        t.optimizer.step()
        scheduler.step()
        t.optimizer.zero_grad()
        t.save(number)


def accelerate_with_accumulation(t: Training) -> None:
    """The same with two batches for each step, and a save between them."""
    for number, (x, y) in enumerate(t.loader(batches_per_execution=2)):
        for half in (slice(0, BATCH // 2), slice(BATCH // 2, None)):
            (t.forward(x[half], y[half]) / 2).backward()
            if half.start == 0:
                t.save(number)
        xm.all_reduce(xm.REDUCE_SUM, [p.grad for p in t.model.parameters()], scale=1.0)
        t.optimizer.step()
        t.optimizer.zero_grad()


def gradient_accumulation(t: Training) -> None:
    """A save between the two backward passes of a step: gradients are pending, and no weight is."""
    for number, (x, y) in enumerate(t.batches):
        t.optimizer.zero_grad()
        t.forward(x[:2], y[:2]).backward()
        t.save(number)
        t.forward(x[2:], y[2:]).backward()
        t.optimizer.step()
        torch_xla.sync()


def between_forward_and_backward(t: Training) -> None:
    """Two steps in a graph, so that weights are pending; the backward pass needs what the forward pass kept."""
    for number, (x, y) in enumerate(t.batches):
        t.optimizer.zero_grad()
        loss = t.forward(x, y)
        t.save(number)
        loss.backward()
        t.optimizer.step()
        if number % 2:
            torch_xla.sync()


def the_loss_is_read_in_every_step(t: Training) -> None:
    """Reading computes the loss alone, the rest stays pending."""
    for number, (x, y) in enumerate(t.batches, 1):
        t.step(x, y)
        assert t.losses[-1].item() > 0
        t.save(number)
        torch_xla.sync()


def mark_step_of_xm(t: Training) -> None:
    for number, (x, y) in enumerate(t.batches, 1):
        t.step(x, y)
        xm.mark_step()
        t.save(number)


def accumulation_under_a_loader(t: Training) -> None:
    """The loader ends a step after each batch; the weights change after every second one."""
    for number, (x, y) in enumerate(t.loader(), 1):
        (t.forward(x, y) / 2).backward()
        if number % 2 == 0:
            t.optimizer.step()
            t.optimizer.zero_grad()
        t.save(number)


def accumulation_in_a_graph(t: Training) -> None:
    for number, (x, y) in enumerate(t.batches, 1):
        t.optimizer.zero_grad()
        t.forward(x[:2], y[:2]).backward()
        t.forward(x[2:], y[2:]).backward()
        t.optimizer.step()
        t.save(number)
        torch_xla.sync()


def eager(t: Training) -> None:
    """No sync ends a step."""
    torch_xla.experimental.eager_mode(True)
    try:
        for number, (x, y) in enumerate(t.batches, 1):
            t.step(x, y)
            t.save(number)
    finally:
        torch_xla.experimental.eager_mode(False)


def eager_under_a_loader(t: Training) -> None:
    torch_xla.experimental.eager_mode(True)
    try:
        mp_device_loader(t)
    finally:
        torch_xla.experimental.eager_mode(False)


Loop = Callable[[Training], None]

COMPILE_NOTHING: list[Loop] = [
    mp_device_loader,
    mp_device_loader_before_the_step,
    sync_before_the_save,
    sync_after_the_save,
    optimizer_step,
    optimizer_step_under_a_loader,
    step_closures,
    inside_torch_xla_step,
    after_torch_xla_step,
    torch_xla_compile,
    accelerate,
    the_loss_is_read_in_every_step,
    gradient_accumulation,
]
"""Loops that save when no weight is pending, or all that the loop would compute next: no save compiles anything."""

CUT: list[Loop] = [
    two_steps_in_a_graph,
    accelerate_with_accumulation,
    between_forward_and_backward,
]
"""Loops in which a save cuts a graph in two: the first save compiles the two."""

RESUMED: list[Loop] = [
    mp_device_loader,
    optimizer_step_under_a_loader,
    step_closures,
    accumulation_under_a_loader,
    two_steps_in_a_graph,
    mark_step_of_xm,
    sync_before_the_save,
    sync_after_the_save,
    optimizer_step,
    the_loss_is_read_in_every_step,
    accumulation_in_a_graph,
    inside_torch_xla_step,
    after_torch_xla_step,
    torch_xla_compile,
    eager,
    eager_under_a_loader,
]
"""Loops that save after a step, so that a run can be resumed there."""


def run(loop: Loop, save: Callable[[Training, int], None] = lambda *_: None, steps: int = STEPS) -> Training:
    training = Training(steps, save)
    loop(training)
    torch_xla.sync(wait=True)
    return training


def compiled() -> int:
    """How many graphs this process has compiled."""
    found = metrics.metric_data("CompileTime")
    return int(found[0]) if found else 0


def stored(root: Path, tag: str) -> dict[str, torch.Tensor]:
    """The arrays of a tag, named as `Training.state` names them."""
    tree = xla_ckpt.restore(root, tag).tree
    found = {f"model/{name}": v for name, v in tree["model"].items()}
    for name, state in tree["optimizer"]["state"].items():
        found |= {f"optimizer/state/{name}/{k}": v for k, v in state.items()}
    return found


def check_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert [name for name, v in wanted.items() if not torch.equal(found[name], v)] == []


def check_rounded(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """Check that only the rounding differs: a step that is missing, or done twice, moves a weight by 0.01."""
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-7)


def saves_in(root: Path, async_save: bool) -> Callable[[Training, int], None]:
    """What saves in a loop."""

    def save(training: Training, finished: int) -> None:
        if finished in SAVES:
            parts = training.model, training.optimizer
            xla_ckpt.save_checkpoint(root, f"step_{finished}", *parts, async_save=async_save)

    return save


@pytest.mark.parametrize("async_save", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("loop", COMPILE_NOTHING, ids=lambda loop: loop.__name__)
def test_a_save_in_a_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loop: Loop, async_save: bool) -> None:
    monkeypatch.setenv("XLA_ALWAYS_ALLREDUCE", "1")  # also with one device
    undisturbed, before = run(loop), compiled()
    saving = run(loop, saves_in(tmp_path, async_save))
    assert compiled() == before, "a save has compiled something"
    assert saving.numbers() == undisturbed.numbers()
    check_same(saving.state(), undisturbed.state())
    xla_ckpt.finalize_checkpoint()
    for finished in SAVES:
        check_same(stored(tmp_path, f"step_{finished}"), run(loop, steps=finished).state())


@pytest.mark.parametrize("async_save", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("loop", CUT, ids=lambda loop: loop.__name__)
def test_a_save_that_cuts_a_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loop: Loop, async_save: bool
) -> None:
    monkeypatch.setenv("XLA_ALWAYS_ALLREDUCE", "1")
    undisturbed = run(loop)
    compiles: list[int] = []
    at_the_cut: dict[int, dict[str, torch.Tensor]] = {}

    def cut(training: Training, finished: int) -> None:
        if finished in SAVES:
            compiles.append(compiled())
            moments = [v for state in training.optimizer.state.values() for v in state.values()]
            materialize([v for v in [*training.model.parameters(), *moments] if v.device.type == "xla"])
            at_the_cut[finished] = {path: v.clone() for path, v in training.state().items()}

    alike = run(loop, cut)
    assert compiled() == compiles[1], "the second cut has compiled something"
    saving = run(loop, saves_in(tmp_path, async_save))
    assert compiled() == compiles[1], "a save has compiled more than the cut"
    assert saving.numbers() == alike.numbers() == pytest.approx(undisturbed.numbers(), rel=1e-5)
    check_same(saving.state(), alike.state())
    check_rounded(alike.state(), undisturbed.state())
    xla_ckpt.finalize_checkpoint()
    for finished in SAVES:
        check_same(stored(tmp_path, f"step_{finished}"), at_the_cut[finished])
        check_rounded(at_the_cut[finished], run(loop, steps=finished).state())


def check_resumed(root: Path, loop: Loop, exact: bool = True) -> None:
    """Check that a run that is resumed with `RNGState` has the losses of the run that saved, dropout included.

    `exact`: the save changes nothing in the run that makes it.
    """
    (saved_at, _), extras = SAVES, {"rng": xla_ckpt.RNGState()}

    def save(training: Training, finished: int) -> None:
        if finished == saved_at:
            xla_ckpt.save_checkpoint(root, "middle", training.model, training.optimizer, extras=extras)

    whole = run(loop, save).numbers()
    if exact:
        assert whole == run(loop).numbers()
    resumed = Training(STEPS, lambda *_: None, first=saved_at)
    xla_ckpt.load_checkpoint(root, "middle", resumed.model, resumed.optimizer, extras=extras)
    loop(resumed)
    found = resumed.numbers()
    assert found == whole[-len(found) :]


@pytest.mark.filterwarnings("ignore:Use torch_xla.sync instead")  # of xm.mark_step
@pytest.mark.parametrize("loop", RESUMED, ids=lambda loop: loop.__name__)
def test_dropout_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, loop: Loop
) -> None:
    monkeypatch.setenv("XLA_ALWAYS_ALLREDUCE", "1")
    check_resumed(tmp_path, loop, exact=loop not in CUT)
    assert "RNGState" not in caplog.text


def test_dropout_after_a_save_within_a_step(tmp_path: Path) -> None:
    """The rest of the step goes on with the numbers that a run without the save draws."""

    def save(training: Training, finished: int) -> None:
        if finished in SAVES:
            extras = {"rng": xla_ckpt.RNGState()}
            xla_ckpt.save_checkpoint(tmp_path, str(finished), nn.Linear(1, 1), extras=extras)

    assert run(gradient_accumulation, save).numbers() == run(gradient_accumulation).numbers()


def test_a_save_between_the_steps_of_a_loader_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def save(training: Training, finished: int) -> None:
        if finished == 3:
            extras = {"rng": xla_ckpt.RNGState()}
            xla_ckpt.save_checkpoint(tmp_path, "middle", training.model, training.optimizer, extras=extras)

    run(two_steps_in_a_graph, save, steps=4)
    assert "pass batches_per_execution=1" in caplog.text


@pytest.fixture
def alone() -> Iterator[None]:
    """neuronx-distributed's arrangement of a job of one rank."""
    parallel_layers.parallel_state.initialize_model_parallel()
    yield
    parallel_layers.parallel_state.destroy_model_parallel()


@pytest.mark.parametrize("xser", [False, True])
@pytest.mark.usefixtures("alone")
def test_a_save_of_neuronx_distributeds_older_call_in_a_loop(tmp_path: Path, xser: bool) -> None:
    def save(training: Training, finished: int) -> None:
        if finished in SAVES:
            weights = {"model": dict(training.model.named_parameters())}
            parallel_layers.save(weights, tmp_path / str(finished), save_xser=xser)

    assert run(mp_device_loader, save).numbers() == run(mp_device_loader).numbers()
    for finished in SAVES:
        found = parallel_layers.load(tmp_path / str(finished), load_xser=xser)["model"]
        for name, wanted in run(mp_device_loader, steps=finished).model.named_parameters():
            assert torch.equal(found[name].cpu(), wanted.detach().cpu()), name


def spmd(root: str) -> None:
    """Saves amid a loop with sharded tensors: what `test_a_save_in_a_loop` asks, in a process of its own."""
    import numpy as np
    import torch_xla.distributed.spmd as xla_spmd

    mesh = xla_spmd.Mesh(np.arange(4), (4,), ("x",))

    def loop(training: Training) -> None:
        for layer in (0, 3):
            xla_spmd.mark_sharding(training.model[layer].weight, mesh, (None, "x"))
        for number, (x, y) in enumerate(training.batches, 1):
            training.step(x, y)
            training.save(number)
            torch_xla.sync()

    def save(training: Training, finished: int) -> None:
        if finished in SAVES:
            xla_ckpt.save_checkpoint(root, f"step_{finished}", training.model, training.optimizer, async_save=True)

    undisturbed, before = run(loop), compiled()
    saving = run(loop, save)
    assert compiled() == before, "a save has compiled something"
    assert saving.numbers() == undisturbed.numbers()
    check_same(saving.state(), undisturbed.state())
    xla_ckpt.finalize_checkpoint()
    for finished in SAVES:
        check_same(stored(Path(root), f"step_{finished}"), run(loop, steps=finished).state())
    for each in (loop, mp_device_loader):
        check_resumed(Path(root) / each.__name__, each)
    assert len(list((Path(root) / "step_4" / "model").iterdir())) == 4, "the weights were not sharded"


def test_a_save_in_a_loop_under_spmd(tmp_path: Path) -> None:
    code = """
        import sys
        import torch_xla.runtime
        torch_xla.runtime.use_spmd()  # before the first device is asked for
        from tests.api.test_xla_loops import spmd
        spmd(sys.argv[1])
    """
    run_program(code, tmp_path, env={"CPU_NUM_DEVICES": "4"}, xla=True)


def test_a_save_where_nothing_may_be_computed_is_refused(tmp_path: Path) -> None:
    """torch_xla would fail in the midst of the computation, and leave tensors behind that have no value."""
    training = Training(1, lambda *_: None)
    with torch_xla.compile(full_graph=True):
        training.step(*training.batches[0])
        with pytest.raises(xla_ckpt.UsageError, match="full_graph"):
            xla_ckpt.save_checkpoint(tmp_path, "inside", training.model, training.optimizer)
    check_same(training.state(), run(torch_xla_compile, steps=1).state())
    xla_ckpt.save_checkpoint(tmp_path, "after", training.model, training.optimizer)
    assert xla_ckpt.list_tags(tmp_path) == ["after"]


@pytest.mark.parametrize("origin", ["computed", "adopted"])
def test_a_buffer_that_a_snapshot_holds_is_not_donated(origin: str) -> None:
    """A step writes the new weights into the memory of the old ones, but not while a snapshot holds that."""
    pointer: Callable[[torch.Tensor], int] = torch_xla._XLAC._unsafe_buffer_pointer
    device = torch_xla.device()
    if origin == "computed":
        weight = torch.ones(1024, device=device)
    else:  # as a load makes them
        memory = DLPackBuffer(torch.float32, (1024,), SlabAllocator())
        weight = move_to_device(memory.as_tensor().fill_(1), memory, device)
    torch_xla.sync(wait=True)

    def step() -> int:
        weight.mul_(2)
        torch_xla.sync(wait=True)
        return pointer(weight)

    assert step() == step(), "nothing is donated: this test would prove nothing"
    (held,) = to_host([weight])
    assert held.data_ptr() == pointer(weight), "the snapshot is a copy: this test would prove nothing"
    assert [step() == held.data_ptr() for _ in range(3)] == [False] * 3
    assert held.tolist() == [4.0] * 1024
    assert weight.cpu().tolist() == [32.0] * 1024
    del held
    assert step() == step(), "buffers are donated again"
