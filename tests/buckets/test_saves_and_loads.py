"""Saves and loads in a bucket: what goes over the wire, and what comes back."""

from __future__ import annotations

import pytest
import torch

import xla_ckpt
from tests.buckets.s3_server import S3Server


def model_and_optimizer(width: int = 30) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Linear(width, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(width)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_is_saved_comes_back(root: str, asynchronous: bool) -> None:
    model, optimizer = model_and_optimizer()
    for step in (1, 2):
        handle = xla_ckpt.save_checkpoint(
            root, f"step_{step}", model, optimizer, user_content={"step": step}, async_save=asynchronous
        )
        if asynchronous:
            handle.result()
    assert xla_ckpt.list_tags(root) == ["step_1", "step_2"]
    other, its_optimizer = model_and_optimizer()
    loaded = xla_ckpt.load_checkpoint(root, model=other, optimizer=its_optimizer)
    assert loaded.user_content == {"step": 2}
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert xla_ckpt.verify(root).ok


def test_a_large_file_goes_up_in_parts(root: str, s3: S3Server) -> None:
    state = {"w": torch.arange(10_000_000, dtype=torch.float32), "v": torch.ones(3)}
    xla_ckpt.save(root, "a", state)
    assert len([r for r in s3.requests if r.method == "PUT" and "partNumber" in r.path]) == 3
    tree = xla_ckpt.restore(root, "a").tree
    assert torch.equal(tree["w"], state["w"])
    assert torch.equal(tree["v"], state["v"])


def test_the_name_of_a_tag_is_no_root(root: str, s3: S3Server) -> None:
    xla_ckpt.save(root, "a", {"w": torch.ones(3)})
    with pytest.raises(xla_ckpt.UsageError, match="this is a tag, and no root of tags"):
        xla_ckpt.save(f"{root}/a", "b", {"w": torch.ones(3)})
    assert xla_ckpt.list_tags(f"{root}/a") == []
    assert xla_ckpt.verify(root).ok
    assert not [r for r in s3.requests if r.method in ("PUT", "POST", "DELETE") and "/a/.ledger" in r.path]


def test_addresses_that_have_lost_something() -> None:
    with pytest.raises(xla_ckpt.UsageError, match="makes one slash of the two"):
        xla_ckpt.save("s3:/bucket/run", "a", {"w": torch.ones(3)})
    with pytest.raises(xla_ckpt.UsageError, match="names no bucket"):
        xla_ckpt.save("s3:///run", "a", {"w": torch.ones(3)})
