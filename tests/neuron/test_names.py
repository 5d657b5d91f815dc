"""The table of names in docs/from-nxd.md is true: each is there, or an error that says what to do."""

from __future__ import annotations

import importlib
import re

import pytest

from neuron_compat.nxd.exports import UNSUPPORTED
from tests.runs import ROOT
from xla_ckpt import UsageError

ROW = re.compile(r"^\| `(nxd[\w.]*)` \| (.*?) \| (there|error) \| (.*?) \|$", re.MULTILINE)


def rows() -> list[tuple[str, str, str]]:
    """(module, name, there or error)."""
    found = ROW.findall((ROOT / "docs/from-nxd.md").read_text())
    return [(module, name, how) for module, names, how, _ in found for name in re.findall(r"`(\w+)`", names)]


def test_there_are_names() -> None:
    assert len(rows()) > 70


OF_TORCH_XLA = {"NeuronZero1Optimizer"}
"""Is derived from a class of torch_xla's."""


@pytest.mark.parametrize(
    ("module", "name", "how"),
    [pytest.param(*row, marks=pytest.mark.xla if row[1] in OF_TORCH_XLA else ()) for row in rows()],
    ids=lambda v: v,
)
def test_a_name_is_what_the_table_says(module: str, name: str, how: str) -> None:
    home = importlib.import_module(f"neuron_compat.{module}")
    if how == "there":
        assert getattr(home, name) is not None
        return
    with pytest.raises(UsageError, match=rf"neuron_compat\.{module}\.{name} is not there\. .") as caught:
        getattr(home, name)
    assert caught.value.hint
    assert name not in dir(home)


@pytest.mark.parametrize(
    "module",
    [
        "kernels.kernel_utils",
        "modules.moe.model",
        "modules.lora",
        "parallel_layers.layer_norm",
        "pipeline",
        "utils.timeline",
    ],
)
def test_a_module_that_is_not_there_says_what_to_do_when_it_is_imported(module: str) -> None:
    with pytest.raises(UsageError, match=r"^neuron_compat\.nxd\.[\w.]+ is not there") as caught:
        importlib.import_module(f"neuron_compat.nxd.{module}")
    assert caught.value.hint
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("neuron_compat.nxd.nobody_knows_it")


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_is_said_to_be_absent_is_not_there(name: str) -> None:
    module, _, last = f"neuron_compat.nxd.{name}".rpartition(".")
    with pytest.raises(UsageError, match=f"{last} is not there"):
        getattr(importlib.import_module(module), last)
