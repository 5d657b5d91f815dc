"""Saves amid XLA training loops: the saved state is exact, and the loop goes on as if there had been no save.

Every loop runs in three ways: to its end without a save, which gives the losses; up to a step where it ends, which
gives the state that a save at that step has to hold; and with saves.
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
from tests.runs import run as run_python

torch_xla.device()  # before the first backward pass: autograd counts the devices only once

STEPS = 9
SAVES = (4, 6)
"""Steps with a save. The second one must find everything compiled."""

BATCH = 4


class Training:
    """A model in training. `save` is called with the number of finished steps."""

    def __init__(self, steps: int, save: Callable[[Training, int], None]) -> None:
        torch.manual_seed(0)
        self.device = torch_xla.device()
        xm.set_rng_state(7, str(self.device))
        layers = nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.25), nn.Linear(8, 2)
        self.model = nn.Sequential(*layers).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.batches = [(torch.randn(BATCH, 8), torch.randn(BATCH, 2)) for _ in range(STEPS)][:steps]
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


Loop = Callable[[Training], None]

WHOLE_STEPS: list[Loop] = [mp_device_loader, mp_device_loader_before_the_step]
"""Loops that save when nothing is pending, or all that the loop would compute next: no save compiles anything."""

PARTS_OF_STEPS: list[Loop] = [two_steps_in_a_graph]
"""Loops in which a save cuts a graph in two: the first save compiles the two."""

LOOPS = WHOLE_STEPS + PARTS_OF_STEPS


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


@pytest.mark.parametrize("async_save", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_a_save_in_a_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loop: Loop, async_save: bool) -> None:
    monkeypatch.setenv("XLA_ALWAYS_ALLREDUCE", "1")  # also with one device
    undisturbed = run(loop)
    compiles: list[int] = []

    def save(training: Training, finished: int) -> None:
        if finished in SAVES:
            compiles.append(compiled())
            parts = training.model, training.optimizer
            xla_ckpt.save_checkpoint(tmp_path, f"step_{finished}", *parts, async_save=async_save)

    before = compiled()
    saving = run(loop, save)
    assert compiled() == (before if loop in WHOLE_STEPS else compiles[1])
    assert saving.numbers() == undisturbed.numbers()
    check_same(saving.state(), undisturbed.state())
    xla_ckpt.finalize_checkpoint()
    for finished in SAVES:
        check_same(stored(tmp_path, f"step_{finished}"), run(loop, steps=finished).state())


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
    assert len(list((Path(root) / "step_4" / "model").iterdir())) == 4, "the weights were not sharded"


def test_a_save_in_a_loop_under_spmd(tmp_path: Path) -> None:
    code = """
        import sys
        import torch_xla.runtime
        torch_xla.runtime.use_spmd()  # before the first device is asked for
        from tests.api.test_xla_loops import spmd
        spmd(sys.argv[1])
    """
    run_python(code, tmp_path, env={"CPU_NUM_DEVICES": "4"})
