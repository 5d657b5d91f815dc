"""Runs under Lightning that are resumed: as if unbroken, or as they go on from Lightning's own checkpoints."""

from __future__ import annotations

import functools
import logging
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from tests.integrations.environment import needs
from tests.jobs import run_on_ranks

pytestmark = [
    needs("lightning", "torchdata"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata 0.11 with torch 2.15
]

EXACT = {
    "schedulers by epoch": (1, 4, 6, 8), "validation in epochs": (2, 3, 4, 10), "accumulated": (1, 2, 3, 4),
    "accumulated, validation in epochs": (1, 2, 3), "manual": (3, 4, 8), "several optimizers": (2, 8, 18),
    "plateau": (3, 4, 7, 8), "early stopping": (3, 4, 8), "early stopping in epochs": (2, 4, 5),
    "moving average": (3, 4, 8), "weight averaging": (4, 5, 8), "weight averaging, batch norm": (4, 5, 8),
    "finetuning": (3, 4), "scheduled accumulation": (3, 4, 8), "steps": (3, 5, 7),
}  # fmt: skip
"""Steps at which a resumed run is as one that nothing interrupts, with dropout, and data in a random order."""

AS_LIGHTNING = {"weight averaging": (2,), "finetuning": (5, 8), "scheduled accumulation": (9,), "steps": (4, 8)}
"""Steps at which Lightning's own checkpoints do not give the unbroken run, either."""


class Runs:
    """Runs that save at each step, and what they are when they are resumed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @functools.cache  # noqa: B019  # as long as the module's tests
    def unbroken(self, case: str, random: bool = True) -> tuple[dict[str, Any], Path]:
        """A run that nothing interrupts, and the root of its tags."""
        from tests.integrations import lightning_runs
        from xla_ckpt.integrations.lightning import CheckpointCallback

        root = self._folder / f"{case} {random}"
        return lightning_runs.run(case, CheckpointCallback(root, every_n_steps=1), random=random), root

    def resumed(self, case: str, step: int, folder: Path, random: bool = True) -> dict[str, Any]:
        """The rest of that run, resumed at a step."""
        from tests.integrations import lightning_runs
        from xla_ckpt.integrations.lightning import CheckpointCallback

        root = folder / f"resumed_{step}"
        shutil.copytree(self.unbroken(case, random)[1] / f"step_{step}", root / f"step_{step}")
        return lightning_runs.run(case, CheckpointCallback(root, every_n_steps=1), random=random, seed=7)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("case", [*EXACT])
def test_a_resumed_run_is_as_if_unbroken(runs: Runs, case: str, tmp_path: Path) -> None:
    expected, _ = runs.unbroken(case)
    for step in EXACT[case]:
        found = runs.resumed(case, step, tmp_path)
        assert {**found, "logged": None} == {**expected, "logged": None}, step
        # The mean of an epoch is that of its batches since the resume, as it is under Lightning.
        own = {at: value for at, value in found["logged"].items() if at[1] != "mean"}
        assert own == {at: value for at, value in expected["logged"].items() if at in own}, step
        assert {at for at in expected["logged"] if at[0] is not None and at[0] > step} <= {*found["logged"]}, step


@pytest.mark.parametrize("case", [*AS_LIGHTNING])
def test_where_lightning_is_not_exact_a_run_is_as_lightnings_own(runs: Runs, case: str, tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    from tests.integrations import lightning_runs

    def of_epochs() -> list[Any]:
        return [ModelCheckpoint(tmp_path / "epochs", every_n_epochs=1, save_on_train_epoch_end=True, **every)]

    every: dict[str, Any] = {"save_top_k": -1, "filename": "{step}"}
    steps = ModelCheckpoint(tmp_path / "steps", every_n_train_steps=1, **every)
    expected, _ = runs.unbroken(case, random=False)
    assert lightning_runs.run(case, steps, random=False, more=of_epochs) == expected
    for step in AS_LIGHTNING[case]:
        file = tmp_path / "epochs" / f"step={step}.ckpt"
        path = file if file.exists() else tmp_path / "steps" / file.name
        own = lightning_runs.run(case, ModelCheckpoint(tmp_path / "more"), random=False, seed=7, path=path)
        assert runs.resumed(case, step, tmp_path, random=False) == own
        assert own["weights"] != expected["weights"]


def fit(root: Path | str, module: Any, epochs: int = 1, others: Any = (), path: Any = None, **options: Any) -> Any:
    """Train some epochs of four steps with plain data; the Trainer."""
    import lightning.pytorch as pl

    from tests.integrations.lightning_runs import QUIET, samples
    from xla_ckpt.integrations.lightning import CheckpointCallback

    trainer_options = options.pop("trainer", {})
    loader = options.pop("loader", None) or torch.utils.data.DataLoader(samples(), batch_size=4)
    callbacks = [CheckpointCallback(root, **options), *others]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?!.*trust_pickle)")
        trainer = pl.Trainer(max_epochs=epochs, logger=False, callbacks=callbacks, **QUIET, **trainer_options)
        trainer.fit(module, loader, ckpt_path=path)
    return trainer


def test_hooks_may_change_weights_and_optimizers(tmp_path: Path) -> None:
    from tests.integrations.lightning_runs import Module

    class Frozen(Module):
        """Keeps its frozen part out of checkpoints, and its optimizer, too."""

        strict_loading = False

        def __init__(self) -> None:
            super().__init__(dropout=0.0)
            self.base = torch.nn.Linear(8, 8).requires_grad_(False)

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            super().on_save_checkpoint(checkpoint)
            weights = checkpoint["state_dict"]
            checkpoint["state_dict"] = {name: value for name, value in weights.items() if not name.startswith("base.")}
            checkpoint["optimizer_states"][0]["param_groups"][0]["note"] = "kept"

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            super().on_load_checkpoint(checkpoint)
            self.note = checkpoint["optimizer_states"][0]["param_groups"][0]["note"]
            assert not any(name.startswith("base.") for name in checkpoint["state_dict"])

    first, second = Frozen(), Frozen()
    fit(tmp_path, first)
    stored = xla_ckpt.restore(tmp_path).tree
    assert "base.weight" not in stored["model"]
    assert {*stored["optimizer"]["state"]} == {"backbone.weight", "backbone.bias", "head.weight", "head.bias"}
    base = second.base.weight.clone()
    trainer = fit(tmp_path, second)
    assert (second.note, second.seen, trainer.global_step) == ("kept", 4, 4)
    assert torch.equal(second.head.weight, first.head.weight)
    assert torch.equal(second.base.weight, base)


def test_wrapped_modules_and_adapters_alone(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import EMAWeightAveraging

    from tests.integrations.lightning_runs import Module

    class Compiled(Module):
        def __init__(self, compiled: bool = True) -> None:
            super().__init__(dropout=0.0)
            self.backbone.requires_grad_(False)
            if compiled:
                self.head = torch.compile(self.head, backend="eager")

        def get_extra_state(self) -> Any:
            return {"scale": torch.ones(1, device="cpu")}

        def set_extra_state(self, state: Any) -> None:
            self.scale = state["scale"]

    first, second = Compiled(), Compiled(compiled=False)
    second.backbone.load_state_dict(first.backbone.state_dict())
    fit(tmp_path / "whole", first)
    fit(tmp_path / "whole", second)
    assert torch.equal(second.head.weight, first.head.weight)
    assert second.scale.tolist() == [1.0]
    averaged = [EMAWeightAveraging(decay=0.9), EMAWeightAveraging(decay=0.9)]
    fit(tmp_path / "averaged", first, others=averaged[:1])
    fit(tmp_path / "averaged", Compiled(), others=averaged[1:])
    one, other = (dict(callback._average_model.named_parameters()) for callback in averaged)
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    fit(tmp_path / "alone", first, only="adapters")
    third, stranger = Compiled(), Compiled()
    third.backbone.load_state_dict(first.backbone.state_dict())
    fit(tmp_path / "alone", third, only="adapters")
    assert torch.equal(third.head.weight, first.head.weight)
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="belong to another base model"):
        fit(tmp_path / "alone", stranger, only="adapters")


class Note:
    """An object that only pickle can store."""

    def __init__(self, text: str) -> None:
        self.text = text


def noting(text: str) -> Any:
    """A callback whose state is such an object."""
    import lightning.pytorch as pl

    class Noting(pl.Callback):  # type: ignore[misc]
        note = Note(text)

        def state_dict(self) -> dict[str, Any]:
            return {"note": self.note}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.note = state["note"]

    return Noting()


def test_objects_that_need_trust_are_named(tmp_path: Path) -> None:
    from tests.integrations.lightning_runs import Module

    with pytest.warns(match="user_content/lightning/callbacks/.*Noting.*/note.*trust_pickle=True"):
        fit(tmp_path, Module(), others=[noting("first")])
    module = Module()
    weights = module.head.weight.clone()
    with pytest.raises(xla_ckpt.UntrustedObjectError, match=r"callbacks/.*Noting.*/note") as caught:
        fit(tmp_path, module, others=[noting("second")])
    assert "trust_pickle=True" in str(caught.value)
    assert torch.equal(module.head.weight, weights)
    second = noting("second")
    fit(tmp_path, Module(), others=[second], trust_pickle=True)
    assert second.note.text == "first"


def test_weights_that_fit_are_resumed_if_it_is_not_strict(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from tests.integrations.lightning_runs import Module

    class Wider(Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(4, 2)
            self.more = torch.nn.Linear(2, 2)

    first = Module()
    fit(tmp_path, first)
    with pytest.raises(RuntimeError, match="size mismatch"):
        fit(tmp_path, Wider())
    second = Wider()
    head = second.head.weight.clone()
    with caplog.at_level(logging.WARNING, logger="xla_ckpt"):
        trainer = fit(tmp_path, second, strict=False)
    assert trainer.global_step == 4
    assert torch.equal(second.backbone.weight, first.backbone.weight)
    assert torch.equal(second.head.weight, head)
    for line in ("head.weight: the stored shape is (1, 4)", "more.weight: it is not stored", "optimizer 0: its groups"):
        assert f"tag step_4: not loaded: {line}" in caplog.text


def test_another_checkpoint_that_the_program_names(tmp_path: Path) -> None:
    from tests.integrations.lightning_runs import Module

    first = Module()
    trainer = fit(tmp_path / "a", first, epochs=2)
    trainer.save_checkpoint(tmp_path / "own.ckpt")
    fit(tmp_path / "b", Module())
    second = Module()
    assert fit(tmp_path / "b", second, epochs=2, path=tmp_path / "own.ckpt").global_step == 8
    assert torch.equal(second.head.weight, first.head.weight)


def test_a_search_of_a_learning_rate_before_a_resumed_run(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import LearningRateFinder

    from tests.integrations.lightning_runs import Module

    class Found(Module):
        lr = 0.05

    torch.manual_seed(3)
    whole, module = Found(dropout=0.0), Found(dropout=0.0)
    module.load_state_dict(whole.state_dict())
    fit(tmp_path / "a", whole, epochs=3)
    fit(tmp_path / "b", module, epochs=2)
    module = Found(dropout=0.0)
    finder = LearningRateFinder(num_training_steps=4, update_attr=False)
    trainer = fit(tmp_path / "b", module, epochs=3, others=[finder])
    assert trainer.global_step == 12
    assert torch.equal(module.head.weight, whole.head.weight)


def test_a_job_that_is_to_end_while_gradients_are_accumulated(tmp_path: Path) -> None:
    from lightning.pytorch import Callback
    from torchdata.stateful_dataloader import StatefulDataLoader

    from tests.integrations.lightning_runs import Module, samples

    class Stop(Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            if index == 0:
                (tmp_path / "stop").touch()

    def train(module: Any, root: Path, **options: Any) -> Any:
        loader = StatefulDataLoader(samples(), batch_size=2)
        return fit(root, module, loader=loader, trainer={"accumulate_grad_batches": 3}, **options)

    torch.manual_seed(3)
    whole, module = Module(dropout=0.0), Module(dropout=0.0)
    module.load_state_dict(whole.state_dict())
    train(whole, tmp_path / "a")
    with xla_ckpt.PreemptionGuard(file=tmp_path / "stop") as guard:
        stopped = train(module, tmp_path / "b", guard=guard, others=[Stop()])
    assert (stopped.global_step, xla_ckpt.list_tags(tmp_path / "b")) == (1, ["step_1"])
    module = Module(dropout=0.0)
    assert train(module, tmp_path / "b").global_step == 3
    assert torch.equal(module.head.weight, whole.head.weight)
    assert module.seen == 8


def test_a_tag_that_is_no_run(tmp_path: Path) -> None:
    from tests.integrations.lightning_runs import Module

    xla_ckpt.save_checkpoint(tmp_path, "weights", Module())
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="no state of a Lightning Trainer") as caught:
        fit(tmp_path, Module())
    assert caught.value.tag == "weights"


def test_a_tag_of_an_older_version(runs: Runs, tmp_path: Path) -> None:
    """Which had the loops and the states of callbacks in an extra, and nothing of hooks and data modules."""
    from tests.integrations.lightning_runs import Module

    whole = xla_ckpt.restore(runs.unbroken("several optimizers")[1], "step_16").tree
    rest, extras = whole["user_content"]["lightning"], whole["extras"]
    older = {"fit_loop": rest["loops"]["fit_loop"], "callbacks": rest["callbacks"], "precision": {}}
    names = ("optimizer_1", "scheduler_1")
    xla_ckpt.save_checkpoint(
        tmp_path,
        "step_16",
        whole["model"],
        whole["optimizer"],
        whole["scheduler"],
        {"step": 16, "epoch": 1},
        extras={
            "rng": xla_ckpt.RNGState(),
            "loaders": xla_ckpt.PerRank({"combined_loader": []}),
            "lightning": older,
            **{name: extras[name] for name in names},
        },
    )

    class Plain(Module):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            """Nothing of its own is there."""

    module = Plain("two", dropout=0.0)
    trainer = fit(tmp_path, module, epochs=2)
    assert (trainer.global_step, trainer.current_epoch) == (16, 2)
    assert torch.equal(module.head.weight, whole["model"]["head.weight"])
    second = trainer.optimizers[1].state_dict()["state"]
    assert torch.equal(second[0]["momentum_buffer"], extras["optimizer_1"]["state"][0]["momentum_buffer"])
    assert trainer.lr_scheduler_configs[1].scheduler.last_epoch == extras["scheduler_1"]["last_epoch"]


def on_two_ranks(rank: int, root: str) -> tuple[str, list[Any]]:
    """A hook that raises on one rank; then a run of which the ranks count differently, resumed."""
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import EMAWeightAveraging

    from tests.integrations.lightning_runs import Module

    class Fails(Module):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["of rank 1"] = 1 // (1 - rank)

    class OfRank(pl.Callback):  # type: ignore[misc]
        count = rank

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.count = state["count"]

    def train(module: Any, epochs: int, name: str, others: Any = ()) -> Any:
        return fit(f"{root}/{name}", module, epochs, others, trainer={"devices": 2, "strategy": "ddp"})

    with pytest.raises(xla_ckpt.CheckpointError) as caught:
        train(Fails(), 1, "failed")
    assert not xla_ckpt.has_checkpoint(f"{root}/failed")
    torch.manual_seed(3)
    whole = Module("batch norm")
    train(whole, 3, "whole", [EMAWeightAveraging(decay=0.9), OfRank()])
    torch.manual_seed(3)
    train(Module("batch norm"), 2, "broken", [EMAWeightAveraging(decay=0.9), OfRank()])
    module, counted = Module("batch norm"), OfRank()
    train(module, 3, "broken", [EMAWeightAveraging(decay=0.9), counted])
    same = all(
        torch.equal(value, module.state_dict()[name])
        for name, value in whole.state_dict().items()
        if not name.startswith("dropout.running")  # of which rank 0's are stored
    )
    return str(caught.value), [same, counted.count, module.seen == whole.seen]


def test_on_two_ranks(tmp_path: Path) -> None:
    found = run_on_ranks(on_two_ranks, 2, str(tmp_path))
    assert found[0] == found[1]
    error, rest = found[0]
    assert "ZeroDivisionError" in error
    assert "rank 1" in error
    assert rest == [True, 0, True]


def sharded(rank: int, root: str) -> tuple[bool, list[Any]]:
    """A module that the strategy shards, resumed: True if its weights are those of an unbroken run; and counters."""
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    from tests.integrations.lightning_runs import Module

    class Sharded(Module):
        def configure_model(self) -> None:
            if not hasattr(self, "is_sharded"):
                self.is_sharded = True
                del self.epochs  # which is no sharded tensor
                for layer in (self.backbone, self.head):
                    fully_shard(layer, mesh=self.device_mesh["data_parallel"])

        def on_train_epoch_end(self) -> None:
            """Nothing."""

    def train(epochs: int, name: str) -> tuple[Any, Any]:
        strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
        module = Sharded(dropout=0.0)
        trainer = fit(f"{root}/{name}", module, epochs, trainer={"devices": 2, "strategy": strategy})
        return module, trainer

    torch.manual_seed(3)
    whole, _ = train(3, "whole")
    torch.manual_seed(3)
    train(2, "broken")
    module, trainer = train(3, "broken")
    pairs = [
        (value.full_tensor(), module.state_dict()[name].full_tensor()) for name, value in whole.state_dict().items()
    ]
    return all(torch.equal(*pair) for pair in pairs), [
        module.seen == whole.seen,
        trainer.global_step,
        trainer.lr_scheduler_configs[0].scheduler.last_epoch,
    ]


def test_a_module_that_the_strategy_shards(tmp_path: Path) -> None:
    assert run_on_ranks(sharded, 2, str(tmp_path)) == [(True, [True, 6, 3])] * 2
