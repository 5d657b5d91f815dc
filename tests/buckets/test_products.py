"""Products of tags in a bucket, in a bucket of products, and of tags that go to a bucket."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import xla_ckpt
from xla_ckpt import LatestN, Product, SaveOptions
from xla_ckpt.storage.resolve import open_store


def save(root: str, step: int, *products: Product, **options: Any) -> None:
    tree = {"model": {"w": torch.full((3,), float(step))}}
    options = {"stale": "ignore"} | options
    xla_ckpt.save(root, f"step_{step}", tree, options=SaveOptions(products=products, **options))


def test_products_of_a_bucket(root: str, tmp_path: Path) -> None:
    theirs = root.replace("/run", "/dcp")
    products = [
        Product(to=tmp_path / "hf/{tag}"),
        Product(to=root.replace("/run", "/hf/{tag}"), keep=LatestN(1)),
        Product(to=theirs, layout="dcp", keep=LatestN(1)),
    ]
    for step in (1, 2):
        save(root, step, *products, retention=LatestN(1))
        xla_ckpt.finalize_checkpoint()
    assert xla_ckpt.list_tags(root) == xla_ckpt.list_tags(theirs) == ["step_2"]
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == ["step_1", "step_2"]
    assert xla_ckpt.restore(theirs).tree["model"]["w"].tolist() == [2, 2, 2]
    assert open_store(root.replace("/run", "/hf")).list_names() == ["step_2"]
    xla_ckpt.convert(root.replace("/run", "/hf/step_2"), tmp_path / "back")
    assert xla_ckpt.restore(tmp_path / "back").tree["model"]["w"].tolist() == [2, 2, 2]


def test_products_of_tags_that_go_to_a_bucket(root: str, tmp_path: Path) -> None:
    save(root, 1, Product(to=tmp_path / "hf/{tag}"), local=tmp_path / "run")
    xla_ckpt.finalize_checkpoint()
    assert xla_ckpt.list_tags(root) == ["step_1"]
    assert (tmp_path / "hf/step_1/model.safetensors").exists()
