"""A module of a stored model, written as a model of its own: one of a dict of modules, or one in a module."""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import xla_ckpt


class Tied(torch.nn.Module):
    """A model whose output layer is its embedding, in a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Embedding(6, 4), torch.nn.Linear(4, 4))
        self.head = torch.nn.Linear(4, 6, bias=False)
        self.head.weight = self.body[0].weight


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Tied, Tied]:
    """A root directory with a model and its master weights, and both of them."""
    model = Tied().bfloat16()
    master = copy.deepcopy(model).float()
    for parameter in master.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW(master.parameters())
    optimizer.step()
    xla_ckpt.save_checkpoint(tmp_path / "run", "a", {"model": model, "master": master}, optimizer)
    return tmp_path / "run", model, master


def written(root: Path, part: str) -> list[dict[str, torch.Tensor]]:
    """A part as both calls write it."""
    xla_ckpt.export_hf(root, root.parent / "hf", part=part)
    xla_ckpt.convert(root, root.parent / "out.pt", to="torch", part=part)
    return [load_file(root.parent / "hf/model.safetensors"), torch.load(root.parent / "out.pt")]


@pytest.mark.parametrize("name", ["model", "master"])
def test_one_of_a_dict_of_modules(saved: tuple[Path, Tied, Tied], name: str) -> None:
    root, model, master = saved
    state = (model if name == "model" else master).state_dict()
    exported, loaded = written(root, f"model/{name}")
    assert list(loaded) == list(state)
    assert all(torch.equal(loaded[key], state[key]) and loaded[key].dtype == state[key].dtype for key in state)
    assert loaded["head.weight"].data_ptr() == loaded["body.0.weight"].data_ptr(), "they stay one array"
    assert exported.keys() == state.keys() - {"head.weight"}, "what is shared is written once, as of a whole model"
    assert all(torch.equal(exported[key], state[key]) for key in exported)


def test_a_module_in_a_module(saved: tuple[Path, Tied, Tied]) -> None:
    """Its array is stored under the name of another module."""
    root, _, master = saved
    for files in written(root, "model/master.head"):
        assert list(files) == ["weight"]
        assert torch.equal(files["weight"], master.head.weight)


def test_a_file_of_torch_save(tmp_path: Path) -> None:
    state = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2)).state_dict()
    torch.save({"model": OrderedDict(state)}, tmp_path / "old.pt")
    xla_ckpt.export_hf(tmp_path / "old.pt", tmp_path / "hf", part="model/1")
    exported = load_file(tmp_path / "hf/model.safetensors")
    assert exported.keys() == {"weight", "bias"}
    assert torch.equal(exported["weight"], state["1.weight"])


def test_a_part_that_is_misspelt(saved: tuple[Path, Tied, Tied]) -> None:
    root, *_ = saved
    for call in (
        lambda: xla_ckpt.export_hf(root, root.parent / "hf", part="model/mastr"),
        lambda: xla_ckpt.convert(root, root.parent / "out.pt", to="torch", part="model/mastr"),
    ):
        with pytest.raises(xla_ckpt.UsageError, match="no such part: did you mean 'model/master'"):
            call()
    assert [path.name for path in root.parent.iterdir()] == ["run"]


def test_adapters_alone_are_no_module(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"base": torch.nn.Linear(2, 2), "lora_A": torch.nn.Linear(2, 2)})
    model["base"].requires_grad_(False)
    xla_ckpt.save_checkpoint(tmp_path / "run", "a", model, only="adapters")
    with pytest.raises(xla_ckpt.UsageError, match="a part of its model alone"):
        xla_ckpt.export_hf(tmp_path / "run", tmp_path / "hf", part="model/lora_A")


def test_the_log_says_that_there_are_several(saved: tuple[Path, Tied, Tied], caplog: pytest.LogCaptureFixture) -> None:
    root, model, _ = saved
    with caplog.at_level(logging.WARNING):
        xla_ckpt.export_hf(root, root.parent / "hf")
    assert (
        "several modules with the same arrays, and all of them are written: model/model, model/master." in caplog.text
    )
    caplog.clear()
    alike = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(2, 2)) for _ in range(2)))
    for name, layers in (("two", alike), ("three", torch.nn.ModuleDict({"q": alike[0][0], "k": alike[1][0]}))):
        xla_ckpt.save_checkpoint(root.parent / name, "a", layers)
        xla_ckpt.export_hf(root.parent / name, root.parent / f"hf-{name}")
    assert not caplog.messages
    xla_ckpt.save_checkpoint(root.parent / "one", "a", model)
    with caplog.at_level(logging.WARNING):
        xla_ckpt.export_hf(root.parent / "one", root.parent / "hf1")
        xla_ckpt.export_hf(root, root.parent / "hf2", part="model/model")
    assert "several modules" not in caplog.text
