"""What `xla-ckpt show` and `explain` print of tags that neuronx-distributed wrote."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.formats.gold import Gold, Target
from xla_ckpt.cli.main import main
from xla_ckpt.rendering import formatting

CASES = [
    "tp2_dp2_z1m__xser_small",
    "tp2_ep2_dp2__xser_small",
    "tp2_pp2_dp1__pt_small",
    "tp2_dp2_z1m_gqafused__pt_small",
]
REASON = "nothing says what the whole is"


def call(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    code = main([str(word) for word in words])
    return code, capsys.readouterr().out


def size_of(tag: Path) -> tuple[int, int]:
    files = [path for path in tag.rglob("*") if path.is_file()]
    return sum(path.stat().st_size for path in files), len(files)


@pytest.mark.parametrize("case", CASES)
def test_without_a_model(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    gold = Gold(case, "step_40")
    nbytes, files = size_of(gold.root / gold.tag)
    code, out = call(capsys, "show", gold.root)
    assert code == 0
    text = " ".join(out.split())
    assert f"written by neuronx-distributed, {formatting.format_bytes(nbytes)} in {files} files by 4 ranks" in text
    assert re.search(r"model: \d+ arrays, [\d.]+ kB", text)
    cure = "with --like what was saved, or give a rule such as --sharding up_proj tp,_; "
    assert (text.count(REASON), text.count(cure)) == (1, 1)
    assert "shardings=" not in out
    for name in [*gold.truth["params"], *gold.truth["buffers"]]:
        assert re.search(rf"model/{re.escape(name)}\t(float32|bfloat16)\t[\d x]+\t\d+\t[\d.]+ k?B", out), name

    code, out = call(capsys, "show", gold.root, "--json")
    facts = json.loads(out)
    assert (facts["nbytes"], len(facts["files"])) == (nbytes, files)
    (group,) = [g for g in facts["unknown"] if REASON in g["problem"]]
    held = {a["leaf"]: a for a in group["arrays"]}
    embed = held["model/model.embed_tokens.weight"]
    assert (embed["rank_shape"], embed["tensors"]) == ([12, 16], 2)  # experts' ranks share the two
    assert embed["nbytes"] == 2 * 12 * 16 * (2 if embed["dtype"] == "bfloat16" else 4)
    assert sum(part["nbytes"] for part in facts["parts"]) < nbytes
    assert [part["part"] for part in facts["parts"]][0] == "model"

    code, out = call(capsys, "explain", gold.root, "--mesh", "tp=2")
    assert code == 1
    text = " ".join(out.split())
    assert text.count(REASON) == 1
    assert len(json.loads(call(capsys, "explain", gold.root, "--mesh", "tp=2", "--json")[1])["problems"]) <= 2
    assert re.search(r"\[\d+ arrays: model/model.embed_tokens.weight, .* and \d+ more\]", text)


def built(case: str) -> Any:
    target = Target(Gold(case, "step_40"))
    return target.model, target.optimizer


def z1m() -> Any:
    return built(CASES[0])


def experts() -> Any:
    return built(CASES[1])


def stages() -> Any:
    return built(CASES[2])


@pytest.mark.parametrize(("case", "like"), [*zip(CASES, ("z1m", "experts", "stages"), strict=False)])
def test_with_a_model(case: str, like: str, capsys: pytest.CaptureFixture[str]) -> None:
    gold = Gold(case, "step_40")
    given = ["--like", f"{__name__}:{like}"]
    code, out = call(capsys, "show", gold.root, *given)
    assert code == 0
    assert "not known" not in out
    for name, value in gold.truth["params"].items():
        shape = " x ".join(map(str, value.shape))
        assert re.search(rf"model/{re.escape(name)}\t(float32|bfloat16)\t{shape}\t", out), name
        assert f"optimizer/state/{name}/exp_avg" in out
    facts = json.loads(call(capsys, "show", gold.root, *given, "--json")[1])
    assert facts["unknown"] == []
    assert facts["nbytes"] == size_of(gold.root / gold.tag)[0]
    code, out = call(capsys, "explain", gold.root, "--mesh", "dp=2,tp=2", *given)
    assert code == 0
    assert "can be restored" in out


def test_pages_take_a_model_and_a_tag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gold, page = Gold(CASES[0], "step_40"), tmp_path / "page.html"
    leaf = f"optimizer/state/{next(iter(gold.truth['params']))}/exp_avg"
    words = ["view", gold.root, gold.tag, "--like", f"{__name__}:z1m", "--leaf", leaf, "--mesh", "tp=4", "--html", page]
    assert call(capsys, *words)[0] == 0
    text = page.read_text()
    assert "values were read." in text
    assert "can be restored" in text


def test_the_optimizers_of_stages_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    _, out = call(capsys, "show", Gold(CASES[2], "step_40").root)
    assert "optimizer: not known what is in it" in out
    assert "optimizer: 0" not in out
    assert " 0 B" not in out


def test_what_differs_is_listed_leaf_by_leaf(capsys: pytest.CaptureFixture[str]) -> None:
    gold = Gold(CASES[3], "step_40")
    _, out = call(capsys, "show", gold.root, "--like", f"{__name__}:one_rank", "--leaf", "model")
    text = " ".join(out.split())
    assert text.count("the ranks hold different tensors of this name") == 1
    assert "(tp 1) differs from (tp 0)" in text


def one_rank() -> Any:
    from xla_ckpt import Mesh

    return Target(Gold(CASES[3], "step_40"), Mesh(tp=2), 0, layers=False).model
