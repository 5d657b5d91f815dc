"""Models in the form in which MaxText saves them, loaded into those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import torch
from transformers import LlamaForCausalLM, MistralConfig, MistralForCausalLM

import xla_ckpt
from tests.formats import jax_llama
from tests.formats.test_orbax_names import check_numbers, forgotten, llama

pytestmark = pytest.mark.usefixtures(forgotten.__name__)

NAMES = {
    "attention": "self_attention",
    "gate": "wi_0",
    "up": "wi_1",
    "down": "wo",
    "norm_0": "pre_self_attention_layer_norm",
    "norm_1": "post_self_attention_layer_norm",
    "norm": "decoder_norm",
    "logits": "logits_dense",
    "embedder": "token_embedder",
}
"""What `jax_llama` calls a part of the model -> what MaxText does."""

Rope = Literal["halves", "interleaved"]
Form = Literal["scanned", "named", "listed"]


def renamed(tree: Any) -> Any:
    """A tree of `jax_llama` under MaxText's names."""
    return {NAMES.get(k, k): renamed(v) for k, v in tree.items()} if isinstance(tree, dict) else tree


def each(tree: Any, what: Any) -> Any:
    """A tree with something else in the place of each array."""
    return {k: each(v, what) for k, v in tree.items()} if isinstance(tree, dict) else what(tree)


def parameters(rope: Rope, form: Form = "scanned") -> dict[str, Any]:
    """The parameters of the small Llama of `jax_llama`, in MaxText's form."""
    params: dict[str, Any] = renamed(jax_llama.params()["params"])
    decoder = params["decoder"]
    attention = decoder["layers"]["self_attention"]
    attention["query"]["kernel"] = attention["query"]["kernel"] / np.sqrt(np.float32(jax_llama.HEAD))
    if rope == "halves":
        for name in ("query", "key"):
            kernel = attention[name]["kernel"]
            attention[name]["kernel"] = np.concatenate([kernel[..., ::2], kernel[..., 1::2]], -1)
    if form != "scanned":
        layers = decoder.pop("layers")
        alone = {n: each(layers, lambda array, n=n: array.take(n, 1)) for n in range(jax_llama.LAYERS)}
        decoder |= {"layers": {str(n): v for n, v in alone.items()}} if form == "listed" else {
            f"layers_{n}": v for n, v in alone.items()
        }  # fmt: skip
    return params


def saved(folder: Path, tree: Any) -> Path:
    """A checkpoint of orbax's."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "run", tree)
    return folder / "run"


def trained(run: Path, params: Any, *steps: int) -> Path:
    """A run as training saves it: steps of a manager's, with moments that have the names of the parameters, too."""
    with ocp.CheckpointManager(run / "checkpoints", item_names=("items",)) as manager:
        for step in steps:
            state = {"params": {"params": params}, "opt_state": [{"mu": {"params": params}, "count": 5}], "step": step}
            manager.save(step, args=ocp.args.Composite(items=ocp.args.PyTreeSave(state)))
    return run


@pytest.mark.parametrize("rope", ["halves", "interleaved"])
@pytest.mark.parametrize("form", ["scanned", "named", "listed"])
def test_a_run_as_training_saves_it(tmp_path: Path, rope: Rope, form: Form) -> None:
    run = trained(tmp_path / "run", parameters(rope, form), 3)
    xla_ckpt.register_names(xla_ckpt.maxtext_names(rope))
    model = llama()
    xla_ckpt.load_checkpoint(run / "checkpoints", model=model)
    check_numbers(model)


def test_the_directory_of_a_run(tmp_path: Path) -> None:
    """Its steps are its tags, though they lie below a directory of their own."""
    run = trained(tmp_path / "run", parameters("halves"), 9, 10)
    (run / "tensorboard").mkdir()
    assert xla_ckpt.has_checkpoint(run)
    assert xla_ckpt.list_tags(run) == ["9", "10"]
    assert xla_ckpt.verify(run, "9").ok
    assert xla_ckpt.restore(run).tree["step"] == 10
    assert xla_ckpt.restore(run, "9").tree["step"] == 9
    assert xla_ckpt.restore(run / "checkpoints/9").tree["step"] == 9
    xla_ckpt.register_names(xla_ckpt.maxtext_names("halves"))
    model = llama()
    xla_ckpt.load_checkpoint(run, model=model)
    check_numbers(model)


def test_a_run_that_has_saved_nothing(tmp_path: Path) -> None:
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    assert not xla_ckpt.has_checkpoint(tmp_path / "run")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/checkpoints").write_text("a file")
    assert xla_ckpt.list_tags(tmp_path / "other") == []


@pytest.mark.parametrize("around", ["params", "nnx", "base"])
@pytest.mark.parametrize("form", ["scanned", "listed"])
def test_other_trees(tmp_path: Path, around: str, form: Form) -> None:
    params = parameters("halves", form)
    with_value = each(params, lambda array: {"value": array})
    tree = {"params": {"params": params}, "nnx": with_value, "base": {"base": with_value}}[around]
    xla_ckpt.register_names(xla_ckpt.maxtext_names("halves"))
    model = llama()
    xla_ckpt.load_checkpoint(saved(tmp_path, tree), model=model)
    check_numbers(model)


def test_a_mistral(tmp_path: Path) -> None:
    about = {k: v for k, v in llama().config.to_dict().items() if k not in ("model_type", "architectures")}
    model = MistralForCausalLM(MistralConfig(**about, sliding_window=None)).eval()
    xla_ckpt.register_names(xla_ckpt.maxtext_names("halves"))
    xla_ckpt.load_checkpoint(saved(tmp_path, {"params": {"params": parameters("halves")}}), model=model)
    check_numbers(model)


def test_the_wrong_order_is_another_model(tmp_path: Path) -> None:
    """So the order is asked for: nothing else would find it."""
    xla_ckpt.register_names(xla_ckpt.maxtext_names("halves"))
    model = llama()
    xla_ckpt.load_checkpoint(saved(tmp_path, {"params": {"params": parameters("interleaved")}}), model=model)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check_numbers(model)


@pytest.mark.parametrize("nnx", [False, True])
def test_the_order_is_asked_for(tmp_path: Path, *, nnx: bool) -> None:
    params = parameters("halves")
    path = saved(tmp_path, params if nnx else {"params": {"params": params}})
    with pytest.raises(xla_ckpt.CheckpointError, match=r"maxtext_names\(rope=\.\.\."):
        xla_ckpt.load_checkpoint(path, model=llama())


def test_an_order_that_there_is_not() -> None:
    with pytest.raises(xla_ckpt.UsageError, match="halves or interleaved"):
        xla_ckpt.maxtext_names("pairs")  # type: ignore[arg-type]


def test_it_is_exported(tmp_path: Path) -> None:
    """Hugging Face's files, whose model says the same."""
    path = saved(tmp_path, {"params": {"params": parameters("interleaved")}})
    llama().config.save_pretrained(tmp_path)
    xla_ckpt.register_names(xla_ckpt.maxtext_names("interleaved"))
    xla_ckpt.export_hf(path, tmp_path / "hf", llama=xla_ckpt.LlamaJob(config=tmp_path / "config.json"))
    check_numbers(LlamaForCausalLM.from_pretrained(tmp_path / "hf").eval())


@pytest.mark.parametrize("kind", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("by", ["sqrt(head dim)", "0.3"])
def test_elements_are_multiplied(tmp_path: Path, kind: Any, by: str) -> None:
    """In float32, or what is wider, and rounded once."""
    kernel = np.random.default_rng(3).standard_normal((5, 2, 3)).astype(kind)
    xla_ckpt.register_names([("w", "w", f"embed head dim -> (head dim) embed * {by}")])
    tensor = xla_ckpt.restore(saved(tmp_path, {"w": kernel})).tree["model"]["w"]
    wide = np.float64 if kind is np.float64 else np.float32
    product = kernel.astype(wide) * wide(np.sqrt(6) if by != "0.3" else 0.3)
    expected = product.astype(kind).reshape(5, 6).T.astype(np.float64)
    assert np.array_equal(tensor.to(torch.float64).numpy(), expected)


def test_integers_are_not_multiplied(tmp_path: Path) -> None:
    xla_ckpt.register_names([("w", "w", "a -> a * 0.5")])
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="no floating-point numbers"):
        xla_ckpt.restore(saved(tmp_path, {"w": np.arange(4)}))


@pytest.mark.parametrize(
    ("by", "problem"),
    [("sqrt(z)", "each axis of the factor"), ("two", "could not convert"), ("nan", "no factor"), ("0", "no factor"),
     ("", "could not convert"), ("sqrt()", "could not convert"), ("2 * 2", "more than a factor"),
     ("2 + x", "could not convert"), ("2 + 1 * 2", "more than a factor"), ("bfloat16(2)", "could not convert")],
)  # fmt: skip
def test_factors_that_make_no_sense(by: str, problem: str) -> None:
    with pytest.raises(xla_ckpt.UsageError, match=problem):
        xla_ckpt.register_names([("w", "w", f"a -> a * {by}")])
