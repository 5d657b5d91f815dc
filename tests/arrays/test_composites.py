"""Tensors that consist of several: sparse, quantized and nested ones, and subclasses of tensors."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from xla_ckpt import IncompatibleCheckpointError, UnsupportedStateError, UntrustedObjectError
from xla_ckpt.core.manifest import manifest_json

pytestmark = pytest.mark.filterwarnings("ignore:.*(beta|prototype|experimental).*")


class Scaled(torch.Tensor):
    """Whole numbers and a scale, as quantized weights are: a tensor without elements of its own."""

    numbers: torch.Tensor
    scale: torch.Tensor
    label: str

    @staticmethod
    def __new__(cls, numbers: torch.Tensor, scale: torch.Tensor, label: str) -> Scaled:
        made = torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=torch.float32)
        made.numbers, made.scale, made.label = numbers, scale, label
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["numbers", "scale"], (self.label, torch.float32)

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Any], context: Any, size: Any, stride: Any) -> Scaled:
        assert context[1] is torch.float32
        assert tuple(size) == tuple(inner["numbers"].shape)
        return cls(inner["numbers"], inner["scale"], context[0])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(args[0].numbers.clone(), args[0].scale.clone(), args[0].label)
        if func is torch.ops.aten.copy_.default:
            args[0].numbers.copy_(args[1].numbers)
            args[0].scale.copy_(args[1].scale)
            args[0].label = args[1].label
            return args[0]
        raise NotImplementedError(str(func))

    def values(self) -> torch.Tensor:
        return self.numbers * self.scale


class Labelled(torch.nn.Parameter):
    """A parameter that only has more methods."""

    def told(self) -> str:
        return "labelled"


def scaled(seed: int = 0) -> Scaled:
    made = torch.Generator().manual_seed(seed)
    return Scaled(torch.randint(-9, 9, (4, 3), generator=made), torch.rand(4, 1, generator=made), f"of seed {seed}")


def sparse() -> torch.Tensor:
    return torch.tensor([[0.0, 2.0, 0.0], [3.0, 0.0, 0.0]])


def values() -> dict[str, torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "coo": sparse().to_sparse_coo(),
            "uncoalesced": torch.sparse_coo_tensor([[0, 0], [1, 1]], [1.0, 2.0], (2, 3)),
            "empty": torch.zeros(2, 3).to_sparse_coo(),
            "csr": sparse().to_sparse_csr(),
            "csc": sparse().to_sparse_csc(),
            "bsr": torch.ones(4, 4).to_sparse_bsr((2, 2)),
            "bsc": torch.ones(4, 4).to_sparse_bsc((2, 2)),
            "hybrid": torch.sparse_coo_tensor([[0, 2]], torch.rand(2, 3), (4, 3)),
            "qint8": torch.quantize_per_tensor(torch.randn(3, 4), 0.5, 1, torch.qint8),
            "quint8": torch.quantize_per_tensor(torch.rand(3, 4), 0.25, 3, torch.quint8),
            "qint32": torch.quantize_per_tensor(torch.randn(5), 0.125, 0, torch.qint32),
            "per channel": torch.quantize_per_channel(
                torch.randn(2, 3), torch.tensor([0.5, 0.25]), torch.tensor([0, 1]), 0, torch.qint8
            ),
            "complex32": torch.randn(2, 3, 2).half().view(torch.complex32)[..., 0],
            "nested": torch.nested.nested_tensor([torch.rand(3, 2), torch.rand(1, 2)]),
            "jagged": torch.nested.nested_tensor([torch.rand(3, 2), torch.rand(1, 2)], layout=torch.jagged),
            "subclass": scaled(),
        }


def facts(value: Any) -> Any:
    """What a tensor of these kinds is, as something that can be compared."""
    if isinstance(value, Scaled):
        return "scaled", value.numbers.tolist(), value.scale.tolist(), value.label
    if value.is_nested:
        return str(value.layout), [part.tolist() for part in value.unbind()]
    if value.layout is torch.sparse_coo:
        return value.shape, value.is_coalesced(), value._indices().tolist(), value._values().tolist()
    if value.layout is not torch.strided:
        return value.layout, value.to_dense().tolist(), value.values().tolist()
    if value.is_quantized:
        return value.dtype, value.qscheme(), value.int_repr().tolist(), value.dequantize().tolist()
    return value.dtype, torch.view_as_real(value).tolist()


@pytest.mark.parametrize("name", sorted(values()))
def test_it_comes_back_as_it_was(tmp_path: Path, name: str) -> None:
    value = values()[name]
    xla_ckpt.save(tmp_path, "a", {"here": [value]})
    found = xla_ckpt.restore(tmp_path, "a").tree["here"][0]
    assert type(found) is type(value)
    assert facts(found) == facts(value)
    assert xla_ckpt.verify(tmp_path, "a").ok
    assert not manifest_json.parse_manifest((tmp_path / "a" / "manifest.json").read_bytes()).object_files, (
        "nothing is pickled"
    )


class Holder(torch.nn.Module):
    """A module with a weight and buffers that consist of several tensors."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(seed)
        self.weight = torch.nn.Parameter(scaled(seed), requires_grad=False)
        self.mask = torch.nn.Buffer(torch.rand(4, 3, generator=made).round().to_sparse_coo())
        self.table = torch.nn.Buffer(
            torch.quantize_per_tensor(torch.randn(3, 4, generator=made), 0.5, 1, torch.qint8), persistent=True
        )
        self.extra = Labelled(torch.rand(3, generator=made))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_module_gets_them_back(tmp_path: Path, *, asynchronous: bool) -> None:
    model, target = Holder(1), Holder(2)
    expected = {name: facts(getattr(model, name)) for name in ("weight", "mask", "table")}
    handle = xla_ckpt.save_checkpoint(tmp_path, "a", model, async_save=asynchronous)
    model.weight.numbers.add_(1)  # an asynchronous save has the numbers of the call
    handle.result()
    weight, extra = target.weight, target.extra
    xla_ckpt.load_checkpoint(tmp_path, "a", target)
    assert {name: facts(getattr(target, name)) for name in expected} == expected
    assert target.weight is weight
    assert target.extra is extra
    assert extra.told() == "labelled"
    assert torch.equal(extra, model.extra)


class ScaleBeside(torch.nn.Module):
    """A layer whose weight has its scale as an attribute, and which saves it beside the weight, or does not."""

    def __init__(self, number: float, *, saves: bool = True) -> None:
        super().__init__()
        self.weight = Labelled(torch.full((2, 2), number))
        self.weight.scale = torch.tensor([number])  # type: ignore[attr-defined]
        self.saves = saves

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.saves:
            destination[prefix + "scale"] = self.weight.scale  # type: ignore[attr-defined]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *more: Any) -> None:
        self.weight.scale.copy_(state_dict.pop(prefix + "scale"))  # type: ignore[attr-defined]
        super()._load_from_state_dict(state_dict, prefix, *more)


def test_an_attribute_of_a_parameter_is_no_loss_where_the_module_saves_it(tmp_path: Path) -> None:
    xla_ckpt.save_checkpoint(tmp_path, "a", torch.nn.Sequential(ScaleBeside(3.0)))
    target: Any = torch.nn.Sequential(ScaleBeside(0.0))
    xla_ckpt.load_checkpoint(tmp_path, "a", target)
    assert (target[0].weight.scale.tolist(), target[0].weight.tolist()) == ([3.0], [[3.0, 3.0], [3.0, 3.0]])
    with pytest.raises(UnsupportedStateError, match="a Labelled cannot be stored"):
        xla_ckpt.save_checkpoint(tmp_path, "b", torch.nn.Sequential(ScaleBeside(3.0, saves=False)))


def test_the_state_of_an_optimizer(tmp_path: Path) -> None:
    def trained(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = torch.nn.Linear(3, 4)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.state[model.weight]["exp_avg"] = scaled(seed)
        return model, optimizer

    model, optimizer = trained(1)
    xla_ckpt.save_checkpoint(tmp_path, "a", model, optimizer)
    fresh = torch.nn.Linear(3, 4)
    for target in (trained(2), (fresh, torch.optim.Adam(fresh.parameters()))):
        xla_ckpt.load_checkpoint(tmp_path, "a", *target)
        found = target[1].state[target[0].weight]["exp_avg"]
        assert facts(found) == facts(scaled(1))


def test_gradients_that_are_sparse_leave_sparse_momentum(tmp_path: Path) -> None:
    def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Embedding(5, 2, sparse=True)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.tensor([1, 3, 3])).sum().backward()
        optimizer.step()

    model, optimizer = trained()
    step(model, optimizer)
    xla_ckpt.save_checkpoint(tmp_path, "a", model, optimizer)
    step(model, optimizer)
    other = trained()
    xla_ckpt.load_checkpoint(tmp_path, "a", *other)
    step(*other)
    assert torch.equal(other[0].weight, model.weight)


def test_a_class_that_is_not_imported_is_not_imported_for_a_file(tmp_path: Path) -> None:
    xla_ckpt.save(tmp_path, "a", {"w": scaled()})
    path = tmp_path / "a" / "manifest.json"
    manifest = manifest_json.parse_manifest(path.read_bytes())
    skeleton = copy.deepcopy(manifest.skeleton)

    def named(name: str) -> None:
        skeleton["w"]["$composite"][0] = name
        path.write_bytes(manifest_json.dump_manifest(replace(manifest, skeleton=skeleton)))

    named("somebody.elses:Class")
    with pytest.raises(UntrustedObjectError, match="not imported"):
        xla_ckpt.restore(tmp_path, "a")
    named("os:system")
    with pytest.raises(IncompatibleCheckpointError, match="has changed or is gone"):
        xla_ckpt.restore(tmp_path, "a")
    named("torch:unheard_of")
    with pytest.raises(IncompatibleCheckpointError):
        xla_ckpt.restore(tmp_path, "a")


def test_dcp_has_their_parts(tmp_path: Path) -> None:
    model, target = Holder(1), Holder(2)
    xla_ckpt.save_checkpoint(tmp_path, "a", model, layout="dcp")
    xla_ckpt.load_checkpoint(tmp_path, "a", target)
    assert facts(target.weight) == facts(model.weight)
    stock = {"model.weight.numbers": torch.zeros(4, 3, dtype=torch.int64)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.distributed.checkpoint.load(stock, checkpoint_id=tmp_path / "a")
    assert torch.equal(stock["model.weight.numbers"], model.weight.numbers)


@pytest.mark.parametrize("layout", ["xser", "pt", "smp"])
def test_other_layouts_say_that_they_have_no_place_for_them(tmp_path: Path, layout: str) -> None:
    with pytest.raises(UnsupportedStateError) as caught:
        xla_ckpt.save_checkpoint(tmp_path, "a", Holder(1), layout=layout)
    assert 'layout="native"' in str(caught.value)
    assert xla_ckpt.list_tags(tmp_path) == []
