"""Saves with ``only="adapters"``: the base is left out and named, and a load is refused over another one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from tests import xla
from tests.adapted import Training
from tests.jobs import run_alone
from xla_ckpt.cli.main import main
from xla_ckpt.state import base_model

xla.begin()


def saved(root: Path, device: Any = "cpu", *, tag: str = "a") -> Training:
    """A training of adapters, whose base and first steps are stored."""
    training = Training(device, seed=1)
    xla_ckpt.save_checkpoint(root / "base", "base", training.base)
    training.steps(3)
    xla_ckpt.save_checkpoint(root, tag, **training.members, user_content={"step": 3}, only="adapters")
    return training


def goes_on(root: Path, device: Any) -> list[float]:
    """The losses of a training that is saved and goes on."""
    return saved(root, device).steps(3)


def with_base(root: Path, device: Any) -> Training:
    """Another training, with the stored base."""
    training = Training(device, seed=2)
    xla_ckpt.load_checkpoint(root / "base", model=training.base)
    return training


def resumed(root: Path, device: Any) -> list[float]:
    """The losses of a training that goes on from the stored base and adapters."""
    training = with_base(root, device)
    assert xla_ckpt.load_checkpoint(root, "a", **training.members).user_content == {"step": 3}
    return training.steps(3)


@pytest.mark.parametrize("device", xla.DEVICES)
def test_a_training_goes_on_in_a_new_process(tmp_path: Path, device: str) -> None:
    losses = run_alone(goes_on, tmp_path, device, xla=xla.HAS_XLA)
    stored = {array.leaf for array in xla_ckpt.Checkpoints(tmp_path).show("a").arrays}
    assert not any("base_layer" in leaf for leaf in stored)
    assert {"model/0.lora_A.weight", "model/1.weight", "model/1.running_mean"} <= stored
    assert run_alone(resumed, tmp_path, device, xla=xla.HAS_XLA) == losses


def values(training: Training) -> list[torch.Tensor]:
    state = training.optimizer.state_dict()["state"].values()
    return [
        t.detach().clone() for t in (*training.model.state_dict().values(), *(v for s in state for v in s.values()))
    ]


@pytest.mark.parametrize("wrong", ["bytes", "type", "shape", "name"])
def test_another_base_is_refused_before_anything_is_changed(tmp_path: Path, wrong: str) -> None:
    saved(tmp_path)
    training = with_base(tmp_path, "cpu")
    layer: Any = training.model[2]
    if wrong == "bytes":
        layer.base_layer.weight.data[3, 63] *= 1.0000002
    elif wrong == "type":
        layer.base_layer.bias.data = layer.base_layer.bias.data.double()
    elif wrong == "shape":
        layer.base_layer.bias.data = layer.base_layer.bias.data[:3]
    else:
        layer.base_layer.bias = None
    before = values(training)
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError) as caught:
        xla_ckpt.load_checkpoint(tmp_path, "a", **training.members)
    name = "2.base_layer.weight" if wrong == "bytes" else "2.base_layer.bias"
    text = {
        "bytes": "digest .* is named, .* is here",
        "type": "type float32 is named, float64 is here",
        "shape": r"shape \[4\] is named, \[3\] is here",
        "name": "it is not in the model",
    }[wrong]
    assert caught.match(f"model/{name}: the adapters belong to another base model: {text}")
    assert "Load the base model first" in (caught.value.hint or "")
    assert all(map(torch.equal, values(training), before))
    (skipped,) = xla_ckpt.load_checkpoint(tmp_path, "a", **training.members, strict=False).report.skipped
    assert skipped.startswith(f"model/{name}")


def test_a_base_is_digested_again_when_it_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = saved(tmp_path)
    digested: list[int] = []
    digest = base_model.compute_rows_digest
    monkeypatch.setattr(base_model, "compute_rows_digest", lambda *a: digested.append(len(a[0])) or digest(*a))

    def save(tag: str) -> Any:
        digested.clear()
        xla_ckpt.save_checkpoint(tmp_path, tag, training.model, only="adapters")
        return xla_ckpt.restore(tmp_path, tag).tree["base"]["ranks"]["0"]

    first = save("b")
    assert digested == []
    layer: Any = training.model[0]
    with torch.no_grad():
        layer.base_layer.weight[0, 0] += 1
    second = save("c")
    assert digested == [layer.base_layer.weight.nbytes]
    layer.base_layer.bias.data = torch.zeros_like(layer.base_layer.bias)
    third = save("d")
    assert digested == [layer.base_layer.bias.nbytes]
    layer.base_layer.weight.data += 0.5  # as adapters are merged: torch counts no such write
    assert save("merged") != third
    assert digested == [layer.base_layer.weight.nbytes]
    xla_ckpt.load_checkpoint(tmp_path / "base", model=training.base)  # in place, behind torch's back
    assert save("e") == first
    assert len({first["0.base_layer.weight"], second["0.base_layer.weight"]}) == 2
    assert len({first["0.base_layer.bias"], third["0.base_layer.bias"]}) == 2
    # A load of the adapters leaves the base alone.
    digested.clear()
    xla_ckpt.load_checkpoint(tmp_path, "e", training.model)
    assert save("f") == first
    assert digested == []


def test_what_has_no_base_is_refused(tmp_path: Path) -> None:
    linear = torch.nn.Linear(2, 2)
    with pytest.raises(xla_ckpt.UsageError, match="no such parameter"):
        xla_ckpt.save_checkpoint(tmp_path, "a", linear, only="adapters")
    with pytest.raises(xla_ckpt.UsageError, match="no such parameter"):
        xla_ckpt.save_checkpoint(tmp_path, "a", {"w": torch.ones(2)}, only="adapters")
    linear.requires_grad_(False)
    with pytest.raises(xla_ckpt.UsageError, match="did you mean 'adapters'"):
        xla_ckpt.save_checkpoint(tmp_path, "a", linear, only="adapter")  # type: ignore[arg-type]
    assert xla_ckpt.list_tags(tmp_path) == []


def test_a_model_that_is_all_base_is_refused(tmp_path: Path) -> None:
    linear = torch.nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(xla_ckpt.UsageError, match="no parameter is trained, and none has lora_ in its name"):
        xla_ckpt.save_checkpoint(tmp_path, "a", linear, only="adapters")
    assert xla_ckpt.list_tags(tmp_path) == []


def test_patterns_name_what_is_saved(tmp_path: Path) -> None:
    training = Training("cpu", seed=1)
    training.model[2].base_layer.bias.requires_grad_(False)
    patterns = ["model/*.lora_*", "model/1", "model/2.base_layer.bias"]
    xla_ckpt.save_checkpoint(tmp_path, "a", **training.members, only=patterns)
    stored = {array.leaf for array in xla_ckpt.Checkpoints(tmp_path).show("a").arrays}
    weights = {leaf for leaf in stored if leaf.startswith("model/")}
    assert {"model/0.lora_A.weight", "model/1.weight", "model/1.running_mean", "model/2.base_layer.bias"} <= weights
    assert not {"model/0.base_layer.weight", "model/2.base_layer.weight"} & weights
    other = Training("cpu", seed=2)
    for name in ("0.base_layer.weight", "0.base_layer.bias", "2.base_layer.weight"):
        other.base[name].data = training.base[name].data
    xla_ckpt.load_checkpoint(tmp_path, "a", **other.members)  # the tag says what it has
    assert all(map(torch.equal, other.model.state_dict().values(), training.model.state_dict().values()))
    # A word of its own in a list of patterns.
    xla_ckpt.save_checkpoint(tmp_path, "b", training.model, only=("adapters", "model/2.base_layer.bias"))
    assert {array.leaf for array in xla_ckpt.Checkpoints(tmp_path).show("b").arrays} == weights


@pytest.mark.parametrize(
    ("only", "says"),
    [
        ("model/*.lora_*", "no other tag would have it [tag a, leaf model/1.weight"),
        (["adapters", "model/3"], "no parameter of the model is like 'model/3'"),
        ("model/3*", "no parameter of the model is like 'model/3*' of only= ["),
        ("2.*", "no parameter of the model is like '2.*' of only=: did you mean 'model/2.*'? ["),
        ("model", "no such parameter"),
        ([], "only is not of the kind that it takes"),
        (["adapters", ""], "only is not of the kind that it takes"),
        (7, "expected a name, or a list of names, found 7"),
    ],
)
def test_patterns_that_make_no_sense_are_refused(tmp_path: Path, only: Any, says: str) -> None:
    with pytest.raises(xla_ckpt.UsageError, match=re.escape(says)):
        xla_ckpt.save_checkpoint(tmp_path, "a", Training("cpu", seed=1).model, only=only)
    assert xla_ckpt.list_tags(tmp_path) == []


def test_adapters_alone_are_exported_as_no_model(tmp_path: Path) -> None:
    saved(tmp_path)
    for export in (
        lambda: xla_ckpt.export_hf(tmp_path, tmp_path / "hf", "a"),
        lambda: xla_ckpt.convert(tmp_path, tmp_path / "hf", "a", to="safetensors"),
    ):
        with pytest.raises(xla_ckpt.UsageError, match="a part of its model alone") as caught:
            export()
        assert "to='peft'" in (caught.value.hint or "")
    assert not (tmp_path / "hf").exists()
    xla_ckpt.convert(tmp_path, tmp_path / "dcp", "a", to="dcp")  # a tag still says that it is of adapters alone
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="another base model"):
        xla_ckpt.load_checkpoint(tmp_path / "dcp", "a", Training("cpu", seed=2).model)


def test_adapters_go_into_a_model_that_is_not_trained(tmp_path: Path) -> None:
    """What is left out is what the tag names, whatever is frozen now; an adapter may be frozen, too."""
    training = saved(tmp_path)
    found = with_base(tmp_path, "cpu")
    found.model.requires_grad_(False)
    xla_ckpt.load_checkpoint(tmp_path, "a", found.model)
    assert all(map(torch.equal, found.model.state_dict().values(), training.model.state_dict().values()))
    xla_ckpt.save_checkpoint(tmp_path, "b", found.model, only="adapters")
    stored = {array.leaf for array in xla_ckpt.Checkpoints(tmp_path).show("b").arrays}
    assert "model/0.lora_A.weight" in stored
    assert "model/1.weight" not in stored
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="it is not in the model"):
        xla_ckpt.load_checkpoint(tmp_path, "a", torch.nn.Linear(2, 2))


def test_a_module_with_hooks_takes_its_adapters_through_them(tmp_path: Path) -> None:
    training, found = saved(tmp_path), with_base(tmp_path, "cpu")
    loads: list[int] = []
    found.model.register_load_state_dict_post_hook(lambda module, keys: loads.append(1))
    xla_ckpt.load_checkpoint(tmp_path, "a", found.model)
    assert all(map(torch.equal, found.model.state_dict().values(), training.model.state_dict().values()))
    assert loads == [1]


@pytest.mark.parametrize("layout", ["xser", "pt", "smp", "dcp"])
def test_layouts_of_other_libraries_keep_what_is_said_of_the_base(tmp_path: Path, layout: str) -> None:
    training = Training("cpu", seed=1)
    xla_ckpt.save_checkpoint(tmp_path, "a", training.model, training.optimizer, layout=layout, only="adapters")
    assert xla_ckpt.Checkpoints(tmp_path).show("a").layout == layout
    other = Training("cpu", seed=2)
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="another base model"):
        xla_ckpt.load_checkpoint(tmp_path, "a", other.model)
    for name, value in other.base.items():
        value.data = training.base[name].data
    xla_ckpt.load_checkpoint(tmp_path, "a", other.model, other.optimizer)
    assert all(map(torch.equal, other.model.state_dict().values(), training.model.state_dict().values()))


def test_what_a_tag_says_of_a_base_may_make_no_sense() -> None:
    for text in ("float32", "float32 2xb 0-1-a", "float32 2 0-1", 7):
        with pytest.raises(xla_ckpt.FormatError, match="makes no sense"):
            base_model.merge_digests([{"w": text}])  # type: ignore[dict-item]


def test_a_difference_says_whether_the_base_is_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It was a list of digests that were equal or not, rank by rank, of which nobody was told what they are."""
    training = saved(tmp_path)
    training.steps(1)
    xla_ckpt.save_checkpoint(tmp_path, "b", **training.members, user_content={"step": 4}, only="adapters")
    for parameter in training.base.values():
        parameter.data += 1
    xla_ckpt.save_checkpoint(tmp_path, "c", **training.members, user_content={"step": 4}, only="adapters")
    xla_ckpt.save_checkpoint(tmp_path, "whole", **training.members, user_content={"step": 4})
    same, another, whole = (xla_ckpt.diff(tmp_path, tmp_path, a, b) for a, b in ("ab", "bc", ("c", "whole")))
    assert (same.base, another.base, whole.base) == (True, False, None)
    assert not another.same
    assert not any(leaf.startswith("base/") for leaf in (*another.values, *whole.only_in_a, *whole.only_in_b))
    assert main(["diff", str(tmp_path / "a"), "b"]) == 1
    assert "both are for the same base model" in capsys.readouterr().out
    assert main(["diff", str(tmp_path / "b"), "c"]) == 1
    assert "they are for different base models" in capsys.readouterr().out


def test_a_base_is_the_same_on_another_number_of_ranks_and_before_adapters_were_put_into_it() -> None:
    def tag(*ranks: dict[str, str]) -> Any:
        return {"model": {}, "base": {"per_rank": len(ranks), "ranks": {str(i): said for i, said in enumerate(ranks)}}}

    rows, digests = {"first": "0-2-0000000000000001", "last": "2-4-0000000000000002"}, "0-4-0000000000000003"
    one = base_model.parse_base(tag({"q.base_layer.w": f"float32 4x2 {digests}"}))
    two = base_model.parse_base(tag(*({"q.w": f"float32 4x2 {part}"} for part in rows.values())))
    assert base_model.is_same_base(one, two) is True
    assert base_model.is_same_base(one, base_model.parse_base(tag({"q.w": "float32 4x2"}))) is None
    assert base_model.is_same_base(one, base_model.parse_base(tag({"q.w": "float32 4x3"}))) is False
    assert base_model.is_same_base(one, base_model.parse_base(tag({}))) is False


def test_what_is_said_of_a_base_is_shown_to_who_asks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path)
    shown: list[str] = []
    for words in ([], ["--leaf", "base"]):
        assert main(["show", str(tmp_path), "a", *words]) == 0
        shown.append(capsys.readouterr().out)
    assert ["base/ranks/0" in text for text in shown] == [False, True]
    assert "values say which base model it is for: --leaf base lists them" in shown[0]
    xla_ckpt.save(tmp_path / "tree", "a", {"base": 1})  # a name of the program's own
    (summary,) = xla_ckpt.Checkpoints(tmp_path / "tree").summaries()
    assert summary.note == ""
