"""Directories that stock DCP wrote, restored: bit for bit what was saved, wherever they lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint

import xla_ckpt
from tests.formats.stock_dcp import STOCK, Stock, differences, stock
from tests.same import same
from xla_ckpt.core.plan.hints import LoadHints
from xla_ckpt.core.tree.nested import build_nested
from xla_ckpt.formats.state_dict_search import build_training_state

READ = [s for s in STOCK if s.recipe.get("reader") in (None, "none: each rank loads its own")]


def truth(of: Stock) -> dict[str, Any]:
    """What was saved, as the members of a training state."""
    values = {**of.contents(), **of.objects()}
    tree = build_nested([(path, values[key]) for key, path in of.paths().items()])
    return build_training_state(tree, LoadHints(), lambda value: isinstance(value, torch.Tensor))


def flat(tree: Any, path: str = "") -> dict[str, Any]:
    """The leaves by path: the order of keys is not compared, since DCP's ranks add theirs one after the other."""
    if isinstance(tree, dict) and tree:
        return {k: v for key, value in tree.items() for k, v in flat(value, f"{path}/{key!r}").items()}
    if isinstance(tree, list) and tree and not all(isinstance(v, int | str | float) for v in tree):
        return {k: v for key, value in enumerate(tree) for k, v in flat(value, f"{path}/{key!r}").items()}
    return {path: tree}


@pytest.mark.parametrize("of", READ, ids=str)
def test_a_restore_gives_exactly_what_was_saved(of: Stock) -> None:
    assert differences(flat(xla_ckpt.restore(of.path).tree), flat(truth(of))) == []


@pytest.mark.parametrize("of", READ, ids=str)
def test_all_of_it_is_verified(of: Stock) -> None:
    report = xla_ckpt.verify(of.path)
    assert (report.ok, report.problems, report.strangers, report.digests) == (True, [], [], False)
    assert report.arrays >= len(of.contents())
    if of.name != "fsdp2_no_collectives":  # there, what several ranks have is read once
        assert report.nbytes == sum(p.stat().st_size for p in of.path.glob("*.distcp"))


def test_tags_below_a_root_are_listed_by_their_numbers() -> None:
    of = stock("titan", "step-100")
    assert xla_ckpt.list_tags(of.root) == ["step-100", "step-200"]
    for tag in ("step-100", "step-200"):
        here = stock("titan", tag)
        assert differences(flat(xla_ckpt.restore(of.root, tag).tree), flat(truth(here))) == []
    assert xla_ckpt.restore(of.root).report.tag == "step-200"


def test_a_directory_is_named_by_itself_or_as_a_tag() -> None:
    of = stock("fsdp2")
    for path, tag in ((of.path, None), (str(of.path) + "/", None), (of.folder, "ckpt"), (of.folder, None)):
        assert same(xla_ckpt.restore(path, tag).tree["model"]["net1.bias"], of.contents()["model.net1.bias"])
    assert xla_ckpt.has_checkpoint(of.path)
    assert not xla_ckpt.has_checkpoint(of.path / "ckpt")


def test_a_part_is_restored_alone() -> None:
    of = stock("tp_fsdp2")
    like = {"model": {"odd.weight": xla_ckpt.ArraySpec((5, 8), torch.float32)}}
    found = xla_ckpt.restore(of.path, like=like)
    assert same(found.tree["model"]["odd.weight"], of.contents()["model.odd.weight"])
    assert found.report.read_bytes <= 5 * 8 * 4


def test_a_directory_of_tags_of_ours_is_their_root_whatever_else_lies_in_it(tmp_path: Path) -> None:
    for file in stock("model_only").path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert "model" in xla_ckpt.restore(tmp_path).tree
    with pytest.raises(xla_ckpt.UsageError, match="no root of tags"):
        xla_ckpt.save(tmp_path, "ours", {"a": torch.ones(2)})
    xla_ckpt.save(tmp_path / "elsewhere", "ours", {"a": torch.ones(2)})
    (tmp_path / "elsewhere" / "ours").rename(tmp_path / "ours")
    assert list(xla_ckpt.restore(tmp_path).tree) == ["a"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("member", [torch.zeros(3), {"state": torch.zeros(3)}], ids=["tensor", "dict"])
def test_a_tensor_at_the_top_is_read_alone(tmp_path: Path, member: Any) -> None:
    """No object of `extras` takes it: the errors led from one to the other, and named a class of this library's."""
    model = {"w": torch.ones(2)}
    state = {"model": model, "rng": torch.arange(3.0)}
    torch.distributed.checkpoint.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    told = r"extras/rng: stored is an array, .*Checkpoints\(path\)\.read\('extras/rng'\) reads it"
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match=told):
        xla_ckpt.load_checkpoint(tmp_path / "dcp", model=model, extras={"rng": member})
    assert torch.equal(xla_ckpt.Checkpoints(tmp_path / "dcp").read("extras/rng"), torch.arange(3.0))
