"""Each adapter takes the keywords of a load that the errors of its loads propose, and passes them on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import xla_ckpt
from tests.integrations import titan_job
from tests.integrations.environment import needs
from tests.jobs import run_on_ranks
from xla_ckpt import LoadOptions

if TYPE_CHECKING:
    from tests.buckets.s3_server import S3Server

pytestmark = pytest.mark.filterwarnings("ignore")  # of objects that are pickled, and of much that trainers call


class Opaque:
    """An object that is stored pickled."""

    def __init__(self, number: int) -> None:
        self.number = number


class Member:
    """A part of a program, whose state is an object."""

    def __init__(self, number: int) -> None:
        self.value = Opaque(number)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def network(grown: bool) -> torch.nn.Sequential:
    """A model; `grown`, with a layer that the saved one has not got."""
    layers = [torch.nn.Linear(4, 4, device="cpu"), *([torch.nn.Linear(4, 4, device="cpu")] * grown)]
    return torch.nn.Sequential(*layers)


def trainer_of(root: Path | str, out: Path, steps: int, grown: bool = False, **keywords: Any) -> tuple[Any, Any]:
    """A Trainer of transformers, and its callback."""
    from transformers import Trainer, TrainingArguments

    from xla_ckpt.integrations.transformers import CheckpointCallback

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network(grown)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.net(x).square().mean()}

    arguments = TrainingArguments(
        str(out), max_steps=steps, save_strategy="steps", save_steps=2, report_to=[], disable_tqdm=True, use_cpu=True
    )
    callback = CheckpointCallback(root, **keywords)
    return Trainer(Model(), arguments, train_dataset=[{"x": torch.ones(4)}] * 8, callbacks=[callback]), callback


def transformers(root: Path, steps: int, member: Member | None, grown: bool, load: dict[str, Any]) -> int:
    extras = {"member": member} if member else {}
    trainer, callback = trainer_of(root, root.with_name("out"), steps, grown, extras=extras, **load)
    trainer.train(resume_from_checkpoint=callback.resume(trainer))
    return int(trainer.state.global_step)


def lightning_io(root: Path, steps: int, member: Member | None, grown: bool, load: dict[str, Any]) -> int:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    from xla_ckpt.integrations.lightning import TagIO

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network(grown)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss: torch.Tensor = self.net(batch).square().mean()
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            if member:
                checkpoint["member"] = member.state_dict()

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            if member:
                member.load_state_dict(checkpoint["member"])

    trainer = pl.Trainer(
        max_steps=steps, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        plugins=[TagIO(**load)], callbacks=[ModelCheckpoint(root, every_n_train_steps=2)],
    )  # fmt: skip
    tags = xla_ckpt.list_tags(root)
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(16, 4)), ckpt_path=root / tags[-1] if tags else None)
    return int(trainer.global_step)


def lightning_run(
    root: Path | str, steps: int, member: Member | None, grown: bool, load: dict[str, Any], every: int = 2
) -> list[int]:
    """The steps from which Lightning trains with the callback, and to which."""
    import lightning.pytorch as pl

    from xla_ckpt.integrations.lightning import CheckpointCallback

    reached: list[int] = []

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network(grown)

        def on_train_start(self) -> None:
            reached.append(self.global_step)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss: torch.Tensor = self.net(batch).square().mean()
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    callback = CheckpointCallback(root, every_n_steps=every, extras={"member": member} if member else {}, **load)
    trainer = pl.Trainer(
        max_steps=steps, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[callback],
    )  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(16, 4)))
    return [*reached, int(trainer.global_step)]


def lightning(root: Path, steps: int, member: Member | None, grown: bool, load: dict[str, Any]) -> int:
    return lightning_run(root, steps, member, grown, load)[-1]


def accelerate(root: Path, steps: int, member: Member | None, grown: bool, load: dict[str, Any]) -> int:
    from accelerate import Accelerator

    from xla_ckpt.integrations.accelerate import load_state, save_state

    accelerator, net, first = Accelerator(cpu=True), network(grown), 0
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
    if member:
        accelerator.register_for_checkpointing(member)
    if xla_ckpt.has_checkpoint(root):
        first = load_state(accelerator, root, **load).user_content
    for _ in range(first, steps):
        accelerator.backward(model(torch.ones(2, 4)).mean())
        optimizer.step()
    save_state(accelerator, root, f"step_{steps}", user_content=steps)
    return steps


def titan_on_a_rank(
    rank: int, root: str, steps: int, member: Member | None, grown: bool, load: dict[str, Any]
) -> tuple[int, Any]:
    options = {"member": member, "grown": grown, **load}
    try:
        resumed, at, _, _ = titan_job.run(rank, root, steps, options)
    except xla_ckpt.CheckpointError as error:
        return 0, error.to_json()
    assert resumed is (steps > 2)
    return at, member


def torchtitan(root: Path, steps: int, member: Member | None, grown: bool, load: dict[str, Any]) -> int:
    ((at, outcome),) = run_on_ranks(titan_on_a_rank, 1, str(root), steps, member, grown, load)
    if isinstance(outcome, dict):
        kind = getattr(xla_ckpt, outcome.pop("kind"))
        raise kind(outcome.pop("problem"), **outcome)
    if member:
        member.value = outcome.value
    return int(at)


@dataclass(frozen=True)
class Adapter:
    """How a program with an adapter trains up to a step, from the newest tag."""

    train: Callable[[Path, int, Member | None, bool, dict[str, Any]], int]

    strict: dict[str, Any] | None
    """The keyword that has it load what fits; None where the trainer fits the weights itself."""

    marks: pytest.MarkDecorator


ADAPTERS = {
    "transformers": Adapter(transformers, {"strict": False}, needs("accelerate")),
    "Lightning": Adapter(lightning, None, needs("lightning", "torchdata")),
    "Lightning's TagIO": Adapter(lightning_io, None, needs("lightning")),
    "accelerate": Adapter(accelerate, {"strict": False}, needs("accelerate")),
    "torchtitan": Adapter(torchtitan, {"strict": False}, needs("torchtitan", "torch.distributed._local_tensor")),
}
EACH = [pytest.param(adapter, id=name, marks=adapter.marks) for name, adapter in ADAPTERS.items()]
FITTING = [pytest.param(adapter, id=name, marks=adapter.marks) for name, adapter in ADAPTERS.items() if adapter.strict]


@pytest.mark.parametrize("adapter", EACH)
def test_pickled_objects_are_loaded_as_the_error_proposes(adapter: Adapter, tmp_path: Path) -> None:
    root = tmp_path / "run"
    assert adapter.train(root, 2, Member(1), False, {}) == 2
    with pytest.raises(xla_ckpt.UntrustedObjectError, match="trust_pickle=True") as caught:
        adapter.train(root, 4, Member(2), False, {})
    assert "dcp" not in str(caught.value.hint)
    member = Member(2)
    assert adapter.train(root, 4, member, False, {"trust_pickle": True}) == 4
    assert member.value.number == 1


@pytest.mark.parametrize("adapter", FITTING)
def test_a_part_is_loaded_as_the_error_proposes(adapter: Adapter, tmp_path: Path) -> None:
    root = tmp_path / "run"
    assert adapter.train(root, 2, None, False, {}) == 2
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="strict=False") as caught:
        adapter.train(root, 4, None, True, {})
    assert "planner" not in str(caught.value.hint)
    assert adapter.train(root, 4, None, True, adapter.strict or {}) == 4


def constructors() -> dict[str, Callable[..., Any]]:
    from xla_ckpt.integrations import lightning, transformers

    return {
        "transformers": lambda **keywords: transformers.CheckpointCallback("runs", **keywords),
        "Lightning": lambda **keywords: lightning.CheckpointCallback("runs", **keywords),
        "TagIO": lightning.TagIO,
    }


@needs("accelerate", "lightning")
@pytest.mark.parametrize(
    ("keywords", "kind", "text"),
    [
        ({"trust_pikcle": True}, TypeError, "did you mean 'trust_pickle'"),
        ({"trust_pickle": "no"}, xla_ckpt.UsageError, "trust_pickle"),
        ({"async_save": "no"}, xla_ckpt.UsageError, "async_save"),
        ({"num_workers": "many"}, xla_ckpt.UsageError, "num_workers"),
        ({"model": {}}, TypeError, "no argument 'model'"),
        ({"prove": True}, TypeError, r"say load_options=LoadOptions\(prove="),
        ({"parity": "file"}, TypeError, r"say options=SaveOptions\(parity="),
        ({"options": xla_ckpt.LoadOptions()}, xla_ckpt.UsageError, r"expected xla_ckpt\.SaveOptions"),
        ({"load_options": xla_ckpt.SaveOptions()}, xla_ckpt.UsageError, r"expected xla_ckpt\.LoadOptions"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
@pytest.mark.parametrize("adapter", ["transformers", "Lightning", "TagIO"])
def test_what_no_call_takes_is_refused_at_once(
    adapter: str, keywords: dict[str, Any], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        constructors()[adapter](**keywords)


@needs("lightning")
def test_lightnings_own_choice_comes_before_that_of_the_plugin(tmp_path: Path) -> None:
    from xla_ckpt.integrations.lightning import TagIO

    path = tmp_path / "a.ckpt"
    TagIO().save_checkpoint({"member": Opaque(1)}, path)
    for trust, weights_only in ((False, None), (False, True), (True, True)):
        with pytest.raises(xla_ckpt.UntrustedObjectError):
            TagIO(trust_pickle=trust).load_checkpoint(path, weights_only=weights_only)
    for trust, weights_only in ((True, None), (True, False), (False, False)):
        loaded = TagIO(trust_pickle=trust).load_checkpoint(path, weights_only=weights_only)
        assert loaded["member"].number == 1


@needs("lightning")
def test_a_checkpoint_that_is_gone_is_deleted_once_more(tmp_path: Path) -> None:
    from xla_ckpt.integrations.lightning import TagIO

    io = TagIO()
    io.save_checkpoint({"w": torch.ones(1)}, tmp_path / "a.ckpt")
    for _ in range(2):
        io.remove_checkpoint(tmp_path / "a.ckpt")
    assert not xla_ckpt.list_tags(tmp_path)


@needs("accelerate")
def test_a_run_goes_on_from_the_local_directory_of_its_saves(s3: S3Server, tmp_path: Path) -> None:
    from transformers import TrainerCallback

    class ResumedAt(TrainerCallback):
        step: int | None = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
            self.step = state.global_step
            raise KeyboardInterrupt

    root, options = f"s3://{s3.new_bucket()}/run", xla_ckpt.SaveOptions(local=tmp_path / "local")
    trainer, callback = trainer_of(root, tmp_path / "out", 4, options=options)
    trainer.train(resume_from_checkpoint=callback.resume(trainer))
    xla_ckpt.Checkpoints(root).delete("checkpoint-4")  # as if the machine had been lost before the upload
    for keywords, newest in (
        ({}, 2),
        ({"options": options}, 4),
        ({"load_options": LoadOptions(local=options.local)}, 4),
    ):
        trainer, callback = trainer_of(root, tmp_path / "out", 6, **keywords)
        trainer.add_callback(resumed_at := ResumedAt())
        with pytest.raises(KeyboardInterrupt):
            trainer.train(resume_from_checkpoint=callback.resume(trainer))
        assert resumed_at.step == newest


@needs("lightning", "torchdata")
def test_a_lightning_run_goes_on_from_the_local_directory_of_its_saves(s3: S3Server, tmp_path: Path) -> None:
    root, options = f"s3://{s3.new_bucket()}/run", xla_ckpt.SaveOptions(local=tmp_path / "local")
    lightning_run(root, 4, None, False, {"options": options})
    xla_ckpt.finalize_checkpoint()
    xla_ckpt.Checkpoints(root).delete("step_4")  # as if the machine had been lost before the upload
    for keywords, newest in (
        ({}, 2),
        ({"options": options}, 4),
        ({"load_options": LoadOptions(local=options.local)}, 4),
    ):
        assert lightning_run(root, 5, None, False, keywords, every=100) == [newest, 5]
