"""Loads over memory of the program: what is read once, what is read twice, and that a failed load changes nothing."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from xla_ckpt.core.plan.read_costs import DIRECT_BYTES
from xla_ckpt.loading import restore
from xla_ckpt.storage.local_file import LocalFileReader
from xla_ckpt.storage.threads import WORKER_BUFFER_BYTES

LARGE = DIRECT_BYTES // 4
"""Elements of the smallest array that is read straight into its place."""

SHAPES = {"a": 3 * LARGE, "b": 10, "c": LARGE, "d": LARGE - 1, "e": WORKER_BUFFER_BYTES // 4 + LARGE}


def saved(root: Path) -> dict[str, torch.Tensor]:
    """A tag of small and large arrays, with other numbers in each."""
    values = {name: torch.arange(n) + i / 8 for i, (name, n) in enumerate(SHAPES.items())}
    xla_ckpt.save_checkpoint(root, "t", values)
    return values


def zeros() -> dict[str, torch.Tensor]:
    return {name: torch.zeros(n) for name, n in SHAPES.items()}


def is_all(state: dict[str, torch.Tensor], values: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(state[name], value) for name, value in values.items())


@pytest.mark.parametrize(
    ("memory", "once"),
    [(0, ""), (39, ""), (40, "b"), (4 * LARGE + 35, "b"), (4 * LARGE + 36, "bd"), (restore.MAX_STAGED_BYTES, "bd")],
)
def test_small_arrays_are_read_once_as_far_as_memory_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: int, once: str
) -> None:
    monkeypatch.setattr(restore, "MAX_STAGED_BYTES", memory)
    values, state = saved(tmp_path), zeros()
    report = xla_ckpt.load_checkpoint(tmp_path, "t", model=state).report
    assert is_all(state, values)
    assert report.needed_bytes == sum(value.nbytes for value in values.values())
    assert report.read_bytes == sum(value.nbytes * (1 if name in once else 2) for name, value in values.items())


@pytest.mark.parametrize("memory", [0, restore.MAX_STAGED_BYTES])
@pytest.mark.parametrize("damaged", [*SHAPES])
def test_a_damaged_byte_of_one_array_changes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: int, damaged: str
) -> None:
    monkeypatch.setattr(restore, "MAX_STAGED_BYTES", memory)
    value = saved(tmp_path)[damaged]
    stored = value.numpy().tobytes()
    for file in (tmp_path / "t").rglob("*"):
        if file.is_file() and (at := file.read_bytes().find(stored)) >= 0:
            with file.open("r+b") as f:
                f.seek(at + len(stored) - 1)  # in the last block
                f.write(bytes([stored[-1] ^ 1]))
            break
    state = zeros()
    with pytest.raises(xla_ckpt.CorruptCheckpointError) as caught:
        xla_ckpt.load_checkpoint(tmp_path, "t", model=state)
    assert caught.value.leaf == f"model/{damaged}"
    assert is_all(state, zeros())


class Signal:
    """Ctrl-C after the read of a number, on the thread that reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reads, self.after = 0, -1
        read_into = LocalFileReader.read_into

        def read(source: LocalFileReader, *args: Any) -> int:
            assert threading.current_thread() is threading.main_thread()
            got = read_into(source, *args)
            self.reads += 1
            if self.reads == self.after:
                signal.raise_signal(signal.SIGINT)
            return got

        monkeypatch.setattr(LocalFileReader, "read_into", read)


def test_control_c_leaves_all_as_it_was_or_all_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After each read of a load: those that verify, and those that overwrite."""
    values, control_c = saved(tmp_path), Signal(monkeypatch)
    xla_ckpt.load_checkpoint(tmp_path, "t", model=zeros(), num_workers=1)
    outcomes = []
    for after in range(1, control_c.reads + 1):
        state, control_c.reads, control_c.after = zeros(), 0, after
        with pytest.raises(KeyboardInterrupt):
            xla_ckpt.load_checkpoint(tmp_path, "t", model=state, num_workers=1)
        assert is_all(state, zeros()) or is_all(state, values)
        outcomes.append(is_all(state, values))
    assert outcomes == sorted(outcomes), "new from the first that overwrites on"
    assert {*outcomes} == {False, True}
