"""Checkpoints that neuronx-distributed wrote, to our format and back to its own: the same files, the same contents."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import xla_ckpt
from tests.formats.gold import LOST, Gold, Target, cases, few_of
from tests.formats.same import as_theirs, content, names, rank_files
from tests.same import differences
from xla_ckpt import Mesh

CASES = [case for case in cases() if case[0] != LOST]


def to_ours(gold: Gold, root: Path, **target_options: Any) -> None:
    """To our format."""
    target = Target(gold, **target_options)
    xla_ckpt.convert(
        gold.root,
        root,
        gold.tag,
        to="native",
        mesh="dp=2",
        as_tag="ours",
        model=target.model,
        optimizer=target.optimizer,
        options=xla_ckpt.ConvertOptions(max_memory=10_000),
    )


def to_theirs(gold: Gold, ours: Path, root: Path, mesh: Mesh) -> None:
    """From our format to the layout that it had, for a mesh."""
    config = gold.topology["config"]
    xla_ckpt.convert(
        ours,
        root,
        "ours",
        to="xser" if "xser" in gold.case else "pt",
        mesh=mesh,
        as_tag="theirs",
        pipeline_cuts=["model.layers.0"] * (mesh.pp - 1),
        zero1=bool(config["zero1"]),
        options=xla_ckpt.ConvertOptions(max_memory=10_000),
    )


@pytest.mark.parametrize(("case", "tag"), few_of(CASES))
def test_there_and_back(case: str, tag: str, tmp_path: Path) -> None:
    gold = Gold(case, tag)
    config = gold.topology["config"]
    to_ours(gold, tmp_path)
    to_theirs(gold, tmp_path, tmp_path, Mesh(**{a: config[a] for a in ("pp", "dp", "ep", "cp", "tp")}))
    for made in ("ours", "theirs"):
        assert xla_ckpt.verify(tmp_path, made).ok
        target = Target(gold)
        xla_ckpt.load_checkpoint(tmp_path, made, target.model, target.optimizer)
        assert not target.differences()
    if "legacy" in case:
        return
    stored = gold.root / tag
    assert names(tmp_path / "theirs") == names(stored)
    for name in rank_files(stored):
        if "ep_rank_01" in name and not name.endswith("info.pt"):
            continue  # it names tensors of ep_rank_00's folder, which torch_xla alone does not find
        assert not differences(content(stored / name), content(tmp_path / "theirs" / name), name)
    for name in names(stored):
        if ".tensors/" in name:
            assert not differences(content(stored / name), content(tmp_path / "theirs" / name), name)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> tuple[Gold, Path]:
    """A checkpoint of theirs, and a root with the same in our format."""
    gold, root = Gold("tp2_pp2_dp2_z1m__xser_sync", "step_40"), tmp_path_factory.mktemp("ours")
    to_ours(gold, root)
    return gold, root


@pytest.mark.parametrize("mesh", ["dp=3", "tp=2", "pp=2,dp=3,tp=2", "dp=2,tp=4"])
def test_for_another_topology_and_read_as_neuronx_distributed_would(
    ours: tuple[Gold, Path], mesh: str, tmp_path: Path
) -> None:
    """The manifest is taken away: what is left are its files alone."""
    gold, root = ours
    to_theirs(gold, root, tmp_path, Mesh.parse(mesh))
    as_theirs(tmp_path / "theirs")
    target = Target(gold)
    assert xla_ckpt.verify(tmp_path, "theirs").ok
    xla_ckpt.load_checkpoint(tmp_path, "theirs", target.model, target.optimizer)
    assert not target.differences()


def test_a_conversion_needs_to_know_how_arrays_were_split(tmp_path: Path) -> None:
    gold = Gold("tp2_dp2__pt_sync", "step_40")
    rules = [("embed|lm_head|[qkv]_proj|gate_proj|up_proj", ("tp",)), ("o_proj|down_proj", (None, "tp")), ("", None)]
    refused: list[dict[str, Any]] = [{}, {"shardings": rules}]
    for more in refused:  # the last of the rules is not true of the states
        with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="numbers its parameters"):
            xla_ckpt.convert(gold.root, tmp_path / "new", **more)
    target = Target(gold)
    report = xla_ckpt.convert(gold.root, tmp_path / "all", model=target.model, optimizer=target.optimizer)
    loaded = Target(gold)
    xla_ckpt.load_checkpoint(tmp_path / "all", report.tag, loaded.model, loaded.optimizer)
    assert not loaded.differences()
    shutil.copytree(gold.root / "step_40", tmp_path / "model/step_40", ignore=shutil.ignore_patterns("optim"))
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="ambiguous how this array was split"):
        xla_ckpt.convert(tmp_path / "model", tmp_path / "new", to="native")
    assert not (tmp_path / "new").exists()
    xla_ckpt.convert(tmp_path / "model", tmp_path / "new", to="native", shardings=rules)
    weights: dict[str, object] = {}
    xla_ckpt.load_checkpoint(tmp_path / "new", model=weights)
    truth = {**gold.truth["params"], **gold.truth["buffers"]}
    assert not differences(truth, weights, order=False)


def test_rows_are_not_dealt_out_of_states_without_a_parameter(tmp_path: Path) -> None:
    gold = Gold("tp1__pt_sync", "step_40")
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="the parameter that this belongs to is not known"):
        xla_ckpt.convert(gold.root, tmp_path / "new", to="xser", mesh="dp=2", zero1=True)
    assert not (tmp_path / "new").exists()
    target, loaded = Target(gold), Target(gold)
    more: dict[str, Any] = {"model": target.model, "optimizer": target.optimizer}
    xla_ckpt.convert(gold.root, tmp_path / "new", to="xser", mesh="dp=2", zero1=True, **more)
    as_theirs(tmp_path / "new/step_40")
    xla_ckpt.load_checkpoint(tmp_path / "new", "step_40", loaded.model, loaded.optimizer)
    assert not loaded.differences()


def test_what_neuronx_distributed_lost_is_not_converted(tmp_path: Path) -> None:
    gold = Gold(LOST, "step_40")
    target = Target(gold)
    xla_ckpt.export_hf(gold.root, tmp_path / "hf", model=target.model)  # the model is whole
    exported = safetensors.torch.load_file(tmp_path / "hf/model.safetensors")
    assert not differences({**gold.truth["params"], **gold.truth["buffers"]}, exported, order=False)
    with pytest.raises(xla_ckpt.CorruptCheckpointError, match="the others are missing"):
        xla_ckpt.convert(gold.root, tmp_path / "new", to="native", model=target.model, optimizer=target.optimizer)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("described_in", [torch.bfloat16, torch.float32])
def test_a_model_of_the_masters_type_takes_the_masters_of_a_converted_tag(
    tmp_path: Path, described_in: torch.dtype
) -> None:
    """As it does of the tag that neuronx-distributed wrote, and one of the weights' type takes the weights.

    The conversion keeps both, whichever of the two types the model has that it is given.
    """
    gold = Gold("tp2_dp2_z1m__pt_sync", "step_40")
    to_ours(gold, tmp_path, dtype=described_in)
    to_theirs(gold, tmp_path, tmp_path, Mesh(dp=2, tp=2))
    for tag in ("ours", "theirs"):
        for cast in (False, True):
            target = Target(gold, dtype=torch.float32)
            xla_ckpt.load_checkpoint(tmp_path, tag, target.model, target.optimizer, cast=cast)
            assert not target.differences("master")
        target = Target(gold)
        xla_ckpt.load_checkpoint(tmp_path, tag, target.model, target.optimizer)
        assert not target.differences("params")


def test_programs_that_know_no_master_weights_get_them_as_weights_if_the_model_has_their_type(tmp_path: Path) -> None:
    gold = Gold("tp2_dp2_z1m__pt_sync", "step_40")
    for dtype, part in ((torch.float32, "master"), (torch.bfloat16, "params")):
        target = Target(gold, dtype=dtype)
        file = tmp_path / f"{part}.pt"
        xla_ckpt.convert(gold.root, file, to="torch", model=target.model, optimizer=target.optimizer)
        weights = torch.load(file, weights_only=True)["model"]
        assert not differences(gold.truth[part], {name: weights[name] for name in gold.truth[part]}, order=False)


def test_a_comparison_is_of_the_weights_whatever_the_type_of_the_model(tmp_path: Path) -> None:
    gold = Gold("tp2_dp2_z1m__pt_sync", "step_40")
    target = Target(gold, dtype=torch.float32)
    file = tmp_path / "masters.pt"
    xla_ckpt.convert(gold.root, file, to="torch", model=target.model, optimizer=target.optimizer)
    found = xla_ckpt.diff(file, gold.root, leaf="model", model=target.model, optimizer=target.optimizer)
    assert found.retyped["model/lm_head.weight"] == ("float32 [96, 64]", "bfloat16 [96, 64]")


def test_master_weights_have_no_place_without_zero1(tmp_path: Path) -> None:
    gold = Gold("tp2_pp2_dp2_z1m__xser_sync", "step_40")
    target = Target(gold)
    xla_ckpt.convert(gold.root, tmp_path, model=target.model, optimizer=target.optimizer)
    with pytest.raises(xla_ckpt.UsageError, match="master weights have a place in ZeRO-1 files only"):
        xla_ckpt.convert(tmp_path, tmp_path, to="pt", as_tag="b", mesh="tp=2", zero1=False)
    assert xla_ckpt.list_tags(tmp_path) == ["step_40"]
