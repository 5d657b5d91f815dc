"""Adapters of the real neuronx-distributed, over tp 2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

import xla_ckpt
from tests.neuron.real import lora
from tests.neuron.real_nxd import needs_nxd, run_on_nxd

pytestmark = [needs_nxd, pytest.mark.xla]

TAGS = ("theirs", "pt", "xser", "native")
BASE = [f"{layer}.base_layer.{kind}" for layer in ("down", "norm", "up") for kind in ("bias", "weight")]


@pytest.mark.parametrize(("base", "joined"), [(False, True), (False, False), (True, False)])
def test_adapters_resume_with_their_optimizer(tmp_path: Path, base: bool, joined: bool) -> None:
    for told in run_on_nxd(lora.saves_and_loads, 2, tmp_path, base, joined):
        assert told == {name: [] if base else BASE for name in TAGS}  # without the base, that of the program stays
    # The files do not say how they are split, unless LoraModel has joined them.
    split = [] if joined else [(r"up\.lora_B", ("tp", None)), (r"down\.lora_A", (None, "tp"))]
    xla_ckpt.convert(tmp_path / "theirs", tmp_path / "peft", "a", to="peft", shardings=[*split, ("", None)])
    # By default the configuration lies beside neuronx-distributed's tags.
    assert json.loads((tmp_path / "peft/adapter_config.json").read_text())["lora_alpha"] == 8
    held = load_file(tmp_path / "peft/adapter_model.safetensors")
    assert tuple(held["base_model.model.up.lora_B.weight"].shape) == (12, 4)
    assert tuple(held["base_model.model.down.lora_A.weight"].shape) == (4, 12)


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize(("fused", "copies"), [(True, 1), (True, 2), (False, 2), (False, 1)])
def test_joined_adapters_of_queries_keys_and_values(tmp_path: Path, fused: bool, copies: int, joined: bool) -> None:
    lost = joined and (fused or copies > 1)
    for told in run_on_nxd(lora.joins_queries, 2, tmp_path, fused, copies, joined):
        assert told["ours"] == ""
        assert ("has joined the adapters of all ranks" in told["theirs"]) is lost
        assert lost or told["theirs"] == ""


def test_neuronx_distributed_reads_them_from_our_files(tmp_path: Path) -> None:
    assert run_on_nxd(lora.reads_ours, 2, tmp_path) == [[], []]
