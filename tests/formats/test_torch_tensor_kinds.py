"""All kinds of tensors that torch's safe loader reads of a file of torch.save: so does this library, without trust."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from tests import xla
from tests.same import same
from xla_ckpt.arrays.composite_tensor import split_value
from xla_ckpt.formats.torch_save.serialization import read_whole_file

BASE = torch.arange(24.0).reshape(4, 6)


def numbers() -> torch.Tensor:
    """Complex numbers of a storage of their own: torch.save refuses two tensors of one storage and several types."""
    return torch.complex(BASE, -BASE - 1)


DENSE = torch.tensor([[0.0, 1.0, 0.0, 2.0], [0.0, 0.0, 3.0, 4.0]])


class Weight(torch.nn.Parameter):
    """A parameter of a class of its own: torch.save stores it as a plain one."""


def with_attribute(tensor: torch.Tensor) -> torch.Tensor:
    tensor.split = "rows"  # type: ignore[attr-defined]
    return tensor


def uncoalesced() -> torch.Tensor:
    return torch.sparse_coo_tensor(torch.tensor([[0, 0], [1, 1]]), torch.ones(2), (2, 2), check_invariants=True)


PLAIN: dict[str, Callable[[], torch.Tensor]] = {
    "a parameter of a class of its own": lambda: Weight(BASE.clone()),
    "a parameter with an attribute": lambda: with_attribute(torch.nn.Parameter(BASE.clone())),
    "with an attribute": lambda: with_attribute(BASE.clone()),
    "a buffer": lambda: torch.nn.Buffer(BASE.clone()),
    "requires grad": lambda: BASE.clone().requires_grad_(),
    "transposed": BASE.t,
    "expanded": lambda: torch.ones(1, 3).expand(4, 3),
}
"""Kinds of tensors that are one array."""

OF_XLA: dict[str, Callable[[], torch.Tensor]] = {
    "xla": lambda: BASE.to(xla.device()),
    "a parameter of xla": lambda: torch.nn.Parameter(BASE.to(xla.device())),
    "xla, bfloat16": lambda: BASE.bfloat16().to(xla.device()),
    "xla, bool": lambda: (BASE > 3).to(xla.device()),
    "xla, of no dims": lambda: torch.tensor(3).to(xla.device()),
    "xla, empty": lambda: torch.zeros(0, 3).to(xla.device()),
    "xla, with an attribute": lambda: with_attribute(BASE.to(xla.device())),
}

SEVERAL: dict[str, Callable[[], torch.Tensor]] = {
    "sparse_coo": DENSE.to_sparse,
    "sparse_coo, uncoalesced": uncoalesced,
    "sparse_coo, without elements": lambda: torch.zeros(2, 3).to_sparse(),
    "sparse_coo, hybrid": lambda: torch.eye(3).unsqueeze(-1).expand(3, 3, 2).contiguous().to_sparse(2),
    "sparse_csr": DENSE.to_sparse_csr,
    "sparse_csc": DENSE.to_sparse_csc,
    "sparse_bsr": lambda: DENSE.to_sparse_bsr((2, 2)),
    "sparse_bsc": lambda: DENSE.to_sparse_bsc((2, 2)),
    "qint8": lambda: torch.quantize_per_tensor(BASE, 0.1, 0, torch.qint8),
    "quint8": lambda: torch.quantize_per_tensor(BASE, 0.5, 3, torch.quint8),
    "qint32": lambda: torch.quantize_per_tensor(BASE, 0.5, 3, torch.qint32),
    "per channel": lambda: torch.quantize_per_channel(
        BASE, torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0, 1, 2, 3]), 0, torch.qint8
    ),
    "quantized, transposed": lambda: torch.quantize_per_tensor(BASE, 0.5, 3, torch.quint8).t(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2, 3), BASE[:, :3]]),
    "nested, of parts of other dims": lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(5, 1)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2, 3), BASE[:, :3]], layout=torch.jagged),
    "conjugated": lambda: numbers().conj(),
    "conjugated, complex128": lambda: numbers().to(torch.complex128).conj(),
    "conjugated, transposed": lambda: numbers().mH,
    "negative view": lambda: numbers().conj().imag,
    "negative view, bfloat16": lambda: torch._neg_view(BASE.bfloat16()),
    "complex32": lambda: numbers().to(torch.complex32),
    "complex32, transposed": lambda: numbers().to(torch.complex32).t(),
}
"""Kinds that consist of several arrays, or whose values are not those that are stored."""

REFUSED = ("jagged",)
"""What torch's safe loader and the readers of whole files refuse, because of a note of torch's compiler about it."""

KINDS = {"plain": PLAIN, "xla": OF_XLA, "several": SEVERAL}


def groups(*names: str) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.xla] * (name == "xla")) for name in names]


def as_arrays(value: torch.Tensor) -> Any:
    """What tells a tensor from any other: its layout, and its plain parts."""
    value = value.detach().cpu().resolve_conj().resolve_neg()
    if (parts := split_value(value)) is None:
        return value.as_subclass(torch.Tensor)
    return parts.name, dict(parts.members), parts.extra


def alike(found: Any, wanted: torch.Tensor) -> bool:
    return isinstance(found, torch.Tensor) and same(as_arrays(found), as_arrays(wanted), order=False)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("group", groups(*KINDS))
def test_they_are_read_as_torch_reads_them(group: str, tmp_path: Path) -> None:
    """Beside a model, and as members of it: restored, converted, and as a value of the facades' readers."""
    values, path = {kind: make() for kind, make in KINDS[group].items()}, tmp_path / "x.pt"
    torch.save({"model": {"w": BASE, **values}, "beside": [[*values.values()], 3]}, path)
    for kind, value in values.items():
        torch.save(value, tmp_path / "one.pt")
        if kind not in REFUSED:
            assert alike(torch.load(tmp_path / "one.pt", weights_only=True, map_location="cpu"), value), kind
    assert xla_ckpt.verify(path).ok
    restored = xla_ckpt.restore(path).tree
    converted = xla_ckpt.restore(xla_ckpt.convert(path, tmp_path / "run", to="native").path).tree
    for tree in (restored, converted):
        assert torch.equal(tree["model"]["w"], BASE)
        for kind, value, beside in zip(values, values.values(), tree["extras"]["beside"][0], strict=True):
            assert alike(tree["model"][kind], value), kind
            assert alike(beside, value), kind
    torch.save({kind: value for kind, value in values.items() if kind not in REFUSED}, tmp_path / "some.pt")
    for kind, value in read_whole_file(str(tmp_path / "some.pt")).items():
        assert alike(value, values[kind]), kind
    # Who wants one array alone reads nothing else.
    mine = {"w": torch.zeros_like(BASE)}
    xla_ckpt.load_checkpoint(path, model=mine, strict=False)
    assert torch.equal(mine["w"], BASE)


@pytest.mark.parametrize("group", groups("plain", "xla"))
def test_those_of_one_array_are_loaded_into_a_module(group: str, tmp_path: Path) -> None:
    values = {f"w{i}": make() for i, make in enumerate(KINDS[group].values())}
    torch.save(values, tmp_path / "x.pt")
    module = torch.nn.Module()
    for name, value in values.items():
        module.register_buffer(name, torch.zeros(value.shape, dtype=value.dtype))
    xla_ckpt.load_checkpoint(tmp_path / "x.pt", model=module)
    for name, value in values.items():
        assert same(getattr(module, name), value.detach().cpu().as_subclass(torch.Tensor), order=False), name


@pytest.mark.xla
def test_a_training_state_on_xla_comes_back(tmp_path: Path) -> None:
    """What an XLA script saves with torch.save, model and optimizer: into modules on the CPU and on XLA."""
    torch.manual_seed(0)
    made = torch.nn.Linear(3, 2).to(xla.device())
    optimizer = torch.optim.AdamW(made.parameters())
    made(torch.ones(1, 3, device=xla.device())).sum().backward()
    optimizer.step()
    torch.save({"model": made.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}, tmp_path / "x.pt")
    for device in ("cpu", xla.device()):
        model = torch.nn.Linear(3, 2).to(device)
        into = torch.optim.AdamW(model.parameters())
        loaded = xla_ckpt.load_checkpoint(tmp_path / "x.pt", model=model, optimizer=into)
        assert loaded.user_content == {"epoch": 3}
        assert same(dict(model.state_dict()), dict(made.state_dict()))
        assert same(into.state_dict()["state"], optimizer.state_dict()["state"])


class Logger:
    """An object that is made on trust alone."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("group", groups(*KINDS))
def test_objects_beside_them_are_made_on_trust(group: str, tmp_path: Path) -> None:
    values, path = {kind: make() for kind, make in KINDS[group].items()}, tmp_path / "x.pt"
    torch.save({"model": {"w": BASE, **values}, "logger": Logger()}, path)
    tree = xla_ckpt.restore(path, trust_pickle=True).tree
    assert isinstance(tree["extras"]["logger"], Logger)
    for kind, value in values.items():
        assert alike(tree["model"][kind], value), kind


def test_a_tensor_without_bytes_is_an_error_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"model": {"w": BASE}, "ghost": torch.ones(2, 3, device="meta")}, path)
    mine = {"w": torch.zeros_like(BASE)}
    xla_ckpt.load_checkpoint(path, model=mine)
    assert torch.equal(mine["w"], BASE)
    assert xla_ckpt.verify(path).ok
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match=r"meta device when it was saved.*extras/ghost"):
        xla_ckpt.restore(path)
    ghost = read_whole_file(str(path))["ghost"]
    assert ghost.is_meta
    assert ghost.shape == (2, 3)


@pytest.mark.filterwarnings("ignore")
def test_a_directory_of_dcp_has_them_too(tmp_path: Path) -> None:
    """DCP stores values that are no tensors as files of torch.save inside of its own."""
    import torch.distributed.checkpoint as dcp

    kinds = ["sparse_coo", "sparse_csr", "qint8", "complex32"]
    dcp.save({"w": BASE, **{kind: (SEVERAL[kind](), 1) for kind in kinds}}, checkpoint_id=tmp_path / "dcp")
    tree = xla_ckpt.restore(tmp_path / "dcp").tree
    for kind in kinds:
        assert alike(tree[kind][0], SEVERAL[kind]()), kind


class Own(torch.Tensor):
    """A tensor of a class of its own, which torch's safe loader refuses, too."""


def test_a_tensor_of_a_class_of_its_own_names_a_fix_that_helps(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"w": BASE.clone().as_subclass(Own)}, path)
    with pytest.raises(xla_ckpt.UntrustedObjectError, match=r"a tensor of a class or kind.*torch\.load"):
        xla_ckpt.load_checkpoint(path, model={"w": torch.zeros_like(BASE)})
    assert type(xla_ckpt.restore(path, trust_pickle=True).tree["w"]) is Own
    torch.save({"w": torch.load(path, weights_only=False)["w"].as_subclass(torch.Tensor)}, path)  # the fix
    mine = {"w": torch.zeros_like(BASE)}
    xla_ckpt.load_checkpoint(path, model=mine)
    assert torch.equal(mine["w"], BASE)
