"""Adapters in PEFT's layout, and back. `peft` itself judges where it can be imported."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import xla_ckpt
from tests.formats.test_gqa import KEYS, QUERIES, Attention
from tests.formats.test_layers import adapted, saves_adapters, state
from tests.jobs import run_on_ranks
from tests.neuron.standins import LoraConfig, LoraModel, NxDModel
from tests.same import differences
from xla_ckpt import Mesh
from xla_ckpt.cli.main import main

ARRAYS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."


def lora(seed: int, **options: Any) -> LoraModel:
    torch.manual_seed(seed)
    return LoraModel(torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3))), LoraConfig(**options))


def adapters(model: LoraModel) -> dict[str, torch.Tensor]:
    return {n: v for n, v in model.module.state_dict().items() if "lora_" in n}


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("peft")
    xla_ckpt.save_checkpoint(root / "run", "a", NxDModel(lora(0, base=True)))
    assert main(["convert", str(root / "run"), str(root / "peft"), "--to", "peft"]) == 0
    return root / "peft"


def test_the_files_of_peft_hold_the_adapters_alone(converted: Path) -> None:
    assert sorted(p.name for p in converted.iterdir()) == [CONFIG, ARRAYS]
    wanted = {PREFIX + n: v for n, v in adapters(lora(0)).items()}
    assert not differences(load_file(converted / ARRAYS), wanted, order=False)
    said = json.loads((converted / CONFIG).read_text())
    assert (said["peft_type"], said["r"], said["lora_alpha"], said["bias"]) == ("LORA", 2, 4, "none")
    assert said["target_modules"] == ["0", "1", "2"]


def test_peft_computes_with_them_what_the_job_did(converted: Path) -> None:
    peft = pytest.importorskip("peft", reason="PYTHONPATH names no folder with peft")
    model, inputs = lora(0), torch.randn(3, 4)
    base = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    base.load_state_dict(
        {n.replace(".base_layer", ""): v for n, v in model.module.state_dict().items() if "lora_" not in n}
    )
    theirs = peft.PeftModel.from_pretrained(base, converted)
    wanted = inputs
    for layer in model.module:
        wanted = layer.base_layer(wanted) + layer.lora_B(layer.lora_A(wanted)) * (4 / 2)
    assert torch.allclose(theirs(inputs), wanted, atol=1e-6)


def test_what_peft_saves_is_loaded(converted: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="PYTHONPATH names no folder with peft")
    base = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    theirs = peft.get_peft_model(
        base, peft.LoraConfig(r=2, lora_alpha=4, target_modules=["0", "1", "2"], revision="first")
    )
    theirs.save_pretrained(tmp_path / "theirs")
    xla_ckpt.convert(tmp_path / "theirs", tmp_path / "run")
    xla_ckpt.convert(tmp_path / "run", tmp_path / "back", to="peft")
    said, saying = (json.loads((tmp_path / folder / CONFIG).read_text()) for folder in ("back", "theirs"))
    assert said == saying
    assert said["revision"] == "first"
    model = lora(1)
    xla_ckpt.load_checkpoint(tmp_path / "theirs", model=NxDModel(model))
    held = load_file(tmp_path / "theirs" / ARRAYS)
    assert not differences({PREFIX + n: v for n, v in adapters(model).items()}, held, order=False)


def test_a_model_of_peft_s_own_names_is_told_who_loads_the_files(converted: Path) -> None:
    """It said to make the model as it was at the save."""
    of_peft = {"lora_A.weight": "lora_A.default.weight", "lora_B.weight": "lora_B.default.weight"}
    model = {}
    for name, value in lora(1, base=True).module.state_dict().items():
        layer, _, own = name.partition(".")
        model[f"{PREFIX}{layer}.{of_peft.get(own, own)}"] = value
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError) as caught:
        xla_ckpt.load_checkpoint(converted, model=model)
    assert f"PeftModel.from_pretrained(base, '{converted}')" in str(caught.value.hint)
    put_in = {name.removeprefix(PREFIX): value for name, value in model.items()}  # as transformers' add_adapter does
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match=r"PeftModel\.from_pretrained.*load_adapter\("):
        xla_ckpt.load_checkpoint(converted, model=put_in, strict=False)
    other = torch.nn.Sequential(torch.nn.Linear(4, 4))
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError) as caught:
        xla_ckpt.load_checkpoint(converted, model=other)
    assert "PeftModel" not in str(caught.value.hint)


def test_peft_s_own_model_becomes_what_it_saves_itself(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="PYTHONPATH names no folder with peft")
    base = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["0", "1"], modules_to_save=["2"]))
    model.save_pretrained(tmp_path / "theirs")
    for name, only in (("part", "adapters"), ("whole", None)):
        xla_ckpt.save_checkpoint(tmp_path / name, "a", model, only=only)
        model.peft_config["default"].save_pretrained(tmp_path / name)
        xla_ckpt.convert(tmp_path / name, tmp_path / f"{name}_peft", to="peft")
        ours, theirs = (load_file(tmp_path / folder / ARRAYS) for folder in (f"{name}_peft", "theirs"))
        assert not differences(ours, theirs, order=False)
        said, saying = (json.loads((tmp_path / f / CONFIG).read_text()) for f in (f"{name}_peft", "theirs"))
        assert said == {**saying, "auto_mapping": None}, "PEFT's model says its class in it, its configuration does not"


OF_PEFT = {
    "0.base_layer.weight": None, "0.lora_A.default.weight": "0.lora_A.weight",
    "0.lora_B.default.weight": "0.lora_B.weight", "0.lora_embedding_A.default": "0.lora_embedding_A",
    "2.original_module.weight": None, "2.modules_to_save.default.weight": "2.weight", "3.bias": None,
}  # fmt: skip
"""Names in the state of a model of PEFT's -> in its file; None for what is not in that."""


def saved_of_peft(root: Path, config: dict[str, Any] | None, *more: str) -> None:
    names = [PREFIX + name for name in (*OF_PEFT, *more)]
    xla_ckpt.save_checkpoint(root, "a", {name: torch.full((2,), float(i)) for i, name in enumerate(names)})
    if config is not None:
        (root / CONFIG).write_text(json.dumps(config))


def test_names_of_peft_s_own_model(tmp_path: Path) -> None:
    config = {"peft_type": "LORA", "r": 2, "rank_pattern": {"0": 1}, "inference_mode": False}
    saved_of_peft(tmp_path / "run", config)
    xla_ckpt.convert(tmp_path / "run", tmp_path / "peft", to="peft")
    files = {PREFIX + name: float(i) for i, name in enumerate(OF_PEFT.values()) if name is not None}
    assert {name: value[0].item() for name, value in load_file(tmp_path / "peft" / ARRAYS).items()} == files
    assert json.loads((tmp_path / "peft" / CONFIG).read_text()) == {**config, "inference_mode": True}


@pytest.mark.parametrize(
    ("config", "more", "message"),
    [
        (None, (), r"beside the tags.*peft_config\[.default.\]\.save_pretrained\(root\)"),
        ({"peft_type": "LORA"}, ("0.lora_A.other.weight",), "one adapter in a directory.*found default, other"),
        ({"peft_type": "LORA", "use_dora": True}, (), "what PEFT calls these adapters.*found use_dora"),
        ({"peft_type": "LORA", "bias": "all"}, (), "found LORA, with bias 'all'.*save_pretrained"),
        ({"peft_type": "IA3"}, (), "found IA3"),
    ],
)
def test_what_nothing_says_of_peft_s_own_model(
    tmp_path: Path, config: dict[str, Any] | None, more: tuple[str, ...], message: str
) -> None:
    saved_of_peft(tmp_path / "run", config, *more)
    with pytest.raises(xla_ckpt.CheckpointError, match=message):
        xla_ckpt.convert(tmp_path / "run", tmp_path / "peft", to="peft")
    assert not (tmp_path / "peft").exists()


def test_they_come_back_with_their_configuration(
    converted: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = lora(1)
    kept = model.module[0].base_layer.weight.clone()
    xla_ckpt.load_checkpoint(converted, model=NxDModel(model))
    assert not differences(adapters(model), adapters(lora(0)), order=False)
    assert torch.equal(model.module[0].base_layer.weight, kept)
    assert "another configuration" not in caplog.text
    other = lora(1)
    other.lora_config.fields["lora_alpha"] = 16
    xla_ckpt.load_checkpoint(converted, model=other)
    assert "the adapters were saved with another configuration: lora_alpha" in caplog.text
    xla_ckpt.convert(converted, tmp_path / "back", to="native", as_tag="a")
    xla_ckpt.convert(tmp_path / "back", tmp_path / "again", to="peft")
    for name in (ARRAYS, CONFIG):
        assert (tmp_path / "again" / name).read_bytes() == (converted / name).read_bytes()
    assert xla_ckpt.verify(converted).ok


SAID = {
    "alpha_pattern": {}, "auto_mapping": {"base_model_class": "Net", "parent_library": "net"}, "bias": "none",
    "base_model_name_or_path": "org/base", "fan_in_fan_out": True, "inference_mode": True, "init_lora_weights": "pissa",
    "layers_to_transform": [1, 10, 2], "loftq_config": {"$bits": [4, {"deep": None}]}, "lora_alpha": 16,
    "lora_bias": True, "lora_dropout": 0.05, "modules_to_save": ["head"], "peft_type": "LORA", "r": 2, "revision": "x",
    "target_modules": ["v", "q"], "task_type": "CAUSAL_LM", "use_dora": False, "use_rslora": True, "of_tomorrow": 1e-7,
}  # fmt: skip
"""A configuration of PEFT's, with much that neuronx-distributed's has no word for."""

SAVED = ("q.lora_A.weight", "q.lora_B.weight", "q.lora_B.bias", "v.lora_A.weight", "v.lora_B.weight", "head.weight")
EMBEDDING = "embed_tokens.weight"
"""Which PEFT saves, too, if the vocabulary has grown. Nothing in the configuration says so."""


@pytest.fixture
def of_peft(tmp_path: Path) -> Path:
    """A directory as PEFT itself saves it."""
    (tmp_path / "theirs").mkdir()
    names = [PREFIX + name for name in (*SAVED, EMBEDDING)]
    save_file({n: torch.full((2, 2), float(i)) for i, n in enumerate(names)}, tmp_path / "theirs" / ARRAYS)
    (tmp_path / "theirs" / CONFIG).write_text(json.dumps(SAID))
    return tmp_path / "theirs"


@pytest.mark.parametrize("by", [None, "native", "dcp", "torch_checkpointing"])
def test_a_directory_of_peft_comes_back_with_all_that_it_said(of_peft: Path, tmp_path: Path, by: str | None) -> None:
    """Of the configuration the words came back that neuronx-distributed has, too; and of the arrays the adapters."""
    source = of_peft
    if by is not None:
        xla_ckpt.convert(of_peft, tmp_path / "run", to=by, as_tag="step_1")
        source = tmp_path / "run"
    xla_ckpt.convert(source, tmp_path / "back", to="peft")
    assert json.loads((tmp_path / "back" / CONFIG).read_text()) == SAID
    assert not differences(load_file(tmp_path / "back" / ARRAYS), load_file(of_peft / ARRAYS), order=False)


def test_a_directory_of_peft_without_its_arrays(of_peft: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It was said that there is no tag of this library."""
    (of_peft / ARRAYS).unlink()
    for call in (xla_ckpt.restore, xla_ckpt.verify, lambda path: xla_ckpt.load_checkpoint(path, model=lora(0))):
        with pytest.raises(xla_ckpt.NoCheckpointError, match=rf"of PEFT's, {ARRAYS} is missing"):
            call(of_peft)
    assert main(["convert", str(of_peft), str(of_peft / "x"), "--to", "native"]) == 1
    assert f"{ARRAYS} is missing" in capsys.readouterr().err
    torch.save({"0.lora_A.weight": torch.ones(2)}, of_peft / "adapter_model.bin")  # as older versions of PEFT did
    with pytest.raises(xla_ckpt.NoCheckpointError, match=r"adapter_model\.bin: pass the path"):
        xla_ckpt.restore(of_peft)


@pytest.mark.parametrize("source", ["theirs", "of a job", "run"])
def test_adapters_alone_are_exported_as_no_model(of_peft: Path, tmp_path: Path, source: str) -> None:
    """They became a model.safetensors, and no word said that it is no model."""
    path = of_peft
    if source != "theirs":
        path = tmp_path / "run"
        if source == "run":
            xla_ckpt.convert(of_peft, path, as_tag="a")
        else:
            xla_ckpt.save_checkpoint(path, "a", lora(0))
    for export in (xla_ckpt.export_hf, partial(xla_ckpt.convert, to="safetensors")):
        with pytest.raises(xla_ckpt.UsageError, match=r"adapters of its model alone.*--to peft"):
            export(path, tmp_path / "hf")
        assert not (tmp_path / "hf").exists()
    xla_ckpt.save_checkpoint(tmp_path / "whole", "a", lora(0, base=True))
    xla_ckpt.export_hf(tmp_path / "whole", tmp_path / "hf")
    assert "0.base_layer.weight" in load_file(tmp_path / "hf/model.safetensors")


def test_what_peft_said_besides_is_no_difference_of_a_job_s_adapters(
    converted: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / ARRAYS).write_bytes((converted / ARRAYS).read_bytes())
    said = json.loads((converted / CONFIG).read_text())
    (tmp_path / "a" / CONFIG).write_text(json.dumps({**said, "task_type": "CAUSAL_LM", "lora_bias": False}))
    model = lora(1)
    xla_ckpt.load_checkpoint(tmp_path / "a", model=model)
    assert not differences(adapters(model), adapters(lora(0)), order=False)
    assert "another configuration" not in caplog.text
    xla_ckpt.save_checkpoint(tmp_path / "run", "b", model)  # it is the job's configuration now
    xla_ckpt.convert(tmp_path / "run", tmp_path / "again", to="peft")
    assert json.loads((tmp_path / "again" / CONFIG).read_text())["task_type"] is None


def test_adapters_over_tp_and_onto_it(tmp_path: Path) -> None:
    run_on_ranks(saves_adapters, 2, tmp_path, "pt")
    xla_ckpt.convert(tmp_path, tmp_path / "peft", "a", to="peft")
    (whole, _), (wanted, _) = adapted(1, Mesh(), 0), adapted(0, Mesh(), 0)
    xla_ckpt.load_checkpoint(tmp_path / "peft", model=whole)
    assert not differences(adapters(whole), adapters(wanted), order=False)
    split = [(r"0\.lora_B", ("tp", None)), (r"1\.lora_A", (None, "tp"))]
    xla_ckpt.convert(tmp_path / "peft", tmp_path / "run", to="pt", mesh="tp=2", as_tag="a", shardings=split)
    file = tmp_path / "run/a/model/dp_rank_00_tp_rank_01_pp_rank_00.pt"
    part = torch.load(file, weights_only=True)
    assert torch.equal(part["0.lora_B.weight"], wanted.module[0].lora_B.weight[4:])
    assert torch.equal(part["1.lora_A.weight"], wanted.module[1].lora_A.weight[:, 4:])


def as_nxd(tag: Path, **held: list[Any]) -> None:
    """A tag of neuronx-distributed's: what each tp rank has in the files of each kind."""
    for kind, of_ranks in held.items():
        (tag / kind).mkdir(parents=True)
        for rank, content in enumerate(of_ranks):
            torch.save(content, tag / kind / f"dp_rank_00_tp_rank_{rank:02d}_pp_rank_00.pt")
    for mark in ("checkpoint", "done"):
        (tag / mark).write_text("1")


def joined(root: Path) -> Any:
    """A tag of TP 2 as LoraModel writes it by default: joined adapters, states of each rank, no configuration."""
    whole = adapted(0, Mesh(), 0)
    states = [adapted(0, Mesh(tp=2), rank)[1].state_dict() for rank in range(2)]
    as_nxd(root / "lora", model=[adapters(whole[0])] * 2, optim=states)
    return whole


def test_joined_adapters_of_neuronx_distributed_load_with_their_optimizer(tmp_path: Path) -> None:
    wanted = joined(tmp_path)
    fresh = adapted(1, Mesh(), 0)
    xla_ckpt.load_checkpoint(tmp_path, "lora", *fresh)
    assert not differences(adapters(fresh[0]), adapters(wanted[0]), order=False)
    states = [{k: v for k, v in state(*of).items() if ".exp_avg" in k} for of in (fresh, wanted)]
    assert states[0]
    assert not differences(*states, order=False)


@pytest.mark.parametrize("equal", ["joined", "first part", "zeros", "none"])
def test_joined_adapters_of_queries_keys_and_values(tmp_path: Path, equal: str) -> None:
    model = torch.nn.Module()
    model.qkv = torch.nn.Module()
    model.qkv.lora_B = Attention(Mesh(), 0, copies=1)
    whole = torch.randn_like(model.qkv.lora_B.weight_qkv)
    sections = whole.split((QUERIES, KEYS, KEYS))
    parts = [torch.cat([s.chunk(2)[rank] for s in sections]) for rank in range(2)]
    files = {"joined": [torch.cat(parts)] * 2, "first part": [parts[0]] * 2, "none": parts}
    of_ranks = files.get(equal, [torch.zeros_like(parts[0])] * 2)
    as_nxd(tmp_path / "a", model=[{"qkv.lora_B.weight_qkv": held} for held in of_ranks])
    if equal in ("joined", "first part"):
        with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="joined the adapters of all ranks") as caught:
            xla_ckpt.load_checkpoint(tmp_path, "a", model=model)
        assert "merge_sharded_lora=False" in str(caught.value)
        return
    xla_ckpt.load_checkpoint(tmp_path, "a", model=model)
    assert torch.equal(model.qkv.lora_B.weight_qkv, whole if equal == "none" else torch.zeros_like(whole))


def test_lists_of_the_configuration_may_be_in_another_order_on_each_rank(tmp_path: Path) -> None:
    configs = [{"r": 2, "target_modules": order} for order in (["0", "1", "2"], ["2", "0", "1"])]
    as_nxd(tmp_path / "a", model=[{**adapters(lora(0)), "lora_config": config} for config in configs])
    model = lora(1)
    xla_ckpt.load_checkpoint(tmp_path, "a", model=model)
    assert not differences(adapters(model), adapters(lora(0)), order=False)


def test_the_configuration_beside_the_tags_of_neuronx_distributed(tmp_path: Path) -> None:
    wanted, _ = joined(tmp_path)
    with pytest.raises(xla_ckpt.UsageError, match="nothing says by what the adapters are scaled") as caught:
        xla_ckpt.convert(tmp_path, tmp_path / "peft", "lora", to="peft", model=wanted)
    assert CONFIG in str(caught.value)
    (tmp_path / CONFIG).write_text(json.dumps(wanted.lora_config.selected_fields_to_save()))
    xla_ckpt.convert(tmp_path, tmp_path / "peft", "lora", to="peft", model=wanted)
    assert json.loads((tmp_path / "peft" / CONFIG).read_text())["lora_alpha"] == 4
    held = load_file(tmp_path / "peft" / ARRAYS)
    assert not differences(held, {PREFIX + n: v for n, v in adapters(wanted).items()}, order=False)


@pytest.mark.parametrize(
    ("names", "error", "words"),
    [
        (["0.weight"], xla_ckpt.UsageError, "no adapters under the names by which PEFT finds them"),
        (["0.lora_A.weight"], xla_ckpt.UsageError, "nothing says by what the adapters are scaled"),
        (["q.lora_B.weight_qkv", "config"], xla_ckpt.UnsupportedStateError, "queries, keys and values in one layer"),
    ],
)
def test_what_peft_has_no_place_for(tmp_path: Path, names: list[str], error: type[Exception], words: str) -> None:
    held: dict[str, Any] = {name: torch.ones(2) for name in names if name != "config"}
    if "config" in names:
        held["lora_config"] = {"lora_rank": 2}
    xla_ckpt.save_checkpoint(tmp_path / "run", "a", held)
    with pytest.raises(error, match=words):
        xla_ckpt.convert(tmp_path / "run", tmp_path / "peft", to="peft")
    assert not (tmp_path / "peft").exists()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{", xla_ckpt.CorruptCheckpointError),
        ("[]", xla_ckpt.CorruptCheckpointError),
        ('{"r": "2"}', xla_ckpt.CorruptCheckpointError),
        ('{"r": 2, "bias": {"$object": 0}}', xla_ckpt.CorruptCheckpointError),
        ('{"r": 2, "peft_type": "IA3"}', xla_ckpt.UnsupportedStateError),
        ('{"r": 2, "use_dora": true}', xla_ckpt.UnsupportedStateError),
    ],
)
def test_a_configuration_that_is_none(tmp_path: Path, text: str, error: type[Exception]) -> None:
    (tmp_path / "a").mkdir()
    save_file({f"{PREFIX}0.lora_A.weight": torch.ones(2, 4)}, tmp_path / "a" / ARRAYS)
    (tmp_path / "a" / CONFIG).write_text(text)
    with pytest.raises(error, match=CONFIG):
        xla_ckpt.load_checkpoint(tmp_path / "a", model=lora(0))


@pytest.mark.parametrize("names", [("down.weight", "up.weight"), ("lora_A", "lora_B"), ("my_lora_down", "my_lora_up")])
def test_adapters_of_other_names_are_told_which_ones_peft_has(tmp_path: Path, names: tuple[str, str]) -> None:
    """The names were not said; or a configuration was asked for, which would not have helped."""
    xla_ckpt.save_checkpoint(tmp_path / "run", "a", {name: torch.ones(2, 2) for name in names})
    with pytest.raises(xla_ckpt.UsageError, match=r"such as q_proj\.lora_A\.weight.*found " + ", ".join(names)):
        xla_ckpt.convert(tmp_path / "run", tmp_path / "peft", to="peft")
    xla_ckpt.convert(tmp_path / "run", tmp_path / "out.pt", to="torch", part="model")  # as it says
    assert [*torch.load(tmp_path / "out.pt")] == [*names]
