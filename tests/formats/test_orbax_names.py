"""Models that a program of jax saved with orbax, under the names and in the form of a model of torch."""

from __future__ import annotations

import itertools
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

import xla_ckpt
from tests.formats import jax_llama, scanned_memory
from tests.formats.orbax_saves import eight_devices
from tests.formats.writing import as_job
from tests.runs import ROOT
from xla_ckpt import Mesh
from xla_ckpt.core.sharding.box import Box
from xla_ckpt.formats.orbax import name_rules, virtual_files
from xla_ckpt.formats.orbax.name_rules import Renaming, find_renaming, parse_name_rules


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """No test has the rules of another one."""
    yield
    xla_ckpt.register_names([])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the small Llama, saved by orbax over eight devices, cut in three ways."""
    folder = tmp_path_factory.mktemp("llama")
    command = [sys.executable, "-W", "ignore", "-m", "tests.formats.jax_llama", str(folder)]
    subprocess.run(command, cwd=ROOT, env=eight_devices(), check=True)
    return folder


def llama() -> LlamaForCausalLM:
    """The same model in transformers, with other weights."""
    config = LlamaConfig(
        vocab_size=jax_llama.VOCAB,
        hidden_size=jax_llama.HIDDEN,
        num_hidden_layers=jax_llama.LAYERS,
        num_attention_heads=jax_llama.HEADS,
        num_key_value_heads=jax_llama.KV_HEADS,
        head_dim=jax_llama.HEAD,
        intermediate_size=jax_llama.INNER,
        rope_theta=jax_llama.THETA,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).eval()


def check_numbers(model: LlamaForCausalLM) -> None:
    """Compare what transformers makes of tokens with what the program of jax makes of them."""
    tokens = np.array([3, 1, 4, 1, 5, 9, 2, 6])
    with torch.no_grad():
        actual = model(torch.tensor(tokens)[None]).logits[0].numpy()
    np.testing.assert_allclose(actual, jax_llama.logits(jax_llama.params(), tokens), atol=1e-5)


@pytest.mark.parametrize("name", ["first", "last", "whole"])
def test_a_model_of_transformers_says_the_same(saved: Path, name: str) -> None:
    xla_ckpt.register_names(jax_llama.RULES)
    model = llama()
    xla_ckpt.load_checkpoint(saved / name, model=model)
    check_numbers(model)


def test_what_is_no_model_stays(saved: Path) -> None:
    xla_ckpt.register_names(jax_llama.RULES[:2])
    tree = xla_ckpt.restore(saved / "first").tree
    assert tree["step"] == 3
    assert sorted(tree["model"]) == ["model.embed_tokens.weight", "model.norm.weight"]
    assert "embedder" not in tree["params"]
    assert tree["params"]["decoder"]["logits"]["kernel"].shape == (jax_llama.HIDDEN, jax_llama.VOCAB)


def test_each_chunk_is_decoded_once(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk has a part of each layer. It is not decoded for each of them."""
    decoded: list[tuple[str, str]] = []
    ordered = Renaming.to_model_order
    monkeypatch.setattr(
        Renaming,
        "to_model_order",
        lambda self, a, chunk: decoded.append((self.leaf, str(chunk))) or ordered(self, a, chunk),
    )
    xla_ckpt.register_names(jax_llama.RULES)
    xla_ckpt.load_checkpoint(saved / "first", model=llama())
    assert len(decoded) == len(set(decoded)) > 11


def test_a_chunk_is_kept_for_all_of_its_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversion that may take little memory comes back to a chunk for each layer. One chunk is kept at a time."""
    decoded: list[str] = []
    ordered = Renaming.to_model_order
    monkeypatch.setattr(Renaming, "to_model_order", lambda self, a, c: decoded.append(self.leaf) or ordered(self, a, c))
    monkeypatch.setattr(virtual_files, "CHUNK_CACHE_BYTES", 1)
    arrays = {name: np.arange(6 * 8 * 5, dtype=np.float32).reshape(6, 8, 5) + n for n, name in enumerate("vw")}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "run", arrays)
    xla_ckpt.register_names([(name, f"{{layer}}.{name}", "in layer out -> out in") for name in arrays])
    little = xla_ckpt.ConvertOptions(max_memory=100, num_workers=1)
    xla_ckpt.convert(tmp_path / "run", tmp_path / "native", to="native", as_tag="0", options=little)
    assert sorted(decoded) == ["v", "w"]
    model = xla_ckpt.restore(tmp_path / "native").tree["model"]
    assert all(np.array_equal(model[f"{n}.{k}"], array[:, n].T) for k, array in arrays.items() for n in range(8))


def test_what_memory_a_chunk_takes(tmp_path: Path) -> None:
    """It is decoded as a whole: once compressed and once not, and no copy of it is made for all layers."""
    nbytes, growth = scanned_memory.measured(tmp_path)
    assert nbytes < growth < 2.4 * nbytes


def test_another_topology(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    xla_ckpt.register_names(jax_llama.RULES)
    name = "model.layers.2.self_attn.q_proj.weight"
    whole = xla_ckpt.restore(saved / "last").tree["model"][name].numpy()
    like = {"model": {name: xla_ckpt.ArraySpec(whole.shape, torch.float32, sharding=("tp", None))}}
    parts = as_job(
        monkeypatch, Mesh(tp=2), "load", lambda rank: xla_ckpt.restore(saved / "last", like=like).tree["model"][name]
    )
    assert np.concatenate([part.numpy() for part in parts]).tobytes() == whole.tobytes()


def test_it_is_converted_and_exported(saved: Path, tmp_path: Path) -> None:
    xla_ckpt.register_names(jax_llama.RULES)
    model = llama()
    model.config.save_pretrained(tmp_path)
    xla_ckpt.convert(saved / "first", tmp_path / "native", to="native")
    xla_ckpt.export_hf(saved / "first", tmp_path / "hf", llama=xla_ckpt.LlamaJob(config=tmp_path / "config.json"))
    xla_ckpt.register_names([])
    assert xla_ckpt.verify(tmp_path / "native").digests
    xla_ckpt.load_checkpoint(tmp_path / "native", model=model)
    check_numbers(model)
    check_numbers(LlamaForCausalLM.from_pretrained(tmp_path / "hf").eval())


def test_paths_that_rules_have_taken_are_there_again_without_them(saved: Path) -> None:
    """The error named `params`, with the advice to make `like` as it was at the save, as which it was."""
    embedding = xla_ckpt.restore(saved).tree["params"]["embedder"]["embedding"]
    like = {"params": {"embedder": {"embedding": xla_ckpt.ArraySpec(tuple(embedding.shape), embedding.dtype)}}}
    xla_ckpt.register_names(jax_llama.RULES)
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match=r"those of `model`, .*register_names\(\[\]\)"):
        xla_ckpt.restore(saved, like=like)
    xla_ckpt.register_names([])
    assert xla_ckpt.restore(saved, like=like).tree["params"]["embedder"]["embedding"].shape == embedding.shape


def test_what_no_rule_gives_is_named(tmp_path: Path) -> None:
    """The error said to take the rules back, or to leave the biases as they are."""
    import orbax.checkpoint as ocp

    weight = np.arange(12, dtype=np.float32).reshape(4, 3)
    dense = {"kernel": weight, "bias": np.ones(3, np.float32)}
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=ocp.args.StandardSave({"params": {"dense": dense}, "step": 1}))
    model = torch.nn.Sequential(torch.nn.Linear(4, 3))
    rules = [("params/dense/kernel", "0.weight", "in out -> out in")]
    xla_ckpt.register_names(rules)
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError) as error:
        xla_ckpt.load_checkpoint(tmp_path, model=model)
    assert error.value.hint == (
        "No rule of register_names gives model/0.bias: add one. "
        "No rule is for these arrays of the tag: params/dense/bias."
    )
    bias = ("params/dense/bias", "0.bias", "out -> out")
    xla_ckpt.register_names([("params/dense/kernel", "0.weight", "in out -> in out"), bias])
    with pytest.raises(
        xla_ckpt.IncompatibleCheckpointError, match="pattern of a rule of register_names orders the dims"
    ):
        xla_ckpt.load_checkpoint(tmp_path, model=model)
    xla_ckpt.register_names([*rules, bias])
    xla_ckpt.load_checkpoint(tmp_path, model=model)
    assert (model[0].weight.tolist(), model[0].bias.tolist()) == (weight.T.tolist(), [1, 1, 1])


def test_a_model_of_jax_is_recognised_in_an_item_of_any_name(tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path) as manager:
        state = ocp.args.StandardSave({"params": {"kernel": np.ones((4, 3), np.float32)}, "step": 1})
        manager.save(1, args=ocp.args.Composite(state=state, meta=ocp.args.JsonSave({"lr": 0.1})))
    xla_ckpt.register_names([])
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match=r"state, meta \(are they those of a model of jax\?"):
        xla_ckpt.load_checkpoint(tmp_path, model=torch.nn.Linear(4, 3))


def test_rules_of_which_none_fits_are_named(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    xla_ckpt.register_names([("params/misspelt/kernel", "a.weight", "in out -> out in")])
    xla_ckpt.restore(saved)
    (told,) = [r.getMessage() for r in caplog.records if r.name.startswith("xla_ckpt")]
    assert "no rule of register_names is for an array of this checkpoint: params/misspelt/kernel. Its arrays: " in told
    caplog.clear()
    xla_ckpt.register_names(jax_llama.RULES[:2])
    xla_ckpt.restore(saved)
    assert "no rule of register_names" not in caplog.text


def test_layers_of_their_own(tmp_path: Path) -> None:
    """Arrays that are not put together: the number of a layer is in the path."""
    import orbax.checkpoint as ocp

    kernels = [np.arange(6, dtype=np.float32).reshape(2, 3) + 10 * n for n in range(3)]
    tree = {"params": {f"layer_{n}": {"Dense_0": {"kernel": kernel}} for n, kernel in enumerate(kernels)}}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "a", tree)
    xla_ckpt.register_names([("params/layer_{n}/Dense_0/kernel", "{n}.weight", "in out -> out in")])
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 3, bias=False) for _ in range(3)))
    xla_ckpt.load_checkpoint(tmp_path / "a", model=model)
    for kernel, layer in zip(kernels, model, strict=True):
        assert np.array_equal(layer.weight.detach().numpy(), kernel.T)


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        (("a", "b"), "no (path, name, pattern)"),
        (("a", "b", "x y"), "one arrow"),
        (("a", "b", "x y -> y z"), "stands before it"),
        (("a", "b", "x x -> x"), "none stands twice"),
        (("a", "b", "x y -> x"), "the axis y is neither"),
        (("a", "{n}", "x -> x"), "'n'"),
        (("a", "b", "() x -> x"), "without axes"),
        (("a", "b", "3 x -> x"), "no axis"),
        (3, "no (path, name, pattern)"),
    ],
)
def test_rules_that_make_no_sense(rule: Any, problem: str) -> None:
    with pytest.raises(xla_ckpt.UsageError, match=re.escape(problem)):
        xla_ckpt.register_names([rule])


@pytest.mark.parametrize("pattern", ["a b c -> c b a", "a -> a", "(a b:5) c -> c b a", "(a b) c -> c b a"])
def test_dims_that_an_array_does_not_have(saved: Path, pattern: str) -> None:
    xla_ckpt.register_names([("params/embedder/embedding", "w", pattern)])
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="does not have the dims"):
        xla_ckpt.restore(saved / "first")


def test_names_that_clash(saved: Path) -> None:
    rules = [(path, "w", "in out -> out in") for path in ("params/decoder/logits/kernel", "params/embedder/embedding")]
    xla_ckpt.register_names(rules)
    with pytest.raises(xla_ckpt.CheckpointError, match="w"):
        xla_ckpt.restore(saved / "whole")


def test_chunks_that_cut_a_pair(saved: Path) -> None:
    """Four chunks of two elements of a head: a pair of four is in two of them."""
    rule = (
        "params/decoder/layers/attention/query/kernel",
        "{layer}",
        "embed layer head (pair two:4) -> head two pair embed",
    )
    xla_ckpt.register_names([rule])
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="ends inside of the axes pair two"):
        xla_ckpt.restore(saved / "last")


def test_a_model_without_rules(saved: Path) -> None:
    with pytest.raises(xla_ckpt.CheckpointError, match=r"holds params, step .*xla_ckpt\.register_names"):
        xla_ckpt.load_checkpoint(saved / "first", model=torch.nn.Linear(2, 2))


def test_parts_without_number(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hostile file may say any number of layers."""
    monkeypatch.setattr(name_rules, "MAX_MODEL_PARTS", 15)
    xla_ckpt.register_names(jax_llama.RULES)
    with pytest.raises(xla_ckpt.CorruptCheckpointError, match="too many parts"):
        xla_ckpt.restore(saved / "first")


@given(st.data())
def test_the_parts_of_chunks_are_the_arrays(data: st.DataObject) -> None:
    """Whatever axes there are, and wherever chunks cut them: the parts are what numpy makes of the whole."""
    axes = "abcde"[: data.draw(st.integers(1, 5))]
    sizes = {axis: data.draw(st.integers(1, 4)) for axis in axes}
    before = _grouped(data, list(axes))
    kept = data.draw(st.permutations(axes))[data.draw(st.integers(0, len(axes) - 1)) :]
    after = _grouped(data, list(kept))
    numbers = [axis for axis in axes if axis not in kept]
    text = [" ".join(f"({' '.join(f'{a}:{sizes[a]}' for a in g)})" for g in groups) for groups in (before, after)]
    rules = parse_name_rules([("w", "".join(f"{{{axis}}}." for axis in numbers), f"{text[0]} -> {text[1]}")])
    shape = [math.prod(sizes[axis] for axis in group) for group in before]
    inner = [math.prod(sizes[axis] for axis in group[1:]) for group in before]
    chunk = [data.draw(st.integers(1, n // k)) * k for n, k in zip(shape, inner, strict=True)]
    whole = np.arange(math.prod(shape)).reshape(shape)
    of = find_renaming(rules, "w", shape, chunk, "w")
    assert of is not None
    arrays: dict[str, Any] = {}
    for low in itertools.product(*(range(0, n, k) for n, k in zip(shape, chunk, strict=True))):
        box = Box(low, tuple(min(a + k, n) for a, k, n in zip(low, chunk, shape, strict=True)))
        index = tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
        elements, at = of.to_model_values(of.to_model_order(whole[index], box)).reshape(-1), 0
        assert np.array_equal(of.to_stored(elements, box), whole[index])  # its own inverse
        for name, part in of.iterate_parts(box):
            array = arrays.setdefault(name, np.full(of.shape, -1))
            array[tuple(slice(a, b) for a, b in zip(part.start, part.stop, strict=True))] = elements[
                at : at + part.size
            ].reshape(part.shape)
            at += part.size
        assert at == box.size
    split = whole.reshape([sizes[axis] for axis in axes]).transpose([axes.index(a) for a in [*numbers, *kept]])
    for number in itertools.product(*(range(sizes[axis]) for axis in numbers)):
        assert np.array_equal(arrays["".join(f"{n}." for n in number)], split[number].reshape(of.shape))


def _grouped(data: st.DataObject, axes: list[str]) -> list[list[str]]:
    """The axes, in their order, as dims."""
    groups: list[list[str]] = []
    for axis in axes:
        if groups and data.draw(st.booleans()):
            groups[-1].append(axis)
        else:
            groups.append([axis])
    return groups


def test_a_path_may_begin_with_the_name_of_an_item(tmp_path: Path) -> None:
    """Weights and their average have the same paths: a rule without an item would take both for one array."""
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        trees = {name: {"dense": {"kernel": np.full((4, 8), value)}} for name, value in (("ema", 2.0), ("params", 1.0))}
        manager.save(1, args=ocp.args.Composite(**{name: ocp.args.StandardSave(tree) for name, tree in trees.items()}))
    model = torch.nn.Linear(4, 8, bias=False)
    xla_ckpt.register_names([("dense/kernel", "weight", "in out -> out in")])
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match=r"weight in the items ema and params.*ema/dense"):
        xla_ckpt.load_checkpoint(tmp_path / "run", model=model, cast=True)
    xla_ckpt.register_names([("params/dense/kernel", "weight", "in out -> out in")])
    xla_ckpt.load_checkpoint(tmp_path / "run", model=model, cast=True, strict=False)
    assert (model.weight == 1.0).all()
