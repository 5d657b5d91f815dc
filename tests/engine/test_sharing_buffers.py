"""Saves that share files: of what is not trained and lies in the same buffer as before, no digest is computed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_xla

import xla_ckpt
from tests import xla
from tests.jobs import run_on_ranks
from xla_ckpt.features.reuse import buffer_cache, reuse

xla.begin()

pytestmark = pytest.mark.xla

SHARE = xla_ckpt.SaveOptions(share=True, stale="ignore")


@pytest.fixture(autouse=True)
def nothing_saved() -> Iterator[None]:
    buffer_cache.clear_saved_buffers()
    yield
    buffer_cache.clear_saved_buffers()


class Half(torch.nn.Module):
    """A model of which one half is not trained."""

    def __init__(self, device: str = "xla") -> None:
        super().__init__()
        self.base = torch.nn.Parameter(torch.randn(600, 600, device=device), requires_grad=False)
        self.trained = torch.nn.Parameter(torch.zeros(500, 600, device=device))

    def step(self) -> None:
        with torch.no_grad():
            self.trained.add_(1)
        torch_xla.sync()


@pytest.fixture
def digested(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of what is compared by digests."""
    sizes: list[int] = []
    is_same = reuse._has_known_digests
    monkeypatch.setattr(
        reuse, "_has_known_digests", lambda data, *more: sizes.append(len(data)) or is_same(data, *more)
    )
    return sizes


def saves(root: Path, tag: str, model: Half, **more: Any) -> int:
    """How many bytes the tag shares; it is whole, and has the model."""
    model.step()
    report = xla_ckpt.save_checkpoint(root, tag, model, options=SHARE, **more).result()
    assert xla_ckpt.verify(root, tag).ok
    stored = xla_ckpt.restore(root, tag).tree["model"]
    assert all(torch.equal(stored[name].cpu(), value.cpu()) for name, value in model.state_dict().items())
    return report.shared


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_same_buffer_is_not_digested(tmp_path: Path, digested: list[int], asynchronous: bool) -> None:
    model = Half()
    whole = model.base.nbytes
    assert [saves(tmp_path, f"{n}", model, async_save=asynchronous) for n in range(3)] == [0, whole, whole]
    assert whole not in digested
    assert model.trained.nbytes in digested


WRITES: list[Callable[[Half], object]] = [
    lambda model: model.base.data.add_(1),
    lambda model: model.base.data.__setitem__((0, 0), 7.0),
    lambda model: setattr(model.base, "data", model.base.data + 1),
    lambda model: setattr(model, "base", torch.nn.Parameter(torch.ones(600, 600).to("xla"), requires_grad=False)),
]


@pytest.mark.parametrize("write", WRITES, ids=["in place", "one element", "another buffer", "another parameter"])
def test_what_is_written_to_is_stored_anew(tmp_path: Path, write: Callable[[Half], object]) -> None:
    model = Half()
    for n in range(2):
        saves(tmp_path, f"{n}", model)
    write(model)
    assert saves(tmp_path, "2", model) == 0
    assert saves(tmp_path, "3", model) == model.base.nbytes


def test_it_has_to_be_the_tag_of_the_same_save(tmp_path: Path, digested: list[int]) -> None:
    model = Half()
    for root in ("a", "b"):
        saves(tmp_path / root, "0", model)
    digested.clear()
    assert saves(tmp_path / "a", "1", model) == model.base.nbytes
    assert model.base.nbytes in digested, "the last save was into the other root"
    with torch.no_grad():
        model.base.requires_grad_(True)
    digested.clear()
    saves(tmp_path / "a", "2", model)
    assert model.base.nbytes in digested, "it is trained now"


def test_buffers_go_with_their_parameter_and_with_a_load(tmp_path: Path) -> None:
    model = Half()
    saves(tmp_path, "0", model)
    assert len(buffer_cache._saved) == 1
    xla_ckpt.load_checkpoint(tmp_path, model=model)
    assert buffer_cache._saved == {}
    saves(tmp_path, "1", model)
    gone = weakref.ref(model.base)
    del model
    gc.collect()
    assert gone() is None
    assert buffer_cache._saved == {}


def test_a_cpu_tensor_is_always_digested(tmp_path: Path, digested: list[int]) -> None:
    model = Half("cpu")
    for n in range(3):
        saves(tmp_path, f"{n}", model)
    assert digested.count(model.base.nbytes) == 2, "in all saves but the first"
    model.base.data[3, 3] += 1
    assert saves(tmp_path, "3", model) == 0


def on_each_rank(rank: int, root: Path) -> list[int]:
    sizes: list[int] = []
    is_same = reuse._has_known_digests
    reuse._has_known_digests = lambda data, *more: sizes.append(len(data)) or is_same(data, *more)  # type: ignore[func-returns-value]
    torch.manual_seed(0)
    model = Half("cpu").to("xla")
    for n in range(3):
        model.step()
        xla_ckpt.save_checkpoint(root, f"{n}", model, mesh="dp=2", options=SHARE)
    assert sizes
    return sizes


def test_in_a_job_each_rank_knows_what_it_has_saved(tmp_path: Path) -> None:
    of_ranks = run_on_ranks(on_each_rank, 2, tmp_path, xla=True)
    assert xla_ckpt.verify(tmp_path, "2").ok
    trained = 500 * 600 * 4
    assert max(map(max, of_ranks)) <= trained, "parts of what is trained, and nothing of what is not"
