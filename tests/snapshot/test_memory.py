"""Host memory for what is loaded: of huge pages where they pay, and as good as any other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import xla_ckpt
from tests.mappings import flags_of, needs_huge_pages
from xla_ckpt.snapshot import memory
from xla_ckpt.snapshot.memory import HugePagePolicy, SlabAllocator
from xla_ckpt.storage.threads import HUGE_PAGE_BYTES

LARGE = 5 * HUGE_PAGE_BYTES + 4096


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """No page is slow, however busy the machine is."""
    monkeypatch.setattr(memory, "HUGE_PAGES", pages := HugePagePolicy())
    pages.slow_page_seconds = float("inf")


@pytest.fixture
def never(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each page is slow."""
    monkeypatch.setattr(memory, "HUGE_PAGES", pages := HugePagePolicy())
    pages.slow_page_seconds = -1.0


def _restored(root: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """A large tensor, and the same one after a save and a restore into new memory."""
    saved = torch.randn(LARGE // 4)
    xla_ckpt.save(root, "a", {"w": saved})
    return saved, xla_ckpt.restore(root).tree["w"]


def _inside(tensor: torch.Tensor) -> int:
    """An address in a whole huge page of its memory."""
    return tensor.data_ptr() - tensor.data_ptr() % HUGE_PAGE_BYTES + HUGE_PAGE_BYTES


@needs_huge_pages
@pytest.mark.usefixtures("always")
def test_a_restored_tensor_is_of_huge_pages(tmp_path: Path) -> None:
    saved, restored = _restored(tmp_path)
    assert "hg" in flags_of(_inside(restored))
    assert torch.equal(saved, restored)


@needs_huge_pages
@pytest.mark.usefixtures("never")
def test_it_is_of_ordinary_ones_where_huge_ones_take_longer(tmp_path: Path) -> None:
    saved, restored = _restored(tmp_path)
    assert "hg" not in flags_of(_inside(restored))
    assert torch.equal(saved, restored)


@pytest.mark.usefixtures("always")
def test_a_restored_tensor_can_be_resized(tmp_path: Path) -> None:
    """Memory that is not torch's own cannot."""
    saved, restored = _restored(tmp_path)
    restored.resize_(LARGE)
    assert torch.equal(saved, restored[: len(saved)])


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("nbytes", [0, 1, HUGE_PAGE_BYTES - 1, HUGE_PAGE_BYTES, LARGE])
@pytest.mark.parametrize("first", [0, 1, HUGE_PAGE_BYTES - 1, HUGE_PAGE_BYTES + 1])
def test_pages_are_backed_for_what_is_written_next(nbytes: int, first: int) -> None:
    """A piece begins anywhere in a region. Backing its pages changes nothing that lies before it or behind it."""
    slabs = SlabAllocator()
    taken = slabs.allocate(nbytes)
    assert len(taken) == nbytes
    taken[:] = 7
    piece = taken.data[first : first + HUGE_PAGE_BYTES]
    slabs.touch_pages(piece)
    behind = first + len(piece)
    assert np.all(taken[:first] == 7)
    assert np.all(taken[behind:] == 7)
