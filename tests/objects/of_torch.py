"""Programs with packages for torch: quantization, optimizers, models, data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

import xla_ckpt
from tests.objects.trial import Case, Training


class Net(torch.nn.Module):
    """Two layers and a norm: parameters of one dim and of two."""

    def __init__(self, seed: int, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = torch.nn.Linear(6, width)
        self.norm = torch.nn.LayerNorm(width)
        self.last = torch.nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of [batch, 6]: [batch, 4]."""
        return self.last(torch.tanh(self.norm(self.first(x))))


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], device: Any = "cpu") -> Callable[[], torch.Tensor]:
    """A loss on a fixed batch."""
    batch = torch.randn(5, 6, generator=torch.Generator().manual_seed(5)).to(device)
    return lambda: (model(batch) ** 2).mean()


def with_optimizer(make: Callable[[Any], Any], seed: int, width: int = 8) -> Training:
    """A small net and an optimizer of its parameters."""
    model = Net(seed, width)
    return Training(model, make(model), loss_of(model))


def optimizer_case(package: str, name: str, make: Callable[[Any], Any], *, width: int = 8, **more: Any) -> Case:
    """A case of an optimizer."""
    return Case(package=package, name=name, make=partial(with_optimizer, make, width=width), **more)


def torchao() -> Iterator[Case]:
    """Quantized optimizer states, and quantized weights below a head that is trained."""
    import torchao.optim
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    # States are quantized from 4096 elements on, in blocks of 256.
    for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8", "Adam8bit"):
        kind = getattr(torchao.optim, name)
        yield optimizer_case("torchao", f"optim.{name}", lambda m, k=kind: k(m.parameters(), lr=1e-2), width=1024)

    def quantized(seed: int) -> Training:
        model = Net(seed, 64)
        quantize_(model.first, Int8WeightOnlyConfig())
        for p in model.first.parameters():
            p.requires_grad_(False)
        trained = [p for p in model.parameters() if p.requires_grad]
        return Training(model, torch.optim.AdamW(trained, lr=1e-2), loss_of(model))

    yield Case(package="torchao", name="quantize_(Int8WeightOnlyConfig)", make=quantized)


def bitsandbytes() -> Iterator[Case]:
    """Weights of 8 and 4 bits, and 8-bit optimizers, on the CPU."""
    import bitsandbytes as bnb

    def quantized(layer: Callable[[], Any], seed: int, *, passed: bool = False) -> Training:
        model = Net(seed, 64)
        small = layer()
        small.load_state_dict({"weight": model.last.weight.data, "bias": model.last.bias.data})
        model.last = small.to("cpu").requires_grad_(False)
        if passed:
            loss_of(model)()
        trained = [p for p in model.parameters() if p.requires_grad]
        return Training(model, torch.optim.AdamW(trained, lr=1e-2), loss_of(model))

    eight = partial(bnb.nn.Linear8bitLt, 64, 4, has_fp16_weights=False)
    four = partial(bnb.nn.Linear4bit, 64, 4, compute_dtype=torch.float32, quant_type="nf4")
    yield Case(
        package="bitsandbytes",
        name="nn.Linear8bitLt (Int8Params) before its first pass",
        make=partial(quantized, eight),
        over_old=False,
    )
    yield Case(
        package="bitsandbytes",
        name="nn.Linear8bitLt (Int8Params) after a pass",
        make=partial(quantized, eight, passed=True),
        xfail="Loading a quantized checkpoint into non-quantized Linear8bitLt is not supported",
        because="refused by bitsandbytes, and so is torch's own `load_state_dict`: load before the first pass",
    )
    yield Case(package="bitsandbytes", name="nn.Linear4bit (Params4bit)", make=partial(quantized, four))
    for name in ("AdamW8bit", "Lion8bit", "AdamW32bit"):
        kind = getattr(bnb.optim, name)
        yield optimizer_case("bitsandbytes", f"optim.{name}", lambda m, k=kind: k(m.parameters(), lr=1e-2), width=1024)


_NEED_MORE = {
    *("alig", "lbfgs", "lomo", "adalomo", "demo", "distributedmuon", "spectralsphere"),
    *("sam", "gsam", "looksam", "wsam", "bsam", "lookahead", "trac"),
}
"""Optimizers of pytorch_optimizer that need more than parameters and a backward pass: a closure, a process group, an
optimizer inside."""

_SPLUS = {
    "xfail": "losses differ after the load",
    "because": "the state is equal, and a later loss differs in its last bit: SPlus has matrices in column-major "
    "order, a load makes row-major ones, and their products are rounded differently",
}


def pytorch_optimizer() -> Iterator[Case]:
    """All of its optimizers that step after a plain backward pass."""
    import pytorch_optimizer as po

    for name in sorted(po.get_supported_optimizers()):
        if name in _NEED_MORE:
            continue

        def make(model: Any, name: str = name) -> Any:
            flat, rest = [p for p in model.parameters() if p.ndim == 2], [p for p in model.parameters() if p.ndim == 1]
            groups = [{"params": flat, "use_muon": True}, {"params": rest, "use_muon": False}]
            takes = {"adago": groups, "adammini": model}.get(name, groups if "muon" in name else model.parameters())
            more = {"num_iterations": 100} if name == "ranger21" else {}
            optimizer = po.load_optimizer(name)(takes, **more)
            optimizer.wants_graph = "adahessian" in name or "sophia" in name
            return optimizer

        yield optimizer_case("pytorch_optimizer", name, make, **(_SPLUS if name == "splus" else {}))
    inner = po.load_optimizer("adamw")
    for name in ("Lookahead", "OrthoGrad", "TRAC"):
        outer = getattr(po, name)

        def around(model: Any, outer: Any = outer) -> Any:
            return outer(inner(model.parameters()))

        yield optimizer_case("pytorch_optimizer", f"{name}(adamw)", around)
    for name in ("galore", "apollo"):
        if name not in po.get_supported_optimizers():
            continue

        def low(model: Any, name: str = name) -> Any:
            flat, rest = [model.first.weight, model.last.weight], [p for p in model.parameters() if p.ndim == 1]
            projected = {"params": flat, "rank": 2, "update_proj_gap": 2, "scale": 1.0, "projection_type": "std"}
            return po.load_optimizer(name)([projected, {"params": rest}])

        yield optimizer_case("pytorch_optimizer", f"{name}, rank 2", low)


def small_ones() -> Iterator[Case]:
    """Packages that are one optimizer, or a few."""
    import madgrad
    import schedulefree

    def training(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def made(model: Any) -> Any:
            optimizer = make(model.parameters())
            optimizer.train()
            return optimizer

        return made

    for name in ("AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree"):
        yield optimizer_case("schedulefree", name, training(partial(getattr(schedulefree, name), lr=1e-2)))
    wrapper = schedulefree.ScheduleFreeWrapper
    wrapped = training(lambda parameters: wrapper(torch.optim.SGD(parameters, lr=1e-2), momentum=0.9))
    yield optimizer_case("schedulefree", "ScheduleFreeWrapper(SGD)", wrapped)
    for name in ("MADGRAD", "MirrorMADGRAD"):
        kind = getattr(madgrad, name)
        yield optimizer_case("madgrad", name, lambda m, k=kind: k(m.parameters(), lr=1e-2))


def timm() -> Iterator[Case]:
    """Models with an average of their weights and a schedule, and its optimizers."""
    import timm as package
    from timm.optim import create_optimizer_v2, list_optimizers
    from timm.utils import ModelEmaV3

    def vision(name: str, seed: int) -> Training:
        torch.manual_seed(seed)
        model = package.create_model(name, num_classes=3)
        average = ModelEmaV3(model, decay=0.9)
        optimizer = create_optimizer_v2(model, opt="lamb", lr=1e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        batch = torch.randn(2, 3, *model.default_cfg["input_size"][1:], generator=torch.Generator().manual_seed(1))

        def loss() -> torch.Tensor:
            average.update(model)
            return (model(batch) ** 2).mean()

        return Training(model, optimizer, loss, scheduler, {"average": average})

    for name in ("test_vit", "test_resnet", "test_convnext", "test_efficientnet"):
        yield Case(package="timm", name=f"{name}, ModelEmaV3, lamb, cosine", make=partial(vision, name))
    for name in list_optimizers():
        if name.startswith(("fused", "bnb", "adahessian", "lookahead")):
            continue
        yield optimizer_case("timm", f"optim {name}", lambda m, n=name: create_optimizer_v2(m, opt=n, lr=1e-2))


def torchdata() -> Iterator[Case]:
    """A data loader that goes on where it was."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    def reading(workers: int, seed: int) -> Training:
        model = Net(seed)
        rows = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
        loader = StatefulDataLoader(list(rows), batch_size=4, num_workers=workers)
        optimizer = torch.optim.AdamW(model.parameters())
        at: list[Any] = []

        def loss() -> torch.Tensor:
            if not at:
                at.append(iter(loader))
            return (model(next(at[0])) ** 2).mean()

        return Training(model, optimizer, loss, extras={"data": loader}, before_load=at.clear)

    for workers in (0, 1):
        yield Case(package="torchdata", name=f"StatefulDataLoader, {workers} workers", make=partial(reading, workers))


def transformers() -> Iterator[Case]:
    """Small models of several families."""
    import transformers as package

    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 32,
        "vocab_size": 50,
    }

    def language(config: Any, seed: int) -> Training:
        torch.manual_seed(seed)
        model = package.AutoModelForCausalLM.from_config(config)
        ids = torch.randint(0, 50, (2, 8), generator=torch.Generator().manual_seed(1))
        optimizer = package.optimization.Adafactor(model.parameters(), lr=1e-3, relative_step=False)
        scheduler = package.get_linear_schedule_with_warmup(optimizer, 2, 10)
        return Training(model, optimizer, lambda: model(input_ids=ids, labels=ids).loss, scheduler)

    for name in ("Llama", "Qwen2", "Mistral", "GPTNeoX"):
        config = getattr(package, f"{name}Config")(**sizes)
        yield Case(package="transformers", name=f"{name}ForCausalLM, Adafactor", make=partial(language, config))


class SavingLoop:
    """accelerate's own loop, with a save at each step that is in flight while the next steps run.

    On XLA such a loop once ended in `Check failed: !buffer->IsDeleted()`. The question was whether a snapshot, which
    holds buffers, holds one that a later graph was allowed to donate.
    """

    def __init__(self, seed: int) -> None:
        from accelerate import Accelerator

        self.accelerator = Accelerator()
        net = Net(seed)
        adam = torch.optim.AdamW(net.parameters())
        rows = torch.randn(1, 6, generator=torch.Generator().manual_seed(5)).repeat(4 * 64, 1)
        parts = net, adam, torch.utils.data.DataLoader(list(rows), batch_size=4)
        self.model, self.optimizer, loader = self.accelerator.prepare(*parts)
        self.batches = iter(loader)  # between two of them torch_xla ends the step
        self.aside = f"memory://loop-{id(self)}"
        self.steps = 0

    def step(self) -> float:
        """Three of them. Only the last loss is read, so that the work of the others is pending at their saves."""
        for _ in range(3):
            loss = (self.model(next(self.batches)) ** 2).mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.steps += 1
            self._saved(self.aside, f"step_{self.steps}", async_save=True, num_kept_ckpts=2)
        return float(loss.detach())

    def _saved(self, root: Any, tag: str, **options: Any) -> xla_ckpt.SaveHandle:
        return xla_ckpt.save_checkpoint(root, tag, self.model, self.optimizer, **options)

    def save(self, root: Path, *, asynchronous: bool) -> xla_ckpt.SaveHandle:
        """Save it under the tag `a`."""
        return self._saved(root, "a", async_save=asynchronous)

    def load(self, root: Path) -> None:
        """Load it."""
        xla_ckpt.load_checkpoint(root, "a", self.model, self.optimizer)

    def state(self) -> Any:
        """All that has to be equal after a load."""
        return self.model.state_dict(), self.optimizer.state_dict()


def accelerate() -> Iterator[Case]:
    """What an Accelerator has prepared."""
    from accelerate import Accelerator

    def prepared(seed: int) -> Training:
        accelerator = Accelerator()  # XLA's device, where torch_xla is installed
        model = Net(seed)
        optimizer = torch.optim.AdamW(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        return Training(model, optimizer, loss_of(model, accelerator.device), scheduler)

    yield Case(package="accelerate", name="prepare(model, optimizer, scheduler)", make=prepared)
    yield Case(package="accelerate", name="a loop over its loader, a save in flight at each step", make=SavingLoop)


ALL = (accelerate, torchao, bitsandbytes, pytorch_optimizer, small_ones, timm, torchdata, transformers)
"""What makes the cases of each package. accelerate's comes first: its import of torch_xla has to be before the first
backward pass of the process, in which torch counts the kinds of devices."""
