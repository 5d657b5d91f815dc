"""Models of transformers in MaxText's form and back: the trees are those that MaxText's own code makes.

`tests/fixtures/maxtext/trees.json` was written by `tests/fixtures/maxtext/make.py`, with MaxText as of 22 August 2026.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file

import xla_ckpt
from tests.formats.test_orbax_names import forgotten
from tests.runs import ROOT
from xla_ckpt.cli.main import main
from xla_ckpt.formats.orbax.maxtext import get_rules_for_config

pytestmark = pytest.mark.usefixtures(forgotten.__name__)

TREES: dict[str, dict[str, list[int]]] = json.loads((ROOT / "tests/fixtures/maxtext/trees.json").read_text())

SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 96, "num_hidden_layers": 3,
}  # fmt: skip
CLASSES: dict[str, Any] = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {"tie_word_embeddings": False}),
    "mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM, {}),
    "gemma": (transformers.GemmaConfig, transformers.GemmaForCausalLM, {}),
    "gemma2": (transformers.Gemma2Config, transformers.Gemma2ForCausalLM, {"num_hidden_layers": 6}),
    "gemma3_text": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM, {"num_hidden_layers": 8}),
}
"""The class of the configuration, that of the model, and in which sizes it differs."""


def model_of(family: str) -> Any:
    """A small model, whose norms are no zeros."""
    config, model, about = CLASSES[family]
    new = model(config(**{**SIZES, **about}))
    torch.manual_seed(len(family))
    for name, parameter in new.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.1)
    return new


def registered(family: str, model: Any, **about: Any) -> None:
    rope = "halves" if family in ("llama", "mistral") else None
    xla_ckpt.register_names(xla_ckpt.maxtext_names(rope, config=model.config.to_dict(), **about))


def written(folder: Path, model: Any) -> Path:
    """A step in MaxText's form of what transformers wrote."""
    model.save_pretrained(folder / "hf")
    xla_ckpt.convert(folder / "hf", folder / "run", to="orbax-model", as_tag="0")
    return folder / "run"


def saved_by_orbax(run: Path) -> Path:
    """What orbax restores of it, saved by orbax: the rules are for what other libraries wrote."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(run / "theirs", ocp.PyTreeCheckpointer().restore(run / "0"))
    return run / "theirs"


def shapes(tree: Any, path: str = "") -> dict[str, list[int]]:
    """Path -> shape of each array."""
    if not isinstance(tree, dict):
        return {path.removeprefix("/"): [*tree.shape]}
    return {p: shape for key, value in tree.items() for p, shape in shapes(value, f"{path}/{key}").items()}


@pytest.mark.parametrize("name", [*TREES])
def test_orbax_restores_maxtexts_own_tree(tmp_path: Path, name: str) -> None:
    family, _, form = name.partition("-")
    model = model_of(family)
    registered(family, model, scan_layers=form != "apart")
    tree = ocp.PyTreeCheckpointer().restore(written(tmp_path, model) / "0")
    assert [*tree] == ["params"]
    assert shapes(tree["params"]["params"]) == TREES[name]


@pytest.mark.parametrize("scan_layers", [True, False])
@pytest.mark.parametrize("family", [*CLASSES])
def test_there_and_back(tmp_path: Path, family: str, *, scan_layers: bool) -> None:
    """What only changes places is the same, bit for bit; what is computed is rounded there and back."""
    model = model_of(family)
    registered(family, model, scan_layers=scan_layers)
    again = CLASSES[family][1](model.config)
    xla_ckpt.load_checkpoint(saved_by_orbax(written(tmp_path, model)), model=again)
    for (name, one), other in zip(model.named_parameters(), again.parameters(), strict=True):
        if "norm" in name and family.startswith("gemma"):
            torch.testing.assert_close(one, other, rtol=0, atol=3e-7)
        else:  # roots of 16 and 64 are powers of two
            assert torch.equal(one, other), name


@pytest.mark.parametrize("family", [family for family in CLASSES if family != "llama"])
def test_a_model_says_its_names(tmp_path: Path, family: str) -> None:
    """Where MaxText has one way to store it. Rules that a program registers count more."""
    model = model_of(family)
    registered(family, model)
    run = saved_by_orbax(written(tmp_path, model))
    xla_ckpt.register_names([])
    again = CLASSES[family][1](model.config)
    xla_ckpt.load_checkpoint(run, model=again)
    assert torch.equal(again.model.layers[1].self_attn.v_proj.weight, model.model.layers[1].self_attn.v_proj.weight)
    assert "model" not in xla_ckpt.restore(run).tree
    xla_ckpt.register_names([("params/params/decoder/decoder_norm/scale", "model.norm.weight", "embed -> embed")])
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="embed_tokens"):
        xla_ckpt.load_checkpoint(run, model=again)


def test_a_model_that_maxtext_does_not_have(tmp_path: Path) -> None:
    """Another one than the checkpoint's: the error says what MaxText has."""
    model = model_of("gemma")
    registered("gemma", model)
    run = saved_by_orbax(written(tmp_path, model))
    xla_ckpt.register_names([])
    other = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16))
    with pytest.raises(xla_ckpt.UsageError, match="no names of MaxText's are known.*gpt2"):
        xla_ckpt.load_checkpoint(run, model=other)


def test_the_arithmetic_is_maxtexts(tmp_path: Path) -> None:
    """As its converter has it: norms with one added, queries and embeddings by roots, the last one in bfloat16."""
    config = transformers.Gemma3TextConfig(**{**SIZES, "hidden_size": 40, "num_hidden_layers": 6})
    model = transformers.Gemma3ForCausalLM(config)
    registered("gemma3_text", model)
    params = ocp.PyTreeCheckpointer().restore(written(tmp_path, model) / "0")["params"]["params"]
    embedding = model.model.embed_tokens.weight.detach().numpy()
    root = np.float32(torch.tensor(40**0.5, dtype=torch.bfloat16).item())
    np.testing.assert_allclose(params["token_embedder"]["embedding"], embedding * root, rtol=1e-6)
    norm = model.model.layers[5].input_layernorm.weight.detach().numpy()
    assert np.array_equal(
        params["decoder"]["layers"]["layers_5"]["pre_self_attention_norm"]["scale"][:, 0], norm + np.float32(1)
    )


@pytest.mark.parametrize(("family", "scan_layers"), [("llama", True), ("mixtral", False), ("gemma3_text", True)])
def test_what_was_written_is_a_model(tmp_path: Path, family: str, *, scan_layers: bool) -> None:
    """A tag has the rules by which it was written, so nobody has to say them again."""
    model = model_of(family)
    registered(family, model, scan_layers=scan_layers)
    run = written(tmp_path, model)
    xla_ckpt.register_names([])
    again = CLASSES[family][1](model.config)
    xla_ckpt.load_checkpoint(run, model=again)
    for (name, one), other in zip(model.named_parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=3e-7 if family.startswith("gemma") else 0, msg=name)
    xla_ckpt.export_hf(run, tmp_path / "again")
    with safe_open(tmp_path / "again/model.safetensors", "pt") as file:
        assert "model.layers.1.self_attn.q_proj.weight" in file.keys()  # noqa: SIM118  # it has no `in`
    shown = xla_ckpt.Checkpoints(run).show()
    assert any(array.leaf.startswith("params/params/decoder") for array in shown.arrays)


@pytest.mark.parametrize("damaged", ["names.json", "params.params.token_embedder.embedding/0.0"])
def test_what_was_written_is_verified(tmp_path: Path, damaged: str) -> None:
    """With the digests that a tag of ours has, though its elements are rearranged."""
    model = model_of("gemma")
    registered("gemma", model)
    file = written(tmp_path, model) / "0" / damaged
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert [problem.file for problem in xla_ckpt.verify(tmp_path / "run", "0").problems] == [damaged]
    with pytest.raises(xla_ckpt.CorruptCheckpointError, match=damaged):
        xla_ckpt.load_checkpoint(tmp_path / "run", model=CLASSES["gemma"][1](model.config))


def test_interleaved_there_and_back(tmp_path: Path) -> None:
    model = model_of("llama")
    xla_ckpt.register_names(xla_ckpt.maxtext_names("interleaved", config=model.config.to_dict()))
    run = written(tmp_path, model)
    kernel = ocp.PyTreeCheckpointer().restore(run / "0")["params"]["params"]["decoder"]["layers"]["self_attention"]
    stored = kernel["key"]["kernel"][:, 1]
    rows = model.model.layers[1].self_attn.k_proj.weight.detach().numpy().reshape(2, 2, 8, 64)
    assert np.array_equal(stored, rows.transpose(3, 0, 2, 1).reshape(64, 2, 16))
    again = CLASSES["llama"][1](model.config)
    xla_ckpt.load_checkpoint(saved_by_orbax(run), model=again)
    assert all(map(torch.equal, model.parameters(), again.parameters()))


def test_a_tag_of_ours_is_written_so(tmp_path: Path) -> None:
    """Its optimizer has no place there."""
    model = model_of("gemma2")
    xla_ckpt.save_checkpoint(tmp_path / "ours", "step", model, torch.optim.AdamW(model.parameters()))
    registered("gemma2", model)
    xla_ckpt.convert(tmp_path / "ours", tmp_path / "run", to="orbax-model", as_tag="0")
    assert xla_ckpt.verify(tmp_path / "run", "0").digests
    again = CLASSES["gemma2"][1](model.config)
    xla_ckpt.load_checkpoint(saved_by_orbax(tmp_path / "run"), model=again)
    assert torch.equal(again.model.layers[5].mlp.up_proj.weight, model.model.layers[5].mlp.up_proj.weight)


def hugging_face(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return folder


RULES = [("layers/w", "layers.{layer}.w", "in layer out -> out in")]


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ({"layers.0.w": (2, 3), "layers.2.w": (2, 3)}, "an array of the model is missing.*layers.1.w"),
        ({"layers.0.w": (2, 3), "other": (2,)}, "no rule of names gives an array of the model.*other"),
        ({"layers.0.w": (2, 3), "layers.1.w": (3, 3)}, "different shapes"),
        ({"layers.0.w": (2,)}, "does not have the dims"),
    ],
)
def test_models_that_do_not_fit(tmp_path: Path, tensors: dict[str, tuple[int, ...]], problem: str) -> None:
    source = hugging_face(tmp_path / "hf", {name: torch.ones(shape) for name, shape in tensors.items()})
    xla_ckpt.register_names(RULES)
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match=f"(?s){problem}"):
        xla_ckpt.convert(source, tmp_path / "run", to="orbax-model")
    assert not (tmp_path / "run" / "hf").exists()


def test_layers_of_two_types(tmp_path: Path) -> None:
    tensors = {"layers.0.w": torch.ones(2, 3), "layers.1.w": torch.ones(2, 3, dtype=torch.float64).to(torch.int32)}
    xla_ckpt.register_names(RULES)
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="different types"):
        xla_ckpt.convert(hugging_face(tmp_path / "hf", tensors), tmp_path / "run", to="orbax-model")


def test_without_rules(tmp_path: Path) -> None:
    source = hugging_face(tmp_path / "hf", {"w": torch.ones(2)})
    with pytest.raises(xla_ckpt.UsageError, match=r"register_names.*maxtext_names\(config"):
        xla_ckpt.convert(source, tmp_path / "run", to="orbax-model")


@pytest.mark.parametrize("family", ["gemma2", "mixtral"])
def test_the_configuration_in_the_folder_says_the_names(tmp_path: Path, family: str) -> None:
    model = model_of(family)
    registered(family, model)
    expected = shapes(ocp.PyTreeCheckpointer().restore(written(tmp_path, model) / "0"))
    xla_ckpt.register_names([])
    assert main(["convert", str(tmp_path / "hf"), str(tmp_path / "again"), "--to", "orbax-model", "--as", "0"]) == 0
    assert shapes(ocp.PyTreeCheckpointer().restore(tmp_path / "again/0")) == expected
    other = model_of(family)
    torch.nn.init.zeros_(other.lm_head.weight)
    xla_ckpt.load_checkpoint(tmp_path / "again", "0", model=other)
    for name, value in model.state_dict().items():  # norms of Gemma's are rounded, since one is added
        assert torch.allclose(value, other.state_dict()[name], atol=1e-6), name


def test_the_configuration_in_the_folder_does_not_say_how_heads_turn(tmp_path: Path) -> None:
    model_of("llama").save_pretrained(tmp_path / "hf")
    with pytest.raises(xla_ckpt.UsageError, match="several ways to store a llama"):
        xla_ckpt.convert(tmp_path / "hf", tmp_path / "run", to="orbax-model")
    assert not (tmp_path / "run").exists()


def test_large_tables_are_cut_into_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xla_ckpt.formats.orbax.renamed_model.MAX_CHUNK_BYTES", 100)
    table = torch.arange(35, dtype=torch.float32).reshape(7, 5)
    xla_ckpt.register_names([("table", "w", "vocab embed -> vocab embed * 2")])
    xla_ckpt.convert(hugging_face(tmp_path / "hf", {"w": table}), tmp_path / "run", to="orbax-model", as_tag="0")
    assert json.loads((tmp_path / "run/0/table/.zarray").read_text())["chunks"] == [3, 5]
    assert np.array_equal(ocp.PyTreeCheckpointer().restore(tmp_path / "run/0")["table"], table.numpy() / 2)


def test_a_chunk_is_one_region(tmp_path: Path) -> None:
    """However many rows of the stored array it has a part of: real models have 4096 of them, in each layer."""
    tensors = {f"layers.{n}.w": torch.full((2, 4096), float(n)) for n in range(20)}
    xla_ckpt.register_names(RULES)
    xla_ckpt.convert(hugging_face(tmp_path / "hf", tensors), tmp_path / "run", to="orbax-model", as_tag="0")
    assert [array.shards for array in xla_ckpt.Checkpoints(tmp_path / "run").show().arrays] == [20]
    tree = ocp.PyTreeCheckpointer().restore(tmp_path / "run/0")
    assert (tree["layers"]["w"] == np.arange(20)[None, :, None]).all()


@pytest.mark.parametrize(
    ("about", "problem"),
    [
        ({"model_type": "gemma4"}, "did you mean"),
        ({"model_type": "llama"}, "halves or interleaved"),
        ({"model_type": "gemma2", "head_dim": "16"}, "a number for head_dim"),
    ],
)
def test_configurations_that_are_refused(about: dict[str, Any], problem: str) -> None:
    with pytest.raises(xla_ckpt.UsageError, match=problem):
        xla_ckpt.maxtext_names(config=about)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"head_dim": 8}, r"embed layer:\d+ head:\d+ dim:8|\(head:\d+ dim:8\)"),
        ({"num_key_value_heads": 1}, r"head:1"),
        ({"num_hidden_layers": 8}, "as many arrays of a name as the rule says"),
    ],
)
def test_a_configuration_of_another_model_is_refused(tmp_path: Path, change: dict[str, Any], problem: str) -> None:
    model = model_of("gemma2")
    model.save_pretrained(tmp_path / "hf")
    xla_ckpt.register_names(xla_ckpt.maxtext_names(config={**model.config.to_dict(), **change}))
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match=problem):
        xla_ckpt.convert(tmp_path / "hf", tmp_path / "run", to="orbax-model", as_tag="0")
    xla_ckpt.register_names(xla_ckpt.maxtext_names(config=model.config))
    xla_ckpt.convert(tmp_path / "hf", tmp_path / "run", to="orbax-model", as_tag="0")


@pytest.mark.parametrize(("config", "problem"), [("config.json", "is no configuration"), (3, "is no configuration")])
def test_what_is_no_configuration(config: Any, problem: str) -> None:
    with pytest.raises(xla_ckpt.UsageError, match=problem):
        xla_ckpt.maxtext_names(config=config)


def test_half_a_layer_of_maxtexts() -> None:
    config = {"model_type": "gemma2", "num_hidden_layers": 3}
    with pytest.raises(xla_ckpt.UsageError, match="a layer of a gemma2 in MaxText is 2 of transformers'"):
        xla_ckpt.maxtext_names(config=config)


def test_rules_are_parsed_once() -> None:
    """A conversion asks for them when it makes the tree, and when it writes them beside it."""
    config = transformers.GemmaConfig(num_hidden_layers=2).to_dict()
    once, again = get_rules_for_config(config), get_rules_for_config(config)
    assert len(once) > 10
    assert all(rule is same for rule, same in zip(once, again, strict=True))
