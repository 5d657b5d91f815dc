"""What the library says of its arguments in Python, the command line says of its options."""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from tests.formats.gold import SMALL, Gold, Target
from xla_ckpt.cli.main import main
from xla_ckpt.cli.output import translate_to_options

PACKAGE = Path(xla_ckpt.__file__).parent

OF_PROGRAMS = (
    "arrays/", "cli/", "core/plan/merge.py", "dcp/", "distributed/", "features/local_first/host_commit.py",
    "features/products/product.py", "formats/orbax/maxtext.py", "integrations/", "loading/load.py", "options.py",
    "saving/merge.py", "saving/save.py", "snapshot/", "state/",
)  # fmt: skip
"""Modules whose errors only a program meets, in a save or a load of its own; and what has no arguments in Python."""

CALLS = (xla_ckpt.convert, xla_ckpt.explain, xla_ckpt.export_hf, xla_ckpt.diff)
ARGUMENTS = {name for call in CALLS for name in inspect.signature(call).parameters} - {"dtype"}
"""Arguments of what the command line calls, but one whose values it checks itself."""


def texts_of(module: ast.Module) -> Iterator[str]:
    """The sentences in the code of a module; what is put into them is left out."""
    bodies = [node.body for node in ast.walk(module) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
    documentation = {id(node.value) for body in bodies for node in body if isinstance(node, ast.Expr)}
    parts = {id(part) for node in ast.walk(module) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(module):
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "_" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation | parts:
            text = node.value
        else:
            continue
        if " " in text:
            yield text


def test_no_error_that_the_command_line_shows_speaks_of_an_argument() -> None:
    python = re.compile(rf"\b({'|'.join(sorted(ARGUMENTS))})=|\b(LlamaJob|convert|export_hf)\(")
    of_a_save = re.compile(r"SaveOptions\([^()]*\)|maxtext_names\([^()]*\)| is of another class$|^llama=")
    wrong, count = [], 0
    for file in sorted(PACKAGE.rglob("*.py")):
        name = file.relative_to(PACKAGE).as_posix()
        if name.startswith(OF_PROGRAMS):
            continue
        for text in texts_of(ast.parse(file.read_text())):
            count += "--" in text and python.search(text) is not None
            if python.search(of_a_save.sub("", translate_to_options(text))):
                wrong.append(f"{name}: {translate_to_options(text)}")
    assert not wrong
    assert count > 10, "the search finds sentences that speak of both"


NXD = SMALL / "tp2_dp2_z1m/ckpt"


def without_buffer() -> Any:
    """A model of a job whose class has stopped storing a buffer, and its optimizer."""
    target = Target(Gold("tp2_dp2_z1m__xser_small", "step_40"))
    del target.model.get_submodule("model.rotary_emb").inv_freq
    return target.model, target.optimizer


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("explain TMP/run --mesh dp=2 --sharding col tpp,_", r"as in --sharding '\.up_proj' tp,_."),
        ("explain TMP/run --mesh dp2", "expected --mesh dp=2,tp=4, found"),
        (
            "convert TMP/run TMP/out --to native --part model",
            "--part is for a single file, and the layout native is none",
        ),
        ("convert TMP/run TMP/out --to safetensors --part b", "xla-ckpt export --part writes a part as safetensors."),
        ("convert TMP/run TMP/out --to safetensors", "Name another part of it, or '' for all: xla-ckpt export --part."),
        ("convert TMP/run TMP/out --to orbax-manager", "by --as 5; or take --to orbax, which has tags of any name."),
        (
            "convert NXD TMP/out --to native --config CONFIG",
            "Give the model and its optimizer: --like. For the weights",
        ),
        (
            "export TMP/run TMP/out --config TMP/none.json",
            "the config.json that is given does not exist: TMP/none.json [",
        ),
        (
            "convert NXD TMP/out --to native --like tests.cli.test_words:without_buffer",
            r"If each rank has all of it, give --sharding 'rotary_emb\.inv_freq' _.",
        ),
    ],
)
def test_errors_name_options(tmp_path: Path, words: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    xla_ckpt.save(tmp_path / "run", "a", {"b": {"w": torch.ones(2)}})
    places = {"TMP": str(tmp_path), "NXD": str(NXD), "CONFIG": str(config_of_nxd(tmp_path))}

    def placed(text: str) -> str:
        return re.sub("|".join(places), lambda name: places[name[0]], text)

    assert main(placed(words).split()) in (1, 2)
    said = capsys.readouterr().err
    assert placed(says) in said
    assert not (tmp_path / "out").exists()


def config_of_nxd(folder: Path) -> Path:
    """The config.json of the model in `NXD`."""
    config = {
        "model_type": "llama", "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 24, "vocab_size": 24, "num_hidden_layers": 1, "tie_word_embeddings": False,
    }  # fmt: skip
    path = folder / "given.json"
    path.write_text(json.dumps(config))
    return path


def test_a_rule_that_an_error_proposes_is_enough(tmp_path: Path) -> None:
    like = ["--like", f"{__name__}:without_buffer", "--sharding", r"rotary_emb\.inv_freq", "_"]
    assert main(["convert", str(NXD), str(tmp_path / "out"), "--to", "native", *like]) == 0
    stored = xla_ckpt.restore(tmp_path / "out").tree["model"]["model.rotary_emb.inv_freq"]
    assert torch.equal(stored, Gold("tp2_dp2_z1m__xser_small", "step_40").truth["buffers"]["model.rotary_emb.inv_freq"])


def test_weights_alone_by_way_of_an_export(tmp_path: Path) -> None:
    """As the error of a conversion with a configuration, and without the optimizer, says."""
    assert main(["export", str(NXD), str(tmp_path / "hf"), "--config", str(config_of_nxd(tmp_path))]) == 0
    assert main(["convert", str(tmp_path / "hf"), str(tmp_path / "out"), "--to", "native"]) == 0
    state = xla_ckpt.restore(tmp_path / "out").tree
    truth = Gold("tp2_dp2_z1m__xser_small", "step_40").truth["params"]
    assert list(state) == ["model"]
    assert all(torch.equal(state["model"][name], truth[name]) for name in truth)


def test_what_show_says_of_an_optimizer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(SMALL / "tp2_pp2_dp1/ckpt"), "--leaf", "optimizer"]) == 0
    assert "Give the model and its optimizer, whose names and groups say so: --like." in capsys.readouterr().out


def test_what_is_no_sentence_stays_in_an_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    xla_ckpt.save(tmp_path, "a", {"as_tag= (--as)": "as_tag= (--as)", "w": torch.ones(2)})
    assert main(["show", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["values"] == {"as_tag= (--as)": "as_tag= (--as)"}
