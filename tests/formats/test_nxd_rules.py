"""Rules of how arrays were split, where a model says the shapes: a rule that contradicts it makes no tag."""

from __future__ import annotations

import ast
import logging
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from tests.formats.gold import Gold, Target
from xla_ckpt import IncompatibleCheckpointError
from xla_ckpt.cli.results import parse_spec

DENSE, EXPERTS = "tp2_dp2_z1m__xser_small", "tp2_ep2_dp2__xser_small"
STRIDED = ("gate_up_proj", ("ep", None, ("tp", 2)))

WRONG = [
    (DENSE, ("o_proj", ("tp", None)), [32, 8], [16, 16]),  # the other dim
    (DENSE, ("down_proj", None), [16, 12], [16, 24]),  # it is split, and the rule says that it is not
    (EXPERTS, ("gate_up_proj", (None, None, ("tp", 2))), [2, 16, 48], [4, 16, 48]),  # ep is forgotten
    (EXPERTS, ("up_proj", ("tp", None)), [4, 16, 24], [4, 16, 48]),  # a rule for another array finds this one, too
]


def said_by(error: IncompatibleCheckpointError) -> tuple[Any, Any]:
    """The rule that an error proposes, in Python and at the command line."""
    found = re.search(r"shardings=(\[.*?\]) \(--sharding '(.*?)' '(.*?)'\)", str(error.hint))
    assert found is not None
    return ast.literal_eval(found[1]), [(found[2], parse_spec(found[3]))]


@pytest.mark.parametrize(("case", "rule", "made", "wanted"), WRONG)
def test_a_rule_that_contradicts_the_model_is_refused(
    case: str, rule: tuple[str, Any], made: list[int], wanted: list[int], tmp_path: Path
) -> None:
    """Half of an array, or twice as much as there is, was stored with exit code 0."""
    gold = Gold(case, "step_40")
    target = Target(gold, attributes=False)
    rules = [rule, *([STRIDED] if case == EXPERTS and "down" in rule[0] else [])]
    both: dict[str, Any] = {"model": target.model, "optimizer": target.optimizer}
    calls = (
        lambda rules: xla_ckpt.convert(gold.root, tmp_path / "new", shardings=rules, **both),
        lambda rules: xla_ckpt.export_hf(gold.root, tmp_path / "new", shardings=rules, model=target.model),
        lambda rules: xla_ckpt.load_checkpoint(gold.root, shardings=rules, **both),
    )
    for call in calls:
        with pytest.raises(IncompatibleCheckpointError) as caught:
            call(rules)
        text = f"the rule ({rule[0]!r}, {xla_ckpt.ArraySpec((1,), torch.float32, rule[1]).sharding or ()}) makes {made}"
        assert f"{text} of what the ranks have, the model has {wanted}" in str(caught.value)
        assert not (tmp_path / "new").exists()
    found = xla_ckpt.explain(gold.root, mesh="tp=4", shardings=rules, **both)
    assert not found.ok
    assert any("the model has" in problem for problem in found.problems)


@pytest.mark.parametrize(("case", "rules"), [*[(c, [rule]) for c, rule, _, _ in WRONG], (EXPERTS, [])])
def test_the_rule_that_the_error_proposes_is_the_right_one(case: str, rules: Any, tmp_path: Path) -> None:
    """Followed to the letter, it makes a tag that is bit for bit what was saved."""
    gold = Gold(case, "step_40")
    target = Target(gold, attributes=False)
    both: dict[str, Any] = {"model": target.model, "optimizer": target.optimizer}
    proposed: list[Any] = []
    for arrays in range(1, 9):
        with pytest.raises(IncompatibleCheckpointError) as caught:
            xla_ckpt.convert(gold.root, tmp_path / "new", shardings=[*proposed, *rules], **both)
        python, typed = said_by(caught.value)
        assert python == typed
        assert "(--like)" not in str(caught.value.hint)  # it was given
        proposed += python
        if len(proposed) == arrays and xla_ckpt.explain(gold.root, mesh="", shardings=[*proposed, *rules], **both).ok:
            break
    xla_ckpt.convert(gold.root, tmp_path / "new", shardings=[*proposed, *rules], **both)
    loaded = Target(gold)
    xla_ckpt.load_checkpoint(tmp_path / "new", model=loaded.model, optimizer=loaded.optimizer)
    assert not loaded.differences()


class Attention(torch.nn.Module):
    """Queries of 16 rows, keys and values of 4, in one array or in three."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        sizes = {"weight_qkv": 24, "weight_q": 16, "weight_k": 4, "weight_v": 4}
        self.qkv_proj = torch.nn.Module()
        for name in names:
            weight = torch.arange(sizes[name] * 4.0).reshape(-1, 4)
            self.qkv_proj.register_parameter(name, torch.nn.Parameter(weight))


def of_four_ranks(tmp_path: Path, model: torch.nn.Module, rules: Any) -> Path:
    """The model in neuronx-distributed's files for 4 tp ranks."""
    xla_ckpt.save_checkpoint(tmp_path / "native", "a", model)
    xla_ckpt.convert(tmp_path / "native", tmp_path / "nxd", "a", to="pt", mesh="tp=4", shardings=rules)
    for ours in ("manifest.json", "commit_success.txt"):
        (tmp_path / "nxd/a" / ours).unlink()  # else it says how it was split
    return tmp_path / "nxd"


def test_for_sections_of_unknown_sizes_no_numbers_are_proposed(tmp_path: Path) -> None:
    """Three blocks of one size were, and fit other sizes, too: the rows of queries, keys and values came back mixed."""
    sizes = [("weight_qkv", (("tp", [16, 4, 4]), None))]
    model = Attention("weight_qkv")
    root = of_four_ranks(tmp_path, model, sizes)
    with pytest.raises(IncompatibleCheckpointError) as caught:
        xla_ckpt.load_checkpoint(root, model=Attention("weight_qkv"))
    assert "(('tp', [Q, K, V]), None)" in str(caught.value)
    assert "'tp:Q+K+V,_'), with the rows that the whole array has of queries, keys and values" in str(caught.value)
    loaded = Attention("weight_qkv")
    torch.nn.init.zeros_(loaded.qkv_proj.weight_qkv)
    xla_ckpt.load_checkpoint(root, model=loaded, shardings=sizes)
    assert torch.equal(loaded.qkv_proj.weight_qkv, model.qkv_proj.weight_qkv)


@pytest.mark.parametrize("wrong", [[], [("weight_k", ("tp", None))]])
def test_of_keys_that_several_ranks_hold_the_copies_are_proposed(wrong: list[Any], tmp_path: Path) -> None:
    """A split was, which makes twice the rows that are wanted."""
    names = ("weight_q", "weight_k", "weight_v")
    model = Attention(*names)
    root = of_four_ranks(tmp_path, model, [("weight_q", ("tp", None)), ("weight_[kv]", (("tp", ["x2"]), None))])
    loaded, rules = Attention(*names), list[Any]()
    for parameter in loaded.parameters():
        torch.nn.init.zeros_(parameter)
    for leaf in ("weight_k", "weight_v"):
        with pytest.raises(IncompatibleCheckpointError) as caught:
            xla_ckpt.load_checkpoint(root, model=loaded, shardings=[*rules, *wrong])
        python, typed = said_by(caught.value)
        assert python == [(rf"qkv_proj\.{leaf}", (("tp", ("x2",)), None))]
        assert typed == [(rf"qkv_proj\.{leaf}", (("tp", ["x2"]), None))]
        rules += python
    xla_ckpt.load_checkpoint(root, model=loaded, shardings=rules)
    assert all(map(torch.equal, loaded.parameters(), model.parameters()))


def test_without_a_model_a_rule_is_taken_at_its_word_and_the_log_says_what_it_leaves_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gold = Gold(DENSE, "step_40")
    shutil.copytree(gold.root / "step_40", tmp_path / "run/step_40", ignore=shutil.ignore_patterns("optim"))
    rules = [
        ("down_proj", None),
        ("o_proj", (None, "tp")),
        ("embed|lm_head|[qkv]_proj|gate_proj|up_proj", ("tp",)),
        ("", None),
    ]
    with caplog.at_level(logging.WARNING):
        xla_ckpt.convert(tmp_path / "run", tmp_path / "new", shardings=rules)
    (told,) = [r.getMessage() for r in caplog.records if "differed" in r.getMessage()]
    assert "leaves out what the other ranks have" in told
    assert "the rule is wrong" in told
    weights = xla_ckpt.restore(tmp_path / "new").tree["model"]
    assert weights["model.layers.0.mlp.down_proj.weight"].shape == (16, 12)
    with caplog.at_level(logging.WARNING):  # nobody gave a rule here: that they differed is what is stored
        caplog.clear()
        xla_ckpt.convert(tmp_path / "new", tmp_path / "newer")
    assert "differed" in caplog.text
    assert "rule" not in caplog.text


def test_a_padded_vocabulary_may_have_a_rule(tmp_path: Path) -> None:
    """Of a parameter that says its true size the padding stays behind, as without a rule."""
    gold = Gold(DENSE, "step_40")
    target = Target(gold)
    vocab = target.model.model.embed_tokens.weight
    vocab.unpadded_shape = tuple(vocab.shape)
    xla_ckpt.convert(
        gold.root, tmp_path / "new", shardings=[("embed", ("tp", None))],
        model=target.model, optimizer=target.optimizer,
    )  # fmt: skip
    loaded = Target(gold)
    xla_ckpt.load_checkpoint(tmp_path / "new", model=loaded.model, optimizer=loaded.optimizer)
    assert not loaded.differences()


def test_a_size_of_a_section_that_was_meant_as_a_stride() -> None:
    target = Target(Gold(EXPERTS, "step_40"), attributes=False)
    with pytest.raises(xla_ckpt.CheckpointError, match=r"2 strided blocks are \('tp', 2\), or tp\*2 at the command"):
        xla_ckpt.explain(
            target.gold.root, mesh="tp=2", shardings=[("gate_up", parse_spec("ep,_,tp:2"))], model=target.model
        )


def test_a_tensor_file_that_is_missing_or_cut_off_names_a_cure(tmp_path: Path) -> None:
    gold = Gold(DENSE, "step_40")
    tensors = gold.root / "step_40/model/dp_rank_00_tp_rank_00_pp_rank_00.pt.tensors"
    inside = tensors.relative_to(gold.root)
    last = max(file.name for file in tensors.glob("*.pt"))
    for problem in ("missing", "no whole zip"):
        shutil.copytree(gold.root, tmp_path / problem)
        file = tmp_path / problem / inside / last
        if problem == "missing":
            file.unlink()
        else:
            file.write_bytes(file.read_bytes()[:-40])
        target = Target(gold)
        with pytest.raises(xla_ckpt.CorruptCheckpointError, match=problem) as caught:
            xla_ckpt.load_checkpoint(tmp_path / problem, "step_40", target.model)
        assert caught.value.hint == "Load another tag, or restore this file from a copy."


def test_no_rule_is_proposed_for_a_parameter_that_is_a_number() -> None:
    """Rules for all weights are given, and the optimizer numbers them. A rule for a number would be the next error."""
    gold = Gold("tp2_dp2_z1m__xser_small", "step_40")
    rules = [
        ("norm|rotary", None),
        ("o_proj|down_proj", (None, "tp")),
        ("gate_up|qkv", (("tp", 2), None)),
        ("proj|embed|lm_head", ("tp", None)),
    ]
    with pytest.raises(IncompatibleCheckpointError, match="the stored optimizer numbers its parameters") as error:
        xla_ckpt.restore(gold.root, shardings=rules)
    assert str(error.value.leaf).startswith("optimizer/state/~(0)/")
    assert "shardings=" not in str(error.value)
