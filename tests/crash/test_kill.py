"""kill -9 at any instant of a save: every listed tag is whole, the newest never goes backwards, the next save works."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest
import torch

import xla_ckpt
from tests.nursery import Call, bear
from tests.runs import names_in

ELEMENTS = 1_500_000


def trains(root: Path) -> None:
    """Save for ever, and say what has been committed."""
    number = 0
    while True:
        number += 1
        model = {"w": torch.full((ELEMENTS,), float(number)), "b": torch.full((7,), float(number))}
        tag = "best" if number % 2 else f"step_{number}"
        xla_ckpt.save_checkpoint(
            root, tag, model=model, user_content=number, num_kept_ckpts=3, pinned=tag == "best",
            async_save=number % 3 != 0,
        ).result()  # fmt: skip
        print(number, tag, flush=True)


def whole(root: Path, tag: str) -> int:
    """The number that a tag was saved with, after checking every byte of it."""
    report = xla_ckpt.verify(root, tag)
    assert report.ok, report.problems
    tree = xla_ckpt.restore(root, tag).tree
    number = tree["user_content"]
    assert (tree["model"]["w"] == number).all(), f"{tag} is a mixture"
    assert (tree["model"]["b"] == number).all()
    assert isinstance(number, int)
    return number


def found_in(root: Path) -> tuple[list[str], str | None, dict[str, int]]:
    """All tags, the newest one, and what is in each of them."""
    tags = xla_ckpt.list_tags(root)
    return tags, xla_ckpt.latest_tag(root), {tag: whole(root, tag) for tag in tags}


@pytest.mark.crash
def test_kill_nine(tmp_path: Path, kill_instant: float, request: pytest.FixtureRequest) -> None:
    """At an instant of a save, as a part of its length: --kill-instants=30 tries more of them."""
    instants = request.config.getoption("--kill-instants")
    process = bear(Call.of(trains, tmp_path), live=True)
    committed: dict[str, int] = {}
    times = []
    for _ in range(3 + round(kill_instant * instants) % 3):
        number, tag = process.stdout.readline().split()
        committed[tag] = int(number)
        times.append(time.monotonic())
    # The instants are spread over the length of a save, which the run itself has shown.
    length = max(b - a for a, b in zip(times, times[1:], strict=False))
    end = times[-1] + (kill_instant + random.Random(kill_instant).random() / instants) * 1.2 * length
    while time.monotonic() < end:
        pass
    process.kill()
    rest = process.communicate()[0].splitlines()
    assert process.returncode == -signal.SIGKILL
    committed |= {tag: int(number) for number, tag in (line.split() for line in rest if len(line.split()) == 2)}

    last = max(committed.values())
    seen = None
    while seen != (seen := found_in(tmp_path)):  # the process that commits may outlive the one that was killed
        pass
    tags, newest, there = seen
    assert there["best"] >= committed["best"]
    assert max(there.values()) >= last, "a committed tag is gone"
    assert newest is not None
    assert there[newest] == max(there.values())
    assert sorted(there.values()) == [there[tag] for tag in tags]

    model = {"w": torch.full((ELEMENTS,), -1.0), "b": torch.full((7,), -1.0)}
    xla_ckpt.save_checkpoint(tmp_path, "after", model=model, user_content=-1, num_kept_ckpts=1)
    xla_ckpt.finalize_checkpoint()
    assert xla_ckpt.list_tags(tmp_path) == ["best", "after"]
    assert names_in(tmp_path) == ["after", "best"], "litter"
    assert whole(tmp_path, "after") == -1
    assert whole(tmp_path, "best") == there["best"]
