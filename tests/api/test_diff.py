"""What `diff` says of two tags: the right leaves, the right distances, without reading what digests say is equal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import xla_ckpt
from tests.cli.test_cli import call
from xla_ckpt.loading import compare
from xla_ckpt.loading.compare import ArrayDiff


def trees() -> tuple[dict[str, Any], dict[str, Any]]:
    w = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    one = {
        "model": {"w": w, "same": torch.ones(4), "h": torch.ones(3, dtype=torch.bfloat16), "gone": torch.ones(1)},
        "optimizer": {"step": torch.tensor(3), "m": torch.ones(2, 2)},
        "lr": 0.1,
        "name": "a",
    }
    other = {
        "model": {
            "w": w + torch.tensor([[0, 0, 0], [0, 0, 0.5]]),
            "same": torch.ones(4),
            "h": torch.tensor([1, 1, float("nan")], dtype=torch.bfloat16),
            "new": torch.ones(1),
        },
        "optimizer": {"step": torch.tensor(5), "m": torch.ones(4)},
        "lr": 0.2,
        "name": "a",
    }
    return one, other


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for tag, tree in zip("ab", trees(), strict=True):
        xla_ckpt.save(tmp_path, tag, tree)
    return tmp_path


def test_each_kind_of_difference(root: Path) -> None:
    found = xla_ckpt.diff(root, root, "a", "b")
    assert not found.same
    assert (found.only_in_a, found.only_in_b) == (("model/gone",), ("model/new",))
    assert found.retyped == {"optimizer/m": ("float32 [2, 2]", "float32 [4]")}
    assert found.values == {"lr": (0.1, 0.2)}
    assert found.equal == 1
    assert found.moved == {
        "model/w": ArrayDiff(1, 0.5, 0.25, 55.0),
        "model/h": ArrayDiff(1, float("inf"), float("inf"), 3.0),
        "optimizer/step": ArrayDiff(1, 2.0, 4.0, 9.0),
    }
    assert found.moved["optimizer/step"].relative == pytest.approx(2 / 3)
    assert found.parts["optimizer"] == found.moved["optimizer/step"]
    assert xla_ckpt.diff(root, root, "a", "b", leaf="model/same").same
    with pytest.raises(xla_ckpt.UsageError, match="no leaf of the two tags is like this"):
        xla_ckpt.diff(root, root, "a", "b", leaf="modle")


@pytest.mark.parametrize("layout", ["xser", "pt", "dcp"])
def test_tags_of_other_layouts_are_equal_if_their_values_are(tmp_path: Path, layout: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    xla_ckpt.save_checkpoint(tmp_path / "native", "a", model)
    xla_ckpt.save_checkpoint(tmp_path / "other", "a", model, layout=layout)
    found = xla_ckpt.diff(tmp_path / "native", tmp_path / "other", leaf="model")
    assert (found.same, found.equal) == (True, 4)


def test_equal_digests_are_not_read_and_damage_is_told(tmp_path: Path) -> None:
    for tag in "ab":
        xla_ckpt.save(tmp_path, tag, {"w": torch.ones(1000)})
    (payload,) = (tmp_path / "a").rglob("*.safetensors")
    data = bytearray(payload.read_bytes())
    data[-1] ^= 1
    payload.write_bytes(data)
    assert xla_ckpt.diff(tmp_path, tmp_path, "a", "b").same  # the damaged byte was not read
    xla_ckpt.save(tmp_path, "c", {"w": torch.zeros(1000)})
    with pytest.raises(xla_ckpt.CorruptCheckpointError, match="leaf w"):
        xla_ckpt.diff(tmp_path, tmp_path, "a", "c")


def test_pieces_add_up_within_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    one, other = (rng.standard_normal((64, 33)).astype(np.float32) for _ in range(2))
    for tag, value in (("a", one), ("b", other)):
        xla_ckpt.save(tmp_path, tag, {"w": value})
    sizes = []

    def measured(*args: Any) -> ArrayDiff:
        sizes.append(len(args[0]))
        return of_bytes(*args)

    of_bytes = compare.compare_bytes
    monkeypatch.setattr(compare, "compare_bytes", measured)
    found = xla_ckpt.diff(tmp_path, tmp_path, "a", "b", options=xla_ckpt.ConvertOptions(max_memory=16384)).moved["w"]
    assert len(sizes) > 8
    assert max(sizes) <= 16384 // compare.MEMORY_FACTOR
    assert found.elements == one.size
    assert found.max_abs == np.abs(one.astype(float) - other).max()
    assert found.relative == pytest.approx(
        np.linalg.norm(one.astype(float) - other) / np.linalg.norm(one.astype(float))
    )


def test_the_command(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "diff", root / "a", "b")  # a name beside a is a tag of the same root
    assert (code, err) == (1, "")
    assert "\nmodel/w\t1\t0.5\t0.0674\n" in out
    assert "\nmodel/h\t1\tinf\tinf\n" in out
    assert "\noptimizer/m\tfloat32 [2, 2]\tfloat32 [4]\n" in out
    assert "\nlr\t0.1\t0.2\n" in out
    code, out, _ = call(capsys, "diff", root / "a", root, "--tag-b", "b", "--json", "--leaf", "model/h")
    assert code == 1
    assert json.loads(out)["moved"] == [{"leaf": "model/h", "elements": 1, "max_abs": "inf", "relative": "inf"}]
    code, out, _ = call(capsys, "diff", root / "a", root / "a")
    assert (code, out.splitlines()[-1]) == (0, "equal: 6 arrays")


class Tied(torch.nn.Module):
    """Two names of one array."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(6, 4)
        self.head = torch.nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight


def test_an_array_with_two_names_is_one_as_in_the_list_of_tags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Tied()
    for tag in ("a", "b", "c"):
        xla_ckpt.save_checkpoint(tmp_path, tag, model)
        if tag == "b":
            torch.nn.init.zeros_(model.head.weight)
    (summary, *_) = xla_ckpt.Checkpoints(tmp_path).summaries()
    equal, moved = (xla_ckpt.diff(tmp_path, tmp_path, "a", tag, leaf="model") for tag in "bc")
    assert summary.arrays == equal.equal == 1
    assert (moved.equal, [*moved.moved]) == (0, ["model/embedding.weight"])
    assert moved.parts["model"].elements == 24
    assert [*xla_ckpt.diff(tmp_path, tmp_path, "a", "c", leaf="model/head").moved] == ["model/head.weight"]
    assert call(capsys, "diff", tmp_path / "a", "b", "--leaf", "model")[1].endswith("equal: 1 array\n")
