"""Two real ranks with a fused weight in interleaved shards: what they save is the whole weight for everybody."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import xla_ckpt
from tests.jobs import run_on_ranks
from tests.topology.strided import fused, load, save


def saves_and_loads(rank: int, root: str) -> None:
    save(root, "a", interleaved=True, async_save=False)
    save(root, "b", interleaved=True, async_save=True)
    save(root, "c", interleaved=False, async_save=False)
    for tag in "abc":
        for interleaved in (True, False):
            load(root, tag, interleaved=interleaved)


def loads(rank: int, root: str) -> None:
    load(root, "d", interleaved=True)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved, and loaded back in both ways, by two ranks."""
    root = tmp_path_factory.mktemp("strided") / "ckpt"
    run_on_ranks(saves_and_loads, 2, str(root))
    return root


@pytest.mark.parametrize("tag", ["a", "b", "c"])
def test_one_process_restores_the_whole_weight(root: Path, tag: str) -> None:
    tree = xla_ckpt.restore(root, tag).tree
    assert torch.equal(tree["model"]["weight"], fused())
    assert torch.equal(tree["optimizer"]["state"]["weight"]["momentum_buffer"], fused() * 2)
    assert xla_ckpt.verify(root, tag).ok


def test_explain_knows_the_blocks(root: Path) -> None:
    found = xla_ckpt.explain(root, "a", mesh="tp=2")
    assert found.ok
    assert found.split["model/weight"] == (("tp", 3), None)


def test_two_ranks_load_what_one_process_saved(tmp_path: Path) -> None:
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(fused())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    optimizer.state[model.weight]["momentum_buffer"] = fused() * 2
    xla_ckpt.save_checkpoint(tmp_path / "ckpt", "d", model, optimizer)
    run_on_ranks(loads, 2, str(tmp_path / "ckpt"))
