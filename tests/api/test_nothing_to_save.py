"""A save of nothing is refused: it would commit an empty tag, and retention would delete the good ones for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from tests.jobs import job

NOTHING: list[dict[str, Any]] = [
    {},
    {"model": None, "optimizer": None},
    {"model": {}},
    {"extras": {}},
    {"extras": {"loader": None}},
    {"user_content": {}},
]


@pytest.mark.parametrize("members", NOTHING, ids=str)
@pytest.mark.parametrize("async_save", [False, True])
def test_a_forgotten_model_costs_no_tag(members: dict[str, Any], async_save: bool, tmp_path: Path) -> None:
    xla_ckpt.save_checkpoint(tmp_path, "good", {"w": torch.ones(2)})
    with pytest.raises(xla_ckpt.UsageError, match="there is nothing to save"):
        xla_ckpt.save_checkpoint(tmp_path, "oops", num_kept_ckpts=1, async_save=async_save, **members)
    xla_ckpt.finalize_checkpoint()
    assert xla_ckpt.list_tags(tmp_path) == ["good"]


@pytest.mark.parametrize("tree", [None, {}, [], ()], ids=str)
def test_an_empty_tree_is_nothing(tree: object, tmp_path: Path) -> None:
    with pytest.raises(xla_ckpt.UsageError, match="there is nothing to save"):
        xla_ckpt.save(tmp_path / "root", "a", tree, num_kept_ckpts=1)
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize("tree", [{"step": 3}, {"losses": []}, 0, [None], {"model": {}}], ids=str)
def test_plain_values_are_something(tree: object, tmp_path: Path) -> None:
    xla_ckpt.save(tmp_path, "a", tree)
    assert xla_ckpt.restore(tmp_path, "a").tree == tree


@pytest.mark.parametrize("members", [{"user_content": {"step": 3}}, {"user_content": 0}, {"extras": {"n": {"k": 1}}}])
def test_each_member_alone_is_something(members: dict[str, Any], tmp_path: Path) -> None:
    xla_ckpt.save_checkpoint(tmp_path, "a", **members)
    content = members.get("user_content", members.get("extras"))  # plain values that no object takes are given back
    assert xla_ckpt.load_checkpoint(tmp_path, "a").user_content == content


def test_a_module_without_parameters_is_something(tmp_path: Path) -> None:
    xla_ckpt.save_checkpoint(tmp_path, "a", torch.nn.ReLU())
    assert xla_ckpt.list_tags(tmp_path) == ["a"]


RANKS = """
root, W, SAVE = sys.argv[1], {"w": torch.ones(2)}, xla_ckpt.SaveOptions(timeout=60)
xla_ckpt.save(root, "good", W)
for state in (lambda: {}, lambda: {"user_content": "rank 0's alone is stored" if rank else None}):
    try:
        xla_ckpt.save_checkpoint(root, "oops", num_kept_ckpts=1, options=SAVE, **state())
    except xla_ckpt.UsageError as error:
        say(error)
say(xla_ckpt.list_tags(root))
xla_ckpt.save_checkpoint(root, "content", user_content={"step": 3} if rank == 0 else None, options=SAVE)
say(xla_ckpt.load_checkpoint(root, "content", options=xla_ckpt.LoadOptions(timeout=60)).user_content)
stages = xla_ckpt.Mesh(pp=2)
xla_ckpt.save(root, "stages", W if rank else {}, mesh=stages, options=SAVE)
try:
    xla_ckpt.save_checkpoint(root, "oops", mesh=stages, options=SAVE)
except xla_ckpt.UsageError as error:
    say(error.problem)
say(xla_ckpt.list_tags(root))
"""


def test_all_ranks_hear_of_it(tmp_path: Path) -> None:
    said = job(RANKS, 2, tmp_path, tmp_path / "ckpt")
    assert said[:6] == said[6:]
    first, second, tags, content, stages, at_last = said[:6]
    assert "there is nothing to save [tag oops" in first
    assert "there is nothing to save [tag oops" in second
    assert tags == "['good']"
    assert content == "{'step': 3}"
    assert stages == "there is nothing to save"
    assert at_last == "['good', 'content', 'stages']"
